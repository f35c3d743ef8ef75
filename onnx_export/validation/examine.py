"""The whole examination of one file, in order: read, find, lint, run, judge, stress, repair.

It runs in a child process (`child`) and therefore takes and returns plain data. The report is sent to the parent
after each stage, so a crash of the runtime loses the results of one stage only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import onnx
import onnx.version_converter
import onnxruntime

from cnorm.storage.files import replaces, write_whole
from cnorm.text import clip, printable, quoted
from onnx_export import ort
from onnx_export.graph.scope import import_domains, mark_functions, opset_versions, with_shapes
from onnx_export.graph.sizes import size
from onnx_export.model_io import (
    Limits,
    Refused,
    Unreadable,
    attach_external_data,
    data_files,
    external_files,
    parse,
    read,
)
from onnx_export.nodes import drop_omitted, inlined, model_graphs, model_nodes, settle_references, sort_nodes
from onnx_export.validation import (
    inputs,
    lint,
    outputs,
    recurrences,
    recurrent,
    recurrent_lint,
    runtimes,
    stress,
    verdict,
)
from onnx_export.validation.alone import alone
from onnx_export.validation.expanded import expanded
from onnx_export.validation.findings import NOT_JUDGED, CellReport, Finding, NormReport, many
from onnx_export.validation.judge import type_name
from onnx_export.validation.lock import value_hash
from onnx_export.validation.norm import Norm, unproved_claims
from onnx_export.validation.normal import normal_form
from onnx_export.validation.options import Options
from onnx_export.validation.patterns import find
from onnx_export.validation.recurrent import Recurrent
from onnx_export.validation.report import ValidationReport
from onnx_export.validation.run import Candidate, Case, Run
from onnx_export.validation.values import PASSED, Values
from onnx_export.validation.weights import put_back, set_aside

# Sizes (--batch, --dim) to try where the model does not run with the default ones: caches and tables may be that short,
# and exporters fix a batch of 2 or a length of 10 in shapes that they compute.
_OTHER_SIZES = ((1, 1), (2, 10), (1, 2), (1, 16), (2, 8), (1, 512))  # the last for windows of samples


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
    model = _read(path, options, report, emit)
    if model is None:
        return report
    if options.opset and not report.problem:
        model = _converted(model, options.opset, report)
    emit("stage", "find")
    model, weights = set_aside(model)
    model, found = _find(model, weights, options, report, emit)
    unread = _lint(model, found, report)
    cells = _recurrent(model, weights, found, report)
    report.findings += runtimes.compare(model, weights, found, cells, options.runtimes)
    emit("report", report)
    if options.fix:
        report.fixed = ["wrote nothing: the file was not run, so nothing is proved"]
    if report.problem or options.find_only or not (found or cells or options.outputs):
        report.problem = report.problem or ("" if options.find_only else _refusal(model, weights)) or unread
        if not (options.find_only or report.refused):
            _judge_alone(model, found, report, options, emit)
        return report

    candidates = [Candidate(n, r, stress.producers(n)) for n, r in zip(found, report.norms, strict=True)]
    emit("stage", "run")
    try:
        run = _run(model, weights, candidates, options, report)
        report.findings += run.notes
        report.findings += outputs.compare(run, options.outputs, options.seed)
    except (inputs.MissingInput, ort.CannotRun, Unreadable) as error:
        report.problem = clip(str(error))
        if not isinstance(error, Unreadable):  # the caller's file, whose values the norms are to be judged on
            _judge_alone(model, found, report, options, emit)
        return report
    report.problem, report.fixed = clip(unread), []
    cases = _judge(run, candidates, report, emit)
    if not any(norm.blame == "optimiser" for norm in report.norms):
        report.problem = report.problem or clip(run.trouble)
    emit("stage", "cells")
    reset = _judge_cells(run, cells, report, options)
    emit("stage", "stress")
    _stress(run, cases, report, options.seed, emit)
    if options.fix:
        emit("stage", "fix")
        _fix(run, candidates, cases, reset, report, options)
    return report


def _run(model, weights, candidates: list[Candidate], options: Options, report: ValidationReport) -> Run:
    """The run of the model, with other sizes of free dimensions where it fails with those of default."""
    try:
        return Run(model, weights, candidates, options)
    except ort.CannotRun as error:
        chosen = options.sizes or (options.batch, options.dim) != (Options.batch, Options.dim)
        for batch, dim in () if chosen else _OTHER_SIZES:
            try:
                run = Run(model, weights, candidates, replace(options, batch=batch, dim=dim))
            except ort.CannotRun:
                continue
            message = f"the model does not run with the default sizes; it was run with --batch {batch} --dim {dim}"
            report.findings.append(Finding("note", "sizes", message))
            return run
        sizes = "" if options.input else _open_inputs(model)
        raise ort.CannotRun(f"{sizes}{error}") from None


def _open_inputs(model: onnx.ModelProto) -> str:
    """What to give for inputs whose sizes the file leaves open, before the error of a run; empty if it leaves none."""
    stored, shown = {tensor.name for tensor in model.graph.initializer}, []
    for each in model.graph.input:
        dims = each.type.tensor_type.shape.dim
        if each.name not in stored and None in map(size, dims):
            sizes = [dim.dim_param or "?" if size(dim) is None else str(size(dim)) for dim in dims]
            shown.append(f"{quoted(each.name)} [{printable(', '.join(sizes))}]")
    hint = "it does not run with sizes made up for {}: give them (--size, --dim), or the inputs (--input FILE.npz); "
    return hint.format(clip(", ".join(shown), 200)) if shown else ""


def _refusal(model: onnx.ModelProto, weights: dict) -> str:
    """Why onnxruntime does not load a model, so that its operators may be anything; empty if it does."""
    try:
        ort.Session(model, "off", weights)
    except ort.CannotRun as error:
        return clip(f"onnxruntime does not load the model: {error}")
    return ""


def _read(path: str, options: Options, report: ValidationReport, emit) -> onnx.ModelProto | None:
    """The model, None if it cannot be read. Problems that prevent running it are added to the report."""
    try:
        limits = options.limits or Limits()
        model = parse(read(path, limits), limits)
    except (Refused, Unreadable) as error:
        report.problem, report.refused = clip(str(error)), isinstance(error, Refused)
        return None
    folder = Path(path).parent
    report.external_data = external_files(model, folder)
    emit("report", report)
    if options.fix and any(replaces(options.fix, file) for file in report.external_data):
        report.problem = f"--fix must name another file than {options.fix}, which holds tensors of the model"
        return None
    try:
        root = (options.data_root or folder) if options.external_data else None
        attach_external_data(model, folder, root, data_files(path))
        if report.external_data and root is None:
            names = ", ".join(quoted(Path(file).name) for file in report.external_data)
            report.findings.append(Finding("note", "data-file", f"tensors were read from {names} beside the model"))
    except (Refused, Unreadable) as error:
        report.problem, report.refused = clip(str(error)), isinstance(error, Refused)
    try:
        if sort_nodes(model):
            message = (
                "nodes come before what they use, which the standard forbids; onnxruntime sorts the main graph only"
            )
            report.findings.append(Finding("warning", "order", message))
            report.problem = report.problem or _refusal(_as_given(path, options), {})  # it does not sort subgraphs
        elif _untyped(model):
            report.problem = report.problem or _refusal(model, {})  # shape inference would give the types
    except Unreadable as error:
        report.problem = report.problem or clip(str(error))
    for name in drop_omitted(model, {"LayerNormalization"}):
        message = "its bias is omitted by the empty name, which onnxruntime 1.32 does not optimise; leave the name out"
        report.findings.append(Finding("error", "omitted-bias", message, name))
    report.problem = report.problem or clip(_foreign(model))
    if import_domains(model):
        message = (
            "operators of com.microsoft are used, but the domain is not imported; onnxruntime takes it as imported"
        )
        report.findings.append(Finding("note", "operator-opset", message))
    return model


def _as_given(path: str, options: Options) -> onnx.ModelProto:
    """The model with its nodes in the order of the file. It is read again, so that most files are held once only."""
    limits = options.limits or Limits()
    model = parse(read(path, limits), limits)
    root = (options.data_root or Path(path).parent) if options.external_data else None
    attach_external_data(model, Path(path).parent, root, data_files(path))
    return model


def _untyped(model: onnx.ModelProto) -> bool:
    """Whether a tensor is declared without its element type."""
    values = [value for graph in model_graphs(model) for value in (*graph.input, *graph.output, *graph.value_info)]
    kinds = [value.type.tensor_type for value in values if value.type.HasField("tensor_type")]
    return any(kind.elem_type == onnx.TensorProto.UNDEFINED for kind in kinds)


def _converted(model: onnx.ModelProto, opset: int, report: ValidationReport) -> onnx.ModelProto:
    """The model converted to a newer opset; unchanged if onnx's converter fails."""
    given = opset_versions(model).get("", 0)
    if given >= opset:
        return model
    try:
        converted = onnx.version_converter.convert_version(model, opset)
    except Exception as error:  # the C++ layer raises many kinds
        report.problem = clip(f"--opset {opset}: cannot convert from opset {given}: {' '.join(str(error).split())}")
        return model
    report.findings.append(Finding("note", "converted", f"examined as converted from opset {given} to {opset}"))
    return converted


