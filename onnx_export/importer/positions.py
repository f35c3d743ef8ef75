"""Layers at each position of a frame: a product of several rows, a cell scanned over positions, one for each of them.

A frame is [channels, positions]; a product or a recurrent operator has its channels last. So what they compute is taken
in the layer's order first, and put in the file's order by a move that costs nothing where two of them meet.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

import cnorm
from onnx_export.importer.cells import Found, written_cell
from onnx_export.importer.elements import Block
from onnx_export.importer.frames import rows_of
from onnx_export.importer.operators_of_cells import Scan

__all__ = ["Orders", "linear", "rows_apart", "scans_of", "turned", "written_cells"]

MAX_ROWS = 512  # that are normalised one by one


def scans_of(trace, old: Collection[int], inside: bool) -> list[Scan]:
    """The recurrent operators whose steps or rows are positions of a frame: their steps are no states.

    `inside`: where the steps are frames, those of one step are cells, of both directions, too.
    """
    over = [scan for scan in trace.scans if scan.over and scan.x.shape[1] == 1 and (len(scan.x) > 1 or not inside)]
    per = [scan for scan in trace.scans if not scan.over and scan.x.shape[1] > 1]
    return per + [scan for scan in over if not any(number in old for number in _firsts(scan))]


def turned(trace, numbers: np.ndarray) -> np.ndarray | None:
    """The order in which `linear` knows elements that are those of several rows, one after another."""
    block, *others = trace.owners(numbers)
    at = numbers
    while not others and block.op in ("scale", "shift"):
        at = block.operands[0][at - block.first, 0]
        block, *others = trace.owners(at)
    if others or block.op != "product" or len(numbers) % len(block.constants["weight"]):
        return None
    whole = numbers.reshape(-1, len(block.constants["weight"])).T.ravel()
    return whole if linear(trace, whole) else None


def linear(trace, numbers: np.ndarray) -> tuple[cnorm.PerPosition, np.ndarray] | None:
    """The layer of a product of several rows, scaled and shifted, and what it reads; None for others."""
    factor, offset, (block, *others) = np.ones(len(numbers)), np.zeros(len(numbers)), trace.owners(numbers)
    while not others and block.op in ("scale", "shift"):
        at = numbers - block.first
        if block.op == "scale":
            factor = factor * block.constants["factor"][at]
        else:
            offset = offset + factor * block.constants["offset"][at]
        numbers = block.operands[0][at, 0]
        block, *others = trace.owners(numbers)
    if others or block.op != "product" or len(block.operands[0]) < 2:
        return None
    weight = block.constants["weight"]
    if len(numbers) % len(weight) or len(numbers) == len(weight):
        return None
    at = (numbers - block.first).reshape(len(weight), -1)
    if not np.array_equal(at, at[0] // len(weight) * len(weight) + np.arange(len(weight))[:, None]):
        return None
    rows = block.operands[0][at[0] // len(weight)]
    factor, offset = (each.reshape(len(weight), -1) for each in (factor, offset))
    if any((each != each[:, :1]).any() for each in (factor, offset)):
        return None
    bias = offset[:, 0].astype(np.float32) if offset.any() else None
    layer = cnorm.Linear((weight * factor[:, :1]).astype(np.float32), bias)
    return cnorm.PerPosition(layer, positions=len(rows)), rows.T.ravel()


def written_cells(trace, numbers: np.ndarray, old: Mapping[int, int]) -> tuple[Found, int] | None:
    """A cell at each position, written out for all of them at once, whose new h are some elements; None for others.

    A product of several rows says which old h belong to one position. The numbers of `Found` are those of all
    positions, in the order of the layer, [units, positions].
    """
    new = {old.get(number): number for number in numbers.tolist()}
    if None in new:
        return None
    for block in trace.blocks:
        rows = block.operands[0] if block.op == "product" else np.empty((0, 0), np.int64)
        if len(rows) < 2 or rows.size != len(new) or set(rows.ravel().tolist()) != new.keys():
            continue
        cells: list[Found] = []
        for row in rows.tolist():
            cell = written_cell(trace, np.array([new[number] for number in row]), old)
            if cell is None or not _is_same(cell, (cells or [cell])[0]):
                break
            cells.append(cell)
        if len(cells) == len(rows):
            return _together(cells), len(cells)
    return None


def _together(cells: list[Found]) -> Found:
    def joined(parts) -> np.ndarray:
        return np.stack(list(parts), axis=1).ravel()

    old, new = ({name: joined(one[name] for one in each) for name in each[0]}
                for each in ([cell.old for cell in cells], [cell.new for cell in cells]))  # fmt: skip
    return replace(cells[0], x=joined(cell.x for cell in cells), old=old, new=new)


def _is_same(cell: Found, other: Found) -> bool:
    """Whether two cells are one but for what they read."""
    fixed = [(each.kind, each.fields, each.eps, len(each.x), each.parts.keys()) for each in (cell, other)]
    return fixed[0] == fixed[1] and all(np.array_equal(part, other.parts[name]) for name, part in cell.parts.items())


def rows_apart(trace, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Of elements that are normalised in several rows, scaled and shifted: the row of each, and all that these read.

    None for others. That is a norm or a softmax, or a norm written as a quotient whose denominators are its rows'.
    """
    block, *others = trace.owners(numbers)
    at = numbers - block.first
    while not others and block.op in ("scale", "shift"):
        numbers = block.operands[0][at, 0]
        block, *others = trace.owners(numbers)
        at = numbers - block.first
    if others:
        return None
    if block.op in ("norm", "softmax"):
        row = at // (block.size // len(block.operands[0]))
        rows = block.operands[0][list(dict.fromkeys(row.tolist()))]
    else:
        own = _denominators(trace, block, at)
        row, rows = (own, np.empty((0, 0), np.int64)) if own is not None else (np.zeros(1), None)
    several = len(np.unique(row)) > 1 and len(np.unique(row)) <= MAX_ROWS
    return (row, rows) if several else None


