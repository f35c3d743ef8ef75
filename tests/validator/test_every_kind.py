"""Statistics and roots by other operators, at least six writings of each: form x dtype x opset x optimiser level.

Each form is a layer norm or an RMS norm, with a count that may be planted wrong: then it must be a near miss. Of all
combinations each form meets every opset, and the dtypes and levels by turns; with CNORM_EVERY_WRITING=1 all of them.
"""

import itertools
import os

import numpy as np
import pytest
from onnx import helper
from writings import LEVELS, Writing, examined, saved, shown

from onnx_export import ort

D = 24
ROWS, CHANNELS, MATRIX = (2, 5, D), (2, D, 3, 4), (6, D)
OPSETS = (11, 13, 17, 21)
DTYPES = (np.float32, np.float16, np.float64)
STEPS = ("none", *LEVELS)


def full(w, shape, value):
    return w.constant(np.full(shape, value, w.dtype))


def norm(mean, square=None, gain=D, product="Mul"):
    """x - mean(x) over the root of `square`(d), by default the mean of d times d."""

    def write(w, x, n):
        d = w.op("Sub", x, mean(w, x, D))
        v = square(w, d, n) if square else mean(w, w.op("Mul", d, d) if product == "Mul" else w.op("Pow", d, 2.0), n)
        return w.op("Mul", w.op("Div", d, w.op("Sqrt", w.op("Add", v, 1e-3))), w.gain(gain))

    return write


def plain(w, x, n):
    return w.mean(x)


def rms(square, gain=D):
    def write(w, x, n):
        return w.op("Mul", w.op("Div", x, w.op("Sqrt", w.op("Add", square(w, x, n), 1e-3))), w.gain(gain))

    return write


def squares(mean):
    return lambda w, x, n: mean(w, w.op("Mul", x, x), n)


def of_rows(mean):
    """A mean of matrices for x of three axes."""

    def write(w, x, n):
        return w.op("Reshape", mean(w, w.op("Reshape", x, np.int64([-1, D])), n), np.int64([2, 5, 1]))

    return write


# ------------------------------------------------------------------------------------------------------------ Conv


def pixel(w, x, n):
    return w.op("Conv", x, full(w, (1, D, 1, 1), 1 / n))


def pixel_with_bias(w, x, n):
    return w.op("Conv", x, full(w, (1, D, 1, 1), 1 / n), full(w, (1,), 0), kernel_shape=[1, 1], pads=[0] * 4)


def pixel_sum(w, x, n):
    return w.op("Div", w.op("Conv", x, full(w, (1, D, 1, 1), 1)), float(n))


def pixel_repeated(w, x, n):
    return w.op("Conv", x, full(w, (D, D, 1, 1), 1 / n), strides=[1, 1], dilations=[1, 1])


def pixel_of_lines(w, x, n):
    return w.op("Conv", x, full(w, (1, D, 1), 1 / n))


def window(w, x, n):
    """The row as the window of an image of one channel."""
    image = w.over("Unsqueeze", x, (1,))
    return w.over("Squeeze", w.op("Conv", image, full(w, (1, 1, 1, D), 1 / n)), (1,))


def depthwise(w, x, n):
    return w.op("Conv", x, full(w, (5, 1, D), 1 / n), group=5)


def transposed_pixel(w, x, n):
    return w.op("ConvTranspose", x, full(w, (D, 1, 1, 1), 1 / n))


# ---------------------------------------------------------------------------------------------------- MatMul, Gemm


def column(w, x, n):
    return w.op("MatMul", x, full(w, (D, 1), 1 / n))


def column_of_ones(w, x, n):
    return w.op("Div", w.op("MatMul", x, full(w, (D, 1), 1)), float(n))


def square_matrix(w, x, n):
    return w.op("MatMul", x, full(w, (D, D), 1 / n))


def vector(w, x, n):
    return w.over("Unsqueeze", w.op("MatMul", x, full(w, D, 1 / n)), (-1,))


def stacked_columns(w, x, n):
    return w.op("MatMul", x, full(w, (1, D, 1), 1 / n))


def from_the_left(w, x, n):
    return w.op("MatMul", full(w, (1, D), 1 / n), x)


def of_transposed(w, x, n):
    turned = w.op("Transpose", x, perm=[0, 2, 1])
    return w.op("Transpose", w.op("MatMul", full(w, (1, D), 1 / n), turned), perm=[0, 2, 1])


