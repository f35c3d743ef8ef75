"""Normalisation over the last axes: as an operator where the opset has one, else composed of other operators.

Composed norms square with Mul(d, d): onnxruntime's fusions match a Pow, or eps as the first operand of the Add, and
have replaced such patterns by norms that compute something else. Composed norms compute in float32, as the operators
do with stash_type=1: in float16 squares overflow from 256 on.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

LAYER_NORM_OPSET = 17  # LayerNormalization is an operator from here on
RMS_NORM_OPSET = 23  # RMSNormalization is an operator from here on


def checked_eps(eps: float | None, of: str = "eps") -> float | None:
    """`eps`, as stored in float32, unless it is 0: then ONNX gives NaN for constant rows, cnorm the bias."""
    if eps == 0:
        raise ValueError(f"{of} must be positive in float32: where the variance is 0 too, ONNX would give NaN, got 0")
    return eps


def layer_norm(graph, x: str, gain: str, bias: str | None, eps: float, name: str, rank: int = 1) -> str:
    """(x - mean) / sqrt(var + eps) * gain + bias over the last `rank` axes."""
    if graph.has(LAYER_NORM_OPSET):
        given = (x, gain) if bias is None else (x, gain, bias)
        return graph.add("LayerNormalization", *given, name=name, axis=-rank, epsilon=eps, stash_type=1)
    wide = _widened(graph, x, name)
    centred = graph.add("Sub", wide, mean(graph, wide, f"{name}_mean", rank), name=f"{name}_centred")
    return _scaled(graph, centred, gain, bias, eps, name, rank)


def rms_norm(graph, x: str, gain: str, eps: float, name: str, rank: int = 1) -> str:
    """x / sqrt(mean(x^2) + eps) * gain over the last `rank` axes."""
    if graph.has(RMS_NORM_OPSET):
        return graph.add("RMSNormalization", x, gain, name=name, axis=-rank, epsilon=eps, stash_type=1)
    return _scaled(graph, _widened(graph, x, name), gain, None, eps, name, rank)


def _scaled(graph, x, gain, bias, eps, name, rank):
    """x / sqrt(mean(x^2) + eps) * gain + bias, with x in float32."""
    square = graph.add("Mul", x, x, name=f"{name}_square")
    power = mean(graph, square, f"{name}_power", rank)
    small = graph.constant(eps, f"{name}_eps", np.float32)
    root = graph.add("Sqrt", graph.add("Add", power, small, name=f"{name}_power_eps"), name=f"{name}_root")
    y = graph.add("Div", x, root, name=f"{name}_normalised")
    if graph.dtype == np.float16:
        y = graph.add("Cast", y, name=f"{name}_narrow", to=TensorProto.FLOAT16)
    y = graph.add("Mul", y, gain, name=name if bias is None else f"{name}_scaled")
    return y if bias is None else graph.add("Add", y, bias, name=name)


def _widened(graph, x, name):
    if graph.dtype != np.float16:
        return x
    return graph.add("Cast", x, name=f"{name}_wide", to=TensorProto.FLOAT)


def mean(graph, x, name, rank):
    """The mean over the last `rank` axes, which stay with length 1."""
    axes = list(range(-rank, 0))
    if graph.opset >= 18:  # from here on axes are an input, not an attribute
        return graph.add("ReduceMean", x, graph.constant(axes, f"{name}_axes", np.int64), name=name, keepdims=1)
    return graph.add("ReduceMean", x, name=name, axes=axes, keepdims=1)
