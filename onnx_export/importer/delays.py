"""Frames of earlier steps, read from a cache that the file carries, or moved along its time axis: `cnorm.Delay`."""

from __future__ import annotations

from math import gcd

import numpy as np

import cnorm
from onnx_export.importer.convolutions import Lags
from onnx_export.importer.frames import depending
from onnx_export.importer.joining import Cell

__all__ = ["Delays"]


class Delays:
    """The delays that elements of earlier steps are read through, one for each frame that is kept.

    Parameters
    ----------
    trace : Trace
    lags : Lags
    """

    def __init__(self, trace, lags: Lags) -> None:
        self._trace, self._lags = trace, lags
        self._recurrent: dict[tuple[int, ...], bool] = {}
        self._read: dict[tuple[int, ...], set[int]] = {}  # for the frame of a delay the steps that are read
        self._own: dict[int, tuple[int, ...]] = {}  # for an element of a frame all of it
        self._grown = False  # whether a delay has to keep more steps than when it was found first

    def find(self, numbers: np.ndarray) -> tuple[cnorm.Delay, Cell, np.ndarray, np.ndarray] | None:
        """The layer, its state, the frame that it reads and all that it computes; None for others."""
        found = self._lags.of(numbers)
        if None in found or not any(lag for _, lag in found):
            return None
        heads = tuple(dict.fromkeys(head for head, _ in found))
        heads = self._own.get(heads[0], heads)
        read = self._read.get(heads, set()) | {lag for _, lag in found}
        frames = self._lags.chains([(head, max(read)) for head in heads], ordered=True)
        if frames is None or not {head for head, _ in found} <= set(heads):
            return None
        if heads not in self._recurrent:  # over a time axis it would be read on the way to itself
            depends = self._lags.cached and depending(self._trace, frames[1:].ravel())[list(heads)].any()
            self._recurrent[heads] = bool(depends)
        if self._recurrent[heads]:
            return None
        self._grown |= read != self._read.setdefault(heads, read)
        self._read[heads] = read
        history = len(frames) - 1
        dilation = gcd(history, *read)
        frames = frames[::-1]  # the oldest first
        layer = cnorm.Delay(history // dilation + 1, dilation, input_size=len(heads))
        state = Cell({"f": frames[1:].ravel()}, {"f": frames[:-1].ravel()})
        return layer, state, frames[-1], frames[::dilation].ravel()

    def parts(self, numbers: np.ndarray) -> list[np.ndarray]:
        """Elements of earlier steps by the delay that they are read from, where the file keeps some longer than others.

        As a cache of 12 positions does for chunks of 8. Steps that stand in a row are parts of their own.
        """
        found = self._lags.of(numbers)
        if None in found or not any(lag for _, lag in found):
            return []
        kept = np.array([[self._lags.kept(head), lag] for head, lag in found])
        if (kept[:, 0] == kept[0, 0]).all():
            return []
        runs = np.split(numbers, 1 + np.flatnonzero((kept[1:] != kept[:-1]).any(axis=1)))
        if len(runs) == len(np.unique(kept, axis=0)):
            return runs
        return [numbers[kept[:, 0] == one] for one in np.unique(kept[:, 0])]

    def share(self) -> bool:
        """Whether elements of a frame are read through several delays, which are one from now on."""
        groups: list[tuple[set[int], list[tuple[int, ...]]]] = []
        for heads in self._read:
            own = [group for group in groups if group[0] & set(heads)]
            groups = [group for group in groups if not group[0] & set(heads)]
            groups.append((set(heads).union(*(one for one, _ in own)), [*(e for _, each in own for e in each), heads]))
        several = [parts for _, parts in groups if len(parts) > 1]
        for parts in several:
            whole = tuple(dict.fromkeys(head for part in parts for head in part))
            self._own |= dict.fromkeys(whole, whole)
            self._read[whole] = set().union(*(self._read.pop(part) for part in parts))
        return bool(several) or self._grown
