"""Kind, tensors and spec of the layers of recurrent operators, and of cells that are written out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

import cnorm
from cnorm.cells.specs import GATES
from onnx_export.importer.cells import Found

__all__ = ["of_operator", "of_written"]


def of_operator(kind: str, constants):
    """Kind, tensors and spec of a recurrent operator."""
    weights = {name: np.asarray(w, np.float32) for name, w in constants["weights"].items()}
    preset = "onnx_linear_before_reset" if constants["reset_after"] and kind == "GRU" else "onnx"
    return kind, weights, replace(cnorm.PRESETS[kind, preset], **constants["functions"])


def of_written(found: Found):
    """Kind, tensors, spec and eps of a written cell, whose gates are in the order of the kernels."""
    gates = GATES[found.kind]
    parts = {name: np.asarray(array, np.float32) for name, array in found.parts.items()}
    if found.fields["scope"] == "none" and not {"gain_c", "weight_p", "bias_p"} & parts.keys():
        return _plain_layer(found, parts)
    tensors, triples = {}, []
    for name, array in parts.items():
        rows = f"{len(gates)}H" if len(gates) > 1 else "H"
        shape = {"weight_x": f"{rows} I", "weight_h": f"{rows} P" if "weight_p" in parts else f"{rows} H"}
        shape |= {"weight_p": "P H", "bias_p": "P", "bias_n": "H", "gain_c": "H", "bias_c": "H"}
        meaning = "bias_h[n]" if name == "bias_n" else name
        triples.append((name, shape.get(name, rows), meaning))
        tensors[name] = array if name in ("weight_p",) else array.reshape(-1, *array.shape[2:])
        if name in ("bias_p", "bias_n", "gain_c", "bias_c"):
            tensors[name] = array
    spec = cnorm.CellSpec(
        found.kind, "written", "written out in an ONNX file", gates, tuple(triples), eps=found.eps, **found.fields
    )
    return found.kind, tensors, spec


def _plain_layer(found: Found, parts):
    """A cell without norms or projection, under the names of ONNX' operators."""
    preset = cnorm.PRESETS[found.kind, "onnx_linear_before_reset" if found.fields.get("reset") == "after" else "onnx"]
    at = [GATES[found.kind].index(gate) for gate in preset.gates]
    bias_h = np.zeros_like(parts["bias"])
    if "bias_n" in parts:
        bias_h[2] = parts["bias_n"]
    order = {name: array[at] for name, array in parts.items() if array.ndim > 1}
    tensors = {
        "W": order["weight_x"].reshape(1, -1, order["weight_x"].shape[-1]),
        "R": order["weight_h"].reshape(1, -1, order["weight_h"].shape[-1]),
        "B": np.concatenate([order["bias"].ravel(), bias_h[at].ravel()])[None],
    }
    return found.kind, tensors, replace(preset, **found.fields)
