"""y = row x of a table, for one token id x: Cast and Gather."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto


def build(graph, layer, weights, x, states):
    if graph.dtype == np.float16:
        raise ValueError(f"dtype must be 'float32' for {layer!r}: float16 does not hold all token ids")
    table = weights.get("weight")
    if layer.rows:  # [outputs, tokens]
        table = graph.add("Transpose", weights["rows.weight"], name="table", perm=[1, 0])
    ids = graph.add("Cast", x, name="id", to=TensorProto.INT64)
    y = graph.add("Gather", table, ids, name="rows", axis=0)  # [..., 1, outputs]
    y = graph.add("Squeeze", y, graph.constant([-2], "axis", np.int64), name="y")
    if layer.rows and layer.rows["weight"].rows.dtype != np.float32:
        y = graph.add("Cast", y, name="wide", to=TensorProto.FLOAT)
    if layer.rows and layer.rows["weight"].scales is not None:
        y = graph.add("Mul", y, weights["rows.weight.scales"], name="scaled")
    return y, {}
