"""The oracle: a second, plain implementation of the project's mathematics in a wider type.

float32 and narrower arrays are computed in float64; float64 arrays in ``np.longdouble`` (80 or 128 bits), so
that the reference for float64 kernels is more precise than they are. Both wide types hold the square of every input, so
nothing here needs scaling. Results are returned in the wide type. Equation numbers are those of Ba, Kiros
and Hinton, "Layer Normalization", arXiv:1607.06450.
"""

import functools
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
    xhat, mean, rstd = _normalise(rows, rounded_eps(eps, x))
    y = _affine(xhat.reshape(np.shape(x)), weight, bias)
    stats_shape = _stats_shape(x, axis)
    return y, mean.reshape(stats_shape), rstd.reshape(stats_shape)


def layer_norm_backward(dy, x, weight=None, eps=1e-5, axis=-1):
    """dx [like x], dweight and dbias [x.shape[axis:]] of sum(dy * y)."""
    xhat, _, rstd = _normalise(_as_rows(x, axis), rounded_eps(eps, x))
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
    rstd = reciprocal_root(_mean(rows * rows), rounded_eps(eps, x))
    y = _affine((rows * rstd).reshape(np.shape(x)), weight, None)
    return y, rstd.reshape(_stats_shape(x, axis))


def rms_norm_backward(dy, x, weight=None, eps=1e-5, axis=-1):
    """dx [like x] and dweight [x.shape[axis:]] of sum(dy * y)."""
    rows, dy_rows = _as_rows(x, axis), _as_rows(dy, axis)
    rstd = reciprocal_root(_mean(rows * rows), rounded_eps(eps, x))
    xhat = rows * rstd
    g = dy_rows if weight is None else dy_rows * wide(weight).ravel()
    dx = rstd * (g - xhat * _mean(g * xhat))
    dweight = (dy_rows * xhat).sum(axis=0)
    return dx.reshape(np.shape(x)), dweight.reshape(np.shape(x)[axis:])


# autodiff.py adds variants of `sigmoid`, `normalised` and `float64` that can be differentiated
@functools.singledispatch
def sigmoid(x):
    """1 / (1 + exp(-x)), in a form that cannot overflow."""
    x = wide(x)
    with np.errstate(under="ignore"):
        e = np.exp(-np.abs(x))
        return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def activation(function, x, alpha=0.0, beta=0.0, slope=0.0):
    """The functions of the layer Activation; alpha is also log's eps and clip's lo, beta its hi."""
    x = wide(x)
    with np.errstate(all="ignore"):
        return {
            "tanh": lambda: np.tanh(x),
            "relu": lambda: np.maximum(x, 0),
            "sigmoid": lambda: sigmoid(x),
            "elu": lambda: np.where(x < 0, alpha * np.expm1(np.minimum(x, 0)), x),
            "selu": lambda: np.float64(np.float32(1.0507010)) * activation("elu", x, np.float64(np.float32(1.6732632))),
            "silu": lambda: x * sigmoid(x),
            "gelu": lambda: x * 0.5 * _erfc(-x * math.sqrt(0.5)),
            "gelu_tanh": lambda: x * sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)),
            "leaky_relu": lambda: np.where(x < 0, slope * x, x),
            "prelu": lambda: np.where(x < 0, slope * x, x),
            "softplus": lambda: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))),
            "hard_sigmoid": lambda: np.clip(alpha * x + beta, 0, 1),
            "hard_swish": lambda: x * np.clip(x / 6 + 0.5, 0, 1),
            "softmax": lambda: _softmax(x),
            "log": lambda: np.log(x + alpha),
            "exp": lambda: np.exp(x),
            "sqrt": lambda: np.sqrt(x),
            "square": lambda: x * x,
            "abs": lambda: np.abs(x),
            "clip": lambda: np.clip(x, alpha, beta),
            "sin": lambda: np.sin(x),
            "cos": lambda: np.cos(x),
        }[function]()


def _softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def tanh(x):
    """The hyperbolic tangent."""
    with np.errstate(under="ignore"):
        return np.tanh(wide(x))


def linear(weights, x):
    """y [..., O] = x [..., I] W' + b."""
    y = wide(x) @ wide(weights["weight"]).T
    return y + wide(weights["bias"]) if weights.get("bias") is not None else y


