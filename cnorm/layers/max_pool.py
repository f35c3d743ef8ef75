"""The largest of windows of a frame."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cnorm.layers.base import Layer, at_least, check_own_forward, with_name
from cnorm.layers.conv import pair_of


class MaxPool1d(Layer):
    """The largest of each window of a frame of [channels, positions], flattened; its outputs are [channels, places].

    Parameters
    ----------
    taps : int
        Of a window, or a torch.nn.MaxPool1d, whose options are then taken too.
    channels, positions : int
        Of the frame.
    stride : int, optional
        From one window to the next; `taps` if not given.
    padding : int or (int, int), default 0
        Positions before and after the frame, which are smaller than any number. Below `taps`.
    dilation : int, default 1
    name : str, optional
        As of `Add`.

    Raises
    ------
    TypeError, ValueError
        If a number is no int, or is out of range; for a module that returns indices.
    """

    kind = "MaxPool1d"
    part = "max_pool"
    numbers = ("taps", "channels", "positions", "stride", "dilation")

    def __init__(
        self,
        taps: Any,
        *,
        channels: int,
        positions: int,
        stride: int | None = None,
        padding: Any = 0,
        dilation: int = 1,
        name: str | None = None,
    ) -> None:
        self.channels, self.positions = at_least(1, channels, "channels"), at_least(1, positions, "positions")
        if hasattr(taps, "kernel_size"):
            taps, stride, padding, dilation = _of_module(taps, self.positions)
        self.taps, self.dilation = at_least(1, taps, "taps"), at_least(1, dilation, "dilation")
        self.stride, self.padding = at_least(1, self.taps if stride is None else stride, "stride"), pair_of(padding)
        if max(self.padding) >= self.taps:
            raise ValueError(f"padding must be below the {self.taps} taps, got {max(self.padding)}")
        if any(self.padding) and self.dilation > self.positions:
            raise ValueError(f"dilation must be at most the {positions} positions with padding, got {dilation}")
        reach = (self.taps - 1) * self.dilation + 1
        self.places = (sum(self.padding) + self.positions - reach) // self.stride + 1
        if self.places < 1:
            raise ValueError(
                f"positions and padding must be at least the {reach} that a window reaches over, got "
                f"{self.positions} and {sum(self.padding)}"
            )
        self.input_size, self.output_size = self.channels * self.positions, self.channels * self.places
        with_name(self, name)

    def __repr__(self):
        shapes = f"{self.channels}x{self.positions} -> {self.channels}x{self.places}"
        return f"MaxPool1d({shapes}, {self.taps} taps, stride={self.stride})"

    def options(self, size: int) -> dict[str, float]:
        sizes = {"before": self.padding[0], "inputs": self.input_size, "results": self.output_size}
        return {key: getattr(self, key) for key in self.numbers} | sizes

    def entry(self) -> dict:
        return {key: getattr(self, key) for key in self.numbers} | {"padding": list(self.padding)}

    @classmethod
    def from_entry(cls, entry: dict, weights: Mapping[str, np.ndarray], read: Callable) -> Layer | None:
        return cls(**entry) if entry.keys() == {*cls.numbers, "padding"} else None


def _of_module(module, positions: int) -> tuple[int, int, tuple[int, int], int]:
    """taps, stride, padding and dilation of a torch.nn.MaxPool1d."""
    if type(module).__name__ != "MaxPool1d" or module.return_indices:
        raise ValueError(f"the module must be a torch.nn.MaxPool1d that returns no indices, got {module}")
    check_own_forward(module)
    numbers = (module.kernel_size, module.stride, module.padding, module.dilation)
    taps, stride, padding, dilation = (one[0] if isinstance(one, tuple) else one for one in numbers)
    after = padding
    if module.ceil_mode:  # the last window may end behind the padding, if it begins before that
        reach, whole = (taps - 1) * dilation + 1, positions + 2 * padding
        places = -(-(whole - reach) // stride) + 1
        places -= (places - 1) * stride >= positions + padding
        after = max(0, (places - 1) * stride + reach - padding - positions)
    return taps, stride, (padding, after), dilation
