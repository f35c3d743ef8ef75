"""Layers that read others by name: Add, Multiply, Slice, Concat. `weights` has the values that they read, by name."""

from __future__ import annotations

import numpy as np


def build(graph, layer, weights, x, states):
    read = [weights[name] for name in layer.reads]
    if layer.kind == "Slice":
        bounds = {"starts": layer.start, "ends": layer.stop, "axes": -1}
        constants = [graph.constant([value], name, np.int64) for name, value in bounds.items()]
        return graph.add("Slice", *read, *constants, name="y"), {}
    if layer.kind == "Concat":
        return graph.add("Concat", *read, name="y", axis=-1), {}
    return graph.add({"Add": "Add", "Multiply": "Mul"}[layer.kind], x, *read, name="y"), {}
