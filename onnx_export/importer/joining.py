"""Make layers of the steps between a frame and the outputs.

A product with the shifts and scales around it is one `Linear`, but for large shifts before it, which are a layer of
their own; a norm with the scale and shift behind it is one `LayerNorm`. The list of layers has the order of the steps.
A step that reads another than the one before it begins with a `Slice`; one that reads two is `Add` or `Multiply`. What
an earlier layer computes is not computed again, unless it has a state.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import cnorm
from cnorm.layers.base import INPUT, with_name
from cnorm.layers.chain import sizes_of
from cnorm.layers.taps import PARTS
from cnorm.storage.model_files import identity
from onnx_export.importer.affine import MAX_FACTOR
from onnx_export.importer.elements import Cannot
from onnx_export.importer.selecting import box, tiled

__all__ = ["FRAME", "Cell", "Joined", "Link", "Step"]

FRAME = -1  # the place of the frame among the steps
MAX_SHIFT = 4.0  # of a scaled element, by a constant that a product may take over: its rounding grows by as much
MAX_TILED = 1 << 12  # weights of a product that repeats what it reads: a convolution of larger ones is faster
MAX_SELECTED = 1 << 16  # weights of a product that only selects, scales and shifts elements

Link = Callable[["Joined"], None]


@dataclass(frozen=True, eq=False)
class Cell:
    """A recurrent layer's states: numbers of the new ones, and of the old ones or None where they are constants."""

    new: dict[str, np.ndarray]
    old: dict[str, np.ndarray]

    @property
    def is_sum(self) -> bool:
        """Whether it is a linear recurrence, whose h and c are the same elements."""
        return "c" in self.new and np.array_equal(self.new["h"], self.new["c"])


@dataclass(frozen=True, eq=False)
class Step:
    """`link` gives it to the layers, `reads` has the places of the steps that it reads, `size` counts its elements."""

    link: Link
    reads: list[int]
    size: int


