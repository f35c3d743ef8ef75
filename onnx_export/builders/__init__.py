"""One builder per kind of layer: the ONNX nodes of a layer.

A builder module has

``states(layer)``
    Recurrent arrays as {"h": units, ...}; empty for a layer without memory.
``build(graph, layer, weights, x, states)``
    Appends the nodes of one step to a `GraphBuilder` and returns (y, new states). `weights` maps the layer's
    weights, and what it reads by name, to the names of their values; `x` [B, input_size] and `states` [B, units] are
    names of values too.
"""

from __future__ import annotations

from types import ModuleType

from onnx_export.builders import conv, elementwise, embedding, gru, linear, lstm, native, rnn, scale, taps

__all__ = ["builder", "native"]

_BUILDERS = {
    "Activation": elementwise,
    "Add": taps,
    "CausalConv1d": conv,
    "Concat": taps,
    "Conv1d": conv,
    "Embedding": embedding,
    "GRU": gru,
    "LSTM": lstm,
    "LayerNorm": elementwise,
    "Linear": linear,
    "Multiply": taps,
    "RNN": rnn,
    "Scale": scale,
    "Slice": taps,
}
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
