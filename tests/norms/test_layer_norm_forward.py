"""cnorm.layer_norm against the oracle: the rows of docs/numerics.md about the forward pass."""

import functools
import threading

import inputs
import numpy as np
import pytest
import reference
import tolerances

import cnorm

pytestmark = pytest.mark.usefixtures("isa")
both_types = pytest.mark.parametrize("dtype", [np.float32, np.float64])
MEAN_OVER_STD = [0, 0.5, 1, 2, 3.9, 4.1, 10, 1e2, 1e4, 1e6]


def check(x, weight=None, bias=None, eps=1e-5, axis=-1):
    """layer_norm with statistics against the oracle; returns y."""
    y, stats = cnorm.layer_norm(x, weight, bias, eps=eps, axis=axis, return_stats=True)
    assert y.dtype == x.dtype
    xhat, mean, rstd = reference.layer_norm(x, eps=eps, axis=axis)
    expected, _, _ = reference.layer_norm(x, weight, bias, eps=eps, axis=axis)
    gain = 1 if weight is None else reference.wide(weight)
    shift = 0 if bias is None else reference.wide(bias)
    tolerances.assert_within(y, expected, tolerances.forward(xhat, x.dtype, gain, shift))
    tolerances.assert_within(stats.mean, mean, tolerances.mean(mean, rstd, x.dtype), "mean")
    defined = (rstd > 0) & (rstd <= float(np.finfo(x.dtype).max))  # a constant row with eps = 0 has none
    bound = tolerances.inv_std_dev(rstd, x.dtype)
    tolerances.assert_within(stats.inv_std_dev[defined], rstd[defined], bound[defined], "inv_std_dev")
    return y


@functools.cache
def shifted_normal(mean_over_std, rows, n):
    """Float32 rows mean/std + N(0, 1), and the oracle's answer; shared by the instruction sets."""
    z = np.random.default_rng(n).standard_normal((rows, n), np.float32)
    x = (z + mean_over_std).astype(np.float32)
    return x, reference.layer_norm(x)[0]


@pytest.mark.exhaustive(one_in=36)
@pytest.mark.parametrize(("rows", "n"), [(4096, 1024), (512, 768), (128, 4096), (128, 8192)])
@pytest.mark.parametrize("mean_over_std", MEAN_OVER_STD)
def test_error_at_any_mean(mean_over_std, rows, n):
    x, expected = shifted_normal(mean_over_std, rows, n)
    tolerances.assert_within(cnorm.layer_norm(x), expected, tolerances.xhat(expected, x.dtype))


@both_types
@pytest.mark.parametrize("mean_over_std", MEAN_OVER_STD)
def test_error_at_any_mean_and_scale(rng, dtype, mean_over_std):
    for scale in 1e-12, 1e-3, 1e5, 1e15:
        x = (scale * (mean_over_std + rng.standard_normal((64, 500)))).astype(dtype)
        check(x, eps=0)


@both_types
def test_every_length(rng, dtype):
    for n in inputs.LENGTHS:
        weight, bias = inputs.random_affine(rng, n, dtype)
        x = (np.array([[0], [1], [4], [30], [1e4]]) + rng.standard_normal((5, n))).astype(dtype)
        check(x, weight, bias)


@both_types
def test_every_kind_of_row(rng, dtype):
    for n in 1, 2, 3, 7, 33, 64, 100, 1000:
        x = inputs.difficult_rows(rng, n, dtype)
        weight, bias = inputs.random_affine(rng, n, dtype)
        check(x)
        check(x, weight, bias)
        check(x, eps=0)


@both_types
@pytest.mark.parametrize("n", [33, 1000, 8192, 20000])
def test_error_whatever_the_distribution(rng, dtype, n):
    """Repeated values and outliers round in the same direction each time: the bound is that of the longest chain."""
    z = rng.standard_normal((6, n))
    kinds = {
        "two values": np.where(z > 0, 0.1, 0),
        "few ones": np.where(z > 1, 1.0, 0),
        "rectified": np.maximum(z, 0),
        "exponential": rng.exponential(size=z.shape),
        "log-normal": np.exp(3 * z),
        "sorted": np.sort(z),
        "sorted magnitudes": np.sort(np.abs(z)),
        "ramp": np.arange(n) + z,
        "step": np.where(np.arange(n) < n / 2, 1e3, 0) + z,
        "one lane": np.where(np.arange(n) % 32, 50, 1000) + z,
        "outlier": np.where(np.arange(n) == 5, -3e5, 1e4 + z),
    }
    for name, x in kinds.items():
        x = x.astype(dtype)
        expected, _, _ = reference.layer_norm(x)
        tolerances.assert_within(cnorm.layer_norm(x), expected, tolerances.any_row(expected, dtype), name)


