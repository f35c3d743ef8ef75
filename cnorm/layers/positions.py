"""One layer at each position of a frame of [channels, positions], by itself or scanned over the positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from cnorm.cells.packing import Parts
from cnorm.cells.rounded import Matrix, Rows
from cnorm.layers.base import Bound, Layer, Scope, at_least, remade, with_name, with_type
from cnorm.layers.cells import GRU, LSTM, RNN, Cell
from cnorm.layers.linear import Linear
from cnorm.layers.taps import concatenation

SCANS = ("each", "forward", "backward")  # cnorm_scan of cnorm_rnn.h


class Positions(Layer):
    """What both kinds have: a layer, whose tensors are this one's, and the number of positions."""

    inner_kinds: ClassVar[Mapping[str, type[Layer]]] = MappingProxyType({one.kind: one for one in (LSTM, GRU, RNN)})
    scan: str

    def _take(self, layer: Layer, positions: int) -> None:
        if "h0" in layer.weights or "c0" in layer.weights:
            raise ValueError(f"the cell of {self.kind} must have no initial state, h0 or c0: it begins at zero")
        self._layer, self.positions = layer, at_least(1, positions, "positions")
        self.weights, self.absent_biases, self.eps = layer.weights, layer.absent_biases, getattr(layer, "eps", None)
        if layer.rows:
            self.rows = layer.rows
        self.input_size = layer.input_size * self.positions
        self.output_size = layer.output_size * self.positions

    @property
    def layer(self) -> Any:
        """The layer, with the rows of this one's rounded matrices."""
        if not self.rows or self._layer.rows:
            return self._layer
        return remade(type(self._layer), self._layer.entry(), self.weights, self.rows)

    def packed(self, weights: Mapping[str, np.ndarray] | None = None) -> dict:
        return self._layer.packed(weights)

    def options(self, size: int) -> dict[str, float]:
        more = {"positions": self.positions, "scan": SCANS.index(self.scan)}
        return self._layer.options(size) | more | {"inputs": self.input_size, "outputs": self.output_size}

    def parts(self, size: int) -> Parts:
        matrices = {name: matrix.given(self.rows.get(name)) for name, matrix in self.matrices().items()}
        return Parts(self.part, self.options(size), self._layer.parts(size).fields | matrices)

    def gradient_targets(self, into: Mapping[str, np.ndarray]) -> list[tuple[np.ndarray, str, int | None]]:
        return self._layer.gradient_targets(into)

    def matrices(self) -> dict[str, Matrix]:
        return self._layer.matrices()

    def longest_sum(self) -> int:
        return self._layer.longest_sum()

    def replaced(self) -> tuple[str, ...]:
        return self._layer.replaced()

    @classmethod
    def filled(cls, entry: dict, rows: Mapping[str, Rows], others: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        kind, options = cls._inner(entry)
        return kind.filled(options, rows, others)

    def entry(self) -> dict:
        return {"layer": {"type": self._layer.kind} | self._layer.entry(), "positions": self.positions}

    @classmethod
    def _inner(cls, entry: dict) -> tuple[type[Layer], dict]:
        """The class of the layer of an untrusted entry, and its own entry."""
        own = entry.get("layer")
        name = own.get("type") if isinstance(own, dict) else None
        if not isinstance(name, str) or name not in cls.inner_kinds:
            raise ValueError(f"the layer of {cls.kind} must be one of {', '.join(cls.inner_kinds)}, got {own!s:.200}")
        return cls.inner_kinds[name], {key: value for key, value in own.items() if key != "type"}


class PerPosition(Positions):
    """One layer for every position of a frame of [channels, positions], flattened.

    Its outputs are [outputs, positions], flattened. A cell has a state for each position, [output_size, positions], and
    for an LSTM [units, positions], flattened.

    Parameters
    ----------
    layer : LSTM, GRU, RNN or Linear
        Whose inputs are the channels. A cell has no initial state of its own.
    positions : int
    name : str, optional
        As of `Add`.

    Raises
    ------
    TypeError, ValueError
        For another layer, or a number of positions that is no int or out of range.
    """

    kind = "PerPosition"
    scan = "each"
    inner_kinds = MappingProxyType({**Positions.inner_kinds, "Linear": Linear})

    def __init__(self, layer: Cell | Linear, *, positions: int, name: str | None = None) -> None:
        if not isinstance(layer, Cell | Linear):
            raise TypeError(f"layer must be a recurrent layer or a Linear, got {type(layer).__name__}")
        self._take(layer, positions)
        self.stateful = layer.stateful
        with_name(self, name)

    @property
    def part(self) -> str:
        return "positions" if self.stateful else "conv"

    def options(self, size: int) -> dict[str, float]:
        if self.stateful:
            return super().options(size)
        once = dict.fromkeys(("taps", "dilation", "stride"), 1)
        none = dict.fromkeys(("depthwise", "reflect", "before", "after", "groups"), 0)
        sizes = {"channels": self.layer.input_size, "outputs": self.layer.output_size, "positions": self.positions}
        return once | none | sizes | {"inputs": self.input_size, "results": self.output_size}

    @classmethod
    def from_entry(cls, entry: dict, weights: Mapping[str, np.ndarray], read: Callable) -> Layer | None:
        if entry.keys() != {"layer", "positions"}:
            return None
        kind, own = cls._inner(entry)
        layer = kind.from_entry(own, weights, None)
        return None if layer is None else cls(layer, positions=entry["positions"])

    def __repr__(self):
        return f"PerPosition({self.layer!r}, positions={self.positions})"


class OverPositions(Positions):
    """A recurrent cell scanned over the positions of each frame of [channels, positions], flattened, from zero.

    Its outputs are [outputs, positions], flattened. Nothing is kept from frame to frame.

    Parameters
    ----------
    cell : LSTM, GRU or RNN
        Whose inputs are the channels. It has no initial state of its own.
    positions : int
    reverse : bool, default False
        Scan from the last position to the first.
    both : LSTM, GRU or RNN, optional
        A second cell, which scans the other way; its outputs are the channels behind those of `cell`.
    name : str, optional
        As of `Add`.

    Raises
    ------
    TypeError, ValueError
        For another layer, two cells with different inputs, or a number of positions that is no int or out of range.
    """

    kind = "OverPositions"
    part = "positions"
    ways: Mapping[str, OverPositions] = MappingProxyType({})  # layers of one cell each, if there are two

    def __init__(
        self,
        cell: Cell,
        *,
        positions: int,
        reverse: bool = False,
        both: Cell | None = None,
        name: str | None = None,
    ) -> None:
        for argument, one in (("cell", cell), ("both", both)):
            if not isinstance(one, Cell) and not (one is None and argument == "both"):
                raise TypeError(f"{argument} must be a recurrent layer such as cnorm.GRU, got {type(one).__name__}")
        if not isinstance(reverse, bool):
            raise TypeError(f"reverse must be a bool, got {type(reverse).__name__}")
        self.reverse = reverse
        if both is None:
            self._take(cell, positions)
        else:
            one, other = (cell, reverse), (both, not reverse)
            self._take_both(*(OverPositions(own, positions=positions, reverse=way) for own, way in (one, other)))
        with_name(self, name)

    def _take_both(self, ahead: OverPositions, back: OverPositions) -> None:
        if (ahead.input_size, ahead.positions) != (back.input_size, back.positions):
            raise ValueError(f"both must take the {ahead.layer.input_size} inputs of cell, got {back.layer.input_size}")
        self.ways = MappingProxyType({"cell": ahead, "both": back})
        self.positions, self.input_size = ahead.positions, ahead.input_size
        self.output_size = ahead.output_size + back.output_size

    @property
    def scan(self) -> str:
        return "backward" if self.reverse else "forward"

    # ---- a second cell: two layers of one cell

    def inner(self) -> dict[str, Layer]:
        return dict(self.ways)

    def with_inner(self, layers: Mapping[str, Layer]) -> Layer:
        return with_name(_both(layers["cell"], layers["both"]), self.name)

    def through(self, name: str, x: np.ndarray, run: Callable[[str, Layer, np.ndarray], np.ndarray]) -> np.ndarray:
        return np.concatenate([run(f"{name}.{way}", layer, x) for way, layer in self.ways.items()], axis=1)

    def flat(self, size: int, scope: Scope) -> list[tuple[Any, int]]:
        if not self.ways:
            return super().flat(size, scope)
        ahead, back = self.ways.values()
        again = concatenation(ahead.output_size, [(1, size, 0, size)])  # x, the input of `ahead`
        joined = [(2, ahead.output_size, 0, ahead.output_size), (0, back.output_size, 0, back.output_size)]
        return [
            (ahead, ahead.output_size),
            (Bound(again), size),
            (back, back.output_size),
            (Bound(concatenation(back.output_size, joined)), self.output_size),
        ]

    # ---- files

    def entry(self) -> dict:
        if self.ways:
            return {way: with_type(layer) for way, layer in self.ways.items()}
        return super().entry() | {"reverse": self.reverse}

    @classmethod
    def from_entry(cls, entry: dict, weights: Mapping[str, np.ndarray], read: Callable) -> Layer | None:
        if entry.keys() == {"cell", "both"}:
            ways = dict(zip(entry, read(entry, weights), strict=True))
            if not all(isinstance(one, cls) and not one.ways for one in ways.values()):
                raise ValueError(f"the layers of OverPositions must be OverPositions of one cell, got {ways!s:.200}")
            if ways["cell"].reverse == ways["both"].reverse:
                raise ValueError("the two cells of OverPositions must scan in opposite directions")
            return _both(ways["cell"], ways["both"])
        if entry.keys() != {"layer", "positions", "reverse"}:
            return None
        kind, own = cls._inner(entry)
        layer = kind.from_entry(own, weights, None)
        return None if layer is None else cls(layer, positions=entry["positions"], reverse=entry["reverse"])

    def __reduce__(self):
        if not self.ways:
            return super().__reduce__()
        return _both, tuple(self.ways.values())

    def __repr__(self):
        if self.ways:
            ahead, back = (layer.layer for layer in self.ways.values())
            more = ", reverse=True" if self.reverse else ""
            return f"OverPositions({ahead!r}, positions={self.positions}{more}, both={back!r})"
        return f"OverPositions({self.layer!r}, positions={self.positions}{', reverse=True' if self.reverse else ''})"


def _both(ahead: OverPositions, back: OverPositions) -> OverPositions:
    """The layer of two, of one cell each, in opposite directions."""
    made = object.__new__(OverPositions)
    made.reverse = ahead.reverse
    made._take_both(ahead, back)
    return made
