"""Means in writings that no pattern knows: what x loses before an RMS norm is evaluated, over the right axis or not."""

import numpy as np
import onnx
import pytest
from writings import LEVELS, Writing, examined, saved, shown

from onnx_export.validation import patterns

D = 24
SHAPE = (2, D, D)
TURN = [0, 2, 1]


def part(w, x, first, last, axis):
    return w.op("Slice", x, np.int64([first]), np.int64([last]), np.int64([axis]))


def halves(w, x, axis):
    means = [w.mean(part(w, x, i, i + D // 2, axis), (axis,)) for i in (0, D // 2)]
    return w.op("Mul", w.op("Add", *means), 0.5)


def weighted_halves(w, x, axis):
    """Of 8 and 16 elements."""
    means = w.mean(part(w, x, 0, 8, axis), (axis,)), w.mean(part(w, x, 8, D, axis), (axis,))
    return w.op("Add", w.op("Mul", means[0], 1 / 3), w.op("Mul", means[1], 2 / 3))


def pooled(w, x, axis):
    if axis == 2:
        return w.op("Transpose", w.op("Transpose", w.op("AveragePool", x, kernel_shape=[D]), perm=TURN), perm=TURN)
    turned = w.op("AveragePool", w.op("Transpose", x, perm=TURN), kernel_shape=[D])
    return w.op("Transpose", turned, perm=TURN)


def turned(w, x, axis):
    return w.op("Transpose", w.mean(w.op("Transpose", x, perm=TURN), (3 - axis,)), perm=TURN)


def last_of_running_sums(w, x, axis):
    sums = w.op("CumSum", x, np.int64(axis))
    return w.op("Mul", w.op("Gather", sums, np.int64([D - 1]), axis=axis), 1 / D)


def flattened(w, x, axis):
    rows = w.op("Reshape", w.op("Transpose", x, perm=TURN) if axis == 1 else x, np.int64([-1, D]))
    mean = w.op("Reshape", w.mean(rows), np.int64([2, D, 1]))
    return w.op("Transpose", mean, perm=TURN) if axis == 1 else mean


def doubled(w, x, axis):
    return w.op("Mul", w.mean(w.op("Mul", x, 2.0), (axis,)), 0.5)


def through_other_functions(w, x, axis):
    return w.op("Neg", w.op("Sub", w.op("Neg", w.mean(w.op("Add", x, 3.0), (axis,))), -3.0))


def as_a_product(w, x, axis):
    """x times a matrix of 1/n, as long as x."""
    matrix = np.full((D, D), 1 / D, w.dtype)
    return w.op("MatMul", x, matrix) if axis == 2 else w.op("MatMul", w.constant(matrix), x)


MEANS = [
    halves,
    weighted_halves,
    pooled,
    turned,
    last_of_running_sums,
    flattened,
    doubled,
    through_other_functions,
    as_a_product,
]
ON_FLOAT32 = [pooled, last_of_running_sums]  # in onnxruntime


def decomposed(w, mean, axis):
    x = w.input("x", SHAPE)
    d = w.op("Sub", x, mean(w, x, axis))
    return w.op("Mul", w.op("Div", d, w.op("Sqrt", w.op("Add", w.variance(d), 1e-3))), w.gain(D))


def by_operator(w, mean, axis):
    x = w.input("x", SHAPE)
    return w.op("SimplifiedLayerNormalization", w.op("Sub", x, mean(w, x, axis)), w.gain(D), axis=-1, epsilon=1e-3)


def check(report, axis):
    assert [norm.formula for norm in report.norms] == ["layer"], shown(report)
    near = "the mean is over axes (1,), the variance over (2,)" if axis == 1 else ""
    assert report.norms[0].near_miss == near, shown(report)
    assert report.exit_code() == (axis == 1), shown(report)


@pytest.mark.exhaustive(one_in=19)
@pytest.mark.parametrize("axis", [2, 1], ids=["right", "wrong"])
@pytest.mark.parametrize("level", ["none", *LEVELS])
@pytest.mark.parametrize("mean", MEANS, ids=lambda mean: mean.__name__)
@pytest.mark.parametrize("opset", [13, 18])
def test_a_mean_is_evaluated_where_no_pattern_knows_it(mean, opset, level, axis, tmp_path):
    w = Writing(opset=opset)
    check(examined(saved(w.model(decomposed(w, mean, axis)), level, tmp_path), tmp_path), axis)


@pytest.mark.exhaustive(one_in=4)
@pytest.mark.parametrize("axis", [2, 1], ids=["right", "wrong"])
@pytest.mark.parametrize("dtype", [np.float16, np.float64])
@pytest.mark.parametrize("mean", [mean for mean in MEANS if mean not in ON_FLOAT32], ids=lambda mean: mean.__name__)
def test_a_mean_in_another_type_is_evaluated(mean, dtype, axis, tmp_path):
    w = Writing(dtype)
    check(examined(w.model(decomposed(w, mean, axis)), tmp_path), axis)


@pytest.mark.exhaustive(one_in=3)
@pytest.mark.parametrize("axis", [2, 1], ids=["right", "wrong"])
@pytest.mark.parametrize("level", ["none", "all"])
@pytest.mark.parametrize("mean", MEANS, ids=lambda mean: mean.__name__)
def test_a_mean_before_an_rms_operator_makes_it_a_layer_norm(mean, level, axis, tmp_path):
    w = Writing(opset=17)
    check(examined(saved(w.model(by_operator(w, mean, axis)), level, tmp_path), tmp_path), axis)


@pytest.mark.parametrize("write", [decomposed, by_operator], ids=lambda write: write.__name__)
def test_a_multiple_of_the_mean_is_an_error(write, tmp_path):
    w = Writing(opset=17)
    report = examined(w.model(write(w, lambda w, x, axis: w.op("Mul", halves(w, x, axis), 0.9), 2)), tmp_path)
    assert [norm.near_miss for norm in report.norms] == ["0.9 times its mean is subtracted from x"], shown(report)
    assert report.exit_code() == 1


@pytest.mark.exhaustive(one_in=2)
@pytest.mark.parametrize("write", [decomposed, by_operator], ids=lambda write: write.__name__)
@pytest.mark.parametrize("what", ["ReduceL2", "median", "gate", "residual"])
def test_what_is_no_mean_leaves_an_rms_norm(what, write, tmp_path):
    """Sound norms of x minus another value: no near miss."""

    def other(w, x, axis):
        if what == "median":
            return part(w, w.op("TopK", x, np.int64([D // 2]), outputs=2)[0], D // 2 - 1, D // 2, axis)
        if what == "gate":
            return w.op("Sigmoid", w.mean(x, (1,)))
        return w.op("MatMul", x, w.gain((D, D))) if what == "residual" else w.over(what, x)

    w = Writing(opset=17)
    report = examined(w.model(write(w, other, 2)), tmp_path)
    assert [(norm.formula, norm.near_miss) for norm in report.norms] == [("rms", "")], shown(report)
    assert report.exit_code() == 0, shown(report)


@pytest.mark.parametrize("opset", [13, 18])
def test_axes_of_one_element_make_no_difference(opset, tmp_path):
    w = Writing(opset=opset)
    x = w.input("x", (2, 1, D))
    d = w.op("Sub", x, w.mean(x, (1, 2)))
    y = w.op("Div", d, w.op("Sqrt", w.op("Add", w.variance(d), 1e-3)))
    report = examined(w.model(y), tmp_path)
    assert [(norm.formula, norm.near_miss) for norm in report.norms] == [("layer", "")], shown(report)


def test_an_axis_that_x_lacks_ends_no_search():
    """A file that no runtime loads: its variance is over an axis that x has not."""
    kinds = {name: onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, 3, 4]) for name in "xy"}
    nodes = [
        onnx.helper.make_node("ReduceMean", ["x"], ["m"], axes=[-1]),
        onnx.helper.make_node("Sub", ["x", "m"], ["d"]),
        onnx.helper.make_node("Mul", ["d", "d"], ["dd"]),
        onnx.helper.make_node("ReduceMean", ["dd"], ["v"], axes=[7]),
        onnx.helper.make_node("Add", ["v", "eps"], ["ve"]),
        onnx.helper.make_node("Sqrt", ["ve"], ["s"]),
        onnx.helper.make_node("Div", ["d", "s"], ["y"]),
    ]
    eps = onnx.numpy_helper.from_array(np.array(1e-5, np.float32), "eps")
    model = onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [kinds["x"]], [kinds["y"]], [eps]))
    assert [bool(norm.near.reason) for norm in patterns.find(model)] == [True]
