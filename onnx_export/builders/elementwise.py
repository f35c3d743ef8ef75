"""Layers that act on each frame without matrix products: LayerNorm and Activation."""

from __future__ import annotations

from onnx_export.builders.norms import layer_norm

_OPERATORS = {"relu": "Relu", "tanh": "Tanh", "sigmoid": "Sigmoid"}


def states(layer) -> dict[str, int]:
    return {}


def build(graph, layer, weights, x, states):
    if layer.kind == "Activation":
        return graph.add(_OPERATORS[layer.function], x, name="y"), {}
    return layer_norm(graph, x, weights["weight"], weights.get("bias"), layer.eps, "y"), {}
