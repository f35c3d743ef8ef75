"""Which inputs of a file are the frame, which are states, and which outputs give the states back.

A state is paired by structure, not by its name or shape: every element of a state's output must be what the element
at the same place of its input becomes, a new h or c of a cell that read this element as the old one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
import onnx
from onnx import TensorProto

from cnorm.arguments import whole_number
from cnorm.text import quoted
from onnx_export.errors import NotImported, together
from onnx_export.importer.chain import Chain
from onnx_export.importer.dimensions import frames_of, open_dimensions, shape_of
from onnx_export.importer.elements import Elements
from onnx_export.importer.frames import unrolled
from onnx_export.importer.given import FLOATS, INTEGERS, constant, undecided
from onnx_export.importer.pairings import alike, assignments, unpaired
from onnx_export.importer.shifts import Shifts
from onnx_export.importer.trace import Trace

__all__ = ["Inputs", "Plan", "plan"]

ONE_KIND = "choose those of each frame, or of the last, by outputs=[...]"
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
        The inputs that have steps, and the axis that counts them; empty if a call is one step.
    constants : dict of str to ndarray
        The inputs that are the same for every frame.
    symbols : set of str
        Open dimensions that nobody gave a size, taken as 1.
    types : dict of str to type
        NumPy's, of the inputs in `shapes`; integers are token ids.
    steps : int
        Of one call: 1, or the number that a file is written for.
    open_axes : list of dict of str to int
        Other open dimensions: the inputs that have one, and their axes. Its elements do not depend on each other.
    unfollowed : list of (dict of str to int, list of str)
        Open dimensions that can't be followed with several elements, as in `open_axes`, and why not.
    output_axes : dict of str to int or None
        The axis of each output that counts steps, where the inputs have one; None if it is of the last step alone.
    lengths : list of int
        Numbers of frames to compare: beyond every stored number that may count frames.
    mixed : list of (dict of str to int, list of str)
        Open dimensions, or the fixed time axis, whose elements depend on each other outside recurrent operators, and
        where: the caches of a file may carry them from call to call, which the proof decides.
    faults : list of str
        What else is wrong with the frames.
    uneven : list of str
        Why not every one of a fixed number of steps is computed by the same rule.
    fixed : int
        Steps of a call, declared or given by dims; 0 if it takes any number.
    shifts : Shifts or None
        Of a file that computes a frame from those before it, over the time axis, the trace with as many steps as that.
    """

    shapes: dict[str, tuple[int, ...]]
    time_axes: dict[str, int]
    constants: dict[str, np.ndarray]
    symbols: set[str]
    types: dict[str, type]
    steps: int = 1
    open_axes: list[dict[str, int]] = field(default_factory=list)
    unfollowed: list[tuple[dict[str, int], list[str]]] = field(default_factory=list)
    output_axes: dict[str, int | None] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    mixed: list[tuple[dict[str, int], list[str]]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    uneven: list[str] = field(default_factory=list)
    fixed: int = 0
    shifts: Shifts | None = None


@dataclass(frozen=True, eq=False)
class Plan:
    """What was found in a file.

    Attributes
    ----------
    trace : Trace
    inputs : Inputs
    frames : tuple of str
        Names of the inputs that are x, concatenated.
    outputs : tuple of str
        Names of the outputs, which are y, concatenated.
    states : dict of str to str
        Input to output.
    chain : Chain
    """

    trace: Trace
    inputs: Inputs
    frames: tuple[str, ...]
    outputs: tuple[str, ...]
    states: dict[str, str]
    chain: Chain

    @property
    def time_axis(self) -> int | None:
        """The axis of the frame's input that counts steps; None if a call is one step."""
        return self.inputs.time_axes.get(self.frames[0])

    @property
    def faults(self) -> list[str]:
        mixed = [] if self.states else [fault for _, faults in self.inputs.mixed for fault in faults]
        if self.inputs.shifts and self.inputs.shifts.fault and self.chain.faults:
            mixed = [*mixed, self.inputs.shifts.fault]
        return [*self.trace.faults, *mixed, *self.inputs.faults, *self.inputs.uneven, *self.chain.faults]


def plan(
    model: onnx.ModelProto,
    inputs: Mapping,
    states: Mapping[str, str],
    dims: Mapping[str, int],
    frames: Collection[str] = (),
) -> Plan:
    """Find the layers, the frame and the states of a file.

    Parameters
    ----------
    model : onnx.ModelProto
        Sorted, without local functions, its tensors in memory.
    inputs : mapping of str to number or array
        Values of inputs that are neither frame nor state.
    states : mapping of str to str
        Input to output, for states that the structure does not decide.
    dims : mapping of str to int
        Sizes of symbolic dimensions; those that are not given are 1.
    frames : collection of str
        The inputs that are x, besides those that can't be states. If empty: these, else one.

    Raises
    ------
    NotImported
        With all reasons, one in a line.
    """
    read = _inputs(model, inputs, dims)
    for name in states.keys() - read.shapes.keys():
        raise NotImported(f"states: the file has no input {quoted(name)}; it has {_names(read.shapes)}")
    for name in frames:
        if name not in read.shapes or name in states:
            free = _names(read.shapes.keys() - states.keys())
            raise NotImported(
                f"frames: {quoted(name)} must be an input that is no constant and no state, one of {free}"
            )
    for name in set(states.values()) - {value.name for value in model.graph.output}:
        raise NotImported(f"states: the file has no output {quoted(name)}; it has {_names(_outputs(model))}")
    if read.shifts:
        trace = read.shifts.trace
        shapes = {name: trace.values[name].shape for name in read.shapes}
        read = replace(read, shapes=shapes, steps=read.shifts.length)
    else:
        trace = Trace(model, read.shapes, read.constants)
    plans = list(_plans(model, trace, read, states, frames))
    if trace.faults and read.time_axes and not read.mixed:  # the file may be written for its number of steps
        whole = _whole(model, read, dims)
        if whole.steps > 1:
            read, trace = whole, Trace(model, whole.shapes, whole.constants)
            if trace.repeated:
                raise NotImported("a Loop takes a stored number of steps: export it for any number, or as a Scan")
            plans = list(_plans(model, trace, read, states, frames))
    if read.time_axes and not read.shifts and not any(not found.faults for found in plans):
        frame = _one_frame(model, read, dims)
        one = frame and Trace(model, frame.shapes, frame.constants)
        others = list(_plans(model, one, frame, states, frames)) if one else []
        fits = one and not one.faults and not unrolled(one, frame.shapes)  # then its reasons say more
        if any(not found.faults for found in others) or (trace.faults and fits):
            read, trace, plans = frame, one, others
    written = [] if read.shifts else unrolled(trace, read.shapes)
    found = _only(plans, trace, read, written)
    if written and not found.states and not found.chain.cells:
        raise NotImported("it keeps no state from call to call:", written)
    _check_names(found, states)
    return found


def _whole(model: onnx.ModelProto, inputs: Inputs, dims: Mapping[str, int]) -> Inputs:
    """The same inputs with as many steps as the file declares."""
    shapes = {value.name: shape_of(value, dims, 1, None) for value in _over(model, inputs)}
    steps = {shapes[name][axis] for name, axis in inputs.time_axes.items()}
    return replace(inputs, shapes=inputs.shapes | shapes, steps=steps.pop())


def _one_frame(model: onnx.ModelProto, inputs: Inputs, dims: Mapping[str, int]) -> Inputs | None:
    """The same inputs where the steps of a recurrent operator are positions of one frame; None if any number fits."""
    values = _over(model, inputs)
    if not all(shape_of(value, dims, 0, None)[inputs.time_axes[value.name]] for value in values):
        return None
    mixed = [each for each in inputs.mixed if each[0] != inputs.time_axes]
    given = {"time_axes": {}, "output_axes": {}, "mixed": mixed, "uneven": []}
    shapes = {value.name: shape_of(value, dims, 1, None) for value in values}
    return replace(inputs, shapes=inputs.shapes | shapes, steps=1, **given)


def _over(model: onnx.ModelProto, inputs: Inputs) -> list[onnx.ValueInfoProto]:
    """The inputs that have steps."""
    return [value for value in model.graph.input if value.name in inputs.time_axes]


def _names(values) -> str:
    return ", ".join(map(quoted, values))


def _outputs(model: onnx.ModelProto) -> list[str]:
    return [value.name for value in model.graph.output]


def _inputs(model: onnx.ModelProto, given: Mapping, dims: Mapping[str, int]) -> Inputs:
    _check_dims(model, dims)
    stored = {tensor.name for tensor in model.graph.initializer}
    varying, constants = {}, {}
    for value in undecided(model, given):
        kind = TensorProto.DataType.Name(value.type.tensor_type.elem_type).lower()
        raise NotImported(
            f"input {quoted(value.name)} is {kind}: if it is the same for every frame, give it as "
            f"inputs={{{value.name!r}: VALUE}}; token ids must be the indices of a Gather of a constant"
        )
    for value in model.graph.input:
        if value.name in stored:
            continue
        if value.name in given:
            constants[value.name] = constant(value, given[value.name])
        else:
            varying[value.name] = value
    for name in given.keys() - constants.keys():
        raise NotImported(f"inputs: the file has no input {quoted(name)}; it has {_names([*varying, *constants])}")
    if not varying:
        raise NotImported("the file has no input of floating point or token ids")
    fields = frames_of(model, varying, constants, dims)
    shapes = {name: shape_of(value, dims, 1, fields["time_axes"].get(name)) for name, value in varying.items()}
    types = {name: (FLOATS | INTEGERS)[value.type.tensor_type.elem_type] for name, value in varying.items()}
    return Inputs(
        shapes=shapes, constants=constants, symbols=set(open_dimensions(varying, dims)), types=types, **fields
    )


def _check_dims(model: onnx.ModelProto, dims: Mapping) -> None:
    symbols = open_dimensions({value.name: value for value in model.graph.input}, {})
    for name, size in dims.items():
        if name not in symbols:
            known = f"it has {_names(sorted(symbols))}" if symbols else "all its sizes are fixed"
            raise NotImported(f"dims: no input has the open dimension {quoted(name)}; {known}")
        whole_number(size, f"dims[{name!r}]", 1)


def _plans(model, trace: Trace, inputs: Inputs, states, frames):
    """The layers for each assignment of inputs and outputs that the sizes allow."""
    outputs = {name: trace.values.get(name) for name in _outputs(model)}
    known = {name: value for name, value in outputs.items() if isinstance(value, Elements)}
    known_one = False  # reading without a fault: what is wrong with others is not told
    for chosen, names, pairs in islice(assignments(trace, inputs, known, states, frames), MAX_PAIRINGS):
        old = dict(trace.unrolled) if inputs.time_axes or trace.loops else {}  # else its steps are positions of a frame
        for name, result in pairs.items():
            old |= dict(zip(_flat(known[result]), _flat(trace.values[name]), strict=True))
        xs, ys = [trace.values[name].numbers for name in chosen], {n: known[n].numbers.ravel() for n in names}
        if inputs.steps > 1:  # the last step
            if set(chosen) != set(inputs.time_axes):
                continue
            xs = [x.take(-1, inputs.time_axes[name]) for name, x in zip(chosen, xs, strict=True)]
        x, within = np.concatenate([x.ravel() for x in xs]), bool(inputs.time_axes)
        if inputs.steps > 1:
            ys = {name: _of_last(known[name], x, trace, inputs, name) for name in ys}
        chain = Chain(trace, x, old, ys, inputs.shifts, brief=known_one, inside=within)
        ends = {begin: end for *_, each in trace.repeated for begin, end in each.items()}
        if any(ends.get(before, new) != new for new, before in old.items()):
            chain.faults.append("an output gives a state of a loop back changed")
        if rest := [name for name in chosen if inputs.time_axes and name not in inputs.time_axes]:
            own = _names(inputs.time_axes)
            chain.faults.append(
                f"{own} runs over steps, so all of x must: {_names(rest)} has one element for each call"
            )
        each = [name for name in outputs if inputs.output_axes.get(name) is not None]
        if given_back := [name for name in pairs.values() if name in each]:
            chain.faults.append(f"output {_names(given_back)} is of each frame, so it gives no state back")
        if 0 < len(last := [name for name in names if name not in each]) < len(names):
            chain.faults.append(f"output {_names(last)} is of the last frame, others are of each: {ONE_KIND}")
        _check_states(chain, trace, known, pairs, names, each)
        found = Plan(trace, inputs, chosen, names, pairs, chain)
        known_one |= not found.faults
        yield found


def _of_last(value: Elements, x: np.ndarray, trace: Trace, inputs: Inputs, name: str) -> np.ndarray:
    """The elements of an output that belong to the last step, whose frame is x."""
    if inputs.shifts:
        axis = inputs.output_axes[name]
        return value.numbers.ravel() if axis is None else value.numbers.take(-1, axis).ravel()
    last, y = set(x.ravel().tolist()), value.numbers.ravel()
    return y[[trace.root(number) in last for number in y.tolist()]]


def _flat(value: Elements) -> list[int]:
    return value.numbers.ravel().tolist()


def _only(plans: list[Plan], trace: Trace, inputs: Inputs, written: list[str]) -> Plan:
    """The one plan without a fault; `written` are possible reasons why there is none."""
    possible = [found for found in plans if not found.faults]
    best = max(map(_rank, possible), default=None)
    good = [found for found in possible if _rank(found) == best]
    least = min(map(_likeness, good), default=0.0)
    good += [found for found in possible if found not in good and _likeness(found) > least]
    if good and all(_elements(found) == _elements(good[0]) or _holds(found, good[0]) for found in good):
        return max(good, key=_likeness)  # readings of the same elements are one
    if good:
        raise NotImported(
            "more than one reading of the inputs and outputs fits; choose one by states={...}:", map(_reading, good)
        )
    # the reading that came furthest says best what is missing: to layers, or most steps
    furthest = max(plans, key=lambda found: (bool(found.chain.layers), found.chain.depth), default=None)
    mixed = [fault for _, faults in inputs.mixed for fault in faults]
    more = mixed if trace.faults else []
    found = [*furthest.faults, *more] if furthest else [*trace.faults, *mixed, *inputs.faults, *inputs.uneven]
    faults = together([*written, *found])
    faults = faults or [unpaired(trace, inputs)]
    rest = [f"and {len(faults) - MAX_FAULTS} more"] if len(faults) > MAX_FAULTS else []
    if inputs.symbols:
        rest.append(f"open dimensions were taken as 1; dims={{...}} sets {', '.join(sorted(inputs.symbols))}")
    if len(inputs.shapes) > 1 and not trace.faults:
        rest.append("an input that is a part of x, though an output has its size, is named by frames=[...]")
    raise NotImported("it is not a list of layers that cnorm has:", [*faults[:MAX_FAULTS], *rest], not trace.faults)


def _rank(found: Plan) -> tuple:
    """Which of several readings is meant: it loses no output, its states keep their shapes, y has the time axis."""
    axes = found.inputs.output_axes
    over = [name for name, axis in axes.items() if axis is not None]
    kept = [name for name in found.outputs if name in over or not over]
    values = found.trace.values
    shapes = sum(values[name].shape == values[result].shape for name, result in found.states.items())
    elements = set(np.concatenate([np.empty(0, int), *(_numbers(found, name) for name in kept)]).tolist())
    given = len(kept) - sum(name in over for name in found.states.values())
    return len(elements) if over or found.states else 0, len(found.outputs) == 1, shapes, given


def _likeness(found: Plan) -> float:
    """How much the names of states are like those of the outputs that give them back."""
    return sum(alike(*pair) for pair in found.states.items())


def _check_names(found: Plan, states) -> None:
    """Refuse what the names say otherwise where structure alone decides too little.

    That is a cache of one frame whose output has the frame's name rather than its own, and a sum of frames, as h = a h
    + x is no other if h and x change places.
    """
    sums = {int(n) for cell in found.chain.cells if cell.is_sum for n in cell.new["h"]}
    for name, result in found.states.items():
        for frame in (
            found.frames if name not in states and sums.intersection(_flat(found.trace.values[result])) else ()
        ):
            same = _numbers(found, frame).size == _numbers(found, name).size
            if same and alike(frame, result) >= alike(name, result):
                raise NotImported(
                    f"the output {quoted(result)} is a sum, of which {quoted(name)} or {quoted(frame)} may be the "
                    f"state: say which by states={{{name!r}: {result!r}}}"
                )
        for frame in found.frames:
            same = np.array_equal(_numbers(found, frame), _numbers(found, result))
            if same and name not in states and alike(frame, result) >= alike(name, result):
                raise NotImported(
                    f"the output {quoted(result)} is the input {quoted(frame)} unchanged: if {quoted(name)} is the "
                    f"frame before, say so by states={{{name!r}: {result!r}}}"
                )


def _numbers(found: Plan, name: str) -> np.ndarray:
    return found.trace.values[name].numbers.ravel()


def _elements(found: Plan) -> tuple:
    """A reading by elements instead of names."""
    states = tuple((name, _numbers(found, result).tobytes()) for name, result in found.states.items())
    return found.frames, sorted(_numbers(found, name).tobytes() for name in found.outputs), states


def _holds(found: Plan, first: Plan) -> bool:
    """Whether y of a reading is all states, the last of which are y of the first: h_n of several layers."""
    part, whole = ({n for name in one.outputs for n in _numbers(one, name).tolist()} for one in (first, found))
    return (found.frames, found.states) == (first.frames, first.states) and part < whole


def _reading(found: Plan) -> str:
    pairs = ", ".join(f"{a!r}: {b!r}" for a, b in found.states.items()) or "no state"
    x, y = (", ".join(map(repr, names)) for names in (found.frames, found.outputs))
    return f"frame {x}, output {y}, {pairs}"


def _check_states(chain: Chain, trace: Trace, outputs, pairs, names: tuple[str, ...], each: list[str]) -> None:
    """Note each state element that no cell uses, or two do, and each output that is neither y nor a state.

    `each` has the outputs that are of each frame, where the file runs over several.
    """
    if chain.faults:
        return
    new = {int(n) for cell in chain.cells for numbers in cell.new.values() for n in numbers}
    used = Counter(n for cell in chain.cells for n in {int(n) for numbers in cell.old.values() for n in numbers})
    for name, result in pairs.items():
        if any(used[n] > 1 for n in _flat(trace.values[name])):
            chain.faults.append(f"input {quoted(name)}: it is the state of two layers")
        unused = [n for n in _flat(trace.values[name]) if n not in used]
        if unused:
            chain.faults.append(
                f"input {quoted(name)}: {len(unused)} of its {trace.values[name].numbers.size} elements are not the "
                f"state of a cell that {quoted(result)} gives back"
            )
    for name, value in ((name, _flat(value)) for name, value in outputs.items() if name not in pairs.values()):
        if not (set(value) <= new or value in [_flat(outputs[each]) for each in names]):
            one_kind = (name in each) == (names[0] in each)
            why = "no state, and {} is another output" if one_kind else f"of other frames than {{}}: {ONE_KIND}"
            chain.faults.append(f"output {quoted(name)}: {why.format(_names(names))}")
