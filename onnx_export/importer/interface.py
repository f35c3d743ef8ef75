"""Which input of a file is the frame, which are states, and which outputs give the states back.

A state is paired by structure, not by its name or shape: every element of a state's output must be what the element
at the same place of its input becomes, a new h or c of a cell that read this element as the old one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import onnx
from onnx import TensorProto, helper

from cnorm.text import quoted
from onnx_export.errors import NotImported
from onnx_export.importer.chain import Chain
from onnx_export.importer.elements import Cannot, Elements
from onnx_export.importer.trace import Trace

__all__ = ["Inputs", "Plan", "plan"]

FLOATS = {TensorProto.FLOAT: np.float32, TensorProto.FLOAT16: np.float16, TensorProto.DOUBLE: np.float64}
MAX_PAIRINGS = 64
MAX_FAULTS = 40  # in one message


@dataclass(frozen=True, eq=False)
class Inputs:
    """How the inputs of a file are read.

    Attributes
    ----------
    shapes : dict of str to tuple
        Of frame and states, for one row.
    time_axes : dict of str to int
        The axis of an input over which a recurrent operator runs, if there is one.
    constants : dict of str to ndarray
        The inputs that are the same for every frame.
    symbols : set of str
        Symbolic dimensions that nobody gave a size, taken as 1.
    steps : int
        Of one call: 1, or the number that a file is written for.
    """

    shapes: dict[str, tuple[int, ...]]
    time_axes: dict[str, int]
    constants: dict[str, np.ndarray]
    symbols: set[str]
    steps: int = 1


@dataclass(frozen=True, eq=False)
class Plan:
    """What was found in a file.

    Attributes
    ----------
    trace : Trace
    inputs : Inputs
    frame : str
        Name of the input.
    outputs : tuple of str
        Names of the outputs, which are y one behind another.
    states : dict of str to str
        Input to output.
    chain : Chain
    """

    trace: Trace
    inputs: Inputs
    frame: str
    outputs: tuple[str, ...]
    states: dict[str, str]
    chain: Chain

    @property
    def time_axis(self) -> int | None:
        """The axis of the frame's input that counts steps; None if a call is one step."""
        return self.inputs.time_axes.get(self.frame)

    @property
    def faults(self) -> list[str]:
        return [*self.trace.faults, *self.chain.faults]


def plan(model: onnx.ModelProto, constants: Mapping, states: Mapping[str, str], dims: Mapping[str, int]) -> Plan:
    """Find the layers, the frame and the states of a file.

    Parameters
    ----------
    model : onnx.ModelProto
        Sorted, without local functions, its tensors in memory.
    constants : mapping of str to number or array
        Values of inputs that are neither frame nor state.
    states : mapping of str to str
        Input to output, for states that the structure does not decide.
    dims : mapping of str to int
        Sizes of symbolic dimensions; those that are not given are 1.

    Raises
    ------
    NotImported
        With all reasons, one in a line.
    """
    inputs = _inputs(model, constants, dims)
    for name in states.keys() - inputs.shapes.keys():
        raise NotImported(f"states: the file has no input {quoted(name)}; it has {_names(inputs.shapes)}")
    for name in set(states.values()) - {value.name for value in model.graph.output}:
        raise NotImported(f"states: the file has no output {quoted(name)}; it has {_names(_outputs(model))}")
    trace = Trace(model, inputs.shapes, inputs.constants)
    plans = list(_plans(model, trace, inputs, states))
    if trace.faults and inputs.time_axes:  # the file may be written for its number of steps
        whole = _whole(model, inputs, dims)
        if whole.steps > 1:
            inputs, trace = whole, Trace(model, whole.shapes, whole.constants)
            plans = list(_plans(model, trace, inputs, states))
    return _only(plans, trace, inputs)


def _whole(model: onnx.ModelProto, inputs: Inputs, dims: Mapping[str, int]) -> Inputs:
    """The same inputs with as many steps as the file declares."""
    ((name, axis),) = inputs.time_axes.items()
    value = next(value for value in model.graph.input if value.name == name)
    shape = _shape(value, dims, 1, None)
    return replace(inputs, shapes=inputs.shapes | {name: shape}, steps=shape[axis])


