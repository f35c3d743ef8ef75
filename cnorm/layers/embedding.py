"""Embeddings of token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from cnorm.cells.rounded import Matrix, Rows
from cnorm.cells.tensors import Tensor
from cnorm.cells.weights import checked
from cnorm.layers.base import Layer, check_own_forward, with_name
from cnorm.text import listed

TABLE = (Tensor("weight", ("T", "O")),)
TOKENS = 1 << 24  # CNORM_TOKENS of cnorm_rnn.h


class Embedding(Layer):
    """y = row x of a table, for one token id x in a frame.

    The id is an integer from 0 to the number of tokens less 1, as a float32 number. It is an element of the frame: the
    layer is the first of a model, or stands behind a `Slice` or `Concat` of the frame. A call with another number in
    its place is a ValueError that names it, and no frame of the call is processed.

    Parameters
    ----------
    weight : ndarray, shape (tokens, output_size), float32 (float16 and bfloat16 are widened)
        At most 2^24 tokens. Or a torch.nn.Embedding without max_norm.
    name : str, optional
        As of `Add`.

    Attributes
    ----------
    tokens : int

    Raises
    ------
    TypeError, ValueError
        As `LSTM`.

    Examples
    --------
    >>> import cnorm, numpy as np
    >>> model = cnorm.Model([cnorm.Embedding(np.arange(6, dtype=np.float32).reshape(3, 2))])
    >>> model.run(np.array([[2], [0]], np.float32))
    array([[4., 5.],
           [0., 1.]], dtype=float32)
    """

    kind = "Embedding"
    part = "embedding"
    fields = MappingProxyType({"weight": "weight"})

    def __init__(self, weight: Any, *, name: str | None = None) -> None:
        if hasattr(weight, "num_embeddings") and hasattr(weight, "weight"):  # a torch.nn.Embedding
            if weight.max_norm is not None:
                raise ValueError(f"the module must have no max_norm, got {weight.max_norm}: it changes the table")
            check_own_forward(weight)
            weight = weight.weight
        self.weights, sizes = checked({"weight": weight}, TABLE, "Embedding")
        self.tokens, self.output_size, self.input_size = sizes["T"], sizes["O"], 1
        if self.tokens > TOKENS:
            raise ValueError(f"weight must have at most {TOKENS} rows, got {self.tokens}")
        with_name(self, name)

    def __repr__(self):
        return f"Embedding({self.tokens} tokens -> {self.output_size})"

    def options(self, size: int) -> dict[str, float]:
        return {"inputs": 1}

    # the runtime's matrix is [outputs, tokens]: the product of a Linear with a vector that is 1 at the id, else 0

    def packed(self, weights: Mapping[str, np.ndarray] | None = None) -> dict:
        return {"weight": np.ascontiguousarray((self.weights if weights is None else weights)["weight"].T)}

    def matrices(self) -> dict[str, Matrix]:
        return {"weight": Matrix(np.ascontiguousarray(self.weights["weight"].T))}

    def longest_sum(self) -> int:
        return 1  # it copies a column

    def gradient_targets(self, into: Mapping[str, np.ndarray]) -> list[tuple[np.ndarray, str, int | None]]:
        return [(into["weight"].T, "weight", 0)]

    @classmethod
    def filled(cls, entry: dict, rows: Mapping[str, Rows], others: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        if rows.keys() != {"weight"} or others:
            raise ValueError(f"the table of a rounded Embedding must be rows.weight, got {sorted(rows)}")
        return {"weight": np.ascontiguousarray(rows["weight"].values().T)}

    @classmethod
    def from_entry(cls, entry: dict, weights: Mapping[str, np.ndarray], read: Callable) -> Layer | None:
        if weights.keys() != {"weight"}:
            raise ValueError(f"Embedding must have the tensor weight, got {listed(sorted(weights))}")
        return None if entry else cls(weights["weight"])


def in_tokens(x: np.ndarray, tokens: Mapping[int, int]) -> np.ndarray:
    """A copy of frames [..., inputs] whose elements `tokens` are ids, made of what they have there: for random frames.

    `tokens` is `Model.tokens`.
    """
    x = x.copy()
    for element, count in tokens.items():
        x[..., element] = np.floor(np.abs(x[..., element]) * 1024) % count
    return x