def _lint(model: onnx.ModelProto, found: list[Norm], report: ValidationReport) -> str:
    """Describe the norms and add the findings of lint. Returns the first norm that could not be examined, or ""."""
    report.findings += lint.lint_model(model)
    for norm in found:
        report.norms.append(_describe(norm))
        try:
            report.findings += list(lint.lint_norm(norm))
        except Exception as error:  # a failure on one norm must not affect the others
            report.findings.append(_unread(norm.name, error))
    report.findings += [*lint.lint_siblings(found), *lint.lint_unclaimed(model, found)]
    unseen = ("unread", "unproved-claim")
    return next((f"{f.norm}: {f.message}" for f in report.findings if f.code in unseen), "")


def _recurrent(model, weights, found: list[Norm], report: ValidationReport) -> list[Recurrent]:
    """Describe the recurrent nodes, which are returned, and the recurrences behind them, and add their findings."""
    cells = recurrent.find(model, weights)
    unnamed, notes = recurrences.find(model, weights, found, cells)
    report.cells = [*map(recurrent.describe, cells), *unnamed]
    report.findings += [*recurrent_lint.lint(cells), *notes]
    return cells


def _judge(run: Run, candidates: list[Candidate], report: ValidationReport, emit) -> list[Case]:
    """Judge every norm that rows reached; returns the cases of those that could be judged."""
    cases: list[Case] = []
    for done, position in enumerate(run.reached):
        emit("progress", (done, 2 * len(run.reached)))
        with _isolated_failure(candidates[position].report, report):
            case = run.case(position)
            report.findings += verdict.judge(run, case)
            cases.append(case)
            if not case.norm.near_miss:  # evaluation refuted it
                report.findings = [f for f in report.findings if (f.code, f.norm) != ("near-miss", case.norm.name)]
    emit("report", report)
    return cases


