"""Run a piece of an ONNX graph: in the types that it has, or in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import onnx
from onnx import helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from onnx_export.float64 import Float64
from onnx_export.kernels import KERNELS

Run = Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]
_QUANTISERS = frozenset({"QuantizeLinear", "DequantizeLinear"})


def evaluate(
    nodes: Iterable[onnx.NodeProto], feeds: Mapping[str, np.ndarray], outputs: Sequence[str], opsets: Mapping[str, int]
) -> dict[str, np.ndarray]:
    """Run nodes by onnx's evaluator, each result rounded to its type, as a runtime does.

    Parameters
    ----------
    nodes : iterable of onnx.NodeProto
        In topological order.
    feeds : mapping of str to ndarray
        Every value that the nodes read and do not compute; others are ignored.
    outputs : sequence of str
        Values to return.
    opsets : mapping of str to int
        The versions of the domains, "" for ONNX's own.

    Raises
    ------
    Exception
        Whatever onnx's kernels raise for a malformed node.
    """
    nodes = list(nodes)
    if not outputs:
        return {}
    used = {name for node in nodes for name in node.input if name}
    fed = {name: value for name, value in feeds.items() if name in used}
    part = helper.make_graph(nodes, "piece", list(map(_untyped, fed)), list(map(_untyped, outputs)))
    return in_types(helper.make_model(part, opset_imports=list(map(helper.make_opsetid, opsets, opsets.values()))))(fed)


def in_types(model: onnx.ModelProto, kernels: Sequence[type[OpRun]] = ()) -> Run:
    """A function that runs a model by onnx's evaluator in its own types, with other kernels for some operators.

    Returns
    -------
    callable
        Of the inputs by name; gives the outputs by name, or whatever onnx's kernels raise for a malformed node.
    """
    evaluator = ReferenceEvaluator(model, new_ops=[*KERNELS, *kernels])

    def run(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        with np.errstate(all="ignore"):
            return dict(zip(evaluator.output_names, evaluator.run(None, dict(feeds)), strict=True))

    return run


def in_float64(part: onnx.ModelProto) -> Run:
    """A function that computes in float64 what a piece computes without its quantisation.

    Parameters
    ----------
    part : onnx.ModelProto
        A model of the nodes alone (`onnx_export.graph.scope.cut`). It is changed: quantisers become Identity.

    Returns
    -------
    callable
        Of the inputs by name; gives the outputs by name, or whatever onnx's kernels raise for a malformed node.
    """
    for node in part.graph.node:
        if node.op_type in _QUANTISERS:  # passed as a pair; constants are dequantised already
            node.CopyFrom(helper.make_node("Identity", node.input[:1], node.output))
    return Float64(part).run


def _untyped(name: str) -> onnx.ValueInfoProto:
    return onnx.ValueInfoProto(name=name)
