"""Operators that slide a window over positions: Conv."""

from __future__ import annotations

import numpy as np

from onnx_export.importer.blocks import is_elements, product, shift
from onnx_export.importer.elements import Cannot, Elements

__all__ = ["convolution"]

MAX_WINDOWS = 1 << 22  # elements


def convolution(trace, node, attributes, inputs, outputs):
    """A convolution, a product where its kernel has one place. x [1, channels, positions], with axes of size 1."""
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
    if len(x.shape) > 3:
        return _over_one_axis(trace, node, attributes, (x, np.asarray(weight), bias))
    kernel, groups = weight.shape[2], int(attributes.get("group", 1))
    stride, dilation, (before, after), places = _places(attributes, 0, x.shape[2], kernel)
    if x.shape[1] != weight.shape[1] * groups or len(weight) % groups:
        raise Cannot(f"its weight has {weight.shape[1]} channels for each of {groups} groups, its input {x.shape[1]}")
    size = places * kernel * x.shape[1]
    if size > MAX_WINDOWS:
        raise Cannot(f"its windows have {size} elements in all, the limit is {MAX_WINDOWS}")
    at = stride * np.arange(places)[:, None] + dilation * np.arange(kernel) - before
    if places == 1 and groups == 1:
        inside = (at[0] >= 0) & (at[0] < x.shape[2])
        taps = x.numbers[0][:, at[0, inside]].reshape(1, -1)
        y = product(trace, node, taps, np.asarray(weight)[:, :, inside].reshape(len(weight), -1))
        y = Elements(y.numbers.reshape(1, -1, 1))
    else:
        options = {"stride": stride, "dilation": dilation, "groups": groups, "padding": (before, after)}
        y = _filtered(trace, node, x, np.asarray(weight), at, options)
    return [y if bias is None else shift(trace, node, y, np.asarray(bias)[:, None])]


def _over_one_axis(trace, node, attributes, inputs):
    """A convolution over several axes, of which all but one have one position."""
    x, weight, bias = inputs
    sizes = x.shape[2:]
    long = [axis for axis, size in enumerate(sizes) if size > 1] or [len(sizes) - 1]
    if len(long) > 1:
        raise Cannot(f"a convolution over {len(long)} axes; only one over one axis is a layer")
    for axis in sorted(set(range(len(sizes))) - set(long), reverse=True):
        _, dilation, (before, _), places = _places(attributes, axis, 1, weight.shape[2 + axis])
        tap, rest = divmod(before, dilation)
        if places != 1 or rest or tap >= weight.shape[2 + axis]:
            raise Cannot(f"axis {2 + axis} of its input has one position, of its result {places}, not all from it")
        weight = weight.take(tap, 2 + axis)
    own = {name: [_of_axis(attributes, name, long[0])] for name in ("strides", "dilations")}
    own["pads"] = _places(attributes, long[0], sizes[long[0]], weight.shape[2])[2]
    flat = Elements(x.numbers.reshape(1, x.shape[1], -1))
    (y,) = convolution(trace, node, {"group": attributes.get("group", 1)} | own, [flat, weight, bias], 1)
    places = [y.shape[2] if axis == long[0] else 1 for axis in range(len(sizes))]
    return [Elements(y.numbers.reshape(1, -1, *places))]


def _filtered(trace, node, x, weight, at, options):
    """A block `conv`; its operand has the window [channels / groups, taps] of each place and group, in this order."""
    groups = options["groups"]
    zero = trace.lift(np.zeros(1, np.float32), node).numbers
    outside = (at < 0) | (at >= x.shape[2])
    windows = np.where(outside, zero, x.numbers[0][:, np.where(outside, 0, at)])  # [channels, places, taps]
    windows = windows.reshape(groups, -1, *at.shape).transpose(2, 0, 1, 3).reshape(len(at) * groups, -1)
    return trace.add("conv", node, (1, len(weight), len(at)), [windows], weight=weight, x=x.numbers[0], options=options)


def _of_axis(attributes, name: str, axis: int) -> int:
    return int(attributes[name][axis]) if name in attributes else 1


def _places(attributes, axis: int, length: int, kernel: int) -> tuple[int, int, tuple[int, int], int]:
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
