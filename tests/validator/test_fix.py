"""--fix rewrites norms proved equal, the new file computes the same, and the others get a reason."""

import gallery
import numpy as np
import onnx
import pytest

from onnx_export import ort
from onnx_export.float64 import Float64
from onnx_export.validation.examine import examine
from onnx_export.validation.options import Options

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


@pytest.mark.exhaustive(one_in=4)
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
    if build is gallery.quantised_scale:  # onnx's evaluator lacks DequantizeLinear of this opset
        old = ort.Session(before, "off").run(["y"], given)[0]
        np.testing.assert_allclose(Float64(after).run(given)["y"], old, rtol=0, atol=1e-5)
    else:
        old = Float64(before).run(given)["y"]
        np.testing.assert_allclose(Float64(after).run(given)["y"], old, rtol=0, atol=1e-12)
    # the optimised runtime now computes the new file correctly
    again = examine(str(out), Options(), lambda kind, value: None)
    assert {(n.form, n.verdict) for n in again.norms} == {("LayerNormalization", "ok")}
    assert ort.Session(after, "all").run(["y"], given)[0].shape == old.shape


@pytest.mark.parametrize("build", LEFT, ids=lambda build: build.__name__)
def test_unrewritten_norms_have_a_reason(build, tmp_path):
    report, out = fixed(build, tmp_path)
    assert not out.exists()
    assert LEFT[build] in report.fixed[0]


def test_a_norm_whose_mean_is_used_elsewhere_is_not_rewritten(tmp_path):
    specimen = gallery.pytorch_mul()
    specimen.model.graph.output.append(onnx.ValueInfoProto(name="mean"))
    report, out = fixed(lambda: specimen, tmp_path)
    assert "'mean' is used elsewhere" in report.fixed[0]
    assert not out.exists()


def test_a_difference_in_float64_stops_the_rewrite(tmp_path, monkeypatch):
    """With a fault in the rewrite, the comparison in float64 prevents that a wrong operator is written."""
    from onnx_export.validation import repair

    honest = repair.replacement

    def crooked(case, prefix):
        operator = honest(case, prefix)
        for attribute in operator.nodes[0].attribute:
            if attribute.name == "epsilon":
                attribute.f *= 1.01
        return operator

    monkeypatch.setattr(repair, "replacement", crooked)
    report, out = fixed(gallery.pytorch_mul, tmp_path)
    assert "differ in float64" in report.fixed[0]
    assert not out.exists()


def test_an_unwritable_path_is_reported_and_leaves_nothing(tmp_path):
    path, _ = gallery.lay_out(gallery.pytorch_mul(), tmp_path)
    report = examine(str(path), Options(fix=str(tmp_path / "no" / "x.onnx")), lambda kind, value: None)
    assert "--fix: cannot write" in report.problem
    assert report.fixed == []  # the reason must not be that the file was not run: it was
    assert [norm.verdict for norm in report.norms] == ["ok"]
    assert report.exit_code() == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx"]


def two_norms(first, second, joined="Add", **options):
    """Two norms of x and the nodes that join their results."""
    (nodes, constants), (others, more) = first, second
    return gallery.model([*nodes, *others, gallery.node(joined, "y0 y1", "y")], constants=constants | more, **options)


def norms_over_both_axes(time):
    last, other = (
        gallery.decomposed(y="y0", prefix="p_"),
        gallery.decomposed(y="y1", prefix="q_", axes=(1,), affine=False),
    )
    return two_norms(last, other, shape=(2, time, gallery.N))


def assert_computes_the_same(path, model, atol=1e-5):
    given = feeds(model)
    after = onnx.load(path)
    onnx.checker.check_model(after, full_check=True)
    old, new = (ort.Session(m, "off").run(["y"], given)[0] for m in (model, after))
    np.testing.assert_allclose(new, old, rtol=0, atol=atol)


def test_a_repaired_file_is_repaired_again(tmp_path):
    """A second repair rewrites what the first left, and does not reuse names that the first generated."""

    def examine_fix(path, out):
        return examine(str(path), Options(fix=str(out)), lambda kind, value: None)

    onnx.save(norms_over_both_axes("T"), tmp_path / "m.onnx")
    report = examine_fix(tmp_path / "m.onnx", tmp_path / "r1.onnx")
    assert "row length is not fixed" in report.fixed[1]
    halfway = onnx.load(tmp_path / "r1.onnx")
    del halfway.graph.value_info[:]
    halfway.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 16
    onnx.save(halfway, tmp_path / "m.onnx")
    report = examine_fix(tmp_path / "m.onnx", tmp_path / "r2.onnx")
    assert report.fixed[-1].endswith("1 of 1 decomposed norms rewritten")
    assert_computes_the_same(tmp_path / "r2.onnx", norms_over_both_axes(16))
    assert [node.op_type for node in onnx.load(tmp_path / "r2.onnx").graph.node].count("LayerNormalization") == 2


