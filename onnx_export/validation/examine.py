"""The whole examination of one file, in order: read, find, lint, run, judge, stress.

It runs in a child process (`child`), which is why it takes and reports plain data. After each stage the
report so far is handed over, so that a crash of the runtime loses no more than the stage it happened in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx.reference import ReferenceEvaluator

from . import inputs, lint, runtime, stress
from .bench import Bench, fed, made_by, makers, piece
from .graph import Scope, boundary, inline, scopes
from .judge import BROKEN, Measure, Oracle, type_name, worst
from .patterns import Norm, find
from .report import Finding, NormReport, ValidationReport
from .safe_load import (
    Limits,
    Refused,
    Unreadable,
    attach_external_data,
    contradiction,
    model_nodes,
    parse,
    read,
)
from .taps import Tap, expose

_RANDOM = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli"}
)
_ITERATIONS = 16  # of a loop, judged for each norm in it


@dataclass(frozen=True)
class Options:
    """What a user can choose; see `validation.validate`."""

    input: str = ""
    batch: int = 1
    dim: int = 8
    named: tuple[tuple[str, int], ...] = ()
    seed: int = 0
    external_data: bool = False
    data_root: str = ""
    fix: str = ""
    infer_shapes: bool = True
    limits: Limits = field(default_factory=Limits)


@dataclass
class _Case:
    """One norm under examination."""

    norm: Norm
    report: NormReport
    producers: list[onnx.NodeProto]
    feeds: list[dict[str, np.ndarray]] = field(default_factory=list)  # of the boundary, one per iteration
    oracle: Oracle | None = None
    bench: Bench | None = None


def examine(path: str, options: Options, emit: Callable[[str, object], None]) -> ValidationReport:
    """Examine a file.

    Parameters
    ----------
    path : str
    options : Options
    emit : callable
        Called with ("stage", name), ("report", ValidationReport) and ("progress", (done, total)).
    """
    versions = {"onnx": onnx.__version__, "onnxruntime": onnxruntime.__version__}
    report = ValidationReport(str(path), versions=versions)
    emit("stage", "read")
    try:
        model = parse(read(path, options.limits), options.limits)
    except (Refused, Unreadable) as error:
        report.problem, report.refused = _clip(str(error)), isinstance(error, Refused)
        return report
    try:
        folder = Path(path).parent
        attach_external_data(model, folder, (options.data_root or folder) if options.external_data else None)
    except (Refused, Unreadable) as error:
        report.problem, report.refused = _clip(str(error)), isinstance(error, Refused)
    report.problem = report.problem or _clip(contradiction(model) or _foreign(model))

    emit("stage", "find")
    model, found = _find(model, options, report, emit)
    report.norms = [_describe(norm) for norm in found]
    report.findings += [*lint.lint_model(model), *(f for norm in found for f in lint.lint_norm(norm))]
    emit("report", report)
    if options.fix:
        report.fixed = ["wrote nothing: the file was not run, so nothing is proved"]
    if report.problem or not found:
        return report

    cases = [_Case(n, r, stress.producers(n)) for n, r in zip(found, report.norms, strict=True)]
    emit("stage", "run")
    try:
        run = _Run(model, cases, options)
    except (inputs.MissingInput, runtime.CannotRun, Unreadable) as error:
        report.problem = _clip(str(error))
        return report
    for done, case in enumerate(cases):
        emit("progress", (done, 2 * len(cases)))
        if case.feeds:
            run.judge(case, report)
    emit("report", report)

    emit("stage", "stress")
    runtime_faults: dict[str, str] = {}
    for done, case in enumerate(cases):
        emit("progress", (len(cases) + done, 2 * len(cases)))
        if case.feeds and not case.norm.near_miss and case.report.verdict == "ok":
            _stress(model, case, options, runtime_faults)
    for family, message in runtime_faults.items():
        report.findings.append(Finding("note", "runtime-limit", f"{family}: {message}"))
    if options.fix:
        from .repair import repair

        emit("stage", "fix")
        try:
            report.fixed = repair(Path(options.fix), model, cases)
        except OSError as error:
            report.problem = f"--fix: cannot write {options.fix}: {error.strerror}"
    return report


def _clip(text: str) -> str:
    """A length people read: names in a file can be of any."""
    return text if len(text) <= 500 else f"{text[:400]} ... {text[-90:]}"


def _foreign(model: onnx.ModelProto) -> str:
    local = {function.domain for function in model.functions}
    foreign = {node.domain for node in model_nodes(model)} - runtime.KNOWN_DOMAINS - local
    return f"needs operators of the domain {', '.join(map(repr, sorted(foreign)))}" if foreign else ""


def _find(model, options: Options, report: ValidationReport, emit) -> tuple[onnx.ModelProto, list[Norm]]:
    if not report.problem:
        model = inline(model)
    if options.infer_shapes:
        emit("stage", "shapes")
        try:
            model = onnx.shape_inference.infer_shapes(model, data_prop=True)
        except Exception as error:  # the C++ layer raises many kinds
            reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
            report.findings.append(Finding("note", "shapes", f"shapes could not be inferred: {reason}"))
        emit("stage", "find")
    return model, find(model)


def _describe(norm: Norm) -> NormReport:
    scope = " > ".join(filter(None, (norm.scope.label, norm.function and f"function {norm.function}")))
    return NormReport(
        norm.name,
        _clip(scope),
        norm.form,
        norm.formula,
        norm.variance,
        None if norm.axes is None else list(norm.axes),
        norm.eps,
        type_name(norm.eps_dtype),
        _clip(norm.scale),
        _clip(norm.bias),
        type_name(norm.compute_dtype),
        norm.near_miss,
    )


# ------------------------------------------------------------------------------------------- the whole model


class _Run:
    """The model run without optimisation, tapped, and with each optimisation, its norms' results tapped."""

    def __init__(self, model: onnx.ModelProto, cases: list[_Case], options: Options) -> None:
        self._model, self._cases = model, cases
        main = next(iter(scopes(model)))
        stored = {tensor.name for tensor in model.graph.initializer}
        wanted = [value.name for value in model.graph.input if value.name not in stored]
        given = inputs.read(options.input, wanted) if options.input else {}
        sizes = inputs.Sizes(options.batch, options.dim, options.named)
        self._feeds = inputs.complete(main, given, sizes, options.seed)
        self._made_up = [name for name in wanted if name not in given]
        self._random = any(node.op_type in _RANDOM for node in model_nodes(model))
        self._tap(main)
        self._levels = {level: self._results(level) for level in ("off", "basic", "all")}
        self._inputs: dict[str, dict[int, list[np.ndarray]]] = {}
        self._dumps: dict[str, list[dict[str, onnx.NodeProto]]] = {}

    def _tap(self, main: Scope) -> None:
        """Run unoptimised with the boundary of every norm and of the additions before it exposed."""
        try:
            self._try_tap(self._cases)
        except runtime.CannotRun as error:
            self._run_plainly()
            inner = [case for case in self._cases if case.norm.scope.path]
            for case in inner:
                case.report.detail = f"its values cannot be tapped: {error}"
            self._try_tap([case for case in self._cases if not case.norm.scope.path])

    def _run_plainly(self) -> None:
        """Run the model as it is; where that fails, tapping is not to blame."""
        try:
            session = runtime.Session(self._model, "off")
        except runtime.CannotRun as error:
            raise runtime.CannotRun(f"onnxruntime does not load the model: {error}") from error
        try:
            session.run([], self._feeds)
        except runtime.CannotRun as error:
            made_up = f"; made up were {self._made_up}, supply them with --input" if self._made_up else ""
            raise runtime.CannotRun(f"onnxruntime does not run the model: {error}{made_up}") from error

    def _try_tap(self, cases: list[_Case]) -> None:
        taps: dict[tuple[int, str], Tap] = {}
        wanted: list[tuple[_Case, list[str]]] = []
        for case in cases:
            scope = case.norm.scope
            names = dict.fromkeys(
                [*boundary(scope, case.norm.nodes), *boundary(scope, [*case.norm.nodes, *case.producers])]
            )
            tap = {name: Tap(scope, name, copied=True) for name in names}
            case.report.detail = next(filter(None, (t.obstacle for t in tap.values())), "")
            if case.report.detail:
                continue
            taps |= {(id(scope), name): t for name, t in tap.items()}
            wanted.append((case, list(names)))
        exposed, names = expose(self._model, list(taps.values()))
        values = runtime.Session(exposed, "off").run(names, self._feeds) if names else []
        by_key = dict(zip(taps, values, strict=True))
        for case, needed in wanted:
            scope = case.norm.scope
            levels = Tap(scope, "", True).levels
            stacked = {name: _iterations(by_key[id(scope), name], levels) for name in needed}
            count = min((len(values) for values in stacked.values()), default=0)
            case.feeds = [{name: values[i] for name, values in stacked.items()} for i in _spread(count)]
            if count == 0:
                case.report.detail = (
                    "no rows reached it: a branch not taken, a loop not entered, or an empty input"
                )

    def _results(self, level: str) -> dict[int, list[np.ndarray]]:
        """The result of each norm that was reached, by position."""
        reached = [i for i, case in enumerate(self._cases) if case.feeds]
        taps = [Tap(self._cases[i].norm.scope, self._cases[i].norm.y, copied=False) for i in reached]
        return self._tapped(level, reached, taps)

    def _tapped(self, level: str, which: list[int], taps: list[Tap]) -> dict[int, list[np.ndarray]]:
        exposed, names = expose(self._model, taps)
        values = runtime.Session(exposed, level).run(names, self._feeds) if names else []
        result = {}
        for index, tap, value in zip(which, taps, values, strict=True):
            stacked = _iterations(value, tap.levels)
            result[index] = [stacked[i] for i in _spread(len(stacked))]
        return result

    def judge(self, case: _Case, report: ValidationReport) -> None:
        """Set the verdict of one norm."""
        norm, said = case.norm, case.report
        position = self._cases.index(case)
        feeds = case.feeds
        case.oracle = Oracle(norm, piece(self._model, norm, norm.nodes, feeds[0]))
        made = {level: self._became(norm, level) for level in ("basic", "all")}
        case.bench = Bench(self._model, norm, case.producers, case.oracle, feeds, made)
        rows = [case.oracle.rows(f) for f in feeds]
        said.conditioning = max(float(np.max(r.conditioning, initial=0.0)) for r in rows)
        said.verdict = "ok"
        _range_lint(norm, rows, report)

        if not norm.near_miss or norm.claimed:
            error = worst(case.oracle.file_error(f) for f in feeds)
            if error.ratio > 1:
                _settle(said, error, "wrong", "file")
                why = norm.near_miss or "its nodes compute another function"
                said.detail = f"the file does not compute the layer norm it claims: {why}"
                return
        off = worst(
            case.oracle.runtime_error(f, y) for f, y in zip(feeds, self._levels["off"][position], strict=True)
        )
        said.error, said.bound = off.error, off.bound
        said.points += [[c, r, "run"] for c, r in off.points]
        if off.ratio > 1:
            blame = _culprit(self._model, case, feeds)
            _settle(said, off, "wrong" if off.ratio > BROKEN else "inaccurate", blame)
            said.detail = f"{_WHO[blame].format(norm=norm)}: {_amount(off)}"
            return
        for level in ("basic", "all"):
            self._judge_optimised(case, position, level)
            if said.verdict != "ok":
                return

    def _judge_optimised(self, case: _Case, position: int, level: str) -> None:
        norm, said, feeds = case.norm, case.report, case.feeds
        results = self._levels[level][position]
        error = worst(case.oracle.runtime_error(f, y) for f, y in zip(feeds, results, strict=True))
        said.became = self._became(norm, level)
        if error.ratio <= 1:
            return
        alone = case.bench.tapped(level)
        if alone.ratio <= 1:
            # not reproduced in isolation: its input has drifted, or the rest of the graph matters
            if self._random or any(c.report.blame == "optimiser" for c in self._cases[:position]):
                return
            drift = self._drift(case, position, level)
            alone = worst(
                case.oracle.runtime_error(f, y, d) for f, y, d in zip(feeds, results, drift, strict=True)
            )
        if alone.ratio > 1:
            _settle(said, alone, "wrong", "optimiser")
            said.points += [[c, min(r, 1e12), f"run, optimisation {level}"] for c, r in alone.points]
            said.detail = f"right without optimisation, wrong with {level!r}, which makes it {said.became}"

    def _drift(self, case: _Case, position: int, level: str) -> list[float]:
        """How far the exact result moves when the input is the one an optimised run sees; with a margin."""
        if level not in self._inputs:
            reached = [i for i, c in enumerate(self._cases) if c.feeds]
            taps = [Tap(self._cases[i].norm.scope, self._cases[i].norm.x, copied=True) for i in reached]
            self._inputs[level] = self._tapped(level, reached, taps)
        moved = []
        for feeds, x in zip(case.feeds, self._inputs[level][position], strict=True):
            if case.norm.x not in feeds or x.shape != feeds[case.norm.x].shape:
                moved.append(0.0)
                continue
            with np.errstate(all="ignore"):
                change = case.oracle.own({**feeds, case.norm.x: x}) - case.oracle.own(feeds)
                moved.append(4 * float(np.nanmax(np.abs(change), initial=0.0)))
        return moved

    def _became(self, norm: Norm, level: str) -> str:
        """What the optimiser makes of the norm when nobody looks at its result, if that can be seen.

        Both graphs are dumped, with the results exposed and without: a tap must not change what it shows.
        """
        if level not in self._dumps:
            taps = [Tap(c.norm.scope, c.norm.y, copied=False) for c in self._cases if c.feeds]
            exposed, _ = expose(self._model, taps)
            self._dumps[level] = [makers(runtime.optimised(m, level)) for m in (self._model, exposed)]
        plain, tapped = (made_by(made, norm) for made in self._dumps[level])
        return plain or tapped


