"""Write a single norm as an ONNX graph from x to y, with the exporter's own tools.

    python examples/onnx/export_norm.py FILE.onnx [KIND]

`export_norm` writes layer, RMS, batch, group, instance and divisive norm: as operators where the opset has them, else
composed of others.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper

from cnorm._core import rounded as rounded_scalar
from cnorm.arguments import whole_number
from onnx_export.builders import norms
from onnx_export.builders.norms import checked_eps
from onnx_export.exporter import finished
from onnx_export.files import write
from onnx_export.graph_builder import GraphBuilder
from onnx_export.options import checked_opset

GROUP_NORM_OPSET = 21  # GroupNormalization has one scale per channel from here on
OF_ROWS = ("layer_norm", "rms_norm")  # norms over the last axes; the others have channels
KINDS = (*OF_ROWS, "batch_norm", "group_norm", "instance_norm", "divisive_norm")


def export_norm(
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
    """Write a norm with given weights as an ONNX graph.

    The graph takes ``x`` and gives ``y`` of the same shape: ``[rows, *weight.shape]`` for "layer_norm" and "rms_norm",
    whose last ``weight.ndim`` axes are normalised together, as with ``axis=-weight.ndim``; ``[samples, n, *space]`` for
    the others. A weight norm has no graph of its own: export ``Linear(*fold_weight_norm(...))``.

    Parameters
    ----------
    kind : str
        "layer_norm", "rms_norm", "batch_norm" (`cnorm.batch_norm_inference`), "group_norm", "instance_norm" or
        "divisive_norm".
    weight : ndarray
        Gain; ones, where the norm has none. For "layer_norm" and "rms_norm" of any shape, float32 or float16; for
        the others float32, shape (n,): of each channel, or for "divisive_norm" of each element of a row.
    bias : ndarray of weight's shape and dtype, optional
        Not for "rms_norm".
    path : str or path-like, optional
        Where to write the file, which is replaced in one step or not at all.
    mean, var : ndarray, shape (n,), float32
        For "batch_norm": the statistics; var is not negative.
    groups : int
        For "group_norm".
    space : int
        How many axes x has besides samples and channels, each of any length; at least 1 for "instance_norm". For
        "divisive_norm", whose x is [rows, n], it is 0.
    sigma, mean_radius, radius
        For "divisive_norm", as in `cnorm.divisive_norm`. The square of sigma must be positive in float32, because 0/0
        is NaN in ONNX.
    eps : float
        Rounded to float32, where it must be positive for the same reason; "batch_norm" allows 0 if no var is 0.
    opset : int
        As in `export`. "layer_norm" is the operator LayerNormalization from 17 on, "group_norm" with space axes
        GroupNormalization from 21 on, "rms_norm" RMSNormalization from 23 on; below they are composed of others, as
        "divisive_norm" always is.

    Returns
    -------
    onnx.ModelProto

    Raises
    ------
    TypeError
        For weights of another type.
    ValueError
        For an unknown kind, shapes that differ, an option that this kind does not have, a missing one that it needs, an
        invalid var, eps, sigma or radius, or an opset out of range.
    OSError
        If the file cannot be written.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(map(repr, KINDS))}, got {kind!r}")
    options = _NormOptions(kind, groups, space, sigma, (mean_radius, radius), eps)
    if kind in OF_ROWS:
        if mean is not None or var is not None:
            raise ValueError(f"mean and var must be None for {kind!r}, which takes them from x")
        stored, shape = _row_weights(kind, weight, bias), ["rows", *np.shape(weight)]
    else:
        stored = _channel_weights(kind, weight, bias, mean, var)
        shape = ["samples", len(weight)]
    options = options.checked(stored)
    shape += [f"space{i}" for i in range(options.space)]
    graph = GraphBuilder(checked_opset(opset), weight.dtype, taken=["x", *stored])
    graph.publish(options.build(graph, stored), "y")
    element = helper.np_dtype_to_tensor_dtype(weight.dtype)
    values = [helper.make_tensor_value_info(name, element, shape) for name in ("x", "y")]
    model = finished(helper.make_graph(graph.nodes, kind, values[:1], values[1:]), graph.opset)
    write(model, stored, path)
    return model


@dataclass(frozen=True)
class _NormOptions:
    """The options of one norm. The attributes are parameters of `export_norm`."""

    kind: str
    groups: int | None
    space: int
    sigma: float
    radii: tuple[int | None, int | None]
    eps: float

    def checked(self, stored: dict[str, np.ndarray]) -> _NormOptions:
        """The options as they are stored in the file; `stored` are the weights."""
        kind, channels = self.kind, len(stored["weight"])
        space = whole_number(self.space, "space", 1 if kind == "instance_norm" else 0)
        if kind in (*OF_ROWS, "divisive_norm") and space:
            raise ValueError(f"space must be 0 for {kind!r}, got {space}")
        if (self.groups is not None) != (kind == "group_norm"):
            raise ValueError("groups must be given for 'group_norm' and for no other kind")
        groups = None if self.groups is None else whole_number(self.groups, "groups", 1)
        if groups is not None and channels % groups:
            raise ValueError(f"groups must divide the number of channels, {channels}, got {groups}")
        radii = [
            None if radius is None else min(whole_number(radius, name, 0), channels - 1)
            for radius, name in zip(self.radii, ("mean_radius", "radius"), strict=True)
        ]
        eps, sigma = rounded_scalar(self.eps, "eps"), rounded_scalar(self.sigma, "sigma")
        if kind == "divisive_norm" and not 2.0**-149 <= sigma * sigma <= float(np.finfo(np.float32).max):
            reason = "where it is 0 and the deviation as well, ONNX would give NaN"
            raise ValueError(f"sigma must be positive, and its square a float32 that is: {reason}, got {sigma:g}")
        if kind not in ("divisive_norm", "batch_norm") or (kind == "batch_norm" and not stored["var"].all()):
            checked_eps(eps)
        return _NormOptions(kind, groups, space, sigma, (radii[0], radii[1]), eps)

    def build(self, graph: GraphBuilder, stored) -> str:
        """Append the nodes and return the name of y."""
        bias = "bias" if "bias" in stored else None
        if self.kind == "layer_norm":
            return norms.layer_norm(graph, "x", "weight", bias, self.eps, "norm", stored["weight"].ndim)
        if self.kind == "rms_norm":
            return norms.rms_norm(graph, "x", "weight", self.eps, "norm", stored["weight"].ndim)
        if self.kind == "batch_norm":
            return batch_norm(graph, "x", "weight", "bias", "mean", "var", self.eps, "norm")
        if self.kind == "instance_norm":
            return instance_norm(graph, "x", "weight", "bias", self.eps, "norm")
        if self.kind == "group_norm":
            return group_norm(graph, "x", self.groups, "weight", "bias", self.eps, "norm", self.space)
        return divisive_norm(graph, "x", "weight", "bias", self.sigma, self.radii, "norm")


