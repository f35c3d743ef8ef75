"""From a cnorm model to an ONNX file."""

from __future__ import annotations

import functools
import json
import operator
import os
import tempfile
from pathlib import Path

import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

import cnorm
from cnorm.model import METADATA_KEY, _configuration, _tensors
from onnx_export.builders import builder
from onnx_export.graph import GraphBuilder

__all__ = ["FIRST_OPSET", "export", "newest_opset", "state_table"]

FIRST_OPSET = 13
FIRST_IR = 8  # of opset 17; every onnxruntime that runs LayerNormalization reads it


def export(
    model,
    path=None,
    *,
    form: str = "step",
    opset: int = 17,
    batch: int | str = 1,
    functions: bool = False,
    native_ops: bool = False,
) -> onnx.ModelProto:
    """Write a model as an ONNX graph with its states as named inputs and outputs.

    The graph of form "step" takes ``x`` [batch, input_size] and each state, ``h0_in``, ``c0_in``, ...
    [batch, units], and gives ``y`` [batch, output_size] and the next states, ``h0_out``, ``c0_out``, ...; the
    number counts recurrent layers. Initialisers have the names and layout of the model file. The metadata key
    ``cnorm.model`` holds, as JSON, the configuration and a table of the states.

    Parameters
    ----------
    model : cnorm.Model
    path : str or path-like, optional
        Where to write the file. It appears whole or not at all.
    form : "step"
    opset : int
        Version of the ONNX operators, 13 or newer, as far as the installed onnxruntime loads it. Layer
        normalisation is the operator LayerNormalization from 17 on, composed of others below.
    batch : 1 or str
        The number of conversations in one call, or the name of a dimension that stays open.
    functions : bool
        Not yet.
    native_ops : bool
        Not yet.

    Returns
    -------
    onnx.ModelProto

    Raises
    ------
    TypeError
        If `model` or an option is of another type.
    ValueError
        For an unknown form, an opset out of range or a layer without an ONNX form.
    OSError
        If the file cannot be written.
    """
    if not isinstance(model, cnorm.Model):
        raise TypeError(f"model must be a cnorm.Model, got {type(model).__name__}")
    if form != "step":
        raise ValueError(f"form must be 'step', got {form!r}")
    opset = _checked_opset(opset)
    batch = _checked_batch(batch)
    exported = _step(model, opset, batch)
    onnx.checker.check_model(exported, full_check=True)
    if path is not None:
        write(exported, path)
    return exported


def _step(model, opset: int, batch) -> onnx.ModelProto:
    graph = GraphBuilder(opset)
    table = state_table(model)
    given = {row["name"]: row["input"] for row in table}
    y, new = _layers(graph, model, "x", given)
    for row in table:
        graph.publish(new[row["name"]], row["output"])
    graph.publish(y, "y")
    inputs = [_value("x", [batch, model.input_size])]
    inputs += [_value(row["input"], [batch, row["units"]]) for row in table]
    outputs = [_value("y", [batch, model.output_size])]
    outputs += [_value(row["output"], [batch, row["units"]]) for row in table]
    stored = [numpy_helper.from_array(array, name) for name, array in _tensors(model.layers).items()]
    proto = helper.make_graph(graph.nodes, "cnorm", inputs, outputs, stored)
    opsets = [helper.make_opsetid("", opset)]
    exported = helper.make_model(
        proto,
        opset_imports=opsets,
        ir_version=max(FIRST_IR, helper.find_min_ir_version_for(opsets)),
        producer_name="cnorm",
        producer_version=cnorm.__version__,
    )
    described = json.loads(_configuration(model.layers)) | {"form": "step", "states": table}
    helper.set_model_props(exported, {METADATA_KEY: json.dumps(described)})
    return exported


def _layers(graph: GraphBuilder, model, x: str, states: dict[str, str]) -> tuple[str, dict[str, str]]:
    """The nodes of all layers for one step; `states` and the result go by the names of the state table."""
    recurrent, new = 0, {}
    for i, layer in enumerate(model.layers):
        family = builder(layer)
        if graph.opset < family.FIRST_OPSET:
            raise ValueError(f"opset must be at least {family.FIRST_OPSET} for {layer!r}, got {graph.opset}")
        weights = {name: f"layers.{i}.{name}" for name in layer.weights}
        names = {letter: f"{letter}{recurrent}" for letter in family.states(layer)}
        own = {letter: states[name] for letter, name in names.items()}
        graph.scope = f"layers.{i}/"
        x, after = family.build(graph, layer, weights, x, own)
        new |= {names[letter]: value for letter, value in after.items()}
        recurrent += bool(names)
    return x, new


def state_table(model) -> list[dict]:
    """What a host must know to carry the states: a row for each, in the order of the graph's inputs."""
    table, recurrent = [], 0
    for layer in model.layers:
        states = builder(layer).states(layer)
        for letter, units in states.items():
            name = f"{letter}{recurrent}"
            table.append(
                {
                    "name": name,
                    "input": f"{name}_in",
                    "output": f"{name}_out",
                    "units": units,
                    "shape": ["batch", units],
                    "dtype": "float32",
                    "initial": 0.0,
                    "reset": "set to initial before the first step of a sequence",
                }
            )
        recurrent += bool(states)
    return table


def _value(name: str, shape) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def _checked_opset(opset) -> int:
    if isinstance(opset, bool) or not hasattr(opset, "__index__"):
        raise TypeError(f"opset must be an integer, got {opset!r}")
    opset = operator.index(opset)
    if not FIRST_OPSET <= opset <= newest_opset():
        raise ValueError(
            f"opset must be from {FIRST_OPSET} to {newest_opset()}, the newest that the installed "
            f"onnxruntime {onnxruntime.__version__} loads, got {opset}"
        )
    return opset


def _checked_batch(batch):
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
        opsets = [helper.make_opsetid("", opset)]
        values = [[_value(name, [1])] for name in ("x", "y")]
        graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "probe", *values)
        ir = max(FIRST_IR, helper.find_min_ir_version_for(opsets))
        probe = helper.make_model(graph, opset_imports=opsets, ir_version=ir)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # a refusal is what we are asking for, not an error to print
        try:
            onnxruntime.InferenceSession(
                probe.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        except Exception:  # onnxruntime's exceptions have no common base but this
            continue
        return opset
    return FIRST_OPSET


def write(model: onnx.ModelProto, path) -> None:
    """Write the file whole or not at all."""
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(model.SerializeToString(deterministic=True))
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
