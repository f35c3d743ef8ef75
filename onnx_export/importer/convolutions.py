"""Convolutions: over time, by a cache of frames that the file carries from step to step, and inside a frame."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd

import numpy as np

import cnorm
from onnx_export.importer.affine import Affine
from onnx_export.importer.elements import Block
from onnx_export.importer.joining import Cell
from onnx_export.importer.shifts import Shifts

__all__ = ["Lags", "in_frame", "over_time"]


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
            self._linked = shifts.chains()  # [frames, n]
            self._place = np.full((2, len(shifts.before)), -1)
            self._place[:, self._linked] = np.indices(self._linked.shape)
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

    def chains(self, found: list[tuple[int, int]]) -> np.ndarray | None:
        """The frames [history + 1, n] that a layer keeps which reads some, the new one first; None if caches differ."""
        heads = sorted({head for head, _ in found})
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


def in_frame(block_of: Callable, lags: Lags, block: Block | None) -> tuple[cnorm.Conv1d, np.ndarray] | None:
    """The layer and what it reads, of all elements of a convolution, scaled and shifted by channel; None for others."""
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
    if any(found and found[1] for found in lags.of(x.ravel())):
        return None  # frames of before
    factor, offset = (np.broadcast_to(one, block.size).reshape(-1, places) for one in (factor, offset))
    if any((one != one[:, :1]).any() for one in (factor, offset)):
        return None
    x, padding = _unreflected(x) if options["padding"] == (0, 0) else (x, (0, 0))
    more = {"padding_mode": "reflect", "padding": padding} if any(padding) else {}
    weight = (weight * factor[:, :1, None]).astype(np.float32)
    bias = offset[:, 0].astype(np.float32) if offset.any() else None
    return cnorm.Conv1d(weight, bias, positions=x.shape[1], **options | more), x.ravel()


def _unreflected(x: np.ndarray) -> tuple[np.ndarray, tuple[int, int]]:
    """x [channels, positions] without positions that mirror others at its ends, and how many these are."""
    length = len(np.unique(x[0]))
    for before in range(x.shape[1] - length + 1):
        around = before, x.shape[1] - length - before
        core = x[:, before : before + length]
        if max(around) < length and np.array_equal(np.pad(core, [(0, 0), around], mode="reflect"), x):
            return core, around
    return x, (0, 0)
