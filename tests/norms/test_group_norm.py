"""cnorm.group_norm and cnorm.instance_norm against the oracle, layer norm, differences and PyTorch."""

import inputs
import numpy as np
import pytest
import reference
import tolerances

import cnorm

pytestmark = pytest.mark.usefixtures("isa")
both_types = pytest.mark.parametrize("dtype", [np.float32, np.float64])

SHAPES = [(3, 8), (5, 6, 1), (2, 12, 7), (70, 4, 5), (3, 6, 4, 4), (2, 4, 33), (2, 6, 5, 3, 2), (1, 3, 8200)]


def groupings(x):
    return [g for g in range(1, x.shape[1] + 1) if x.shape[1] % g == 0]


def check(x, dy, groups, weight=None, bias=None, eps=1e-5):
    """Forward and backward against the oracle; returns y."""
    y, stats = cnorm.group_norm(x, groups, weight, bias, eps=eps, return_stats=True)
    expected, mean, rstd = reference.group_norm(x, groups, weight, bias, eps)
    assert y.dtype == x.dtype
    assert stats.mean.shape == stats.inv_std_dev.shape == (len(x), groups)
    xhat, _, _ = reference.group_norm(x, groups, eps=eps)
    gain = 1 if weight is None else reference.per_channel(weight, x)
    shift = 0 if bias is None else reference.per_channel(bias, x)
    tolerances.assert_within(y, expected, tolerances.forward(xhat, x.dtype, gain, shift), "y")
    tolerances.assert_within(stats.mean, mean, tolerances.mean(mean, rstd, x.dtype), "mean")
    tolerances.assert_within(stats.inv_std_dev, rstd, tolerances.inv_std_dev(rstd, x.dtype), "inv_std_dev")

    got = cnorm.group_norm_backward(dy, x, groups, weight, stats)
    wanted = reference.group_norm_backward(dy, x, groups, weight, eps)
    rows = len(x) * groups, -1
    g = reference.wide(dy) * (1 if weight is None else reference.wide(reference.per_channel(weight, x)))
    bound = tolerances.dx(g.reshape(rows), xhat.reshape(rows), rstd.reshape(-1, 1), x.dtype, 1).reshape(x.shape)
    tolerances.assert_within(got[0], wanted[0], bound, "dx")
    channel = [a.reshape(x.shape[1], -1) for a in (reference.channel_rows(dy), reference.channel_rows(xhat))]
    d, h = reference.wide(channel[0]), channel[1]
    # a run of space in lanes, then 64 samples one after another and a tree, all of the same roundings
    sums = tolerances.row_sum(x[0, 0].size, x.dtype) + tolerances.column_sum(len(x), x.dtype)
    u = tolerances.unit_roundoff(x.dtype)
    bound = (np.abs(d) * tolerances.xhat(h, x.dtype)).sum(-1) + (sums + 2 * u) * np.abs(d * h).sum(-1)
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
def test_every_grouping(rng, dtype, shape):
    x, dy, weight, bias = random_case(rng, shape, dtype)
    for groups in groupings(x):
        check(x, dy, groups, weight, bias)
        check(x, dy, groups)
        check(x, dy, groups, None, bias)
        check(x, dy, groups, weight)


@both_types
@pytest.mark.parametrize("mean", [0.9, 1.1, 4, 100, 1e4, 1e6])
def test_any_mean(rng, dtype, mean):
    x, dy, weight, bias = random_case(rng, (4, 6, 200), dtype, mean)
    for groups in 1, 2, 6:
        check(x, dy, groups, weight, bias)


