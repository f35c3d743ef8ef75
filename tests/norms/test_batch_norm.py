"""cnorm.batch_norm, in training and inference, against the oracle, differences and PyTorch; and its fold."""

import inputs
import numpy as np
import pytest
import reference
import tolerances

import cnorm

pytestmark = pytest.mark.usefixtures("isa")
both_types = pytest.mark.parametrize("dtype", [np.float32, np.float64])

SHAPES = [
    (2, 1),
    (3, 5),
    (64, 33),
    (65, 17),
    (129, 70),
    (300, 100),
    (1, 3, 2),
    (4, 5, 6),
    (3, 4, 100),
    (2, 2, 8200),
]
SHAPES += [(70, 3, 5, 2), (5, 40, 3)]


def columns(p):
    """[channels] -> [channels, 1]."""
    return 1 if p is None else reference.wide(p)[:, None]


def check(x, dy, weight=None, bias=None, eps=1e-5):
    """Forward and backward against the oracle, channel by channel."""
    rows = reference.channel_rows
    y, stats = cnorm.batch_norm(x, weight, bias, eps=eps, return_stats=True)
    expected, mean, _, rstd = reference.batch_norm(x, weight, bias, eps)
    xhat = rows(reference.batch_norm(x, eps=eps)[0])
    from_xhat = tolerances.batch_xhat(xhat, x, x.dtype)
    shift = 0 if bias is None else columns(bias)
    bound = tolerances.affine(xhat, from_xhat, x.dtype, columns(weight), shift)
    assert y.dtype == x.dtype
    tolerances.assert_within(rows(y), rows(expected), bound, "y")
    std = 1 / np.where(rstd > 0, rstd, np.inf)
    u = tolerances.unit_roundoff(x.dtype)
    sums = tolerances.channel_sum(x, x.dtype)
    bound = 1.42 * sums * std + 2 * u * np.abs(mean) + tolerances.smallest(x.dtype)
    tolerances.assert_within(stats.mean, mean, bound, "mean")
    bound = (2.42 * sums + 2 * u) * rstd + tolerances.smallest(x.dtype)
    tolerances.assert_within(stats.inv_std_dev, rstd, bound, "inv_std_dev")

    got = cnorm.batch_norm_backward(dy, x, weight, stats)
    wanted = reference.batch_norm_backward(dy, x, weight, eps)
    d = reference.wide(rows(dy))
    bound = tolerances.dx(d * columns(weight), xhat, rstd[:, None], x.dtype, sums=sums + u)
    # the error of xhat is that of sums over a channel, not that of a layer norm row
    g = np.abs(d * columns(weight))
    terms = g + g.mean(-1, keepdims=True) + np.abs(xhat) * (g * np.abs(xhat)).mean(-1, keepdims=True)
    bound = bound + rstd[:, None] * (
        from_xhat * (g * np.abs(xhat)).mean(-1, keepdims=True)
        + np.abs(xhat) * (g * from_xhat).mean(-1, keepdims=True)
        + 2.42 * sums * terms
    )
    tolerances.assert_within(rows(got[0]), rows(wanted[0]), bound, "dx")
    bound = (np.abs(d) * from_xhat).sum(-1) + (sums + 2 * u) * np.abs(d * xhat).sum(-1)
    if weight is None:
        assert got[1] is None
    else:
        tolerances.assert_within(got[1], wanted[1], bound + tolerances.smallest(x.dtype), "dweight")
    tolerances.assert_within(got[2], wanted[2], (sums + u) * np.abs(d).sum(-1), "dbias")
    return y


def random_case(rng, shape, dtype, mean=0.0):
    x = (mean + rng.standard_normal(shape)).astype(dtype)
    dy = rng.standard_normal(shape).astype(dtype)
    return x, dy, *inputs.random_affine(rng, shape[1], dtype)


