"""Run the whole model at every optimisation level and collect the inputs and results of each norm."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import onnx

from cnorm.text import clip
from onnx_export import ort
from onnx_export.graph.scope import Scope, boundary, op, scopes
from onnx_export.validation import inputs, sampling
from onnx_export.validation.findings import Finding, NormReport
from onnx_export.validation.isolated import Isolated, cast_feeds, fused_into, makers, subgraph_model
from onnx_export.validation.judge import JudgedRows, Measure, Oracle, allowed_change, worst
from onnx_export.validation.norm import Norm
from onnx_export.validation.options import Options
from onnx_export.validation.taps import Tap, expose, has_halves

_RANDOM = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli"}
)
_ITERATIONS = 16  # at most so many iterations of a loop are judged for each norm in it


@dataclass(frozen=True, eq=False)
class Candidate:
    """One norm to examine, its report and the additions that compute its input."""

    norm: Norm
    report: NormReport
    producers: list[onnx.NodeProto]


@dataclass(frozen=True, eq=False)
class Case:
    """One norm that rows reached, with everything that is needed to judge it.

    Attributes
    ----------
    norm, report, producers
        As in `Candidate`.
    position : int
        Its place among the candidates.
    feeds : list of dict
        Tapped values that enter the norm and the producers, one dict per iteration of the loops around it.
    results : list of ndarray
        The norm's result for each of the feeds, from the same run.
    oracle : Oracle
    isolated : Isolated
    """

    norm: Norm
    report: NormReport
    producers: list[onnx.NodeProto]
    position: int
    feeds: list[dict[str, np.ndarray]]
    results: list[np.ndarray]
    oracle: Oracle
    isolated: Isolated

    @property
    def rows(self) -> list[JudgedRows]:
        """Its rows, one `JudgedRows` per iteration."""
        return [self.oracle.rows(feeds) for feeds in self.feeds]


class Run:
    """The model's runs: unoptimised with inputs and results of all norms tapped, and at each level with results tapped.

    Added outputs disable fusions, so the optimised runs expose the results of norms only.

    Parameters
    ----------
    model : onnx.ModelProto
    weights : dict of str to ndarray
        Its large initialisers (`weights.set_aside`).
    candidates : list of Candidate
        The reports of those that no rows reach get the reason.
    options : Options

    Attributes
    ----------
    model, weights
    random : bool
        Whether two runs of the model may differ.
    generated : list of str
        Names of the generated inputs.
    notes : list of Finding
        About norms of which some rows only are judged.
    plain : dict of str to ndarray
        Outputs of the unoptimised model; empty where those of the run with taps may differ from them.
    failed : dict of str to str
        Why the model does not run, for each optimisation level at which it does not.

    Raises
    ------
    inputs.MissingInput, model_io.Unreadable, ort.CannotRun
        If there is nothing to judge.
    """

    def __init__(self, model, weights, candidates: list[Candidate], options: Options) -> None:
        self.model, self.weights, self._candidates = model, weights, candidates
        self._reached: dict[int, tuple[list[dict[str, np.ndarray]], list[np.ndarray]]] = {}  # feeds and results
        self._kept: dict[int, tuple[tuple[int, ...], sampling.Indices]] = {}  # shape of x, indices that are judged
        self.notes: list[Finding] = []
        main = next(iter(scopes(model)))
        stored = {tensor.name for tensor in model.graph.initializer}
        wanted = [value.name for value in model.graph.input if value.name not in stored]
        bound = [tensor.name for tensor in model.graph.initializer if tensor.doc_string == inputs.BOUND]
        given = inputs.read(options.input, [*wanted, *bound]) if options.input else {}
        self._feeds = inputs.complete(main, given, options)
        self.generated = [name for name in wanted if name not in given]
        self.random = any(_draws(scope, node) for scope in scopes(model) for node in scope.nodes)
        self.plain: dict[str, np.ndarray] = {}
        self._exact = not has_halves(model)
        self._tap()
        if not candidates:  # else the tapped run shows whether the model runs
            self.session(model, "off").run([value.name for value in model.graph.output], self._feeds)
        tapped = {index: results for index, (_, results) in self._reached.items()}
        self._levels = {"off": tapped if self._exact and not self.random else self._results("off")}
        self._inputs: dict[tuple[str, int], list[np.ndarray]] = {}
        self._dumps: dict[str, list[dict[str, onnx.NodeProto]]] = {}
        self.failed: dict[str, str] = {}
        for level in ("basic", "all"):
            try:
                self._levels[level] = self._results(level)
                self._dumps[level] = self._dump(level)  # also where the taps keep the optimiser from what it cannot run
            except ort.CannotRun as error:
                self._levels.pop(level, None)
                self.failed[level] = str(error)

    @property
    def trouble(self) -> str:
        """The last optimisation level at which the model does not run, and why; empty when there is none."""
        messages = [f"onnxruntime does not run the model with optimisation {k!r}: {e}" for k, e in self.failed.items()]
        return messages[-1] if messages else ""

    def runs(self, level: str, disabled: tuple[str, ...]) -> bool:
        """Whether the model runs at a level without these optimisers."""
        names = [value.name for value in self.model.graph.output]
        try:
            ort.Session(self.model, level, self.weights, disabled=disabled).run(names, self._feeds)
        except ort.CannotRun:
            return False
        return True

    def fails_alone(self, case: Case, level: str) -> bool:
        """Whether onnxruntime does not run the norm as a model of its own at this level either."""
        part = subgraph_model(case.norm, case.norm.nodes, case.feeds[0])
        try:
            ort.Session(part, level).run([case.norm.y], cast_feeds(part, case.feeds[0]))
        except ort.CannotRun:
            return True
        return False

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
        everything = range(len(self._candidates))
        try:
            self._try_tap(everything)
        except ort.CannotRun as error:
            self._run_plainly()
            inner = [index for index in everything if self._candidates[index].norm.scope.path]
            for index in inner:
                self._candidates[index].report.detail = f"its values cannot be tapped: {error}"
            self._try_tap([index for index in everything if index not in inner])

    def _run_plainly(self) -> None:
        """Run the model without taps, to raise an error that is the model's own and not due to the taps."""
        try:
            session = self.session(self.model, "off")
        except ort.CannotRun as error:
            raise ort.CannotRun(f"onnxruntime does not load the model: {error}") from error
        try:
            session.run([], self._feeds)
        except ort.CannotRun as error:
            advice = "other sizes may do (--batch, --dim, --size NAME=N), or supply them with --input"
            advice = f"; generated inputs: {self.generated}: {advice}" if self.generated else ""
            raise ort.CannotRun(f"onnxruntime does not run the model: {clip(str(error), 300)}{advice}") from error

    def _try_tap(self, which: Iterable[int]) -> None:
        """Run unoptimised and store, per norm, the values that enter it and its producers, and its result."""
        taps: dict[int, dict[str, Tap]] = {}
        for index in which:
            norm, report = self._candidates[index].norm, self._candidates[index].report
            if norm.quantised:
                report.detail = "its statistics are quantised: its result is not held to that of the float norm"
                continue
            wide = [*norm.nodes, *self._candidates[index].producers]
            names = dict.fromkeys([*boundary(norm.scope, norm.nodes), *boundary(norm.scope, wide), norm.y])
            tap = {name: Tap(norm.scope, name, copied=True) for name in names}
            report.detail = next(filter(None, (t.obstacle for t in tap.values())), "")
            if not report.detail:
                taps[index] = tap
        sizes = {index: sum(self._bytes(each) for each in tap.values()) for index, tap in taps.items()}
        for group in sampling.groups(sizes):
            together = {(id(tap.scope), name): tap for index in group for name, tap in taps[index].items()}
            exposed, names = expose(self.model, list(together.values()))
            outputs = [value.name for value in self.model.graph.output] if self._exact and not self.plain else []
            values = self.session(exposed, "off").run([*names, *outputs], self._feeds)
            self.plain |= dict(zip(outputs, values[len(names) :], strict=True))
            by_key = dict(zip(together, values[: len(names)], strict=True))
            for index in group:
                values = {name: by_key[id(tap.scope), name] for name, tap in taps[index].items()}
                self._keep(index, values)

    def _bytes(self, tap: Tap) -> int:
        """About the size of a value; one that is not known is taken as large where an input is."""
        shape = tap.scope.shape(tap.value)
        if shape is not None and None not in shape:
            return 4 * int(np.prod(shape))
        return 32 * max((value.size for value in self._feeds.values()), default=0)

    def _keep(self, index: int, values: dict[str, np.ndarray]) -> None:
        """Store the tapped values of a norm: of some iterations, and some rows where they are large."""
        norm, report = self._candidates[index].norm, self._candidates[index].report
        levels = Tap(norm.scope, "", True).levels
        stacked = {name: _iterations(value, levels) for name, value in values.items()}
        count = min((len(values) for values in stacked.values()), default=0)
        feeds = [{name: values[i] for name, values in stacked.items()} for i in _sample_indices(count)]
        if not norm.scope.path and norm.x in values:
            feeds = [self._sampled(index, values)]
        results = [each.pop(norm.y) for each in feeds]
        stored = norm.scope.constant(norm.x) is not None
        if stored or any(_has_rows(each, norm) for each in feeds):
            self._reached[index] = feeds, results
        else:
            report.detail = "no rows reached it: a branch not taken, a loop not entered, or an empty input"

    def _sampled(self, index: int, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The values of a norm, of some rows only if they are large and the rows are independent of one another."""
        norm, x = self._candidates[index].norm, values[self._candidates[index].norm.x]
        kept = sampling.rows_to_keep(norm, x, len(self._candidates))
        names = [name for node in (*norm.nodes, *self._candidates[index].producers) for name in node.input if name]
        fits = values[norm.y].shape == x.shape
        if not kept or not fits or not sampling.independent(norm, values, kept, names):
            return dict(values)
        self._kept[index] = x.shape, kept
        feeds = sampling.sampled(norm, values, kept, names)
        rows, judged = (norm.formula.layout(v.shape, norm.axes, norm.nodes[0])[0] for v in (x, feeds[norm.x]))
        self.notes.append(Finding("note", "sizes", f"{judged} of its {rows} rows were judged", norm.name))
        return feeds | {norm.y: sampling.result_of(values[norm.y], x.shape, kept)}

    def _results(self, level: str) -> dict[int, list[np.ndarray]]:
        """The results, at one level, of each norm that rows reached, by position."""
        taps = dict(zip(self._reached, self._result_taps(), strict=True))
        found: dict[int, list[np.ndarray]] = {}
        for group in sampling.groups({index: self._bytes(tap) for index, tap in taps.items()}):
            found |= self._tapped(level, group, [taps[index] for index in group])
        return found

    def _result_taps(self) -> list[Tap]:
        norms = [self._candidates[index].norm for index in self._reached]
        return [Tap(norm.scope, norm.y, copied=False) for norm in norms]

    def _tapped(self, level: str, which: list[int], taps: list[Tap]) -> dict[int, list[np.ndarray]]:
        """Run with these taps; the values of each, one per judged iteration, under its number in `which`."""
        exposed, names = expose(self.model, taps)
        values = self.session(exposed, level).run(names, self._feeds) if names else []
        result = {}
        for index, tap, value in zip(which, taps, values, strict=True):
            stacked = _iterations(value, tap.levels)
            result[index] = [stacked[i] for i in _sample_indices(len(stacked))]
            if index in self._kept:
                result[index] = [sampling.result_of(value, *self._kept[index])]
        return result

    @property
    def reached(self) -> list[int]:
        """Positions of the candidates that rows reached."""
        return list(self._reached)

    def case(self, position: int) -> Case:
        """What is needed to judge a candidate that rows reached."""
        candidate, (feeds, results) = self._candidates[position], self._reached[position]
        norm, producers = candidate.norm, candidate.producers
        oracle = Oracle(norm, subgraph_model(norm, norm.nodes, feeds[0]))
        made = {level: self.became(norm, level)[0] for level in self.optimised}
        isolated = Isolated(norm, producers, oracle, feeds, made)
        return Case(norm, candidate.report, producers, position, feeds, results, oracle, isolated)

    @property
    def optimised(self) -> list[str]:
        """The optimisation levels at which the model runs."""
        return [level for level in self._levels if level != "off"]

    def results(self, level: str, case: Case) -> list[np.ndarray]:
        """A norm's results at an optimisation level, one per iteration."""
        return self._levels[level][case.position]

    def drifts(self, case: Case) -> bool:
        """Whether the norm's input may differ between the optimised and the unoptimised run by more than rounding.

        True if the model draws random numbers, or if the optimiser broke a norm before this one.
        """
        return self.random or any(c.report.blame == "optimiser" for c in self._candidates[: case.position])

    def alone(self, case: Case) -> Measure:
        """Error of the unoptimised norm run as a model of its own, on inputs of the types that the file gives."""
        ran = []
        for feeds in case.feeds:
            part = subgraph_model(case.norm, case.norm.nodes, feeds)
            ran += ort.Session(part, "off").run([case.norm.y], cast_feeds(part, feeds))
        return worst(map(case.oracle.runtime_error, case.feeds, ran))

    def drift(self, case: Case, level: str) -> list[np.ndarray | float]:
        """Allowed difference of an optimised result, per iteration, for changes upstream of the norm.

        Two terms, each with the margin of `allowed_change`. Optimising the nodes before the norm changes its input,
        and with it the float64 result. And a runtime that keeps half types in float32 between nodes rounds a value
        only where it is tapped, so the taps change results even without optimisation.
        """
        position = case.position
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

    def _dump(self, level: str) -> list[dict[str, onnx.NodeProto]]:
        """The producers of values in the optimised graph, without and with the results of norms as outputs."""
        models = (self.model, expose(self.model, self._result_taps())[0]) if self._reached else ()
        return [makers(ort.optimised(model, level, self.weights)) for model in models]

    def became(self, norm: Norm, level: str) -> tuple[str, bool]:
        """The operator that the optimiser makes of a norm, and whether it is the same with the result tapped."""
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