@pytest.mark.parametrize("name", ["cnorm_fixed_0_scale", "cnorm_tap_0", "cnorm_tap_0_0"])
@pytest.mark.parametrize("inside", [False, True])
def test_generated_names_avoid_existing_ones(name, inside, tmp_path):
    nodes, constants = gallery.decomposed(y="h")
    if inside:
        branch = onnx.helper.make_graph([gallery.node("Neg", "h", name)], "g", [], [gallery.value(name)])
        nodes.append(gallery.node("If", "yes", "y", then_branch=branch, else_branch=branch))
        constants["yes"] = np.array(True)
    else:
        nodes += [gallery.node("Neg", "h", name), gallery.node("Abs", name, "y")]
    model = gallery.model(nodes, constants=constants)
    report, out = fixed(lambda: gallery.Specimen(model), tmp_path)
    assert [norm.verdict for norm in report.norms] == ["ok"], report.problem
    assert_computes_the_same(out, model)


def test_does_not_write_a_model_whose_outputs_changed(tmp_path, monkeypatch):
    """The whole model is compared with the original even if each rewritten norm was proved equal."""
    from onnx_export.validation import repair

    honest = repair.replaced

    def miswired(model, chosen):
        fixed = honest(model, chosen)
        fixed.graph.initializer[0].raw_data = bytes(4 * gallery.N)
        return fixed

    monkeypatch.setattr(repair, "replaced", miswired)
    report, out = fixed(gallery.pytorch_mul, tmp_path)
    assert report.problem == "--fix: wrote nothing, the outputs of the repaired model differ"
    assert not out.exists()

    def twice(model, chosen):
        fixed = honest(model, chosen)
        fixed.graph.initializer.append(fixed.graph.initializer[0])
        return fixed

    monkeypatch.setattr(repair, "replaced", twice)
    report, out = fixed(gallery.pytorch_mul, tmp_path)
    assert "--fix: wrote nothing, onnx's checker refuses the result" in report.problem
    assert "not unique" in report.problem
    assert not out.exists()


def test_differences_in_small_rows_are_seen_beside_a_large_row(tmp_path, monkeypatch):
    from onnx_export.validation import repair

    honest = repair.replaced

    def miswired(model, chosen):
        fixed = honest(model, chosen)
        for tensor in fixed.graph.initializer:
            if tensor.name.endswith("_scale"):
                tensor.raw_data = (1.5 * onnx.numpy_helper.to_array(tensor)).tobytes()
        return fixed

    monkeypatch.setattr(repair, "replaced", miswired)
    nodes, constants = gallery.decomposed(y="h")
    constants["high"] = np.array([[0.0], [0.0], [1e5]], np.float32)
    model = gallery.model([*nodes, gallery.node("Add", "h high", "y")], constants=constants)
    report, out = fixed(lambda: gallery.Specimen(model), tmp_path)
    assert report.problem == "--fix: wrote nothing, the outputs of the repaired model differ"
    assert not out.exists()


def test_outputs_that_differ_only_by_rounding_are_accepted():
    from onnx_export.validation.repair import agree

    a = np.array([[1, -2, np.nan], [np.inf, 1e-3, 0], [1e-9, 0, 0]], np.float32)
    near = a + np.array([1e-3, 1e-7, 1e-8], np.float32)[:, None]
    assert agree([a], [near])
    assert not agree([a], [a + np.float32(1e-5)])
    assert not agree([np.float16([[1], [1e4]])], [np.float16([[2], [1e4]])])
    for at, value in (((0, 2), 0), ((1, 0), 1), ((1, 0), -np.inf), ((0, 0), np.nan)):
        other = a.copy()
        other[at] = value
        assert not agree([a], [other])
    for same in (np.float32(3), np.float16([]), np.zeros((0, 3)), np.zeros((3, 0)), np.array(["a"]), np.array([True])):
        assert agree([same], [same])


def test_output_that_is_all_nan_is_reported_as_not_compared(tmp_path):
    nodes, constants = gallery.decomposed(y="h")
    constants["nothing"] = np.array(np.nan, np.float32)
    nodes.append(gallery.node("Mul", "h nothing", "y"))
    report, out = fixed(lambda: gallery.Specimen(gallery.model(nodes, constants=constants)), tmp_path)
    assert "not compared: 'y' has no finite element" in report.fixed[-1], report.problem
    assert out.exists()


