"""What each element was a frame earlier, in a trace of several frames: what a cache would carry of a causal network.

A convolution over a time axis that is padded with zeros in front computes every frame by the same rule from this frame
and those before it. Here the rule is compared: an element is linked to another of the same operator with the same
constants if each operand of the one is linked to that of the other. What the first frame reads of frames before it must
be constants of zero, which is what a stream begins with.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np

from onnx_export.importer.elements import Block
from onnx_export.importer.frames import CELLS, Reach, rows_of

__all__ = ["Shifts"]

ZERO, NONE = -1, -2  # before the first frame, or a constant 0; not linked
NEAR = 8  # blocks of an operator, back from one, among which the one of the frame before is
OF_ELEMENTS = ("factor", "offset", "slope")  # constants with a value for each element
# Their results of zeros are zeros.
OF_ZEROS = {"scale", "add", "subtract", "multiply", "square", "mean", "sum", "max", "product", "conv", "relu", "tanh"}


class Shifts:
    """Links from each element to the one of the frame before.

    Parameters
    ----------
    reach : Reach
    axes : mapping of str to int
        The inputs that have frames, and the axis that counts them.
    fixed : bool
        Whether the file takes just as many frames as the trace has.

    Attributes
    ----------
    trace : Trace
    length : int
        Frames of the trace.
    fault : str
        Where frames are mixed; "" if a loop carries all that is.
    before : ndarray of int64
        For each element, by its number, that of the frame before; `NONE` if there is none. In the first frame `ZERO`,
        or what the file computes there of the zeros in front. What reads no frame is its own.
    """

    def __init__(self, reach: Reach, axes: Mapping[str, int], *, fixed: bool = False) -> None:
        self.fixed = fixed
        self.trace, self.length, self.fault, self._last = reach.trace, reach.length, reach.fault, reach.last
        self._steps = reach.sequences
        self._same = np.arange(len(self._last))  # one number for constants of one value
        self._still = np.zeros(len(self._last), bool)  # what reads neither a frame nor what a loop carries
        self.before = np.full(len(self._last), NONE)
        self._known: dict[tuple[str, str], list[_Rows]] = {}
        values: dict[float, int] = {}
        for block in self.trace.blocks:
            if block.op == "constant":
                self._constant(block, values)
            elif block.op == "input" and block.node in axes:
                frames = np.moveaxis(self.trace.values[block.node].numbers, axes[block.node], 0)
                self.before[frames[1:]], self.before[frames[0]] = frames[:-1], ZERO
            elif block.op == "carried":
                self._carried(block)
            elif block.op == "repeated":  # each step has the same body, so its states were those of the step before
                self.before[block.numbers] = block.constants["before"]
            elif block.constants.get("backward"):
                self._from_the_end(block)
            elif block.operands:
                self._through(block)
            still = self._still_of(block)
            self._still[still] = True
            self.before[still] = self._same[still]

    def _still_of(self, block: Block) -> np.ndarray:
        still = self._last[block.numbers] < 0
        for operand in block.operands:
            still &= self._still[operand].all(axis=1)[rows_of(block, len(operand))]
        return block.numbers[still & (block.op not in ("carried", "repeated"))]

    def _constant(self, block: Block, values: dict[float, int]) -> None:
        each, places = np.unique(np.asarray(block.constants["value"], np.float64), return_inverse=True)
        own = [ZERO if v == 0 else values.setdefault(v, block.first + i) for i, v in enumerate(each.tolist())]
        self._same[block.numbers] = np.array(own)[places.ravel()]

    def _carried(self, block: Block) -> None:
        """Link what a loop carries to what it carried before: zeros at first, and then what is linked."""
        before = block.constants["before"]
        if before is not None and len(before) == block.size:
            given = self.trace.owner(int(before[0])).operands[0].ravel()
            linked = self.before[block.operands[0].ravel()] == self._same[given]
            self.before[block.numbers[linked]] = before[linked]

    def _through(self, block: Block) -> None:
        """Link the elements of a block whose operands are linked."""
        operands = np.concatenate(block.operands[: 1 if block.op in CELLS else None], axis=1)
        more = [
            np.asarray(block.constants[name], np.float64).view(np.int64).reshape(len(operands), -1)
            for name in OF_ELEMENTS
            if name in block.constants
        ]
        groups = block.constants["options"]["groups"] if block.op == "conv" else 1
        more.append(np.arange(len(operands))[:, None] % groups)
        known = self._known.setdefault((block.op, block.node), [])
        own = np.concatenate([self._same[operands], *more], axis=1)
        known.append(_Rows(block, own))
        if len(still := self._still_of(block)):
            self._one_number(block, still, own, known[-1])
        moved = np.concatenate([self.before[operands], *more], axis=1)
        sought = np.arange(len(moved))
        for rows in known[: -NEAR - 1 : -1]:
            if rows.block is block or _alike(block.constants, rows.block.constants):
                at, to = rows.find(moved[sought])
                self._link(block, rows.block, sought[at], to)
                sought = np.delete(sought, at)
            if not len(sought):
                break
        first = block.numbers[(self._last[block.numbers] == 0) & (self.before[block.numbers] == NONE)]
        self.before[first] = ZERO

    def _one_number(self, block: Block, still: np.ndarray, own: np.ndarray, rows: _Rows) -> None:
        """Give what reads no frame, of the same operands, one number, and zeros that of all zeros."""
        at, to = rows.find(own)
        elements, there = self._elements(block, block, at, to)
        same = np.full(block.size, NONE)
        same[elements] = there
        of_zeros = block.op in OF_ZEROS and all(np.isfinite(value).all() for value in _weights(block))
        if of_zeros:
            operand = np.concatenate(block.operands, axis=1)
            zeros = (self._same[operand] == ZERO).all(axis=1)[rows_of(block, len(operand))]
            same[zeros] = ZERO
        self._same[still] = same[still - block.first]

    def _from_the_end(self, block: Block) -> None:
        """Link the frame behind this one, whose state a cell that runs backward reads, to this one."""
        x, h = (operand.ravel() for operand in block.operands[:2])
        behind = self.trace.owner(int(h[0]))
        if behind.op in CELLS and np.array_equal(self.before[behind.operands[0].ravel()], self._same[x]):
            self.before[h] = block.numbers
        self.before[block.numbers[self._last[block.numbers] == 0]] = ZERO

    def _link(self, block: Block, other: Block, at: np.ndarray, to: np.ndarray) -> None:
        """Link the elements of the rows `at` of a block to those of the rows `to` of another."""
        elements, there = self._elements(block, other, at, to)
        elements = elements + block.first
        kept = (self._last[there] == self._last[elements] - 1) | (self._last[elements] < 0)
        if block.op in CELLS:
            unrolled = [self.trace.unrolled.get(number, NONE) for number in elements.tolist()]
            kept &= np.array(unrolled, np.int64) == there
        self.before[elements[kept]] = self._same[there[kept]]

    @staticmethod
    def _elements(block: Block, other: Block, at: np.ndarray, to: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The places of the elements of the rows `at` of a block, and the numbers of those of `to` of another."""
        target = np.full(len(block.operands[0]), NONE)
        target[at] = to
        row = rows_of(block, len(block.operands[0]))
        elements = np.flatnonzero(target[row] != NONE)
        if block.op == "conv":
            places = block.size // len(block.constants["weight"])
            there = elements // places * places + target[row[elements]] // block.constants["options"]["groups"]
        else:
            width = block.size // len(block.operands[0])
            there = target[row[elements]] * width + elements % width
        return elements, there + other.first

    def carries(self, outputs: Mapping[str, object], axes: Mapping[str, int | None]) -> bool:
        """Whether each frame of the outputs is linked to the one before it, or they are of the last frame alone."""
        for name, axis in axes.items():
            numbers = outputs[name].numbers
            if axis is None:
                if ((self._last[numbers] != self.length - 1) & (self._last[numbers] >= 0)).any():
                    return False
                continue
            if not self._in_order(np.moveaxis(numbers, axis, 0)):
                return False
        # each step of a loop must do what the one before did, and begin with zeros
        return all((self.before[states[1:]] == states[:-1]).all() for states in self.trace.loops)

    def steps_in_order(self) -> bool:
        """Whether recurrent operators read at each step what they read at the one before, a frame later."""
        return all(map(self._in_order, self._steps))

    def _in_order(self, frames: np.ndarray) -> bool:
        """Whether elements [frames, ...] are linked, each frame to the one before it."""
        return not (self.before[frames[1:]] != self._same[frames[:-1]])[self._last[frames[1:]] >= 0].any()

    @cached_property
    def chains(self) -> tuple[np.ndarray, np.ndarray]:
        """Elements [frames, n] of the last frame, and what they were in each frame before, back to the first.

        And for each element of the trace its row and column in these, -1 where it has none.
        """
        at = np.flatnonzero(self._last == self.length - 1)
        chains, whole = np.full((self.length, len(at)), NONE), np.arange(len(at))
        chains[0] = at
        for lag in range(1, self.length):
            before = self.before[chains[lag - 1, whole]]
            whole, before = whole[before >= 0], before[before >= 0]
            chains[lag, whole] = before
        linked = chains[:, whole[self.before[chains[-1, whole]] == ZERO]]
        places = np.full((2, len(self.before)), -1, np.int32)
        places[0, linked], places[1, linked] = np.arange(self.length)[:, None], np.arange(linked.shape[1])
        return linked, places


