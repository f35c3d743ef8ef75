"""Sound files pass, whatever the seed, the optional inputs and the order of summation; who is to blame is right."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from writings import Writing

from onnx_export.validation.examine import examine
from onnx_export.validation.options import Options

D = 32
SHAPE = (2, 5, D)


def examined(model, folder, **options):
    onnx.save(model, folder / "model.onnx")
    return examine(str(folder / "model.onnx"), Options(**options), lambda *_: None)


def shown(report):
    findings = [f"{f.level} {f.code}: {f.message}" for f in report.findings]
    return report.problem, findings, [(n.near_miss, n.verdict, n.detail) for n in report.norms]


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("positions", ["", "each", "shared"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_optional_inputs_of_an_embedding_norm_are_read(dtype, positions, segments, tmp_path):
    w = Writing(dtype)
    ids = w.input("ids", (2, 5), TensorProto.INT32)
    kinds = w.input("kinds", (2, 5), TensorProto.INT32) if segments else ""
    where = w.input("where", (1 if positions == "shared" else 2, 5), TensorProto.INT32) if positions else ""
    tables = [w.gain((rows, D), rows) for rows in (11, 9)]
    norm = w.gain(D), w.gain(D, 2)
    kind_table = w.constant(w.gain((2, D), 5)) if segments else ""
    inputs = ids, kinds, *tables, kind_table, *norm, "", where
    y, _ = w.op("EmbedLayerNormalization", *inputs, outputs=2, domain="com.microsoft", epsilon=1e-5)
    report = examined(w.model(y), tmp_path)
    assert [norm.verdict for norm in report.norms] == ["ok"], shown(report)
    assert report.exit_code() == 0


@pytest.mark.exhaustive(one_in=2)
@pytest.mark.parametrize("shape", [(3, 8), (3, 8, 4), (2, 8, 3, 3)])
@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("opset", [18, 21])
def test_a_group_norm_of_any_rank_has_axes(shape, groups, opset, tmp_path):
    if groups == 8 and len(shape) == 2:
        pytest.skip("rows of one element are all 0")
    w = Writing(opset=opset)
    size = groups if opset == 18 else 8
    y = w.op("GroupNormalization", w.input("x", shape), w.gain(size), w.gain(size, 2), num_groups=groups)
    report = examined(w.model(y), tmp_path)
    assert report.exit_code() == 0, shown(report)
    assert report.norms[0].axes == list(range(1, len(shape)))


def one_pass(n, eps, dtype=np.float32):
    w = Writing(dtype, opset=18)
    x = w.input("x", (3, 4, n))
    mean = w.mean(x)
    var = w.op("Sub", w.mean(w.op("Mul", x, x)), w.op("Mul", mean, mean))
    return w.model(w.op("Div", w.op("Sub", x, mean), w.op("Sqrt", w.op("Add", var, eps))))


@pytest.mark.exhaustive(one_in=2)
@pytest.mark.parametrize("n", [4, 8, 16])
@pytest.mark.parametrize("eps", [1e-2, 1e-3])
def test_the_seed_does_not_decide_the_exit_code(n, eps, tmp_path):
    codes = {seed: examined(one_pass(n, eps), tmp_path, seed=seed).exit_code() for seed in range(3)}
    assert set(codes.values()) == {0}, codes


def test_rows_of_any_seed_are_not_taken_for_nearly_constant_ones(tmp_path):
    """As onnx writes GroupNormalization out, with eps 0.01: rows 1 + 0.1 N(0, 1) fail, rows N(0, 1) are unlike them."""
    w = Writing(np.float32, 18)
    x = w.input("x", (3, 2, 8))
    mean = w.mean(x)
    var = w.op("Sub", w.mean(w.op("Mul", x, x)), w.op("Mul", mean, mean))
    model = w.model(w.op("Div", w.op("Sub", x, mean), w.op("Sqrt", w.op("Add", var, 1e-2))))
    codes = {}
    for seed in range(8):
        values = np.random.default_rng(seed).standard_normal((3, 2, 8)).astype(np.float32)
        np.savez(tmp_path / "in.npz", x=values)
        codes[seed] = examined(model, tmp_path, input=str(tmp_path / "in.npz")).exit_code()
    assert set(codes.values()) == {0}, codes
    np.savez(tmp_path / "in.npz", x=1000 + values)
    assert examined(model, tmp_path, input=str(tmp_path / "in.npz")).exit_code() == 1


@pytest.mark.parametrize("n", [384, 4096])
@pytest.mark.parametrize("square", ["Mul", "ReduceSumSquare"])
def test_a_sum_over_another_axis_does_not_blame_the_formula(n, square, tmp_path):
    """Rows of few distinct values: rounding errors of a sequential sum have one sign and add up."""
    w = Writing(opset=17)
    x = w.input("x", (1, n, 4))
    x = w.op("Add", w.op("Mul", w.op("Cast", w.op("Greater", x, 1.3), to=1), 0.07), 0.7)
    d = w.centred(x, (1,))
    total = w.over("ReduceSumSquare", d, (1,))
    var = w.variance(d, (1,)) if square == "Mul" else w.op("Div", total, float(n))
    report = examined(w.model(w.op("Div", d, w.op("Sqrt", w.op("Add", var, 1e-5)))), tmp_path)
    assert report.norms[0].blame in ("", "kernel"), shown(report)


@pytest.mark.parametrize("value", [8.0, 16.0])
def test_an_instance_norm_may_sum_sequentially(value, tmp_path):
    w = Writing(opset=17)
    corner = np.zeros((1, 1, 200, 200), np.float32)
    corner[..., 190:, 190:] = value
    x = w.op("Add", w.input("x", (1, 1, 200, 200)), corner)
    y = w.op("InstanceNormalization", x, np.ones(1, np.float32), np.zeros(1, np.float32), epsilon=1e-5)
    assert examined(w.model(y), tmp_path).exit_code() == 0


@pytest.mark.parametrize("size", [(4, 3, 3, 3), (2, 3, 2, 2), (16, 64), (8, 4)])
@pytest.mark.parametrize("square", ["Mul", "Pow"])
def test_a_norm_of_stored_weights_is_judged(size, square, tmp_path):
    w = Writing(opset=17)
    stored, axes = w.constant(w.gain(size)), tuple(range(1, len(size)))
    d = w.centred(stored, axes)
    q = w.op("Mul", d, d) if square == "Mul" else w.op("Pow", d, 2.0)
    kernel = w.op("Div", d, w.op("Sqrt", w.op("Add", w.mean(q, axes), 1e-5)))
    if len(size) == 4:
        y = w.op("Conv", w.input("x", (1, 3, 8, 8)), kernel)
    else:
        y = w.op("MatMul", w.input("x", (5, size[0])), kernel)
    report = examined(w.model(y), tmp_path)
    assert [norm.verdict for norm in report.norms] == ["ok"], shown(report)
    assert report.exit_code() == 0


@pytest.mark.parametrize("form", ["rms", "layer"])
@pytest.mark.parametrize("how", ["Abs", "Neg", "Abs of Neg"])
@pytest.mark.parametrize("opset", [13, 18])
def test_an_even_power_forgets_the_sign(form, how, opset, tmp_path):
    w = Writing(opset=opset)
    x = w.input("x", SHAPE)
    d = a = w.centred(x) if form == "layer" else x
    for kind in reversed(how.split(" of ")):
        a = w.op(kind, a)
    std = w.op("Sqrt", w.op("Add", w.mean(w.op("Pow", a, 2.0)), 1e-5))
    report = examined(w.model(w.op("Mul", w.op("Div", d, std), w.gain(D))), tmp_path)
    assert [(norm.formula, norm.near_miss) for norm in report.norms] == [(form, "")], shown(report)
    assert report.exit_code(strict=True) == 0, shown(report)


@pytest.mark.parametrize("shapes", [((8,), (1, 8)), ((4, 1), (8,))])
def test_a_norm_that_the_optimiser_cannot_run_is_blamed_on_it(shapes, tmp_path):
    """A gain of more elements or dimensions than x, which onnxruntime's fusion does not take."""
    shape, gain = shapes
    w = Writing(opset=17)
    d = w.centred(w.input("x", shape))
    std = w.op("Sqrt", w.op("Add", w.mean(w.op("Pow", d, 2.0)), 1e-5))
    y = w.op("Add", w.op("Mul", w.op("Div", d, std), w.gain(gain)), w.gain(gain, 2))
    report = examined(w.model(y), tmp_path)
    (norm,) = report.norms
    if norm.verdict == "ok":
        pytest.skip("the installed onnxruntime runs it")
    assert (norm.verdict, norm.blame, report.exit_code()) == ("wrong", "optimiser", 1), shown(report)
    assert "disabled_optimizers" in norm.detail or "ORT_DISABLE_ALL" in norm.detail


