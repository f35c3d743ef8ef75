"""Scan and Loop: the body, followed once for each step.

A state is carried from step to step by a block `carried`, which hides what it was made of from the search for frames
that are mixed. So a state must be an input of the file that only the body reads, and its last value must be an output
as it is: then the body at one step is the step of the layers, and these are found as in a file of one step.
"""

from __future__ import annotations

import numpy as np
import onnx

from onnx_export.importer.blocks import each
from onnx_export.importer.elements import Cannot, Elements
from onnx_export.nodes import names_read, subgraphs

__all__ = ["REPEATING", "carried", "check_index", "faults_of_loops", "note_steps"]

MAX_STEPS = 1 << 14  # of one call
# They move what they are given, so an integer among their inputs is the number of a step as it is.
MOVES = {"Identity", "Squeeze", "Unsqueeze", "Reshape"}


def _scan(trace, node: str, attributes, inputs, outputs) -> list:
    if trace.opset < 9:
        raise Cannot("a Scan before opset 9 has other inputs")
    body, scanned = attributes["body"], attributes["num_scan_inputs"]
    states, xs = inputs[: len(inputs) - scanned], inputs[len(inputs) - scanned :]
    if any(np.any(attributes.get(f"scan_{way}_directions", 0)) for way in ("input", "output")):
        raise Cannot("it reads its steps from the end")
    if any(not isinstance(x, Elements) for x in xs):
        raise Cannot("it reads a stored value at each step")
    axes = attributes.get("scan_input_axes", [0] * scanned)
    frames = [np.moveaxis(x.numbers, axis, 0) for x, axis in zip(xs, axes, strict=True)]
    if len({len(each) for each in frames}) != 1:
        raise Cannot("its inputs have different numbers of steps")
    steps = [[Elements(each[t]) for each in frames] for t in range(len(frames[0]))]
    of = _from_zeros if states and not any(isinstance(state, Elements) for state in states) else _steps
    last, ys = of(trace, node, body, states, steps)
    axes = attributes.get("scan_output_axes", [0] * len(ys))
    return [*last, *(_moved(trace, y, axis) for y, axis in zip(ys, axes, strict=False))]


def _loop(trace, node: str, attributes, inputs, outputs) -> list:
    body, (count, condition, *states) = attributes["body"], (*inputs, None)[: max(2, len(inputs))]
    if count is None or isinstance(count, Elements) or isinstance(condition, Elements):
        raise Cannot("its number of steps depends on what it computes")
    if condition is not None and not np.all(condition):
        raise Cannot("it does no step")
    check_index(body, body.input[0].name)
    steps = range(min(int(np.ravel(count)[0]), MAX_STEPS + 1))
    given = [[np.array(t, np.int64), np.array(True)] for t in steps]
    last, ys = _steps(trace, node, body, states, given)
    return [*last, *(_moved(trace, y, 0) for y in ys)]


def check_index(body: onnx.GraphProto, index: str) -> None:
    """The number of a step may only choose the frame that it reads."""
    numbers = {index}
    for node in body.node:
        inner = {name for _, graph in subgraphs(node) for name in names_read(graph)}
        if node.op_type in MOVES and node.input[0] in numbers:
            numbers.update(node.output)
        elif node.op_type == "Gather" and node.input[1] in numbers and node.input[0] not in numbers:
            continue
        elif not numbers.isdisjoint({*node.input, *inner}):
            raise Cannot("it computes with the number of the step")
    if numbers.intersection(value.name for value in body.output):
        raise Cannot("it gives the number of the step")


