"""LSTM cells, layer-normalised and plain, by the fields of their `CellSpec`."""

from __future__ import annotations

from onnx_export.builders.cells import Cell
from onnx_export.builders.norms import layer_norm


def states(layer) -> dict[str, int]:
    return {"h": layer.output_size, "c": layer.units}


def build(graph, layer, weights, x, states):
    """(f, i, o, g) by the scope; c = s(f) c + s(i) tanh(g); h = s(o) tanh(c), c normalised or not."""
    cell, spec = Cell(graph, layer, weights), layer.spec
    gate = cell.gates(x, states["h"], spec.gates)
    forget = cell.gate(gate["f"], "f", spec.forget_bias)
    enter, leave = (cell.gate(gate[k], k) for k in "io")
    kept = graph.add("Mul", forget, states["c"], name="kept")
    added = graph.add("Mul", enter, cell.candidate(gate["g"], "g"), name="added")
    c = cell.clipped(graph.add("Add", kept, added, name="c"), spec.cell_clip, "c_clipped")

    shown = c
    if spec.cell_norm != "none":
        shown = layer_norm(graph, c, cell.vector("gain_c", otherwise=1.0), cell.vector("bias_c"), layer.eps, "norm_c")
    if spec.cell_norm == "carry":
        c = shown
    h = graph.add("Mul", leave, cell.candidate(shown, "shown"), name="h")
    if "weight_p" in cell:
        h = cell.product("weight_p", h, "projected", bias=cell.vector("bias_p"))
        h = cell.clipped(h, spec.projection_clip, "h_clipped")
    h = cell.zoneout(states["h"], h)
    return h, {"h": h, "c": c}
