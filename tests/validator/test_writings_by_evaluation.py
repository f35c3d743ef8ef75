"""Variances and roots in writings that no pattern knows are recognised by evaluation; faults in them are seen."""

import tracemalloc

import numpy as np
import pytest
from onnx import TensorProto, helper, shape_inference
from writings import LEVELS, Writing, examined, saved, shown

from onnx_export.validation.patterns import find

D = 24
SHAPE = (2, 5, D)


def norms_of(report):
    return [("~" if norm.near_miss else "") + norm.formula for norm in report.norms]


def row_with_itself(w, d, n):
    product = w.op("MatMul", w.over("Unsqueeze", d, (2,)), w.over("Unsqueeze", d, (3,)))
    return w.over("Squeeze", w.op("Mul", product, 1 / n), (3,))


def running_sum(w, d, n):
    total = w.op("CumSum", w.op("Mul", d, d), np.int64(2))
    return w.op("Div", w.op("Slice", total, np.int64([-1]), np.int64([999]), np.int64([2])), float(n))


def running_sum_gathered(w, d, n):
    total = w.op("CumSum", w.op("Mul", d, d), np.int64(-1), reverse=1)
    return w.over("Unsqueeze", w.op("Div", w.op("Gather", total, np.int64(0), axis=2), float(n)), (2,))


def mean_of_parts(w, d, n):
    parts = w.op("Split", w.op("Mul", d, d), axis=2, outputs=D)
    return w.op("Mul", w.op("Mean", *parts), D / n)


# each writes the sum of the squares of d over n
SQUARES = {
    "ReduceL1": lambda w, d, n: w.op("Div", w.over("ReduceL1", w.op("Mul", d, d)), float(n)),
    "row with itself": row_with_itself,
    "weighted factor": lambda w, d, n: w.over("ReduceSum", w.op("Mul", d, w.op("Mul", d, 1 / n))),
    "scaled first": lambda w, d, n: w.over("ReduceSumSquare", w.op("Mul", d, float(n**-0.5))),
    "CumSum": running_sum,
    "CumSum and Gather": running_sum_gathered,
    "eps inside": lambda w, d, n: w.mean(w.op("Add", w.op("Mul", w.op("Mul", d, d), D / n), 1e-3)),
    "Mean": mean_of_parts,
}
# onnxruntime has Mean for float32 alone
SQUARES_BY_DTYPE = [(how, t) for how in SQUARES for t in (np.float32, np.float64) if (how, t) != ("Mean", np.float64)]
# sums of squares of x about its mean, without a centred value
ABOUT_MEAN = {
    "x times d": lambda w, x: w.mean(w.op("Mul", x, w.centred(x))),
    "mean twice": lambda w, x: w.op("Sub", w.variance(x), w.op("Mul", w.mean(x), w.mean(w.op("Identity", x)))),
    "mean of x": lambda w, x: w.op("Sub", w.variance(x), w.mean(w.op("Mul", x, w.mean(x)))),
    "sums": lambda w, x: w.op("Div", w.op("Sub", w.op("Mul", w.variance(x), float(D)), square_over(w, x)), float(D)),
}


def square_over(w, x):
    total = w.over("ReduceSum", x)
    return w.op("Div", w.op("Mul", total, total), float(D))


def squared(how, n, centred=True, opset=13, dtype=np.float32, root="Sqrt"):
    w = Writing(dtype, opset)
    x = w.input("x", SHAPE)
    d = w.centred(x) if centred else x
    v = SQUARES[how](w, d, n)
    v = v if how == "eps inside" else w.op("Add", v, 1e-3)
    y = w.op("Div", d, w.op("Sqrt", v)) if root == "Sqrt" else w.op("Mul", d, w.op("Reciprocal", v))
    return w.model(w.op("Mul", y, w.gain(D)))


@pytest.mark.exhaustive(one_in=13)
@pytest.mark.parametrize("centred", [True, False], ids=["layer", "rms"])
@pytest.mark.parametrize(("how", "dtype"), SQUARES_BY_DTYPE, ids=lambda each: getattr(each, "__name__", each))
@pytest.mark.parametrize("opset", [13, 17])
def test_a_mean_square_in_any_writing_is_found(how, opset, dtype, centred, tmp_path):
    report = examined(squared(how, D, centred, opset, dtype), tmp_path)
    assert norms_of(report) == ["layer" if centred else "rms"], shown(report)
    assert report.norms[0].scale
    assert report.norms[0].eps == pytest.approx(1e-3, rel=1e-6)
    assert report.exit_code() == 0, shown(report)


