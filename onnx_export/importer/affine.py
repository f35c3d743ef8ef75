"""Elements as linear functions of others, through sums, constant factors and products, however they are written."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnx_export.importer.elements import Block, Cannot

__all__ = ["MAX_FACTOR", "Affine", "affine"]

MAX_FACTOR = 2.0**64  # half of float32's exponents: what is divided by as much again would be folded to an ordinary one
MAX_LINEAR = 20_000  # calls of `affine` for one trace: each sum of two makes two more


@dataclass(frozen=True, eq=False)
class Affine:
    """Elements as weight [n, terms] times the elements `terms`, plus bias [n]."""

    terms: np.ndarray
    weight: np.ndarray
    bias: np.ndarray

    def columns(self, keep) -> np.ndarray:
        """The weights of the terms `keep` (numbers), in their order; 0 where a term is missing."""
        place = {number: at for at, number in enumerate(self.terms.tolist())}
        found = [place.get(number, -1) for number in np.ravel(keep).tolist()]
        return np.concatenate([self.weight, np.zeros((len(self.weight), 1))], axis=1)[:, found]


def affine(trace, numbers: np.ndarray, atoms: bool = False) -> Affine | None:
    """Elements as a linear function of others, through sums, constant factors and products; None if they are not.

    With `atoms` what no product makes is itself among the others, so that there is always such a function.
    """
    numbers = np.ravel(numbers)
    trace.linear += 1
    if trace.linear > MAX_LINEAR:
        raise Cannot(f"its sums and products are nested so that more than {MAX_LINEAR} parts would be expanded")
    owners = trace.owners(numbers)
    parts = [(block, (numbers >= block.first) & (numbers < block.first + block.size)) for block in owners]
    found = [_affine_of(trace, block, numbers[inside] - block.first, atoms) for block, inside in parts]
    for (block, _), part in zip(parts, found, strict=True):
        if part is not None and np.abs(part.weight).max(initial=0) > MAX_FACTOR:
            raise Cannot(f"{block.node}: its factors are so large that float32 overflows for ordinary frames")
    if any(part is None for part in found):
        return None
    if len(found) == 1:
        return found[0]
    terms = np.array(list(dict.fromkeys(np.concatenate([part.terms for part in found]).tolist())), np.int64)
    weight, bias = np.zeros((len(numbers), len(terms))), np.zeros(len(numbers))
    for (_, inside), part in zip(parts, found, strict=True):
        weight[inside], bias[inside] = part.columns(terms), part.bias
    return Affine(terms, weight, bias)


def _affine_of(trace, block: Block, at: np.ndarray, atoms: bool) -> Affine | None:
    """Elements `at` of one block."""
    found = _of_operands(trace, block, at, atoms)
    if found is not None or not atoms:
        return found
    if block.op == "constant":
        value = np.asarray(block.constants["value"], np.float64)[at]
        return Affine(np.zeros(0, np.int64), np.zeros((len(at), 0)), value)
    return _themselves(at + block.first)


def _themselves(numbers: np.ndarray) -> Affine:
    terms, places = np.unique(numbers, return_inverse=True)
    return Affine(terms, np.eye(len(terms))[places], np.zeros(len(numbers)))


def _of_operands(trace, block: Block, at: np.ndarray, atoms: bool) -> Affine | None:
    if block.op == "product":
        operand, weight = block.operands[0], block.constants["weight"]
        rows, columns = np.divmod(at, len(weight))
        if (rows != rows[0]).any():
            return None
        kept = [trace.owner(int(number)).op != "constant" for number in operand[rows[0]]]
        if not all(kept):
            return None
        terms, places = np.unique(operand[rows[0]], return_inverse=True)
        order = np.argsort([np.flatnonzero(places == place)[0] for place in range(len(terms))])
        summed = np.zeros((len(at), len(terms)))
        np.add.at(summed, (slice(None), places), weight[columns].astype(np.float64))
        return Affine(terms[order], summed[:, order], np.zeros(len(at)))
    if block.op == "conv":
        return _affine_of_windows(trace, block, at)
    if block.op in ("scale", "shift"):
        inner = affine(trace, block.operands[0][at, 0], atoms)
        if inner is None:
            return None
        if block.op == "shift":
            return Affine(inner.terms, inner.weight, inner.bias + block.constants["offset"][at])
        factor = block.constants["factor"][at]
        return Affine(inner.terms, inner.weight * factor[:, None], inner.bias * factor)
    if block.op in ("add", "subtract"):
        a, b = (affine(trace, operand[at, 0], atoms) for operand in block.operands)
        if a is None or b is None:
            return None
        first, second = (operand[at, 0] for operand in block.operands)
        if np.isin(first, b.terms).all():  # x + f(x), with x = W v: W v would be computed for f all the same
            a = _themselves(first)
        elif np.isin(second, a.terms).all():
            b = _themselves(second)
        sign = -1.0 if block.op == "subtract" else 1.0
        terms = np.array(list(dict.fromkeys([*a.terms.tolist(), *b.terms.tolist()])), np.int64)
        return Affine(terms, a.columns(terms) + sign * b.columns(terms), a.bias + sign * b.bias)
    return None


def _affine_of_windows(trace, block: Block, at: np.ndarray) -> Affine | None:
    """Elements of a convolution at one place; None for several, whose layer is a convolution."""
    weight, groups = block.constants["weight"], block.constants["options"]["groups"]
    outputs, places = np.divmod(at, block.size // len(weight))
    if (places != places[0]).any():
        return None
    windows = block.operands[0][places[0] * groups + outputs // (len(weight) // groups)]
    known = {one.first for one in trace.owners(windows) if one.op == "constant"}
    terms, columns = np.unique(windows, return_inverse=True)
    summed = np.zeros((len(at), len(terms)))
    np.add.at(
        summed, (np.arange(len(at))[:, None], columns.reshape(windows.shape)), weight[outputs].reshape(len(at), -1)
    )
    padding = np.array([trace.owner(number).first in known for number in terms.tolist()])
    if any(trace.owner(number).constants["value"].any() for number in terms[padding].tolist()):
        return None
    return Affine(terms[~padding], summed[:, ~padding], np.zeros(len(at)))
