"""GRU cells, layer-normalised and plain, by the fields of their `CellSpec`."""

from __future__ import annotations

from onnx_export.builders.cells import Cell


def states(layer) -> dict[str, int]:
    return {"h": layer.units}


def build(graph, layer, weights, x, states):
    """z and the candidate n by scope and reset; h = (1 - s(z)) h + s(z) n, or z and 1 - z exchanged."""
    cell, spec, before = Cell(graph, layer, weights), layer.spec, states["h"]
    z, n = _CANDIDATES[spec.reset](cell, x, before)
    z = cell.gate(z, "z", spec.update_bias)
    rest = graph.add("Sub", graph.constant(1, "one"), z, name="z_rest")
    of_old, of_new = (z, rest) if spec.update == "keep" else (rest, z)
    old = graph.add("Mul", of_old, before, name="old")
    new = graph.add("Mul", of_new, n, name="new")
    h = cell.zoneout(before, graph.add("Add", old, new, name="h"))
    return h, {"h": h}


def _after(cell, x, h):
    """n = tanh(a_n of x + s(r) (a_n of h + bias_h)): the reset gate acts between two products."""
    graph, order = cell.graph, cell.spec.gates.replace("n", "") + "n"
    both = order[:2]
    if cell.spec.scope == "none":
        bias_x = cell.sum((cell.vector(p, order) for p in ("bias", "bias_x")), "bias_outside")
        from_x = {order: cell.product("weight_x", x, "from_x", order, bias_x)}
        from_h = {order: cell.product("weight_h", h, "from_h", order, cell.vector("bias_h", order))}
    else:
        from_x, from_h = cell.split_norms(x, h, order)
        from_x = cell.with_bias(from_x, cell.vector("bias", order), order)
    from_x, from_h = (cell.cut(v, [both, "n"], f"from_{k}") for k, v in (("x", from_x), ("h", from_h)))
    gate = cell.cut({both: graph.add("Add", from_h[both], from_x[both], name="gates")}, list(both), "gate")
    reset = graph.add("Mul", cell.gate(gate["r"], "r"), from_h["n"], name="reset")
    return gate["z"], cell.candidate(graph.add("Add", from_x["n"], reset, name="gate_n"), "n")


def _candidate(cell, x, h):
    """n = tanh(s(r) a_n): the reset gate acts on the whole candidate."""
    gate = cell.gates(x, h, cell.spec.gates)
    reset = cell.graph.add("Mul", cell.gate(gate["r"], "r"), gate["n"], name="reset")
    return gate["z"], cell.candidate(reset, "n")


def _before(cell, x, h):
    """n = tanh(a_n of x + W_n (s(r) h)): the reset gate acts before the product."""
    graph, order = cell.graph, cell.spec.gates.replace("n", "") + "n"
    both = order[:2]
    bias = cell.sum((cell.vector(p, order) for p in ("bias", "bias_x", "bias_h")), "bias")
    from_x = cell.cut({order: cell.product("weight_x", x, "from_x", order, bias)}, [both, "n"], "from_x")
    gates = graph.add("Add", cell.product("weight_h", h, "from_h", both), from_x[both], name="gates")
    gate = cell.cut({both: gates}, list(both), "gate")
    reset = graph.add("Mul", cell.gate(gate["r"], "r"), h, name="reset")
    from_h = cell.product("weight_h", reset, "from_reset", "n")
    return gate["z"], cell.candidate(graph.add("Add", from_x["n"], from_h, name="gate_n"), "n")


_CANDIDATES = {"after": _after, "candidate": _candidate, "before": _before}
