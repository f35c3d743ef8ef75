"""numba: the fastest kernel that a NumPy user can easily write; it is numerically unsafe.

It sums x and x^2 in one sweep under fastmath and takes E[x^2] - E[x]^2 for the variance: the least memory traffic, and
wrong results, by cancellation, for rows whose mean is large against their deviation. numba has no float16 or bfloat16.
"""

from functools import cache

import numpy as np

from cnorm_bench.contenders.timing import Contender, empty_like

LABEL = "numba"
PACKAGES = ("numba",)


def layer_norm(x, weight, bias):
    return _contender("layer_norm(x, weight, bias, y)", _layer_norm, x=x, weight=weight, bias=bias, y=empty_like(x))


def layer_norm_backward(dy, x, weight, bias):
    mean = x.mean(-1, dtype=np.float64).astype(x.dtype)
    rstd = (1 / np.sqrt(x.var(-1, dtype=np.float64) + 1e-5)).astype(x.dtype)
    out = {"dx": empty_like(x), "dweight": np.empty_like(weight), "dbias": np.empty_like(bias)}
    statement = "layer_norm_backward(dy, x, weight, stats, dx, dweight, dbias)"
    return _contender(statement, _layer_norm_backward, dy=dy, x=x, weight=weight, stats=(mean, rstd), **out)


def rms_norm(x, weight):
    return _contender("rms_norm(x, weight, y)", _rms_norm, x=x, weight=weight, y=empty_like(x))


def add_layer_norm(x, residual, weight, bias):
    out = {"y": empty_like(x), "total": empty_like(x)}
    statement = "add_layer_norm(x, residual, weight, bias, y, total)"
    return _contender(statement, _add_layer_norm, x=x, residual=residual, weight=weight, bias=bias, **out)


def _contender(statement, function, **names):
    if names["x"].dtype != np.float32:
        return []
    return [Contender("numba", statement, names | {statement.partition("(")[0]: _compiled(function)})]


@cache
def _compiled(function):
    from numba import njit

    return njit(fastmath=True)(function)


def _layer_norm(x, weight, bias, y):
    rows, n = x.shape
    for i in range(rows):
        total = square = np.float32(0)
        for j in range(n):
            total += x[i, j]
            square += x[i, j] * x[i, j]
        mean = total / np.float32(n)
        rstd = np.float32(1) / np.sqrt(square / np.float32(n) - mean * mean + np.float32(1e-5))
        for j in range(n):
            y[i, j] = (x[i, j] - mean) * rstd * weight[j] + bias[j]
    return y


def _layer_norm_backward(dy, x, weight, stats, dx, dweight, dbias):
    mean, rstd = stats
    rows, n = x.shape
    dweight[:] = 0
    dbias[:] = 0
    for i in range(rows):
        of_g = of_g_xhat = np.float32(0)
        for j in range(n):
            xhat = (x[i, j] - mean[i]) * rstd[i]
            g = dy[i, j] * weight[j]
            of_g += g
            of_g_xhat += g * xhat
            dweight[j] += dy[i, j] * xhat
            dbias[j] += dy[i, j]
        of_g /= np.float32(n)
        of_g_xhat /= np.float32(n)
        for j in range(n):
            xhat = (x[i, j] - mean[i]) * rstd[i]
            dx[i, j] = rstd[i] * (dy[i, j] * weight[j] - of_g - xhat * of_g_xhat)
    return dx, dweight, dbias


def _rms_norm(x, weight, y):
    rows, n = x.shape
    for i in range(rows):
        square = np.float32(0)
        for j in range(n):
            square += x[i, j] * x[i, j]
        rstd = np.float32(1) / np.sqrt(square / np.float32(n) + np.float32(1e-5))
        for j in range(n):
            y[i, j] = x[i, j] * rstd * weight[j]
    return y


def _add_layer_norm(x, residual, weight, bias, y, total):
    rows, n = x.shape
    for i in range(rows):
        plain = square = np.float32(0)
        for j in range(n):
            value = x[i, j] + residual[i, j]
            total[i, j] = value
            plain += value
            square += value * value
        mean = plain / np.float32(n)
        rstd = np.float32(1) / np.sqrt(square / np.float32(n) - mean * mean + np.float32(1e-5))
        for j in range(n):
            y[i, j] = (total[i, j] - mean) * rstd * weight[j] + bias[j]
    return y, total