def lstm_ba2016(weights, x, h, c, eps=1e-5, *, gate=sigmoid, state=np.tanh):
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
    c = gate(f) * c + gate(i) * state(g)
    h = gate(o) * state(_layer_norm_of(c, w["gain_c"], w["bias_c"], eps))
    return h, c


def lstm_draw(weights, x, h, c, eps=1e-5):
    """One step of the LSTM of the DRAW experiment (Eq. 29-31): plain gates, LN of the cell for the output only."""
    w, x, h, c = _recurrent(weights, x, h, c)
    f, i, o, g = np.split(h @ w["weight_h"].T + x @ w["weight_x"].T + w["bias"], 4, axis=-1)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    h = sigmoid(o) * np.tanh(_layer_norm_of(c, w["gain_c"], w["bias_c"], eps))
    return h, c


def gru_ba2016(weights, x, h, eps=1e-5, *, gate=sigmoid, state=np.tanh):
    """One step of the layer-normalised GRU (Eq. 26-28): x [..., I], h [..., H] -> the next h; gates z, r."""
    w, x, h = _recurrent(weights, x, h)
    gates = _layer_norm_of(h @ w["weight_h"].T, w["gain_h"], w["bias_h"], eps) + _layer_norm_of(
        x @ w["weight_x"].T, w["gain_x"], w["bias_x"], eps
    )
    z, r = np.split(gates, 2, axis=-1)
    from_x = _layer_norm_of(x @ w["weight_xn"].T, w["gain_xn"], w["bias_xn"], eps)
    from_h = _layer_norm_of(h @ w["weight_hn"].T, w["gain_hn"], w["bias_hn"], eps)
    n = state(from_x + gate(r) * from_h)
    return (1 - gate(z)) * h + gate(z) * n


def rnn_ba2016(weights, x, h, eps=1e-5, activation="tanh", *, state=None):
    """One step of the layer-normalised simple network (Eq. 4): x [..., I], h [..., H] -> the next h."""
    w, x, h = _recurrent(weights, x, h)
    a = _layer_norm_of(h @ w["weight_h"].T + x @ w["weight_x"].T, w["gain"], w["bias"], eps)
    return (state or {"tanh": np.tanh, "relu": lambda a: np.maximum(a, 0)}[activation])(a)


def _normalise(rows, eps):
    """rows [m, n] -> xhat [m, n], mean [m, 1], rstd [m, 1], all wide."""
    with np.errstate(all="ignore"):
        first = rows[:, :1]
        d = rows - first  # a constant row is now exactly 0
        delta = _mean(d)
        d = d - delta
        rest = _mean(d)  # the rounding error of delta
        d = d - rest
        rstd = reciprocal_root(_mean(d * d), eps)
        return d * rstd, first + (delta + rest), rstd


def reciprocal_root(square, eps):
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(square + eps == 0, 0, 1 / np.sqrt(square + eps))


def _affine(xhat, weight, bias):
    y = xhat if weight is None else xhat * wide(weight)
    return y if bias is None else y + wide(bias)


@functools.singledispatch
def normalised(a, eps):
    """xhat of the rows of an array that is wide already; the runtime rounds eps to float32."""
    rows = a.reshape(-1, a.shape[-1])
    xhat, _, _ = _normalise(rows, np.float64(np.float32(eps)))
    return xhat.reshape(a.shape)


def _layer_norm_of(a, gain, bias, eps):
    return normalised(a, eps) * gain + bias


@functools.singledispatch
def float64(array):
    """Recurrent cells are float32 only, so float64 is the wide type, also for states in float64."""
    return np.float64(array)


def _recurrent(weights, *arrays):
    return {name: float64(w) for name, w in weights.items()}, *(float64(a) for a in arrays)


def rounded_eps(eps, x):
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


# ---- published recurrent cells: one step each, in the checkpoint's own names and layout ----------------------------
# Written from the sources that docs/cells.md names, one by one, sharing nothing but the norm: no table, no spec.


def lstm_ba2016_code(weights, x, h, c, eps=1e-5):
    """ryankiros/layer-norm, lnlstm_layer: i, f, o, candidate; b is added inside the input's norm and again outside."""
    w, x, h, c = _recurrent(weights, x, h, c)
    below = _layer_norm_of(x @ w["W"] + w["b"], w["s1"], w["b1"], eps)
    before = _layer_norm_of(h @ w["U"], w["s2"], w["b2"], eps)
    i, f, o, g = np.split(before + below + w["b"], 4, axis=-1)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(_layer_norm_of(c, w["s3"], w["b3"], eps)), c


