"""From a cnorm model to an ONNX graph."""

from __future__ import annotations

import functools
import json
import operator
import re

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

import cnorm
from cnorm.model_files import METADATA_KEY, configuration, named_tensors
from onnx_export.builders import builder, native
from onnx_export.builders.norms import checked_eps
from onnx_export.files import write
from onnx_export.graph_builder import GraphBuilder
from onnx_export.ort import loads

__all__ = ["DOMAIN", "FIRST_OPSET", "checked_opset", "export", "finished", "newest_opset", "state_table"]

FIRST_OPSET = 13
FIRST_IR = 8  # of opset 17; every onnxruntime that runs LayerNormalization reads it
FORMS = ("step", "sequence")
DTYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}
FLOAT16_MAX = float(np.finfo(np.float16).max)
TIME = "T"  # the name of the dimension of steps
DOMAIN = "cnorm"  # of the local functions


def export(
    model,
    path=None,
    *,
    form: str = "step",
    opset: int = 17,
    batch: int | str = 1,
    functions: bool = False,
    native_ops: bool = False,
    dtype: str = "float32",
) -> onnx.ModelProto:
    """Write a model as an ONNX graph with its states as named inputs and outputs.

    The graph of form "step" takes ``x`` [batch, input_size] and each state, ``h0_in``, ``c0_in``, ...
    [batch, units], and gives ``y`` [batch, output_size] and the next states, ``h0_out``, ``c0_out``, ...; the
    number counts recurrent layers. In form "sequence" ``x`` is [T, batch, input_size] and ``y``
    [T, batch, output_size] for any T from 1 on (onnxruntime's Scan takes no empty sequence), and the states are
    those before the first and after the last step, so that long recordings may be cut into chunks.

    Initialisers have the names and layout of the model file. The metadata key ``cnorm.model`` holds, as JSON,
    the configuration and a table of the states, from which `load` makes the model again.

    Parameters
    ----------
    model : cnorm.Model
    path : str or path-like, optional
        Where to write the file. It appears whole or not at all. Weights of more than 1 GiB go to a second
        file beside it, to which the result then refers (see `onnx_export.files.write`).
    form : "step" or "sequence"
    opset : int
        Version of the ONNX operators, 13 or newer, as far as the installed onnxruntime loads it. Layer
        normalisation is the operator LayerNormalization from 17 on, composed of others below.
    batch : 1 or str
        The number of conversations in one call, or the name of a dimension that stays open. In form "sequence"
        "T" is taken.
    functions : bool
        Make each recurrent cell a local function of the domain "cnorm", not a run of nodes.
    native_ops : bool
        Write recurrent layers without norms as the operators LSTM, GRU and RNN.
    dtype : "float32" or "float16"
        Of weights, inputs, outputs and states. For float16 the weights are rounded; norms are computed in
        float32 in either case.

    Returns
    -------
    onnx.ModelProto

    Raises
    ------
    TypeError
        If `model` or an option is of another type.
    ValueError
        For an unknown form or dtype, an opset out of range, a layer without an ONNX form or without a native operator,
        an eps of 0, or weights beyond float16's range.
    OSError
        If the file cannot be written.
    """
    if not isinstance(model, cnorm.Model):
        raise TypeError(f"model must be a cnorm.Model, got {type(model).__name__}")
    for name, value, known in (("form", form, FORMS), ("dtype", dtype, DTYPES)):
        if not isinstance(value, str) or value not in known:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")
    exporter = _Export(model, form, checked_opset(opset), _checked_batch(batch, form), functions, native_ops, dtype)
    exported = exporter.model()
    write(exported, exporter.weights(), path)
    return exported


