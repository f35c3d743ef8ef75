"""The frames of several steps, whose cache is a state."""

from __future__ import annotations

from onnx_export.builders.conv import part


def states(layer) -> dict[str, int]:
    return {"f": layer.history * layer.input_size}


def build(graph, layer, weights, x, states):
    if not states:
        return x, {}
    n, frames = layer.input_size, graph.add("Concat", states["f"], x, name="frames", axis=-1)
    kept = part(graph, frames, n, (layer.history + 1) * n, "f")
    if layer.dilation == 1:
        return frames, {"f": kept}
    taken = [part(graph, frames, at * n, (at + 1) * n, "frame") for at in range(0, layer.history, layer.dilation)]
    return graph.add("Concat", *taken, x, name="y", axis=-1), {"f": kept}
