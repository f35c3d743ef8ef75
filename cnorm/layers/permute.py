"""The axes of a frame in another order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any

import numpy as np

from cnorm.layers.base import Layer, at_least, with_name

AXES = 6  # CNORM_AXES of cnorm_rnn.h


class Permute(Layer):
    """y = x.reshape(shape).transpose(axes), flattened: a frame of [positions, channels], a shuffle of channels.

    Parameters
    ----------
    shape : sequence of int
        Of x, with at most 6 axes.
    axes : sequence of int
        The axis of x that is axis 0, 1, ... of y, each once, as of numpy.transpose and torch.permute.
    name : str, optional
        As of `Add`.

    Raises
    ------
    TypeError, ValueError
        If they are no sequences of integers, or `axes` is no order of the axes.

    Examples
    --------
    >>> import cnorm
    >>> shuffle = cnorm.Permute((2, 8, 33), (1, 0, 2))  # the 16 channels of two groups of 8 alternate
    >>> shuffle.output_size
    528
    """

    kind = "Permute"
    part = "permute"

    def __init__(self, shape: Iterable[int], axes: Iterable[int], *, name: str | None = None) -> None:
        self.shape, self.axes = _numbers(1, shape, "shape"), _numbers(0, axes, "axes")
        if not 0 < len(self.shape) <= AXES:
            raise ValueError(f"shape must have 1 to {AXES} axes, got {len(self.shape)}")
        if sorted(self.axes) != list(range(len(self.shape))):
            raise ValueError(f"axes must be an order of 0 to {len(self.shape) - 1}, got {self.axes}")
        self.input_size = self.output_size = at_least(1, prod(self.shape), "the product of shape")
        with_name(self, name)

    def __repr__(self):
        return f"Permute({self.shape}, {self.axes})"

    def options(self, size: int) -> dict[str, float]:
        missing = AXES - len(self.shape)
        lengths = [1] * missing + list(self.shape)
        axes = [*range(missing), *(missing + axis for axis in self.axes)]
        numbers = {f"lengths[{i}]": length for i, length in enumerate(lengths)}
        return {"n": self.input_size} | numbers | {f"axes[{i}]": axis for i, axis in enumerate(axes)}

    def entry(self) -> dict:
        return {"shape": list(self.shape), "axes": list(self.axes)}

    @classmethod
    def from_entry(cls, entry: dict, weights: Mapping[str, np.ndarray], read: Callable) -> Layer | None:
        return cls(**entry) if entry.keys() == {"shape", "axes"} else None


def _numbers(least: int, given: Any, name: str) -> tuple[int, ...]:
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise TypeError(f"{name} must be a sequence of integers, got {type(given).__name__}")
    return tuple(at_least(least, one, f"{name}[{i}]") for i, one in enumerate(given))
