"""Error bounds of the kernels against the oracle. No bound is measured; each has its derivation.

u is the unit roundoff of the kernel's type. Arguments are the oracle's wide arrays, shaped [rows, n]
(or anything that broadcasts to it); a bound has the shape of the result that it bounds.
"""

import math

import numpy as np

# The numerics contract: |error of xhat| <= CONTRACT * max(1, |xhat|). For float64 the same roundings,
# each 2^-29 times as large.
CONTRACT = {np.dtype(np.float32): 1e-6, np.dtype(np.float64): 1e-6 * 2.0**-29}
LANES = {np.dtype(np.float32): 32, np.dtype(np.float64): 16}
FOLD = 8192  # elements after which the lanes are folded into float64
LANE_BLOCK = 16  # additions into a lane before they are added to its total
BLOCK = 64  # rows summed one after another for dweight and dbias


def unit_roundoff(dtype):
    return float(np.finfo(dtype).eps) / 2


def smallest(dtype):
    return np.finfo(dtype).smallest_subnormal.astype(np.longdouble)


def xhat(xhat, dtype):
    """The contract's own bound, for gain 1 and bias 0."""
    return CONTRACT[np.dtype(dtype)] * np.maximum(1, np.abs(xhat))


def forward(xhat_, dtype, weight=1, bias=0):
    """The error of xhat times the gain, a rounding of product and sum each, and a subnormal unit for both."""
    product = np.abs(xhat_ * weight)
    total = np.abs(xhat_ * weight + bias)
    u = unit_roundoff(dtype)
    return xhat(xhat_, dtype) * np.abs(weight) + u * product + u * total + 2 * smallest(dtype)


def any_row(xhat_, dtype):
    """Any values, with g the summation's relative error and |mean| <= std (other rows are shifted first):

    sum|x| / n <= sqrt(2) std, so the mean is off by 1.42 g std; sum(x^2) / n <= 2 var, so var is off by
    2 g var + 2 |mean| 1.42 g std, and rstd by 2.42 g. Four roundings of xhat follow.
    """
    g = row_sum(np.shape(xhat_)[-1], dtype) + 2 * unit_roundoff(dtype)
    return g * (1.42 + 2.42 * np.abs(xhat_)) + 4 * unit_roundoff(dtype) * np.maximum(1, np.abs(xhat_))


def rescued(y):
    """A float32 row computed in float64 and rounded once: half a unit in the last place, 6e-8 for |y| < 2."""
    return 6e-8 * np.maximum(1, np.abs(y))


def half(exact, dtype):
    """float16 or bfloat16: the contract of float32, then half a unit in the last place of the value so bounded.

    From |y| = 2^-8 on that is less than one unit of y: the contract's 1e-6 is half a unit of float16 there.
    """
    off = CONTRACT[np.dtype(np.float32)] * np.maximum(1, np.abs(exact))
    return off + np.spacing((np.abs(exact) + off).astype(dtype)).astype(np.float64) / 2


def mean(mean_, rstd, dtype):
    """An error of the mean moves xhat by rstd times itself, which the contract bounds; then one rounding."""
    std = np.where(rstd > 0, 1 / np.where(rstd > 0, rstd, 1), 0)
    return CONTRACT[np.dtype(dtype)] * std + unit_roundoff(dtype) * np.abs(mean_) + smallest(dtype)


def inv_std_dev(rstd, dtype):
    """A relative error of rstd is one of xhat, which the contract bounds; then one rounding."""
    return (CONTRACT[np.dtype(dtype)] + unit_roundoff(dtype)) * rstd + smallest(dtype)


def dx(dy, xhat_, rstd, dtype, weight=1, sums=None, from_xhat=None):
    """dx = rstd * (g - mean(g) - xhat * mean(g * xhat)): errors of means, xhat and rstd, four roundings.

    sums: the relative error of a sum, where it is not one over a row. from_xhat: the error of xhat, as any_row
    has it, where it is not the contract's; that of rstd is then 2.42 g.
    """
    g = np.abs(dy * weight)
    u, of_rstd = unit_roundoff(dtype), CONTRACT[np.dtype(dtype)]
    if from_xhat is None:
        from_xhat = xhat(xhat_, dtype)
    else:
        of_rstd = 2.42 * (row_sum(g.shape[-1], dtype) + 2 * u)
    mean_g = g.mean(-1, keepdims=True)
    mean_gx = (g * np.abs(xhat_)).mean(-1, keepdims=True)
    sums = row_sum(g.shape[-1], dtype) if sums is None else sums
    error_mean_g = (sums + u) * mean_g
    error_mean_gx = (sums + 2 * u) * mean_gx + (g * from_xhat).mean(-1, keepdims=True)
    terms = g + mean_g + np.abs(xhat_) * mean_gx
    inside = error_mean_g + np.abs(xhat_) * error_mean_gx + from_xhat * mean_gx
    subnormal = 3 * smallest(dtype) * (1 + np.abs(xhat_))  # subnormals, which u does not cover: g, means, products
    return rstd * (inside + subnormal + (of_rstd + 4 * u) * terms) + 2 * smallest(dtype)


