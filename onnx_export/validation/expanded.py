"""Operators on integers written as the float operators between quantisers that they stand for."""

from __future__ import annotations

import onnx
from onnx import helper

from onnx_export.nodes import all_graphs
from onnx_export.validation.graph import free_prefix

_TWO = {"QLinearAdd": "Add", "QLinearMul": "Mul"}  # of the domain com.microsoft: a, scale, zero, b, scale, zero, ...


def expanded(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """A copy of the model in which sums and products of integers are float ones; None if it has none.

    It serves to find norms whose sum with eps, or scale, is computed on integers. It is not run.
    """
    found = [node for graph in all_graphs(model.graph) for node in graph.node if node.op_type in _TWO]
    if not found:
        return None
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    prefix = free_prefix(model, "cnorm_float")
    for graph in all_graphs(copy.graph):
        nodes = [each for node in graph.node for each in _floats(node, f"{prefix}_{node.output[0]}")]
        del graph.node[:]
        graph.node.extend(nodes)
    return copy


def _floats(node: onnx.NodeProto, stem: str) -> list[onnx.NodeProto]:
    """The node, or what it stands for."""
    if node.op_type not in _TWO or node.domain != "com.microsoft" or len(node.input) < 7:
        return [node]
    given = list(node.input)
    return [
        helper.make_node("DequantizeLinear", [name for name in given[:3] if name], [f"{stem}_a"]),
        helper.make_node("DequantizeLinear", [name for name in given[3:6] if name], [f"{stem}_b"]),
        helper.make_node(_TWO[node.op_type], [f"{stem}_a", f"{stem}_b"], [f"{stem}_y"], name=node.name),
        helper.make_node("QuantizeLinear", [f"{stem}_y", *filter(None, given[6:])], list(node.output)),
    ]
