"""Simple recurrent cells, layer-normalised and plain: h = f(a)."""

from __future__ import annotations

from onnx_export.builders.cells import Cell


def states(layer) -> dict[str, int]:
    return {"h": layer.units}


def build(graph, layer, weights, x, states):
    cell = Cell(graph, layer, weights)
    h = cell.candidate(cell.gates(x, states["h"], "a")["a"], "h")
    h = cell.zoneout(states["h"], h)
    return h, {"h": h}
