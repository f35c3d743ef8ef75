"""Bad input to the norms: the exception's type, the argument's name in its message, and nothing written."""

import re
import subprocess
import sys
from importlib import util

import inputs
import numpy as np
import pytest

import cnorm

N = 6


@pytest.fixture
def x(rng):
    return rng.standard_normal((4, N), np.float32)


@pytest.fixture
def weight():
    return np.full(N, 2, np.float32)


@pytest.fixture
def stats(x):
    return cnorm.layer_norm(x, return_stats=True)[1]


def raises(error, name):
    """The message has the argument's name as a word of its own."""
    return pytest.raises(error, match=rf"\b{name}\b")


class Convertible:
    """Not an array, but NumPy can convert it into one."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


class Elsewhere:
    """An array in the memory of a GPU."""

    def __dlpack__(self, **_):
        raise BufferError("the memory is on a GPU")

    def __dlpack_device__(self):
        return 2, 0


class Subclass(np.ndarray):
    pass


# x --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        None,
        "text",
        1.0,
        object(),
        np.zeros((2, 3), object),
        np.full((2, 3), "a"),
        np.full((2, 3), b"a"),
        np.zeros((2, 3), "datetime64[s]"),
        np.zeros((2, 3), "timedelta64[s]"),
        np.zeros((2, 3), [("a", "f4"), ("b", "f4")]),
        np.zeros((2, 3), bool),
        np.zeros((2, 3), np.complex64),
        np.zeros((2, 3), np.complex128),
        np.zeros((2, 3), np.longdouble),
        *(np.zeros((2, 3), t) for t in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")),
    ],
    ids=lambda bad: f"{type(bad).__name__}-{getattr(bad, 'dtype', '')}",
)
def test_x_of_another_type(bad):
    with raises(TypeError, "x") as caught:
        cnorm.layer_norm(bad)
    if isinstance(bad, np.ndarray):
        assert "float32" in str(caught.value)
        assert "float64" in str(caught.value)


def test_rejects_masked_x(x):
    with raises(TypeError, "x"):
        cnorm.layer_norm(np.ma.masked_array(x, x > 0))


def test_rejects_masked_arrays_without_masked_elements(x):
    with raises(TypeError, "x"):
        cnorm.layer_norm(np.ma.masked_array(x))


@pytest.mark.parametrize("make", [Convertible, memoryview], ids=["__array__", "memoryview"])
def test_accepts_array_likes_without_conversion(x, make):
    np.testing.assert_array_equal(cnorm.layer_norm(make(x)), cnorm.layer_norm(x))


@pytest.mark.parametrize(
    "make",
    [lambda x: x.tolist(), lambda x: tuple(map(tuple, x.tolist())), lambda x: x.astype(">f4")],
    ids=["list", "tuple", "big-endian"],
)
def test_rejects_x_that_needs_conversion(x, make):
    with raises(TypeError, "x"):
        cnorm.layer_norm(make(x))


@pytest.mark.parametrize("make", [np.asmatrix, lambda x: x.view(Subclass)], ids=["matrix", "subclass"])
@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_x_of_a_subclass_of_ndarray(x, make):
    y = cnorm.layer_norm(make(x))
    np.testing.assert_array_equal(np.asarray(y), cnorm.layer_norm(x))


def test_x_memory_mapped(x, tmp_path):
    np.save(tmp_path / "x.npy", x)
    for mode in "r", "r+", "c":
        mapped = np.load(tmp_path / "x.npy", mmap_mode=mode)
        np.testing.assert_array_equal(cnorm.layer_norm(mapped), cnorm.layer_norm(x))


def test_x_a_torch_tensor(x):
    torch = pytest.importorskip("torch")
    np.testing.assert_array_equal(cnorm.layer_norm(torch.from_numpy(x)), cnorm.layer_norm(x))


def unreadable():
    yield from (Elsewhere(), Convertible(None))
    if util.find_spec("torch"):
        import torch

        yield torch.empty(N, device="meta")


def test_rejects_arrays_that_numpy_cannot_read(x):
    for bad in unreadable():
        with raises(TypeError, "x"):
            cnorm.layer_norm(bad)
        with raises(TypeError, "bias"):
            cnorm.layer_norm(x, None, bad)


def test_x_of_no_dimension():
    with raises(ValueError, "(x|axis)"):
        cnorm.layer_norm(np.array(1, np.float32))
    with raises(ValueError, "(x|axis)"):
        cnorm.layer_norm(np.array(1.0), axis=0)


@pytest.mark.parametrize(("shape", "axis"), [((3, 0), -1), ((0,), 0), ((3, 0, 2), 1), ((3, 2, 0), -2), ((0, 0), -1)])
def test_rows_of_no_elements(shape, axis):
    with raises(ValueError, "axis"):
        cnorm.layer_norm(np.zeros(shape, np.float32), axis=axis)


@pytest.mark.parametrize("shape", [(2**31, 2**29), (2**60, 1), (1, 2**60)])
def test_x_larger_than_memory(shape):
    """A view of one element that claims 2^62 bytes: refused before anything is touched."""
    huge = np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), shape, (0, 0))
    with pytest.raises((MemoryError, ValueError)):
        cnorm.layer_norm(huge)


# weight and bias ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalized_shape", [(N,), (4, N), (), [N], N])
def test_weight_that_is_a_normalized_shape_is_explained(x, normalized_shape):
    """torch.nn.functional.layer_norm takes the shape there; the message says what to write instead."""
    with raises(TypeError, "weight") as caught:
        cnorm.layer_norm(x, normalized_shape)
    assert "no normalized_shape" in str(caught.value)
    assert str(caught.value).endswith(": layer_norm(x, weight, bias, axis=-k)")
    with pytest.raises(TypeError, match=r"no normalized_shape; .*: rms_norm\(x, weight, axis=-k\)$"):
        cnorm.rms_norm(x, normalized_shape)
    with pytest.raises(TypeError, match=r"no normalized_shape; .*: add_layer_norm\(x, residual, weight, bias, axis=-k"):
        cnorm.add_layer_norm(x, x, normalized_shape)


@pytest.mark.parametrize("bad", [(N,), [1.0, 2.0], N])
def test_weights_of_other_norms_do_not_mention_normalized_shape(x, stats, bad):
    """No other library takes normalized_shape in this place, so the message does not mention it."""
    v = x[:, :, None]
    for call in (
        lambda: cnorm.weight_norm(bad),
        lambda: cnorm.batch_norm(x, bad),
        lambda: cnorm.group_norm(x, 3, bad),
        lambda: cnorm.instance_norm(v, bad),
        lambda: cnorm.divisive_norm(x, bad),
        lambda: cnorm.layer_norm_backward(x, x, bad, stats),
        lambda: cnorm.smoothing_gradient(x, x, bad, stats, 1.0),
    ):
        kind = "list, which has no dtype: pass np.float32(weight)" if bad == [1.0, 2.0] else type(bad).__name__
        with pytest.raises(TypeError, match=f"^weight must be an array, NumPy's or .* got {re.escape(kind)}$"):
            call()


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (np.zeros((3, N + 1), np.float32), ValueError),
        (np.zeros((), np.float32), ValueError),
        (np.zeros((3, N)), TypeError),
        (np.zeros((3, N), np.int32), TypeError),
        ([0.0] * N, TypeError),
    ],
)
def test_errors_of_a_bound_norm_name_x(bad, error):
    """In cnorm.LayerNorm(weight)(x) the weight was bound earlier, so the message names x."""
    with raises(error, "x"):
        cnorm.LayerNorm(np.ones(N, np.float32))(bad)


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize(
    "bad",
    [
        N,
        2.0,
        "w",
        object(),
        *(np.ones(N, t) for t in ("f8", "i4", "?", "c8", "O")),
        np.ma.masked_array(np.ones(N, "f4")),
    ],
    ids=lambda bad: f"{type(bad).__name__}-{getattr(bad, 'dtype', '')}",
)
def test_weight_or_bias_of_another_type(x, name, bad):
    with raises(TypeError, name):
        cnorm.layer_norm(x, **{name: bad})


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_float32_weight_for_a_float64_x(x, name):
    with raises(TypeError, name) as caught:
        cnorm.layer_norm(x.astype(np.float64), **{name: np.ones(N, np.float32)})
    assert "float32" in str(caught.value)
    assert "float64" in str(caught.value)


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("shape", [(), (1,), (N - 1,), (N + 1,), (1, N), (4, N), (N, 1), (0,)])
def test_weight_or_bias_of_another_shape(x, name, shape):
    with raises(ValueError, name) as caught:
        cnorm.layer_norm(x, **{name: np.ones(shape, np.float32)})
    assert str(shape) in str(caught.value)  # what was given
    assert str((N,)) in str(caught.value)  # what is wanted


def test_weight_has_the_shape_of_all_the_normalised_dimensions(rng):
    x = rng.standard_normal((2, 3, 4), np.float32)
    cnorm.layer_norm(x, np.ones((3, 4), np.float32), axis=1)
    for shape in (12,), (4,), (4, 3), (1, 12):
        with raises(ValueError, "weight"):
            cnorm.layer_norm(x, np.ones(shape, np.float32), axis=1)


def test_weight_read_only_strided_and_unaligned_are_fine(x, weight):
    expected = cnorm.layer_norm(x, weight, weight)
    readonly = weight.copy()
    readonly.flags.writeable = False
    for other in (
        readonly,
        np.repeat(weight, 3)[::3],
        np.broadcast_to(np.float32(2), N),
        inputs.at_byte_offset(weight, 1),
    ):
        np.testing.assert_array_equal(cnorm.layer_norm(x, other, other), expected)


# axis and eps ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [2, -3, 100, -(2**40), 2**40, 2**70, -(2**70)])
def test_axis_out_of_range(x, axis):
    with raises(ValueError, "axis"):
        cnorm.layer_norm(x, axis=axis)


@pytest.mark.parametrize("axis", [None, (), (1.0,), [1], 1.0, "1", True, np.True_, np.float32(1), np.array([1])])
def test_axis_of_another_type(x, axis):
    with raises(TypeError, "axis"):
        cnorm.layer_norm(x, axis=axis)


@pytest.mark.parametrize("ndim", [1, 2, 3, 4])
def test_axis_as_a_tuple(rng, ndim):
    """The last dimensions, in any order and of either sign, are those from the first of them on."""
    x = rng.standard_normal((3, 2, 5, 4)[-ndim:], np.float32)
    for count in range(1, ndim + 1):
        wanted, stats = cnorm.layer_norm(x, axis=-count, return_stats=True)
        gradients = cnorm.layer_norm_backward(x, x, None, stats, axis=-count)
        for numbers in (range(-count, 0), range(ndim - count, ndim), range(-1, -count - 1, -1)):
            axis = tuple(numbers)
            assert np.array_equal(cnorm.layer_norm(x, axis=axis), wanted)
            assert np.array_equal(cnorm.rms_norm(x, axis=axis), cnorm.rms_norm(x, axis=-count))
            assert np.array_equal(cnorm.add_layer_norm(x, x, axis=axis)[1], x + x)
            ours = cnorm.layer_norm_backward(x, x, None, stats, axis=axis)
            assert np.array_equal(ours[0], gradients[0])
            assert cnorm.smoothing_gradient(x, x, None, stats, 0.1, axis=axis) == cnorm.smoothing_gradient(
                x, x, None, stats, 0.1, axis=-count
            )


@pytest.mark.parametrize("axis", [(0,), (0, 2), (2, 0), (0, 1), (-3, -1)])
def test_other_axes_get_the_remedy(rng, axis):
    """The call that the message names computes the norm over those axes."""
    x = rng.standard_normal((3, 2, 5), np.float32)
    with raises(ValueError, "axis") as caught:
        cnorm.layer_norm(x, axis=axis)
    call = re.search(r"np\.moveaxis\(.*?\)\)", str(caught.value))[0]
    moved = eval(call, {"np": np, "x": x})
    last = tuple(range(-len(axis), 0))
    y = np.moveaxis(cnorm.layer_norm(moved, axis=last), last, axis)
    deviation = np.sqrt(x.var(axis, keepdims=True, dtype=np.float64) + 1e-5)
    np.testing.assert_allclose(y, (x - x.mean(axis, keepdims=True, dtype=np.float64)) / deviation, rtol=0, atol=2e-6)


@pytest.mark.parametrize("axis", [(-1, -1), (0, 2), (1, -1), (-3,), (2**70,)])
def test_tuples_that_are_no_dimensions(x, axis):
    with raises(ValueError, "axis"):
        cnorm.layer_norm(x, axis=axis)


def test_weight_for_columns_is_told_what_axis_means(x):
    with pytest.raises(ValueError, match=r"weight must .*axis=0 is the first normalised dimension"):
        cnorm.layer_norm(x, np.ones(len(x), np.float32), axis=0)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "batch_norm", "instance_norm", "divisive_norm"])
def test_tensors_that_require_gradients(name):
    """The result would be an array without a gradient."""
    torch = pytest.importorskip("torch")
    shape = (4, 3, 5) if name == "instance_norm" else (4, 6)
    t = torch.ones(shape, requires_grad=True)
    norm = getattr(cnorm, name)
    for given, what in (((t,), "x"), ((t.detach(), torch.ones(shape[1], requires_grad=True)), "weight")):
        with pytest.raises(TypeError, match=rf"^{what} must .*cnorm\.torch.*\.detach\(\)"):
            norm(*given)
    assert norm(t.detach()).shape == shape


@pytest.mark.parametrize("axis", [np.int64(-1), np.int8(1), np.uint8(1)])
def test_axis_of_a_numpy_integer(x, axis):
    np.testing.assert_array_equal(cnorm.layer_norm(x, axis=axis), cnorm.layer_norm(x))


@pytest.mark.parametrize(
    "eps", [-1e-5, -1, -1e-300, float("nan"), float("inf"), -float("inf"), np.float32("nan"), 10**400]
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_eps_of_another_value(x, eps, dtype):
    with raises(ValueError, "eps"):
        cnorm.layer_norm(x.astype(dtype), eps=eps)


def test_eps_beyond_the_type(x):
    assert not cnorm.layer_norm(x.astype(np.float64), eps=1e300).round(20).any()
    for norm in cnorm.layer_norm, cnorm.rms_norm:
        with pytest.raises(ValueError, match=r"^eps must be finite in float32, got 1e\+39$"):
            norm(x, eps=1e39)


@pytest.mark.parametrize("eps", [None, "1e-5", 1j, True, np.True_, [1e-5], (1e-5,), np.array([1e-5, 1e-5])])
def test_eps_of_another_type(x, eps):
    with raises(TypeError, "eps"):
        cnorm.layer_norm(x, eps=eps)


# out ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        [0.0] * N,
        "out",
        1.0,
        np.zeros((4, N), np.float64),
        np.zeros((4, N), np.int32),
        np.zeros((4, N), ">f4"),
        np.ma.zeros((4, N), np.float32),
    ],
    ids=["list", "str", "float", "float64", "int32", "big-endian", "masked"],
)
def test_out_of_another_type(x, bad):
    with raises(TypeError, "out"):
        cnorm.layer_norm(x, out=bad)


@pytest.mark.parametrize("shape", [(), (N,), (3, N), (5, N), (4, N + 1), (1, 4, N), (4 * N,), (N, 4)])
def test_out_of_another_shape(x, shape):
    with raises(ValueError, "out") as caught:
        cnorm.layer_norm(x, out=np.zeros(shape, np.float32))
    assert str(shape) in str(caught.value)
    assert str((4, N)) in str(caught.value)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_out_over_a_parameter_that_has_to_be_copied(x, dtype, name):
    """C reads a copy of strided or half-precision parameters, but out would still overwrite the caller's array."""
    room = np.arange(2 * N).astype(dtype)
    given = room[:N] if dtype == np.float16 else room[::2]
    before = room.copy()
    for call in cnorm.layer_norm, cnorm.rms_norm, lambda x, **given: cnorm.add_layer_norm(x, x, **given):
        if name == "bias" and call is cnorm.rms_norm:
            continue
        with raises(ValueError, f"out must not overlap {name}"):
            call(x[0].astype(dtype), **{name: given}, out=given)
    with raises(ValueError, "sum_out must not overlap weight"):
        cnorm.add_layer_norm(x[0].astype(dtype), x[1].astype(dtype), given, sum_out=given)
    assert room.tobytes() == before.tobytes()


