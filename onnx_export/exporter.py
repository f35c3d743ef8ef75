"""From a cnorm model to an ONNX graph."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
from onnx import helper

import cnorm
from cnorm.layers.base import INPUT
from cnorm.layers.chain import with_outputs
from cnorm.storage.model_files import named_tensors
from onnx_export.builders import builder, native, states_of
from onnx_export.builders.norms import checked_eps
from onnx_export.description import described, sidecar, state_table
from onnx_export.files import write
from onnx_export.folding import fold
from onnx_export.graph.sizes import shape_of
from onnx_export.graph_builder import GraphBuilder
from onnx_export.loops import LOOPS
from onnx_export.nodes import model_graphs
from onnx_export.options import DTYPES, Options, ir_version
from onnx_export.runtimes.ways import written_for

__all__ = ["export", "finished", "is_export"]

FLOAT16_MAX = float(np.finfo(np.float16).max)


def export(
    model,
    path=None,
    *,
    form: str = "step",
    opset: int = 17,
    batch: int | str = 1,
    native_ops: bool = False,
    dtype: str = "float32",
    portable: bool = False,
    composed_norms: bool = False,
    loop: str = "scan",
    steps: int | None = None,
    sidecar: bool = False,
    runtime: str | None = None,
) -> onnx.ModelProto:
    """Write a model as an ONNX graph with its states as named inputs and outputs.

    The graph of form "step" takes ``x`` [batch, input_size] and each state, ``h0_in``, ``c0_in``, ...
    [batch, units], and gives ``y`` [batch, output_size] and the next states, ``h0_out``, ``c0_out``, ...; the
    number counts recurrent layers. In form "sequence" ``x`` is [T, batch, input_size] and ``y``
    [T, batch, output_size] for any T >= 1 (onnxruntime's Scan rejects empty sequences). The states are those before
    the first and after the last step, so that long recordings can be processed in chunks.

    Initialisers have the names and layout of the model file. The metadata key ``cnorm.model`` holds, as JSON,
    the configuration and a table of the states, from which `load` rebuilds the model.

    Parameters
    ----------
    model : cnorm.Model
    path : str or path-like, optional
        Where to write the file, which is replaced in one step or not at all. Weights of more than 1 GiB go to a second
        file in the same folder, to which the result then refers (see `onnx_export.files.write`).
    form : "step" or "sequence"
    opset : int
        Version of the ONNX operators, from 13 to the newest that the installed onnxruntime loads. Layer normalisation
        is the operator LayerNormalization from 17 on, and composed of other operators below.
    batch : 1 or str
        The number of rows in one call, each an independent stream: 1, or the name of an open dimension. In form
        "sequence" the name must not be "T", which is that of the steps.
    native_ops : bool
        Write recurrent layers without norms as the operators LSTM, GRU and RNN.
    dtype : "float32" or "float16"
        Type of weights, inputs, outputs and states. For float16 the weights are rounded; norms are computed in float32
        in both cases.
    portable : bool
        For other runtimes than onnxruntime: nodes that depend on weights alone are folded into weights, products
        are MatMul and Add, not Gemm, and every output comes from a node of its own name, which nothing else reads.
        `load` cannot rebuild the model from such a file.
    composed_norms : bool
        Compose norms of other operators at any opset.
    loop : "scan", "loop" or "unrolled"
        How form "sequence" repeats the step: the operator Scan, the operator Loop, or the nodes of every step.
    steps : int, optional
        Fix T of form "sequence"; needed for "unrolled".
    sidecar : bool
        Write ``PATH.json`` too: the metadata, and the shapes of inputs and outputs.
    runtime : str, optional
        A name of docs/runtimes.md. Of form, steps, batch and dtype write what this runtime was seen to compute right
        for the model's presets; the other options are chosen. A warning names what it was not tried with.

    Returns
    -------
    onnx.ModelProto

    Raises
    ------
    TypeError
        If `model` or an option is of another type.
    ValueError
        For an unknown form, loop or dtype, an opset or steps out of range, options that exclude each other, a layer
        without an ONNX form or without a native operator, an eps of 0, weights beyond float16's range, or a form that
        `runtime` was not seen to compute right.
    OSError
        If the file cannot be written.
    """
    if not isinstance(model, cnorm.Model):
        raise TypeError(f"model must be a cnorm.Model, got {type(model).__name__}")
    if model.weights != "float32" and dtype != "float32":
        raise ValueError(f"dtype must be 'float32' for a model with {model.weights} weights, got {dtype!r}")
    if sidecar and path is None:
        raise ValueError("path must be given for a sidecar, which lies beside the file")
    options = Options(
        form=form,
        opset=opset,
        batch=batch,
        native_ops=native_ops,
        dtype=dtype,
        portable=portable,
        composed_norms=composed_norms,
        loop=loop,
        steps=steps,
    )
    if runtime is not None:
        options = written_for(runtime, model, options, export.__kwdefaults__)
    exporter = _Export(model, options)
    exported, weights = exporter.model()
    described(exported, model, options, exporter.states)
    write(exported, weights, path, beside={".json": _sidecar(exported)} if sidecar else {})
    return exported


_sidecar = sidecar  # `export` has a parameter of that name


def is_export(onnx_model: onnx.ModelProto, model, options) -> bool:
    """Whether a graph is the one that `export` writes of a model; its initialisers are the model's weights.

    Parameters
    ----------
    onnx_model : onnx.ModelProto
        A file as `model_io.load` gives it; changed.
    model : cnorm.Model
    options : object
        What the file's metadata says: anything.
    """
    try:
        wanted = Options(**options)
        if wanted.loop == "unrolled":  # a few bytes may ask for many steps
            one, two = (len(_Export(model, replace(wanted, steps=n)).model()[0].graph.node) for n in (1, 2))
            if len(onnx_model.graph.node) != one + (two - one) * (wanted.steps - 1):
                return False
        exported, weights = _Export(model, wanted).model()
    except (TypeError, ValueError):
        return False
    types = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in weights.items()}
    return {tensor.name: tensor.data_type for tensor in onnx_model.graph.initializer} == types and _computed(
        exported
    ) == _computed(onnx_model)


def _computed(onnx_model: onnx.ModelProto) -> tuple:
    """What decides the results of a model beside its weights; inferred shapes, which are cleared, do not."""
    for graph in model_graphs(onnx_model):
        graph.ClearField("value_info")
    graph = onnx_model.graph
    interface = [[(value.name, value.type) for value in values] for values in (graph.input, graph.output)]
    return graph.node, interface, graph.sparse_initializer, onnx_model.functions, onnx_model.opset_import


class _Export:
    """One call of `export`, its options checked."""

    def __init__(self, model, options: Options):
        self.layers, self.sizes, self.options = model.layers, (model.input_size, model.output_size), options
        self.outputs = model.outputs
        self.states = state_table(model, options.batch, options.dtype)
        # initial states that are in the state table: no node reads these weights
        self.starts = {row.get("tensor") for row in self.states}
        self.weights = self._initialisers()

    def model(self) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
        graph = self._builder()
        time = [] if self.options.form == "step" else [self.options.time]
        inputs, outputs = self._interface("", time)
        if self.options.form == "step" or self.options.native_ops:
            graph.sequence = bool(time)
            y, new = self.body(graph, "x", {row["name"]: row["input"] for row in self.states})
            values = {"y": y} | new
        else:
            values = LOOPS[self.options.loop](self, graph)
        outputs += self._parts(graph, values["y"], time)
        self._publish(graph, values, outputs)
        # with Scan and Loop the graph of the step has been folded already
        if not any(node.op_type in ("Scan", "Loop") for node in graph.nodes):
            self._fold(graph)
        made = helper.make_graph(graph.nodes, "cnorm", inputs, outputs)
        return finished(made, self.options.opset), self.weights

    def _builder(self) -> GraphBuilder:
        """A builder for the model's graph, or for that of one step."""
        taken = ["x", "y", *(row[key] for row in self.states for key in ("input", "output"))]
        for name in self.outputs.keys() & {*taken, *self.weights}:
            raise ValueError(
                f"model: an output must have another name in a file, got {name!r}, which is another value's"
            )
        taken += self.outputs
        return self._empty(taken, self.weights if self.options.loop == "unrolled" else None)

    def _empty(self, taken: list[str], shared: dict[str, np.ndarray] | None = None) -> GraphBuilder:
        given = self.options
        return GraphBuilder(
            given.opset, given.dtype, taken, portable=given.portable, composed=given.composed_norms, shared=shared
        )

    def _publish(self, graph: GraphBuilder, values: dict[str, str], outputs) -> None:
        names = [*(row["name"] for row in self.states), "y"]
        outputs = outputs[: len(names)]
        for name, output in zip(names, outputs[1:] + outputs[:1], strict=True):
            if self.options.portable:
                graph.copy(values[name], output.name, [size or 0 for size in shape_of(output.type) or ()])
            else:
                graph.publish(values[name], output.name)

    def _parts(self, graph: GraphBuilder, y: str, leading: list) -> list:
        """Append a node for each named output, a part of y; returns the outputs."""
        graph.scope = ""
        for name, at in self.outputs.items():
            bounds = {"starts": at.start, "ends": at.stop, "axes": -1}
            constants = [graph.constant([value], f"{name}_{key}", np.int64) for key, value in bounds.items()]
            graph.nodes.append(helper.make_node("Slice", [y, *constants], [name], name=name))
        shapes = {name: [*leading, self.options.batch, at.stop - at.start] for name, at in self.outputs.items()}
        return [helper.make_tensor_value_info(name, DTYPES[self.options.dtype], shapes[name]) for name in shapes]

    def _fold(self, graph: GraphBuilder) -> None:
        if self.options.portable:
            graph.nodes, self.weights = fold(graph.nodes, self.weights, self.options.opset)

    def _initialisers(self) -> dict[str, np.ndarray]:
        """The model's own tensors, without those that no node reads."""
        tensors = named_tensors(self.layers).items()
        return {name: self._rounded(name, array) for name, array in tensors if name not in self.starts}

    def _rounded(self, name: str, array: np.ndarray) -> np.ndarray:
        dtype = self.options.dtype
        if array.dtype != np.float32:  # rows of a rounded matrix
            return array
        if dtype == "float16" and np.abs(array).max() > FLOAT16_MAX:
            raise ValueError(f"dtype must be 'float32': {name} has weights beyond the {FLOAT16_MAX:.0f} of float16")
        return array.astype(dtype, copy=False)

    def step_graph(self, prefix: str, row_of: tuple[str, str] | None = None):
        """The graph of one step for a Scan or Loop: its builder, inputs and outputs.

        Parameters
        ----------
        prefix : str
            Prefix of the names of inputs and outputs.
        row_of : (str, str), optional
            (value, index): x is this row of this value of the enclosing graph, instead of an input.
        """
        graph = self._builder()
        x = prefix + "x"
        if row_of:
            x = graph.add("Gather", *row_of, name=x, axis=0)
        given = {row["name"]: prefix + row["input"] for row in self.states}
        y, new = self.body(graph, x, given)
        for row in self.states:
            graph.publish(new[row["name"]], prefix + row["output"])
        graph.publish(y, prefix + "y")
        self._fold(graph)
        return (graph, *self._interface(prefix, []))

    def _interface(self, prefix: str, leading: list) -> tuple[list, list]:
        """Inputs and outputs: x or y, with `leading` dimensions, and then the states."""

        def value(name, *shape):
            return helper.make_tensor_value_info(prefix + name, DTYPES[self.options.dtype], shape)

        batch = self.options.batch
        inputs = [value("x", *leading, batch, self.sizes[0])]
        inputs += [value(row["input"], batch, row["units"]) for row in self.states]
        outputs = [value("y", *leading, batch, self.sizes[1])]
        outputs += [value(row["output"], batch, row["units"]) for row in self.states]
        return inputs, outputs

    def body(self, graph, x: str, states: dict[str, str]) -> tuple[str, dict[str, str]]:
        """Append the nodes of one step. `states` and the new states are keyed by the names in the state table."""
        before, after = iter(states.items()), {}

        def chain(layers, prefix, x):
            known = {INPUT: x}
            for i, layer in enumerate(layers):
                x = one(layer, f"{prefix}{i}", x, known)
                if layer.name is not None:
                    known[layer.name] = x
            return x

        def one(layer, place, x, known):
            if layer.inner() and layer.kind in held:
                return held[layer.kind](layer, place, x)
            build, letters = self._builder_of(layer)
            names = (*layer.weights, *(f"rows.{name}{end}" for name in layer.rows for end in ("", ".scales")))
            weights = {name: f"{place}.{name}" for name in names if f"{place}.{name}" in self.weights}
            weights |= {name: known[name] for name in layer.reads}
            given = {letter: next(before) for letter in letters}
            graph.scope = f"{place}/"
            y, new = build(graph, layer, weights, x, {letter: value for letter, (_, value) in given.items()})
            after.update({given[letter][0]: value for letter, value in new.items()})
            return y

        def residual(layer, place, x):
            inner = chain(layer.layers, f"{place}.", x)
            graph.scope = f"{place}/"
            return graph.add("Add", x, inner, name="y")

        def both_ways(layer, place, x):
            ways = [one(way, f"{place}.{name}", x, {}) for name, way in layer.inner().items()]
            graph.scope = f"{place}/"
            return graph.add("Concat", *ways, name="y", axis=-1)

        held = {"Residual": residual, "OverPositions": both_ways}
        return chain(with_outputs(self.layers, tuple(self.outputs)), "layers.", x), after

    def _builder_of(self, layer):
        """The function that appends a layer's nodes, and the layer's states."""
        states = states_of(layer)
        checked_eps(getattr(layer, "eps", None), f"model: eps of {layer!r}")
        if self.options.native_ops and layer.recurrent:
            if layer.rows:
                raise ValueError(f"native_ops must be False for {layer!r}: its matrices are rounded")
            return native.build, states
        return builder(layer).build, states


def finished(graph: onnx.GraphProto, opset: int) -> onnx.ModelProto:
    """The model of a graph, with explicit versions: the onnx package's defaults are newer than runtimes can read."""
    return helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", opset)],
        ir_version=ir_version(opset),
        producer_name="cnorm",
        producer_version=cnorm.__version__,
    )
