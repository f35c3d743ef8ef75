"""The largest of windows: MaxPool, along one axis after another."""

from __future__ import annotations

import numpy as np

from onnx_export.importer.blocks import is_elements
from onnx_export.importer.elements import Cannot, Elements
from onnx_export.importer.windows import places_of

__all__ = ["max_pool"]


def max_pool(trace, node, attributes, inputs, outputs):
    """Blocks "max" of each window of x [rows, channels, positions, ...]."""
    x, kernels = inputs[0], attributes["kernel_shape"]
    if not is_elements(x) or len(kernels) != len(x.shape) - 2:
        raise Cannot(f"its input has {len(np.shape(x))} axes, its kernel {len(kernels)}")
    if outputs > 1:
        raise Cannot("its indices are read")
    for axis, kernel in enumerate(map(int, kernels)):
        size = x.shape[2 + axis]
        stride, dilation, (before, after), count = places_of(attributes, axis, size, kernel)
        if attributes.get("ceil_mode") and (size + before + after - (kernel - 1) * dilation - 1) % stride:
            if count * stride >= size + before:
                raise Cannot("a max pool whose last window begins behind its input")
            count += 1  # one that ends behind all padding
        at = stride * np.arange(count)[:, None] + dilation * np.arange(kernel) - before
        after = max(0, int(at[-1, -1]) - size + 1)  # that windows reach over
        options = {"stride": stride, "dilation": dilation, "padding": (before, after)}
        inside = (at >= 0) & (at < size)
        if not inside.any(axis=1).all():
            raise Cannot("a window is over padding alone")
        # padding is smaller than any number: an element of the window stands for it
        at = np.where(inside, at, np.take_along_axis(at, inside.argmax(axis=1)[:, None], axis=1))
        x = _largest(trace, node, np.moveaxis(x.numbers, 2 + axis, -1), at, options)
        x = Elements(np.moveaxis(x.numbers, -1, 2 + axis))
    return [x]


def _largest(trace, node, numbers: np.ndarray, at: np.ndarray, options) -> Elements:
    """The largest of the places `at` [places, taps] along the last axis."""
    windows = numbers[..., at]
    if at.shape[1] == 1:
        return Elements(windows[..., 0])
    of = {"x": numbers.reshape(-1, numbers.shape[-1]), "options": options}
    padding, dilation = options["padding"], options["dilation"]
    if max(padding) >= at.shape[1] or (any(padding) and dilation > numbers.shape[-1]):
        of = {}  # `MaxPool1d` has no such options: its windows are copied
    return trace.add("max", node, windows.shape[:-1], [windows.reshape(-1, at.shape[1])], **of)
