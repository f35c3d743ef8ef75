"""Operators that normalise a row: layer norms as they are, RMS norms as layer norms of the row and its negative.

The row (x, -x) has the mean 0 and the variance mean(x^2), so the first half of its layer norm is x / sqrt(mean(x^2) +
eps), and `LayerNorm` computes both.
"""

from __future__ import annotations

from math import prod

import numpy as np

from onnx_export.importer.blocks import each, is_elements, scale, shift
from onnx_export.importer.elements import Cannot, Elements
from onnx_export.operators import LAYER, RMS, Operator

__all__ = ["FORMULAS", "norm", "rms_norm"]

FORMULAS = {LAYER, RMS}
SUM = 3  # the output of a Skip norm that is its input plus what is added


def norm(trace, node: str, operator: Operator, attributes, inputs, outputs) -> list:
    """What an operator of one of FORMULAS makes; `outputs` are names, "" of those that nobody wants."""
    if any(outputs[1:SUM]):
        raise Cannot("its statistics are read")
    x, *added = (inputs[at] for at in (operator.x, *operator.added) if at < len(inputs) and inputs[at] is not None)
    for value in added:
        x = _sum(trace, node, x, value)
    gain, bias = (None if at is None or at >= len(inputs) else inputs[at] for at in (operator.scale, operator.bias))
    if is_elements(gain) or is_elements(bias) or not is_elements(x):
        raise Cannot("its scale and bias must be constants")
    axis = attributes.get("axis", -1) % len(x.shape)
    rows = Elements(x.numbers.reshape(prod(x.shape[:axis]), -1))
    eps = float(attributes.get("epsilon", operator.eps))
    if operator.formula is RMS:
        y = rms_norm(trace, node, rows, eps)
    else:
        y = trace.add("norm", node, rows.shape, [rows.numbers], eps=eps)
    y = scale(trace, node, Elements(y.numbers.reshape(x.shape)), gain)
    return [y if bias is None else shift(trace, node, y, bias), None, None, x]


def _sum(trace, node: str, x, value) -> Elements:
    if np.shape(x)[-1:] != np.shape(value)[-1:] or (is_elements(x) and is_elements(value) and x.shape != value.shape):
        raise Cannot("what is added to its input has another shape")
    if is_elements(x) and is_elements(value):
        return trace.add("add", node, x.shape, [each(x), each(value)])
    return shift(trace, node, *((x, value) if is_elements(x) else (value, x)))


def rms_norm(trace, node: str, rows: Elements, eps: float) -> Elements:
    """x / sqrt(mean(x^2) + eps) of each of some rows [rows, n]."""
    both = np.concatenate([rows.numbers, scale(trace, node, rows, -1).numbers], axis=1)
    return Elements(trace.add("norm", node, both.shape, [both], eps=eps).numbers[:, : rows.shape[1]])
