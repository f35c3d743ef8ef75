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
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

import numpy as np
import onnx
import onnxruntime

import cnorm
from onnx_export.builders import builder
from onnx_export.exporter import state_table
from onnx_export.float64 import Float64

__all__ = ["Drift", "ParityReport", "Row", "check_parity"]

UNIT = 2.0**-24  # unit roundoff of float32
LEVELS = {  # graph optimisation of onnxruntime
    "off": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
}


@dataclass(frozen=True)
class Row:
    """One tensor of one engine against another, the worst over all steps.

    Attributes
    ----------
    engine, against : str
        "cnorm", "onnxruntime off", "onnxruntime basic", "onnxruntime all" or "float64".
    tensor : str
        The graph's name of an output or next state.
    max_abs, max_ulp : float
        Largest absolute difference, and largest in units in the last place of the float32 judge's value.
    bound : float
        What is allowed in the step that came closest to its bound or went furthest beyond it.
    recording, step : int
        That step.
    ok : bool
    """

    engine: str
    against: str
    tensor: str
    max_abs: float
    max_ulp: float
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
        Steps judged.
    inputs : str
        "random" or "recorded".
    onnxruntime : str
        Its version.
    """

    rows: tuple[Row, ...]
    drift: tuple[Drift, ...]
    first: Row | None
    steps: int
    inputs: str
    onnxruntime: str

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
            return f"equal within float32 rounding: {setting}"
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
        lines = [f"{'engine':<18} {'against':<18} {'tensor':<8} {'max abs':>9} {'ULP':>9} {'allowed':>9}"]
        lines += [
            f"{r.engine:<18} {r.against:<18} {r.tensor:<8} {r.max_abs:9.2e} {r.max_ulp:9.3g} {r.bound:9.2e}"
            + ("" if r.ok else "  too far")
            for r in self.rows
        ]
        lines += [f"{d.engine:<18} {d.against:<18} {d.tensor:<8} {d.max_abs:9.2e}  drift" for d in self.drift]
        return "\n".join([*lines, self.verdict])

    def __rich__(self):
        from rich.table import Table

        table = Table(title=self.verdict, caption="drift: free runs, not judged")
        for heading in ("engine", "against", "tensor"):
            table.add_column(heading)
        for heading in ("max abs", "ULP", "allowed", "drift"):
            table.add_column(heading, justify="right")
        drift = {(d.engine, d.against, d.tensor): d.max_abs for d in self.drift}
        for r in self.rows:
            apart = drift.get((r.engine, r.against, r.tensor))
            cells = (r.engine, r.against, r.tensor, f"{r.max_abs:.1e}", f"{r.max_ulp:.3g}", f"{r.bound:.1e}")
            shown = "" if apart is None else f"{apart:.1e}"
            table.add_row(*cells, shown, style=None if r.ok else "bold red")
        return table


def bound(longest: int, reference: np.ndarray) -> float:
    """How far one float32 step may be from float64: 4 u sqrt(n) max(1, max|reference|), u = 2^-24.

    Each of the n additions of a product rounds by at most u times the partial sum, u / sqrt(3) in the mean
    square; if the terms have no preferred sign the roundings add up to u sqrt(n / 6) times the size of the
    finished sum (one chain of additions; blocked sums do better). Normalisation divides the sum and its error
    alike, sigmoid and tanh do not enlarge an error, and the step adds two such errors for the gates and a
    third through the cell's own norm: with four standard deviations for the largest of the elements,
    4 u sqrt(n) sqrt(3 / 6), and the remaining factor sqrt(2) for gains above one and what is done element by
    element. Sums shorter than 64 count as 64: there those roundings outweigh the sums'. At 64 this is 1.9e-6.
    Values above 1 (cells, logits) round in proportion to their size.
    """
    size = float(np.max(np.abs(reference), initial=1.0))
    return 4 * UNIT * math.sqrt(max(longest, 64)) * size


def check_parity(model, onnx_model, *, inputs=None, steps: int = 64, seed: int = 0) -> ParityReport:
    """Compare a model with an ONNX file of it: outputs and states, cnorm, onnxruntime and float64.

    Parameters
    ----------
    model : cnorm.Model
    onnx_model : onnx.ModelProto, str or path-like
        A step model with the interface of `export`.
    inputs : ndarray [T, input_size], float32, or a list of them, optional
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
    ValueError
        If the file has another interface than the model, or `inputs` another shape.
    """
    if not isinstance(model, cnorm.Model):
        raise TypeError(f"model must be a cnorm.Model, got {type(model).__name__}")
    if not isinstance(onnx_model, onnx.ModelProto):
        onnx_model = onnx.load(onnx_model)
    recordings = _recordings(model, inputs, steps, seed)
    table = state_table(model)
    names = [row["name"] for row in table]
    _check_interface(model, onnx_model, names)

    judge = _Judge(onnx_model, names)
    engines = {"cnorm": _Cnorm(model, names)}
    engines |= {f"onnxruntime {level}": _Ort(onnx_model, names, level) for level in LEVELS}
    pairs = [(name, "float64") for name in engines] + [("cnorm", f"onnxruntime {level}") for level in LEVELS]
    tensors = ["y", *(f"{name}_out" for name in names)]
    longest = _longest_sum(model)
    initial = {row["name"]: np.full(row["units"], row["initial"], np.float32) for row in table}

    worst: dict[tuple[str, str, str], Row] = {}
    drift: dict[tuple[str, str, str], float] = {}
    first = None
    for number, recording in enumerate(recordings):
        trajectory = {name: array.astype(np.float64) for name, array in initial.items()}
        free = {name: (engine, dict(initial)) for name, engine in engines.items()}
        for step, x in enumerate(recording):
            start = {name: array.astype(np.float32) for name, array in trajectory.items()}
            results = {"float64": judge.step(x, start)}
            results |= {name: engine.step(x, start) for name, engine in engines.items()}
            for row in _compare(results, pairs, tensors, longest, number, step):
                key = row.engine, row.against, row.tensor
                worst[key] = _worse(worst.get(key), row)
                if first is None and not row.ok:
                    first = row

            runs = {"float64": judge.step(x, trajectory)}
            trajectory = _next(runs["float64"], names)
            for name, (engine, state) in free.items():
                runs[name] = engine.step(x, state)
                free[name] = engine, _next(runs[name], names)
            for engine, against in pairs:
                for tensor in tensors:
                    apart = _largest(np.abs(runs[engine][tensor] - runs[against][tensor]))
                    key = engine, against, tensor
                    drift[key] = max(drift.get(key, 0.0), apart)
    return ParityReport(
        rows=tuple(worst.values()),
        drift=tuple(Drift(*key, apart) for key, apart in drift.items()),
        first=first,
        steps=sum(map(len, recordings)),
        inputs="random" if inputs is None else "recorded",
        onnxruntime=onnxruntime.__version__,
    )


class _Cnorm:
    """The model itself; x [input_size], states [units] -> {"y": ..., "h0_out": ...}, as the other engines."""

    def __init__(self, model, names):
        self.stream, self.names = model.stream(), names

    def step(self, x, states):
        if self.names:
            self.stream.set_state(states)
        y = self.stream.step(x)
        return {"y": y} | {f"{name}_out": array for name, array in self.stream.state().items()}


class _Ort:
    """onnxruntime at one level of optimisation."""

    def __init__(self, onnx_model, names, level):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = LEVELS[level]
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(
            onnx_model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        self.names, self.outputs = names, [value.name for value in self.session.get_outputs()]

    def step(self, x, states):
        feeds = {"x": x[None]} | {f"{name}_in": states[name][None] for name in self.names}
        return {n: a[0] for n, a in zip(self.outputs, self.session.run(None, feeds), strict=True)}


class _Judge:
    """The file's graph in float64."""

    def __init__(self, onnx_model, names):
        self.graph, self.names = Float64(onnx_model), names

    def step(self, x, states):
        feeds = {"x": x[None]} | {f"{name}_in": states[name][None] for name in self.names}
        return {name: array[0] for name, array in self.graph.run(feeds).items()}


