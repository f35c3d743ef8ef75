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
from .graph import Scope, boundary, cut, inline, scopes
from .judge import BROKEN, Measure, Oracle, type_name
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
    x_shape: tuple[int, ...] = ()
    oracle: Oracle | None = None


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
        report.problem, report.refused = str(error), isinstance(error, Refused)
        return report
    try:
        root = Path(options.data_root) if options.data_root else Path(path).resolve().parent
        attach_external_data(model, root if options.external_data else None, options.limits)
    except (Refused, Unreadable) as error:
        report.problem, report.refused = str(error), isinstance(error, Refused)
    report.problem = report.problem or contradiction(model) or _foreign(model)

    emit("stage", "find")
    model, found = _find(model, options, report, emit)
    report.norms = [_describe(norm) for norm in found]
    report.findings += [*lint.lint_model(model), *(f for norm in found for f in lint.lint_norm(norm))]
    emit("report", report)
    if report.problem or not found:
        return report

    cases = [_Case(n, r, stress.producers(n)) for n, r in zip(found, report.norms, strict=True)]
    emit("stage", "run")
    try:
        run = _Run(model, cases, options)
    except (inputs.MissingInput, runtime.CannotRun, Unreadable) as error:
        report.problem = str(error)
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
        report.fixed = repair(path, model, cases, options)
    return report


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
        scope,
        norm.form,
        norm.formula,
        norm.variance,
        None if norm.axes is None else list(norm.axes),
        norm.eps,
        type_name(norm.eps_dtype),
        norm.scale,
        norm.bias,
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
        self._dumps: dict[str, tuple[onnx.ModelProto, onnx.ModelProto]] = {}

    def _tap(self, main: Scope) -> None:
        """Run unoptimised with the boundary of every norm and of the additions before it exposed."""
        try:
            self._try_tap(self._cases)
        except runtime.CannotRun as error:
            try:
                runtime.Session(self._model, "off").run([], self._feeds)
            except runtime.CannotRun as plain:
                made_up = f"; made up were {self._made_up}, supply them with --input" if self._made_up else ""
                raise runtime.CannotRun(f"onnxruntime does not run the model: {plain}{made_up}") from error
            inner = [case for case in self._cases if case.norm.scope.path]
            for case in inner:
                case.report.detail = f"its values cannot be tapped: {error}"
            self._try_tap([case for case in self._cases if not case.norm.scope.path])

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
                case.report.detail = "its branch was not taken"

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
        case.oracle = Oracle(norm, _piece(self._model, norm, norm.nodes, feeds[0]))
        rows = [case.oracle.rows(f) for f in feeds]
        said.conditioning = max(float(np.max(r.conditioning, initial=0.0)) for r in rows)
        said.verdict = "ok"
        _range_lint(norm, rows, report)

        if not norm.near_miss or norm.claimed:
            error = _worst(case.oracle.file_error(f) for f in feeds)
            if error.ratio > 1:
                _settle(said, error, "wrong", "file")
                why = norm.near_miss or "its nodes compute another function"
                said.detail = f"the file does not compute the layer norm it claims: {why}"
                return
        off = _worst(
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
        error = _worst(case.oracle.runtime_error(f, y) for f, y in zip(feeds, results, strict=True))
        turned = self._became(norm, level)
        said.became = turned
        if error.ratio <= 1:
            return
        alone = _alone(self._model, case, level)
        if alone.ratio <= 1 and not self._random:
            # not reproduced in isolation: either its input has drifted, or the rest of the graph matters
            drift = self._drift(case, position, level)
            again = _worst(
                case.oracle.runtime_error(f, y, d) for f, y, d in zip(feeds, results, drift, strict=True)
            )
            earlier = any(c.report.blame == "optimiser" for c in self._cases[:position])
            alone = Measure() if again.ratio <= 1 or earlier else again
        if alone.ratio > 1:
            _settle(said, alone, "wrong", "optimiser")
            said.detail = f"right without optimisation, wrong with {level!r}, which makes it {turned}"

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
        """What the optimiser made of the norm, from the graphs it writes with and without the tap."""
        if level not in self._dumps:
            taps = [Tap(c.norm.scope, c.norm.y, copied=False) for c in self._cases if c.feeds]
            exposed, _ = expose(self._model, taps)
            self._dumps[level] = tuple(runtime.optimised(m, level) for m in (self._model, exposed))
        plain, tapped = (_maker(dump, norm) for dump in self._dumps[level])
        if plain == tapped or not plain:
            return tapped or "something else"
        return f"{tapped} ({plain} when its result is not looked at)"


def _iterations(value: np.ndarray, levels: int) -> list[np.ndarray]:
    if value.size == 0:
        return []
    return list(value.reshape(-1, *value.shape[levels:])) if levels else [value]


def _spread(count: int) -> list[int]:
    """At most _ITERATIONS indices, first and last among them."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, _ITERATIONS))}) if count else []


def _piece(model, norm: Norm, nodes, feeds: dict[str, np.ndarray], extra: tuple[str, ...] = ()):
    """The norm (and perhaps the additions before it) as a model, sized for these values."""
    needed = boundary(norm.scope, nodes)
    kinds = {n: (_element_type(norm.scope, n, feeds[n]), feeds[n].shape) for n in needed}
    return cut(model, norm.scope, nodes, [norm.y, *extra], kinds)


def _element_type(scope: Scope, name: str, value: np.ndarray) -> int:
    return scope.dtype(name) or onnx.helper.np_dtype_to_tensor_dtype(value.dtype)


def _fed(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The feeds a cut takes, in the types it takes them."""
    kinds = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
    return {n: feeds[n].astype(onnx.helper.tensor_dtype_to_np_dtype(kind)) for n, kind in kinds.items()}


def _worst(measures) -> Measure:
    measures = list(measures)
    worst = max(measures, key=lambda m: m.ratio)
    worst.points = [point for m in measures for point in m.points][:200]
    return worst


def _settle(said: NormReport, measure: Measure, verdict: str, blame: str) -> None:
    said.verdict, said.blame = verdict, blame
    said.error, said.bound = measure.error, measure.bound


def _alone(model: onnx.ModelProto, case: _Case, level: str) -> Measure:
    """The norm and the additions before it, cut out and run on the tapped values."""
    nodes = [*case.producers, *case.norm.nodes]
    part = _piece(model, case.norm, nodes, case.feeds[0])
    try:
        session = runtime.Session(part, level)
        return _worst(
            case.oracle.runtime_error(f, session.run([case.norm.y], _fed(part, f))[0])
            for f in case.feeds
            if all(f[n].shape == case.feeds[0][n].shape for n in f)
        )
    except runtime.CannotRun:
        return Measure()


_WHO = {
    "file": "the file's formula ({norm.variance} variance) in its own precision, on any runtime",
    "kernel": "onnxruntime without optimisation",
}


def _culprit(model: onnx.ModelProto, case: _Case, tried: list[dict[str, np.ndarray]]) -> str:
    """Tell a poor kernel from a formula that no kernel computes well in its precision."""
    if case.norm.form == "decomposed":
        part = _piece(model, case.norm, case.norm.nodes, tried[0])
        try:
            with np.errstate(all="ignore"):
                evaluator = ReferenceEvaluator(part)
                plain = [evaluator.run(None, _fed(part, feeds))[0] for feeds in tried]
            if _worst(map(case.oracle.runtime_error, tried, plain)).ratio > 1:
                return "file"
        except Exception:  # onnx's evaluator does not know every operator; then the runtime is all we know
            pass
    return "kernel"


def _amount(measure: Measure) -> str:
    return "NaN for finite input" if np.isnan(measure.error) else f"{measure.ratio:.3g} times the bound"


def _maker(dump: onnx.ModelProto, norm: Norm) -> str:
    """The operator that makes the norm's result in an optimised graph."""
    for scope in scopes(dump):
        node = scope.producer(norm.y)
        if node is not None:
            if node.op_type in {n.op_type for n in norm.nodes} and norm.form == "decomposed":
                return "no fused operator"
            return node.op_type
    return ""


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
    bench = _Bench(model, case)
    if not bench.usable:
        return
    seen = bench.hardness(case.feeds)
    for hard in stress.cases(*bench.layout, bench.dtype, norm.eps, options.seed):
        feeds = bench.feed(hard.rows)
        for level in ("off", "basic", "all"):
            x, y = bench.run(level, feeds)
            error = case.oracle.claim_error(x, y)
            said.points += [[c, min(r, 1e12), hard.family] for c, r in error.points[::8]]
            if error.ratio <= 1:
                continue
            if bench.bare_fails(hard.rows):
                runtime_faults[hard.family] = "onnxruntime's own operator fails on such rows as well"
                break
            blame = _culprit(model, case, [x]) if level == "off" else "optimiser"
            where = f"{hard.family}, optimisation {level!r}: {_amount(error)}"
            if _reached(hard.hard_by, bench.hardness([x]), seen):
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


class _Bench:
    """One norm, with the additions before it where they can be fed, at every optimisation level."""

    def __init__(self, model: onnx.ModelProto, case: _Case) -> None:
        norm = case.norm
        self._norm, self._oracle = norm, case.oracle
        self._base = case.feeds[0]
        self.usable = norm.x in self._base and norm.form != "EmbedLayerNormalization"
        if not self.usable:
            return
        shape = self._base[norm.x].shape
        self._shape, self.layout = shape, stress.layout(norm, shape)
        self.usable = min(self.layout) > 0
        nodes, self._entry, self._zeros = norm.nodes, norm.x, []
        kind = _element_type(norm.scope, norm.x, self._base[norm.x])
        self.dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind))
        if case.producers:
            outer = boundary(norm.scope, [*case.producers, *norm.nodes])
            inner = set(boundary(norm.scope, norm.nodes))
            terms = [name for name in outer if name not in inner or name in _terms(case.producers)]
            full = [name for name in terms if self._base[name].shape == shape]
            if full:
                self._entry, self._zeros = full[0], [name for name in terms if name != full[0]]
                nodes = [*case.producers, *norm.nodes]
        if norm.form.startswith("Skip"):
            self._zeros = [norm.nodes[0].input[1]]
        self._taps = (norm.x,) if self._entry != norm.x else ()
        base = {**self._base}
        self._plain = _piece(model, norm, nodes, base, self._taps)
        self._quiet = _piece(model, norm, nodes, base)
        self._sessions = {"off": runtime.Session(self._plain, "off")}
        for level in ("basic", "all"):
            self._sessions[level] = runtime.Session(self._quiet, level)
        self._bare: runtime.Session | None = None
        self._kind = kind
        self._x: np.ndarray | None = None

    def feed(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Boundary values that make the norm see these rows."""
        zeros = {name: np.zeros_like(self._base[name]) for name in self._zeros}
        return {**self._base, **zeros, self._entry: stress.arrange(self._norm, rows, self._shape)}

    def run(self, level: str, feeds: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """(values at the norm's own boundary, its result)."""
        if level == "off":
            y, *x = self._sessions["off"].run([self._norm.y, *self._taps], _fed(self._plain, feeds))
            self._x = x[0] if x else feeds[self._norm.x]
        else:
            (y,) = self._sessions[level].run([self._norm.y], _fed(self._quiet, feeds))
        return {**feeds, self._norm.x: self._x}, y

    def hardness(self, feeds: list[dict[str, np.ndarray]]) -> dict[str, float]:
        """How hard rows are, by each of the measures that the stress families name."""
        rows = [self._oracle.rows(f) for f in feeds]
        with np.errstate(all="ignore"):
            return {
                stress.CONDITIONING: max(float(np.nanmax(r.conditioning, initial=0.0)) for r in rows),
                stress.MAGNITUDE: max(float(np.nanmax(r.largest, initial=0.0)) for r in rows),
                stress.SPREAD: min(float(np.sqrt(np.nanmin(r.variance, initial=np.inf))) for r in rows),
            }

    def bare_fails(self, rows: np.ndarray) -> bool:
        """Whether the runtime's own operator fails on these rows too."""
        if self._bare is None:
            part = stress.bare(self._norm, *self.layout, self._kind)
            self._bare_oracle = Oracle(find(part)[0], part)
            self._bare = runtime.Session(part, "off")
        feeds = {"x": rows.astype(self.dtype)}
        return self._bare_oracle.claim_error(feeds, self._bare.run(["y"], feeds)[0]).ratio > 1


def _terms(producers: list[onnx.NodeProto]) -> set[str]:
    return {name for node in producers for name in node.input}