@pytest.mark.parametrize(("batch", "length"), [(2, 10), (1, 1), (1, 2), (1, 16)])
@pytest.mark.parametrize("named", [True, False])
def test_other_sizes_are_tried_where_the_default_ones_do_not_run(batch, length, named, tmp_path):
    """A shape that an exporter computed once, with a batch and a length of its own."""
    w = Writing(opset=17)
    x = w.input("x", ("batch", "length", D) if named else (None, None, D))
    w.op("Reshape", x, np.int64([batch * length * D]))
    y = w.layer_norm(w.op("Reshape", x, np.int64([batch, length, D])))
    report = examined(w.model(y), tmp_path)
    assert report.exit_code() == 0, shown(report)
    assert any(f.code == "sizes" and f"--batch {batch} --dim {length}" in f.message for f in report.findings)
    stays = examined(w.model(y), tmp_path, dim=5)  # sizes that were asked for
    shape = f"'x' [batch, length, {D}]" if named else f"'x' [?, ?, {D}]"
    assert stays.exit_code() == 2
    assert f"it does not run with sizes made up for {shape}: give them (--size, --dim), or" in stays.problem


TWICE = {
    "Sigmoid": lambda w, x: w.op("Sigmoid", x),
    "Relu": lambda w, x: w.op("Relu", x),
    "Transpose": lambda w, x: w.op("Transpose", x, perm=[1, 0, 2]),
    "Gelu": lambda w, x: w.op("FastGelu", x, domain="com.microsoft"),
    "Softmax": lambda w, x: w.op("Softmax", x, axis=1),
}