def gemm(**attributes):
    def write(w, x, n):
        wide = (1, D) if attributes.get("transB") else (D, 1)
        return w.op("Gemm", x, full(w, wide, 1 / n), **attributes)

    return write


def gemm_alpha(w, x, n):
    return w.op("Gemm", x, full(w, (1, D), 1), transB=1, alpha=1 / n)


def gemm_with_bias(w, x, n):
    return w.op("Gemm", x, full(w, (D, 1), 1 / n), full(w, 1, 0), beta=1.0)


def gemm_sum(w, x, n):
    return w.op("Mul", w.op("Gemm", x, full(w, (D, 1), 1)), 1 / n)


def gemm_square(w, x, n):
    return w.op("Gemm", x, full(w, (D, D), 1 / n))


def gemm_of_transposed(w, x, n):
    return w.op("Gemm", w.op("Transpose", x, perm=[1, 0]), full(w, (D, 1), 1 / n), transA=1)


def gemm_from_the_left(w, x, n):
    turned = w.op("Gemm", full(w, (1, D), 1 / n), x, transB=1)
    return w.op("Transpose", turned, perm=[1, 0])


# ---------------------------------------------------------------------------------------------------------- Einsum


def einsum(equation, weights=(D,), after=True):
    def write(w, x, n):
        y = w.op("Einsum", x, full(w, weights, 1 / n), equation=equation)
        return w.over("Unsqueeze", y, (-1,)) if after else y

    return write


def weights_first(w, x, n):
    return w.over("Unsqueeze", w.op("Einsum", full(w, D, 1 / n), x, equation="d,btd->bt"), (-1,))


def by_channels(w, x, n):
    return w.over("Unsqueeze", w.op("Einsum", x, full(w, D, 1 / n), equation="bdt,d->bt"), (1,))


def einsum_sum(w, x, n):
    return w.op("Mul", w.over("Unsqueeze", w.op("Einsum", x, equation="btd->bt"), (-1,)), 1 / n)


def einsum_squares(equation, weighted=True):
    def write(w, d, n):
        values = [d, d] + [full(w, D, 1 / n)] * weighted
        y = w.over("Unsqueeze", w.op("Einsum", *values, equation=equation), (-1,))
        return y if weighted else w.op("Div", y, float(n))

    return write


# ------------------------------------------------------------------------------------------------------------- Sum


def variadic(total, mean=None, square=None):
    def write(w, x, n):
        d = mean(w, x) if mean else w.centred(x)
        v = w.op("Div", w.over("ReduceSum", w.op("Mul", d, d)), float(n))
        y = w.op("Mul", w.op("Div", d, w.op("Sqrt", total(w, v))), w.gain(D))
        return w.op("Sum", y, w.gain(D, 2)) if square else y

    return write


SUMS = {
    "of variance and eps": variadic(lambda w, v: w.op("Sum", v, 1e-3)),
    "of eps and variance": variadic(lambda w, v: w.op("Sum", 1e-3, v)),
    "of three": variadic(lambda w, v: w.op("Sum", v, 5e-4, 5e-4)),
    "of one": variadic(lambda w, v: w.op("Sum", w.op("Add", v, 1e-3))),
    "of x and -mean": variadic(lambda w, v: w.op("Add", v, 1e-3), lambda w, x: w.op("Sum", x, w.op("Neg", w.mean(x)))),
    "of -mean and x": variadic(lambda w, v: w.op("Sum", v, 1e-3), lambda w, x: w.op("Sum", w.op("Neg", w.mean(x)), x)),
    "with the bias": variadic(lambda w, v: w.op("Add", v, 1e-3), square="bias"),
    "of all": variadic(lambda w, v: w.op("Sum", 1e-3, v), lambda w, x: w.op("Sub", x, w.op("Sum", w.mean(x))), "bias"),
}


# -------------------------------------------------------------------------------------------- ReduceL2, LpNormalization


def squared_l2(w, d, n):
    root = w.over("ReduceL2", d)
    return w.op("Div", w.op("Mul", root, root), float(n))


def pow_of_l2(w, d, n):
    return w.op("Mul", w.op("Pow", w.over("ReduceL2", d), 2.0), 1 / n)


def l2_over_root(w, d, n):
    root = w.op("Div", w.over("ReduceL2", d), float(n**0.5))
    return w.op("Mul", root, root)


