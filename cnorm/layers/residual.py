"""Layers around which their input is added."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from cnorm.cells.packing import Parts
from cnorm.layers.base import Bound, Layer, Scope, with_name, with_type
from cnorm.layers.chain import chained, check_read, ends, flat, followed, shown


class Residual(Layer):
    """y = x + layers(x).

    Parameters
    ----------
    layers : sequence of layers
        Applied in order; the last has as many outputs as the first has inputs. `Bidirectional` is not allowed. Their
        names are not visible outside, nor those outside to them; ``"input"`` is x.
    name : str, optional
        As of `Add`.

    Raises
    ------
    TypeError, ValueError
        As `cnorm.Model`.
    """

    kind = "Residual"

    def __init__(self, layers: Iterable[Layer], *, name: str | None = None) -> None:
        self.layers = chained(layers)
        check_read(self.layers)
        if any(layer.whole_sequence for layer in self.layers):
            raise ValueError("layers of Residual must not have a Bidirectional layer: put it on its own")
        self.input_size, self.output_size = ends(self.layers)
        if self.input_size != self.output_size:
            raise ValueError(
                f"layers of Residual must have as many outputs as inputs, got {self.input_size} -> {self.output_size}"
            )
        with_name(self, name)

    def inner(self) -> dict[str, Layer]:
        return {str(i): layer for i, layer in enumerate(self.layers)}

    def with_inner(self, layers: Mapping[str, Layer]) -> Layer:
        return Residual(layers.values(), name=self.name)

    def through(self, name: str, x: np.ndarray, run: Callable[[str, Layer, np.ndarray], np.ndarray]) -> np.ndarray:
        return x + followed(name, self.inner(), x, run)

    def flat(self, size: int, scope: Scope) -> list[tuple[Any, int]]:
        inner = flat(self.layers, size)
        return [*inner, (Bound(Parts("residual", {"n": size, "back": len(inner)})), size)]

    def entry(self) -> dict:
        return {"layers": [with_type(layer) for layer in self.layers]}

    @classmethod
    def from_entry(cls, entry: dict, weights: Mapping[str, np.ndarray], read: Callable) -> Layer | None:
        if entry.keys() != {"layers"} or not isinstance(entry["layers"], list):
            return None
        return cls(read({str(i): one for i, one in enumerate(entry["layers"])}, weights))

    def __repr__(self):
        return f"Residual([{', '.join(map(shown, self.layers))}])"

    def __reduce__(self):
        return Residual, (self.layers,)
