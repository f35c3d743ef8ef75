"""Layers that act on each frame without matrix products: LayerNorm and Activation."""

from __future__ import annotations

import math

from onnx_export.builders.norms import layer_norm

_OPERATORS = {
    "relu": "Relu",
    "tanh": "Tanh",
    "sigmoid": "Sigmoid",
    "elu": "Elu",
    "softplus": "Softplus",
    "exp": "Exp",
    "sqrt": "Sqrt",
    "abs": "Abs",
    "hard_sigmoid": "HardSigmoid",
}
_SELU = {"alpha": 1.6732632, "gamma": 1.0507010}  # rounded to float32


def states(layer) -> dict[str, int]:
    return {}


def build(graph, layer, weights, x, states):
    if layer.kind == "Activation":
        return _activation(graph, layer, weights, x), {}
    return layer_norm(graph, x, weights["weight"], weights.get("bias"), layer.eps, "y"), {}


def _activation(graph, layer, weights, x):
    given = dict(layer.parameters)
    if layer.function in _OPERATORS:
        return graph.add(_OPERATORS[layer.function], x, name="y", **given)
    return _FORMS[layer.function](graph, x, given, weights)


def _silu(graph, x, given, weights):
    return graph.add("Mul", x, graph.add("Sigmoid", x, name="y_gate"), name="y")


def _gelu(graph, x, given, weights):
    scaled = graph.add("Mul", x, graph.constant(math.sqrt(0.5), "y_root"), name="y_scaled")
    return _half_of_one_and(graph, x, graph.add("Erf", scaled, name="y_erf"))


def _gelu_tanh(graph, x, given, weights):
    square = graph.add("Mul", x, x, name="y_square")
    cubic = graph.add("Mul", square, graph.constant(0.044715, "y_factor"), name="y_cubic")
    inner = graph.add("Add", cubic, graph.constant(1, "y_one"), name="y_inner")
    scaled = graph.add("Mul", x, graph.constant(math.sqrt(2 / math.pi), "y_root"), name="y_scaled")
    return _half_of_one_and(
        graph, x, graph.add("Tanh", graph.add("Mul", scaled, inner, name="y_argument"), name="y_tanh")
    )


def _half_of_one_and(graph, x, value):
    """x (1 + value) / 2"""
    gate = graph.add("Add", value, graph.constant(1, "y_one"), name="y_gate")
    half = graph.add("Mul", x, graph.constant(0.5, "y_half"), name="y_halved")
    return graph.add("Mul", half, gate, name="y")


def _hard_swish(graph, x, given, weights):
    return graph.add("Mul", x, graph.add("HardSigmoid", x, name="y_gate", alpha=1 / 6, beta=0.5), name="y")


def _log(graph, x, given, weights):
    shifted = graph.add("Add", x, graph.constant(given["eps"], "y_eps"), name="y_shifted") if given["eps"] else x
    return graph.add("Log", shifted, name="y")


def _clip(graph, x, given, weights):
    limits = [graph.constant(v, f"y_{name}") if math.isfinite(v) else "" for name, v in given.items()]
    return graph.add("Clip", x, *limits, name="y")


_FORMS = {
    "selu": lambda graph, x, given, weights: graph.add("Selu", x, name="y", **_SELU),
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "leaky_relu": lambda graph, x, given, weights: graph.add("LeakyRelu", x, name="y", alpha=given["slope"]),
    "prelu": lambda graph, x, given, weights: graph.add("PRelu", x, weights["slope"], name="y"),
    "hard_swish": _hard_swish,
    "softmax": lambda graph, x, given, weights: graph.add("Softmax", x, name="y", axis=-1),
    "log": _log,
    "square": lambda graph, x, given, weights: graph.add("Mul", x, x, name="y"),
    "clip": _clip,
}
