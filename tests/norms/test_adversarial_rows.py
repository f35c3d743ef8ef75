"""float64 rows made to lose digits, forward and backward, against an oracle in longdouble.

A few thousand rows by default; CNORM_ADVERSARIAL_ROWS=1000000 (`make adversarial`) is the measurement of
docs/numerics.md.
"""

import os

import numpy as np
import pytest
import reference
import tolerances

import cnorm

ROWS = int(os.environ.get("CNORM_ADVERSARIAL_ROWS", 2000))
U = tolerances.unit_roundoff(np.float64)
LARGEST = np.finfo(np.float64).max
FAMILIES = {}


def family(make):
    FAMILIES[make.__name__] = make
    return make


def any_scale(rng, rows):
    """A power of two [rows, 1] from the whole range of float64."""
    return np.ldexp(1.0, rng.integers(-1020, 1020, (rows, 1)))


@family
def outlier_first(rng, rows, n):
    x = 0.7 * (1 + 10.0 ** -rng.integers(0, 15, (rows, 1)) * rng.standard_normal((rows, n)))
    x[:, 0] = rng.choice([0.3, -0.7, 1e3, 1e-9], rows)
    return x * (any_scale(rng, rows) / 2**12)


@family
def huge_offset(rng, rows, n):
    offset = 10.0 ** rng.integers(0, 16, (rows, 1))
    return (rng.standard_normal((rows, n)) + offset) * np.ldexp(1.0, rng.integers(-900, 900, (rows, 1)))


@family
def any_magnitude_of_a_row(rng, rows, n):
    return rng.standard_normal((rows, n)) * (any_scale(rng, rows) / 8)


@family
def magnitudes_mixed_in_a_row(rng, rows, n):
    return rng.choice([-1.0, 1.0], (rows, n)) * 10.0 ** rng.uniform(-308, 308, (rows, n))


@family
def subnormals(rng, rows, n):
    return rng.integers(-(2**20), 2**20, (rows, n)) * 5e-324


@family
def cancelling_pairs(rng, rows, n):
    x = rng.standard_normal((rows, n)) * 10.0 ** rng.uniform(-8, 8, (rows, n))
    half = n // 2
    x[:, half : 2 * half] = -x[:, :half] * (1 + 1e-13 * rng.standard_normal((rows, half)))
    return x * (any_scale(rng, rows) / 2**34)


@family
def alternating_signs(rng, rows, n):
    return (1 + 1e-12 * rng.standard_normal((rows, n))) * (-1.0) ** np.arange(n) * (any_scale(rng, rows) / 2)


@family
def powers_of_two(rng, rows, n):
    spread = rng.integers(1, 60, (rows, 1))
    powers = np.ldexp(rng.choice([-1.0, 1.0], (rows, n)), rng.integers(0, spread, (rows, n)))
    return powers * np.ldexp(1.0, rng.integers(-1020, 960, (rows, 1)))


@family
def constant_but_for_one_ulp(rng, rows, n):
    value = rng.uniform(1, 2, (rows, 1)) * any_scale(rng, rows) / 4
    return np.where(rng.random((rows, n)) < rng.choice([0.02, 0.5]), np.nextafter(value, np.inf), value)


@family
def roundings_one_way(rng, rows, n):
    """Each addition into a lane rounds up by almost half a unit: 1 + u (1 + 2^-10), and so on."""
    first = np.arange(n) < 16
    x = np.where(first, (-1.0) ** np.arange(n), U * (1 + 2.0**-10) * 2.0 ** rng.integers(0, 3, (rows, 1)))
    return x * (any_scale(rng, rows) / 2)


@family
def skewed(rng, rows, n):
    return np.exp(rng.uniform(1, 20, (rows, 1)) * rng.standard_normal((rows, n))) * 2.0 ** rng.integers(
        -800, 800, (rows, 1)
    )


def oracle(x, eps):
    """xhat [rows, n] and rstd [rows, 1]; x - x[0] comes first, so that a large mean costs no digits."""
    d = reference.wide(x) - reference.wide(x[:, :1])
    d -= d.mean(-1, keepdims=True)
    d -= d.mean(-1, keepdims=True)
    var = (d * d).mean(-1, keepdims=True) + np.longdouble(eps)
    rstd = np.where(var > 0, 1 / np.sqrt(np.where(var > 0, var, 1)), 0)
    return d * rstd, rstd


def worst(actual, expected, bound):
    """The largest error in units of the bound. A result beyond float64 must be infinite, or just in range."""
    with np.errstate(all="ignore"):
        error = np.abs(actual.astype(np.longdouble) - expected)
        out = np.abs(expected) + bound > LARGEST
        sign = (np.sign(actual) == np.sign(expected)) | (np.abs(expected) <= bound)
        ratio = np.where(out & (np.abs(actual) > LARGEST / 2) & sign, 0, error / bound)
    return np.where(np.isnan(ratio), np.inf, ratio).max(initial=0)


def check(rng, make, rows):
    """The worst forward and backward error of a batch, in units of the bound."""
    n = int(rng.choice([2, 3, 7, 16, 17, 33, 64, 100, 257]))
    x = make(rng, rows, n)
    eps = float(rng.choice([0, 1e-5, 1e-300]))
    dy = rng.standard_normal((rows, n)) + rng.choice([0, 10])
    gain, bias = 1 + 0.3 * rng.standard_normal(n), rng.standard_normal(n)
    y, stats = cnorm.layer_norm(x, gain, bias, eps=eps, return_stats=True)
    dx, dgain, dbias = cnorm.layer_norm_backward(dy, x, gain, stats)
    xhat, rstd = oracle(x, eps)
    from_xhat = tolerances.any_row(xhat, np.float64)
    forward = worst(y, xhat * gain + bias, tolerances.affine(xhat, from_xhat, np.float64, gain, bias))
    g = reference.wide(dy) * gain
    expected = rstd * (g - g.mean(-1, keepdims=True) - xhat * (g * xhat).mean(-1, keepdims=True))
    backward = worst(dx, expected, tolerances.dx(dy, xhat, rstd, np.float64, gain, from_xhat=from_xhat))
    terms = tolerances.dweight(dy, xhat, np.float64, from_xhat)
    of_gain = worst(dgain, (reference.wide(dy) * xhat).sum(0), terms)
    of_bias = worst(dbias, reference.wide(dy).sum(0), tolerances.dbias(dy, np.float64))
    return forward, max(backward, of_gain, of_bias)


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_made_to_lose_digits(name):
    rng = np.random.default_rng(list(FAMILIES).index(name))
    each = -(-ROWS // len(FAMILIES))
    found = [check(rng, FAMILIES[name], min(500, each - done)) for done in range(0, each, 500)]
    forward, backward = np.max(found, axis=0)
    print(f"{name}: {each} rows, {forward:.3f} forward, {backward:.3f} backward, in units of the bound")
    assert forward <= 1
    assert backward <= 1
