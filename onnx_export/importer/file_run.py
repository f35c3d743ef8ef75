"""Runs of a file as it is in onnxruntime, with the frames and states that a plan found in it."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import onnx

from onnx_export.errors import NotImported
from onnx_export.importer.interface import Plan
from onnx_export.ort import CannotRun, Session

__all__ = ["FileRun"]


class FileRun:
    """The file as it is in onnxruntime, from states of zero.

    Parameters
    ----------
    onnx_model : onnx.ModelProto
    found : Plan

    Attributes
    ----------
    steps : int or None
        Steps of one call; None if a call takes any number.
    """

    def __init__(self, onnx_model: onnx.ModelProto, found: Plan) -> None:
        self._found, self._session, self.steps = found, Session(onnx_model, "all"), 1
        if found.time_axis is not None:
            traced = 1 if found.inputs.shifts and not found.inputs.shifts.fixed else found.inputs.steps
            self.steps = traced if traced > 1 else found.inputs.fixed or None

    def run(self, x: np.ndarray, calls: int = 1) -> np.ndarray:
        """The outputs [steps, outputs], or [1, outputs] where a call of several steps gives the last one only."""
        return self.run_rows(x[None], {}, calls)[0]

    def run_rows(self, xs: np.ndarray, axes, calls: int = 1, *, alternate: bool = False) -> np.ndarray:
        """The outputs [rows, steps, outputs] of rows in the same calls, which lie along some axes of the inputs.

        `calls` is the number of calls that a file over a time axis takes the steps in; `alternate` says that the rows
        of each step are behind one another in an output, not the steps of each row.
        """
        calls = calls if self._found.time_axis is not None else xs.shape[1]
        states = _joined([self.zeros(self._found.states)] * len(xs), axes)
        parts = []
        for x in np.split(xs, calls, axis=1):
            frames = _joined([self._frames(row) for row in x], axes)
            names = [*self._found.outputs, *self._found.states.values()]
            results = self._session.run(names, self.constants() | states | frames)
            own = len(self._found.outputs)
            states = dict(zip(states, results[own:], strict=True))
            pairs = zip(self._found.outputs, results[:own], strict=True)
            ys = [self._split(*pair, *x.shape[:2], alternate) for pair in pairs]
            parts.append(np.concatenate(ys, axis=2))
        return parts[-1] if parts[-1].shape[1] < x.shape[1] else np.concatenate(parts, axis=1)

    def shapes(self, axes, size: int) -> dict[str, tuple[int, ...]] | None:
        """The shapes of the results of a call with several elements along some axes; None if the file refuses it."""
        feeds = {
            name: np.repeat(array, size, axes[name]) if name in axes else array
            for name, array in self.zeros(self._found.inputs.shapes).items()
        }
        names = [*self._found.outputs, *self._found.states.values()]
        with suppress(CannotRun):
            results = self._session.run(names, self.constants() | feeds)
            return {name: array.shape for name, array in zip(names, results, strict=True)}
        return None

    def grown(self, axes) -> dict[str, list[int]] | None:
        """The axes along which each result grows with two elements along some axes; None if the file refuses them."""
        one, two = self.shapes(axes, 1), self.shapes(axes, 2)
        return two and {name: [axis for axis, n in enumerate(two[name]) if n != one[name][axis]] for name in two}

    def is_flat(self, axes) -> bool:
        """Whether an output has steps and rows, which lie along some axes of the inputs, along one axis."""
        grown, steps = self.grown(axes) or {}, self._found.inputs.output_axes
        return any(steps.get(name) in each for name, each in grown.items())

    def zeros(self, names) -> dict[str, np.ndarray]:
        """Arrays for some inputs, at one step of one row."""
        inputs = self._found.inputs
        return {name: np.zeros(inputs.shapes[name], inputs.types[name]) for name in names}

    def call(self, frame: np.ndarray, states) -> list[np.ndarray]:
        """One call of one step: the outputs and the new states."""
        names = [*self._found.outputs, *self._found.states.values()]
        return self._session.run(names, self.constants() | states | self._frames(frame[None]))

    def constants(self) -> dict[str, np.ndarray]:
        """The inputs that are the same for each frame."""
        return {name: np.array(array) for name, array in self._found.inputs.constants.items()}

    def _frames(self, x: np.ndarray) -> dict[str, np.ndarray]:
        """The frames [steps, inputs] of one call, by input."""
        feeds, start, axes = {}, 0, self._found.inputs.time_axes
        for name, zero in self.zeros(self._found.frames).items():
            if self._found.time_axis is None:
                feeds[name] = x[0, start : start + zero.size].reshape(zero.shape).astype(zero.dtype, copy=False)
                start += zero.size
                continue
            sizes = np.delete(zero.shape, axes[name])
            stop = start + int(np.prod(sizes))
            feeds[name] = np.moveaxis(x[:, start:stop].reshape(-1, *sizes), 0, axes[name]).astype(zero.dtype)
            start = stop
        return feeds

    def _split(self, name: str, y: np.ndarray, rows: int, steps: int, alternate: bool) -> np.ndarray:
        """An output of a call as [rows, steps, elements], or [rows, 1, elements] if it is of the last step only."""
        if rows == 1:
            return self._rows(name, y, steps)[None]
        one, axis = list(self._found.trace.values[name].shape), self._found.inputs.output_axes.get(name)
        if axis is not None:
            one[axis] = steps
        along = [i for i, (size, n) in enumerate(zip(y.shape, one, strict=True)) if size != n]
        if len(along) != 1 or y.shape[along[0]] != rows * one[along[0]]:
            raise NotImported(f"{rows} rows at once give the output {name!r} the shape {list(y.shape)}, one has {one}")
        each = np.split(y, rows, along[0])
        if alternate and along[0] == axis:
            each = [y.take(range(row, y.shape[axis], rows), axis) for row in range(rows)]
        return np.stack([self._rows(name, row, steps) for row in each])

    def _rows(self, name: str, y: np.ndarray, steps: int) -> np.ndarray:
        """An output of one row as [steps, elements], or [1, elements] if it is of the last step only."""
        one = self._found.trace.values[name].numbers
        alone = self._found.inputs.shifts and self._found.inputs.output_axes.get(name, 0) is None
        if not alone and y.size == one.size // self._found.inputs.steps * steps:
            axis = self._found.inputs.output_axes.get(name)
            if axis is None:
                sizes = zip(y.shape, one.shape, strict=False)
                axis = next((axis for axis, (size, single) in enumerate(sizes) if size != single), 0)
            return np.moveaxis(y, axis, 0).reshape(steps, -1)
        return y.reshape(1, -1)


def _joined(rows: list[dict[str, np.ndarray]], axes) -> dict[str, np.ndarray]:
    """The inputs of several rows, behind one another along their axes."""
    first = rows[0]
    return {
        name: np.concatenate([row[name] for row in rows], axes[name]) if name in axes else first[name] for name in first
    }
