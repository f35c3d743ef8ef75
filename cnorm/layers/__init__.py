"""Layers: immutable descriptions that hold the original weights. `Model` packs and runs them.

`__all__` is the one list of their kinds: those of a model file, and the names that `cnorm` has, follow from it.
"""

from __future__ import annotations

from types import MappingProxyType

from cnorm.layers.activation import Activation
from cnorm.layers.bidirectional import Bidirectional
from cnorm.layers.cells import GRU, LSTM, RNN
from cnorm.layers.conv import CausalConv1d, Conv1d
from cnorm.layers.conv_transpose import ConvTranspose1d
from cnorm.layers.delay import Delay
from cnorm.layers.embedding import Embedding
from cnorm.layers.linear import Linear
from cnorm.layers.max_pool import MaxPool1d
from cnorm.layers.norm import LayerNorm
from cnorm.layers.permute import Permute
from cnorm.layers.positions import OverPositions, PerPosition
from cnorm.layers.residual import Residual
from cnorm.layers.scale import Scale
from cnorm.layers.taps import Add, Concat, Multiply, Slice

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "Activation",
    "Add",
    "Bidirectional",
    "CausalConv1d",
    "Concat",
    "Conv1d",
    "ConvTranspose1d",
    "Delay",
    "Embedding",
    "LayerNorm",
    "Linear",
    "MaxPool1d",
    "Multiply",
    "OverPositions",
    "PerPosition",
    "Permute",
    "Residual",
    "Scale",
    "Slice",
]

KINDS = MappingProxyType({globals()[name].kind: globals()[name] for name in __all__})
"""Layers by the name that a model file has for them."""

CELLS = MappingProxyType({name: one for name, one in KINDS.items() if one.recurrent})