@pytest.mark.exhaustive(one_in=5)
@pytest.mark.parametrize("how", SQUARES)
@pytest.mark.parametrize("level", LEVELS)
def test_a_mean_square_is_found_after_the_optimiser(how, level, tmp_path):
    report = examined(saved(squared(how, D), level, tmp_path), tmp_path)
    assert norms_of(report) == ["layer"], shown(report)
    assert report.exit_code() == 0, shown(report)


@pytest.mark.exhaustive(one_in=3)
@pytest.mark.parametrize("how", SQUARES)
@pytest.mark.parametrize("n", [D - 1, 20])
def test_another_count_in_any_writing_is_a_near_miss(how, n, tmp_path):
    report = examined(squared(how, n), tmp_path)
    assert norms_of(report) == ["~layer"], shown(report)
    assert report.exit_code() == (0 if n == D - 1 else 1), shown(report)
    assert report.exit_code(strict=True) == 1


@pytest.mark.exhaustive(one_in=2)
@pytest.mark.parametrize("how", SQUARES)
def test_no_root_in_any_writing_is_an_error(how, tmp_path):
    report = examined(squared(how, D, root=""), tmp_path)
    assert norms_of(report) == ["~layer"], shown(report)
    assert report.exit_code() == 1, shown(report)


@pytest.mark.exhaustive(one_in=5)
@pytest.mark.parametrize("how", ABOUT_MEAN)
@pytest.mark.parametrize("eps", [1e-3, 0.0])
@pytest.mark.parametrize("opset", [13, 18])
def test_a_variance_in_any_writing_is_found(how, eps, opset, tmp_path):
    w = Writing(opset=opset)
    x = w.input("x", SHAPE)
    v = ABOUT_MEAN[how](w, x)
    report = examined(w.model(w.op("Div", w.centred(x), w.op("Sqrt", w.op("Add", v, eps) if eps else v))), tmp_path)
    assert norms_of(report) == ["layer"], shown(report)
    assert report.exit_code() == (0 if eps else 1), shown(report)
    assert eps or any(found.code == "eps-zero" for found in report.findings)


ADDED = {
    "twice": lambda w, v: w.op("Add", w.op("Add", v, 5e-4), 5e-4),
    "a row of them": lambda w, v: w.op("Add", w.constant(np.full((1, 5, 1), 1e-3, w.dtype)), v),
    "one for each element": lambda w, v: w.op("Add", v, w.constant(np.full((2, 5, 1), 1e-3, w.dtype))),
    "then Abs": lambda w, v: w.op("Abs", w.op("Add", v, 1e-3)),
    "then Relu": lambda w, v: w.op("Relu", w.op("Add", v, 1e-3)),
    "then Max": lambda w, v: w.op("Max", 0.0, w.op("Add", v, 1e-3)),
    "then Clip": lambda w, v: w.op("Clip", w.op("Add", v, 1e-3), 0.0),
    "scaled": lambda w, v: w.op("Mul", w.op("Add", w.op("Mul", v, 2.0), 2e-3), 0.5),
}


@pytest.mark.exhaustive(one_in=4)
@pytest.mark.parametrize("how", ADDED)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("centred", [True, False], ids=["layer", "rms"])
def test_an_eps_in_any_writing_is_found(how, dtype, centred, tmp_path):
    w = Writing(dtype, opset=17)
    x = w.input("x", SHAPE)
    d = w.centred(x) if centred else x
    report = examined(w.model(w.op("Div", d, w.op("Sqrt", ADDED[how](w, w.variance(d))))), tmp_path)
    assert norms_of(report) == ["layer" if centred else "rms"], shown(report)
    assert report.norms[0].eps == pytest.approx(1e-3, rel=1e-6)
    assert report.exit_code() == 0, shown(report)


