"""Constant folding: nodes that depend on weights and constants only are evaluated when the file is written."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper
from onnx.reference import ReferenceEvaluator

__all__ = ["fold"]


def fold(nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray], opset: int):
    """Replace nodes that depend on weights only by initialisers with their results.

    Parameters
    ----------
    nodes : list of onnx.NodeProto
        In topological order, without subgraphs and local functions.
    weights : dict of str to ndarray
        The initialisers.
    opset : int
        Of the nodes.

    Returns
    -------
    nodes : list of onnx.NodeProto
        Those that depend on an input, and the constants they use.
    weights : dict of str to ndarray
        The weights that these nodes use, and the folded results, by name.
    """
    constants = {node.output[0]: node for node in nodes if node.op_type == "Constant"}
    known, folded, rest = {*weights, *constants, ""}, [], []
    for node in nodes:
        if node.op_type == "Constant":
            continue
        if node.input and known.issuperset(node.input):
            folded.append(node)
            known.update(node.output)
        else:
            rest.append(node)
    used = {name for node in rest for name in node.input}
    results = [name for node in folded for name in node.output if name in used]
    kept = {name: array for name, array in weights.items() if name in used}
    left = [node for name, node in constants.items() if name in used]
    return left + rest, kept | _computed([*constants.values(), *folded], results, weights, opset)


def _computed(nodes, results: list[str], weights: dict[str, np.ndarray], opset: int) -> dict[str, np.ndarray]:
    """The values of some names, each rounded to its type after every node, as a runtime does."""
    if not results:
        return {}
    used = {name for node in nodes for name in node.input}
    feeds = {name: array for name, array in weights.items() if name in used}
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feeds.items()
    ]
    outputs = [helper.make_empty_tensor_value_info(name) for name in results]
    graph = helper.make_graph(nodes, "folded", inputs, outputs)
    evaluator = ReferenceEvaluator(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)]))
    return dict(zip(results, evaluator.run(None, feeds), strict=True))
