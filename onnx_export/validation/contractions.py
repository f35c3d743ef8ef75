"""Sums and means that a product with equal weights computes: MatMul, Gemm, Einsum, and convolutions.

The usual forms are read from the node, others are evaluated on made-up values and compared with sums over axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, pairwise
from math import prod

import numpy as np
import onnx
from onnx import TensorProto

from onnx_export.graph.evaluate import in_float64
from onnx_export.graph.scope import attribute, cut, op
from onnx_export.validation.values import Values, unit_of

_BLOCKED = "com.microsoft.nchwc::"  # a Conv between two reorderings, as onnxruntime's layout optimiser writes it
_EVALUATED = ("MatMul", "com.microsoft::FusedMatMul", "Gemm", "Conv", "ConvTranspose", "Einsum")
WEIGHTED = frozenset({*_EVALUATED, f"{_BLOCKED}ReorderOutput"})
_MOST_AXES, _MOST_ELEMENTS = 5, 2**18
_OPEN = 3  # the size of an axis that the file leaves open


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
    if op(node) == f"{_BLOCKED}ReorderOutput":
        return _blocked(values, node)
    return (_read(values, node) or _evaluated(values, node)) if op(node) in _EVALUATED else None


def _read(values: Values, node: onnx.NodeProto) -> Weighing | None:
    """`weighted_sum` of the forms that need no evaluation, nor the shape of the value."""
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
    return _contraction(values, node) if kind == "Einsum" else None


def _evaluated(values: Values, node: onnx.NodeProto) -> Weighing | None:
    """The sum over some axes of the one value that the node multiplies by equal weights, perhaps of its squares."""
    scope = values.scope
    stored = {name: scope.constant(name) for name in node.input if name}
    free = [name for name, value in stored.items() if value is None]
    weights = [_equal(value) for value in stored.values() if value is not None]
    shape = scope.shape(free[0]) if len(free) == 1 else None
    if shape is None or None in weights or not 0 < len(shape) <= _MOST_AXES:
        return None
    sizes = [size or _OPEN for size in shape]
    if np.prod(sizes) > _MOST_ELEMENTS:
        return None
    x = np.random.default_rng(0).normal(1, 1, sizes)
    kind = scope.dtype(free[0]) or TensorProto.FLOAT
    try:
        y = in_float64(cut(scope, [node], list(node.output), {free[0]: (kind, sizes)}))({free[0]: x})[node.output[0]]
    except Exception:  # from onnx's evaluator: an operator or a size that it does not take
        return None
    squared = op(node) == "Einsum" and list(node.input).count(free[0]) == 2
    fixed = [axis for axis, size in enumerate(shape) if size and size > 1]
    unit = sum(each[1] for each in weights) + (2.0**-24 if attribute(node, "alpha", 1.0) != 1 else 0.0)
    for axes in (each for count in range(1, len(fixed) + 1) for each in combinations(fixed, count)):
        total = np.sum(x * x if squared else x, axis=axes, keepdims=True)
        without, repeated = np.squeeze(total, axes), np.broadcast_to(total, x.shape)
        for sums, keepdims in ((total, True), (without, False), (repeated, True)):
            weight = _multiple(y, sums)
            if weight:
                n = int(np.prod([sizes[axis] for axis in axes]))
                return Weighing(free[0], axes, n, weight, 2 * unit, squared, keepdims)
    return None


def _multiple(y: np.ndarray, sums: np.ndarray) -> float | None:
    """What multiple of these sums y is, None if it is none."""
    if y.shape != sums.shape:
        return None
    weight = float(np.sum(y * sums) / np.sum(sums * sums))
    return weight if np.max(np.abs(y - weight * sums)) <= 1e-9 * np.max(np.abs(y)) else None


def _equal(value: np.ndarray | None) -> tuple[float, float] | None:
    """(weight, unit roundoff) of an array whose elements are all one number."""
    if value is None or not value.size or value.dtype.kind != "f" or not np.all(value == value.flat[0]):
        return None
    return float(value.flat[0]), unit_of(value)


def _product(values: Values, node, transposed: bool, alpha: float = 1.0) -> Weighing | None:
    """Over the last axis, by a column of weights or a square matrix, which repeats the result."""
    matrix = values.scope.constant(node.input[1])
    weight = _equal(matrix) if matrix is not None and matrix.ndim == 2 else None
    if weight is None:
        return None
    n, columns = matrix.shape[::-1] if transposed else matrix.shape
    unit = 2 * max(weight[1], 0.0 if alpha == 1 else 2.0**-24)  # an attribute is float32
    return Weighing(node.input[0], (-1,), n, weight[0] * alpha, unit) if columns in (1, n) else None


def _pixel(values: Values, node) -> Weighing | None:
    """Over the channels, by a convolution of one pixel."""
    kernel = values.scope.constant(node.input[1])
    weight = _equal(kernel) if kernel is not None and kernel.ndim > 2 else None
    if weight is None or not _plain(values, node) or set(kernel.shape[2:]) != {1}:
        return None
    return Weighing(node.input[0], (1,), kernel.shape[1], *weight) if kernel.shape[0] in (1, kernel.shape[1]) else None


def _plain(values: Values, node) -> bool:
    """Whether a convolution has no padding, stride, group or bias."""
    bias = len(node.input) > 2 and node.input[2]
    moves = any(attribute(node, "pads", ())) or set(attribute(node, "strides", ())) - {1}
    return not moves and attribute(node, "group", 1) == 1 and not (bias and not values.filled(bias, 0.0))


def _blocked(values: Values, node) -> Weighing | None:
    """By a convolution whose kernel onnxruntime has filled up to blocks of channels and results with zeros.

    It is that of one pixel over the channels, or that of the whole of some axes of a single channel.
    """
    conv = values.made_by(node.input[0], f"{_BLOCKED}Conv")
    kernel = values.scope.constant(conv.input[1]) if conv is not None else None
    if kernel is None or kernel.ndim != 4 or not _plain(values, conv) or attribute(conv, "activation", b""):
        return None
    reordered = values.made_by(conv.input[0], f"{_BLOCKED}ReorderInput")  # not where there is one channel
    source = conv.input[0] if reordered is None else reordered.input[0]
    shape, results = values.scope.shape(source), attribute(node, "channels", 0)
    last = any(attribute(each, "channels_last", 0) for each in (node, reordered) if each is not None)
    if shape is None or len(shape) != 4 or last:
        return None
    window = {axis: size for axis, size in enumerate(kernel.shape) if axis > 1 and size > 1}
    axes, n = ((1,), shape[1]) if not window else (tuple(window), prod(window.values()))
    if window and (shape[1] != 1 or any(shape[axis] != size for axis, size in window.items())):
        return None
    used = kernel[kernel != 0]
    weight = _equal(used)  # in blocks of both kinds of channels, in whatever order
    if weight is None or n is None or results not in (1, shape[1]) or used.size != n * results:
        return None
    return Weighing(source, axes, n, *weight)


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