# each writes v^e, for e = -1/2
ROOTS = {
    "root over v": lambda w, v, e: w.op("Div", w.op("Pow", v, 1 + e), v),
    "1 over v over root": lambda w, v, e: w.op("Reciprocal", w.op("Div", v, w.op("Pow", v, 1 + e))),
    "product": lambda w, v, e: w.op("Mul", v, w.op("Pow", v, e - 1)),
    "power of 2": lambda w, v, e: w.op("Pow", 2.0, w.op("Mul", w.op("Div", w.op("Log", v), float(np.log(2))), e)),
    "two logarithms": lambda w, v, e: w.op("Exp", w.op("Sub", w.op("Mul", w.op("Log", v), e - 1), negated(w, v))),
    "Relu behind": lambda w, v, e: w.op("Relu", w.op("Pow", v, e)),
    "Clip behind": lambda w, v, e: w.op("Clip", w.op("Pow", v, e), 0.0),
    "Abs behind": lambda w, v, e: w.op("Abs", w.op("Pow", v, e)),
    "cubed": lambda w, v, e: w.op("Pow", w.op("Pow", v, e / 3), 3.0),
    "PRelu": lambda w, v, e: w.op("PRelu", w.op("Pow", v, e), w.constant(np.full(1, 0.1, w.dtype))),
}


def negated(w, v):
    return w.op("Neg", w.op("Log", v))


def rooted(how, exponent, divided, opset=17, dtype=np.float32):
    w = Writing(dtype, opset)
    d = w.centred(w.input("x", SHAPE))
    factor = ROOTS[how](w, w.op("Add", w.variance(d), 1e-3), -exponent if divided else exponent)
    return w.model(w.op("Mul", w.op("Div" if divided else "Mul", d, factor), w.gain(D)))


@pytest.mark.exhaustive(one_in=9)
@pytest.mark.parametrize("how", ROOTS)
@pytest.mark.parametrize("divided", [True, False])
@pytest.mark.parametrize(("opset", "dtype"), [(13, np.float32), (18, np.float32), (17, np.float64)])
def test_a_root_in_any_writing_is_found(how, divided, opset, dtype, tmp_path):
    report = examined(rooted(how, -0.5, divided, opset, dtype), tmp_path)
    assert norms_of(report) == ["layer"], shown(report)
    assert report.exit_code() == 0, shown(report)


@pytest.mark.exhaustive(one_in=4)
@pytest.mark.parametrize("how", ROOTS)
@pytest.mark.parametrize("exponent", [-2.0, -1.0, -0.25])
def test_a_wrong_power_in_any_writing_is_an_error(how, exponent, tmp_path):
    report = examined(rooted(how, exponent, exponent == -2), tmp_path)
    assert norms_of(report) == ["~layer"], shown(report)
    assert report.exit_code() == 1, shown(report)


@pytest.mark.parametrize("how", ["Sigmoid", "Tanh", "Exp"])
@pytest.mark.parametrize("last", ["Mul", "Div"])
def test_other_functions_of_a_variance_are_no_norm(how, last, tmp_path):
    w = Writing(opset=17)
    d = w.centred(w.input("x", SHAPE))
    y = w.op(last, d, w.op("Sqrt", w.op(how, w.op("Add", w.variance(d), 1e-3))))
    report = examined(w.model(y), tmp_path)
    assert norms_of(report) == [], shown(report)
    assert report.exit_code() == 0, shown(report)


@pytest.mark.parametrize("how", [*ABOUT_MEAN])
def test_a_variance_of_a_cast_value_is_found(how, tmp_path):
    """As converters to float16 write it, with the type of inputs and results kept."""
    w = Writing(np.float16, opset=17)
    x = w.op("Cast", w.input("x", SHAPE, TensorProto.FLOAT), to=w.kind)
    y = w.op("Div", w.centred(x), w.op("Sqrt", w.op("Add", ABOUT_MEAN[how](w, x), 1e-2)))
    report = examined(w.model(w.op("Cast", y, to=TensorProto.FLOAT), kind=TensorProto.FLOAT), tmp_path)
    assert norms_of(report) == ["layer"], shown(report)
    assert report.norms[0].verdict != "not exercised"
    assert report.exit_code() == 0, shown(report)


@pytest.mark.exhaustive(one_in=2)
@pytest.mark.parametrize("exponent", [-1 / 6, -1 / 12, -0.1])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_rounded_exponent_is_no_wrong_power(exponent, dtype, tmp_path):
    w = Writing(dtype, opset=17)
    d = w.centred(w.input("x", SHAPE))
    y = w.op("Mul", d, w.op("Pow", w.op("Pow", w.op("Add", w.variance(d), 1e-3), exponent), -0.5 / exponent))
    report = examined(w.model(y), tmp_path)
    assert norms_of(report) == ["layer"], shown(report)
    assert report.exit_code() == 0, shown(report)


