"""Add inner values of a model to its outputs, through any nesting of If, Loop and Scan."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnx_export.graph.scope import Scope
from onnx_export.nodes import free_prefix, model_graphs, model_nodes


@dataclass(frozen=True)
class Tap:
    """A value to expose.

    Attributes
    ----------
    scope, value
        The graph that it is in, and its name.
    copied : bool
        Whether to expose a copy, made by Identity. Inputs of a subgraph and values of enclosing graphs need one. Avoid
        it in optimised runs, because the additional node may change what the optimiser fuses.
    """

    scope: Scope
    value: str
    copied: bool

    @property
    def levels(self) -> int:
        """Leading dimensions that the enclosing graphs add: one for each Loop or Scan around the value."""
        return sum(kind in ("Loop", "Scan") for kind in self.scope.kinds)

    @property
    def obstacle(self) -> str:
        """Why the value cannot be exposed, empty when it can."""
        if self.scope.is_function:
            return f"{self.scope.label} could not be inlined"
        if set(self.scope.kinds) - {"If", "Loop", "Scan"}:
            return f"values inside {self.scope.label} cannot be made outputs"
        if "If" in self.scope.kinds and self.scope.dtype(self.value) == TensorProto.UNDEFINED:
            return f"the type of {self.value!r} in {self.scope.label} is not known"
        return ""


def has_halves(model: onnx.ModelProto) -> bool:
    """Whether a value may be of a half type, which onnxruntime rounds only where it is exposed."""
    kinds: set[int] = set()
    for graph in model_graphs(model):
        kinds |= {value.type.tensor_type.elem_type for value in (*graph.input, *graph.value_info, *graph.output)}
        kinds |= {tensor.data_type for tensor in graph.initializer}
    for each in chain.from_iterable(node.attribute for node in model_nodes(model)):
        kinds |= {each.t.data_type} | ({each.i} if each.name in ("to", "dtype", "output_dtype") else set())
    return not kinds.isdisjoint((TensorProto.FLOAT16, TensorProto.BFLOAT16))


def expose(model: onnx.ModelProto, taps: list[Tap]) -> tuple[onnx.ModelProto, list[str]]:
    """A copy of `model` with these taps as additional outputs, and the names of these outputs.

    No tap may have an obstacle. The other branch of an If returns an empty tensor; a Loop or Scan returns the values of
    all iterations, stacked.
    """
    exposed = onnx.ModelProto()
    exposed.CopyFrom(model)
    prefix = free_prefix(model, "cnorm_tap")
    return exposed, [_expose(exposed, tap, f"{prefix}_{index}") for index, tap in enumerate(taps)]


def _expose(model: onnx.ModelProto, tap: Tap, unique: str) -> str:
    levels = []
    graph = model.graph
    for first_output, attribute_name, _ in tap.scope.path:
        node = next(n for n in graph.node if n.output and n.output[0] == first_output)
        attribute = next(a for a in node.attribute if a.name == attribute_name)
        levels.append((graph, node, attribute))
        graph = attribute.g

    name = tap.value
    if tap.copied or (levels and any(value.name == name for value in graph.output)):
        graph.node.append(helper.make_node("Identity", [name], [unique]))
        name = unique
    if levels or not any(value.name == name for value in graph.output):
        graph.output.append(onnx.ValueInfoProto(name=name))

    for depth, (outer, node, attribute) in reversed(list(enumerate(levels))):
        name = f"{unique}_{depth}"
        node.output.append(name)
        outer.output.append(onnx.ValueInfoProto(name=name))
        if node.op_type == "If":
            _balance(node, attribute.name, tap, unique)
        elif node.op_type == "Scan":
            for key in ("scan_output_axes", "scan_output_directions"):
                for candidate in node.attribute:
                    if candidate.name == key:
                        candidate.ints.append(0)
    return name


def _balance(node: onnx.NodeProto, taken: str, tap: Tap, unique: str) -> None:
    """Give the other branch an empty output."""
    shape = tap.scope.shape(tap.value)
    empty = np.zeros(
        [0] * (1 if shape is None else len(shape)),
        helper.tensor_dtype_to_np_dtype(tap.scope.dtype(tap.value)),
    )
    for attribute in node.attribute:
        if attribute.HasField("g") and attribute.name != taken:
            name = f"{unique}_empty"
            value = numpy_helper.from_array(empty, name)
            attribute.g.node.append(helper.make_node("Constant", [], [name], value=value))
            attribute.g.output.append(onnx.ValueInfoProto(name=name))
