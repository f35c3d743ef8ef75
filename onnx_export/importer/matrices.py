"""Operators that a constant matrix computes: Einsum with a constant, means and sums of a frame, pools of averages."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from string import ascii_letters

import numpy as np

from onnx_export.importer.blocks import is_elements, product
from onnx_export.importer.elements import MAX_NUMBERED, Cannot, Elements
from onnx_export.importer.windows import convolution

__all__ = ["average_pool", "einsum", "global_pool", "reduction"]


def reduction(op: str) -> Callable:
    """Blocks "mean", "sum" or "max" of each row."""

    def apply(trace, node, attributes, inputs, outputs):
        x, axes = (*inputs, None)[:2]
        if not is_elements(x) or is_elements(axes):
            raise Cannot("its axes must be constants")
        axes = attributes.get("axes") if axes is None else axes
        if np.size(axes) == 0 or axes is None:
            axes = [] if attributes.get("noop_with_empty_axes") else range(len(x.shape))
        axes = [int(axis) % len(x.shape) for axis in np.ravel(axes)]
        return [_reduced(trace, node, x, op, axes, attributes.get("keepdims", 1))]

    return apply


def _reduced(trace, node, x, op: str, axes: list[int], keepdims) -> Elements:
    kept = [axis for axis in range(len(x.shape)) if axis not in axes]
    rows = x.numbers.transpose([*kept, *axes]).reshape(prod(x.shape[i] for i in kept), -1)
    shape = [1 if axis in axes else size for axis, size in enumerate(x.shape)]
    shape = shape if keepdims else [x.shape[axis] for axis in kept]
    return trace.add(op, node, shape, [rows]) if rows.shape[1] != 1 else Elements(x.numbers.reshape(shape))


def global_pool(op: str) -> Callable:
    def apply(trace, node, attributes, inputs, outputs):
        return [_reduced(trace, node, inputs[0], op, list(range(2, len(inputs[0].shape))), 1)]

    return apply


def average_pool(trace, node, attributes, inputs, outputs):
    """A depthwise convolution with equal weights. x [1, channels, positions]."""
    kernel = [int(size) for size in attributes["kernel_shape"]]
    if attributes.get("ceil_mode") or attributes.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
        raise Cannot("an average pool with windows that reach beyond its input")
    if any(attributes.get("pads", [])) and not attributes.get("count_include_pad"):
        raise Cannot("an average pool that divides by fewer positions where it is padded")
    channels = inputs[0].shape[1]
    weight = np.full((channels, 1, *kernel), 1 / prod(kernel), np.float32)
    own = {name: attributes[name] for name in ("strides", "dilations", "pads") if name in attributes}
    return convolution(trace, node, own | {"group": channels}, [inputs[0], weight], 1)


def einsum(trace, node, attributes, inputs, outputs):
    """A product with a constant: plain, or with a matrix for each group of elements."""
    if len(inputs) != 2 or all(map(is_elements, inputs)):
        raise Cannot("it multiplies what depends on the frame by what depends on the frame")
    terms, result = _equation(attributes["equation"].decode(), [len(np.shape(value)) for value in inputs])
    (x, of_x), (constant, of_constant) = sorted(
        zip(inputs, terms, strict=True), key=lambda pair: not is_elements(pair[0])
    )
    sizes: dict[str, int] = {}
    for value, letters in zip(inputs, terms, strict=True):
        for letter, size in zip(letters, np.shape(value), strict=True):
            if sizes.setdefault(letter, size) != size:
                raise Cannot(f"its axis {letter!r} has {sizes[letter]} elements in one input, {size} in the other")
    if set(result) - sizes.keys():
        raise Cannot("its result has an axis that no input has")
    rows = [letter for letter in of_x if letter in result and letter not in of_constant]
    taken = [letter for letter in of_x if letter not in rows]
    made = [letter for letter in result if letter not in rows]
    n, m = (prod(sizes[letter] for letter in letters) for letters in (taken, made))
    if n * m > MAX_NUMBERED:
        raise Cannot(f"its matrix has {n * m} elements, the limit is {MAX_NUMBERED}")
    weight = _matrix(np.asarray(constant), of_constant, taken, made, sizes)
    moved = x.numbers.transpose([of_x.index(letter) for letter in (*rows, *taken)])
    y = product(trace, node, moved.reshape(*(sizes[letter] for letter in rows), n), weight.reshape(m, n))
    numbers = y.numbers.reshape([sizes[letter] for letter in (*rows, *made)])
    return [Elements(numbers.transpose([[*rows, *made].index(letter) for letter in result]))]


def _matrix(constant: np.ndarray, letters: str, taken: list[str], made: list[str], sizes) -> np.ndarray:
    """The constant as a weight [made..., taken...]; an axis that both have is on the diagonal."""
    kept = [letter for letter in letters if letter in made or letter in taken]
    constant = constant.sum(axis=tuple(at for at, letter in enumerate(letters) if letter not in kept))
    axes = list(dict.fromkeys([*made, *taken]))
    grid = dict(zip(axes, np.ix_(*(range(sizes[letter]) for letter in axes)), strict=True))
    weight = np.zeros([sizes[letter] for letter in (*made, *taken)], constant.dtype)
    weight[tuple(grid[letter] for letter in (*made, *taken))] = constant[tuple(grid[letter] for letter in kept)]
    return weight


def _equation(text: str, axes: list[int]) -> tuple[list[str], str]:
    """The letters of two inputs with some numbers of axes, and of the result, with ... written out."""
    left, arrow, result = text.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != 2:
        raise Cannot(f"its equation has {len(terms)} terms, wanted 2")
    free = [letter for letter in ascii_letters if letter not in text]
    missing = [max(0, n - len(term.replace("...", ""))) for n, term in zip(axes, terms, strict=True)]
    spread = "".join(free[: max(missing)])
    terms = [term.replace("...", spread[len(spread) - n :]) for n, term in zip(missing, terms, strict=True)]
    if not arrow:
        once = [letter for letter in sorted("".join(terms)) if "".join(terms).count(letter) == 1]
        result = "..." + "".join(letter for letter in once if letter not in spread)
    result = result.replace("...", spread)
    if any(len(set(term)) < len(term) for term in (*terms, result)) or list(map(len, terms)) != axes:
        raise Cannot(f"its equation {text!r:.80} is no product of two inputs axis by axis")
    return terms, result
