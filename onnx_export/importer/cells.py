"""Find a step of an LSTM, GRU or RNN that a graph writes out in primitive operators.

The gates are told apart by what is done with them, not by their order or names: in c' = f c + i g, h' = o tanh(c') the
factor of the old state is the forget gate. Their pre-activations are linear in the input and in the old state, however
they are written: one product or eight, split or sliced, with one bias or two. `affine` brings them into one form.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cnorm.cells.functions import OF_CELLS, function_of_cell
from onnx_export.importer.elements import Block, Cannot

__all__ = ["Affine", "affine", "written_cell"]

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


def affine(trace, numbers: np.ndarray) -> Affine | None:
    """Elements as a linear function of others, through sums, constant factors and products; None if they are not."""
    numbers = np.ravel(numbers)
    trace.linear += 1
    if trace.linear > MAX_LINEAR:
        raise Cannot(f"its sums and products are nested so that more than {MAX_LINEAR} parts would be expanded")
    owners = trace.owners(numbers)
    parts = [(block, (numbers >= block.first) & (numbers < block.first + block.size)) for block in owners]
    found = [_affine_of(trace, block, numbers[inside] - block.first) for block, inside in parts]
    if any(part is None for part in found):
        return None
    if len(found) == 1:
        return found[0]
    terms = np.array(list(dict.fromkeys(np.concatenate([part.terms for part in found]).tolist())), np.int64)
    weight, bias = np.zeros((len(numbers), len(terms))), np.zeros(len(numbers))
    for (_, inside), part in zip(parts, found, strict=True):
        weight[inside], bias[inside] = part.columns(terms), part.bias
    return Affine(terms, weight, bias)


def _affine_of(trace, block: Block, at: np.ndarray) -> Affine | None:
    """Elements `at` of one block."""
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
        inner = affine(trace, block.operands[0][at, 0])
        if inner is None:
            return None
        if block.op == "shift":
            return Affine(inner.terms, inner.weight, inner.bias + block.constants["offset"][at])
        factor = block.constants["factor"][at]
        return Affine(inner.terms, inner.weight * factor[:, None], inner.bias * factor)
    if block.op in ("add", "subtract"):
        a, b = (affine(trace, operand[at, 0]) for operand in block.operands)
        if a is None or b is None:
            return None
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


def _block_of(trace, numbers: np.ndarray, *ops: str) -> tuple[Block, np.ndarray] | None:
    """The one block, of one of some operations, that computes all of some elements, and which elements of it."""
    owners = trace.owners(np.ravel(numbers))
    if len(owners) != 1 or owners[0].op not in ops:
        return None
    return owners[0], np.ravel(numbers) - owners[0].first


def _operands(trace, numbers, *ops: str) -> list[np.ndarray]:
    """The operands of elements that are all of one block of these operations; empty for others."""
    found = _block_of(trace, numbers, *ops)
    return [operand[found[1], 0] for operand in found[0].operands] if found else []


def _orders(pair: list[np.ndarray]):
    return [tuple(pair), tuple(reversed(pair))] if len(pair) == 2 else []


def _function(trace, numbers) -> tuple[str | tuple | None, np.ndarray | None]:
    """The function of a spec that makes elements, and what it is applied to; (None, None) for others."""
    found = _block_of(trace, numbers, *OF_CELLS)
    if not found:
        return None, None
    block, at = found
    return function_of_cell((block.op, *block.constants.values()), block.node), block.operands[0][at, 0]


def _gates(trace, parts) -> tuple[str | tuple, list[Affine]] | None:
    """The one function of all gates, and their pre-activations; None where they differ or are not linear."""
    found = [_function(trace, part) for part in parts]
    functions = {function for function, _ in found}
    if len(functions) != 1 or functions <= {None, "tanh"}:  # cnorm's cells have no gates of tanh
        return None
    linear = [affine(trace, before) for _, before in found]
    return None if any(one is None for one in linear) else (functions.pop(), linear)


def written_cell(trace, h: np.ndarray, old: dict[int, int]):
    """The cell whose output is `h` (numbers), or None.

    Parameters
    ----------
    trace : Trace
    h : ndarray of int64
    old : dict of int to int
        For each element of a new state, that of the old one.

    Returns
    -------
    tuple or None
        Kind, numbers of the input's elements, of the old h and c (None), of the new c (None), and the weights, in the
        layout of the preset that `chain.py` names; for a GRU whether it resets after the product.
    """
    h = np.ravel(h)
    if any(number not in old for number in h.tolist()):
        return None
    before = np.array([old[number] for number in h.tolist()], np.int64)
    return _lstm(trace, h, before, old) or _gru(trace, h, before) or _rnn(trace, h, before)


def _split(gates: list[Affine], h: np.ndarray):
    """x, W [gates, units, inputs], R [gates, units, units], b [gates, units] of gates that read x and h."""
    inside = set(h.tolist())
    x = list(dict.fromkeys(number for gate in gates for number in gate.terms.tolist() if number not in inside))
    w = np.stack([gate.columns(x) for gate in gates])
    return np.array(x, np.int64), w, np.stack([gate.columns(h) for gate in gates]), np.stack([g.bias for g in gates])


def _lstm(trace, h, before, old):
    for o, squashed in _orders(_operands(trace, h, "multiply")):
        function, c = _function(trace, squashed)
        if c is None or any(number not in old for number in c.tolist()):
            continue
        c_before = np.array([old[number] for number in c.tolist()], np.int64)
        for kept, added in _orders(_operands(trace, c, "add")):
            f = [a for a, b in _orders(_operands(trace, kept, "multiply")) if (b == c_before).all()]
            for i, g in _orders(_operands(trace, added, "multiply")):
                gates, (same, inner) = _gates(trace, (i, o, *f[:1])), _function(trace, g)
                if not f or not gates or same != function or (candidate := affine(trace, inner)) is None:
                    continue
                x, w, r, b = _split([*gates[1], candidate], before)
                functions = {"recurrent_activation": gates[0], "activation": function}
                return "LSTM", x, (before, c_before), c, {"x": w, "h": r, "b": b, "functions": functions}, False
    return None


def _gru(trace, h, before):
    """h' = (1 - z) n + z h in its writings, with the reset gate before or after the product."""
    for z, n in _interpolations(trace, h, before):
        function, inner = _function(trace, n)
        for candidate in (_reset_after, _reset_before) if function else ():
            if found := candidate(trace, inner, before, z):
                found[4]["functions"]["activation"] = function
                return found
    return None


