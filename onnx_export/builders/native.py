"""Recurrent layers without norms as the operators LSTM, GRU and RNN."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from cnorm.cells.functions import named_parameters
from cnorm.cells.tensors import has_projection, present
from onnx_export.builders.cells import Cell
from onnx_export.graph.tables import FUNCTIONS
from onnx_export.recurrent import ACTIVATIONS

_HEEDED = {  # the fields of a spec that `build` writes or `refusal` judges, those of norms with the norms
    "kind", "name", "source", "gates", "weights", "scope", "grouping", "cell_norm", "eps", "reset", "update",
    "forget_bias", "update_bias", "activation", "recurrent_activation", "clip", "zoneout", "cell_clip",
    "projection_clip",
}  # fmt: skip
_PARTS = {"weight_x", "weight_h", "bias", "bias_x", "bias_h", "h0", "c0"}  # that `build` reads, or the state
_ORDER = {"LSTM": "iofg", "GRU": "zrn", "RNN": "a"}  # of the gates, in the operators' weights


def refusal(layer) -> str | None:
    """Why an operator does not compute this cell; None if it does."""
    spec = layer.spec
    if spec.normalises:
        return "the operators have no layer norm"
    if spec.zoneout:
        return "the operators have no zoneout"
    given = present(layer.tensors, layer.weights)
    if has_projection(given):
        return "the operator LSTM has no projection"
    if unknown := {use.part for tensor in given for use in tensor.uses()} - _PARTS:
        return f"the operators have no {', '.join(sorted(unknown))}"
    if spec.cell_clip is not None:
        return "the operator LSTM clips what enters its activations, not the cell"
    if spec.kind == "LSTM" and spec.clip is not None:
        return "onnxruntime does not clip the cell before its activation, as the operator LSTM demands"
    for name, _ in map(named_parameters, _functions(spec)):
        if FUNCTIONS.get(name, "").lower() not in ACTIVATIONS:
            return f"the operators have no {name}"
    if spec.kind == "GRU" and spec.reset == "candidate":
        return "the operator GRU does not let the reset gate act on the whole candidate"
    if spec.kind == "GRU" and spec.update == "new":
        return "the operator GRU weighs the candidate with 1 - z, this cell with z"
    for field in fields(spec):
        if field.name not in _HEEDED and getattr(spec, field.name) != field.default:
            return f"the operators have no {field.name}"
    return None


def _functions(spec) -> list[str | tuple]:
    """f, g and h of the operators."""
    return [spec.recurrent_activation] * (spec.kind != "RNN") + [spec.activation] * (2 if spec.kind == "LSTM" else 1)


def _activations(spec) -> dict:
    """The attributes of the functions that are not the usual, and of the clip."""
    functions = [named_parameters(function) for function in _functions(spec)]
    options: dict = {} if spec.clip is None else {"clip": spec.clip}
    if spec.kind != "RNN" and (spec.recurrent_activation, spec.activation) == ("sigmoid", "tanh"):
        return options
    options["activations"] = [FUNCTIONS[name] for name, _ in functions]
    for place, which in enumerate(("alpha", "beta")):
        values = [list(given.values())[place] for _, given in functions if len(given) > place]
        options |= {f"activation_{which}": values} if values else {}
    return options


def build(graph, layer, weights, x, states):
    """x [B, input_size], or [T, B, input_size] where the graph takes whole sequences."""
    if reason := refusal(layer):
        raise ValueError(f"native_ops must be False for {layer!r}: {reason}")
    cell, spec, order = Cell(graph, layer, weights), layer.spec, _ORDER[layer.kind]

    def lengthened(value, name, axis=0):
        return graph.add("Unsqueeze", value, graph.constant([axis], f"{name}_axes", np.int64), name=name)

    def shortened(value, name, axis=0):
        return graph.add("Squeeze", value, graph.constant([axis], f"{name}_axes", np.int64), name=name)

    constant = {"LSTM": ("f", spec.forget_bias), "GRU": ("z", spec.update_bias), "RNN": ("a", 0.0)}[layer.kind]
    offset = None
    if constant[1]:
        vector = np.where(np.array(list(order)) == constant[0], constant[1], 0.0).repeat(layer.units)
        offset = graph.constant(vector, "offset")
    bias_x = cell.sum([*(cell.vector(part, order) for part in ("bias", "bias_x")), offset], "bias_x_all")
    bias_h = cell.vector("bias_h", order)
    bias = ""
    if bias_x or bias_h:
        zero = np.zeros(len(order) * layer.units)
        both = [value or graph.constant(zero, "no_bias") for value in (bias_x, bias_h)]
        bias = lengthened(graph.add("Concat", *both, name="biases", axis=0), "B")

    inputs = [
        x if graph.sequence else lengthened(x, "X"),
        lengthened(cell.matrix("weight_x", order), "W"),
        lengthened(cell.matrix("weight_h", order), "R"),
        bias,
        "",  # sequence_lens: empty, all sequences have full length
        *(lengthened(value, f"initial_{letter}") for letter, value in states.items()),
    ]
    options = {"hidden_size": layer.units}
    if layer.kind == "GRU":
        options["linear_before_reset"] = int(spec.reset == "after")
    options |= _activations(spec)
    names = ("Y", *(f"Y_{letter}" for letter in states))
    y, *after = graph.add(layer.kind, *inputs, name=names, **options)
    new = {letter: shortened(value, letter) for letter, value in zip(states, after, strict=True)}
    return (shortened(y, "y", 1) if graph.sequence else new["h"]), new
