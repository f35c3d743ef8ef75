"""What x loses before its squares are averaged, where that is no mean of x but behaves like one: by evaluation.

A mean-like value doubles where x doubles, and moves by one and the same 1 / k with each element that it depends on: the
mean of a part of the row or of another row, of the positive elements, of magnitudes, the largest element, a sum of the
elements so far over n. Projections, differences of neighbours, local means and residuals are none of these.
"""

from __future__ import annotations

import numpy as np

from onnx_export.validation.evaluated import between, made_up, runner
from onnx_export.validation.norm import NearMiss
from onnx_export.validation.statistic import Mean
from onnx_export.validation.values import Values

_MOST_TRIED = 64  # elements of x that are changed one by one
_STEP = 2.0**-12
_SAME = 1e-6
_FEWEST_EXTENTS = 3  # different numbers of results that an element changes, of a sum of the elements so far


def other_mean(values: Values, x: str, other: str, sign: int) -> Mean | None:
    """The axes and nodes of the mean-like value that `sign` times `other` is, `unlike` says what it is; else None."""
    if sign * values.signed(other)[1] < 0:  # added to x, as residuals are
        return None
    scope = values.scope
    shape, nodes = scope.shape(x), between(scope, x, [other])
    if shape is None or not nodes:
        return None
    try:
        given = made_up(shape)
        run = runner(scope, nodes, x, (other,), given.shape)

        def lost(values: np.ndarray) -> np.ndarray:
            return np.broadcast_to(sign * run(values)[0], given.shape)

        plain = lost(given)
        if not np.allclose(lost(2 * given), 2 * plain, rtol=_SAME, atol=_SAME) or not np.any(plain):
            return None
        chosen = _chosen(given)
        changes = np.stack([lost(_moved(given, place)) - plain for place in chosen]) / _STEP
    except Exception:  # from onnx's evaluator: an operator or a size that it does not take
        return None
    changes[np.abs(changes) <= _SAME] = 0.0
    of_magnitudes = changes * np.sign(given[tuple(chosen.T)]).reshape(-1, *[1] * given.ndim)
    magnitudes = bool((changes < 0).any() and (of_magnitudes >= 0).all())
    changes = of_magnitudes if magnitudes else changes
    axes = tuple(a for a, size in enumerate(given.shape) if size > 1 and np.ptp(plain, axis=a).max() <= _SAME)
    several = _averages(changes)
    if several is None:
        return None
    if not axes:
        axes = _cumulated(changes, chosen) if several else ()
        reason = "sums of the elements so far, over one and the same count, are subtracted from x, not its mean"
    else:
        mean_of = "magnitudes" if magnitudes else "other elements than those of its row"
        what = f"a mean of {mean_of}" if several else "one of its elements"
        reason = f"{what} is subtracted from x, not its mean"
    return Mean(x, axes, True, tuple(nodes), reshaped=True, unlike=NearMiss(reason, error=several)) if axes else None


def _chosen(given: np.ndarray) -> np.ndarray:
    """Places of elements to change: all of a few, else some by chance and the extreme ones along each axis."""
    if given.size <= _MOST_TRIED:
        return np.argwhere(np.ones(given.shape, bool))
    rng, places = np.random.default_rng(0), []
    for axis in range(given.ndim):
        line = [int(rng.integers(size)) for size in given.shape]
        whole = given[tuple(slice(None) if a == axis else at for a, at in enumerate(line))]
        spread = np.linspace(0, given.shape[axis] - 1, 8).astype(int)
        places += [[*line[:axis], int(at), *line[axis + 1 :]] for at in (*spread, whole.argmax(), whole.argmin())]
    return np.array(places)


def _moved(given: np.ndarray, place: np.ndarray) -> np.ndarray:
    moved = given.copy()
    moved[tuple(place)] += _STEP
    return moved


def _averages(changes: np.ndarray) -> bool | None:
    """Whether each result moves by one 1 / k with all elements that it depends on, and k is more than 1.

    None where it is no mean-like value.
    """
    weights = changes[changes != 0]
    if not weights.size or (weights < 0).any():
        return None
    flat = changes.reshape(len(changes), -1)
    top = flat.max(axis=0)
    alike = np.where(flat > 0, np.abs(flat - top) <= _SAME, True).all()
    count = np.round(1 / weights)
    whole = (np.abs(count * weights - 1) <= _SAME * count).all()
    return bool((count > 1).any()) if alike and whole else None


def _cumulated(changes: np.ndarray, chosen: np.ndarray) -> tuple[int, ...]:
    """The axis along which an element changes all results from its place on, or up to it; empty for none."""
    for axis in range(chosen.shape[1]):
        others = tuple(a + 1 for a in range(chosen.shape[1]) if a != axis)
        touched = (changes != 0).any(axis=others)  # [element, place along the axis]
        extents, steps = touched.sum(axis=1), np.abs(np.diff(touched.astype(int), axis=1)).sum(axis=1)
        if len(np.unique(extents)) >= _FEWEST_EXTENTS and (steps <= 1).all() and 2 * extents.max() > touched.shape[1]:
            return (axis,)
    return ()