def lstm_torch_custom(weights, x, h, c, eps=1e-5):
    """PyTorch's fastrnns LayerNormLSTMCell: i, f, g, o; the cell itself is normalised and carried."""
    w, x, h, c = _recurrent(weights, x, h, c)
    gates = _layer_norm_of(x @ w["weight_ih"].T, w["layernorm_i.weight"], w["layernorm_i.bias"], eps)
    gates = gates + _layer_norm_of(h @ w["weight_hh"].T, w["layernorm_h.weight"], w["layernorm_h.bias"], eps)
    i, f, g, o = np.split(gates, 4, axis=-1)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    c = _layer_norm_of(c, w["layernorm_c.weight"], w["layernorm_c.bias"], eps)
    return sigmoid(o) * np.tanh(c), c


def lstm_torchaudio(weights, x, h, c, eps, *, gate=sigmoid, state=np.tanh):
    """torchaudio's rnnt _CustomLSTM: i, f, g, o; one norm of the sum; the cell is normalised and carried."""
    w, x, h, c = _recurrent(weights, x, h, c)
    total = x @ w["x2g.weight"].T + h @ w["p2g.weight"].T
    i, f, g, o = np.split(_layer_norm_of(total, w["g_norm.weight"], w["g_norm.bias"], eps), 4, axis=-1)
    c = gate(f) * c + gate(i) * state(g)
    c = _layer_norm_of(c, w["c_norm.weight"], w["c_norm.bias"], eps)
    return gate(o) * state(c), c


def lstm_tfa(weights, x, h, c, eps=1e-3):
    """TensorFlow Addons LayerNormLSTMCell: i, f, candidate, o; the cell is normalised and carried."""
    w, x, h, c = _recurrent(weights, x, h, c)
    z = _layer_norm_of(x @ w["kernel"], w["kernel_norm/gamma"], w["kernel_norm/beta"], eps)
    z = z + _layer_norm_of(h @ w["recurrent_kernel"], w["recurrent_norm/gamma"], w["recurrent_norm/beta"], eps)
    i, f, g, o = np.split(z + w.get("bias", 0), 4, axis=-1)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    c = _layer_norm_of(c, w["state_norm/gamma"], w["state_norm/beta"], eps)
    return sigmoid(o) * np.tanh(c), c


def lstm_tf_contrib(weights, x, h, c, eps=1e-12):
    """TensorFlow 1 LayerNormBasicLSTMCell: i, j, f, o of [x, h], a norm each; forget bias 1; the cell is carried."""
    w, x, h, c = _recurrent(weights, x, h, c)
    parts = np.split(np.concatenate([x, h], axis=-1) @ w["kernel"], 4, axis=-1)
    names = ("input", "transform", "forget", "output")
    i, j, f, o = (
        _layer_norm_of(part, w[f"{name}/gamma"], w[f"{name}/beta"], eps)
        for part, name in zip(parts, names, strict=True)
    )
    c = c * sigmoid(f + 1.0) + sigmoid(i) * np.tanh(j)
    c = _layer_norm_of(c, w["state/gamma"], w["state/beta"], eps)
    return np.tanh(c) * sigmoid(o), c


def lstm_haste(weights, x, h, c, eps=1e-5, zoneout=0.0, *, gate=sigmoid, state=np.tanh):
    """haste LayerNormLSTM at inference: i, g, f, o; norms with gain only; zoneout mixes h."""
    w, x, before, c = _recurrent(weights, x, h, c)
    v = _layer_norm_of(x @ w["kernel"], w["gamma"][0], 0, eps)
    v = v + _layer_norm_of(before @ w["recurrent_kernel"], w["gamma"][1], 0, eps) + w["bias"]
    i, g, f, o = np.split(v, 4, axis=-1)
    c = gate(f) * c + gate(i) * state(g)
    h = gate(o) * state(_layer_norm_of(c, w["gamma_h"], w["beta_h"], eps))
    return zoneout * before + (1 - zoneout) * h, c


