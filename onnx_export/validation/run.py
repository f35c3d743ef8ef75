"""Run the whole model at every optimisation level and collect the inputs and results of each norm."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx

from onnx_export import ort
from onnx_export.validation import inputs
from onnx_export.validation.graph import Scope, boundary, op, scopes
from onnx_export.validation.isolated import Isolated, cast_feeds, fused_into, makers, subgraph_model
from onnx_export.validation.judge import JudgedRows, Measure, Oracle, allowed_change, worst
from onnx_export.validation.norm import Norm
from onnx_export.validation.report import NormReport
from onnx_export.validation.taps import Tap, expose

_RANDOM = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli"}
)
_ITERATIONS = 16  # at most so many iterations of a loop are judged for each norm in it


@dataclass(eq=False)
class Case:
    """One norm under examination.

    Attributes
    ----------
    norm, report
    producers : list of onnx.NodeProto
        The additions that compute its input.
    feeds : list of dict
        Tapped values that enter the norm and the producers, one dict per iteration of the loops around it; empty if
        no rows reached the norm.
    results : list of ndarray
        The norm's result for each of the feeds, from the same run.
    oracle, isolated
        Set by `Run.prepare`.
    """

    norm: Norm
    report: NormReport
    producers: list[onnx.NodeProto]
    feeds: list[dict[str, np.ndarray]] = field(default_factory=list)
    results: list[np.ndarray] = field(default_factory=list)
    oracle: Oracle = field(init=False)
    isolated: Isolated = field(init=False)


class Run:
    """The model's runs: unoptimised with inputs and results of all norms tapped, and at each level with results tapped.

    Added outputs disable fusions, so the optimised runs expose the results of norms only.

    Parameters
    ----------
    model : onnx.ModelProto
    weights : dict of str to ndarray
        Its large initialisers (`weights.set_aside`).
    cases : list of Case
        The constructor sets their feeds and results.
    file : str
        File of inputs, empty for none.
    sizes : inputs.Sizes
    seed : int
        Seed for the inputs that the file lacks, which are generated.

    Attributes
    ----------
    model, weights
    random : bool
        Whether two runs of the model may differ.
    generated : list of str
        Names of the generated inputs.
    trouble : str
        Optimisation levels at which the model does not run, and why; empty when there are none.

    Raises
    ------
    inputs.MissingInput, model_io.Unreadable, ort.CannotRun
        If there is nothing to judge.
    """

    def __init__(self, model, weights, cases: list[Case], file: str, sizes: inputs.Sizes, seed: int) -> None:
        self.model, self.weights, self._cases = model, weights, cases
        main = next(iter(scopes(model)))
        stored = {tensor.name for tensor in model.graph.initializer}
        wanted = [value.name for value in model.graph.input if value.name not in stored]
        given = inputs.read(file, wanted) if file else {}
        self._feeds = inputs.complete(main, given, sizes, seed)
        self.generated = [name for name in wanted if name not in given]
        self.random = any(_draws(scope, node) for scope in scopes(model) for node in scope.nodes)
        self._tap()
        self._levels = {"off": self._results("off")}
        self.trouble = ""
        for level in ("basic", "all"):
            try:
                self._levels[level] = self._results(level)
            except ort.CannotRun as error:
                self.trouble = f"onnxruntime does not run the model with optimisation {level!r}: {error}"
        self._inputs: dict[tuple[str, int], list[np.ndarray]] = {}
        self._dumps: dict[str, list[dict[str, onnx.NodeProto]]] = {}

    @property
    def finite_inputs(self) -> bool:
        """Whether no input of the model holds NaN or Inf."""
        return all(np.isfinite(v.astype(np.float64)).all() for v in self._feeds.values() if v.dtype.kind in "fV")

    @property
    def feeds(self) -> dict[str, np.ndarray]:
        """The inputs of the model, read or generated."""
        return self._feeds

    def session(self, model: onnx.ModelProto, level: str) -> ort.Session:
        """A session of the model or of a copy of it with taps."""
        return ort.Session(model, level, self.weights)

    def _tap(self) -> None:
        """Tap all norms in an unoptimised run; if that fails, those of the main graph only."""
        try:
            self._try_tap(self._cases)
        except ort.CannotRun as error:
            self._run_plainly()
            inner = [case for case in self._cases if case.norm.scope.path]
            for case in inner:
                case.report.detail = f"its values cannot be tapped: {error}"
            self._try_tap([case for case in self._cases if not case.norm.scope.path])

    def _run_plainly(self) -> None:
        """Run the model without taps, to raise an error that is the model's own and not due to the taps."""
        try:
            session = self.session(self.model, "off")
        except ort.CannotRun as error:
            raise ort.CannotRun(f"onnxruntime does not load the model: {error}") from error
        try:
            session.run([], self._feeds)
        except ort.CannotRun as error:
            advice = f"; generated inputs: {self.generated}, supply them with --input" if self.generated else ""
            raise ort.CannotRun(f"onnxruntime does not run the model: {error}{advice}") from error

    def _try_tap(self, cases: list[Case]) -> None:
        """Run unoptimised and store, per case, the values that enter the norm and its producers, and its result."""
        taps: dict[tuple[int, str], Tap] = {}
        wanted: list[tuple[Case, list[str]]] = []
        for case in cases:
            scope = case.norm.scope
            needed = [*boundary(scope, case.norm.nodes), *boundary(scope, [*case.norm.nodes, *case.producers])]
            names = dict.fromkeys([*needed, case.norm.y])
            tap = {name: Tap(scope, name, copied=True) for name in names}
            case.report.detail = next(filter(None, (t.obstacle for t in tap.values())), "")
            if case.report.detail:
                continue
            taps |= {(id(scope), name): t for name, t in tap.items()}
            wanted.append((case, list(names)))
        exposed, names = expose(self.model, list(taps.values()))
        values = self.session(exposed, "off").run(names, self._feeds) if names else []
        by_key = dict(zip(taps, values, strict=True))
        for case, needed in wanted:
            scope = case.norm.scope
            levels = Tap(scope, "", True).levels
            stacked = {name: _iterations(by_key[id(scope), name], levels) for name in needed}
            count = min((len(values) for values in stacked.values()), default=0)
            case.feeds = [{name: values[i] for name, values in stacked.items()} for i in _sample_indices(count)]
            case.results = [feeds.pop(case.norm.y) for feeds in case.feeds]
            if not any(_has_rows(feeds, case.norm) for feeds in case.feeds):
                case.feeds = []
                case.report.detail = "no rows reached it: a branch not taken, a loop not entered, or an empty input"

    def _results(self, level: str) -> dict[int, list[np.ndarray]]:
        """The results, at one level, of each norm that rows reached, by position."""
        reached = [i for i, case in enumerate(self._cases) if case.feeds]
        taps = [Tap(self._cases[i].norm.scope, self._cases[i].norm.y, copied=False) for i in reached]
        return self._tapped(level, reached, taps)

    def _tapped(self, level: str, which: list[int], taps: list[Tap]) -> dict[int, list[np.ndarray]]:
        """Run with these taps; the values of each, one per judged iteration, under its number in `which`."""
        exposed, names = expose(self.model, taps)
        values = self.session(exposed, level).run(names, self._feeds) if names else []
        result = {}
        for index, tap, value in zip(which, taps, values, strict=True):
            stacked = _iterations(value, tap.levels)
            result[index] = [stacked[i] for i in _sample_indices(len(stacked))]
        return result

    def prepare(self, position: int) -> list[JudgedRows]:
        """Set `oracle` and `isolated` of a case that has feeds; returns its rows, one `JudgedRows` per iteration."""
        case = self._cases[position]
        norm, feeds = case.norm, case.feeds
        case.oracle = Oracle(norm, subgraph_model(self.model, norm, norm.nodes, feeds[0]))
        made = {level: self.became(norm, level)[0] for level in self.optimised}
        case.isolated = Isolated(self.model, norm, case.producers, case.oracle, feeds, made)
        return [case.oracle.rows(f) for f in feeds]

    @property
    def optimised(self) -> list[str]:
        """The optimisation levels at which the model runs."""
        return [level for level in self._levels if level != "off"]

    def results(self, level: str, position: int) -> list[np.ndarray]:
        """A norm's results at an optimisation level, one per iteration."""
        return self._levels[level][position]

    def drifts(self, position: int) -> bool:
        """Whether the norm's input may differ between the optimised and the unoptimised run by more than rounding.

        True if the model draws random numbers, or if the optimiser broke a norm before this one.
        """
        return self.random or any(c.report.blame == "optimiser" for c in self._cases[:position])

    def alone(self, case: Case) -> Measure:
        """Error of the unoptimised norm run as a model of its own, on inputs of the types that the file gives."""
        ran = []
        for feeds in case.feeds:
            part = subgraph_model(self.model, case.norm, case.norm.nodes, feeds)
            ran += ort.Session(part, "off").run([case.norm.y], cast_feeds(part, feeds))
        return worst(map(case.oracle.runtime_error, case.feeds, ran))

    def drift(self, case: Case, position: int, level: str) -> list[np.ndarray | float]:
        """Allowed difference of an optimised result, per iteration, for changes upstream of the norm.

        Two terms, each with the margin of `allowed_change`. Optimising the nodes before the norm changes its input,
        and with it the float64 result. And a runtime that keeps half types in float32 between nodes rounds a value
        only where it is tapped, so the taps change results even without optimisation.
        """
        if (level, position) not in self._inputs:
            # this input alone: tapping the inputs of the norms before it would stop their fusions, which change it
            tap = Tap(case.norm.scope, case.norm.x, copied=True)
            self._inputs[level, position] = self._tapped(level, [position], [tap])[position]
        allowed = []
        unseen, inputs_ = self._levels["off"][position], self._inputs[level, position]
        for feeds, seen, plain, x in zip(case.feeds, case.results, unseen, inputs_, strict=True):
            looking = allowed_change(seen, plain) + case.oracle.carried(feeds)
            if case.norm.x in feeds and x.shape == feeds[case.norm.x].shape:
                looking = looking + allowed_change(
                    case.oracle.graph_result({**feeds, case.norm.x: x}), case.oracle.graph_result(feeds)
                )
            allowed.append(looking)
        return allowed

    def became(self, norm: Norm, level: str) -> tuple[str, bool]:
        """The operator that the optimiser makes of a norm, and whether it is the same with the result tapped."""
        if level not in self._dumps:
            taps = [Tap(c.norm.scope, c.norm.y, copied=False) for c in self._cases if c.feeds]
            exposed, _ = expose(self.model, taps)
            self._dumps[level] = [makers(ort.optimised(m, level, self.weights)) for m in (self.model, exposed)]
        plain, tapped = (fused_into(made, norm) for made in self._dumps[level])
        return plain or tapped, plain in ("", tapped)


def _draws(scope: Scope, node: onnx.NodeProto) -> bool:
    """Whether a node draws random numbers, so that two runs may differ."""
    if op(node) == "Dropout" and len(node.input) > 2 and node.input[2]:
        training = scope.constant(node.input[2])
        return training is None or bool(training.any())
    return node.op_type in _RANDOM


def _iterations(value: np.ndarray, levels: int) -> list[np.ndarray]:
    """Split a tapped value into iterations; its leading `levels` dimensions are those of the loops around it."""
    if not levels:
        return [value]
    inner = value.shape[levels:]
    return list(value.reshape(-1, *inner)) if value.size else []


def _has_rows(feeds: dict[str, np.ndarray], norm: Norm) -> bool:
    return feeds[norm.x].size > 0 if norm.x in feeds else any(value.size for value in feeds.values())


def _sample_indices(count: int) -> list[int]:
    """At most _ITERATIONS indices out of range(count), evenly spaced, the first and the last among them."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, _ITERATIONS))}) if count else []
