"""Set the verdict on a norm from its errors, and decide who is to blame: the file, the kernel or the optimiser."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from operator import add

import numpy as np
import onnx

from cnorm.text import clip
from onnx_export.graph.evaluate import in_types
from onnx_export.operators import SEQUENTIAL_SUMS
from onnx_export.validation import stress
from onnx_export.validation.findings import MOST_RATIO, Finding, NormReport
from onnx_export.validation.isolated import cast_feeds, subgraph_model
from onnx_export.validation.judge import JudgedRows, Measure, worst
from onnx_export.validation.norm import NONE
from onnx_export.validation.pairwise import PAIRWISE
from onnx_export.validation.run import Case, Run

BROKEN = 100.0  # times the bound; a runtime with a larger error is "wrong", below it "inaccurate"

# Elements of all stress rows of all norms together, and at least those of one norm.
_STRESSED, _STRESSED_EACH = 2**25, 2**22

_WHO = {
    "file": "the file's formula ({norm.variance} variance) in its own precision, on any runtime",
    "kernel": "onnxruntime without optimisation",
}
# Optimisers to leave out where the model does not run with them.
_DISABLED = (
    ("LayerNormFusion", "SimplifiedLayerNormFusion"),
    ("SkipLayerNormFusion",),
    ("LayerNormFusion", "SimplifiedLayerNormFusion", "SkipLayerNormFusion", "EmbedLayerNormFusion"),
)
# Operators that the optimiser makes, and the name of the fusion to disable to avoid each.
_FUSIONS = {
    "SkipLayerNormalization": "SkipLayerNormFusion",
    "SkipSimplifiedLayerNormalization": "SkipLayerNormFusion",
    "EmbedLayerNormalization": "EmbedLayerNormFusion",
    "LayerNormalization": "LayerNormFusion",
    "SimplifiedLayerNormalization": "SimplifiedLayerNormFusion",
}


def not_judged(report: NormReport, reason: str) -> None:
    """Set the verdict "not exercised", and why."""
    report.verdict, report.detail = "not exercised", clip(reason)


def set_verdict(report: NormReport, measure: Measure, verdict: str, blame: str) -> None:
    """Set a verdict, who is to blame, and the error and bound that it is based on."""
    report.verdict, report.blame = verdict, blame
    report.error, report.bound = measure.error, measure.bound


def judge(run: Run, case: Case) -> list[Finding]:
    """Set the verdict of a case from the rows of the run; returns findings about these rows."""
    report, rows = case.report, case.rows
    report.conditioning = max(float(np.max(r.conditioning, initial=0.0)) for r in rows)
    report.verdict, notes = "ok", []
    _judge_file(case)
    if report.verdict == "ok":
        notes += _judge_kernel(run, case)
    for level in run.optimised:
        if report.verdict == "ok":
            notes += _judge_optimised(run, case, level)
    for level in run.failed if report.verdict == "ok" else ():
        if run.fails_alone(case, level):
            _blame_failure(run, report, level)
            break
    unique = {(note.code, note.message): note for note in notes}
    return [*unique.values(), *_lost_rows(case, rows), *_spoiled_rows(run, case, rows), *_overflow(case, rows)]


def _judge_file(case: Case) -> None:
    """Compare G, the file's nodes in float64, with C, the formula."""
    norm, report = case.norm, case.report
    if norm.near_miss and _refuted(case):
        norm.near, report.near_miss = NONE, ""
    if norm.near_miss and not norm.claimed:
        return
    error = worst(map(case.oracle.file_error, case.feeds))
    if error.ratio > 1:
        set_verdict(report, error, "wrong", "file")
        why = norm.near_miss or f"its nodes compute another function ({norm.formula.name} over {_axes(norm)})"
        report.detail = f"the file does not compute the layer norm it claims: {why}"


def _refuted(case: Case) -> bool:
    """Whether a near miss computes the norm after all, on the rows of the run and on stress rows."""
    norm, isolated = case.norm, case.isolated
    if (
        norm.floor
        or norm.stored_reciprocal
        or not isolated.can_stress
        or worst(map(case.oracle.file_error, case.feeds)).ratio > 1
    ):
        return False
    hard = stress.hard_rows(*isolated.layout, isolated.dtype, norm.eps, seed=0)
    return all(case.oracle.file_error(isolated.feed(each.rows)).ratio <= 1 for each in hard)


