"""A model's weights and their gradients, each as one flat array; used by `cnorm.Learner` and `cnorm.torch`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from cnorm import _core
from cnorm.layers import Layer, Residual, flat
from cnorm.weights import gradient_views, packed

__all__ = ["Parameters", "add_gradients", "gradient_targets"]


def gradient_targets(layer: Layer, into: Mapping[str, np.ndarray]) -> list:
    """The views of `into` that gradients of a layer's packed arrays are added to, see `weights.gradient_views`."""
    if layer.kind == "Linear":
        return [(into["weight"], "weight_x", 0)] + [(into[name], name, None) for name in ("bias",) if name in into]
    if layer.kind == "LayerNorm":
        return [(into["weight"], "gain_h", None)] + [(into[name], name, None) for name in ("bias",) if name in into]
    return gradient_views(layer.spec, layer.tensors, into, layer.sizes) if layer.weights else []


def add_gradients(targets: list, gradients: Mapping[str, np.ndarray]) -> None:
    """Add the gradients of packed arrays, by name, to their targets; a target without a gradient is left as it is."""
    for view, name, gate in targets:
        if name in gradients:
            view += gradients[name] if gate is None else gradients[name][gate]


def _leaves(layers, prefix: str) -> Iterator[tuple[str, Layer]]:
    """Yield (prefix of the tensors' names, layer) in the order of `flat`; a `Residual` is replaced by its layers."""
    for i, layer in enumerate(layers):
        if isinstance(layer, Residual):
            yield from _leaves(layer.layers, f"{prefix}{i}.")
        else:
            yield f"{prefix}{i}.", layer


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
        leaves = _leaves(layers, "layers.")
        places = [(i, *next(leaves)) for i, (kind, _, _) in enumerate(self.flat) if kind != "Residual"]
        named = [(prefix + name, array) for _, prefix, layer in places for name, array in layer.weights.items()]
        self.values = np.concatenate([np.zeros(0, np.float32), *(array.reshape(-1) for _, array in named)])
        self.gradient = np.zeros_like(self.values)
        ends = np.cumsum([0] + [array.size for _, array in named])
        self.arrays, grown = {}, {}
        for (name, array), start, end in zip(named, ends[:-1], ends[1:], strict=True):
            self.arrays[name] = self.values[start:end].reshape(array.shape)
            grown[name] = self.gradient[start:end].reshape(array.shape)
        self.places = [
            (i, layer, _own(self.arrays, prefix, layer), gradient_targets(layer, _own(grown, prefix, layer)))
            for i, prefix, layer in places
            if layer.weights
        ]

    def collect(self, tape: _core.Tape, initial: bool) -> None:
        """Set `gradient` from `tape`; `initial`: the tape began at the initial state, which is a parameter too."""
        self.gradient[:] = 0
        names = {name: slice(start, start + units) for name, units, start in tape.state_arrays}
        cell = 0
        for i, layer, _, targets in self.places:
            gradients = tape.gradients[i]
            if hasattr(layer, "spec"):
                if initial:
                    states = {f"{part}0": names.get(f"{part}{cell}") for part in "hc"}
                    gradients = gradients | {k: tape.dstate[:, at].sum(0) for k, at in states.items() if at}
                cell += 1
            add_gradients(targets, gradients)

    def load_into(self, tape: _core.Tape) -> None:
        """Pack the values into the network of `tape`."""
        for i, layer, arrays, _ in self.places:
            if hasattr(layer, "spec"):
                with _core.default_float_env():
                    arrays = packed(layer.spec, layer.tensors, arrays, layer.sizes)
            tape.load(i, arrays)

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
