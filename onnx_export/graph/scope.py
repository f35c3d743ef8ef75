"""Views of an ONNX graph: producers and consumers of values, constant folding, and extraction of subgraphs."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cached_property, lru_cache
from itertools import takewhile
from math import prod

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnx_export.graph import constants
from onnx_export.graph.sizes import shape_of
from onnx_export.nodes import model_nodes, subgraphs

_LONGEST_SHAPE = 2**17
_IR_VERSION = 8  # of models made of some nodes: all runtimes here take it, with any opset
_NEWEST = onnx.defs.onnx_opset_version()
FUNCTION_KEY = "cnorm.function"  # metadata of a node that names its local function, because inlining loses it


def op(node: onnx.NodeProto) -> str:
    """The operator of a node, preceded by its domain and "::" if that is not ONNX's own. A Sum of two is an Add."""
    if node.domain not in ("", "ai.onnx"):
        return f"{node.domain}::{node.op_type}"
    return "Add" if node.op_type == "Sum" and len(node.input) == 2 else node.op_type


def well_formed(node: onnx.NodeProto, opsets: dict[str, int]) -> bool:
    """Whether a node has the results and, if its operator is ONNX's own, as many inputs as the operator takes.

    The first result must have a name, except for operators that may leave it out: LSTM, GRU and RNN.
    """
    if not any(node.output[: None if _may_omit_first(op(node)) else 1]):
        return False
    fewest, most, required = _inputs(op(node), opsets.get("", _NEWEST))
    return fewest <= len(node.input) <= most and all(node.input[:required])


@lru_cache(maxsize=1024)
def _may_omit_first(kind: str) -> bool:
    """Whether the first output of one of ONNX's own operators is optional, and others follow."""
    with suppress(onnx.defs.SchemaError):
        outputs = onnx.defs.get_schema(kind, _NEWEST, "").outputs
        return len(outputs) > 1 and outputs[0].option == onnx.defs.OpSchema.FormalParameterOption.Optional
    return False


@lru_cache(maxsize=1024)
def _inputs(kind: str, opset: int) -> tuple[int, int, int]:
    """The fewest and the most inputs of an operator, and how many of the first must have a name.

    The widest of this opset and the newest: exporters, and ONNX's own expansions, mix them.
    """
    known = []
    for version in {min(max(opset, 1), _NEWEST), _NEWEST}:
        with suppress(onnx.defs.SchemaError):
            known.append(onnx.defs.get_schema(kind, version, ""))
    single = onnx.defs.OpSchema.FormalParameterOption.Single
    named = [sum(1 for _ in takewhile(lambda formal: formal.option == single, schema.inputs)) for schema in known]
    fewest = min((schema.min_input for schema in known), default=0)
    return fewest, max((schema.max_input for schema in known), default=sys.maxsize), min(named, default=0)


