"""Operators that slide a window over positions: Conv. One over several axes is one along the longest of them."""

from __future__ import annotations

import numpy as np

from onnx_export.importer.blocks import is_elements, product, shift
from onnx_export.importer.elements import Cannot, Elements

__all__ = [
    "arranged", "convolution", "filtered", "frames_apart", "joined", "longest", "places_of", "reaching", "rows_at",
    "spread", "with_rows",
]  # fmt: skip

MAX_WINDOWS = 1 << 22  # elements


def convolution(trace, node, attributes, inputs, outputs):
    """A convolution of x [1, channels, positions, ...], a product where its kernel has one place."""
    x, weight, bias = (*inputs, None)[:3]
    if is_elements(weight) or is_elements(bias) or not is_elements(x):
        raise Cannot("its weights must be constants")
    if len(x.shape) < 3 or np.ndim(weight) != len(x.shape):
        raise Cannot(f"its input has {len(x.shape)} axes, its weight {np.ndim(weight)}")
    if x.shape[0] != 1:
        if not trace.rows:
            raise Cannot(f"it takes {x.shape[0]} rows at once, wanted 1")
        rows = [convolution(trace, node, attributes, [Elements(row[None]), weight, bias], 1)[0] for row in x.numbers]
        return [Elements(np.concatenate([row.numbers for row in rows]))]
    y, sizes = _along_one_axis(trace, node, attributes, x.numbers[0], np.asarray(weight))
    y = Elements(y.numbers.reshape(1, len(weight), *sizes))
    return [y if bias is None else shift(trace, node, y, np.asarray(bias).reshape(-1, *[1] * len(sizes)))]


def _along_one_axis(trace, node, attributes, numbers, weight) -> tuple[Elements, list[int]]:
    """A convolution along one axis of numbers [channels, ...]; the rows of other axes are channels, too."""
    sizes, groups = numbers.shape[1:], int(attributes.get("group", 1))
    if numbers.shape[0] != weight.shape[1] * groups or len(weight) % groups:
        raise Cannot(
            f"its weight has {weight.shape[1]} channels for each of {groups} groups, its input {numbers.shape[0]}"
        )
    ways = [places_of(attributes, axis, size, weight.shape[2 + axis]) for axis, size in enumerate(sizes)]
    over = frames_apart(trace, numbers, [way[-1] for way in ways])
    if over is None:
        return _in_one_frame(trace, node, ways, groups, numbers, weight)
    stride, dilation, (before, _), count = ways[over]
    at = stride * np.arange(count)[:, None] + dilation * np.arange(weight.shape[2 + over]) - before
    ways[over] = (1, 1, (0, 0), 1)
    each = rows_at(trace, node, numbers, at, 1 + over)
    return joined(over, [_in_one_frame(trace, node, ways, groups, rows, weight) for rows in each])


def frames_apart(trace, numbers: np.ndarray, places: list[int]) -> int | None:
    """The axis of numbers [channels, ...] that counts frames, if a convolution has several places beside its frames."""
    axis = trace.frame_axis(numbers)
    if not axis or places[axis - 1] == 1 or max(places[: axis - 1] + places[axis:], default=1) == 1:
        return None
    return axis - 1


def rows_at(trace, node, numbers: np.ndarray, at: np.ndarray, axis: int) -> list[np.ndarray]:
    """For each place of `at` [places, taps] the rows of an axis there, or zeros where there are none."""
    (zero,) = trace.lift(np.zeros(1, np.float32), node).numbers
    padded = np.concatenate([numbers, np.full_like(numbers.take([0], axis), zero)], axis)
    return [padded.take(rows, axis) for rows in np.where((at < 0) | (at >= numbers.shape[axis]), -1, at)]


def joined(over: int, results: list[tuple[Elements, list[int]]]) -> tuple[Elements, list[int]]:
    """The results [outputs, ...] of one place each along an axis, together."""
    places = results[0][1]
    numbers = np.concatenate([y.numbers for y, _ in results], 1 + over)
    return Elements(numbers), [*places[:over], len(results), *places[over + 1 :]]


def _in_one_frame(trace, node, ways, groups: int, numbers, weight) -> tuple[Elements, list[int]]:
    sizes, places = numbers.shape[1:], [way[-1] for way in ways]
    along = longest(places, sizes)
    for axis in sorted(set(range(len(sizes))) - {along}, reverse=True):
        stride, dilation, (before, _), _ = ways[axis]
        taps = reaching(weight.shape[2 + axis], places[axis], sizes[axis], (stride, dilation, before))
        numbers, taps = with_rows(numbers, taps, 1 + axis)
        weight = spread(weight, taps, 2 + axis)
    x, kernel = Elements(numbers[None]), weight.shape[2]
    stride, dilation, (before, after), count = ways[along]
    if (size := count * kernel * x.shape[1]) > MAX_WINDOWS:
        raise Cannot(f"its windows have {size} elements in all, the limit is {MAX_WINDOWS}")
    at = stride * np.arange(count)[:, None] + dilation * np.arange(kernel) - before
    if count == 1 and groups == 1:
        inside = (at[0] >= 0) & (at[0] < x.shape[2])
        taps = x.numbers[0][:, at[0, inside]].reshape(1, -1)
        y = product(trace, node, taps, weight[:, :, inside].reshape(len(weight), -1))
    else:
        options = {"stride": stride, "dilation": dilation, "groups": groups, "padding": (before, after)}
        y = filtered(trace, node, x, weight, at, options)
    return arranged(y.numbers, places, along), places


