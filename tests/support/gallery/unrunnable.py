"""Files that cannot be run."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper

from gallery.context import function, if_model
from gallery.specimen import INT64, OK, N, Specimen, decomposed, model, native, node, parts, specimen, value, weights
from onnx_export import nodes


@specimen
def custom_domain():
    nodes = [node("Magic", "x", "h", domain="acme"), native("h")]
    return Specimen(model(nodes, constants=weights()), exit_code=2)


@specimen
def input_that_cannot_be_generated():
    nodes = [node("StringNormalizer", "words", "lower"), native()]
    inputs = [value("x", (3, N)), value("words", (2,), TensorProto.STRING)]
    outputs = [value("y"), value("lower", None, TensorProto.STRING)]
    built = model(nodes, constants=weights(), inputs=inputs, outputs=outputs)
    return Specimen(built, exit_code=2)


@specimen
def generated_input_that_does_not_fit():
    """A shape given as input: any generated value is wrong, and the report names the input."""
    nodes = [node("Reshape", "x shape", "h"), native("h")]
    inputs = [value("x", (3, N)), value("shape", (1,), INT64)]
    built = model(nodes, constants=weights(), inputs=inputs)
    return Specimen(built, exit_code=2)


@specimen
def broken_but_linted():
    """A lint that is an error takes precedence over a model that cannot run."""
    nodes = [node("Magic", "x", "h", domain="acme"), native("h", epsilon=-1.0)]
    built = model(nodes, constants=weights())
    return Specimen(built, [("layer", "inaccurate", "kernel")], {"eps-negative"}, 1)


@specimen
def dropout_in_training():
    """A Dropout in training mode draws another mask in every run."""
    constants = weights() | {"ratio": np.float32(0.5), "training": np.array(True)}
    return Specimen(model([node("Dropout", "x ratio training", "h"), native("h")], constants=constants))


@specimen
def random_operator():
    """Two runs have different rows; the norm is then judged in isolation."""
    nodes = [node("RandomNormalLike", "x", "noise"), node("Add", "x noise", "h"), native("h")]
    return Specimen(model(nodes, constants=weights()))


def shuffled(nodes):
    """The same nodes in reverse topological order."""
    return list(reversed(nodes))


@specimen
def nodes_out_of_order():
    """onnxruntime sorts the nodes itself, so files of such converters run."""
    nodes, constants = decomposed()
    return Specimen(model(shuffled(nodes), constants=constants), findings={"order"})


@specimen
def nodes_out_of_order_in_a_branch():
    """The branch uses a value that the outer graph computes later in the list of nodes."""
    return Specimen(_branch([node("Add", "later x", "h"), native("h", "t")]), findings={"order"})


@specimen
def nodes_out_of_order_inside_a_branch():
    """onnxruntime sorts the nodes of the main graph only."""
    built = _branch([native("h", "t"), node("Add", "later x", "h")])
    return Specimen(built, findings={"order"}, exit_code=2)


def _branch(inner):
    then = helper.make_graph(inner, "then", [], [value("t", (3, N))])
    other = helper.make_graph([node("Neg", "x", "e")], "else", [], [value("e", (3, N))])
    nodes = [node("If", "yes", "y", then_branch=then, else_branch=other), node("Abs", "x", "later")]
    return model(nodes, constants=weights() | {"yes": np.array(True)})


@specimen
def nodes_out_of_order_in_a_local_function():
    nodes, constants = decomposed()
    calls = [node("Norm", "x", "y", domain="local")]
    built = model(calls, functions=[function("Norm", shuffled(nodes), constants)])
    return Specimen(built, [("layer", "not exercised", "")], {"order"}, 2)


def long_domain(built):
    """`built` with every use of the operators' domain replaced by the domain's other name."""
    for owner in (built, *built.functions):
        for opset in owner.opset_import:
            opset.domain = opset.domain or "ai.onnx"
    for each in nodes.model_nodes(built):
        each.domain = each.domain or "ai.onnx"
    return built


@specimen
def domain_by_its_long_name():
    return Specimen(long_domain(model(*parts(decomposed()))))


@specimen
def domain_by_both_names():
    """Nodes use one name of the domain and the opset import the other; and the import twice."""
    built = model([native(y="h"), native("h", "y")], constants=weights())
    built.graph.node[0].domain = "ai.onnx"
    built.opset_import.add(domain="ai.onnx", version=17)
    return Specimen(built, [OK, OK])


@specimen
def domain_by_its_long_name_in_a_branch_and_in_a_function():
    nodes, constants = decomposed(y="t")
    built, feeds = if_model([*nodes[:-1], node("Norm", "scaled", "t", domain="local")], constants)
    built.functions.append(function("Norm", [native()], weights()))
    built.opset_import.add(domain="local", version=1)
    return Specimen(long_domain(built), [OK, OK], input=feeds)


@specimen
def negative_dimension():
    """Some exporters write -1 for a dimension that is free."""
    return Specimen(model(*parts(decomposed(), (-1, N))))