def _row_weights(kind: str, weight, bias) -> dict[str, np.ndarray]:
    """The initialisers of a norm over the last axes."""
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
    return stored


def _channel_weights(kind: str, weight, bias, mean, var) -> dict[str, np.ndarray]:
    """The initialisers of a norm with channels, with a bias of zeros if none is given."""
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
    if kind == "batch_norm" and not (var >= 0).all():
        channel = int(np.argmin(var >= 0))
        raise ValueError(f"var must not be negative, got {var[channel]} in channel {channel}")
    return stored


def batch_norm(graph, x: str, gain: str, bias: str, mean: str, var: str, eps: float, name: str) -> str:
    """(x - mean) / sqrt(var + eps) * gain + bias with given statistics of each channel."""
    return graph.add("BatchNormalization", x, gain, bias, mean, var, name=name, epsilon=eps)


def instance_norm(graph, x: str, gain: str, bias: str, eps: float, name: str) -> str:
    """Each channel of each sample over its space."""
    return graph.add("InstanceNormalization", x, gain, bias, name=name, epsilon=eps)


def group_norm(graph, x: str, groups: int, gain: str, bias: str, eps: float, name: str, space: int) -> str:
    """Each group of channels of each sample with their space."""
    if graph.has(GROUP_NORM_OPSET) and space:  # the operator's x is [N, C, D1, ...]
        return graph.add("GroupNormalization", x, gain, bias, name=name, num_groups=groups, epsilon=eps)
    # instance norm with gain 1 of the groups as channels; the gain of each channel is applied after it
    grouped = graph.constant([0, groups, -1], f"{name}_groups", np.int64)
    rows = graph.add("Reshape", x, grouped, name=f"{name}_rows")
    one, zero = graph.constant(np.ones(groups), f"{name}_one"), graph.constant(np.zeros(groups), f"{name}_zero")
    rows = instance_norm(graph, rows, one, zero, eps, f"{name}_normalised")
    shape = graph.add("Shape", x, name=f"{name}_shape")
    y = graph.add("Reshape", rows, shape, name=f"{name}_restored")
    broad = graph.constant([-1] + [1] * space, f"{name}_broad", np.int64)
    gain = graph.add("Reshape", gain, broad, name=f"{name}_gain")
    bias = graph.add("Reshape", bias, broad, name=f"{name}_bias")
    return graph.add("Add", graph.add("Mul", y, gain, name=f"{name}_scaled"), bias, name=name)


def divisive_norm(graph, x: str, gain: str, bias: str, sigma: float, radii, name: str) -> str:
    """v / sqrt(sigma^2 + mean of v^2 over a field) * gain + bias, v = x - mean over a field; radii None: the row."""
    mean = _field_mean(graph, x, radii[0], f"{name}_mean")
    centred = graph.add("Sub", x, mean, name=f"{name}_centred")
    square = graph.add("Mul", centred, centred, name=f"{name}_square")
    power = _field_mean(graph, square, radii[1], f"{name}_power")
    smoothing = graph.constant(sigma * sigma, f"{name}_smoothing")
    root = graph.add("Sqrt", graph.add("Add", power, smoothing, name=f"{name}_power_sigma"), name=f"{name}_root")
    y = graph.add("Div", centred, root, name=f"{name}_normalised")
    return graph.add("Add", graph.add("Mul", y, gain, name=f"{name}_scaled"), bias, name=name)


def _field_mean(graph, x, radius, name):
    """The mean over the neighbours within a radius; a pooling without padding in the count truncates it at the ends."""
    if radius is None:
        return norms.mean(graph, x, name, 1)
    axis = graph.constant([1], f"{name}_axis", np.int64)
    wide = graph.add("Unsqueeze", x, axis, name=f"{name}_wide")
    size = {"kernel_shape": [2 * radius + 1], "pads": [radius, radius], "strides": [1]}
    pooled = graph.add("AveragePool", wide, name=f"{name}_pooled", count_include_pad=0, **size)
    return graph.add("Squeeze", pooled, axis, name=name)


if __name__ == "__main__":
    gain = np.ones(16, np.float32)
    made = export_norm(sys.argv[2] if len(sys.argv) > 2 else "layer_norm", gain, path=sys.argv[1])
    print(f"wrote {sys.argv[1]}: {', '.join(node.op_type for node in made.graph.node)}")