def _axes(norm) -> str:
    return "all axes" if norm.axes is None else f"axes {list(norm.axes)}"


def _judge_kernel(run: Run, case: Case) -> Iterator[Finding]:
    """Compare the unoptimised runtime with G; result and inputs are of the same run."""
    report = case.report
    error = worst(map(case.oracle.runtime_error, case.feeds, case.results))
    if error.ratio > 1 and _sequential(case, case.norm.form):
        wider = worst(map(case.oracle.runtime_error, case.feeds, case.results, _sequential_slack(case)))
        if wider.ratio <= 1:
            yield _summed_sequentially(case, case.norm.form, "rows of this run", f", {amount(error)}")
            error = wider
    # If the norm is right on the tapped values, x was not yet rounded to its half type in the run.
    if error.ratio > 1 and run.alone(case).ratio <= 1:
        error = worst(map(case.oracle.runtime_error, case.feeds, case.results, map(case.oracle.carried, case.feeds)))
    report.error, report.bound = error.error, error.bound
    report.points += [[c, min(r, MOST_RATIO), "run"] for c, r in error.points]
    if not error.judged:
        not_judged(report, "NaN or Inf in every row, or by the formula itself: there is nothing to judge")
    if error.ratio > 1:
        blame = culprit(case, case.feeds)
        set_verdict(report, error, "wrong" if error.ratio > BROKEN else "inaccurate", blame)
        report.detail = f"{_WHO[blame].format(norm=case.norm)}: {amount(error)}"


def _judge_optimised(run: Run, case: Case, level: str) -> Iterator[Finding]:
    """Compare the optimised runtime with G, for a norm that is right without optimisation."""
    report, results = case.report, run.results(level, case)
    report.became, faithful = run.became(case.norm, level)
    operator = report.became.partition(" ")[0]
    one_by_one = _sequential(case, "no fused operator" if report.became == "no fused operator" else operator)
    slack = _sequential_slack(case) if one_by_one else [0.0] * len(case.feeds)
    error = alone = case.isolated.tapped(level, one_by_one)
    if faithful:
        strict = worst(map(case.oracle.runtime_error, case.feeds, results))
        if strict.ratio <= 1:
            return
        whole = worst(map(case.oracle.runtime_error, case.feeds, results, slack))
        if whole.ratio <= 1:
            yield _summed_sequentially(case, operator, "rows of this run", f", {amount(strict)}")
            return
        # If the norm alone is right, allow for its input, which the nodes before it may have changed.
        if alone.ratio <= 1 and not run.drifts(case):
            drift = map(add, slack, run.drift(case, level))
            error = worst(map(case.oracle.runtime_error, case.feeds, results, drift))
    if error.ratio > 1:
        set_verdict(report, error, "wrong", "optimiser")
        report.points += [[c, min(r, MOST_RATIO), f"run, optimisation {level}"] for c, r in error.points]
        report.detail = (
            f"right without optimisation, wrong with {level!r}, which makes it {report.became}{remedy(report)}"
        )


def _blame_failure(run: Run, report: NormReport, level: str) -> None:
    """Set the verdict on a norm that onnxruntime does not run, even by itself, with optimisation."""
    report.verdict, report.blame = "wrong", "optimiser"
    helps = next((names for names in _DISABLED if run.runs(level, names)), None)
    named = ", ".join(f'"{name}"' for name in helps or ())
    advice = f"InferenceSession(..., disabled_optimizers=[{named}])" if helps else "ORT_DISABLE_ALL"
    report.detail = clip(
        f"right without optimisation, but onnxruntime does not run it with {level!r}; {advice} avoids it: "
        f"{run.failed[level]}"
    )


