"""Numbered elements and the blocks that compute them, which the modules of this package share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

__all__ = ["MAX_NUMBERED", "Block", "Cannot", "Elements"]


MAX_NUMBERED = 1 << 22  # elements of one value that depends on an input


class Cannot(ValueError):
    """A node that has no counterpart in a `cnorm.Model`; the message is the reason.

    `behind` has the numbers of what the node reads, if the search can go on there.
    """

    def __init__(self, reason: str, *, behind: np.ndarray | None = None) -> None:
        super().__init__(reason)
        self.behind = behind


@dataclass(frozen=True, eq=False)
class Elements:
    """The value of a name that depends on an input: the numbers of its elements."""

    numbers: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape


@dataclass(frozen=True, eq=False)
class Block:
    """What one operator computes.

    Attributes
    ----------
    op : str
        "input" for a graph input, "constant" for constants among moved elements, else what `computing.py` calls it.
    node : str
        The operator and name of the node, for messages.
    first : int
        Its elements have the numbers first, first + 1, ..., first + size - 1.
    size : int
    operands : tuple of ndarray of int64
        Numbers of the operands [rows, terms]; output i depends on row i // (size / rows) of each.
    constants : mapping
        Weights and attributes, by the names that `computing.py` gives them.
    """

    op: str
    node: str
    first: int
    size: int
    operands: tuple[np.ndarray, ...] = ()
    constants: Mapping = field(default_factory=dict)

    @property
    def numbers(self) -> np.ndarray:
        return np.arange(self.first, self.first + self.size)

    def row(self, number: int) -> np.ndarray:
        """The first operand's row that an element depends on."""
        at, rows = number - self.first, len(self.operands[0])
        if self.op != "conv":
            return self.operands[0][at // (self.size // rows)]
        outputs, groups = len(self.constants["weight"]), self.constants["options"]["groups"]
        output, place = divmod(at, self.size // outputs)
        return self.operands[0][place * groups + output // (outputs // groups)]

    def part(self, at: np.ndarray) -> Block | None:
        """Some of its elements as a block of their own; None if they are not whole rows, or it has no rows.

        One row that is normalised may be in another order.

        Its `first` is that of the whole block.
        """
        if not self.operands or self.op in ("LSTM", "GRU", "RNN"):
            return None
        if self.op == "conv":
            return self._some_outputs(at)
        if self.op in ("norm", "softmax") and len(self.operands[0]) == 1 and len(np.unique(at)) == self.size:
            return Block(self.op, self.node, self.first, self.size, (self.operands[0][:, at],), self.constants)
        width = self.size // len(self.operands[0])
        rows = at[::width] // width
        if not np.array_equal(at, (rows[:, None] * width + np.arange(width)).ravel()):
            return None
        each = {name: self.constants[name][at] for name in ("factor", "offset", "slope") if name in self.constants}
        kept = {} if self.op == "max" else self.constants  # those of a max say of what array its windows are
        operands = tuple(operand[rows] for operand in self.operands)
        return Block(self.op, self.node, self.first, len(at), operands, dict(kept) | each)

    def _some_outputs(self, at: np.ndarray) -> Block | None:
        """Some outputs of a convolution, as many of each group, with all their places."""
        weight, groups = self.constants["weight"], self.constants["options"]["groups"]
        places = self.size // len(weight)
        outputs = at[::places] // places
        of_group = outputs.reshape(groups, -1) if len(outputs) % groups == 0 else np.zeros((0, 0), int)
        own = np.arange(groups)[:, None]
        if not len(of_group) or (of_group // (len(weight) // groups) != own).any():
            return None
        if not np.array_equal(at, (outputs[:, None] * places + np.arange(places)).ravel()):
            return None
        constants = dict(self.constants) | {"weight": weight[outputs]}
        return Block("conv", self.node, self.first, len(at), self.operands, constants)
