"""Means, variances and roots in writings that the patterns do not know: evaluated on made-up values and compared."""

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
from onnx_export.validation.values import SUMS, Values, ancestors

_MOST_NODES = 32  # between x and what is subtracted from it
_MOST_ELEMENTS, _MOST_AXES = 2**20, 5
_MOST_TRIED = 6  # values whose moment another one may be
_REPEATING = (MOVING - LAYOUT) | {"GatherElements", "GatherND"}
_OPEN = (3, 4, 5, 6, 7)  # sizes for those that the file leaves open
# what a mean of squares may be written with; Mul and Div by constants
_LINEAR = MOVING | SUMS | {"Pad", "Mul", "Div", "Neg", "CumSum", "ReduceSum"}
_LINEAR |= {"ReduceMean", "AveragePool", "GlobalAveragePool", "MatMul", "com.microsoft::FusedMatMul", "Gemm"}
_LINEAR |= {"Conv", "ConvTranspose", "Einsum"}


@dataclass(frozen=True)
class Evaluated:
    """The mean of x over some axes that a value is, `factor` times if these are the last one.

    `direct` if its nodes start at x, not at a value of which x is a transposed one. A moment may be `about_mean`, the
    variance of x, or the mean of its squares, and `eps` may be added.
    """

    mean: Mean
    direct: bool
    factor: float
    about_mean: bool = False
    eps: float = 0.0


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


def evaluated_moment(values: Values, name: str) -> Evaluated | None:
    """The mean square or the variance of another value that a value is, in any writing, perhaps with eps added."""
    scope, tried = values.scope, 0
    for base in ancestors(scope, name, _MOST_NODES):
        nodes = between(scope, base, [name]) if _is_smaller(scope, name, base) else None
        if not nodes or tried == _MOST_TRIED:
            continue
        tried += 1
        try:
            given = made_up(scope.shape(base))
            added = np.unique(_run(scope, nodes, base, (name,), np.zeros(given.shape))[0])
            if added.size != 1 or not np.isfinite(added[0]):
                continue
            (held,) = _run(scope, nodes, base, (name,), given)
            held = np.broadcast_to(_as_kept(held, given), given.shape) - added[0]
        except Exception:  # as in `evaluated_mean`
            continue
        rounding = 4 * max(unit_roundoff(values.dtype(base)), unit_roundoff(values.dtype(name)))  # of a stored 1/n
        for about_mean, x, moment in ((False, given * given, np.mean), (True, given, np.var)):
            axes, factor = _multiple_of(x, held, 2.0**-20 * float(np.max(np.abs(given))) ** 2, moment)
            if axes is not None and 0.5 < factor < 2:  # others are sums
                mean = Mean(base, axes, True, tuple(nodes), reshaped=True, stored_reciprocal=True)
                factor = 1.0 if abs(factor - 1) <= rounding else factor
                return Evaluated(mean, True, factor, about_mean, float(added[0]))
    return None


def _multiple_of(x: np.ndarray, found: np.ndarray, allowed: float, moment) -> tuple[tuple[int, ...] | None, float]:
    """The axes over which `found` is a multiple of a moment of x, None if over none, and what multiple."""
    for axes in _subsets([axis for axis, size in enumerate(x.shape) if size > 1]):
        exact = np.broadcast_to(moment(x, axis=axes, keepdims=True), x.shape)
        factor = float(np.sum(found * exact) / np.sum(exact * exact))
        if np.max(np.abs(found - factor * exact)) <= allowed:
            return axes, factor
    return None, 1.0


def _is_smaller(scope: Scope, name: str, base: str) -> bool:
    """Whether a value has fewer elements than another, by what is known without a run."""
    shape, own = scope.shape(base), scope.shape(name)
    if shape is None or own is None or max(len(shape), len(own)) > _MOST_AXES:
        return False
    return prod(_sizes(own)) < prod(_sizes(shape)) <= _MOST_ELEMENTS


def _as_kept(held: np.ndarray, given: np.ndarray) -> np.ndarray:
    """A statistic of the last axis with this axis, where it has lost it."""
    return held[..., None] if held.shape == given.shape[:-1] else held


def evaluated_power(values: Values, base: str, name: str) -> tuple[float, list[onnx.NodeProto]] | None:
    """(exponent, nodes): the power of a positive value `base` that another value is, elementwise, in any writing."""
    scope, shape = values.scope, values.scope.shape(base)
    nodes = between(scope, base, [name])
    if not nodes or shape is None or not _is_small(shape):
        return None
    try:
        given = np.exp(np.random.default_rng(0).uniform(-4, 4, _sizes(shape)))
        (held,) = _run(scope, nodes, base, (name,), given)
        given = np.broadcast_to(given, held.shape)
        with np.errstate(all="raise"):
            made = np.log(held)
    except Exception:  # as in `evaluated_mean`, and no power of a positive value
        return None
    logarithm = np.log(given)
    exponent = float(np.sum(made * logarithm) / np.sum(logarithm * logarithm))
    unit = max(unit_roundoff(values.dtype(base)), unit_roundoff(values.dtype(name)))
    return (exponent, nodes) if np.max(np.abs(made - exponent * logarithm)) <= 64 * unit else None


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
