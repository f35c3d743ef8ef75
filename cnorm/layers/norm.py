"""Layer normalisation as a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from cnorm._core import BoundLayerNorm, rounded
from cnorm.cells.tensors import Tensor
from cnorm.cells.weights import of_layer_norm
from cnorm.layers.base import Layer, check_own_forward, weight_and_bias, with_name

LAYER_NORM = Tensor("weight", ("N",)), Tensor("bias", ("N",), optional=True)


class LayerNorm(Layer, BoundLayerNorm):
    """y = LN(x) weight + bias over the last dimension (arXiv:1607.06450, Eq. 3).

    As a layer of a `Model` it normalises a frame. It can also be called: ``norm = cnorm.LayerNorm(weight, bias)``, then
    ``norm(x)`` or ``norm(x, out)``, is `layer_norm` with parameters that are checked once, not at every call.

    Parameters
    ----------
    weight : ndarray, shape (input_size,), float32 (float16 and bfloat16 are widened)
        Or a torch.nn.LayerNorm of one dimension, whose bias and eps are then taken too.
    bias : ndarray, shape (input_size,), optional
    eps : float, optional
        Added to the variance, rounded to float32; 1e-5 if not given.
    name : str, optional
        As of `Add`.

    Raises
    ------
    TypeError, ValueError
        As `LSTM`.
    """

    kind = "LayerNorm"
    part = "norm"
    fields = MappingProxyType({"weight": "gain", "bias": "bias"})

    def __init__(self, weight: Any, bias: Any = None, *, eps: float | None = None, name: str | None = None) -> None:
        if hasattr(weight, "normalized_shape"):  # a torch.nn.LayerNorm
            if bias is not None or eps is not None:
                raise TypeError("bias and eps must not be given beside a module, which brings its own")
            check_own_forward(weight)
            weight, bias, eps = of_layer_norm(weight)
        if isinstance(weight, (int, tuple)):
            raise TypeError(
                f"weight must be an array, got {type(weight).__name__}: there is no normalized_shape; for {weight} "
                f"without a gain write np.ones({weight}, np.float32)"
            )
        sizes = self._take_weights(LAYER_NORM, weight, bias)
        self.eps = rounded(1e-5 if eps is None else eps, "eps")
        self.input_size = self.output_size = sizes["N"]
        self._bind(self.weights["weight"], self.weights.get("bias"), self.eps)
        with_name(self, name)

    def __repr__(self):
        return f"LayerNorm({self.input_size}, eps={self.eps:g})"

    def options(self, size: int) -> dict[str, float]:
        return {"n": size, "eps": self.eps}

    def entry(self) -> dict:
        return {"eps": self.eps}

    @classmethod
    def from_entry(cls, entry: dict, weights: Mapping[str, np.ndarray], read: Callable) -> Layer | None:
        return cls(**weight_and_bias(cls.kind, weights), **entry) if entry.keys() == {"eps"} else None