def lstm_baselines(weights, x, h, c, eps=1e-5):
    """OpenAI baselines lnlstm: i, f, o, u; LN of the cell for the output only."""
    w, x, h, c = _recurrent(weights, x, h, c)
    z = _layer_norm_of(x @ w["wx"], w["gx"], w["bx"], eps) + _layer_norm_of(h @ w["wh"], w["gh"], w["bh"], eps) + w["b"]
    i, f, o, u = np.split(z, 4, axis=-1)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(u)
    return sigmoid(o) * np.tanh(_layer_norm_of(c, w["gc"], w["bc"], eps)), c


def lstm_di_engine(weights, x, h, c, eps=1e-5):
    """DI-engine LSTM with norm_type LN: i, f, o, u; the cell is not normalised."""
    w, x, h, c = _recurrent(weights, x, h, c)
    gate = _layer_norm_of(x @ w["wx.0"], w["norm.0.weight"], w["norm.0.bias"], eps)
    gate = gate + _layer_norm_of(h @ w["wh.0"], w["norm.1.weight"], w["norm.1.bias"], eps) + w["bias"][0]
    i, f, o, u = np.split(gate, 4, axis=-1)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(u)
    return sigmoid(o) * np.tanh(c), c


def lstm_lingvo(weights, x, h, c, eps=1e-8, cap=10.0):
    """Lingvo LayerNormalizedLSTMCellSimple: candidate, i, f, o of [x, h], a norm each; c capped; h may be projected."""
    w, x, h, c = _recurrent(weights, x, h, c)
    xmw = np.concatenate([x, h], axis=-1) @ w["wm"]
    scales, biases = np.split(w["ln_scale"], 4), np.split(w.get("b", np.zeros_like(w["ln_scale"])), 4)
    g, i, f, o = (
        _layer_norm_of(part, scale, bias, eps)
        for part, scale, bias in zip(np.split(xmw, 4, axis=-1), scales, biases, strict=True)
    )
    c = np.clip(sigmoid(f) * c + sigmoid(i) * np.tanh(g), -cap, cap)
    m = sigmoid(o) * np.tanh(c)
    return m @ w["w_proj"] if "w_proj" in w else m, c


def lstm_tflite(weights, x, h, c, eps=1e-8, cell_clip=np.inf, projection_clip=np.inf):
    """TensorFlow Lite LSTM with layer norm: a matrix, a coefficient and a bias for each gate."""
    w, x, h, c = _recurrent(weights, x, h, c)

    def gate(name, bias):
        total = x @ w[f"input_to_{name}_weights"].T + h @ w[f"recurrent_to_{name}_weights"].T
        return _layer_norm_of(total, w[f"{name}_layer_norm_coefficients"], w[bias], eps)

    i, f = sigmoid(gate("input", "input_gate_bias")), sigmoid(gate("forget", "forget_gate_bias"))
    g, o = np.tanh(gate("cell", "cell_gate_bias")), sigmoid(gate("output", "output_gate_bias"))
    c = np.clip(f * c + i * g, -cell_clip, cell_clip)
    h = o * np.tanh(c)
    if "projection_weights" in w:
        h = h @ w["projection_weights"].T + w.get("projection_bias", 0)
        h = np.clip(h, -projection_clip, projection_clip)
    return h, c


def lstm_torch(weights, x, h, c, *, gate=sigmoid, state=np.tanh):
    """torch.nn.LSTM: i, f, g, o; h may be projected."""
    w, x, h, c = _recurrent(weights, x, h, c)
    gates = x @ w["weight_ih_l0"].T + w.get("bias_ih_l0", 0) + h @ w["weight_hh_l0"].T + w.get("bias_hh_l0", 0)
    i, f, g, o = np.split(gates, 4, axis=-1)
    c = gate(f) * c + gate(i) * state(g)
    h = gate(o) * state(c)
    return h @ w["weight_hr_l0"].T if "weight_hr_l0" in w else h, c


def lstm_keras(weights, x, h, c, *, gate=sigmoid, state=np.tanh):
    """keras.layers.LSTM: i, f, candidate, o."""
    w, x, h, c = _recurrent(weights, x, h, c)
    i, f, g, o = np.split(x @ w["kernel"] + h @ w["recurrent_kernel"] + w.get("bias", 0), 4, axis=-1)
    c = gate(f) * c + gate(i) * state(g)
    return gate(o) * state(c), c