def test_out_over_a_strided_parameter_of_the_other_norms(x):
    room = np.ones(2 * N, np.float32)
    given, stats = room[::2], cnorm.batch_norm(x, return_stats=True)[1]
    row, average = given[None], np.zeros(N, np.float32)
    for call, name in [
        (lambda: cnorm.group_norm(x[:1], 2, given, out=row), "weight"),
        (lambda: cnorm.batch_norm_inference(x[:1], given, average, out=row), "mean"),
        (lambda: cnorm.batch_norm_inference(x[:1], average, given, out=row), "var"),
        (lambda: cnorm.batch_norm_inference(x[:1], average, average, None, given, out=row), "bias"),
        (lambda: cnorm.batch_norm(x, given, running_mean=given, running_var=average), "weight"),
        (lambda: cnorm.batch_norm_backward(x, x, given, stats, out=(None, given, None)), "weight"),
        (lambda: cnorm.divisive_norm(x[:1], given, out=row), "weight"),
    ]:
        with raises(ValueError, f"must not overlap {name}"):
            call()
    assert (room == 1).all()


def test_rejects_uninitialised_stats(x):
    empty = cnorm.Stats.__new__(cnorm.Stats)
    for call in (
        lambda: cnorm.layer_norm_backward(x, x, None, empty),
        lambda: cnorm.rms_norm_backward(x, x, None, empty),
        lambda: cnorm.group_norm_backward(x, x, 1, None, empty),
        lambda: cnorm.batch_norm_backward(x, x, None, empty),
        lambda: cnorm.smoothing_gradient(x, x, None, empty, 0.1),
    ):
        with raises(RuntimeError, "Stats"):
            call()


