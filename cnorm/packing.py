"""The arrays and numbers that `_core.Network` packs of each layer, and its errors about sizes."""

from __future__ import annotations

import math

import numpy as np

from cnorm.arguments import quoted

# 1 GiB; panels have 32 rows, so a file of many matrices of one row could fill the memory
PANEL_FLOATS = 1 << 28

# the matrices, then the vectors of a layer, in the order of cnorm_gradient
FIELDS = (
    *("weight_x", "weight_h", "weight_n", "weight_p"),
    *("inside_x", "inside_h", "gain_x", "gain_h", "bias", "bias_n", "gain_c", "bias_c", "bias_p"),
)
# the enumerations of cnorm_rnn.h
LAYER_KIND = {"Linear": 0, "LSTM": 1, "GRU": 1, "RNN": 1, "LayerNorm": 2, "Activation": 3, "Residual": 4}
CELL_KIND = ("LSTM", "GRU", "RNN")
SCOPE = ("none", "split", "sum")
CELL_NORM = ("none", "output", "carry")
RESET = ("after", "candidate", "before")
ACTIVATION = ("tanh", "relu", "sigmoid")


def layer_parts(kind: str, layer, size: int) -> tuple[int, np.ndarray, dict]:
    """The arrays and numbers that a layer is packed from; (kind, layer, size) as returned by `cnorm.layers.flat`.

    Returns
    -------
    kind : int
        A cnorm_layer_kind.
    numbers : ndarray, float64
        The numbers of its struct, in their order.
    fields : dict of str to tuple or ndarray
        By the names of `FIELDS`, as `_matrix` and `_vector` return them; without those that the layer does not have.
        Of a cell also the initial state h0 and, for an LSTM, c0.
    """
    if kind == "Linear":
        numbers = ()
        fields = {
            "weight_x": _matrix(layer.weights["weight"], layer.rows.get("weight"), 1, 0),
            "bias": _vector(layer.weights.get("bias"), 1, size),
        }
    elif kind == "LayerNorm":
        numbers = (size, layer.eps)
        fields = {
            "gain_h": _vector(layer.weights["weight"], 1, size),
            "bias": _vector(layer.weights.get("bias"), 1, size),
        }
    elif kind == "Activation":
        numbers, fields = (size, ACTIVATION.index(layer.function)), {}
    elif kind == "Residual":
        numbers, fields = (size, layer), {}
    elif kind in LAYER_KIND:
        numbers, fields = _cell_numbers(layer), _cell_fields(layer)
    else:
        raise ValueError(f"kind must be that of a layer, got {quoted(kind)}")
    return LAYER_KIND[kind], np.array(numbers, np.float64), fields


def _cell_numbers(layer) -> tuple:
    spec = layer.spec
    return (
        CELL_KIND.index(spec.kind),
        SCOPE.index(spec.scope),
        CELL_NORM.index(spec.cell_norm),
        RESET.index(spec.reset),
        ACTIVATION.index(spec.activation),
        spec.update == "keep",
        0 if layer.eps is None else layer.eps,
        math.inf if spec.cell_clip is None else spec.cell_clip,
        math.inf if spec.projection_clip is None else spec.projection_clip,
        spec.zoneout,
    )


def _cell_fields(layer) -> dict:
    tensors, units, outputs = layer.packed(), layer.units, layer.output_size
    gates, group = len(layer.spec.gates), tensors["group"]
    of_h = gates - (tensors["weight_n"] is not None)
    shapes = {
        "weight_x": (gates * units, layer.input_size),
        "weight_n": (units, units),
        "weight_h": (of_h * units, outputs),
        "weight_p": (outputs, units),
    }
    for name, shape in shapes.items():  # the kernels read exactly this much
        if tensors[name] is not None and tensors[name].shape != shape:
            raise ValueError(f"{name} of {layer!r} must be packed as {shape}, got {tensors[name].shape}")
    grouped = {"weight_x": (gates, group), "weight_h": (of_h, group), "weight_n": (1, 0), "weight_p": (1, 0)}
    fields = {name: _matrix(tensors[name], layer.rows.get(name), *those) for name, those in grouped.items()}
    for name in FIELDS[4:9]:
        fields[name] = _vector(tensors[name], gates, units)
    for name in ("bias_n", "gain_c", "bias_c"):
        fields[name] = _vector(tensors[name], 1, units)
    return fields | {"bias_p": _vector(tensors["bias_p"], 1, outputs), "h0": tensors["h0"], "c0": tensors["c0"]}


def _matrix(w: np.ndarray | None, rounded, gates: int, group: int) -> tuple | None:
    """(w, rows, scales, gates, group): w [gates * units, inputs] and the arrays of the `Rows` that it is rounded to."""
    if w is None:
        return None
    if gates < 1:
        raise ValueError(f"gates must be at least 1, got {gates}")
    rows = scales = None
    if rounded is not None:
        rows = np.ascontiguousarray(rounded.rows)
        if rows.shape != w.shape:
            raise ValueError(f"rows must have the shape {w.shape}, got {rows.shape}")
        if rows.dtype == np.int8:
            scales = np.ascontiguousarray(rounded.scales, np.float32)
            if scales.shape != (len(rows),):
                raise ValueError(f"scales must have the shape ({len(rows)},), got {scales.shape}")
    return w, rows, scales, gates, group


def _vector(v: np.ndarray | None, gates: int, units: int) -> np.ndarray | None:
    """v [gates, units], or None."""
    return None if v is None else np.ascontiguousarray(v, np.float32).reshape(gates, units)


def refuse_outputs(size: int, weights: int) -> None:
    raise ValueError(
        f"layers take {size} bytes for the outputs of one step: more than 64 MiB, and more "
        f"than 8 times the {weights} bytes of their weights"
    )


def refuse_panels(size: int, weights: int) -> None:
    raise ValueError(
        f"layers take {size} bytes packed in panels of 32 rows: more than {4 * PANEL_FLOATS}, and "
        f"more than 8 times the {weights} bytes of their weights"
    )


def set_starts(initial: np.ndarray, arrays: tuple, starts: list) -> None:
    """Set the recurrent arrays (name, units, offset) of a state to their initial values; None is 0."""
    for (_, units, offset), start in zip(arrays, starts, strict=True):
        if start is not None:
            initial[offset : offset + units] = start


def set_cell_starts(initial: np.ndarray, fields: dict, h: int, c: int) -> None:
    """Set the initial h and c of one cell, which lie at these offsets, to those among its packed `fields`."""
    for name, offset in (("h0", h), ("c0", c)):
        start = fields.get(name)
        if start is not None:
            initial[offset : offset + len(start)] = start


def grid(flat: np.ndarray, shape: tuple) -> np.ndarray:
    """A view of this shape of an array whose rows are padded."""
    return flat.reshape(*shape[:-1], -1)[..., : shape[-1]]