def test_float64_decides_when_float32_rounding_differs(tmp_path):
    """The original's one-pass variance is inaccurate in float32; in float64 the operator is the same function."""
    report, out = fixed(gallery.one_pass_at_a_huge_mean, tmp_path)
    assert report.norms[0].verdict == "wrong"
    assert report.fixed[-1].endswith("1 of 1 decomposed norms rewritten"), report.problem
    assert out.exists()


def test_random_models_are_reported_as_not_comparable(tmp_path):
    nodes, constants = gallery.decomposed(y="h")
    nodes += [gallery.node("RandomNormalLike", "x", "noise"), gallery.node("Add", "h noise", "y")]
    report, out = fixed(lambda: gallery.Specimen(gallery.model(nodes, constants=constants)), tmp_path)
    assert "not compared: the model gives other results at each run" in report.fixed[-1]
    assert out.exists()


def test_an_unused_norm_does_not_stop_the_others(tmp_path):
    used, idle = gallery.decomposed(y="y0", prefix="p_"), gallery.decomposed(y="y1", prefix="q_")
    model = gallery.model([*used[0], *idle[0], gallery.node("Neg", "y0", "y")], constants=used[1] | idle[1])
    report, out = fixed(lambda: gallery.Specimen(model), tmp_path)
    assert report.fixed[-1].endswith("2 of 2 decomposed norms rewritten"), report.problem
    assert_computes_the_same(out, model)
    assert "y1" in {name for node in onnx.load(out).graph.node for name in node.output}  # it was unused before, too


def test_norm_whose_scale_broadcasts_the_result_is_not_rewritten(tmp_path):
    wide, plain = gallery.decomposed(y="y0", prefix="p_"), gallery.decomposed(y="y1", prefix="q_", affine=False)
    model = two_norms(wide, plain, shape=(4, 1))
    report, out = fixed(lambda: gallery.Specimen(model), tmp_path)
    assert report.fixed[0].endswith("its scale of shape [16] is not one for the axes [1] of [4, 1]")
    assert report.fixed[-1].endswith("1 of 2 decomposed norms rewritten")
    assert_computes_the_same(out, model)


@pytest.mark.parametrize(
    "step", ["isolated.subgraph_model", "repair.replacement", "repair.Float64", "stress.hard_rows"]
)
def test_an_error_in_one_norm_does_not_stop_other_rewrites(step, tmp_path, fails_once):
    fails_once(step, ValueError("met something strange"))
    model = two_norms(gallery.decomposed(y="y0", prefix="p_"), gallery.decomposed(y="y1", prefix="q_"))
    report, out = fixed(lambda: gallery.Specimen(model), tmp_path)
    assert report.fixed[0].startswith("left y0: it ")
    assert report.fixed[-1].endswith("1 of 2 decomposed norms rewritten")
    assert_computes_the_same(out, model)


@pytest.mark.parametrize("name", ["scale", "bias", "eps", "power", "stored_scale"])
def test_initialisers_that_are_inputs_are_not_folded(name, tmp_path):
    """An initialiser that is also an input is a default value; keep_initializers_as_inputs=True writes such files."""
    nodes, constants = gallery.decomposed()
    if name == "stored_scale":  # the scale folds from it
        constants[name] = constants.pop("scale")
        nodes.insert(0, gallery.node("Identity", name, "scale"))
    inputs = [gallery.value("x", (3, gallery.N)), gallery.value(name, constants[name].shape)]
    report, out = fixed(lambda: gallery.Specimen(gallery.model(nodes, constants=constants, inputs=inputs)), tmp_path)
    assert report.fixed[0].endswith(f"its {name!r} can be replaced by the caller"), report.problem
    assert not out.exists()


def test_default_inputs_outside_the_norm_do_not_stop_the_rewrite(tmp_path):
    nodes, constants = gallery.decomposed(x="h")
    constants["shift"] = np.ones(gallery.N, np.float32)
    nodes.insert(0, gallery.node("Add", "x shift", "h"))
    inputs = [gallery.value("x", (3, gallery.N)), gallery.value("shift", (gallery.N,))]
    model = gallery.model(nodes, constants=constants, inputs=inputs)
    model.graph.value_info.append(gallery.value("h", (3, gallery.N)))
    report, out = fixed(lambda: gallery.Specimen(model), tmp_path)
    assert report.fixed[-1].endswith("1 of 1 decomposed norms rewritten"), report.problem
    assert_computes_the_same(out, model)
