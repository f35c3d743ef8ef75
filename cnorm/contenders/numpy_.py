"""NumPy, written with care: two passes, no temporary as large as x."""

import numpy as np

from cnorm.contenders.timing import Contender

LABEL = "NumPy"
PACKAGES = ()


def layer_norm(x, weight, bias):
    names = {"layer_norm": _layer_norm, "x": x, "weight": weight, "bias": bias, "y": np.empty_like(x)}
    return [Contender("NumPy", "layer_norm(x, weight, bias, y)", names)]


def layer_norm_backward(dy, x, weight, bias):
    mean = x.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt(x.var(-1, keepdims=True) + x.dtype.type(1e-5))
    names = {
        "dy": dy,
        "x": x,
        "weight": weight,
        "mean": mean,
        "rstd": rstd,
        "dx": np.empty_like(x),
        "xhat": np.empty_like(x),
    }
    names["layer_norm_backward"] = _layer_norm_backward
    return [Contender("NumPy", "layer_norm_backward(dy, x, weight, mean, rstd, dx, xhat)", names)]


def _layer_norm(x, weight, bias, y):
    np.subtract(x, x.mean(-1, keepdims=True), out=y)
    variance = np.einsum("ij,ij->i", y, y) / x.dtype.type(x.shape[-1])
    y *= (1 / np.sqrt(variance + x.dtype.type(1e-5)))[:, np.newaxis]
    y *= weight
    y += bias
    return y


def _layer_norm_backward(dy, x, weight, mean, rstd, dx, xhat):
    n = x.dtype.type(x.shape[-1])
    np.subtract(x, mean, out=xhat)
    xhat *= rstd
    dbias = dy.sum(0)
    dweight = np.einsum("ij,ij->j", dy, xhat)
    np.multiply(dy, weight, out=dx)
    of_g = dx.mean(-1, keepdims=True)
    of_g_xhat = np.einsum("ij,ij->i", dx, xhat)[:, np.newaxis] / n
    dx -= of_g
    xhat *= of_g_xhat
    dx -= xhat
    dx *= rstd
    return dx, dweight, dbias
