"""Properties of every norm for arbitrary arrays: hypothesis searches for a counterexample and shows the smallest."""

import math
from collections.abc import Callable
from typing import NamedTuple

import hypothesis.extra.numpy as arrays
import ml_dtypes
import numpy as np
import pytest
import reference
import tolerances
from hypothesis import given
from hypothesis import strategies as st

import cnorm

FULL = (np.float32, np.float64)
ALL = (*FULL, np.float16, ml_dtypes.bfloat16)


class Norm(NamedTuple):
    """One of cnorm's norms, called like all the others."""

    forward: Callable  # (x, weight, bias, axis, out) -> y
    backward: Callable  # (dy, x, weight, axis, out) -> gradients
    parameters: Callable  # (shape, axis) -> the shape of weight and bias
    dtypes: tuple = FULL
    dimensions: int = 2  # at least
    samples: int = 0  # at least


def with_stats(norm, *arguments, **options):
    return norm(*arguments, **options, return_stats=True)[-1]


NORMS = {
    "layer_norm": Norm(
        lambda x, w, b, axis, out: cnorm.layer_norm(x, w, b, axis=axis, out=out),
        lambda dy, x, w, axis, out: cnorm.layer_norm_backward(
            dy, x, w, with_stats(cnorm.layer_norm, x, axis=axis), axis=axis, out=out
        ),
        lambda shape, axis: shape[axis:],
        ALL,
        1,
    ),
    "add_layer_norm": Norm(
        lambda x, w, b, axis, out: cnorm.add_layer_norm(x, x[::-1].copy(), w, b, axis=axis, out=out)[0],
        lambda dy, x, w, axis, out: cnorm.layer_norm_backward(
            dy, x, w, with_stats(cnorm.add_layer_norm, x, np.zeros_like(x), axis=axis), axis=axis, out=out
        ),
        lambda shape, axis: shape[axis:],
        ALL,
        1,
    ),
    "rms_norm": Norm(
        lambda x, w, b, axis, out: cnorm.rms_norm(x, w, axis=axis, out=out),
        lambda dy, x, w, axis, out: cnorm.rms_norm_backward(
            dy, x, w, with_stats(cnorm.rms_norm, x, axis=axis), axis=axis, out=out
        ),
        lambda shape, axis: shape[axis:],
        ALL,
        1,
    ),
    "group_norm": Norm(
        lambda x, w, b, axis, out: cnorm.group_norm(x, 1, w, b, out=out),
        lambda dy, x, w, axis, out: cnorm.group_norm_backward(dy, x, 1, w, with_stats(cnorm.group_norm, x, 1), out=out),
        lambda shape, axis: shape[1:2],
    ),
    "instance_norm": Norm(
        lambda x, w, b, axis, out: cnorm.instance_norm(x, w, b, out=out),
        lambda dy, x, w, axis, out: cnorm.instance_norm_backward(dy, x, w, with_stats(cnorm.instance_norm, x), out=out),
        lambda shape, axis: shape[1:2],
        dimensions=3,
    ),
    "batch_norm": Norm(
        lambda x, w, b, axis, out: cnorm.batch_norm(x, w, b, out=out),
        lambda dy, x, w, axis, out: cnorm.batch_norm_backward(dy, x, w, with_stats(cnorm.batch_norm, x), out=out),
        lambda shape, axis: shape[1:2],
        samples=2,
    ),
    "batch_norm_inference": Norm(
        lambda x, w, b, axis, out: cnorm.batch_norm_inference(x, b, w * w, w, b, out=out),
        lambda dy, x, w, axis, out: cnorm.batch_norm_inference_backward(dy, x, w, w * w, w, out=out),
        lambda shape, axis: shape[1:2],
    ),
    "weight_norm": Norm(
        lambda x, w, b, axis, out: cnorm.weight_norm(x, w, out=out),
        lambda dy, x, w, axis, out: cnorm.weight_norm_backward(dy, x, w, out=out),
        lambda shape, axis: shape[:1],
    ),
    "divisive_norm": Norm(
        lambda x, w, b, axis, out: cnorm.divisive_norm(x, w, b, mean_radius=1, radius=2, out=out),
        lambda dy, x, w, axis, out: cnorm.divisive_norm_backward(dy, x, w, mean_radius=1, radius=2, out=out),
        lambda shape, axis: shape[-1:],
        dimensions=1,
    ),
}
every_norm = pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)


