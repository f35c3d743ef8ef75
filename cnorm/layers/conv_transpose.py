"""Transposed convolutions inside a frame."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cnorm.cells.rounded import Matrix, Rows
from cnorm.cells.tensors import Tensor
from cnorm.layers.base import Layer, at_least, weight_and_bias, with_name
from cnorm.layers.conv import module_of, pair_of

TENSORS = Tensor("weight", ("I", "O", "K")), Tensor("bias", ("B",), optional=True)


class ConvTranspose1d(Layer):
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
        shapes = f"{self.channels}x{self.positions} -> {self.out_channels}x{self.places}"
        more = [f"{key}={getattr(self, key)}" for key in ("stride", "dilation", "groups") if getattr(self, key) > 1]
        return f"ConvTranspose1d({', '.join([shapes, f'{self.taps} taps', *more])})"

    @property
    def depthwise(self) -> bool:
        """Whether each channel is filtered by itself."""
        return self.groups == self.channels == self.out_channels > 1

    @property
    def fields(self) -> Mapping[str, str]:
        return {"weight": "kernel" if self.depthwise else "weight", "bias": "bias"}

    def _parts(self) -> list[tuple[slice, slice]]:
        """The channels and the outputs of each group."""
        c, o = self.channels // self.groups, self.out_channels // self.groups
        return [(slice(g * c, (g + 1) * c), slice(g * o, (g + 1) * o)) for g in range(self.groups)]

    def _matrix(self, weight: np.ndarray) -> np.ndarray:
        """A weight as the matrix [taps * outputs, channels], zeros between groups."""
        whole = np.zeros((self.taps, self.out_channels, self.channels), np.float32)
        for channels, outputs in self._parts():
            whole[:, outputs, channels] = weight[channels].transpose(2, 1, 0)
        return whole.reshape(-1, self.channels)

    def packed(self, weights: Mapping[str, np.ndarray] | None = None) -> dict:
        weights = self.weights if weights is None else weights
        own = {"bias": weights["bias"]} if "bias" in weights else {}
        if self.depthwise:
            return own | {"kernel": np.ascontiguousarray(weights["weight"][:, 0].T)}
        return own | {"weight": self._matrix(weights["weight"])}

    def gradient_targets(self, into: Mapping[str, np.ndarray]) -> list[tuple[np.ndarray, str, Any]]:
        own = [(into["bias"], "bias", None)] if "bias" in into else []
        if self.depthwise:
            return [(into["weight"].transpose(2, 1, 0), "kernel", None), *own]
        rows, found = np.arange(self.taps * self.out_channels).reshape(self.taps, self.out_channels), []
        for channels, outputs in self._parts():
            at = (0, rows[:, outputs].reshape(-1, 1), np.arange(self.channels)[channels])
            found.append((into["weight"][channels].transpose(2, 1, 0), "weight", at))
        return [*found, *own]

    def matrices(self) -> dict[str, Matrix]:
        return {} if self.depthwise else {"weight": Matrix(self._matrix(self.weights["weight"]))}

    def longest_sum(self) -> int:
        return self.weights["weight"].shape[0] // self.groups * self.taps

    @classmethod
    def filled(cls, entry: dict, rows: Mapping[str, Rows], others: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        taps, groups = entry.get("taps"), entry.get("groups")
        if rows.keys() != {"weight"} or "weight" in others:
            raise ValueError(f"the matrix of a rounded {cls.kind} must be rows.weight, got {sorted(rows)}")
        values = rows["weight"].values()
        if not all(type(n) is int and n > 0 for n in (taps, groups)):
            raise ValueError(f"taps and groups of {cls.kind} must be positive, got {taps!r} and {groups!r}")
        if values.shape[0] % (taps * groups) or values.shape[1] % groups:
            raise ValueError(f"taps and groups of {cls.kind} must divide {values.shape}, got {taps} and {groups}")
        whole = values.reshape(taps, -1, values.shape[1]).transpose(2, 1, 0)
        c, o = whole.shape[0] // groups, whole.shape[1] // groups
        weight = np.concatenate([whole[g * c : (g + 1) * c, g * o : (g + 1) * o] for g in range(groups)])
        return others | {"weight": weight}

    def options(self, size: int) -> dict[str, float]:
        return {
            "channels": self.channels,
            "outputs": self.out_channels,
            "taps": self.taps,
            "dilation": self.dilation,
            "depthwise": self.depthwise,
            "positions": self.positions,
            "stride": self.stride,
            "before": self.padding[0],
            "inputs": self.input_size,
            "results": self.output_size,
            "groups": self.groups,
        }

    def entry(self) -> dict:
        numbers = {key: getattr(self, key) for key in sorted(self.numbers)}
        return {"taps": self.taps} | numbers | {"padding": list(self.padding)}

    @classmethod
    def from_entry(cls, entry: dict, weights: Mapping[str, np.ndarray], read: Callable) -> Layer | None:
        given = dict(entry)
        taps = given.pop("taps", None)
        if given.keys() != cls.numbers:
            return None
        layer = cls(**weight_and_bias(cls.kind, weights), **given)
        if layer.taps != taps:
            raise ValueError(f"the weight of {cls.kind} must have {taps!r} taps, got {layer.taps}")
        return layer
