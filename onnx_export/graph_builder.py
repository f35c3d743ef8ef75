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
        Names of inputs, which `add` must not give again.

    Attributes
    ----------
    nodes : list of onnx.NodeProto
        In order of evaluation.
    scope : str
        Goes before each name that `add` gives.
    sequence : bool
        Values have a leading axis of steps: [T, B, size], not [B, size].
    """

    def __init__(self, opset: int, dtype=np.float32, taken: Iterable[str] = ()):
        self.opset = opset
        self.dtype = np.dtype(dtype)
        self.nodes: list[onnx.NodeProto] = []
        self.scope = ""
        self.sequence = False
        self._taken = set(taken)
        self._public: dict[str, str] = {}  # what a published value was called before

    def add(self, operator: str, *inputs: str, name: str | tuple[str, ...], domain: str = "", **attributes):
        """Append a node and return the name of its output, or a tuple of names if `name` is one."""
        several = isinstance(name, tuple)
        outputs = [self._unique(n) for n in (name if several else (name,))]
        self.nodes.append(helper.make_node(operator, inputs, outputs, name=outputs[0], domain=domain, **attributes))
        return tuple(outputs) if several else outputs[0]

    def constant(self, value, name: str, dtype=None) -> str:
        """A Constant node: unlike an initialiser it may stand in a function body."""
        tensor = numpy_helper.from_array(np.asarray(value, dtype or self.dtype))
        return self.add("Constant", name=name, value=tensor)

    def split(self, value: str, lengths: list[int], names: list[str], axis: int) -> tuple[str, ...]:
        """Cut along an axis; where the parts are equal their sizes are left to the runtime."""
        attributes, sizes = {"axis": axis}, []
        if len(set(lengths)) > 1:
            sizes = [self.constant(lengths, f"{names[0]}_lengths", np.int64)]
        elif self.opset >= 18:
            attributes["num_outputs"] = len(lengths)
        return self.add("Split", value, *sizes, name=tuple(names), **attributes)

    def publish(self, value: str, name: str) -> None:
        """Give `value` the public name `name`; what is an input, or public already, is copied instead."""
        value = self._public.get(value, value)
        producer = next((node for node in self.nodes if value in node.output), None)
        if producer is None or value in self._public.values():
            self.nodes.append(helper.make_node("Identity", [value], [name], name=name))
        else:
            for node in self.nodes:
                for names in (node.input, node.output):
                    names[:] = [name if n == value else n for n in names]
            self._public[value] = name

    def _unique(self, name: str) -> str:
        name = candidate = self.scope + name
        number = 2
        while candidate in self._taken:
            candidate, number = f"{name}_{number}", number + 1
        self._taken.add(candidate)
        return candidate
