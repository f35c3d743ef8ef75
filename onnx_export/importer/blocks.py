"""What operators of several files make: blocks of scales, shifts and products."""

from __future__ import annotations

import numpy as np

from onnx_export.importer.elements import Cannot, Elements

__all__ = ["each", "is_elements", "product", "scale", "shift"]


def is_elements(value) -> bool:
    return isinstance(value, Elements)


def each(value) -> np.ndarray:
    """The operand of an elementwise block: one term in each row."""
    return value.numbers.reshape(-1, 1)


def shift(trace, node, x, offset):
    offset = np.broadcast_to(np.asarray(offset, np.float64), x.shape).ravel()
    return x if not offset.any() else trace.add("shift", node, x.shape, [each(x)], offset=offset)


def scale(trace, node, x, factor):
    factor = np.broadcast_to(np.asarray(factor, np.float64), x.shape).ravel()
    return x if (factor == 1).all() else trace.add("scale", node, x.shape, [each(x)], factor=factor)


def product(trace, node, rows, weight):
    """rows: numbers [..., terms]; weight [outputs, terms] -> [..., outputs]."""
    if rows.shape[-1] != weight.shape[1]:
        raise Cannot(f"it multiplies {rows.shape[-1]} elements by a matrix with {weight.shape[1]}")
    operand = rows.reshape(-1, rows.shape[-1])
    return trace.add("product", node, (*rows.shape[:-1], len(weight)), [operand], weight=np.asarray(weight))
