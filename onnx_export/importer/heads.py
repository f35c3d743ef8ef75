"""The end of a file that no layer computes, such as an ArgMax: it is left out, or said where it can be."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import onnx
from onnx import helper

from cnorm.text import quoted
from onnx_export.errors import NotImported
from onnx_export.importer.dimensions import shape_of
from onnx_export.nodes import describe, names_read, subgraphs

__all__ = ["ending_at", "first_alone", "heads"]

FLOATS = {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE}
MOST = 8  # values in one proposal
PRODUCTS = {"MatMul", "Gemm", "Conv", "ConvTranspose", "LSTM", "GRU", "RNN"}


def ending_at(model: onnx.ModelProto, names: Sequence[str], given: Mapping) -> onnx.ModelProto:
    """A copy of a file whose outputs are these values, and those that may be states by their size.

    Parameters
    ----------
    model : onnx.ModelProto
    names : sequence of str
        Outputs, or values that nodes of the main graph compute.
    given : mapping
        The other arguments of `onnx_export.load`, of which `states` and `dims` are used.
    """
    computed = {name for node in model.graph.node for name in node.output if name}
    for name in names:
        if name not in computed:
            known = ", ".join(quoted(value.name) for value in model.graph.output)
            raise NotImported(f"outputs: no node of the file computes {quoted(name)}; its outputs are {known}")
    outputs = {value.name: value for value in model.graph.output}
    kind = next((v.type.tensor_type.elem_type for v in model.graph.input if _is_float(v)), onnx.TensorProto.FLOAT)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    states = [value for name, value in outputs.items() if name not in names and _may_be_state(model, value, given)]
    ends = [outputs.get(name) or helper.make_tensor_value_info(name, kind, None) for name in dict.fromkeys(names)]
    del copy.graph.output[:]
    copy.graph.output.extend([*ends, *states])
    return copy


def heads(model: onnx.ModelProto, given: Mapping, reasons: Sequence[str], read: Callable[..., object]) -> list[str]:
    """Lines for a refusal: the outputs with which a file can be imported without the nodes that the reasons name.

    Parameters
    ----------
    model : onnx.ModelProto
    given : mapping
        How the file was read.
    reasons : sequence of str
    read : callable
        Takes `outputs`; raises an error if the file has no layers then, or they do not compute what it does.
    """
    nodes = [node for node in model.graph.node if _is_named(node, reasons)]
    names = _before(model, given, nodes)
    if names and _reads(read, names):
        left = ", ".join(map(describe, nodes[:MOST]))
        return [f"with outputs={names!r}, which leaves out {left} and what is behind, it has layers"]
    return []


def first_alone(model: onnx.ModelProto, reasons: Sequence[str], read: Callable[..., object]) -> list[str]:
    """A line for a refusal of outputs that are neither y nor states: the first, if a file can be imported with it."""
    first = [value.name for value in model.graph.output][:1]
    if any(": no state, and " in reason for reason in reasons) and _reads(read, first):
        return [f"with outputs={first!r}, which leaves out the others, it has layers"]
    return []


def _before(model: onnx.ModelProto, given: Mapping, nodes: Sequence[onnx.NodeProto]) -> list[str]:
    """The outputs that do not depend on some nodes, and what the nodes read; none if weights are behind them."""
    inputs = {value.name for value in model.graph.input} - {tensor.name for tensor in model.graph.initializer}
    made = {name for node in nodes for name in node.output}
    if not nodes or _has_weights(model.graph, made):
        return []
    computed = _behind(model.graph, inputs - given["inputs"].keys()) - _behind(model.graph, made)
    whole = [v.name for v in model.graph.output if v.name in computed and not _may_be_state(model, v, given)]
    cut = [next((name for name in node.input if name in computed - inputs), None) for node in nodes]
    names = list(dict.fromkeys([*whole, *filter(None, cut)]))
    return names if len(names) <= MOST else []


def _reads(read: Callable[..., object], names: Sequence[str]) -> bool:
    try:
        read(outputs=names)
    except Exception:  # whatever the file, which is untrusted, does without its end; also more memory than it may have
        return False
    return True


def _is_float(value: onnx.ValueInfoProto) -> bool:
    return value.type.tensor_type.elem_type in FLOATS


def _may_be_state(model: onnx.ModelProto, output: onnx.ValueInfoProto, given: Mapping) -> bool:
    """Whether an output may give a state back: one that is named so, or of the size of an input."""
    if output.name in given["states"].values():
        return True
    stored = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if _is_float(value) and value.name not in stored]
    sizes = [_size(value, given["dims"]) for value in inputs]
    return _is_float(output) and _size(output, given["dims"]) in sizes


def _size(value: onnx.ValueInfoProto, dims: Mapping[str, int]) -> int:
    product = 1
    for size in shape_of(value, dims, 1, None):
        product *= size
    return product


def _is_named(node: onnx.NodeProto, reasons: Sequence[str]) -> bool:
    """Whether reasons name a node, or an output of it that is neither y nor a state."""
    operator, _, name = describe(node).partition(" ")
    ends = tuple(f"output {quoted(name)}: no state" for name in node.output)
    return any(each.startswith(ends) or (each.startswith(f"{operator} ") and name in each) for each in reasons)


def _has_weights(graph: onnx.GraphProto, names: Collection[str]) -> bool:
    """Whether products with matrices make some values or are behind them, so that these are not the end of a model."""
    behind = _behind(graph, names)  # these, too
    matrices = {tensor.name for tensor in graph.initializer if len(tensor.dims) > 1}
    matrices |= {node.output[0] for node in graph.node if node.op_type == "Constant"}
    products = [node for node in graph.node if node.op_type in PRODUCTS and matrices.intersection(node.input)]
    return any(behind.intersection((*node.input, *node.output)) for node in products)


def _behind(graph: onnx.GraphProto, names: Collection[str]) -> set[str]:
    """The values that nodes compute of some others, and these."""
    found = {*names} - {""}
    for node in graph.node:  # sorted
        if found.intersection(node.input) or any(found.intersection(names_read(g)) for _, g in subgraphs(node)):
            found.update(filter(None, node.output))
    return found
