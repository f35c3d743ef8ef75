"""Layers that make fewer elements of some, or put constants between them."""

from __future__ import annotations

import numpy as np

import cnorm
from onnx_export.importer.elements import Block, Cannot
from onnx_export.importer.joining import MAX_SELECTED, Link
from onnx_export.importer.selecting import box

__all__ = ["among_constants", "largest", "summed"]

MAX_SUMMED = 1 << 12  # weights of a product that only sums: a convolution of larger ones is faster


def summed(block: Block) -> tuple[Link, list[np.ndarray]]:
    """The mean or the sum of each row: a product, or of a large array [channels, positions] a convolution."""
    rows, operand = len(block.operands[0]), block.operands[0]
    terms, places = np.unique(operand, return_inverse=True)
    places, share = places.reshape(rows, -1), 1 / operand.shape[1] if block.op == "mean" else 1.0
    if rows * len(terms) > MAX_SUMMED and len(terms) == operand.size:
        weight, inner = np.full((1, operand.shape[1], 1), share, np.float32), np.arange(operand.size)
        layer = cnorm.Conv1d(weight, positions=rows)
        if np.array_equal(places, inner.reshape(rows, -1)):
            return (lambda to: to.turned(rows, layer)), [terms]
        if np.array_equal(places, inner.reshape(-1, rows).T):
            return (lambda to: to.add(layer)), [terms]
    weight = np.zeros((rows, len(terms)))
    np.add.at(weight, (np.arange(rows)[:, None], places), share)
    return (lambda to: to.product(weight, np.zeros(rows))), [terms]


def largest(block: Block) -> tuple[Link, list[np.ndarray]]:
    """The largest of each row: of windows of a frame [channels, positions], or of these as they are copied."""
    rows = block.operands[0]
    if "x" in block.constants:
        x, options = block.constants["x"], block.constants["options"]
        layer = cnorm.MaxPool1d(rows.shape[1], channels=len(x), positions=x.shape[1], **options)
        return (lambda to: to.add(layer)), [x.ravel()]
    size = rows.shape[1]
    layer = cnorm.MaxPool1d(size, channels=len(rows), positions=size)
    return (lambda to: to.add(layer)), [rows.ravel()]


def among_constants(numbers: np.ndarray, owners: list[Block]) -> tuple[Link, list[np.ndarray]]:
    """Elements with constants between them, as those of a Pad or a Concat."""
    bias, fixed = np.zeros(len(numbers)), np.zeros(len(numbers), bool)
    constant = [owner for owner in owners if owner.op == "constant"]
    if len(constant) == len(owners):
        raise Cannot(f"{constant[0].node}: an output, or all that a layer reads, is constant")
    for owner in constant:
        inside = (numbers >= owner.first) & (numbers < owner.first + owner.size)
        bias[inside] = np.asarray(owner.constants["value"], np.float64)[numbers[inside] - owner.first]
        fixed |= inside
    rest, zeros = numbers[~fixed], int(fixed.sum())
    if not bias.any() and (found := _zeros_behind(fixed, rest)):
        each, order = found
        return (lambda to: to.padded(zeros, order)), [each]
    if len(numbers) * len(rest) > MAX_SELECTED:
        raise Cannot(f"{constant[0].node}: it puts {zeros} constants between {len(rest)} elements of the frame")
    weight = np.zeros((len(numbers), len(rest)))
    weight[np.flatnonzero(~fixed), np.arange(len(rest))] = 1
    return (lambda to: to.product(weight, bias)), [rest]


def _zeros_behind(fixed: np.ndarray, rest: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """The elements `rest` in an order, and the order of them and zeros behind them that has zeros where `fixed` is.

    None if that order is not one that copies make.
    """
    for each in (rest, np.sort(rest)):
        own, order = np.argsort(each), np.empty(len(fixed), np.int64)
        order[~fixed] = own[np.searchsorted(each[own], rest)]
        order[fixed] = len(rest) + np.arange(fixed.sum())
        if box(order, len(order)) is not None:
            return each, order
    return None
