"""What the number of frames decides, beyond what runs and traces of some numbers show."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from onnx_export.importer.elements import Elements
from onnx_export.importer.frames import CELLS, MAX_REACH, Reach
from onnx_export.importer.trace import MOVING
from onnx_export.nodes import all_graphs, describe

__all__ = ["counted", "thresholds", "together"]

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
            pairs = [pair for pair in pairs if not (_is_length(pair, one, more) or _is_start(*pair))]
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


def _is_start(a, b) -> bool:
    """Whether both are the same elements for each frame, as the zeros from which rows of a batch begin."""
    return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.shape != b.shape and _repeats(a, b)


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
