"""Layer-normalised LSTM cells, driven by the fields of their `CellSpec`."""

from __future__ import annotations

from onnx_export.builders.norms import layer_norm

KIND = "LSTM"
FIRST_OPSET = 13


def states(layer) -> dict[str, int]:
    return {"h": layer.output_size, "c": layer.output_size}


def build(graph, layer, weights, x, states):
    spec, eps = layer.spec, layer.eps

    def norm(value, site, name):
        return layer_norm(graph, value, weights[f"gain_{site}"], weights[f"bias_{site}"], eps, name)

    from_x = graph.add("Gemm", x, weights["weight_x"], name="from_x", transB=1)
    from_h = graph.add("Gemm", states["h"], weights["weight_h"], name="from_h", transB=1)
    if spec.scope != "split":
        raise ValueError(f"model: no ONNX form is known for an LSTM with scope {spec.scope!r}")
    from_x, from_h = norm(from_x, "x", "norm_x"), norm(from_h, "h", "norm_h")
    total = graph.add("Add", from_h, from_x, name="gates_unbiased")
    total = graph.add("Add", total, weights["bias"], name="gates")

    parts = {"num_outputs": 4} if graph.opset >= 18 else {}
    gates = graph.add("Split", total, name=tuple(f"gate_{letter}" for letter in spec.gates), axis=-1, **parts)
    gate = dict(zip(spec.gates, gates, strict=True))
    forget, enter, leave = (graph.add("Sigmoid", gate[k], name=f"{k}") for k in "fio")
    new = graph.add("Tanh", gate["g"], name="g")
    kept = graph.add("Mul", forget, states["c"], name="kept")
    added = graph.add("Mul", enter, new, name="added")
    c = graph.add("Add", kept, added, name="c")

    if spec.cell_norm != "output":
        raise ValueError(f"model: no ONNX form is known for an LSTM with cell_norm {spec.cell_norm!r}")
    shown = graph.add("Tanh", norm(c, "c", "norm_c"), name="shown")
    h = graph.add("Mul", leave, shown, name="h")
    return h, {"h": h, "c": c}
