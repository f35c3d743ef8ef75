"""Rows on which the laws differ: large ones, where eps does not count, and small ones, which show it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

LARGE = 4  # probes for the law and its parameters: four rows at least, where the value has only one
DOUBLE = LARGE  # the probe that is twice the first
SCALES = (1e3,) * LARGE
SMALL = (1e-1, 1e-4, 1e-14)
PROBES = LARGE + 1 + len(SMALL)
OPEN = (3, 4, 5, 6, 7)  # sizes for those that the file leaves open, by axis
_RANKS = (3, 2, 4)  # tried where the rank is open


def sizes(shape: tuple[int | None, ...] | None, last: Iterable[int] = ()) -> Iterator[tuple[int, ...]]:
    """A shape with sizes for those that the file leaves open: several, where the last or the rank is.

    `last` are sizes to try for the last axis, before one of no meaning.
    """
    for given in [shape] if shape is not None else [(None,) * rank for rank in _RANKS]:
        filled = tuple(OPEN[axis] if size is None else size for axis, size in enumerate(given))
        for size in dict.fromkeys(last) if given and given[-1] is None else ():
            yield (*filled[:-1], size)
        yield filled


def probes(shape: tuple[int, ...]) -> list[np.ndarray]:
    """Values of float64 of this shape, whose means over any axes differ: large ones, twice the first, small ones."""
    made = []
    for seed, scale in enumerate(SCALES + SMALL):
        rng = np.random.default_rng(seed)
        value = rng.normal(size=shape)
        for axis, size in enumerate(shape):
            value = value + rng.normal(0.3, 1, size).reshape(-1, *(1,) * (len(shape) - 1 - axis))
        made.append(scale * value)
    return [*made[:LARGE], 2 * made[0], *made[LARGE:]]