@both_types
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape(rng, dtype, shape):
    x, dy, weight, bias = random_case(rng, shape, dtype)
    check(x, dy, weight, bias)
    check(x, dy)
    check(x, dy, None, bias)
    check(x, dy, weight)


@pytest.mark.exhaustive(one_in=4)
@both_types
@pytest.mark.parametrize("mean", [0, 0.5, 1, 2, 4, 10, 1e2, 1e4, 1e6])
def test_error_at_any_mean(rng, dtype, mean):
    """Random columns keep layer norm's contract, 1e-6 of max(1, |xhat|) in float32."""
    for shape in (1000, 40), (20, 5, 300):
        x, dy, weight, bias = random_case(rng, shape, dtype, mean)
        check(x, dy, weight, bias)
        xhat = reference.batch_norm(x)[0]
        tolerances.assert_within(cnorm.batch_norm(x), xhat, tolerances.xhat(xhat, dtype))


@both_types
def test_every_number_of_rows_and_columns(rng, dtype):
    for n in [*range(1, 70), 127, 257]:
        x, dy, weight, bias = random_case(rng, (9, n), dtype, 2)
        check(x, dy, weight, bias)
    for m in [*range(2, 70), 127, 128, 129, 1000]:
        x, dy, weight, bias = random_case(rng, (m, 19), dtype, 2)
        check(x, dy, weight, bias)


@both_types
@pytest.mark.parametrize("eps", [0, 1e-5])
@pytest.mark.parametrize("space", [1, 4])
def test_difficult_columns(rng, dtype, eps, space):
    """Shifted, huge, tiny, constant and skewed channels side by side: each stays within its own bound."""
    for n in 8, 100, 1000:
        x = np.moveaxis(inputs.difficult_rows(rng, n, dtype).reshape(24, -1, space), 0, 1)
        x = np.ascontiguousarray(x[..., 0] if space == 1 else x)
        weight, bias = inputs.random_affine(rng, 24, dtype)
        y = cnorm.batch_norm(x, weight, bias, eps=eps)
        expected = reference.batch_norm(x, weight, bias, eps)[0]
        xhat = reference.batch_norm(x, eps=eps)[0]
        from_xhat = tolerances.batch_xhat(xhat, x, dtype)
        gain, shift = reference.per_channel(weight, x), reference.per_channel(bias, x)
        tolerances.assert_within(y, expected, tolerances.affine(xhat, from_xhat, dtype, gain, shift))
        for c in range(24):
            alone = cnorm.batch_norm(x[:, c : c + 1], weight[c : c + 1], bias[c : c + 1], eps=eps)
            assert alone.tobytes() == y[:, c : c + 1].tobytes(), c


@both_types
def test_first_rows_far_from_the_mean_of_the_rest(rng, dtype):
    """The initial shift is the mean of the first 32 rows; the guard detects that the other rows lie elsewhere."""
    x, dy, weight, bias = random_case(rng, (2000, 7), dtype)
    x[:40] += dtype(1e6)
    check(x, dy, weight, bias)


@both_types
def test_gradients_of_rescued_channels(rng, dtype):
    """Squares leave the range of T: dx scales inversely with x, the other gradients do not change."""
    limit = 100 * np.finfo(dtype).eps
    for shape in (20, 3), (5, 3, 4):
        x, dy, weight, _ = random_case(rng, shape, dtype)
        scale = dtype(2.0**-100 if dtype == np.float32 else 2.0**-600)
        results = []
        for factor in dtype(1), scale:
            moved = x.copy()
            moved[:, 1] *= factor
            _, stats = cnorm.batch_norm(moved, weight, eps=0, return_stats=True)
            results.append(cnorm.batch_norm_backward(dy, moved, weight, stats))
        plain, rescued = results
        assert rescued[0][:, ::2].tobytes() == plain[0][:, ::2].tobytes()
        for i in range(3):
            at = (slice(None), 1) if i == 0 else 1
            got = rescued[i][at] * scale if i == 0 else rescued[i][at]
            np.testing.assert_allclose(got, plain[i][at], rtol=0, atol=limit * np.abs(dy).sum())


