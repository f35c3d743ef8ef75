"""Products with a vector."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from cnorm.cells.tensors import Tensor
from cnorm.cells.weights import checked
from cnorm.layers.base import Layer, with_name

SCALE = (Tensor("weight", ("N",)),)


class Scale(Layer):
    """y = x weight, element by element: a learned scale, as LayerScale of residual branches or the scale of features.

    Parameters
    ----------
    weight : ndarray, shape (input_size,), float32 (float16 and bfloat16 are widened)
        Or a torch.nn.Parameter or tensor, whose values are taken.
    name : str, optional
        As of `Add`.

    Raises
    ------
    TypeError, ValueError
        As `LSTM`.
    """

    kind = "Scale"
    part = "scale"
    fields = MappingProxyType({"weight": "weight"})

    def __init__(self, weight: Any, *, name: str | None = None) -> None:
        self.weights, sizes = checked({"weight": weight}, SCALE, "Scale")
        self.input_size = self.output_size = sizes["N"]
        with_name(self, name)

    def __repr__(self):
        return f"Scale({self.input_size})"

    def options(self, size: int) -> dict[str, float]:
        return {"n": size}

    @classmethod
    def from_entry(cls, entry: dict, weights: Mapping[str, np.ndarray], read: Callable) -> Layer | None:
        if entry or weights.keys() != {"weight"}:
            return None
        return cls(weights["weight"])
