"""One step of the cells that `CellSpec` describes, in float64, from their pre-activations."""

from __future__ import annotations

import numpy as np

from cnorm.cells.functions import named_parameters
from onnx_export.laws.functions import TABLE

__all__ = ["function_of", "step"]


def function_of(of: str | tuple, clip: float | None = None):
    """A function of a spec, of arguments that are clipped first."""
    name, parameters = named_parameters(of)

    def apply(x):
        return TABLE[name].value(x if clip is None else np.clip(x, -clip, clip), *parameters.values())

    return apply


def step(kind: str, p, h, c, fields, norm=None) -> tuple[np.ndarray, ...]:
    """The new h, and the new c of an LSTM.

    Parameters
    ----------
    kind : str
        "LSTM", "GRU" or "RNN".
    p : mapping of str to ndarray [rows, units]
        Pre-activations by gate, norms and biases included; of a GRU with reset after, "m" is what the reset gate
        multiplies and "n" what is added to it.
    h, c : ndarray [rows, units]
        The old states; c is not read without an LSTM.
    fields : mapping
        Those of a `CellSpec` that the step depends on.
    norm : callable or None
        Layer norm of c.
    """
    state = function_of(fields["activation"], fields.get("clip"))
    with np.errstate(all="ignore"):
        if kind == "RNN":
            return (state(p["a"]),)
        gate = function_of(fields["recurrent_activation"], fields.get("clip"))
        return _lstm(p, c, state, gate, fields, norm) if kind == "LSTM" else (_gru(p, h, state, gate, fields),)


def _lstm(p, c, state, gate, fields, norm):
    c = gate(p["f"]) * c + gate(p["i"]) * state(p["g"])
    if fields.get("cell_clip") is not None:
        c = np.clip(c, -fields["cell_clip"], fields["cell_clip"])
    shown = c if norm is None else norm(c)
    return gate(p["o"]) * state(shown), shown if fields.get("cell_norm") == "carry" else c


def _gru(p, h, state, gate, fields):
    if fields["reset"] == "before":
        n = state(p["n"])
    else:
        n = state(gate(p["r"]) * p["n"] if fields["reset"] == "candidate" else p["n"] + gate(p["r"]) * p["m"])
    z = gate(p["z"])
    return z * h + (1 - z) * n if fields["update"] == "keep" else (1 - z) * h + z * n