def lstm_onnx(weights, x, h, c, *, gate=sigmoid, state=np.tanh):
    """The ONNX operator LSTM, one direction, no peepholes: i, o, f, c; B is Wb and Rb."""
    w, x, h, c = _recurrent(weights, x, h, c)
    bias = sum(np.split(w["B"][0], 2)) if "B" in w else 0
    i, o, f, g = np.split(x @ w["W"][0].T + h @ w["R"][0].T + bias, 4, axis=-1)
    c = gate(f) * c + gate(i) * state(g)
    return gate(o) * state(c), c


def gru_ba2016_code(weights, x, h, eps=1e-5):
    """ryankiros/layer-norm, lngru_layer: r, u; candidate apart; biases inside the norms of x; u weights the old h."""
    w, x, h = _recurrent(weights, x, h)
    below = _layer_norm_of(x @ w["W"] + w["b"], w["s1"], w["b1"], eps)
    below_x = _layer_norm_of(x @ w["Wx"] + w["bx"], w["s2"], w["b2"], eps)
    r, u = np.split(sigmoid(_layer_norm_of(h @ w["U"], w["s3"], w["b3"], eps) + below), 2, axis=-1)
    candidate = np.tanh(_layer_norm_of(h @ w["Ux"], w["s4"], w["b4"], eps) * r + below_x)
    return u * h + (1 - u) * candidate


def gru_haste(weights, x, h, eps=1e-5, zoneout=0.0):
    """haste LayerNormGRU at inference: z, r, h; one norm over all three, gain only; z keeps; zoneout mixes h."""
    w, x, h = _recurrent(weights, x, h)
    vx = np.split(_layer_norm_of(x @ w["kernel"], w["gamma"][0], 0, eps) + w["bias"], 3, axis=-1)
    vh = np.split(_layer_norm_of(h @ w["recurrent_kernel"], w["gamma"][1], 0, eps) + w["recurrent_bias"], 3, axis=-1)
    z, r = sigmoid(vx[0] + vh[0]), sigmoid(vx[1] + vh[1])
    new = z * h + (1 - z) * np.tanh(vx[2] + r * vh[2])
    return zoneout * h + (1 - zoneout) * new


def _dreamer(parts, h, gate=sigmoid, state=np.tanh):
    """r, candidate, u; the reset gate acts on the whole candidate; u weights the new h, with a bias of -1."""
    reset, candidate, update = np.split(parts, 3, axis=-1)
    update = gate(update - 1)
    return update * state(gate(reset) * candidate) + (1 - update) * h


def gru_dreamer_v2(weights, x, h, eps=1e-3):
    """DreamerV2 GRUCell(norm=True): a norm over a biased product of [x, h]."""
    w, x, h = _recurrent(weights, x, h)
    total = np.concatenate([x, h], axis=-1) @ w["kernel"] + w["bias"]
    return _dreamer(_layer_norm_of(total, w["gamma"], w["beta"], eps), h)


def gru_dreamer_v3(weights, x, h, eps=1e-3, *, gate=sigmoid, state=np.tanh):
    """DreamerV3 of 2023: a norm over a product of [h, x] without bias."""
    w, x, h = _recurrent(weights, x, h)
    total = np.concatenate([h, x], axis=-1) @ w["kernel"]
    return _dreamer(_layer_norm_of(total, w["norm/scale"], w["norm/bias"], eps), h, gate, state)


def gru_dreamer_torch(weights, x, h, eps=1e-3):
    """The PyTorch ports: a norm over a product of [x, h] without bias."""
    w, x, h = _recurrent(weights, x, h)
    total = np.concatenate([x, h], axis=-1) @ w["layers.GRU_linear.weight"].T
    return _dreamer(_layer_norm_of(total, w["layers.GRU_norm.weight"], w["layers.GRU_norm.bias"], eps), h)


def gru_torch(weights, x, h):
    """torch.nn.GRU: r, z, n; the reset gate acts after the product, and on its bias; z keeps."""
    w, x, h = _recurrent(weights, x, h)
    of_x = np.split(x @ w["weight_ih_l0"].T + w.get("bias_ih_l0", 0), 3, axis=-1)
    of_h = np.split(h @ w["weight_hh_l0"].T + w.get("bias_hh_l0", 0), 3, axis=-1)
    r, z = sigmoid(of_x[0] + of_h[0]), sigmoid(of_x[1] + of_h[1])
    return (1 - z) * np.tanh(of_x[2] + r * of_h[2]) + z * h


