"""One norm in many writings: each is found as often as it is there, whatever its form, dtype, opset and optimiser."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from writings import LEVELS, Writing, saved

from onnx_export.validation.examine import examine
from onnx_export.validation.options import Options

D = 32
SHAPE = (2, 5, D)


def examined(model, folder, **options):
    onnx.save(model, folder / "model.onnx")
    return examine(str(folder / "model.onnx"), Options(**options), lambda *_: None)


def norms_of(report):
    return [("~" if norm.near_miss else "") + norm.formula for norm in report.norms]


def shown(report):
    findings = [f"{f.level} {f.code}: {f.message}" for f in report.findings]
    return report.problem, findings, [(n.near_miss, n.verdict, n.detail) for n in report.norms]


# ------------------------------------------------------------------------------------------- shared helper nodes


def counted(w, x):
    """The row length of x as a float, from its shape."""
    return w.op("Cast", w.op("Gather", w.op("Shape", x), np.int64(2)), to=w.kind)


def of_mean(w, x, mean, var=None, eps=1e-5, scale=None):
    d = w.op("Sub", x, mean)
    total = w.op("Add", var or w.variance(d), eps)
    return w.op("Mul", w.op("Div", d, w.op("Sqrt", total)), w.gain(D) if scale is None else scale)


def shares_a_cast(w, k):
    x = w.op("Cast", w.input("x", SHAPE, TensorProto.FLOAT16), to=w.kind)
    return [of_mean(w, x, w.mean(x), scale=w.gain(D, i)) for i in range(k)]


def shares_an_identity(w, k):
    x = w.op("Identity", w.op("Abs", w.input("x", SHAPE)))
    return [of_mean(w, x, w.mean(x), scale=w.gain(D, i)) for i in range(k)]


def shares_a_count(w, k):
    x = w.input("x", SHAPE)
    n, ys = counted(w, x), []
    for i in range(k):
        x = w.op("MatMul", x, w.gain((D, D), i))
        mean = w.op("Div", w.over("ReduceSum", x), n)
        d = w.op("Sub", x, mean)
        ys.append(of_mean(w, x, mean, w.op("Div", w.over("ReduceSum", w.op("Mul", d, d)), n)))
    return ys


def shares_the_mean(w, k):
    x = w.input("x", SHAPE)
    mean = w.mean(x)
    return [of_mean(w, x, mean) for _ in range(k)]


def shares_the_variance(w, k):
    x = w.input("x", SHAPE)
    mean = w.mean(x)
    var = w.variance(w.op("Sub", x, mean))
    return [of_mean(w, x, mean, var, eps=1e-5 * (i + 1)) for i in range(k)]


def shares_the_deviation(w, k):
    x = w.input("x", SHAPE)
    d = w.centred(x)
    std = w.op("Sqrt", w.op("Add", w.variance(d), 1e-5))
    return [w.op("Mul", w.op("Div", d, std), w.gain(D, i)) for i in range(k)]


def shares_the_reciprocal(w, k):
    """One rstd, multiplied by a gain for each norm first."""
    x = w.input("x", SHAPE)
    d = w.centred(x)
    rstd = w.op("Reciprocal", w.op("Sqrt", w.op("Add", w.variance(d), 1e-5)))
    return [w.op("Mul", d, w.op("Mul", rstd, w.gain(D, i))) for i in range(k)]


def shares_squares(w, k):
    """An RMS norm and layer norms of one value."""
    x = w.input("x", SHAPE)
    rms = w.op("Div", x, w.op("Sqrt", w.op("Add", w.variance(x), 1e-6)))
    return [rms, *(of_mean(w, x, w.mean(x)) for _ in range(k - 1))]


SHARED = [
    shares_a_cast,
    shares_an_identity,
    shares_a_count,
    shares_the_mean,
    shares_the_variance,
    shares_the_deviation,
    shares_the_reciprocal,
    shares_squares,
]


# onnxruntime merges equal nodes, so that these become one norm with several gains
MERGED = [shares_a_cast, shares_an_identity, shares_the_mean, shares_the_deviation, shares_squares]


@pytest.mark.exhaustive(one_in=30)
@pytest.mark.parametrize("level", ["none", *LEVELS])
@pytest.mark.parametrize("opset", [13, 17, 18])
@pytest.mark.parametrize("share", SHARED, ids=lambda share: share.__name__)
def test_norms_that_share_nodes_are_each_found(share, opset, level, tmp_path):
    for k in (2, 3):
        w = Writing(opset=opset)
        report = examined(saved(w.model(*share(w, k)), level, tmp_path), tmp_path)
        merged = level != "none" and share in MERGED
        assert len(norms_of(report)) == k or (merged and report.norms), shown(report)
        assert not any(norm.near_miss for norm in report.norms)
        assert report.exit_code() == 0, shown(report)


@pytest.mark.exhaustive(one_in=5)
@pytest.mark.parametrize("share", SHARED, ids=lambda share: share.__name__)
@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_norms_of_other_types_that_share_nodes_are_each_found(share, dtype, tmp_path):
    w = Writing(dtype, opset=17)
    report = examined(w.model(*share(w, 2)), tmp_path)
    assert len(norms_of(report)) == 2, shown(report)


# -------------------------------------------------------------------------------- constants that nodes compute

EPS = {
    "Exp": lambda w: w.op("Exp", float(np.log(1e-5))),
    "Abs": lambda w: w.op("Abs", -1e-5),
    "Relu": lambda w: w.op("Relu", 1e-5),
    "Clip": lambda w: w.op("Clip", 1e-9, 1e-5, 1.0),
    # onnxruntime has these two for float32 alone
    "Softplus": lambda w: w.op("Cast", w.op("Softplus", np.float32(np.log(np.expm1(1e-5)))), to=w.kind),
    "Sigmoid": lambda w: w.op("Sigmoid", float(np.log(1e-5 / (1 - 1e-5)))),
    "Min": lambda w: w.op("Min", 1e-5, 1.0),
    "Sum": lambda w: w.op("Sum", 5e-6, 5e-6),
    "Mean": lambda w: w.op("Cast", w.op("Mean", np.float32(1e-5), np.float32(1e-5)), to=w.kind),
    "ReduceMax": lambda w: w.op("ReduceMax", w.constant(np.array([1e-5, 1e-7], w.dtype)), keepdims=0),
    "MatMul": lambda w: w.op("MatMul", w.constant(np.full(2, 5e-6, w.dtype)), w.constant(np.ones(2, w.dtype))),
    "Where": lambda w: w.op("Where", np.bool_(True), 1e-5, 1.0),
    "Gather": lambda w: w.op("Gather", w.constant(np.array([1.0, 1e-5], w.dtype)), np.int64(1)),
    "Split": lambda w: w.op("Split", w.constant(np.array([1e-5, 2.0], w.dtype)), np.int64([1, 1]), outputs=2)[0],
    "Sin": lambda w: w.op("Sin", 1e-5),
    "two steps": lambda w: w.op("Exp", w.op("Tanh", w.op("Neg", float(np.arctanh(0.9999999))))),
}


@pytest.mark.exhaustive(one_in=14)
@pytest.mark.parametrize("formula", ["layer", "rms"])
@pytest.mark.parametrize("how", EPS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("opset", [13, 18])
def test_an_eps_made_by_any_operator_is_a_constant(how, formula, dtype, opset, tmp_path):
    w = Writing(dtype, opset)
    x = w.input("x", SHAPE)
    d = w.centred(x) if formula == "layer" else x
    std = w.op("Sqrt", w.op("Add", w.variance(d), EPS[how](w)))
    report = examined(w.model(w.op("Mul", w.op("Div", d, std), w.gain(D))), tmp_path)
    assert norms_of(report) == [formula], shown(report)
    assert report.exit_code() == 0, shown(report)
    if how != "two steps":
        assert report.norms[0].eps == pytest.approx(1e-5, rel=1e-3)


GAINS = {
    "Exp": lambda w: w.op("Exp", w.constant(np.log(w.gain(D)))),
    "Softplus": lambda w: w.op("Softplus", w.constant(w.gain(D))),
    "Abs": lambda w: w.op("Abs", w.constant(w.gain(D))),
    "Add of two": lambda w: w.op("Add", w.constant(w.gain(D)), w.constant(w.gain(D, 2))),
    "Concat": lambda w: w.op("Concat", w.constant(w.gain(D // 2)), w.constant(w.gain(D // 2, 2)), axis=0),
    "Expand": lambda w: w.op("Expand", w.constant(w.gain(1)), np.int64([D])),
    "Tile": lambda w: w.op("Tile", w.constant(w.gain(4)), np.int64([D // 4])),
    "Clip": lambda w: w.op("Clip", w.constant(w.gain(D)), 0.5, 1.5),
}


@pytest.mark.exhaustive(one_in=3)
@pytest.mark.parametrize("before", [True, False], ids=["into rstd", "after"])
@pytest.mark.parametrize("how", GAINS)
@pytest.mark.parametrize("level", ["none", "all"])
def test_a_gain_made_by_any_operator_is_a_constant(how, before, level, tmp_path):
    w = Writing(opset=17)
    x = w.input("x", SHAPE)
    d, gain = w.centred(x), GAINS[how](w)
    rstd = w.op("Reciprocal", w.op("Sqrt", w.op("Add", w.variance(d), 1e-5)))
    y = w.op("Mul", d, w.op("Mul", rstd, gain)) if before else w.op("Mul", w.op("Mul", d, rstd), gain)
    report = examined(saved(w.model(y), level, tmp_path), tmp_path)
    assert norms_of(report) == ["layer"], shown(report)
    assert report.norms[0].scale
    assert report.exit_code() == 0, shown(report)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_an_eps_that_a_random_operator_makes_is_no_constant(dtype, tmp_path):
    w = Writing(dtype)
    d = w.centred(w.input("x", SHAPE))
    eps = w.op("Abs", w.op("RandomNormal", shape=[1], dtype=w.kind))
    y = w.op("Div", d, w.op("Sqrt", w.op("Add", w.variance(d), eps)))
    assert norms_of(examined(w.model(y), tmp_path, find_only=True)) == []


# ---------------------------------------------------------------------------- the power of the variance

# Each writes d * v^e.
POWERS = {
    "Pow": lambda w, d, v, e: w.op("Mul", d, w.op("Pow", v, e)),
    "Div by Pow": lambda w, d, v, e: w.op("Div", d, w.op("Pow", v, -e)),
    "Pow of Reciprocal": lambda w, d, v, e: w.op("Mul", d, w.op("Pow", w.op("Reciprocal", v), -e)),
    "Reciprocal of Pow": lambda w, d, v, e: w.op("Mul", w.op("Reciprocal", w.op("Pow", v, -e)), d),
    "Pow of Sqrt": lambda w, d, v, e: w.op("Mul", d, w.op("Pow", w.op("Sqrt", v), 2 * e)),
    "Sqrt of Pow": lambda w, d, v, e: w.op("Mul", d, w.op("Sqrt", w.op("Pow", v, 2 * e))),
    "1 over Pow": lambda w, d, v, e: w.op("Mul", d, w.op("Div", 1.0, w.op("Pow", v, -e))),
    "Exp of Log": lambda w, d, v, e: w.op("Mul", d, w.op("Exp", w.op("Mul", w.op("Log", v), e))),
    "Exp of Log over": lambda w, d, v, e: w.op("Mul", w.op("Exp", w.op("Div", w.op("Log", v), 1 / e)), d),
    "Div by Exp of Log": lambda w, d, v, e: w.op("Div", d, w.op("Exp", w.op("Mul", -e, w.op("Log", v)))),
    "Exp of negated Log": lambda w, d, v, e: w.op("Mul", d, w.op("Exp", w.op("Neg", w.op("Mul", w.op("Log", v), -e)))),
}
ROOTS = {
    "Sqrt of Reciprocal": lambda w, d, v: w.op("Mul", d, w.op("Sqrt", w.op("Reciprocal", v))),
    "Sqrt of 1 over": lambda w, d, v: w.op("Mul", d, w.op("Sqrt", w.op("Div", 1.0, v))),
    "square of a fourth root": lambda w, d, v: w.op("Div", d, w.op("Pow", w.op("Sqrt", w.op("Sqrt", v)), 2.0)),
    "twice by a fourth root": lambda w, d, v: twice(w, d, w.op("Sqrt", w.op("Sqrt", v))),
    "a fourth root by itself": lambda w, d, v: itself(w, d, w.op("Sqrt", w.op("Sqrt", v))),
}
WRONG_ROOTS = {
    "Reciprocal": lambda w, d, v: w.op("Mul", d, w.op("Reciprocal", v)),
    "Mul of itself": lambda w, d, v: w.op("Div", d, w.op("Mul", v, v)),
    "a fourth root": lambda w, d, v: w.op("Div", d, w.op("Sqrt", w.op("Sqrt", v))),
    "Reciprocal of itself": lambda w, d, v: w.op("Mul", d, w.op("Reciprocal", w.op("Mul", v, v))),
    "times the variance": lambda w, d, v: w.op("Mul", d, v),
    "times the deviation": lambda w, d, v: w.op("Mul", w.op("Sqrt", v), d),
}


def twice(w, d, root):
    return w.op("Div", w.op("Div", d, root), root)


def itself(w, d, root):
    return w.op("Div", d, w.op("Mul", root, root))


def powered(write, dtype, opset, centred=True, *exponent):
    w = Writing(dtype, opset)
    x = w.input("x", SHAPE)
    d = w.centred(x) if centred else x
    y = write(w, d, w.op("Add", w.variance(d), 1e-3), *exponent)
    return w.model(w.op("Mul", y, w.gain(D)))


@pytest.mark.exhaustive(one_in=5)
@pytest.mark.parametrize("centred", [True, False], ids=["layer", "rms"])
@pytest.mark.parametrize("how", [*POWERS, *ROOTS])
@pytest.mark.parametrize(("dtype", "opset"), [(np.float32, 13), (np.float32, 18), (np.float64, 17)])
def test_a_root_is_recognised_in_every_writing(how, dtype, opset, centred, tmp_path):
    write, exponent = (POWERS[how], [-0.5]) if how in POWERS else (ROOTS[how], [])
    report = examined(powered(write, dtype, opset, centred, *exponent), tmp_path)
    assert norms_of(report) == ["layer" if centred else "rms"], shown(report)
    assert report.norms[0].scale
    assert report.exit_code() == 0, shown(report)


@pytest.mark.exhaustive(one_in=6)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("how", [*POWERS, *ROOTS])
def test_a_root_is_recognised_after_the_optimiser(how, level, tmp_path):
    write, exponent = (POWERS[how], [-0.5]) if how in POWERS else (ROOTS[how], [])
    report = examined(saved(powered(write, np.float32, 17, True, *exponent), level, tmp_path), tmp_path)
    assert norms_of(report) == ["layer"], shown(report)


@pytest.mark.exhaustive(one_in=9)
@pytest.mark.parametrize("exponent", [-2.0, -1.0, -0.25, -1 / 3, 1.5, 0.5])
@pytest.mark.parametrize("how", POWERS)
@pytest.mark.parametrize(("dtype", "opset"), [(np.float32, 13), (np.float64, 18)])
def test_a_wrong_power_is_a_near_miss_in_every_writing(how, exponent, dtype, opset, tmp_path):
    report = examined(powered(POWERS[how], dtype, opset, True, exponent), tmp_path)
    assert norms_of(report) == ["~layer"], shown(report)
    assert report.exit_code() == 1


@pytest.mark.exhaustive(one_in=4)
@pytest.mark.parametrize("how", WRONG_ROOTS)
@pytest.mark.parametrize("centred", [True, False], ids=["layer", "rms"])
@pytest.mark.parametrize("level", ["none", *LEVELS])
def test_no_root_is_a_near_miss_in_every_writing(how, centred, level, tmp_path):
    if not centred and how.startswith("times"):
        pytest.skip("a product with the mean square resembles no norm")
    report = examined(saved(powered(WRONG_ROOTS[how], np.float32, 17, centred), level, tmp_path), tmp_path)
    assert norms_of(report) == ["~layer" if centred else "~rms"], shown(report)
    assert report.exit_code(strict=not centred) == 1, shown(report)
