"""A norm by itself as an ONNX graph."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from cnorm.layers import rounded
from onnx_export.builders import norms
from onnx_export.exporter import checked_opset, finished
from onnx_export.files import write
from onnx_export.graph_builder import GraphBuilder

__all__ = ["export_norm"]

KINDS = ("layer_norm", "rms_norm")


def export_norm(kind: str, weight, bias=None, path=None, *, eps: float = 1e-5, opset: int = 17) -> onnx.ModelProto:
    """Write `cnorm.layer_norm` or `cnorm.rms_norm` with given weights as an ONNX graph.

    The graph takes ``x`` [rows, *weight.shape], any number of rows, and gives ``y`` of the same shape: the last
    ``weight.ndim`` axes are normalised together, as with ``axis=-weight.ndim``.

    Parameters
    ----------
    kind : "layer_norm" or "rms_norm"
    weight : ndarray, float32 or float16
        Ones, where the norm has none.
    bias : ndarray of weight's shape and dtype, optional
        For "layer_norm" only.
    path : str or path-like, optional
        Where to write the file. It appears whole or not at all.
    eps : float
        Rounded to float32, and positive there: 0/0 is NaN in ONNX.
    opset : int
        As in `export`. "layer_norm" is the operator LayerNormalization from 17 on, "rms_norm" RMSNormalization
        from 23 on; below they are composed of others.

    Returns
    -------
    onnx.ModelProto

    Raises
    ------
    TypeError
        For weights of another type.
    ValueError
        For an unknown kind, shapes that differ, an eps that is not positive or not finite, an opset out of range.
    OSError
        If the file cannot be written.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(map(repr, KINDS))}, got {kind!r}")
    if kind == "rms_norm" and bias is not None:
        raise ValueError("bias must be None for 'rms_norm', which has none")
    stored = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    for name, array in stored.items():
        if not isinstance(array, np.ndarray) or array.dtype not in (np.float32, np.float16):
            got = getattr(array, "dtype", type(array).__name__)
            raise TypeError(f"{name} must be an array of float32 or float16, got {got}")
        if array.dtype != weight.dtype:
            raise TypeError(f"{name} must have the dtype of weight, {weight.dtype}, got {array.dtype}")
        if array.shape != weight.shape or not array.ndim or not array.size:
            wanted = "at least one element" if name == "weight" else f"the shape of weight, {weight.shape}"
            raise ValueError(f"{name} must have {wanted}, got shape {array.shape}")
    eps = norms.checked_eps(rounded(eps, "eps"))

    graph = GraphBuilder(checked_opset(opset), weight.dtype, taken=["x", *stored])
    if kind == "layer_norm":
        y = norms.layer_norm(graph, "x", "weight", None if bias is None else "bias", eps, "norm", weight.ndim)
    else:
        y = norms.rms_norm(graph, "x", "weight", eps, "norm", weight.ndim)
    graph.publish(y, "y")
    element = helper.np_dtype_to_tensor_dtype(weight.dtype)
    values = [helper.make_tensor_value_info(name, element, ["rows", *weight.shape]) for name in ("x", "y")]
    model = finished(helper.make_graph(graph.nodes, kind, values[:1], values[1:]), graph.opset)
    write(model, stored, path)
    return model