def gru_keras(weights, x, h, *, gate=sigmoid, state=np.tanh):
    """keras.layers.GRU with reset_after: z, r, candidate; bias [2, 3H], of the input and of the recurrence."""
    w, x, h = _recurrent(weights, x, h)
    bias = w.get("bias", np.zeros((2, 1)))
    xz, xr, xh = np.split(x @ w["kernel"] + bias[0], 3, axis=-1)
    hz, hr, hh = np.split(h @ w["recurrent_kernel"] + bias[1], 3, axis=-1)
    z, r = gate(xz + hz), gate(xr + hr)
    return z * h + (1 - z) * state(xh + r * hh)


def gru_keras_reset_before(weights, x, h, *, gate=sigmoid, state=np.tanh):
    """keras.layers.GRU with reset_after=False: the reset gate acts on h before its product."""
    w, x, h = _recurrent(weights, x, h)
    xz, xr, xh = np.split(x @ w["kernel"] + w.get("bias", 0), 3, axis=-1)
    kz, kr, kh = np.split(w["recurrent_kernel"], 3, axis=-1)
    z, r = gate(xz + h @ kz), gate(xr + h @ kr)
    return z * h + (1 - z) * state(xh + (r * h) @ kh)


def gru_onnx(weights, x, h, linear_before_reset=False, *, gate=sigmoid, state=np.tanh):
    """The ONNX operator GRU, one direction: z, r, h; z keeps."""
    w, x, h = _recurrent(weights, x, h)
    wz, wr, wh = np.split(w["W"][0], 3)
    rz, rr, rh = np.split(w["R"][0], 3)
    wbz, wbr, wbh, rbz, rbr, rbh = np.split(w["B"][0], 6) if "B" in w else np.zeros((6, 1))
    z = gate(x @ wz.T + h @ rz.T + wbz + rbz)
    r = gate(x @ wr.T + h @ rr.T + wbr + rbr)
    if linear_before_reset:
        candidate = state(x @ wh.T + r * (h @ rh.T + rbh) + wbh)
    else:
        candidate = state(x @ wh.T + (r * h) @ rh.T + rbh + wbh)
    return (1 - z) * candidate + z * h


def rnn_tfa(weights, x, h, eps=1e-5):
    """TensorFlow Addons LayerNormSimpleRNNCell: a norm with gain only over the sum, then the bias."""
    w, x, h = _recurrent(weights, x, h)
    total = x @ w["kernel"] + h @ w["recurrent_kernel"]
    return np.tanh(_layer_norm_of(total, w["gamma"], 0, eps) + w.get("bias", 0))


def rnn_torch(weights, x, h, activation="tanh"):
    """torch.nn.RNN."""
    w, x, h = _recurrent(weights, x, h)
    a = x @ w["weight_ih_l0"].T + w.get("bias_ih_l0", 0) + h @ w["weight_hh_l0"].T + w.get("bias_hh_l0", 0)
    return np.tanh(a) if activation == "tanh" else np.maximum(a, 0)


def rnn_keras(weights, x, h):
    """keras.layers.SimpleRNN."""
    w, x, h = _recurrent(weights, x, h)
    return np.tanh(x @ w["kernel"] + h @ w["recurrent_kernel"] + w.get("bias", 0))


def rnn_onnx(weights, x, h, *, state=np.tanh):
    """The ONNX operator RNN, one direction; B is Wb and Rb."""
    w, x, h = _recurrent(weights, x, h)
    bias = sum(np.split(w["B"][0], 2)) if "B" in w else 0
    return state(x @ w["W"][0].T + h @ w["R"][0].T + bias)


def rnn_kann(weights, x, h, eps=0.0):
    """KANN's kann_layer_rnn with KANN_RNN_NORM: a norm with gain and bias for each product, then the bias."""
    w, x, h = _recurrent(weights, x, h)
    a = _layer_norm_of(x @ w["w"].T, w["alpha_w"], w["beta_w"], eps)
    return np.tanh(a + _layer_norm_of(h @ w["u"].T, w["alpha_u"], w["beta_u"], eps) + w["b"])


