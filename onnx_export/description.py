"""The description of an exported model: its table of states, metadata, doc strings and JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict

import numpy as np
import onnx
from onnx import helper

from cnorm.storage.files import each_once
from cnorm.storage.model_files import METADATA_KEY, configuration
from cnorm.text import clip, printable
from onnx_export.builders import states_of
from onnx_export.options import Options

__all__ = ["described", "initial_states", "metadata_difference", "sidecar", "state_table"]


def state_table(model, batch: int | str = 1, dtype: str = "float32") -> list[dict]:
    """The table that a host needs to carry the states: a row for each, in the order of the graph's inputs.

    `initial` is a number for all units, or a list with one for each; `tensor` is then its name in the model file.
    """
    table, recurrent = [], 0

    for i, whole in enumerate(model.layers):
        for own, layer in whole.leaves(f"layers.{i}"):
            states = states_of(layer)
            for letter, units in states.items():
                name, start = f"{letter}{recurrent}", layer.weights.get(f"{letter}0")
                row = {"name": name, "input": f"{name}_in", "output": f"{name}_out", "units": units}
                row |= {"shape": [batch, units], "dtype": dtype, "initial": 0.0}
                if start is not None:
                    row |= {"initial": start.tolist(), "tensor": f"{own}.{letter}0"}
                table.append(row | {"reset": "set to initial before the first step of a sequence"})
            recurrent += bool(states)
    return table


def initial_states(text: str | None, units: Mapping[str, int], dtype) -> dict[str, np.ndarray]:
    """The initial states by the file's state table, which is untrusted JSON; zeros without a table."""
    try:
        table = {row["name"]: row["initial"] for row in json.loads(text or "{}").get("states", [])}
        with np.errstate(over="ignore"):
            initial = {name: np.full(size, table.get(name, 0), dtype) for name, size in units.items()}
        if not all(np.isfinite(array).all() for array in initial.values()):
            raise ValueError("NaN or infinity among the initial states")
        return initial
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"onnx_model: {METADATA_KEY!r} has no state table that fits the inputs: {error!r}") from None


def described(onnx_model: onnx.ModelProto, model, options: Options, states: list[dict]) -> None:
    """Set metadata and doc strings.

    ``cnorm.model`` holds everything as JSON. The other keys hold one value each, for hosts that do not parse JSON, such
    as sherpa-onnx's metadata reader.
    """
    whole = json.loads(configuration(model.layers, model.outputs))
    whole |= {"form": options.form, "dtype": options.dtype, "states": states}
    whole["options"] = asdict(options)
    flat = {"model_type": "cnorm", "version": whole["format"], "form": options.form, "dtype": options.dtype}
    flat |= {"input_size": model.input_size, "output_size": model.output_size}
    flat |= {"steps": options.steps} if options.steps is not None else {}
    flat |= {"states": ",".join(row["name"] for row in states)}
    for row in states:
        initial = row["initial"]
        initial = ",".join(map(repr, initial)) if isinstance(initial, list) else repr(initial)
        flat |= {f"{row['name']}_units": row["units"], f"{row['name']}_initial": initial}
    helper.set_model_props(
        onnx_model, {METADATA_KEY: json.dumps(whole)} | {key: str(value) for key, value in flat.items()}
    )
    step = "one step" if options.form == "step" else f"{options.time} steps"
    layers = ", ".join(repr(layer) for layer in model.layers)
    onnx_model.doc_string = f"{step} of the layers {layers}"[:2000]
    onnx_model.graph.doc_string = (
        "Feed each STATE_out back as STATE_in; before the first step of a sequence STATE_in is the initial value of "
        f"the table in the metadata {METADATA_KEY!r}."
    )
    texts = {"x": "the input", "y": "the output"}
    for row in states:
        kind = {"c": "cell", "f": "kept frames"}.get(row["name"][0], "output")
        texts[row["input"]] = f"{kind} of recurrent layer {row['name'][1:]} before the first step of this call"
        texts[row["output"]] = f"{kind} of recurrent layer {row['name'][1:]} after the last step of this call"
    texts |= {name: f"elements {at.start} to {at.stop} of y" for name, at in model.outputs.items()}
    for value in (*onnx_model.graph.input, *onnx_model.graph.output):
        value.doc_string = texts[value.name]


def sidecar(onnx_model: onnx.ModelProto) -> bytes:
    """The metadata and the interface as JSON, for hosts whose runtime does not give access to them."""
    text = {entry.key: entry.value for entry in onnx_model.metadata_props}[METADATA_KEY]
    graph = onnx_model.graph
    whole = json.loads(text) | {
        "inputs": [_value(v) for v in graph.input],
        "outputs": [_value(v) for v in graph.output],
    }
    return (json.dumps(whole, indent=1) + "\n").encode()


def _value(value: onnx.ValueInfoProto) -> dict:
    kind = value.type.tensor_type
    shape = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in kind.shape.dim]
    dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type).name
    return {"name": value.name, "shape": shape, "dtype": dtype, "about": value.doc_string}


def metadata_difference(text: str | None, model) -> str | None:
    """How the configuration of a file's metadata, untrusted JSON, differs from the model's."""
    if text is None:
        return None
    try:
        found = json.loads(text, object_pairs_hook=each_once)
        outputs = {"outputs": found["outputs"]} if "outputs" in found else {}
        found = {key: found[key] for key in ("format", "layers")} | outputs
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"{METADATA_KEY!r} is not JSON with a format and layers"
    return _difference(found, json.loads(configuration(model.layers, model.outputs)), "")


def _difference(found, wanted, where: str) -> str | None:
    """The first place where two JSON values differ."""
    if isinstance(found, dict) and isinstance(wanted, dict) and found.keys() == wanted.keys():
        pairs = [(found[key], wanted[key], f"{where}.{key}") for key in wanted]
    elif isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        pairs = [(*pair, f"{where}[{i}]") for i, pair in enumerate(zip(found, wanted, strict=True))]
    elif found == wanted:
        return None
    else:
        got = clip(printable(json.dumps(found)), 200)
        return f"{where.lstrip('.')} is {got}, the model's is {clip(json.dumps(wanted), 200)}"
    return next(filter(None, (_difference(*pair) for pair in pairs)), None)
