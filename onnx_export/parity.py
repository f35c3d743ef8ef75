"""Does an ONNX file compute what a model computes? Judged per step, with the file in float64 as the judge.

A layer-normalised recurrence is chaotic: two correct float32 engines drift apart when each runs on from
its own state, by 1e-3 and more after some hundred steps. So each step is judged for itself. Every engine
starts it from the float64 trajectory's state rounded to float32, and may then be off by no more than `bound`.
The free runs' drift is reported beside it and judges nothing.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

import numpy as np
import onnx
import onnxruntime

import cnorm
from onnx_export import model_io
from onnx_export.builders import builder
from onnx_export.exporter import state_table
from onnx_export.float64 import Float64
from onnx_export.ort import LEVELS
from onnx_export.ort_stream import OrtStream, checked_model

__all__ = ["Drift", "ParityReport", "Row", "check_parity"]

UNIT = 2.0**-24  # unit roundoff of float32


@dataclass(frozen=True)
class Row:
    """One tensor of one engine against another, the worst over all steps.

    Attributes
    ----------
    engine, against : str
        "cnorm", "onnxruntime off", "onnxruntime basic", "onnxruntime all" or "float64".
    tensor : str
        The graph's name of an output or next state, or of a state's input where the file begins it otherwise than
        the model.
    max_abs, max_ulp : float
        Largest absolute difference, and largest in units in the last place of the judge's value in the file's dtype.
    used : float
        The largest part of its bound that a step used: 1 is the limit.
    bound : float
        Absolute difference that was allowed in that step.
    recording, step : int
        That step.
    ok : bool
        Every step was within its bound.
    """

    engine: str
    against: str
    tensor: str
    max_abs: float
    max_ulp: float
    used: float
    bound: float
    recording: int
    step: int
    ok: bool


@dataclass(frozen=True)
class Drift:
    """Largest absolute difference of two engines running freely, each from its own state. Not judged."""

    engine: str
    against: str
    tensor: str
    max_abs: float


@dataclass(frozen=True)
class ParityReport:
    """The result of `check_parity`. True in a condition if the file and the model agree.

    Attributes
    ----------
    ok : bool
        Every row is within its bound.
    rows : tuple of Row
    drift : tuple of Drift
    first : Row or None
        The first step and tensor that went apart, with the differences of that step.
    steps : int
        Steps judged; a recording ends where a state is no longer finite.
    inputs : str
        "random" or "recorded".
    onnxruntime : str
        Its version.
    dtype : str
        Of the file: "float32" or "float16", whose rounding the bounds allow for.
    """

    rows: tuple[Row, ...]
    drift: tuple[Drift, ...]
    first: Row | None
    steps: int
    inputs: str
    onnxruntime: str
    dtype: str = "float32"

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    def __bool__(self) -> bool:
        return self.ok

    @property
    def verdict(self) -> str:
        """One sentence."""
        setting = f"{self.steps} {self.inputs} steps, onnxruntime {self.onnxruntime}"
        if self.first is None:
            return f"equal within {self.dtype} rounding: {setting}"
        f = self.first
        return (
            f"not equal: {f.engine} and {f.against} go apart first in {f.tensor} at step {f.step} of "
            f"recording {f.recording}, by {f.max_abs:.3g} where {f.bound:.3g} is allowed ({setting})"
        )

    def to_json(self) -> str:
        """The whole report as JSON; an infinite or undefined difference is null."""
        report = {"ok": self.ok, "verdict": self.verdict} | asdict(self)
        return json.dumps(_without_nan(report), indent=1, allow_nan=False)

    def __str__(self) -> str:
        lines = [f"{'engine':<18} {'against':<18} {'tensor':<8} {'max abs':>9} {'ULP':>9} {'used':>6}"]
        lines += [
            f"{r.engine:<18} {r.against:<18} {r.tensor:<8} {r.max_abs:9.2e} {r.max_ulp:9.3g} {r.used:6.0%}"
            + ("" if r.ok else "  too far")
            for r in self.rows
        ]
        lines += [f"{d.engine:<18} {d.against:<18} {d.tensor:<8} {d.max_abs:9.2e}  drift" for d in self.drift]
        return "\n".join([*lines, self.verdict])

    def __rich__(self):
        from rich.table import Table

        table = Table(title=self.verdict, caption="used: part of what a step may be off; drift: free runs, not judged")
        for heading in ("engine", "against", "tensor"):
            table.add_column(heading)
        for heading in ("max abs", "ULP", "used", "drift"):
            table.add_column(heading, justify="right")
        drift = {(d.engine, d.against, d.tensor): d.max_abs for d in self.drift}
        for r in self.rows:
            apart = drift.get((r.engine, r.against, r.tensor))
            cells = (r.engine, r.against, r.tensor, f"{r.max_abs:.1e}", f"{r.max_ulp:.3g}", f"{r.used:.0%}")
            shown = "" if apart is None else f"{apart:.1e}"
            table.add_row(*cells, shown, style=None if r.ok else "bold red")
        return table


def bound(longest: int, exact: np.ndarray, unit: float = UNIT, spread: float = 0.0) -> float:
    """How far one step may be from float64: the larger of 4 u sqrt(n) max(1, max|exact|) and 4 `spread`.

    Each of the n additions of a product rounds by at most u times the partial sum, u / sqrt(3) in the mean
    square; if the terms have no preferred sign the roundings add up to u sqrt(n / 6) times the size of the
    finished sum (one chain of additions; blocked sums do better). Normalisation divides the sum and its error
    alike, sigmoid and tanh do not enlarge an error, and the step adds two such errors for the gates and a
    third through the cell's own norm: with four standard deviations for the largest of the elements,
    4 u sqrt(n) sqrt(3 / 6), and the remaining factor sqrt(2) for gains above one and what is done element by
    element. Sums shorter than 64 count as 64: there those roundings outweigh the sums'. For float32 and
    n = 64 this is 1.9e-6. Values above 1 (cells, logits) round in proportion to their size.

    Where a norm meets numbers that hardly differ (the cell of a layer of two units, say) it enlarges the
    errors that reach it, however they came about. The float64 graph shows by how much: `spread` is how far
    its results move when the step's inputs are off by u sqrt(n / 6).
    """
    size = float(np.max(np.abs(exact), initial=1.0, where=np.isfinite(exact)))  # what is not finite allows nothing
    return max(4 * unit * math.sqrt(max(longest, 64)) * size, 4 * spread if math.isfinite(spread) else 0.0)


def check_parity(model, onnx_model, *, inputs=None, steps: int = 64, seed: int = 0) -> ParityReport:
    """Compare a model with an ONNX file of it: outputs and states, cnorm, onnxruntime and float64.

    Parameters
    ----------
    model : cnorm.Model
    onnx_model : onnx.ModelProto, str or path-like
        With the interface of `export`, form "step" or "sequence".
    inputs : ndarray [T, input_size], float32 and finite, or a list of them, optional
        Recordings, each run from the initial state, all their steps judged. Without them, standard normal
        numbers.
    steps : int
        Number of random steps.
    seed : int
        Of the random inputs.

    Returns
    -------
    ParityReport

    Raises
    ------
    TypeError
        For an argument of another type.
    OSError
        If there is no file of the name `onnx_model`.
    ValueError
        If the file cannot be read for another reason or has another interface than the model, or `inputs` another
        shape, or numbers that are not finite.
    """
    if not isinstance(model, cnorm.Model):
        raise TypeError(f"model must be a cnorm.Model, got {type(model).__name__}")
    if not isinstance(checked_model(onnx_model), onnx.ModelProto):
        onnx_model = model_io.load(onnx_model, external_data=True)
    recordings = _recordings(model, inputs, steps, seed)
    names = [row["name"] for row in state_table(model)]
    _check_interface(onnx_model, names)

    judge = _Judge(onnx_model, names)
    engines = {"cnorm": model.stream()}
    engines |= {f"onnxruntime {level}": OrtStream(onnx_model, optimisation=level) for level in LEVELS}
    dtype = engines["onnxruntime off"].dtype
    starts = {name: _rounded(engine.state(), dtype) for name, engine in engines.items()}
    of_file = starts["onnxruntime off"]
    pairs = [(name, "float64") for name in engines] + [("cnorm", f"onnxruntime {level}") for level in LEVELS]
    measure = _Measure(pairs, _longest_sum(model.layers), dtype)
    measure.starts(starts["cnorm"], of_file)
    rng, judged = np.random.default_rng(seed), 0

    for number, recording in enumerate(recordings):
        trajectory, free = of_file, starts
        for step, frame in enumerate(recording):
            x = frame.astype(dtype)
            start = _rounded(trajectory, dtype)
            results = {"float64": judge.step(x, start)}
            results |= {name: _step(engine, x, start) for name, engine in engines.items()}
            spread = judge.spread(x, start, results["float64"], measure.noise, rng)
            measure.judge(results, spread, number, step)
            judged += 1

            runs = {"float64": judge.step(x, trajectory)}
            runs |= {name: _step(engine, x, free[name]) for name, engine in engines.items()}
            measure.drift(runs)
            trajectory = {name: runs["float64"][f"{name}_out"] for name in names}
            free = {engine: {n: runs[engine][f"{n}_out"] for n in names} for engine in engines}
            states = [array for state in (trajectory, *free.values()) for array in state.values()]
            if not all(np.isfinite(array).all() for array in states):
                break  # reported by now as infinitely far; no engine need start from it
    return ParityReport(
        rows=tuple(measure.rows.values()),
        drift=tuple(Drift(*key, apart) for key, apart in measure.drifts.items()),
        first=measure.first,
        steps=judged,
        inputs="random" if inputs is None else "recorded",
        onnxruntime=onnxruntime.__version__,
        dtype=dtype.name,
    )


def _rounded(state, dtype) -> dict[str, np.ndarray]:
    return {name: array.astype(dtype) for name, array in state.items()}


def _step(stream, x, state) -> dict[str, np.ndarray]:
    """One step of a cnorm or onnxruntime stream from a given state: {"y": ..., "h0_out": ...}."""
    dtype = getattr(stream, "dtype", np.float32)
    stream.set_state(_rounded(state, dtype))
    y = stream.step(x.astype(dtype))
    return {"y": y} | {f"{name}_out": array for name, array in stream.state().items()}


class _Judge:
    """The file's graph in float64."""

    def __init__(self, onnx_model, names):
        self.graph, self.names = Float64(onnx_model), names
        self.leading = (1,) * (len(onnx_model.graph.input[0].type.tensor_type.shape.dim) - 1)

    def step(self, x, states):
        feeds = {"x": x.reshape(*self.leading, -1)}
        feeds |= {f"{name}_in": states[name][None] for name in self.names}
        return {name: array.reshape(array.shape[-1]) for name, array in self.graph.run(feeds).items()}

    def spread(self, x, states, exact, noise, rng, samples=3) -> dict[str, float]:
        """How far the step moves if its inputs are off by `noise`, relatively."""
        spread = dict.fromkeys(exact, 0.0)
        for _ in range(samples):
            near = {n: a * (1 + noise * rng.standard_normal(a.shape)) for n, a in {"x": x, **states}.items()}
            moved = self.step(near.pop("x"), near)
            spread = {n: max(spread[n], _largest(np.abs(moved[n] - exact[n]))) for n in exact}
        return spread