@st.composite
def views(draw, dtype, shape):
    """Arrays of that shape in any layout: permuted dimensions, steps, negative strides, slices, any byte offset."""
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.sampled_from([1, 2, 3, -1, -2])) for _ in shape]
    margins = [draw(st.integers(0, 2)) for _ in shape]
    room = [shape[i] * abs(steps[i]) + margins[i] for i in order]
    offset = draw(st.sampled_from([0, 1, 4]))
    memory = np.zeros(math.prod(room) * np.dtype(dtype).itemsize + offset, np.uint8)
    view = np.ndarray(room, dtype, memory, offset).transpose(np.argsort(order))
    view = view[tuple(slice(None, None, step) for step in steps)][tuple(slice(0, n) for n in shape)]
    view[...] = np.random.default_rng(draw(st.integers(0, 99))).standard_normal(shape)
    return view


@st.composite
def cases(draw, norm):
    """dtype, shape and axis, and views of weight and bias."""
    dtype = draw(st.sampled_from(norm.dtypes))
    shape = [draw(st.integers(1, 6)) for _ in range(draw(st.integers(norm.dimensions, 4)))]
    shape[-1] = draw(st.integers(1, 40))
    axis = draw(st.integers(0, len(shape) - 1))
    if len(shape) > 1 and axis > 0:
        shape[0] = draw(st.integers(norm.samples, 6))
    shape[0] = max(shape[0], norm.samples)
    weight, bias = (draw(views(dtype, norm.parameters(tuple(shape), axis))) for _ in range(2))
    return dtype, tuple(shape), axis, weight, bias


def plain(array):
    return np.array(array, order="C", copy=True)


def assert_same_bits(got, expected):
    assert np.shape(got) == np.shape(expected)
    assert np.asarray(got).tobytes() == np.asarray(expected).tobytes()


def memory_of(view):
    """The whole array that a view was cut out of."""
    while isinstance(view.base, np.ndarray):
        view = view.base
    return view


@pytest.mark.exhaustive(one_in=9)
@every_norm
@given(data=st.data())
def test_any_layout_gives_the_same_bits(norm, data):
    """The same bits as for contiguous arrays, for any layout of inputs and output; nothing else is written."""
    dtype, shape, axis, weight, bias = data.draw(cases(norm), "case")
    x, out = (data.draw(views(dtype, shape), name) for name in ("x", "out"))
    expected = norm.forward(plain(x), plain(weight), plain(bias), axis, None)
    before, kept = [memory_of(a).tobytes() for a in (x, weight, bias, out)], out.copy()
    assert_same_bits(norm.forward(x, weight, bias, axis, None), expected)
    assert norm.forward(x, weight, bias, axis, out) is out
    assert_same_bits(out, expected)
    out[...] = kept
    assert [memory_of(a).tobytes() for a in (x, weight, bias, out)] == before
    assert norm.forward(x, weight, bias, axis, x) is x
    assert_same_bits(x, expected)


@pytest.mark.exhaustive(one_in=5)
@every_norm
@given(data=st.data())
def test_any_layout_gives_the_same_gradients(norm, data):
    dtype, shape, axis, weight, _ = data.draw(cases(norm), "case")
    x, dy, dx = (data.draw(views(dtype, shape), name) for name in ("x", "dy", "dx"))
    expected = norm.backward(plain(dy), plain(x), plain(weight), axis, None)
    small = [np.empty_like(gradient) for gradient in expected[1:3]]
    over_dy, over_x, none = plain(dy), plain(x), [None] * len(small)
    for got in (
        norm.backward(dy, x, weight, axis, None),
        norm.backward(dy, x, weight, axis, (dx, *small)),
        norm.backward(over_dy, x, weight, axis, (over_dy, *none)),
        norm.backward(dy, over_x, weight, axis, (over_x, *none)),
        norm.backward(dy, x, weight, axis, (dy, *none)),
    ):
        for gradient, wanted in zip(got, expected, strict=True):
            assert_same_bits(gradient, wanted)
    for gradient, wanted in zip((dx, *small), expected, strict=False):
        assert_same_bits(gradient, wanted)


@pytest.mark.exhaustive(one_in=3)
@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", FULL)
@pytest.mark.parametrize(
    ("norm", "oracle"), [(cnorm.layer_norm, reference.layer_norm), (cnorm.rms_norm, reference.rms_norm)]
)
@given(data=st.data())
def test_any_finite_rows_are_right(norm, oracle, dtype, data):
    """Any finite numbers, near overflow or subnormal; each row has the bits that it has alone."""
    finite = arrays.from_dtype(np.dtype(dtype), allow_nan=False, allow_infinity=False)
    x = data.draw(arrays.arrays(dtype, st.tuples(st.integers(1, 3), st.integers(1, 40)), elements=finite), "x")
    eps = data.draw(st.sampled_from([0, 1e-5]), "eps")
    y = norm(x, eps=eps)
    xhat = oracle(x, eps=eps)[0]
    tolerances.assert_within(y, xhat, tolerances.any_row(xhat, dtype) + 2 * tolerances.smallest(dtype))
    for row, alone in zip(y, x, strict=True):
        assert_same_bits(row, norm(alone, eps=eps))