def _denominators(trace, block: Block, at: np.ndarray) -> np.ndarray | None:
    """What elements of a quotient, or of a product with a reciprocal, are divided by, if it is the root of a sum."""
    for side, inverse in ((1, "root"), (0, "reciprocal"), (1, "reciprocal")):
        if block.op == ("divide" if inverse == "root" else "multiply"):
            numbers = block.operands[side][at, 0]
            if all(owner.op == inverse for owner in trace.owners(numbers)) and len(np.unique(numbers)) < len(numbers):
                return numbers
    return None


class Orders:
    """The order in which all elements of a block are computed, where only parts of them or others are asked for.

    Parameters
    ----------
    trace : Trace
    scans : list of Scan
    outputs : list of ndarray
        Numbers of the elements that are needed; none if frames have no positions.
    states : collection of int
        Elements of states.

    Attributes
    ----------
    scan_of : dict of int to Scan
        By the first number of a block.
    concatenated : set of bytes
        Elements that are those of several layers, concatenated.
    parts : dict of bytes to list of ndarray
        What the graph joins some elements of.
    """

    def __init__(self, trace, scans: list[Scan], outputs: list[np.ndarray], states: Collection[int]) -> None:
        self.trace = trace
        self.scan_of = {number: scan for scan in scans for number in _firsts(scan)}
        self._whole: dict[int, np.ndarray] = {}
        self._joined: dict[bytes, np.ndarray] = {}
        self.concatenated: set[bytes] = set()
        self.parts: dict[bytes, list[np.ndarray]] = {}
        self._scans: dict[int, np.ndarray] = {id(scan): scan.whole().ravel() for scan in scans}
        self._place = np.arange(trace.size)  # of each element in the order of computing
        if not outputs or not (scans or any(self._has_positions(block) for block in trace.blocks)):
            return
        needed = _needed(trace, outputs)
        states = np.isin(np.arange(trace.size), states)
        for value, parts in trace.joined:
            alone = needed[value].all() and not states[value].any() and len(np.unique(value)) == len(value)
            if alone and all(owner.op != "constant" for owner in trace.owners(value)):
                self._joined.setdefault(value.tobytes(), value)
                parts = [part for part in parts if part.size]
                if parts:
                    self.join(value, parts)
        for whole in self._scans.values():
            self._place[whole] = np.sort(whole)
        for block in trace.blocks:
            at = slice(block.first, block.first + block.size)
            if block.first in self.scan_of or block.op in ("input", "constant", "embedding") or block.size < 2:
                continue
            whole = self._order(block)
            self._place[whole] = block.numbers
            used = needed[at].reshape(len(block.operands[0]), -1).any(1) if block.op == "product" else needed[at]
            if used.all() and not rows_apart(trace, block.numbers):  # a row of a product reads the same for each output
                self._whole[block.first] = whole

    @staticmethod
    def _has_positions(block: Block) -> bool:
        if block.op == "product":
            return len(block.operands[0]) > 1
        return block.op == "conv" and block.size > len(block.constants["weight"])

    def _order(self, block: Block) -> np.ndarray:
        """All elements of a block as its layer has them."""
        if block.op == "product":
            return block.numbers.reshape(len(block.operands[0]), -1).T.ravel()
        operands = [self._place[operand.ravel()] for operand in block.operands if operand.size == block.size]
        if block.op in ("conv", "mean", "sum", "max") or not operands or len(block.operands[0]) not in (1, block.size):
            return block.numbers
        return max([np.arange(block.size), *self._turned(block)], key=lambda at: _runs(operands, at)) + block.first

    def _turned(self, block: Block) -> list[np.ndarray]:
        """Places in the order with the last two axes of a block's result exchanged."""
        shape = [size for size in self.trace.shapes[block.first] if size > 1]
        return [np.arange(block.size).reshape(-1, *shape[-2:]).swapaxes(1, 2).ravel()] if len(shape) > 1 else []

    def whole(self, owners: list[Block], numbers: np.ndarray) -> np.ndarray | None:
        """All elements of the layer that computes some, if these are others, or in another order."""
        scans = {id(self.scan_of.get(owner.first)) for owner in owners}
        if owners[0].first in self.scan_of and len(scans) == 1:
            whole = self._scans[scans.pop()]
        elif len(owners) == 1 and owners[0].first in self._whole:
            whole = self._whole[owners[0].first]
        else:
            return self._value(numbers) if len(owners) > 1 else None
        if np.array_equal(whole, numbers) or not np.isin(numbers, whole).all():
            return None
        return whole

    def _value(self, numbers: np.ndarray) -> np.ndarray | None:
        """The value of the graph that some elements are a part of: as they stand, or else the smallest."""
        own, found, last = numbers.tobytes(), [], self.trace.owner(int(numbers.max())).first
        for key, value in self._joined.items():
            if key == own or own in self.concatenated:
                break  # those behind it are made of it
            if self.trace.owner(int(value.max())).first > last or len(value) < len(numbers):
                continue  # what it has besides may be computed from these elements
            if np.isin(numbers, value).all():
                (at,) = np.flatnonzero(value == numbers[0])
                found.append((not np.array_equal(value[at : at + len(numbers)], numbers), len(value), value))
        return min(found, key=lambda each: each[:2])[2] if found else None

    def join(self, numbers: np.ndarray, parts: list[np.ndarray]) -> np.ndarray:
        """Note what some elements are joined of: these parts, concatenated."""
        together = np.concatenate(parts)
        self.concatenated.add(together.tobytes())
        for each in (numbers, together):
            self.parts.setdefault(each.tobytes(), parts)
        return together

    def grouped(self, owners: list[Block], numbers: np.ndarray) -> list[np.ndarray]:
        """Elements by the layer that computes them."""
        groups: dict[int, np.ndarray] = {}
        for owner in owners:
            key = id(self.scan_of[owner.first]) if owner.first in self.scan_of else -1 - owner.first
            inside = (numbers >= owner.first) & (numbers < owner.first + owner.size)
            groups[key] = groups.get(key, False) | inside
        return [numbers[inside] for inside in groups.values()]


def _firsts(scan: Scan) -> list[int]:
    return [int(number) for y, _ in scan.ways for number in y[..., 0].ravel()]


def _runs(operands: list[np.ndarray], at: np.ndarray) -> int:
    """How many elements of some operands follow, in an order, the one before."""
    return sum(int((np.diff(operand[at]) == 1).sum()) for operand in operands)


def _needed(trace, outputs: list[np.ndarray]) -> np.ndarray:
    """For each element whether an output depends on it."""
    needed = np.zeros(trace.size, bool)
    for numbers in outputs:
        needed[numbers] = True
    for block in reversed(trace.blocks):
        own = needed[block.first : block.first + block.size]
        if block.operands and own.any():
            for operand in block.operands:
                needed[operand[np.unique(rows_of(block, len(operand))[own])]] = True
    return needed