@both_types
@pytest.mark.parametrize("shape", [(40, 5), (6, 5, 9)])
def test_gain_over_deviation_outside_the_range_of_the_type(rng, dtype, shape):
    """y and 1/std are in the range of T, but gain/std overflows or is subnormal; other channels are ordinary."""
    size, other = (1e-12, 1e30) if dtype == np.float32 else (1e-100, 1e220)
    x, dy, weight, _ = random_case(rng, shape, dtype)
    for channel, power in (1, 1), (3, -1):
        x[:, channel] *= dtype(size**power)
        dy[:, channel] *= dtype(size**power)
        weight[channel] *= dtype(other**power)
    check(x, dy, weight, eps=0)


@both_types
def test_gain_over_deviation_that_underflows_to_zero(rng, dtype):
    """gain/std underflows to 0 but must not be treated as a gain of 0: y and dx are in the range of T."""
    size, gain = (1e13, 1e-35) if dtype == np.float32 else (1e100, 1e-250)
    x = (size * rng.uniform(1, 2, (2, 1, 20)) * [[[-1]], [[1]]]).astype(dtype)
    mean, var, weight = np.zeros(1, dtype), np.full(1, size * size, dtype), np.full(1, gain, dtype)
    check(x, x, weight, eps=0)
    y = cnorm.batch_norm_inference(x, mean, var, weight, eps=0)
    dx, *_ = cnorm.batch_norm_inference_backward(x, x, mean, var, weight, eps=0)
    assert y.all()
    for got, wanted in (
        (y, reference.batch_norm_inference(x, mean, var, weight, eps=0)),
        (dx, reference.batch_norm_inference_backward(x, x, mean, var, weight, eps=0)[0]),
    ):
        tolerances.assert_within(got, wanted, 8 * tolerances.unit_roundoff(dtype) * np.abs(wanted))


@pytest.mark.parametrize("shape", [(40, 5), (6, 5, 200)])
def test_gradient_sums_whose_partial_sums_overflow(rng, shape):
    """The sum of the first half of the samples overflows float32; the second half cancels it."""
    x, dy, weight, bias = random_case(rng, shape, np.float32)
    half = shape[0] // 2
    x[:, ::3] *= 100
    dy[:half, ::3] = np.float32(3e37) * (1 + np.abs(dy[:half, ::3]))
    x[half:], dy[half:] = x[:half], -dy[:half]
    check(x, dy, weight, bias)


@pytest.mark.parametrize("shape", [(6, 3), (3, 2, 4)])
@pytest.mark.parametrize("mean", [0, 100])
def test_gradients_are_finite_differences(rng, shape, mean):
    h = 2.0**-17
    x, dy, weight, bias = random_case(rng, shape, np.float64, mean)
    var = rng.uniform(0.5, 2, shape[1])
    _, stats = cnorm.batch_norm(x, weight, bias, return_stats=True)
    centre = np.full(shape[1], float(mean))
    forward = {
        "training": cnorm.batch_norm,
        "inference": lambda x, w, b: cnorm.batch_norm_inference(x, centre, var, w, b),
    }
    backward = {
        "training": cnorm.batch_norm_backward(dy, x, weight, stats),
        "inference": cnorm.batch_norm_inference_backward(dy, x, centre, var, weight),
    }
    for kind, gradients in backward.items():
        for i, gradient in enumerate(gradients):
            difference = np.empty_like(gradient)
            for at in np.ndindex(gradient.shape):
                ends = []
                for step in h, -h:
                    arguments = [a.copy() for a in (x, weight, bias)]
                    arguments[i][at] += step
                    ends.append(forward[kind](*arguments))
                difference[at] = (dy * (ends[0] - ends[1])).sum() / (2 * h)
            np.testing.assert_allclose(gradient, difference, rtol=0, atol=1e-8 * max(1, np.abs(gradient).max()))