def _iterations(value: np.ndarray, levels: int) -> list[np.ndarray]:
    if value.size == 0:
        return []
    return list(value.reshape(-1, *value.shape[levels:])) if levels else [value]


def _spread(count: int) -> list[int]:
    """At most _ITERATIONS indices, first and last among them."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, _ITERATIONS))}) if count else []


def _settle(said: NormReport, measure: Measure, verdict: str, blame: str) -> None:
    said.verdict, said.blame = verdict, blame
    said.error, said.bound = measure.error, measure.bound


_WHO = {
    "file": "the file's formula ({norm.variance} variance) in its own precision, on any runtime",
    "kernel": "onnxruntime without optimisation",
}


def _culprit(model: onnx.ModelProto, case: _Case, tried: list[dict[str, np.ndarray]]) -> str:
    """Tell a poor kernel from a formula that no kernel computes well in its precision."""
    if case.norm.form == "decomposed":
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


def _amount(measure: Measure) -> str:
    return "NaN for finite input" if np.isnan(measure.error) else f"{measure.ratio:.3g} times the bound"


def _range_lint(norm: Norm, rows, report: ValidationReport) -> None:
    """Squares of the range seen that overflow float16; onnxruntime's CPU hides it by computing in float32."""
    if norm.compute_dtype != onnx.TensorProto.FLOAT16 or norm.form != "decomposed":
        return
    top = max(float(np.max(r.largest, initial=0.0)) for r in rows)
    spread = max(float(np.sqrt(np.max(r.variance, initial=0.0) * r.n)) for r in rows)
    if min(top * 2, spread) ** 2 > 65504:
        message = (
            f"squares up to {min(top * 2, spread) ** 2:.3g} overflow float16 where it is computed in float16"
        )
        report.findings.append(Finding("warning", "float16-overflow", message, norm.name))


