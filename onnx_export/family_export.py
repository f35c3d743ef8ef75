"""Batch, group, instance and divisive norm by themselves as ONNX graphs."""

from __future__ import annotations

import operator

import numpy as np
import onnx
from onnx import TensorProto, helper

from cnorm.layers import rounded
from onnx_export.builders import family
from onnx_export.builders.norms import checked_eps
from onnx_export.exporter import checked_opset, finished
from onnx_export.files import write
from onnx_export.graph_builder import GraphBuilder

__all__ = ["export_family_norm"]

KINDS = ("batch_norm", "group_norm", "instance_norm", "divisive_norm")


def export_family_norm(
    kind: str,
    weight,
    bias=None,
    path=None,
    *,
    mean=None,
    var=None,
    groups: int | None = None,
    space: int = 0,
    sigma: float = 1.0,
    mean_radius: int | None = None,
    radius: int | None = None,
    eps: float = 1e-5,
    opset: int = 17,
) -> onnx.ModelProto:
    """Write a norm of the family with given weights as an ONNX graph from ``x`` to ``y``.

    A weight norm has no graph of its own: export ``Linear(*fold_weight_norm(...))``.

    Parameters
    ----------
    kind : "batch_norm", "group_norm", "instance_norm" or "divisive_norm"
        "batch_norm" is `cnorm.batch_norm_inference`; the others are the functions of these names.
    weight : ndarray, shape (n,), float32
        Gain of each channel, or for "divisive_norm" of each element of a row. Ones, where the norm has none.
    bias : ndarray, shape (n,), float32, optional
    path : str or path-like, optional
        Where to write the file. It appears whole or not at all.
    mean, var : ndarray, shape (n,), float32
        For "batch_norm": the statistics; var is not negative.
    groups : int
        For "group_norm".
    space : int
        How many axes x has besides samples and channels, each of any length; at least 1 for "instance_norm". For
        "divisive_norm", whose x is [rows, n], it is 0.
    sigma, mean_radius, radius
        For "divisive_norm", as in `cnorm.divisive_norm`; the square of sigma is positive in float32, because 0/0 is
        NaN in ONNX.
    eps : float
        Rounded to float32, and positive there for the same reason; for "batch_norm" 0 will do where no var is 0.
    opset : int
        As in `export`. "group_norm" with space axes is the operator GroupNormalization from 21 on; else it is composed
        of others, as "divisive_norm" always is.

    Returns
    -------
    onnx.ModelProto

    Raises
    ------
    TypeError
        For weights of another type.
    ValueError
        For an unknown kind, shapes that differ, an option that this kind has not or needs, a var, eps, sigma or
        radius that can't be used, an opset out of range.
    OSError
        If the file cannot be written.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(map(repr, KINDS))}, got {kind!r}")
    stored = {"weight": weight, "bias": np.zeros_like(weight) if bias is None else bias}
    if kind == "batch_norm":
        stored |= {"mean": mean, "var": var}
    elif mean is not None or var is not None:
        raise ValueError(f"mean and var must be None for {kind!r}, which takes them from x")
    for name, array in stored.items():
        if not isinstance(array, np.ndarray) or array.dtype != np.float32:
            raise TypeError(f"{name} must be an array of float32, got {getattr(array, 'dtype', type(array).__name__)}")
        if array.ndim != 1 or array.shape != weight.shape or not array.size:
            raise ValueError(f"{name} must have one axis, and as many elements as weight, got shape {array.shape}")
    space = _whole(space, "space", 1 if kind == "instance_norm" else 0)
    if kind == "divisive_norm" and space:
        raise ValueError(f"space must be 0 for 'divisive_norm', got {space}")
    if (groups is not None) != (kind == "group_norm"):
        raise ValueError("groups must be given for 'group_norm' and for no other kind")
    if groups is not None and len(weight) % _whole(groups, "groups", 1):
        raise ValueError(f"groups must divide the number of channels, {len(weight)}, got {groups}")
    radii = [
        None if r is None else min(_whole(r, name, 0), len(weight) - 1)
        for r, name in ((mean_radius, "mean_radius"), (radius, "radius"))
    ]
    eps, sigma = (rounded(value, name) for value, name in ((eps, "eps"), (sigma, "sigma")))
    if kind == "divisive_norm" and not 2.0**-149 <= sigma * sigma <= float(np.finfo(np.float32).max):
        reason = "where it is 0 and the deviation as well, ONNX would give NaN"
        raise ValueError(f"sigma must be positive, and its square a float32 that is: {reason}, got {sigma:g}")
    if kind == "batch_norm" and not (var >= 0).all():
        channel = int(np.argmin(var >= 0))
        raise ValueError(f"var must not be negative, got {var[channel]} in channel {channel}")
    if kind in ("group_norm", "instance_norm") or (kind == "batch_norm" and not var.all()):
        checked_eps(eps)

    graph = GraphBuilder(checked_opset(opset), np.float32, taken=["x", *stored])
    if kind == "batch_norm":
        y = family.batch_norm(graph, "x", "weight", "bias", "mean", "var", eps, "norm")
    elif kind == "instance_norm":
        y = family.instance_norm(graph, "x", "weight", "bias", eps, "norm")
    elif kind == "group_norm":
        y = family.group_norm(graph, "x", operator.index(groups), "weight", "bias", eps, "norm", space)
    else:
        y = family.divisive_norm(graph, "x", "weight", "bias", sigma, radii, "norm")
    graph.publish(y, "y")
    shape = ["samples", len(weight), *(f"space{i}" for i in range(space))]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", "y")]
    model = finished(helper.make_graph(graph.nodes, kind, values[:1], values[1:]), graph.opset)
    write(model, stored, path)
    return model


def _whole(value, name, least):
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return operator.index(value)
