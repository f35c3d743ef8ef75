"""Normalisation over the last axis, in the form that each opset has for it."""

from __future__ import annotations


def layer_norm(graph, x: str, gain: str, bias: str, eps: float, name: str) -> str:
    """LN(x) * gain + bias; LayerNormalization from opset 17, composed below.

    The composed form squares with Mul(d, d): a Pow, or eps as the first operand of the Add, is what
    onnxruntime's fusions recognise, and they have taken such patterns for norms they are not.
    """
    if graph.opset >= 17:
        return graph.add("LayerNormalization", x, gain, bias, name=name, axis=-1, epsilon=eps, stash_type=1)
    mean = graph.add("ReduceMean", x, name=f"{name}_mean", axes=[-1], keepdims=1)
    centred = graph.add("Sub", x, mean, name=f"{name}_centred")
    square = graph.add("Mul", centred, centred, name=f"{name}_square")
    variance = graph.add("ReduceMean", square, name=f"{name}_variance", axes=[-1], keepdims=1)
    shifted = graph.add("Add", variance, graph.constant(eps, f"{name}_eps"), name=f"{name}_variance_eps")
    deviation = graph.add("Sqrt", shifted, name=f"{name}_deviation")
    normalised = graph.add("Div", centred, deviation, name=f"{name}_normalised")
    scaled = graph.add("Mul", normalised, gain, name=f"{name}_scaled")
    return graph.add("Add", scaled, bias, name=name)