@pytest.mark.exhaustive(one_in=2)
@pytest.mark.parametrize("n", [2**20, 2**24])
def test_rows_of_millions_of_elements(rng, n):
    """Compared one part at a time: the oracle's wide arrays of a whole row would take a gigabyte."""
    x = rng.standard_normal(n, np.float32)
    x += np.float32(7)
    y, stats = cnorm.layer_norm(x, return_stats=True)
    mean = x.mean(dtype=np.float64)
    parts = [slice(start, start + 2**18) for start in range(0, n, 2**18)]
    var = sum(np.square(x[part] - mean).sum() for part in parts) / n
    rstd = 1 / np.sqrt(var + float(np.float32(1e-5)))
    for part in parts:
        expected = (x[part] - mean) * rstd
        tolerances.assert_within(y[part], expected, tolerances.xhat(expected, x.dtype))
    assert abs(float(stats.mean[0]) - mean) <= tolerances.mean(mean, rstd, x.dtype)
    assert abs(float(stats.inv_std_dev[0]) - rstd) <= tolerances.inv_std_dev(rstd, x.dtype)


@pytest.mark.parametrize(
    "row",
    [
        1e20 * np.arange(1, 9),
        1e-30 * np.arange(1, 9),
        1e-40 * np.arange(1, 9),
        [3e38, -3e38],
        [3e38, -3e38, 3e38, 1.0],
    ],
    ids=["huge", "tiny", "subnormal", "largest", "largest-lopsided"],
)
@pytest.mark.parametrize("repeat", [1, 5, 128])
def test_rows_beyond_the_range_of_their_squares(row, repeat):
    x = np.tile(np.array(row, np.float32), repeat)
    y = cnorm.layer_norm(x, eps=0)
    expected, _, _ = reference.layer_norm(x, eps=0)
    tolerances.assert_within(y, expected, tolerances.rescued(expected))


@pytest.mark.parametrize("row", [1e300 * np.arange(1, 9), 1e-300 * np.arange(1, 9), 5e-324 * np.arange(1, 9)])
def test_float64_rows_beyond_the_range_of_their_squares(row):
    check(row, eps=0)
    check(np.tile(row, 40), eps=0)


def test_the_largest_float64_of_both_signs():
    check(np.tile([1.7e308, -1.7e308, 1.7e308], 9), eps=0)


@both_types
@pytest.mark.parametrize("eps", [0, 1e-5, 1.0])
def test_constant_rows_give_the_bias_exactly(rng, dtype, eps):
    info = np.finfo(dtype)
    values = [
        0,
        -0.0,
        1,
        -3.3,
        0.1,
        1234,
        1e-20,
        1e20,
        info.tiny,
        info.smallest_subnormal,
        info.max,
        -info.max,
    ]
    for n in 2, 3, 7, 31, 100, 1001, 8200:
        x = np.repeat(np.array(values, dtype)[:, None], n, axis=1)
        weight, bias = inputs.random_affine(rng, n, dtype)
        np.testing.assert_array_equal(cnorm.layer_norm(x, weight, bias, eps=eps), np.broadcast_to(bias, x.shape))
        assert not cnorm.layer_norm(x, eps=eps).any()


@both_types
@pytest.mark.parametrize("eps", [0, 1e-5])
def test_one_element_rows_give_the_bias_exactly(dtype, eps):
    info = np.finfo(dtype)
    x = np.array([[1e6], [3.3], [-7], [0], [info.max], [info.smallest_subnormal]], dtype)
    weight, bias = np.array([2.0], dtype), np.array([0.7], dtype)
    np.testing.assert_array_equal(cnorm.layer_norm(x, weight, bias, eps=eps), np.repeat(bias[None], 6, axis=0))