def l2_times_root(w, d, n):
    return w.op("Pow", w.op("Mul", w.over("ReduceL2", d), float(n**-0.5)), 2.0)


def sum_of_squares(w, d, n):
    return w.op("Div", w.over("ReduceSumSquare", d), float(n))


def sum_of_squares_times(w, d, n):
    return w.op("Mul", 1 / n, w.over("ReduceSumSquare", d))


def by_l2(divide, centre=True):
    """d over its norm, times the root of n; without eps."""

    def write(w, x, n):
        d = w.centred(x) if centre else x
        return w.op("Mul", divide(w, d, w.over("ReduceL2", d), float(n**0.5)), w.gain(D))

    return write


L2 = {
    "squared": norm(plain, squared_l2),
    "Pow": norm(plain, pow_of_l2),
    "over the root": norm(plain, l2_over_root),
    "times the root": norm(plain, l2_times_root),
    "ReduceSumSquare": norm(plain, sum_of_squares),
    "times ReduceSumSquare": norm(plain, sum_of_squares_times),
    "rms": rms(squared_l2),
    "rms over the root": rms(l2_over_root),
    "quotient": by_l2(lambda w, d, r, n: w.op("Mul", w.op("Div", d, r), n)),
    "deviation": by_l2(lambda w, d, r, n: w.op("Div", d, w.op("Div", r, n))),
    "deviation times": by_l2(lambda w, d, r, n: w.op("Div", d, w.op("Mul", r, 1 / n))),
    "rms quotient": by_l2(lambda w, d, r, n: w.op("Mul", n, w.op("Div", d, r)), centre=False),
    "numerator": by_l2(lambda w, d, r, n: w.op("Div", w.op("Mul", d, n), r)),
    "reciprocal": by_l2(lambda w, d, r, n: w.op("Mul", d, w.op("Mul", w.op("Reciprocal", r), n))),
}


NO_EPS = ("quotient", "deviation", "deviation times", "rms quotient", "numerator", "reciprocal")


def lp(after, centre=True, before=None, **attributes):
    def write(w, x, n):
        d = w.centred(x, (attributes.get("axis", -1),)) if centre else x
        d = before(w, d) if before else d
        return after(w, w.op("LpNormalization", d, **attributes), n**0.5)

    return write


LP = {
    "times the root": lp(lambda w, y, r: w.op("Mul", w.op("Mul", y, float(r)), w.gain(D)), axis=-1, p=2),
    "root first": lp(lambda w, y, r: w.op("Mul", float(r), y)),
    "root in the gain": lp(lambda w, y, r: w.op("Mul", y, w.constant((w.gain(D) * r).astype(w.dtype))), axis=2),
    "over the root": lp(lambda w, y, r: w.op("Mul", w.op("Div", y, float(1 / r)), w.gain(D)), p=2),
    "no gain": lp(lambda w, y, r: w.op("Mul", y, float(r)), axis=-1),
    "rms": lp(lambda w, y, r: w.op("Mul", w.op("Mul", y, float(r)), w.gain(D)), centre=False),
    "Cast": lp(lambda w, y, r: w.op("Mul", w.op("Cast", y, to=w.kind), float(r))),
    "Abs inside": lp(lambda w, y, r: w.op("Mul", y, float(r)), before=lambda w, d: w.op("Identity", d)),
}


# -------------------------------------------------------------------------------------------------------------- If


def in_branch(inner, outer):
    """`outer`(w, x, n) gives values outside of the If; `inner`(x, *values, gain) the nodes of a branch."""

    def write(w, x, n):
        values, gain = outer(w, x, n), w.constant(w.gain(D))
        which = w.op("Equal", w.op("Size", x), np.int64(int(np.prod(ROWS))))
        nodes = inner(x, *values, gain)
        result = helper.make_tensor_value_info(nodes[-1].output[0], w.kind, None)
        other = helper.make_graph(
            [helper.make_node("Identity", [x], ["r"])], "else", [], [helper.make_tensor_value_info("r", w.kind, None)]
        )
        return w.op("If", which, then_branch=helper.make_graph(nodes, "then", [], [result]), else_branch=other)

    return write


def deviation(w, x, n):
    d = w.centred(x)
    v = w.op("Div", w.over("ReduceSum", w.op("Mul", d, d)), float(n))
    return d, w.op("Sqrt", w.op("Add", v, 1e-3))


