"""cnorm.layer_norm_backward against the oracle: the rows of docs/numerics.md about gradients."""

import inputs
import numpy as np
import pytest
import reference
import tolerances

import cnorm

pytestmark = pytest.mark.usefixtures("isa")
both_types = pytest.mark.parametrize("dtype", [np.float32, np.float64])


def gradients(dy, x, weight=None, eps=1e-5, axis=-1):
    _, stats = cnorm.layer_norm(x, weight, eps=eps, axis=axis, return_stats=True)
    return cnorm.layer_norm_backward(dy, x, weight, stats, axis=axis)


def check(dy, x, weight=None, eps=1e-5, axis=-1):
    """All three gradients against the oracle; returns them."""
    dx, dweight, dbias = got = gradients(dy, x, weight, eps, axis)
    expected_dx, expected_dweight, expected_dbias = reference.layer_norm_backward(dy, x, weight, eps, axis)
    n = expected_dbias.size
    rows = dbias_rows(x, n)
    xhat, _, rstd = reference.layer_norm(x.reshape(rows, n), eps=eps)
    dy_rows = reference.wide(dy).reshape(rows, n)
    gain = 1 if weight is None else reference.wide(weight).ravel()
    assert dx.dtype == dbias.dtype == x.dtype
    assert dx.shape == x.shape
    tolerances.assert_within(
        dx.reshape(rows, n),
        expected_dx.reshape(rows, n),
        tolerances.dx(dy_rows, xhat, rstd, x.dtype, gain),
        "dx",
    )
    if weight is None:
        assert dweight is None
    else:
        assert dweight.dtype == x.dtype
        bound = tolerances.dweight(dy_rows, xhat, x.dtype).reshape(weight.shape)
        tolerances.assert_within(dweight, expected_dweight, bound, "dweight")
    bound = tolerances.dbias(dy_rows, x.dtype).reshape(expected_dbias.shape)
    tolerances.assert_within(dbias, expected_dbias, bound, "dbias")
    return got


def dbias_rows(x, n):
    return x.size // n


@pytest.mark.exhaustive(one_in=20)
@both_types
@pytest.mark.parametrize("mean_over_std", [0, 0.5, 1, 2, 3.9, 4.1, 10, 1e2, 1e4, 1e6])
def test_error_at_any_mean(rng, dtype, mean_over_std):
    for rows, n in (300, 1024), (40, 4096), (20, 8192):
        x = (mean_over_std + rng.standard_normal((rows, n))).astype(dtype)
        weight, _ = inputs.random_affine(rng, n, dtype)
        dy = rng.standard_normal((rows, n)).astype(dtype)
        check(dy, x, weight)
    check(dy + dtype(10), x)  # dy with a nonzero mean


@both_types
def test_every_length(rng, dtype):
    for n in inputs.LENGTHS:
        weight, _ = inputs.random_affine(rng, n, dtype)
        x = (np.array([[0], [1], [4], [30], [1e4]]) + rng.standard_normal((5, n))).astype(dtype)
        check(rng.standard_normal((5, n)).astype(dtype), x, weight)


@both_types
def test_every_number_of_rows(rng, dtype):
    """Rows are summed in blocks of 64: every remainder, and more blocks than a power of two."""
    for rows in [*range(1, 10), 31, 63, 64, 65, 66, 127, 128, 129, 191, 192, 193, 257, 320, 449, 1000, 4097]:
        x, dy = rng.standard_normal((2, rows, 21)).astype(dtype)
        weight, _ = inputs.random_affine(rng, 21, dtype)
        check(dy, x, weight)


@both_types
@pytest.mark.parametrize("eps", [0, 1e-5])
def test_every_kind_of_row(rng, dtype, eps):
    for n in 2, 3, 33, 100, 1000:
        x = inputs.difficult_rows(rng, n, dtype)
        _, _, rstd = reference.layer_norm(x, eps=eps)
        largest = float(np.finfo(dtype).max) / 1e6
        x = x[(rstd[:, 0] > 0) & (rstd[:, 0] < largest)]  # else dx itself is not a finite number of this type
        weight, _ = inputs.random_affine(rng, n, dtype)
        check(rng.standard_normal(x.shape).astype(dtype), x, weight, eps=eps)


