"""The whole model at every optimisation level, and what its norms are to be blamed for."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from onnx_export import ort
from onnx_export.validation import inputs
from onnx_export.validation.bench import Bench, fed, made_by, makers, piece
from onnx_export.validation.graph import Scope, boundary, op, scopes
from onnx_export.validation.judge import BROKEN, MOST, Measure, Oracle, Rows, moved, worst
from onnx_export.validation.norm import Norm
from onnx_export.validation.report import Finding, NormReport
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
        Their feeds are set here, their verdicts by `judge`.
    file : str
        Of inputs, empty for none.
    sizes : inputs.Sizes
    seed : int
        For the inputs that the file lacks.

    Attributes
    ----------
    trouble : str
        Optimisation levels at which the model does not run, and why; empty when there are none.

    Raises
    ------
    inputs.MissingInput, model_io.Unreadable, ort.CannotRun
        If there is nothing to judge.
    """

    def __init__(self, model, cases: list[Case], file: str, sizes: inputs.Sizes, seed: int) -> None:
        self._model, self._cases = model, cases
        main = next(iter(scopes(model)))
        stored = {tensor.name for tensor in model.graph.initializer}
        wanted = [value.name for value in model.graph.input if value.name not in stored]
        given = inputs.read(file, wanted) if file else {}
        self._feeds = inputs.complete(main, given, sizes, seed)
        self._made_up = [name for name in wanted if name not in given]
        self._random = any(_draws(scope, node) for scope in scopes(model) for node in scope.nodes)
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
            session = ort.Session(self._model, "off")
        except ort.CannotRun as error:
            raise ort.CannotRun(f"onnxruntime does not load the model: {error}") from error
        try:
            session.run([], self._feeds)
        except ort.CannotRun as error:
            made_up = f"; made up were {self._made_up}, supply them with --input" if self._made_up else ""
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
        exposed, names = expose(self._model, list(taps.values()))
        values = ort.Session(exposed, "off").run(names, self._feeds) if names else []
        by_key = dict(zip(taps, values, strict=True))
        for case, needed in wanted:
            scope = case.norm.scope
            levels = Tap(scope, "", True).levels
            stacked = {name: _iterations(by_key[id(scope), name], levels) for name in needed}
            count = min((len(values) for values in stacked.values()), default=0)
            case.feeds = [{name: values[i] for name, values in stacked.items()} for i in _spread(count)]
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
        exposed, names = expose(self._model, taps)
        values = ort.Session(exposed, level).run(names, self._feeds) if names else []
        result = {}
        for index, tap, value in zip(which, taps, values, strict=True):
            stacked = _iterations(value, tap.levels)
            result[index] = [stacked[i] for i in _spread(len(stacked))]
        return result

    def judge(self, position: int) -> list[Finding]:
        """Set the verdict of one case that has feeds; lints of the values seen."""
        case = self._cases[position]
        norm, said, feeds = case.norm, case.report, case.feeds
        case.oracle = Oracle(norm, piece(self._model, norm, norm.nodes, feeds[0]))
        made = {level: self._became(norm, level)[0] for level in self._levels if level != "off"}
        case.bench = Bench(self._model, norm, case.producers, case.oracle, feeds, made)
        rows = [case.oracle.rows(f) for f in feeds]
        said.conditioning = max(float(np.max(r.conditioning, initial=0.0)) for r in rows)
        said.verdict = "ok"
        self._judge_file(case)
        if said.verdict == "ok":
            self._judge_kernel(case)
        for level in made:
            if said.verdict == "ok":
                self._judge_optimised(case, position, level)
        return [*_finite_lint(norm, rows), *_range_lint(norm, rows)]

    def _judge_file(self, case: Case) -> None:
        """G against C."""
        norm, said = case.norm, case.report
        if norm.near_miss and not norm.claimed:
            return
        error = worst(map(case.oracle.file_error, case.feeds))
        if error.ratio > 1:
            settle(said, error, "wrong", "file")
            why = norm.near_miss or "its nodes compute another function"
            said.detail = f"the file does not compute the layer norm it claims: {why}"

    def _judge_kernel(self, case: Case) -> None:
        """The unoptimised runtime against G, result and inputs from one run."""
        said = case.report
        error = worst(map(case.oracle.runtime_error, case.feeds, case.results))
        if error.ratio > 1 and self._alone(case).ratio <= 1:  # then x was not what the tap says: not rounded yet
            error = worst(
                map(case.oracle.runtime_error, case.feeds, case.results, map(case.oracle.carried, case.feeds))
            )
        said.error, said.bound = error.error, error.bound
        said.points += [[c, min(r, MOST), "run"] for c, r in error.points]
        if not error.judged:
            said.verdict = "not exercised"
            said.detail = "NaN or Inf in every row, or by the formula itself: there is nothing to judge"
        if error.ratio > 1:
            blame = culprit(self._model, case, case.feeds)
            settle(said, error, "wrong" if error.ratio > BROKEN else "inaccurate", blame)
            said.detail = f"{_WHO[blame].format(norm=case.norm)}: {amount(error)}"

    def _alone(self, case: Case) -> Measure:
        """The unoptimised norm by itself, fed values that are of the types the file gives them."""
        ran = []
        for feeds in case.feeds:
            part = piece(self._model, case.norm, case.norm.nodes, feeds)
            ran += ort.Session(part, "off").run([case.norm.y], fed(part, feeds))
        return worst(map(case.oracle.runtime_error, case.feeds, ran))

    def _judge_optimised(self, case: Case, position: int, level: str) -> None:
        """The optimised runtime against G, for a norm that is right without optimisation."""
        said, results = case.report, self._levels[level][position]
        said.became, faithful = self._became(case.norm, level)
        alone = case.bench.tapped(level)
        error = alone
        if faithful:
            whole = worst(map(case.oracle.runtime_error, case.feeds, results))
            if whole.ratio <= 1:
                return
            # not reproduced in isolation: its input has drifted, or the rest of the graph matters
            drifted = self._random or any(c.report.blame == "optimiser" for c in self._cases[:position])
            if alone.ratio <= 1 and not drifted:
                drift = self._drift(case, position, level)
                error = worst(map(case.oracle.runtime_error, case.feeds, results, drift))
        if error.ratio > 1:
            settle(said, error, "wrong", "optimiser")
            said.points += [[c, min(r, MOST), f"run, optimisation {level}"] for c, r in error.points]
            said.detail = f"right without optimisation, wrong with {level!r}, which makes it {said.became}"

    def _drift(self, case: Case, position: int, level: str) -> list[np.ndarray | float]:
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
            looking = moved(seen, plain) + case.oracle.carried(feeds)
            if case.norm.x in feeds and x.shape == feeds[case.norm.x].shape:
                looking = looking + moved(case.oracle.own({**feeds, case.norm.x: x}), case.oracle.own(feeds))
            allowed.append(looking)
        return allowed

    def _became(self, norm: Norm, level: str) -> tuple[str, bool]:
        """What the optimiser makes of a norm, and whether tapping its result leaves it at that."""
        if level not in self._dumps:
            taps = [Tap(c.norm.scope, c.norm.y, copied=False) for c in self._cases if c.feeds]
            exposed, _ = expose(self._model, taps)
            self._dumps[level] = [makers(ort.optimised(m, level)) for m in (self._model, exposed)]
        plain, tapped = (made_by(made, norm) for made in self._dumps[level])
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


