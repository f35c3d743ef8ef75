"""Means in writings that the patterns do not know: evaluated on made-up values and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from math import prod

import numpy as np
import onnx
from onnx import TensorProto

from onnx_export.graph.constants import is_random
from onnx_export.graph.evaluate import in_float64
from onnx_export.graph.scope import Scope, cut, op, unit_roundoff
from onnx_export.graph.tables import LAYOUT, MOVING, REPEATING
from onnx_export.nodes import subgraphs
from onnx_export.validation.statistic import Mean
from onnx_export.validation.values import Values

_MOST_NODES = 32  # between x and what is subtracted from it
_MOST_ELEMENTS, _MOST_AXES = 2**20, 5
_REPEATING = (MOVING - LAYOUT) | {"GatherElements", "GatherND"}
_OPEN = (3, 4, 5, 6, 7)  # sizes for those that the file leaves open


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
    nodes = between(values.scope, x, [other])
    if nodes is None:
        base, _, moves = values.signed(x, LAYOUT | REPEATING)
        nodes = between(values.scope, base, [other])
    if not nodes:
        return None
    try:
        before, lost = _run(values.scope, [*moves, *nodes], base, (x, other))
        lost = sign * np.broadcast_to(lost, before.shape)
    except Exception:  # from onnx's evaluator: an operator or a size that it does not take
        return None
    unit = max(unit_roundoff(values.dtype(base)), unit_roundoff(values.dtype(other)))
    axes, factor = _axes_of(before, lost, 16 * unit * float(np.max(np.abs(before))))
    if axes is None:
        return None
    return Evaluated(Mean(x, axes, True, tuple(nodes), reshaped=True, stored_reciprocal=True), not moves, factor)


def _may_reduce(scope: Scope, x: str, other: str, less: bool) -> bool:
    """Whether `other` may have fewer elements than x, or be constant along an axis, by what is known without a run.

    A product with all of x, which may be, is tried only where it is subtracted from x: residuals add one.
    """
    shape, own = scope.shape(x), scope.shape(other)
    if shape is None or own is None or len(shape) > _MOST_AXES:
        return False
    node = scope.producer(other)
    kinds = _REPEATING | ({"MatMul", "Gemm", "Conv"} if less else set())
    repeats = node is not None and op(node) in kinds
    return repeats or len(own) != len(shape) or any(b == 1 and a != 1 for a, b in zip(shape, own, strict=True))


def between(scope: Scope, base: str, names: list[str]) -> list[onnx.NodeProto] | None:
    """The nodes that compute values from `base` and constants alone; None if they need more, or are too many."""
    nodes: dict[int, onnx.NodeProto] = {}
    pending = list(names)
    while pending:
        name = pending.pop()
        if name == base or not name or scope.constant(name) is not None:
            continue
        node = scope.producer(name)
        if node is None or len(nodes) == _MOST_NODES or is_random(node) or any(True for _ in subgraphs(node)):
            return None
        if id(node) not in nodes:
            nodes[id(node)] = node
            pending += node.input
    return list(nodes.values())


def _run(scope: Scope, nodes, base: str, names: tuple[str, ...], given=None) -> list[np.ndarray]:
    """Values in float64, for values of `base`: those `given`, or some whose means over all axes differ."""
    given = made_up(scope.shape(base)) if given is None else given
    return runner(scope, nodes, base, names, given.shape)(given)


def runner(
    scope: Scope, nodes, base: str, names: tuple[str, ...], shape: tuple[int, ...]
) -> Callable[[np.ndarray], list[np.ndarray]]:
    """A function of values of `base`, of this shape, that computes other values in float64 by these nodes."""
    if not all(_is_small(scope.shape(name)) for node in nodes for name in node.output):
        raise ValueError("too large")
    kind = scope.dtype(base) or TensorProto.FLOAT
    wanted = [name for name in dict.fromkeys(names) if name != base]
    evaluate = in_float64(cut(scope, nodes, wanted, {base: (kind, shape)}))

    def run(given: np.ndarray) -> list[np.ndarray]:
        found = evaluate({base: given})
        return [given if name == base else found[name] for name in names]

    return run


def _sizes(shape: tuple[int | None, ...]) -> list[int]:
    """A shape with sizes for those that the file leaves open."""
    return [_OPEN[axis] if size is None else size for axis, size in enumerate(shape)]


def _is_small(shape: tuple[int | None, ...] | None) -> bool:
    """Whether a value may be computed: of an unknown shape, or of few elements."""
    return shape is None or prod(2 if size is None else size for size in shape) <= _MOST_ELEMENTS


def made_up(shape: tuple[int | None, ...]) -> np.ndarray:
    """Values whose means over any axes differ, with sizes for those that the file leaves open."""
    sizes, rng = _sizes(shape), np.random.default_rng(0)
    if prod(sizes) > _MOST_ELEMENTS:
        raise ValueError("too large")
    given = rng.normal(size=sizes)
    for axis, size in enumerate(sizes):
        given += rng.normal(1, 1, size).reshape(-1, *(1,) * (len(sizes) - 1 - axis))
    return given


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
