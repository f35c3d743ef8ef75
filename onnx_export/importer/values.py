"""The float64 values of traced elements, given those of some that they depend on."""

from __future__ import annotations

import heapq

import numpy as np

from onnx_export.laws.functions import TABLE, _erf

__all__ = ["Unknown", "evaluate"]

MAX_VALUES = 1 << 24  # float64 numbers held at once
_BINARY = {"add": np.add, "subtract": np.subtract, "multiply": np.multiply, "divide": np.divide}
_UNARY = {"root": np.sqrt, "reciprocal": np.reciprocal, "log": np.log, "erf": _erf}


class Unknown(Exception):
    """The elements depend on others than the given ones, or on what has no value here."""


def evaluate(trace, wanted: np.ndarray, given) -> np.ndarray:
    """Values [probes, wanted] of elements.

    Parameters
    ----------
    trace : Trace
    wanted : ndarray of int64
        Numbers [n].
    given : list of (ndarray of int64 [k], ndarray [probes, k])
        Numbers and their values; what is behind them is not looked at.
    """
    run = _Run(trace, given)
    run.mark(wanted)
    with np.errstate(all="ignore"):
        return run.values(wanted)


class _Run:
    def __init__(self, trace, given):
        numbers = np.concatenate([each for each, _ in given])
        order = np.argsort(numbers, kind="stable")
        self._numbers, self._order = numbers[order], order
        self._given = np.concatenate([values for _, values in given], axis=1)[:, order]
        self.trace, self._firsts = trace, trace.starts
        self._masks: dict[int, np.ndarray] = {}
        self._made: dict[int, np.ndarray] = {}

    def _split(self, numbers):
        """Places among the given ones, whether they are among them, and the blocks of all."""
        places = np.minimum(np.searchsorted(self._numbers, numbers), len(self._numbers) - 1)
        return places, self._numbers[places] == numbers, np.searchsorted(self._firsts, numbers, side="right") - 1

    def mark(self, wanted) -> None:
        """Find what is to be computed, from the last block to the first."""
        heap: list[int] = []
        total = self._need(wanted, heap)
        while heap:
            block = self.trace.blocks[index := -heapq.heappop(heap)]
            if block.op == "constant":
                continue
            if not block.operands or block.op in ("conv", "LSTM", "GRU", "RNN", "state", "integer", "embedding"):
                raise Unknown(block.op)
            rows = np.unique(np.flatnonzero(self._masks[index]) // (block.size // len(block.operands[0])))
            for operand in block.operands:
                total += self._need(operand[rows].ravel(), heap)
            if total * len(self._given) > MAX_VALUES:
                raise Unknown("too large")

    def _need(self, numbers, heap) -> int:
        _, hit, owners = self._split(numbers)
        numbers, owners = numbers[~hit], owners[~hit]
        total = 0
        for index in np.unique(owners).tolist():
            block = self.trace.blocks[index]
            if index not in self._masks:
                self._masks[index] = np.zeros(block.size, bool)
                heapq.heappush(heap, -index)
                total += block.size
            self._masks[index][numbers[owners == index] - block.first] = True
        return total

    def values(self, wanted) -> np.ndarray:
        for index in sorted(self._masks):
            block, at = self.trace.blocks[index], np.flatnonzero(self._masks[index])
            made = np.full((len(self._given), block.size), np.nan)
            made[:, at] = self._computed(block, at)
            self._made[index] = made
        return self._fetch(wanted)

    def _fetch(self, numbers) -> np.ndarray:
        flat = numbers.ravel()
        places, hit, owners = self._split(flat)
        result = np.empty((len(self._given), len(flat)))
        result[:, hit] = self._given[:, places[hit]]
        for index in np.unique(owners[~hit]).tolist():
            own = ~hit & (owners == index)
            result[:, own] = self._made[index][:, flat[own] - self._firsts[index]]
        return result.reshape(len(result), *numbers.shape)

    def _computed(self, block, at) -> np.ndarray:
        op, constants = block.op, block.constants
        if op == "constant":
            return np.broadcast_to(np.asarray(constants["value"], np.float64)[at], (len(self._given), len(at)))
        rows, columns = np.divmod(at, block.size // len(block.operands[0]))
        if op in ("product", "mean", "sum", "max", "norm", "softmax"):
            used, inverse = np.unique(rows, return_inverse=True)
            x = self._fetch(block.operands[0][used])
            return _of_rows(op, x, constants)[:, inverse, columns]
        operands = [self._fetch(operand[at, 0]) for operand in block.operands]
        if op in _BINARY:
            return _BINARY[op](*operands)
        (x,) = operands
        each = [value[at] if np.ndim(value) else value for value in constants.values()]
        if op in ("scale", "shift"):
            return x * each[0] if op == "scale" else x + each[0]
        if op == "prelu":
            return np.where(x < 0, x * each[0], x)
        if op == "selu" or (op not in TABLE and op not in _UNARY):
            raise Unknown(op)
        return TABLE[op].value(x, *each) if op in TABLE else _UNARY[op](x)


def _of_rows(op, x, constants) -> np.ndarray:
    """x [probes, rows, terms] -> [probes, rows, outputs]."""
    if op == "product":
        return x @ np.asarray(constants["weight"], np.float64).T
    if op in ("mean", "sum", "max"):
        return getattr(x, op)(-1, keepdims=True)
    centred = x - x.mean(-1, keepdims=True) if op == "norm" else x - x.max(-1, keepdims=True)
    if op == "norm":
        eps = float(np.float32(constants["eps"]))
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    weights = np.exp(centred)
    return weights / weights.sum(-1, keepdims=True)
