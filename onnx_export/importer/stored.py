"""Tensors that a file stores sparse, as integers with scales or in 16 bits, as plain tensors of float32.

onnxruntime's optimisation rounds what is multiplied by a dequantised matrix, which the standard does not, and a file of
16 bits rounds every result. Neither is in the layers, so such a file is compared without it.
"""

from __future__ import annotations

from math import prod

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnx_export.errors import NotImported
from onnx_export.graph.evaluate import evaluate
from onnx_export.graph.sizes import largest
from onnx_export.nodes import all_graphs

__all__ = ["ROUNDED", "SCALED", "in_float32", "plain"]

MAX_ELEMENTS = 1 << 24  # of one tensor
HALVES = {TensorProto.FLOAT16, TensorProto.BFLOAT16}
TYPES = {"to", "dtype", "output_dtype", "stash_type"}  # attributes that are element types
SCALED = (
    "its matrices of integers are taken as the standard says, products in float32; onnxruntime's optimisation rounds "
    "the frame as well"
)
ROUNDED = "it computes in 16 bits, which the stream does not: it was compared with the same file in float32"


def in_float32(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """A copy in float32 of a file whose inputs of floating point have 16 bits; None for others.

    Elsewhere a cast to 16 bits is a node of its own, which no layer computes.
    """
    kinds = {value.type.tensor_type.elem_type for value in model.graph.input}
    if not kinds & HALVES or kinds & {TensorProto.FLOAT, TensorProto.DOUBLE}:
        return None
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for graph in all_graphs(copy.graph):
        _widen(graph)
    return copy


def _widen(graph: onnx.GraphProto) -> None:
    """16 bits as float32; subgraphs are graphs of their own."""
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type in HALVES:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    attributes = [attribute for node in graph.node for attribute in node.attribute]
    for attribute in attributes:
        if attribute.name in TYPES and attribute.i in HALVES:
            attribute.i = TensorProto.FLOAT
    tensors = [attribute.t for attribute in attributes if attribute.HasField("t")]
    for tensor in (*graph.initializer, *tensors):
        if tensor.data_type in HALVES:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))


def plain(model: onnx.ModelProto) -> bool:
    """Replace, in place, sparse tensors and those with scales; whether there were any of these."""
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 1)
    scaled = False
    for graph in all_graphs(model.graph):
        for sparse in graph.sparse_initializer:
            graph.initializer.append(_dense(sparse, sparse.values.name))
        del graph.sparse_initializer[:]
        known = {tensor.name: tensor for tensor in graph.initializer}
        given = {value.name for value in graph.input}  # such a tensor is a default
        nodes = []
        for node in graph.node:
            for attribute in node.attribute:
                if node.op_type == "Constant" and attribute.name == "sparse_value":
                    attribute.CopyFrom(helper.make_attribute("value", _dense(attribute.sparse_tensor, "")))
            fixed = [name for name in node.input if name in known and name not in given]
            if node.op_type != "DequantizeLinear" or node.domain not in ("", "ai.onnx") or fixed != [*node.input]:
                nodes.append(node)
                continue
            graph.initializer.append(_dequantised(node, [known[name] for name in node.input], opset))
            scaled = True
        if len(nodes) < len(graph.node):
            del graph.node[:]
            graph.node.extend(nodes)
    return scaled


def _dense(sparse: onnx.SparseTensorProto, name: str) -> onnx.TensorProto:
    """The indices are of the flat tensor, or of each of its axes."""
    size, values = prod(sparse.dims), numpy_helper.to_array(sparse.values).ravel()
    at = numpy_helper.to_array(sparse.indices)
    if min(sparse.dims, default=1) < 0 or size > MAX_ELEMENTS:
        raise NotImported(f"a sparse tensor of shape {list(sparse.dims)} is larger than {MAX_ELEMENTS} elements")
    flat = at if at.ndim == 1 else np.ravel_multi_index(tuple(at.T), tuple(sparse.dims))
    if len(np.unique(flat)) < len(flat) or len(flat) != len(values) or (flat < 0).any():
        raise NotImported("a sparse tensor does not have one value for each of its places")
    dense = np.zeros(size, values.dtype)
    dense[flat] = values
    return numpy_helper.from_array(dense.reshape(tuple(sparse.dims)), name)


def _dequantised(node: onnx.NodeProto, tensors: list[onnx.TensorProto], opset: int) -> onnx.TensorProto:
    arrays = list(map(numpy_helper.to_array, tensors))
    if largest(node, arrays, opset) > MAX_ELEMENTS:
        raise NotImported(f"{node.op_type} {node.name!r}: its result is larger than {MAX_ELEMENTS} elements")
    feeds = dict(zip(node.input, arrays, strict=True))
    (result,) = evaluate([node], feeds, node.output, {"": opset}).values()
    return numpy_helper.from_array(result, node.output[0])
