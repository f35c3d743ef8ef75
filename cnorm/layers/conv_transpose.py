"""Transposed convolutions inside a frame."""

from __future__ import annotations

from typing import Any

import numpy as np

from cnorm.cells.tensors import Tensor
from cnorm.layers.base import at_least, with_name
from cnorm.layers.conv import Conv, in_frame, module_of, pair_of, shown_in_frame

TENSORS = Tensor("weight", ("I", "O", "K")), Tensor("bias", ("B",), optional=True)


class ConvTranspose1d(Conv):
    """The transpose of a `Conv1d` inside a frame of [channels, positions], flattened.

    Position p adds weight[:, :, k] x[:, p] to place p stride + k dilation - padding; then bias is added. The outputs
    are [outputs, places], flattened. There are (positions - 1) stride + (taps - 1) dilation + 1 - 2 padding
    + output_padding places.

    Parameters
    ----------
    weight : ndarray, shape (channels, outputs / groups, taps), float32 (float16 and bfloat16 are widened)
        Or a torch.nn.ConvTranspose1d, whose bias and options are then taken too.
    bias : ndarray, shape (outputs,), optional
    positions : int
        Of the frame, for each channel.
    stride, dilation, groups : int, default 1
    padding : int or (int, int), default 0
        Places cut off at the start and at the end.
    output_padding : int, default 0
        Places more at the end, below stride or dilation.
    name : str, optional
        As of `Add`.

    Raises
    ------
    TypeError, ValueError
        As `LSTM`; where no place is left.
    """

    kind = "ConvTranspose1d"
    part = "conv_transpose"
    numbers = frozenset({"dilation", "groups", "positions", "stride", "padding", "output_padding"})

    def __init__(
        self,
        weight: Any,
        bias: Any = None,
        *,
        positions: int,
        stride: int = 1,
        padding: Any = 0,
        output_padding: int = 0,
        dilation: int = 1,
        groups: int = 1,
        name: str | None = None,
    ) -> None:
        if hasattr(weight, "in_channels"):
            module = module_of(weight, bias, "ConvTranspose1d")
            weight, bias, dilation, groups = module.weight, module.bias, module.dilation[0], module.groups
            stride, padding, output_padding = module.stride[0], module.padding[0], module.output_padding[0]
        sizes = self._take_weights(TENSORS, weight, bias)
        self.positions, self.stride = at_least(1, positions, "positions"), at_least(1, stride, "stride")
        self.dilation, self.groups = at_least(1, dilation, "dilation"), at_least(1, groups, "groups")
        self.padding, self.output_padding = pair_of(padding), at_least(0, output_padding, "output_padding")
        self.channels, self.taps, self.out_channels = sizes["I"], sizes["K"], sizes["O"] * self.groups
        if self.channels % self.groups:
            raise ValueError(f"groups must divide the {self.channels} channels, got {groups}")
        if sizes.get("B", self.out_channels) != self.out_channels:
            raise ValueError(f"bias must have the shape ({self.out_channels},), got ({sizes['B']},)")
        if self.output_padding >= max(self.stride, self.dilation):
            raise ValueError(f"output_padding must be below stride or dilation, got {output_padding}")
        whole = (self.positions - 1) * self.stride + (self.taps - 1) * self.dilation + 1 + self.output_padding
        self.places = whole - sum(self.padding)
        if self.places < 1:
            raise ValueError(f"padding must leave at least one of the {whole} places, got {self.padding}")
        self.input_size, self.output_size = self.channels * self.positions, self.out_channels * self.places
        with_name(self, name)

    def __repr__(self):
        return shown_in_frame(self)

    def _matrix(self, weight: np.ndarray) -> np.ndarray:
        """A weight as the matrix [taps * outputs, channels]."""
        whole = np.zeros((self.taps, self.out_channels, self.channels), np.float32)
        for outputs, channels in self._parts():
            whole[:, outputs, channels] = weight[channels].transpose(2, 1, 0)
        return whole.reshape(-1, self.channels)

    def _targets(self, into: np.ndarray) -> list[tuple[np.ndarray, str, Any]]:
        rows, found = np.arange(self.taps * self.out_channels).reshape(self.taps, self.out_channels), []
        for outputs, channels in self._parts():
            at = (0, rows[:, outputs].reshape(-1, 1), np.arange(self.channels)[channels])
            found.append((into[channels].transpose(2, 1, 0), "weight", at))
        return found

    @classmethod
    def _tensor(cls, values: np.ndarray, taps: int, groups: int) -> np.ndarray:
        if values.shape[0] % (taps * groups) or values.shape[1] % groups:
            raise ValueError(f"taps and groups of {cls.kind} must divide {values.shape}, got {taps} and {groups}")
        whole = values.reshape(taps, -1, values.shape[1]).transpose(2, 1, 0)
        c, o = whole.shape[0] // groups, whole.shape[1] // groups
        return np.concatenate([whole[g * c : (g + 1) * c, g * o : (g + 1) * o] for g in range(groups)])

    def longest_sum(self) -> int:
        return self.weights["weight"].shape[0] // self.groups * self.taps

    def options(self, size: int) -> dict[str, float]:
        return super().options(size) | in_frame(self)

    def _numbers(self) -> dict:
        return {key: getattr(self, key) for key in sorted(self.numbers)} | {"padding": list(self.padding)}
