"""The quantiser of int8 products in float64 evaluation: its rounding decisions are those of float32.

An exported int8 model rounds the input x of each product to integers, ``q = Round(x * Where(tiny, 0, levels / m))``
(`onnx_export.builders.rounded`). Float64 would round some elements near a tie the other way than float32 does, and one
such element changes the product by more than all rounding errors of a step. So the nodes are replaced by one node
`Quantize`, which is computed in float32. If x is an input of the graph, every correct engine decides as it does. If x
is computed, engines may differ in elements near a tie, and `Decisions.vary` shows what that changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper
from onnx.reference.op_run import OpRun

__all__ = ["DOMAIN", "Decisions", "Variation", "Varied", "kernel", "replace_quantizers"]

DOMAIN = "cnorm.float64"


def replace_quantizers(graph: onnx.GraphProto, inputs: set[str]) -> bool:
    """Replace the quantisers among the nodes of a graph, not of its subgraphs; says whether there were any.

    Parameters
    ----------
    graph : onnx.GraphProto
    inputs : set of str
        Names whose values every engine gets alike.
    """
    makers = {name: node for node in graph.node for name in node.output}

    def made_by(name: str, operator: str) -> onnx.NodeProto | None:
        node = makers.get(name)
        return node if node is not None and node.op_type == operator and not node.domain else None

    found = False
    for node in graph.node:
        product = made_by(node.input[0], "Mul") if node.op_type == "Round" and node.input else None
        where = made_by(product.input[1], "Where") if product else None
        ratio = made_by(where.input[2], "Div") if where else None
        if ratio is None:
            continue
        x = product.input[0]
        node.CopyFrom(
            helper.make_node(
                "Quantize", [x, *ratio.input, where.input[0]], node.output, node.name, domain=DOMAIN, given=x in inputs
            )
        )
        found = True
    return found


@dataclass(frozen=True)
class Variation:
    """How decisions differ from those of the last call: see `Decisions.vary`.

    Attributes
    ----------
    rng : numpy.random.Generator
    tolerance : float
        Relative error of a computed x: engines may decide differently where x levels/m lies within tolerance * levels
        of a tie.
    share : float
        Probability that an element near a tie is decided the other way.
    """

    rng: np.random.Generator
    tolerance: float
    share: float


class Decisions:
    """The rounding decisions of one call of a graph, and of calls near it."""

    def __init__(self):
        self._taken: list[np.ndarray] = []  # x levels/m of each quantiser, in the order of evaluation
        self._left: list[np.ndarray] = []
        self._variation: Variation | None = None

    def follow(self) -> None:
        """Decide as float32 does, in the next call."""
        self._taken, self._variation = [], None

    def vary(self, variation: Variation) -> None:
        """In the next call keep the decisions for inputs of the graph, and take computed ones near a tie at random."""
        self._left, self._variation = self._taken[::-1], variation

    def take(self, unrounded: np.ndarray, levels: float, given: bool) -> np.ndarray:
        """q for x levels/m in float32."""
        q = np.rint(unrounded)
        if self._variation is None:
            self._taken.append(unrounded)
            return q
        before = self._left.pop() if self._left else unrounded
        if before.shape != q.shape:  # a graph whose shapes depend on values
            return q
        decided = np.rint(before)
        if given:
            return decided
        beyond = before - decided  # from -1/2 to 1/2
        other = np.clip(decided + np.sign(beyond), -levels, levels)
        near = np.abs(beyond) >= 0.5 - self._variation.tolerance * levels
        changed = self._variation.rng.random(q.shape) < self._variation.share
        return np.where(near, np.where(changed, other, decided), q)


class Varied(OpRun):
    """x changed relatively by `noise`, as what is rounded."""

    op_domain = DOMAIN

    def _run(self, x, noise=0.0, seed=0):
        return (x * (1 + noise * np.random.default_rng(seed).standard_normal(x.shape)),)


def kernel(decisions: Decisions) -> type[OpRun]:
    """The class of `Quantize` for onnx's reference evaluator."""

    class Quantize(OpRun):
        """q = round(x levels/m) in float32, 0 where `tiny`; the result is float64."""

        op_domain = DOMAIN

        def _run(self, x, levels, largest, tiny, given=0):
            with np.errstate(all="ignore"):
                ratio = np.where(tiny, np.float32(0), np.float32(levels) / np.asarray(largest, np.float32))
                unrounded = np.asarray(x, np.float32) * ratio
            return (decisions.take(unrounded, float(levels), bool(given)).astype(np.float64),)

    return Quantize