@pytest.mark.parametrize("form", ["rms", "layer"])
@pytest.mark.parametrize("how", ["Div", *TWICE])
def test_a_value_may_be_computed_twice(how, form, tmp_path):
    w = Writing(opset=17)
    x = w.input("x", SHAPE)
    if how == "Div":
        largest = w.over("ReduceMax", w.op("Abs", x))
        one, other = (w.op("Div", x, largest) for _ in range(2))
    else:
        one, other = (TWICE[how](w, x) for _ in range(2))
    d = w.centred(one) if form == "layer" else one
    above = w.op("Sub", other, w.mean(other)) if form == "layer" else other
    y = w.op("Div", above, w.op("Sqrt", w.op("Add", w.variance(d), 1e-5)))
    report = examined(w.model(w.op("Mul", y, w.gain(D))), tmp_path)
    assert [(norm.formula, norm.near_miss) for norm in report.norms] == [(form, "")], shown(report)
    assert report.exit_code() == 0, shown(report)


def test_a_sorted_row_has_the_statistics_of_the_row(tmp_path):
    w = Writing(opset=17)
    x = w.input("x", SHAPE)
    ordered, _ = w.op("TopK", x, np.array([D]), outputs=2)
    d, v = w.op("Sub", x, w.mean(ordered)), w.variance(w.op("Sub", ordered, w.mean(ordered)))
    report = examined(w.model(w.op("Div", d, w.op("Sqrt", w.op("Add", v, 1e-5)))), tmp_path)
    assert [(norm.verdict, norm.near_miss) for norm in report.norms] == [("ok", "")], shown(report)


