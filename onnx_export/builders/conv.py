"""Convolutions over time, whose cache of frames is a state, and inside a frame."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from onnx_export.builders import rounded


def states(layer) -> dict[str, int]:
    return {"f": layer.history * layer.channels}


def build(graph, layer, weights, x, states):
    if layer.kind == "Conv1d":
        return _in_frame(graph, layer, weights, x), {}
    frames, new = x, {}
    if states:
        frames = graph.add("Concat", states["f"], x, name="frames", axis=-1)
        new["f"] = part(graph, frames, layer.channels, (layer.history + 1) * layer.channels, "f")
    if layer.rows:
        at = np.arange(layer.taps)[:, None] * layer.dilation * layer.channels + np.arange(layer.channels)
        return product(graph, layer, weights, taken(graph, frames, at.reshape(-1), "window"), "y"), new
    grid_of = grid(graph, frames, (layer.history + 1, layer.channels))
    turned = graph.add("Transpose", grid_of, name="channels", perm=[0, 2, 1])
    y = _conv(graph, weights, turned, "filtered", group=layer.groups, dilations=[layer.dilation])
    return flat(graph, x, y, layer.output_size), new


def _in_frame(graph, layer, weights, x):
    if layer.rows:
        return _rounded_in_frame(graph, layer, weights, x)
    framed, pads = grid(graph, x, (layer.channels, layer.positions)), list(layer.padding)
    if layer.padding_mode == "reflect" and any(pads):
        around = graph.constant([0, 0, pads[0], 0, 0, pads[1]], "around", np.int64)
        framed, pads = graph.add("Pad", framed, around, name="padded", mode="reflect"), [0, 0]
    options = {"group": layer.groups, "dilations": [layer.dilation], "strides": [layer.stride], "pads": pads}
    return flat(graph, x, _conv(graph, weights, framed, "filtered", **options), layer.output_size)


def _rounded_in_frame(graph, layer, weights, x):
    """Each window is a row of the product: [..., places, taps * channels]."""
    at, zero = layer.window_positions(), layer.input_size
    index = np.arange(layer.channels) * layer.positions + at[..., None]
    index = np.where(at[..., None] < 0, zero, index)
    rank = 3 if graph.sequence else 2
    around = graph.constant([0] * (2 * rank - 1) + [1], "around", np.int64)
    windows = taken(graph, graph.add("Pad", x, around, name="padded"), index.reshape(-1), "taken")
    shape = graph.constant([0] * (rank - 1) + [layer.places, -1], "window_shape", np.int64)
    y = product(graph, layer, weights, graph.add("Reshape", windows, shape, name="windows"), "products")
    order = [*range(rank - 1), rank, rank - 1]
    shape = graph.constant([0] * (rank - 1) + [layer.output_size], "y_shape", np.int64)
    return graph.add("Reshape", graph.add("Transpose", y, name="turned", perm=order), shape, name="y")


def product(graph, layer, weights, x, name):
    """x [..., windows] by the rounded matrix, however many axes x has: Gemm takes two."""
    value, scales = weights["rows.weight"], weights.get("rows.weight.scales")
    if scales is not None:
        return rounded.product(graph, x, layer.rows["weight"], value, scales, name, weights.get("bias"))
    wide = graph.add("Cast", value, name=f"{name}_wide", to=TensorProto.FLOAT)
    matrix = graph.add("Transpose", wide, name=f"{name}_weight", perm=[1, 0])
    y = graph.add("MatMul", x, matrix, name=f"{name}_product")
    return graph.add("Add", y, weights["bias"], name=name) if "bias" in weights else y


def _conv(graph, weights, x, name, **options):
    return graph.add("Conv", x, *(weights[one] for one in ("weight", "bias") if one in weights), name=name, **options)


def taken(graph, x, index, name):
    """The elements `index` of the last axis."""
    return graph.add("Gather", x, graph.constant(index, f"{name}_at", np.int64), name=name, axis=-1)


def part(graph, x, start, stop, name):
    """Elements start to stop of the last axis."""
    constants = [graph.constant([value], f"{name}_{end}", np.int64) for end, value in
                 (("start", start), ("stop", stop), ("axis", -1))]  # fmt: skip
    return graph.add("Slice", x, *constants, name=name)


def grid(graph, x, shape):
    """Frames as arrays [rows, *shape], for any leading axes of x."""
    return graph.add("Reshape", x, graph.constant([-1, *shape], "grid_shape", np.int64), name="grid")


def flat(graph, x, y, size):
    """y [rows, channels, places] with the leading axes of x, flattened behind them."""
    if not graph.sequence:
        return graph.add("Reshape", y, graph.constant([-1, size], "y_shape", np.int64), name="y")
    lead = part(graph, graph.add("Shape", x, name="x_shape"), 0, -1, "lead")
    shape = graph.add("Concat", lead, graph.constant([size], "y_size", np.int64), name="y_shape", axis=0)
    return graph.add("Reshape", y, shape, name="y")
