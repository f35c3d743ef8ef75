"""Kernels in the place of those of onnx's reference evaluator that compute something else than the standard says.

Each was found by comparing single nodes with onnxruntime, as tests/onnx_export/test_kernels.py does. Norms are in
`operators.py`, recurrent operators in `recurrent.py`. Formulas: the ONNX operator documentation of the versions named.
"""

from __future__ import annotations

from math import prod

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from onnx.reference.op_run import OpRun
from onnx.reference.ops import (
    op_conv_transpose,
    op_dequantize_linear,
    op_loop,
    op_scatternd,
)

from onnx_export.operators import standardise

__all__ = ["KERNELS"]


class FusedMatMul(OpRun):
    """onnxruntime's product of matrices that may be transposed, with a factor."""

    op_domain = "com.microsoft"

    def _run(self, a, b, alpha=1.0, transA=0, transB=0, transBatchA=0, transBatchB=0):
        if transBatchA or transBatchB:
            raise NotImplementedError("FusedMatMul with transposed batches")
        a, b = (np.swapaxes(each, -1, -2) if turn else each for each, turn in ((a, transA), (b, transB)))
        return ((np.matmul(a, b) * np.asarray(alpha, a.dtype)).astype(a.dtype),)


class BatchNormalization(OpRun):
    """Replaces onnx's kernel, which uses the statistics of the batch in every model below opset 14."""

    def _run(self, *inputs, epsilon=None, momentum=None, training_mode=None, **_):
        x, scale, bias, mean, var = inputs
        per_channel, eps = (-1,) + (1,) * (x.ndim - 2), float(np.float32(1e-5 if epsilon is None else epsilon))
        if not training_mode:
            d = x - mean.reshape(per_channel)
            xhat = d / np.sqrt(var.reshape(per_channel) + eps)
            return (xhat * scale.reshape(per_channel) + bias.reshape(per_channel),)
        axes, share = (0, *range(2, x.ndim)), 0.9 if momentum is None else momentum
        xhat = standardise(x, axes, eps)[0]
        averages = (old * share + new * (1 - share) for old, new in ((mean, x.mean(axes)), (var, x.var(axes))))
        return xhat * scale.reshape(per_channel) + bias.reshape(per_channel), *averages


class Loop(op_loop.Loop):
    """Replaces onnx's kernel, which concatenates scan outputs along their first axis; the standard stacks them."""

    def _run(self, M, cond, *carried, context=None, body=None, **options):
        index, running, *names = self.body.input_names
        values, scanned, cond = dict(context or {}), [], True if cond is None else cond
        step = 0
        while cond and (M is None or step < M):
            values |= {index: np.array(step, np.int64), running: np.asarray(cond)}
            values |= dict(zip(names, carried, strict=True))
            cond, *results = self._run_body(values, **options)
            carried = results[: len(names)]
            scanned.append(results[len(names) :])
            step += 1
        if not scanned:
            return (*carried, *[np.empty(0)] * (len(self.onnx_node.output) - len(names)))
        return (*carried, *(np.stack(column) for column in zip(*scanned, strict=True)))


# ------------------------------------------------------------------------------- what an older version does otherwise


class _OverTheRest(OpRun):
    """Below opset 13, functions of all axes from `axis` on, by default 1, as one; onnx has the newest version only."""

    def _run(self, x, axis=None):
        opsets = self.run_params["opsets"]
        if opsets.get("", opsets.get("ai.onnx", 13)) >= 13 or not x.size:
            return (self._along(x, axis) if x.size else x,)
        stored = next((each.i for each in self.onnx_node.attribute if each.name == "axis"), 1)
        flat = x.reshape(prod(x.shape[: stored + x.ndim if stored < 0 else stored]), -1)
        return (self._along(flat, -1).reshape(x.shape),)


class Softmax(_OverTheRest):
    def _along(self, x, axis):
        y = np.exp(x - x.max(axis, keepdims=True))
        return y / y.sum(axis, keepdims=True)


