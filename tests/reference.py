"""The oracle: the project's mathematics a second time, written plainly in a wider type.

float32 and narrower arrays are computed in float64; float64 arrays in ``np.longdouble`` (80 or 128 bits), so
that float64 kernels have a judge better than themselves. Both wide types hold the square of every input, so
nothing here needs scaling, and results are returned in the wide type. Equation numbers are those of Ba, Kiros
and Hinton, "Layer Normalization", arXiv:1607.06450.
"""

import math

import numpy as np

if np.finfo(np.longdouble).nmant < 63:
    raise RuntimeError("the oracle judges float64 with np.longdouble, which is no wider than float64 on this platform")


def wide(array):
    """The array in the type the oracle computes in."""
    array = np.asarray(array)
    return array.astype(np.longdouble if array.dtype == np.float64 else np.float64)


def layer_norm(x, weight=None, bias=None, eps=1e-5, axis=-1):
    """y [like x], mean and rstd [x.shape[:axis] + (1, ...)]; everything from `axis` on is one row (Eq. 3, 4).

    A row with var + eps = 0 has xhat = 0 and rstd = 0. A row with NaN or Inf is NaN.
    """
    rows = _as_rows(x, axis)
    xhat, mean, rstd = _normalise(rows, _rounded_eps(eps, x))
    y = _affine(xhat.reshape(np.shape(x)), weight, bias)
    stats_shape = _stats_shape(x, axis)
    return y, mean.reshape(stats_shape), rstd.reshape(stats_shape)


def layer_norm_backward(dy, x, weight=None, eps=1e-5, axis=-1):
    """dx [like x], dweight and dbias [x.shape[axis:]] of sum(dy * y)."""
    xhat, _, rstd = _normalise(_as_rows(x, axis), _rounded_eps(eps, x))
    dy_rows = _as_rows(dy, axis)
    g = dy_rows if weight is None else dy_rows * wide(weight).ravel()
    with np.errstate(all="ignore"):
        dx = rstd * (g - _mean(g) - xhat * _mean(g * xhat))
        dweight = (dy_rows * xhat).sum(axis=0)
        dbias = dy_rows.sum(axis=0)
    row_shape = np.shape(x)[axis:]
    return dx.reshape(np.shape(x)), dweight.reshape(row_shape), dbias.reshape(row_shape)


def rms_norm(x, weight=None, eps=1e-5, axis=-1):
    """y [like x] and rstd [x.shape[:axis] + (1, ...)]: x / sqrt(mean(x^2) + eps) * weight."""
    rows = _as_rows(x, axis)
    rstd = _reciprocal_root(_mean(rows * rows), _rounded_eps(eps, x))
    y = _affine((rows * rstd).reshape(np.shape(x)), weight, None)
    return y, rstd.reshape(_stats_shape(x, axis))


def rms_norm_backward(dy, x, weight=None, eps=1e-5, axis=-1):
    """dx [like x] and dweight [x.shape[axis:]] of sum(dy * y)."""
    rows, dy_rows = _as_rows(x, axis), _as_rows(dy, axis)
    rstd = _reciprocal_root(_mean(rows * rows), _rounded_eps(eps, x))
    xhat = rows * rstd
    g = dy_rows if weight is None else dy_rows * wide(weight).ravel()
    dx = rstd * (g - xhat * _mean(g * xhat))
    dweight = (dy_rows * xhat).sum(axis=0)
    return dx.reshape(np.shape(x)), dweight.reshape(np.shape(x)[axis:])


def sigmoid(x):
    """1 / (1 + exp(-x)), in the form that cannot overflow."""
    x = wide(x)
    with np.errstate(under="ignore"):
        e = np.exp(-np.abs(x))
        return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


def tanh(x):
    """The hyperbolic tangent."""
    with np.errstate(under="ignore"):
        return np.tanh(wide(x))


def linear(weights, x):
    """y [..., O] = x [..., I] W' + b."""
    y = wide(x) @ wide(weights["weight"]).T
    return y + wide(weights["bias"]) if weights.get("bias") is not None else y


