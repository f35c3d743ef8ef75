"""A mean in a writing that `moments` does not know: it is evaluated and compared with means of x over its axes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from math import prod

import numpy as np
import onnx
from onnx import TensorProto, helper

from onnx_export.float64 import Float64
from onnx_export.nodes import subgraphs
from onnx_export.validation.graph import Scope, cut, op, unit_roundoff
from onnx_export.validation.statistic import Mean
from onnx_export.validation.values import RESHAPERS, SAME, SUMS, Values

_MOST_NODES = 32  # between x and what is subtracted from it
_MOST_ELEMENTS, _MOST_AXES = 2**20, 5
_OPEN = (3, 4, 5, 6, 7)  # sizes for those that the file leaves open
# what a mean of squares may be written with; Mul and Div by constants
_LINEAR = SAME | RESHAPERS | SUMS
_LINEAR |= {"Transpose", "Slice", "Split", "Gather", "Concat", "Pad", "Mul", "Div", "Neg", "CumSum", "ReduceSum"}
_LINEAR |= {"ReduceMean", "AveragePool", "GlobalAveragePool", "MatMul", "com.microsoft::FusedMatMul", "Gemm"}
_LINEAR |= {"Conv", "ConvTranspose", "Einsum"}
_LAYOUT = SAME | RESHAPERS | {"Transpose"}


@dataclass(frozen=True)
class Evaluated:
    """The mean of x over some axes that a value is, `factor` times if these are the last one.

    `direct` if its nodes start at x, not at a value of which x is a transposed one.
    """

    mean: Mean
    direct: bool
    factor: float


def evaluated_mean(values: Values, x: str, other: str, sign: int) -> Evaluated | None:
    """The mean of x that `sign` times `other` is, or a multiple of it over the last axis; None if it is none."""
    if not _may_reduce(values.scope, x, other, sign > 0):
        return None
    base, moves = x, []
    nodes = _between(values.scope, x, [other])
    if nodes is None:
        base, _, moves = values.signed(x, _LAYOUT)
        nodes = _between(values.scope, base, [other])
    if not nodes:
        return None
    try:
        before, lost = _run(values.scope, [*moves, *nodes], base, x, other)
    except Exception:  # from onnx's evaluator: an operator or a size that it does not take
        return None
    lost = sign * lost
    unit = max(unit_roundoff(values.dtype(base)), unit_roundoff(values.dtype(other)))
    axes, factor = _axes_of(before, lost, 16 * unit * float(np.max(np.abs(before))))
    if axes is None:
        return None
    return Evaluated(Mean(x, axes, True, tuple(nodes), reshaped=True, stored_reciprocal=True), not moves, factor)


def squares_before(values: Values, name: str) -> str | None:
    """The squares of one value from which linear operators compute `name`, None if it is made of more than those."""
    scope, found, pending = values.scope, "", [name]
    for _ in range(_MOST_NODES):
        if not pending:
            break
        current = pending.pop()
        if current == found or not current or scope.constant(current) is not None:
            continue
        node = scope.producer(current)
        if node is None:
            return None
        twice = op(node) == "Mul" and values.same(*node.input)
        if twice or (op(node) == "Pow" and values.scalar(node.input[1]) == 2):
            if found:
                return None
            found = current
        elif op(node) in _LINEAR and not (op(node) in SUMS and _has_constant(scope, node)):  # such as eps
            pending += node.input
        else:
            return None
    return found if found and not pending and found != name else None


def _has_constant(scope: Scope, node: onnx.NodeProto) -> bool:
    return any(scope.constant(name) is not None for name in node.input)


def _may_reduce(scope: Scope, x: str, other: str, less: bool) -> bool:
    """Whether `other` may have fewer elements than x, or be constant along an axis, by what is known without a run.

    A product with all of x, which may be, is tried only where it is subtracted from x: residuals add one.
    """
    shape, own = scope.shape(x), scope.shape(other)
    if shape is None or own is None or len(shape) > _MOST_AXES:
        return False
    node = scope.producer(other)
    kinds = {"Expand", "Tile"} | ({"MatMul", "Gemm", "Conv"} if less else set())
    repeats = node is not None and op(node) in kinds
    return repeats or len(own) != len(shape) or any(b == 1 and a != 1 for a, b in zip(shape, own, strict=True))


def _between(scope: Scope, base: str, names: list[str]) -> list[onnx.NodeProto] | None:
    """The nodes that compute values from `base` and constants alone; None if they need more, or are too many."""
    nodes: dict[int, onnx.NodeProto] = {}
    pending = list(names)
    while pending:
        name = pending.pop()
        if name == base or not name or scope.constant(name) is not None:
            continue
        node = scope.producer(name)
        if node is None or len(nodes) == _MOST_NODES or any(True for _ in subgraphs(node)):
            return None
        if id(node) not in nodes:
            nodes[id(node)] = node
            pending += node.input
    return list(nodes.values())


def _run(scope: Scope, nodes, base: str, x: str, other: str) -> tuple[np.ndarray, np.ndarray]:
    """x and `other` in float64, for values of `base` whose means over all axes differ."""
    sizes = [_OPEN[axis] if size is None else size for axis, size in enumerate(scope.shape(base))]
    if prod(sizes) > _MOST_ELEMENTS:
        raise ValueError("too large")
    rng = np.random.default_rng(0)
    given = rng.normal(size=sizes)
    for axis, size in enumerate(sizes):
        given += rng.normal(1, 1, size).reshape(-1, *(1,) * (len(sizes) - 1 - axis))
    kind = scope.dtype(base) or TensorProto.FLOAT
    model = onnx.ModelProto(ir_version=8)
    model.opset_import.extend(helper.make_opsetid(*each) for each in scope.opsets.items())
    wanted = [name for name in dict.fromkeys((x, other)) if name != base]
    found = Float64(cut(model, scope, nodes, wanted, {base: (kind, sizes)})).run({base: given})
    before = given if x == base else found[x]
    return before, np.broadcast_to(found[other], before.shape)


def _axes_of(x: np.ndarray, lost: np.ndarray, allowed: float) -> tuple[tuple[int, ...] | None, float]:
    """The axes over which `lost` is the mean of x, None if over none, and what multiple of that mean it is."""
    long = [axis for axis, size in enumerate(x.shape) if size > 1]
    for axes in _subsets(long):
        mean = np.mean(x, axis=axes, keepdims=True)
        if np.max(np.abs(lost - mean)) <= allowed:
            return axes, 1.0
    mean = np.mean(x, axis=-1, keepdims=True)
    factor = float(np.sum(lost * mean) / max(float(np.sum(mean * mean)) * x.shape[-1], np.finfo(float).tiny))
    multiple = factor > 0 and np.max(np.abs(lost - factor * mean)) <= allowed
    return ((x.ndim - 1,), factor) if multiple else (None, 1.0)


def _subsets(axes: list[int]) -> Iterator[tuple[int, ...]]:
    for count in range(1, len(axes) + 1):
        yield from combinations(axes, count)
