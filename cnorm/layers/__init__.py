"""Layers: immutable descriptions that hold the original weights. `Model` packs and runs them."""

from __future__ import annotations

from types import MappingProxyType

from cnorm.layers.activation import Activation
from cnorm.layers.base import Layer, chained, ends, flat, with_type
from cnorm.layers.bidirectional import Bidirectional
from cnorm.layers.cells import GRU, LSTM, RNN, cell_spec, check_with, checked_eps, spec_of, with_values
from cnorm.layers.linear import Linear
from cnorm.layers.norm import LayerNorm
from cnorm.layers.residual import Residual
from cnorm.layers.scale import Scale

__all__ = [
    "CELLS",
    "GRU",
    "KINDS",
    "LSTM",
    "RNN",
    "Activation",
    "Bidirectional",
    "Layer",
    "LayerNorm",
    "Linear",
    "Residual",
    "Scale",
    "cell_spec",
    "chained",
    "check_with",
    "checked_eps",
    "ends",
    "flat",
    "spec_of",
    "with_type",
    "with_values",
]

KINDS = MappingProxyType(
    {one.kind: one for one in (LSTM, GRU, RNN, Linear, LayerNorm, Activation, Residual, Bidirectional, Scale)}
)
"""Layers by the name that a model file has for them."""

CELLS = MappingProxyType({name: one for name, one in KINDS.items() if one.recurrent})