class LogSoftmax(_OverTheRest):
    def _along(self, x, axis):
        d = x - x.max(axis, keepdims=True)
        return d - np.log(np.exp(d).sum(axis, keepdims=True))


class Hardmax(_OverTheRest):
    def _along(self, x, axis):
        y = np.zeros_like(x)
        np.put_along_axis(y, x.argmax(axis, keepdims=True), 1, axis)
        return y


class DequantizeLinear(op_dequantize_linear.DequantizeLinear_25):
    """For opset 10 and 13 as well, which onnx lacks."""


class Pad(OpRun):
    """Negative pads cut elements off, which onnx refuses."""

    def _run(self, x, pads=None, fill=None, axes=None, mode="constant", value=None):
        axes = range(x.ndim) if axes is None else [axis % x.ndim for axis in np.ravel(axes).tolist()]
        width = [(0, 0)] * x.ndim
        for axis, *pair in zip(axes, *np.reshape(pads, (2, -1)).tolist(), strict=True):
            width[axis] = tuple(pair)
        kept = tuple(slice(-min(a, 0), n + min(b, 0)) for (a, b), n in zip(width, x.shape, strict=True))
        fill = value if fill is None else fill
        options = {"constant_values": np.ravel(0 if fill is None else fill)[0]} if mode == "constant" else {}
        width = [(max(a, 0), max(b, 0)) for a, b in width]
        return (np.pad(x[kept], width, mode=mode, **options).astype(x.dtype),)


# --------------------------------------------------------------------------------------- what onnx computes otherwise


