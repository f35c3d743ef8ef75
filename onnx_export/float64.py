"""Evaluate an ONNX graph in float64, whatever precision it was written for.

No runtime executes a float32 graph in float64, so the graph is rewritten: every float16, bfloat16 and
float32 type in it becomes float64, while the stored *values* (weights, epsilon) stay the ones in the file.
What comes out is what the file says, free of the rounding of any particular kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper, inliner, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

NARROW = frozenset({TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT})

# Attributes that hold an element type as an integer; `to` belongs to Cast.
_TYPE_ATTRIBUTES = frozenset({"to", "dtype", "output_dtype", "output_datatype"})
# Without `dtype`, these produce float32 (the others follow their input).
_FLOAT32_BY_DEFAULT = frozenset({"EyeLike", "RandomNormal", "RandomUniform"})
_WINDOWS = frozenset({"BlackmanWindow", "HammingWindow", "HannWindow", "MelWeightMatrix"})


def widen(model: onnx.ModelProto) -> onnx.ModelProto:
    """Copy `model` with every floating type narrower than float64 replaced by float64.

    Initialisers, Constants, inputs, outputs, value_info, Cast targets and operator defaults are widened, in
    the main graph, its subgraphs and its local functions (which are inlined where their opset allows it, so
    that types passed as attributes are seen). Float attributes such as epsilon cannot be wider than float32
    in ONNX and keep the stored float32 value. `stash_type` is removed: `Float64` computes in float64.

    Parameters
    ----------
    model : onnx.ModelProto
        Any model whose tensors are in memory.

    Returns
    -------
    onnx.ModelProto
        A new model. It is made for `Float64`: some operators (Resize, for one) do not allow float64 by the
        letter of the standard, so the checker may refuse it.

    Raises
    ------
    ValueError
        If a tensor lies in an external file that has not been read.
    """
    if model.functions:
        wide = inliner.inline_local_functions(model)
    else:
        wide = onnx.ModelProto()
        wide.CopyFrom(model)
    _widen_graph(wide.graph)
    for function in wide.functions:
        _widen_nodes(function.node)
        for info in function.value_info:
            _widen_type(info.type)
        for attribute in function.attribute_proto:
            _widen_attribute(attribute)
    return wide


class Float64:
    """Runs a model in float64.

    Parameters
    ----------
    model : onnx.ModelProto
        Any model; it is widened first (see `widen`) and is not changed.

    Attributes
    ----------
    inputs, outputs : list of str
        Names of the graph inputs that must be fed (those without an initialiser) and of its outputs.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        wide = widen(model)
        stored = {tensor.name for tensor in wide.graph.initializer}
        self.inputs = [value.name for value in wide.graph.input if value.name not in stored]
        self.outputs = [value.name for value in wide.graph.output]
        self._evaluator = _Evaluator(wide)

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Evaluate the graph.

        Parameters
        ----------
        feeds : mapping of str to array
            One array for each of `inputs`; floating arrays are widened to float64, others taken as they are.

        Returns
        -------
        dict of str to ndarray
            One array for each of `outputs`.

        Raises
        ------
        ValueError
            If an input is missing.
        """
        missing = [name for name in self.inputs if name not in feeds]
        if missing:
            raise ValueError(f"feeds: missing {missing}, the model wants {self.inputs}")
        wide = {name: _wide_array(value) for name, value in feeds.items()}
        with np.errstate(all="ignore"):
            return dict(zip(self.outputs, self._evaluator.run(None, wide), strict=True))


def _wide_array(value: np.ndarray) -> np.ndarray:
    value = np.asarray(value)
    # ml_dtypes.bfloat16 has kind "V"; casting it is exact, like every other widening here
    floating = value.dtype.kind == "f" or value.dtype.name == "bfloat16"
    return value.astype(np.float64) if floating else value


# ---------------------------------------------------------------------------------------------- widening


def _widen_graph(graph: onnx.GraphProto) -> None:
    for value in (*graph.input, *graph.output, *graph.value_info):
        _widen_type(value.type)
    for tensor in graph.initializer:
        _widen_tensor(tensor)
    for sparse in graph.sparse_initializer:
        _widen_tensor(sparse.values)
    _widen_nodes(graph.node)


def _widen_nodes(nodes: Iterable[onnx.NodeProto]) -> None:
    for node in nodes:
        for attribute in node.attribute:
            _widen_attribute(attribute)
        _widen_defaults(node)


def _widen_defaults(node: onnx.NodeProto) -> None:
    """Spell out the defaults and drop the attributes that would bring float32 back."""
    names = {attribute.name for attribute in node.attribute}
    if node.op_type in _FLOAT32_BY_DEFAULT and "dtype" not in names:
        node.attribute.append(helper.make_attribute("dtype", TensorProto.DOUBLE))
    if node.op_type in _WINDOWS and "output_datatype" not in names:
        node.attribute.append(helper.make_attribute("output_datatype", TensorProto.DOUBLE))
    if node.op_type == "ConstantOfShape" and "value" not in names:
        node.attribute.append(helper.make_attribute("value", numpy_helper.from_array(np.zeros(1))))
    if "stash_type" in names:
        _replace_attributes(node, [a for a in node.attribute if a.name != "stash_type"])
    if node.op_type == "Constant" and names & {"value_float", "value_floats"}:
        (old,) = node.attribute
        value = np.array(old.f if old.name == "value_float" else list(old.floats), np.float64)
        _replace_attributes(node, [helper.make_attribute("value", numpy_helper.from_array(value))])


def _replace_attributes(node: onnx.NodeProto, attributes: list[onnx.AttributeProto]) -> None:
    kept = []
    for attribute in attributes:  # copies: clearing the field empties the originals
        kept.append(onnx.AttributeProto())
        kept[-1].CopyFrom(attribute)
    node.ClearField("attribute")
    node.attribute.extend(kept)


def _widen_attribute(attribute: onnx.AttributeProto) -> None:
    if attribute.name in _TYPE_ATTRIBUTES and attribute.i in NARROW:
        attribute.i = TensorProto.DOUBLE
    if attribute.HasField("t"):
        _widen_tensor(attribute.t)
    if attribute.HasField("sparse_tensor"):
        _widen_tensor(attribute.sparse_tensor.values)
    if attribute.HasField("tp"):
        _widen_type(attribute.tp)
    if attribute.HasField("g"):
        _widen_graph(attribute.g)
    for tensor in attribute.tensors:
        _widen_tensor(tensor)
    for sparse in attribute.sparse_tensors:
        _widen_tensor(sparse.values)
    for kind in attribute.type_protos:
        _widen_type(kind)
    for graph in attribute.graphs:
        _widen_graph(graph)


def _widen_type(kind: onnx.TypeProto) -> None:
    which = kind.WhichOneof("value")
    if which in ("tensor_type", "sparse_tensor_type"):
        tensor = getattr(kind, which)
        if tensor.elem_type in NARROW:
            tensor.elem_type = TensorProto.DOUBLE
    elif which in ("sequence_type", "optional_type"):
        _widen_type(getattr(kind, which).elem_type)
    elif which == "map_type":
        _widen_type(kind.map_type.value_type)


def _widen_tensor(tensor: onnx.TensorProto) -> None:
    if tensor.data_type not in NARROW:
        return
    if tensor.data_location == TensorProto.EXTERNAL:
        raise ValueError(f"model: tensor {tensor.name!r} lies in an external file that has not been read")
    wide = numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name)
    tensor.CopyFrom(wide)


# ------------------------------------------------------------------------------------------- norm kernels
# The reference evaluator refuses some stash types, expands GroupNormalization into a body that casts to
# float32, and knows none of onnxruntime's own operators. Formulas: the ONNX operator documentation, and
# onnxruntime's ContribOperators.md for the domain com.microsoft.


def _eps(epsilon: float | None, default: float) -> float:
    return float(np.float32(default if epsilon is None else epsilon))


def standardise(x: np.ndarray, axes: tuple[int, ...], eps: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Subtract the mean over `axes` and divide by sqrt(var + eps), var centred and biased.

    Returns
    -------
    xhat, mean, rstd : ndarray
        `xhat` has the shape of `x`, the statistics keep the reduced axes with length 1. A row with
        var + eps = 0 has xhat = 0, the limit for eps -> 0.
    """
    mean = np.mean(x, axis=axes, keepdims=True)
    d = x - mean
    d = d - np.mean(d, axis=axes, keepdims=True)  # takes out what rounding the mean put in
    xhat, rstd = _divide_rms(d, axes, eps)
    return xhat, mean, rstd


