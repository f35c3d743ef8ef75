"""y = weight x + bias."""

from __future__ import annotations

from onnx_export.builders import rounded


def build(graph, layer, weights, x, states):
    if layer.rows:
        value, scales = weights["rows.weight"], weights.get("rows.weight.scales")
        return rounded.product(graph, x, layer.rows["weight"], value, scales, "y", weights.get("bias")), {}
    return graph.product(x, weights["weight"], weights.get("bias"), "y"), {}
