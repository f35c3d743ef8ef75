"""Check that an ONNX file computes what a model computes, step by step, against the file in float64.

Layer-normalised recurrences amplify rounding errors: two correct float32 engines that each continue from their own
state differ by 1e-3 and more after some hundred steps. Therefore each step is judged by itself. Every engine starts
it from the state of the float64 trajectory, rounded to float32, and may then differ from float64 by at most `bound`.
The drift of engines that run freely is reported, but not judged.
"""

from __future__ import annotations

import os
from contextlib import closing
from functools import cached_property
from itertools import pairwise

import numpy as np
import onnx
import onnxruntime

import cnorm
from cnorm.storage.model_files import METADATA_KEY
from onnx_export import model_io
from onnx_export.description import initial_states, metadata_difference, state_table
from onnx_export.nodes import model_nodes
from onnx_export.ort import LEVELS
from onnx_export.parity_engines import CnormEngine, Float64Engine, OrtEngine, RuntimeEngine, interface
from onnx_export.parity_measure import Call, Elements, Measure
from onnx_export.parity_recordings import Domain, hard_calls, recordings, weights_varied, whole_calls
from onnx_export.parity_report import ELEMENT, Drift, ParityReport, Row
from onnx_export.quantizer import Variation

__all__ = ["Drift", "ParityReport", "Row", "check_parity"]

SAMPLES = 3  # of a sensitivity
VISIBLE = 2.0**-14  # of the largest value of an element: what a change of the weights counts in a recording
ELEMENT_CALLS = 16  # from so many on no element's sensitivity is small by chance: in 48 samples
BATCH = 3  # rows in the call that is compared with calls of one row each


def check_parity(
    model, onnx_model, *, inputs=None, steps: int = 64, seed: int = 0, runtime: str | None = None
) -> ParityReport:
    """Compare a model with an ONNX file of it: outputs and states, cnorm, onnxruntime and float64.

    Parameters
    ----------
    model : cnorm.Model
    onnx_model : onnx.ModelProto, str or path-like
        A model with the interface of `export`, form "step" or "sequence", whatever program wrote it. A file with a
        fixed number of steps is judged by whole calls.
    inputs : ndarray [T, input_size], float32 and finite, or a list of them, optional
        Recordings. Each is run from the initial state, and all its steps are judged. By default, standard normal
        numbers.
    steps : int
        Number of random steps, rounded up to whole calls.
    seed : int
        Seed of the random inputs.
    runtime : str, optional
        A name of docs/runtimes.md: run the file there, too, where it is installed for this Python, in a child process.

    Returns
    -------
    ParityReport

    Raises
    ------
    TypeError
        For an argument of another type.
    OSError
        If the file `onnx_model` does not exist.
    ValueError
        If the file cannot be read, loaded or run for another reason, or has another interface than the model; if
        `inputs` have another shape or are not finite; or if `runtime` is unknown, not installed or refuses the file.
    """
    if not isinstance(model, cnorm.Model):
        raise TypeError(f"model must be a cnorm.Model, got {type(model).__name__}")
    if not isinstance(onnx_model, (onnx.ModelProto, str, os.PathLike)):
        raise TypeError(f"onnx_model must be an onnx.ModelProto, a str or path-like, got {type(onnx_model).__name__}")
    if not isinstance(onnx_model, onnx.ModelProto):
        onnx_model = model_io.load(onnx_model, external_data=True)
    domain = Domain(model)
    check = _Check(model, domain, onnx_model, recordings(model, domain, inputs, steps, seed), inputs is None, seed)
    if runtime is None:
        return check.report()
    with closing(RuntimeEngine(onnx_model, check.given, runtime)) as engine:
        check.engines[runtime] = engine
        return check.report()


