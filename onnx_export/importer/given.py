"""Inputs that are neither frames nor states: what may be one, and the values that are given for the others."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx
from onnx import TensorProto, helper

from onnx_export.errors import NotImported
from onnx_export.graph import sizes
from onnx_export.graph.tables import LAYOUT

__all__ = ["FLOATS", "INTEGERS", "constant", "undecided"]

INTEGERS = {
    TensorProto.INT32: np.int32, TensorProto.INT64: np.int64, TensorProto.INT8: np.int8, TensorProto.INT16: np.int16,
    TensorProto.UINT8: np.uint8, TensorProto.UINT16: np.uint16, TensorProto.UINT32: np.uint32,
    TensorProto.UINT64: np.uint64,
}  # fmt: skip
FLOATS = {TensorProto.FLOAT: np.float32, TensorProto.FLOAT16: np.float16, TensorProto.DOUBLE: np.float64}


def undecided(model: onnx.ModelProto, given: Collection[str]) -> list[onnx.ValueInfoProto]:
    """The inputs that are neither frames nor states, and were not given."""
    known = {tensor.name for tensor in model.graph.initializer}.union(given)
    others = [value for value in model.graph.input if value.name not in known]
    return [v for v in others if v.type.tensor_type.elem_type not in FLOATS and not _is_token(model.graph, v)]


def _is_token(graph: onnx.GraphProto, value: onnx.ValueInfoProto) -> bool:
    """Whether an input of integers is read as the indices of Gather nodes alone."""
    if value.type.tensor_type.elem_type not in INTEGERS:
        return False
    moved, read = {value.name}, False
    for node in graph.node:  # sorted
        if moved.intersection(node.input) and node.op_type not in ("Shape", "Size"):
            indices = node.op_type == "Gather" and node.input[0] not in moved
            if not indices and not (node.op_type in LAYOUT and not moved.intersection(node.input[1:])):
                return False
            read |= indices
            moved.update([] if indices else node.output)
    return read


def constant(value: onnx.ValueInfoProto, given) -> np.ndarray:
    """The value of an input that is the same for every frame, in its type and shape."""
    kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    array = np.asarray(given).astype(kind)
    shape = [size or 1 for size in sizes.shape_of(value.type) or ()]
    try:
        return np.broadcast_to(array, shape)
    except ValueError:
        raise NotImported(f"inputs[{value.name!r}] must have shape {shape}, got {list(array.shape)}") from None