def _divide_rms(x: np.ndarray, axes: tuple[int, ...], eps: float) -> tuple[np.ndarray, np.ndarray]:
    power = np.mean(x * x, axis=axes, keepdims=True) + eps
    with np.errstate(all="ignore"):
        rrms = 1 / np.sqrt(power)
        return np.where(power == 0, 0.0, x * rrms), rrms


def _suffix(x: np.ndarray, axis: int | None) -> tuple[int, ...]:
    axis = -1 if axis is None else axis
    return tuple(range(axis + x.ndim if axis < 0 else axis, x.ndim))


class LayerNormalization(OpRun):
    def _run(self, x, scale, bias=None, axis=-1, epsilon=None, **_):
        xhat, mean, rstd = standardise(x, _suffix(x, axis), _eps(epsilon, 1e-5))
        y = xhat * scale
        return (y if bias is None else y + bias), mean, rstd


class RMSNormalization(OpRun):
    def _run(self, x, scale, axis=-1, epsilon=None, **_):
        return (_divide_rms(x, _suffix(x, axis), _eps(epsilon, 1e-5))[0] * scale,)


class SimplifiedLayerNormalization(OpRun):
    def _run(self, x, scale, axis=-1, epsilon=None, **_):
        xhat, rstd = _divide_rms(x, _suffix(x, axis), _eps(epsilon, 1e-5))
        return xhat * scale, rstd