def dweight(dy, xhat_, dtype, from_xhat=None):
    """Sum over rows of dy * xhat: the error of each xhat, a rounding of each product, and the summation's."""
    products = np.abs(dy * xhat_).sum(axis=0)
    from_xhat = (np.abs(dy) * (xhat(xhat_, dtype) if from_xhat is None else from_xhat)).sum(axis=0)
    return from_xhat + (unit_roundoff(dtype) + column_sum(len(dy), dtype)) * products + len(dy) * smallest(dtype)


def dbias(dy, dtype):
    """Sum over rows of dy: the summation's error alone."""
    return column_sum(len(dy), dtype) * np.abs(dy).sum(axis=0)


def channel_sum(x, dtype):
    """A sum over a channel of x [samples, channels, ...]: 64 rows one after another, or runs of space."""
    space = math.prod(x.shape[2:])
    terms = len(x) * unit_roundoff(np.float64)
    return terms + (min(len(x), BLOCK) * unit_roundoff(dtype) if space == 1 else row_sum(space, dtype))


def batch_xhat(xhat_, x, dtype):
    """Any channel whose mean is shifted to within a standard deviation: see any_row."""
    g = channel_sum(x, dtype) + 2 * unit_roundoff(dtype)
    return g * (1.42 + 2.42 * np.abs(xhat_)) + 4 * unit_roundoff(dtype) * np.maximum(1, np.abs(xhat_))


def affine(xhat_, from_xhat, dtype, weight=1, bias=0):
    """The error of xhat times the gain, two roundings of the product, one of the sum, and subnormal units."""
    u = unit_roundoff(dtype)
    product, total = np.abs(xhat_ * weight), np.abs(xhat_ * weight + bias)
    return from_xhat * np.abs(weight) + 2 * u * product + u * total + 2 * smallest(dtype)


def assert_within(actual, expected, bound, what="y"):
    """Every element within its bound; the message shows the worst one. NaN is never within."""
    assert actual.shape == expected.shape, f"{what} has shape {actual.shape}, wanted {expected.shape}"
    if actual.size == 0:
        return
    bound = np.broadcast_to(bound, expected.shape)
    with np.errstate(invalid="ignore"):
        error = np.abs(actual.astype(np.longdouble) - expected)
        ratio = np.where(np.isnan(error), np.inf, error / bound)
    at = np.unravel_index(np.argmax(ratio), ratio.shape)
    assert ratio[at] <= 1, (
        f"{what}{[int(i) for i in at]} = {actual[at]!r}, wanted {expected[at]!r}: "
        f"off by {float(error[at]):.3g}, allowed {float(bound[at]):.3g} "
        f"({np.count_nonzero(ratio > 1)} of {ratio.size} elements are out of bounds)"
    )


def ulps(actual, exact):
    """Distance of float32 results from exact ones in units in the last place of the exact result."""
    ulp = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    return np.abs(actual.astype(np.float64) - exact) / ulp


def row_sum(n, dtype):
    """The roundings of one element: a block of its lane, the blocks, the halving tree, and a float64 chain of folds."""
    lanes = LANES[np.dtype(dtype)]
    additions = math.ceil(min(n, FOLD) / lanes)
    chain = min(additions, LANE_BLOCK) + math.ceil(additions / LANE_BLOCK) + math.log2(lanes)
    return chain * unit_roundoff(dtype) + math.ceil(n / FOLD) * unit_roundoff(np.float64)


def column_sum(rows, dtype):
    """The roundings of one row: the chain within its block and the tree over the blocks."""
    return (min(rows, BLOCK) + math.ceil(math.log2(max(1, rows / BLOCK)))) * unit_roundoff(dtype)
