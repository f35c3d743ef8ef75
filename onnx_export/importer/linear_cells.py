"""Linear recurrences h = a h + b, where a and b depend on the frame alone: minGRU, SRU, leaky averages and their kin.

They are the cell of an LSTM without functions: c = f c + i g with f = a, i = 1, g = b, and h = c. Its weights choose a
and b, or are a bias where a is constant, so that every product is exact; h has no weights.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

import cnorm
from onnx_export.importer.computing import COMPUTING
from onnx_export.importer.elements import Elements
from onnx_export.importer.frames import depending
from onnx_export.importer.joining import Cell

__all__ = ["linear_recurrence"]

IDENTITY = ("leaky_relu", 1.0)
MAX_DEPTH = 64
OF_TWO = {"add": "Add", "subtract": "Sub", "multiply": "Mul"}

Value = Elements | np.ndarray | None  # a vector that is computed, constant, or 0


def linear_recurrence(trace, h: np.ndarray, old) -> tuple[tuple, Cell, np.ndarray] | None:
    """The cell of new states `h` (numbers), as `Joined.cell` takes it, and the numbers that it reads; None for others.

    `old` has for each new state that of the step before.
    """
    if any(number not in old for number in h.tolist()):
        return None
    before = np.array([old[number] for number in h.tolist()], np.int64)
    a, b = _Linear(trace, before).parts(h) or (None, None)
    if a is None or not isinstance(b, Elements):
        return None
    size = len(h)
    x = np.concatenate([*([a.numbers] if isinstance(a, Elements) else []), b.numbers])
    weight, bias = np.zeros((1, 4 * size, len(x)), np.float32), np.zeros((1, 8 * size), np.float32)
    i, o, f, c = (slice(gate * size, (gate + 1) * size) for gate in range(4))  # in the order of the operator
    bias[0, i] = bias[0, o] = 1
    weight[0, c, -size:] = np.eye(size)
    if isinstance(a, Elements):
        weight[0, f, :size] = np.eye(size)
    else:
        bias[0, f] = a
    weights = {"W": weight, "R": np.zeros((1, 4 * size, size), np.float32), "B": bias}
    spec = replace(cnorm.PRESETS["LSTM", "onnx"], activation=IDENTITY, recurrent_activation=IDENTITY)
    return ("LSTM", weights, spec), Cell({"h": h, "c": h}, {"h": before, "c": before}), x


class _Linear:
    """Elements as a h + b, for the states h of the step before."""

    def __init__(self, trace, before: np.ndarray) -> None:
        self._trace, self._before, self._depends = trace, before, depending(trace, before)

    def parts(self, numbers: np.ndarray, depth: int = 0) -> tuple[Value, Value] | None:
        """a and b of a vector with an element for each state; None if there are none."""
        if np.array_equal(numbers, self._before):
            return np.ones(len(numbers)), None
        if not self._depends[numbers].any():
            return None, self._trace.lowered(Elements(numbers))
        owners = self._trace.owners(numbers)
        if len(owners) > 1 or depth > MAX_DEPTH:
            return None
        block, at = owners[0], numbers - owners[0].first
        if block.op in ("scale", "shift"):
            inner = self.parts(block.operands[0][at, 0], depth + 1)
            if inner is None:
                return None
            if block.op == "shift":
                return inner[0], self._made("add", block.node, inner[1], block.constants["offset"][at])
            return tuple(self._made("multiply", block.node, part, block.constants["factor"][at]) for part in inner)
        if block.op not in OF_TWO:
            return None
        two = [self.parts(operand[at, 0], depth + 1) for operand in block.operands]
        if None in two:
            return None
        if block.op != "multiply":
            return tuple(self._made(block.op, block.node, *pair) for pair in zip(*two, strict=True))
        if all(a is not None for a, _ in two):
            return None  # a square of h
        (inner,), (factor,) = [p for p in two if p[0] is not None], [p[1] for p in two if p[0] is None]
        return tuple(self._made("multiply", block.node, part, factor) for part in inner)

    def _made(self, op: str, node: str, u: Value, v: Value) -> Value:
        if op == "multiply":
            if u is None or v is None:
                return None
        elif v is None:
            return u
        elif u is None:
            return v if op == "add" else self._made("multiply", node, v, -np.ones(np.shape(v)))
        if isinstance(u, Elements) or isinstance(v, Elements):
            return COMPUTING[OF_TWO[op]](self._trace, node, {}, [u, v], 1)[0]
        return {"add": np.add, "subtract": np.subtract, "multiply": np.multiply}[op](u, v)
