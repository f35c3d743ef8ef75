"""Operators on integers written as the float operators between quantisers that they stand for."""

from __future__ import annotations

from contextlib import suppress

import onnx
from onnx import helper

from onnx_export.graph.scope import with_shapes
from onnx_export.nodes import all_graphs, free_prefix

# Of the domain com.microsoft; their inputs are a, scale, zero, and for two operands b, scale, zero, then scale, zero.
_TWO = {"QLinearAdd": "Add", "QLinearMul": "Mul"}
_ONE = {"QLinearGlobalAveragePool": "GlobalAveragePool", "QLinearReduceMean": "ReduceMean"}
_ONE |= {"QLinearAveragePool": "AveragePool"}
_ATTRIBUTES = ("axes", "keepdims", "kernel_shape", "strides", "pads")


def expanded(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """A copy of the model in which sums and products of integers are float ones; None if it has none.

    It serves to find norms whose sum with eps, or scale, is computed on integers. It is not run.
    """
    found = [node for graph in all_graphs(model.graph) for node in graph.node if node.op_type in _TWO | _ONE]
    if not found:
        return None
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    prefix = free_prefix(model, "cnorm_float")
    for graph in all_graphs(copy.graph):
        nodes = [each for node in graph.node for each in _floats(node, f"{prefix}_{node.output[0]}")]
        del graph.node[:]
        graph.node.extend(nodes)
    with suppress(Exception):  # the C++ layer raises many kinds; forms that need no shape are found without
        return with_shapes(copy)
    return copy


def _floats(node: onnx.NodeProto, stem: str) -> list[onnx.NodeProto]:
    """The node, or what it stands for."""
    operands = 2 if node.op_type in _TWO else 1 if node.op_type in _ONE else 0
    if not operands or node.domain != "com.microsoft" or len(node.input) <= 3 * operands:
        return [node]
    given, floats = list(node.input), [f"{stem}_{index}" for index in range(operands)]
    opened = [
        helper.make_node("DequantizeLinear", [name for name in given[3 * index : 3 * index + 3] if name], [name_])
        for index, name_ in enumerate(floats)
    ]
    made = helper.make_node((_TWO | _ONE)[node.op_type], floats, [f"{stem}_y"], name=node.name)
    made.attribute.extend(attribute for attribute in node.attribute if attribute.name in _ATTRIBUTES)
    closing = [f"{stem}_y", *filter(None, given[3 * operands :])]
    return [*opened, made, helper.make_node("QuantizeLinear", closing, list(node.output))]
