"""The operator ConvTranspose: a convolution of its input with zeros between the positions."""

from __future__ import annotations

import numpy as np

from onnx_export.importer.blocks import is_elements, shift
from onnx_export.importer.elements import Cannot, Elements
from onnx_export.importer.windows import (
    MAX_WINDOWS,
    arranged,
    filtered,
    frames_apart,
    joined,
    longest,
    reaching,
    rows_at,
    spread,
    with_rows,
)

__all__ = ["transposed"]


def transposed(trace, node, attributes, inputs, outputs):
    """Of x [1, channels, positions, ...] and a weight [channels, outputs / groups, taps, ...]."""
    x, weight, bias = (*inputs, None)[:3]
    if is_elements(weight) or is_elements(bias) or not is_elements(x):
        raise Cannot("its weights must be constants")
    if len(x.shape) < 3 or np.ndim(weight) != len(x.shape):
        raise Cannot(f"its input has {len(x.shape)} axes, its weight {np.ndim(weight)}")
    if attributes.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID") or "output_shape" in attributes:
        raise Cannot("its padding is not given as numbers")
    if x.shape[0] != 1:
        if not trace.rows:
            raise Cannot(f"it takes {x.shape[0]} rows at once, wanted 1")
        rows = [transposed(trace, node, attributes, [Elements(row[None]), weight, bias], 1)[0] for row in x.numbers]
        return [Elements(np.concatenate([row.numbers for row in rows]))]
    weight, groups = np.asarray(weight), int(attributes.get("group", 1))
    if len(weight) != x.shape[1] or len(weight) % groups:
        raise Cannot(f"its weight has {len(weight)} channels in {groups} groups, its input {x.shape[1]}")
    # [outputs, channels / groups, ...], as of a convolution
    parts = weight.reshape(groups, -1, *weight.shape[1:])
    weight = np.moveaxis(parts, 1, 2).reshape(groups * weight.shape[1], -1, *weight.shape[2:])
    y, sizes = _along_one_axis(trace, node, attributes, x.numbers[0], weight)
    y = Elements(y.numbers.reshape(1, -1, *sizes))
    return [y if bias is None else shift(trace, node, y, np.asarray(bias).reshape(-1, *[1] * len(sizes)))]


def _along_one_axis(trace, node, attributes, numbers, weight) -> tuple[Elements, list[int]]:
    """As `windows._along_one_axis`."""
    sizes, kernels, groups = numbers.shape[1:], weight.shape[2:], int(attributes.get("group", 1))
    ways = [_way(attributes, axis, *both) for axis, both in enumerate(zip(sizes, kernels, strict=True))]
    over = frames_apart(trace, numbers, [way[-1] for way in ways])
    if over is None:
        return _in_one_frame(trace, node, ways, groups, numbers, weight)
    (stride, dilation, before, count), last = ways[over], kernels[over] - 1
    # rows [count, taps] in the order in which a window at place `last` meets them
    at, rest = np.divmod(np.arange(count)[:, None] + before - dilation * np.arange(last, -1, -1), stride)
    ways[over] = (1, 1, last, 1)
    each = rows_at(trace, node, numbers, np.where(rest, -1, at), 1 + over)
    return joined(over, [_in_one_frame(trace, node, ways, groups, rows, weight) for rows in each])


def _in_one_frame(trace, node, ways, groups: int, numbers, weight) -> tuple[Elements, list[int]]:
    sizes, kernels, places = numbers.shape[1:], weight.shape[2:], [way[-1] for way in ways]
    along = longest(places, sizes)
    for axis in sorted(set(range(len(sizes))) - {along}, reverse=True):
        stride, dilation, before, _ = ways[axis]
        taps = reaching(kernels[axis], sizes[axis], places[axis], (stride, dilation, before)).transpose(1, 0, 2)
        numbers, taps = with_rows(numbers, taps, 1 + axis)
        weight = spread(weight, taps, 2 + axis)
    stride, dilation, before, count = ways[along]
    kernel, length = kernels[along], sizes[along]
    if (size := count * kernel * len(numbers)) > MAX_WINDOWS:
        raise Cannot(f"its windows have {size} elements in all, the limit is {MAX_WINDOWS}")
    (zero,) = trace.lift(np.zeros(1, np.float32), node).numbers
    stretched = np.full((len(numbers), (length - 1) * stride + 1), zero)
    stretched[:, ::stride] = numbers
    before = (kernel - 1) * dilation - before
    after = count + (kernel - 1) * dilation - stretched.shape[1] - before
    at = np.arange(count)[:, None] + dilation * np.arange(kernel) - before
    options = {"stride": 1, "dilation": dilation, "groups": groups, "padding": (before, after)}
    y = filtered(trace, node, Elements(stretched[None]), np.ascontiguousarray(weight[:, :, ::-1]), at, options)
    return arranged(y.numbers, places, along), places


def _way(attributes, axis: int, size: int, kernel: int) -> tuple[int, int, int, int]:
    """Stride, dilation, places cut off in front, and the places that are left along an axis."""
    stride, dilation, more = (
        int(attributes[name][axis]) if name in attributes else default
        for name, default in (("strides", 1), ("dilations", 1), ("output_padding", 0))
    )
    pads = attributes.get("pads", [])
    before, after = (int(pads[axis]), int(pads[axis + len(pads) // 2])) if len(pads) else (0, 0)
    places = (size - 1) * stride + (kernel - 1) * dilation + 1 + more - before - after
    if places < 1:
        raise Cannot(f"it leaves no place along axis {2 + axis}")
    return stride, dilation, before, places