class _Export:
    """One call of `export`, its options checked."""

    def __init__(self, model, form, opset, batch, functions, native_ops, dtype):
        self.layers, self.sizes = model.layers, (model.input_size, model.output_size)
        self.form, self.opset, self.batch, self.dtype = form, opset, batch, dtype
        self.functions: dict[str, onnx.FunctionProto] | None = {} if functions else None
        self.native_ops = native_ops
        self.states = state_table(model, batch, dtype)
        self.starts = {row.get("tensor") for row in self.states}  # these are in the table: no node reads them

    def model(self) -> onnx.ModelProto:
        graph = self._step("", "cnorm") if self.form == "step" else self._sequence()
        model = finished(graph, self.opset, list((self.functions or {}).values()))
        described = json.loads(configuration(self.layers))
        described |= {"form": self.form, "dtype": self.dtype, "states": self.states}
        helper.set_model_props(model, {METADATA_KEY: json.dumps(described)})
        return model

    def weights(self) -> dict[str, np.ndarray]:
        """The initialisers: the model's own tensors, but those that no node reads."""
        tensors = named_tensors(self.layers).items()
        return {name: self._rounded(name, array) for name, array in tensors if name not in self.starts}

    def _rounded(self, name: str, array: np.ndarray) -> np.ndarray:
        if self.dtype == "float16" and np.abs(array).max() > FLOAT16_MAX:
            raise ValueError(f"dtype must be 'float32': {name} has weights beyond the {FLOAT16_MAX:.0f} of float16")
        return array.astype(self.dtype, copy=False)

    def _step(self, prefix: str, name: str) -> onnx.GraphProto:
        """The graph of one step, or with a prefix to its names the body of a Scan."""
        graph = GraphBuilder(self.opset, self.dtype)
        self._fill(graph, prefix)
        inputs, outputs = self._interface(prefix, [])
        if prefix:  # Scan wants the states before what it scans
            inputs, outputs = inputs[1:] + inputs[:1], outputs[1:] + outputs[:1]
        return helper.make_graph(graph.nodes, name, inputs, outputs)

    def _fill(self, graph: GraphBuilder, prefix: str) -> None:
        """All nodes, from the inputs to the outputs."""
        given = {row["name"]: prefix + row["input"] for row in self.states}
        y, new = self._all_layers(graph, prefix + "x", given)
        for row in self.states:
            graph.publish(new[row["name"]], prefix + row["output"])
        graph.publish(y, prefix + "y")

    def _sequence(self) -> onnx.GraphProto:
        inputs, outputs = self._interface("", [TIME])
        if self.native_ops:
            graph = GraphBuilder(self.opset, self.dtype)
            graph.sequence = True
            self._fill(graph, "")
            return helper.make_graph(graph.nodes, "cnorm", inputs, outputs)
        scan = helper.make_node(
            "Scan",
            [value.name for value in inputs[1:] + inputs[:1]],
            [value.name for value in outputs[1:] + outputs[:1]],
            name="steps",
            body=self._step("step/", "step"),
            num_scan_inputs=1,
        )
        return helper.make_graph([scan], "cnorm", inputs, outputs)

    def _interface(self, prefix: str, leading: list) -> tuple[list, list]:
        """Inputs and outputs: x or y, with `leading` dimensions, and then the states."""

        def value(name, *shape):
            return helper.make_tensor_value_info(prefix + name, DTYPES[self.dtype], shape)

        inputs = [value("x", *leading, self.batch, self.sizes[0])]
        inputs += [value(row["input"], self.batch, row["units"]) for row in self.states]
        outputs = [value("y", *leading, self.batch, self.sizes[1])]
        outputs += [value(row["output"], self.batch, row["units"]) for row in self.states]
        return inputs, outputs

    def _all_layers(self, graph, x: str, states: dict[str, str]) -> tuple[str, dict[str, str]]:
        """The nodes of one step; `states` and the result go by the names of the state table."""
        before, after = iter(states.items()), {}

        def chain(layers, prefix, x):
            for i, layer in enumerate(layers):
                own = f"{prefix}{i}."
                if layer.kind == "Residual":
                    inner = chain(layer.layers, own, x)
                    graph.scope = f"{prefix}{i}/"
                    x = graph.add("Add", x, inner, name="y")
                    continue
                family = builder(layer)
                checked_eps(getattr(layer, "eps", None), f"model: eps of {layer!r}")
                if self.native_ops and family.states(layer):
                    family = native
                weights = {name: own + name for name in layer.weights if own + name not in self.starts}
                given = {letter: next(before) for letter in family.states(layer)}
                graph.scope = f"{prefix}{i}/"
                own_function = given and self.functions is not None and family is not native
                build = self._call if own_function else family.build
                x, new = build(graph, layer, weights, x, {letter: value for letter, (_, value) in given.items()})
                after.update({given[letter][0]: value for letter, value in new.items()})
            return x

        return chain(self.layers, "layers.", x), after

    def _call(self, graph, layer, weights, x, states):
        """A call of the layer's local function, which is made unless an equal one is there."""
        own = {name: re.sub(r"\W", "_", name) for name in weights}
        inputs = ["x", *states, *own.values()]
        body = GraphBuilder(self.opset, self.dtype, taken=inputs)
        y, new = builder(layer).build(body, layer, own, "x", {letter: letter for letter in states})
        outputs = [f"{letter}_next" for letter in new]
        for value, name in zip(new.values(), outputs, strict=True):
            body.publish(value, name)
        known = [letter for letter, value in new.items() if value == y]
        if not known:
            body.publish(y, "y")
            outputs.append("y")
        name = self._function(re.sub(r"\W", "_", f"{layer.kind}_{layer.spec.name}"), inputs, outputs, body.nodes)
        results = graph.add(name, x, *states.values(), *weights.values(), name=tuple(outputs), domain=DOMAIN)
        after = dict(zip(new, results, strict=False))
        return (after[known[0]] if known else results[-1]), after

    def _function(self, name: str, inputs, outputs, nodes) -> str:
        made = helper.make_function(DOMAIN, name, inputs, outputs, nodes, [helper.make_opsetid("", self.opset)])
        number = 2
        while made.name in self.functions and self.functions[made.name] != made:
            made.name, number = f"{name}_{number}", number + 1
        self.functions[made.name] = made
        return made.name