def _names(values) -> str:
    return ", ".join(map(quoted, values))


def _outputs(model: onnx.ModelProto) -> list[str]:
    return [value.name for value in model.graph.output]


def _inputs(model: onnx.ModelProto, given: Mapping, dims: Mapping[str, int]) -> Inputs:
    stored = {tensor.name for tensor in model.graph.initializer}
    varying, constants = {}, {}
    for value in model.graph.input:
        if value.name in stored:
            continue
        if value.name in given:
            constants[value.name] = _constant(value, given[value.name])
        elif value.type.tensor_type.elem_type not in FLOATS:
            kind = TensorProto.DataType.Name(value.type.tensor_type.elem_type).lower()
            raise NotImported(
                f"input {quoted(value.name)} is {kind}: if it is the same for every frame, give it as "
                f"inputs={{{value.name!r}: VALUE}}"
            )
        else:
            varying[value.name] = value
    for name in given.keys() - constants.keys():
        raise NotImported(f"inputs: the file has no input {quoted(name)}; it has {_names([*varying, *constants])}")
    if not varying:
        raise NotImported("the file has no input of floating point")
    axes = _time_axes(model, varying, constants, dims)
    shapes = {name: _shape(value, dims, 1, axes.get(name)) for name, value in varying.items()}
    symbols = {dim.dim_param for value in varying.values() for dim in value.type.tensor_type.shape.dim} - dims.keys()
    return Inputs(shapes, axes, constants, symbols - {""})


def _constant(value: onnx.ValueInfoProto, given) -> np.ndarray:
    kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    array = np.asarray(given).astype(kind)
    shape = [dim.dim_value or 1 for dim in value.type.tensor_type.shape.dim]
    try:
        return np.broadcast_to(array, shape)
    except ValueError:
        raise NotImported(f"inputs[{value.name!r}] must have shape {shape}, got {list(array.shape)}") from None


def _shape(value, dims: Mapping[str, int], unknown: int, time: int | None) -> tuple[int, ...]:
    """The shape of an input, with 1 in the place of the time axis."""
    shape = []
    for index, dim in enumerate(value.type.tensor_type.shape.dim):
        size = dim.dim_value if dim.HasField("dim_value") else int(dims.get(dim.dim_param, unknown))
        shape.append(1 if index == time else size)
    return tuple(shape)


def _time_axes(model, varying, constants, dims) -> dict[str, int]:
    """The axis of an input along which the first recurrent operator's steps are, if it takes more than one."""
    for unknown in (2, 1):
        shapes = {name: _shape(value, dims, unknown, None) for name, value in varying.items()}
        try:
            trace = Trace(model, shapes, constants)
        except Cannot:
            continue
        if trace.sequences and trace.sequences[0].shape[0] > 1:
            first, second = (trace.root(int(step.flat[0])) for step in trace.sequences[0][:2])
            block = trace.owner(first)
            if block.op == "input" and block is trace.owner(second):
                at = [np.unravel_index(n - block.first, shapes[block.node]) for n in (first, second)]
                moved = [axis for axis, (a, b) in enumerate(zip(*at, strict=True)) if a != b]
                if len(moved) == 1:
                    return {block.node: int(moved[0])}
        if trace.sequences:
            break
    return {}


def _plans(model, trace: Trace, inputs: Inputs, states):
    """The layers for each assignment of inputs and outputs that the sizes allow."""
    outputs = {name: trace.values.get(name) for name in _outputs(model)}
    known = {name: value for name, value in outputs.items() if isinstance(value, Elements)}
    for frame, names, pairs in islice(_assignments(trace, inputs.shapes, known, states), MAX_PAIRINGS):
        old = dict(trace.unrolled)
        for name, result in pairs.items():
            old |= dict(zip(_flat(known[result]), _flat(trace.values[name]), strict=True))
        x, ys = trace.values[frame].numbers, {name: known[name].numbers.ravel() for name in names}
        if inputs.steps > 1:  # the last step
            if frame not in inputs.time_axes:
                continue
            x = x.take(-1, inputs.time_axes[frame])
            last = set(x.ravel().tolist())
            ys = {name: y[[trace.root(number) in last for number in y.tolist()]] for name, y in ys.items()}
        chain = Chain(trace, x.ravel(), old, ys)
        _check_states(chain, trace, known, pairs, names)
        yield Plan(trace, inputs, frame, names, pairs, chain)


