"""Layers: immutable descriptions that hold the original weights. `Model` packs and runs them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from cnorm.specs import PRESETS, CellSpec

__all__ = ["LSTM", "Linear"]


def _checked_weights(weights, shapes: dict[str, tuple[int, ...]], layer: str, optional=()) -> Mapping[str, np.ndarray]:
    """Read-only float32 copies of exactly the named arrays, shapes checked.

    `shapes` has a letter for a size that the first array that has it decides, such as ("4H", "I").
    """
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights of {layer} must be a mapping of names to arrays, got {type(weights).__name__}")
    missing = [name for name in shapes if name not in weights and name not in optional]
    extra = [str(name) for name in weights if name not in shapes]
    if missing or extra:
        raise ValueError(
            f"weights of {layer} must be {', '.join(shapes)}; missing: {', '.join(missing) or 'none'}; "
            f"unknown: {', '.join(extra) or 'none'}"
        )
    sizes: dict[str, int] = {}
    checked = {}
    for name, letters in shapes.items():
        if name not in weights:
            continue
        array = np.asarray(weights[name])
        if array.dtype == np.float64:
            raise TypeError(
                f"weights[{name!r}] of {layer} is float64 and the runtime computes in float32: cast it yourself, "
                f"weights[{name!r}].astype('float32')"
            )
        if array.dtype != np.float32 and array.dtype != np.float16 and array.dtype.name != "bfloat16":
            raise TypeError(f"weights[{name!r}] of {layer} must be float32, float16 or bfloat16, got {array.dtype}")
        if array.ndim != len(letters):
            raise ValueError(f"weights[{name!r}] of {layer} must have shape [{', '.join(letters)}], got {array.shape}")
        for length, symbol in zip(array.shape, letters, strict=True):
            factor, letter = (int(symbol[:-1]), symbol[-1]) if len(symbol) > 1 else (1, symbol)
            size = sizes.setdefault(letter, length // factor)
            if size < 1 or length != factor * size:
                known = ", ".join(f"{k} = {v}" for k, v in sizes.items())
                raise ValueError(
                    f"weights[{name!r}] of {layer} must have shape [{', '.join(letters)}] with {known}, got {array.shape}"
                )
        if not np.isfinite(array).all():
            raise ValueError(f"weights[{name!r}] of {layer} must be finite, got NaN or infinity")
        copy = np.array(array, dtype=np.float32, order="C", copy=True)
        copy.flags.writeable = False
        checked[name] = copy
    return MappingProxyType(checked)


class _Layer:
    """What all layers share: read-only attributes, equality by content, pickling by constructor arguments."""

    kind: ClassVar[str]
    weights: Mapping[str, np.ndarray]
    input_size: int
    output_size: int

    def __setattr__(self, name, value):
        if name in self.__dict__:
            raise AttributeError(f"a layer is immutable: {name} can't be set")
        self.__dict__[name] = value


class LSTM(_Layer):
    """A layer-normalised long short-term memory layer.

    Preset ``ba2016`` (arXiv:1607.06450, Eq. 20-22), gates f, i, o, g::

        (f, i, o, g) = LN(weight_h h; gain_h, bias_h) + LN(weight_x x; gain_x, bias_x) + bias
        c = sigmoid(f) c + sigmoid(i) tanh(g)
        h = sigmoid(o) tanh(LN(c; gain_c, bias_c))

    Parameters
    ----------
    weights : mapping of str to ndarray, float32 (float16 and bfloat16 are widened)
        ``weight_x`` [4H, I], ``weight_h`` [4H, H], ``bias``, ``gain_x``, ``bias_x``, ``gain_h``, ``bias_h`` [4H],
        ``gain_c``, ``bias_c`` [H]. Copied.
    preset : str or CellSpec
        Which cell the weights are for. Never guessed: cells with the same names and shapes differ.
    eps : float, optional
        Added to each variance, rounded to float32; the preset's own if not given.

    Raises
    ------
    TypeError
        For another type or dtype; float64 weights are refused, cast them.
    ValueError
        For an unknown preset, missing, unknown, misshapen or non-finite weights, or an eps that is not positive.
    """

    kind = "LSTM"

    def __init__(self, weights, *, preset, eps=None):
        self.spec = _spec(self.kind, preset)
        self.eps = _checked_eps(eps, self.spec)
        gates, cell = ("4H",), ("H",)
        shapes = {"weight_x": ("4H", "I"), "weight_h": ("4H", "H")}
        shapes |= dict.fromkeys(("bias", "gain_x", "bias_x", "gain_h", "bias_h"), gates)
        shapes |= dict.fromkeys(("gain_c", "bias_c"), cell)
        self.weights = _checked_weights(weights, shapes, f"LSTM {self.spec.name}")
        self.input_size = self.weights["weight_x"].shape[1]
        self.output_size = self.weights["weight_h"].shape[1]

    def __repr__(self):
        return f"LSTM({self.input_size} -> {self.output_size}, preset={self.spec.name!r}, eps={self.eps:g})"

    def __reduce__(self):
        return _lstm, (dict(self.weights), self.spec.name, self.eps)


def _lstm(weights, preset, eps):
    return LSTM(weights, preset=preset, eps=eps)


class Linear(_Layer):
    """y = weight x + bias.

    Parameters
    ----------
    weight : ndarray, shape (output_size, input_size), float32 (float16 and bfloat16 are widened)
    bias : ndarray, shape (output_size,), optional

    Raises
    ------
    TypeError, ValueError
        As `LSTM`.
    """

    kind = "Linear"

    def __init__(self, weight, bias=None):
        given = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        self.weights = _checked_weights(given, {"weight": ("O", "I"), "bias": ("O",)}, "Linear", optional=("bias",))
        self.output_size, self.input_size = self.weights["weight"].shape

    def __repr__(self):
        return f"Linear({self.input_size} -> {self.output_size})"

    def __reduce__(self):
        return Linear, (self.weights["weight"], self.weights.get("bias"))


def _spec(kind: str, preset) -> CellSpec:
    if isinstance(preset, CellSpec):
        if PRESETS.get((kind, preset.name)) != preset:
            raise ValueError(f"preset must be one of the {kind} cells the runtime covers, got {preset}")
        return preset
    if not isinstance(preset, str):
        raise TypeError(f"preset must be a name or a CellSpec, got {type(preset).__name__}")
    if (kind, preset) not in PRESETS:
        names = ", ".join(sorted(name for k, name in PRESETS if k == kind))
        raise ValueError(f"preset must be one of the {kind} presets {names}, got {preset!r}")
    return PRESETS[kind, preset]


def _checked_eps(eps, spec: CellSpec) -> float:
    if eps is None:
        if spec.eps is None:
            raise ValueError(f"eps must be given for preset {spec.name!r}: its checkpoints do not carry one")
        eps = spec.eps
    if isinstance(eps, (str, bytes, bool)) or not hasattr(eps, "__float__"):
        raise TypeError(f"eps must be a real number, got {eps!r}")
    rounded = float(np.float32(min(float(eps), 3e38)))
    if not (0 <= rounded < 3e38 and float(eps) >= 0):
        raise ValueError(f"eps must be finite and not negative, got {eps!r}")
    return rounded
