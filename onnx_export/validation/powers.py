"""The power of a value that nodes compute, however they write it: roots, reciprocals, products, Exp of Log."""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from onnx_export.graph.scope import op
from onnx_export.validation.values import Values

NEAR = 1e-3  # of exponents, which a half type may have rounded; evaluation decides about what is that near


@dataclass(frozen=True)
class Power:
    """base^exponent, or its logarithm if `logged`."""

    exponent: float = 1.0
    logged: bool = False

    def is_(self, exponent: float) -> bool:
        """Whether it is this power, not a logarithm."""
        return not self.logged and abs(self.exponent - exponent) <= NEAR

    def times(self, factor: float) -> Power:
        """The power of this power."""
        return Power(self.exponent * factor, self.logged)


def next_power(values: Values, node: onnx.NodeProto, name: str, power: Power) -> Power | None:
    """The power that `node` makes of `name`, which is `power` of some base; None if it makes another function of it."""
    kind, first = op(node), node.input[0] == name
    if kind == "Neg" and power.logged:
        return power.times(-1.0)
    if kind == "Exp" and power.logged:
        return Power(power.exponent)
    if power.logged:
        return _scaled_logarithm(values, node, first, power)
    if kind in ("Sqrt", "Reciprocal"):
        return power.times(0.5 if kind == "Sqrt" else -1.0)
    if kind == "Log":
        return Power(power.exponent, logged=True)
    if kind == "Pow" and first:
        exponent = values.scalar(node.input[1])
        return power.times(exponent) if exponent else None
    if kind == "Mul" and values.same(*node.input):
        return power.times(2.0)
    if kind == "Div" and node.input[1] == name and values.scalar(node.input[0]) == 1:
        return power.times(-1.0)
    return None


def _scaled_logarithm(values: Values, node: onnx.NodeProto, first: bool, power: Power) -> Power | None:
    kind = op(node)
    if kind not in ("Mul", "Div") or (kind == "Div" and not first):
        return None
    factor = values.scalar(node.input[1 if first else 0])
    return power.times(factor if kind == "Mul" else 1 / factor) if factor else None
