"""Every instruction set gives the same bits: compared byte for byte, with every NaN canonicalised."""

import inputs
import ml_dtypes
import numpy as np
import pytest

import cnorm
from cnorm import _core

both_types = pytest.mark.parametrize("dtype", [np.float32, np.float64])


def assert_isas_agree(compute, *arguments):
    """compute(*arguments) -> a mapping of names to arrays, run once on each instruction set."""
    before = cnorm.active_isa()
    results = {}
    try:
        for isa in cnorm.available_isas():
            cnorm.use_isa(isa)
            assert cnorm.active_isa() == isa
            results[isa] = compute(*arguments)
    finally:
        cnorm.use_isa(before)
    first, *others = results
    for isa in others:
        for name, expected in results[first].items():
            got = results[isa][name]
            if inputs.canonical_bytes(got) != inputs.canonical_bytes(expected):
                unequal = np.argwhere((got != expected) & ~(np.isnan(got) & np.isnan(expected)))
                pytest.fail(f"{name}: {isa} and {first} differ in {len(unequal)} elements, first {unequal[:5]}")


def test_baseline_and_active_isa_are_available():
    assert "baseline" in cnorm.available_isas()
    assert cnorm.active_isa() in cnorm.available_isas()


def forward_and_backward(x, dy, weight, bias, eps):
    y, stats = cnorm.layer_norm(x, weight, bias, eps=eps, return_stats=True)
    dx, dweight, dbias = cnorm.layer_norm_backward(dy, x, weight, stats)
    plain_dx, _, _ = cnorm.layer_norm_backward(dy, x, None, stats)
    return {
        "y": y,
        "y without gain": cnorm.layer_norm(x, None, bias, eps=eps),
        "y without bias": cnorm.layer_norm(x, weight, eps=eps),
        "xhat": cnorm.layer_norm(x, eps=eps),
        "mean": stats.mean,
        "inv_std_dev": stats.inv_std_dev,
        "dx": dx,
        "dx without gain": plain_dx,
        "dweight": dweight,
        "dbias": dbias,
    }


def forward(x):
    return {"y": cnorm.layer_norm(x), "y with eps 0": cnorm.layer_norm(x, eps=0)}


def backward(dy, x, weight, stats):
    return {"dx": cnorm.layer_norm_backward(dy, x, weight, stats)[0]}


@both_types
def test_ordinary_rows_of_every_length(rng, dtype):
    for n in inputs.LENGTHS:
        x = (np.array([[0], [1], [4], [30], [1e4]]) + rng.standard_normal((5, n))).astype(dtype)
        dy = rng.standard_normal((5, n)).astype(dtype)
        weight, bias = inputs.random_affine(rng, n, dtype)
        assert_isas_agree(forward_and_backward, x, dy, weight, bias, 1e-5)


@both_types
@pytest.mark.parametrize("eps", [0, 1e-5])
def test_every_kind_of_row(rng, dtype, eps):
    for n in [*range(1, 71), 100, 1000, 8193]:
        x = inputs.difficult_rows(rng, n, dtype)
        for i, bad in enumerate([np.nan, np.inf, -np.inf]):
            spoilt = x[i : i + 1].copy()
            spoilt[0, n // 2] = bad
            x = np.concatenate([x, spoilt])
        dy = rng.standard_normal(x.shape).astype(dtype)
        weight, bias = inputs.random_affine(rng, n, dtype)
        assert_isas_agree(forward_and_backward, x, dy, weight, bias, eps)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("eps", [0, 1e-5])
def test_every_kind_of_half_row(rng, dtype, eps):
    for n in [*range(1, 71), 100, 512, 767, 1000, 8193]:
        with np.errstate(over="ignore"):
            x = inputs.difficult_rows(rng, n, np.float32).astype(dtype)
        weight, bias = inputs.random_affine(rng, n, np.float32)
        assert_isas_agree(forward_and_backward, x, x[::-1], weight, bias, eps)


@both_types
def test_mean_over_std_around_the_acceptance_tests(rng, dtype):
    """Rows on both sides of each acceptance test: every instruction set must take the same decision."""
    ratio = np.concatenate([np.linspace(0.9, 1.1, 400), np.geomspace(1e-3, 1e9, 400)])
    for n in 48, 1000:
        x = (rng.standard_normal((800, n)) + ratio[:, None]).astype(dtype)
        assert_isas_agree(forward, x)
        scale = 2.0 ** np.linspace(-80, 80, 800)[:, None]
        x = (rng.standard_normal((800, n)) * scale).astype(dtype)
        assert_isas_agree(forward, x)


@both_types
def test_every_number_of_rows(rng, dtype):
    for rows in [*range(1, 10), 63, 64, 65, 127, 128, 129, 193, 449, 1000]:
        x, dy = rng.standard_normal((2, rows, 37)).astype(dtype)
        weight, bias = inputs.random_affine(rng, 37, dtype)
        assert_isas_agree(forward_and_backward, x, dy, weight, bias, 1e-5)


def test_a_large_batch(rng):
    x, dy = rng.standard_normal((2, 8192, 512), np.float32)
    weight, bias = inputs.random_affine(rng, 512, np.float32)
    assert_isas_agree(forward_and_backward, x, dy, weight, bias, 1e-5)


def test_any_bit_pattern(rng):
    """Rows of random bits: every exponent, NaN and Inf among them."""
    for n in 1, 2, 3, 8:
        x, dy = rng.integers(0, 2**32, (2, 5000, n), np.uint32).view(np.float32)
        weight, _ = inputs.random_affine(rng, n, np.float32)
        assert_isas_agree(forward, x)
        _, stats = cnorm.layer_norm(x, return_stats=True)
        assert_isas_agree(backward, dy, x, weight, stats)


@pytest.mark.parametrize("name", ["sigmoid", "tanh"])
def test_activations(rng, name):
    function = getattr(_core, name)
    x = rng.integers(0, 2**32, 2**20 + 13, np.uint32).view(np.float32)
    assert_isas_agree(lambda: {"any": function(x), **{str(n): function(x[:n]) for n in range(70)}})
    x = rng.uniform(-20, 20, 2**20).astype(np.float32)
    assert_isas_agree(lambda: {"usual": function(x)})