def arranged(numbers: np.ndarray, places: list[int], along: int) -> Elements:
    """Results [outputs, places of the last axis, ..., of the first, of the axis along] with the axes in order."""
    others = [axis for axis in range(len(places) - 1, -1, -1) if axis != along]
    shaped = numbers.reshape([-1, *(places[axis] for axis in (*others, along))])
    return Elements(shaped.transpose([0, *(1 + [*others, along].index(axis) for axis in range(len(places)))]))


def longest(places, sizes) -> int:
    """The axis along which a convolution is a layer: of most places, or else elements."""
    return max(range(len(sizes)), key=lambda axis: (places[axis], sizes[axis], axis))


def reaching(kernel: int, places: int, size: int, options: tuple[int, int, int]) -> np.ndarray:
    """Whether [places, size, kernel] a tap is over an element of one axis at a place of a window."""
    stride, dilation, before = options
    at = stride * np.arange(places)[:, None] + dilation * np.arange(kernel) - before
    return at[:, None] == np.arange(size)[:, None]


def with_rows(numbers: np.ndarray, taps: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers [channels * rows, ...] with the rows of an axis that a tap is over, and the taps of these."""
    used = np.flatnonzero(taps.any(axis=(0, 2)))
    if not len(used):
        raise Cannot("its kernel is over padding alone")
    moved = np.moveaxis(numbers.take(used, axis), axis, 1)
    return moved.reshape(-1, *moved.shape[2:]), taps[:, used]


def spread(weight: np.ndarray, taps: np.ndarray, axis: int) -> np.ndarray:
    """A weight [outputs * places, channels * rows, ...] whose products are those of taps of an axis."""
    size = weight.size // weight.shape[axis] * taps[..., 0].size
    if size > MAX_WINDOWS:
        raise Cannot(f"as one along one axis its weight has {size} elements, the limit is {MAX_WINDOWS}")
    # [outputs, channels, ..., places, rows]: each product of a weight and a tap has one term at most
    wide = np.tensordot(np.moveaxis(weight, axis, -1), taps.astype(weight.dtype), (-1, 2))
    wide = np.moveaxis(np.moveaxis(wide, -2, 1), -1, 3)
    return wide.reshape(wide.shape[0] * wide.shape[1], wide.shape[2] * wide.shape[3], *wide.shape[4:])


def filtered(trace, node, x, weight, at, options):
    """A block `conv`; its operand has the window [channels / groups, taps] of each place and group, in this order."""
    groups = options["groups"]
    zero = trace.lift(np.zeros(1, np.float32), node).numbers
    outside = (at < 0) | (at >= x.shape[2])
    windows = np.where(outside, zero, x.numbers[0][:, np.where(outside, 0, at)])  # [channels, places, taps]
    windows = windows.reshape(groups, -1, *at.shape).transpose(2, 0, 1, 3).reshape(len(at) * groups, -1)
    return trace.add("conv", node, (1, len(weight), len(at)), [windows], weight=weight, x=x.numbers[0], options=options)


def _of_axis(attributes, name: str, axis: int) -> int:
    return int(attributes[name][axis]) if name in attributes else 1


def places_of(attributes, axis: int, length: int, kernel: int) -> tuple[int, int, tuple[int, int], int]:
    """Stride, dilation, padding before and behind, and the places of the window along an axis."""
    stride, dilation = (_of_axis(attributes, name, axis) for name in ("strides", "dilations"))
    reach = (kernel - 1) * dilation + 1
    before, after = _pads(attributes, axis, length, reach, stride)
    places = (length + before + after - reach) // stride + 1
    if places < 1:
        raise Cannot(f"its kernel reaches over {reach} positions, its input has {length}")
    return stride, dilation, (before, after), places


def _pads(attributes, axis: int, length: int, reach: int, stride: int) -> tuple[int, int]:
    auto = attributes.get("auto_pad", b"NOTSET")
    if auto in (b"NOTSET", b"VALID"):
        pads = attributes.get("pads", []) if auto == b"NOTSET" else []
        return (int(pads[axis]), int(pads[axis + len(pads) // 2])) if len(pads) else (0, 0)
    total = max((-(-length // stride) - 1) * stride + reach - length, 0)
    less, more = total // 2, total - total // 2
    return (less, more) if auto == b"SAME_UPPER" else (more, less)