@both_types
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_inference(rng, dtype, shape):
    x, dy, weight, bias = random_case(rng, shape, dtype, 1)
    mean = rng.standard_normal(shape[1]).astype(dtype)
    var = rng.uniform(0, 2, shape[1]).astype(dtype)
    u = tolerances.unit_roundoff(dtype)
    for gain, shift in (weight, bias), (None, bias), (weight, None), (None, None):
        y = cnorm.batch_norm_inference(x, mean, var, gain, shift)
        expected = reference.batch_norm_inference(x, mean, var, gain, shift)
        unshifted = reference.batch_norm_inference(x, mean, var, gain)
        # difference, scale and product are rounded once each, then the sum
        bound = 4 * u * (np.abs(unshifted) + np.abs(expected))
        tolerances.assert_within(y, expected, bound + tolerances.smallest(dtype))
        got = cnorm.batch_norm_inference_backward(dy, x, mean, var, gain)
        wanted = reference.batch_norm_inference_backward(dy, x, mean, var, gain)
        tolerances.assert_within(got[0], wanted[0], 3 * u * np.abs(wanted[0]), "dx")
        sums = tolerances.channel_sum(x, dtype) + 6 * u
        axes = (0, *range(2, x.ndim))
        xhat = reference.batch_norm_inference(x, mean, var)
        if gain is None:
            assert got[1] is None
        else:
            tolerances.assert_within(got[1], wanted[1], sums * np.abs(dy * xhat).sum(axes), "dweight")
        tolerances.assert_within(got[2], wanted[2], sums * np.abs(dy).sum(axes), "dbias")


@both_types
def test_inference_at_any_scale(rng, dtype):
    """Statistics and gains whose products leave the range of T: computed in float64 and rounded once.

    float64 has no wider type: there xhat itself must be in range.
    """
    big, small = (3e38, 1e-40) if dtype == np.float32 else (0.9e308, 1e-310)
    var_big, var_small = (1e38, 1e-42) if dtype == np.float32 else (1e306, 1e-312)
    mean = np.array([big, -big, 0, 1, 0, 0, -big], dtype)
    var = np.array([var_big, 1, var_small, 0, 0, 2, 1], dtype)
    weight = np.array([1, small, small, 2, 3, big, 2.0**-50], dtype)  # the last: only x - mean overflows
    for shape in (5, 7), (4, 7, 3):
        x = rng.uniform(-0.5, 0.5, shape).astype(dtype)
        x[:, [0, 1, 6]] *= dtype(big)
        x[:, 2] *= dtype(var_small**0.5)
        with np.errstate(all="ignore"):
            y = cnorm.batch_norm_inference(x, mean, var, weight, eps=0)
            expected = reference.batch_norm_inference(x, mean, var, weight, eps=0)
        assert np.isfinite(expected).all()
        u = tolerances.unit_roundoff(dtype)
        tolerances.assert_within(y, expected, 8 * u * np.abs(expected) + 2 * tolerances.smallest(dtype))
        assert not y[:, 3:5].any()


@both_types
@pytest.mark.parametrize("kind", ["unbiased", "biased"])
def test_running_averages(rng, dtype, kind):
    for shape in (10, 4), (3, 4, 5):
        x = rng.standard_normal(shape).astype(dtype) + dtype(3)
        number = x.size // 4
        mean, var = np.full(4, 2, dtype), np.full(4, 5, dtype)
        cnorm.batch_norm(x, running_mean=mean, running_var=var, momentum=0.25, running_variance=kind)
        _, batch_mean, batch_var, _ = reference.batch_norm(x)
        factor = number / (number - 1) if kind == "unbiased" else 1
        for got, wanted in (mean, 0.75 * 2 + 0.25 * batch_mean), (var, 0.75 * 5 + 0.25 * factor * batch_var):
            np.testing.assert_allclose(got.astype(np.float64), np.float64(wanted), rtol=8 * np.finfo(dtype).eps)
    strided = np.zeros(8, dtype)[::2]
    cnorm.batch_norm(x, running_mean=strided, running_var=var, momentum=1)
    np.testing.assert_allclose(strided, np.float64(batch_mean), rtol=8 * np.finfo(dtype).eps)


