"""The operations that contenders compute, their inputs, and reference results in float64."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

import cnorm
from cnorm_bench.contenders.timing import empty

__all__ = [
    "CELLS",
    "OPERATIONS",
    "Case",
    "Operation",
    "as_dtype",
    "check",
    "check_rounded_steps",
    "check_steps",
    "correct",
    "measured_error",
    "random_model",
    "trajectory",
]

EPS = 1e-5


class Case(NamedTuple):
    """An operation on rows of one dtype, with one ratio of mean to standard deviation."""

    operation: str
    dtype: str = "float32"
    mean: float = 0

    def __str__(self):
        return f"{self.operation}, {self.dtype}" + (f", rows with mean/std = {self.mean:g}" if self.mean else "")

    def inputs(self, rng, rows, n):
        """The arguments by name: weight and bias [n], all others [rows, n]."""
        dtype, arrays = as_dtype(self.dtype), {}
        for name in OPERATIONS[self.operation].arguments:
            if name == "weight":
                arrays[name] = rng.uniform(0.5, 1.5, n).astype(dtype)
            elif name == "bias":
                arrays[name] = rng.uniform(-1, 1, n).astype(dtype)
            else:
                arrays[name] = empty((rows, n), dtype)
                arrays[name][:] = rng.standard_normal((rows, n), dtype=np.float32) + np.float32(self.mean)
        return arrays

    def expected(self, **inputs):
        """The reference results, a tuple of float64 arrays."""
        return OPERATIONS[self.operation].reference(**inputs)


def as_dtype(name):
    """A dtype by its name; bfloat16 comes from ml_dtypes."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


@dataclass(frozen=True)
class Operation:
    """An operation.

    Attributes
    ----------
    arguments : tuple of str
    reference : callable
        Takes the arguments, returns the right results as a tuple of float64 arrays.
    moved : int
        How many arrays [rows, n] must at least be read or written.
    """

    arguments: tuple
    reference: Callable
    moved: int


def _layer_norm(x, weight, bias):
    weight, bias = weight.astype(np.float64), bias.astype(np.float64)
    return (np.concatenate([_normalised(part)[0] * weight + bias for part in _parts(x)]),)


def _layer_norm_backward(dy, x, weight, bias):
    dx, dweight, dbias = [], 0.0, 0.0
    for dy_part, x_part in zip(_parts(dy), _parts(x), strict=True):
        dy_part = dy_part.astype(np.float64)
        xhat, rstd = _normalised(x_part)
        g = dy_part * weight
        dx.append(rstd * (g - g.mean(-1, keepdims=True) - xhat * np.mean(g * xhat, -1, keepdims=True)))
        dweight, dbias = dweight + (dy_part * xhat).sum(0), dbias + dy_part.sum(0)
    return np.concatenate(dx), dweight, dbias


def _rms_norm(x, weight):
    y = []
    for part in _parts(x):
        part = part.astype(np.float64)
        y.append(part / np.sqrt(np.mean(part * part, -1, keepdims=True) + EPS) * weight.astype(np.float64))
    return (np.concatenate(y),)


def _add_layer_norm(x, residual, weight, bias):
    total = x + residual  # rounded to its dtype before it is normalised
    return _layer_norm(total, weight, bias)[0], total.astype(np.float64)


OPERATIONS = {
    "layer_norm": Operation(("x", "weight", "bias"), _layer_norm, 2),
    "layer_norm_backward": Operation(("dy", "x", "weight", "bias"), _layer_norm_backward, 3),
    "rms_norm": Operation(("x", "weight"), _rms_norm, 2),
    "add_layer_norm": Operation(("x", "residual", "weight", "bias"), _add_layer_norm, 4),
}


def _normalised(x):
    x = x.astype(np.float64)
    x -= x.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt(np.mean(x * x, -1, keepdims=True) + EPS)
    return x * rstd, rstd


def _parts(array, rows=256):
    return (array[start : start + rows] for start in range(0, len(array), rows))


def check(contender, expected):
    """Check that a contender computes the right results before it is timed; a limit computes none and is not checked.

    The tolerance is wide enough for rounding errors, so that this finds wrong formulas only: a float32
    E[x^2] - E[x]^2 at mean/std 10 is off by up to 2e-4 and must pass. The tests check accuracy.

    Parameters
    ----------
    contender : Contender
    expected : tuple of ndarray, float64

    Raises
    ------
    ArithmeticError
        If it does not; the message names the contender, the error and the bound.
    """
    if contender.limit:
        return
    outputs = contender.compute()
    if len(outputs) != len(expected):
        raise ArithmeticError(f"{contender.label} gives {len(outputs)} arrays instead of {len(expected)}")
    for output, wanted in zip(outputs, expected, strict=True):
        _compare(contender.label, output, wanted)


def check_steps(runner, frames, expected):
    """As `check`, for the output of a step contender after the last of the frames."""
    runner.reset()
    with runner.mode():
        for x in frames:
            y = np.array(runner.step(x)).reshape(-1)
    _compare(runner.label, y, expected)