def reciprocal(w, x, n):
    d, std = deviation(w, x, n)
    return d, w.op("Reciprocal", std)


def radicand(w, x, n):
    d = w.centred(x)
    v = w.op("Div", w.over("ReduceSum", w.op("Mul", d, d)), float(n))
    return d, w.op("Add", v, 1e-3)


def moments(w, x, n):
    return w.mean(x), deviation(w, x, n)[1]


def root_mean_square(w, x, n):
    v = w.op("Div", w.over("ReduceSum", w.op("Mul", x, x)), float(n))
    return (w.op("Sqrt", w.op("Add", v, 1e-3)),)


def steps(*texts):
    """Nodes of a branch from texts such as "Div a b p": x, the values from outside a and b, the gain g, own results."""

    def nodes(*names):
        known = dict(zip("xabg" if len(names) == 4 else "xag", names, strict=True))
        made = []
        for kind, *inputs, result in map(str.split, texts):
            made.append(helper.make_node(kind, [known[each] for each in inputs], [f"in_{result}"]))
            known[result] = f"in_{result}"
        return made

    return nodes


IF = {
    "quotient": in_branch(steps("Div a b p", "Mul p g q"), deviation),
    "product": in_branch(steps("Mul a b p", "Mul p g q"), reciprocal),
    "gain first": in_branch(steps("Mul b g s", "Mul a s q"), reciprocal),
    "root inside": in_branch(steps("Sqrt b s", "Div a s p", "Mul p g q"), radicand),
    "reciprocal root": in_branch(steps("Sqrt b s", "Reciprocal s t", "Mul t a p", "Mul p g q"), radicand),
    "difference": in_branch(steps("Sub x a d", "Div d b p", "Mul p g q"), moments),
    "rms": in_branch(steps("Div x a p", "Mul p g q"), root_mean_square),
    "reciprocal inside": in_branch(steps("Reciprocal b t", "Mul a t p", "Mul p g q"), deviation),
}


# ----------------------------------------------------------------------------------------------------------- kinds

KINDS = {
    "Conv": {
        "pixel": (CHANNELS, norm(pixel, gain=(D, 1, 1))),
        "Pow": (CHANNELS, norm(pixel, gain=(D, 1, 1), product="Pow")),
        "bias": (CHANNELS, norm(pixel_with_bias, gain=(D, 1, 1))),
        "sum": (CHANNELS, norm(pixel_sum, gain=(D, 1, 1))),
        "repeated": (CHANNELS, norm(pixel_repeated, gain=(D, 1, 1))),
        "lines": ((2, D, 7), norm(pixel_of_lines, gain=(D, 1))),
        "window": (ROWS, norm(window)),
        "depthwise": (ROWS, norm(depthwise)),
        "ConvTranspose": (CHANNELS, norm(transposed_pixel, gain=(D, 1, 1))),
        "rms": (CHANNELS, rms(squares(pixel), (D, 1, 1))),
    },
    "MatMul": {
        "column": (ROWS, norm(column)),
        "ones": (ROWS, norm(column_of_ones)),
        "square": (ROWS, norm(square_matrix)),
        "vector": (ROWS, norm(vector)),
        "stacked": (ROWS, norm(stacked_columns)),
        "left": ((2, D, 7), norm(from_the_left, gain=(D, 1))),
        "transposed": (ROWS, norm(of_transposed)),
        "rms": (ROWS, rms(squares(column))),
    },
    "Gemm": {
        "column": (MATRIX, norm(gemm())),
        "transposed": (MATRIX, norm(gemm(transB=1))),
        "alpha": (MATRIX, norm(gemm_alpha)),
        "bias": (MATRIX, norm(gemm_with_bias)),
        "sum": (MATRIX, norm(gemm_sum)),
        "square": (MATRIX, norm(gemm_square)),
        "transA": (MATRIX, norm(gemm_of_transposed)),
        "left": (MATRIX, norm(gemm_from_the_left)),
        "reshaped": (ROWS, norm(of_rows(gemm()))),
        "rms": (MATRIX, rms(squares(gemm()))),
    },
    "Einsum": {
        "weights": (ROWS, norm(einsum("btd,d->bt"))),
        "dots": (ROWS, norm(einsum("...d,d->..."))),
        "column": (ROWS, norm(einsum("btd,de->bte", (D, 1), after=False))),
        "square": (ROWS, norm(einsum("btd,ed->bte", (D, D), after=False))),
        "sum": (ROWS, norm(einsum_sum)),
        "weights first": (ROWS, norm(weights_first)),
        "squares": (ROWS, norm(einsum("btd,d->bt"), einsum_squares("btd,btd,d->bt"))),
        "squares and count": (ROWS, norm(einsum("btd,d->bt"), einsum_squares("btd,btd->bt", weighted=False))),
        "dots of squares": (ROWS, norm(einsum("...d,d->..."), einsum_squares("...d,...d->...", weighted=False))),
        "channels": ((2, D, 7), norm(by_channels, gain=(D, 1))),
        "rms": (ROWS, rms(einsum_squares("btd,btd->bt", weighted=False))),
    },
    "Sum": {name: (ROWS, write) for name, write in SUMS.items()},
    "ReduceL2": {name: (ROWS, write) for name, write in L2.items()},
    "LpNormalization": {name: (ROWS, write) for name, write in LP.items()},
    "If": {name: (ROWS, write) for name, write in IF.items()},
}


