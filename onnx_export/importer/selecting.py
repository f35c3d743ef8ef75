"""Elements of a frame that are selected and put in another order, as a few layers that copy."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy as np

from cnorm.layers.permute import AXES

__all__ = ["box", "tiled"]

Move = tuple[str, tuple[int, ...], tuple[int, ...]]


def box(index: np.ndarray, size: int) -> list[Move] | None:
    """Moves that take the elements `index` of `size`, which are a box of an array, its axes in some order.

    Returns
    -------
    list of ("permute", shape, axes) or ("slice", (start, stop), ())
        None for elements that are no such box.
    """
    found = _axes(index)
    if found is None:
        return None
    order = sorted(range(len(found)), key=lambda at: found[at][1])
    strides, taken = [found[at][1] for at in order], [found[at][0] for at in order]
    if not strides or strides[0] != 1:  # one of the innermost is taken
        order, strides, taken = [-1, *order], [1, *strides], [1, *taken]
    if any(b % a or b < 2 * a for a, b in pairwise(strides)) or size % strides[-1]:
        return None
    sizes = [b // a for a, b in pairwise([*strides, size])]
    starts = [int(index[0]) // stride % n for stride, n in zip(strides, sizes, strict=True)]
    if any(start + n > whole for start, n, whole in zip(starts, taken, sizes, strict=True)):
        return None
    # name -> whole size, start, taken; the outermost first
    axes = {at: (sizes[i], starts[i], taken[i]) for i, at in reversed(list(enumerate(order)))}
    return _moves(axes, [*range(len(found))])


def tiled(index: np.ndarray) -> tuple[np.ndarray, int, bool] | None:
    """Elements that are taken several times, how often, and whether one by one instead of all together.

    None for others.
    """
    each = index[np.sort(np.unique(index, return_index=True)[1])]
    times, left = divmod(len(index), len(each))
    if left or times < 2:
        return None
    if np.array_equal(index, np.tile(each, times)):
        return each, times, False
    return (each, times, True) if np.array_equal(index, np.repeat(each, times)) else None


def _axes(index: np.ndarray) -> list[tuple[int, int]] | None:
    """The sizes and strides of a result, the outermost first; None if it has no strides, or one that is not above 0."""
    found: list[tuple[int, int]] = []
    while len(index) > 1:
        stride = int(index[1] - index[0])
        breaks = np.flatnonzero(np.diff(index) != stride)
        n = int(breaks[0]) + 1 if len(breaks) else len(index)
        if stride < 1 or len(index) % n:
            return None
        rows = index.reshape(-1, n)
        if (rows != rows[:, :1] + stride * np.arange(n)).any():
            return None
        found.append((n, stride))
        index = rows[:, 0]
    return found[::-1]


def _moves(axes: dict[int, tuple[int, int, int]], result: list[int]) -> list[Move] | None:
    """The moves from an array with some axes to a box of it with the axes `result`."""
    sizes, layout, moves = {at: whole for at, (whole, _, _) in axes.items()}, list(axes), []
    for at, (whole, start, taken) in axes.items():
        if taken == whole:
            continue
        front = [at, *(one for one in (*result, *layout) if one != at)]
        moves += _permuted(sizes, layout, list(dict.fromkeys(front)))
        layout = list(dict.fromkeys(front))
        inner = prod(sizes[one] for one in layout[1:])
        moves.append(("slice", (start * inner, (start + taken) * inner), ()))
        sizes[at] = taken
    moves += _permuted(sizes, layout, [*result, *(one for one in layout if one not in result)])
    return moves if all(len(shape) <= AXES for _, shape, _ in moves) else None


def _permuted(sizes: dict[int, int], layout: list[int], order: list[int]) -> list[Move]:
    """The move from one order of axes to another; none where it changes nothing."""
    long = [at for at in layout if sizes[at] > 1]
    order = [at for at in order if sizes[at] > 1]
    groups: list[list[int]] = []  # axes that stay together
    for at in long:
        place = order.index(at)
        if groups and place and order[place - 1] == groups[-1][-1]:
            groups[-1].append(at)
        else:
            groups.append([at])
    if len(groups) < 2:
        return []
    firsts = [group[0] for group in groups]
    shape = tuple(prod(sizes[at] for at in group) for group in groups)
    return [("permute", shape, tuple(firsts.index(at) for at in order if at in firsts))]