def test_stats_are_indexed_like_their_mean(x):
    _, stats = cnorm.group_norm(x, 3, return_stats=True)
    for rows in (slice(1, 3), 2, (slice(None), 1), (..., 0), (..., slice(None, None, -1)), [0, 2]):
        part = stats[rows]
        np.testing.assert_array_equal(part.mean, stats.mean[rows])
        np.testing.assert_array_equal(part.inv_std_dev, stats.inv_std_dev[rows])
    with raises(IndexError, "rows"):
        stats[0, 0]
    make, (numbers,) = stats.__reduce__()
    with raises(ValueError, "stats"):
        cnorm.group_norm_backward(x, x, 3, None, make(numbers[..., :2]))


def test_accepts_x_that_only_supports_dlpack(x):
    class Foreign:
        def __dlpack__(self, **options):
            return x.__dlpack__(**options)

        def __dlpack_device__(self):
            return x.__dlpack_device__()

    assert cnorm.layer_norm(Foreign()).tobytes() == cnorm.layer_norm(x).tobytes()


class Boastful(np.ndarray):
    """An array that claims another shape than it has."""

    shape = property(lambda self: (4, N))


def test_out_of_a_subclass_that_claims_another_shape(x):
    out = np.zeros((2, N), np.float32).view(Boastful)
    with raises(ValueError, "out"):
        cnorm.layer_norm(x, out=out)
    assert not np.asarray(out).any()