def lstm_kann(weights, x, h, c, eps=0.0):
    """KANN's kann_layer_lstm with KANN_RNN_NORM: a norm for each product of each gate; raw c carried."""
    w, x, h, c = _recurrent(weights, x, h, c)

    def gate(name):
        a = _layer_norm_of(x @ w[f"w_{name}"].T, w[f"alpha_w_{name}"], w[f"beta_w_{name}"], eps)
        return a + _layer_norm_of(h @ w[f"u_{name}"].T, w[f"alpha_u_{name}"], w[f"beta_u_{name}"], eps) + w[f"b_{name}"]

    c = sigmoid(gate("f")) * c + sigmoid(gate("i")) * np.tanh(gate("g"))
    return sigmoid(gate("o")) * np.tanh(_layer_norm_of(c, w["alpha_c"], w["beta_c"], eps)), c


# ---- batch, group, weight and divisive norm


def group_norm(x, groups, weight=None, bias=None, eps=1e-5):
    """y [like x], mean and rstd [samples, groups] for x [samples, channels, ...] (arXiv:1803.08494)."""
    shape = np.shape(x)
    grouped = np.reshape(x, (shape[0], groups, -1))
    xhat, mean, rstd = layer_norm(grouped, eps=eps)
    y = _affine(xhat.reshape(shape), per_channel(weight, x), per_channel(bias, x))
    return y, mean[..., 0], rstd[..., 0]


def group_norm_backward(dy, x, groups, weight=None, eps=1e-5):
    """dx [like x], dweight and dbias [channels] of sum(dy * y)."""
    shape = np.shape(x)
    g = wide(dy) if weight is None else wide(dy) * wide(per_channel(weight, x))
    grouped = np.reshape(x, (shape[0] * groups, -1))
    xhat, _, rstd = _normalise(wide(grouped), rounded_eps(eps, x))
    g = g.reshape(grouped.shape)
    dx = rstd * (g - _mean(g) - xhat * _mean(g * xhat))
    axes = (0, *range(2, len(shape)))
    return dx.reshape(shape), (wide(dy) * xhat.reshape(shape)).sum(axes), wide(dy).sum(axes)


def batch_norm(x, weight=None, bias=None, eps=1e-5):
    """y [like x], mean, var and rstd [channels] for x [samples, channels, ...] (arXiv:1502.03167)."""
    rows = channel_rows(x)
    xhat, mean, rstd = _normalise(wide(rows), rounded_eps(eps, x))
    d = wide(rows) - mean
    y = _affine(from_channel_rows(xhat, x), per_channel(weight, x), per_channel(bias, x))
    return y, mean[:, 0], _mean(d * d)[:, 0], rstd[:, 0]


def batch_norm_backward(dy, x, weight=None, eps=1e-5):
    """dx [like x], dweight and dbias [channels] of sum(dy * y), through mean and variance."""
    xhat, _, rstd = _normalise(wide(channel_rows(x)), rounded_eps(eps, x))
    d = wide(channel_rows(dy))
    g = d if weight is None else d * wide(weight)[:, None]
    dx = rstd * (g - _mean(g) - xhat * _mean(g * xhat))
    return from_channel_rows(dx, x), (d * xhat).sum(-1), d.sum(-1)


def batch_norm_inference(x, mean, var, weight=None, bias=None, eps=1e-5):
    """y [like x] with a given mean and variance [channels]."""
    rstd = reciprocal_root(wide(var), rounded_eps(eps, x))
    xhat = (wide(x) - wide(per_channel(mean, x))) * per_channel(rstd, x)
    return _affine(xhat, per_channel(weight, x), per_channel(bias, x))


def batch_norm_inference_backward(dy, x, mean, var, weight=None, eps=1e-5):
    """dx [like x], dweight and dbias [channels] of sum(dy * y); mean and variance are constants."""
    rstd = reciprocal_root(wide(var), rounded_eps(eps, x))
    xhat = (wide(x) - wide(per_channel(mean, x))) * per_channel(rstd, x)
    scale = rstd if weight is None else rstd * wide(weight)
    axes = (0, *range(2, np.ndim(x)))
    return wide(dy) * per_channel(scale, x), (wide(dy) * xhat).sum(axes), wide(dy).sum(axes)


