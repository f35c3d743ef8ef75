"""Write what surrounds recurrent operators in one form: layout 0 by transposes, shapes without the number of steps."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnx_export.nodes import all_graphs

__all__ = ["any_steps", "steps_first"]

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


def any_steps(model: onnx.ModelProto) -> None:
    """Write -1, in place, for the number of steps in a stored shape that an operator's y is given.

    PyTorch's newer exporter stores the number of its example, be it open or not. Other numbers the file refuses.
    """
    for graph in all_graphs(model.graph):
        stored = {tensor.name: tensor for tensor in graph.initializer}
        constants = [node for node in graph.node if node.op_type == "Constant"]
        stored |= {node.output[0]: a.t for node in constants for a in node.attribute if a.HasField("t")}
        steps = set()  # values whose first axis is that of the steps
        for node in graph.node:
            if node.op_type in ("LSTM", "GRU", "RNN"):
                steps.update(filter(None, node.output[:1]))
            elif steps.isdisjoint(node.input[:1]):
                continue
            elif node.op_type == "Transpose":
                steps.update(node.output if any(a.ints[:1] == [0] for a in node.attribute) else ())
            elif node.op_type == "Reshape" and len(node.input) > 1 and node.input[1] in stored:
                shape = numpy_helper.to_array(stored[node.input[1]])
                if shape.ndim == 1 and shape.size > 1 and (shape > 0).all():
                    node.input[1] = f"{node.output[0]}/any_steps"
                    opened = np.array([-1, *shape[1:]], np.int64)
                    graph.initializer.append(numpy_helper.from_array(opened, node.input[1]))