class _Check:
    """The state of one call of `check_parity`, with checked arguments."""

    def __init__(self, model, domain: Domain, onnx_model, given, random: bool, seed: int):
        self.model, self.domain, self.onnx_model = model, domain, onnx_model
        units = {row["name"]: row["units"] for row in state_table(model)}
        self.given = interface(onnx_model, model.input_size, units, model.outputs)
        self.frames = self.given.frames or 1  # of one call
        self.random, self.recordings = random, whole_calls(given, self.frames, random)
        self.judge = Float64Engine(onnx_model, self.given)
        self.engines = {"cnorm": CnormEngine(model)}
        self.engines |= {f"onnxruntime {level}": OrtEngine(onnx_model, self.given, level) for level in LEVELS}
        self.rng = np.random.default_rng(seed)
        text = {entry.key: entry.value for entry in onnx_model.metadata_props}.get(METADATA_KEY)
        self.metadata = metadata_difference(text, model)
        self.of_file = {n: a[None] for n, a in initial_states(text, units, self.given.dtype).items()}
        self.of_model = _rounded(self.engines["cnorm"].initial(), self.given.dtype)
        native = any(node.op_type in ("LSTM", "GRU", "RNN") and not node.domain for node in model_nodes(onnx_model))
        longest = max(leaf.longest_sum() for layer in model.layers for _, leaf in layer.leaves(""))
        self.measure = Measure(longest, self.given.dtype, self.frames, native)
        self.elements = Elements()
        self.calls: list[Call] = []  # the first that were judged

    def report(self) -> ParityReport:
        self.measure.starts(self.of_model, self.of_file)
        judged = sum(self._recording(i, recording) for i, recording in enumerate(self.recordings))
        self._each_element()
        self._hard_calls()
        self._outside()
        if self.given.sequence and self.given.frames is None:
            self._chunks()
        if self.given.open_batch:
            self._batch()
        return ParityReport(
            rows=tuple(self.measure.rows.values()),
            drift=tuple(Drift(*key, distance) for key, distance in self.measure.drifts.items()),
            first=self.measure.first,
            steps=judged,
            inputs="random" if self.random else "recorded",
            onnxruntime=onnxruntime.__version__,
            dtype=self.given.dtype.name,
            metadata=self.metadata,
            positive=self.domain.positive,
        )

    def _recording(self, number: int, recording: np.ndarray) -> int:
        """Judge each call from the float64 trajectory's state; also run all engines freely, for the drift."""
        trajectory = self.of_file
        free = {name: self.of_model if name == "cnorm" else self.of_file for name in self.engines}
        for step in range(0, len(recording), self.frames):
            x = recording[step : step + self.frames, None].astype(self.given.dtype)
            self._judged(x, trajectory, number, step)

            runs = {"float64": self.judge.call(x, trajectory)}
            runs |= {name: engine.call(x, free[name]) for name, engine in self.engines.items()}
            self.measure.drift(runs)
            trajectory = self._next(runs["float64"])
            free = {name: self._next(runs[name]) for name in self.engines}
            states = [array for state in (trajectory, *free.values()) for array in state.values()]
            if not all(np.isfinite(array).all() for array in states):
                return step + self.frames  # the difference is already reported as infinite; do not continue from it
        return len(recording)

    def _judged(self, x, states, number: int, step: int) -> None:
        start = _rounded(states, self.given.dtype)
        call = self._call(x, start)
        if not self.measure.within(call):  # a few changed inputs may not show how sums of weights round
            self._vary_weights(call, VISIBLE)
        self.measure.judge(call, number, step)
        self.elements.add(call)
        if len(self.calls) < ELEMENT_CALLS:
            self.calls.append(call)

    def _call(self, x, states) -> Call:
        results = {"float64": self.judge.call(x, states)}
        results |= {name: engine.call(x, states) for name, engine in self.engines.items()}
        return Call(x, states, results, self._sensitivity(x, states, results["float64"]))

    def _each_element(self) -> None:
        if len(self.calls) < ELEMENT_CALLS:
            return
        if any((distance > allowed).any() for *_, distance, _, allowed in self.elements.worst(self.measure)):
            for call in self.calls:
                self._vary_weights(call, VISIBLE)
                self.elements.add(call)
        for row in self.elements.worst(self.measure):
            self.measure.add(*row, (ELEMENT, 0))

    def _next(self, results) -> dict[str, np.ndarray]:
        return {name: results[f"{name}_out"] for name in self.given.states}

    def _sensitivity(self, x, states, exact) -> dict[str, np.ndarray]:
        """Change of each float64 output if the inputs of the call are changed relatively by the measure's `noise`.

        Where an int8 product rounds computed numbers to integers, elements within 4 `noise` of a tie change, too.
        """
        largest = {name: np.zeros(value.shape) for name, value in exact.items()}
        for sample in range(SAMPLES):
            vary = Variation(self.rng, 4 * self.measure.noise, share=0.5 if sample else 1.0)
            near = {
                n: a * (1 + self.measure.noise * self.rng.standard_normal(a.shape))
                for n, a in {"x": x, **states}.items()
            }
            tokens = list(self.model.tokens)
            near["x"][..., tokens] = x[..., tokens]
            _enlarge(largest, self.judge.call(near.pop("x"), near, vary=vary), exact)
        return largest

    def _hard_calls(self) -> None:
        """Judge calls that recordings may never reach; the states need not be those of a trajectory.

        On zeros and repeated values a relative change of the inputs changes little, while a norm of nearly equal
        numbers enlarges the rounding of sums of weights. So the sensitivity is also that to a change of the weights.
        """
        for call in list(hard_calls(self.given, self.model.input_size, self.model.layers, self.rng)):
            x, states = self.domain(call.x).astype(self.given.dtype), _rounded(call.states, self.given.dtype)
            judged = self._call(x, states)
            self._vary_weights(judged)
            self.measure.judge(judged, call.name, 0)

    def _vary_weights(self, call: Call, most: float | None = None) -> None:
        """Raise the sensitivity of a call to that to a change of the weights, of which at most `most` counts if given.

        That is relative to the largest value of each element: weights that cancel, as K and -K, would allow any error.
        """
        for varied in self._varied:
            moved = varied.call(call.x, call.states)
            for name, exact in call.results["float64"].items() if most else ():
                limit = most * np.fmax(np.abs(exact), self.elements.exact.get(name, 0.0))
                moved[name] = exact + np.clip(moved[name] - exact, -limit, limit)
            _enlarge(call.sensitivity, moved, call.results["float64"])

    @cached_property
    def _varied(self) -> list[Float64Engine]:
        measure = self.measure
        files = (weights_varied(self.onnx_model, measure.noise, measure.unit, self.rng) for _ in range(SAMPLES))
        return [Float64Engine(file, self.given) for file in files]

    def _outside(self) -> None:
        """Where negative elements give no numbers in the model, they must give none in the file."""
        if not self.domain.positive:
            return
        x = self.domain.outside(self.rng.standard_normal((self.frames, 1, self.model.input_size)))
        ours, exact = (engine.call(x, self.of_file)["y"] for engine in (self.engines["cnorm"], self.judge))
        distance = np.where(np.isfinite(ours) == np.isfinite(exact), 0.0, np.inf)
        self.measure.add("cnorm", "float64", "y", distance, np.nan_to_num(exact), 0.0, ("negative elements", 0))

    def _chunks(self) -> None:
        """Compare many steps in one call, and in three calls, with the same engine's single steps."""
        longest = max(range(len(self.recordings)), key=lambda i: len(self.recordings[i]))
        x = self.recordings[longest][:, None].astype(self.given.dtype)
        if len(x) < 3:
            x = self.domain(self.rng.standard_normal((3, *x.shape[1:]))).astype(self.given.dtype)
        cuts = [0, (len(x) + 2) // 3, (2 * len(x) + 2) // 3, len(x)]
        for name, engine in self.engines.items():
            if name == "cnorm":
                continue
            if not isinstance(engine, OrtEngine):  # nothing promises its bits
                self._one_call(name, engine, x[:6])
                continue
            single = self._run(engine, x, range(len(x) + 1))
            for whole in (self._run(engine, x, (0, len(x))), self._run(engine, x, cuts)):
                self.measure.chunks(name, single, whole, longest)

    def _one_call(self, name, engine, x) -> None:
        """Judge one call of several steps."""
        exact = self.judge.call(x, self.of_file)
        sensitivity = self._sensitivity(x, self.of_file, exact)
        found = engine.call(x, self.of_file)  # the engine rounds
        self.measure.row(name, f"float64, {len(x)} steps", found, (exact, sensitivity), (0, 0), len(x))

    def _run(self, engine, x, cuts) -> dict[str, np.ndarray]:
        """Run x freely in calls that begin and end at `cuts`; returns all of y and the last states."""
        states, ys = self.of_file, []
        for start, end in pairwise(cuts):
            results = engine.call(x[start:end], states)
            states = self._next(results)
            ys.append(results["y"])
        return {"y": np.concatenate(ys)} | {f"{name}_out": array for name, array in states.items()}

    def _batch(self) -> None:
        """Compare the rows of one call of BATCH rows with float64 calls of one row each."""
        calls = self.calls[:BATCH]
        while len(calls) < BATCH:  # fewer were judged
            x = self.domain(self.rng.standard_normal(calls[0].x.shape)).astype(calls[0].x.dtype)
            calls.append(self._call(x, calls[0].states))
        x = np.concatenate([call.x for call in calls], axis=1)
        states = {n: np.concatenate([call.states[n] for call in calls]) for n in self.given.states}
        for name, engine in self.engines.items():
            if name == "cnorm":
                continue
            results = engine.call(x, states)
            for row, call in enumerate(calls):
                one = {n: a[..., row : row + 1, :] for n, a in results.items()}
                judge = call.results["float64"], call.sensitivity
                self.measure.row(name, f"float64, batch {BATCH}", one, judge, (0, row * self.frames))


def _enlarge(sensitivity: dict[str, np.ndarray], moved, exact) -> None:
    """Raise each sensitivity to the difference of a result from the exact one."""
    for name, value in exact.items():
        sensitivity[name] = np.maximum(sensitivity[name], np.abs(moved[name] - value))


def _rounded(state, dtype) -> dict[str, np.ndarray]:
    return {name: array.astype(dtype) for name, array in state.items()}
