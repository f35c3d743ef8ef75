"""The functions of one element, and softmax: of the layer Activation and of the gates and states of cells."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from cnorm.text import listed

__all__ = ["FUNCTIONS", "OF_CELLS", "checked_parameters", "function_of_cell", "named_parameters"]

# In the order of cnorm_activation in cnorm_rnn.h, with their parameters, the values of these that are taken if none are
# given, as alpha and beta of cnorm_elementwise.
FUNCTIONS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "tanh": {},
        "relu": {},
        "sigmoid": {},
        "elu": {"alpha": 1.0},
        "selu": {},
        "silu": {},
        "gelu": {},
        "gelu_tanh": {},
        "leaky_relu": {"slope": 0.01},
        "prelu": {},
        "softplus": {},
        "hard_sigmoid": {"alpha": 1 / 6, "beta": 0.5},
        "hard_swish": {},
        "softmax": {},
        "log": {"eps": 0.0},
        "exp": {},
        "sqrt": {},
        "square": {},
        "abs": {},
        "clip": {"lo": -math.inf, "hi": math.inf},
        "sin": {},
        "cos": {},
    }
)
# those that need no other element and have a finite derivative at 0, the value of padding
OF_CELLS = tuple(name for name in FUNCTIONS if name not in ("prelu", "softmax", "log", "sqrt"))


def checked_parameters(function: str, given: Mapping[str, Any]) -> dict[str, float]:
    """The parameters of a function, rounded to float32."""
    parameters = dict(FUNCTIONS[function])
    for name, value in given.items():
        if name not in parameters:
            raise ValueError(f"the parameters of {function} must be among {listed(parameters)}, got {name!r}")
        if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
            raise TypeError(f"{name} must be a number, got {type(value).__name__}")
        parameters[name] = value
    with np.errstate(over="ignore"):
        rounded = {name: float(np.float32(value)) for name, value in parameters.items()}
    if function == "clip":
        if not rounded["lo"] <= rounded["hi"]:
            raise ValueError(f"lo must be at most hi, got {rounded['lo']} and {rounded['hi']}")
        return rounded
    for name, value in rounded.items():
        if not math.isfinite(value):
            raise ValueError(f"{name} must be finite in float32, got {parameters[name]!r}")
    return rounded


def function_of_cell(value, field: str) -> str | tuple:
    """A function of a cell in its one form: a name, or (name, parameter, ...) with parameters that are not the usual.

    Raises
    ------
    TypeError, ValueError
        For another type, a name that no cell has, or wrong parameters; `field` is named.
    """
    name, *given = [value] if isinstance(value, str) else value if isinstance(value, list | tuple) and value else [None]
    if not isinstance(name, str):
        raise TypeError(f"{field} must be a name or (name, parameter, ...), got {value!r:.80}")
    if name not in OF_CELLS:
        raise ValueError(f"{field} must be one of {', '.join(OF_CELLS)}, got {name!r}")
    names = list(FUNCTIONS[name])
    if len(given) > len(names):
        raise ValueError(f"{field}: {name} takes {len(names)} parameters, got {len(given)}")
    usual = checked_parameters(name, {})
    try:
        parameters = checked_parameters(name, dict(zip(names, given, strict=False)))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{field}: {error}") from None
    if not all(map(math.isfinite, parameters.values())):
        raise ValueError(f"{field}: {name} of a cell needs finite {' and '.join(names)}")
    return name if parameters == usual else (name, *parameters.values())


def named_parameters(function: str | tuple) -> tuple[str, dict[str, float]]:
    """Name and parameters of what `function_of_cell` returns."""
    name, *given = (function,) if isinstance(function, str) else function
    return name, checked_parameters(name, dict(zip(FUNCTIONS[name], given, strict=False)))
