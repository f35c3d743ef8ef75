"""Operators that normalise a row: layer norms as they are, RMS norms as layer norms of the row and its negative.

The row (x, -x) has the mean 0 and the variance mean(x^2), so the first half of its layer norm is x / sqrt(mean(x^2) +
eps), and `LayerNorm` computes both.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np

from onnx_export.importer.blocks import each, is_elements, scale, shift
from onnx_export.importer.elements import Block, Cannot, Elements
from onnx_export.importer.normed_rows import normed
from onnx_export.operators import LAYER, RMS, Operator

__all__ = ["FORMULAS", "distributed_norm", "norm", "written_norm"]

FORMULAS = {LAYER, RMS}
MAX_ROW = 1024  # elements of a row that is tried as a norm
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
        y = _rms_norm(trace, node, rows, eps)
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


def _rms_norm(trace, node: str, rows: Elements, eps: float) -> Elements:
    """x / sqrt(mean(x^2) + eps) of each of some rows [rows, n]."""
    both = np.concatenate([rows.numbers, scale(trace, node, rows, -1).numbers], axis=1)
    return Elements(trace.add("norm", node, both.shape, [both], eps=eps).numbers[:, : rows.shape[1]])


def written_norm(trace, block_of: Callable, block: Block) -> tuple[np.ndarray, float | None] | None:
    """What (x - mean) / sqrt(mean((x - mean)^2) + eps) reads, and eps; or the elements that are x / sqrt(mean(x^2) +
    eps), and None."""
    for d, s in _quotients(block_of, block):
        root = block_of(s[:1])
        if (s != s[0]).any() or not root or root.op != "root":
            continue
        inner, eps = block_of(root.operands[0].ravel()), 0.0
        if inner and inner.op == "shift":
            inner, eps = block_of(inner.operands[0].ravel()), float(inner.constants["offset"][0])
        squares = block_of(inner.operands[0].ravel()) if inner and inner.op == "mean" else None
        if not squares or squares.op not in ("multiply", "square") or squares.size != len(d):
            continue
        x = _centred(block_of, d)
        if x is not None and all(_same_elements(_centred(block_of, one.ravel()), x) for one in squares.operands):
            return x, eps
        if all(_same_elements(operand.ravel(), d) for operand in squares.operands):
            return _rms_norm(trace, block.node, Elements(d[None]), eps).numbers[0], None
    return None


def distributed_norm(trace, node: str, y: Elements) -> Elements:
    """x s + (bias - mean s), s = gain / root, of rows, as TensorFlow has it: norms of the rows; y itself for others."""
    if not y.shape or not 1 < y.shape[-1] <= MAX_ROW or not _has_common_factor(trace, y):
        return y
    rows = y.numbers.reshape(-1, y.shape[-1])
    unit, found = np.eye(rows.shape[1]), []
    for row in rows:
        one = normed(trace, row, unit)
        if one is None or not np.array_equal(np.sort(one.index), np.arange(len(row))):
            return y
        found.append(one)
    if any(one.eps != found[0].eps for one in found):
        return y
    of = np.stack([one.row[one.index] for one in found])
    made = trace.add("norm", node, of.shape, [of], eps=found[0].eps)
    made = scale(trace, node, made, np.stack([one.gain for one in found]))
    made = shift(trace, node, made, np.stack([one.bias for one in found]))
    return Elements(made.numbers.reshape(y.shape))


def _has_common_factor(trace, y: Elements) -> bool:
    """Whether the terms of a sum, scaled and shifted, are products with a factor in common."""
    factors = []
    for operand in trace.owner(int(y.numbers.flat[0])).operands:
        numbers = operand.ravel()
        owners = trace.owners(numbers)
        while len(owners) == 1 and owners[0].op in ("scale", "shift"):
            numbers = owners[0].operands[0][numbers - owners[0].first].ravel()
            owners = trace.owners(numbers)
        if len(owners) != 1 or owners[0].op != "multiply":
            return False
        factors.append({part[numbers - owners[0].first].tobytes() for part in owners[0].operands})
    return len(factors) == 2 and bool(factors[0] & factors[1])


def _quotients(block_of: Callable, block: Block) -> list[tuple[np.ndarray, np.ndarray]]:
    """What is divided by what: in a quotient, or in a product with a reciprocal."""
    if block.op not in ("divide", "multiply"):
        return []
    a, b = (operand.ravel() for operand in block.operands)
    if block.op == "divide":
        return [(a, b)]
    pairs = []
    for d, other in ((a, b), (b, a)):
        inverse = block_of(other[:1])
        if (other == other[0]).all() and inverse and inverse.op == "reciprocal":
            pairs.append((d, np.repeat(inverse.operands[0].ravel(), len(d))))
    return pairs


def _centred(block_of: Callable, d: np.ndarray) -> np.ndarray | None:
    """x of x - mean(x)."""
    block = block_of(d)
    if not block or block.op != "subtract":
        return None
    x, m = (operand.ravel() for operand in block.operands)
    mean = block_of(m[:1]) if (m == m[0]).all() else None
    same = mean and mean.op == "mean" and np.array_equal(np.sort(mean.operands[0].ravel()), np.sort(x))
    return x if same else None


def _same_elements(one: np.ndarray | None, other: np.ndarray) -> bool:
    """Whether they are the same, in any order."""
    return one is not None and np.array_equal(np.sort(one), np.sort(other))
