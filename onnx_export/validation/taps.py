"""Make inner values of a model outputs of it, through any nesting of If, Loop and Scan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from .graph import Scope

# numpy cannot take these from onnxruntime; float32 holds each of their values
_WIDENED = frozenset({TensorProto.BFLOAT16})


@dataclass(frozen=True)
class Tap:
    """A value to expose.

    Attributes
    ----------
    scope, value
        Where it lies and its name.
    copied : bool
        Expose a copy. Inputs of a subgraph and values of outer graphs need one; in an optimised run a copy
        would be one more node for the optimiser to see.
    """

    scope: Scope
    value: str
    copied: bool

    @property
    def levels(self) -> int:
        """Leading dimensions the outer graphs add: one for each Loop or Scan round the value."""
        return sum(kind in ("Loop", "Scan") for kind in self.scope.kinds)


def expose(model: onnx.ModelProto, taps: list[Tap]) -> tuple[onnx.ModelProto, list[str]]:
    """A copy of `model` with `taps` among its outputs, and their names there.

    In an If, the branches that lack the value return an empty tensor; a Loop or Scan returns the values of
    all iterations, stacked.

    Raises
    ------
    ValueError
        For a value that cannot be reached.
    """
    exposed = onnx.ModelProto()
    exposed.CopyFrom(model)
    return exposed, [_expose(exposed, tap, f"cnorm_tap_{index}") for index, tap in enumerate(taps)]


def _expose(model: onnx.ModelProto, tap: Tap, unique: str) -> str:
    if tap.scope.is_function:
        raise ValueError(f"{tap.scope.label} could not be inlined")
    levels = []
    graph = model.graph
    for first_output, attribute_name, _ in tap.scope.path:
        node = next((n for n in graph.node if n.output and n.output[0] == first_output), None)
        attribute = node and next((a for a in node.attribute if a.name == attribute_name), None)
        if attribute is None or node.op_type not in ("If", "Loop", "Scan"):
            raise ValueError(f"values inside {tap.scope.label} cannot be made outputs")
        levels.append((graph, node, attribute))
        graph = attribute.g

    dtype = tap.scope.dtype(tap.value)
    name = tap.value
    if dtype in _WIDENED:
        graph.node.append(helper.make_node("Cast", [name], [unique], to=TensorProto.FLOAT))
        name, dtype = unique, TensorProto.FLOAT
    elif tap.copied or (levels and any(value.name == name for value in graph.output)):
        graph.node.append(helper.make_node("Identity", [name], [unique]))
        name = unique
    if levels or not any(value.name == name for value in graph.output):
        graph.output.append(onnx.ValueInfoProto(name=name))

    for depth, (outer, node, attribute) in reversed(list(enumerate(levels))):
        name = f"{unique}_{depth}"
        node.output.append(name)
        outer.output.append(onnx.ValueInfoProto(name=name))
        if node.op_type == "If":
            _balance(node, attribute.name, dtype, tap, unique)
        elif node.op_type == "Scan":
            for key in ("scan_output_axes", "scan_output_directions"):
                for candidate in node.attribute:
                    if candidate.name == key:
                        candidate.ints.append(0)
    return name


def _balance(node: onnx.NodeProto, taken: str, dtype: int, tap: Tap, unique: str) -> None:
    """Give the other branch an empty output."""
    if dtype == TensorProto.UNDEFINED:
        raise ValueError(f"the type of {tap.value!r} in {tap.scope.label} is not known")
    shape = tap.scope.shape(tap.value)
    empty = np.zeros([0] * (1 if shape is None else len(shape)), helper.tensor_dtype_to_np_dtype(dtype))
    for attribute in node.attribute:
        if attribute.HasField("g") and attribute.name != taken:
            name = f"{unique}_empty"
            value = numpy_helper.from_array(empty, name)
            attribute.g.node.append(helper.make_node("Constant", [], [name], value=value))
            attribute.g.output.append(onnx.ValueInfoProto(name=name))