def weight_norm(weight, gain=None):
    """g_i w_i / |w_i| for the rows of weight [outputs, ...] (arXiv:1602.07868, Eq. 2)."""
    w = wide(weight).reshape(len(weight), -1)
    u = w * reciprocal_root((w * w).sum(-1, keepdims=True), 0)
    return (u if gain is None else u * wide(gain)[:, None]).reshape(np.shape(weight))


def weight_norm_backward(dv, weight, gain=None):
    """dweight [like weight] and dgain [outputs] of sum(dv * v)."""
    w, d = wide(weight).reshape(len(weight), -1), wide(dv).reshape(len(weight), -1)
    inverse = reciprocal_root((w * w).sum(-1, keepdims=True), 0)
    u = w * inverse
    dgain = (d * u).sum(-1, keepdims=True)
    dw = (d - u * dgain) * inverse
    if gain is not None:
        dw = dw * wide(gain)[:, None]
    return dw.reshape(np.shape(weight)), dgain[:, 0]


def divisive_norm(x, weight=None, bias=None, sigma=1.0, mean_radius=None, radius=None):
    """y [like x] along the last axis (arXiv:1611.04520), each field summed by itself."""
    z, _, _ = _divisive(x, sigma, mean_radius, radius)
    return _affine(z, weight, bias)


def divisive_norm_backward(dy, x, weight=None, sigma=1.0, mean_radius=None, radius=None):
    """dx [like x], dweight, dbias [n] and dsigma of sum(dy * y); field means are written as matrices."""
    n = np.shape(x)[-1]
    z, v, s = _divisive(x, sigma, mean_radius, radius)
    inverse = np.where(s == 0, 0, 1 / np.where(s == 0, 1, s))
    g = wide(dy) if weight is None else wide(dy) * wide(weight)
    mean_a, mean_b = _field_mean(n, mean_radius, z.dtype), _field_mean(n, radius, z.dtype)
    dv = g * inverse - v * ((g * z * inverse**2) @ mean_b)
    dx = dv - dv @ mean_a
    rows = tuple(range(np.ndim(x) - 1))
    dsigma = -rounded_eps(sigma, x) * (g * z * inverse**2).sum()
    return dx, (wide(dy) * z).sum(rows), wide(dy).sum(rows), dsigma


def smoothing_gradient(dy, x, weight, smoothing, axis=-1):
    """dl/ds of sum(dy * layer_norm(x, eps=s^2)): sum of dy * gain * (x - mean) * (-s / sigma^3)."""
    xhat, _, rstd = _normalise(_as_rows(x, axis), rounded_eps(np.float64(smoothing) ** 2, x))
    g = _as_rows(dy, axis) if weight is None else _as_rows(dy, axis) * wide(weight).ravel()
    return -wide(np.float64(smoothing)) * (g * xhat * rstd**2).sum()


def per_channel(p, x):
    """p [channels] so that it broadcasts over x [samples, channels, ...]."""
    return None if p is None else np.reshape(p, (-1,) + (1,) * (np.ndim(x) - 2))


def channel_rows(x):
    """x [samples, channels, ...] -> [channels, N]."""
    return np.moveaxis(np.asarray(x), 1, 0).reshape(np.shape(x)[1], -1)


def from_channel_rows(rows, x):
    shape = np.shape(x)
    return np.moveaxis(rows.reshape((shape[1], shape[0], *shape[2:])), 0, 1)


def _divisive(x, sigma, mean_radius, radius):
    """z, v and s, like x; v is the mean of differences, so that a large mean loses no digits."""
    x_given, x = x, wide(x)
    v = np.empty_like(x)
    n = x.shape[-1]
    for i in range(n):
        around = x[..., _field(i, mean_radius)] - x[..., i : i + 1]
        v[..., i] = -around.mean(-1)
    mean_square = np.stack([(v[..., _field(i, radius)] ** 2).mean(-1) for i in range(n)], -1)
    s = np.sqrt(rounded_eps(sigma, x_given) ** 2 + mean_square)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(s == 0, 0, v / s), v, s


def _field(i, radius):
    return slice(None) if radius is None else slice(max(0, i - radius), i + radius + 1)


def _field_mean(n, radius, dtype):
    """The matrix M with (M a)_i = mean of a over the field of i."""
    m = np.zeros((n, n), dtype)
    for i in range(n):
        m[i, _field(i, radius)] = 1
    return m / m.sum(1, keepdims=True)