def measured_error(runner, frames, exact):
    """Root mean square error of a free run of `frames` against `exact` [frames, outputs], float64."""
    runner.reset()
    with runner.mode():
        y = np.stack([np.array(runner.step(x), np.float64).reshape(-1) for x in frames])
    return float(np.sqrt(np.mean((y - exact) ** 2)))


def check_rounded_steps(runner, frames, exact):
    """As `check_steps`, for rounded weights: an error of a tenth of the outputs' size would be a wrong formula."""
    error, bound = measured_error(runner, frames, exact), 0.1 * float(np.sqrt(np.mean(exact**2)))
    if not error <= bound:  # NaN fails
        raise ArithmeticError(f"{runner.label} is off by {error:.2g} in the root mean square, more than {bound:.2g}")


def _compare(label, output, wanted):
    if output.shape != wanted.shape:
        raise ArithmeticError(f"{label} gives an array of shape {output.shape} instead of {wanted.shape}")
    # float16 and bfloat16 are rounded once or twice on the way out
    rounding = {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(output.dtype.name, 0)
    bound = (1e-3 + rounding) * max(1.0, np.abs(wanted).max())
    pairs = zip(_parts(output), _parts(wanted), strict=True)
    error = max(np.abs(o.astype(np.float64) - w).max() for o, w in pairs)
    if not error <= bound:  # NaN fails
        raise ArithmeticError(f"{label} is off by {error:.2g}, more than {bound:.2g}")


def correct(made, judge, what, left_out):
    """The contenders that pass `judge`; for each other one a sentence is appended to `left_out`.

    `made` has a tuple for each contender: the contender and the further arguments of `judge`.
    """
    passed = []
    for contender, *arguments in made:
        try:
            judge(contender, *arguments)
        except ArithmeticError as error:
            if contender.label.startswith("cnorm"):
                raise
            left_out.append(f"{what}: {error}; it is not timed")
        else:
            passed.append(contender)
    return passed


CELLS = ("LN-LSTM", "LSTM", "GRU")  # the preset ba2016, and PyTorch's plain cells


def random_model(cell, rng, inputs, hidden):
    """A model of one of `CELLS` with random weights, normal with deviation 1/sqrt(inputs) in matrices."""
    if cell == "LN-LSTM":
        shapes = {"weight_x": (4 * hidden, inputs), "weight_h": (4 * hidden, hidden)}
        shapes |= dict.fromkeys(("bias", "gain_x", "bias_x", "gain_h", "bias_h"), (4 * hidden,))
        shapes |= dict.fromkeys(("gain_c", "bias_c"), (hidden,))
    else:
        rows = {"LSTM": 4, "GRU": 3}[cell] * hidden
        shapes = {"weight_ih_l0": (rows, inputs), "weight_hh_l0": (rows, hidden)}
        shapes |= dict.fromkeys(("bias_ih_l0", "bias_hh_l0"), (rows,))
    weights = {}
    for name, shape in shapes.items():
        scale = 0.5 if len(shape) == 1 else 1 / math.sqrt(shape[1])
        weights[name] = (rng.standard_normal(shape) * scale + name.startswith("gain")).astype(np.float32)
    layer = cnorm.GRU if cell == "GRU" else cnorm.LSTM
    return cnorm.Model([layer(weights, preset="ba2016" if cell == "LN-LSTM" else "torch")])


def trajectory(cell, model, frames):
    """y [T, outputs] for the frames [T, input] from a zero state, in float64."""
    layer = model.layers[0]
    w = {name.removesuffix("_l0"): array.astype(np.float64) for name, array in layer.weights.items()}
    h = c = np.zeros(layer.output_size)
    outputs = []
    for x in frames:
        h, c = _STEPS[cell](w, x, h, c)
        outputs.append(h)
    return np.array(outputs)


def _ln_lstm(w, x, h, c):
    """arXiv:1607.06450, Eq. 20-22."""

    def norm(a, site):
        return _normalised(a)[0] * w[f"gain_{site}"] + w[f"bias_{site}"]

    f, i, o, g = np.split(norm(w["weight_h"] @ h, "h") + norm(w["weight_x"] @ x, "x") + w["bias"], 4)
    c = _sigmoid(f) * c + _sigmoid(i) * np.tanh(g)
    return _sigmoid(o) * np.tanh(norm(c, "c")), c


def _lstm(w, x, h, c):
    i, f, g, o = np.split(w["weight_ih"] @ x + w["bias_ih"] + w["weight_hh"] @ h + w["bias_hh"], 4)
    c = _sigmoid(f) * c + _sigmoid(i) * np.tanh(g)
    return _sigmoid(o) * np.tanh(c), c


def _gru(w, x, h, c):
    from_x = np.split(w["weight_ih"] @ x + w["bias_ih"], 3)
    from_h = np.split(w["weight_hh"] @ h + w["bias_hh"], 3)
    r, z = (_sigmoid(from_x[k] + from_h[k]) for k in range(2))
    n = np.tanh(from_x[2] + r * from_h[2])
    return (1 - z) * n + z * h, c


_STEPS = {"LN-LSTM": _ln_lstm, "LSTM": _lstm, "GRU": _gru}


def _sigmoid(a):
    return 1 / (1 + np.exp(-a))
