"""Frames of earlier steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from cnorm.layers.base import Layer, at_least, with_name


class Delay(Layer):
    """y = the frames of several steps, concatenated: x[t - (frames - 1) dilation], ..., x[t - dilation], x[t].

    Its state, f0, f1, ..., is the last (frames - 1) dilation frames, the oldest first; zeros at the start. With frames
    of [channels, positions] y is [frames * channels, positions]. So it and a `Conv1d` are a two-dimensional convolution
    that is causal over time: of a weight [outputs, channels, frames, taps] the `Conv1d` has
    ``weight.transpose(0, 2, 1, 3).reshape(outputs, frames * channels, taps)``.

    Parameters
    ----------
    frames : int
        At least 1, which changes nothing.
    dilation : int, default 1
        Steps from one of the frames to the next.
    input_size : int
        Of x.
    name : str, optional
        As of `Add`.

    Raises
    ------
    TypeError, ValueError
        If a number is no int, or is out of range.
    """

    kind = "Delay"
    part = "delay"

    def __init__(self, frames: int, dilation: int = 1, *, input_size: int, name: str | None = None) -> None:
        self.frames, self.dilation = at_least(1, frames, "frames"), at_least(1, dilation, "dilation")
        self.input_size = at_least(1, input_size, "input_size")
        self.output_size = self.frames * self.input_size
        self.stateful = self.frames > 1
        with_name(self, name)

    def __repr__(self):
        dilation = f", dilation={self.dilation}" if self.dilation != 1 else ""
        return f"Delay({self.input_size} -> {self.output_size}, {self.frames} frames{dilation})"

    @property
    def history(self) -> int:
        """The frames that its state has."""
        return (self.frames - 1) * self.dilation

    def options(self, size: int) -> dict[str, float]:
        return {"n": self.input_size, "frames": self.frames, "dilation": self.dilation, "outputs": self.output_size}

    def entry(self) -> dict:
        return {"frames": self.frames, "dilation": self.dilation, "input_size": self.input_size}

    @classmethod
    def from_entry(cls, entry: dict, weights: Mapping[str, np.ndarray], read: Callable) -> Layer | None:
        return cls(**entry) if entry.keys() == {"frames", "dilation", "input_size"} else None
