"""Layer norms of traced rows, by what they compute: gain, bias and eps are fitted to float64 values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from zlib import crc32

import numpy as np

from onnx_export.importer.elements import Block
from onnx_export.importer.values import Unknown, evaluate

__all__ = ["Normed", "normed"]

MAX_PARTS = 400  # of blocks that are walked
PROBES = 12
SCALES = 10.0 ** -np.arange(-4, 9)
SHIFTS = 10.0 ** np.arange(1, 6)  # means of probes of deviation 1: float64 computes their variance to 1e-5
LARGE = 1e5  # deviation of the probes that make eps invisible
DEEP = 40  # operators behind one another from the elements to the row
EACH, STATISTICS, SAME = {"add", "subtract"}, {"mean", "sum"}, {"scale", "shift"}


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
        terms = _Terms(trace, row)
        if len(row) > 1 and terms.are_a_norms(numbers) and (one := _fitted(trace, numbers, weight, row, terms.seed)):
            return one
    return None


class _Terms:
    """Of which terms elements are sums: products of powers of a row, its means and sums, and 1 / sqrt(quadratic ones).

    A norm's are of degree 1 with at most one such quotient, all by the same root. These bend once with the size of the
    row and have no narrow parts, so a few probes show them everywhere; a quotient of other polynomials may be large at
    one size alone, and so may a sum of quotients by several roots.

    `seed` follows from the constants of the terms: whoever writes a file does not know the probes before.
    """

    def __init__(self, trace, row: np.ndarray) -> None:
        self.trace, self.row, self.seed = trace, row, 1
        self._roots: set[bytes] = set()
        self._known: dict[tuple[int, bytes], tuple[int, int]] = {}

    def are_a_norms(self, numbers: np.ndarray) -> bool:
        try:
            return _is_within(self.of(numbers, DEEP), (1, 1)) and len(self._roots) < 2
        except Unknown:
            return False

    def of(self, numbers: np.ndarray, depth: int) -> tuple[int, int]:
        """The largest degree and number of quotients of a term of some elements; Unknown if they are others."""
        part = np.setdiff1d(numbers, self.row)
        terms = [(1, 0)] if np.isin(numbers, self.row).any() else [(0, 0)]
        for block, at, operands in self._blocks(part):
            key = block.first, at.tobytes()
            if key not in self._known:
                self._known[key] = self._of_block(block, operands, depth - 1)
            terms.append(self._known[key])
        return _largest(terms)

    def _blocks(self, numbers: np.ndarray) -> Iterator[tuple[Block, np.ndarray, list[np.ndarray]]]:
        """The blocks of some elements: each, its elements, and what they read."""
        for block in self.trace.owners(numbers):
            at = numbers[(numbers >= block.first) & (numbers < block.first + block.size)] - block.first
            rows = np.unique(at // (block.size // len(block.operands[0]))) if block.operands else at
            yield block, at, [operand[rows].ravel() for operand in block.operands]

    def _of_block(self, block: Block, operands: list[np.ndarray], depth: int) -> tuple[int, int]:
        for value in block.constants.values():
            self.seed = crc32(value.tobytes(), self.seed) if isinstance(value, np.ndarray) else self.seed
        if block.op == "constant":
            return 0, 0
        if depth < 0 or not operands:
            raise Unknown(block.op)
        if block.op in ("reciprocal", "divide"):
            self._check_root(operands[-1], depth)
            degree, quotients = self.of(operands[0], depth) if block.op == "divide" else (0, 0)
            return degree, quotients + 1
        terms = [self.of(operand, depth) for operand in operands]
        if block.op in EACH | STATISTICS | SAME:
            return _largest(terms)
        if block.op == "multiply":
            return terms[0][0] + terms[1][0], terms[0][1] + terms[1][1]
        if block.op == "square":
            return 2 * terms[0][0], 2 * terms[0][1]
        if block.op == "norm" and terms[0] == (1, 0):
            self._roots.add(np.unique(operands[0]).tobytes())
            return 1, 1
        raise Unknown(block.op)

    def _check_root(self, numbers: np.ndarray, depth: int) -> None:
        """Raise Unknown if elements are not roots of terms of degree 2, times constants."""
        for block, _, operands in self._blocks(numbers):
            if block.op == "scale" and depth > 0:
                self._check_root(operands[0], depth - 1)
            elif block.op != "root" or not _is_within(self.of(operands[0], depth), (2, 0)):
                raise Unknown(block.op)
            else:
                self._roots.update(number.tobytes() for number in np.unique(operands[0]))


def _largest(terms: list[tuple[int, int]]) -> tuple[int, int]:
    return max(degree for degree, _ in terms), max(quotients for _, quotients in terms)


def _is_within(term: tuple[int, int], most: tuple[int, int]) -> bool:
    return term[0] <= most[0] and term[1] <= most[1]


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


def _fitted(trace, numbers, weight, row, seed: int) -> Normed | None:
    rng = np.random.default_rng(seed)
    if len(np.unique(row)) < len(row):
        return None
    probes = rng.standard_normal((PROBES, len(row)))
    probes += rng.standard_normal((PROBES, 1))
    shifted = probes[:1] + SHIFTS[:, None]
    all_rows = np.concatenate([probes * LARGE, shifted, *(probes[:2] * scale for scale in SCALES)])
    try:
        y = evaluate(trace, numbers, [(row, all_rows)]) @ weight.T
    except Unknown:
        return None
    if not np.isfinite(y).all():
        return None
    d = probes - probes.mean(-1, keepdims=True)
    deviation = np.sqrt((d * d).mean(-1, keepdims=True))
    z = d / deviation
    large, small = y[:PROBES], y[PROBES + len(SHIFTS) :].reshape(len(SCALES), 2, -1)
    a, b = large - large.mean(0), z - z.mean(0)
    if not (spread := np.linalg.norm(a, axis=0)).all():
        return None
    likeness = (a.T @ b) / spread[:, None] / np.linalg.norm(b, axis=0)
    index = np.abs(likeness).argmax(1)
    gain = (a * b[:, index]).sum(0) / (b[:, index] ** 2).sum(0)
    bias = (large - gain * z[:, index]).mean(0)
    if not np.allclose(large, gain * z[:, index] + bias, rtol=1e-7, atol=1e-7 * np.abs(gain).max()):
        return None
    one = _with_eps(row, index, gain, bias, small, z[:2][:, index], deviation[:2])
    if one and not np.allclose(y[PROBES:], one.of(all_rows[PROBES:]), rtol=0, atol=1e-4 * np.abs(gain).max()):
        return None  # at some size it is another function, whatever eps is
    return one


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