def _next(result, names):
    return {name: result[f"{name}_out"] for name in names}


def _compare(results, pairs, tensors, longest, recording, step) -> Iterator[Row]:
    """Rows of one step. Two float32 engines may each be off by the bound, so twice as far from each other."""
    for engine, against in pairs:
        for tensor in tensors:
            exact = results["float64"][tensor]
            allowed = bound(longest, exact) * (1 if against == "float64" else 2)
            with np.errstate(invalid="ignore"):
                apart = np.abs(results[engine][tensor].astype(np.float64) - results[against][tensor])
            ulp = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
            furthest = _largest(apart)
            ok = furthest <= allowed
            yield Row(engine, against, tensor, furthest, _largest(apart / ulp), allowed, recording, step, ok)


def _worse(old: Row | None, new: Row) -> Row:
    """The step that used most of its bound, with the largest differences of all steps."""
    if old is None:
        return new
    head = new if new.max_abs / new.bound > old.max_abs / old.bound else old
    return Row(
        *(head.engine, head.against, head.tensor),
        max(old.max_abs, new.max_abs),
        max(old.max_ulp, new.max_ulp),
        *(head.bound, head.recording, head.step),
        old.ok and new.ok,
    )


def _largest(differences: np.ndarray) -> float:
    """NaN counts as infinitely far: it can never be within a bound."""
    return float(np.max(np.where(np.isnan(differences), np.inf, differences), initial=0.0))


def _longest_sum(model) -> int:
    """Terms of the longest sum of products in one step."""
    return max(max(layer.input_size, *builder(layer).states(layer).values(), 1) for layer in model.layers)


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
            raise ValueError(
                f"inputs[{i}] must have shape (steps, {model.input_size}), got {recording.shape}"
            )
    if not sum(map(len, inputs)):
        raise ValueError("inputs must have at least one step, got none")
    return [np.ascontiguousarray(recording) for recording in inputs]


def _check_interface(model, onnx_model, names) -> None:
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
