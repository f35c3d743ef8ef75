"""Every specimen of the gallery gives exactly the norms, findings and exit code that it declares."""

import gallery
import numpy as np
import onnx
import onnxruntime
import pytest

from onnx_export.validation.examine import examine
from onnx_export.validation.norm import unproved_claims
from onnx_export.validation.options import Options
from onnx_export.validation.patterns import find


def examined(specimen, folder):
    path, options = gallery.lay_out(specimen, folder)
    return examine(str(path), Options(**options), lambda kind, value: None)


@pytest.mark.exhaustive(one_in=14)
@pytest.mark.parametrize("build", gallery.SPECIMENS, ids=lambda build: build.__name__)
def test_specimen(build, tmp_path):
    specimen = build()
    report = examined(specimen, tmp_path)
    found = [("~" * bool(n.near_miss) + n.formula, n.verdict, n.blame) for n in report.norms]
    said = f"{[n.detail for n in report.norms]} {report.problem}"
    assert found == specimen.norms, said
    assert {f.code for f in report.findings if f.level != "note"} == specimen.findings
    assert report.exit_code() == specimen.exit_code, said


@pytest.mark.parametrize(
    ("n", "dtype"),
    [(n, np.float16) for n in (2, 3, 7, 333, 767, 768, 1000, 4095)]
    + [(n, np.float32) for n in (2, 3, 7, 333, 768, 50000, 100003)],
)
@pytest.mark.parametrize("divide", [True, False])
def test_stored_count_n_is_distinguished_from_n_minus_1(divide, n, dtype):
    """A stored 1/n is never a near miss; a stored 1/(n - 1) is one, unless both round to the same number."""

    def near_miss(count):
        model = onnx.shape_inference.infer_shapes(gallery.sum_nodes(divide, count, n, dtype))
        return find(model)[0].near_miss

    assert near_miss(n) == ""
    as_stored = {float(dtype(count if divide else 1 / count)) for count in (n, n - 1)}
    if len(as_stored) == 2 and not (dtype == np.float16 and n > 1000):
        assert near_miss(n - 1).endswith("(unbiased)")


FORMS = ["pytorch_pow", "pytorch_mul", "keras_batch_normalization_form", "keras_3_form", "scale_before_the_division"]


@pytest.mark.parametrize("form", [*FORMS, "flax_one_pass_benign", "residual_before_the_norm", "unbiased_sum"])
def test_finder_accepts_nodes_with_a_third_operand(form):
    whole = onnx.shape_inference.infer_shapes(getattr(gallery, form)().model)
    for at, node in enumerate(whole.graph.node):
        for first in (True, False):
            if node.op_type in ("Add", "Sub", "Mul", "Div", "Pow"):
                model = onnx.ModelProto()
                model.CopyFrom(whole)
                model.graph.node[at].input.insert(0 if first else 2, "x")
                assert len(find(model)) <= len(find(whole))


def test_claims_are_checked_in_time_linear_in_the_functions(work):
    """A norm in the innermost of many nested functions."""

    def steps(count):
        names = [f"LayerNorm{i}" for i in range(count)]
        calls = [gallery.node(name, "x", "y", domain="local") for name in names]
        bodies = [[call] for call in calls[1:]] + [[gallery.native()]]
        functions = [gallery.function(name, body, {}) for name, body in zip(names, bodies, strict=True)]
        model = gallery.model(calls[:1], functions=functions)
        norms = find(model)
        assert unproved_claims(model, norms) == []
        assert unproved_claims(model, []) == names
        return work(lambda: unproved_claims(model, norms))

    assert steps(400) < 2.2 * steps(200)


def test_gallery_has_enough_specimens():
    assert len(gallery.SPECIMENS) >= 40


@pytest.mark.parametrize(
    ("trap", "build", "level", "became"),
    [
        ("eps-first", gallery.trap_eps_first, "basic", "LayerNormalization (axis -1, epsilon 1e-05)"),
        ("skip-axis", gallery.trap_skip_axis, "all", "SkipLayerNormalization"),
    ],
)
def test_report_names_the_fused_operator_of_a_norm(trap, build, level, became, tmp_path):
    if not gallery.traps.miscomputes(trap):
        pytest.skip(f"onnxruntime {onnxruntime.__version__} gets {trap} right")
    norm = examined(build(), tmp_path).norms[0]
    assert norm.became.startswith(became)
    assert f"wrong with {level!r}" in norm.detail


def test_a_failed_run_names_generated_inputs(tmp_path):
    report = examined(gallery.generated_input_that_does_not_fit(), tmp_path)
    assert "generated inputs: ['x', 'shape']: other sizes may do (--batch, --dim, --size NAME=N)" in report.problem


def test_runtime_overflow_is_one_note_for_all_norms(tmp_path):
    """Rows of 1e25 overflow the squares of onnxruntime's own kernel: one note for any number of norms."""
    report = examined(gallery.two_norms_in_a_row(), tmp_path)
    assert [f.code for f in report.findings].count("runtime-limit") <= 1
    assert [n.risks for n in report.norms] == [[], []]


@pytest.mark.parametrize("step", ["patterns.operator_of", "lint.trap_of"])
def test_an_error_in_finding_one_norm_does_not_stop_the_others(step, tmp_path, fails_once):
    """An exception becomes a finding about that node, and the exit code says that the check is incomplete."""
    fails_once(step, RecursionError("met something strange"))
    report = examined(gallery.two_norms_in_a_row(), tmp_path)
    assert [n.verdict for n in report.norms] == ["ok"] * (1 if step == "patterns.operator_of" else 2)
    (finding,) = [f for f in report.findings if f.code == "unread"]
    assert finding.norm == "h"
    assert "met something strange" in finding.message
    assert "met something strange" in report.problem
    assert report.exit_code() == 2


@pytest.mark.parametrize("step", ["verdict.culprit", "stress.hard_rows", "isolated.subgraph_model"])
def test_an_error_in_judging_one_norm_does_not_stop_the_others(step, tmp_path, fails_once):
    """An exception while judging one norm affects its verdict and the exit code; the report is still complete."""
    fails_once(step, RuntimeError("met something strange"))
    build = gallery.one_pass_at_a_huge_mean if step == "verdict.culprit" else gallery.two_norms_in_a_row
    report = examined(build(), tmp_path)
    assert [n.verdict for n in report.norms] == (
        ["not exercised"] if step == "verdict.culprit" else ["not exercised", "ok"]
    )
    assert "met something strange" in report.problem
    assert report.exit_code() == 2


@pytest.mark.parametrize("divide", [True, False])
def test_finder_accepts_rows_without_elements(divide):
    model = onnx.shape_inference.infer_shapes(gallery.sum_nodes(divide, 5, n=0))
    assert [norm.form for norm in find(model)] == ["decomposed"]