def _spread(count: int) -> list[int]:
    """At most _ITERATIONS indices, first and last among them."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, _ITERATIONS))}) if count else []


def settle(said: NormReport, measure: Measure, verdict: str, blame: str) -> None:
    """Write down a verdict and the error it rests on."""
    said.verdict, said.blame = verdict, blame
    said.error, said.bound = measure.error, measure.bound


_WHO = {
    "file": "the file's formula ({norm.variance} variance) in its own precision, on any runtime",
    "kernel": "onnxruntime without optimisation",
}


def culprit(model: onnx.ModelProto, case: Case, tried: list[dict[str, np.ndarray]]) -> str:
    """Tell a poor kernel from a formula that no kernel computes well in its precision."""
    if not case.norm.operator:
        part = piece(model, case.norm, case.norm.nodes, tried[0])
        try:
            with np.errstate(all="ignore"):
                evaluator = ReferenceEvaluator(part)
                plain = [evaluator.run(None, fed(part, feeds))[0] for feeds in tried]
            if worst(map(case.oracle.runtime_error, tried, plain)).ratio > 1:
                return "file"
        except Exception:  # onnx's evaluator does not know every operator; then the runtime is all we know
            pass
    return "kernel"


def amount(measure: Measure) -> str:
    """An error in words."""
    return "NaN for finite input" if np.isnan(measure.error) else f"{measure.ratio:.3g} times the bound"


def _finite_lint(norm: Norm, rows: list[Rows]) -> list[Finding]:
    """Rows that cannot be right, whatever the norm does; they are left out of the verdict."""
    spoiled = sum(int(np.sum(~np.isfinite(r.largest))) for r in rows)
    if not spoiled:
        return []
    message = f"{spoiled} rows with NaN or Inf reached it and were not judged"
    return [Finding("warning", "non-finite", message, norm.name)]


def _range_lint(norm: Norm, rows: list[Rows]) -> list[Finding]:
    """Squares of the range seen that overflow float16; onnxruntime's CPU hides it by computing in float32."""
    if norm.compute_dtype != onnx.TensorProto.FLOAT16 or norm.operator:
        return []
    # no deviation exceeds twice the largest element, nor the root of the sum of squared deviations
    largest = max(float(np.max(r.largest, initial=0.0)) for r in rows)
    spread = max(float(np.sqrt(np.max(r.variance, initial=0.0) * r.n)) for r in rows)
    square = min(2 * largest, spread) ** 2
    if square <= float(np.finfo(np.float16).max):
        return []
    message = f"squares up to {square:.3g} overflow float16 where it is computed in float16"
    return [Finding("warning", "float16-overflow", message, norm.name)]
