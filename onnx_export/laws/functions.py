"""Functions of one element: ONE table of their values and parameters in float64, and the look-up of a function
by its values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cnorm.cells.functions import FUNCTIONS, checked_parameters

__all__ = ["GRID", "TABLE", "Function", "found"]

# dense near 0, wide enough for every saturation, without symmetry that could hide a sign
GRID = np.concatenate([np.linspace(-8.3, 8.1, 83), [-700.0, -90.0, -40.0, 40.0, 90.0, 600.0], [0.0, 1e-3, -1e-3]])
_erf = np.vectorize(math.erf, otypes=[np.float64])
_SELU = 1.0507010, 1.6732632  # gamma and alpha


@dataclass(frozen=True)
class Function:
    """A row of the table.

    Attributes
    ----------
    name : str
        cnorm's.
    value : callable
        f(x, *parameters) in float64.
    fit : callable or None
        The parameters of values: fit(f), where f gives the value at a point of the grid near its argument; None for a
        function without parameters.
    """

    name: str
    value: Callable
    fit: Callable | None = None


def sigmoid(x):
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def _elu(x, alpha=1.0):
    return np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))


def _exp(x):
    with np.errstate(over="ignore"):
        return np.exp(x)


def _clip_limits(f):
    low, high = f(-700.0), f(600.0)
    return (-math.inf if low == -700 else low), (math.inf if high == 600 else high)


TABLE = {
    row.name: row
    for row in (
        Function("tanh", np.tanh),
        Function("relu", lambda x: np.maximum(x, 0)),
        Function("sigmoid", sigmoid),
        Function("elu", _elu, lambda f: (-f(-90.0),)),
        Function("selu", lambda x: _SELU[0] * _elu(x, _SELU[1])),
        Function("silu", lambda x: x * sigmoid(x)),
        Function("gelu", lambda x: x * (1 + _erf(x / math.sqrt(2))) / 2),
        Function(
            "gelu_tanh",
            lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
        ),
        Function("softplus", lambda x: np.logaddexp(0, x)),
        Function(
            "hard_sigmoid",
            lambda x, alpha, beta: np.clip(alpha * x + beta, 0, 1),
            lambda f: ((f(1e-3) - f(-1e-3)) / 2e-3, f(0.0)),
        ),
        Function("hard_swish", lambda x: x * np.clip(x / 6 + 0.5, 0, 1)),
        Function("exp", _exp),
        Function("square", np.square),
        Function("abs", np.abs),
        Function("leaky_relu", lambda x, s: np.where(x < 0, s * x, x), lambda f: (f(-40.0) / -40,)),
        Function("clip", np.clip, _clip_limits),
        Function("sin", np.sin),
        Function("cos", np.cos),
    )
}


def found(values: np.ndarray) -> tuple[str, tuple[float, ...]] | None:
    """Name and parameters, rounded to float32, of the function with these values at `GRID`; None for others."""

    def at(point):
        return float(values[int(np.abs(GRID - point).argmin())])

    if np.ptp(values) == 0:
        return None
    for row in TABLE.values():
        parameters = row.fit(at) if row.fit else ()
        with np.errstate(all="ignore"):
            try:
                rounded = checked_parameters(row.name, dict(zip(FUNCTIONS[row.name], parameters, strict=True)))
                same = np.isclose(values, row.value(GRID, *parameters), rtol=1e-6, atol=1e-9)
            except ValueError:  # parameters of no such function
                continue
        if same.all():
            return row.name, tuple(rounded.values()) if row.fit else ()
    return None
