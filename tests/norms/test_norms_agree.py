"""Batch, group, instance, weight and divisive norm give the same bits on every instruction set, at every alignment,
streaming or not. Their golden hashes are checked in C: tests/c/golden.c.
"""

import hashlib

import inputs
import numpy as np
import pytest

import cnorm

both_types = pytest.mark.parametrize("dtype", [np.float32, np.float64])


def numbers(count, dtype, seed):
    """In [-1, 1), from a linear congruential generator: the same on every machine and NumPy."""
    state = np.arange(seed, seed + count, dtype=np.uint64)
    for _ in range(3):
        state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        state ^= state >> np.uint64(29)
    return ((state >> np.uint64(40)).astype(np.float64) / 2.0**23 - 1).astype(dtype)


def volume(shape, dtype, seed):
    """Some channels are shifted, scaled or constant, so that every path of the kernels is taken."""
    x = numbers(int(np.prod(shape)), dtype, seed).reshape(shape)
    huge = dtype(2.0**100 if dtype == np.float32 else 2.0**700)
    for c in range(shape[1]):
        kind = c % 8
        if kind == 1:
            x[:, c] += dtype(3)
        elif kind == 3:
            x[:, c] += dtype(1e4)
        elif kind == 5:
            x[:, c] *= huge if c % 16 == 5 else 1 / huge
        elif kind == 7:
            x[:, c] = dtype(3.3)
    return x


def results(dtype, shapes):
    """The results of every function of the other norms on these shapes, by name."""
    found = {}
    for number, shape in enumerate(shapes):
        x, dy = volume(shape, dtype, 1 + number), numbers(int(np.prod(shape)), dtype, 77).reshape(shape)
        channels = shape[1]
        weight, bias, mean = numbers(3 * channels, dtype, 5).reshape(3, channels)
        var = weight * weight
        averages = np.zeros(channels, dtype), np.ones(channels, dtype)
        y, stats = cnorm.batch_norm(
            x, weight, bias, running_mean=averages[0], running_var=averages[1], return_stats=True
        )
        name = f"{shape} "
        found[name + "batch"] = [y, stats.mean, stats.inv_std_dev, *averages]
        found[name + "batch, eps 0"] = [cnorm.batch_norm(x, eps=0)]
        found[name + "batch, backward"] = cnorm.batch_norm_backward(dy, x, weight, stats)
        found[name + "inference"] = [cnorm.batch_norm_inference(x, mean, var, weight, bias)]
        found[name + "inference, backward"] = cnorm.batch_norm_inference_backward(dy, x, mean, var, weight)
        for groups in {1, 2 - channels % 2, channels}:
            y, stats = cnorm.group_norm(x, groups, weight, bias, return_stats=True)
            found[f"{name}group {groups}"] = [y, stats.mean, stats.inv_std_dev]
            backward = cnorm.group_norm_backward(dy, x, groups, weight, stats)
            found[f"{name}group {groups}, backward"] = backward
        first = numbers(shape[0], dtype, 9)
        found[name + "weight"] = [cnorm.weight_norm(x, first), cnorm.weight_norm(x)]
        found[name + "weight, backward"] = cnorm.weight_norm_backward(dy, x, first)
        last = numbers(2 * shape[-1], dtype, 11).reshape(2, -1)
        for fields in (None, None), (1, 2), (4, 0):
            options = {"sigma": 0.1, "mean_radius": fields[0], "radius": fields[1]}
            found[f"{name}divisive {fields}"] = [cnorm.divisive_norm(x, *last, **options)]
            backward = cnorm.divisive_norm_backward(dy, x, last[0], **options)
            found[f"{name}divisive {fields}, backward"] = [*backward[:3], np.float64(backward[3])]
        _, stats = cnorm.layer_norm(x, eps=0.01, return_stats=True)
        found[name + "smoothing"] = [np.float64(cnorm.smoothing_gradient(dy, x, last[0], stats, 0.1))]
    return found


def hashes(dtype, shapes):
    return {
        name: hashlib.sha256(b"".join(inputs.canonical_bytes(a) for a in arrays)).hexdigest()[:16]
        for name, arrays in results(dtype, shapes).items()
    }


SHAPES = [(m, n) for m, n in zip(range(2, 36), range(1, 69, 2), strict=True)]
SHAPES += [(3, 16), (70, 37), (5, 16, 9), (2, 3, 4, 5), (130, 70), (3, 4, 33), (2, 3, 8193), (9, 5, 2, 2), (4, 1025)]


