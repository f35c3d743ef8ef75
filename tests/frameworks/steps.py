"""Steps of the cells of other frameworks in float64: `python steps.py FRAMEWORK FOLDER` in its environment.

For each of its cells it writes FOLDER/CELL.npz: 30 frames "x", the states "before" and "after" each step, h and c, and
the cell's tensors ("w:NAME") under the names that the framework gives them. Each step starts from the state of the last
one rounded to float32, which is what cnorm can be given, and all weights are float32 numbers. It imports NumPy and the
framework, nothing of cnorm.

To add a cell, write a function under `@cell(FRAMEWORK)`: it returns the tensors as float32 arrays by name, and a step
(x, *states) -> states in float64.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

INPUTS, UNITS, STEPS = 5, 12, 30
CELLS: dict[str, dict[str, Callable]] = {}
# the packages of a framework's environment; the first has the version that is shown
PINS = {
    "flax": ("flax==0.12.8", "jax==0.10.2", "numpy==2.4.6"),
    "equinox": ("equinox==0.13.8", "jax==0.10.2", "numpy==2.4.6"),
    "haiku": ("dm-haiku==0.0.17", "jax==0.10.2", "numpy==2.4.6"),
    "keras": ("keras==3.15.1", "jax==0.10.2", "numpy==2.4.6"),
    "mlx": ("mlx==0.32.4", "mlx-cpu==0.32.4", "numpy==2.4.6"),
    "paddle": ("paddlepaddle==3.3.1", "numpy==2.4.6"),
    "torch": ("torch==2.13.0", "numpy==2.4.6"),
    "written": ("numpy==2.4.6",),
}
RNG = np.random.default_rng(11)


def cell(framework: str):
    """Register a cell of a framework."""

    def register(function):
        CELLS.setdefault(framework, {})[function.__name__.replace("_", "-")] = function
        return function

    return register


def random(shape) -> np.ndarray:
    """Weights in float32."""
    return (0.4 * RNG.standard_normal(shape)).astype(np.float32)


def filled(tree):
    """A tree of JAX arrays with `random` ones of their shapes, in float64."""
    import jax

    jax.config.update("jax_enable_x64", True)
    return jax.tree.map(lambda leaf: jax.numpy.asarray(random(leaf.shape), "float64"), tree)


def named(tree) -> dict[str, np.ndarray]:
    """The leaves of a tree by their path, as "a.b"."""
    import jax

    words = lambda path: ".".join(str(getattr(key, "key", getattr(key, "name", key))).strip(".") for key in path)  # noqa: E731
    return {words(path): np.asarray(leaf, np.float32) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


# --------------------------------------------------------------------------------------------------------- JAX


def _linen(module, states, **options):
    import jax
    from flax import linen

    jax.config.update("jax_enable_x64", True)
    layer = getattr(linen, module)(UNITS, param_dtype="float64", **options)
    carry = layer.initialize_carry(jax.random.key(0), (1, INPUTS))
    params = filled(layer.init(jax.random.key(0), carry, jax.numpy.zeros((1, INPUTS)))["params"])

    def step(x, *given):  # the carry of an LSTM is (c, h)
        after, _ = layer.apply({"params": params}, given[::-1] if states == 2 else given[0], x)
        return after[::-1] if states == 2 else (after,)

    return named(params), step


@cell("flax")
def linen_LSTMCell():
    return _linen("LSTMCell", 2)


@cell("flax")
def linen_OptimizedLSTMCell():
    return _linen("OptimizedLSTMCell", 2)


@cell("flax")
def linen_GRUCell():
    return _linen("GRUCell", 1)


@cell("flax")
def linen_SimpleCell():
    return _linen("SimpleCell", 1)


def _nnx(module, states):
    import jax
    from flax import nnx

    jax.config.update("jax_enable_x64", True)
    layer = getattr(nnx, module)(INPUTS, UNITS, dtype="float64", param_dtype="float64", rngs=nnx.Rngs(0))
    nnx.update(layer, filled(nnx.state(layer, nnx.Param)))
    tensors = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(layer, nnx.Param))}
    tensors = {name: np.asarray(leaf[...], np.float32) for name, leaf in tensors.items()}

    def step(x, *given):
        after, _ = layer(given[::-1] if states == 2 else given[0], x)
        return after[::-1] if states == 2 else (after,)

    return tensors, step


@cell("flax")
def nnx_LSTMCell():
    return _nnx("LSTMCell", 2)


@cell("flax")
def nnx_OptimizedLSTMCell():
    return _nnx("OptimizedLSTMCell", 2)


@cell("flax")
def nnx_GRUCell():
    return _nnx("GRUCell", 1)


@cell("flax")
def nnx_SimpleCell():
    return _nnx("SimpleCell", 1)


def _equinox(module, states):
    import equinox
    import jax

    jax.config.update("jax_enable_x64", True)
    layer = getattr(equinox.nn, module)(INPUTS, UNITS, key=jax.random.key(0))
    arrays, rest = equinox.partition(layer, equinox.is_array)
    arrays = filled(arrays)
    layer = equinox.combine(arrays, rest)

    def step(x, *given):
        after = layer(x[0], (given[0][0], given[1][0]) if states == 2 else given[0][0])
        return [each[None] for each in (after if states == 2 else (after,))]

    return named(arrays), step


@cell("equinox")
def eqx_LSTMCell():
    return _equinox("LSTMCell", 2)


@cell("equinox")
def eqx_GRUCell():
    return _equinox("GRUCell", 1)


def _haiku(module, states, **options):
    import haiku
    import jax

    jax.config.update("jax_enable_x64", True)
    network = haiku.transform(lambda x, state: getattr(haiku, module)(UNITS, **options)(x, state))
    wrap = (lambda given: haiku.LSTMState(*given)) if states == 2 else (lambda given: given[0])
    start = wrap([jax.numpy.zeros((1, UNITS))] * states)
    params = filled(network.init(jax.random.key(0), jax.numpy.zeros((1, INPUTS)), start))

    def step(x, *given):
        after = network.apply(params, None, x, wrap(given))[1]
        return (after.hidden, after.cell) if states == 2 else (after,)

    return named(params), step


@cell("haiku")
def hk_LSTM():
    return _haiku("LSTM", 2)


@cell("haiku")
def hk_GRU():
    return _haiku("GRU", 1)


@cell("haiku")
def hk_VanillaRNN():
    return _haiku("VanillaRNN", 1)


def _keras(module, states, **options):
    import os

    os.environ["KERAS_BACKEND"] = "jax"
    import jax

    jax.config.update("jax_enable_x64", True)
    import keras

    keras.config.set_floatx("float64")
    layer = getattr(keras.layers, f"{module}Cell")(UNITS, **options)
    layer.build((1, INPUTS))
    tensors = {weight.name: random(weight.shape) for weight in layer.weights}
    layer.set_weights(list(tensors.values()))
    return tensors, lambda x, *given: layer(x, list(given))[1]


@cell("keras")
def LSTM():
    return _keras("LSTM", 2)


@cell("keras")
def GRU():
    return _keras("GRU", 1)


@cell("keras")
def GRU_reset_before():
    return _keras("GRU", 1, reset_after=False)


@cell("keras")
def SimpleRNN():
    return _keras("SimpleRNN", 1)


# --------------------------------------------------------------------------------------------------------- MLX


def _mlx(module, states):
    import mlx.core as mx
    import mlx.nn as nn

    mx.set_default_device(mx.cpu)
    layer = getattr(nn, module)(INPUTS, UNITS)
    tensors = {name: random(array.shape) for name, array in layer.parameters().items()}
    layer.update({name: mx.array(array.astype(np.float64), mx.float64) for name, array in tensors.items()})

    def step(x, *given):
        x, *given = (mx.array(each, mx.float64) for each in (x[:, None], *given))
        after = layer(x, *given)
        return [np.array(each)[:, 0] for each in (after if states == 2 else (after,))]

    return tensors, step


@cell("mlx")
def nn_LSTM():
    return _mlx("LSTM", 2)


@cell("mlx")
def nn_GRU():
    return _mlx("GRU", 1)


@cell("mlx")
def nn_RNN():
    return _mlx("RNN", 1)


# ------------------------------------------------------------------------------------------- Paddle and PyTorch


def _paddle(module, states):
    import paddle

    paddle.set_default_dtype("float64")
    layer = getattr(paddle.nn, module)(INPUTS, UNITS)
    for parameter in layer.state_dict().values():  # each parameter stands there under two names
        parameter.set_value(random(parameter.shape).astype(np.float64))
    tensors = {name: parameter.numpy().astype(np.float32) for name, parameter in layer.state_dict().items()}

    def step(x, *given):
        x, *given = (paddle.to_tensor(each[None]) for each in (x, *given))
        after = layer(x, tuple(given) if states == 2 else given[0])[1]
        return [each.numpy()[0] for each in (after if states == 2 else (after,))]

    return tensors, step


@cell("paddle")
def paddle_LSTM():
    return _paddle("LSTM", 2)


@cell("paddle")
def paddle_GRU():
    return _paddle("GRU", 1)


@cell("paddle")
def paddle_SimpleRNN():
    return _paddle("SimpleRNN", 1)


def _torch(layer, step_of):
    import torch

    layer = layer.double().eval()
    tensors = {name: random(tensor.shape) for name, tensor in layer.state_dict().items()}
    layer.load_state_dict({name: torch.tensor(array, dtype=torch.float64) for name, array in tensors.items()})

    def step(x, *given):
        with torch.no_grad():
            after = step_of(layer, *(torch.tensor(each) for each in (x, *given)))
        return [each.numpy() for each in (after if isinstance(after, tuple) else (after,))]

    return tensors, step


@cell("torch")
def LSTMCell():
    import torch

    return _torch(torch.nn.LSTMCell(INPUTS, UNITS), lambda layer, x, h, c: layer(x, (h, c)))


@cell("torch")
def GRUCell():
    import torch

    return _torch(torch.nn.GRUCell(INPUTS, UNITS), lambda layer, x, h: layer(x, h))


@cell("torch")
def RNNCell():
    import torch

    return _torch(torch.nn.RNNCell(INPUTS, UNITS), lambda layer, x, h: layer(x, h))


# ------------------------------------------------------------------------------------------- equations as written


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def norm(x, gain, bias=0.0, eps=1e-5):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) * gain + bias


@cell("written")
def haste_LayerNormLSTM():
    """LayerNormLSTM of haste 0.5 (its script and docs; the package needs CUDA)."""
    w = {"kernel": random((INPUTS, 4 * UNITS)), "recurrent_kernel": random((UNITS, 4 * UNITS))}
    w |= {"bias": random(4 * UNITS), "gamma": random((2, 4 * UNITS)), "gamma_h": random(UNITS), "beta_h": random(UNITS)}

    def step(x, h, c):
        v = norm(x @ w["kernel"].astype(float), w["gamma"][0]) + norm(h @ w["recurrent_kernel"], w["gamma"][1])
        i, g, f, o = np.split(v + w["bias"], 4, -1)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        return sigmoid(o) * np.tanh(norm(c, w["gamma_h"], w["beta_h"])), c

    return w, step


@cell("written")
def haste_LayerNormGRU():
    w = {"kernel": random((INPUTS, 3 * UNITS)), "recurrent_kernel": random((UNITS, 3 * UNITS))}
    w |= {"bias": random(3 * UNITS), "recurrent_bias": random(3 * UNITS), "gamma": random((2, 3 * UNITS))}

    def step(x, h):
        v = norm(x @ w["kernel"].astype(float), w["gamma"][0]) + w["bias"]
        u = norm(h @ w["recurrent_kernel"], w["gamma"][1]) + w["recurrent_bias"]
        (vz, vr, vg), (uz, ur, ug) = np.split(v, 3, -1), np.split(u, 3, -1)
        z, r = sigmoid(vz + uz), sigmoid(vr + ur)
        return (z * h + (1 - z) * np.tanh(vg + r * ug),)

    return w, step


@cell("written")
def tfa_LayerNormLSTMCell():
    """LayerNormLSTMCell of TensorFlow Addons 0.23, which no present TensorFlow imports."""
    w = {
        "kernel": random((INPUTS, 4 * UNITS)),
        "recurrent_kernel": random((UNITS, 4 * UNITS)),
        "bias": random(4 * UNITS),
    }
    parts = (("kernel_norm", 4), ("recurrent_norm", 4), ("state_norm", 1))
    w |= {f"{part}/{name}": random(k * UNITS) for part, k in parts for name in ("gamma", "beta")}

    def normed(part, value):
        return norm(value, w[f"{part}/gamma"], w[f"{part}/beta"], 1e-3)

    def step(x, h, c):
        z = normed("kernel_norm", x @ w["kernel"].astype(float)) + normed("recurrent_norm", h @ w["recurrent_kernel"])
        i, f, g, o = np.split(z + w["bias"], 4, -1)
        c = normed("state_norm", sigmoid(f) * c + sigmoid(i) * np.tanh(g))
        return sigmoid(o) * np.tanh(c), c

    return w, step


@cell("written")
def torchaudio_CustomLSTM():
    """The cell of torchaudio 2.11's RNN-T encoder, models/rnnt.py: its library does not load beside PyTorch 2.13."""
    w = {"x2g.weight": random((4 * UNITS, INPUTS)), "p2g.weight": random((4 * UNITS, UNITS))}
    w |= {f"{part}_norm.{name}": random(k * UNITS) for part, k in (("g", 4), ("c", 1)) for name in ("weight", "bias")}

    def step(x, h, c):
        gates = x @ w["x2g.weight"].T.astype(float) + h @ w["p2g.weight"].T
        i, f, g, o = np.split(norm(gates, w["g_norm.weight"], w["g_norm.bias"]), 4, -1)
        c = norm(sigmoid(f) * c + sigmoid(i) * np.tanh(g), w["c_norm.weight"], w["c_norm.bias"])
        return sigmoid(o) * np.tanh(c), c

    return w, step


def write(name: str, folder: Path) -> None:
    """The steps and tensors of a cell."""
    tensors, step = CELLS[folder.name][name]()
    states = 2 if "LSTM" in name else 1
    x = RNG.standard_normal((STEPS, INPUTS)).astype(np.float32)
    before, after = [], []
    state = [np.zeros((1, UNITS)) for _ in range(states)]
    for frame in x.astype(np.float64):
        start = [np.asarray(each).astype(np.float32).astype(np.float64) for each in state]
        # Keras 3.15.1 on JAX rounds tanh to float32
        state = [np.asarray(each, np.float64) for each in step(frame[None], *start)]
        before.append([each[0] for each in start])
        after.append([each[0] for each in state])
    found = {f"w:{key}": value for key, value in tensors.items()}
    np.savez(folder / f"{name}.npz", x=x, before=np.stack(before), after=np.stack(after), **found)


if __name__ == "__main__":
    for each in CELLS[sys.argv[1]]:
        write(each, Path(sys.argv[2]))
