"""Mistakes that laws name along the rows of x, statistics restored by copies, an eps that is an input or subnormal."""

import numpy as np
import pytest
from writings import Writing, examined, shown

D = 24
EPS = 1e-3


def root(w, v):
    return w.op("Sqrt", w.op("Add", v, EPS))


def deviation(w, x):
    return root(w, w.variance(w.centred(x)))


def rolled(w, s):
    """The statistic of the next row."""
    later, first = ((1, 5), (0, 1))
    parts = [w.op("Slice", s, np.int64([a]), np.int64([b]), np.int64([1])) for a, b in (later, first)]
    return w.op("Concat", *parts, axis=1)


def of_power(exponent, last=0.5):
    def write(w, x):
        d = w.centred(x)
        moment = w.op("Add", w.mean(w.op("Pow", w.op("Abs", d), exponent)), EPS)
        return w.op("Div", d, w.op("Pow", moment, last))

    return write


def less(other):
    return lambda w, x: w.op("Div", w.op("Sub", x, other(w, x)), deviation(w, x))


def median(w, x):
    largest = w.op("TopK", x, np.int64([D]), outputs=2, axis=-1)[0]
    return w.op("Gather", largest, np.int64([D // 2]), axis=-1)


def sum_for_mean(w, x):
    d = w.centred(x)
    return w.op("Div", d, root(w, w.over("ReduceSum", w.op("Mul", d, d))))


ANOTHER = "of another row"
OTHER = "what is subtracted from x is not its mean"
NAMED = {
    "the next row's deviation": (lambda w, x: w.op("Div", w.centred(x), rolled(w, deviation(w, x))), ANOTHER, 1),
    "by Gather": (
        lambda w, x: w.op("Div", w.centred(x), w.op("Gather", deviation(w, x), np.int64([1, 2, 3, 4, 0]), axis=1)),
        ANOTHER,
        1,
    ),
    "the next row's root mean square": (
        lambda w, x: w.op("Div", x, rolled(w, root(w, w.mean(w.op("Mul", x, x))))),
        ANOTHER,
        1,
    ),
    "the next row's statistics": (
        lambda w, x: w.op("Div", w.op("Sub", x, rolled(w, w.mean(x))), rolled(w, deviation(w, x))),
        ANOTHER,
        1,
    ),
    "power 1.9": (of_power(1.9), "the exponent is 1.9, not 2", 1),
    "power 2.1": (of_power(2.1), "the exponent is 2.1, not 2", 1),
    "power 1.9 and its root": (of_power(1.9, 1 / 1.9), "powers 1.9", 1),
    "a sum for the mean of squares": (sum_for_mean, "a sum is divided by 1", 0),
    "less the median": (less(median), OTHER, 0),
    "less the root mean square": (less(lambda w, x: w.op("Sqrt", w.mean(w.op("Mul", x, x)))), OTHER, 0),
    "less a stored number": (less(lambda w, x: 0.7), OTHER, 0),
    "less the log of a mean of exponentials": (
        less(lambda w, x: w.op("Sub", w.over("ReduceLogSumExp", x), float(np.log(D)))),
        OTHER,
        0,
    ),
}


@pytest.mark.parametrize("what", NAMED)
def test_a_mistake_along_the_rows_is_named(what, tmp_path):
    write, words, code = NAMED[what]
    w = Writing(opset=18)
    report = examined(w.model(write(w, w.input("x", (2, 5, D)))), tmp_path)
    (norm,) = report.norms
    assert words in norm.near_miss, shown(report)
    assert report.exit_code() == code
    assert {"eps-zero", "eps-negative"}.isdisjoint(finding.code for finding in report.findings)


def restored(how):
    def write(w, x):
        mean, std = w.mean(x), deviation(w, x)
        return w.op("Div", w.op("Sub", x, how(w, mean)), how(w, std))

    return write


def chunked(w, x):
    """The moments of halves, combined."""
    a, b = w.op("Split", x, np.int64([D // 2, D // 2]), outputs=2, axis=-1)
    means = w.mean(a), w.mean(b)
    inside = w.op("Mul", w.op("Add", w.variance(w.centred(a)), w.variance(w.centred(b))), 0.5)
    apart = w.op("Mul", w.op("Sub", *means), 0.5)
    mean = w.op("Mul", w.op("Add", *means), 0.5)
    return w.op("Div", w.op("Sub", x, mean), root(w, w.op("Add", inside, w.op("Mul", apart, apart))))


def masked(w, x):
    """As padded batches are normalised, with a mask that hides nothing."""
    mask = w.op("Cast", w.op("Greater", w.op("Abs", x), -1.0), to=w.kind)
    n = w.over("ReduceSum", mask)
    d = w.op("Mul", w.op("Sub", x, w.op("Div", w.over("ReduceSum", w.op("Mul", x, mask)), n)), mask)
    return w.op("Div", d, root(w, w.op("Div", w.over("ReduceSum", w.op("Mul", d, d)), n)))


def newton(w, x):
    """A reciprocal root with a step of Newton's method, as for estimates."""
    d = w.centred(x)
    v = w.op("Add", w.variance(d), EPS)
    r = w.op("Reciprocal", w.op("Sqrt", v))
    step = w.op("Sub", 1.5, w.op("Mul", w.op("Mul", v, 0.5), w.op("Mul", r, r)))
    return w.op("Mul", d, w.op("Mul", r, step))


def length_with_eps(w, x):
    """The length of the deviation and the root of eps, as one vector."""
    d = w.centred(x)
    e = w.op("Expand", float(np.sqrt(EPS)), np.int64([2, 5, 1]))
    both = w.op("Concat", w.op("Sqrt", w.variance(d)), e, axis=-1)
    return w.op("Div", d, w.over("ReduceL2", both))


def scaled_first(w, x):
    """Over the largest magnitude, so that squares do not overflow."""
    size = w.over("ReduceMax", w.op("Abs", x))
    d = w.centred(w.op("Div", x, size))
    v = w.op("Mul", w.variance(d), w.op("Mul", size, size))
    return w.op("Div", w.op("Mul", d, size), root(w, v))


SOUND = {
    "Concat": restored(lambda w, s: w.op("Concat", *[s] * D, axis=-1)),
    "Gather": restored(lambda w, s: w.op("Gather", s, np.zeros(D, np.int64), axis=-1)),
    "GatherElements": restored(lambda w, s: w.op("GatherElements", s, np.zeros((2, 5, D), np.int64), axis=2)),
    "chunked": chunked,
    "masked": masked,
    "newton": newton,
    "length_with_eps": length_with_eps,
    "scaled_first": scaled_first,
}


@pytest.mark.parametrize("what", SOUND)
def test_a_sound_norm_in_an_unusual_writing_is_found(what, tmp_path):
    w = Writing(opset=18)
    report = examined(w.model(SOUND[what](w, w.input("x", (2, 5, D)))), tmp_path)
    (norm,) = report.norms
    assert (norm.formula, norm.axes, norm.near_miss, report.exit_code()) == ("layer", [2], "", 0), shown(report)
    np.testing.assert_allclose(norm.eps, EPS, rtol=1e-6)


@pytest.mark.parametrize(
    "write",
    [
        lambda w, x: w.op("Div", x, w.op("Add", w.over("ReduceL2", x), EPS)),
        lambda w, x: w.op("Div", x, w.over("ReduceMax", w.op("Abs", x))),
        lambda w, x: w.op("Mul", x, w.op("Sigmoid", w.mean(x))),  # squeeze and excitation
        lambda w, x: w.op("Sub", x, w.over("ReduceLogSumExp", x)),
        lambda w, x: w.op("Div", w.op("Sub", x, median(w, x)), w.over("ReduceMax", w.op("Abs", x))),
    ],
)
def test_other_functions_that_scale_rows_are_no_norms(write, tmp_path):
    w = Writing(opset=18)
    assert examined(w.model(write(w, w.input("x", (2, 5, D)))), tmp_path).norms == []


def with_eps(w, x, eps):
    d = w.centred(x)
    return w.op("Div", d, w.op("Sqrt", w.op("Add", w.variance(d), eps)))


@pytest.mark.parametrize("shape", [[], [1], [1, 1, 1]])
@pytest.mark.parametrize("given", [None, 1e-2])
def test_an_eps_that_is_an_input_is_judged_with_its_value(shape, given, tmp_path):
    w = Writing(opset=18)
    model = w.model(with_eps(w, w.input("x", (2, 5, D)), w.input("eps", shape)))
    options = {"fix": str(tmp_path / "fixed.onnx")}
    if given:
        x = np.random.default_rng(0).normal(size=(2, 5, D)).astype("f")
        np.savez(tmp_path / "x.npz", x=x, eps=np.full(shape, given))
        options["input"] = str(tmp_path / "x.npz")
    report = examined(model, tmp_path, **options)
    (norm,) = report.norms
    assert (norm.eps, norm.verdict) == (np.float32(given or 1e-5), "ok"), shown(report)
    assert "eps-input" in {finding.code for finding in report.findings}
    assert "--fix: wrote nothing" in report.problem
    assert not (tmp_path / "fixed.onnx").exists()


def test_an_input_that_is_added_elsewhere_stays_one(tmp_path):
    w = Writing(opset=18)
    x, shift = w.input("x", (2, 5, D)), w.input("shift", [])
    model = w.model(w.op("Add", with_eps(w, x, EPS), shift))
    report = examined(model, tmp_path)
    assert [(norm.bias, norm.verdict) for norm in report.norms] == [("", "ok")], shown(report)
    assert "eps-input" not in {finding.code for finding in report.findings}


@pytest.mark.parametrize(("eps", "code"), [(1e-44, "eps-subnormal"), (1e-38, "eps-subnormal"), (1.2e-38, "")])
def test_a_subnormal_eps_is_a_warning(eps, code, tmp_path):
    w = Writing(opset=18)
    report = examined(w.model(with_eps(w, w.input("x", (2, 5, D)), eps)), tmp_path)
    found = [(finding.level, finding.code) for finding in report.findings if finding.code.startswith("eps-")]
    assert found == [("warning", code)] * bool(code)
    assert report.exit_code() == 0


@pytest.mark.parametrize("axis", range(3))
def test_a_gain_before_the_division_is_a_scale_over_any_axis(axis, tmp_path):
    w = Writing(opset=18)
    x, axes = w.input("x", (3, 5, D)), (axis,)
    gain, d = w.gain([(3, 1, 1), (5, 1), (D,)][axis]), w.centred(x, axes)
    report = examined(w.model(w.op("Div", w.op("Mul", gain, d), root(w, w.variance(d, axes)))), tmp_path)
    (norm,) = report.norms
    assert (norm.axes, norm.near_miss, norm.verdict, bool(norm.scale)) == ([axis], "", "ok", True), shown(report)
