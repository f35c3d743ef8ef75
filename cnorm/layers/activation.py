"""Functions of each element, and softmax."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from cnorm.cells.functions import FUNCTIONS, checked_parameters
from cnorm.cells.tensors import Tensor
from cnorm.cells.weights import checked
from cnorm.layers.base import Layer, check_own_forward, with_name
from cnorm.text import listed

SLOPE = (Tensor("slope", ("N",)),)


class Activation(Layer):
    """A function of each element, or softmax over the frame.

    Parameters
    ----------
    function : str
        "relu", "tanh", "sigmoid", "elu", "selu", "silu", "gelu" (by erf), "gelu_tanh", "leaky_relu", "prelu",
        "softplus", "hard_sigmoid", "hard_swish", "softmax", "log", "exp", "sqrt", "square", "abs", "clip", "sin" or
        "cos". Or a module of torch.nn: ReLU, ReLU6, Tanh, Sigmoid, ELU, SELU, SiLU, GELU, LeakyReLU, PReLU, Softplus,
        Hardsigmoid, Hardswish, Hardtanh or Softmax.
    name : str, optional
        As of `Add`.
    **parameters : float
        Rounded to float32. elu: `alpha` (1). leaky_relu: `slope` (0.01). hard_sigmoid, alpha x + beta within 0 and 1:
        `alpha` (1/6, as in PyTorch and Keras 3; Keras 2 and ONNX have 0.2) and `beta` (0.5). log of x + eps: `eps` (0).
        clip: `lo` and `hi` (none). prelu: `slope`, an array of float32 [input_size], which is learned.

    Attributes
    ----------
    parameters : mapping of str to float
    input_size, output_size : int or None
        None but for prelu: it takes any size; both are those of the layer before.

    Raises
    ------
    TypeError
        If `function` is not a str, or a parameter no number.
    ValueError
        For another name, a parameter that the function has not, or that is not finite; `lo` above `hi`.
    """

    kind = "Activation"
    part = "activation"
    fields = MappingProxyType({"slope": "slope"})

    def __init__(self, function: str, *, name: str | None = None, **parameters: Any) -> None:
        if hasattr(function, "forward"):
            function, parameters = _of_module(function, parameters)
        if not isinstance(function, str):
            raise TypeError(f"function must be a str, got {type(function).__name__}")
        if function not in FUNCTIONS:
            raise ValueError(f"function must be one of {', '.join(FUNCTIONS)}, got {function!r}")
        self.function = function
        sizes = {}
        if function == "prelu":
            self.weights, sizes = checked(parameters, SLOPE, "prelu")
            parameters = {}
        self.input_size = self.output_size = sizes.get("N")
        self.parameters = MappingProxyType(checked_parameters(function, parameters))
        with_name(self, name)

    def __repr__(self):
        given = [f"{name}={value:.7g}" for name, value in self._given().items()]
        size = [f"{self.input_size}"] if self.input_size else []
        return f"Activation({', '.join([repr(self.function), *size, *given])})"

    def _given(self) -> dict[str, float]:
        """The parameters that are not infinite, which a file has."""
        return {name: value for name, value in self.parameters.items() if math.isfinite(value)}

    def options(self, size: int) -> dict[str, float]:
        alpha, beta = [*self.parameters.values(), 0.0, 0.0][:2]
        return {"n": size, "f": list(FUNCTIONS).index(self.function), "alpha": alpha, "beta": beta}

    def entry(self) -> dict:
        return {"function": self.function} | self._given()

    @classmethod
    def from_entry(cls, entry: dict, weights: Mapping[str, np.ndarray], read: Callable) -> Layer | None:
        given = dict(entry)
        function = given.pop("function", None)
        if not isinstance(function, str) or function not in FUNCTIONS or not given.keys() <= FUNCTIONS[function].keys():
            return None
        if function != "prelu" and weights:
            return None
        return cls(function, **given, **weights)


# ---------------------------------------------------------------------------------------------- torch.nn


def _softplus(module) -> dict:
    if module.beta != 1 or module.threshold < 20:  # from 20 on both branches are x in float32
        raise ValueError(f"Softplus must have beta 1 and a threshold of at least 20, got {module}")
    return {"function": "softplus"}


def _softmax(module) -> dict:
    if module.dim not in (None, -1):
        raise ValueError(f"Softmax must have dim=-1, got {module}")
    return {"function": "softmax"}


def _prelu(module) -> dict:
    slope = module.weight.detach()
    if slope.numel() == 1:
        return {"function": "leaky_relu", "slope": float(slope)}
    return {"function": "prelu", "slope": slope}


MODULES: Mapping[str, Callable[[Any], dict]] = MappingProxyType(
    {
        "Tanh": lambda module: {"function": "tanh"},
        "ReLU": lambda module: {"function": "relu"},
        "Sigmoid": lambda module: {"function": "sigmoid"},
        "ELU": lambda module: {"function": "elu", "alpha": module.alpha},
        "SELU": lambda module: {"function": "selu"},
        "SiLU": lambda module: {"function": "silu"},
        "GELU": lambda module: {"function": "gelu_tanh" if module.approximate == "tanh" else "gelu"},
        "LeakyReLU": lambda module: {"function": "leaky_relu", "slope": module.negative_slope},
        "PReLU": _prelu,
        "Softplus": _softplus,
        "Hardsigmoid": lambda module: {"function": "hard_sigmoid"},
        "Hardswish": lambda module: {"function": "hard_swish"},
        "Hardtanh": lambda module: {"function": "clip", "lo": module.min_val, "hi": module.max_val},
        "ReLU6": lambda module: {"function": "clip", "lo": 0.0, "hi": 6.0},
        "Softmax": _softmax,
    }
)


def _of_module(module, parameters: Mapping) -> tuple[Any, dict]:
    """Function and parameters of a module of torch.nn; the module itself where it is another one."""
    if parameters:
        raise TypeError(f"{listed(parameters)} must not be given beside a module, which brings its own")
    name = type(module).__name__
    if name not in MODULES:
        raise TypeError(f"function must be a str or a module of torch.nn ({', '.join(MODULES)}), got {name}")
    check_own_forward(module)
    given = MODULES[name](module)
    return given.pop("function"), given
