"""Replace If nodes by the nodes of the branch that is always taken."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import helper

from onnx_export.nodes import subgraphs

__all__ = ["without_branches"]


def without_branches(model: onnx.ModelProto, taken: Mapping[tuple[str, ...], str]) -> onnx.ModelProto:
    """A copy of a model in which the branches that are known stand in the place of their If nodes.

    Parameters
    ----------
    model : onnx.ModelProto
    taken : mapping of tuple of str to str
        The attribute of the branch, `then_branch` or `else_branch`, for the first output of an If, behind those of
        the If nodes around it.

    Returns
    -------
    onnx.ModelProto
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    nodes = _inlined(copy.graph, copy.graph, taken, ())
    del copy.graph.node[:]
    copy.graph.node.extend(nodes)
    return copy


def _inlined(graph: onnx.GraphProto, main: onnx.GraphProto, taken, around: tuple[str, ...]) -> list[onnx.NodeProto]:
    """The nodes of a graph, those of branches in the place of their If; stored tensors of branches go to `main`."""
    nodes = []
    for node in graph.node:
        place = (*around, node.output[0])
        if node.op_type != "If" or place not in taken:
            nodes.append(node)
            continue
        branch = next(inner for name, inner in subgraphs(node) if name == taken[place])
        inner = _inlined(branch, main, taken, place)
        _rename(branch.initializer, inner, results := [value.name for value in branch.output], "/".join(place) + "/")
        main.initializer.extend(branch.initializer)
        nodes += inner
        nodes += [helper.make_node("Identity", [a], [b]) for a, b in zip(results, node.output, strict=True)]
    return nodes


def _rename(stored, nodes: list[onnx.NodeProto], results: list[str], prefix: str) -> None:
    """Give what a branch computes or stores names of its own: another branch may use the same."""
    names = {tensor.name for tensor in stored} | {name for node in nodes for name in node.output if name}
    for tensor in stored:
        tensor.name = prefix + tensor.name
    pending = list(nodes)
    for node in pending:
        for listed in (node.input, node.output):
            listed[:] = [prefix + name if name in names else name for name in listed]
        for _, inner in subgraphs(node):
            pending += inner.node
            for value in inner.output:
                value.name = prefix + value.name if value.name in names else value.name
    results[:] = [prefix + name if name in names else name for name in results]