def _sequential(case: Case, operator: str) -> bool:
    """Whether onnxruntime adds the elements of a row one after another: reductions over other axes than the last do."""
    norm, rank = case.norm, case.results[0].ndim
    if operator in SEQUENTIAL_SUMS or norm.operator or norm.axes is None:
        return operator in SEQUENTIAL_SUMS
    last = sorted(axis % rank for axis in norm.axes) == list(range(rank - len(norm.axes), rank))
    return not last and operator in ("decomposed", "no fused operator", "")


def _sequential_slack(case: Case) -> list[np.ndarray]:
    """The addition to the bound for a kernel that sums sequentially, per iteration."""
    return [case.oracle.sequential(rows) for rows in case.rows]


def _summed_sequentially(case: Case, operator: str, where: str, amount: str = "") -> Finding:
    """A note on an error above B that is no larger than that of a sequential sum (`judge.JudgedRows.sequential`)."""
    if operator not in SEQUENTIAL_SUMS:
        code, whose, operator, advice = "runtime-limit", "onnxruntime's", "sum over other axes than the last", ""
    elif case.norm.form == operator:
        code, whose, advice = "runtime-limit", "onnxruntime's", ""
    else:
        code, whose, advice = "optimiser-precision", "the optimiser's", remedy(case.report)
    message = f"{where}: {whose} {operator} adds the elements of a row one after another{amount}{advice}"
    return Finding("note", code, message, case.norm.name if amount else "")


def culprit(case: Case, tried: list[dict[str, np.ndarray]]) -> str:
    """Who is to blame for an error without optimisation: "kernel" or "file".

    "file" if onnx's reference evaluator, in the file's types, exceeds the bound in each of two orders of summation: one
    after another where the axis is not the last, and in pairs. Then the formula is not accurate enough in that
    precision on any runtime. "kernel" otherwise, and for an operator.
    """
    if not case.norm.operator:
        part = subgraph_model(case.norm, case.norm.nodes, tried[0])
        try:
            ratios = []
            for kernels in ([], PAIRWISE):
                run = in_types(part, kernels)
                plain = [run(cast_feeds(part, feeds))[case.norm.y] for feeds in tried]
                ratios.append(worst(map(case.oracle.runtime_error, tried, plain)).ratio)
            if min(ratios) > 1:
                return "file"
        except Exception:  # onnx's evaluator lacks some operators: nothing to compare the runtime with
            pass
    return "kernel"


def amount(measure: Measure) -> str:
    """An error in words."""
    return "NaN for finite input" if np.isnan(measure.error) else f"{measure.ratio:.3g} times the bound"


def remedy(report: NormReport) -> str:
    """How to disable the fusion that made the norm's operator, for a message; empty where it is not known."""
    fusion = _FUSIONS.get(report.became.split(" ")[0])
    return f'; InferenceSession(..., disabled_optimizers=["{fusion}"]) avoids it' if fusion else ""


# ------------------------------------------------------------------------------------------------- hard rows