def _steps(trace, node: str, body: onnx.GraphProto, initial, given) -> tuple[list, list]:
    """The states behind the last of some steps, and what the steps give besides, [steps, ...].

    `given` has the values of the body's other inputs for each step: before the states for a Loop, else behind them.
    """
    if not 0 < len(given) <= MAX_STEPS:
        raise Cannot(f"it takes {len(given)} steps, wanted 1 to {MAX_STEPS}")
    states, loops = [_checked(trace, state) for state in initial], isinstance(given[0][0], np.ndarray)
    first, made, before = len(trace.blocks), [], states
    for t, own in enumerate(given):
        if t:
            pairs = [(s, old.numbers.ravel()) for s, old in zip(states, before, strict=True)]
            states = [trace.add("repeated", node, s.shape, [each(s)], before=old) for s, old in pairs]
        before = states
        results = trace.of_subgraph(body, [*own, *states] if loops else [*states, *own])
        if not results:
            raise Cannot("its body can't be followed", behind=None)
        if loops and not (isinstance(results[0], np.ndarray) and np.all(results.pop(0))):
            raise Cannot("its condition is computed")
        results = [trace.lift(value, node) for value in results]
        new = results[: len(states)]
        if any(a.shape != b.shape for a, b in zip(new, states, strict=True)):
            raise Cannot("a state changes its shape")
        states = new
        made.append(results)
    numbers = np.stack([np.concatenate([r.numbers.ravel() for r in each]) for each in made])
    trace.sequences.append((node, numbers[:, None]))
    begin, end = (np.concatenate([[], *(s.numbers.ravel() for s in each)]).astype(int) for each in (initial, states))
    trace.repeated.append((first, len(trace.blocks), dict(zip(begin.tolist(), end.tolist(), strict=True))))
    return states, [[each[i] for each in made] for i in range(len(states), len(made[0]))]


def _from_zeros(trace, node: str, body: onnx.GraphProto, initial, given) -> tuple[list, list]:
    """As `_steps`, of a Scan whose first states are stored, as `loops.unroll` has them."""
    if not 0 < len(given) <= MAX_STEPS:
        raise Cannot(f"it takes {len(given)} steps, wanted 1 to {MAX_STEPS}")
    states, old, made = [trace.lift(np.asarray(state, np.float32), node) for state in initial], None, []
    for own in given:
        old = [carried(trace, node, *pair) for pair in zip(states, old or [None] * len(states), strict=True)]
        results = [trace.lift(value, node) for value in trace.of_subgraph(body, [*old, *own])]
        if not results:
            raise Cannot("its body can't be followed", behind=None)
        states = results[: len(old)]
        for before, after in zip(old, states, strict=True):
            if before.shape != after.shape:
                raise Cannot("a state changes its shape")
            trace.unrolled |= dict(zip(after.numbers.ravel().tolist(), before.numbers.ravel().tolist(), strict=True))
        made.append(results)
    for i in range(len(states)):
        note_steps(trace, node, [each[i] for each in made])
    return states, [[each[i] for each in made] for i in range(len(states), len(made[0]))]


def carried(trace, node: str, value: Elements, before: Elements | None) -> Elements:
    """What a step is given; `before`: what the step before it was."""
    return trace.add("carried", node, value.shape, [each(value)], before=before and before.numbers.ravel())


def note_steps(trace, node: str, states: list[Elements]) -> None:
    """Note what a loop carries from step to step."""
    steps = np.stack([state.numbers.reshape(1, -1) for state in states])
    trace.sequences.append((node, steps))
    trace.loops.append(steps)


def _checked(trace, state) -> Elements:
    """A state, which must be elements of inputs."""
    if not isinstance(state, Elements) or any(block.op != "input" for block in trace.owners(state.numbers)):
        raise Cannot("a state begins with what is stored or computed; wanted an input of the file")
    return state


def _moved(trace, y: list[Elements], axis: int) -> Elements:
    """What the steps give, along an axis."""
    return trace.lowered(Elements(np.stack([each.numbers for each in y], axis)))


def faults_of_loops(trace) -> list[str]:
    """The states that a node outside the body reads."""
    faults = []
    for first, stop, states in trace.repeated:
        begins = np.array(list(states), np.int64)
        for index, block in enumerate(trace.blocks):
            if not first <= index < stop and any(np.isin(operand, begins).any() for operand in block.operands):
                faults.append(f"{block.node}: it reads the first state of a loop, which the steps do not change")
    return faults


REPEATING = {"Scan": _scan, "Loop": _loop}
