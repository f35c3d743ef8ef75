"""Large initialisers, held once in memory for all copies of a model and all its sessions.

A protobuf message is copied whole by shape inference, by every tapped copy of the model and by every session. Without
the large initialisers these copies are small; `ort.Session` gets the arrays beside the message.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

_SMALLEST = 1 << 16  # bytes
_TYPES = frozenset({TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.INT8, TensorProto.UINT8})


def set_aside(model: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Take the large initialisers out of the main graph.

    Parameters
    ----------
    model : onnx.ModelProto
        Emptied of them; not to be used any more.

    Returns
    -------
    model : onnx.ModelProto
        A new message, in which these tensors name a file of external data that does not exist. The old one still holds
        the memory of the large ones.
    weights : dict of str to ndarray
        The arrays by name, read-only.
    """
    weights: dict[str, np.ndarray] = {}
    inputs = {value.name for value in model.graph.input}  # a default that the caller may replace
    for tensor in model.graph.initializer:
        stored = tensor.raw_data if tensor.data_type in _TYPES and tensor.name not in inputs else b""
        if len(stored) >= _SMALLEST:
            dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type)).newbyteorder("<")
            weights[tensor.name] = np.frombuffer(stored, dtype).reshape(tuple(tensor.dims))
            tensor.ClearField("raw_data")
            tensor.data_location = TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value="held in memory")
    if not weights:
        return model, weights
    rest = onnx.ModelProto()
    rest.CopyFrom(model)
    return rest, weights


def put_back(model: onnx.ModelProto, weights: dict[str, np.ndarray]) -> None:
    """Store the weights in their tensors again, in place."""
    for tensor in model.graph.initializer:
        if tensor.name in weights and tensor.data_location == TensorProto.EXTERNAL:
            tensor.raw_data = weights[tensor.name].tobytes()
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