def _flat(value: Elements) -> list[int]:
    return value.numbers.ravel().tolist()


def _only(plans: list[Plan], trace: Trace, inputs: Inputs) -> Plan:
    """The one plan without a fault."""
    good = [found for found in plans if not found.faults]
    good = [found for found in good if len(found.outputs) == 1] or good
    if len(good) == 1:
        return good[0]
    if good:
        raise NotImported(
            "more than one reading of the inputs and outputs fits; choose one by states={...}:", map(_reading, good)
        )
    # the reading that came furthest says best what is missing
    faults = max(plans, key=lambda found: found.chain.depth).faults if plans else list(trace.faults)
    faults = list(dict.fromkeys(faults)) or ["no output has the size of a result or of a state"]
    rest = [f"and {len(faults) - MAX_FAULTS} more"] if len(faults) > MAX_FAULTS else []
    if inputs.symbols:
        rest.append(f"symbolic dimensions were taken as 1; dims={{...}} sets {', '.join(sorted(inputs.symbols))}")
    raise NotImported("it is not a list of layers that cnorm has:", [*faults[:MAX_FAULTS], *rest])


def _reading(found: Plan) -> str:
    pairs = ", ".join(f"{a!r}: {b!r}" for a, b in found.states.items()) or "no state"
    return f"frame {found.frame!r}, output {', '.join(map(repr, found.outputs))}, {pairs}"


def _assignments(trace: Trace, shapes, outputs, states):
    """Frame, outputs and pairs of states: all that the sizes allow, the given pairs kept, those in order first."""
    sizes = {name: value.numbers.size for name, value in outputs.items()}
    sizes |= {name: trace.values[name].numbers.size for name in shapes}
    if any(sizes[name] != sizes.get(result) for name, result in states.items()):
        return
    free = [name for name in outputs if name not in states.values()]
    for frame in shapes:
        if frame not in states:
            rest = [name for name in shapes if name != frame and name not in states]
            for pairs in _pairings(rest, free, sizes):
                others = [name for name in free if name not in pairs.values()]
                for names in [(name,) for name in others] + ([tuple(others)] if len(others) > 1 else []):
                    yield frame, names, dict(states) | pairs


def _pairings(names: list[str], free: list[str], sizes):
    """Every way to give each of some inputs an output of its size."""
    if not names:
        yield {}
        return
    for result in free:
        if sizes[result] == sizes[names[0]]:
            for pairs in _pairings(names[1:], [name for name in free if name != result], sizes):
                yield {names[0]: result} | pairs


def _check_states(chain: Chain, trace: Trace, outputs, pairs, names: tuple[str, ...]) -> None:
    """Note each state element that no cell uses, and each output that is neither y nor a state."""
    if chain.faults:
        return
    new = {int(n) for cell in chain.cells for numbers in cell.new.values() for n in numbers}
    used = {int(n) for cell in chain.cells for numbers in cell.old.values() for n in numbers}
    for name, result in pairs.items():
        unused = [n for n in _flat(trace.values[name]) if n not in used]
        if unused:
            chain.faults.append(
                f"input {quoted(name)}: {len(unused)} of its {trace.values[name].numbers.size} elements are not the "
                f"state of a cell that {quoted(result)} gives back"
            )
    for name, value in outputs.items():
        if name not in names and name not in pairs.values() and not set(_flat(value)) <= new:
            chain.faults.append(f"output {quoted(name)}: no state, and {_names(names)} is another output")