@both_types
@pytest.mark.parametrize("where", [0, 1, 511, -1])
@pytest.mark.parametrize("outlier", [1e3, -1e6, 1e12])
def test_one_outlier(rng, dtype, where, outlier):
    x = rng.standard_normal((4, 1024)).astype(dtype)
    x[:, where] = outlier
    check(x)


@both_types
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_inf_stay_in_their_row(rng, dtype, bad):
    for n in 1, 5, 32, 77, 1024:
        x = (rng.standard_normal((9, n)) + 2).astype(dtype)
        weight, bias = inputs.random_affine(rng, n, dtype)
        clean, clean_stats = cnorm.layer_norm(x, weight, bias, return_stats=True)
        x[4, n // 2] = bad
        y, stats = cnorm.layer_norm(x, weight, bias, return_stats=True)
        assert np.isnan(y[4, n // 2])
        others = np.arange(9) != 4
        assert y[others].tobytes() == clean[others].tobytes()
        assert stats.mean[others].tobytes() == clean_stats.mean[others].tobytes()
        assert stats.inv_std_dev[others].tobytes() == clean_stats.inv_std_dev[others].tobytes()


@both_types
def test_nan_in_the_gain_stays_in_its_column(rng, dtype):
    x = rng.standard_normal((3, 40)).astype(dtype)
    weight, bias = inputs.random_affine(rng, 40, dtype)
    weight[11] = np.nan
    assert np.array_equal(np.isnan(cnorm.layer_norm(x, weight, bias)), np.broadcast_to(np.arange(40) == 11, x.shape))


@both_types
def test_subnormals_are_kept(dtype):
    smallest = np.finfo(dtype).smallest_subnormal
    x = np.tile(np.array([1, -1], dtype), 24)
    check(x * smallest, eps=0)  # in the input
    check(x * smallest)
    weight = np.full(48, 5 * smallest, dtype)
    np.testing.assert_array_equal(cnorm.layer_norm(x, weight, eps=0), x * weight)  # in gain, bias and output
    np.testing.assert_array_equal(cnorm.layer_norm(x, weight, weight, eps=0), x * weight + weight)


@both_types
def test_zero_inputs_of_the_affine_part(rng, dtype):
    x = rng.standard_normal((4, 50)).astype(dtype)
    _, bias = inputs.random_affine(rng, 50, dtype)
    plain = cnorm.layer_norm(x)
    ones, zeros = np.ones(50, dtype), np.zeros(50, dtype)
    assert cnorm.layer_norm(x, ones).tobytes() == plain.tobytes()
    np.testing.assert_array_equal(cnorm.layer_norm(x, ones, zeros), plain)
    np.testing.assert_array_equal(cnorm.layer_norm(x, zeros, bias), np.broadcast_to(bias, x.shape))
    check(x, None, bias)
    check(x, bias, None)


@both_types
def test_a_row_alone_is_the_row_in_a_batch(rng, dtype):
    for n in 3, 32, 100, 1024, 4099:
        x = inputs.difficult_rows(rng, n, dtype)
        alike = (100 + rng.standard_normal((24, n))).astype(dtype)  # nearly the same shift for each
        x = np.concatenate([rng.permutation(np.concatenate([x, x, x])), alike])  # every pair of kinds occurs
        weight, bias = inputs.random_affine(rng, n, dtype)
        batch = cnorm.layer_norm(x, weight, bias)
        for i in reversed(range(len(x))):  # in another order than the batch's
            assert cnorm.layer_norm(x[i], weight, bias).tobytes() == batch[i].tobytes()
        for start, stop in (0, 2), (1, 4), (5, 10), (7, len(x)):
            assert cnorm.layer_norm(x[start:stop], weight, bias).tobytes() == batch[start:stop].tobytes()


@pytest.mark.parametrize("n", [16, 37, 1024])
def test_a_large_batch_is_its_rows(rng, n):
    """Large enough for every tuned path: larger than the caches and above the size at which the GIL is released."""
    x = np.tile(rng.standard_normal((64, n), np.float32), (8192 // 64 if n == 1024 else 16384 // 64, 1))
    x[3::64] = -0.0
    y = cnorm.layer_norm(x)
    few = cnorm.layer_norm(x[:64].copy())
    assert (y.reshape(-1, 64, n).view(np.uint32) == few.view(np.uint32)).all()


@both_types
def test_any_alignment_gives_the_same_bits(rng, dtype):
    for rows, n in (3, 13), (5, 70), (2, 1024):
        x = (rng.standard_normal((rows, n)) + 3).astype(dtype)
        weight, bias = inputs.random_affine(rng, n, dtype)
        expected = cnorm.layer_norm(x, weight, bias).tobytes()
        for offset in range(64):
            moved = inputs.at_byte_offset(x, offset)
            assert cnorm.layer_norm(moved, weight, bias).tobytes() == expected
            out = inputs.at_byte_offset(np.zeros_like(x), (offset * 5) % 64)
            affine = (
                inputs.at_byte_offset(weight, (offset * 3) % 64),
                inputs.at_byte_offset(bias, 63 - offset),
            )
            assert cnorm.layer_norm(moved, *affine, out=out) is out
            assert out.tobytes() == expected
            cnorm.layer_norm(moved, weight, bias, out=moved)
            assert moved.tobytes() == expected


def test_a_large_batch_at_any_alignment(rng):
    x = np.tile(rng.standard_normal((32, 777), np.float32), (300, 1))
    expected = cnorm.layer_norm(x)
    for offset in 4, 16, 36, 60, 1, 35:
        out = inputs.at_byte_offset(np.zeros_like(x), 64 - offset)
        cnorm.layer_norm(inputs.at_byte_offset(x, offset), out=out)
        np.testing.assert_array_equal(out, expected)


def layouts(x):
    """The same values [6, 35] in every memory layout NumPy has."""
    wider = np.zeros((x.shape[0] * 2, x.shape[1] * 3), x.dtype)
    wider[::2, ::3] = x
    padded = np.zeros((x.shape[0], x.shape[1] + 5), x.dtype)
    padded[:, 2:-3] = x
    readonly = x.copy()
    readonly.flags.writeable = False
    return {
        "C": x.copy(),
        "Fortran": np.asfortranarray(x),
        "transposed": x.T.copy().T,
        "step": wider[::2, ::3],
        "row step": np.repeat(x, 2, axis=0)[::2],
        "reversed": x[::-1, ::-1].copy()[::-1, ::-1],
        "rows reversed": x[::-1].copy()[::-1],
        "columns reversed": x[:, ::-1].copy()[:, ::-1],
        "padded rows": padded[:, 2:-3],
        "read-only": readonly,
        "new axis": x.copy()[:, None, :][:, 0, :],
        "big batch of views": np.moveaxis(np.moveaxis(x, 0, 1).copy(), 1, 0),
    }


@both_types
def test_any_layout_gives_the_same_bits(rng, dtype):
    x = (rng.standard_normal((6, 35)) + 2).astype(dtype)
    weight, bias = inputs.random_affine(rng, 35, dtype)
    expected = cnorm.layer_norm(x, weight, bias)
    strided = np.repeat(weight, 2)[::2], bias[::-1].copy()[::-1]
    for name, view in layouts(x).items():
        before = view.copy()
        y, stats = cnorm.layer_norm(view, *strided, return_stats=True)
        assert y.tobytes() == expected.tobytes(), name
        assert stats.mean.shape == (6, 1), name
        assert np.array_equal(view, before), name


@both_types
def test_out_in_any_layout(rng, dtype):
    x = (rng.standard_normal((6, 35)) + 2).astype(dtype)
    expected = cnorm.layer_norm(x)
    for name, out in layouts(np.zeros_like(x)).items():
        if out.flags.writeable:
            assert cnorm.layer_norm(x, out=out) is out
            np.testing.assert_array_equal(out, expected, err_msg=name)
    for name, view in layouts(x).items():
        if view.flags.writeable:
            assert cnorm.layer_norm(view, out=view) is view
            np.testing.assert_array_equal(view, expected, err_msg=name)


@pytest.mark.parametrize("step", [1, 2])
@both_types
def test_nothing_is_written_outside_out(rng, dtype, step):
    for n in range(1, 70):
        x = rng.standard_normal((3, n)).astype(dtype)
        room = np.full((7, 5 + step * n), 7, dtype)
        view = room[1:-1:2, 2 : 2 + step * n : step]
        cnorm.layer_norm(x, out=view)
        np.testing.assert_array_equal(view, cnorm.layer_norm(x))
        view[...] = 7
        assert (room == 7).all(), n


@both_types
def test_stride_zero_rows(rng, dtype):
    row = rng.standard_normal(45).astype(dtype)
    expected = cnorm.layer_norm(row)
    assert (cnorm.layer_norm(np.broadcast_to(row, (7, 45))) == expected).all()
    assert not cnorm.layer_norm(np.broadcast_to(row[:, None], (45, 7))).any()


@both_types
@pytest.mark.parametrize("axis", [-1, 3, -2, 2, 1, -3, 0, -4])
def test_every_axis_of_four(rng, dtype, axis):
    x = rng.standard_normal((3, 4, 5, 6)).astype(dtype)
    weight, bias = (rng.standard_normal(x.shape[axis:]).astype(dtype) for _ in range(2))
    y = check(x, weight, bias, axis=axis)
    _, stats = cnorm.layer_norm(x, axis=axis, return_stats=True)
    lead = axis % 4
    assert y.shape == x.shape
    assert stats.mean.shape == stats.inv_std_dev.shape == x.shape[:lead] + (1,) * (4 - lead)
    check(np.moveaxis(x.copy(), 0, 2), axis=axis)


def test_one_dimension():
    x = np.arange(10, dtype=np.float32)
    y, stats = cnorm.layer_norm(x, return_stats=True)
    assert y.shape == (10,)
    assert stats.mean.shape == (1,)
    assert y.tobytes() == cnorm.layer_norm(x, axis=0).tobytes()


@both_types
def test_in_place_gives_the_same_bits(rng, dtype):
    for n in 1, 8, 33, 100, 1024:
        x = inputs.difficult_rows(rng, n, dtype)
        weight, bias = inputs.random_affine(rng, n, dtype)
        expected = cnorm.layer_norm(x, weight, bias)
        same = x.copy()
        y, _ = cnorm.layer_norm(same, weight, bias, out=same, return_stats=True)
        assert y is same
        assert same.tobytes() == expected.tobytes()


@both_types
def test_statistics_change_no_bits(rng, dtype):
    x = inputs.difficult_rows(rng, 100, dtype)
    assert cnorm.layer_norm(x, return_stats=True)[0].tobytes() == cnorm.layer_norm(x).tobytes()


@both_types
@pytest.mark.parametrize("shape", [(0, 5), (3, 0, 5), (0, 0, 5)])
def test_zero_rows(dtype, shape):
    x = np.zeros(shape, dtype)
    y, stats = cnorm.layer_norm(x, np.ones(5, dtype), np.ones(5, dtype), return_stats=True)
    assert y.shape == shape
    assert y.dtype == dtype
    assert stats.mean.shape == stats.inv_std_dev.shape == (*shape[:-1], 1)


@pytest.mark.parametrize("eps", [0, -0.0, 1e-12, 1e-5, 1e-3, 1, 10, 1e-45, np.float32(1e-5), np.float64(1e-3)])
@both_types
def test_any_eps(rng, dtype, eps):
    for scale in 1, 1e-3, 1e-8:
        check((scale * rng.standard_normal((8, 60))).astype(dtype), eps=eps)


def test_eps_is_rounded_to_the_type_computed_in():
    x = np.float32([[1e-4, -1e-4, 3e-4, 0]])
    assert cnorm.layer_norm(x, eps=1e-5).tobytes() == cnorm.layer_norm(x, eps=np.float32(1e-5)).tobytes()


def test_many_threads_on_one_input(rng):
    x = rng.standard_normal((512, 256), np.float32)
    weight, bias = inputs.random_affine(rng, 256, np.float32)
    expected = cnorm.layer_norm(x, weight, bias).tobytes()
    wrong = []
    start = threading.Barrier(8)

    def work():
        start.wait()
        out = np.empty_like(x)
        for _ in range(20):
            cnorm.layer_norm(x, weight, bias, out=out)
            if out.tobytes() != expected:
                wrong.append(threading.current_thread().name)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
