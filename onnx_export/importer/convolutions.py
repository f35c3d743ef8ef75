"""Convolutions: over time, by a cache of frames that the file carries from step to step, and inside a frame."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd

import numpy as np

import cnorm
from onnx_export.importer.affine import Affine, affine
from onnx_export.importer.elements import Block
from onnx_export.importer.joining import Cell
from onnx_export.importer.shifts import Shifts

__all__ = ["Lags", "in_frame", "over_time", "unfolding"]


class Lags:
    """The frames of before that states hold.

    A cache gives back, at the place of each frame, the frame that came after it; so a new element, which is no state,
    is found again in the chain of what `old` says of it: once for each step that has passed.

    Or they are frames of a trace over a time axis, linked by `Shifts`.

    Parameters
    ----------
    old : dict of int to int
        As of `Chain`.
    shifts : Shifts, optional

    Attributes
    ----------
    cached : bool
        Whether the frames are in states of the file.
    """

    def __init__(self, old: dict[int, int], shifts: Shifts | None = None) -> None:
        self.cached, self._chains = shifts is None, {}  # a new element, and what it was 1, 2, ... steps before
        if shifts:
            self._linked, self._place = shifts.chains
            return
        before, self._of = set(old.values()), {}  # an element: the new one, and the steps since
        for head in old.keys() - before:
            chain, number = [], head
            while number in old and len(chain) <= len(old):
                number = old[number]
                chain.append(number)
            self._chains[head] = chain
            self._of |= {number: (head, lag) for lag, number in enumerate([head, *chain])}

    def of(self, numbers: np.ndarray) -> list[tuple[int, int] | None]:
        """For each of some elements the new one, and the steps since."""
        if self.cached:
            return [self._of.get(number) for number in numbers.tolist()]
        known = numbers < self._place.shape[1]  # others were added behind the trace, by `Chain`
        lags, places = np.where(known, self._place[:, np.where(known, numbers, 0)], -1)
        heads = self._linked[0, places]
        return [None if lag < 0 else (head, lag) for head, lag in zip(heads.tolist(), lags.tolist(), strict=True)]

    def kept(self, head: int) -> int:
        """For how many steps a new element is kept."""
        return len(self._chains.get(head, ())) if self.cached else len(self._linked) - 1

    def begins_alike(self, trace, numbers: np.ndarray, linear: Affine) -> bool:
        """Whether a linear function of frames of several steps adds the same in the first, which has none before it."""
        if self.cached or not any(each and each[1] for each in self.of(linear.terms)):
            return True
        found = self.of(numbers)
        if None in found:
            return True  # of the last frame alone
        first = affine(trace, self._linked[-1, self._place[1, [head for head, _ in found]]], atoms=True)
        return np.array_equal(first.bias, linear.bias)

    def chains(self, found: list[tuple[int, int]], *, ordered: bool = False) -> np.ndarray | None:
        """The frames [history + 1, n] that a layer keeps which reads some, the new one first; None if caches differ.

        The elements have the order of their numbers or, with `ordered`, of `found`.
        """
        heads = [head for head, _ in found] if ordered else sorted({head for head, _ in found})
        if not self.cached:
            return self._linked[: max(lag for _, lag in found) + 1, self._place[1, heads]]
        chains = [[head, *self._chains[head]] for head in heads]
        return np.array(chains).T if len({len(chain) for chain in chains}) == 1 else None


def over_time(lags: Lags, linear: Affine) -> tuple[cnorm.CausalConv1d, Cell, np.ndarray] | None:
    """The layer, its state and the frame that it reads, of a product with frames of several steps; None for others."""
    found = lags.of(linear.terms)
    if None in found or not any(lag for _, lag in found):
        return None
    frames = lags.chains(found)
    if frames is None:
        return None
    heads, history = frames[0].tolist(), len(frames) - 1
    dilation = gcd(history, *(lag for _, lag in found))
    taps, place = history // dilation + 1, {head: at for at, head in enumerate(heads)}
    weight = np.zeros((len(linear.weight), len(heads), taps))
    for column, (head, lag) in enumerate(found):
        weight[:, place[head], taps - 1 - lag // dilation] += linear.weight[:, column]
    groups = 1
    if len(weight) == len(heads) and not weight[~np.eye(len(heads), dtype=bool)].any():
        groups, weight = len(heads), weight[np.arange(len(heads)), np.arange(len(heads))][:, None]
    bias = linear.bias.astype(np.float32) if linear.bias.any() else None
    layer = cnorm.CausalConv1d(weight.astype(np.float32), bias, dilation=dilation, groups=groups)
    frames = frames[::-1]  # the oldest first
    return layer, Cell({"f": frames[1:].ravel()}, {"f": frames[:-1].ravel()}), frames[-1]


def in_frame(block_of: Callable, lags: Lags, block: Block | None, zero: Callable):
    """The layer and what it reads, of all elements of a convolution, scaled and shifted by channel; None for others.

    `zero` tells which of some elements are constants of 0. What the layer reads has the shape [channels, positions].
    """
    factor, offset = np.ones(1), np.zeros(1)
    while block and block.op in ("scale", "shift"):
        if block.op == "scale":
            factor = factor * block.constants["factor"]
        else:
            offset = offset + factor * block.constants["offset"]
        block = block_of(block.operands[0].ravel())
    if not block or block.op != "conv":
        return None
    weight, options, x = (block.constants[name] for name in ("weight", "options", "x"))
    places = block.size // len(weight)
    chunk = lags.cached and places > 1  # of which a cache has the last positions of the one before
    if any(found and found[1] for found in lags.of(x.ravel())) and not (chunk or _rows_of_steps(lags, x)):
        return None  # a window over frames of before
    factor, offset = (np.broadcast_to(one, block.size).reshape(-1, places) for one in (factor, offset))
    if any((one != one[:, :1]).any() for one in (factor, offset)):
        return None
    weight = weight * factor[:, :1, None]
    bias = offset[:, 0].astype(np.float32) if offset.any() else None
    return _layer(weight, bias, x, options, zero(x))


def _rows_of_steps(lags: Lags, x: np.ndarray) -> bool:
    """Whether each row of several positions is of one step, but for what is of none, as zeros around it."""
    steps = np.array([found[1] if found else -1 for found in lags.of(x.ravel())]).reshape(x.shape)
    return x.shape[1] > 1 and bool(((steps == steps.max(axis=1, keepdims=True)) | (steps < 0)).all())


def _layer(weight: np.ndarray, bias, x: np.ndarray, options: dict, zeros: np.ndarray):
    """A layer with the weight of a convolution of x, some of whose elements are zeros, and what it reads."""
    weight, x, zeros = _without_rows(weight, x, zeros, options["groups"])
    inside = np.flatnonzero(~zeros.all(axis=0))
    if not len(inside):
        return None
    first, last = int(inside[0]), int(inside[-1])
    step = int(inside[1] - inside[0]) if len(inside) > 1 else 1
    before, after = options["padding"][0] + first, options["padding"][1] + x.shape[1] - 1 - last
    even = np.array_equal(inside, np.arange(first, last + 1, step))
    if (step > 1 or min(before, after) < 0) and even and options["stride"] == 1:
        return _stretched(weight, bias, x[:, inside], options | {"stride": step, "padding": (before, after)})
    if min(before, after) < 0:
        return None
    x, zeros = x[:, first : last + 1], zeros[:, first : last + 1]
    more = {}
    if zeros.any() and weight.shape[2] == 1 and options["groups"] == 1:
        weight, x, (left, right) = _unfolded(weight, x, zeros)
        before, after = before + left, after + right
    elif not any((before, after, zeros.any())):
        x, (before, after) = _unreflected(x)
        more = {"padding_mode": "reflect"} if any((before, after)) else {}
    options = options | more | {"padding": (before, after)}
    return cnorm.Conv1d(weight.astype(np.float32), bias, positions=x.shape[1], **options), x


def _without_rows(weight: np.ndarray, x: np.ndarray, zeros: np.ndarray, groups: int):
    """A convolution without the channels that are zeros, or are multiplied by 0, if each group has as many others."""
    each = weight.reshape(groups, -1, *weight.shape[1:])  # [groups, outputs, channels, taps]
    kept = ~zeros.all(axis=1).reshape(groups, -1) & each.any(axis=(1, 3))
    count = int(kept[0].sum())
    if (kept.sum(axis=1) != count).any() or count in (0, kept.shape[1]):
        return weight, x, zeros
    each = np.stack([own[:, use] for own, use in zip(each, kept, strict=True)])
    return each.reshape(len(weight), count, -1), x[kept.ravel()], zeros[kept.ravel()]


def _unfolded(weight: np.ndarray, x: np.ndarray, zeros: np.ndarray):
    """A convolution of one tap over rows that are others moved by some positions, as one of several taps of these."""
    base = np.flatnonzero(~zeros.any(axis=1))
    base = base[np.sort(np.unique(x[base, 0], return_index=True)[1])]
    places = {number: (row, at) for row, each in enumerate(x[base].tolist()) for at, number in enumerate(each)}
    moved = []
    for each, none in zip(x.tolist(), zeros.tolist(), strict=True):
        found = {(row, at - place) for place, (n, z) in enumerate(zip(each, none, strict=True)) if not z
                 for row, at in [places.get(n, (-1, 0))]}  # fmt: skip
        if len(found) != 1 or min(found)[0] < 0 or sum(none) != min(abs(min(found)[1]), len(each)):
            return weight, x, (0, 0)
        moved.append(found.pop())
    low, high = min(by for _, by in moved), max(by for _, by in moved)
    wide = np.zeros((len(weight), len(base), high - low + 1))
    for column, (row, by) in enumerate(moved):
        wide[:, row, by - low] += weight[:, column, 0]
    return wide, x[base], (-low, high)


def unfolding(x: np.ndarray, zeros: np.ndarray) -> tuple[cnorm.Conv1d, np.ndarray] | None:
    """A layer that copies rows, moved by some positions with zeros behind them, and the rows that it reads."""
    wide, base, padding = _unfolded(np.eye(len(x))[:, :, None], x, zeros)
    if base is x:
        return None
    groups = 1
    if len(x) % len(base) == 0 and not wide[~_blocks(len(x), len(base))].any():
        groups, wide = len(base), wide[_blocks(len(x), len(base))].reshape(len(x), 1, -1)
    return cnorm.Conv1d(wide.astype(np.float32), positions=x.shape[1], padding=padding, groups=groups), base


def _blocks(rows: int, columns: int) -> np.ndarray:
    """The places of a matrix of as many blocks, one for each column."""
    return np.arange(rows)[:, None] // (rows // columns) == np.arange(columns)


def _stretched(weight: np.ndarray, bias, x: np.ndarray, options: dict):
    """A convolution over positions with zeros between them, as the transpose of one with a stride."""
    reach = (weight.shape[2] - 1) * options["dilation"]
    before, after = (reach - padding for padding in options["padding"])
    more = max(0, -after)
    if before < 0 or more >= max(options["stride"], options["dilation"]):
        return None
    parts = weight[:, :, ::-1].reshape(options["groups"], -1, *weight.shape[1:])
    turned = np.moveaxis(parts, 1, 2).reshape(len(x), -1, weight.shape[2])
    options = options | {"padding": (before, max(0, after)), "output_padding": more}
    return cnorm.ConvTranspose1d(turned.astype(np.float32), bias, positions=x.shape[1], **options), x


def _unreflected(x: np.ndarray) -> tuple[np.ndarray, tuple[int, int]]:
    """x [channels, positions] without positions that mirror others at its ends, and how many these are."""
    length = len(np.unique(x[0]))
    for before in range(x.shape[1] - length + 1):
        around = before, x.shape[1] - length - before
        core = x[:, before : before + length]
        if max(around) < length and np.array_equal(np.pad(core, [(0, 0), around], mode="reflect"), x):
            return core, around
    return x, (0, 0)
