"""PerPosition and OverPositions: a layer at each position of a frame [channels, positions].

The nodes are those of a step of the layer with all positions as rows, or of a step for each position in turn; where an
operator LSTM, GRU or RNN computes the cell, it runs over the positions.
"""

from __future__ import annotations

from types import MappingProxyType

import numpy as np
from onnx import numpy_helper

from onnx_export.builders import gru, linear, lstm, native, rnn
from onnx_export.builders.conv import flat, grid, part

_INNER = MappingProxyType({"GRU": gru, "LSTM": lstm, "Linear": linear, "RNN": rnn})


def states(layer) -> dict[str, int]:
    return {letter: units * layer.positions for letter, units in _INNER[layer.layer.kind].states(layer.layer).items()}


def build(graph, layer, weights, x, states):
    sequence = graph.sequence
    if layer.kind == "PerPosition":
        made = _at_once(graph, layer, weights, x, states)
    elif layer.rows or native.refusal(layer.layer):
        made = _in_turn(graph, layer, weights, x), {}
    else:
        made = _by_operator(graph, layer, weights, x), {}
    graph.sequence = sequence
    return made


def _at_once(graph, layer, weights, x, states):
    """A step of the layer with the positions of all frames as rows."""
    inner = _INNER[layer.layer.kind]
    before = {letter: _rows(graph, layer, value, letter) for letter, value in states.items()}
    given = _rows(graph, layer, x, "x")
    sequence, graph.sequence = graph.sequence, False
    y, after = inner.build(graph, layer.layer, weights, given, before)
    graph.sequence = sequence
    new = {letter: _frames(graph, layer, x, value, letter) for letter, value in after.items()}
    same = next((new[letter] for letter in after if after[letter] == y), None)
    return same or _frames(graph, layer, x, y, "y"), new


def _rows(graph, layer, value, name):
    """[frames * positions, units] of frames [..., units * positions]: x, or a state by its letter."""
    size = layer.input_size if name == "x" else states(layer)[name]
    turned = graph.add("Transpose", grid(graph, value, (size // layer.positions, layer.positions)),
                       name=f"{name}_turned", perm=[0, 2, 1])  # fmt: skip
    shape = graph.constant([-1, size // layer.positions], f"{name}_rows_shape", np.int64)
    return graph.add("Reshape", turned, shape, name=f"{name}_rows")


def _frames(graph, layer, x, rows, name):
    """The reverse of `_rows`, with the leading axes of x."""
    size = layer.output_size if name == "y" else states(layer)[name]
    shape = graph.constant([-1, layer.positions, size // layer.positions], f"{name}_frames_shape", np.int64)
    frames = graph.add("Reshape", rows, shape, name=f"{name}_frames")
    return flat(graph, x, graph.add("Transpose", frames, name=f"{name}_back", perm=[0, 2, 1]), size)


def _by_operator(graph, layer, weights, x):
    frames = grid(graph, x, (layer.layer.input_size, layer.positions))
    steps = _in_order(graph, layer, graph.add("Transpose", frames, name="steps", perm=[2, 0, 1]), "x")
    sequence, graph.sequence = graph.sequence, True
    y, _ = native.build(graph, layer.layer, weights, steps, {})
    graph.sequence = sequence
    turned = graph.add("Transpose", _in_order(graph, layer, y, "y"), name="turned", perm=[1, 2, 0])
    return flat(graph, x, turned, layer.output_size)


def _in_order(graph, layer, value, name):
    """Positions [positions, rows, ...] in the order of the scan, or back from it."""
    if not layer.reverse:
        return value
    order = graph.constant(np.arange(layer.positions)[::-1], f"{name}_order", np.int64)
    return graph.add("Gather", value, order, name=f"{name}_ordered", axis=0)


def _in_turn(graph, layer, weights, x):
    frames = grid(graph, x, (layer.layer.input_size, layer.positions))
    sequence, graph.sequence = graph.sequence, False
    inner, outputs = _INNER[layer.layer.kind], {}
    rows = part(graph, graph.add("Shape", frames, name="shape"), 0, 1, "rows")
    states = {letter: _zeros(graph, rows, units, letter) for letter, units in inner.states(layer.layer).items()}
    for p in range(layer.positions)[:: -1 if layer.reverse else 1]:
        step = graph.add("Gather", frames, graph.constant(p, "position", np.int64), name="step", axis=2)
        y, states = inner.build(graph, layer.layer, weights, step, states)
        outputs[p] = graph.add("Unsqueeze", y, graph.constant([-1], "axes", np.int64), name="at")
    graph.sequence = sequence
    joined = graph.add("Concat", *(outputs[p] for p in range(layer.positions)), name="joined", axis=-1)
    return flat(graph, x, joined, layer.output_size)


def _zeros(graph, rows, units, name):
    shape = graph.add("Concat", rows, graph.constant([units], f"{name}_units", np.int64), name=f"{name}_shape", axis=0)
    zero = numpy_helper.from_array(np.zeros(1, graph.dtype))
    return graph.add("ConstantOfShape", shape, name=f"{name}_zero", value=zero)
