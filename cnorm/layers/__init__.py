"""Layers: immutable descriptions that hold the original weights. `Model` packs and runs them."""

from __future__ import annotations

from types import MappingProxyType

from cnorm.layers.activation import Activation
from cnorm.layers.base import INPUT, Layer, name_of, with_name, with_type
from cnorm.layers.bidirectional import Bidirectional
from cnorm.layers.cells import GRU, LSTM, RNN, cell_spec, check_with, checked_eps, spec_of, with_values
from cnorm.layers.chain import (
    chained,
    check_read,
    ends,
    flat,
    followed,
    named_outputs,
    shown,
    sizes_of,
    slices,
    with_outputs,
)
from cnorm.layers.conv import CausalConv1d, Conv, Conv1d
from cnorm.layers.embedding import Embedding, in_tokens
from cnorm.layers.linear import Linear
from cnorm.layers.norm import LayerNorm
from cnorm.layers.residual import Residual
from cnorm.layers.scale import Scale
from cnorm.layers.taps import Add, Concat, Multiply, Slice

__all__ = [
    "CELLS",
    "GRU",
    "INPUT",
    "KINDS",
    "LSTM",
    "RNN",
    "Activation",
    "Add",
    "Bidirectional",
    "CausalConv1d",
    "Concat",
    "Conv",
    "Conv1d",
    "Embedding",
    "Layer",
    "LayerNorm",
    "Linear",
    "Multiply",
    "Residual",
    "Scale",
    "Slice",
    "cell_spec",
    "chained",
    "check_read",
    "check_with",
    "checked_eps",
    "ends",
    "flat",
    "followed",
    "in_tokens",
    "name_of",
    "named_outputs",
    "shown",
    "sizes_of",
    "slices",
    "spec_of",
    "with_name",
    "with_outputs",
    "with_type",
    "with_values",
]

KINDS = MappingProxyType(
    {one.kind: one for one in (
        LSTM, GRU, RNN, Linear, LayerNorm, Activation, Residual, Bidirectional, Scale, Add, Multiply, Slice, Concat,
        CausalConv1d, Conv1d, Embedding,
    )}
)  # fmt: skip
"""Layers by the name that a model file has for them."""

CELLS = MappingProxyType({name: one for name, one in KINDS.items() if one.recurrent})
