"""A pair of recurrent layers, one of which reads the sequence from its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from cnorm.layers.base import Layer, with_name, with_type
from cnorm.layers.cells import Cell


class Bidirectional(Layer):
    """y[t] = (forward's output at t, backward's output at t); backward reads the sequence from its end.

    It needs the whole sequence, so a model with such a layer has `Model.run` but no streams.

    Parameters
    ----------
    forward, backward : LSTM, GRU or RNN
        Both with the same input_size.
    name : str, optional
        As of `Add`.

    Raises
    ------
    TypeError
        If one is not a recurrent layer.
    ValueError
        If their input sizes differ.
    """

    kind = "Bidirectional"
    whole_sequence = True

    def __init__(self, forward: Cell, backward: Cell, *, name: str | None = None) -> None:
        for way, layer in (("forward", forward), ("backward", backward)):
            if not isinstance(layer, Cell):
                raise TypeError(f"{way} must be a recurrent layer such as cnorm.LSTM, got {type(layer).__name__}")
        if forward.input_size != backward.input_size:
            raise ValueError(
                f"backward must take the {forward.input_size} inputs that forward takes, got {backward.input_size}"
            )
        self.forward, self.backward = forward, backward
        self.input_size, self.output_size = forward.input_size, forward.output_size + backward.output_size
        with_name(self, name)

    def inner(self) -> dict[str, Layer]:
        return {"forward": self.forward, "backward": self.backward}

    def with_inner(self, layers: Mapping[str, Layer]) -> Layer:
        return Bidirectional(**layers, name=self.name)

    def through(self, name: str, x: np.ndarray, run: Callable[[str, Layer, np.ndarray], np.ndarray]) -> np.ndarray:
        ahead = run(f"{name}.forward", self.forward, x)
        back = run(f"{name}.backward", self.backward, x[::-1])
        return np.concatenate([ahead, back[::-1]], axis=1)

    def entry(self) -> dict:
        return {"forward": with_type(self.forward), "backward": with_type(self.backward)}

    @classmethod
    def from_entry(cls, entry: dict, weights: Mapping[str, np.ndarray], read: Callable) -> Layer | None:
        if entry.keys() != {"forward", "backward"}:
            return None
        return cls(*read({way: entry[way] for way in ("forward", "backward")}, weights))

    def __repr__(self):
        return f"Bidirectional({self.forward!r}, {self.backward!r})"

    def __reduce__(self):
        return Bidirectional, (self.forward, self.backward)
