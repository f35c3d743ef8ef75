"""Constant folding of one node: what any deterministic operator makes of constants, within a budget."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, prod

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnx_export.graph.evaluate import evaluate
from onnx_export.graph.sizes import shape_of
from onnx_export.graph.tables import LAYOUT

SMALL = 64  # elements; a node whose inputs have no more is folded, whatever its operator
_LARGEST = 2**20  # elements of the result of an elementwise operator
_MOST_RESULTS = 2**12  # elements of another operator's result
_RANDOM = frozenset({"Bernoulli", "Dropout", "Multinomial"})
# The result has the elements of the first input, so that constants of any size are folded.
_SAME_SIZE = LAYOUT | {"Neg", "Sqrt", "Reciprocal", "DequantizeLinear", "QuantizeLinear"}
# The result has the broadcast shape of the inputs.
_ELEMENTWISE = frozenset(
    {"Add", "Sub", "Mul", "Div", "Pow", "Sum", "Mean", "Max", "Min", "Where", "Mod", "And", "Or", "Xor", "Not"}
    | {"Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal", "PRelu"}
    | {"Abs", "Exp", "Log", "Relu", "Sigmoid", "Softplus", "Softsign", "Tanh", "Erf", "Elu", "Selu", "Celu", "Gelu"}
    | {"LeakyRelu", "HardSigmoid", "HardSwish", "Mish", "ThresholdedRelu", "Floor", "Ceil", "Round", "Sign", "Clip"}
    | {"Sin", "Cos", "Tan", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Asinh", "Acosh", "Atanh", "IsNaN", "IsInf"}
)
# The result of small inputs is small.
_NO_LARGER = frozenset({"Gather", "GatherElements", "GatherND", "Slice", "Split", "Concat", "MatMul", "Gemm", "Einsum"})
_ARITHMETIC = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply}
_PLAIN = tuple(map(np.dtype, ("float16", "float32", "float64", "int32", "int64")))
# Their attributes make work or memory that shows in no shape.
_SPATIAL = frozenset({"pads", "kernel_shape", "dilations", "strides"})


def is_random(node: onnx.NodeProto) -> bool:
    """Whether a node gives other results each time."""
    return node.op_type in _RANDOM or node.op_type.startswith("Random")


def folds(node: onnx.NodeProto) -> bool:
    """Whether the results of a node may be folded if its inputs are constants."""
    if is_random(node) or node.domain not in ("", "ai.onnx"):
        return False
    return not any(each.name in _SPATIAL or each.HasField("g") or each.graphs for each in node.attribute)


def folded(
    node: onnx.NodeProto, name: str, inputs: Mapping[str, np.ndarray], opsets: Mapping[str, int]
) -> np.ndarray | None:
    """The value of `name`, an output of the node, from its constant inputs; None if it is too large or malformed."""
    if node.op_type in ("DequantizeLinear", "QuantizeLinear"):  # the evaluator has them from 19 on; 13 means the same
        opsets = {**opsets, "": max(19, opsets.get("", 0))}
    try:
        if not _affordable(node, name, inputs, opsets):
            return None
        with np.errstate(all="ignore"):
            value = _directly(node, [inputs[each] for each in node.input]) if name == node.output[0] else None
            if value is not None:
                return np.asarray(value)
            return np.asarray(evaluate([node], inputs, [name], opsets)[name])
    except Exception:  # a malformed node is not folded; the runtime reports it
        return None


def _directly(node: onnx.NodeProto, values: list[np.ndarray]) -> np.ndarray | None:
    """The result of the commonest operators, for which the evaluator takes many times longer; None for others."""
    kind = node.op_type
    if kind == "Identity":
        return values[0]
    if kind in _ARITHMETIC and values[0].dtype == values[1].dtype:
        return _ARITHMETIC[kind](*values)
    axis = next((each.i for each in node.attribute if each.name == "axis"), 0)
    if kind == "Gather":
        return np.take(*values, axis=axis)
    if kind == "Concat":
        return np.concatenate(values, axis=axis)
    if kind == "Cast" and values[0].dtype in _PLAIN:
        target = next(each.i for each in node.attribute if each.name == "to")
        wanted = helper.tensor_dtype_to_np_dtype(target)
        return values[0].astype(wanted) if wanted in _PLAIN else None
    return None


def _affordable(node, name: str, inputs: Mapping[str, np.ndarray], opsets: Mapping[str, int]) -> bool:
    """Whether the work and the result are bounded."""
    kind, sizes = node.op_type, [value.size for value in inputs.values()]
    if kind in _SAME_SIZE:
        return True
    small = all(size <= SMALL for size in sizes)
    if kind in _ELEMENTWISE:
        made = prod(np.broadcast_shapes(*(value.shape for value in inputs.values())))
        return made <= max(SMALL, *sizes) and made <= max(_LARGEST, SMALL)
    if kind in _NO_LARGER or kind.startswith("Reduce"):
        return small or (kind == "Concat" and sum(sizes) <= _LARGEST)
    if kind in ("Expand", "Tile") and not small:
        return False
    return small and _inferred_size(node, name, inputs, opsets) <= _MOST_RESULTS


def _inferred_size(node, name: str, inputs: Mapping[str, np.ndarray], opsets: Mapping[str, int]) -> float:
    """The number of elements of a result by onnx's shape inference, infinite if it is not known."""
    stored = [numpy_helper.from_array(value, each) for each, value in inputs.items()]
    graph = helper.make_graph([node], "constant", [], [onnx.ValueInfoProto(name=name)], stored)
    imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    model = helper.make_model(graph, opset_imports=imports, ir_version=8)
    shape = shape_of(onnx.shape_inference.infer_shapes(model, data_prop=True).graph.output[0].type)
    return inf if shape is None or None in shape else prod(shape)


def stored_value(tensor: onnx.TensorProto) -> np.ndarray | None:
    """The array of an initialiser, None if it is not in the message or holds strings."""
    if tensor.data_location == TensorProto.EXTERNAL or tensor.data_type == TensorProto.STRING:
        return None
    return numpy_helper.to_array(tensor)


def constant_node(node: onnx.NodeProto) -> np.ndarray | None:
    """The value of a Constant node, None for a kind that no norm uses."""
    for attribute in node.attribute:
        if attribute.ref_attr_name:  # given by the call of a function
            return None
        if attribute.name == "value" and attribute.HasField("t"):
            return stored_value(attribute.t)
        if attribute.name in ("value_float", "value_floats"):
            value = attribute.f if attribute.name == "value_float" else list(attribute.floats)
            return np.array(value, np.float32)
        if attribute.name in ("value_int", "value_ints"):
            return np.array(attribute.i if attribute.name == "value_int" else list(attribute.ints), np.int64)
    return None
