"""Norms of a graph: values that follow a law as functions of a value near a reduction, and of constants alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import onnx
from onnx import TensorProto, helper

from onnx_export.graph.evaluate import in_float64
from onnx_export.laws.fit import Fit, fit
from onnx_export.laws.probes import probes, sizes
from onnx_export.nodes import subgraphs
from onnx_export.operators import operator_of
from onnx_export.validation.constants import is_random
from onnx_export.validation.graph import Scope, cut, op, unit_roundoff

_MOST_NODES, _MOST_AXES, _MOST_ELEMENTS = 48, 5, 2**16
_MOST_SOURCES = 2**10  # of one graph
_STEPS, _WIDTH = 4, 3  # from a reduction back to a source
_PRODUCTS = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "com.microsoft::FusedMatMul"})
_REDUCING = _PRODUCTS | {"AveragePool", "GlobalAveragePool", "LpPool", "GlobalLpPool", "CumSum", "LpNormalization"}
_DIVIDING = frozenset({"Div", "Reciprocal", "Pow", "Exp", "Sqrt", "ReduceL2", "LpNormalization"})
_RESULTS = frozenset({"Div", "Mul", "Sub", "Add", "Sum", "LpNormalization", "Reshape", "Transpose", "Cast"})
_FLOATING = frozenset({0, TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16})


@dataclass(frozen=True)
class Found:
    """A value y that is a norm, or a near miss, of x; `nodes` compute it from x."""

    x: str
    y: str
    fit: Fit
    nodes: tuple[onnx.NodeProto, ...]


def norms(scope: Scope, seconds: float = 10.0) -> Iterator[Found]:
    """The norms and near misses of one graph that no operator names, each with the first value that follows a law.

    Parameters
    ----------
    scope : Scope
        After shape inference: values of unknown rank are passed over.
    seconds : float
        No source is begun later than this.
    """
    end = time.monotonic() + seconds
    place = {name: index for index, node in enumerate(scope.nodes) for name in node.output}
    best: dict[str, Found] = {}
    for x in _sources(scope):
        if time.monotonic() > end:
            break
        for found in _of(scope, x):
            other = best.get(found.y)
            if other is None or _rank(found, place) < _rank(other, place):
                best[found.y] = found
    sound = {node.output[0] for each in best.values() if not each.fit.words for node in each.nodes}
    claimed: set[str] = set()
    for y in sorted(best, key=place.__getitem__):
        found = best[y]
        before = {name for node in found.nodes for name in node.output} | {found.x}
        if found.fit.words and y in sound:  # a step of a norm
            continue
        if not claimed & before:
            yield found
        claimed.add(y)


def _rank(found: Found, place: dict[str, int]) -> tuple:
    """A norm before a near miss, centred before not, the nearest source first."""
    return bool(found.fit.words), found.fit.law.formula != "layer", -place.get(found.x, -1)


def _reduces(node: onnx.NodeProto) -> bool:
    return op(node) in _REDUCING or node.op_type.startswith("Reduce")


def _sources(scope: Scope) -> list[str]:
    """Values from which a reduction is few steps away, in the order of the graph."""
    found: dict[str, None] = {}
    for node in scope.nodes:
        level = [name for name in node.input if name and scope.constant(name) is None] if _reduces(node) else []
        for _ in range(_STEPS):
            level = [name for name in level if name not in found][:_WIDTH]
            if not level or len(found) >= _MOST_SOURCES:
                break
            found.update(dict.fromkeys(level))
            before = [node for node in map(scope.producer, level) if node is not None]
            level = [name for node in before for name in node.input if name and scope.constant(name) is None]
    return list(found)


def _of(scope: Scope, x: str) -> Iterator[Found]:
    """What is a norm of x, in the order of the graph; nothing if x is too large or of a kind that no norm has."""
    shape, kind = scope.shape(x), scope.dtype(x) or 0
    if shape is None or not 0 < len(shape) <= _MOST_AXES or kind not in _FLOATING:
        return
    given = sizes(shape)
    if not 2 <= prod(given) <= _MOST_ELEMENTS:
        return
    nodes = _closure(scope, x)
    if not any(map(_reduces, nodes)) or not any(op(node) in _DIVIDING for node in nodes):
        return
    made = _values(scope, x, nodes, given, kind)
    unit = max(unit_roundoff(scope.dtype(name)) for node in nodes for name in (x, *node.output))
    # laws and axes of which a value that is no norm was seen: a scale measured later would hide a wrong count or floor
    wrong: set[tuple] = set()
    for node in nodes:
        y = node.output[0]
        if op(node) in _RESULTS and made and y in made[0]:
            found = fit([each[x] for each in made], [np.asarray(each[y], np.float64) for each in made], unit)
            if found is None:
                continue
            n, key = prod(given[axis] for axis in found.axes), (found.law, found.axes)
            found = _counted(scope, node, found, n, unit)
            if found is None or found.words:
                wrong.add(key)
            elif found.factor is not None:
                wrong.discard(key)
            if found is not None and (found.words or key not in wrong):
                yield Found(x, y, found, tuple(_between(scope, nodes, y)))


def _counted(scope: Scope, node: onnx.NodeProto, found: Fit, n: int, unit: float) -> Fit | None:
    """A fit whose factor is 1, a stored one, or by which a count is wrong; None for L2 normalisation and the like."""
    factor, rounding = found.factor, max(32 * unit, 1e-9)
    if factor is None or found.law.words or abs(abs(factor) - 1) <= rounding:
        return found
    stored = [scope.constant(name) for name in node.input if name]
    if op(node) == "Mul" and any(value is not None and value.size == 1 for value in stored):
        return found if abs(n * factor * factor - 1) > rounding else None
    return replace(found, count=n * factor * factor) if n > 1 and 0.2 < factor * factor < 5 else None


def _closure(scope: Scope, x: str) -> list[onnx.NodeProto]:
    """Nodes that compute from x and constants alone, up to products with weights."""
    known, nodes = {x}, []
    for node in scope.nodes:
        if len(nodes) == _MOST_NODES:
            break
        live = [name for name in node.input if name and scope.constant(name) is None]
        if not live or not known.issuperset(live) or x in node.output:
            continue
        if not (is_random(node) or operator_of(node) or any(True for _ in subgraphs(node)) or _weighs(scope, node)):
            nodes.append(node)
            known.update(filter(None, node.output))
    return nodes


def _weighs(scope: Scope, node: onnx.NodeProto) -> bool:
    """Whether a node multiplies by a matrix of unequal weights, so that no norm goes on behind it."""
    stored = [scope.constant(name) for name in node.input if name] if op(node) in _PRODUCTS else []
    return any(value is not None and value.size > 1 and (value != value.flat[0]).any() for value in stored)


def _values(scope: Scope, x: str, nodes, shape: tuple[int, ...], kind: int) -> list[dict[str, np.ndarray]]:
    """All values of some nodes for each probe; empty if they can't be computed, or are too large."""
    names = [name for node in nodes for name in node.output if name]
    known = [scope.shape(name) for name in names]
    if any(each is not None and prod(2 if s is None else s for s in each) > _MOST_ELEMENTS * 4 for each in known):
        return []
    model = onnx.ModelProto(ir_version=8)
    model.opset_import.extend(helper.make_opsetid(*each) for each in scope.opsets.items())
    given = [{x: value} for value in probes(shape)]
    try:
        run = in_float64(cut(model, scope, nodes, names, {x: (kind or TensorProto.FLOAT, shape)}))
        return [each | run(each) for each in given]
    except Exception:  # from onnx's evaluator: an operator or a size that it does not take
        return []


def _between(scope: Scope, nodes, y: str) -> list[onnx.NodeProto]:
    """Those of the nodes that y depends on, in order."""
    needed, kept = {y}, []
    for node in reversed(nodes):
        if needed.intersection(node.output):
            kept.append(node)
            needed.update(node.input)
    return kept[::-1]
