"""A partial match of a decomposed norm."""

from __future__ import annotations

from dataclasses import dataclass

import onnx
from onnx import TensorProto

from onnx_export.graph.scope import Scope
from onnx_export.operators import RMS
from onnx_export.validation.norm import NONE, NearMiss
from onnx_export.validation.powers import Power
from onnx_export.validation.statistic import Variance


@dataclass(frozen=True)
class Match:
    """A partial match: the nodes recognised so far between the square root and the norm's result.

    Attributes
    ----------
    y : str
        The result of the last node matched.
    std : str
        The value of the variance and eps to `power`, after the nodes matched so far.
    power : Power
    excess : int or None
        n if `std` is the root of a sum rather than of a mean, and so sqrt(n) times too large; None once a factor
        sqrt(n) has been found.
    odd : bool
        Whether it is a near miss by its power, which any better match of the same start replaces.
    axes : tuple of int or None
        Normalised axes if they are not those of the variance.
    shrink, shared
        As in `Norm`.
    scope : Scope or None
        The inner graph in which the quotient lies, None for the graph of the variance.
    """

    variance: Variance
    nodes: tuple[onnx.NodeProto, ...]
    y: str
    std: str
    power: Power
    eps: float = 0.0
    eps_dtype: int = TensorProto.UNDEFINED
    eps_first: bool = False
    scale: str = ""
    bias: str = ""
    near: NearMiss = NONE
    stored_reciprocal: bool = False
    floor: float = 0.0
    folded: bool = False
    excess: int | None = None
    odd: bool = False
    axes: tuple[int, ...] | None = None
    shrink: float = 1.0
    shared: int = 0
    scope: Scope | None = None

    @property
    def reciprocal(self) -> bool:
        """Whether `std` is a negative power, by which the numerator is multiplied."""
        return self.power.exponent < 0 and not self.power.logged

    @property
    def rms(self) -> bool:
        """Whether no mean is subtracted."""
        return self.variance.formula is RMS

    def add(self, *nodes: onnx.NodeProto, near: NearMiss = NONE, **changes) -> Match:
        """The match extended by nodes, with a near miss that these make it."""
        return self.but(nodes=(*self.nodes, *nodes), near=self.near.then(near), **changes)

    def but(self, **changes) -> Match:
        """`dataclasses.replace`, which took a tenth of the whole search."""
        made = object.__new__(Match)
        made.__dict__.update(self.__dict__, **changes)
        return made
