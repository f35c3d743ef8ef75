"""What a value was recognised as: a mean, a centred value, a variance."""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx

from onnx_export.operators import Formula
from onnx_export.validation.graph import op
from onnx_export.validation.norm import NONE, NearMiss
from onnx_export.validation.values import RESHAPERS

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

    @property
    def misbroadcast(self) -> NearMiss:
        """Set if the mean, without its reduced axes, broadcasts wrongly against its source."""
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
        reshaped = self.reshaped or any(op(node) in RESHAPERS for node in nodes)
        near = self.near.then(near)
        return replace(self, nodes=(*self.nodes, *nodes), reshaped=reshaped, near=near, **changes)


@dataclass(frozen=True)
class Centred:
    """x - mean(x), or mean(x) - x if `negative`."""

    x: str
    mean: Mean
    nodes: tuple[onnx.NodeProto, ...]
    negative: bool = False
