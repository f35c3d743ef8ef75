"""rms_norm, add_layer_norm and the half dtypes; compared bit for bit with layer_norm where that applies."""

import inputs
import ml_dtypes
import numpy as np
import pytest
import reference
import tolerances

import cnorm

HALF = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
FULL = [np.dtype(np.float32), np.dtype(np.float64)]
SHAPES = [(1, 1), (3, 7), (5, 16), (4, 33), (70, 130), (2, 513), (2, 8197)]


def rows(rng, shape, dtype, mean=1.0):
    return (rng.standard_normal(shape) + mean).astype(dtype)


def bits(a):
    return np.asarray(a).tobytes()


# ---- float16 and bfloat16 are storage: widened exactly, computed in float32, rounded once ---------------------------


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mean", [0.0, 30.0])
def test_half_is_float32_rounded_once(isa, rng, dtype, shape, mean):
    x, weight, bias = (rows(rng, s, dtype, m) for s, m in ((shape, mean), (shape[-1:], 1), (shape[-1:], 0)))
    wide = [a.astype(np.float32) for a in (x, weight, bias)]
    assert bits(cnorm.layer_norm(x, weight, bias)) == bits(cnorm.layer_norm(*wide).astype(dtype))
    assert bits(cnorm.rms_norm(x, weight)) == bits(cnorm.rms_norm(*wide[:2]).astype(dtype))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half_with_float32_weights(isa, rng, dtype):
    x, weight, bias = rows(rng, (9, 50), dtype), rows(rng, 50, np.float32), rows(rng, 50, np.float32)
    expected = cnorm.layer_norm(x.astype(np.float32), weight, bias).astype(dtype)
    assert bits(cnorm.layer_norm(x, weight, bias)) == bits(expected)
    with pytest.raises(TypeError, match="weight"):
        cnorm.layer_norm(x, weight.astype(np.float64))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("shape", [(1, 130), (9, 130), (9, 1024), (3, 4100), (1100, 4100), (5000, 1024)], ids=str)
