"""Does an ONNX file really compute the layer norms it claims to? See docs/validator.md."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from onnx_export.validation.report import Finding, NormReport, ValidationReport

if TYPE_CHECKING:
    from onnx_export.validation.safe_load import Limits

__all__ = ["Finding", "NormReport", "ValidationReport", "validate"]


def validate(
    path: str | os.PathLike,
    *,
    input: str | os.PathLike | None = None,
    batch: int = 1,
    dim: int = 8,
    sizes: Mapping[str, int] | None = None,
    seed: int = 0,
    external_data: bool = False,
    data_root: str | os.PathLike | None = None,
    fix: str | os.PathLike | None = None,
    timeout: float = 600.0,
    memory: int = 8 * 2**30,
    limits: Limits | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> ValidationReport:
    """Find every layer norm of an ONNX file and judge what the file and onnxruntime make of it, in float64.

    Everything that touches the file happens in a child process with limits on time and memory.

    Parameters
    ----------
    path : path
        The model.
    input : path, optional
        An .npz file with arrays named as the model's inputs, or an .npy file for the only input. Inputs it
        lacks are generated from types and shapes: N(0, 1), integers 0 and 1, true.
    batch, dim : int
        Sizes of free dimensions of generated inputs: the first dimension (or one named batch), and others.
    sizes : mapping of str to int, optional
        Sizes of free dimensions by name.
    seed : int
        Seed of all generated numbers.
    external_data, data_root
        As in `safe_load.load`.
    fix : path, optional
        Write a copy in which decomposed norms, where proved equal, are LayerNormalization operators. Not over the
        model itself.
    timeout : float
        Seconds for everything.
    memory : int
        Bytes of address space for the child.
    limits : safe_load.Limits, optional
        Caps on what the file may declare.
    progress : callable, optional
        Called with (stage, done, total) now and then.

    Returns
    -------
    ValidationReport
        Also for a file that cannot be validated or is refused; `problem` says why.

    Raises
    ------
    TypeError
        If a size is not an integer.
    ValueError
        If a size, the timeout or the memory limit is not positive, or `fix` is the model's own file.
    """
    whole = {"batch": batch, "dim": dim} | {f"sizes[{name!r}]": size for name, size in (sizes or {}).items()}
    for name, value in (whole | {"timeout": timeout, "memory": memory}).items():
        if name in whole and (isinstance(value, bool) or not hasattr(value, "__index__")):
            raise TypeError(f"{name} must be an integer, got {value!r}")
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")
    if fix is not None and replaces(fix, path):
        raise ValueError(f"fix must name another file than the model, which it would replace, got {os.fspath(fix)!r}")
    from onnx_export.validation import child

    options = {
        "input": os.fspath(input) if input is not None else "",
        "batch": operator.index(batch),
        "dim": operator.index(dim),
        "named": [(name, operator.index(size)) for name, size in (sizes or {}).items()],
        "seed": seed,
        "external_data": external_data,
        "data_root": os.fspath(data_root) if data_root is not None else "",
        "fix": os.fspath(fix) if fix is not None else "",
        "limits": asdict(limits) if limits else {},
    }
    return child.run(os.fspath(path), options, timeout=timeout, memory=memory, progress=progress)


def replaces(path: str | os.PathLike, model: str | os.PathLike) -> bool:
    """Whether a file written to `path` would take the place of `model`, whatever the two are called."""
    return os.path.exists(path) and os.path.exists(model) and os.path.samefile(path, model)
