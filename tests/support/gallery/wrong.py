"""Files that compute another function than their names claim."""

from __future__ import annotations

import numpy as np
from onnx import helper

from gallery.arithmetic import flax_nodes
from gallery.context import function
from gallery.near_misses import misspelt
from gallery.specimen import OK, N, Specimen, decomposed, model, native, node, specimen, value, weights


@specimen
def stored_count_of_another_width():
    """A Flax norm exported with 1/n for another n: structurally a norm, numerically none."""
    nodes, constants = flax_nodes()
    constants["nth"] = np.float32(1 / (2 * N))
    inputs = [value("x", (3, "n"))]
    built = model(nodes, constants=constants, inputs=inputs)
    return Specimen(built, [("layer", "wrong", "file")], exit_code=1, options={"dim": N})


@specimen
def claim_broken_in_the_eighth_digit():
    """std + eps instead of sqrt(var + eps), eps 1e-7: the difference shows in float64 but not in float32."""
    nodes, constants = decomposed(square="Mul", eps=1e-7)
    at = next(i for i, n in enumerate(nodes) if n.op_type == "Add")
    nodes[at : at + 3] = [
        node("Sqrt", "var", "std"),
        node("Add", "std eps", "total"),
        node("Div", "d total", "xhat"),
    ]
    calls = [node("layer_norm", "x", "y", domain="local")]
    built = model(calls, functions=[function("layer_norm", nodes, constants)])
    return Specimen(built, [("~layer", "wrong", "file")], {"near-miss"}, 1)


@specimen
def function_named_layer_norm_that_is_none():
    """A near miss that claims by its function's name to be a layer norm."""
    nodes, constants = decomposed(square="Mul")
    constants["correction"] = np.float32(N / (N - 1))
    at = next(i for i, n in enumerate(nodes) if n.op_type == "Add")
    nodes.insert(at, node("Mul", "var correction", "unbiased"))
    nodes[at + 1] = node("Add", "unbiased eps", "total")
    calls = [node("LayerNorm", "x", "y", domain="local")]
    built = model(calls, functions=[function("LayerNorm", nodes, constants)])
    return Specimen(built, [("~layer", "wrong", "file")], {"near-miss"}, 1)


def broken_claim(*instead, of):
    nodes, constants = misspelt(*instead, of=of)
    built = model([node("LayerNorm", "x", "y", domain="local")], functions=[function("LayerNorm", nodes, constants)])
    return Specimen(built, [], {"unproved-claim"}, 2)


@specimen
def claim_without_a_root_or_an_eps():
    return broken_claim(node("Div", "d var", "xhat"), of=["total", "std", "xhat"])


@specimen
def claim_that_multiplies_by_the_deviation():
    broken = broken_claim(node("Mul", "d std", "xhat"), of=["xhat"])
    return Specimen(broken.model, [("~layer", "wrong", "file")], {"near-miss"}, 1)


@specimen
def claim_that_does_nothing():
    calls = [node("LayerNorm", "x", "y", domain="local")]
    built = model(calls, functions=[function("LayerNorm", [node("Identity", "x", "y")], {})])
    return Specimen(built, [], {"unproved-claim"}, 2)


@specimen
def claim_kept_by_a_function_it_calls():
    """A function LayerNorm that calls another function for its arithmetic, possibly in a branch, is sound."""
    inner = function("Normalise", *decomposed())
    branch = helper.make_graph([node("Normalise", "x", "t", domain="local")], "then", [], [value("t", (3, N))])
    other = helper.make_graph([node("Neg", "x", "e")], "else", [], [value("e", (3, N))])
    body = [node("If", "taken", "y", then_branch=branch, else_branch=other)]
    outer = function("LayerNorm", body, {"taken": np.array(True)})
    outer.opset_import.append(helper.make_opsetid("local", 1))
    built = model([node("LayerNorm", "x", "y", domain="local")], functions=[inner, outer])
    return Specimen(built)


@specimen
def claim_kept_by_a_namesake_of_another_domain():
    idle = function("LayerNorm", [node("Identity", "x", "y")], {})
    idle.domain = "other"
    calls = [node("LayerNorm", "x", "h", domain="local"), node("LayerNorm", "h", "y", domain="other")]
    return Specimen(model(calls, functions=[function("LayerNorm", *decomposed()), idle]), [OK], {"unproved-claim"}, 2)


@specimen
def claim_of_an_unused_function():
    idle = function("LayerNorm", [node("Identity", "x", "y")], {})
    return Specimen(model([native()], constants=weights(), functions=[idle]))
