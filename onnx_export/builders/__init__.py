"""One builder per kind of layer: the ONNX nodes of a layer.

A builder module has

``states(layer)``
    Recurrent arrays as {"h": units, ...}; only where layers have memory.
``build(graph, layer, weights, x, states)``
    Appends the nodes of one step to a `GraphBuilder` and returns (y, new states). `weights` maps the layer's
    weights, and what it reads by name, to the names of their values; `x` [B, input_size] and `states` [B, units] are
    names of values too.
"""

from __future__ import annotations

from importlib import import_module, util
from types import ModuleType

from cnorm.layers import KINDS
from onnx_export.builders import native

__all__ = ["builder", "native", "states_of"]

_SHARED = {
    "Activation": "elementwise",
    "Add": "taps",
    "CausalConv1d": "conv",
    "Concat": "taps",
    "Conv1d": "conv",
    "ConvTranspose1d": "frames",
    "LayerNorm": "elementwise",
    "MaxPool1d": "frames",
    "Multiply": "taps",
    "OverPositions": "positions",
    "PerPosition": "positions",
    "Permute": "frames",
    "Slice": "taps",
}  # modules of several kinds; that of another kind has its name in small letters
_MODULES = {kind: f"{__name__}.{_SHARED.get(kind, kind.lower())}" for kind in KINDS}
_BUILDERS = {kind: import_module(name) for kind, name in _MODULES.items() if util.find_spec(name)}
_REFUSED = {
    "Bidirectional": "its backward half needs the end of the sequence before the start, so a graph of it has no "
    "states to carry from chunk to chunk",
}


def builder(layer) -> ModuleType:
    """The module that builds `layer`.

    Raises
    ------
    ValueError
        If there is none, with the reason.
    """
    kind = getattr(layer, "kind", None)
    if kind not in _BUILDERS:
        reason = _REFUSED.get(kind, f"there is one for {', '.join(sorted(_BUILDERS))}")
        raise ValueError(f"model: there is no ONNX form of {layer!r}: {reason}")
    return _BUILDERS[kind]


def states_of(layer) -> dict[str, int]:
    """The recurrent arrays of a layer, {"h": units, ...}; as `builder` for a layer without an ONNX form."""
    module = builder(layer)
    return module.states(layer) if layer.stateful else {}