def test_out_read_only(x):
    out = np.zeros_like(x)
    out.flags.writeable = False
    with raises(ValueError, "out"):
        cnorm.layer_norm(x, out=out)
    assert not out.any()


@pytest.mark.parametrize("strides", [(0, 4), (4 * N, 0), (0, 0), (4, 4)])
def test_out_whose_elements_overlap_each_other(x, strides):
    room = np.zeros(4 * N, np.float32)
    with raises(ValueError, "out"):
        cnorm.layer_norm(x, out=np.lib.stride_tricks.as_strided(room, (4, N), strides))
    assert not room.any()


@pytest.mark.parametrize(
    "shift",
    [
        lambda room: (room[:4], room[1:]),
        lambda room: (room[1:], room[:4]),
        lambda room: (room[:4], room[3::-1]),
        lambda room: (room[:4], room[:4, ::-1]),
        lambda room: (room.ravel()[: 4 * N].reshape(4, N), room.ravel()[1 : 4 * N + 1].reshape(4, N)),
        lambda room: (
            room.ravel()[: 4 * N].reshape(4, N),
            np.ndarray((4, N), np.float32, buffer=room, offset=2),  # by half an element
        ),
        lambda room: (room.ravel()[: 4 * N].reshape(4, N), room.ravel()[: 4 * N].reshape(N, 4).T),
    ],
    ids=[
        "a row later",
        "a row earlier",
        "rows reversed",
        "reversed",
        "an element later",
        "two bytes later",
        "transposed",
    ],
)
def test_out_partly_over_x(rng, shift):
    room = rng.standard_normal((5, N), np.float32)
    before = room.copy()
    x, out = shift(room)
    with raises(ValueError, "out"):
        cnorm.layer_norm(x, out=out)
    np.testing.assert_array_equal(room, before)


