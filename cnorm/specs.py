"""What a recurrent cell computes, as data. A preset names a cell that exists in the wild; it is never guessed."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["PRESETS", "CellSpec"]


@dataclass(frozen=True)
class CellSpec:
    """One recurrent cell.

    Two checkpoints can have the same names and shapes and still mean different recurrences, so everything that
    decides the result is here.

    Attributes
    ----------
    kind : str
        "LSTM".
    name : str
        The preset's name, as in the model file.
    source : str
        Where the equations are from.
    scope : str
        What is normalised before the gates: "split", LN(W_h h) + LN(W_x x), each over all gates together.
    cell_norm : str
        "output": h = o * tanh(LN(c)), and the next step sees the raw c.
    gates : str
        Their order in the weights, a letter each.
    eps : float or None
        Added to the variance where the user gives none; None: the user must.
    """

    kind: str
    name: str
    source: str
    scope: str
    cell_norm: str
    gates: str
    eps: float | None


PRESETS = MappingProxyType(
    {
        (spec.kind, spec.name): spec
        for spec in (CellSpec("LSTM", "ba2016", "arXiv:1607.06450, Eq. 20-22", "split", "output", "fiog", 1e-5),)
    }
)
"""Presets by (kind, name), such as ``PRESETS["LSTM", "ba2016"]``."""
