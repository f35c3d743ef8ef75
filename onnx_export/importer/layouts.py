"""Write recurrent operators with layout 1, which onnxruntime does not run, with layout 0 and transposes."""

from __future__ import annotations

import onnx
from onnx import helper

from onnx_export.nodes import all_graphs

__all__ = ["steps_first"]

INPUTS = {0: [1, 0, 2], 5: [1, 0, 2], 6: [1, 0, 2]}  # x, initial h and c: rows first to steps or directions first
OUTPUTS = {0: [2, 0, 1, 3], 1: [1, 0, 2], 2: [1, 0, 2]}  # y [steps, directions, rows, units], h and c


def steps_first(model: onnx.ModelProto) -> None:
    """Replace, in place, what the standard says layout 1 is."""
    for graph in all_graphs(model.graph):
        nodes: list[onnx.NodeProto] = []
        for node in graph.node:
            layout = next((a for a in node.attribute if a.name == "layout"), None)
            if node.op_type not in ("LSTM", "GRU", "RNN") or layout is None or layout.i != 1:
                nodes.append(node)
                continue
            node.attribute.remove(layout)
            for at, turn in INPUTS.items():
                if at < len(node.input) and node.input[at]:
                    name = f"{node.output[0] or node.output[1]}/input{at}"
                    nodes.append(helper.make_node("Transpose", [node.input[at]], [name], perm=turn))
                    node.input[at] = name
            nodes.append(node)
            for at, turn in OUTPUTS.items():
                if at < len(node.output) and node.output[at]:
                    name = f"{node.output[at]}/steps_first"
                    nodes.append(helper.make_node("Transpose", [name], [node.output[at]], perm=turn))
                    node.output[at] = name
        if len(nodes) > len(graph.node):
            del graph.node[:]
            graph.node.extend(nodes)
