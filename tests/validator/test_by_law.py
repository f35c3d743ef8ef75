"""Norms in writings that no pattern has are found by what they compute, and judged."""

import numpy as np
import onnx
import pytest
from writings import Writing, examined, shown

from onnx_export.graph.scope import with_shapes
from onnx_export.validation.patterns import find

D = 24


def log_sum_exp(w, x):
    d = w.centred(x)
    total = w.over("ReduceLogSumExp", w.op("Log", w.op("Mul", d, d)))
    v = w.op("Exp", w.op("Sub", total, float(np.log(D))))
    return w.op("Div", d, w.op("Sqrt", w.op("Add", v, 1e-3)))


def signs_apart(w, x):
    d = w.centred(x)
    std = w.op("Sqrt", w.op("Add", w.variance(d), 1e-3))
    above, below = w.op("Relu", d), w.op("Relu", w.op("Neg", d))
    return w.op("Sub", w.op("Div", above, std), w.op("Div", below, std))


def root_of_the_quotient(w, x):
    d = w.centred(x)
    q = w.op("Mul", d, d)
    return w.op("Mul", w.op("Sign", d), w.op("Sqrt", w.op("Div", q, w.op("Add", w.mean(q), 1e-3))))


def not_centred(w, x):
    q = w.op("Mul", x, x)
    return w.op("Mul", w.op("Sign", x), w.op("Sqrt", w.op("Div", q, w.op("Add", w.mean(q), 1e-3))))


SOUND = {
    "log_sum_exp": (log_sum_exp, "layer"),
    "signs_apart": (signs_apart, "layer"),
    "root_of_the_quotient": (root_of_the_quotient, "layer"),
    "not_centred": (not_centred, "rms"),
}


def built(write):
    w = Writing(opset=18)
    return w.model(write(w, w.input("x", (2, 5, D))))


@pytest.mark.parametrize("how", SOUND)
def test_a_norm_that_no_pattern_has_is_found_and_judged(how, tmp_path):
    write, formula = SOUND[how]
    model = built(write)
    assert find(with_shapes(model), laws=False) == []
    report = examined(model, tmp_path)
    (norm,) = report.norms
    assert (norm.formula, norm.axes, norm.near_miss) == (formula, [2], "")
    assert norm.verdict in ("ok", "risky"), shown(report)  # logarithms of huge values lose digits
    assert norm.eps == np.float32(1e-3)
    assert report.exit_code() == 0


def test_rows_are_of_the_type_before_a_cast(tmp_path):
    """Of a file in float16 with its inputs kept, rows of float32 show that E[x^2] - E[x]^2 is no number far from 0."""
    w = Writing(np.float16, opset=17)
    x = w.op("Cast", w.input("x", (2, 5, D), onnx.TensorProto.FLOAT), to=w.kind)
    v = w.op("Sub", w.variance(x), w.mean(w.op("Mul", x, w.mean(x))))
    y = w.op("Div", w.centred(x), w.op("Sqrt", w.op("Add", v, 1e-2)))
    model = w.model(w.op("Cast", y, to=onnx.TensorProto.FLOAT), kind=onnx.TensorProto.FLOAT)
    assert [norm.x for norm in find(with_shapes(model))] == ["x"]
    assert [norm.verdict for norm in examined(model, tmp_path).norms] == ["risky"]


def test_parameters_are_named(tmp_path):
    w = Writing(opset=18)
    y = signs_apart(w, w.input("x", (2, 5, D)))
    gain, shift = w.gain(D), w.gain(D, 2)
    scaled = w.op("Mul", y, w.op("Identity", gain))
    model = w.model(w.op("Add", scaled, shift))
    report = examined(model, tmp_path)
    assert [norm.verdict for norm in report.norms] == ["ok"], shown(report)


def test_a_near_miss_that_no_pattern_has_is_named(tmp_path):
    def over_the_deviation(w, x):
        d = w.centred(x)
        q = w.op("Mul", x, x)
        ratio = w.op("Div", q, w.op("Add", w.variance(d), 1e-3))
        return w.op("Mul", w.op("Sign", x), w.op("Sqrt", ratio))

    model = built(over_the_deviation)
    assert find(with_shapes(model), laws=False) == []
    report = examined(model, tmp_path)
    assert [norm.near_miss for norm in report.norms] == ["x is divided by the deviation, not x - mean"]
    assert (report.exit_code(), report.exit_code(strict=True)) == (0, 1)


@pytest.mark.parametrize(
    "write",
    [
        lambda w, x: w.op("Softmax", x),
        lambda w, x: w.op("Div", x, w.over("ReduceMax", x)),
        lambda w, x: w.op("Mul", w.op("Div", x, w.over("ReduceL2", x)), 3.0),  # its gain is not sqrt(n)
    ],
)
def test_other_quotients_are_no_norms(write, tmp_path):
    assert examined(built(write), tmp_path).norms == []


def test_what_is_evaluated_is_small():
    """A value of 2^40 elements is not computed."""
    w = Writing(opset=18)
    x = w.input("x", (2, 5, D))
    wide = w.op("Expand", w.mean(x), np.int64([2**20, 2**10, 2**10, 1, 1, 1]))
    y = w.op("Div", x, w.op("Sqrt", w.over("ReduceMean", w.op("Mul", wide, wide))))
    assert isinstance(find(onnx.shape_inference.infer_shapes(w.model(y))), list)