def test_out_between_the_rows_of_x(rng):
    """The rows of out and x are interleaved, but share no byte."""
    room = rng.standard_normal((8, N), np.float32)
    expected = cnorm.layer_norm(room[::2].copy())
    before = room[::2].copy()
    cnorm.layer_norm(room[::2], out=room[1::2])
    np.testing.assert_array_equal(room[1::2], expected)
    np.testing.assert_array_equal(room[::2], before)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_out_over_weight_or_bias(x, name):
    room = np.ones((5, N), np.float32)
    for parameter in room[0], room[2], room[3], room.ravel()[3 : 3 + N]:
        with raises(ValueError, "out"):
            cnorm.layer_norm(x, **{name: parameter}, out=room[:4])
    assert (room == 1).all()
    one_row = np.ones(N, np.float32)
    with raises(ValueError, "out"):
        cnorm.layer_norm(x[0], **{name: one_row}, out=one_row)


@pytest.mark.parametrize(
    "wrong",
    [
        {"weight": np.ones(N + 1, np.float32)},
        {"weight": np.ones(N, np.float64)},
        {"bias": np.ones(N - 1, np.float32)},
        {"eps": -1.0},
        {"axis": 5},
        {"axis": 0, "weight": np.ones(N, np.float32)},
    ],
)
def test_nothing_is_written_on_an_error(x, wrong):
    out = np.full_like(x, 7)
    with pytest.raises((TypeError, ValueError)):
        cnorm.layer_norm(x, **wrong, out=out)
    assert (out == 7).all()
    before = x.copy()
    with pytest.raises((TypeError, ValueError)):
        cnorm.layer_norm(x, **wrong, out=x)
    np.testing.assert_array_equal(x, before)