def combinations():
    forms = [(kind, form) for kind, table in KINDS.items() for form in table]
    pairs = list(itertools.product(DTYPES, STEPS))
    for (place, (kind, form)), (turn, opset) in itertools.product(enumerate(forms), enumerate(OPSETS)):
        everything = bool(os.environ.get("CNORM_EVERY_WRITING"))
        for dtype, level in pairs if everything else [pairs[(5 * turn + place) % len(pairs)]]:
            if kind != "Einsum" or opset > 11:
                yield pytest.param(
                    kind, form, dtype, opset, level, id=f"{kind}-{form}-{dtype.__name__}-{opset}-{level}"
                )


def written(kind, form, dtype, opset, count=D):
    shape, write = KINDS[kind][form]
    w = Writing(dtype, opset)
    return w.model(write(w, w.input("x", shape), count))


def runs(model):
    try:
        ort.Session(model, "off")
    except ort.CannotRun:
        return False
    return True


def saved_or_skipped(model, level, folder):
    if not runs(model):
        pytest.skip("onnxruntime does not run it")
    copy = saved(model, level, folder)
    if not runs(copy):
        pytest.skip("onnxruntime does not load what it saved: one name twice in a branch")
    return copy


@pytest.mark.exhaustive(one_in=42)
@pytest.mark.parametrize(("kind", "form", "dtype", "opset", "level"), list(combinations()))
def test_a_norm_is_found_and_sound_in_every_writing(kind, form, dtype, opset, level, tmp_path):
    report = examined(saved_or_skipped(written(kind, form, dtype, opset), level, tmp_path), tmp_path)
    formula = "rms" if "rms" in form else "layer"
    assert [(norm.formula, norm.near_miss) for norm in report.norms] == [(formula, "")], shown(report)
    blocked = "nchwc" in report.problem  # in a layout that only onnxruntime evaluates: not exercised
    without_eps = "eps-zero" in {finding.code for finding in report.findings} and form in NO_EPS
    assert report.exit_code() == (2 if blocked else 1 if without_eps else 0), shown(report)


COUNTED = [each for each in combinations() if each.values[0] != "LpNormalization" and each.values[1] not in NO_EPS]


@pytest.mark.exhaustive(one_in=18)
@pytest.mark.parametrize(("kind", "form", "dtype", "opset", "level"), COUNTED)
def test_a_wrong_count_does_not_pass_in_any_writing(kind, form, dtype, opset, level, tmp_path):
    """Without those that only multiply by the root of n, which may be another gain."""
    report = examined(saved_or_skipped(written(kind, form, dtype, opset, D + 2), level, tmp_path), tmp_path)
    assert [bool(norm.near_miss) for norm in report.norms] == [True], shown(report)
    assert report.exit_code() != 0, shown(report)


@pytest.mark.parametrize("kind", ["MatMul", "Gemm", "Einsum", "Conv"])
def test_weights_of_zero_are_a_wrong_count(kind, tmp_path):
    form = {"MatMul": "column", "Gemm": "rms", "Einsum": "rms", "Conv": "rms"}[kind]
    model = written(kind, form, np.float32, 17, np.inf)
    report = examined(model, tmp_path)
    assert [bool(norm.near_miss) for norm in report.norms] == [True], shown(report)
    assert report.exit_code() == 1, shown(report)


def test_each_kind_has_six_writings():
    assert all(len(table) >= 6 for table in KINDS.values())