@both_types
@pytest.mark.parametrize("axis", [-1, 3, -2, 2, 1, -3, 0, -4])
def test_every_axis_of_four(rng, dtype, axis):
    x, dy = rng.standard_normal((2, 3, 4, 5, 6)).astype(dtype)
    weight = rng.standard_normal(x.shape[axis:]).astype(dtype)
    check(dy, x, weight, axis=axis)
    check(dy, x, None, axis=axis)


@pytest.mark.parametrize("axis", [-1, 1, 0])
@pytest.mark.parametrize("mean_over_std", [0, 3, 100])
def test_gradients_are_finite_differences(rng, axis, mean_over_std):
    """Central differences of the kernel itself, in float64.

    With h = 2^-17 the truncation, h^2 / 6 times a third derivative of order 10, and the rounding,
    a few 2^-53 * sum|dy * y| / h, are each below 1e-9 for values of order 1 and 60 elements.
    """
    h = 2.0**-17
    x = mean_over_std + rng.standard_normal((3, 4, 5))
    dy = rng.standard_normal(x.shape)
    weight, bias = rng.standard_normal((2, *x.shape[axis:]))
    _, stats = cnorm.layer_norm(x, weight, bias, axis=axis, return_stats=True)
    got = cnorm.layer_norm_backward(dy, x, weight, stats, axis=axis)
    for i, gradient in enumerate(got):
        arguments = [x, weight, bias]
        difference = np.empty_like(gradient)
        for at in np.ndindex(gradient.shape):
            ends = []
            for step in h, -h:
                moved = [a.copy() for a in arguments]
                moved[i][at] += step
                ends.append(cnorm.layer_norm(*moved, axis=axis))
            difference[at] = (dy * (ends[0] - ends[1])).sum() / (2 * h)
        scale = max(1, np.abs(gradient).max())
        np.testing.assert_allclose(gradient, difference, rtol=0, atol=1e-8 * scale)


@both_types
def test_dx_sums_to_zero_over_a_row(rng, dtype):
    """A shift of x changes nothing, so dx sums to zero over a row, within the sum of its elements' bounds."""
    for n in 2, 17, 256, 1000:
        x = (rng.standard_normal((20, n)) + 5).astype(dtype)
        dy = (rng.standard_normal((20, n)) + 3).astype(dtype)
        dx, _, _ = gradients(dy, x)
        xhat, _, rstd = reference.layer_norm(x)
        bound = tolerances.dx(reference.wide(dy), xhat, rstd, dtype).sum(axis=-1)
        assert (np.abs(reference.wide(dx).sum(axis=-1)) <= bound).all()


@both_types
@pytest.mark.parametrize("eps", [0, 1e-5])
def test_one_element_rows_have_no_gradient(dtype, eps):
    """n = 1: y is the bias whatever x and the gain are, so dx and dweight are exactly zero."""
    x = np.array([[1e6], [3.3], [-7], [1e-20]], dtype)
    dy = np.array([[1], [2], [3], [4]], dtype)
    _, stats = cnorm.layer_norm(x, np.array([2], dtype), eps=eps, return_stats=True)
    dx, dweight, dbias = cnorm.layer_norm_backward(dy, x, np.array([2], dtype), stats)
    assert not dweight.any()
    assert (dbias == 10).all()
    if eps:
        assert not dx.any()


@both_types
def test_constant_rows_give_no_dweight(rng, dtype):
    x = np.repeat(np.array([[0.1], [1234], [-1e20], [1e-30]], dtype), 37, axis=1)
    dy = rng.standard_normal(x.shape).astype(dtype)
    weight, _ = inputs.random_affine(rng, 37, dtype)
    _, dweight, _ = check(dy, x, weight)
    assert not dweight.any()
    huge = np.full((3, 37), 0.9 * np.finfo(dtype).max, dtype)
    tiny_eps = 1e-30 if dtype == np.float32 else 1e-300  # 1/sqrt of it is far beyond what it is in units of x
    _, dweight, _ = check(dy[:3], huge, weight, eps=tiny_eps)
    assert not dweight.any()