def test_arguments_after_bias_are_keywords(x, weight):
    with pytest.raises(TypeError):
        cnorm.layer_norm(x, weight, weight, 1e-5)
    with pytest.raises(TypeError):
        cnorm.layer_norm(x, normalized_shape=(N,))
    with pytest.raises(TypeError):
        cnorm.layer_norm()


# backward -------------------------------------------------------------------------------------------------


def test_dy_of_another_shape(x, weight, stats):
    for shape in (4, N - 1), (3, N), (N,), (1, 4, N), (4, 1):
        with raises(ValueError, "dy"):
            cnorm.layer_norm_backward(np.ones(shape, np.float32), x, weight, stats)


@pytest.mark.parametrize("bad", [None, [1.0], np.ones((4, N)), np.ones((4, N), int), np.ma.ones((4, N), np.float32)])
def test_dy_of_another_type(x, weight, stats, bad):
    with raises(TypeError, "dy"):
        cnorm.layer_norm_backward(bad, x, weight, stats)


@pytest.mark.parametrize("bad", [None, np.ones((4, N), int), np.ma.ones((4, N), np.float32)])
def test_backward_x_of_another_type(x, weight, stats, bad):
    with raises(TypeError, "x"):
        cnorm.layer_norm_backward(x, bad, weight, stats)


def test_backward_weight(x, stats):
    for shape in (N - 1,), (1, N), (4, N), (), (1,):
        with raises(ValueError, "weight"):
            cnorm.layer_norm_backward(x, x, np.ones(shape, np.float32), stats)
    for bad in np.ones(N), np.ones(N, int), (N,), 1.0:
        with raises(TypeError, "weight"):
            cnorm.layer_norm_backward(x, x, bad, stats)


def test_backward_axis(x, weight, stats):
    with raises(ValueError, "axis"):
        cnorm.layer_norm_backward(x, x, weight, stats, axis=2)
    with raises(TypeError, "axis"):
        cnorm.layer_norm_backward(x, x, weight, stats, axis=[1])
    empty = np.zeros((3, 0), np.float32)
    with raises(ValueError, "axis"):
        cnorm.layer_norm_backward(empty, empty, None, stats)


