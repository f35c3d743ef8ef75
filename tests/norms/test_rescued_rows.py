"""Rows whose sums leave the range of their type: computed in float64, within the same bounds, at any scale."""

import numpy as np
import pytest
import tolerances

import cnorm

NORMS = [(cnorm.layer_norm, cnorm.layer_norm_backward), (cnorm.rms_norm, cnorm.rms_norm_backward)]
U = tolerances.unit_roundoff(np.float64)


def normed(x):
    return cnorm.layer_norm(x, eps=0, return_stats=True)


@pytest.mark.parametrize("exponent", [600, -600])
def test_first_element_far_from_the_mean_keeps_the_others_precise(exponent):
    x = 0.7 * (1 + 1e-9 * np.random.default_rng(0).standard_normal(10_000))
    x[0] = 0.3
    ordinary, scaled = cnorm.layer_norm(x, eps=0), cnorm.layer_norm(x * 2.0**exponent, eps=0)
    assert (np.abs(scaled - ordinary) <= tolerances.xhat(ordinary, np.float64)).all()


def test_float64_path_gradient_sums_are_blocked():
    x = np.random.default_rng(0).standard_normal((1, 100_000)) * 2.0**600
    dy = np.full(x.shape, 0.1)  # the exact dx is 0
    dx = cnorm.layer_norm_backward(dy, x, None, normed(x)[1])[0]
    assert np.abs(dx).max() * 2.0**600 <= (16 + x.size / 512) * U * 0.1


@pytest.mark.parametrize(("dtype", "ordinary", "rescued"), [(np.float32, 20, 90), (np.float64, 200, 700)])
@pytest.mark.parametrize("n", [1, 7, 32, 257, 1000, 8193])
def test_scaling_by_a_power_of_two_changes_no_bit(dtype, ordinary, rescued, n):
    """At eps = 0, among rows that take the same path; dx is scaled by the inverse power."""
    rng = np.random.default_rng(n)
    x, dy = rng.standard_normal((2, 3, n)).astype(dtype)
    ones = np.ones(n, dtype)
    for low, high in [(-ordinary // 2, ordinary // 2), (rescued, rescued + 20)]:
        small, large = (np.ldexp(x, power).astype(dtype) for power in (low, high))
        for norm, backward in [
            (cnorm.layer_norm, cnorm.layer_norm_backward),
            (cnorm.rms_norm, cnorm.rms_norm_backward),
        ]:
            (y, stats), (y_large, stats_large) = (norm(rows, eps=0, return_stats=True) for rows in (small, large))
            assert y.tobytes() == y_large.tobytes()
            ours, theirs = backward(dy, small, ones, stats), backward(dy, large, ones, stats_large)
            normal = np.abs(theirs[0]) >= np.finfo(dtype).tiny
            assert np.array_equal(np.ldexp(ours[0], low - high)[normal], theirs[0][normal])
            assert ours[1].tobytes() == theirs[1].tobytes()


def family_norms():
    """(name, forward, backward) for x [4, 4, n]; backward takes (dy, x) and computes the statistics itself."""
    gain = np.ones(4)

    def pair(norm, backward, *arguments, **options):
        def forward(x):
            return norm(x, *arguments, eps=0, **options)

        def gradients(dy, x):
            ones = gain.astype(x.dtype)
            stats = norm(x, *arguments, eps=0, return_stats=True, **options)[1]
            return backward(dy, x, *arguments, ones, stats)

        return forward, gradients

    yield "group", *pair(cnorm.group_norm, cnorm.group_norm_backward, 2)
    yield "instance", *pair(cnorm.instance_norm, cnorm.instance_norm_backward)
    yield "batch", *pair(cnorm.batch_norm, cnorm.batch_norm_backward)
    yield "weight", cnorm.weight_norm, lambda dy, x: cnorm.weight_norm_backward(dy, x, gain.astype(x.dtype))


@pytest.mark.parametrize("powers", ["ordinary", "rescued, huge", "rescued, tiny"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [1, 2, 16, 33, 257])
def test_the_other_norms_scaled_by_a_power_of_two_change_no_bit(n, dtype, powers):
    """At eps = 0; dx is scaled by the inverse power."""
    ranges = {"ordinary": (20, 200), "rescued, huge": (90, 700), "rescued, tiny": (-90, -700)}
    middle = ranges[powers][dtype is np.float64]
    low, high = (-middle // 2, middle // 2) if powers == "ordinary" else (middle - 5, middle + 5)
    rng = np.random.default_rng(n)
    x, dy = rng.standard_normal((2, 4, 4, n)).astype(dtype)
    small, large = (np.ldexp(x, power).astype(dtype) for power in (low, high))
    for name, forward, backward in family_norms():
        assert forward(small).tobytes() == forward(large).tobytes(), name
        ours, theirs = backward(dy, small), backward(dy, large)
        wanted = np.ldexp(ours[0], low - high)
        normal = (np.abs(theirs[0]) >= np.finfo(dtype).tiny) & np.isfinite(wanted)
        assert np.array_equal(wanted[normal], theirs[0][normal]), name
        for of_small, of_large in zip(ours[1:], theirs[1:], strict=True):
            assert of_small.tobytes() == of_large.tobytes(), name