class LRN(OpRun):
    """x / (bias + alpha / size * sum of the squares of `size` channels around)^beta."""

    def _run(self, x, alpha=None, beta=None, bias=None, size=None):
        ends = ((0, 0), ((size - 1) // 2, size // 2), *((0, 0),) * (x.ndim - 2))
        squares = np.pad(x * x, ends)
        total = sum(squares[:, place : place + x.shape[1]] for place in range(size))
        return ((x / (bias + alpha / size * total) ** beta).astype(x.dtype),)


class LpNormalization(OpRun):
    """x / (sum |x|^p)^(1/p) over an axis, 0 for rows of zeros."""

    def _run(self, x, axis=None, p=None):
        norm = np.sum(np.abs(x) ** p, axis=axis, keepdims=True) ** (1 / p)
        return (np.where(norm == 0, 0, x / np.where(norm == 0, 1, norm)).astype(x.dtype),)


class _Pool(OpRun):
    """Functions of windows; onnx takes unequal pads, auto_pad and ceil_mode otherwise than the standard."""

    def _run(self, x, auto_pad="NOTSET", ceil_mode=0, dilations=None, kernel_shape=(), pads=None, strides=None, **more):
        axes = len(kernel_shape)
        strides, dilations = strides or [1] * axes, dilations or [1] * axes
        before, after = np.reshape(pads if pads and auto_pad == "NOTSET" else [0] * 2 * axes, (2, -1)).tolist()
        spans, behind = [(k - 1) * d + 1 for k, d in zip(kernel_shape, dilations, strict=True)], [0] * axes
        for axis, (size, span, stride) in enumerate(zip(x.shape[2:], spans, strides, strict=True)):
            if auto_pad.startswith("SAME"):
                total = max(0, (-(-size // stride) - 1) * stride + span - size)
                before[axis], after[axis] = total // 2, total - total // 2
                if auto_pad == "SAME_LOWER":
                    before[axis], after[axis] = after[axis], before[axis]
            elif ceil_mode:
                left = size + before[axis] + after[axis] - span
                last = -(-left // stride) * stride
                last -= stride if last >= size + before[axis] else 0  # no window begins in the padding behind
                behind[axis] = max(0, last - left)

        sizes = [slice(None), slice(None), *(slice(None, None, step) for step in (*strides, *dilations))]

        def windows(array, fill, fill_behind):
            for pairs, value in ((zip(before, after, strict=True), fill), ([(0, n) for n in behind], fill_behind)):
                array = np.pad(array, [(0, 0), (0, 0), *pairs], constant_values=value)
            return sliding_window_view(array, spans, tuple(range(2, x.ndim)))[tuple(sizes)]

        return (self._of(x, windows, tuple(range(-axes, 0)), **more).astype(x.dtype),)


class MaxPool(_Pool):
    def _of(self, x, windows, over, storage_order=0):
        if len(self.onnx_node.output) > 1:
            raise NotImplementedError("MaxPool with indices")
        low = -np.inf if x.dtype.kind == "f" else np.iinfo(x.dtype).min
        return windows(x, low, low).max(over)


class LpPool(_Pool):
    def _of(self, x, windows, over, p=2):
        return windows(np.abs(x) ** p, 0, 0).sum(over) ** (1 / p)


class AveragePool(_Pool):
    def _of(self, x, windows, over, count_include_pad=0):
        counted = windows(np.ones_like(x), count_include_pad, 0)  # what ceil_mode adds does not count
        return windows(x, 0, 0).sum(over) / counted.sum(over)


class ConvTranspose(op_conv_transpose.ConvTranspose):
    """Groups of several output channels, which onnx refuses, and a product for each tap, where onnx has loops."""

    def _run(self, x, w, b=None, group=None, **options):
        given = options.get("auto_pad", "NOTSET") == "NOTSET" and not options.get("output_shape")
        y = (_transposed if given else self._of_groups)(x, w, group or 1, options)
        return (y if b is None else y + b.reshape(-1, *(1,) * (x.ndim - 2)),)

    def _of_groups(self, x, w, group, options):
        run, parts = super()._run, zip(np.split(x, group, 1), np.split(w, group), strict=True)
        return np.concatenate([run(*part, None, group=1, **options)[0] for part in parts], 1)


def _transposed(x, w, group, options):
    """x [rows, channels, ...] through w [channels, outputs of a group, ...]."""
    axes = x.ndim - 2
    strides, dilations = (options.get(name) or [1] * axes for name in ("strides", "dilations"))
    pads, more = options.get("pads") or [0] * 2 * axes, options.get("output_padding") or [0] * axes
    reach = [(n - 1) * s + 1 for n, s in zip(x.shape[2:], strides, strict=True)]
    sizes = [r + (k - 1) * d + o for r, k, d, o in zip(reach, w.shape[2:], dilations, more, strict=True)]
    channels, outputs = len(w) // group, w.shape[1]
    y = np.zeros((len(x), group * outputs, *sizes), np.result_type(x, w))
    parts = np.reshape(x, (len(x), group, channels, prod(x.shape[2:])))
    for tap in np.ndindex(*w.shape[2:]):
        at = [slice(k * d, k * d + r, s) for k, d, r, s in zip(tap, dilations, reach, strides, strict=True)]
        taken = np.reshape(w[(..., *tap)], (group, channels, outputs)).swapaxes(1, 2)
        y[(..., *at)] += np.reshape(taken @ parts, (len(x), group * outputs, *x.shape[2:]))
    return y[(..., *(slice(pads[i], sizes[i] - pads[i + axes]) for i in range(axes)))]


class ScatterND(op_scatternd.ScatterND):
    """All elements at once, where onnx has a loop."""

    def _run(self, data, indices, updates, reduction=None):
        if (reduction or "none") != "none":
            return super()._run(data, indices, updates, reduction=reduction)
        y = data.copy()
        y[tuple(np.moveaxis(indices, -1, 0))] = updates
        return (y,)


KERNELS = (
    AveragePool, BatchNormalization, ConvTranspose, DequantizeLinear, FusedMatMul, Hardmax, LRN, LogSoftmax, Loop,
    LpNormalization, LpPool, MaxPool, Pad, ScatterND, Softmax,
)  # fmt: skip