@both_types
@pytest.mark.parametrize("shape", [(20, 5), (4, 5, 7)])
def test_running_averages_of_rescued_channels(rng, dtype, shape):
    """The averaged variance does not include eps, and the sum of its squares may leave the range of T.

    With g of tolerances.any_row it is off by 2 g + 2.84 g of itself, and rounded.
    """
    exponents = np.array([0, -15, 18, 1, -16] if dtype == np.float32 else [0, -140, 151, 1, -141])
    x = rng.standard_normal(shape)
    x = (x * reference.per_channel(10.0**exponents, x)).astype(dtype)
    limit = 4.84 * tolerances.channel_sum(x, dtype) + 2 * tolerances.unit_roundoff(dtype)
    for eps in 0, 1e-5:
        mean, var = np.zeros(5, dtype), np.zeros(5, dtype)
        cnorm.batch_norm(x, running_mean=mean, running_var=var, momentum=0.25, running_variance="biased", eps=eps)
        wanted = 0.25 * reference.batch_norm(x)[2]
        tolerances.assert_within(var, wanted, limit * wanted, "running_var")


@both_types
def test_pytorch_agrees(rng, dtype):
    torch = pytest.importorskip("torch")
    limit = 30 * np.finfo(dtype).eps
    for shape in (128, 48), (6, 12, 9), (3, 4, 8, 8):
        x, dy, weight, bias = random_case(rng, shape, dtype, 0.5)
        mean, var = np.zeros(shape[1], dtype), np.ones(shape[1], dtype)
        tensors = [torch.tensor(a, requires_grad=True) for a in (x, weight, bias)]
        running = [torch.tensor(a) for a in (mean, var)]
        theirs = torch.nn.functional.batch_norm(tensors[0], *running, *tensors[1:], training=True)
        theirs.backward(torch.tensor(dy))
        y, stats = cnorm.batch_norm(x, weight, bias, running_mean=mean, running_var=var, return_stats=True)
        np.testing.assert_allclose(y, theirs.detach().numpy(), rtol=0, atol=limit * np.abs(y).max())
        for ours, tensor in zip((mean, var), running, strict=True):
            np.testing.assert_allclose(ours, tensor.numpy(), rtol=limit, atol=limit)
        for ours, tensor in zip(cnorm.batch_norm_backward(dy, x, weight, stats), tensors, strict=True):
            np.testing.assert_allclose(ours, tensor.grad.numpy(), rtol=0, atol=limit * np.abs(dy).sum())
        theirs = torch.nn.functional.batch_norm(
            torch.tensor(x), *running, torch.tensor(weight), torch.tensor(bias)
        ).numpy()
        ours = cnorm.batch_norm_inference(x, mean, var, weight, bias)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=limit * np.abs(theirs).max())


