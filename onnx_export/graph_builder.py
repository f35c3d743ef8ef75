"""The graph under construction: nodes with readable, unique names."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx
from onnx import helper, numpy_helper


class GraphBuilder:
    """Collects the nodes of one graph, Scan body or local function.

    Parameters
    ----------
    opset : int
        Of the default domain; builders choose their form by it.
    dtype : numpy dtype
        Of weights, states, inputs and outputs: float32 or float16.
    taken : iterable of str
        Names of inputs and outputs, which `add` must not use.
    portable : bool
        Products are MatMul and Add, not Gemm.
    composed : bool
        Norms are composed of other operators at any opset.
    shared : iterable of str, optional
        Names of weights. A node that depends on these and on constants only is added once, and later equal ones reuse
        its outputs (common subexpression elimination).

    Attributes
    ----------
    nodes : list of onnx.NodeProto
        In topological order.
    prefix, scope : str
        Prefixes of each name that `add` makes.
    sequence : bool
        Values have a leading axis of steps: [T, B, size], not [B, size].
    """

    def __init__(
        self,
        opset: int,
        dtype=np.float32,
        taken: Iterable[str] = (),
        *,
        portable: bool = False,
        composed: bool = False,
        shared: Iterable[str] | None = None,
    ):
        self.opset = opset
        self.dtype = np.dtype(dtype)
        self.portable, self.composed = portable, composed
        self.nodes: list[onnx.NodeProto] = []
        self.prefix = self.scope = ""
        self.sequence = False
        self._taken = set(taken)
        self._public: dict[str, str] = {}  # former name of a published value to its public name
        self._constant = None if shared is None else {*shared, ""}
        self._known: dict[tuple, list[str]] = {}  # key of a node that depends on constants only to its outputs

    def add(
        self, operator: str, *inputs: str, name: str | tuple[str, ...], domain: str = "", node: str = "", **attributes
    ):
        """Append a node and return the name of its output, or a tuple of names if `name` is one.

        The name of the node is `node`, or that of its first output.
        """
        several = isinstance(name, tuple)
        names = name if several else (name,)
        key = self._key(operator, inputs, domain, attributes)
        outputs = self._known.get(key) if key else None
        if outputs is None:
            outputs = [self._unique(n) for n in names]
            made = helper.make_node(operator, inputs, outputs, name=node or outputs[0], domain=domain, **attributes)
            self.nodes.append(made)
            if key:
                self._known[key] = outputs
                self._constant.update(outputs)
        return tuple(outputs) if several else outputs[0]

    def _key(self, operator, inputs, domain, attributes) -> tuple | None:
        """A key, equal for equal nodes, of a node that depends on constants only; None for other nodes."""
        if self._constant is None or not self._constant.issuperset(inputs):
            return None
        given = sorted(helper.make_attribute(k, v).SerializeToString() for k, v in attributes.items())
        return operator, domain, inputs, *given

    def constant(self, value, name: str, dtype=None) -> str:
        """Append a Constant node, which, unlike an initialiser, is allowed in a function body."""
        tensor = numpy_helper.from_array(np.asarray(value, dtype or self.dtype))
        return self.add("Constant", name=name, value=tensor)

    def has(self, opset: int) -> bool:
        """Whether to use a norm's operator that exists from this opset on."""
        return self.opset >= opset and not self.composed

    def product(self, x: str, matrix: str, bias: str | None, name: str, inputs_first: bool = False) -> str:
        """x [..., inputs] by a matrix [outputs, inputs], or [inputs, outputs] with the inputs first, and a bias."""
        if not (self.portable or self.sequence):
            given = [] if bias is None else [bias]
            return self.add("Gemm", x, matrix, *given, name=name, transB=0 if inputs_first else 1)
        if not inputs_first:
            matrix = self.add("Transpose", matrix, name=f"{name}_weight", perm=[1, 0])
        if bias is None:
            return self.add("MatMul", x, matrix, name=name)
        return self.add("Add", self.add("MatMul", x, matrix, name=f"{name}_product"), bias, name=name)

    def split(self, value: str, lengths: list[int], names: list[str], axis: int) -> tuple[str, ...]:
        """Split along an axis; equal sizes are left to the runtime."""
        attributes, sizes = {"axis": axis}, []
        if len(set(lengths)) > 1:
            sizes = [self.constant(lengths, f"{names[0]}_lengths", np.int64)]
        elif self.opset >= 18:
            attributes["num_outputs"] = len(lengths)
        return self.add("Split", value, *sizes, name=tuple(names), **attributes)

    def publish(self, value: str, name: str) -> None:
        """Rename `value`, and the node if this is its only output, to the public name `name`.

        An input, or a value that is public already, is copied. Some runtimes (tract) name outputs after nodes.
        """
        value = self._public.get(value, value)
        producer = next((node for node in self.nodes if value in node.output), None)
        if producer is None or value in self._public.values():
            self.nodes.append(helper.make_node("Identity", [value], [name], name=name))
            return
        if len(producer.output) == 1:
            producer.name = name
        for node in self.nodes:
            for names in (node.input, node.output):
                names[:] = [name if n == value else n for n in names]
        self._public[value] = name

    def copy(self, value: str, name: str, shape: list[int]) -> None:
        """Copy a value to an output that no node reads.

        Uses Reshape, where 0 in `shape` keeps a size, because pnnx fails on Identity.
        """
        shape = self.constant(shape, f"{name}_shape", np.int64)
        self.nodes.append(helper.make_node("Reshape", [value, shape], [name], name=name))

    def _unique(self, name: str) -> str:
        name = candidate = self.prefix + self.scope + name
        number = 2
        while candidate in self._taken:
            candidate, number = f"{name}_{number}", number + 1
        self._taken.add(candidate)
        return candidate