@pytest.mark.parametrize("bad", [None, (1, 2), "stats", np.ones((4, 1), np.float32)])
def test_stats_of_another_type(x, weight, bad):
    with raises(TypeError, "stats"):
        cnorm.layer_norm_backward(x, x, weight, bad)


def test_stats_of_another_input(x, weight, stats):
    for other in x[:3], x[0], x[None]:
        _, others = cnorm.layer_norm(other, return_stats=True)
        with raises(ValueError, "stats"):
            cnorm.layer_norm_backward(x, x, weight, others)
    with raises(ValueError, "stats"):
        cnorm.layer_norm_backward(x, x, np.ones_like(x), stats, axis=0)


def test_stats_of_another_precision(x, weight):
    _, stats = cnorm.layer_norm(x.astype(np.float64), return_stats=True)
    with raises(TypeError, "stats"):
        cnorm.layer_norm_backward(x, x, weight, stats)


def test_stats_from_bad_arrays():
    mean = np.zeros((4, 1), np.float32)
    with raises(TypeError, "mean"):
        cnorm.Stats(mean.astype(int), mean)
    with raises(TypeError, "inv_std_dev"):
        cnorm.Stats(mean, mean.astype(int))
    with raises(TypeError, "mean"):
        cnorm.Stats(None, mean)
    with raises(TypeError, "inv_std_dev"):
        cnorm.Stats(mean, mean.astype(np.float64))
    with raises(ValueError, "inv_std_dev"):
        cnorm.Stats(mean, mean[:3])
    with raises(ValueError, "inv_std_dev"):
        cnorm.Stats(mean, mean[:, 0])


@pytest.mark.parametrize(
    ("place", "bad", "error"),
    [
        (None, 5, TypeError),
        (None, np.zeros((4, N), np.float32), TypeError),
        (None, (np.zeros((4, N), np.float32),), (TypeError, ValueError)),
        (0, np.zeros((4, N)), TypeError),
        (0, [0.0], TypeError),
        (0, np.zeros((3, N), np.float32), ValueError),
        (0, np.broadcast_to(np.float32(0), (4, N)), ValueError),
        (1, np.zeros(N), TypeError),
        (1, np.zeros(N + 1, np.float32), ValueError),
        (1, np.zeros((1, N), np.float32), ValueError),
        (2, np.zeros(N, int), TypeError),
        (2, np.zeros((4, N), np.float32), ValueError),
    ],
)
def test_backward_out(x, weight, stats, place, bad, error):
    out = [np.zeros_like(x), np.zeros_like(weight), np.zeros_like(weight)]
    good = list(out)
    if place is not None:
        out[place] = bad
    with raises(error, "out"):
        cnorm.layer_norm_backward(x, x, weight, stats, out=bad if place is None else tuple(out))
    assert not any(array.any() for array in good)


def test_backward_out_with_shared_memory(x, weight, stats):
    dx, shared = np.zeros_like(x), np.zeros_like(weight)
    with raises(ValueError, "out"):
        cnorm.layer_norm_backward(x, x, weight, stats, out=(dx, shared, shared))
    with raises(ValueError, "out"):
        cnorm.layer_norm_backward(x, x, weight, stats, out=(dx, dx[1], shared))
    kept = weight.copy()
    with raises(ValueError, "out"):
        cnorm.layer_norm_backward(x, x, weight, stats, out=(dx, weight, shared))
    np.testing.assert_array_equal(weight, kept)
    assert not dx.any()
    assert not shared.any()


def test_backward_out_partly_over_an_input(rng, weight, stats):
    room = rng.standard_normal((5, N), np.float32)
    before = room.copy()
    dweight, dbias = np.zeros((2, N), np.float32)
    for dy, x in ((room[:4], before[:4]), (before[:4], room[:4])):
        with raises(ValueError, "out"):
            cnorm.layer_norm_backward(dy, x, weight, stats, out=(room[1:], dweight, dbias))
    np.testing.assert_array_equal(room, before)