class Joined:
    """The layers of steps.

    What is not yet a layer: a product (`weight`), a norm (`eps`) or elements that are selected (`index`), in each case
    scaled and shifted.

    Parameters
    ----------
    size : int
        Of the frame.
    steps : list of Step
        Each reads only steps before it.
    ends : dict of str to int
        Outputs and their steps.
    sized : bool
        Begin with a layer that has a size.

    Attributes
    ----------
    layers, cells : list
    tell_size : bool
        Whether the layers tell the size of the frame.
    names : dict of str to str
        As of `Chain`.
    """

    def __init__(self, size: int, steps: list[Step], ends: dict[str, int], *, sized: bool = False) -> None:
        self.layers, self.cells = [], []
        self.size = self._frame_size = size
        self._here = FRAME  # the place of the layer whose outputs the next one reads
        self._sizes = {FRAME: size}  # of outputs, by places
        self._computed: dict[tuple[bytes, int | None], int] = {}  # places by layers and the place that they read
        self._steps, self._places = steps, {FRAME: FRAME}  # of steps the places of their last layers
        self._at = FRAME  # the step whose result the layer at `_here`, with what is not yet one, computes
        self._forget()
        if sized:
            self._begin_sized()
        single = len(ends) == 1 and next(iter(ends.values())) == len(steps) - 1
        heads = {} if single else {end: output for output, end in reversed(ends.items())}  # of each step the first
        tapped = set(heads).union(*(set(step.reads) - {place - 1} for place, step in enumerate(steps)))
        for place, step in enumerate(steps):
            self._now = place
            if len(step.reads) == 1:
                self._begin()
            step.link(self)
            self._at = place
            if place in tapped or place == len(steps) - 1:
                self._settle()
            if place in heads:
                self._output(heads[place])
        if single and self._here != len(self.layers) - 1:
            self._append(self._whole())
        elif FRAME in heads and self.layers:  # an output that is the frame as it is
            self._here = self._at = FRAME
            self._output(heads[FRAME])
        self.names = {} if single else {output: self._name(self._places[end]) for output, end in ends.items()}
        self.tell_size = not self.layers or _tell(self.layers, size)

    def _settle(self) -> None:
        """Make layers of all that the step computes, as others read it by name."""
        self._flush()
        self._places[self._at] = self._here

    def _output(self, output: str) -> None:
        """Name the last layer after an output; if it is the frame, or has a name, a copy of it."""
        if self._here == FRAME or self.layers[self._here].name is not None:
            self._append(self._whole())
            self._places[self._at] = self._here
        self._name(self._here, output)

    def _name(self, place: int, output: str = "") -> str:
        """The name of a layer: that of an output, if it can be one, or its place."""
        if place == FRAME:
            return INPUT
        if self.layers[place].name is None:
            name = re.sub(r"[^A-Za-z0-9_]+", "_", output)[:64]
            known = {INPUT, "x", "y", *(layer.name for layer in self.layers)}  # x and y are what `export` calls them
            usable = name[:1].isalpha() and name not in known and not name.startswith("layer")
            with_name(self.layers[place], name if usable else f"layer{place}")
        return self.layers[place].name

    def _begin(self) -> None:
        """Go on behind the step that this one reads first."""
        first = self._steps[self._now].reads[0]
        if first != self._at:
            self._branch(first)

    def _branch(self, step: int) -> None:
        """Go on behind the step at a place."""
        self._flush()
        self._go(self._places[step])

    def _go(self, here: int) -> None:
        self._here, self.size = here, self._sizes[here]

    def _put(self, layer, size: int | None = None) -> None:
        """Go on behind a layer, or behind an earlier one that computes the same; `size` of a `Concat`."""
        key = identity([layer], {}), self._here if layer.continues else None
        if layer.stateful or layer.whole_sequence or key not in self._computed:
            if layer.continues and self._here != len(self.layers) - 1:
                self._append(self._whole())
            self._append(layer, size)
            self._computed[key] = self._here
        self._go(self._computed[key])

    def _append(self, layer, size: int | None = None) -> None:
        self.layers.append(layer)
        self._sizes[len(self.layers) - 1] = size or layer.output_size or self._sizes[self._here]
        self._here = len(self.layers) - 1

    def _whole(self) -> cnorm.Slice:
        return cnorm.Slice(self._name(self._here), 0, self._sizes[self._here])

    def _begin_sized(self) -> None:
        """Begin with a layer that has a size: the frame times 1."""
        self._put(cnorm.Scale(np.ones(self._frame_size, np.float32)))
        self._places[FRAME] = self._here

    def _slice(self, start: int, stop: int) -> None:
        if not self.layers:
            self._begin_sized()
        self._put(cnorm.Slice(self._name(self._here), start, stop))

    def joined(self, kind) -> None:
        """Multiply or Add of the two steps that it reads."""
        self._settle()
        first, second = (self._places[step] for step in self._steps[self._now].reads)
        if second == len(self.layers) - 1:
            first, second = second, first
        self._go(first)
        if first == second:  # no layer reads the one before it a second time
            self._put(self._whole())
        self._put(kind(self._name(second)))

    def concat(self) -> None:
        """The steps that it reads, in order."""
        self._settle()
        places = [self._places[step] for step in self._steps[self._now].reads]
        while len(places) > PARTS:
            self._concat(places[:PARTS])
            places = [self._here, *places[PARTS:]]
        self._concat(places)

    def _concat(self, places: list[int]) -> None:
        size = sum(self._sizes[place] for place in places)
        self._put(cnorm.Concat([self._name(place) for place in places]), size)

    def take(self, at: np.ndarray) -> None:
        if self._eps is not None:
            self._flush()
        self._start()
        for name in ("_weight", "_index", "_factor", "_offset"):
            if getattr(self, name) is not None and (name != "_index" or self._weight is None):
                setattr(self, name, getattr(self, name)[at])

    def scale(self, factor) -> None:
        self._start()
        self._factor, self._offset = self._factor * factor, self._offset * factor
        if np.abs(self._factor).max(initial=0) > MAX_FACTOR:
            raise Cannot("its factors are so large that float32 overflows for ordinary frames")

    def shift(self, offset) -> None:
        self._start()
        self._offset = self._offset + offset

    def product(self, weight: np.ndarray, bias: np.ndarray) -> None:
        weight, bias = self._absorbed(weight, bias)
        self._weight, self.size = weight, len(weight)
        self._factor, self._offset = np.ones(self.size), bias

    def norm(self, eps: float) -> None:
        self._flush()
        self._eps = eps
        self._start()

    def add(self, layer) -> None:
        self._flush()
        self._put(layer)

    def embedding(self, table: np.ndarray, at: int) -> None:
        """Of the token id that is element `at` of the frame."""
        self._flush()
        if self.layers or self._frame_size > 1:
            self._put(cnorm.Slice(INPUT, at, at + 1))
        self.add(cnorm.Embedding(np.ascontiguousarray(table, np.float32)))

    def turned(self, rows: int, layer) -> None:
        """A layer that reads an array of some rows with its axes exchanged."""
        self._flush()
        self.add(cnorm.Permute((rows, self.size // rows), (1, 0)))
        self.add(layer)

    def padded(self, zeros: int, order: np.ndarray) -> None:
        """As many zeros behind the elements, and of all of them those of an order."""
        self._flush()
        self.add(cnorm.Conv1d(np.ones((1, 1, 1), np.float32), positions=self.size, padding=(0, zeros)))
        self.take(order)

    def activation(self, layer, factor: float) -> None:
        self.add(layer)
        self.scale(factor)

    def bent(self, layer, factor: np.ndarray, offset: np.ndarray) -> None:
        """An activation whose outputs are scaled and shifted."""
        self.add(layer)
        self.scale(factor)
        self.shift(offset)

    def cell(self, made, cell: Cell) -> None:
        self.add(self._cell_layer(made))
        self.cells.append(cell)

    def filtered(self, layer, cell: Cell) -> None:
        """A convolution over time, whose cache is a state."""
        self.add(layer)
        self.cells.append(cell)

    def per_position(self, made, positions: int, cell: Cell, order: np.ndarray | None = None) -> None:
        """A cell for each position, and of all outputs those of `order`."""
        self._flush()
        self.add(cnorm.PerPosition(self._cell_layer(made), positions=positions))
        self.cells.append(cell)
        if order is not None:
            self.take(order)

    def over_positions(self, made: list, positions: int, reverse: bool) -> None:
        self._flush()
        one, both = (*map(self._cell_layer, made), None)[:2]
        self.add(cnorm.OverPositions(one, positions=positions, reverse=reverse, both=both))

    def both(self, made: list) -> None:
        self._flush()
        self.add(cnorm.Bidirectional(*(self._cell_layer(one) for one in made)))

    def _cell_layer(self, made):
        """A cell, whose product with its input takes over what is selected, scaled and shifted before it."""
        kind, weights, preset = made
        if self._weight is not None or self._eps is not None:
            self._flush()
        self._shift_first()
        self._narrow()
        if self._index is not None and "W" not in weights and self._offset.any():
            self._flush()  # a cell that is written out has no bias of x alone, which its norms may cover
        if self._index is not None:
            name = "W" if "W" in weights else "weight_x"
            whole = weights[name].astype(np.float64)
            rows, old = whole.reshape(-1, whole.shape[-1]), self._offset
            wide, extra = self._absorbed(rows, np.zeros(len(rows)))
            weights = weights | {name: wide.reshape(*whole.shape[:-1], -1).astype(np.float32)}
            if old.any():
                given = np.array(weights.get("B", np.zeros((1, 2 * len(rows)))), np.float64)
                given.reshape(-1)[: len(rows)] += extra
                weights |= {"B": given.astype(np.float32)}
        return getattr(cnorm, kind)(weights, preset=preset)

    def _absorbed(self, weight, bias):
        """A product behind elements that are selected, scaled and shifted, as one of all elements before."""
        if self._weight is not None or self._eps is not None:
            self._flush()
        self._shift_first()
        self._narrow()
        if self._index is None:
            return np.asarray(weight, np.float64), np.asarray(bias, np.float64)
        wide = np.zeros((len(weight), self.size))
        np.add.at(wide, (slice(None), self._index), weight * self._factor)
        bias = bias + weight @ self._offset
        self._forget()
        return wide, bias

    def _narrow(self) -> None:
        """A slice where a matrix would have more zeros than weights: half of the elements, in a row, or fewer."""
        if self._index is not None and 2 * len(self._index) <= self.size and (np.diff(self._index) == 1).all():
            self._moved(self._index)
            self._index = np.arange(self.size)

    def _shift_first(self) -> None:
        """A layer for large shifts, before any scale: x - mean is exact near the mean, x / std - mean / std is not."""
        if self._index is None:
            return
        factor, offset = self._factor, self._offset
        far = (np.abs(offset) > MAX_SHIFT) & (factor != 0)
        if far.any():
            before = np.divide(offset, factor, out=np.zeros_like(offset), where=far)
            self._select(self._index, np.ones(len(offset), np.float32), before.astype(np.float32))
            self._forget()
            self._start()
            self._factor, self._offset = factor, np.where(far, 0.0, offset)

    def _start(self) -> None:
        if self._factor is None:
            self._factor, self._offset = np.ones(self.size), np.zeros(self.size)
            if self._weight is None and self._eps is None:
                self._index = np.arange(self.size)

    def _forget(self) -> None:
        self._weight = self._eps = self._index = self._factor = self._offset = None

    def _flush(self) -> None:
        """Make a layer of what is not yet one."""
        self._shift_first()
        if self._factor is None:
            return
        with np.errstate(over="ignore", under="ignore"):
            factor, offset = self._factor.astype(np.float32), self._offset.astype(np.float32)
            if self._weight is not None:
                weight = (self._weight * self._factor[:, None]).astype(np.float32)
                self._put(cnorm.Linear(weight, offset if offset.any() else None))
            elif self._eps is not None:
                self._put(cnorm.LayerNorm(factor, offset if offset.any() else None, eps=self._eps))
            else:
                self._select(self._index, factor, offset)
        self._forget()

    def _select(self, index: np.ndarray, factor: np.ndarray, offset: np.ndarray) -> None:
        """Layers for elements that are selected, then scaled and shifted, where no product follows."""
        if not np.array_equal(index, np.arange(self.size)):
            self._moved(index)
        if offset.any():  # a channel for each element
            self._put(cnorm.CausalConv1d(factor.reshape(-1, 1, 1), offset, groups=self.size))
        elif (factor != 1).any():
            self._put(cnorm.Scale(factor))

    def _moved(self, index: np.ndarray) -> None:
        """Layers that copy the elements of an index; a product where these are not the box of an array."""
        found = tiled(index)
        if found and len(index) * self.size > MAX_TILED:
            each, times, inner = found
            if not np.array_equal(each, np.arange(self.size)):
                self._moved(each)
            self._put(cnorm.Conv1d(np.ones((times, 1, 1), np.float32), positions=len(each)))
            if inner:
                self._put(cnorm.Permute((times, len(each)), (1, 0)))
            return
        moves = box(index, self.size)
        if moves is None:
            if len(index) * self.size > MAX_SELECTED:
                raise Cannot(f"{len(index)} elements are selected or reordered where no product follows")
            weight = np.zeros((len(index), self.size), np.float32)
            weight[np.arange(len(index)), index] = 1
            self._put(cnorm.Linear(weight))
        for kind, numbers, axes in moves or []:
            if kind == "permute":
                self._put(cnorm.Permute(numbers, axes))
            else:
                self._slice(*numbers)


def _tell(layers: list, size: int) -> bool:
    """Whether layers tell the size of the frame that they take."""
    try:
        return sizes_of(layers)[0] == size
    except ValueError:
        return False
