"""Linear layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from cnorm.cells.rounded import Matrix, Rows
from cnorm.cells.tensors import Tensor
from cnorm.layers.base import Layer, check_own_forward, weight_and_bias, with_name

LINEAR = Tensor("weight", ("O", "I")), Tensor("bias", ("O",), optional=True)


class Linear(Layer):
    """y = weight x + bias.

    Parameters
    ----------
    weight : ndarray, shape (output_size, input_size), float32 (float16 and bfloat16 are widened)
        Or a torch.nn.Linear, whose bias is then taken too. A kernel [inputs, outputs] of Keras is given as kernel.T.
    bias : ndarray, shape (output_size,), optional
    name : str, optional
        As of `Add`.

    Raises
    ------
    TypeError, ValueError
        As `LSTM`.
    """

    kind = "Linear"
    part = "linear"
    fields = MappingProxyType({"weight": "weight", "bias": "bias"})

    def __init__(self, weight: Any, bias: Any = None, *, name: str | None = None) -> None:
        if hasattr(weight, "in_features") and hasattr(weight, "weight"):  # a torch.nn.Linear
            if bias is not None:
                raise TypeError("bias must not be given beside a module, which brings its own")
            check_own_forward(weight)
            weight, bias = weight.weight, weight.bias
        sizes = self._take_weights(LINEAR, weight, bias)
        self.output_size, self.input_size = sizes["O"], sizes["I"]
        with_name(self, name)

    def __repr__(self):
        return f"Linear({self.input_size} -> {self.output_size})"

    def with_product(self, weight: np.ndarray, bias: np.ndarray) -> Layer:
        """A layer with another weight and bias."""
        return Linear(weight, bias)

    def matrices(self) -> dict[str, Matrix]:
        return {"weight": Matrix(self.weights["weight"])}

    @classmethod
    def filled(cls, entry: dict, rows: Mapping[str, Rows], others: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        if rows.keys() != {"weight"} or "weight" in others:
            raise ValueError(f"the matrix of a rounded Linear must be rows.weight, got {sorted(rows)}")
        return others | {"weight": rows["weight"].values()}

    @classmethod
    def from_entry(cls, entry: dict, weights: Mapping[str, np.ndarray], read: Callable) -> Layer | None:
        return None if entry else cls(**weight_and_bias(cls.kind, weights))