@pytest.mark.parametrize("eps", [True, False], ids=["eps", "no eps"])
@pytest.mark.parametrize("root", ["Pow", "Reciprocal", "Div"])
def test_a_mean_square_about_a_parameter_is_a_near_miss(root, eps, tmp_path):
    """x divided by the root of the mean square of x - b."""
    w = Writing(opset=17)
    x = w.input("x", SHAPE)
    v = w.variance(w.op("Sub", x, w.gain(D)))
    v = w.op("Add", v, 1e-5) if eps else v
    if root == "Pow":
        y = w.op("Mul", x, w.op("Pow", v, -0.5))
    elif root == "Reciprocal":
        y = w.op("Mul", x, w.op("Reciprocal", w.op("Sqrt", v)))
    else:
        y = w.op("Div", x, w.op("Sqrt", v))
    (norm,) = examined(w.model(y), tmp_path, find_only=True).norms
    assert "of another value" in norm.near_miss


@pytest.mark.parametrize("scale", ["ReduceMax", "ReduceSum", "ReduceMean"])
@pytest.mark.parametrize("order", [0, 1])
def test_an_eps_relative_to_a_divisor_is_a_near_miss(scale, order, tmp_path):
    """x / (sqrt(mean((x / m)^2) + eps) m)."""
    w = Writing(opset=17)
    x = w.input("x", SHAPE)
    m = w.over(scale, w.op("Abs", x))
    std = w.op("Sqrt", w.op("Add", w.variance(w.op("Div", x, m)), 1e-5))
    y = w.op("Div", x, w.op("Mul", *((std, m) if order else (m, std))))
    (norm,) = examined(w.model(y), tmp_path, find_only=True).norms
    assert "relative to the divisor" in norm.near_miss


@pytest.mark.parametrize("kind", ["Tanh", "Neg", "Exp", "Shape", "Identity", "Softmax"])
@pytest.mark.parametrize("root", ["Sqrt", "Reciprocal", "Log"])
def test_other_uses_of_a_deviation_disturb_nothing(kind, root, tmp_path):
    w = Writing(opset=17)
    d = w.centred(w.input("x", SHAPE))
    total = w.op("Add", w.variance(d), 1e-5)
    other = w.op(kind, w.op(root, total))
    y = w.op("Div", d, w.op("Sqrt", total))
    report = examined(w.model(y, other), tmp_path, find_only=True)
    assert [(norm.formula, norm.near_miss) for norm in report.norms] == [("layer", "")], shown(report)
    assert not report.problem


@pytest.mark.parametrize("form", ["rms", "layer"])
@pytest.mark.parametrize("after", [False, True], ids=["x", "x and the result"])
@pytest.mark.parametrize("gain", [False, True], ids=["no gain", "gain"])
@pytest.mark.parametrize("narrow", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_a_row_that_was_rounded_before_wide_statistics_is_sound(narrow, gain, after, form, tmp_path):
    """As converters write it that keep norms in float32: a Cast to a half type and back."""
    w = Writing(opset=18)

    def rounded(value):
        return w.op("Cast", w.op("Cast", value, to=narrow), to=TensorProto.FLOAT)

    x = rounded(w.input("x", SHAPE))
    d = w.centred(x) if form == "layer" else x
    y = w.op("Div", d, w.op("Sqrt", w.op("Add", w.variance(d), 1e-5)))
    y = rounded(y) if after else y
    report = examined(w.model(w.op("Mul", y, w.gain(D)) if gain else y), tmp_path)
    assert [norm.formula for norm in report.norms] == [form], shown(report)
    assert report.norms[0].verdict in (("ok",) if narrow == TensorProto.BFLOAT16 else ("ok", "risky"))  # it overflows
    assert report.exit_code() == 0, shown(report)
