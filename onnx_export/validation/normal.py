"""The normal form of a norm, in which it can be compared with the same norm of another file, precision or layout."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto, helper

from onnx_export.graph.scope import op, unit_roundoff
from onnx_export.validation.lock import value_hash
from onnx_export.validation.norm import Norm

_PROJECTIONS = 8
_MOST_MOVES = 8


def normal_form(norm: Norm) -> dict[str, Any]:
    """What a norm does: plain data for `lock.compare`.

    Returns
    -------
    dict
        axes : list of int or None
            Counted from the last where the rank is known, in the layout before the Transposes that lead to the norm;
            empty where x has no such axis.
        scale, bias : dict
            Of `parameter`.
        narrow : bool
            Whether the statistics are of a narrower type than x.
    """
    known = TensorProto.UNDEFINED not in (norm.compute_dtype, norm.scope.dtype(norm.x))
    return {
        "axes": _axes(norm),
        "scale": parameter(norm, norm.scale, 1.0),
        "bias": parameter(norm, norm.bias, 0.0),
        "narrow": known and unit_roundoff(norm.compute_dtype) > unit_roundoff(norm.scope.dtype(norm.x)),
    }


def _axes(norm: Norm) -> list[int] | None:
    if norm.axes is None:
        return None
    shape = norm.scope.shape(norm.x)
    axes = [axis - len(shape) if shape is not None and axis >= 0 else axis for axis in norm.axes]
    if shape is not None and any(axis >= 0 for axis in axes):
        return []
    name = norm.x
    for _ in range(_MOST_MOVES):
        node = norm.scope.producer(name)
        if node is None or op(node) not in ("Transpose", "Identity", "Cast") or any(axis >= 0 for axis in axes):
            break
        if op(node) == "Transpose":
            order = next((helper.get_attribute_value(a) for a in node.attribute if a.name == "perm"), None)
            if not order or max(-axis for axis in axes) > len(order):
                break
            axes = [order[axis] - len(order) for axis in axes]
        name = node.input[0]
    return sorted(axes)


def parameter(norm: Norm, name: str, neutral: float) -> dict[str, Any]:
    """A scale or bias as it acts on the elements: without axes along which it is constant, nothing if it is neutral.

    Returns
    -------
    dict
        hash : str
            Empty for none, "computed" for one that the graph computes.
        sketch : list of float
            Projections on random signs, over the root of the number of elements, and its largest magnitude: nearly
            equal arrays have nearly equal sketches.
        type : str
            "float64", ..., of the stored values; "int8" where they are quantised.
    """
    if not name:
        return {"hash": "", "sketch": [], "type": ""}
    value = norm.scope.constant(name)
    if value is None:
        return {"hash": "computed", "sketch": [], "type": ""}
    kind = value.dtype.name
    producer = norm.scope.producer(name)
    if producer is not None and op(producer) == "DequantizeLinear":
        kind = "int8"
    wide = _reduced(value.astype(np.float64))
    if wide.size and np.max(np.abs(wide - neutral)) <= (1 / 254 if kind == "int8" else 0.0):
        return {"hash": "", "sketch": [], "type": kind}
    signs = np.random.default_rng(wide.size).choice([-1.0, 1.0], size=(_PROJECTIONS, wide.size))
    flat = np.nan_to_num(wide.ravel())
    sketch = [*(signs @ flat / np.sqrt(flat.size)), float(np.max(np.abs(flat), initial=0.0))]
    return {"hash": value_hash(wide), "sketch": [float(each) for each in sketch], "type": kind}


def _reduced(value: np.ndarray) -> np.ndarray:
    """`value` with length 1 along every axis along which it is constant."""
    for axis in range(value.ndim):
        first = np.take(value, [0], axis=axis) if value.shape[axis] else value
        if value.shape[axis] and (value == first).all():
            value = first
    return value
