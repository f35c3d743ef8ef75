"""Layer norms of traced rows, by what they compute: gain, bias and eps are fitted to float64 values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from onnx_export.importer.elements import Block
from onnx_export.importer.values import Unknown, evaluate

__all__ = ["Normed", "normed"]

MAX_PARTS = 400  # of blocks that are walked
PROBES = 12
SCALES = 10.0 ** -np.arange(0, 9)
LARGE = 1e5  # deviation of the probes that make eps invisible
# What norms are made of: nothing that bends or is steep in a narrow part, so that probes show it everywhere.
ROOTS = {"root", "reciprocal", "divide"}
STATISTICS = {"mean", "sum"}
OF_STATISTICS = {"add", "subtract", "multiply", "square", "scale", "shift"}
SMOOTH = {"norm", *STATISTICS, *OF_STATISTICS, *ROOTS}


@dataclass(frozen=True, eq=False)
class Normed:
    """Elements i as gain_i (row_index(i) - mean) / sqrt(var + eps) + bias_i."""

    row: np.ndarray
    index: np.ndarray
    gain: np.ndarray
    bias: np.ndarray
    eps: float

    def of(self, x: np.ndarray) -> np.ndarray:
        """The norm of other values [..., row]."""
        d = x - x.mean(-1, keepdims=True)
        y = d / np.sqrt((d * d).mean(-1, keepdims=True) + float(np.float32(self.eps)))
        return y[..., self.index] * self.gain + self.bias


def normed(trace, numbers: np.ndarray, weight: np.ndarray) -> Normed | None:
    """weight [n, terms] times some elements [terms] as a norm of one row; None if it is none."""
    for row in _sources(trace, numbers):
        if len(row) > 1 and _is_smooth(trace, numbers, row) and (one := _fitted(trace, numbers, weight, row)):
            return one
    return None


def _is_smooth(trace, numbers: np.ndarray, row: np.ndarray) -> bool:
    """Whether elements are made of a row by sums and products, by roots of its statistics and quotients by these."""
    return all(
        block.op in SMOOTH and (block.op not in ROOTS or _is_positive(trace, operands[-1], block.op != "root"))
        for block, _, operands in _between(trace, numbers, row, ())
    )


def _is_positive(trace, numbers: np.ndarray, rooted: bool) -> bool:
    """Whether elements are statistics with factors and offsets that are not below 0, as eps is, or roots of these.

    A quotient among them could be large at one size of the row alone, between those that are tried.
    """
    allowed = {*OF_STATISTICS, "root"} if rooted else OF_STATISTICS
    return all(
        block.op in STATISTICS
        or (block.op in allowed and all((value[at] >= 0).all() for value in block.constants.values()))
        for block, at, _ in _between(trace, numbers, numbers[:0], STATISTICS)
    )


def _between(trace, numbers: np.ndarray, row: np.ndarray, last) -> Iterator[tuple[Block, np.ndarray, list[np.ndarray]]]:
    """The blocks behind some elements up to a row and the operators `last`: each, its elements, and what they read."""
    seen, waiting = set(), [numbers]
    while waiting:
        part = np.setdiff1d(waiting.pop(), row)
        for block in trace.owners(part):
            at = part[(part >= block.first) & (part < block.first + block.size)] - block.first
            if block.op == "constant" or (key := (block.first, at.tobytes())) in seen:
                continue
            seen.add(key)
            rows = np.unique(at // (block.size // len(block.operands[0]))) if block.operands else at
            operands = [operand[rows].ravel() for operand in block.operands]
            yield block, at, operands
            waiting += [] if block.op in last else operands


def _sources(trace, numbers) -> list[np.ndarray]:
    """The rows of means and norms next to some elements, without duplicates."""
    rows: dict[bytes, np.ndarray] = {}
    seen, waiting = set(), [numbers]
    for _ in range(MAX_PARTS):
        if not waiting:
            break
        part = waiting.pop(0)
        for block in trace.owners(part):
            at = part[(part >= block.first) & (part < block.first + block.size)] - block.first
            if (key := (block.first, at.tobytes())) in seen or not block.operands:
                continue
            seen.add(key)
            used = np.unique(at // (block.size // len(block.operands[0])))
            if block.op in ("mean", "sum", "norm"):
                for row in used[:8]:
                    rows.setdefault(np.sort(block.operands[0][row]).tobytes(), block.operands[0][row])
            if block.op not in ("product", "conv", "norm", "LSTM", "GRU", "RNN"):
                waiting += [operand[used].ravel() for operand in block.operands]
    return list(rows.values())


def _fitted(trace, numbers, weight, row) -> Normed | None:
    rng = np.random.default_rng(1)
    if len(np.unique(row)) < len(row):
        return None
    probes = rng.standard_normal((PROBES, len(row)))
    probes += rng.standard_normal((PROBES, 1))
    all_rows = np.concatenate([probes * LARGE, *(probes[:2] * scale for scale in SCALES)])
    try:
        y = evaluate(trace, numbers, [(row, all_rows)]) @ weight.T
    except Unknown:
        return None
    if not np.isfinite(y).all():
        return None
    d = probes - probes.mean(-1, keepdims=True)
    deviation = np.sqrt((d * d).mean(-1, keepdims=True))
    z = d / deviation
    large, small = y[:PROBES], y[PROBES:].reshape(len(SCALES), 2, -1)
    a, b = large - large.mean(0), z - z.mean(0)
    if not (spread := np.linalg.norm(a, axis=0)).all():
        return None
    likeness = (a.T @ b) / spread[:, None] / np.linalg.norm(b, axis=0)
    index = np.abs(likeness).argmax(1)
    gain = (a * b[:, index]).sum(0) / (b[:, index] ** 2).sum(0)
    bias = (large - gain * z[:, index]).mean(0)
    if not np.allclose(large, gain * z[:, index] + bias, rtol=1e-7, atol=1e-7 * np.abs(gain).max()):
        return None
    return _with_eps(row, index, gain, bias, small, z[:2][:, index], deviation[:2])


def _with_eps(row, index, gain, bias, small, z, deviation) -> Normed | None:
    """eps from the probes in whose size it shows best: r = s / sqrt(s^2 + eps)."""
    r = np.einsum("spn,pn->sp", (small - bias) * gain, z) / np.einsum("n,pn->p", gain**2, z**2)
    sizes = SCALES[:, None] * deviation[:, 0]
    with np.errstate(all="ignore"):
        eps = sizes**2 * (1 / r**2 - 1)
    best = int(np.abs(r.mean(1) - 0.7).argmin())
    value = float(eps[best].mean())
    near = eps[max(best - 1, 0) : best + 2]
    if not (np.isfinite(value) and value > 0 and np.allclose(near, value, rtol=1e-4)):
        return None
    gain, bias = (_clean(array) for array in (gain, bias))
    return Normed(row, index, gain, bias, float(str(np.float32(value))))


def _clean(array) -> np.ndarray:
    """Fitted numbers as the float32 that they are, 0 where only rounding errors are left."""
    array = np.where(np.abs(array) < 1e-9 * max(1.0, np.abs(array).max()), 0, array)
    return array.astype(np.float32).astype(np.float64)