@both_types
def test_dy_of_zero_gives_zeros(rng, dtype):
    x = rng.standard_normal((70, 33)).astype(dtype)
    weight, _ = inputs.random_affine(rng, 33, dtype)
    for gradient in gradients(np.zeros_like(x), x, weight):
        assert not gradient.any()


def test_sums_of_small_integers_are_exact():
    """Small integers: every partial sum of dbias is representable, so the order of addition cannot matter."""
    dy = (np.arange(300 * 40) % 17 - 8).reshape(300, 40).astype(np.float32)
    x = np.random.default_rng(0).standard_normal(dy.shape).astype(np.float32)
    _, _, dbias = gradients(dy, x)
    np.testing.assert_array_equal(dbias, dy.sum(axis=0))


@both_types
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", ["x", "dy"])
def test_nan_and_inf_stay_in_their_row(rng, dtype, bad, place):
    x, dy = rng.standard_normal((2, 9, 50)).astype(dtype)
    weight, _ = inputs.random_affine(rng, 50, dtype)
    clean, _, _ = gradients(dy, x, weight)
    (x if place == "x" else dy)[4, 20] = bad
    dx, _, dbias = gradients(dy, x, weight)
    others = np.arange(9) != 4
    assert dx[others].tobytes() == clean[others].tobytes()
    assert np.isnan(dx[4]).any()
    assert np.isfinite(dbias[np.arange(50) != 20]).all()


@both_types
def test_a_row_alone_is_the_row_in_a_batch(rng, dtype):
    for n in 3, 32, 100, 1024:
        x = inputs.difficult_rows(rng, n, dtype)
        x = x[rng.permutation(np.repeat(np.arange(len(x)), 3))]
        dy = rng.standard_normal(x.shape).astype(dtype)
        weight, _ = inputs.random_affine(rng, n, dtype)
        batch, _, _ = gradients(dy, x, weight)
        for i in range(len(x)):
            assert gradients(dy[i], x[i], weight)[0].tobytes() == batch[i].tobytes()


@both_types
@pytest.mark.parametrize("shape", [(5, 70), (3, 528), (2, 1024), (2, 1300)])
def test_any_alignment_gives_the_same_bits(rng, dtype, shape):
    """Long rows are summed in aligned vectors that begin before the row, so blocks of 512 end within a vector."""
    x, dy = (rng.standard_normal((2, *shape)) + 1).astype(dtype)
    x[0] -= dtype(1)  # a row without a shift
    weight, _ = inputs.random_affine(rng, shape[1], dtype)
    expected = [g.tobytes() for g in gradients(dy, x, weight)]
    for offset in range(0, 64, 1 if shape[1] == 70 else 4):
        moved = [inputs.at_byte_offset(a, (offset * k) % 64) for a, k in ((dy, 1), (x, 3), (weight, 5))]
        assert [g.tobytes() for g in gradients(*moved)] == expected
        out = tuple(inputs.at_byte_offset(np.zeros_like(a), (offset * 7) % 64) for a in (x, weight, weight))
        _, stats = cnorm.layer_norm(x, weight, return_stats=True)
        cnorm.layer_norm_backward(dy, moved[1], weight, stats, out=out)
        assert [g.tobytes() for g in out] == expected