def test_nan_stays_nan_when_rounded_to_half(isa, rng, dtype, shape):
    """For any payload: rounding a payload of all ones up would give -0, rounding a small one down infinity."""
    kinds = np.array([0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0xFFFF8001, 0x7F800001], np.uint32).view(np.float32)
    x, spoilt = rows(rng, shape, dtype), rows(rng, shape[1:], np.float32)
    spoilt[::2] = np.resize(kinds, shape[1] // 2)
    for y in cnorm.layer_norm(x, None, spoilt), cnorm.layer_norm(x, spoilt), cnorm.rms_norm(x, spoilt):
        assert np.isnan(y[:, ::2]).all()
        assert np.isfinite(y[:, 1::2]).all()


@pytest.mark.exhaustive(one_in=11)
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (4096, 256)], ids=str)
@pytest.mark.parametrize("mean", [0.0, 1.0, 3.0, 10.0, 100.0])
def test_half_is_within_one_unit_of_float64(isa, rng, dtype, shape, mean):
    x = rows(rng, shape, dtype, mean)
    y = cnorm.layer_norm(x).astype(np.float64)
    exact = reference.layer_norm(x.astype(np.float32))[0]
    tolerances.assert_within(y, exact, tolerances.half(exact, dtype))
    large = np.abs(exact) >= 2.0**-8
    unit = np.spacing(np.abs(exact[large]).astype(dtype)).astype(np.float64)
    tolerances.assert_within(y[large], exact[large], unit)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_half_backward_is_float32_rounded_once(isa, rng, dtype, shape):
    x, dy = rows(rng, shape, dtype), rows(rng, shape, dtype, 0)
    weight = rows(rng, shape[-1:], np.float32)
    wide_x, wide_dy = x.astype(np.float32), dy.astype(np.float32)
    _, stats = cnorm.layer_norm(x, weight, return_stats=True)
    dx, dweight, dbias = cnorm.layer_norm_backward(dy, x, weight, stats)
    expected = cnorm.layer_norm_backward(wide_dy, wide_x, weight, stats)
    assert bits(dx) == bits(expected[0].astype(dtype))
    assert (bits(dweight), bits(dbias)) == (bits(expected[1]), bits(expected[2]))
    narrow = cnorm.layer_norm_backward(dy, x, weight.astype(dtype), stats)
    assert narrow[1].dtype == narrow[2].dtype == dtype


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_every_half_value_is_widened_and_rounded_right(isa, dtype):
    """All 65536 values, in rows (x, -x), which normalise to +-1 at any scale; NaN and infinity give NaN."""
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    x = np.stack([every, -every], axis=-1)
    wide = x.astype(np.float32)
    with np.errstate(invalid="ignore"):
        expected = cnorm.layer_norm(wide, eps=0).astype(dtype)
        got = cnorm.layer_norm(x, eps=0)
    same = (got == expected) | (np.isnan(got.astype(np.float32)) & np.isnan(expected.astype(np.float32)))
    assert same.all()
    residual = np.full(1 << 16, 1.0, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        total = (every.astype(np.float32) + 1).astype(dtype)
    got = cnorm.add_layer_norm(every[:, None], residual[:, None])[1][:, 0]
    assert ((got == total) | (np.isnan(got.astype(np.float32)) & np.isnan(total.astype(np.float32)))).all()


# ---- residual sum and norm in one pass ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FULL + HALF, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mean", [0.0, 1e3])
def test_add_layer_norm_is_the_norm_of_the_rounded_sum(isa, rng, dtype, shape, mean):
    x, residual = rows(rng, shape, dtype, mean), rows(rng, shape, dtype, mean)
    weight, bias = rows(rng, shape[-1:], dtype), rows(rng, shape[-1:], dtype)
    expected_sum = x + residual
    y, total, stats = cnorm.add_layer_norm(x, residual, weight, bias, return_stats=True)
    expected, expected_stats = cnorm.layer_norm(expected_sum, weight, bias, return_stats=True)
    assert bits(total) == bits(expected_sum)
    assert bits(y) == bits(expected)
    assert bits(stats.mean) == bits(expected_stats.mean)
    assert bits(stats.inv_std_dev) == bits(expected_stats.inv_std_dev)


@pytest.mark.parametrize("dtype", FULL + HALF, ids=str)
@pytest.mark.parametrize("y_over", ["x", "residual", None])
@pytest.mark.parametrize("sum_over", ["x", "residual", None])
def test_add_layer_norm_in_place(isa, rng, dtype, y_over, sum_over):
    x, residual = rows(rng, (70, 100), dtype), rows(rng, (70, 100), dtype)
    expected = cnorm.add_layer_norm(x, residual)
    places = {"x": x, "residual": residual, None: None}
    if y_over is not None and y_over == sum_over:
        with pytest.raises(ValueError, match="sum_out"):
            cnorm.add_layer_norm(x, residual, out=places[y_over], sum_out=places[sum_over])
        return
    y, total = cnorm.add_layer_norm(x, residual, out=places[y_over], sum_out=places[sum_over])
    assert (bits(y), bits(total)) == (bits(expected[0]), bits(expected[1]))


def test_add_layer_norm_of_extreme_rows(isa):
    x = np.float32([[1e20, 2e20, -3e20, 4e20], [3e38, -3e38, 1e38, 0], [5, 5, 5, 5]])
    residual = np.float32([[0, 0, 0, 1e20], [0, 0, 0, 0], [1, 1, 1, 1]])
    y, total = cnorm.add_layer_norm(x, residual, eps=0)
    assert bits(total) == bits(x + residual)
    assert bits(y) == bits(cnorm.layer_norm(x + residual, eps=0))


@pytest.mark.parametrize("bad", [np.zeros((2, 3), np.float32), np.zeros((2, 4), np.float64), None])
def test_rejects_a_residual_of_another_shape_or_dtype(bad):
    with pytest.raises((TypeError, ValueError), match="residual"):
        cnorm.add_layer_norm(np.ones((2, 4), np.float32), bad)


# ---- RMS norm -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FULL, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mean", [0.0, 1.0, 1e4])
def test_rms_norm_against_the_oracle(isa, rng, dtype, shape, mean):
    x, weight = rows(rng, shape, dtype, mean), rows(rng, shape[-1:], dtype)
    y, stats = cnorm.rms_norm(x, weight, return_stats=True)
    expected, inv = reference.rms_norm(x, weight)
    bound = tolerances.forward(reference.rms_norm(x)[0], dtype, reference.wide(weight))
    tolerances.assert_within(y, expected, bound)
    assert not stats.mean.any()
    tolerances.assert_within(stats.inv_std_dev, inv, tolerances.inv_std_dev(inv, dtype), "inv_std_dev")


@pytest.mark.parametrize("dtype", FULL, ids=str)
def test_rms_gradients_against_the_oracle(isa, rng, dtype):
    for count, n in [(3, n) for n in inputs.LENGTHS] + [(70, 33), (70, 1100)]:
        x, dy, weight = rows(rng, (count, n), dtype), rows(rng, (count, n), dtype), rows(rng, n, dtype)
        _, stats = cnorm.rms_norm(x, weight, return_stats=True)
        dx, dweight = cnorm.rms_norm_backward(dy, x, weight, stats)
        expected_dx, expected_dweight = reference.rms_norm_backward(dy, x, weight)
        (xhat, rstd), wide = reference.rms_norm(x), reference.wide(dy)
        bound = tolerances.dx(wide, xhat, rstd, dtype, reference.wide(weight))
        tolerances.assert_within(dx, expected_dx, bound, "dx")
        tolerances.assert_within(dweight, expected_dweight, tolerances.dweight(wide, xhat, dtype), "dweight")


@pytest.mark.parametrize("dtype", FULL, ids=str)
def test_rms_gradients_near_the_largest_number(isa, dtype):
    x, dy = np.array([[9, 3.5]], dtype), np.array([[0.59, -0.94]], dtype) * np.finfo(dtype).max
    _, stats = cnorm.rms_norm(x, return_stats=True)
    dx, _ = cnorm.rms_norm_backward(dy, x, None, stats)
    xhat, rstd = reference.rms_norm(x)
    bound = tolerances.dx(reference.wide(dy), xhat, rstd, dtype)
    tolerances.assert_within(dx, reference.rms_norm_backward(dy, x)[0], bound, "dx")


@pytest.mark.parametrize("scale", [1e20, 1e-30, 3e37])
def test_rms_norm_at_any_scale(isa, scale):
    k = np.arange(1, 9)
    y = cnorm.rms_norm(np.float32(scale * k)[None], eps=0)
    exact = (np.float32(scale * k).astype(np.float64)) / np.sqrt((np.float32(scale * k).astype(np.float64) ** 2).mean())
    assert np.abs(y - exact).max() <= 6e-8 * np.abs(exact).max()


def test_rms_norm_of_zeros_is_zero(isa):
    y, stats = cnorm.rms_norm(np.zeros((2, 5), np.float32), eps=0, return_stats=True)
    assert not y.any()
    assert not stats.inv_std_dev.any()


def test_rms_gradients_are_finite_differences(rng):
    x, dy, weight = rng.standard_normal((3, 6)), rng.standard_normal((3, 6)), rng.standard_normal(6)

    def loss(x, weight):
        return float((cnorm.rms_norm(x, weight, eps=0.1) * dy).sum())

    _, stats = cnorm.rms_norm(x, weight, eps=0.1, return_stats=True)
    dx, dweight = cnorm.rms_norm_backward(dy, x, weight, stats)
    step = 1e-5  # central differences: error of order step^2 and 1e-16 / step
    for array, gradient in ((x, dx), (weight, dweight)):
        for at in np.ndindex(array.shape):
            kept = array[at]
            array[at] = kept + step
            up = loss(x, weight)
            array[at] = kept - step
            down = loss(x, weight)
            array[at] = kept
            assert abs((up - down) / (2 * step) - gradient[at]) < 1e-8


@pytest.mark.parametrize("dtype", FULL, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_backward_without_weight_and_in_place(isa, rng, dtype, shape):
    x, dy = rows(rng, shape, dtype), rows(rng, shape, dtype, 0)
    ones = np.ones(shape[-1:], dtype)
    _, stats = cnorm.rms_norm(x, return_stats=True)
    dx, dweight = cnorm.rms_norm_backward(dy, x, ones, stats)
    alone, none = cnorm.rms_norm_backward(dy, x, None, stats)
    assert none is None
    assert bits(alone) == bits(dx)
    into = (dy, dweight.copy())
    cnorm.rms_norm_backward(dy, x, ones, stats, out=into)
    assert (bits(into[0]), bits(into[1])) == (bits(dx), bits(dweight))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_long_rows_at_any_alignment_give_the_same_bits(rng, dtype):
    """Rows of several summation blocks, with and without a shift, each input and output at another alignment."""
    x, residual = (rng.standard_normal((2, 4, 1040)) + np.float32([[0], [3], [40], [0]])).astype(dtype)
    sums = [a.tobytes() for a in cnorm.add_layer_norm(x, residual)]
    norm, rms = cnorm.layer_norm(x).tobytes(), cnorm.rms_norm(x).tobytes()
    size = x.itemsize
    for offset in range(0, 64, max(size, 4)):
        moved, other = inputs.at_byte_offset(x, offset), inputs.at_byte_offset(residual, (3 * offset) % 64)
        y, total = (inputs.at_byte_offset(np.zeros_like(x), (k * offset) % 64) for k in (5, 7))
        assert cnorm.layer_norm(moved, out=y).tobytes() == norm
        assert cnorm.rms_norm(moved, out=y).tobytes() == rms
        assert [a.tobytes() for a in cnorm.add_layer_norm(moved, other, out=y, sum_out=total)] == sums
