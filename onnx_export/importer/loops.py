"""The operator Loop where it runs a known number of times, such as a recurrent layer of Keras 3 over a fixed window.

Its body is traced for each step. What it carries from step to step is copied into a block "carried", so that a step
reads the old state of a cell by other numbers than those of the outputs of the step before.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import numpy_helper

from onnx_export.importer.blocks import is_elements
from onnx_export.importer.elements import Cannot, Elements
from onnx_export.importer.repeated import carried, check_index, note_steps
from onnx_export.nodes import describe, subgraphs

__all__ = ["unroll"]

MAX_STEPS = 1 << 12


def unroll(trace, run: Callable[[onnx.GraphProto], None], node: onnx.NodeProto, inputs: list) -> list:
    """The outputs of a Loop; `run` traces its body."""
    ((_, body),) = subgraphs(node)
    trace.values |= {tensor.name: numpy_helper.to_array(tensor) for tensor in body.initializer}
    most, going, *values = inputs
    if any(map(is_elements, (most, going))):
        raise Cannot("how often it runs depends on the frame")
    names, results = ([value.name for value in values] for values in (body.input, body.output))
    states = [
        is_elements(value) or (value.dtype.kind == "f" and _source(body, results[1 + i]) != names[2 + i])
        for i, value in enumerate(values)
    ]
    going = going is None or bool(np.ravel(going)[0])
    most = MAX_STEPS + 1 if most is None else int(np.ravel(most)[0])
    made: list[list] = []
    old: list = [None] * len(states)
    while going and len(made) < most:
        if len(made) == MAX_STEPS:
            raise Cannot(f"it runs for more than {MAX_STEPS} steps")
        old = [
            _copied(trace, node, value, before) if state else value
            for state, value, before in zip(states, values, old, strict=True)
        ]
        trace.values |= dict(zip(names, [np.array(len(made)), np.array(True), *old], strict=True))
        run(body)
        if any(name not in trace.values for name in results):
            return []  # behind a node of the body that could not be traced
        going, *new = (trace.values[name] for name in results)
        if is_elements(going):
            raise Cannot("how often it runs depends on the frame")
        going = bool(np.ravel(going)[0])
        values = new[: len(values)]
        for state, before, after in zip(states, old, values, strict=True):
            if state and is_elements(after) and before.shape == after.shape:
                trace.unrolled |= dict(
                    zip(after.numbers.ravel().tolist(), before.numbers.ravel().tolist(), strict=True)
                )
        made.append(new)
    if not made:
        raise Cannot("it runs for no step")
    for i in [i for i, state in enumerate(states) if state and all(is_elements(new[i]) for new in made)]:
        note_steps(trace, describe(node), [new[i] for new in made])
    trace.numbered += _numbered(node, body, states)
    return [*values, *(_stacked(trace, node, each) for each in list(zip(*made, strict=True))[len(values) :])]


def _source(body: onnx.GraphProto, name: str) -> str:
    """What a name is the same as."""
    same = {one.output[0]: one.input[0] for one in body.node if one.op_type == "Identity"}
    while name in same:
        name = same[name]
    return name


def _copied(trace, node, value, before: Elements | None) -> Elements:
    """What a step is given; `before`: what the step before it was."""
    return carried(trace, describe(node), trace.lift(value, node.op_type), before)


def _numbered(node, body: onnx.GraphProto, states: list[bool]) -> list[str]:
    """Why steps that are not traced may do something else: the body computes with their numbers."""
    names, results = ([value.name for value in values] for values in (body.input, body.output))
    counts = [not state and _source(body, results[1 + i]) != names[2 + i] for i, state in enumerate(states)]
    try:
        check_index(body, names[0])
    except Cannot as error:
        return [f"{describe(node)}: {error}"]
    return [f"{describe(node)}: it counts its steps by what it carries"] if any(counts) else []


def _stacked(trace, node, values):
    """What each step gives, in order."""
    if not any(map(is_elements, values)):
        return np.stack(values)
    return Elements(np.stack([trace.lift(value, node.op_type).numbers for value in values]))
