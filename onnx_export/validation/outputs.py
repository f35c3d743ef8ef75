"""Compare the outputs of the whole model: unoptimised, optimised, and given by a framework."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cnorm.text import quoted
from onnx_export import ort
from onnx_export.errors import Unreadable
from onnx_export.validation import inputs
from onnx_export.validation.report import Finding
from onnx_export.validation.run import Run

# Tolerance relative to the largest element of an output: float32 rounding is smaller, the error of wrong connections or
# weights larger. Half types round a thousand times coarser.
_AGREE = {2: 5e-2}
_AGREE_OTHERS = 1e-3


def compare(run: Run, file: str) -> Iterator[Finding]:
    """Compare the outputs of the unoptimised and the optimised model with an .npz file, and with each other.

    Raises
    ------
    Unreadable
        If it is no .npz file, or its names are not those of the outputs.
    """
    names = [value.name for value in run.model.graph.output]
    wanted = inputs.read(file, names) if file else {}
    try:
        results = {level: dict(zip(names, _outputs(run, level, names), strict=True)) for level in ("off", "all")}
    except ort.CannotRun as error:
        if file:
            raise Unreadable(f"--outputs: {error}") from error
        return
    for name, expected in wanted.items():
        for level, values in results.items():
            error, size = _apart(values[name], expected)
            if not error <= _AGREE.get(values[name].dtype.itemsize, _AGREE_OTHERS) * size:
                message = f"{quoted(name)}, optimisation {level!r}: off by {error:.3g} where the largest is {size:.3g}"
                yield Finding("error", "outputs-differ", message)
                break
    apart = {name: _apart(results["all"][name], plain) for name, plain in results["off"].items()}
    drifts = {name: error / size for name, (error, size) in apart.items() if size > 0 and error > 0}
    if drifts and not run.random:
        name = max(drifts, key=lambda name: drifts[name])
        message = f"optimisation moves the output {quoted(name)} by {drifts[name]:.1g} of its largest element"
        yield Finding("note", "model-drift", message)


def _outputs(run: Run, level: str, names: list[str]) -> list[np.ndarray]:
    return [np.asarray(value) for value in run.session(run.model, level).run(names, run.feeds)]


def _apart(value: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """(largest difference, largest expected element); the difference is infinite if shapes or NaN positions differ."""
    if value.shape != expected.shape or value.dtype.kind not in "fiub":
        return np.inf, 1.0
    if not value.size:
        return 0.0, 0.0
    a, b = value.astype(np.float64), expected.astype(np.float64)
    with np.errstate(all="ignore"):
        difference = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
        size = float(np.max(np.abs(b), where=np.isfinite(b), initial=0.0))
    return (np.inf if np.isnan(difference).any() else float(difference.max())), size