@both_types
def test_the_fold_is_the_inference_norm(rng, dtype):
    """x W' + b' = batch norm of (x W + b): against the oracle of both, within the roundings of W' and b'."""
    w, x = rng.standard_normal((9, 5)).astype(dtype), rng.standard_normal((20, 5)).astype(dtype)
    b, mean, bias = rng.standard_normal((3, 9)).astype(dtype)
    var, weight = rng.uniform(0.1, 2, (2, 9)).astype(dtype)
    var[3] = 0
    for eps in 1e-5, 0:
        for linear_bias, gain, shift in (b, weight, bias), (None, None, None), (b, None, bias):
            folded, folded_bias = cnorm.fold_batch_norm(w, linear_bias, mean, var, gain, shift, eps=eps)
            assert folded.dtype == folded_bias.dtype == dtype
            a = reference.wide(x) @ reference.wide(w).T + (0 if linear_bias is None else linear_bias)
            scale = reference.reciprocal_root(reference.wide(var), reference.rounded_eps(eps, x))
            scale = scale if gain is None else scale * gain
            expected = (a - mean) * scale + (0 if shift is None else shift)
            got = reference.wide(x) @ reference.wide(folded).T + folded_bias
            terms = np.abs(reference.wide(x)) @ np.abs(folded).T + np.abs(folded_bias)
            b_terms = (np.abs(mean) + (0 if linear_bias is None else np.abs(b))) * np.abs(scale)
            u, u64 = tolerances.unit_roundoff(dtype), tolerances.unit_roundoff(np.float64)
            tolerances.assert_within(
                got, expected, u * terms + 6 * u64 * (terms + b_terms) + tolerances.smallest(dtype)
            )
    convolution = rng.standard_normal((9, 2, 3, 3)).astype(dtype)
    folded, _ = cnorm.fold_batch_norm(convolution, b, mean, var, weight)
    read, _ = cnorm.fold_batch_norm(memoryview(convolution), *map(memoryview, (b, mean, var, weight)))  # or a tensor
    assert np.array_equal(folded, read)
    flat, _ = cnorm.fold_batch_norm(convolution.reshape(9, 18), b, mean, var, weight)
    assert np.array_equal(folded.reshape(9, 18), flat)


@both_types
def test_edges(rng, dtype):
    """Two rows normalise to -1 and 1, constants to the bias; inference accepts zero rows and one row."""
    x = np.array([[1, -5], [3, 7]], dtype)
    assert np.array_equal(cnorm.batch_norm(x, eps=0), [[-1, -1], [1, 1]])
    constant = np.full((50, 4), 3.3, dtype)
    weight, bias = inputs.random_affine(rng, 4, dtype)
    for eps in 0, 1e-5:
        y, stats = cnorm.batch_norm(constant, weight, bias, eps=eps, return_stats=True)
        assert np.array_equal(y, np.broadcast_to(bias, y.shape))
        assert np.array_equal(stats.mean, constant[0])
        _, dweight, _ = cnorm.batch_norm_backward(constant, constant, weight, stats)
        assert not dweight.any()
    for rows in 0, 1:
        y = cnorm.batch_norm_inference(constant[:rows], bias, weight * weight)
        assert y.shape == (rows, 4)
    _, _, dbias = cnorm.batch_norm_inference_backward(constant[:0], constant[:0], bias, weight * weight)
    assert not dbias.any()


@both_types
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("shape", [(40, 6), (5, 6, 7)])
def test_nan_and_inf_stay_in_their_channel(rng, dtype, bad, shape):
    x, dy, weight, bias = random_case(rng, shape, dtype)
    clean, stats = cnorm.batch_norm(x, weight, bias, return_stats=True)
    clean_dx, _, _ = cnorm.batch_norm_backward(dy, x, weight, stats)
    x[3, 2] = bad
    y, stats = cnorm.batch_norm(x, weight, bias, return_stats=True)
    others = np.arange(6) != 2
    assert np.isnan(y[:, 2]).all()
    assert y[:, others].tobytes() == clean[:, others].tobytes()
    dx, _, _ = cnorm.batch_norm_backward(dy, x, weight, stats)
    assert np.isnan(dx[:, 2]).all()
    assert dx[:, others].tobytes() == clean_dx[:, others].tobytes()


@both_types
def test_an_inference_row_alone_is_the_row_in_a_batch(rng, dtype):
    x, _, weight, bias = random_case(rng, (9, 37), dtype)
    mean, var = bias + dtype(1), weight * weight
    mean[5] = np.finfo(dtype).max  # one channel in float64 changes no other
    y = cnorm.batch_norm_inference(x, mean, var, weight, bias)
    for i in range(9):
        assert cnorm.batch_norm_inference(x[i : i + 1], mean, var, weight, bias).tobytes() == y[i].tobytes()
    mean[5] = 0
    others = np.arange(37) != 5
    plain = cnorm.batch_norm_inference(x, mean, var, weight, bias)
    assert plain[:, others].tobytes() == y[:, others].tobytes()


