"""LayerNorm and Activation, and the functions of cells."""

from __future__ import annotations

import math
from collections.abc import Mapping

from onnx_export.builders.norms import layer_norm
from onnx_export.graph.tables import ATTRIBUTES, FUNCTIONS

_SELU = {"alpha": 1.6732632, "gamma": 1.0507010}  # rounded to float32


def build(graph, layer, weights, x, states):
    if layer.kind == "Activation":
        return function(graph, x, layer.function, layer.parameters, "y", weights.get("slope")), {}
    return layer_norm(graph, x, weights["weight"], weights.get("bias"), layer.eps, "y"), {}


def function(graph, x: str, of: str, given: Mapping[str, float], name: str, slope: str | None = None) -> str:
    """A function of `cnorm.cells.functions` with its parameters; `slope` is the value of prelu's."""
    if of in FUNCTIONS:
        return graph.add(FUNCTIONS[of], x, name=name, **{ATTRIBUTES.get(key, key): v for key, v in given.items()})
    if of == "prelu":
        return graph.add("PRelu", x, slope, name=name)
    return _FORMS[of](graph, x, given, name)


def _silu(graph, x, given, name):
    return graph.add("Mul", x, graph.add("Sigmoid", x, name=f"{name}_gate"), name=name)


def _gelu(graph, x, given, name):
    scaled = graph.add("Mul", x, graph.constant(math.sqrt(0.5), f"{name}_root"), name=f"{name}_scaled")
    return _half_of_one_and(graph, x, graph.add("Erf", scaled, name=f"{name}_erf"), name)


def _gelu_tanh(graph, x, given, name):
    square = graph.add("Mul", x, x, name=f"{name}_square")
    cubic = graph.add("Mul", square, graph.constant(0.044715, f"{name}_factor"), name=f"{name}_cubic")
    inner = graph.add("Add", cubic, graph.constant(1, f"{name}_one"), name=f"{name}_inner")
    scaled = graph.add("Mul", x, graph.constant(math.sqrt(2 / math.pi), f"{name}_root"), name=f"{name}_scaled")
    argument = graph.add("Mul", scaled, inner, name=f"{name}_argument")
    return _half_of_one_and(graph, x, graph.add("Tanh", argument, name=f"{name}_tanh"), name)


def _half_of_one_and(graph, x, value, name):
    """x (1 + value) / 2"""
    gate = graph.add("Add", value, graph.constant(1, f"{name}_one"), name=f"{name}_gate")
    half = graph.add("Mul", x, graph.constant(0.5, f"{name}_half"), name=f"{name}_halved")
    return graph.add("Mul", half, gate, name=name)


def _hard_swish(graph, x, given, name):
    return graph.add("Mul", x, graph.add("HardSigmoid", x, name=f"{name}_gate", alpha=1 / 6, beta=0.5), name=name)


def _log(graph, x, given, name):
    if given["eps"]:
        x = graph.add("Add", x, graph.constant(given["eps"], f"{name}_eps"), name=f"{name}_shifted")
    return graph.add("Log", x, name=name)


def _clip(graph, x, given, name):
    limits = [graph.constant(v, f"{name}_{key}") if math.isfinite(v) else "" for key, v in given.items()]
    return graph.add("Clip", x, *limits, name=name)


_FORMS = {
    "selu": lambda graph, x, given, name: graph.add("Selu", x, name=name, **_SELU),
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "hard_swish": _hard_swish,
    "softmax": lambda graph, x, given, name: graph.add("Softmax", x, name=name, axis=-1),
    "log": _log,
    "square": lambda graph, x, given, name: graph.add("Mul", x, x, name=name),
    "clip": _clip,
}
