"""Values of what a written cell is a function of, and what the file makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from onnx_export.importer.bends import at_bends
from onnx_export.importer.values import evaluate

__all__ = ["Probes", "bent_probes", "random_probes"]


@dataclass(frozen=True, eq=False)
class Probes:
    """Values [rows, units] of the pre-activations and the old states, and what the file makes of them."""

    p: list[np.ndarray]
    h: np.ndarray
    c: np.ndarray
    h_new: np.ndarray
    c_new: np.ndarray
    given: list[tuple[np.ndarray, np.ndarray]]


def random_probes(reading, old, new, rows: int, scales) -> Probes:
    """Random values, each row of each vector of one of some scales."""
    rng = np.random.default_rng(0)

    def some(columns: int) -> np.ndarray:
        return rng.standard_normal((rows, columns)) * rng.choice(scales, (rows, 1))

    p = [some(reading.units) for _ in reading.leaves]
    return _made(reading, old, new, [*p, some(len(reading.before)), some(reading.units)])


def _given(reading, old, vectors) -> list[tuple[np.ndarray, np.ndarray]]:
    """The numbers and values of pre-activations, old h and old c."""
    *p, h, c = vectors
    given = [(leaf.numbers, values) for leaf, values in zip(reading.leaves, p, strict=True)]
    values = {leaf.numbers.tobytes(): one for leaf, one in zip(reading.leaves, p, strict=True)}
    given += [(numbers, -values[leaf.tobytes()]) for numbers, leaf in reading.negatives]
    return given + [(reading.before, h)] + ([(old["c"], c)] if "c" in old else [])


def _made(reading, old, new, vectors) -> Probes:
    """What the file makes of pre-activations, old h and old c."""
    given = _given(reading, old, vectors)
    values = evaluate(reading.trace, np.concatenate(_results(reading, new)), given)
    return Probes(vectors[:-2], *vectors[-2:], values[:, : reading.units], values[:, reading.units :], given)


def _results(reading, new) -> list[np.ndarray]:
    return [reading.core, *([new["c"]] if "c" in new else [])]


def bent_probes(reading, old, new, probes: Probes) -> Probes:
    """Probes where the functions of the file bend."""
    vectors = [each[:1] for each in (*probes.p, probes.h, probes.c)]
    results = [*_results(reading, new), *(leaf.reset for leaf in reading.leaves if leaf.reset is not None)]
    rows = at_bends(reading.trace, results, vectors, partial(_given, reading, old), reading.norms)
    return _made(reading, old, new, rows)
