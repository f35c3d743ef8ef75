"""How large the results of a node are, before it is evaluated: a few bytes of a file can ask for terabytes."""

from __future__ import annotations

from math import inf, prod

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.shape_inference import infer_node_outputs

__all__ = ["largest", "shape_of", "size"]

_READ = 1024  # elements of an input up to which shape inference is given its values
# Where inference does not know an extent of their results, it is at most the number of elements they are given.
_SELECTING = {"NonZero", "Unique", "Compress", "Reshape", "Slice", "Squeeze", "Flatten", "TopK", "NonMaxSuppression"}


def size(dim: onnx.TensorShapeProto.Dimension) -> int | None:
    """The size of a dimension, None if the file leaves it open; like runtimes, treats a negative size as open."""
    return dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else None


def shape_of(kind: onnx.TypeProto) -> tuple[int | None, ...] | None:
    """The sizes of a tensor's type, None for each that is open, None for all if the rank is, or for other types."""
    return tuple(map(size, kind.tensor_type.shape.dim)) if kind.tensor_type.HasField("shape") else None


def largest(node: onnx.NodeProto, inputs: list, opset: int) -> float:
    """A bound on the number of elements of all results of a node together.

    Parameters
    ----------
    node : onnx.NodeProto
        Without subgraphs; its names are not looked at.
    inputs : list of ndarray, tuple of int or None
        The values of its inputs in their order, a shape where only that is known, None for those that are left out.
    opset : int
        The version of the node's domain.

    Returns
    -------
    float
        Infinity if nothing bounds them, or the domain's operators are not onnx's own.

    Raises
    ------
    ValueError
        If the inputs fit no result of the operator.
    """
    names = ["" if value is None else f"i{index}" for index, value in enumerate(inputs)]
    copy = onnx.NodeProto(op_type=node.op_type, domain=node.domain, attribute=node.attribute)
    copy.input.extend(names)
    copy.output.extend(name and f"o{index}" for index, name in enumerate(node.output))
    given = {name: value for name, value in zip(names, inputs, strict=True) if name}
    types = {name: _type(value) for name, value in given.items()}
    data = {name: numpy_helper.from_array(value) for name, value in given.items() if _is_read(value)}
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, node.domain)
    except onnx.defs.SchemaError:
        return inf
    try:
        imports = [helper.make_opsetid(node.domain, opset)]
        found = infer_node_outputs(schema, copy, types, data, opset_imports=imports)
    except Exception as error:  # onnx's errors have no common base class but Exception
        raise ValueError(f"its inputs do not fit: {' '.join(str(error).split())[:200]}") from None
    shapes = [value if isinstance(value, tuple) else np.shape(value) for value in given.values()]
    unknown = float(sum(map(prod, shapes))) if node.op_type in _SELECTING else inf
    return float(sum(_elements(found.get(name), unknown) for name in copy.output if name))


def _type(value) -> onnx.TypeProto:
    if isinstance(value, tuple):
        return helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, value)
    value = np.asarray(value)
    return helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)


def _is_read(value) -> bool:
    return not isinstance(value, tuple) and np.size(value) <= _READ


def _elements(found: onnx.TypeProto | None, unknown: float) -> float:
    """Elements of a result, with `unknown` for each extent that inference does not know."""
    shape = None if found is None else shape_of(found)
    return unknown if shape is None else prod(unknown if known is None else float(known) for known in shape)