@both_types
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 11])
def test_rows_that_share_sets_of_the_cache(rng, dtype, rows):
    """Rows a page apart and out at the page offset of x are written two rows at a time, other outputs four."""
    channels = 4096 // np.dtype(dtype).itemsize
    x, dy = (rng.standard_normal((rows + 1, channels)).astype(dtype) for _ in range(2))
    mean, var, weight, bias = rng.standard_normal((4, channels)).astype(dtype) ** 2
    stats = cnorm.batch_norm(x, return_stats=True)[1]
    elsewhere = np.empty(x.size + 2048, dtype)
    start = (x.ctypes.data + 2048 - elsewhere.ctypes.data) % 4096 // x.itemsize
    far = elsewhere[start : start + x.size].reshape(x.shape)
    for norm in (
        lambda x, out: cnorm.batch_norm_inference(x, mean, var, weight, bias, out=out),
        lambda x, out: cnorm.batch_norm(x, weight, bias, out=out),
        lambda x, out: cnorm.batch_norm_backward(dy, x, weight, stats, out=(out, None, None))[0],
    ):
        near = x.copy()
        assert norm(near, near).tobytes() == norm(x, far).tobytes()


def test_rejects_one_element_per_channel():
    for x in np.ones((1, 5), np.float32), np.ones((0, 5)), np.ones((1, 5, 1), np.float32):
        with pytest.raises(ValueError, match=r"more than one number per channel in training.*every output the bias"):
            cnorm.batch_norm(x)
    assert cnorm.batch_norm(np.float32([[[1, 2]]])).shape == (1, 1, 2)