class _Measure:
    """Collects the differences of all steps."""

    def __init__(self, pairs, longest, dtype):
        self.pairs, self.longest, self.dtype, self.unit = pairs, longest, dtype, float(np.finfo(dtype).eps) / 2
        self.noise = self.unit * math.sqrt(max(longest, 64) / 6)
        self.rows: dict[tuple[str, str, str], Row] = {}
        self.drifts: dict[tuple[str, str, str], float] = {}
        self.first: Row | None = None

    def starts(self, ours, files) -> None:
        """A row for each state that begins otherwise; none is computed by then, so no difference is allowed."""
        for name, exact in files.items():
            apart = _apart(ours[name], exact)
            if apart.any():
                ulp = _largest(apart / self._ulp(exact))
                row = Row("cnorm", "float64", f"{name}_in", _largest(apart), ulp, math.inf, 0.0, 0, 0, False)
                self.rows[row.engine, row.against, row.tensor] = row
                self.first = self.first or row

    def judge(self, results, spread, recording, step) -> None:
        """One step. Two engines may each be off by the bound, so twice as far from each other."""
        for engine, against in self.pairs:
            for tensor, exact in results["float64"].items():
                allowed = bound(self.longest, exact, self.unit, spread[tensor])
                allowed *= 1 if against == "float64" else 2
                apart = _apart(results[engine][tensor], results[against][tensor])
                largest, ulp = _largest(apart), _largest(apart / self._ulp(exact))
                used = largest / allowed
                row = Row(engine, against, tensor, largest, ulp, used, allowed, recording, step, used <= 1)
                key = engine, against, tensor
                self.rows[key] = _worse(self.rows.get(key, row), row)
                if self.first is None and not row.ok:
                    self.first = row

    def _ulp(self, exact) -> np.ndarray:
        return np.spacing(np.abs(exact).astype(self.dtype)).astype(np.float64)

    def drift(self, runs) -> None:
        for engine, against in self.pairs:
            for tensor, array in runs[engine].items():
                key = engine, against, tensor
                apart = _largest(_apart(array, runs[against][tensor]))
                self.drifts[key] = max(self.drifts.get(key, 0.0), apart)


