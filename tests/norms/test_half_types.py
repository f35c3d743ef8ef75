"""float16 and bfloat16 in group, instance and batch norm: the bits of float32, rounded once."""

import inputs
import ml_dtypes
import numpy as np
import pytest
import reference
import tolerances

import cnorm

pytestmark = pytest.mark.usefixtures("isa")
half_types = pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])

# matrices around each vector width, volumes with short and long runs, more than one block of 64 samples
SHAPES = [(3, 8), (2, 33), (70, 36), (5, 6, 1), (2, 12, 7), (3, 6, 4, 4), (2, 4, 33), (66, 2, 17), (1, 3, 8200)]


def narrowed(x, dtype):
    with np.errstate(over="ignore"):
        return x.astype(dtype)


def case(rng, shape, dtype, mean=0.0, scale=1.0):
    """x, dy of dtype and weight, bias of float32."""
    x, dy = rng.standard_normal((2, *shape))
    weight, bias = inputs.random_affine(rng, shape[1], np.float32)
    return narrowed(mean + scale * x, dtype), narrowed(dy, dtype), weight, bias


def assert_rounded(half, single):
    """half = single rounded to half's dtype, NaN where NaN is."""
    assert half.dtype != single.dtype
    expected = narrowed(single, half.dtype)
    np.testing.assert_array_equal(half.astype(np.float64), expected.astype(np.float64))


def assert_same_stats(half, single):
    assert half.mean.dtype == np.float32
    np.testing.assert_array_equal(half.mean, single.mean)
    np.testing.assert_array_equal(half.inv_std_dev, single.inv_std_dev)


def assert_same_gradients(half, single):
    assert_rounded(half[0], single[0])
    for ours, theirs in zip(half[1:], single[1:], strict=True):
        assert ours.dtype == np.float32  # that of weight
        np.testing.assert_array_equal(ours, theirs)


def check_group(x, dy, groups, weight, bias, eps=1e-5):
    wide, d = x.astype(np.float32), dy.astype(np.float32)
    y, stats = cnorm.group_norm(x, groups, weight, bias, eps=eps, return_stats=True)
    y32, stats32 = cnorm.group_norm(wide, groups, weight, bias, eps=eps, return_stats=True)
    assert_rounded(y, y32)
    assert_same_stats(stats, stats32)
    assert_same_gradients(
        cnorm.group_norm_backward(dy, x, groups, weight, stats),
        cnorm.group_norm_backward(d, wide, groups, weight, stats32),
    )


def check_batch(x, dy, weight, bias, eps=1e-5):
    wide, d = x.astype(np.float32), dy.astype(np.float32)
    y, stats = cnorm.batch_norm(x, weight, bias, eps=eps, return_stats=True)
    y32, stats32 = cnorm.batch_norm(wide, weight, bias, eps=eps, return_stats=True)
    assert_rounded(y, y32)
    assert_same_stats(stats, stats32)
    assert_same_gradients(
        cnorm.batch_norm_backward(dy, x, weight, stats), cnorm.batch_norm_backward(d, wide, weight, stats32)
    )
    mean, var = bias, np.square(weight)
    y = cnorm.batch_norm_inference(x, mean, var, weight, bias, eps=eps)
    assert_rounded(y, cnorm.batch_norm_inference(wide, mean, var, weight, bias, eps=eps))
    assert_same_gradients(
        cnorm.batch_norm_inference_backward(dy, x, mean, var, weight, eps=eps),
        cnorm.batch_norm_inference_backward(d, wide, mean, var, weight, eps=eps),
    )


@half_types
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_half_is_float32_rounded_once(rng, dtype, shape):
    x, dy, weight, bias = case(rng, shape, dtype, mean=1.5)
    for groups in {1, shape[1]} | ({shape[1] // 2} if shape[1] % 2 == 0 else set()):
        check_group(x, dy, groups, weight, bias)
    if x.size > shape[1]:
        check_batch(x, dy, weight, bias)


@half_types
@pytest.mark.parametrize("mean", [0, 4, 1e2, 1e4])
def test_any_mean_and_scale(rng, dtype, mean):
    """Large means take the second sweep; large and small rows of bfloat16 take the float64 path."""
    scales = [1, 2.0**-14] if dtype == np.float16 else [1, 2.0**70, 2.0**-110]
    for scale in scales:
        x, dy, weight, bias = case(rng, (5, 6, 50), dtype, mean * scale, scale)
        for eps in 0, 1e-5:
            check_group(x, dy, 2, weight, bias, eps)
            check_batch(x, dy, weight, bias, eps)


@half_types
def test_half_is_within_one_rounding_of_float64(rng, dtype):
    x, _, weight, bias = case(rng, (4, 6, 200), dtype, mean=1)
    expected = reference.group_norm(x, 3, weight, bias)[0]
    y = cnorm.group_norm(x, 3, weight, bias)
    tolerances.assert_within(y, expected, tolerances.half(expected, dtype), "group_norm")
    expected = reference.batch_norm(x, weight, bias)[0]
    tolerances.assert_within(
        cnorm.batch_norm(x, weight, bias), expected, tolerances.half(expected, dtype), "batch_norm"
    )


@half_types
def test_half_parameters_are_widened_exactly(rng, dtype):
    x, dy, weight, bias = case(rng, (3, 8, 20), dtype)
    w, b = weight.astype(dtype), bias.astype(dtype)
    y, stats = cnorm.group_norm(x, 2, w, b, return_stats=True)
    wide = cnorm.group_norm(x, 2, w.astype(np.float32), b.astype(np.float32))
    assert y.tobytes() == wide.tobytes()
    dx, dweight, dbias = cnorm.group_norm_backward(dy, x, 2, w, stats)
    dx32, dweight32, dbias32 = cnorm.group_norm_backward(dy, x, 2, w.astype(np.float32), stats)
    assert dweight.dtype == dbias.dtype == dtype
    assert dx.tobytes() == dx32.tobytes()
    assert_rounded(dweight, dweight32)
    assert_rounded(dbias, dbias32)


@half_types
def test_strides_and_in_place(rng, dtype):
    x, _, weight, bias = case(rng, (6, 4, 10), dtype)
    spaced = np.zeros((12, 4, 10), dtype)[::2]
    spaced[...] = x
    wanted = cnorm.group_norm(x, 2, weight, bias)
    assert cnorm.group_norm(spaced, 2, weight, bias).tobytes() == wanted.tobytes()
    assert cnorm.group_norm(spaced, 2, weight, bias, out=spaced) is spaced
    assert spaced.tobytes() == wanted.tobytes()


@half_types
def test_running_averages_are_float32(rng, dtype):
    x, _, weight, bias = case(rng, (20, 5), dtype)
    mean, var = np.zeros(5, np.float32), np.ones(5, np.float32)
    mean32, var32 = mean.copy(), var.copy()
    cnorm.batch_norm(x, weight, bias, running_mean=mean, running_var=var)
    cnorm.batch_norm(x.astype(np.float32), weight, bias, running_mean=mean32, running_var=var32)
    assert mean.tobytes() == mean32.tobytes()
    assert var.tobytes() == var32.tobytes()
    with pytest.raises(TypeError, match="running_mean"):
        cnorm.batch_norm(x, running_mean=mean.astype(dtype), running_var=var.astype(dtype))


@half_types
def test_norms_without_half_types_reject_them(dtype):
    with pytest.raises(TypeError, match="float32 or float64"):
        cnorm.weight_norm(np.ones((2, 3), dtype))
