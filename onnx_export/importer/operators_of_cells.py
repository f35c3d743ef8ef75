"""The operators LSTM, GRU and RNN: one block for each step of each direction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cnorm.cells.functions import function_of_cell
from onnx_export.graph.tables import FUNCTIONS
from onnx_export.importer.elements import Cannot, Elements
from onnx_export.recurrent import Cell

__all__ = ["Scan", "recurrent"]

MAX_STEPS = 1 << 14  # of one call

_NAMES = {operator.lower(): name for name, operator in FUNCTIONS.items()}


@dataclass(frozen=True, eq=False)
class Scan:
    """A recurrent operator.

    Attributes
    ----------
    kind, node : str
    x : ndarray of int64
        Numbers [steps, rows, inputs].
    ways : list of (ndarray, ndarray)
        For each direction the outputs [steps, rows, units], and the last c [rows, units] (of a GRU or RNN: h).
    start : tuple of ndarray
        Initial h and c [directions, rows, units].
    cells : list of dict
        What each direction's blocks have as constants.
    """

    kind: str
    node: str
    x: np.ndarray
    ways: list[tuple[np.ndarray, np.ndarray]]
    start: tuple[np.ndarray, np.ndarray]
    cells: list[dict]

    @property
    def over(self) -> bool:
        """Whether its steps are positions: it has several, or both directions of one."""
        return len(self.x) > 1 or (len(self.ways) > 1 and self.x.shape[1] == 1)

    def whole(self) -> np.ndarray:
        """All that the layer gives, [outputs, positions]."""
        return np.concatenate([(y[:, 0] if self.over else y[0]).T for y, _ in self.ways])

    def read(self) -> np.ndarray:
        """What the layer reads, [inputs, positions]."""
        return (self.x[:, 0] if self.over else self.x[0]).T


def recurrent(kind: str) -> Callable:
    """What computes the operator LSTM, GRU or RNN, as the functions of `computing.py`."""

    def apply(trace, node, attributes, inputs, outputs):
        x, w, r, b, lengths, h, c, p = (*inputs, *[None] * 8)[:8]
        if any(isinstance(value, Elements) for value in (w, r, b, lengths, p)):
            raise Cannot("its weights and lengths must be constants")
        if p is not None and np.any(p):
            raise Cannot("it has peepholes (input P), which the preset onnx has not")
        node_cell = _checked_attributes(kind, attributes)
        steps = x.numbers
        if lengths is not None and (np.asarray(lengths) != len(steps)).any():
            raise Cannot(f"its sequence_lens are not the {len(steps)} steps of its input")
        if len(steps) > MAX_STEPS:
            raise Cannot(f"it takes {len(steps)} steps, the limit is {MAX_STEPS}")
        trace.sequences.append((node, steps))
        rows = steps.shape[1]
        if rows != 1 and len(steps) != 1 and not trace.rows:
            raise Cannot(f"it takes {rows} rows at once, wanted 1")
        h, c = (_initial(trace, node, value, (np.shape(r)[0], rows, np.shape(r)[2])) for value in (h, c))
        ways, cells = [], []
        for i, direction in enumerate(node_cell.directions):
            weights = {"W": w[i : i + 1], "R": r[i : i + 1]} | ({} if b is None else {"B": b[i : i + 1]})
            cell = {"weights": weights, "backward": direction == "reverse"}
            cell |= {"reset_after": node_cell.linear_before_reset, "functions": _functions(node_cell, i)}
            each = [_way(trace, node, kind, steps[:, j], cell | {"start": (h[i, j], c[i, j])}) for j in range(rows)]
            ways.append([np.stack(parts, axis=-2) for parts in zip(*each, strict=True)])
            cells.append(cell)
        trace.scans.append(Scan(kind, node, steps, [(way[0], way[2]) for way in ways], (h, c), cells))
        return _outputs(ways, kind)

    return apply


def _checked_attributes(kind: str, attributes) -> Cell:
    """The attributes of a recurrent operator; `Cannot` for those that no spec computes."""
    try:
        cell = Cell.from_attributes(kind, attributes)
    except ValueError as error:
        raise Cannot(str(error)) from None
    if cell.input_forget:
        raise Cannot("it has input_forget (the forget gate is 1 - i), which cnorm's cells have not")
    return cell


def _functions(cell: Cell, direction: int) -> dict:
    """The fields of a spec for the functions and the clip of a direction."""
    given = [_function_of(*each) for each in cell.activations[direction]]
    names = ["recurrent_activation"] * (cell.kind != "RNN") + ["activation", "activation"]
    if cell.kind == "LSTM" and given[1] != given[2]:
        raise Cannot(
            f"its candidate and its output have two functions, {given[1]} and {given[2]}; cnorm's LSTM has one"
        )
    if given[0] == "tanh" and cell.kind != "RNN":
        raise Cannot("its gates are tanh, which cnorm's cells have not")
    return dict(zip(names, given, strict=False)) | ({"clip": cell.clip} if np.isfinite(cell.clip) else {})


def _function_of(name: str, alpha: float | None, beta: float | None) -> str | tuple:
    if name == "affine" and (alpha, beta) == (1.0, 0.0):
        return "leaky_relu", 1.0
    if name not in _NAMES:
        raise Cannot(f"its activations include {name}, which cnorm's cells have not")
    return function_of_cell((_NAMES[name], *(value for value in (alpha, beta) if value is not None)), name)


def _way(trace, node, kind: str, steps, cell):
    """The outputs [steps, units] of one direction, and its last h and c [units]."""
    (h, c), made = cell["start"], []
    for x in steps[::-1] if cell["backward"] else steps:
        operands = [x[None], h[None], *([c[None]] if kind == "LSTM" else [])]
        new_h = trace.add(kind, node, h.shape, operands, **cell).numbers
        new_c = trace.add("state", node, c.shape, [new_h[:, None]]).numbers if kind == "LSTM" else c
        if made:
            trace.unrolled |= dict(zip([*new_h.tolist(), *new_c.tolist()], [*h.tolist(), *c.tolist()], strict=True))
        h, c = new_h, new_c
        made.append(h)
    return np.stack(made[::-1] if cell["backward"] else made), h, c


def _outputs(ways, kind: str) -> list[Elements]:
    """Y, Y_h and Y_c of a recurrent operator, from those of its directions, [steps, rows, units] and [rows, units]."""
    y = np.stack([way[0] for way in ways], axis=1)  # [steps, directions, rows, units]
    last = [np.stack([way[at] for way in ways]) for at in ((1, 2) if kind == "LSTM" else (1,))]
    return [Elements(y), *map(Elements, last)]


def _initial(trace, node, value, shape):
    """Numbers of an initial state of a shape [directions, rows, units]; zeros where it is absent."""
    numbers = trace.lift(np.zeros(shape, np.float32) if value is None else value, node).numbers
    if numbers.shape != shape:
        raise Cannot(f"its initial state has shape {list(numbers.shape)}, wanted {list(shape)}")
    return numbers
