"""Normalisation over the last axis, in the form that each opset has for it."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto


def layer_norm(graph, x: str, gain: str, bias: str, eps: float, name: str) -> str:
    """LN(x) * gain + bias; LayerNormalization from opset 17, composed below.

    The composed form squares with Mul(d, d): a Pow, or eps as the first operand of the Add, is what
    onnxruntime's fusions recognise, and they have taken such patterns for norms they are not. It computes in
    float32, as stash_type=1 makes the operator do: in float16 the squares overflow from 256 on.
    """
    if graph.opset >= 17:
        return graph.add("LayerNormalization", x, gain, bias, name=name, axis=-1, epsilon=eps, stash_type=1)
    half = graph.dtype == np.float16
    if half:
        x = graph.add("Cast", x, name=f"{name}_wide", to=TensorProto.FLOAT)
    mean = graph.add("ReduceMean", x, name=f"{name}_mean", axes=[-1], keepdims=1)
    centred = graph.add("Sub", x, mean, name=f"{name}_centred")
    square = graph.add("Mul", centred, centred, name=f"{name}_square")
    variance = graph.add("ReduceMean", square, name=f"{name}_variance", axes=[-1], keepdims=1)
    small = graph.constant(eps, f"{name}_eps", np.float32)
    shifted = graph.add("Add", variance, small, name=f"{name}_variance_eps")
    deviation = graph.add("Sqrt", shifted, name=f"{name}_deviation")
    normalised = graph.add("Div", centred, deviation, name=f"{name}_normalised")
    if half:
        normalised = graph.add("Cast", normalised, name=f"{name}_narrow", to=TensorProto.FLOAT16)
    scaled = graph.add("Mul", normalised, gain, name=f"{name}_scaled")
    return graph.add("Add", scaled, bias, name=name)