def _worse(old: Row, new: Row) -> Row:
    """The step that used most of its bound, with the largest differences of all steps."""
    head = new if new.used > old.used else old
    max_abs, max_ulp = max(old.max_abs, new.max_abs), max(old.max_ulp, new.max_ulp)
    return replace(head, max_abs=max_abs, max_ulp=max_ulp)


def _apart(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.abs(a.astype(np.float64) - b.astype(np.float64))


def _largest(differences: np.ndarray) -> float:
    """NaN counts as infinitely far: it can never be within a bound."""
    return float(np.max(np.where(np.isnan(differences), np.inf, differences), initial=0.0))


def _longest_sum(layers) -> int:
    """Terms of the longest sum of products in one step."""
    longest = 1
    for layer in layers:
        if layer.kind == "Residual":
            longest = max(longest, _longest_sum(layer.layers))
        elif "weight" not in layer.weights or layer.kind == "Linear":  # no norm and no activation
            longest = max(longest, layer.input_size or 1, *builder(layer).states(layer).values())
    return longest


def _recordings(model, inputs, steps, seed) -> list[np.ndarray]:
    if inputs is None:
        if isinstance(steps, bool) or not hasattr(steps, "__index__"):
            raise TypeError(f"steps must be an integer, got {steps!r}")
        if operator.index(steps) < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        rng = np.random.default_rng(seed)
        return [rng.standard_normal((operator.index(steps), model.input_size)).astype(np.float32)]
    if isinstance(inputs, np.ndarray):
        inputs = [inputs]
    if not isinstance(inputs, Iterable) or isinstance(inputs, (str, bytes, dict)):
        raise TypeError(f"inputs must be an array or a list of arrays, got {type(inputs).__name__}")
    inputs = list(inputs)
    for i, recording in enumerate(inputs):
        if not isinstance(recording, np.ndarray) or recording.dtype != np.float32:
            got = getattr(recording, "dtype", type(recording).__name__)
            raise TypeError(f"inputs[{i}] must be a float32 array, got {got}")
        if recording.ndim != 2 or recording.shape[1] != model.input_size:
            raise ValueError(f"inputs[{i}] must have shape (steps, {model.input_size}), got {recording.shape}")
        if not np.isfinite(recording).all():  # NaN on all sides would be agreement about nothing
            step = int(np.argmin(np.isfinite(recording).all(axis=1)))
            raise ValueError(f"inputs[{i}] must be finite, got NaN or infinity at step {step}")
    if not sum(map(len, inputs)):
        raise ValueError("inputs must have at least one step, got none")
    return [np.ascontiguousarray(recording) for recording in inputs]


def _check_interface(onnx_model, names) -> None:
    stored = {tensor.name for tensor in onnx_model.graph.initializer}
    found = [value.name for value in onnx_model.graph.input if value.name not in stored]
    wanted = ["x", *(f"{name}_in" for name in names)]
    if set(found) != set(wanted):
        raise ValueError(f"onnx_model must have the inputs {', '.join(wanted)}, got {', '.join(found)}")
    found = [value.name for value in onnx_model.graph.output]
    wanted = ["y", *(f"{name}_out" for name in names)]
    if set(found) != set(wanted):
        raise ValueError(f"onnx_model must have the outputs {', '.join(wanted)}, got {', '.join(found)}")


def _without_nan(value):
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
