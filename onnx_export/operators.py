"""The normalisation operators of ONNX and onnxruntime. Whatever is specific to one of them is in this file only.

An `Operator` holds the positions of its inputs, its axes and its kernel in float64; a `Formula` standardises rows and
describes their layout. To add an operator, add its kernel and its line in `OPERATORS`, a specimen in
tests/support/gallery and its name in docs/validator.md.

Formulas: the ONNX operator documentation, and onnxruntime's ContribOperators.md for the domain com.microsoft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx
from onnx.reference.op_run import OpRun

_MOST_AXES = 64  # limit on the axes of a node, which is untrusted input, where the rank is unknown

# ------------------------------------------------------------------------------------------------ the formulas


def standardise(x: np.ndarray, axes: tuple[int, ...], eps: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Subtract the mean over `axes` and divide by sqrt(var + eps), var centred and biased.

    Returns
    -------
    xhat, mean, rstd : ndarray
        `xhat` has the shape of `x`, the statistics keep the reduced axes with length 1. A row with
        var + eps = 0 has xhat = 0, the limit for eps -> 0.
    """
    mean = np.mean(x, axis=axes, keepdims=True)
    d = x - mean
    d = d - np.mean(d, axis=axes, keepdims=True)  # removes the rounding error of the mean
    xhat, rstd = divide_rms(d, axes, eps)
    return xhat, mean, rstd


def divide_rms(x: np.ndarray, axes: tuple[int, ...], eps: float) -> tuple[np.ndarray, np.ndarray]:
    """x / sqrt(mean(x^2) + eps) over `axes`, and the reciprocal root; 0 where the radicand is 0."""
    power = np.mean(x * x, axis=axes, keepdims=True) + eps
    with np.errstate(all="ignore"):
        rrms = 1 / np.sqrt(power)
        return np.where(power == 0, 0.0, x * rrms), rrms


@dataclass(frozen=True)
class Standardised:
    """Standardised rows: xhat [shape of x]; max|x|, |mean| and the second moment of each row, which broadcast to it."""

    n: int
    xhat: np.ndarray
    largest: np.ndarray
    mean: np.ndarray
    variance: np.ndarray