@pytest.mark.parametrize("how", ["ReduceL1", "row with itself", "weighted factor", "scaled first", "CumSum"])
def test_a_quantised_mean_square_in_any_writing_is_a_near_miss(how, tmp_path):
    w = Writing(opset=17)
    d = w.centred(w.input("x", SHAPE))
    step = w.constant(np.float32(0.05)), w.constant(np.uint8(128))
    q = w.op("DequantizeLinear", w.op("QuantizeLinear", d, *step), *step)
    v = SQUARES[how](w, q, D)
    v = w.op("DequantizeLinear", w.op("QuantizeLinear", v, *step), *step)
    report = examined(w.model(w.op("Div", q, w.op("Sqrt", w.op("Add", v, 1e-3)))), tmp_path)
    assert norms_of(report) == ["~layer"], shown(report)
    assert "quantised" in report.norms[0].near_miss


# ------------------------------------------------------------------------------- attributes that a call gives


def with_function(calls, opset=17, default=None, nested=False):
    """Calls of a function of another opset, which is not inlined; its eps is an attribute of the call."""
    texts = ("ReduceMean X m", "Sub X m d", "Mul d d q", "ReduceMean q v", "Add v e a", "Sqrt a s", "Div d s Y")
    nodes = [helper.make_node("Constant", [], ["e"]), *(made(*text.split()) for text in texts)]
    refer(nodes[0], "value_float", "eps")
    attributes = [] if default is None else [helper.make_attribute("eps", default)]
    names = ["eps"] if default is None else []
    imports = [helper.make_opsetid("", 13), helper.make_opsetid("own", 1)]
    functions = [helper.make_function("own", "F", ["X"], ["Y"], nodes, imports, names, attributes)]
    if nested:
        inner = helper.make_node("F", ["X"], ["Y"], domain="own")
        refer(inner, "eps", "small")
        functions.append(helper.make_function("own", "Outer", ["X"], ["Y"], [inner], imports, ["small"]))
    w = Writing(opset=opset)
    x = w.input("x", SHAPE)
    for given in calls:
        x = w.op("Outer" if nested else "F", x, domain="own", **given)
    w.functions = functions
    return w.model(x)


def made(kind, *names):
    axes = {"axes": [-1]} if kind == "ReduceMean" else {}
    return helper.make_node(kind, names[:-1], names[-1:], **axes)


def refer(node, name, to):
    node.attribute.add(name=name, ref_attr_name=to, type=1)


@pytest.mark.parametrize("case", ["one call", "two calls", "default", "nested"])
@pytest.mark.parametrize("eps", [1e-3, 0.0])
def test_an_attribute_of_a_call_is_read_where_nothing_is_inlined(case, eps, tmp_path):
    if case == "default":
        model = with_function([{}], default=eps)
    else:
        name = "small" if case == "nested" else "eps"
        model = with_function([{name: eps}] * (2 if case == "two calls" else 1), nested=case == "nested")
    report = examined(model, tmp_path)
    assert [norm.eps for norm in report.norms] == [pytest.approx(eps)], shown(report)
    assert report.exit_code() == (2 if eps else 1), shown(report)


def test_calls_that_disagree_claim_no_eps(tmp_path):
    report = examined(with_function([{"eps": 1e-3}, {"eps": 1e-5}]), tmp_path)
    assert not [found for found in report.findings if found.level == "error"], shown(report)


@pytest.mark.parametrize("how", ["as it is", "repeated"])
def test_what_is_evaluated_is_small(how):
    """Values of 2^27 rows, or of that many copies of one, are not made up: 1 GiB each in float64."""
    w = Writing(np.float32, 17)
    x = w.input("x", (2**27 if how == "as it is" else 2, 8))
    d = w.centred(x)
    v = w.op("Add", w.mean(w.op("Mul", d, d)), 1e-3)
    if how == "repeated":
        v = w.op("Tile", v, np.int64([2**26, 1]))
    rstd = w.op("Reciprocal", w.op("Sqrt", v))
    model = shape_inference.infer_shapes(w.model(w.op("Mul", x, w.op("Mul", rstd, rstd))), data_prop=True)
    tracemalloc.start()
    try:
        find(model)
        assert tracemalloc.get_traced_memory()[1] < 2**28
    finally:
        tracemalloc.stop()
