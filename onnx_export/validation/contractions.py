"""Sums and means that a product with equal weights computes: MatMul, Gemm, Einsum, and convolutions of one pixel."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import onnx

from onnx_export.validation.graph import attribute, op
from onnx_export.validation.values import Values

_BLOCKED = "com.microsoft.nchwc::"  # a Conv between two reorderings, as onnxruntime's layout optimiser writes it
WEIGHTED = frozenset({"MatMul", "Gemm", "Conv", "Einsum", f"{_BLOCKED}ReorderOutput"})


@dataclass(frozen=True)
class Weighing:
    """weight * sum(source), or of its squares if `squared`, over n elements of these axes; `unit` rounds the weight."""

    source: str
    axes: tuple[int, ...]
    n: int
    weight: float
    unit: float
    squared: bool = False
    keepdims: bool = True


def weighted_sum(values: Values, node: onnx.NodeProto) -> Weighing | None:
    """The sum with equal weights that a node computes, None if it computes another function."""
    kind = op(node)
    if kind == "MatMul" and len(node.input) == 2:
        return _product(values, node, transposed=False)
    if kind == "Gemm":
        bias = len(node.input) > 2 and node.input[2]
        if attribute(node, "transA", 0) or (bias and not values.filled(bias, 0.0)):
            return None
        return _product(values, node, bool(attribute(node, "transB", 0)), attribute(node, "alpha", 1.0))
    if kind == "Conv":
        return _pixel(values, node)
    if kind == f"{_BLOCKED}ReorderOutput":
        return _blocked_pixel(values, node)
    return _contraction(values, node) if kind == "Einsum" else None


def _equal(value: np.ndarray | None) -> tuple[float, float] | None:
    """(weight, unit roundoff) of an array whose elements are all one number."""
    if value is None or not value.size or value.dtype.kind != "f" or not np.all(value == value.flat[0]):
        return None
    return float(value.flat[0]), float(np.finfo(value.dtype).eps)


def _product(values: Values, node, transposed: bool, alpha: float = 1.0) -> Weighing | None:
    """Over the last axis, by a column of weights or a square matrix, which repeats the result."""
    matrix = values.scope.constant(node.input[1])
    weight = _equal(matrix) if matrix is not None and matrix.ndim == 2 else None
    if weight is None:
        return None
    n, columns = matrix.shape[::-1] if transposed else matrix.shape
    return Weighing(node.input[0], (-1,), n, weight[0] * alpha, 2 * weight[1]) if columns in (1, n) else None


def _pixel(values: Values, node) -> Weighing | None:
    """Over the channels, by a convolution of one pixel."""
    kernel = values.scope.constant(node.input[1])
    weight = _equal(kernel) if kernel is not None and kernel.ndim > 2 else None
    if weight is None or not _plain(values, node, kernel) or kernel.shape[0] not in (1, kernel.shape[1]):
        return None
    return Weighing(node.input[0], (1,), kernel.shape[1], *weight)


def _plain(values: Values, node, kernel: np.ndarray) -> bool:
    """Whether a convolution is a product for each pixel alone: no padding, stride, group or bias."""
    bias = len(node.input) > 2 and node.input[2]
    moves = any(attribute(node, "pads", ())) or set(attribute(node, "strides", ())) - {1}
    if moves or attribute(node, "group", 1) != 1 or (bias and not values.filled(bias, 0.0)):
        return False
    return set(kernel.shape[2:]) == {1}


def _blocked_pixel(values: Values, node) -> Weighing | None:
    """`_pixel` of one result, whose kernel onnxruntime has filled up to a block of results with zeros."""
    conv = values.made_by(node.input[0], f"{_BLOCKED}Conv")
    source = None if conv is None else values.made_by(conv.input[0], f"{_BLOCKED}ReorderInput")
    kernel = None if source is None else values.scope.constant(conv.input[1])
    last = any(attribute(each, "channels_last", 0) for each in (node, source) if each is not None)
    if kernel is None or kernel.ndim != 4 or last or attribute(node, "channels", 0) != 1:
        return None
    if not _plain(values, conv, kernel) or attribute(conv, "activation", b""):
        return None
    block = kernel.reshape(-1, kernel.shape[0])
    weight = _equal(block[:, 0])
    if weight is None or block[:, 1:].any():
        return None
    return Weighing(source.input[0], (1,), kernel.shape[1], *weight)


def _contraction(values: Values, node) -> Weighing | None:
    """By an Einsum such as "bti,bti->bt" or "bti,i->bt": one value, perhaps twice, and perhaps weights."""
    equation = next((a.s.decode("ascii", "replace") for a in node.attribute if a.name == "equation"), "")
    terms, _, result = equation.replace(" ", "").partition("->")
    terms = terms.split(",")
    if len(terms) != len(node.input) or "." in equation:
        return None
    weight, unit, free = 1.0, 0.0, []
    for term, name in zip(terms, node.input, strict=True):
        given = _equal(values.scope.constant(name))
        if given is None:
            free.append((term, name))
        elif set(term) & set(result):
            return None
        else:
            weight, unit = weight * given[0], unit + given[1]
    same = all(a == c and values.same(b, d) for (a, b), (c, d) in pairwise(free))
    if not 0 < len(free) < 3 or not same:
        return None
    term, source = free[0]
    axes = tuple(index for index, letter in enumerate(term) if letter not in result)
    if not axes or [letter for letter in term if letter in result] != list(result):
        return None
    n = _length(values, node, terms, term, axes) or values.count(axes, source)
    return Weighing(source, axes, n or 0, weight, unit, len(free) == 2, keepdims=False) if n or weight == 1 else None


def _length(values: Values, node, terms: list[str], term: str, axes: tuple[int, ...]) -> int | None:
    """The number of elements over these axes by the shapes of the weights, None if they do not cover all of them."""
    sizes: dict[str, int] = {}
    for each, name in zip(terms, node.input, strict=True):
        stored = values.scope.constant(name)
        sizes |= dict(zip(each, stored.shape, strict=False)) if stored is not None else {}
    lengths = [sizes.get(term[axis]) for axis in axes]
    return None if None in lengths else int(np.prod(lengths))