@dataclass(frozen=True)
class Formula:
    """Statistics over the axes of a norm; all rows share one scale and bias.

    Attributes
    ----------
    name : str
        Name in reports.
    centred : bool
        Whether the mean is subtracted.
    bare : str
        onnxruntime's operator for this formula over the last axis; stress rows are tried on it, too.
    """

    name: str
    centred: bool = True
    bare: str = "LayerNormalization"
    channels: ClassVar[bool] = False

    def apply(self, x: np.ndarray, axes: tuple[int, ...] | None, eps: float, _node: onnx.NodeProto) -> Standardised:
        """Standardise in float64; a row with variance + eps = 0 gives 0/0."""
        axes = tuple(range(x.ndim)) if axes is None else axes
        n = int(np.prod([x.shape[axis] for axis in axes]))
        with np.errstate(all="ignore"):
            largest = np.max(np.abs(x), axis=axes, keepdims=True, initial=0.0)
            d, mean = x, np.abs(np.mean(x, axis=axes, keepdims=True))
            for _ in range(2 if self.centred else 0):  # the second pass removes the rounding error of the mean
                d = d - np.mean(d, axis=axes, keepdims=True)
            moment = np.mean(d * d, axis=axes, keepdims=True)
            return Standardised(n, d / np.sqrt(moment + eps), largest, mean, moment)

    def broadcast_parameter(self, value: np.ndarray, _x: np.ndarray) -> np.ndarray:
        """A scale or bias, reshaped so that it broadcasts against x."""
        return value

    def layout(self, shape: tuple[int, ...], axes: tuple[int, ...] | None, _node: onnx.NodeProto) -> tuple[int, int]:
        """(number of rows, row length n) of an input of this shape."""
        n = int(np.prod([shape[axis] for axis in _positive(axes, shape)]))
        return (int(np.prod(shape)) // n if n else 0), n

    def arrange(self, rows: np.ndarray, shape: tuple[int, ...], axes: tuple[int, ...] | None) -> np.ndarray:
        """Rows [rows, n] laid out as an input of this shape."""
        axes = _positive(axes, shape)
        kept = [axis for axis in range(len(shape)) if axis not in axes]
        ordered = rows.reshape([shape[axis] for axis in (*kept, *axes)])
        return np.ascontiguousarray(np.moveaxis(ordered, range(len(shape)), (*kept, *axes)))

    def accepts(self, given: Sequence[int | None], shape: Sequence[int | None], _node: onnx.NodeProto) -> bool:
        """Whether a scale or bias of the shape `given` fits an input of `shape`; None is a size not known."""
        return len(given) <= len(shape) and all(
            a is None or b is None or a in (1, b) for a, b in zip(reversed(given), reversed(shape), strict=False)
        )


@dataclass(frozen=True)
class GroupFormula(Formula):
    """Statistics over the channels of a group and all axes after axis 1; scale and bias per channel or per group."""

    channels: ClassVar[bool] = True

    def groups(self, node: onnx.NodeProto, channels: int) -> int:
        """Number of groups that the channels are divided into."""
        return _integer(node, "num_groups", channels)

    def apply(self, x, _axes, eps, node) -> Standardised:
        grouped = x.reshape(x.shape[0], self.groups(node, x.shape[1]), -1)
        done = super().apply(grouped, (2,), eps, node)
        facts = (self.broadcast_parameter(each[..., 0], x) for each in (done.largest, done.mean, done.variance))
        return Standardised(done.n, done.xhat.reshape(x.shape), *facts)

    def broadcast_parameter(self, value, x):
        ones = (1,) * (x.ndim - 2)
        return np.repeat(value, x.shape[1] // value.shape[-1], axis=-1).reshape(*value.shape[:-1], -1, *ones)

    def layout(self, shape, _axes, node):
        rows = shape[0] * self.groups(node, shape[1])
        return (rows, int(np.prod(shape)) // rows) if rows else (0, 0)

    def arrange(self, rows, shape, _axes):
        return rows.reshape(shape)

    def accepts(self, given, shape, node):
        allowed = {shape[1], self.groups(node, 0)}
        return len(given) == 1 and (given[0] is None or None in allowed or given[0] in allowed)


@dataclass(frozen=True)
class InstanceFormula(GroupFormula):
    """Group norm with one channel in each group."""

    def groups(self, node, channels):
        return channels


@dataclass(frozen=True)
class DeviationFormula(Formula):
    """MeanVarianceNormalization, which adds 1e-9 to the standard deviation, not to the variance; eps is its square."""

    def apply(self, x, axes, eps, node) -> Standardised:
        done = super().apply(x, axes, 0.0, node)
        with np.errstate(all="ignore"):
            std = np.sqrt(done.variance)
            xhat = np.where(std > 0, done.xhat, 0.0) * (std / (std + np.sqrt(eps)))
        return Standardised(done.n, xhat, done.largest, done.mean, done.variance)


LAYER = Formula("layer")
MEAN_VARIANCE = DeviationFormula("layer")
RMS = Formula("rms", centred=False, bare="SimplifiedLayerNormalization")
CENTRED = Formula("layer", centred=False, bare="SimplifiedLayerNormalization")  # of a value whose mean is 0 already
GROUP = GroupFormula("group")
INSTANCE = InstanceFormula("instance")


def _positive(axes: tuple[int, ...] | None, shape: tuple[int, ...]) -> list[int]:
    return sorted(axis % len(shape) for axis in (range(len(shape)) if axes is None else axes))


def _integer(node: onnx.NodeProto, name: str, default: int) -> int:
    """An integer attribute of a node, or the default."""
    kinds = (onnx.AttributeProto.INT, onnx.AttributeProto.UNDEFINED)
    return next((a.i for a in node.attribute if a.name == name and a.type in kinds and not a.ref_attr_name), default)


# ------------------------------------------------------------------------------------------- kernels in float64
# They replace those of onnx's reference evaluator, which rejects some stash types, expands GroupNormalization into a
# function that casts to float32, and lacks onnxruntime's own operators.


def _eps(epsilon: float | None, default: float) -> float:
    return float(np.float32(default if epsilon is None else epsilon))


def _suffix(x: np.ndarray, axis: int | None) -> tuple[int, ...]:
    axis = -1 if axis is None else axis
    return tuple(range(axis + x.ndim if axis < 0 else axis, x.ndim))


class LayerNormalization(OpRun):
    def _run(self, x, scale, bias=None, axis=-1, epsilon=None, **_):
        xhat, mean, rstd = standardise(x, _suffix(x, axis), _eps(epsilon, 1e-5))
        y = xhat * scale
        return (y if bias is None else y + bias), mean, rstd


class RMSNormalization(OpRun):
    def _run(self, x, scale, axis=-1, epsilon=None, **_):
        return (divide_rms(x, _suffix(x, axis), _eps(epsilon, 1e-5))[0] * scale,)


class SimplifiedLayerNormalization(OpRun):
    def _run(self, x, scale, axis=-1, epsilon=None, **_):
        xhat, rstd = divide_rms(x, _suffix(x, axis), _eps(epsilon, 1e-5))
        return xhat * scale, rstd


class GroupNormalization(OpRun):
    """Scale and bias are per channel from opset 21 on, per group before; their length decides."""

    def _run(self, x, scale, bias, num_groups=None, epsilon=None, **_):
        channels, ones = x.shape[1], (1,) * (x.ndim - 2)
        groups = x.reshape(x.shape[0], num_groups, channels // num_groups, *x.shape[2:])
        y = standardise(groups, tuple(range(2, groups.ndim)), _eps(epsilon, 1e-5))[0].reshape(x.shape)
        repeat = channels // len(scale)
        return (y * np.repeat(scale, repeat).reshape(-1, *ones) + np.repeat(bias, repeat).reshape(-1, *ones),)


class InstanceNormalization(OpRun):
    def _run(self, x, scale, bias, epsilon=None, **_):
        ones = (1,) * (x.ndim - 2)
        xhat = standardise(x, tuple(range(2, x.ndim)), _eps(epsilon, 1e-5))[0]
        return (xhat * scale.reshape(-1, *ones) + bias.reshape(-1, *ones),)


class SkipLayerNormalization(OpRun):
    def _run(self, x, skip, gamma, beta=None, bias=None, epsilon=None, **_):
        total = x + skip if bias is None else x + skip + bias
        xhat, mean, rstd = standardise(total, (-1,), _eps(epsilon, 1e-12))
        y = xhat * gamma
        return (y if beta is None else y + beta), mean, rstd, total


class SkipSimplifiedLayerNormalization(OpRun):
    def _run(self, x, skip, gamma, bias=None, epsilon=None, **_):
        total = x + skip if bias is None else x + skip + bias
        xhat, rrms = divide_rms(total, (-1,), _eps(epsilon, 1e-12))
        return xhat * gamma, rrms, rrms, total


class EmbedLayerNormalization(OpRun):
    def _run(self, *inputs, epsilon=None, **_):
        ids, segments, words, positions, kinds, gamma, beta, mask, where, *_ = (*inputs, None, None)
        total = words[ids] + (positions[: ids.shape[1]] if where is None else positions[where])
        if segments is not None:
            total = total + kinds[segments]
        lengths = np.zeros(len(ids), np.int32) if mask is None else mask.sum(axis=1).astype(np.int32)
        return standardise(total, (-1,), _eps(epsilon, 1e-12))[0] * gamma + beta, lengths, total


class MeanVarianceNormalization(OpRun):
    def _run(self, x, axes=None, **_):
        axes = tuple(axes or (0, 2, 3))
        d = x - np.mean(x, axis=axes, keepdims=True)
        d = d - np.mean(d, axis=axes, keepdims=True)
        return (d / (np.sqrt(np.mean(d * d, axis=axes, keepdims=True)) + 1e-9),)


# ------------------------------------------------------------------------------------------------ the operators


def trailing_axes(node: onnx.NodeProto, rank: int | None) -> tuple[int, ...]:
    """All from the attribute `axis` on; as stored in the file if the rank is unknown or the axis out of range."""
    axis = _integer(node, "axis", -1)
    if rank is None or not -rank <= axis < rank:
        return tuple(range(axis, 0)) if -_MOST_AXES <= axis < 0 else (axis,)
    return tuple(range(axis % rank, rank))


def last_axis(_node: onnx.NodeProto, rank: int | None) -> tuple[int, ...]:
    """The last axis."""
    return (-1,) if rank is None else (rank - 1,)


def looked_up_axis(_node: onnx.NodeProto, _rank: int | None) -> tuple[int, ...]:
    """The last axis of the rows, whose rank is that of no input."""
    return (-1,)


def with_channels(_node: onnx.NodeProto, rank: int | None) -> tuple[int, ...]:
    """The channels, of which a group is normalised together, and all axes after them."""
    return tuple(range(1, rank or 3))


def behind_channels(_node: onnx.NodeProto, rank: int | None) -> tuple[int, ...]:
    """All axes after batch and channels."""
    return tuple(range(2, rank or 3))


def listed_axes(node: onnx.NodeProto, rank: int | None) -> tuple[int, ...]:
    """Those of the attribute `axes`, by default [0, 2, 3]."""
    listed = next((tuple(a.ints) for a in node.attribute if a.name == "axes"), ()) or (0, 2, 3)
    return tuple(sorted(axis % rank if rank and -rank <= axis < rank else axis for axis in listed[:_MOST_AXES]))


Value = Callable[[str], "np.ndarray | None"]


@dataclass(frozen=True)
class Operator:
    """One operator that computes a norm.

    Attributes
    ----------
    kernel : type of OpRun
        Computes it in float64; the name of the class is the op type.
    domains : tuple of str
    formula : Formula
    axes : callable
        Takes (node, rank of x or None) and returns the normalised axes.
    eps : float
        Default of the attribute epsilon.
    x, scale, bias : int or None
        Positions among the inputs, None if it has none.
    added : tuple of int
        Positions of the inputs that are added to x before the statistics.
    lookup : bool
        Whether the rows are looked up in tables, so that no input holds them.
    trap_behind_add : str
        The key in `validation.traps.TRAPS` that applies if an Add precedes it, empty for none.
    sums_sequentially : bool
        Whether onnxruntime's kernel adds the elements of a row one after another (`judge.JudgedRows.sequential`).
    """

    kernel: type[OpRun]
    domains: tuple[str, ...]
    formula: Formula
    axes: Callable[[onnx.NodeProto, int | None], tuple[int, ...]] = trailing_axes
    eps: float = 1e-5
    x: int = 0
    scale: int | None = 1
    bias: int | None = 2
    added: tuple[int, ...] = ()
    lookup: bool = False
    trap_behind_add: str = ""
    sums_sequentially: bool = False

    @property
    def name(self) -> str:
        """The op type."""
        return self.kernel.__name__

    def input(self, node: onnx.NodeProto, place: int | None) -> str:
        """The name of the input at a position, empty for none."""
        return node.input[place] if place is not None and place < len(node.input) else ""

    def terms(self, node: onnx.NodeProto) -> list[str]:
        """The values whose sum is normalised."""
        return [name for name in (self.input(node, place) for place in (self.x, *self.added)) if name]

    def rows(self, node: onnx.NodeProto, value: Value) -> np.ndarray:
        """The rows before normalisation in float64; `value` gives an input by name."""
        if self.lookup:
            return _embedded(node, value)
        return sum(_wide(value(name)) for name in self.terms(node))

    def axis_error(self, node: onnx.NodeProto, rank: int) -> str:
        """Why an input of this rank cannot be normalised, empty when it can."""
        if self.formula.channels:
            fewest = 2 if self.axes is with_channels else 3
            return "" if rank >= fewest else f"an input of {rank} dimensions has no axes to normalise"
        wrong = next((axis for axis in self.axes(node, rank) if not -rank <= axis < rank), None)
        if wrong is None or self.lookup:
            return ""
        axis = _integer(node, "axis", -1) if self.axes is trailing_axes else wrong
        return f"axis {axis} is out of range for an input of {rank} dimensions"


def _wide(value: np.ndarray | None) -> np.ndarray:
    return np.asarray(value).astype(np.float64)


def _embedded(node: onnx.NodeProto, value: Value) -> np.ndarray:
    """The rows of EmbedLayerNormalization: sums of rows of its tables."""
    names = [*node.input, *[""] * 9]
    ids, segments, words, positions, kinds = (value(name) if name else None for name in names[:5])
    where = value(names[8]) if names[8] else np.arange(ids.shape[1])
    total = _wide(words)[ids] + _wide(positions)[where]
    return total if segments is None or kinds is None else total + _wide(kinds)[segments]


_ONNX, _BOTH, _MICROSOFT = ("",), ("", "com.microsoft"), ("com.microsoft",)

_SKIP = {"axes": last_axis, "eps": 1e-12, "sums_sequentially": True}
OPERATORS = [
    Operator(LayerNormalization, _BOTH, LAYER, trap_behind_add="skip-axis"),
    Operator(RMSNormalization, _ONNX, RMS, bias=None),
    Operator(SimplifiedLayerNormalization, _BOTH, RMS, bias=None),
    Operator(SkipLayerNormalization, _MICROSOFT, LAYER, scale=2, bias=3, added=(1, 4), **_SKIP),
    Operator(SkipSimplifiedLayerNormalization, _MICROSOFT, RMS, scale=2, bias=None, added=(1, 3), **_SKIP),
    Operator(
        EmbedLayerNormalization,
        _MICROSOFT,
        LAYER,
        looked_up_axis,
        1e-12,
        x=2,
        scale=5,
        bias=6,
        lookup=True,
        sums_sequentially=True,
    ),
    Operator(GroupNormalization, _ONNX, GROUP, with_channels),
    Operator(InstanceNormalization, _ONNX, INSTANCE, behind_channels, sums_sequentially=True),
    Operator(MeanVarianceNormalization, _ONNX, MEAN_VARIANCE, listed_axes, 1e-18, scale=None, bias=None),
]
SEQUENTIAL_SUMS = frozenset(operator.name for operator in OPERATORS if operator.sums_sequentially)

_BY_NAME = {(domain, operator.name): operator for operator in OPERATORS for domain in operator.domains}


def operator_of(node: onnx.NodeProto) -> Operator | None:
    """The operator of a node, None if it is no norm; the domain "ai.onnx" is another name of ""."""
    return _BY_NAME.get(("" if node.domain == "ai.onnx" else node.domain, node.op_type))


def kernels() -> list[type[OpRun]]:
    """The kernels for onnx's reference evaluator, which wants one class for each domain."""
    return [type(name, (operator.kernel,), {"op_domain": domain}) for (domain, name), operator in _BY_NAME.items()]
