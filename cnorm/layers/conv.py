"""Convolutions over time and inside a frame."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any

import numpy as np

from cnorm.cells.rounded import Matrix, Rows
from cnorm.cells.tensors import Tensor
from cnorm.layers.base import Layer, at_least, check_own_forward, weight_and_bias, with_name

TENSORS = Tensor("weight", ("O", "I", "K")), Tensor("bias", ("O",), optional=True)


class Conv(Layer):
    """What all convolutions have: weight, bias, taps, dilation and groups."""

    @property
    def depthwise(self) -> bool:
        """Whether each channel is filtered by itself."""
        return self.groups == self.channels == self.out_channels > 1

    @property
    def fields(self) -> Mapping[str, str]:
        return {"weight": "kernel" if self.depthwise else "weight", "bias": "bias"}

    def _matrix(self, weight: np.ndarray) -> np.ndarray:
        """A weight as the matrix of the layer's product, zeros between groups."""
        raise NotImplementedError

    def _targets(self, into: np.ndarray) -> list[tuple[np.ndarray, str, Any]]:
        """The `gradient_targets` of each group's part of that matrix."""
        raise NotImplementedError

    def _parts(self) -> list[tuple[slice, slice]]:
        """The outputs and the channels of each group."""
        o, c = self.out_channels // self.groups, self.channels // self.groups
        return [(slice(g * o, (g + 1) * o), slice(g * c, (g + 1) * c)) for g in range(self.groups)]

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
        return [*self._targets(into["weight"]), *own]

    def matrices(self) -> dict[str, Matrix]:
        return {} if self.depthwise else {"weight": Matrix(self._matrix(self.weights["weight"]))}

    @classmethod
    def _tensor(cls, values: np.ndarray, taps: int, groups: int) -> np.ndarray:
        """The inverse of `_matrix`, for sizes that may not fit."""
        raise NotImplementedError

    @classmethod
    def filled(cls, entry: dict, rows: Mapping[str, Rows], others: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        taps, groups = entry.get("taps"), entry.get("groups")
        if rows.keys() != {"weight"} or "weight" in others:
            raise ValueError(f"the matrix of a rounded {cls.kind} must be rows.weight, got {sorted(rows)}")
        if not all(type(n) is int and n > 0 for n in (taps, groups)):
            raise ValueError(f"taps and groups of {cls.kind} must be positive, got {taps!r} and {groups!r}")
        return others | {"weight": cls._tensor(rows["weight"].values(), taps, groups)}

    def options(self, size: int) -> dict[str, float]:
        return {
            "channels": self.channels,
            "outputs": self.out_channels,
            "taps": self.taps,
            "dilation": self.dilation,
            "depthwise": self.depthwise,
        }

    def _numbers(self) -> dict:
        return {"dilation": self.dilation, "groups": self.groups}

    def entry(self) -> dict:
        return {"taps": self.taps} | self._numbers()

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


class WindowConv(Conv):
    """What convolutions have whose outputs are products with windows: weight [outputs, channels / groups, taps]."""

    def _take(self, weight: Any, bias: Any, dilation: int, groups: int) -> None:
        sizes = self._take_weights(TENSORS, weight, bias)
        self.dilation, self.groups = at_least(1, dilation, "dilation"), at_least(1, groups, "groups")
        self.out_channels, self.taps, self.channels = sizes["O"], sizes["K"], sizes["I"] * self.groups
        if self.out_channels % self.groups:
            raise ValueError(f"groups must divide the {self.out_channels} outputs, got {groups}")

    def _matrix(self, weight: np.ndarray) -> np.ndarray:
        """A weight as the matrix [outputs, taps * channels] of windows [taps, channels]."""
        whole = np.zeros((self.out_channels, self.taps, self.channels), np.float32)
        for rows, channels in self._parts():
            whole[rows, :, channels] = weight[rows].transpose(0, 2, 1)
        return whole.reshape(self.out_channels, -1)

    def _targets(self, into: np.ndarray) -> list[tuple[np.ndarray, str, Any]]:
        columns, found = np.arange(self.taps * self.channels).reshape(self.taps, self.channels), []
        for rows, channels in self._parts():
            at = (0, np.arange(self.out_channels)[rows, None], columns[:, channels].reshape(1, -1))
            found.append((into[rows].transpose(0, 2, 1), "weight", at))
        return found

    @classmethod
    def _tensor(cls, values: np.ndarray, taps: int, groups: int) -> np.ndarray:
        if values.shape[1] % (taps * groups) or values.shape[0] % groups:
            raise ValueError(f"taps and groups of {cls.kind} must divide {values.shape}, got {taps} and {groups}")
        whole = values.reshape(len(values), taps, -1).transpose(0, 2, 1)
        o, c = len(values) // groups, whole.shape[1] // groups
        return np.concatenate([whole[g * o : (g + 1) * o, g * c : (g + 1) * c] for g in range(groups)])

    def longest_sum(self) -> int:
        return self.weights["weight"][0].size

    def with_product(self, weight: np.ndarray, bias: np.ndarray) -> Layer:
        """A layer with another weight and bias."""
        return type(self)(weight, bias, **self._numbers())


class CausalConv1d(WindowConv):
    """A convolution over time: y = bias + the sum over the taps k of weight[:, :, k] x[t - (taps - 1 - k) dilation].

    Its state, f0, f1, ..., is the last (taps - 1) dilation frames, the oldest first; zeros at the start.

    Parameters
    ----------
    weight : ndarray, shape (output_size, input_size / groups, taps), float32 (float16 and bfloat16 are widened)
        Or a torch.nn.Conv1d without padding, whose bias, dilation and groups are then taken too.
    bias : ndarray, shape (output_size,), optional
    dilation : int, default 1
        Frames from one tap to the next.
    groups : int, default 1
        Of channels, each filtered by itself; as many as there are channels: depthwise.
    name : str, optional
        As of `Add`.

    Raises
    ------
    TypeError, ValueError
        As `LSTM`; for a module with stride or padding.
    """

    kind = "CausalConv1d"
    part = "causal_conv"
    numbers = frozenset({"dilation", "groups"})

    def __init__(
        self, weight: Any, bias: Any = None, *, dilation: int = 1, groups: int = 1, name: str | None = None
    ) -> None:
        if hasattr(weight, "in_channels"):
            module = module_of(weight, bias, "Conv1d")
            before = (module.kernel_size[0] - 1) * module.dilation[0]
            if module.stride != (1,) or module.padding not in ((0,), (before,)) or module.padding_mode != "zeros":
                raise ValueError(
                    f"the module must have stride 1, and no padding but (taps - 1) dilation of zeros, got {module}"
                )
            weight, bias, dilation, groups = module.weight, module.bias, module.dilation[0], module.groups
        self._take(weight, bias, dilation, groups)
        self.input_size, self.output_size = self.channels, self.out_channels
        self.stateful = self.taps > 1
        with_name(self, name)

    def __repr__(self):
        more = "".join(f", {k}={v}" for k, v in self._numbers().items() if v != 1)
        return f"CausalConv1d({self.input_size} -> {self.output_size}, {self.taps} taps{more})"

    @property
    def history(self) -> int:
        """The frames that its state has."""
        return (self.taps - 1) * self.dilation


class Conv1d(WindowConv):
    """A convolution inside a frame of [channels, positions], flattened; its outputs are [outputs, places], flattened.

    Parameters
    ----------
    weight : ndarray, shape (outputs, channels / groups, taps), float32 (float16 and bfloat16 are widened)
        Or a torch.nn.Conv1d, whose bias and options are then taken too.
    bias : ndarray, shape (outputs,), optional
    positions : int
        Of the frame, for each channel.
    stride, dilation, groups : int, default 1
    padding : int or (int, int), default 0
        Positions around the frame, before and after it.
    padding_mode : {"zeros", "reflect"}
        What they hold.
    name : str, optional
        As of `Add`.

    Raises
    ------
    TypeError, ValueError
        As `LSTM`; for a kernel that reaches over more than the padded frame.
    """

    kind = "Conv1d"
    part = "conv"
    numbers = frozenset({"dilation", "groups", "positions", "stride", "padding", "padding_mode"})

    def __init__(
        self,
        weight: Any,
        bias: Any = None,
        *,
        positions: int,
        stride: int = 1,
        padding: Any = 0,
        dilation: int = 1,
        groups: int = 1,
        padding_mode: str = "zeros",
        name: str | None = None,
    ) -> None:
        if hasattr(weight, "in_channels"):
            module = module_of(weight, bias, "Conv1d")
            if not isinstance(module.padding, tuple):
                raise ValueError(f"the module's padding must be a number, got {module.padding!r}")
            weight, bias, dilation, groups = module.weight, module.bias, module.dilation[0], module.groups
            stride, padding, padding_mode = module.stride[0], module.padding[0], module.padding_mode
        self._take(weight, bias, dilation, groups)
        self.positions, self.stride = at_least(1, positions, "positions"), at_least(1, stride, "stride")
        self.padding = pair_of(padding)
        if padding_mode not in ("zeros", "reflect"):
            raise ValueError(f"padding_mode must be 'zeros' or 'reflect', got {padding_mode!r}")
        self.padding_mode = padding_mode
        if padding_mode == "reflect" and max(self.padding) >= self.positions:
            raise ValueError(
                f"padding must be below the {positions} positions to reflect them, got {max(self.padding)}"
            )
        reach = (self.taps - 1) * self.dilation + 1
        self.places = (sum(self.padding) + self.positions - reach) // self.stride + 1
        if self.places < 1:
            raise ValueError(
                f"positions and padding must be at least the {reach} that the kernel reaches over, got "
                f"{self.positions} and {sum(self.padding)}"
            )
        self.input_size, self.output_size = self.channels * self.positions, self.out_channels * self.places
        with_name(self, name)

    def __repr__(self):
        return shown_in_frame(self)

    def _numbers(self) -> dict:
        more = {"positions": self.positions, "stride": self.stride, "padding": list(self.padding)}
        return super()._numbers() | more | {"padding_mode": self.padding_mode}

    def options(self, size: int) -> dict[str, float]:
        reflect = self.padding_mode == "reflect"
        return super().options(size) | in_frame(self) | {"reflect": reflect, "after": self.padding[1]}

    def window_positions(self) -> np.ndarray:
        """The position [places, taps] in the frame under each tap at each place; -1 for a zero."""
        at = np.arange(self.places)[:, None] * self.stride + np.arange(self.taps) * self.dilation - self.padding[0]
        last = self.positions - 1
        if self.padding_mode == "reflect":
            return np.where(at < 0, -at, np.where(at > last, 2 * last - at, at))
        return np.where((at < 0) | (at > last), -1, at)


def shown_in_frame(layer: Conv) -> str:
    """The `repr` of a convolution inside a frame."""
    shapes = f"{layer.channels}x{layer.positions} -> {layer.out_channels}x{layer.places}"
    more = [f"{key}={getattr(layer, key)}" for key in ("stride", "dilation", "groups") if getattr(layer, key) > 1]
    return f"{layer.kind}({', '.join([shapes, f'{layer.taps} taps', *more])})"


def in_frame(layer: Conv) -> dict[str, float]:
    """The options that convolutions inside a frame have beside those of all."""
    return {
        "positions": layer.positions,
        "stride": layer.stride,
        "before": layer.padding[0],
        "inputs": layer.input_size,
        "results": layer.output_size,
        "groups": layer.groups,
    }


def pair_of(padding: Any) -> tuple[int, int]:
    """The padding at the start and at the end, checked."""
    both = (padding, padding) if isinstance(padding, Integral) else padding
    if not isinstance(both, (tuple, list)) or len(both) != 2:
        raise TypeError(f"padding must be a number or two, got {padding!r}")
    return at_least(0, both[0], "padding"), at_least(0, both[1], "padding")


def module_of(module, bias, kind: str):
    """A torch.nn.Conv1d or ConvTranspose1d, checked."""
    if bias is not None:
        raise TypeError("bias must not be given beside a module, which brings its own")
    if len(module.kernel_size) != 1 or getattr(module, "transposed", False) != (kind == "ConvTranspose1d"):
        raise ValueError(f"the module must be a torch.nn.{kind}, got {type(module).__name__}")
    check_own_forward(module)
    return module
