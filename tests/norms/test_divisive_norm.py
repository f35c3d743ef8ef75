"""cnorm.divisive_norm and the smoothing term, against the oracle, differences, layer norm and batch norm."""

import inputs
import numpy as np
import pytest
import reference
import tolerances

import cnorm

pytestmark = pytest.mark.usefixtures("isa")
both_types = pytest.mark.parametrize("dtype", [np.float32, np.float64])

FIELDS = [(None, None), (0, 0), (1, 2), (3, 1), (7, None), (None, 4), (5, 5), (1000, 1000)]


def forward_bound(z, dtype, weight=None, bias=None):
    """Computed in float64: a dozen roundings of z, then those of gain and bias; and one rounding to T."""
    gain = 1 if weight is None else np.abs(reference.wide(weight))
    shift = 0 if bias is None else np.abs(reference.wide(bias))
    u, u64 = tolerances.unit_roundoff(dtype), tolerances.unit_roundoff(np.float64)
    inside = 16 * u64 * (np.maximum(1, np.abs(z)) * gain + shift)
    return inside + u * (np.abs(z) * gain + shift) + tolerances.smallest(dtype)


@pytest.mark.exhaustive(one_in=6)
@both_types
@pytest.mark.parametrize("fields", FIELDS, ids=str)
@pytest.mark.parametrize("sigma", [1, 0.01, 0])
def test_every_field(rng, dtype, fields, sigma):
    options = {"sigma": sigma, "mean_radius": fields[0], "radius": fields[1]}
    for n in 1, 2, 3, 7, 16, 33, 100:
        x, dy = (rng.standard_normal((2, 4, n)) + 1).astype(dtype)
        weight, bias = inputs.random_affine(rng, n, dtype)
        z = reference.divisive_norm(x, **options)
        for gain, shift in (weight, bias), (None, None), (None, bias), (weight, None):
            y = cnorm.divisive_norm(x, gain, shift, **options)
            assert y.dtype == dtype
            expected = reference.divisive_norm(x, gain, shift, **options)
            tolerances.assert_within(y, expected, forward_bound(z, dtype, gain, shift))
            got = cnorm.divisive_norm_backward(dy, x, gain, **options)
            wanted = reference.divisive_norm_backward(dy, x, gain, **options)
            assert (got[1] is None) == (gain is None)
            assert isinstance(got[3], float)
            # gradients grow with 1/s, and so does the cancellation error between their terms where s is nearly 0
            _, v, s = reference._divisive(x, sigma, *fields)
            steep = (1 / np.where(s == 0, np.inf, s)).max() ** 2 * max(1, np.abs(v).max())
            u = tolerances.unit_roundoff(dtype)
            slack = 300 * tolerances.unit_roundoff(np.float64) * max(1, steep) * max(1, np.abs(dy).sum())
            for name, a, b in zip(("dx", "dweight", "dbias"), got[:3], wanted[:3], strict=True):
                if a is not None:
                    tolerances.assert_within(a, b, 2 * u * np.abs(b) + slack, name)
            assert abs(got[3] - wanted[3]) <= slack * max(1, steep)


@both_types
@pytest.mark.parametrize("mean", [1, 100, 1e4, 1e6])
def test_any_mean(rng, dtype, mean):
    """A mean far above the deviation does not enlarge the error: layer norm's bound, for float64 a few roundings."""
    x = (mean + rng.standard_normal((6, 500))).astype(dtype)
    for fields in (None, None), (20, 20), (3, 50):
        options = {"sigma": 0.1, "mean_radius": fields[0], "radius": fields[1]}
        z = reference.divisive_norm(x, **options)
        tolerances.assert_within(cnorm.divisive_norm(x, **options), z, forward_bound(z, dtype))


@both_types
def test_fields_truncated_at_the_end_of_the_row(rng, dtype):
    """Includes fields that lie wholly in the last block of sums, whose rounding errors they carry along."""
    for n in 20, 21, 30, 40, 60, 75:
        x = (1e6 + rng.standard_normal((3, n))).astype(dtype)
        for fields in (10, 10), (13, 2), (12, None):
            options = {"sigma": 0.1, "mean_radius": fields[0], "radius": fields[1]}
            z = reference.divisive_norm(x, **options)
            tolerances.assert_within(cnorm.divisive_norm(x, **options), z, forward_bound(z, dtype))


@both_types
@pytest.mark.parametrize("eps", [1e-5, 0])
def test_full_fields_are_layer_norm(rng, dtype, eps):
    for n in 2, 33, 1000:
        x, dy = (rng.standard_normal((2, 20, n)) + 2).astype(dtype)
        weight, bias = inputs.random_affine(rng, n, dtype)
        sigma = np.sqrt(eps)
        y, stats = cnorm.layer_norm(x, weight, bias, eps=eps, return_stats=True)
        xhat, _, rstd = reference.layer_norm(x, eps=eps)
        # sigma is rounded to T and then squared, eps is rounded to T: two roundings apart
        bound = tolerances.forward(xhat, dtype, weight, bias)
        bound = 2 * bound + 2 * np.finfo(dtype).eps * np.abs(xhat * weight)
        tolerances.assert_within(cnorm.divisive_norm(x, weight, bias, sigma=sigma), reference.wide(y), bound)
        got = cnorm.divisive_norm_backward(dy, x, weight, sigma=sigma)
        wanted = cnorm.layer_norm_backward(dy, x, weight, stats)
        bound = 2 * tolerances.dx(reference.wide(dy), xhat, rstd, dtype, reference.wide(weight))
        tolerances.assert_within(got[0], reference.wide(wanted[0]), bound)