def _judge_alone(model, found: list[Norm], report: ValidationReport, options: Options, emit) -> None:
    """Judge the norms of a model that does not run, each as a model of its own, on generated rows."""
    emit("stage", "alone")
    chosen = replace(options, input="", outputs="", fix="", sizes={})
    judged = 0
    for norm, each in zip(found, report.norms, strict=True):
        with _isolated_failure(each, report):
            made = alone(norm, chosen)
            if made is None:
                continue
            run = Run(made[0], {}, [Candidate(made[1], each, [])], chosen)
            _stress(run, _judge(run, [Candidate(made[1], each, [])], report, emit), report, options.seed, emit)
            judged += each.verdict != "not exercised"
    if judged:
        message = (
            f"the model does not run, so {judged} of {len(found)} norms were judged by themselves, on rows N(0, 1)"
        )
        report.findings.append(Finding("note", "alone", message))


def _judge_cells(run: Run, cells: list[Recurrent], report: ValidationReport, options: Options) -> list[Recurrent]:
    """Judge the recurrent nodes; returns the GRUs whose reset gate is proved to be in the wrong place."""
    wrong: list[Recurrent] = []
    try:
        calls = recurrent.values_of(run, cells)
        for cell, each, values in zip(cells, report.cells, calls, strict=False):  # recurrences without a node follow
            with _isolated_failure(each, report):
                recurrent.judge(run.model, cell, each, values, options.seed)
        doubted = recurrent_lint.suspects(cells, calls)
        if doubted:
            producer = run.model.producer_name
            found, proved = recurrent_lint.judge_reset(run, doubted, producer, options.outputs, options.seed)
            report.findings += found
            wrong = doubted if proved else []
    except ort.CannotRun as error:
        report.problem = report.problem or clip(f"the recurrent nodes could not be judged: {error}")
    nodes = [each for each in report.cells if each.verdict != NOT_JUDGED]
    for group, what in ((report.norms, "norm"), (nodes, "recurrent node")):
        if group and all(each.verdict == "not exercised" for each in group):
            report.problem = report.problem or f"no {what} was exercised, so nothing is proved"
    return wrong


def _stress(run: Run, cases: list[Case], report: ValidationReport, seed: int, emit) -> None:
    about_runtime: dict[tuple[str, str], Finding] = {}
    for done, case in enumerate(cases):
        emit("progress", (len(cases) + done, 2 * len(cases)))
        if not case.norm.near_miss and case.report.verdict == "ok":
            with _isolated_failure(case.report, report):
                for finding in verdict.judge_stress(run, case, seed):
                    about_runtime[finding.code, finding.message] = finding
    report.findings += about_runtime.values()


