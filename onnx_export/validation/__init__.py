"""Does an ONNX file really compute the layer norms it claims to? See docs/validator.md."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from numbers import Real
from typing import TYPE_CHECKING, SupportsIndex

from onnx_export.validation.report import Finding, NormReport, ValidationReport

if TYPE_CHECKING:
    from onnx_export.model_io import Limits

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
    opset: int | None = None,
    outputs: str | os.PathLike | None = None,
    find_only: bool = False,
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
        Seed of all generated numbers, not negative.
    external_data, data_root
        As in `model_io.load`.
    fix : path, optional
        Write a copy in which decomposed norms, where proved equal, are LayerNormalization operators. Not over the
        model, its external data or the inputs.
    opset : int, optional
        Convert the model to this opset before it is examined, for `fix`, whose operator needs 17.
    outputs : path, optional
        An .npz file with the outputs that a framework gives for the inputs.
    find_only : bool
        Find and describe the norms, and do not run the model.
    timeout : float
        Seconds for everything, finite.
    memory : int
        Bytes of address space for the child; a lower limit that this process is under stays.
    limits : model_io.Limits, optional
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
        If a path is none, a size or the seed is no integer, or the timeout or memory no number.
    ValueError
        If a size, the timeout or the memory limit is not positive, the seed is negative, or `fix` is the model's own
        file or that of the inputs.
    """
    paths = {"path": path, "input": input, "data_root": data_root, "fix": fix, "outputs": outputs}
    texts = {name: _text(name, value) for name, value in paths.items() if value is not None or name == "path"}
    _check_numbers(batch, dim, sizes or {}, seed, opset, timeout=timeout, memory=memory)
    for name, role in (("path", "the model"), ("input", "the inputs")):
        if fix is not None and name in texts and replaces(texts["fix"], texts[name]):
            raise ValueError(f"fix must name another file than {role}, which it would replace, got {texts['fix']!r}")
    from onnx_export.validation import child

    options = {
        "input": texts.get("input", ""),
        "batch": operator.index(batch),
        "dim": operator.index(dim),
        "named": [(name, operator.index(size)) for name, size in (sizes or {}).items()],
        "seed": operator.index(seed),
        "external_data": external_data,
        "data_root": texts.get("data_root", ""),
        "fix": texts.get("fix", ""),
        "outputs": texts.get("outputs", ""),
        "opset": operator.index(opset or 0),
        "find_only": bool(find_only),
        "limits": asdict(limits) if limits else {},
    }
    return child.run(texts["path"], options, timeout=timeout, memory=memory, progress=progress)


def _check_numbers(batch, dim, sizes: Mapping[str, int], seed, opset, **limits) -> None:
    """Refuse a size or seed that is no integer, and a size or limit that is not positive."""
    whole = {"batch": batch, "dim": dim} | {f"sizes[{name!r}]": size for name, size in sizes.items()}
    for name, value in (whole | {"seed": seed} | ({} if opset is None else {"opset": opset})).items():
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{name} must be an integer, got {value!r}")
    for name, value in (whole | limits).items():
        if isinstance(value, bool) or not isinstance(value, Real | SupportsIndex):
            raise TypeError(f"{name} must be a number, got {value!r}")
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {value}")
    if operator.index(seed) < 0:
        raise ValueError(f"seed must not be negative, got {seed}")


def _text(name: str, path: object) -> str:
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{name} must be a str or path-like, got {type(path).__name__}")
    return os.fsdecode(path)


def replaces(path: str | os.PathLike, other: str | os.PathLike) -> bool:
    """Whether a file written to `path` would take the place of `other`, there or not, whatever the two are called."""
    try:
        if os.path.exists(path) and os.path.exists(other):
            return os.path.samefile(path, other)
        return os.path.realpath(path) == os.path.realpath(other)
    except (OSError, ValueError):  # no name of a file, such as one with a NUL in it
        return False