@both_types
def test_over_the_batch_it_is_batch_norm(rng, dtype):
    """Along the batch axis, with sigma = 0."""
    x = (rng.standard_normal((40, 9)) + 2).astype(dtype)
    y = cnorm.divisive_norm(np.ascontiguousarray(x.T), sigma=0).T
    expected = cnorm.batch_norm(x, eps=0)
    xhat = reference.batch_norm(x, eps=0)[0]
    tolerances.assert_within(y, reference.wide(expected), 2 * tolerances.batch_xhat(xhat, x, dtype))


@pytest.mark.parametrize("fields", FIELDS[:-1], ids=str)
def test_gradients_are_finite_differences(rng, fields):
    h = 2.0**-17
    x, dy = rng.standard_normal((2, 3, 9))
    weight, bias = rng.standard_normal((2, 9))
    radii = {"mean_radius": fields[0], "radius": fields[1]}
    gradients = cnorm.divisive_norm_backward(dy, x, weight, sigma=0.7, **radii)
    for i, gradient in enumerate(map(np.asarray, gradients)):
        difference = np.empty_like(gradient)
        for at in np.ndindex(gradient.shape):
            ends = []
            for step in h, -h:
                arguments = [x.copy(), weight.copy(), bias.copy(), np.array(0.7)]
                arguments[i][at] += step
                ends.append(cnorm.divisive_norm(*arguments[:3], sigma=float(arguments[3]), **radii))
            difference[at] = (dy * (ends[0] - ends[1])).sum() / (2 * h)
        np.testing.assert_allclose(gradient, difference, rtol=0, atol=1e-8 * max(1, np.abs(gradient).max()))


@both_types
@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("smoothing", [0.5, 1e-3, 0])
def test_smoothing_gradient(rng, dtype, axis, smoothing):
    """Against the oracle; in float64 also against differences of the forward kernel."""
    x, dy = rng.standard_normal((2, 5, 4, 9)).astype(dtype)
    weight, _ = rng.standard_normal((2, *x.shape[axis:])).astype(dtype)
    for gain in weight, None:
        _, stats = cnorm.layer_norm(x, gain, eps=smoothing**2, axis=axis, return_stats=True)
        got = cnorm.smoothing_gradient(dy, x, gain, stats, smoothing, axis=axis)
        expected = reference.smoothing_gradient(dy, x, gain, smoothing, axis)
        scale = np.abs(dy).sum() * np.abs(stats.inv_std_dev).max() ** 2 * 10
        assert abs(got - expected) <= 20 * np.finfo(dtype).eps * scale * smoothing
        if dtype == np.float64 and smoothing == 0.5:
            h = 2.0**-17
            ends = [cnorm.layer_norm(x, gain, eps=(smoothing + s) ** 2, axis=axis) for s in (h, -h)]
            difference = (dy * (ends[0] - ends[1])).sum() / (2 * h)
            assert abs(got - difference) <= 1e-8 * scale


def test_smoothing_gradients_of_the_two_norms_agree(rng):
    x, dy = rng.standard_normal((2, 6, 30))
    weight = rng.standard_normal(30)
    _, stats = cnorm.layer_norm(x, weight, eps=0.09, return_stats=True)
    ds = cnorm.smoothing_gradient(dy, x, weight, stats, 0.3)
    np.testing.assert_allclose(ds, cnorm.divisive_norm_backward(dy, x, weight, sigma=0.3)[3], rtol=1e-11)


def test_smoothing_gradient_of_rows_whose_inverse_deviation_overflows(rng):
    """1/std overflows float32 or is subnormal: computed in float64; one rounding per addition and a few for xhat."""
    x, dy = rng.standard_normal((2, 5, 60)).astype(np.float32)
    huge = np.where(x < 0, np.float32(-3e38), np.float32(3e38))
    for rows, smoothing in (x * np.float32(2.0**-132), 2.0**-100), (huge, 1.0):
        for gain in None, x[0]:
            _, stats = cnorm.layer_norm(rows, gain, eps=smoothing**2, return_stats=True)
            got = cnorm.smoothing_gradient(dy, rows, gain, stats, smoothing)
            expected = reference.smoothing_gradient(dy, rows, gain, smoothing)
            xhat, _, rstd = reference.layer_norm(rows, eps=smoothing**2)
            size = (np.abs(dy * (1 if gain is None else gain) * xhat) * rstd**2).sum() * smoothing
            assert abs(got - expected) <= (x.size + 20) * tolerances.unit_roundoff(np.float64) * size