class BatchNormalization(OpRun):
    """onnx's own takes the statistics of the batch in every model below opset 14."""

    def _run(self, x, scale, bias, mean, var, epsilon=None, momentum=None, training_mode=None, **_):
        per_channel, eps = (-1,) + (1,) * (x.ndim - 2), _eps(epsilon, 1e-5)
        if not training_mode:
            d = x - mean.reshape(per_channel)
            xhat = d / np.sqrt(var.reshape(per_channel) + eps)
            return (xhat * scale.reshape(per_channel) + bias.reshape(per_channel),)
        axes, share = (0, *range(2, x.ndim)), 0.9 if momentum is None else momentum
        xhat = standardise(x, axes, eps)[0]
        averages = (old * share + new * (1 - share) for old, new in ((mean, x.mean(axes)), (var, x.var(axes))))
        return xhat * scale.reshape(per_channel) + bias.reshape(per_channel), *averages


class GroupNormalization(OpRun):
    """Scale and bias are per channel from opset 21, per group in opset 18; their length tells which."""

    def _run(self, x, scale, bias, num_groups=None, epsilon=None, **_):
        channels, ones = x.shape[1], (1,) * (x.ndim - 2)
        groups = x.reshape(x.shape[0], num_groups, channels // num_groups, *x.shape[2:])
        y = standardise(groups, tuple(range(2, groups.ndim)), _eps(epsilon, 1e-5))[0].reshape(x.shape)
        repeat = channels // len(scale)
        return (y * np.repeat(scale, repeat).reshape(-1, *ones) + np.repeat(bias, repeat).reshape(-1, *ones),)


class InstanceNormalization(OpRun):
    def _run(self, x, scale, bias, epsilon=None, **_):
        ones = (1,) * (x.ndim - 2)
        xhat = standardise(x, tuple(range(2, x.ndim)), _eps(epsilon, 1e-5))[0]
        return (xhat * scale.reshape(-1, *ones) + bias.reshape(-1, *ones),)


class SkipLayerNormalization(OpRun):
    op_domain = "com.microsoft"

    def _run(self, x, skip, gamma, beta=None, bias=None, epsilon=None, **_):
        total = x + skip if bias is None else x + skip + bias
        xhat, mean, rstd = standardise(total, (-1,), _eps(epsilon, 1e-12))
        y = xhat * gamma
        return (y if beta is None else y + beta), mean, rstd, total


class SkipSimplifiedLayerNormalization(OpRun):
    op_domain = "com.microsoft"

    def _run(self, x, skip, gamma, bias=None, epsilon=None, **_):
        total = x + skip if bias is None else x + skip + bias
        xhat, rrms = _divide_rms(total, (-1,), _eps(epsilon, 1e-12))
        return xhat * gamma, rrms, rrms, total


class EmbedLayerNormalization(OpRun):
    op_domain = "com.microsoft"

    def _run(self, ids, segments, words, positions, kinds, gamma, beta, mask=None, where=None, **attributes):
        total = words[ids] + (positions[: ids.shape[1]] if where is None else positions[where])
        if segments is not None:
            total = total + kinds[segments]
        lengths = np.zeros(len(ids), np.int32) if mask is None else mask.sum(axis=1).astype(np.int32)
        eps = _eps(attributes.get("epsilon"), 1e-12)
        return standardise(total, (-1,), eps)[0] * gamma + beta, lengths, total


def _as_contrib(kernel: type[OpRun]) -> type[OpRun]:
    return type(kernel.__name__, (kernel,), {"op_domain": "com.microsoft"})


_NORMS: list[Callable[..., OpRun]] = [
    LayerNormalization,
    RMSNormalization,
    SimplifiedLayerNormalization,
    BatchNormalization,
    GroupNormalization,
    InstanceNormalization,
    SkipLayerNormalization,
    SkipSimplifiedLayerNormalization,
    EmbedLayerNormalization,
    _as_contrib(LayerNormalization),
    _as_contrib(SimplifiedLayerNormalization),
]


class _Evaluator(ReferenceEvaluator):
    """onnx's evaluator with the kernels above, in subgraphs and local functions too."""

    def __init__(self, proto, new_ops=None, **options):
        super().__init__(proto, new_ops=[*_NORMS, *(new_ops or [])], **options)