def with_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with inferred shapes; the C++ layer raises many kinds.

    The values of shapes are followed, too, unless a dimension is so long that onnx, which takes every vector of a known
    length for a shape, would need seconds or never end.
    """
    values = (*model.graph.input, *model.graph.output, *model.graph.value_info)
    longest = max((dim.dim_value for value in values for dim in value.type.tensor_type.shape.dim), default=0)
    return onnx.shape_inference.infer_shapes(model, data_prop=longest <= _LONGEST_SHAPE)


class Scope:
    """One graph (main graph, subgraph or body of a function) and the scopes that enclose it.

    Attributes
    ----------
    graph : onnx.GraphProto or onnx.FunctionProto
    opsets : dict of str to int
    path : tuple of (str, str, str)
        The nodes from the main graph to this one: (node's first output, attribute, label for reports) per level.
    kinds : tuple of str
        Operator types of the nodes on that path.
    outer : Scope or None
    owner : onnx.NodeProto or None
        The node of `outer` that has this graph as an attribute.
    nodes : list of onnx.NodeProto
        The well-formed nodes. The others are ignored: the runtime reports them.
    """

    def __init__(
        self, graph, opsets, types: dict[str, onnx.TypeProto], path=(), outer=None, owner=None, weights=None
    ) -> None:
        self.graph, self.opsets, self.path, self.outer, self.owner = graph, opsets, path, outer, owner
        self.kinds = (*outer.kinds, owner.op_type) if owner is not None else ()
        self.nodes = [node for node in graph.node if well_formed(node, opsets)]
        self.is_function = isinstance(graph, onnx.FunctionProto)
        self._types = types
        self._shapes: dict[str, tuple[int | None, ...] | None] = {}
        self._producers = {name: node for node in self.nodes for name in node.output if name}
        self._consumers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        self._nested = [
            node for node in self.nodes if any(each.HasField("g") or each.graphs for each in node.attribute)
        ]
        nested = set(map(id, self._nested))
        for node in self.nodes:
            for name in dict.fromkeys(used(node) if id(node) in nested else node.input):
                if name:
                    self._consumers[name].append(node)
        self._initialisers = {} if self.is_function else {t.name: t for t in graph.initializer}
        self.outputs = set(graph.output) if self.is_function else {value.name for value in graph.output}
        self._inputs = set() if self.is_function else {value.name for value in graph.input}
        self._constants: dict[str, np.ndarray | None] = dict(weights or {})
        self._varying = self._computed_from_inputs()

    def _computed_from_inputs(self) -> set[str]:
        """Values that an input of the model decides, so that they are no constants; not all if nodes lack order."""
        stored = self._initialisers.keys() | self._constants.keys()
        found = set() if self.outer is not None else self._inputs - stored
        for node in self.nodes:
            read = node.input[:1] if node.op_type == "CastLike" else node.input
            if node.op_type not in ("Shape", "Size") and not (found.isdisjoint(read) and not self._read_varying(read)):
                found.update(name for name in node.output if name not in stored)
        return found

    def _read_varying(self, names: Iterable[str]) -> bool:
        """Whether one of these is such a value of an enclosing graph."""
        if self.outer is None:
            return False
        own = (self._producers, self._inputs, self._initialisers)
        others = [name for name in names if not any(name in each for each in own)]
        return any(name in self.outer._varying for name in others) or self.outer._read_varying(others)

    @property
    def label(self) -> str:
        """The path to this graph, for reports; empty for the main graph."""
        return " > ".join(label for _, _, label in self.path)

    def producer(self, name: str) -> onnx.NodeProto | None:
        """The node that computes a value, in this graph or an enclosing one."""
        if name in self._producers or self.outer is None or name in self._inputs or name in self._initialisers:
            return self._producers.get(name)
        return self.outer.producer(name)

    def is_input(self, name: str) -> bool:
        """Whether a value is an input of this graph that the file stores no value for."""
        return name in self._inputs and name not in self._initialisers

    def consumers(self, name: str) -> list[onnx.NodeProto]:
        """The nodes of this graph that use a value, themselves or in their subgraphs."""
        return self._consumers.get(name, [])

    @cached_property
    def inner(self) -> list[Scope]:
        """The scopes directly inside this one."""
        found = []
        for node in self._nested:
            for attribute, graph in subgraphs(node):
                label = f"{node.name or node.op_type}.{attribute}"
                step = (node.output[0] if node.output else "", attribute, label)
                found.append(Scope(graph, self.opsets, _types(graph), (*self.path, step), self, node))
        return found

    def dtype(self, name: str) -> int:
        """ONNX element type of a value, UNDEFINED where unknown."""
        constant = self.tensor(name)
        if constant is not None:
            return constant.data_type
        kind = self._type(name)
        return TensorProto.UNDEFINED if kind is None else kind.tensor_type.elem_type

    def shape(self, name: str) -> tuple[int | None, ...] | None:
        """Dimensions of a value, None for each that is unknown, None for all when the rank is unknown."""
        if name not in self._shapes:
            self._shapes[name] = self._shape(name)
        return self._shapes[name]

    def _shape(self, name: str) -> tuple[int | None, ...] | None:
        constant = self.tensor(name)
        if constant is not None:
            return tuple(constant.dims)
        kind = self._type(name)
        return None if kind is None else shape_of(kind)

    def _type(self, name: str) -> onnx.TypeProto | None:
        """The type that the file gives a value, in this graph or an enclosing one."""
        if name in self._types or name in self._producers or self.outer is None:
            return self._types.get(name)
        return self.outer._type(name)

    def tensor(self, name: str) -> onnx.TensorProto | None:
        """The initialiser of this name, in this graph or an enclosing one."""
        if name in self._initialisers:
            return self._initialisers[name]
        if name in self._producers or name in self._inputs or self.outer is None:
            return None
        return self.outer.tensor(name)

    def constant(self, name: str) -> np.ndarray | None:
        """The value of `name` if it is constant, by constant folding; else None."""
        if name in self._constants:
            return self._constants[name]
        if name in self._varying:
            return None
        opened = {name}  # lets the search end where a value depends on itself
        pending = [(name, self._folded_from(name))]
        while pending:
            current, rest = pending[-1]
            for each in rest:
                if each not in self._constants and each not in opened and each not in self._varying:
                    opened.add(each)
                    pending.append((each, self._folded_from(each)))
                    break
            else:
                self._constants[current] = self._fold(current)
                pending.pop()
        return self._constants[name]

    def _folded_from(self, name: str) -> Iterator[str]:
        """The values that must be folded before this one: no more of them after one that is no constant."""
        node = None if name in self._initialisers else self._producers.get(name)
        if node is None or not (op(node) == "CastLike" or constants.folds(node)):
            return
        for each in node.input[:1] if op(node) == "CastLike" else node.input:
            if each:
                yield each
                if self._constants.get(each) is None:
                    return

    def _fold(self, name: str) -> np.ndarray | None:
        if name in self._initialisers:
            return constants.stored_value(self._initialisers[name])
        node = self._producers.get(name)
        if node is None:
            if name in self._inputs:
                return self._carried(name)
            return None if self.outer is None else self.outer.constant(name)
        if op(node) == "Constant":
            return constants.constant_node(node)
        if op(node) in ("Shape", "Size"):
            return self._counted(node)
        if op(node) == "CastLike" and len(node.input) == 2:
            return self._cast_like(node)
        inputs = {each: self._constants.get(each) for each in node.input if each}
        if not inputs or any(value is None for value in inputs.values()) or not constants.folds(node):
            return None
        return constants.folded(node, name, inputs, self.opsets)

    def _counted(self, node: onnx.NodeProto) -> np.ndarray | None:
        """The result of Shape or Size, None if the file leaves a dimension open."""
        shape = self.shape(node.input[0])
        if shape is None or any(length is None for length in shape):
            return None
        if op(node) == "Size":
            return np.array(prod(shape), np.int64)
        start, end = attribute(node, "start", 0), attribute(node, "end", len(shape))
        return np.array(shape[start:end], np.int64)

    def _cast_like(self, node: onnx.NodeProto) -> np.ndarray | None:
        value, kind = self._constants.get(node.input[0]), self.dtype(node.input[1])
        if value is None or kind not in helper.get_all_tensor_dtypes() or kind == TensorProto.UNDEFINED:
            return value
        return value.astype(helper.tensor_dtype_to_np_dtype(kind))

    def _carried(self, name: str) -> np.ndarray | None:
        """The constant value of a loop-carried input that the body of the Loop or Scan returns unchanged, else None."""
        owner = self.owner
        if owner is None or owner.op_type not in ("Loop", "Scan"):
            return None
        names = [value.name for value in self.graph.input]
        place = names.index(name)
        # a Loop's body takes the iteration number and condition before the carried values, and returns the condition
        first, results = (2, 1) if owner.op_type == "Loop" else (0, 0)
        scanned = attribute(owner, "num_scan_inputs", 0)
        kept = place - first + results
        if not first <= place < len(names) - scanned or kept >= len(self.graph.output) or place >= len(owner.input):
            return None
        result, passed = self.graph.output[kept].name, set()
        while result != name:
            node = self._producers.get(result)
            if node is None or op(node) != "Identity" or result in passed:
                return None
            passed.add(result)
            result = node.input[0]
        return self.outer.constant(owner.input[place])


def used(node: onnx.NodeProto) -> Iterator[str]:
    """Names that a node and its subgraphs read: a superset, as names local to the subgraphs are included."""
    yield from (name for name in node.input if name)
    for _, graph in subgraphs(node):
        for inner in graph.node:
            yield from used(inner)
        yield from (value.name for value in graph.output)


def _types(graph: onnx.GraphProto) -> dict[str, onnx.TypeProto]:
    return {v.name: v.type for v in (*graph.input, *graph.value_info, *graph.output)}


def scopes(model: onnx.ModelProto, weights: dict[str, np.ndarray] | None = None) -> Iterator[Scope]:
    """The main graph, its subgraphs, and the functions that could not be inlined.

    `weights` are values of initialisers that are not in the message (`weights.set_aside`).
    """
    pending = [Scope(model.graph, opset_versions(model), _types(model.graph), weights=weights)]
    for function in model.functions:
        types = {v.name: v.type for v in function.value_info}
        path = (("", "", f"function {function.name}"),)
        pending.append(Scope(function, opset_versions(function), types, path))
    while pending:
        scope = pending.pop(0)
        yield scope
        pending += scope.inner


def opset_versions(model: onnx.ModelProto | onnx.FunctionProto) -> dict[str, int]:
    """Imported opsets by domain; "ai.onnx" is another name of the domain ""."""
    return {"" if o.domain == "ai.onnx" else o.domain: o.version for o in model.opset_import}


def import_domains(model: onnx.ModelProto) -> bool:
    """Import com.microsoft where its operators are used without it, as onnxruntime does; returns whether they were."""
    lacking = "com.microsoft" not in opset_versions(model)
    lacking = lacking and any(node.domain == "com.microsoft" for node in model_nodes(model))
    if lacking:
        model.opset_import.add(domain="com.microsoft", version=1)
    return lacking


def function_key(name: str, domain: str) -> str:
    """A key that is unique to a local function: its name, a line break and its domain."""
    return f"{name}\n{domain}"


def mark_functions(model: onnx.ModelProto) -> None:
    """Store the name of its local function in the metadata of each node, for `inlined` loses it."""
    for function in model.functions:
        for node in every(function.node):
            node.metadata_props.add(key=FUNCTION_KEY, value=function_key(function.name, function.domain))


def unit_roundoff(dtype: int) -> float:
    """2^-p, p the bits of the significand, of an ONNX floating-point type; other types are taken for float32."""
    digits = {TensorProto.DOUBLE: 53, TensorProto.FLOAT16: 11, TensorProto.BFLOAT16: 8}
    return 2.0 ** -digits.get(dtype, 24)


def every(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """The nodes and, recursively, those of their subgraphs."""
    for node in nodes:
        yield node
        for _, graph in subgraphs(node):
            yield from every(graph.node)


def _untyped(name: str) -> onnx.ValueInfoProto:
    return onnx.ValueInfoProto(name=name)


_KINDS = {
    int: onnx.AttributeProto.INT,
    float: onnx.AttributeProto.FLOAT,
    tuple: onnx.AttributeProto.INTS,
}


def attribute(node: onnx.NodeProto, name: str, default: int | float | tuple):
    """The value of an attribute if it has the type of the default; else the default."""
    for candidate in node.attribute:
        wanted = candidate.name == name and candidate.type == _KINDS[type(default)]
        if wanted and not candidate.ref_attr_name:
            value = helper.get_attribute_value(candidate)
            return tuple(value) if isinstance(default, tuple) else value
    return default


def cut(
    scope: Scope,
    nodes: Iterable[onnx.NodeProto],
    outputs: list[str],
    inputs: dict[str, tuple[int, tuple]],
) -> onnx.ModelProto:
    """A model that consists of some nodes of a graph.

    Parameters
    ----------
    scope : Scope
        Where the nodes lie.
    nodes : iterable of NodeProto
        Of this graph and enclosing ones, in any order; the new model keeps the order of the graphs.
    outputs : list of str
        Values to return.
    inputs : dict of str to (element type, shape)
        Inputs of the new model. All other values that the nodes read must be constant; they become initialisers.
    """
    chosen = {id(node) for node in nodes}
    graphs = [scope]
    while graphs[0].outer is not None:
        graphs.insert(0, graphs[0].outer)
    ordered = [node for graph in graphs for node in graph.nodes if id(node) in chosen]
    made = {name for node in ordered for name in node.output}
    needed = dict.fromkeys(name for node in ordered for name in node.input if name)
    stored = []
    for name in needed:
        if name not in made and name not in inputs:
            value = scope.constant(name)
            if value is None:
                raise ValueError(f"{name!r} is neither constant nor fed")
            stored.append(numpy_helper.from_array(value, name))
    graph = helper.make_graph(
        ordered,
        "cut",
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
        [_untyped(name) for name in outputs],
        stored,
    )
    opsets = list(map(helper.make_opsetid, scope.opsets, scope.opsets.values()))
    return helper.make_model(graph, ir_version=_IR_VERSION, opset_imports=opsets)


def boundary(scope: Scope, nodes: Iterable[onnx.NodeProto]) -> list[str]:
    """The inputs of a set of nodes: values that they read, and that neither they compute nor the file stores."""
    nodes = list(nodes)
    made = {name for node in nodes for name in node.output}
    used = dict.fromkeys(name for node in nodes for name in node.input if name)
    return [name for name in used if name not in made and scope.constant(name) is None]
