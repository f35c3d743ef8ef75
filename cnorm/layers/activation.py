"""Functions of each element."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from cnorm.layers.base import Layer, with_name
from cnorm.packing import ACTIVATION as FUNCTIONS

MODULES = {"Tanh": "tanh", "ReLU": "relu", "Sigmoid": "sigmoid"}  # of torch.nn


class Activation(Layer):
    """A function of each element: "relu", "tanh" or "sigmoid".

    Parameters
    ----------
    function : str
        Or a torch.nn.ReLU, Tanh or Sigmoid.
    name : str, optional
        As of `Add`.

    Attributes
    ----------
    input_size, output_size : None
        It takes any size; both are those of the layer before.

    Raises
    ------
    TypeError
        If `function` is not a str.
    ValueError
        For another name.
    """

    kind = "Activation"
    part = "activation"

    def __init__(self, function: str, *, name: str | None = None) -> None:
        if hasattr(function, "forward"):
            function = MODULES.get(type(function).__name__, function)
        if not isinstance(function, str):
            raise TypeError(f"function must be a str, got {type(function).__name__}")
        if function not in FUNCTIONS:
            raise ValueError(f"function must be one of {', '.join(FUNCTIONS)}, got {function!r}")
        self.function = function
        self.input_size = self.output_size = None
        with_name(self, name)

    def __repr__(self):
        return f"Activation({self.function!r})"

    def __reduce__(self):
        return Activation, (self.function,)

    def options(self, size: int) -> dict[str, float]:
        return {"n": size, "f": FUNCTIONS.index(self.function)}

    def entry(self) -> dict:
        return {"function": self.function}

    @classmethod
    def from_entry(cls, entry: dict, weights: Mapping[str, np.ndarray], read: Callable) -> Layer | None:
        return cls(entry["function"]) if entry.keys() == {"function"} else None
