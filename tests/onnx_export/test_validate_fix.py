"""--fix rewrites what it has proved, computes the same afterwards, and says why it left the rest."""

import numpy as np
import onnx
import onnx_gallery as gallery
import pytest

from onnx_export.float64 import Float64
from onnx_export.validation import runtime
from onnx_export.validation.examine import Options, examine

REWRITTEN = [
    gallery.pytorch_pow,
    gallery.pytorch_mul,
    gallery.decomposed_without_affine,
    gallery.decomposed_without_bias,
    gallery.decomposed_two_axes,
    gallery.decomposed_channel_axis,
    gallery.decomposed_float16,
    gallery.mixed_precision,
    gallery.paddle,
    gallery.keras_batch_normalization_form,
    gallery.keras_3_form,
    gallery.flax_one_pass_benign,
    gallery.quantised_scale,
    gallery.inside_a_local_function,
    gallery.trap_eps_first,
]
LEFT = {
    gallery.unbiased_variance: "no layer norm",
    gallery.decomposed_rms: "only layer norms are rewritten",
    gallery.pytorch_opset_11: "needs opset 17",
    gallery.inside_if_decomposed: "only the main graph",
    gallery.stored_count_of_another_width: "row length is not fixed",
}


def fixed(build, folder):
    path, options = gallery.lay_out(build(), folder)
    out = folder / "fixed.onnx"
    report = examine(str(path), Options(**options, fix=str(out)), lambda kind, value: None)
    return report, out


def feeds(model):
    rng = np.random.default_rng(3)
    return {
        value.name: (2 + rng.normal(size=[d.dim_value or 3 for d in value.type.tensor_type.shape.dim])).astype(
            onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        )
        for value in model.graph.input
    }


@pytest.mark.parametrize("build", REWRITTEN, ids=lambda build: build.__name__)
def test_rewritten_and_equal(build, tmp_path):
    report, out = fixed(build, tmp_path)
    before, after = build().model, onnx.load(out)
    onnx.checker.check_model(after, full_check=True)
    count = sum(node.op_type == "LayerNormalization" for node in after.graph.node)
    assert count == len(report.norms), report.fixed
    assert not {"Sqrt", "ReduceMean", "ReduceSum"} & {node.op_type for node in after.graph.node}
    assert not any(node.metadata_props for node in after.graph.node)
    assert not any("scale" in t.name and "cnorm" not in t.name for t in after.graph.initializer)

    given = feeds(before)
    if build is gallery.quantised_scale:  # onnx's evaluator has no DequantizeLinear this old
        old = runtime.Session(before, "off").run(["y"], given)[0]
        np.testing.assert_allclose(Float64(after).run(given)["y"], old, rtol=0, atol=1e-5)
    else:
        old = Float64(before).run(given)["y"]
        np.testing.assert_allclose(Float64(after).run(given)["y"], old, rtol=0, atol=1e-12)
    # and the runtime, optimised, now gets it right
    again = examine(str(out), Options(), lambda kind, value: None)
    assert {(n.form, n.verdict) for n in again.norms} == {("LayerNormalization", "ok")}
    assert runtime.Session(after, "all").run(["y"], given)[0].shape == old.shape


@pytest.mark.parametrize("build", LEFT, ids=lambda build: build.__name__)
def test_left_alone_with_the_reason(build, tmp_path):
    report, out = fixed(build, tmp_path)
    assert not out.exists()
    assert LEFT[build] in report.fixed[0]


def test_a_norm_whose_mean_is_used_elsewhere_is_left(tmp_path):
    specimen = gallery.pytorch_mul()
    specimen.model.graph.output.append(onnx.ValueInfoProto(name="mean"))
    report, out = fixed(lambda: specimen, tmp_path)
    assert "'mean' is used elsewhere" in report.fixed[0]
    assert not out.exists()


def test_a_difference_in_float64_stops_the_rewrite(tmp_path, monkeypatch):
    """Were the proof not made, a wrong operator would be written."""
    from onnx_export.validation import repair

    honest = repair._operator

    def crooked(case, prefix):
        nodes, stored = honest(case, prefix)
        for attribute in nodes[0].attribute:
            if attribute.name == "epsilon":
                attribute.f *= 1.01
        return nodes, stored

    monkeypatch.setattr(repair, "_operator", crooked)
    report, out = fixed(gallery.pytorch_mul, tmp_path)
    assert "differ in float64" in report.fixed[0]
    assert not out.exists()


def test_an_unwritable_path_is_reported_and_leaves_nothing(tmp_path):
    path, _ = gallery.lay_out(gallery.pytorch_mul(), tmp_path)
    report = examine(str(path), Options(fix=str(tmp_path / "no" / "x.onnx")), lambda kind, value: None)
    assert "--fix: cannot write" in report.problem
    assert report.fixed == []  # not "the file was not run": it was
    assert [norm.verdict for norm in report.norms] == ["ok"]
    assert report.exit_code() == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx"]
