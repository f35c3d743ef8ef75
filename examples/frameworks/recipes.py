"""Layers of cnorm from the tensors of JAX, MLX and Paddle: one function for each cell, which `make frameworks` runs.

Each takes a mapping of names to float32 arrays; nested names are joined by dots. It returns a layer for `cnorm.Model`.
The equations are those of cnorm's presets but for order, signs and constants, so nothing is approximated.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

import cnorm

Tensors = Mapping[str, np.ndarray]


def _torch(kind, weight_ih, weight_hh, bias_ih, bias_hh=None, preset="torch"):
    bias_hh = np.zeros_like(bias_ih) if bias_hh is None else bias_hh
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    arrays = (np.ascontiguousarray(each) for each in (weight_ih, weight_hh, bias_ih, bias_hh))
    return kind(dict(zip(names, arrays, strict=True)), preset=preset)


def _parts(tensors: Tensors, side: str, gates: str, what: str) -> np.ndarray:
    """The gates of one side of a Flax cell, as rows; a bias that a gate lacks is 0."""
    names = [
        next((name for name in (f"{side}{g}.{what}", f"{side}{g}_.{what}") if name in tensors), None) for g in gates
    ]
    units = tensors[f"h{gates[0]}.kernel"].shape[1]
    return np.concatenate([np.zeros(units, np.float32) if name is None else tensors[name].T for name in names])


def flax_lstm(tensors: Tensors) -> cnorm.LSTM:
    """`LSTMCell` of flax.linen and flax.nnx, linen's `OptimizedLSTMCell`: "ii.kernel", ..., "ho.bias"."""
    kernels = [_parts(tensors, side, "ifgo", "kernel") for side in "ih"]
    return _torch(cnorm.LSTM, *kernels, _parts(tensors, "h", "ifgo", "bias"))


def flax_gru(tensors: Tensors) -> cnorm.GRU:
    """`flax.linen.GRUCell`: "ir.kernel", ..., "hn.bias"."""
    parts = [_parts(tensors, side, "rzn", what) for what in ("kernel", "bias") for side in "ih"]
    return _torch(cnorm.GRU, *parts)


def flax_rnn(tensors: Tensors) -> cnorm.RNN:
    """`flax.linen.SimpleCell`: "i.kernel", "i.bias", "h.kernel"."""
    return _torch(cnorm.RNN, tensors["i.kernel"].T, tensors["h.kernel"].T, tensors["i.bias"])


def _dense(kind, tensors: Tensors):
    biases = [tensors.get(f"dense_{side}.bias", np.zeros(len(tensors["dense_h.kernel"][0]), "f4")) for side in "ih"]
    return _torch(kind, tensors["dense_i.kernel"].T, tensors["dense_h.kernel"].T, *biases)


def nnx_lstm(tensors: Tensors) -> cnorm.LSTM:
    """`flax.nnx.OptimizedLSTMCell`: "dense_i.kernel", "dense_h.kernel", "dense_h.bias"."""
    return _dense(cnorm.LSTM, tensors)


def nnx_gru(tensors: Tensors) -> cnorm.GRU:
    """`flax.nnx.GRUCell`, which has no bias behind the reset gate, as linen's has."""
    return _dense(cnorm.GRU, tensors)


def nnx_rnn(tensors: Tensors) -> cnorm.RNN:
    """`flax.nnx.SimpleCell`."""
    return _dense(cnorm.RNN, tensors)


def equinox_lstm(tensors: Tensors) -> cnorm.LSTM:
    """`equinox.nn.LSTMCell`: its attributes."""
    return _torch(cnorm.LSTM, tensors["weight_ih"], tensors["weight_hh"], tensors["bias"])


def _one_more_bias(tensors: Tensors, bias: str, bias_n: str) -> list[np.ndarray]:
    units = len(tensors[bias_n])
    return [tensors[bias], np.concatenate([np.zeros(2 * units, np.float32), tensors[bias_n]])]


def equinox_gru(tensors: Tensors) -> cnorm.GRU:
    """`equinox.nn.GRUCell`: its attributes; "bias_n" is behind the reset gate."""
    return _torch(cnorm.GRU, tensors["weight_ih"], tensors["weight_hh"], *_one_more_bias(tensors, "bias", "bias_n"))


def haiku_lstm(tensors: Tensors) -> cnorm.LSTM:
    """`haiku.LSTM`: "w" and "b" of its one linear module. It adds 1 to the forget gate, which its bias here has."""
    i, g, f, o = np.split(tensors["w"].T, 4)
    rows, (b_i, b_g, b_f, b_o) = np.concatenate([i, f, g, o]), np.split(tensors["b"], 4)
    inputs, units = rows.shape[1] - len(b_i), len(b_i)
    one = np.concatenate([np.zeros(units), np.ones(units), np.zeros(2 * units)]).astype(np.float32)
    return _torch(cnorm.LSTM, rows[:, :inputs], rows[:, inputs:], np.concatenate([b_i, b_f, b_g, b_o]), one)


def haiku_gru(tensors: Tensors) -> cnorm.GRU:
    """`haiku.GRU`: "w_i", "w_h" and "b". Its z takes the new value where Keras' keeps the old one: s(-a) = 1 - s(a)."""
    z = tensors["w_h"].shape[0]
    sign = np.where(np.arange(3 * z) < z, np.float32(-1), np.float32(1))
    names = {"kernel": tensors["w_i"], "recurrent_kernel": tensors["w_h"], "bias": tensors["b"]}
    return cnorm.GRU({name: array * sign for name, array in names.items()}, preset="keras_reset_before")


def haiku_rnn(tensors: Tensors) -> cnorm.RNN:
    """`haiku.VanillaRNN`, whose function is relu: "linear.w", "linear.b", "linear_1.w", "linear_1.b"."""
    arrays = (tensors["linear.w"].T, tensors["linear_1.w"].T, tensors["linear.b"], tensors["linear_1.b"])
    return _torch(cnorm.RNN, *arrays, preset="torch_relu")


def mlx_lstm(tensors: Tensors) -> cnorm.LSTM:
    """`mlx.nn.LSTM`: its parameters()."""
    return _torch(cnorm.LSTM, tensors["Wx"], tensors["Wh"], tensors["bias"])


def mlx_gru(tensors: Tensors) -> cnorm.GRU:
    """`mlx.nn.GRU`: its parameters(); "bhn" is behind the reset gate."""
    return _torch(cnorm.GRU, tensors["Wx"], tensors["Wh"], *_one_more_bias(tensors, "b", "bhn"))


def mlx_rnn(tensors: Tensors) -> cnorm.RNN:
    """`mlx.nn.RNN`: its parameters()."""
    return _torch(cnorm.RNN, tensors["Wxh"], tensors["Whh"], tensors["bias"])


def paddle(tensors: Tensors, kind: str) -> cnorm.LSTM | cnorm.GRU | cnorm.RNN:
    """`paddle.nn.LSTM`, `GRU` and `SimpleRNN`: their state_dict(), which holds each tensor twice; PyTorch's cells."""
    own = {name: tensor for name, tensor in tensors.items() if not name[0].isdigit()}
    return cnorm.from_torch(own, "torch", kind=kind)[0]
