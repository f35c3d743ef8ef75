"""Form "sequence": the graph of a step, repeated by the operator Scan, by the operator Loop, or unrolled.

Each function takes the exporter of a model and fills a `GraphBuilder` that has the sequence's inputs. `exporter`
gives ``body(builder, x, states) -> (y, new states)``, the nodes of one step between named values.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper

__all__ = ["LOOPS"]

_PREFIX = "step/"  # prefix of the names in the graph of one step, which must differ from those of the enclosing graph


def _scan(exporter, graph) -> dict[str, str]:
    """Repeat the step by Scan, which slices x along its first axis."""
    body, inputs, outputs = exporter.step_graph(_PREFIX)
    # Scan takes the states before the scanned input
    inputs, outputs = inputs[1:] + inputs[:1], outputs[1:] + outputs[:1]
    graph_of_step = helper.make_graph(body.nodes, "step", inputs, outputs)
    names = [value.name.removeprefix(_PREFIX) for value in inputs]
    return _repeated(graph, exporter, "Scan", names, graph_of_step, num_scan_inputs=1)


def _loop(exporter, graph) -> dict[str, str]:
    """Repeat the step by Loop, which scans no input: the body gathers row `index` of x of the enclosing graph."""
    index, running = f"{_PREFIX}index", f"{_PREFIX}running"
    body, inputs, outputs = exporter.step_graph(_PREFIX, row_of=("x", index))
    still = body.add("Identity", running, name=f"{_PREFIX}still_running")
    scalars = [
        helper.make_tensor_value_info(index, TensorProto.INT64, []),
        helper.make_tensor_value_info(running, TensorProto.BOOL, []),
    ]
    outputs = [helper.make_tensor_value_info(still, TensorProto.BOOL, []), *outputs[1:], outputs[0]]
    graph_of_step = helper.make_graph(body.nodes, "step", [*scalars, *inputs[1:]], outputs)
    if exporter.options.steps is None:
        shape = graph.add("Shape", "x", name="x_shape")
        steps = graph.add("Gather", shape, graph.constant(0, "first", np.int64), name="steps", axis=0)
    else:
        steps = graph.constant(exporter.options.steps, "steps", np.int64)
    always = graph.constant(True, "always", bool)  # optional in the standard, but some runtimes need it
    names = [steps, always, *(value.name.removeprefix(_PREFIX) for value in inputs[1:])]
    return _repeated(graph, exporter, "Loop", names, graph_of_step)


def _repeated(graph, exporter, operator: str, inputs, body, **attributes) -> dict[str, str]:
    states = [row["name"] for row in exporter.states]
    names = (*(f"{name}_last" for name in states), "y_all")
    *new, y = graph.add(operator, *inputs, name=names, node="sequence", body=body, **attributes)
    return {"y": y} | dict(zip(states, new, strict=True))


def _unrolled(exporter, graph) -> dict[str, str]:
    """Append the nodes of every step; nodes that depend on weights only are added once."""
    states = {row["name"]: row["input"] for row in exporter.states}
    ys = []
    for step in range(exporter.options.steps):
        graph.prefix = f"step{step}/"
        x = graph.add("Gather", "x", graph.constant(step, "index", np.int64), name="x", axis=0)
        y, states = exporter.body(graph, x, states)
        graph.scope = ""
        ys.append(graph.add("Unsqueeze", y, graph.constant([0], "axes", np.int64), name="y"))
    graph.prefix = ""
    return {"y": graph.add("Concat", *ys, name="y_all", axis=0)} | states


LOOPS = {"scan": _scan, "loop": _loop, "unrolled": _unrolled}
