"""Where the functions of a written cell bend: values that random probes miss, far off or in a narrow part.

A function of sums, such as relu(z - 500) or tanh(4096 (z - 0.37)), shows where its argument is near 0, and one with
limits at these. There the arguments are sought, along each of the vectors that the cell is a function of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from onnx_export.importer.elements import Block
from onnx_export.importer.values import evaluate

__all__ = ["at_bends"]

LINEAR = {"scale", "shift", "add", "subtract"}
LEVELS = (-3.0, -1.0, -0.3, 0.0, 0.3, 1.0, 3.0)  # of arguments: every function without parameters bends between
REACH = np.geomspace(1e-6, 1e9, 91)
PLACES = np.concatenate([-REACH[::-1], [0.0], REACH])
HALVINGS = 60  # from neighbours in PLACES to neighbours in float64
MOST_VECTORS = 400
MOST_PROBED = 1 << 17  # elements of one vector at a time


def at_bends(trace, new: list[np.ndarray], vectors: list[np.ndarray], given: Callable) -> list[np.ndarray]:
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

    Returns
    -------
    list of ndarray [rows, n]
    """
    known = np.concatenate([numbers for numbers, _ in given(vectors)])
    found = list(_arguments(trace, new, known))
    rows = [[vector] for vector in vectors]
    if found:
        numbers, places = (np.concatenate([each[i] for each in found]) for i in (0, 1))
        spans = np.split(np.arange(len(numbers)), np.cumsum([len(each[0]) for each in found])[:-1])
        levels = [level for *_, level in found]
        for at in [at for at, vector in enumerate(vectors) if vector.shape == (1, len(new[0]))]:

            def values(x: np.ndarray, at: int = at) -> list[np.ndarray]:
                """The vectors, of which one has the values x [rows, units]."""
                return [x if i == at else np.repeat(vector, len(x), 0) for i, vector in enumerate(vectors)]

            line = np.repeat(PLACES[:, None], len(new[0]), 1)
            along = evaluate(trace, numbers, given(values(line)))
            brackets = [
                (np.isin(np.arange(len(numbers)), span), level, *_crossing(along[:, span], level, places[span], line))
                for span, each in zip(spans, levels, strict=True)
                for level in each
            ]
            brackets = [each for each in brackets if each[2] is not None]
            for part in range(0, len(brackets), most := max(1, MOST_PROBED // len(numbers))):
                some = brackets[part : part + most]
                x = _halved(lambda x, values=values: evaluate(trace, numbers, given(values(x))), some, places)
                for row, one in zip(rows, values(x), strict=True):
                    row.append(one)
    return [np.concatenate(row) for row in rows]


def _arguments(trace, new, known: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, tuple[float, ...]]]:
    """The sums that functions and products read, behind the new states: numbers, units, and the levels to be at."""
    waiting = [(numbers, np.arange(len(numbers))) for numbers in new]
    seen: set[bytes] = set()
    while waiting and len(seen) < MOST_VECTORS:
        numbers, places = waiting.pop()
        numbers, places = (each[~np.isin(numbers, known)] for each in (numbers, places))
        key = numbers.tobytes() + places.tobytes()
        if key in seen:
            continue
        seen.add(key)
        for block in trace.owners(numbers):
            own = (numbers >= block.first) & (numbers < block.first + block.size)
            for inner, units in _inner(block, numbers[own] - block.first, places[own], len(new[0])):
                waiting.append((inner, units))
                summed = [one.op in LINEAR for one in trace.owners(inner)]
                if block.op not in LINEAR and any(summed) and not np.isin(inner, known).any():
                    yield inner, units, (*LEVELS, *_limits(block))


def _inner(block: Block, at: np.ndarray, places: np.ndarray, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """What elements of a block read, with the unit of each: of a row that is normalised, all of its elements."""
    for operand in block.operands:
        rows = at // (block.size // len(operand))
        if operand.shape[1] == 1:
            yield operand[rows, 0], places
        else:
            yield from ((operand[row], np.arange(operand.shape[1]) % size) for row in np.unique(rows))


def _limits(block: Block) -> tuple[float, ...]:
    if block.op == "clip":
        return float(block.constants["lo"]), float(block.constants["hi"])
    if block.op == "hard_sigmoid":
        alpha, beta = (float(block.constants[name]) for name in ("alpha", "beta"))
        return (-beta / alpha, (1 - beta) / alpha) if alpha else ()
    return ()


def _crossing(values: np.ndarray, level: float, places: np.ndarray, line: np.ndarray):
    """The first places [units] between which values [places, ...] cross a level, and whether they rise; None if none."""
    above = values >= level
    changed = (above[1:] != above[:-1]) & np.isfinite(values[1:]) & np.isfinite(values[:-1])
    hit = changed.any(0)
    if not hit.any():
        return None, None, None
    first = changed.argmax(0)
    low, high, rising = (np.full(line.shape[1], value) for value in (0.0, 0.0, False))
    low[places[hit]], high[places[hit]] = line[first[hit], 0], line[first[hit] + 1, 0]
    rising[places[hit]] = above[first[hit] + 1, np.flatnonzero(hit)]
    return low, high, rising


def _halved(computed: Callable, brackets, places: np.ndarray) -> np.ndarray:
    """Where values cross their levels [brackets, units], to the last bit."""
    own, level, low, high, rising = (np.stack([each[i] for each in brackets]) for i in range(5))
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        values = computed(middle)
        above = np.zeros(middle.shape, bool)
        for row, mask in enumerate(own):
            above[row, places[mask]] = values[row, mask] >= level[row]
        low, high = np.where(above == rising, low, middle), np.where(above == rising, middle, high)
    return high