@both_types
def test_isas_agree(dtype):
    before = cnorm.active_isa()
    found = {}
    try:
        for isa in cnorm.available_isas():
            cnorm.use_isa(isa)
            found[isa] = hashes(dtype, SHAPES)
    finally:
        cnorm.use_isa(before)
    for isa, of_isa in found.items():
        assert of_isa == found["baseline"], isa


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("shape", [(6, 300), (3, 300, 4)])
def test_eps_is_rounded_to_the_dtype(shape):
    """eps slightly above 1 rounds to 1 in float32; with many variances some result would show a missing rounding."""
    x, dy = (numbers(int(np.prod(shape)), np.float32, seed).reshape(shape) for seed in (1, 2))
    weight, mean = numbers(600, np.float32, 3).reshape(2, 300)
    found = []
    for eps in 1, 1 + 0.45 * float(np.finfo(np.float32).eps):
        _, stats = cnorm.group_norm(x, 100, weight, eps=eps, return_stats=True)
        _, batch = cnorm.batch_norm(x, weight, eps=eps, return_stats=True)
        y = cnorm.batch_norm_inference(x, mean, weight * weight, eps=eps)
        gradients = cnorm.batch_norm_inference_backward(dy, x, mean, weight * weight, weight, eps=eps)
        found.append([stats.inv_std_dev, batch.inv_std_dev, y, *gradients])
    for one, other in zip(*found, strict=True):
        assert one.tobytes() == other.tobytes()


@both_types
@pytest.mark.usefixtures("isa")
def test_any_alignment_gives_the_same_bits(dtype):
    for shape in (5, 37), (3, 6, 11):
        x = numbers(int(np.prod(shape)), dtype, 3).reshape(shape)
        weight = numbers(shape[1], dtype, 4)
        expected = [cnorm.batch_norm(x, weight), cnorm.group_norm(x, 1, weight), cnorm.weight_norm(x)]
        for offset in range(0, 64, dtype().itemsize):
            moved, room = inputs.at_byte_offset(x, offset), inputs.at_byte_offset(x, offset * 3 % 64)
            for norm, wanted in zip(
                (
                    lambda x, out, w=weight: cnorm.batch_norm(x, w, out=out),
                    lambda x, out, w=weight: cnorm.group_norm(x, 1, w, out=out),
                    lambda x, out: cnorm.weight_norm(x, out=out),
                ),
                expected,
                strict=True,
            ):
                assert norm(moved, room).tobytes() == wanted.tobytes()


@pytest.mark.exhaustive(one_in=9)
@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("shape", [(8192, 1031), (4, 2053, 1031), (4096, 1056)], ids=str)
def test_streaming_stores_give_the_same_bits(shape):
    """Outputs larger than the caches are written with non-temporal stores, whatever the alignment of the rows."""
    x, dy = numbers(2 * int(np.prod(shape)), np.float32, 3).reshape(2, *shape)
    weight, bias = numbers(2 * shape[1], np.float32, 4).reshape(2, -1)
    variance = weight * weight
    groups = (1, 3, 33) if shape[1] % 33 == 0 else (1,)  # 33 groups of 32 in a row
    room = inputs.at_byte_offset(x, 20)

    def check(norm, x):
        """norm(x, out) into a buffer, with non-temporal stores, and in place, with ordinary stores."""
        in_place = x.copy()
        streamed, *sums = norm(x, room)
        plain, *plain_sums = norm(in_place, in_place)
        assert np.shares_memory(streamed, room)
        assert np.shares_memory(plain, in_place)
        assert np.array_equal(in_place.view(np.uint32), room.view(np.uint32))
        for one, other in zip(sums, plain_sums, strict=True):
            assert np.array_equal(one.view(np.uint32), other.view(np.uint32))

    check(lambda x, out: (cnorm.batch_norm_inference(x, bias, variance, weight, bias, out=out),), x)
    check(lambda x, out: (cnorm.batch_norm(x, weight, bias, out=out),), x)
    _, stats = cnorm.batch_norm(x, weight, bias, return_stats=True)
    check(lambda dy, out: cnorm.batch_norm_backward(dy, x, weight, stats, out=(out, None, None)), dy)
    check(lambda dy, out: cnorm.batch_norm_inference_backward(dy, x, bias, variance, weight, out=(out, None, None)), dy)
    if len(shape) == 2:
        dy[7, :20] = np.copysign(np.float32(1e38), weight[:20])  # the sums of this group overflow
    for count in groups:
        check(lambda x, out, count=count: (cnorm.group_norm(x, count, weight, bias, out=out),), x)
        _, stats = cnorm.group_norm(x, count, weight, bias, return_stats=True)
        check(
            lambda dy, out, count=count, stats=stats: cnorm.group_norm_backward(
                dy, x, count, weight, stats, out=(out, None, None)
            ),
            dy,
        )
