"""What a value was recognised as: a mean, a centred value, a variance."""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx

from onnx_export.graph.scope import attribute, op
from onnx_export.graph.tables import RESHAPING
from onnx_export.operators import Formula
from onnx_export.validation.norm import NONE, NearMiss
from onnx_export.validation.values import Values

_KEEPDIMS = NearMiss("keepdims=0: the statistic broadcasts along the wrong axis", trap="keepdims")


@dataclass(frozen=True)
class Mean:
    """mean(source) over axes, or mean(source^2) where `squared`.

    Attributes
    ----------
    total : bool
        Whether it is the sum, not yet divided by n.
    reshaped : bool
        Whether a change of shape after it may have put the reduced axes back.
    stored_reciprocal : bool
        Whether it is a sum times a stored 1/n.
    miscount : NearMiss
        Set if the sum is divided by a count other than n.
    unlike : NearMiss
        Set if it is something else that behaves like a mean (`other_means`).
    """

    source: str
    axes: tuple[int, ...] | None
    keepdims: bool
    nodes: tuple[onnx.NodeProto, ...]
    squared: bool = False
    total: bool = False
    reshaped: bool = False
    stored_reciprocal: bool = False
    miscount: NearMiss = NONE
    unlike: NearMiss = NONE

    @property
    def misbroadcast(self) -> NearMiss:
        """Set if the mean, without its reduced axes, broadcasts wrongly against its source, or is none."""
        if self.unlike.reason:
            return self.unlike
        leading = self.axes is None or self.axes == tuple(range(len(self.axes)))
        return NONE if self.keepdims or self.reshaped or leading else _KEEPDIMS


@dataclass(frozen=True)
class Variance:
    """Second moment of x about its mean, or about zero (RMS).

    Attributes
    ----------
    centred : str
        The value x - mean, or mean - x if `negative`; empty if the variance is computed without it.
    form : {"centred", "one-pass"}
    mean : Mean
        The outer mean, of the squares.
    reshaped : bool
        Whether the reduced axes may have been put back on the way to the square root.
    order : tuple of int
        The `perm` of a Transpose behind it, through which the numerator goes as well; empty for none.
    """

    x: str
    centred: str
    formula: Formula
    form: str
    mean: Mean
    nodes: tuple[onnx.NodeProto, ...]
    near: NearMiss = NONE
    stored_reciprocal: bool = False
    reshaped: bool = False
    floor: float = 0.0
    negative: bool = False
    order: tuple[int, ...] = ()

    def through(self, nodes: list[onnx.NodeProto], near: NearMiss = NONE, **changes) -> Variance:
        """The variance after further nodes, with a near miss that these make it."""
        reshaped = self.reshaped or any(op(node) in RESHAPING for node in nodes)
        near = self.near.then(near)
        return replace(self, nodes=(*self.nodes, *nodes), reshaped=reshaped, near=near, **changes)


@dataclass(frozen=True)
class Centred:
    """x - mean(x), or mean(x) - x if `negative`."""

    x: str
    mean: Mean
    nodes: tuple[onnx.NodeProto, ...]
    negative: bool = False


def before_unsqueeze(values: Values, found: Mean) -> Mean:
    """Restate a mean of an unsqueezed value as a mean of the value before Unsqueeze, with axes renumbered."""
    node = values.made_by(found.source, "Unsqueeze")
    shape = values.scope.shape(found.source)
    if node is None or shape is None or found.axes is None:
        return found
    stored = attribute(node, "axes", ())
    if not stored and len(node.input) > 1:
        value = values.scope.constant(node.input[1])
        stored = () if value is None else tuple(value.ravel().tolist())
    added = {axis % len(shape) for axis in stored}
    kept = [axis for axis in range(len(shape)) if axis not in added]
    axes = tuple(kept.index(axis) for axis in found.axes if axis in kept)
    if not stored or not axes:
        return found
    source, casts = values.strip(node.input[0])
    return replace(found, source=source, axes=axes, nodes=(*casts, node, *found.nodes))


def miscounted(count: int, divisor: float, unit: float) -> NearMiss:
    """Set if the divisor of a sum over `count` elements, stored with this unit roundoff, is another number."""
    unit = max(unit, 2.0**-50)  # float64 constants: the arithmetic here rounds more
    unbiased = abs(divisor - count + 1) < abs(divisor - count)
    # two roundings, of n and of 1/n; one only if the divisor is nearer to n - 1, lest n - 1 pass for n
    if divisor > 0 and 1 - min(divisor / count, count / divisor) <= (1 if unbiased else 2) * unit:
        return NONE
    unbiased = abs(divisor - count + 1) <= 2 * unit * count
    kind = " (unbiased)" if unbiased else ""
    return NearMiss(f"a sum over {count} elements is divided by {divisor:.6g}{kind}", error=not unbiased)
