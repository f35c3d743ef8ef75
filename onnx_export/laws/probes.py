"""Rows on which the laws differ: large ones, where eps does not count, and small ones, which show it."""

from __future__ import annotations

import numpy as np

LARGE = 4  # probes for the law and its parameters: four rows at least, where the value has only one
SCALES = (1e3,) * LARGE + (1e-1, 1e-4, 1e-14)
OPEN = (3, 4, 5, 6, 7)  # sizes for those that the file leaves open, by axis


def sizes(shape: tuple[int | None, ...]) -> tuple[int, ...]:
    """A shape with sizes for those that the file leaves open."""
    return tuple(OPEN[axis] if size is None else size for axis, size in enumerate(shape))


def probes(shape: tuple[int, ...]) -> list[np.ndarray]:
    """Values of float64 of this shape, one of each scale, whose means over any axes differ."""
    made = []
    for seed, scale in enumerate(SCALES):
        rng = np.random.default_rng(seed)
        value = rng.normal(size=shape)
        for axis, size in enumerate(shape):
            value = value + rng.normal(0.3, 1, size).reshape(-1, *(1,) * (len(shape) - 1 - axis))
        made.append(scale * value)
    return made
