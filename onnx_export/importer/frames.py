"""Which frames an element depends on, other than by the state of a cell: what an import may not lose.

A file is traced with several frames along an axis of its inputs. For each element the first and the last frame are
found that it reads, through every operator but the step of a cell to the next. A frame's outputs, and what a cell
reads at a step, may depend on this frame alone; an average over time, a convolution or a delay outside a cell may not
be lost, so it is a fault that names the node.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from onnx_export.importer.elements import Block, Elements

__all__ = ["CELLS", "MAX_REACH", "Reach", "ancestors", "depending", "rows_of", "unrolled"]

MAX_REACH = 20_000  # frames
CELLS = ("LSTM", "GRU", "RNN")


class Reach:
    """The frames that each element of a trace reads.

    Parameters
    ----------
    trace : Trace
        With `length` frames.
    axes : mapping of str to int
        The inputs that have frames, and the axis that counts them.
    length : int

    Attributes
    ----------
    first, last : ndarray of int
        For each element, by its number; `length` and -1 if it reads no frame.
    mixed : str
        The first node whose result depends on several frames, or "".
    sequences : list of ndarray
        Those of `Trace` whose steps are frames.
    moves : bool
        Whether there are any.
    """

    def __init__(self, trace, axes: Mapping[str, int], length: int) -> None:
        self.trace, self.length, self.mixed = trace, length, ""
        size = sum(block.size for block in trace.blocks)
        self.first, self.last = np.full(size, length), np.full(size, -1)
        for name, axis in axes.items():
            numbers = trace.values[name].numbers
            self.first[numbers] = self.last[numbers] = np.broadcast_to(self._along(axis, numbers.ndim), numbers.shape)
        for block in trace.blocks:
            self._through(block)
        self.sequences = [steps for _, steps in trace.sequences if self._step_frames(steps) is not None]
        self.moves = bool(self.sequences)

    def _through(self, block: Block) -> None:
        at = slice(block.first, block.first + block.size)
        carried = block.op in CELLS and block.first in self.trace.unrolled
        for operand in block.operands[: 0 if block.op in ("carried", "repeated") else 1 if carried else None]:
            row = rows_of(block, len(operand))
            self.first[at] = np.minimum(self.first[at], self.first[operand].min(axis=1)[row])
            self.last[at] = np.maximum(self.last[at], self.last[operand].max(axis=1)[row])
        if block.operands and not self.mixed and (self.first[at] < self.last[at]).any():
            self.mixed = block.node

    def _step_frames(self, steps: np.ndarray) -> np.ndarray | None:
        """The last frame that each step of a sequence [steps, rows, size] reads; None if all read the same."""
        last = self.last[steps].reshape(len(steps), -1).max(axis=1)
        return last if len(steps) > 1 and (last != last[0]).any() else None

    @property
    def fault(self) -> str:
        return (
            self.mixed and f"{self.mixed}: its result depends on several frames, which only a cell or a cache may carry"
        )

    def longest(self) -> int:
        """How many frames all convolutions over frames reach back together."""
        total = 0
        for block in self.trace.blocks:
            if block.op == "conv" and self._is_over_frames(block.constants["x"]):
                total += (block.constants["weight"].shape[2] - 1) * block.constants["options"]["dilation"]
        return total

    def _is_over_frames(self, rows: np.ndarray) -> bool:
        """Whether one of some rows has elements of several frames; zeros around them are of none."""
        last = self.last[rows]
        first = np.where(last < 0, self.length, last).min(axis=1)
        return bool((first < last.max(axis=1)).any())

    def reads(self, outputs: Mapping[str, object]) -> int:
        """How many frames before its own an element of an output reads at most."""
        most = 0
        for value in (value for value in outputs.values() if isinstance(value, Elements)):
            at = value.numbers[self.last[value.numbers] >= 0]
            most = max(most, int((self.last[at] - self.first[at]).max(initial=0)))
            if (axis := self.axis(value, carried=True)) is not None:
                at = value.numbers.take(-1, axis)
                most = max(most, int((self.length - 1 - self.first[at[self.last[at] >= 0]]).max(initial=0)))
        return most

    def faults(self, outputs: Mapping[str, object], *, carried: bool = False) -> list[str]:
        """Why the frames are not independent but for cells and, if `carried`, what was before; empty if they are."""
        if self.mixed and not carried:
            return [self.fault]
        for node, steps in self.trace.sequences:
            odd = self._odd(steps, None) and self._odd(steps, 0, carried=carried)
            if self.moves and odd:
                return [f"{node}: it reads {len(steps)} steps that are not the {self.length} frames in order"]
        for name, value in outputs.items():
            own = isinstance(value, Elements) and self.axis(value, carried=carried) is None
            if own and not self._is_last(value, carried):
                return [f"output {name!r}: a frame of it is computed from another frame of the inputs"]
        return []

    def _odd(self, numbers: np.ndarray, axis: int | None, *, carried: bool = False) -> bool:
        """Whether along an axis the elements do not read the frame of their place, or any frame with axis None.

        If `carried`, an element may read one that is the same number of frames before its place everywhere.
        """
        last = self.last[numbers]
        if axis is None:
            return (last >= 0).any()
        if numbers.shape[axis] != self.length:
            return True
        lag = self.length - 1 - last.take([-1], axis) if carried else 0
        return ((last != self._along(axis, numbers.ndim) - lag) & (last >= 0)).any()

    def _along(self, axis: int, axes: int) -> np.ndarray:
        """The places of the frames along one of some axes."""
        return np.arange(self.length).reshape([-1 if i == axis else 1 for i in range(axes)])

    def axis(self, value: Elements, *, carried: bool = False) -> int | None:
        """The axis of a value that counts frames, or those a number of frames before if `carried`."""
        axes = [axis for axis in range(value.numbers.ndim) if not self._odd(value.numbers, axis, carried=carried)]
        return axes[0] if axes and self._odd(value.numbers, None) else None

    def _is_last(self, value: Elements, carried: bool) -> bool:
        """Whether a value is of the last frame alone, or of none."""
        last = self.last[value.numbers]
        return bool(((last < 0) | ((last == self.length - 1) & (self.moves or carried))).all())


def unrolled(trace, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Where a trace without cells has a recurrent layer written out: copies of a matrix, each with one more frame."""
    copies: dict[bytes, list[Block]] = {}
    for block in trace.blocks:
        if block.op == "product":
            copies.setdefault(block.constants["weight"].tobytes(), []).append(block)
    groups = [group for group in copies.values() if len(group) > 1]
    behind = _behind(trace, {block.first for group in groups for block in group}) if groups else {}
    for name, shape in shapes.items():
        for axis in [axis for axis, size in enumerate(shape) if size > 1 and copies]:
            reach = Reach(trace, {name: axis}, shape[axis])
            last = reach.last
            if node := _fed_back(trace, reach, copies.values()):
                text = (
                    f"the product of one of the {shape[axis]} elements along axis {axis} of {name!r} is added to what "
                )
                return [f"{node}: {text}the same matrix made of one before: an unrolled RNN; export one step"]
            for group in groups:
                ends = [last[block.first : block.first + block.size].max() for block in group]
                pairs = zip(group, group[1:], ends, ends[1:], strict=False)
                if all(a.first in behind[b.first] and end < after for a, b, end, after in pairs):
                    text = f"{len(group)} copies of one matrix in a chain, each with more of the {shape[axis]} elements"
                    remedy = "export one step with its state, or the recurrent operator"
                    return [f"{group[0].node}: {text} along axis {axis} of {name!r}: an unrolled RNN; {remedy}"]
    return []


