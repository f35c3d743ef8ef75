"""ConvTranspose1d, MaxPool1d and Permute of frames [channels, positions]."""

from __future__ import annotations

import numpy as np

from onnx_export.builders.conv import flat, grid, product, taken


def build(graph, layer, weights, x, states):
    return _BUILT[layer.kind](graph, layer, weights, x), {}


def _conv_transpose(graph, layer, weights, x):
    if layer.rows:
        return _rounded(graph, layer, weights, x)
    given = [weights[name] for name in ("weight", "bias") if name in weights]
    y = graph.add(
        "ConvTranspose", grid(graph, x, (layer.channels, layer.positions)), *given, name="filtered",
        group=layer.groups, dilations=[layer.dilation], strides=[layer.stride], pads=list(layer.padding),
        output_padding=[layer.output_padding],
    )  # fmt: skip
    return flat(graph, x, y, layer.output_size)


def _rounded(graph, layer, weights, x):
    """The windows of all positions as one product, and of these, for each output, those that have its place."""
    own = {name: value for name, value in weights.items() if name != "bias"}
    turned = graph.add("Transpose", grid(graph, x, (layer.channels, layer.positions)), name="rows", perm=[0, 2, 1])
    windows = product(graph, layer, own, turned, "windows")  # [..., positions, taps * outputs]
    floats = layer.positions * layer.taps * layer.out_channels
    windows = graph.add("Reshape", windows, graph.constant([-1, floats], "all_shape", np.int64), name="all")
    around = graph.constant([0, 0, 0, 1], "around", np.int64)
    at = _window_elements(layer)
    terms = taken(graph, graph.add("Pad", windows, around, name="padded"), at.reshape(-1), "terms")
    shape = graph.constant([-1, layer.out_channels, layer.places, at.shape[-1]], "terms_shape", np.int64)
    axes = graph.constant([-1], "axes", np.int64)
    y = graph.add("ReduceSum", graph.add("Reshape", terms, shape, name="added"), axes, name="sums", keepdims=0)
    if "bias" in weights:
        shape = graph.constant([layer.out_channels, 1], "bias_shape", np.int64)
        y = graph.add("Add", y, graph.add("Reshape", weights["bias"], shape, name="column"), name="biased")
    return flat(graph, x, y, layer.output_size)


def _window_elements(layer) -> np.ndarray:
    """The elements [outputs, places, most] of windows [positions, taps, outputs] that a place adds, or one behind."""
    p, t = np.indices((layer.positions, layer.taps))
    place = p * layer.stride + t * layer.dilation - layer.padding[0]
    found = [np.flatnonzero(place == q) for q in range(layer.places)]
    at = np.full((layer.out_channels, layer.places, max(1, *map(len, found))), place.size * layer.out_channels)
    for q, windows in enumerate(found):
        at[:, q, : len(windows)] = windows * layer.out_channels + np.arange(layer.out_channels)[:, None]
    return at


def _max_pool(graph, layer, weights, x):
    y = graph.add(
        "MaxPool", grid(graph, x, (layer.channels, layer.positions)), name="largest", kernel_shape=[layer.taps],
        dilations=[layer.dilation], strides=[layer.stride], pads=list(layer.padding),
    )  # fmt: skip
    return flat(graph, x, y, layer.output_size)


def _permute(graph, layer, weights, x):
    order = [0, *(axis + 1 for axis in layer.axes)]
    turned = graph.add("Transpose", grid(graph, x, layer.shape), name="turned", perm=order)
    return flat(graph, x, turned, layer.output_size)


_BUILT = {"ConvTranspose1d": _conv_transpose, "MaxPool1d": _max_pool, "Permute": _permute}
