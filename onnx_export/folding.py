"""Constant folding: nodes that depend on weights and constants only are evaluated when the file is written."""

from __future__ import annotations

import numpy as np
import onnx

from onnx_export.graph.evaluate import evaluate

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
    computed = evaluate([*constants.values(), *folded], weights, results, {"": opset})
    return left + rest, kept | computed
