"""Follow every element of a frame through an ONNX graph, at fixed shapes.

Each element of an input, and each number that an operator computes, has a number of its own. The value of a name is
an array of these numbers, or a constant. Operators that only move elements (Reshape, Transpose, Slice, Concat, ...)
are run by onnx's evaluator on the arrays of numbers, so that any writing of "take this part of the state" is
understood. An operator that computes makes a `Block` of new numbers, which remembers those of its operands.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping
from math import prod

import numpy as np
import onnx
from onnx import helper, numpy_helper

from cnorm.text import quoted
from onnx_export.graph import tables
from onnx_export.graph.evaluate import evaluate
from onnx_export.graph.sizes import largest
from onnx_export.importer.computing import COMPUTING
from onnx_export.importer.elements import MAX_NUMBERED, Block, Cannot, Elements
from onnx_export.importer.loops import unroll
from onnx_export.importer.norms import FORMULAS, norm
from onnx_export.importer.operators_of_cells import Scan
from onnx_export.importer.repeated import REPEATING, faults_of_loops
from onnx_export.nodes import describe, names_read, subgraphs
from onnx_export.operators import operator_of

__all__ = ["Trace"]

# They move or repeat elements of their first input (Concat: of all) and compute nothing.
MOVING = tables.MOVING - {"Cast", "CastLike"} | {"Pad", "Dropout", "GatherElements", "GatherND"}
PLACING = {"ScatterND", "ScatterElements", "Scatter"}  # the elements of their third input into their first
MOVING |= PLACING
JOINING = {"Concat", "Slice", "Split", "Gather"}  # their result, or what they take parts of, may be a value of its own
# Of shapes and truth values, as exporters write them between a Shape and a Reshape.
SHAPES = {
    "Shape", "Size", "Constant", "ConstantOfShape", "Range", "Equal", "Less", "LessOrEqual", "GreaterOrEqual", "Not",
    "And", "Or", "Floor", "Ceil", "Mod", "Min", "Max", "ReduceProd", "NonZero", "ScatterND", "If", "Loop",
}  # fmt: skip
RANDOM = {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial"}
UNFIT = {  # what to say of an operator that no layer computes
    "QuantizeLinear": "it rounds what depends on the frame to small integers: import the file that was quantised"
}
HALVES = {onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
MAX_ELEMENTS = 1 << 24  # of one constant
MAX_INPUT = 1 << 20  # elements of one input
MAX_IN_ALL = 1 << 26  # elements of all values that nodes compute or move
MAX_NODES = 20_000  # traced, those of branches included


class Trace:
    """Run a graph on numbered elements.

    Parameters
    ----------
    model : onnx.ModelProto
        Sorted topologically, without local functions, its tensors in memory.
    shapes : mapping of str to tuple of int
        The shapes of the inputs that vary from frame to frame.
    constants : mapping of str to ndarray
        Values of the other inputs.
    axes : mapping of str to int, optional
        The inputs that have several frames, and the axis that counts them; recurrent operators may take several rows.

    Attributes
    ----------
    halves : bool
        Whether an input has floats of 16 bits, to which its results may be rounded then.
    blocks : list of Block
    size : int
        Elements of all blocks.
    values : dict of str to Elements or ndarray
    outputs : list of str
        Names of the file's outputs.
    sequences : list of (str, ndarray)
        A node LSTM, GRU or RNN and its input, numbers [steps, rows, size]; of a Scan or Loop what its steps make.
    repeated : list of (int, int, dict of int to int)
        For each Scan or Loop its first block, the one behind its last, and for elements of its first states the last.
    unrolled : dict of int to int
        For each new state of a recurrent operator that takes several steps, that of the step before.
    scans : list of Scan
        LSTM, GRU and RNN nodes.
    shapes : dict of int to tuple of int
        Of what each block computes, by its first number.
    joined : list of (ndarray, list of ndarray)
        Elements [n] of several blocks that one value of the graph has, from which others take parts, and what it is
        joined of along the axis that is the outermost in these.
    loops : list of ndarray
        The states [steps, 1, n] that Loop nodes, and Scan nodes from stored states, carry.
    numbered : list of str
        Loop nodes whose body computes with the number of the step, so that a step may do what no other does.
    taken : dict of tuple of str to str
        The branch of each If node, as `graph.branches` wants it.
    faults : list of str
        Nodes that have no counterpart: operator, name and reason. What they compute is not traced further; nodes
        behind them are judged by operator.
    """

    def __init__(
        self,
        model,
        shapes: Mapping[str, tuple[int, ...]],
        constants: Mapping[str, np.ndarray],
        axes: Mapping[str, int] | None = None,
    ):
        self.rows, self._axes = axes is not None, axes or {}
        self.opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 1)
        self.halves = any(value.type.tensor_type.elem_type in HALVES for value in model.graph.input)
        self.blocks: list[Block] = []
        self._firsts: list[int] = []
        self._starts = np.zeros(1024, np.int64)  # the same as an array with room for more
        self.size = self._moved_elements = self._nodes = 0
        self.taken: dict[tuple[str, ...], str] = {}
        self._around: tuple[str, ...] = ()
        self.faults: list[str] = []
        self.linear = 0  # linear functions that were expanded, see `affine.affine`
        self.cells: dict = {}  # that were searched, see `cells.written_cell`
        self.no_cells: list[str] = []  # why what was searched is no cell
        self.sequences: list[tuple[str, np.ndarray]] = []
        self.loops: list[np.ndarray] = []
        self.numbered: list[str] = []
        self.scans: list[Scan] = []
        self.outputs = [value.name for value in model.graph.output]
        self.shapes: dict[int, tuple[int, ...]] = {}
        self.joined: list[tuple[np.ndarray, list[np.ndarray]]] = []
        self.repeated: list[tuple[int, int, dict[int, int]]] = []
        self.unrolled: dict[int, int] = {}
        self.values: dict[str, Elements | np.ndarray] = {"": None}
        self.values |= {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        self.values |= constants
        self.values |= {name: self.add("input", name, shape) for name, shape in shapes.items()}
        self._run(model.graph)
        self.faults += faults_of_loops(self)

    # ------------------------------------------------------------------ elements

    def add(self, op: str, node: str, shape, operands=(), **constants) -> Elements:
        """A new block, as the value of a name."""
        size, most = prod(map(int, shape)), MAX_INPUT if op == "input" else MAX_NUMBERED
        if size > most:
            what = f"input {quoted(node)}" if op == "input" else "its result"
            raise Cannot(f"{what} has {size} elements, the limit is {most}")
        if not size:
            return Elements(np.empty(shape, np.int64))
        self.blocks.append(Block(op, node, self.size, size, tuple(operands), constants))
        if len(self._firsts) == len(self._starts):
            self._starts = np.concatenate([self._starts, np.zeros_like(self._starts)])
        self._starts[len(self._firsts)] = self.size
        self._firsts.append(self.size)
        self.shapes[self.size] = tuple(map(int, shape))
        self.size += size
        return Elements(self.blocks[-1].numbers.reshape(shape))

    def owners(self, numbers: np.ndarray) -> list[Block]:
        """The blocks that compute some elements, in the order of their first use."""
        found = np.searchsorted(self.starts, numbers.ravel(), side="right") - 1
        return [self.blocks[index] for index in dict.fromkeys(found.tolist())]

    @property
    def starts(self) -> np.ndarray:
        """The first numbers of the blocks."""
        return self._starts[: len(self._firsts)]

    def owner(self, number: int) -> Block:
        return self.blocks[bisect_right(self._firsts, number) - 1]

    def lift(self, value: Elements | np.ndarray, node: str = "") -> Elements:
        """A constant as elements, to be moved together with others."""
        if isinstance(value, Elements):
            return value
        return self.add("constant", node, np.shape(value), value=np.asarray(value).ravel())

    def lowered(self, value: Elements) -> Elements | np.ndarray:
        """Elements that are constants, every one, as a constant."""
        blocks = self.owners(value.numbers)
        if not blocks or any(block.op != "constant" for block in blocks):
            return value
        array = np.empty(value.shape, blocks[0].constants["value"].dtype)
        for block in blocks:
            inside = (value.numbers >= block.first) & (value.numbers < block.first + block.size)
            array[inside] = block.constants["value"][value.numbers[inside] - block.first]
        return array

    def root(self, number: int) -> int:
        """The element of an input that an element depends on by its first operands, or a constant."""
        while (block := self.owner(number)).operands:
            operand = block.operands[0]
            number = int(operand[(number - block.first) * len(operand) // block.size].flat[0])
        return number

    def frame_axis(self, numbers: np.ndarray) -> int | None:
        """The axis along which the last elements of some depend, by one of their operands, on different frames."""
        middle = tuple(size // 2 for size in numbers.shape)
        for axis, size in enumerate(numbers.shape):
            ends = [numbers[(*middle[:axis], size - back, *middle[axis + 1 :])] for back in (1, 2) if back <= size]
            frames = [self._frame(int(number)) for number in ends]
            if self._axes and len(frames) == 2 and None not in frames and frames[0] != frames[1]:
                return axis
        return None

    def _frame(self, number: int) -> int | None:
        """The frame of what an element depends on by its last operands that are no constants; None if it is in none."""
        while (block := self.owner(number)).operands:
            behind = block.row(number)[::-1].tolist()
            number = next((one for one in behind if self.owner(one).op != "constant"), None)
            if number is None:
                return None
        if block.op != "input" or block.node not in self._axes:
            return None
        return int(np.unravel_index(number - block.first, self.shapes[block.first])[self._axes[block.node]])

    # ------------------------------------------------------------------ nodes

    def _run(self, graph: onnx.GraphProto) -> None:
        for node in _needed(graph):
            if not all(name in self.values for name in node.input):
                self._judge(node)  # it is behind a node that could not be traced
                continue
            self._nodes += 1
            if self._nodes > MAX_NODES:
                raise Cannot(f"it has more than {MAX_NODES} nodes")
            try:
                results = self._results(node)
                self._count(results)
            except Cannot as error:
                self.faults.append(f"{describe(node)}: {error}")
                continue
            except MemoryError:
                raise
            except Exception:  # of what the standard does not allow: the file is untrusted
                self.faults.append(f"{describe(node)}: it is not as the standard says, or cnorm misreads it")
                continue
            self.values |= {name: value for name, value in zip(node.output, results, strict=False) if name}

    def _judge(self, node: onnx.NodeProto) -> None:
        """Note a node that no layer computes whatever its inputs are."""
        constants = [isinstance(self.values.get(name), np.ndarray) for name in node.input]
        reason = ""
        operator = operator_of(node)
        if operator and operator.formula in FORMULAS:
            return
        if node.domain not in ("", "ai.onnx"):
            reason = "an operator of another domain"
        elif node.op_type not in MOVING | SHAPES | COMPUTING.keys() | REPEATING.keys():
            reason = UNFIT.get(node.op_type, "no layer computes this")
        elif node.op_type == "MatMul" and not any(constants):
            reason = "it multiplies what depends on the frame by what depends on the frame"
        if reason:
            self.faults.append(f"{describe(node)}: {reason}")

    def _count(self, results) -> None:
        self._moved_elements += sum(int(np.prod(np.shape(value))) for value in results if value is not None)
        if self._moved_elements > MAX_IN_ALL:
            raise Cannot(f"the nodes up to here make more than {MAX_IN_ALL} elements")

    def _results(self, node: onnx.NodeProto) -> list:
        inputs = [self.values[name] for name in node.input]
        operator = operator_of(node)
        if operator and operator.formula in FORMULAS and any(isinstance(value, Elements) for value in inputs):
            attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
            return norm(self, describe(node), operator, attributes, inputs, node.output)
        if node.domain not in ("", "ai.onnx") and any(isinstance(value, Elements) for value in inputs):
            raise Cannot("an operator of another domain")
        if node.op_type in RANDOM or _is_training(node, inputs):
            raise Cannot("it makes random numbers")
        if node.op_type in ("Shape", "Size") and inputs:
            return self._evaluate(node, [np.empty(np.shape(inputs[0]), np.int8)])
        if node.op_type == "If":
            return self._branch(node, inputs[0])
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        if node.op_type == "Loop" and not any(isinstance(value, Elements) for value in inputs):
            return unroll(self, self._run, node, inputs)
        if node.op_type in REPEATING:
            return REPEATING[node.op_type](self, describe(node), attributes, inputs, len(node.output))
        if not any(isinstance(value, Elements) for value in inputs):
            return self._evaluate(node, inputs)
        if node.op_type in MOVING and not (node.op_type == "Gather" and not isinstance(inputs[0], Elements)):
            return self._moved(node, inputs)
        if node.op_type not in COMPUTING:
            raise Cannot(UNFIT.get(node.op_type, "no layer computes this"))
        return COMPUTING[node.op_type](self, describe(node), attributes, inputs, len(node.output))

    def _branch(self, node: onnx.NodeProto, condition) -> list:
        if isinstance(condition, Elements):
            raise Cannot("its condition depends on the frame")
        name = "then_branch" if np.asarray(condition).item() else "else_branch"
        graph = next(attribute.g for attribute in node.attribute if attribute.name == name)
        outside, self._around = self._around, (*self._around, node.output[0])
        self.taken[self._around] = name
        results = self.of_subgraph(graph, [])
        self._around = outside
        return results

    def of_subgraph(self, graph: onnx.GraphProto, inputs) -> list:
        """The outputs of a subgraph; none if a node of it could not be traced."""
        for node in graph.node:  # it may have run before
            for name in node.output:
                self.values.pop(name, None) if name else None
        self.values |= {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
        self.values |= {value.name: given for value, given in zip(graph.input, inputs, strict=True)}
        self._run(graph)
        names = [value.name for value in graph.output]
        return [self.values[name] for name in names] if all(name in self.values for name in names) else []

    def _moved(self, node: onnx.NodeProto, inputs: list) -> list:
        """Run a node that moves elements on their numbers."""
        if node.op_type in PLACING and any(a.name == "reduction" and a.s != b"none" for a in node.attribute):
            raise Cannot("it computes with what it writes over")
        movable = len(inputs) if node.op_type == "Concat" else 1
        moved = {*range(movable), *([2] if node.op_type in PLACING else [])}
        if any(isinstance(value, Elements) for at, value in enumerate(inputs) if at not in moved):
            raise Cannot("where elements go depends on the frame")
        numbers = [
            self.lift(value, describe(node)).numbers if at in moved else value for at, value in enumerate(inputs)
        ]
        if node.op_type == "Pad":
            node, numbers = self._padded(node, numbers)
        if node.op_type == "Dropout":
            return [inputs[0]]
        results = self._evaluate(node, numbers, moved)
        if node.op_type in JOINING:
            value = (results if node.op_type == "Concat" else numbers)[0].astype(np.int64).ravel()
            axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
            parts = [np.moveaxis(each, axis, 0).ravel() for each in numbers] if node.op_type == "Concat" else []
            self.joined += [(value, parts)] if len(self.owners(value)) > 1 else []
        return [self.lowered(Elements(result.astype(np.int64))) for result in results]

    def _padded(self, node: onnx.NodeProto, numbers: list) -> tuple[onnx.NodeProto, list]:
        """A Pad whose fill is the number of a constant element instead of its value."""
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        mode = attributes.get("mode", b"constant")
        pads = np.asarray(attributes["pads"], np.int64) if "pads" in attributes else np.asarray(numbers[1], np.int64)
        fill = attributes.get("value", numbers[2] if len(numbers) > 2 and numbers[2] is not None else 0.0)
        axes = [numbers[3]] if len(numbers) > 3 and numbers[3] is not None else []
        along = np.ravel(axes[0]).tolist() if axes else range(numbers[0].ndim)
        for axis, cut in zip(along, np.reshape(pads, (2, -1)).sum(0).tolist(), strict=True):
            if (size := numbers[0].shape[axis]) + cut < 0:
                raise Cannot(f"its negative pads cut {-cut} elements off axis {axis}, which has {size}")
        value = self.lift(np.asarray(fill, np.float32).reshape(1), describe(node)).numbers[0]
        names = ["x", "pads", "fill", "axes"][: 3 + len(axes)]
        padded = helper.make_node("Pad", names, node.output, mode=mode)
        return padded, [numbers[0], pads, np.array(value), *axes]

    def _check_size(self, node: onnx.NodeProto, inputs: list, numbered: Collection[int]) -> None:
        """Refuse results that a small file can ask for and no memory holds."""
        # numbers of elements stand for values of another type; of a Pad, as `_padded` writes it, the fill is one, too
        unread = () if node.op_type == "Pad" else numbered
        known = [np.shape(value) if index in unread else value for index, value in enumerate(inputs)]
        try:
            size = largest(node, known, self._opset_of(node))
        except ValueError as error:
            raise Cannot(str(error)) from None
        most = MAX_NUMBERED if numbered else MAX_ELEMENTS
        if size > most:
            how_many = f"{size:.3g}" if np.isfinite(size) else "any number of"
            raise Cannot(f"its results have {how_many} elements, the limit is {most}")

    def _opset_of(self, node: onnx.NodeProto) -> int:
        """The version of the operator that is run: `_padded` writes a Pad of opset 13."""
        if node.domain not in ("", "ai.onnx"):
            return 1
        return max(self.opset, 13) if node.op_type == "Pad" else self.opset

    def _evaluate(self, node: onnx.NodeProto, inputs: list, numbered: Collection[int] = ()) -> list:
        """Run one node on arrays, those at `numbered` numbers of elements, by onnx's evaluator."""
        if any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute):
            raise Cannot("it has a subgraph")
        if any(value is not None and np.size(value) > MAX_ELEMENTS for value in inputs):
            raise Cannot(f"it moves more than {MAX_ELEMENTS} elements")
        self._check_size(node, inputs, numbered)
        names = ["" if value is None else f"i{index}" for index, value in enumerate(inputs)]
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.ClearField("input")
        copy.input.extend(names)
        feeds = {name: value for name, value in zip(names, inputs, strict=True) if name}
        wanted = [name for name in node.output if name]
        try:
            results = evaluate([copy], feeds, wanted, {node.domain: self._opset_of(node)})
        except Exception:  # onnx's kernels raise anything
            raise Cannot("onnx's evaluator can't run it: its inputs may not fit each other") from None
        return [results.get(name) for name in node.output]


def _is_training(node: onnx.NodeProto, inputs: list) -> bool:
    """Whether a Dropout drops elements."""
    return node.op_type == "Dropout" and len(inputs) > 2 and inputs[2] is not None and bool(np.any(inputs[2]))


def _needed(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """The nodes that an output depends on, in their order."""
    wanted, kept = {value.name for value in graph.output}, []
    for node in reversed(graph.node):
        if wanted.intersection(node.output):
            kept.append(node)
            wanted.update(node.input)
            wanted.update(name for _, inner in subgraphs(node) for name in names_read(inner))
    return kept[::-1]
