"""cnorm.weight_norm against the oracle, differences and PyTorch; and its fold."""

import inputs
import numpy as np
import pytest
import reference
import tolerances

import cnorm

pytestmark = pytest.mark.usefixtures("isa")
both_types = pytest.mark.parametrize("dtype", [np.float32, np.float64])


def check(w, dv, gain=None):
    """Forward and backward against the oracle."""
    n = w[0].size
    u = tolerances.unit_roundoff(w.dtype)
    sums = tolerances.row_sum(n, w.dtype) + u
    v = cnorm.weight_norm(w, gain)
    expected = reference.weight_norm(w, gain)
    assert v.dtype == w.dtype
    # half the error of the sum of squares, the scale, the product
    tolerances.assert_within(v, expected, (sums / 2 + 3 * u) * np.abs(expected) + tolerances.smallest(w.dtype), "v")

    got = cnorm.weight_norm_backward(dv, w, gain)
    wanted = reference.weight_norm_backward(dv, w, gain)
    rows = len(w), -1
    unit = np.abs(reference.weight_norm(w).reshape(rows))
    d = np.abs(reference.wide(dv).reshape(rows))
    along = (d * unit).sum(-1)
    bound = (sums * 1.5 + 4 * u) * along + tolerances.smallest(w.dtype)
    if gain is None:
        assert got[1] is None
    else:
        tolerances.assert_within(got[1], wanted[1], bound, "dgain")
    w_rows = reference.wide(w).reshape(rows)
    inverse = reference.reciprocal_root((w_rows * w_rows).sum(-1, keepdims=True), 0)
    scale = inverse * (1 if gain is None else np.abs(reference.wide(gain))[:, None])
    bound = scale * ((sums / 2 + 5 * u) * d + (2.5 * sums + 10 * u) * unit * along[:, None])
    bound = bound + 2 * tolerances.smallest(w.dtype)
    tolerances.assert_within(got[0].reshape(rows), wanted[0].reshape(rows), bound, "dweight")


@both_types
def test_every_length(rng, dtype):
    for n in inputs.LENGTHS:
        w, dv = (rng.standard_normal((2, 5, n)) + 0.3).astype(dtype)
        check(w, dv, rng.standard_normal(5).astype(dtype))
        check(w, dv)


@both_types
def test_convolutions(rng, dtype):
    w, dv = rng.standard_normal((2, 7, 3, 5, 5)).astype(dtype)
    gain = rng.standard_normal(7).astype(dtype)
    check(w, dv, gain)
    assert np.array_equal(cnorm.weight_norm(w, gain).reshape(7, 75), cnorm.weight_norm(w.reshape(7, 75), gain))


@both_types
def test_every_kind_of_row(rng, dtype):
    for n in 2, 33, 1000:
        w = inputs.difficult_rows(rng, n, dtype)
        dv = rng.standard_normal(w.shape).astype(dtype)
        length = np.sqrt((reference.wide(w) ** 2).sum(-1))
        fits = (length == 0) | (length > 1e6 / float(np.finfo(dtype).max))  # else dweight is not a number of T
        check(w[fits], dv[fits], (1 + rng.random(fits.sum())).astype(dtype))


@both_types
def test_gains_of_any_scale(rng, dtype):
    w, dv = rng.standard_normal((2, 6, 40)).astype(dtype)
    info = np.finfo(dtype)
    gain = np.array([0, info.max / 50, info.tiny, -info.max / 100, info.smallest_subnormal, -1], dtype)
    check(w, dv / dtype(100), gain)


@both_types
def test_gain_over_length_outside_the_range_of_the_type(rng, dtype):
    """v and 1/|w| are in the range of T, but g/|w| overflows, is subnormal or underflows to 0."""
    size, other, tiny = (1e-12, 1e30, 1e-35) if dtype == np.float32 else (1e-100, 1e220, 1e-250)
    for w_size, g_size in (size, other), (1 / size, 1 / other), (1 / size, tiny):
        w, dv = rng.standard_normal((2, 5, 40))
        w, dv = (w_size * w).astype(dtype), (w_size * dv).astype(dtype)
        check(w, dv, (g_size * rng.uniform(1, 2, 5)).astype(dtype))


def test_dweight_in_range_when_its_partial_products_are_not():
    """g/|w| dv is in the range of float64 where g dv, g/|w| or dv/|w| is not."""
    for size, gain, scale in (1e300, 1e300, 1e20), (1e-300, 1e-200, 1e-200), (1e-310, 1e-12, 1e10), (1.7e307, 1e14, 1):
        w, dv = size * np.array([[1, 2, -1.0]]), scale * np.array([[1, -1, 3.0]])
        check(w, dv, np.array([gain]))


def test_gradients_are_finite_differences(rng):
    h = 2.0**-17
    w, dv = rng.standard_normal((2, 3, 7))
    gain = rng.standard_normal(3)
    for i, gradient in enumerate(cnorm.weight_norm_backward(dv, w, gain)):
        difference = np.empty_like(gradient)
        for at in np.ndindex(gradient.shape):
            ends = []
            for step in h, -h:
                arguments = [w.copy(), gain.copy()]
                arguments[i][at] += step
                ends.append(cnorm.weight_norm(*arguments))
            difference[at] = (dv * (ends[0] - ends[1])).sum() / (2 * h)
        np.testing.assert_allclose(gradient, difference, rtol=0, atol=1e-8 * max(1, np.abs(gradient).max()))