@both_types
def test_elements_change_no_bit_outside_their_fields(rng, dtype):
    """An outlier, NaN or infinity changes no bit of elements further away than both radii."""
    x = rng.standard_normal((1, 60)).astype(dtype)
    clean = cnorm.divisive_norm(x, sigma=0.1, mean_radius=2, radius=3)
    for bad in 1e20, np.nan, np.inf:
        spoilt = x.copy()
        spoilt[0, 30] = bad
        y = cnorm.divisive_norm(spoilt, sigma=0.1, mean_radius=2, radius=3)
        near = np.abs(np.arange(60) - 30) <= 5
        if dtype == np.float32 or np.isnan(bad):
            assert y[0, ~near].tobytes() == clean[0, ~near].tobytes(), bad
        if not np.isfinite(bad):
            assert np.isnan(y[0, near]).all()


@both_types
def test_any_scale(rng, dtype):
    """sigma = 0: scaling by a power of two changes no bit, also where squares leave the range of T."""
    x = rng.standard_normal((3, 50)).astype(dtype)
    expected = cnorm.divisive_norm(x, sigma=0, mean_radius=3, radius=4)
    for exponent in (-110, -60, 60, 120) if dtype == np.float32 else (-900, -500, 500, 1000):
        y = cnorm.divisive_norm(x * dtype(2.0**exponent), sigma=0, mean_radius=3, radius=4)
        assert y.tobytes() == expected.tobytes(), exponent
    assert not cnorm.divisive_norm(np.full((2, 9), 3.3, dtype), sigma=0).any()
    assert not cnorm.divisive_norm(x, sigma=0, mean_radius=0).any()
    assert not cnorm.divisive_norm(x * dtype(1e-30), sigma=1e30).round(20).any()


@both_types
def test_sigma_much_larger_than_the_row(rng, dtype):
    """y = v / sigma then, to the bit for powers of two, up to where the square of sigma leaves the range of T."""
    x = rng.standard_normal((3, 50)).astype(dtype)
    few, many = (40, 100) if dtype == np.float32 else (40, 600)
    one, other = (
        dtype(2.0**exponent) * cnorm.divisive_norm(x, sigma=2.0**exponent, mean_radius=3, radius=4)
        for exponent in (few, many)
    )
    v = 2.0**few * reference.divisive_norm(x, sigma=2.0**few, mean_radius=3, radius=4)
    tolerances.assert_within(one, v, forward_bound(v, dtype))
    assert other.tobytes() == one.tobytes()


def test_sigma_is_rounded_to_the_dtype(rng):
    x, dy = rng.standard_normal((2, 30, 50)).astype(np.float32)
    sigma = 1 + 0.45 * float(np.finfo(np.float32).eps)  # which is 1 in float32
    assert cnorm.divisive_norm(x, sigma=sigma).tobytes() == cnorm.divisive_norm(x, sigma=1).tobytes()
    gradients = (cnorm.divisive_norm_backward(dy, x, x[0], sigma=s) for s in (sigma, 1))
    for one, other in zip(*gradients, strict=True):
        assert np.float64(one).tobytes() == np.float64(other).tobytes()


def test_errors(rng):
    x = rng.standard_normal((3, 6), np.float32)
    norm, back, smooth = cnorm.divisive_norm, cnorm.divisive_norm_backward, cnorm.smoothing_gradient
    _, stats = cnorm.layer_norm(x, return_stats=True)
    for call, error, words in [
        (lambda: norm(x, sigma=-1), ValueError, "sigma must be finite and not negative"),
        (lambda: norm(x, sigma=1e39), ValueError, r"sigma must be finite in float32, got 1e\+39"),
        (lambda: norm(x, sigma=np.nan), ValueError, "sigma must be finite"),
        (lambda: norm(x, sigma="1"), TypeError, "sigma must be a real number"),
        (lambda: norm(x, sigma=10**400), ValueError, "sigma must be finite and not negative"),
        (lambda: norm(x, radius=-1), ValueError, "radius must be at least 0"),
        (lambda: norm(x, mean_radius=1.5), TypeError, "mean_radius must be an integer"),
        (lambda: norm(x, x[0, :3]), ValueError, r"weight must have shape \(6,\)"),
        (lambda: norm(x[:, :0]), ValueError, "at least one element"),
        (lambda: norm(x[:2], out=x[1:]), ValueError, "out must not overlap x"),
        (lambda: back(x[:2], x), ValueError, "dy must have the shape of x"),
        (lambda: back(x, x, out=(None, None)), ValueError, "tuple of 3"),
        (lambda: smooth(x, x, None, stats, -1), ValueError, "smoothing must be finite"),
        (lambda: smooth(x, x, None, stats[:2], 1), ValueError, "stats must have the shape"),
        (lambda: smooth(x, x, x, stats, 1), ValueError, "weight must have the normalised shape"),
    ]:
        with pytest.raises(error, match=words):
            call()
