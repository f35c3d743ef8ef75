"""A model's weights and their gradients, each as one flat array; used by `cnorm.Learner` and `cnorm.torch`."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import numpy as np

from cnorm import _core
from cnorm.layers.base import Layer
from cnorm.layers.chain import flat

__all__ = ["Parameters", "add_gradients"]


def add_gradients(targets: list, gradients: Mapping[str, np.ndarray]) -> None:
    """Add the gradients of packed arrays, by name, to their targets; a target without a gradient is left as it is."""
    for view, name, gate in targets:
        if name in gradients:
            view += (gradients[name] if gate is None else gradients[name][gate]).reshape(view.shape)


class Parameters:
    """The weights of a stack of layers in one flat float32 array.

    Parameters
    ----------
    layers : sequence of Layer
        Not bidirectional ones.
    input_size : int

    Attributes
    ----------
    values, gradient : ndarray, float32
        Flat: all tensors one after the other.
    arrays : dict of str to ndarray
        Views of `values` by the names of the model file.
    """

    def __init__(self, layers, input_size: int) -> None:
        self.flat = flat(layers, input_size)
        leaves = [leaf for i, layer in enumerate(layers) for leaf in layer.leaves(f"layers.{i}") if leaf[1].weights]
        run = [i for i, (layer, _) in enumerate(self.flat) if layer.weights]
        self.states = list(accumulate((layer.stateful for layer, _ in self.flat), initial=0))  # before each place
        places = [(i, f"{name}.", layer) for i, (name, layer) in zip(run, leaves, strict=True)]
        named = [(prefix + name, array) for _, prefix, layer in places for name, array in layer.weights.items()]
        self.values = np.concatenate([np.zeros(0, np.float32), *(array.reshape(-1) for _, array in named)])
        self.gradient = np.zeros_like(self.values)
        ends = np.cumsum([0] + [array.size for _, array in named])
        self.arrays, grown = {}, {}
        for (name, array), start, end in zip(named, ends[:-1], ends[1:], strict=True):
            self.arrays[name] = self.values[start:end].reshape(array.shape)
            grown[name] = self.gradient[start:end].reshape(array.shape)
        self.places = [
            (i, layer, _own(self.arrays, prefix, layer), layer.gradient_targets(_own(grown, prefix, layer)))
            for i, prefix, layer in places
        ]

    def collect(self, tape: _core.Tape, initial: bool) -> None:
        """Set `gradient` from `tape`; `initial`: the tape began at the initial state, which is a parameter too."""
        self.gradient[:] = 0
        names = {name: slice(start, start + units) for name, units, start in tape.state_arrays}
        for i, layer, _, targets in self.places:
            gradients = tape.gradients[i]
            if layer.recurrent and initial:
                states = {f"{part}0": names.get(f"{part}{self.states[i]}") for part in "hc"}
                gradients = gradients | {k: tape.dstate[:, at].sum(0) for k, at in states.items() if at}
            add_gradients(targets, gradients)

    def load_into(self, tape: _core.Tape) -> None:
        """Pack the values into the network of `tape`."""
        for i, layer, arrays, _ in self.places:
            tape.load(i, layer.packed(arrays))

    def first_not_finite(self) -> str | None:
        """Name of the first tensor whose gradient has a NaN or infinity, or None."""
        start = 0
        for name, array in self.arrays.items():
            if not np.isfinite(self.gradient[start : start + array.size]).all():
                return name
            start += array.size
        return None


def _own(arrays: Mapping[str, np.ndarray], prefix: str, layer: Layer) -> dict[str, np.ndarray]:
    return {name: arrays[prefix + name] for name in layer.weights}