@both_types
def test_pytorch_agrees(rng, dtype):
    torch = pytest.importorskip("torch")
    limit = 20 * np.finfo(dtype).eps
    w, dv = rng.standard_normal((2, 9, 50)).astype(dtype)
    gain = rng.standard_normal(9).astype(dtype)
    layer = torch.nn.Linear(50, 9, dtype=torch.tensor(w).dtype)
    torch.nn.utils.parametrizations.weight_norm(layer)
    with torch.no_grad():
        layer.parametrizations.weight.original0.copy_(torch.tensor(gain[:, None]))
        layer.parametrizations.weight.original1.copy_(torch.tensor(w))
    layer.weight.backward(torch.tensor(dv))
    np.testing.assert_allclose(cnorm.weight_norm(w, gain), layer.weight.detach(), rtol=0, atol=limit * 4)
    dw, dgain = cnorm.weight_norm_backward(dv, w, gain)
    theirs = layer.parametrizations.weight
    np.testing.assert_allclose(dw, theirs.original1.grad, rtol=0, atol=limit * 20)
    np.testing.assert_allclose(dgain, theirs.original0.grad[:, 0], rtol=0, atol=limit * 50)


@both_types
def test_the_fold_is_rounded_once(rng, dtype):
    w = rng.standard_normal((9, 50)).astype(dtype)
    gain, bias = rng.standard_normal((2, 9)).astype(dtype)
    folded, same_bias = cnorm.fold_weight_norm(w, gain, bias)
    expected = reference.weight_norm(w, gain)
    u, u64 = tolerances.unit_roundoff(dtype), tolerances.unit_roundoff(np.float64)
    tolerances.assert_within(folded, expected, (u + 30 * u64) * np.abs(expected))
    assert folded.dtype == dtype
    assert np.array_equal(same_bias, bias)
    assert cnorm.fold_weight_norm(w)[1] is None


def test_a_folded_layer_runs(rng):
    w, x = rng.standard_normal((4, 3), np.float32), rng.standard_normal(3, np.float32)
    gain, bias = rng.standard_normal((2, 4)).astype(np.float32)
    layer = cnorm.Linear(*cnorm.fold_weight_norm(w, gain, bias))
    y = cnorm.Model([layer]).stream().step(x)
    expected = reference.weight_norm(w, gain) @ reference.wide(x) + bias
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-6)


@both_types
def test_rows_of_zeros_and_nan(rng, dtype):
    w, dv = rng.standard_normal((2, 4, 9)).astype(dtype)
    w[1], w[2, 3] = 0, np.nan
    gain = np.full(4, 2, dtype)
    v = cnorm.weight_norm(w, gain)
    dw, dgain = cnorm.weight_norm_backward(dv, w, gain)
    assert not v[1].any()
    assert not dw[1].any()
    assert dgain[1] == 0
    assert np.isnan(v[2]).all()
    assert np.isfinite(v[[0, 1, 3]]).all()
    assert cnorm.weight_norm(w[:0]).shape == (0, 9)


def test_errors(rng):
    w = rng.standard_normal((4, 6), np.float32)
    norm, back, fold = cnorm.weight_norm, cnorm.weight_norm_backward, cnorm.fold_weight_norm
    for call, error, words in [
        (lambda: norm(w[0]), ValueError, "at least 2 dimensions"),
        (lambda: norm(w, w[0]), ValueError, r"gain must have shape \(4,\), one number for each output"),
        (lambda: norm(w, np.ones(4)), TypeError, "gain must have the dtype"),
        (lambda: norm(w.astype(np.int32)), TypeError, "weight must have dtype"),
        (lambda: norm(w[:, :0]), ValueError, "at least one input"),
        (lambda: norm(w[:3], out=w[1:]), ValueError, "out must not overlap weight"),
        (lambda: back(w[:2], w), ValueError, "dv must have the shape of weight"),
        (lambda: back(w, w, out=(None,)), ValueError, "tuple of 2"),
        (lambda: back(w, w, out=(None, w[:, 0].copy())), ValueError, r"out\[1\] must be None where gain is None"),
        (lambda: fold(w.tolist()), TypeError, "weight must be an array"),
        (lambda: fold(w, w[0]), ValueError, r"gain must have shape \(4,\)"),
        (lambda: fold(w, None, np.ones(4, int)), TypeError, "bias must have dtype"),
    ]:
        with pytest.raises(error, match=words):
            call()


def test_elements_much_smaller_than_the_largest_stay_precise():
    """1e-160 beside 1e160: the squares leave the range of float64, and so does w/|w| before the gain is applied."""
    w, gain = np.array([[1e160, 1e-160, -3e-170]]), np.array([1e30])
    v = cnorm.weight_norm(w, gain)
    np.testing.assert_allclose(v, [[1e30, 1e-290, -3e-300]], rtol=1e-15)


@pytest.mark.parametrize("power", [-700, -40, 3, 700])
def test_scaling_by_a_power_of_two_changes_no_bit(rng, power):
    """Whether or not a row takes the float64 path, which scales it; gradients round in another order there."""
    w, dv, gain = rng.standard_normal((5, 40)), rng.standard_normal((5, 40)), rng.standard_normal(5)
    scaled = np.ldexp(w, power)
    assert cnorm.weight_norm(scaled, gain).tobytes() == cnorm.weight_norm(w, gain).tobytes()
    dw, dgain = cnorm.weight_norm_backward(dv, w, gain)
    dw_scaled, dgain_scaled = cnorm.weight_norm_backward(dv, scaled, gain)
    np.testing.assert_allclose(dgain_scaled, dgain, rtol=0, atol=1e-14)
    np.testing.assert_allclose(np.ldexp(dw_scaled, power), dw, rtol=0, atol=1e-14)