# -------------------------------------------------------------------------------------------------- stress


def _stress(model: onnx.ModelProto, case: _Case, options: Options, runtime_faults: dict[str, str]) -> None:
    """Feed one norm hard rows, and note the families it fails."""
    norm, said = case.norm, case.report
    bench = case.bench
    if not bench.can_stress:
        return
    seen = stress.hardness(map(case.oracle.rows, case.feeds))
    for hard in stress.cases(*bench.layout, bench.dtype, norm.eps, options.seed):
        feeds = bench.feed(hard.rows)
        rows = case.oracle.rows(feeds)
        for level in bench.levels:
            error = case.oracle.claim_error(rows, bench.run(level, feeds))
            if error.ratio > 1 and bench.bare_fails(hard.rows):
                runtime_faults[hard.family] = "onnxruntime's own operator fails on such rows as well"
                break
            said.points += [[c, min(r, 1e12), hard.family] for c, r in error.points[::8]]
            if error.ratio <= 1:
                continue
            blame = _culprit(model, case, [feeds]) if level == "off" else "optimiser"
            where = f"{hard.family}, optimisation {level!r}: {_amount(error)}"
            if _reached(hard.hard_by, stress.hardness([rows]), seen):
                _settle(said, error, "wrong" if error.ratio > BROKEN else "inaccurate", blame)
                said.detail = f"fails on rows like those it meets, {where}"
                return
            if said.verdict == "ok":
                _settle(said, error, "risky", blame)
                said.detail = f"fails on rows it has not met, {where}"
            if hard.family not in said.risks:
                said.risks.append(hard.family)
            break


def _reached(hard_by: str, failing: dict[str, float], seen: dict[str, float]) -> bool:
    """Whether the model's own rows come within a factor of ten of the failing ones."""
    if hard_by == stress.SPREAD:
        return seen[hard_by] <= 10 * failing[hard_by]
    return seen[hard_by] >= failing[hard_by] / 10