@pytest.mark.parametrize("over", ["dy", "x"])
def test_backward_in_place(rng, weight, over):
    """dx exactly over dy or x: the right bits."""
    x, dy = rng.standard_normal((2, 70, N), np.float32)
    _, stats = cnorm.layer_norm(x, return_stats=True)
    expected = cnorm.layer_norm_backward(dy, x, weight, stats)
    target = dy if over == "dy" else x
    out = target, np.empty_like(weight), np.empty_like(weight)
    cnorm.layer_norm_backward(dy, x, weight, stats, out=out)
    for got, wanted in zip(out, expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


# messages and statistics from elsewhere ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda text, x: cnorm.layer_norm(np.zeros(2, [(text, "f4")])),
        lambda text, x: cnorm.layer_norm(x, eps=text),
        lambda text, x: cnorm.layer_norm(x, axis=text),
        lambda text, x: cnorm.group_norm(x, text),
        lambda text, x: cnorm.batch_norm(x, running_variance=text),
        lambda text, x: cnorm.batch_norm(x, momentum=[text]),
        lambda text, x: cnorm.use_isa(text),
        lambda text, x: cnorm.demo_model().stream().set_state({text: x}),
        lambda text, x: cnorm.demo_model().run(x, {text: x}),
    ],
)
def test_untrusted_text_in_a_message_is_bounded_and_printable(x, call):
    with pytest.raises((TypeError, ValueError)) as caught:
        call("\x1b[31m\n\x00" * 100_000, x)
    assert len(str(caught.value)) < 1200
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_stats_pickled_on_a_machine_of_another_byte_order(rng, dtype):
    x = rng.standard_normal((4, N)).astype(dtype)
    stats = cnorm.layer_norm(x, return_stats=True)[1]
    make, (data,) = stats.__reduce__()
    again = make(data.astype(data.dtype.newbyteorder()))
    assert again.mean.tobytes() == stats.mean.tobytes()
    dx, wanted = (cnorm.layer_norm_backward(x, x, None, given)[0] for given in (again, stats))
    assert dx.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("data", [np.zeros((4, 2), np.float32), np.zeros((4, 3), np.float16), [1.0, 2.0, 3.0]])
def test_stats_of_another_array_are_refused(data):
    make, _ = cnorm.layer_norm(np.ones((1, 2), np.float32), return_stats=True)[1].__reduce__()
    with pytest.raises((TypeError, ValueError), match="stats must hold an array"):
        make(data)


def test_statistics_of_an_x_of_as_many_dimensions_as_numpy_has():
    x = np.ones((1,) * 62 + (2, 3), np.float32)
    assert cnorm.layer_norm(x).shape == x.shape
    assert cnorm.layer_norm(x[0], return_stats=True)[1].data.ndim == 64
    with raises(ValueError, "x") as caught:
        cnorm.layer_norm(x, return_stats=True)
    assert str(caught.value).startswith("x must have at most 63 dimensions for return_stats, got 64")


def test_a_second_interpreter_is_told_to_use_threads_or_processes():
    script = """
import cnorm
try:
    import _interpreters as interpreters
    other = interpreters.create("legacy")
except ImportError:
    import _xxsubinterpreters as interpreters
    other = interpreters.create(isolated=False)
text = "try:\\n    import cnorm\\nexcept ImportError as error:\\n    print(error, flush=True)"
interpreters.run_string(other, text)
"""
    run = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True)
    if "cnorm" not in run.stdout:
        pytest.skip(f"no second interpreter imports NumPy here: {run.stdout}{run.stderr}"[:300])
    assert "one interpreter of a process only" in run.stdout
    assert "source folder" not in run.stdout


def test_a_bfloat16_tensor_is_refused_with_the_way_that_works():
    torch, ml_dtypes = pytest.importorskip("torch"), pytest.importorskip("ml_dtypes")
    x = torch.arange(24.0).reshape(3, 8).bfloat16()
    with pytest.raises(TypeError, match=r"pass x\.view\(torch\.uint16\)\.numpy\(\)\.view\(ml_dtypes\.bfloat16\)$"):
        cnorm.layer_norm(x)
    y = cnorm.layer_norm(x.view(torch.uint16).numpy().view(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(y, cnorm.layer_norm(x.float().numpy()).astype(y.dtype))