def _weights(block: Block) -> list[np.ndarray]:
    """What a block multiplies by."""
    return [np.asarray(block.constants[name]) for name in ("factor", "weight") if name in block.constants]


class _Rows:
    """Rows of integers of a block, to be found by value."""

    def __init__(self, block: Block, rows: np.ndarray) -> None:
        self.block, self._rows = block, rows
        keys = self._keys(rows)
        self._order = np.argsort(keys, kind="stable")
        self._sorted = keys[self._order]

    @staticmethod
    def _keys(rows: np.ndarray) -> np.ndarray:
        """A number for each row, which is the same for equal rows."""
        factors = np.random.default_rng(rows.shape[1]).integers(1, 1 << 62, rows.shape[1])
        return (rows * factors).sum(axis=1)  # modulo 2^64

    def find(self, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of some rows are here, and where."""
        keys = self._keys(wanted)
        place = np.searchsorted(self._sorted, keys)
        row = self._order[np.minimum(place, len(self._order) - 1)]
        at = np.flatnonzero((self._rows[row] == wanted).all(axis=1))
        return at, row[at]


def _alike(one, other) -> bool:
    """Whether constants of two blocks are equal, but for those of each element."""
    if one is other:
        return True
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(
            key in OF_ELEMENTS or _alike(value, other[key]) for key, value in one.items() if key != "x"
        )
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool(np.array_equal(one, other))
