"""Reductions for onnx's reference evaluator that add the elements of a row in pairs, whatever its axes."""

from __future__ import annotations

import numpy as np
from onnx.reference.op_run import OpRun

# NumPy adds in pairs along the last axis of a contiguous array, and one after another along others.


def _rows(x: np.ndarray, axes, keepdims, keep_all) -> tuple[np.ndarray, tuple[int, ...]]:
    """x as [..., n] with the reduced axes last, and the shape of the result."""
    chosen = () if axes is None else tuple(int(axis) % x.ndim for axis in np.ravel(axes))
    if not chosen and not keep_all:
        chosen = tuple(range(x.ndim))
    kept = [axis for axis in range(x.ndim) if axis not in chosen]
    shape = [1 if axis in chosen else x.shape[axis] for axis in range(x.ndim) if keepdims or axis not in chosen]
    moved = np.ascontiguousarray(x.transpose([*kept, *chosen]))
    return moved.reshape(*(x.shape[axis] for axis in kept), -1), tuple(shape)


class _Reduction(OpRun):
    def _run(self, x, axes=None, keepdims=None, noop_with_empty_axes=None, **_):
        rows, shape = _rows(x, axes, keepdims in (None, 1), noop_with_empty_axes)
        return (np.asarray(self.of(rows)).astype(x.dtype).reshape(shape),)


class ReduceMean(_Reduction):
    op_domain = ""

    def of(self, rows):
        return np.mean(rows, axis=-1)


class ReduceSum(_Reduction):
    op_domain = ""

    def of(self, rows):
        return np.sum(rows, axis=-1)


class ReduceSumSquare(_Reduction):
    op_domain = ""

    def of(self, rows):
        return np.sum(rows * rows, axis=-1)


class ReduceL2(_Reduction):
    op_domain = ""

    def of(self, rows):
        return np.sqrt(np.sum(rows * rows, axis=-1))


PAIRWISE = [ReduceMean, ReduceSum, ReduceSumSquare, ReduceL2]
