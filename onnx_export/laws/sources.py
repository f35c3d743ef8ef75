"""Norms of a graph: values that follow a law as functions of a value near a reduction, and of constants alone."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import isclose, prod

import numpy as np
import onnx
from onnx import TensorProto

from onnx_export.graph.constants import is_random
from onnx_export.graph.evaluate import in_float64
from onnx_export.graph.scope import Scope, cut, op, unit_roundoff, with_shapes
from onnx_export.graph.sizes import shape_of
from onnx_export.graph.tables import FLOATS
from onnx_export.laws.fit import MOST_AXES, MOST_ELEMENTS, Fit, Source
from onnx_export.laws.norms import rows
from onnx_export.laws.probes import PROBES, sizes
from onnx_export.nodes import subgraphs
from onnx_export.operators import operator_of

_MOST_NODES, _MOST_SEEN = 48, 256  # that compute from one source, and that are looked at for it
_MOST_SOURCES = 2**10  # of one graph
_MOST_WORK, _OVERHEAD = 2**31, 2**11  # elements computed for one file; an operation costs as much as so many
_MOST_KEPT = 2**21  # elements of what all laws give for one probe, of 128 bytes for all probes
_OPERATIONS = 24, 12  # on all large probes: to make what a law gives, and to fit a value to it
_MOST_TRIED, _LONGEST = 4, 2**12  # sizes of the last axis, where it is open
_FEW = 64  # of large weights, which are compared first
_STEPS, _WIDTH = 4, 3  # from a reduction back to a source
_PRODUCTS = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "com.microsoft::FusedMatMul"})
_REDUCING = _PRODUCTS | {
    "Mean",
    "Sum",
    "AveragePool",
    "GlobalAveragePool",
    "LpPool",
    "GlobalLpPool",
    "CumSum",
    "LpNormalization",
}
_DIVIDING = frozenset({"Div", "Reciprocal", "Pow", "Exp", "Sqrt", "ReduceL2", "LpNormalization"})
_RESULTS = frozenset({"Div", "Mul", "Sub", "Add", "Sum", "LpNormalization", "Reshape", "Transpose", "Cast"})


@dataclass(frozen=True)
class Found:
    """A value y that is a norm, or a near miss, of x, which was taken to be of `shape`; `nodes` compute it from x."""

    x: str
    y: str
    fit: Fit
    nodes: tuple[onnx.NodeProto, ...]
    shape: tuple[int, ...]


@dataclass
class Work:
    """Elements that may be computed yet, for all graphs of a file."""

    left: int = _MOST_WORK

    def spend(self, shape: tuple[int, ...], nodes: list[onnx.NodeProto]) -> bool:
        """Whether values of some nodes may be computed and fitted, for x of this shape."""
        made, fitted = _OPERATIONS
        operations = len(nodes) * PROBES + len(rows(shape)) * (made + fitted * sum(map(_is_result, nodes)))
        cost = operations * (prod(shape) + _OVERHEAD)
        affordable = cost <= self.left and len(rows(shape)) * prod(shape) <= _MOST_KEPT
        self.left -= cost if affordable else 0
        return affordable


def norms(scope: Scope, explained: Container[int] = (), work: Work | None = None) -> Iterator[Found]:
    """The norms and near misses of one graph that no operator names, each with the first value that follows a law.

    Parameters
    ----------
    scope : Scope
        After shape inference, its nodes in order.
    explained : container of int
        Identities of nodes near which no norm is looked for.
    work : Work, optional
        Sources that cost more than is left are passed over.
    """
    work = work or Work()
    place = {name: index for index, node in enumerate(scope.nodes) for name in node.output}
    best: dict[str, Found] = {}
    for x in _sources(scope, explained):
        nodes = _closure(scope, x, place)
        if not any(map(reduces, nodes)) or not any(op(node) in _DIVIDING for node in nodes):
            continue
        for shape in _shapes(scope, x, nodes):
            found = list(_of(scope, x, shape, nodes)) if work.spend(shape, nodes) else []
            for each in found:
                other = best.get(each.y)
                if other is None or _rank(each, place) < _rank(other, place):
                    best[each.y] = each
            if found:
                break
    sound = {node.output[0] for each in best.values() if not each.fit.words for node in each.nodes}
    claimed: set[str] = set()
    for y in sorted(best, key=place.__getitem__):
        found = best[y]
        if found.fit.words and y in sound:  # a step of a norm
            continue
        if claimed.isdisjoint(name for node in found.nodes for name in node.output):
            yield found
        claimed.add(y)


def _rank(found: Found, place: dict[str, int]) -> tuple:
    """Centred before not, a norm before a near miss, the nearest source first."""
    return found.fit.law.formula != "layer", bool(found.fit.words), -place.get(found.x, -1)


def reduces(node: onnx.NodeProto) -> bool:
    """Whether an operator may add elements of one value."""
    return op(node) in _REDUCING or node.op_type.startswith("Reduce")


def _is_result(node: onnx.NodeProto) -> bool:
    return op(node) in _RESULTS


def _live(scope: Scope, node: onnx.NodeProto) -> list[str]:
    """The inputs of a node that are no constants."""
    return [name for name in node.input if name and scope.constant(name) is None]


def _sources(scope: Scope, explained: Container[int]) -> list[str]:
    """Values from which a reduction is few steps away, in the order of the graph."""
    found: dict[str, None] = {}
    for node in scope.nodes:
        level = _live(scope, node) if id(node) not in explained and reduces(node) and not _weighs(scope, node) else []
        for _ in range(_STEPS):
            level = [name for name in level if name not in found][:_WIDTH]
            if not level or len(found) >= _MOST_SOURCES:
                break
            found.update(dict.fromkeys(level))
            before = [node for node in map(scope.producer, level) if node is not None]
            level = [name for node in before for name in _live(scope, node)]
    return list(found)


def _closure(scope: Scope, x: str, place: dict[str, int]) -> list[onnx.NodeProto]:
    """Nodes that compute from x and constants alone, up to products with weights, in the order of the graph."""
    known, nodes, seen = {x}, [], set()
    pending: list[int] = []

    def reach(name: str) -> None:
        for node in scope.consumers(name):
            index = place.get(node.output[0] or next(filter(None, node.output)), -1)
            if index >= 0 and index not in seen and len(seen) < _MOST_SEEN:
                seen.add(index)
                heappush(pending, index)

    reach(x)
    while pending and len(nodes) < _MOST_NODES:
        node = scope.nodes[heappop(pending)]
        if not known.issuperset(_live(scope, node)) or x in node.output:
            continue
        if not (is_random(node) or operator_of(node) or any(True for _ in subgraphs(node)) or _weighs(scope, node)):
            nodes.append(node)
            for name in filter(None, node.output):
                known.add(name)
                reach(name)
    return nodes


def _weighs(scope: Scope, node: onnx.NodeProto) -> bool:
    """Whether a node multiplies by a matrix of unequal weights, so that no norm goes on behind it."""
    stored = [scope.constant(name) for name in node.input if name] if op(node) in _PRODUCTS else []
    some = [value for value in stored if value is not None and value.size > 1]
    return any((value.flat[:_FEW] != value.flat[0]).any() or (value != value.flat[0]).any() for value in some)


def _shapes(scope: Scope, x: str, nodes: list[onnx.NodeProto]) -> Iterator[tuple[int, ...]]:
    """The sizes with which x is probed; none if it is too large or of a kind that no norm has."""
    if (scope.dtype(x) or TensorProto.FLOAT) not in FLOATS:
        return
    stored = [scope.constant(name) for node in nodes for name in node.input if name]
    lengths = [length for value in stored if value is not None for length in _lengths(value)]
    for shape in sizes(scope.shape(x), dict.fromkeys(lengths[: _MOST_TRIED * 8])):
        if 0 < len(shape) <= MOST_AXES and 2 <= prod(shape) <= MOST_ELEMENTS:
            yield shape


def _lengths(value: np.ndarray) -> Iterator[int]:
    """What a constant tells of the length of a row: that of a scale, or a count, its reciprocal, or a root of these."""
    if value.dtype.kind != "f" or not value.size:
        return
    if value.size > 1:
        if value.shape[-1] > 1:
            yield value.shape[-1]
        return
    given = abs(float(value.flat[0]))
    if given and np.isfinite(given):
        for count in (given, 1 / given, given**2, 1 / given**2):
            if 3 <= count <= _LONGEST and abs(count - round(count)) <= 1e-3:
                yield round(count)


def _of(scope: Scope, x: str, shape: tuple[int, ...], nodes: list[onnx.NodeProto]) -> Iterator[Found]:
    """What is a norm of x, in the order of the graph, among the values of nodes that compute from it."""
    source = Source(shape)
    made = _values(scope, x, nodes, source.xs)
    unit = max(unit_roundoff(scope.dtype(name)) for node in nodes for name in (x, *node.output))
    # laws and axes of which a value that is no norm was seen: a scale measured later would hide a wrong count or floor
    wrong: set[tuple] = set()
    for node in nodes:
        y = node.output[0]
        if not _is_result(node) or not made or y not in made[0]:
            continue
        found = source.fit([np.asarray(each[y], np.float64) for each in made], unit)
        if found is None:
            continue
        n, key = prod(shape[axis] for axis in found.axes), (found.law, found.axes)
        found = _counted(scope, node, found, n, unit)
        if found is None or found.words:
            wrong.add(key)
        elif found.factor is not None:
            wrong.discard(key)
        if found is not None and (found.words or key not in wrong):
            yield Found(x, y, found, tuple(_between(nodes, y)), shape)


def _counted(scope: Scope, node: onnx.NodeProto, found: Fit, n: int, unit: float) -> Fit | None:
    """A fit whose factor is 1, a stored one, or by which a count is wrong; None for L2 normalisation and the like."""
    factor, rounding = found.factor, max(2 * unit, 1e-5)  # a stored 1/n is rounded; no count is above 2^16
    if factor is None or found.law.words or abs(factor * factor - 1) <= rounding:
        return found
    stored = [scope.constant(name) for name in node.input if name]
    scalars = [float(value.flat[0]) for value in stored if value is not None and value.size == 1]
    if op(node) == "Mul" and scalars:  # another one than the factor is the gain of an L2 norm
        return found if any(isclose(abs(each), abs(factor), rel_tol=rounding) for each in scalars) else None
    count = n * factor * factor
    summed = found.law.formula == "layer" and abs(count - 1) <= rounding  # of x that is not centred: L2 normalisation
    found = replace(found, count=count, eps=found.eps / factor**2)  # as it is added to the mean
    return found if n > 1 and (summed or 0.2 < factor * factor < 5) else None


def _values(scope: Scope, x: str, nodes: list[onnx.NodeProto], xs: list[np.ndarray]) -> list[dict[str, np.ndarray]]:
    """The values of some nodes for each probe, but those of unknown or too large a size; empty if none can be had."""
    inputs = {x: (scope.dtype(x) or TensorProto.FLOAT, xs[0].shape)}
    try:
        part = with_shapes(cut(scope, nodes, [name for node in nodes for name in node.output if name], inputs))
        known = {value.name: shape_of(value.type) or scope.shape(value.name) for value in part.graph.output}
        small = {name for name, shape in known.items() if _is_small(shape)} | {x}
        kept: list[onnx.NodeProto] = []
        computed = {x}
        for node in nodes:
            names = set(filter(None, node.output))
            if names <= small and computed.issuperset(_live(scope, node)):
                kept.append(node)
                computed |= names
        run = in_float64(cut(scope, kept, sorted(computed - {x}), inputs))
        return [run({x: each}) for each in xs]
    except Exception:  # from onnx's inference and evaluator: an operator or a size that they do not take
        return []


def _is_small(shape: tuple[int | None, ...] | None) -> bool:
    return shape is not None and None not in shape and prod(shape) <= 4 * MOST_ELEMENTS


def _between(nodes: list[onnx.NodeProto], y: str) -> list[onnx.NodeProto]:
    """Those of the nodes that y depends on, in order."""
    needed, kept = {y}, []
    for node in reversed(nodes):
        if needed.intersection(node.output):
            kept.append(node)
            needed.update(node.input)
    return kept[::-1]
