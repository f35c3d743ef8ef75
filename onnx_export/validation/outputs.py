"""Compare the outputs of the whole model: unoptimised, optimised, and given by a framework."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from cnorm.text import quoted
from onnx_export import ort, recurrent
from onnx_export.errors import Unreadable
from onnx_export.graph.scope import unit_roundoff
from onnx_export.validation import inputs
from onnx_export.validation.findings import Finding
from onnx_export.validation.run import Run

_DRAWS = 3
_CHUNK = 2**20  # elements compared at a time
# Standard deviations and safety margin, as in `judge._DEVIATIONS` and `judge.allowed_change`.
_DEVIATIONS, _MARGIN = 6.0, 4.0
_FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
_SINGLE = unit_roundoff(TensorProto.FLOAT)


def compare(run: Run, file: str, seed: int) -> Iterator[Finding]:
    """Compare the outputs of the unoptimised and the optimised model with an .npz file, and with each other.

    Raises
    ------
    Unreadable
        If it is no .npz file, or its names are not those of the outputs.
    """
    names = [value.name for value in run.model.graph.output]
    wanted = inputs.read(file, names, "outputs") if file else {}
    try:
        results = {level: dict(zip(names, _outputs(run, level, names), strict=True)) for level in ("off", "all")}
        allowed = _allowed(run, results["off"], seed) if file else {}
    except ort.CannotRun as error:
        if file:
            raise Unreadable(f"--outputs: {error}") from error
        return
    differs = False
    for name, expected in wanted.items():
        for level, values in results.items():
            error, size = _difference(values[name], expected)
            if not error <= allowed[name]:
                message = (
                    f"{quoted(name)}, optimisation {level!r}: off by {error:.3g} where the largest is {size:.3g}; "
                    f"rounding explains {allowed[name]:.2g}"
                )
                yield Finding("error", "outputs-differ", message)
                differs = True
                break
    if wanted and not differs:
        yield Finding("note", "outputs-agree", "the outputs are those of --outputs, within what rounding explains")
    differences = {name: _difference(results["all"][name], plain) for name, plain in results["off"].items()}
    drifts = {name: error / size for name, (error, size) in differences.items() if size > 0 and error > 0}
    if drifts and not run.random:
        name = max(drifts, key=lambda name: drifts[name])
        message = f"optimisation moves the output {quoted(name)} by {drifts[name]:.1g} of its largest element"
        yield Finding("note", "model-drift", message)


def _outputs(run: Run, level: str, names: list[str]) -> list[np.ndarray]:
    if level == "off" and run.plain:
        return [np.asarray(run.plain[name]) for name in names]
    return [np.asarray(value) for value in run.session(run.model, level).run(names, run.feeds)]


def _allowed(run: Run, plain: dict[str, np.ndarray], seed: int) -> dict[str, float]:
    """How far rounding may move each output.

    Backward error: a sum of k products is exact for factors changed by at most 6 u sqrt(k) (Higham and Mary 2019, as
    in `JudgedRows.sequential`), k being the longest dimension of a weight. So weights and inputs are changed at random
    by that much, three times, and 4 times the largest change of an output is allowed. Sums of half types are taken
    in float32, and their results are rounded once: 6 u of the half type. The output's own rounding is added, and 8 u of
    its largest element for the function that may have made it, which no change of weights shows where it saturates.
    """
    tensors = [tensor for tensor in run.model.graph.initializer if tensor.data_type in _FLOATS]
    kinds = {tensor.data_type for tensor in tensors} | {
        value.type.tensor_type.elem_type for value in (*run.model.graph.input, *run.model.graph.output)
    }
    unit = max(map(unit_roundoff, kinds))
    longest = max((max(tensor.dims, default=1) for tensor in tensors), default=1)
    narrow = unit if unit > _SINGLE else 0.0
    amount = _DEVIATIONS * (min(unit, _SINGLE) * max(longest, 1) ** 0.5 + narrow)
    rng = np.random.default_rng(seed)
    moved = dict.fromkeys(plain, 0.0)
    for _ in range(_DRAWS):
        model, weights, feeds = _changed(run, tensors, amount, rng)
        values = ort.Session(model, "off", weights).run(list(plain), feeds)
        for name, value in zip(plain, map(np.asarray, values), strict=True):
            moved[name] = max(moved[name], _difference(value, plain[name])[0])
    last = unit + recurrent.ACTIVATION * min(unit, _SINGLE)
    return {name: _MARGIN * moved[name] + last * _difference(value, value)[1] for name, value in plain.items()}


def _changed(run: Run, tensors, amount: float, rng: np.random.Generator):
    """Copies of the model, its weights held apart and its inputs, with every float changed by up to `amount` of it."""

    def change(value: np.ndarray) -> np.ndarray:
        if value.dtype.kind != "f" and value.dtype.name != "bfloat16":
            return value
        wide = np.float64 if value.dtype.itemsize == 8 else np.float32
        factor = 1 + amount * rng.uniform(-1, 1, value.shape).astype(wide)
        return (value.astype(wide) * factor).astype(value.dtype)

    model = onnx.ModelProto()
    model.CopyFrom(run.model)
    chosen = {tensor.name for tensor in tensors} - run.weights.keys()
    for tensor in model.graph.initializer:
        if tensor.name in chosen and np.prod(tensor.dims, initial=1.0) > 1:
            tensor.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(tensor)), tensor.name))
    weights = {name: change(value) for name, value in run.weights.items()}
    return model, weights, {name: change(value) for name, value in run.feeds.items()}


def _difference(value: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """(largest difference, largest expected element); the difference is infinite if shapes or NaN positions differ."""
    if value.shape != expected.shape or value.dtype.kind not in "fiub":
        return np.inf, 1.0
    if not value.size:
        return 0.0, 0.0
    largest, size = 0.0, 0.0
    for start in range(0, value.size, _CHUNK):
        a, b = (each.reshape(-1)[start : start + _CHUNK].astype(np.float64) for each in (value, expected))
        with np.errstate(all="ignore"):
            difference = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
            size = max(size, float(np.max(np.abs(b), where=np.isfinite(b), initial=0.0)))
        largest = max(largest, np.inf if np.isnan(difference).any() else float(difference.max()))
    return largest, size