def _interpolations(trace, h, before):
    """Pairs (z, n) with h = (1 - z) n + z before."""
    for a, b in _orders(_operands(trace, h, "add")):
        for z, other in _orders(_operands(trace, a, "multiply")):
            if (other == before).all():
                for one, n in _orders(_operands(trace, b, "multiply")):
                    if _is_complement(trace, one, z):
                        yield z, n
            found = _operands(trace, other, "subtract")  # z (h - n) + n
            if found and (found[0] == before).all() and (found[1] == b).all():
                yield z, b


def _is_complement(trace, one, z) -> bool:
    """Whether `one` is 1 - z."""
    found = _block_of(trace, one, "shift")
    if not found or not (found[0].constants["offset"][found[1]] == 1).all():
        return False
    scaled = _block_of(trace, found[0].operands[0][found[1], 0], "scale")
    return bool(
        scaled
        and (scaled[0].constants["factor"][scaled[1]] == -1).all()
        and (scaled[0].operands[0][scaled[1], 0] == z).all()
    )


def _reset_after(trace, inner, before, z):
    """n = tanh(W x + b + r (R h + b'))."""
    for plain, reset in _orders(_operands(trace, inner, "add")):
        for r, product in _orders(_operands(trace, reset, "multiply")):
            gates, n_x, n_h = _gates(trace, (z, r)), affine(trace, plain), affine(trace, product)
            if not gates or n_x is None or n_h is None or set(n_h.terms.tolist()) - set(before.tolist()):
                continue
            x, w, recurrent, b = _split([*gates[1], n_x], before)
            if recurrent[2].any():
                continue
            recurrent[2] = n_h.columns(before)
            functions = {"recurrent_activation": gates[0]}
            weights = {"x": w, "h": recurrent, "b": b, "b_h": n_h.bias, "functions": functions}
            return "GRU", x, (before, None), None, weights, True
    return None


def _reset_before(trace, inner, before, z):
    """n = tanh(W x + b + R (r h))."""
    whole = affine(trace, inner)
    if whole is None:
        return None
    products = [number for number in whole.terms.tolist() if trace.owner(number).op == "multiply"]
    for r, other in _orders(_operands(trace, np.array(products, np.int64), "multiply")) if products else []:
        order = [np.flatnonzero(other == number) for number in before.tolist()]
        if len(products) != len(before) or any(len(at) != 1 for at in order):
            continue
        order = np.concatenate(order)
        gates = _gates(trace, (z, r[order]))
        if not gates:
            continue
        n_h = whole.columns(np.array(products, np.int64)[order])
        rest = [number for number in whole.terms.tolist() if number not in set(products)]
        n_x = Affine(np.array(rest, np.int64), whole.columns(rest), whole.bias)
        x, w, recurrent, b = _split([*gates[1], n_x], before)
        if recurrent[2].any():
            continue
        recurrent[2] = n_h
        weights = {"x": w, "h": recurrent, "b": b, "functions": {"recurrent_activation": gates[0]}}
        return "GRU", x, (before, None), None, weights, False
    return None


def _rnn(trace, h, before):
    function, inner = _function(trace, h)
    gate = None if inner is None else affine(trace, inner)
    if gate is None:
        return None
    x, w, r, b = _split([gate], before)
    weights = {"x": w, "h": r, "b": b, "functions": {"activation": function}}
    return ("RNN", x, (before, None), None, weights, False) if r.any() else None