def _fix(run: Run, candidates, cases: list[Case], reset, report: ValidationReport, options: Options) -> None:
    from onnx_export.validation.repair import CannotRepair, repair

    if any(finding.code == "eps-input" for finding in report.findings):
        report.problem = "--fix: wrote nothing, an operator cannot take eps from an input"
        return
    put_back(run.model, run.weights)
    done = recurrent_lint.set_reset(run.model, reset)
    judged = {case.position: case for case in cases}
    try:
        everything = [judged.get(position, candidate) for position, candidate in enumerate(candidates)]
        report.fixed = repair(Path(options.fix), run.model, everything, run.feeds)
        if done:
            if not any(" as LayerNormalization over" in line for line in report.fixed):
                write_whole(options.fix, run.model.SerializeToString())
                del report.fixed[-1]  # that nothing was written
            report.fixed.append(f"set linear_before_reset = 1 in {many(done, 'GRU')}: wrote {options.fix}")
    except OSError as error:
        report.problem = f"--fix: cannot write {options.fix}: {error.strerror}"
    except CannotRepair as error:
        report.problem = clip(f"--fix: wrote nothing, {error}")


@contextmanager
def _isolated_failure(judged: NormReport | CellReport, report: ValidationReport) -> Iterator[None]:
    """Catch exceptions while one norm is judged, so that the others are still judged."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # from onnxruntime, onnx's evaluator or this package
        verdict.not_judged(judged, f"could not be judged: {type(error).__name__}: {error}")
        report.problem = report.problem or clip(f"{judged.name} {judged.detail}")


def _unread(name: str, error: Exception) -> Finding:
    return Finding("warning", "unread", clip(f"could not be looked at: {type(error).__name__}: {error}"), clip(name))


def _foreign(model: onnx.ModelProto) -> str:
    local = {function.domain for function in model.functions}
    foreign = {node.domain for node in model_nodes(model)} - ort.KNOWN_DOMAINS - local
    return f"needs operators of the domain {', '.join(map(repr, sorted(foreign)))}" if foreign else ""


def _find(model, weights, options: Options, report: ValidationReport, emit) -> tuple[onnx.ModelProto, list[Norm]]:
    mark_functions(model)
    given = model
    if not report.problem:
        # the calls of functions may contradict what they declare; inlined, onnxruntime does not see it
        report.problem = _refusal(model, weights) if model.functions else ""
        model = inlined(model)
        settle_references(model)
    if options.infer_shapes:
        emit("stage", "shapes")
        try:
            model = with_shapes(model)
        except Exception as error:  # the C++ layer raises many kinds
            reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
            report.findings.append(Finding("note", "shapes", f"shapes could not be inferred: {reason}"))
        emit("stage", "find")
    if not report.problem and any(node.domain not in ("", "ai.onnx") for node in model_nodes(model)):
        ort.add_types(model, weights)

    def unread(name: str, error: Exception) -> None:
        report.findings.append(_unread(name, error))

    bound = inputs.bind_eps(model, options)
    found = find(model, unread, weights)
    read = {name: norm for norm in found for name in _eps_of(norm, bound)}
    if len(read) < len(bound):
        inputs.unbind(model, bound.keys() - read.keys())
        found = find(model, unread, weights)
    for name, norm in read.items():
        message = f"eps is the input {quoted(name)}: it was taken as {bound[name]:g}"
        report.findings.append(Finding("note", "eps-input", message, norm.name))
    floats = expanded(model)
    results = {norm.y for norm in found}
    inside = find(floats, unread, weights) if floats is not None else []
    found += [norm for norm in inside if norm.quantised and norm.y not in results]
    for name in unproved_claims(given, found):
        message = "a local function of this name, in which no norm was recognised: what it claims is not proved"
        report.findings.append(Finding("warning", "unproved-claim", message, clip(name)))
    return model, found


def _eps_of(norm: Norm, bound: dict[str, float]) -> list[str]:
    """The inputs, with the values they were given, that a norm reads as its eps or floor."""
    values = Values(norm.scope)
    read = {values.strip(name, PASSED)[0] for node in norm.nodes for name in node.input if name} if bound else ()
    return [name for name, value in bound.items() if name in read and value in (norm.eps, norm.floor)]


def _describe(norm: Norm) -> NormReport:
    scope = " > ".join(filter(None, (norm.scope.label, norm.function and f"function {norm.function}")))
    return NormReport(
        name=norm.name,
        scope=clip(scope),
        form=norm.form,
        formula=norm.formula.name,
        variance=norm.variance,
        axes=None if norm.axes is None else list(norm.axes),
        eps=norm.eps,
        eps_dtype=type_name(norm.eps_dtype),
        scale=clip(norm.scale),
        bias=clip(norm.bias),
        compute_dtype=type_name(norm.compute_dtype),
        near_miss=norm.near_miss,
        scale_hash=_hash(norm, norm.scale),
        bias_hash=_hash(norm, norm.bias),
        of=norm.of,
        normal=normal_form(norm),
    )


def _hash(norm: Norm, name: str) -> str:
    """Hash of a stored scale or bias; "computed" if the graph computes it, empty if there is none."""
    value = norm.scope.constant(name) if name else None
    return "computed" if name and value is None else value_hash(value)
