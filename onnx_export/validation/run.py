"""The whole model at every optimisation level, and what each norm was fed and made of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx

from onnx_export import ort
from onnx_export.validation import inputs
from onnx_export.validation.bench import Bench, cast_feeds, fused_into, makers, subgraph_model
from onnx_export.validation.graph import Scope, boundary, op, scopes
from onnx_export.validation.judge import Measure, Oracle, Rows, allowed_change, worst
from onnx_export.validation.norm import Norm
from onnx_export.validation.report import NormReport
from onnx_export.validation.taps import Tap, expose

_RANDOM = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli"}
)
_ITERATIONS = 16  # of a loop, judged for each norm in it


@dataclass(eq=False)
class Case:
    """One norm under examination.

    Attributes
    ----------
    norm, report
    producers : list of onnx.NodeProto
        The additions before it.
    feeds : list of dict
        Tapped values at its boundary and that of the producers, one dict per iteration; none if it was not
        exercised.
    results : list of ndarray
        What the norm made of each of the feeds, in the same run.
    oracle, bench
        Set once it is judged.
    """

    norm: Norm
    report: NormReport
    producers: list[onnx.NodeProto]
    feeds: list[dict[str, np.ndarray]] = field(default_factory=list)
    results: list[np.ndarray] = field(default_factory=list)
    oracle: Oracle = field(init=False)
    bench: Bench = field(init=False)


class Run:
    """The model run unoptimised with its norms' inputs and results tapped, and at every level with their results alone.

    Parameters
    ----------
    model : onnx.ModelProto
    cases : list of Case
        Their feeds are set here.
    file : str
        Of inputs, empty for none.
    sizes : inputs.Sizes
    seed : int
        For the inputs that the file lacks.

    Attributes
    ----------
    model : onnx.ModelProto
    random : bool
        Whether two runs of the model may differ.
    made_up : list of str
        Inputs that were generated.
    trouble : str
        Optimisation levels at which the model does not run, and why; empty when there are none.

    Raises
    ------
    inputs.MissingInput, model_io.Unreadable, ort.CannotRun
        If there is nothing to judge.
    """

    def __init__(self, model, cases: list[Case], file: str, sizes: inputs.Sizes, seed: int) -> None:
        self.model, self._cases = model, cases
        main = next(iter(scopes(model)))
        stored = {tensor.name for tensor in model.graph.initializer}
        wanted = [value.name for value in model.graph.input if value.name not in stored]
        given = inputs.read(file, wanted) if file else {}
        self._feeds = inputs.complete(main, given, sizes, seed)
        self.made_up = [name for name in wanted if name not in given]
        self.random = any(_draws(scope, node) for scope in scopes(model) for node in scope.nodes)
        self._tap()
        self._levels = {"off": self._results("off")}
        self.trouble = ""
        for level in ("basic", "all"):
            try:
                self._levels[level] = self._results(level)
            except ort.CannotRun as error:
                self.trouble = f"onnxruntime does not run the model with optimisation {level!r}: {error}"
        self._inputs: dict[str, dict[int, list[np.ndarray]]] = {}
        self._dumps: dict[str, list[dict[str, onnx.NodeProto]]] = {}

    @property
    def finite_inputs(self) -> bool:
        """Whether no input of the model holds NaN or Inf."""
        return all(np.isfinite(v.astype(np.float64)).all() for v in self._feeds.values() if v.dtype.kind in "fV")

    @property
    def feeds(self) -> dict[str, np.ndarray]:
        """The inputs of the model, read or made up."""
        return self._feeds

    def _tap(self) -> None:
        """Run unoptimised with every norm's result and boundary, and that of the additions before it, exposed."""
        try:
            self._try_tap(self._cases)
        except ort.CannotRun as error:
            self._run_plainly()
            inner = [case for case in self._cases if case.norm.scope.path]
            for case in inner:
                case.report.detail = f"its values cannot be tapped: {error}"
            self._try_tap([case for case in self._cases if not case.norm.scope.path])

    def _run_plainly(self) -> None:
        """Run the model as it is; where that fails, tapping is not to blame."""
        try:
            session = ort.Session(self.model, "off")
        except ort.CannotRun as error:
            raise ort.CannotRun(f"onnxruntime does not load the model: {error}") from error
        try:
            session.run([], self._feeds)
        except ort.CannotRun as error:
            made_up = f"; made up were {self.made_up}, supply them with --input" if self.made_up else ""
            raise ort.CannotRun(f"onnxruntime does not run the model: {error}{made_up}") from error

    def _try_tap(self, cases: list[Case]) -> None:
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
        values = ort.Session(exposed, "off").run(names, self._feeds) if names else []
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
        """The result of each norm that was reached, by position."""
        reached = [i for i, case in enumerate(self._cases) if case.feeds]
        taps = [Tap(self._cases[i].norm.scope, self._cases[i].norm.y, copied=False) for i in reached]
        return self._tapped(level, reached, taps)

    def _tapped(self, level: str, which: list[int], taps: list[Tap]) -> dict[int, list[np.ndarray]]:
        exposed, names = expose(self.model, taps)
        values = ort.Session(exposed, level).run(names, self._feeds) if names else []
        result = {}
        for index, tap, value in zip(which, taps, values, strict=True):
            stacked = _iterations(value, tap.levels)
            result[index] = [stacked[i] for i in _sample_indices(len(stacked))]
        return result

    def prepare(self, position: int) -> list[Rows]:
        """Give a case that has feeds its oracle and its bench; the rows it was fed."""
        case = self._cases[position]
        norm, feeds = case.norm, case.feeds
        case.oracle = Oracle(norm, subgraph_model(self.model, norm, norm.nodes, feeds[0]))
        made = {level: self.became(norm, level)[0] for level in self.optimised}
        case.bench = Bench(self.model, norm, case.producers, case.oracle, feeds, made)
        return [case.oracle.rows(f) for f in feeds]

    @property
    def optimised(self) -> list[str]:
        """The optimisation levels at which the model runs."""
        return [level for level in self._levels if level != "off"]

    def results(self, level: str, position: int) -> list[np.ndarray]:
        """What a norm made of each of its feeds at an optimisation level."""
        return self._levels[level][position]

    def drifts(self, position: int) -> bool:
        """Whether the input of a norm in an optimised run may be another than in the unoptimised one."""
        return self.random or any(c.report.blame == "optimiser" for c in self._cases[:position])

    def alone(self, case: Case) -> Measure:
        """The unoptimised norm by itself, fed values that are of the types the file gives them."""
        ran = []
        for feeds in case.feeds:
            part = subgraph_model(self.model, case.norm, case.norm.nodes, feeds)
            ran += ort.Session(part, "off").run([case.norm.y], cast_feeds(part, feeds))
        return worst(map(case.oracle.runtime_error, case.feeds, ran))

    def drift(self, case: Case, position: int, level: str) -> list[np.ndarray | float]:
        """How far an optimised result may be off for what is upstream of the norm; with a margin.

        What the optimiser does there moves the norm's input, and so the exact result. And a runtime that keeps half
        types wider between nodes rounds where it is looked at: that moves results without optimisation, too.
        """
        if level not in self._inputs:
            reached = [i for i, c in enumerate(self._cases) if c.feeds]
            taps = [Tap(self._cases[i].norm.scope, self._cases[i].norm.x, copied=True) for i in reached]
            self._inputs[level] = self._tapped(level, reached, taps)
        allowed = []
        unseen, inputs_ = self._levels["off"][position], self._inputs[level][position]
        for feeds, seen, plain, x in zip(case.feeds, case.results, unseen, inputs_, strict=True):
            looking = allowed_change(seen, plain) + case.oracle.carried(feeds)
            if case.norm.x in feeds and x.shape == feeds[case.norm.x].shape:
                looking = looking + allowed_change(
                    case.oracle.graph_result({**feeds, case.norm.x: x}), case.oracle.graph_result(feeds)
                )
            allowed.append(looking)
        return allowed

    def became(self, norm: Norm, level: str) -> tuple[str, bool]:
        """What the optimiser makes of a norm, and whether tapping its result leaves it at that."""
        if level not in self._dumps:
            taps = [Tap(c.norm.scope, c.norm.y, copied=False) for c in self._cases if c.feeds]
            exposed, _ = expose(self.model, taps)
            self._dumps[level] = [makers(ort.optimised(m, level)) for m in (self.model, exposed)]
        plain, tapped = (fused_into(made, norm) for made in self._dumps[level])
        return plain or tapped, plain in ("", tapped)


def _draws(scope: Scope, node: onnx.NodeProto) -> bool:
    """Whether two runs of a node may differ."""
    if op(node) == "Dropout" and len(node.input) > 2 and node.input[2]:
        training = scope.constant(node.input[2])
        return training is None or bool(training.any())
    return node.op_type in _RANDOM


def _iterations(value: np.ndarray, levels: int) -> list[np.ndarray]:
    """The values of each iteration of the loops round a tap."""
    if not levels:
        return [value]
    inner = value.shape[levels:]
    return list(value.reshape(-1, *inner)) if value.size else []


def _has_rows(feeds: dict[str, np.ndarray], norm: Norm) -> bool:
    return feeds[norm.x].size > 0 if norm.x in feeds else any(value.size for value in feeds.values())


def _sample_indices(count: int) -> list[int]:
    """At most _ITERATIONS indices, first and last among them."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, _ITERATIONS))}) if count else []
