"""Evaluate an ONNX graph in float64, whatever precision it was written for.

No runtime executes a float32 graph in float64, so the graph is rewritten: every float16, bfloat16 and float32 type in
it becomes float64, while the stored *values* (weights, epsilon) stay as they are in the file. The result is that of the
file's own formula, without the float32 rounding of a particular kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from onnx_export.kernels import KERNELS
from onnx_export.nodes import inlined
from onnx_export.operators import kernels
from onnx_export.quantizer import DOMAIN, Decisions, Variation, Varied, kernel, replace_quantizers
from onnx_export.recurrent import KERNELS as RECURRENT

NARROW = frozenset({TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT})

# Attributes whose integer value is an element type; `to` is that of Cast.
_TYPE_ATTRIBUTES = frozenset({"to", "dtype", "output_dtype", "output_datatype"})
# These produce float32 without an attribute `dtype`; other operators take the type of their input.
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
        A new model, for `Float64`. The standard does not allow float64 for some operators, such as Resize, so onnx's
        checker may reject it.

    Raises
    ------
    ValueError
        If a tensor is external data that has not been read.
    """
    if model.functions:
        wide = inlined(model)
    else:
        wide = onnx.ModelProto()
        wide.CopyFrom(model)
    stored = {tensor.name for tensor in wide.graph.initializer}
    if _replace_quantizers(wide.graph, {value.name for value in wide.graph.input} - stored):
        wide.opset_import.append(helper.make_opsetid(DOMAIN, 1))
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
        wide, self._decisions = widen(model), Decisions()
        stored = {tensor.name for tensor in wide.graph.initializer}
        self.inputs = [value.name for value in wide.graph.input if value.name not in stored]
        self.outputs = [value.name for value in wide.graph.output]
        self._evaluator = _Evaluator(wide, [kernel(self._decisions), Varied])

    def run(self, feeds: Mapping[str, np.ndarray], *, vary: Variation | None = None) -> dict[str, np.ndarray]:
        """Evaluate the graph.

        Parameters
        ----------
        feeds : mapping of str to array
            One array for each of `inputs`; floating arrays are widened to float64, others taken as they are.
        vary : Variation, optional
            The feeds are near those of the last call: see `onnx_export.quantizer.Decisions.vary`.

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
        if vary is None:
            self._decisions.follow()
        else:
            self._decisions.vary(vary)
        with np.errstate(all="ignore"):
            return dict(zip(self.outputs, self._evaluator.run(None, wide), strict=True))


def _wide_array(value: np.ndarray) -> np.ndarray:
    value = np.asarray(value)
    # ml_dtypes.bfloat16 has kind "V"; casting it is exact, like all widening here
    floating = value.dtype.kind == "f" or value.dtype.name == "bfloat16"
    return value.astype(np.float64) if floating else value


# ---------------------------------------------------------------------------------------------- widening


def _replace_quantizers(graph: onnx.GraphProto, inputs: set[str]) -> bool:
    """Replace the quantisers of a graph and its subgraphs; a subgraph's inputs may be computed."""
    found = replace_quantizers(graph, inputs)
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                found |= _replace_quantizers(inner, set())
    return found


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
    """Make default types explicit, as float64, and remove attributes that would make a result float32."""
    names = {attribute.name for attribute in node.attribute}
    if node.op_type in _FLOAT32_BY_DEFAULT and "dtype" not in names:
        node.attribute.append(helper.make_attribute("dtype", TensorProto.DOUBLE))
    if node.op_type in _WINDOWS and "output_datatype" not in names:
        node.attribute.append(helper.make_attribute("output_datatype", TensorProto.DOUBLE))
    if node.op_type == "ConstantOfShape" and "value" not in names:
        node.attribute.append(helper.make_attribute("value", numpy_helper.from_array(np.zeros(1))))
    for i, attribute in reversed(list(enumerate(node.attribute))):
        if attribute.name == "stash_type":
            del node.attribute[i]
    if node.op_type == "Constant" and names & {"value_float", "value_floats"}:
        (old,) = node.attribute
        value = np.array(old.f if old.name == "value_float" else list(old.floats), np.float64)
        old.CopyFrom(helper.make_attribute("value", numpy_helper.from_array(value)))


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


class _Evaluator(ReferenceEvaluator):
    """onnx's evaluator with this package's kernels, also in subgraphs and local functions."""

    def __init__(self, proto, new_ops=None, **options):
        super().__init__(proto, new_ops=[*KERNELS, *RECURRENT, *kernels(), *(new_ops or [])], **options)