@both_types
def test_difficult_rows(rng, dtype):
    """Huge, tiny, skewed and constant groups take the same paths as layer norm's rows."""
    for n in 6, 60, 600:
        rows = inputs.difficult_rows(rng, n, dtype)
        x = rows.reshape(12, 2 * 3, n // 3)
        weight, bias = inputs.random_affine(rng, 6, dtype)
        y = cnorm.group_norm(x, 2, weight, bias)
        expected, _, _ = reference.group_norm(x, 2, weight, bias)
        xhat, _, _ = reference.group_norm(x, 2)
        gain, shift = reference.per_channel(weight, x), reference.per_channel(bias, x)
        tolerances.assert_within(y, expected, tolerances.forward(xhat, dtype, gain, shift))


@both_types
def test_gradients_of_rescued_groups(rng, dtype):
    """At a scale where T cannot represent xhat's factors, dx scales inversely and the other gradients do not change."""
    x, dy, weight, _ = random_case(rng, (3, 4, 10), dtype)
    scale = dtype(2.0**-100 if dtype == np.float32 else 2.0**-600)
    results = []
    for factor in dtype(1), scale:
        _, stats = cnorm.group_norm(factor * x, 2, weight, eps=0, return_stats=True)
        results.append(cnorm.group_norm_backward(dy, factor * x, 2, weight, stats))
    (dx, dweight, dbias), (dx_scaled, dweight_scaled, dbias_scaled) = results
    limit = 100 * np.finfo(dtype).eps
    np.testing.assert_allclose(dx_scaled * scale, dx, rtol=0, atol=limit * np.abs(dx).max())
    np.testing.assert_allclose(dweight_scaled, dweight, rtol=0, atol=limit * np.abs(dweight).max())
    np.testing.assert_allclose(dbias_scaled, dbias, rtol=0, atol=limit * np.abs(dbias).max())


@pytest.mark.parametrize("shape", [(2, 4, 5), (3, 4, 200)])
def test_gradients_whose_products_with_the_gain_overflow_float32(rng, shape):
    """dy and dx are in the range of float32; g = dy gain and its sums are not."""
    x, dy, weight, _ = random_case(rng, shape, np.float32)
    x, dy, weight = np.float32(1e10) * x, np.float32(1e30) * dy, np.float32(1e10) * np.abs(weight)
    check(x, dy, 2, weight)


def test_gradient_sums_whose_partial_sums_overflow(rng):
    """The sum of the first half of each channel overflows float32; the second half cancels it."""
    x, dy = rng.standard_normal((2, 3, 4, 640))
    dy = 2e37 * (1 + 0.1 * dy)
    x, dy = (np.concatenate([a, b], axis=-1).astype(np.float32) for a, b in ((10 * x, 10 * x), (dy, -dy)))
    weight, bias = inputs.random_affine(rng, 4, np.float32)
    for groups in 1, 2, 4:
        check(x, dy, groups, weight, bias)


@both_types
@pytest.mark.parametrize("shape", [(3, 12), (3, 4, 10)])
def test_gradients_of_rescued_groups_keep_eps(rng, dtype, shape):
    """On the float64 path, an eps as large as the variance still takes effect."""
    for exponent in (-14, 18) if dtype == np.float32 else (-130, 150):
        x, dy, weight, _ = random_case(rng, shape, dtype)
        check(x * dtype(10.0**exponent), dy, 2, weight, eps=10.0 ** (2 * exponent))


@both_types
def test_one_group_is_layer_norm(rng, dtype):
    """Bit-identical: for a matrix in all results, for a volume in y and the statistics."""
    for n in [*range(1, 40), 1000]:
        x, dy, weight, bias = random_case(rng, (70, n), dtype, 3)
        y, stats = cnorm.group_norm(x, 1, weight, bias, return_stats=True)
        layer_y, layer_stats = cnorm.layer_norm(x, weight, bias, return_stats=True)
        assert np.array_equal(y, layer_y)
        assert np.array_equal(stats.mean, layer_stats.mean)
        gradients = cnorm.group_norm_backward(dy, x, 1, weight, stats)
        for got, wanted in zip(gradients, cnorm.layer_norm_backward(dy, x, weight, layer_stats), strict=True):
            assert np.array_equal(got, wanted)
    x, _, weight, bias = random_case(rng, (5, 6, 7, 8), dtype)
    spread = [np.broadcast_to(reference.per_channel(p, x), (1, 6, 7, 8))[0].copy() for p in (weight, bias)]
    assert np.array_equal(cnorm.group_norm(x, 1, weight, bias), cnorm.layer_norm(x, *spread, axis=1))


@both_types
@pytest.mark.parametrize("with_affine", [True, False])
def test_groups_of_a_matrix_are_rows_of_layer_norm(rng, dtype, with_affine):
    """Bit-identical for any number of groups, any neighbouring group and any offset of a group within a vector."""
    for n in [*range(1, 36), 63, 64, 65, 96, 130, 512, 544]:
        for groups in (2, 5, 70):
            x = rng.standard_normal((3, groups, n)).astype(dtype)
            x[0, ::3] += dtype(100)  # takes a shift
            x[1, 1] *= dtype(1e30)  # float32 takes the float64 path
            x[2, 1] = -0.0  # whose sum is +0
            weight, bias = inputs.random_affine(rng, groups * n, dtype) if with_affine else (None, None)
            x = inputs.at_byte_offset(x.reshape(3, -1), n * x.itemsize % 64)
            y, stats = cnorm.group_norm(x, groups, weight, bias, return_stats=True)
            for group in range(groups):
                part = slice(group * n, (group + 1) * n)
                affine = (weight[part], bias[part]) if with_affine else ()
                expected, layer_stats = cnorm.layer_norm(x[:, part], *affine, return_stats=True)
                assert y[:, part].tobytes() == expected.tobytes(), (n, groups, group)
                assert stats.mean[:, group].tobytes() == layer_stats.mean[:, 0].tobytes()


@both_types
def test_instance_norm_is_a_group_per_channel(rng, dtype):
    x, dy, weight, bias = random_case(rng, (4, 6, 5, 7), dtype, 2)
    y, stats = cnorm.instance_norm(x, weight, bias, return_stats=True)
    assert y.tobytes() == cnorm.group_norm(x, 6, weight, bias).tobytes()
    rows = x.reshape(24, 35)
    assert np.array_equal(cnorm.instance_norm(x).reshape(24, 35), cnorm.layer_norm(rows))
    got = cnorm.instance_norm_backward(dy, x, weight, stats)
    for a, b in zip(got, cnorm.group_norm_backward(dy, x, 6, weight, stats), strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("shape", [(3, 6), (2, 4, 5)])
@pytest.mark.parametrize("mean", [0, 100])
def test_gradients_are_finite_differences(rng, shape, mean):
    """As for layer norm: with h = 2^-17 truncation and rounding stay below 1e-8 of the largest gradient."""
    h = 2.0**-17
    x, dy, weight, bias = random_case(rng, shape, np.float64, mean)
    _, stats = cnorm.group_norm(x, 2, weight, bias, return_stats=True)
    for i, gradient in enumerate(cnorm.group_norm_backward(dy, x, 2, weight, stats)):
        difference = np.empty_like(gradient)
        for at in np.ndindex(gradient.shape):
            ends = []
            for step in h, -h:
                arguments = [a.copy() for a in (x, weight, bias)]
                arguments[i][at] += step
                ends.append(cnorm.group_norm(arguments[0], 2, *arguments[1:]))
            difference[at] = (dy * (ends[0] - ends[1])).sum() / (2 * h)
        np.testing.assert_allclose(gradient, difference, rtol=0, atol=1e-8 * max(1, np.abs(gradient).max()))


@both_types
def test_pytorch_agrees(rng, dtype):
    """If PyTorch keeps the same error bound, the two results differ by at most twice that bound."""
    torch = pytest.importorskip("torch")
    limit = 20 * np.finfo(dtype).eps
    for shape in (6, 12), (6, 12, 9), (3, 4, 8, 8):
        x, dy, weight, bias = random_case(rng, shape, dtype)
        for groups in 1, 2, 4:
            tensors = [torch.tensor(a, requires_grad=True) for a in (x, weight, bias)]
            theirs = torch.nn.functional.group_norm(tensors[0], groups, *tensors[1:])
            theirs.backward(torch.tensor(dy))
            y, stats = cnorm.group_norm(x, groups, weight, bias, return_stats=True)
            np.testing.assert_allclose(y, theirs.detach().numpy(), rtol=0, atol=limit * np.abs(y).max())
            for ours, tensor in zip(cnorm.group_norm_backward(dy, x, groups, weight, stats), tensors, strict=True):
                np.testing.assert_allclose(ours, tensor.grad.numpy(), rtol=0, atol=limit * np.abs(dy).sum())
    x, _, weight, bias = random_case(rng, (3, 4, 8, 8), dtype)
    theirs = torch.nn.functional.instance_norm(*(torch.tensor(a) for a in (x,)), weight=torch.tensor(weight))
    ours = cnorm.instance_norm(x, weight)
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=0, atol=limit * np.abs(ours).max())


@both_types
def test_edges(rng, dtype):
    """Groups of a single number, constant groups, and zero samples."""
    x, dy, weight, bias = random_case(rng, (5, 4), dtype)
    y, stats = cnorm.group_norm(x, 4, weight, bias, return_stats=True)
    assert np.array_equal(y, np.broadcast_to(bias, x.shape))
    dx, dweight, _ = cnorm.group_norm_backward(dy, x, 4, weight, stats)
    assert not dx.any()
    assert not dweight.any()
    constant = np.full((2, 4, 9), 3.3, dtype)
    assert not cnorm.group_norm(constant, 2).any()
    assert not cnorm.instance_norm(constant, eps=0).any()
    empty = np.empty((0, 4, 9), dtype)
    y, stats = cnorm.group_norm(empty, 2, return_stats=True)
    assert y.shape == empty.shape
    dx, _, dbias = cnorm.group_norm_backward(empty, empty, 2, None, stats)
    assert dx.shape == empty.shape
    assert not dbias.any()


@both_types
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_inf_stay_in_their_group(rng, dtype, bad):
    x, _, weight, bias = random_case(rng, (3, 4, 9), dtype)
    clean = cnorm.group_norm(x, 2, weight, bias)
    x[1, 2, 5] = bad
    y = cnorm.group_norm(x, 2, weight, bias)
    spoilt = np.zeros(x.shape, bool)
    spoilt[1, 2:] = True
    assert np.isnan(y[spoilt]).all()
    assert y[~spoilt].tobytes() == clean[~spoilt].tobytes()


@both_types
def test_a_sample_alone_is_the_sample_in_a_batch(rng, dtype):
    x, dy, weight, bias = random_case(rng, (9, 6, 11), dtype)
    y, stats = cnorm.group_norm(x, 3, weight, bias, return_stats=True)
    dx, _, _ = cnorm.group_norm_backward(dy, x, 3, weight, stats)
    for i in range(9):
        alone, its_stats = cnorm.group_norm(x[i : i + 1], 3, weight, bias, return_stats=True)
        assert alone.tobytes() == y[i].tobytes()
        its_dx, _, _ = cnorm.group_norm_backward(dy[i : i + 1], x[i : i + 1], 3, weight, its_stats)
        assert its_dx.tobytes() == dx[i].tobytes()


def test_errors(rng):
    x, dy, weight, bias = random_case(rng, (3, 6, 5), np.float32)
    _, stats = cnorm.group_norm(x, 2, return_stats=True)
    norm, back = cnorm.group_norm, cnorm.group_norm_backward
    for call, error, words in [
        (lambda: norm(x, 4), ValueError, "groups must divide the number of channels, 6, got 4"),
        (lambda: norm(x, 10**30), ValueError, f"groups must divide the number of channels, 6, got {10**30}$"),
        (lambda: norm(x, 0), ValueError, "groups must be at least 1"),
        (lambda: norm(x, 2.0), TypeError, "groups must be an integer"),
        (lambda: norm(x, True), TypeError, "groups must be an integer"),
        (lambda: norm(x[0, 0], 1), ValueError, "at least 2 dimensions"),
        (lambda: cnorm.instance_norm(x[0]), ValueError, "at least 3 dimensions"),
        (lambda: norm(x[:, :, :0], 2), ValueError, "at least one element"),
        (
            lambda: norm(x, 2, weight[:3]),
            ValueError,
            r"weight must have shape \(6,\), one number for each channel",
        ),
        (lambda: norm(x, 2, weight, bias.astype(np.float64)), TypeError, "bias must have the dtype of x"),
        (lambda: norm(x.astype(np.int32), 2), TypeError, "x must have dtype float32, float64, float16 or bfloat16"),
        (lambda: norm(x, 2, eps=-1), ValueError, "eps"),
        (lambda: norm(x, 2, eps=1e39), ValueError, r"eps must be finite in float32, got 1e\+39"),
        (lambda: norm(x, 2, eps="a"), TypeError, "eps"),
        (lambda: norm(x, 2, out=x[:2]), ValueError, "out must have shape"),
        (lambda: norm(x[:2], 2, out=x[1:]), ValueError, "out must not overlap x"),
        (lambda: back(dy[:2], x, 2, weight, stats), ValueError, "dy must have the shape of x"),
        (lambda: back(dy, x, 3, weight, stats), ValueError, r"shape \(3, 3\), \(samples, groups\), got \(3, 2\)"),
        (
            lambda: cnorm.instance_norm_backward(dy, x, weight, stats),
            ValueError,
            r"stats must have the shape \(3, 6\), \(samples, channels\), got \(3, 2\)",
        ),
        (lambda: back(dy, x, 2, weight, None), TypeError, "stats"),
        (lambda: back(dy, x, 2, weight, stats, out=[None] * 3), TypeError, "out must be a tuple"),
        (
            lambda: back(dy, x, 2, weight, stats, out=(None, weight, None)),
            ValueError,
            r"out\[1\] must not overlap",
        ),
        (
            lambda: back(dy, x, 2, None, stats, out=(None, bias, None)),
            ValueError,
            r"out\[1\] must be None where weight",
        ),
        (lambda: back(dy, x, 2, weight, stats, out=(None, bias, bias)), ValueError, r"must not overlap out"),
    ]:
        with pytest.raises(error, match=words):
            call()
