"""Where the functions of a written cell bend: values that random probes miss, far off or in a narrow part.

A function of sums, such as relu(z - 500) or tanh(4096 (z - 0.37)), shows where its argument is near 0, and one with
limits at these. There the arguments are sought, along each of the vectors that the cell is a function of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from onnx_export.importer.cell_parts import NoCellError
from onnx_export.importer.elements import Block
from onnx_export.importer.frames import depending
from onnx_export.importer.values import evaluate

__all__ = ["at_bends"]

LINEAR = {"scale", "shift", "add", "subtract"}
LEVELS = (-3.0, -1.0, -0.3, 0.0, 0.3, 1.0, 3.0)  # of arguments: every function without parameters bends between
REACH = np.geomspace(1e-6, 1e9, 91)
PLACES = np.concatenate([-REACH[::-1], [0.0], REACH])
HALVINGS = 60  # from neighbours in PLACES to neighbours in float64
MOST_VECTORS = 400
MOST_PROBED = 1 << 17  # elements of arguments at a time


def at_bends(trace, new: list[np.ndarray], vectors: list[np.ndarray], given: Callable, norms) -> list[np.ndarray]:
    """Rows of the vectors where what is between them and the new states bends.

    Parameters
    ----------
    trace : Trace
    new : list of ndarray of int64 [units]
        Numbers of what a cell computes.
    vectors : list of ndarray [1, n]
        Ordinary values of what it is a function of; each is varied while the others stay.
    given : callable
        Numbers and values, as of `evaluate`, of such vectors [rows, n].
    norms : list of (ndarray, Normed)
        The norms between, with their numbers.

    Returns
    -------
    list of ndarray [rows, n]
        Behind the ordinary values zeros, which show a small offset.

    Raises
    ------
    NoCellError
        If an element depends on several of a vector, other than by a norm of which only functions are.
    """
    units = len(new[0])
    normed = np.concatenate([np.empty(0, np.int64), *(numbers for numbers, _ in norms)])
    known = np.concatenate([normed, *(numbers for numbers, _ in given(vectors))])
    found = list(_arguments(trace, [*new, *(one.row for _, one in norms)], known))
    rows = [[vector, 0 * vector] for vector in vectors]
    if not found:
        return [np.concatenate(row) for row in rows]
    numbers, places = (np.concatenate([each[i] for each in found]) for i in (0, 1))
    if len(normed) and depending(trace, normed)[numbers].any():
        raise NoCellError("what is added to a norm is read by another function than the cell's")
    spans = np.split(np.arange(len(numbers)), np.cumsum([len(each[0]) for each in found])[:-1])
    line = np.repeat(PLACES[:, None], units, 1)
    for at in [at for at, vector in enumerate(vectors) if vector.shape == (1, units)]:

        def varied(x: np.ndarray, at: int = at) -> list[np.ndarray]:
            """The vectors, of which one has the values x [rows, units]."""
            return [x if i == at else np.repeat(vector, len(x), 0) for i, vector in enumerate(vectors)]

        def computed(x: np.ndarray, varied: Callable = varied) -> np.ndarray:
            """The arguments [rows, numbers]."""
            parts = np.array_split(x, min(len(x), 1 + len(x) * len(numbers) // MOST_PROBED))
            return np.concatenate([evaluate(trace, numbers, given(varied(part))) for part in parts])

        along = computed(line)
        crossings = [
            _Crossing.of(along, span, places, units, level, last)
            for span, (*_, levels) in zip(spans, found, strict=True)
            for level in levels
            for last in (False, True)
        ]
        if crossings := [each for each in crossings if each]:
            for row, values in zip(rows, varied(_halved(computed, crossings, places)), strict=True):
                row.append(values)
    return [np.concatenate(row) for row in rows]


def _arguments(trace, new, known: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, tuple[float, ...]]]:
    """The sums that functions and products read, behind the new states: numbers, units, and the levels to be at."""
    waiting = [(numbers, np.arange(len(numbers))) for numbers in new]
    seen: set[bytes] = set()
    while waiting:
        if len(seen) > MOST_VECTORS:
            raise NoCellError
        numbers, places = waiting.pop()
        numbers, places = (each[~np.isin(numbers, known)] for each in (numbers, places))
        key = numbers.tobytes() + places.tobytes()
        if key in seen:
            continue
        seen.add(key)
        for block in trace.owners(numbers):
            own = (numbers >= block.first) & (numbers < block.first + block.size)
            if any(operand.shape[1] > 1 for operand in block.operands):
                raise NoCellError(
                    f"{block.node}: units of a cell depend on each other by products of h and x and norms alone"
                )
            for operand in block.operands:
                inner = operand[(numbers[own] - block.first) // (block.size // len(operand)), 0]
                waiting.append((inner, places[own]))
                summed = any(one.op in LINEAR for one in trace.owners(inner))
                if block.op not in LINEAR and summed and not np.isin(inner, known).any():
                    yield inner, places[own], (*LEVELS, *_limits(block))


def _limits(block: Block) -> tuple[float, ...]:
    if block.op == "clip":
        return float(block.constants["lo"]), float(block.constants["hi"])
    if block.op == "hard_sigmoid":
        alpha, beta = (float(block.constants[name]) for name in ("alpha", "beta"))
        return (-beta / alpha, (1 - beta) / alpha) if alpha else ()
    return ()


@dataclass(frozen=True, eq=False)
class _Crossing:
    """Where an argument, the numbers `span`, crosses a level: the values [units] of a vector on both sides."""

    span: np.ndarray
    level: float
    below: np.ndarray
    above: np.ndarray

    @classmethod
    def of(cls, along: np.ndarray, span, places, units: int, level: float, last: bool) -> _Crossing | None:
        """The first or the last crossing between PLACES, where arguments are `along` [places, numbers]."""
        values = along[:, span]
        above = values >= level
        changed = (above[1:] != above[:-1]) & np.isfinite(values[1:]) & np.isfinite(values[:-1])
        hit = np.flatnonzero(changed.any(0) & (not last or changed.sum(0) > 1))
        if not len(hit):
            return None
        first = changed[::-1].argmax(0) if last else changed.argmax(0)
        first = (len(changed) - 1 - first if last else first)[hit]
        rises = above[first + 1, hit]
        low, high = np.zeros(units), np.zeros(units)
        low[places[span[hit]]], high[places[span[hit]]] = PLACES[first + ~rises], PLACES[first + rises]
        return cls(span, level, low, high)


def _halved(computed: Callable, crossings: list[_Crossing], places: np.ndarray) -> np.ndarray:
    """Where arguments cross their levels [crossings, units], to the last bit."""
    below, above = (np.stack([getattr(each, side) for each in crossings]) for side in ("below", "above"))
    for _ in range(HALVINGS):
        middle = (below + above) / 2
        values, is_above = computed(middle), np.zeros(middle.shape, bool)
        for row, each in enumerate(crossings):
            is_above[row, places[each.span]] = values[row, each.span] >= each.level
        below, above = np.where(is_above, below, middle), np.where(is_above, middle, above)
    return above