@pytest.mark.exhaustive(one_in=12)
@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("weighted", [True, False], ids=["weight", "no weight"])
@pytest.mark.parametrize("mean", [0, 100])
def test_a_large_batch_at_any_alignment(rng, mean, weighted):
    """dx is written with non-temporal stores; the gradients equal those in place, which uses ordinary stores."""
    shape = (9600, 777)
    x, dy = rng.standard_normal((2, *shape), np.float32)
    x += np.float32(mean)
    dy[5, :20] = dy[70, 300:320] = np.float32(5e37)  # the sums of these rows overflow
    weight = inputs.random_affine(rng, shape[1], np.float32)[0] if weighted else None
    _, stats = cnorm.layer_norm(x, weight, return_stats=True)
    in_place = dy.copy()
    _, *expected = cnorm.layer_norm_backward(in_place, x, weight, stats, out=(in_place, None, None))
    expected = [g for g in expected if g is not None]
    assert len(expected) == (2 if weighted else 1)
    assert all(np.isfinite(g).all() for g in (in_place, *expected))
    for offset in 0, 4, 16, 36, 60:
        for moved in inputs.at_byte_offset(x, offset), np.pad(x, ((0, 0), (offset // 4, 3)))[:, offset // 4 : -3]:
            dx = inputs.at_byte_offset(np.zeros_like(x), 64 - offset)
            _, *sums = cnorm.layer_norm_backward(dy, moved, weight, stats, out=(dx, None, None))
            assert dx.tobytes() == in_place.tobytes()
            np.testing.assert_array_equal([g for g in sums if g is not None], expected)


@both_types
def test_any_layout_gives_the_same_bits(rng, dtype):
    x, dy = (rng.standard_normal((2, 66, 35)) + 1).astype(dtype)
    weight, _ = inputs.random_affine(rng, 35, dtype)
    expected = [g.tobytes() for g in gradients(dy, x, weight)]
    for view in (
        np.asfortranarray,
        lambda a: a[::-1].copy()[::-1],
        lambda a: a[..., ::-1].copy()[..., ::-1],
        lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
    ):
        assert [g.tobytes() for g in gradients(view(dy), view(x), view(weight))] == expected


def test_stride_zero_dy(rng):
    """dy broadcast from one element, as in the gradient of a plain sum."""
    x = rng.standard_normal((5, 30), np.float32)
    ones = np.ones_like(x)
    view = np.broadcast_to(np.float32(1), x.shape)
    assert [g.tobytes() for g in gradients(view, x, ones[0])] == [g.tobytes() for g in gradients(ones, x, ones[0])]


@both_types
def test_out_receives_the_gradients(rng, dtype):
    x, dy = rng.standard_normal((2, 70, 33)).astype(dtype)
    weight, _ = inputs.random_affine(rng, 33, dtype)
    expected = gradients(dy, x, weight)
    out = tuple(np.full_like(g, 7) for g in expected)
    _, stats = cnorm.layer_norm(x, weight, return_stats=True)
    got = cnorm.layer_norm_backward(dy, x, weight, stats, out=out)
    assert all(g is o for g, o in zip(got, out, strict=True))
    assert [o.tobytes() for o in out] == [g.tobytes() for g in expected]
    out = np.empty_like(x), None, np.empty_like(weight)
    dx, dweight, dbias = cnorm.layer_norm_backward(dy, x, None, stats, out=out)
    assert dx is out[0]
    assert dweight is None
    assert dbias is out[2]
    assert dx.tobytes() == gradients(dy, x)[0].tobytes()


@both_types
def test_nothing_is_written_outside_out(rng, dtype):
    for n in range(1, 70):
        x, dy = rng.standard_normal((2, 3, n)).astype(dtype)
        weight, _ = inputs.random_affine(rng, n, dtype)
        expected = gradients(dy, x, weight)
        _, stats = cnorm.layer_norm(x, weight, return_stats=True)
        rooms = np.full((7, 5 + n), 7, dtype), np.full(5 + n, 7, dtype), np.full(5 + n, 7, dtype)
        views = rooms[0][1:-1:2, 2 : 2 + n], rooms[1][2 : 2 + n], rooms[2][2 : 2 + n]
        cnorm.layer_norm_backward(dy, x, weight, stats, out=views)
        for room, view, wanted in zip(rooms, views, expected, strict=True):
            np.testing.assert_array_equal(view, wanted)
            view[...] = 7
            assert (room == 7).all(), n


@both_types
@pytest.mark.parametrize("scale", [1e-44, 1e-30, 1e30])
def test_any_scale_of_dy(rng, dtype, scale):
    for n in 3, 64, 300, 1000:
        x = (rng.standard_normal((3, n)) + 1).astype(dtype)
        weight, _ = inputs.random_affine(rng, n, dtype)
        for shift in 0, 3:
            dy = (scale * (rng.standard_normal((3, n)) + shift)).astype(dtype)
            check(dy, x, weight)


@both_types
def test_dy_whose_sum_overflows(rng, dtype):
    """The sum of dy overflows, dx does not: finite input gives the correct output."""
    x = (rng.standard_normal((3, 1000)) + 1).astype(dtype)
    dy = ((rng.standard_normal(x.shape) + 3) * (float(np.finfo(dtype).max) / 100)).astype(dtype)
    check(dy, x)


@both_types
def test_dy_near_the_largest_number(dtype):
    """The sum of dy is in range, and subtracting the means from dy must not overflow."""
    x = np.array([[0, 10, 0.1, -10]], dtype)
    dy = np.array([[0.999, -0.235, -0.999, -0.235]], dtype) * np.finfo(dtype).max
    check(dy, x)
    if dtype == np.float64:  # the sums of the other types need a larger range
        return
    _, stats = cnorm.group_norm(x, 1, return_stats=True)
    dx, _, _ = cnorm.group_norm_backward(dy, x, 1, None, stats)
    assert dx.tobytes() == gradients(dy, x)[0].tobytes()
    columns = np.ascontiguousarray(x.T), np.ascontiguousarray(dy.T)
    _, stats = cnorm.batch_norm(columns[0], return_stats=True)
    assert np.isfinite(cnorm.batch_norm_backward(columns[1], columns[0], None, stats)[0]).all()


@pytest.mark.parametrize(
    ("x_scale", "dy_scale", "gain_scale"),
    [
        (1e-309, 1e-9, 1),
        (1e307, 1e300, 1),
        (1e307, 1e-270, 1),
        (1e-200, 1e-238, 1e289),
        (1e195, 1, 1.2e307),
    ],
)
def test_float64_dx_in_range_when_its_factors_are_not(rng, x_scale, dy_scale, gain_scale):
    """1/std, dy gain and their sums leave the range of float64; their product, dx, does not."""
    for n in 4, 100:
        x, dy = rng.standard_normal((2, 3, n))
        weight, _ = inputs.random_affine(rng, n, np.float64)
        check(dy * dy_scale, x * x_scale, weight * gain_scale, eps=0)
        assert not gradients(np.zeros_like(dy), x * x_scale, eps=0)[0].any()
    volume, given = x * x_scale, dy * dy_scale
    _, stats = cnorm.group_norm(volume, 1, eps=0, return_stats=True)
    expected = gradients(given, volume, eps=0)[0]
    np.testing.assert_allclose(cnorm.group_norm_backward(given, volume, 1, None, stats)[0], expected, rtol=1e-12)
    columns, dy_columns = np.ascontiguousarray(volume.T), np.ascontiguousarray(given.T)
    _, stats = cnorm.batch_norm(columns, eps=0, return_stats=True)
    dx, _, _ = cnorm.batch_norm_backward(dy_columns, columns, None, stats)
    np.testing.assert_allclose(dx.T, expected, rtol=1e-12)


@both_types
@pytest.mark.parametrize("shape", [(0, 5), (3, 0, 5)])
def test_zero_rows(dtype, shape):
    x = np.zeros(shape, dtype)
    dx, dweight, dbias = gradients(x, x, np.ones(5, dtype))
    assert dx.shape == shape
    np.testing.assert_array_equal(dweight, np.zeros(5))
    np.testing.assert_array_equal(dbias, np.zeros(5))


@both_types
def test_stats_sliced_by_rows(rng, dtype):
    x, dy = (rng.standard_normal((2, 10, 4, 20)) + 1000).astype(dtype)
    weight, _ = inputs.random_affine(rng, 20, dtype)
    _, stats = cnorm.layer_norm(x, weight, return_stats=True)
    dx, _, _ = cnorm.layer_norm_backward(dy, x, weight, stats)
    for rows in slice(2, 5), slice(None, None, 3), slice(None, None, -1), slice(4, 4):
        part = stats[rows]
        assert isinstance(part, cnorm.Stats)
        np.testing.assert_array_equal(part.mean, stats.mean[rows])
        np.testing.assert_array_equal(part.inv_std_dev, stats.inv_std_dev[rows])
        part_dx, _, _ = cnorm.layer_norm_backward(dy[rows], x[rows], weight, part)
        assert part_dx.tobytes() == dx[rows].tobytes()


@both_types
def test_stats_from_plain_mean_and_inv_std_dev(rng, dtype):
    """A plain mean is rounded once, which moves xhat by u * |mean| * rstd: at most u if |mean| < 1 / rstd."""
    x, dy = rng.standard_normal((2, 70, 96)).astype(dtype)
    weight, _ = inputs.random_affine(rng, 96, dtype)
    xhat, mean, rstd = reference.layer_norm(x)
    stats = cnorm.Stats(mean.astype(dtype), rstd.astype(dtype))
    np.testing.assert_array_equal(stats.mean, mean.astype(dtype))
    np.testing.assert_array_equal(stats.inv_std_dev, rstd.astype(dtype))
    dx, dweight, dbias = cnorm.layer_norm_backward(dy, x, weight, stats)
    expected = reference.layer_norm_backward(dy, x, weight)
    assert (np.abs(mean) * rstd < 1).all()
    dy, gain = reference.wide(dy), reference.wide(weight)
    tolerances.assert_within(dx, expected[0], tolerances.dx(dy, xhat, rstd, dtype, gain), "dx")
    tolerances.assert_within(dweight, expected[1], tolerances.dweight(dy, xhat, dtype), "dweight")
    tolerances.assert_within(dbias, expected[2], tolerances.dbias(dy, dtype), "dbias")


def test_stats_keep_the_mean_exactly():
    """At mean/std = 1e6 a mean rounded to float32 is off by 3 % of a standard deviation."""
    rng = np.random.default_rng(5)
    x = (1e6 + rng.standard_normal((4, 256))).astype(np.float32)
    dy = rng.standard_normal(x.shape).astype(np.float32)
    check(dy, x, np.ones(256, np.float32))


@both_types
def test_inputs_are_not_modified(rng, dtype):
    x, dy = rng.standard_normal((2, 70, 33)).astype(dtype)
    weight, _ = inputs.random_affine(rng, 33, dtype)
    _, stats = cnorm.layer_norm(x, weight, return_stats=True)
    arrays = [x, dy, weight]
    for array in arrays:
        array.flags.writeable = False
    before = [a.tobytes() for a in [*arrays, stats.mean, stats.inv_std_dev]]
    first = cnorm.layer_norm_backward(dy, x, weight, stats)
    second = cnorm.layer_norm_backward(dy, x, weight, stats)
    assert [a.tobytes() for a in [*arrays, stats.mean, stats.inv_std_dev]] == before
    assert [g.tobytes() for g in first] == [g.tobytes() for g in second]


def test_stats_of_any_memory_layout(rng):
    x, dy = rng.standard_normal((2, 4, 5, 8), np.float32)
    mean, inv_std_dev = x.mean(-1, keepdims=True), 1 / x.std(-1, keepdims=True)
    wanted = [g.tobytes() for g in cnorm.layer_norm_backward(dy, x, None, cnorm.Stats(mean, inv_std_dev))[::2]]
    for layout in np.asfortranarray, lambda a: np.repeat(a, 2, 0)[::2], lambda a: a[::-1].copy()[::-1]:
        stats = cnorm.Stats(layout(mean), layout(inv_std_dev))
        assert [g.tobytes() for g in cnorm.layer_norm_backward(dy, x, None, stats)[::2]] == wanted


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_nan_in_given_stats_propagates(rng, dtype):
    x, dy = rng.standard_normal((2, 3, 8)).astype(dtype)
    mean = np.zeros((3, 1), np.float32 if dtype == np.float16 else dtype)
    for bad in cnorm.Stats(mean, mean + np.nan), cnorm.Stats(mean + np.nan, mean + 1):
        dx, _, dbias = cnorm.layer_norm_backward(dy, x, None, bad)
        assert np.isnan(dx).all()
        assert np.isfinite(dbias).all()
