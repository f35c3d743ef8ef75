"""One builder per family of layers: what an instance of it is, in ONNX operators.

A builder module has

``KIND``
    The `kind` of the layers it builds.
``FIRST_OPSET``
    The first opset of the default domain in which its form is valid.
``states(layer)``
    Recurrent arrays as {"h": units, ...}; empty for a layer without memory.
``build(graph, layer, weights, x, states)``
    Appends the nodes of one step to a `GraphBuilder` and returns (y, new states). `weights` maps the layer's
    weights to the names of their values, `x` [B, input_size] and `states` [B, units] are names of values too.
"""

from __future__ import annotations

from types import ModuleType

from onnx_export.builders import linear, lstm

__all__ = ["builder"]

_BUILDERS = {module.KIND: module for module in (linear, lstm)}


def builder(layer) -> ModuleType:
    """The module that builds `layer`.

    Raises
    ------
    ValueError
        If there is none.
    """
    try:
        return _BUILDERS[layer.kind]
    except (AttributeError, KeyError):
        known = ", ".join(sorted(_BUILDERS))
        raise ValueError(f"model: no ONNX form is known for {layer!r}; there is one for {known}") from None