def _fed_back(trace, reach: Reach, groups) -> str:
    """Where W x[t] is added to what depends on W x[t - 1], which is a recurrence of two steps; else ""."""
    for group in groups:
        rows = [block.numbers.reshape(len(block.operands[0]), -1) for block in group]
        rows = [row for each in rows for row in each if reach.first[row[0]] == reach.last[row[0]]]
        if len({int(reach.last[row[0]]) for row in rows}) < 2:
            continue
        first = min(rows, key=lambda row: reach.last[row[0]])
        late = set(np.concatenate([row for row in rows if reach.last[row[0]] > reach.last[first[0]]]).tolist())
        behind = depending(trace, first)
        for block in trace.blocks:
            if block.op == "add":
                a, b = (operand.ravel() for operand in block.operands)
                for own, fed in ((a, b), (b, a)):
                    if late.issuperset(_unshifted(trace, own).tolist()) and behind[fed].any():
                        return block.node
    return ""


def _unshifted(trace, numbers: np.ndarray) -> np.ndarray:
    """Elements without the constants that are added to them."""
    owners = trace.owners(numbers)
    while len(owners) == 1 and owners[0].op == "shift":
        numbers = owners[0].operands[0][numbers - owners[0].first, 0]
        owners = trace.owners(numbers)
    return numbers


def depending(trace, numbers) -> np.ndarray:
    """For each element whether it depends on one of some elements."""
    depends = np.zeros(trace.size, bool)
    depends[numbers] = True
    for block in trace.blocks:
        if not block.operands:
            continue
        width = block.size // len(block.operands[0])
        rows = np.zeros(len(block.operands[0]), bool)
        for operand in block.operands:
            if len(operand) == len(rows):
                rows |= depends[operand].any(1)
            else:
                rows |= depends[operand].any()
        depends[block.first : block.first + block.size] |= np.repeat(rows, width)[: block.size]
    return depends


def ancestors(trace, numbers: np.ndarray) -> np.ndarray:
    """For each element whether one of some elements depends on it, or is it."""
    wanted = np.zeros(trace.size, bool)
    wanted[numbers] = True
    for block in reversed(trace.blocks):
        own = wanted[block.first : block.first + block.size]
        if own.any() and block.operands:
            for operand in block.operands:
                rows = np.unique(rows_of(block, len(operand))[own])
                wanted[operand[rows]] = True
    return wanted


def _behind(trace, marked: set[int]) -> dict[int, set[int]]:
    """The marked blocks, by their first numbers, that each block depends on; sets are shared where they are equal."""
    found: dict[int, set[int]] = {}
    for block in trace.blocks:
        sets = []
        for operand in block.operands:
            for owner in trace.owners(operand):
                own = {owner.first} if owner.first in marked else set()
                sets.append(found[owner.first] | own if own else found[owner.first])
        largest = max(sets, key=len, default=set())
        found[block.first] = largest if all(one <= largest for one in sets) else set().union(*sets)
    return found


def rows_of(block: Block, rows: int) -> np.ndarray:
    """The row of an operand with `rows` rows that each element of a block depends on."""
    if block.op != "conv":
        return np.arange(block.size) // (block.size // rows)
    outputs, groups = len(block.constants["weight"]), block.constants["options"]["groups"]
    output, place = np.divmod(np.arange(block.size), block.size // outputs)
    return place * groups + output // (outputs // groups)
