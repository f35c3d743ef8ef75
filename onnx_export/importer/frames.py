"""Which frames an element depends on, other than by the state of a cell: what an import may not lose.

A file is traced with several frames along an axis of its inputs. For each element the first and the last frame are
found that it reads, through every operator but the step of a cell to the next. A frame's outputs, and what a cell
reads at a step, may depend on this frame alone; an average over time, a convolution or a delay outside a cell may not
be lost, so it is a fault that names the node.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import TensorProto

from onnx_export.importer.elements import Block, Elements
from onnx_export.importer.trace import MOVING
from onnx_export.nodes import all_graphs, describe

__all__ = [
    "CELLS", "MAX_REACH", "Reach", "ancestors", "counted", "depending", "rows_of", "thresholds", "together", "unrolled",
]  # fmt: skip

MAX_REACH = 20_000  # frames
CELLS = ("LSTM", "GRU", "RNN")
# Their integers are sizes, axes and places of one frame, not of time.
SIZES = {
    "Reshape", "Expand", "Split", "Squeeze", "Unsqueeze", "Transpose", "Concat", "Cast", "Flatten", "Softmax",
    "Constant", "ConstantOfShape", "LSTM", "GRU", "RNN", "LayerNormalization", "BatchNormalization", "Gemm", "Shape",
}  # fmt: skip
# Through these, sizes and places follow the number of frames as a sum of products with constants.
CARRYING = {
    "Shape", "Size", "Gather", "Slice", "Split", "Concat", "Unsqueeze", "Squeeze", "Identity", "Reshape", "Expand",
    "ConstantOfShape", "Tile", "Transpose", "Flatten", "Add", "Sub", "Mul", "Neg", "Sum", "Range", "Pad", "ReduceProd",
}  # fmt: skip
COMPARING = {"Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "Max"}
PARTS = {"Slice", "Gather", "GatherElements", "GatherND", "Split", "Pad"}  # of a table, whose end no run may reach
WIDE = {TensorProto.INT32, TensorProto.INT64, TensorProto.FLOAT, TensorProto.DOUBLE}
MOST_INTEGERS = 64  # of a tensor: longer ones are tables of indices


def thresholds(model: onnx.ModelProto, trace) -> dict[int, str]:
    """The integers that may count frames, each with a node that has it: pads, dilations, slices, rows in front.

    Parameters
    ----------
    model : onnx.ModelProto
    trace : Trace
        Of one frame: what it computes from constants counts as what is stored does.
    """
    nodes = [node for graph in all_graphs(model.graph) for node in graph.node]
    return {number: describe(node) for node in nodes for number in _numbers(node, trace)}


def _numbers(node: onnx.NodeProto, trace) -> list[int]:
    """The integers of one node that may count frames."""
    values = [trace.values.get(name) for name in node.input]
    constants = [value for value in values if isinstance(value, np.ndarray)]
    numbers = []
    if node.op_type == "Concat" and len(constants) < len(values):
        numbers += [extent for value in constants for extent in value.shape]
    if node.op_type not in SIZES:
        numbers += [number for a in node.attribute for number in (a.i, *a.ints)]
        most = np.inf if node.op_type in ("Pad", "Slice") else MOST_INTEGERS
        few = [value for value in constants if value.dtype.kind in "iu" and value.size <= most]
        numbers += [number for value in few for number in value.ravel().tolist()]
    return [abs(number) for number in numbers if abs(number) < 2**31 - 1]  # beyond: to the end


def together(model: onnx.ModelProto, trace, more) -> int:
    """How many frames all nodes that may move frames reach back, the one behind the other.

    Parameters
    ----------
    model : onnx.ModelProto
    trace, more : Trace
        Of one frame and of several.
    """
    reach = 0
    for node in (node for graph in all_graphs(model.graph) for node in graph.node):
        inputs, outputs = (
            [_growing(trace.values.get(name), more.values.get(name)) for name in names if name]
            for names in (node.input, node.output)
        )
        if not any(inputs):
            continue  # of constants
        if (
            node.op_type in ("Slice", "Split", "Gather")
            and not any(inputs[1:])
            and outputs == inputs[:1] * len(outputs)
        ):
            continue  # parts of each frame
        reach += max(_numbers(node, trace), default=0)
    return reach


def _growing(one, more) -> list[int]:
    """The sizes of a value with several frames, along the axes in which it has another with one."""
    few, many = np.shape(one), np.shape(more)
    return list(many) if len(few) != len(many) else [m for n, m in zip(few, many, strict=True) if n != m]


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


def counted(model: onnx.ModelProto, one: Reach, more: Reach) -> list[str]:
    """Why the number of frames or their places matter beyond what runs of some lengths show; empty if they do not.

    Parameters
    ----------
    model : onnx.ModelProto
    one, more : Reach
        Of the same dimension with two numbers of frames. A constant that differs between them depends on the number.
    """
    faults = []
    for node in (node for graph in all_graphs(model.graph) for node in graph.node):
        pairs, results = (
            [(one.trace.values.get(name), more.trace.values.get(name)) for name in names]
            for names in (node.input, node.output)
        )
        if node.op_type in (*CELLS, "Loop"):
            pairs = [pair for pair in pairs if not _is_length(pair, one, more)]
        changed, data = _changed(pairs), pairs[:1] if node.op_type in MOVING - {"Concat"} else pairs
        frames = any(isinstance(a, Elements) for a, _ in data)
        if _is_table(node, pairs) or (frames and any(not _repeats(a, b) for a, b in _changed(data))):
            faults.append(f"{describe(node)}: its operand depends on the places or the number of the frames")
        elif any(_overflows(a, b, one.length) for a, b in _changed(results)):
            faults.append(f"{describe(node)}: what it makes of the number of frames overflows below {MAX_REACH}")
        elif _stacks(node, pairs, results, one):
            faults.append(f"{describe(node)}: it lays several frames in a row")
        elif _is_power(node, pairs, results) or (
            changed and not frames and not _carries(node, pairs, results, one, more)
        ):
            faults.append(f"{describe(node)}: it decides by something computed from the number of frames")
    return faults


def _is_table(node: onnx.NodeProto, pairs) -> bool:
    """Whether the number of frames selects constants that are neither all the same nor equally spaced."""
    table = pairs[0][0] if pairs else None
    if node.op_type not in PARTS or not isinstance(table, np.ndarray) or not _changed(pairs[1:]):
        return False
    return len(np.unique(np.diff(table.ravel()))) > 1 or (table.dtype.kind == "f" and len(np.unique(table)) > 1)


def _stacks(node: onnx.NodeProto, pairs, results, reach: Reach) -> bool:
    """Whether a step along a growing axis holds more frames than before, so that a pad by one moves by many."""
    if node.op_type not in ("Reshape", "Flatten") or not isinstance(pairs[0][0], Elements):
        return False
    return _spread(*results[0], reach) > _spread(*pairs[0], reach)


def _spread(one, more, reach: Reach) -> int:
    """How many frames lie between what elements at one place of the growing axes read."""
    if not (isinstance(one, Elements) and isinstance(more, Elements)) or len(one.shape) != len(more.shape):
        return 0
    fixed = tuple(i for i, (n, m) in enumerate(zip(one.shape, more.shape, strict=True)) if n == m)
    last = reach.last[one.numbers]
    first = np.where(last < 0, reach.length, last).min(axis=fixed)
    return int((last.max(axis=fixed) - first).max(initial=0))


def _is_power(node: onnx.NodeProto, pairs, results) -> bool:
    """Whether an operator makes a power of the number of frames: two numbers do not show where it ends."""
    if node.op_type == "ReduceProd":
        return any(np.sum(a != b) > 1 for a, b in _changed(pairs) if a.shape == b.shape)
    if node.op_type == "Mul":
        return len(_changed(pairs)) > 1
    if node.op_type == "Tile" and _changed(pairs[1:]) and _growing(*pairs[0]):
        return True
    return any(len(_growing(a, b)) > 1 for a, b in results if len(np.shape(a)) == len(np.shape(b)))


def _carries(node: onnx.NodeProto, pairs, results, one: Reach, more: Reach) -> bool:
    """Whether an operator makes the same, or a sum of products, of each number of frames."""
    if any(a.dtype.kind == "f" and not _repeats(a, b) for a, b in _changed(pairs)):
        return False  # floats are rounded, and cut off where they become integers
    if node.op_type == "Cast":
        return any(a.name == "to" and a.i in WIDE for a in node.attribute)
    if node.op_type == "Where":
        return not _changed(pairs[:1])
    if node.op_type == "Div":
        return _is_exact([*pairs, *results])
    if node.op_type in COMPARING:
        return _is_decided(pairs, one.length, more.length)
    return node.op_type in CARRYING


def _overflows(a: np.ndarray, b: np.ndarray, length: int) -> bool:
    """Whether integers made of `length` frames and one more grow so that they leave 32 bits with MAX_REACH."""
    if a.dtype.kind not in "iu" or not a.size or not b.size:
        return False
    few, many = (float(np.abs(each.astype(np.float64)).max()) for each in (a, b))
    growth = np.abs(b.astype(np.float64) - a).max() if a.shape == b.shape else max(many - few, few / length)
    return few + growth * MAX_REACH >= 2.0**31


def _is_exact(pairs) -> bool:
    """Whether quotients of integers leave no remainder for two numbers in a row, and so for each."""
    return all(
        y is not None and y.dtype.kind in "iu" and np.array_equal(y * b, a) for a, b, y in zip(*pairs, strict=True)
    )


def _is_decided(pairs, length: int, longer: int) -> bool:
    """Whether each compared element is the number of frames, or beside it a number that is never as large."""
    if any(not isinstance(each, np.ndarray) for pair in pairs for each in pair):
        return False
    if any(a.shape != b.shape for a, b in pairs):
        return False
    moved = np.broadcast_arrays(*(a != b for a, b in pairs))
    beside = np.logical_or.reduce(moved)
    for (a, b), own in zip(pairs, moved, strict=True):
        a, b = np.broadcast_to(a, own.shape), np.broadcast_to(b, own.shape)
        if (a[own] != length).any() or (b[own] != longer).any() or (a[beside & ~own] > 0).any():
            return False
    return True


def _is_length(pair, one: Reach, more: Reach) -> bool:
    """Whether both of a pair are the number of frames."""
    return all(
        isinstance(value, np.ndarray) and bool((value == reach.length).all())
        for value, reach in zip(pair, (one, more), strict=True)
    )


def _changed(pairs) -> list[tuple[np.ndarray, np.ndarray]]:
    """The pairs of constants that differ."""
    both = [(a, b) for a, b in pairs if isinstance(a, np.ndarray) and isinstance(b, np.ndarray)]
    return [(a, b) for a, b in both if a.shape != b.shape or not np.array_equal(a, b)]


def _repeats(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays repeat the same elements along the axes in which their shapes differ."""
    if a.ndim != b.ndim:
        return False
    first = tuple(slice(0, 1) if n != m else slice(None) for n, m in zip(a.shape, b.shape, strict=True))
    return a.size > 0 and all(np.array_equal(each, np.broadcast_to(a[first], each.shape)) for each in (a, b))


def rows_of(block: Block, rows: int) -> np.ndarray:
    """The row of an operand with `rows` rows that each element of a block depends on."""
    if block.op != "conv":
        return np.arange(block.size) // (block.size // rows)
    outputs, groups = len(block.constants["weight"]), block.constants["options"]["groups"]
    output, place = np.divmod(np.arange(block.size), block.size // outputs)
    return place * groups + output // (outputs // groups)
