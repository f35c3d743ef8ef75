"""Judge a part of the rows where a norm's input is large: the same rows of all values that enter the norm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from onnx_export.float64 import Float64
from onnx_export.validation.isolated import subgraph_model
from onnx_export.validation.norm import Norm

_JUDGED = 2**20  # elements of the inputs of all norms that are judged, shared equally; at least one row of each
_SMALL = 2**16  # elements that are judged whatever the number of norms
TAPPED = 2**29  # bytes of the values of one run, unless those of a single norm are more

Indices = dict[int, np.ndarray]  # those that are kept, by axis of the norm's input


def rows_to_keep(norm: Norm, x: np.ndarray, norms: int) -> Indices:
    """Evenly spaced indices along the axes of rows, and that of the largest element or a NaN; empty to keep all.

    `norms` is the number of norms of the file.
    """
    share = max(_SMALL, _JUDGED // norms)
    if x.size <= share or norm.axes is None or (norm.operator and norm.operator.lookup):
        return {}
    normalised = {axis % x.ndim for axis in norm.axes}
    left, kept = x.size, {}
    hardest = np.unravel_index(np.argmax(np.abs(x)), x.shape)
    for axis in sorted(set(range(x.ndim)) - normalised, key=lambda axis: -x.shape[axis]):
        length = x.shape[axis]
        most = max(1, length * share // left)
        if most >= length:
            continue
        chosen = np.linspace(0, length - 1, most).round().astype(int)
        chosen[np.argmin(np.abs(chosen - hardest[axis]))] = hardest[axis]
        kept[axis] = chosen
        left = left // length * most
    return kept


def sampled(norm: Norm, values: Mapping[str, np.ndarray], kept: Indices, names: list[str]) -> dict[str, np.ndarray]:
    """The values that enter a norm, and stored ones among `names`, with these indices of the norm's input only.

    Parameters
    ----------
    norm : Norm
    values : mapping of str to ndarray
        Tapped values, the norm's input among them.
    kept : dict of int to ndarray
    names : list of str
        What the nodes read. Stored values that vary from row to row, such as the scale of InstanceNormalization,
        become values like those of the run.
    """
    shape = values[norm.x].shape
    result = dict(values)
    for name in names:
        value = values[name] if name in values else norm.scope.constant(name)
        if value is not None:
            first = 1 if norm.formula.channels and name in (norm.scale, norm.bias) else len(shape) - value.ndim
            less = _taken(value, shape, kept, first)
            if name in values or less.shape != value.shape:
                result[name] = less
    return result


def result_of(y: np.ndarray, shape: tuple[int, ...], kept: Indices) -> np.ndarray:
    """A result with these indices only; `shape` is that of the norm's input."""
    return _taken(y, shape, kept, len(shape) - y.ndim)


def _taken(value: np.ndarray, shape: tuple[int, ...], kept: Indices, first: int) -> np.ndarray:
    """A value whose axis 0 is the axis `first` of a value of `shape`, at the indices that are kept."""
    for axis, indices in kept.items():
        own = axis - first
        if 0 <= own < value.ndim and value.shape[own] == shape[axis] > 1:
            value = np.take(value, indices, own)
    return np.ascontiguousarray(value).reshape(value.shape)


def independent(norm: Norm, values: Mapping[str, np.ndarray], kept: Indices, names: list[str]) -> bool:
    """Whether a row's result is the same without the other rows: in float64, of one index and of two along an axis.

    Operators are defined so. Nodes may have shapes or counts stored that fit all rows only.
    """
    if norm.operator:
        return True
    axis = max(kept, key=lambda axis: len(kept[axis]))
    results = []
    for some in ([kept[axis][0], (kept[axis][0] + 1) % values[norm.x].shape[axis]], [kept[axis][0]]):
        few = {other: indices[:1] for other, indices in kept.items()} | {axis: np.array(some)}
        feeds = sampled(norm, values, few, names)
        try:
            result = Float64(subgraph_model(norm, norm.nodes, feeds)).run(feeds)[norm.y]
        except Exception:  # from onnx's evaluator: the nodes do not take another shape
            return False
        if result.shape != feeds[norm.x].shape:
            return False
        results.append(np.take(result, [0], axis))
    with np.errstate(all="ignore"):
        different = np.abs(results[0] - results[1]) > 1e-9 * (1 + np.abs(results[1]))
    return not different.any()


def groups(sizes: Mapping[int, int]) -> Iterator[list[int]]:
    """Norms whose values of so many bytes are taken in one run each."""
    group: list[int] = []
    for index, size in sizes.items():
        if group and sum(sizes[each] for each in group) + size > TAPPED:
            yield group
            group = []
        group.append(index)
    if group:
        yield group
