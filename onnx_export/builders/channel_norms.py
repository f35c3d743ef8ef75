"""Batch, group, instance and divisive normalisation: as operators where the opset has them, else composed.

x is [samples, channels, *space], or [rows, n] for divisive normalisation; `space` is the number of space axes.
"""

from __future__ import annotations

import numpy as np

from onnx_export.builders import norms

GROUP_NORM_OPSET = 21  # GroupNormalization has one scale per channel from here on


def batch_norm(graph, x: str, gain: str, bias: str, mean: str, var: str, eps: float, name: str) -> str:
    """(x - mean) / sqrt(var + eps) * gain + bias with given statistics of each channel."""
    return graph.add("BatchNormalization", x, gain, bias, mean, var, name=name, epsilon=eps)


def instance_norm(graph, x: str, gain: str, bias: str, eps: float, name: str) -> str:
    """Each channel of each sample over its space."""
    return graph.add("InstanceNormalization", x, gain, bias, name=name, epsilon=eps)


def group_norm(graph, x: str, groups: int, gain: str, bias: str, eps: float, name: str, space: int) -> str:
    """Each group of channels of each sample with their space."""
    if graph.has(GROUP_NORM_OPSET) and space:  # the operator's x is [N, C, D1, ...]
        return graph.add("GroupNormalization", x, gain, bias, name=name, num_groups=groups, epsilon=eps)
    # instance norm with gain 1 of the groups as channels; the gain of each channel is applied after it
    grouped = graph.constant([0, groups, -1], f"{name}_groups", np.int64)
    rows = graph.add("Reshape", x, grouped, name=f"{name}_rows")
    one, zero = graph.constant(np.ones(groups), f"{name}_one"), graph.constant(np.zeros(groups), f"{name}_zero")
    rows = instance_norm(graph, rows, one, zero, eps, f"{name}_normalised")
    shape = graph.add("Shape", x, name=f"{name}_shape")
    y = graph.add("Reshape", rows, shape, name=f"{name}_restored")
    broad = graph.constant([-1] + [1] * space, f"{name}_broad", np.int64)
    gain = graph.add("Reshape", gain, broad, name=f"{name}_gain")
    bias = graph.add("Reshape", bias, broad, name=f"{name}_bias")
    return graph.add("Add", graph.add("Mul", y, gain, name=f"{name}_scaled"), bias, name=name)


def divisive_norm(graph, x: str, gain: str, bias: str, sigma: float, radii, name: str) -> str:
    """v / sqrt(sigma^2 + mean of v^2 over a field) * gain + bias, v = x - mean over a field; radii None: the row."""
    mean = _field_mean(graph, x, radii[0], f"{name}_mean")
    centred = graph.add("Sub", x, mean, name=f"{name}_centred")
    square = graph.add("Mul", centred, centred, name=f"{name}_square")
    power = _field_mean(graph, square, radii[1], f"{name}_power")
    smoothing = graph.constant(sigma * sigma, f"{name}_smoothing")
    root = graph.add("Sqrt", graph.add("Add", power, smoothing, name=f"{name}_power_sigma"), name=f"{name}_root")
    y = graph.add("Div", centred, root, name=f"{name}_normalised")
    return graph.add("Add", graph.add("Mul", y, gain, name=f"{name}_scaled"), bias, name=name)


def _field_mean(graph, x, radius, name):
    """The mean over the neighbours within a radius; a pooling without padding in the count truncates it at the ends."""
    if radius is None:
        return norms.mean(graph, x, name, 1)
    axis = graph.constant([1], f"{name}_axis", np.int64)
    wide = graph.add("Unsqueeze", x, axis, name=f"{name}_wide")
    size = {"kernel_shape": [2 * radius + 1], "pads": [radius, radius], "strides": [1]}
    pooled = graph.add("AveragePool", wide, name=f"{name}_pooled", count_include_pad=0, **size)
    return graph.add("Squeeze", pooled, axis, name=name)
