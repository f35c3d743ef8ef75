"""Sound norms in subgraphs, functions and behind other nodes."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from gallery.specimen import (
    INT8,
    INT64,
    OK,
    N,
    Specimen,
    decomposed,
    model,
    native,
    node,
    rng,
    specimen,
    value,
    weights,
)


@specimen
def quantised():
    """DequantizeLinear -> norm -> QuantizeLinear: the float norm in between is judged."""
    constants = weights() | {"step": np.float32(0.05), "zero": np.int8(3)}
    nodes = [
        node("QuantizeLinear", "x step zero", "q"),
        node("DequantizeLinear", "q step zero", "dq"),
        native("dq", "n"),
        node("QuantizeLinear", "n step zero", "y"),
    ]
    return Specimen(model(nodes, constants=constants, outputs=[value("y", None, INT8)]))


@specimen
def quantised_scale():
    """A scale stored as integers is still a constant."""
    nodes, constants = decomposed(square="Mul")
    constants["scale_q"] = np.arange(1, N + 1, dtype=np.int8)
    constants["step"] = np.float32(0.1)
    del constants["scale"]
    nodes.insert(0, node("DequantizeLinear", "scale_q step", "scale"))
    return Specimen(model(nodes, (3, N), constants))


@specimen
def residual_before_the_norm():
    nodes = [node("Add", "x skip", "sum"), native("sum")]
    inputs = [value("x", (2, 3, N)), value("skip", (2, 3, N))]
    return Specimen(model(nodes, constants=weights(), inputs=inputs))


@specimen
def norm_whose_input_is_an_output():
    nodes = [node("Relu", "x", "h"), native("h")]
    return Specimen(model(nodes, constants=weights(), outputs=[value("h"), value("y")]))


def if_model(norm_nodes, constants, taken=True):
    then = helper.make_graph(norm_nodes, "then", [], [value("t")])
    other = helper.make_graph([node("Neg", "x", "e")], "else", [], [value("e")])
    nodes = [node("If", "c", "y", then_branch=then, else_branch=other, name="choose")]
    inputs = [value("x", (3, N)), value("c", [], TensorProto.BOOL)]
    feeds = None if taken else {"c": np.array(False)}
    return model(nodes, constants=constants, inputs=inputs), feeds


@specimen
def inside_if():
    built, feeds = if_model([native(y="t")], weights())
    return Specimen(built, input=feeds)


@specimen
def inside_if_decomposed():
    nodes, constants = decomposed(y="t")
    built, feeds = if_model(nodes, constants)
    return Specimen(built, input=feeds)


@specimen
def inside_a_branch_not_taken():
    built, feeds = if_model([native(y="t")], weights(), taken=False)
    return Specimen(built, [("layer", "not exercised", "")], exit_code=2, input=feeds)


@specimen
def inside_loop():
    body = helper.make_graph(
        [node("Add", "h x", "sum"), native("sum", "h_next"), node("Identity", "keep", "keep_next")],
        "body",
        [value("i", [], INT64), value("keep", [], TensorProto.BOOL), value("h", (3, N))],
        [value("keep_next", [], TensorProto.BOOL), value("h_next", (3, N))],
    )
    nodes = [node("Loop", "count true x", "y", body=body, name="loop")]
    return Specimen(model(nodes, constants=weights() | {"count": np.array(3), "true": np.array(True)}))


@specimen
def inside_scan():
    nodes, constants = decomposed(x="sum", y="h_next")
    body = helper.make_graph(
        [node("Add", "h row", "sum"), *nodes, node("Identity", "h_next", "out")],
        "body",
        [value("h", [N]), value("row", [N])],
        [value("h_next", [N]), value("out", [N])],
    )
    nodes = [node("Scan", "h0 x", "h y", body=body, num_scan_inputs=1)]
    constants["h0"] = np.zeros(N, np.float32)
    return Specimen(model(nodes, (5, N), constants, outputs=[value("h"), value("y")]))


@specimen
def inside_scan_with_output_axes():
    """A tap is one more scan output, and each of them has an axis and a direction."""
    body = helper.make_graph(
        [native("row", "n"), node("Identity", "h", "h_next")],
        "body",
        [value("h", [N]), value("row", [N])],
        [value("h_next", [N]), value("n", [N])],
    )
    sides = {"scan_output_axes": [1], "scan_output_directions": [1]}
    nodes = [node("Scan", "h0 x", "h y", body=body, num_scan_inputs=1, **sides)]
    constants = weights() | {"h0": np.zeros(N, np.float32)}
    return Specimen(model(nodes, (5, N), constants, outputs=[value("h"), value("y")]))


@specimen
def inside_if_inside_loop():
    then = helper.make_graph([native("h", "t")], "then", [], [value("t", (3, N))])
    other = helper.make_graph([node("Neg", "h", "e")], "else", [], [value("e", (3, N))])
    body = helper.make_graph(
        [
            node("If", "keep", "h_next", then_branch=then, else_branch=other),
            node("Identity", "keep", "keep_next"),
        ],
        "body",
        [value("i", [], INT64), value("keep", [], TensorProto.BOOL), value("h", (3, N))],
        [value("keep_next", [], TensorProto.BOOL), value("h_next", (3, N))],
    )
    nodes = [node("Loop", "count true x", "y", body=body)]
    return Specimen(model(nodes, constants=weights() | {"count": np.array(2), "true": np.array(True)}))


def function(name, nodes, constants, opset=17):
    stored = [
        helper.make_node("Constant", [], [key], value=numpy_helper.from_array(np.asarray(array)))
        for key, array in constants.items()
    ]
    opsets = [helper.make_opsetid("", opset)]
    return helper.make_function("local", name, ["x"], ["y"], [*stored, *nodes], opsets)


@specimen
def inside_a_local_function():
    calls = [node("Norm", "x", "h", domain="local"), node("Norm", "h", "y", domain="local")]
    built = model(calls, functions=[function("Norm", *decomposed())])
    return Specimen(built, [OK, OK])


@specimen
def inside_a_local_function_native():
    calls = [node("Norm", "x", "y", domain="local")]
    return Specimen(model(calls, functions=[function("Norm", [native()], weights())]))


@specimen
def inside_a_function_of_another_opset():
    """The function cannot be inlined, so its norm cannot be tapped; it is found and linted."""
    calls = [node("Norm", "x", "y", domain="local")]
    built = model(calls, functions=[function("Norm", [native(epsilon=0.0)], weights(), opset=18)])
    return Specimen(built, [("layer", "not exercised", "")], {"eps-zero"}, 1)


@specimen
def residual_and_bias_before_the_norm():
    """Two additions that onnxruntime fuses into SkipLayerNormalization."""
    nodes = [node("Add", "x b0", "shifted"), node("Add", "shifted skip", "sum"), native("sum")]
    inputs = [value("x", (2, 3, N)), value("skip", (2, 3, N))]
    constants = weights() | {"b0": rng().normal(size=N).astype(np.float32)}
    return Specimen(model(nodes, constants=constants, inputs=inputs))


@specimen
def two_norms_in_a_row():
    nodes = [native(y="h"), native("h", "y")]
    return Specimen(model(nodes, constants=weights()), [OK, OK])


@specimen
def same_names_in_both_branches():
    """Sibling graphs may use the same names for different values."""
    branches = []
    for op in ("Neg", "Abs"):
        body = [node(op, "x", "h"), native("h", "t")]
        branches.append(helper.make_graph(body, op, [], [value("t")]))
    nodes = [node("If", "c", "y", then_branch=branches[0], else_branch=branches[1], name="choose")]
    inputs = [value("x", (3, N)), value("c", [], TensorProto.BOOL)]
    built = model(nodes, constants=weights(), inputs=inputs)
    return Specimen(built, [("layer", "not exercised", ""), OK])  # attributes are sorted: else_branch, then_branch