def judge_stress(run: Run, case: Case, seed: int) -> Iterator[Finding]:
    """Run a norm that is right so far on stress rows (`stress.hard_rows`), against C.

    An error above the bound changes the verdict to "wrong" or "inaccurate" only if the file is to blame and the run
    met rows nearly as hard (`stress.reached`); otherwise to "risky". Yields notes for two limits of the runtime, which
    change no verdict: its plain LayerNormalization fails on the same rows, or its operator sums sequentially.
    """
    norm, report, isolated = case.norm, case.report, case.isolated
    if not isolated.can_stress:
        return
    seen = stress.hardness(case.rows)
    budget = max(_STRESSED // len(run.reached), _STRESSED_EACH)
    most = max(1, budget // max(1, isolated.layout[0] * isolated.layout[1]))
    for tried, hard in enumerate(stress.hard_rows(*isolated.layout, isolated.dtype, norm.eps, seed)):
        if tried == most:
            message = f"only {most} sets of stress rows were tried, because its input is large: --size makes it smaller"
            yield Finding("note", "sizes", message, norm.name)
            break
        feeds = isolated.feed(hard.rows)
        rows = case.oracle.rows(feeds)
        for level in isolated.levels:
            error = isolated.measured(level, feeds, partial(case.oracle.claim_error, rows))
            if error.ratio > 1 and level != "off":
                report.became = run.became(norm, level)[0]
            operator = norm.form if level == "off" else report.became.partition(" ")[0]
            if error.ratio > 1 and isolated.bare_fails(hard.rows):
                yield Finding("note", "runtime-limit", f"{hard.family}: onnxruntime's own operator fails as well")
                break
            report.points += [[c, min(r, MOST_RATIO), hard.family] for c, r in error.points[::8]]
            if error.ratio <= 1:
                continue
            sequential = error.ratio > 1 and _sequential(case, "decomposed" if operator == "no" else operator)
            if sequential and isolated.measured(level, feeds, partial(case.oracle.claim_error, rows), True).ratio <= 1:
                yield _summed_sequentially(case, operator, hard.family)
                break
            blame = culprit(case, [feeds]) if level == "off" else "optimiser"
            where = f"{hard.family}, optimisation {level!r}: {amount(error)}{remedy(report) * (blame == 'optimiser')}"
            if blame == "file" and not run.generated and stress.reached(hard.hard_by, stress.hardness([rows]), seen):
                set_verdict(report, error, "wrong" if error.ratio > BROKEN else "inaccurate", blame)
                report.detail = f"fails on rows like those it meets, {where}"
                return
            if report.verdict == "ok":
                set_verdict(report, error, "risky", blame)
                report.detail = f"fails on rows it has not met, {where}"
            if hard.family not in report.risks:
                report.risks.append(hard.family)
            break


# ------------------------------------------------------------------------------------------- values of the run


def _lost_rows(case: Case, rows: list[JudgedRows]) -> list[Finding]:
    """Finite rows whose result is finite by the formula, but NaN or Inf in the run."""
    norm, lost = case.norm, 0
    for facts, y in zip(rows, case.results, strict=True):
        if y.shape != facts.claim.shape:
            continue
        limit = float(np.finfo(y.dtype).max) if y.dtype.kind == "f" else np.inf
        with np.errstate(all="ignore"):
            fine = np.isfinite(facts.largest) & (facts.variance + norm.eps > 0)
            fine = fine & np.isfinite(facts.claim) & (np.abs(facts.claim) <= limit)
            lost += int(np.sum(fine & ~np.isfinite(y.astype(np.float64))))
    if not lost:
        return []
    return [Finding("error", "nan", f"{lost} elements of finite rows came out as NaN or Inf", norm.name)]


def _spoiled_rows(run: Run, case: Case, rows: list[JudgedRows]) -> list[Finding]:
    """Rows with NaN or Inf in the input; no result for them is right, so the verdict leaves them out."""
    spoiled = sum(int(np.sum(~np.isfinite(r.largest))) for r in rows)
    if not spoiled:
        return []
    message, level = f"{spoiled} rows with NaN or Inf reached it and were not judged", "warning"
    if run.finite_inputs and not run.generated:
        message, level = f"{message}, though every input of the model is finite", "error"
    elif run.generated:
        message += f"; generated inputs: {clip(str(run.generated), 100)}"
    return [Finding(level, "non-finite", message, case.norm.name)]


def _overflow(case: Case, rows: list[JudgedRows]) -> list[Finding]:
    """Squares, for the largest values seen, that overflow float16.

    onnxruntime computes float16 in float32 on the CPU, so the overflow does not show in the run.
    """
    norm = case.norm
    if norm.compute_dtype != onnx.TensorProto.FLOAT16 or norm.operator:
        return []
    # |x - mean| is at most 2 max|x|, and at most the root of the sum of squared deviations, sqrt(n var)
    largest = max(float(np.max(r.largest, initial=0.0)) for r in rows)
    root_of_squares = max(float(np.sqrt(np.max(r.variance, initial=0.0) * r.n)) for r in rows)
    square = min(2 * largest, root_of_squares) ** 2
    if square <= float(np.finfo(np.float16).max):
        return []
    message = f"squares up to {square:.3g} overflow float16 where it is computed in float16"
    return [Finding("warning", "float16-overflow", message, norm.name)]