def lstm_ba2016(weights, x, h, c, eps=1e-5):
    """One step of the layer-normalised LSTM (Eq. 20-22): x [..., I], h and c [..., H] -> the next h and c.

    Gate order f, i, o, g; the next step sees the c that was not normalised.
    """
    w, x, h, c = _recurrent(weights, x, h, c)
    gates = (
        _layer_norm_of(h @ w["weight_h"].T, w["gain_h"], w["bias_h"], eps)
        + _layer_norm_of(x @ w["weight_x"].T, w["gain_x"], w["bias_x"], eps)
        + w["bias"]
    )
    f, i, o, g = np.split(gates, 4, axis=-1)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    h = sigmoid(o) * np.tanh(_layer_norm_of(c, w["gain_c"], w["bias_c"], eps))
    return h, c


def lstm_draw(weights, x, h, c, eps=1e-5):
    """One step of the LSTM of the DRAW experiment (Eq. 29-31): plain gates, LN of the cell on its way out."""
    w, x, h, c = _recurrent(weights, x, h, c)
    f, i, o, g = np.split(h @ w["weight_h"].T + x @ w["weight_x"].T + w["bias"], 4, axis=-1)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    h = sigmoid(o) * np.tanh(_layer_norm_of(c, w["gain_c"], w["bias_c"], eps))
    return h, c


def gru_ba2016(weights, x, h, eps=1e-5):
    """One step of the layer-normalised GRU (Eq. 26-28): x [..., I], h [..., H] -> the next h; gates z, r."""
    w, x, h = _recurrent(weights, x, h)
    gates = _layer_norm_of(h @ w["weight_h"].T, w["gain_h"], w["bias_h"], eps) + _layer_norm_of(
        x @ w["weight_x"].T, w["gain_x"], w["bias_x"], eps
    )
    z, r = np.split(gates, 2, axis=-1)
    from_x = _layer_norm_of(x @ w["weight_xn"].T, w["gain_xn"], w["bias_xn"], eps)
    from_h = _layer_norm_of(h @ w["weight_hn"].T, w["gain_hn"], w["bias_hn"], eps)
    n = np.tanh(from_x + sigmoid(r) * from_h)
    return (1 - sigmoid(z)) * h + sigmoid(z) * n


def rnn_ba2016(weights, x, h, eps=1e-5, activation="tanh"):
    """One step of the layer-normalised simple network (Eq. 4): x [..., I], h [..., H] -> the next h."""
    w, x, h = _recurrent(weights, x, h)
    a = _layer_norm_of(h @ w["weight_h"].T + x @ w["weight_x"].T, w["gain"], w["bias"], eps)
    return {"tanh": np.tanh, "relu": lambda a: np.maximum(a, 0)}[activation](a)


def _normalise(rows, eps):
    """rows [m, n] -> xhat [m, n], mean [m, 1], rstd [m, 1], all wide."""
    with np.errstate(all="ignore"):
        first = rows[:, :1]
        d = rows - first  # a constant row is now exactly 0
        delta = _mean(d)
        d = d - delta
        rest = _mean(d)  # what is missing because delta was rounded
        d = d - rest
        rstd = _reciprocal_root(_mean(d * d), eps)
        return d * rstd, first + (delta + rest), rstd


def _reciprocal_root(square, eps):
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(square + eps == 0, 0, 1 / np.sqrt(square + eps))


def _affine(xhat, weight, bias):
    y = xhat if weight is None else xhat * wide(weight)
    return y if bias is None else y + wide(bias)


def _layer_norm_of(a, gain, bias, eps):
    """Layer norm of an array that is wide already; the runtime rounds eps to float32."""
    rows = a.reshape(-1, a.shape[-1])
    xhat, _, _ = _normalise(rows, np.float64(np.float32(eps)))
    return xhat.reshape(a.shape) * gain + bias


def _recurrent(weights, *arrays):
    """Recurrent cells are float32 only, so float64 is wide enough for whatever the state comes in."""
    return {name: np.float64(w) for name, w in weights.items()}, *(np.float64(a) for a in arrays)


def _rounded_eps(eps, x):
    """eps as the kernels see it: rounded to the type they compute in."""
    compute = np.float64 if np.asarray(x).dtype == np.float64 else np.float32
    return wide(compute(eps))


def _as_rows(x, axis):
    shape = np.shape(x)
    return wide(x).reshape(math.prod(shape[:axis]), math.prod(shape[axis:]))


def _stats_shape(x, axis):
    shape = np.shape(x)
    return shape[:axis] + (1,) * len(shape[axis:])


def _mean(rows):
    return rows.mean(axis=-1, keepdims=True)