def finished(graph: onnx.GraphProto, opset: int, functions=()) -> onnx.ModelProto:
    """The model of a graph, with all versions set: the onnx package's own defaults are newer than runtimes read."""
    opsets = [helper.make_opsetid("", opset)]
    opsets += [helper.make_opsetid(DOMAIN, 1)] if functions else []
    return helper.make_model(
        graph,
        opset_imports=opsets,
        functions=functions,
        ir_version=_ir_version(opset),
        producer_name="cnorm",
        producer_version=cnorm.__version__,
    )


def state_table(model, batch: int | str = 1, dtype: str = "float32") -> list[dict]:
    """What a host must know to carry the states: a row for each, in the order of the graph's inputs.

    `initial` is a number for all units, or a list with one for each; `tensor` is then its name in the model file.
    """
    table, recurrent = [], 0

    def rows(layers, prefix):
        nonlocal recurrent
        for i, layer in enumerate(layers):
            own = f"{prefix}{i}."
            if layer.kind == "Residual":
                rows(layer.layers, own)
                continue
            states = builder(layer).states(layer)
            for letter, units in states.items():
                name, start = f"{letter}{recurrent}", layer.weights.get(f"{letter}0")
                row = {"name": name, "input": f"{name}_in", "output": f"{name}_out", "units": units}
                row |= {"shape": [batch, units], "dtype": dtype, "initial": 0.0}
                if start is not None:
                    row |= {"initial": start.tolist(), "tensor": f"{own}{letter}0"}
                table.append(row | {"reset": "set to initial before the first step of a sequence"})
            recurrent += bool(states)

    rows(model.layers, "layers.")
    return table


def checked_opset(opset) -> int:
    if isinstance(opset, bool) or not hasattr(opset, "__index__"):
        raise TypeError(f"opset must be an integer, got {opset!r}")
    opset = operator.index(opset)
    if not FIRST_OPSET <= opset <= newest_opset():
        raise ValueError(
            f"opset must be from {FIRST_OPSET} to {newest_opset()}, the newest that the installed "
            f"onnxruntime {onnxruntime.__version__} loads, got {opset}"
        )
    return opset


def _checked_batch(batch, form):
    if form == "sequence" and batch == TIME:
        raise ValueError(f"batch must be another name than {TIME!r}, which a sequence has for its steps, got {batch!r}")
    if isinstance(batch, str):
        if not batch.isidentifier():
            raise ValueError(f"batch must be 1 or the name of a dimension, got {batch!r}")
        return batch
    if isinstance(batch, bool) or not hasattr(batch, "__index__"):
        raise TypeError(f"batch must be 1 or the name of a dimension, got {batch!r}")
    if operator.index(batch) != 1:
        raise ValueError(f"batch must be 1 or the name of a dimension, such as 'batch', got {batch!r}")
    return 1


@functools.cache
def newest_opset() -> int:
    """The newest opset that the onnx package can write and the installed onnxruntime loads."""
    for opset in range(onnx.defs.onnx_opset_version(), FIRST_OPSET, -1):
        if loads(opset, _ir_version(opset)):
            return opset
    return FIRST_OPSET


def _ir_version(opset: int) -> int:
    return max(FIRST_IR, helper.find_min_ir_version_for([helper.make_opsetid("", opset)]))
