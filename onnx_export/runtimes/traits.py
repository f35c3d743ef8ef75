"""The traits of a node: what distinguishes it from its operator with all defaults, in float32, with stored weights."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import onnx
from onnx import TensorProto, helper

from onnx_export.runtimes import Traits

_ACTIVATIONS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}
_NO_EFFECT = {"hidden_size", "momentum"}
_USUAL = "B"  # the optional input that most nodes have, so that its absence is the trait
_SPATIAL = {"InstanceNormalization", "GroupNormalization", "BatchNormalization", "MeanVarianceNormalization"}


def traits_of(node: onnx.NodeProto, scope) -> Traits:
    """The traits of a node of one of ONNX's own operators.

    Parameters
    ----------
    node : onnx.NodeProto
    scope
        The graph around it: `constant(name)`, `shape(name)`, `dtype(name)` and `opsets`, as those of
        `graph.scope.Scope`.

    Returns
    -------
    frozenset of str
        Attributes that are not their defaults, optional inputs and outputs, the element type, open and small sizes.
    """
    version = min(scope.opsets.get("", onnx.defs.onnx_opset_version()), onnx.defs.onnx_opset_version())
    schema = onnx.defs.get_schema(node.op_type, version, "")
    found = {*_attributes(node, schema, scope), *_values(node, schema), *_sizes(node, scope), *_weights(node, scope)}
    if node.op_type == "Loop" and _reshaped(node, scope):
        found.add("outputs reshaped")
    kind = scope.dtype(node.input[0])
    if kind in (TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE):
        found.add(TensorProto.DataType.Name(kind).lower())
    return frozenset(found)


def _reshaped(node, scope) -> bool:
    """Whether the outputs of a Loop are only read through Reshape, which makes up for a wrong shape."""
    readers = [scope.consumers(name) for name in node.output if name]
    return all(each and {reader.op_type for reader in each} == {"Reshape"} for each in readers)


def _attributes(node, schema, scope) -> Iterator[str]:
    rank = len(scope.shape(node.input[0]) or ())
    for each in node.attribute:
        declared = schema.attributes.get(each.name)
        if declared is None or declared.required or each.name in _NO_EFFECT:
            continue
        value, default = helper.get_attribute_value(each), None
        if declared.default_value.type:
            default = helper.get_attribute_value(declared.default_value)
        if each.name == "activations":
            yield from _activations(node, value)
        elif each.name == "axis":
            value = value - rank if value >= 0 and rank else value
            if value != default:
                yield f"axis={value}"
        elif isinstance(value, int | bytes) and each.name != "input_forget":
            if value != default:
                yield f"{each.name}={value.decode(errors='replace') if isinstance(value, bytes) else value}"
        elif value not in (default, 0):
            yield each.name


def _activations(node, given) -> Iterator[str]:
    usual = _ACTIVATIONS.get(node.op_type, ())
    names = [name.decode(errors="replace") for name in given]
    for place, name in enumerate(names):
        if usual and name.lower() != usual[place % len(usual)].lower():
            yield f"activation {name.lower()}"
    if any(name.islower() for name in names):
        yield "activations in lower case"


def _values(node, schema) -> Iterator[str]:
    """The optional inputs and outputs that are there; the first output, and a bias, where they are not."""
    optional = onnx.defs.OpSchema.FormalParameterOption.Optional
    for place, formal in enumerate(schema.inputs):
        given = place < len(node.input) and node.input[place] != ""
        if formal.option == optional and given != (formal.name == _USUAL) and formal.name != "sequence_lens":
            yield formal.name if given else f"no {formal.name}"
    for place, formal in enumerate(schema.outputs):
        given = place < len(node.output) and node.output[place] != ""
        if formal.option == optional and given == (place > 0):
            yield formal.name if given else f"no {formal.name}"


def _sizes(node, scope) -> Iterator[str]:
    shapes = [scope.shape(name) for name in node.input if name]
    if any(each is None or None in each for each in shapes):
        yield "open shape"
    shape = shapes[0]
    if shape is None or not shape:
        return
    if node.op_type in _SPATIAL and len(shape) != 4:
        yield f"rank {len(shape)}"
    batch = shape[_attribute(node, "layout", 0) ^ 1] if node.op_type in _ACTIVATIONS else shape[0]
    if node.op_type in _SPATIAL | _ACTIVATIONS.keys() and batch not in (1, None):
        yield "batch"
    row = _row(node, shape)
    if row and None not in row and prod(row) == 1:
        yield "rows of 1"


def _row(node, shape) -> tuple[int | None, ...]:
    """The sizes of the axes along which a norm takes its statistics, empty for other operators."""
    if node.op_type == "InstanceNormalization":
        return shape[2:]
    if node.op_type in ("LayerNormalization", "RMSNormalization", "LpNormalization"):
        return shape[_attribute(node, "axis", -1) :][: 1 if node.op_type == "LpNormalization" else None]
    return ()


def _weights(node, scope) -> Iterator[str]:
    """Scales of unusual shapes, weights that are computed, and lengths."""
    if node.op_type in _ACTIVATIONS:
        if scope.constant(node.input[1]) is None:
            yield "W not stored"
        yield from _lengths(node, scope)
        return
    if len(node.input) < 2:
        return
    scale, shape = scope.shape(node.input[1]), scope.shape(node.input[0])
    if node.op_type in _SPATIAL | {"LayerNormalization", "RMSNormalization"} and scope.constant(node.input[1]) is None:
        yield "scale not stored"
    if scale is None or shape is None:
        return
    if node.op_type in ("LayerNormalization", "RMSNormalization") and scale != _row(node, shape):
        yield "scale of another shape"
    if node.op_type == "GroupNormalization" and scale != shape[1:2]:
        yield "scale of groups"


def _attribute(node, name: str, default: int) -> int:
    return next((each.i for each in node.attribute if each.name == name), default)


def _lengths(node, scope) -> Iterator[str]:
    if len(node.input) < 5 or not node.input[4]:
        return
    lengths, shape = scope.constant(node.input[4]), scope.shape(node.input[0])
    steps = None if shape is None else shape[_attribute(node, "layout", 0)]
    if lengths is None or steps is None or (lengths != steps).any():
        yield "sequence_lens"
    else:
        yield "full sequence_lens"
    if lengths is not None and (lengths == 0).any():
        yield "a length of 0"