def test_errors(rng):
    x, dy, weight, bias = random_case(rng, (4, 6), np.float32)
    mean, var = bias.copy(), np.ones_like(bias)
    _, stats = cnorm.batch_norm(x, return_stats=True)
    norm, infer, back, fold = (
        cnorm.batch_norm,
        cnorm.batch_norm_inference,
        cnorm.batch_norm_backward,
        cnorm.fold_batch_norm,
    )
    for call, error, words in [
        (lambda: norm(x, weight[:3]), ValueError, r"weight must have shape \(6,\)"),
        (lambda: norm(x[0]), ValueError, "at least 2 dimensions"),
        (lambda: norm(x, running_mean=mean), ValueError, "must be given too where running_"),
        (lambda: norm(x, running_mean=mean, running_var=var, momentum=2), ValueError, "momentum must be in"),
        (lambda: norm(x, momentum=2), ValueError, "momentum must be in"),
        (lambda: norm(x, momentum=None), TypeError, "momentum must be a real number"),
        (lambda: norm(x, running_mean=mean, running_var=mean), ValueError, "must not overlap running_var"),
        (
            lambda: norm(x, running_mean=list(mean), running_var=var),
            TypeError,
            "running_mean must be a NumPy array",
        ),
        (
            lambda: norm(x, running_mean=np.ma.array(mean), running_var=var),
            TypeError,
            "running_mean must be a NumPy array or None, got MaskedArray",
        ),
        (
            lambda: norm(x, running_mean=mean, running_var=var.astype("d")),
            TypeError,
            "running_var must have dtype",
        ),
        (lambda: fold(weight[:, None], None, mean, var, eps=1e39), ValueError, "eps must be finite"),
        (lambda: fold(weight[:, None], None, mean, var, eps=10**400), ValueError, "eps must be finite"),
        (lambda: norm(x, running_variance="half"), ValueError, '"unbiased" or "biased"'),
        (lambda: norm(x, eps=np.inf), ValueError, "eps"),
        (lambda: infer(x, mean, -var), ValueError, "var must not be negative"),
        (lambda: infer(x, None, var), TypeError, "mean must be an array"),
        (lambda: infer(x, mean, var, out=mean), ValueError, "out must have shape"),
        (lambda: infer(x[:, :2], mean[:2], var[:2], out=x[:, 1:3]), ValueError, "out must not overlap x"),
        (lambda: back(dy, x, weight, stats[:3]), ValueError, r"stats must have the shape \(6,\)"),
        (lambda: back(dy.astype("d"), x, weight, stats), TypeError, "dy must have the dtype of x"),
        (lambda: back(dy, x, weight, stats, out=(None, None)), ValueError, "tuple of 3"),
        (lambda: fold(weight, None, mean, var), ValueError, "at least 2 dimensions"),
        (lambda: fold(x.T, None, mean[:2], var), ValueError, r"mean must have shape \(6,\)"),
        (lambda: fold(x.T, None, mean, -var), ValueError, "var must not be negative"),
        (lambda: fold(x.T, None, None, var), TypeError, "mean must be an array"),
        (lambda: fold(x.T, None, mean, var, eps=-1), ValueError, "eps"),
        (lambda: fold(np.ma.array(x.T), None, mean, var), TypeError, "linear_weight must be a plain array"),
        (lambda: fold(x.T, None, mean, np.ma.array(var)), TypeError, "var must be a plain array"),
    ]:
        with pytest.raises(error, match=words):
            call()
    before = mean.copy()
    with pytest.raises(ValueError, match="out must have shape"):
        norm(x, running_mean=mean, running_var=var, out=x[:2])
    assert np.array_equal(mean, before)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_inference_gradients_of_a_row_do_not_depend_on_other_rows(rng, dtype):
    """dx uses no sum over the channel, so it is the same whether those sums overflow or not."""
    x, dy = rng.standard_normal((2, 4, 40)).astype(dtype)
    mean, weight = rng.standard_normal((2, 40)).astype(dtype)
    var = rng.uniform(0.1, 1, 40).astype(dtype)
    alone = cnorm.batch_norm_inference_backward(dy[:1], x[:1], mean, var, weight)[0]
    x[1], dy[1] = 100, 0.9 * np.finfo(dtype).max
    assert cnorm.batch_norm_inference_backward(dy, x, mean, var, weight)[0][:1].tobytes() == alone.tobytes()
    for space in 1, 3:
        volume = [np.repeat(array[..., None], space, axis=2) for array in (dy, x)]
        dx = cnorm.batch_norm_inference_backward(*volume, mean, var, weight)[0]
        assert dx[:1, :, 0].tobytes() == alone.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_inference_dx_does_not_depend_on_the_mean(rng, dtype):
    tiny, var, weight, far = (1e-30, 1e8, 1e6, 1e35) if dtype == np.float32 else (1e-290, 1e80, 1e60, 1e258)
    dy = (tiny * rng.standard_normal((3, 5))).astype(dtype)
    x, var, weight = np.ones_like(dy), np.full(5, var, dtype), np.full(5, weight, dtype)
    near, away = (
        cnorm.batch_norm_inference_backward(dy, x, np.full(5, mean, dtype), var, weight, eps=0)[0] for mean in (0, far)
    )
    assert near.tobytes() == away.tobytes()
    assert near.all()


def test_rejects_negative_variance_beside_nan():
    x, mean, var = np.ones((1, 3), np.float32), np.zeros(3, np.float32), np.float32([np.nan, -1, 2])
    with pytest.raises(ValueError, match=r"var must not be negative, got -1.0 in channel 1"):
        cnorm.batch_norm_inference(x, mean, var)


def test_running_averages_overflow_to_infinity_without_a_warning():
    mean, var = np.zeros(1), np.ones(1)
    x = np.float64([[1.2e154], [-1.2e154]])  # the biased variance is finite, the unbiased one is not
    y = cnorm.batch_norm(x, running_mean=mean, running_var=var)
    np.testing.assert_array_equal(y, [[1], [-1]])
    assert (mean[0], var[0]) == (0, np.inf)
