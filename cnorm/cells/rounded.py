"""Layers whose matrices are rounded to int8 or float16: the rounded rows, which are packed and stored in the file.

The rows of a matrix are in the layout of the kernels: [outputs, inputs], gates in the kernels' order, less the mean
over each group of gates that one layer norm covers. A rounded layer's `weights` are the checkpoint's tensors filled
with the values of these rows, in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral

import numpy as np

from cnorm import _core
from cnorm.cells.specs import GATES
from cnorm.cells.tensors import axis_length, has_projection
from cnorm.cells.weights import parts_of

__all__ = [
    "SMALLEST",
    "WEIGHT_TYPES",
    "Matrix",
    "Rows",
    "cell_weights",
    "check_weights",
    "is_matrix",
    "rounded_layers",
    "rows_from_tensors",
    "weight_type",
]

WEIGHT_TYPES = {"float32": np.float32, "float16": np.float16, "int8": np.int8}
SMALLEST = 1 << 15  # with fewer weights in a model, reading fewer bytes saves little time
LEVELS = (
    8191  # the largest |q| of an input that an int8 matrix is multiplied with: CNORM_INT8_LEVELS of int8/backends.h
)
MATRICES = ("weight_x", "weight_h", "weight_n", "weight_p")


@dataclass(frozen=True)
class Rows:
    """A rounded matrix, as it is packed.

    Attributes
    ----------
    rows : ndarray [outputs, inputs], int8, float16 or float32
    scales : ndarray [outputs], float32
        For int8: weight[r, k] = scales[r] rows[r, k]. None for the other types.
    """

    rows: np.ndarray
    scales: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of rows and scales."""
        return self.rows.nbytes + (0 if self.scales is None else self.scales.nbytes)

    @property
    def levels(self) -> int:
        """For int8: the largest |q| of an input, such that the sum of any row fits int32."""
        largest = int(np.abs(self.rows.astype(np.int64)).sum(axis=1).max())
        return min(LEVELS, (2**31 - 1) // max(largest, 1))

    def values(self) -> np.ndarray:
        """The values of the matrix [outputs, inputs], float32."""
        if self.scales is None:
            return self.rows.astype(np.float32)
        return self.rows.astype(np.float32) * self.scales[:, None]


def check_weights(weights: str, smallest: int | None) -> None:
    """The arguments of `Model.with_weights`."""
    if weights not in WEIGHT_TYPES:
        raise ValueError(f"weights must be one of {', '.join(WEIGHT_TYPES)}, got {weights!r}")
    if smallest is not None and (not isinstance(smallest, Integral) or smallest < 0):
        raise ValueError(f"smallest must be an integer of at least 0, got {smallest!r}")


def rounded_layers(layers, weights: str, smallest: int | None) -> list:
    """The layers of a model, see `Model.with_weights`; ValueError where no matrix would be rounded."""
    leaves = [leaf for layer in layers for _, leaf in layer.leaves("")]
    total = sum(matrix.values.size for leaf in leaves for matrix in leaf.matrices().values())
    if smallest is None and total < SMALLEST:
        raise ValueError(
            f"the model's matrices have {total} weights, fewer than {SMALLEST}: rounded to {weights} they would save "
            "little time; smallest=1 (in a command --smallest 1) rounds them all the same"
        )
    rounded = [rounded_layer(layer, weights, smallest or 0) for layer in layers]
    if weight_type(rounded) == "float32":
        most = f" and at most {_core.INT8_COLS} inputs" if weights == "int8" else ""
        raise ValueError(f"no matrix has at least {smallest or 1} weights{most}, so none can be rounded to {weights}")
    return rounded


def rounded_layer(layer, weights: str, smallest: int):
    """The layer with its matrices of at least `smallest` weights rounded to a type; the layer itself if it has none."""
    if inner := layer.inner():
        new = {name: rounded_layer(one, weights, smallest) for name, one in inner.items()}
        same = all(new[name] is one for name, one in inner.items())
        return layer if same else layer.with_inner(new)
    found = layer.matrices()
    types = {name: _type_of(matrix.values.shape, weights, smallest) for name, matrix in found.items()}
    if all(dtype == np.float32 for dtype in types.values()):
        return layer
    rows = {}
    for name, matrix in found.items():
        try:
            rows[name] = matrix.rounded(types[name])
        except ValueError as error:
            largest = np.abs(matrix.values).max()
            raise ValueError(
                f"{name} of {layer!r} can't be rounded to {weights}, its largest weight is {largest:g}: {error}"
            ) from None
    return layer.with_rows(rows)


@dataclass(frozen=True)
class Matrix:
    """A matrix of a float32 layer as it is packed, before it is centred and rounded.

    Attributes
    ----------
    values : ndarray [gates * units, inputs], float32
    gates, group : int
        One layer norm covers the rows of `group` gates; none does if it is 0.
    """

    values: np.ndarray
    gates: int = 1
    group: int = 0

    def rounded(self, dtype) -> Rows:
        """Its rows, centred and rounded; ValueError if one is beyond the type's range."""
        return Rows(*_core.round_matrix(self.values, self.gates, self.group, dtype))

    def given(self, rounded: Rows | None) -> tuple:
        """(w, rows, scales, gates, group), as `_core.Network` packs it: `rounded` if it is not None."""
        rows = scales = None
        if rounded is not None:
            rows = np.ascontiguousarray(rounded.rows)
            if rows.shape != self.values.shape:
                raise ValueError(f"rows must have the shape {self.values.shape}, got {rows.shape}")
            if rows.dtype == np.int8:
                scales = np.ascontiguousarray(rounded.scales, np.float32)
                if scales.shape != (len(rows),):
                    raise ValueError(f"scales must have the shape ({len(rows)},), got {scales.shape}")
        return self.values, rows, scales, self.gates, self.group


def _type_of(shape: tuple[int, int], weights: str, smallest: int) -> type:
    """The type that a matrix of this shape is rounded to."""
    if shape[0] * shape[1] < smallest or (weights == "int8" and shape[1] > _core.INT8_COLS):
        return np.float32
    return WEIGHT_TYPES[weights]


def weight_type(layers) -> str:
    """The narrowest type among all matrices, by name."""
    types = {rows.rows.dtype.type for layer in layers for rows in layer.all_rows()}
    return next((name for name in ("int8", "float16") if WEIGHT_TYPES[name] in types), "float32")


def is_matrix(tensor) -> bool:
    """Whether a tensor of a checkpoint holds one or several matrices."""
    return any(use.part in MATRICES for use in tensor.uses())


def cell_weights(spec, tensors, rows: Mapping[str, Rows], others: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of a cell as in a checkpoint: `others`, and its matrices filled with the values of `rows`.

    Raises
    ------
    ValueError
        If a matrix is missing, or the matrices do not fit one another.
    """
    before = spec.kind == "GRU" and spec.reset == "before"
    order, needed = GATES[spec.kind], {"weight_x", "weight_h"} | ({"weight_n"} if before else set())
    if not needed <= rows.keys() or not rows.keys() <= needed | {"weight_p"}:
        raise ValueError(f"the matrices of {spec.kind} {spec.name} must be {sorted(needed)}, got {sorted(rows)}")
    units, inputs = len(rows["weight_x"].rows) // len(order), rows["weight_x"].rows.shape[1]
    sizes = {"": 1, "H": units, "I": inputs, "P": rows["weight_h"].rows.shape[1]}
    parts = {("weight_p", ""): rows["weight_p"].values()} if "weight_p" in rows else {}
    of_h = [rows[name].values() for name in ("weight_h", "weight_n") if name in rows]
    for name, values in {"weight_x": rows["weight_x"].values(), "weight_h": np.concatenate(of_h)}.items():
        if len(values) != len(order) * units:
            raise ValueError(f"{name} must have {len(order) * units} rows, got {len(values)}")
        parts |= {(name, gate): part for gate, part in zip(order, np.split(values, len(order)), strict=True)}
    filled = dict(others)
    for tensor in tensors:
        if is_matrix(tensor) and ("weight_p" in rows or not has_projection([tensor])):
            named = tensor if "weight_p" in rows else tensor.without_projection()
            filled[tensor.name] = _filled(named, parts, sizes)
    return filled


def _filled(tensor, parts: Mapping[tuple[str, str], np.ndarray], sizes: Mapping[str, int]) -> np.ndarray:
    """One tensor of a checkpoint, its pieces filled with the parts by (part, gate)."""
    array = np.zeros([axis_length(axis, sizes) for axis in tensor.axes], np.float32)
    for (name, gate), target in parts_of([tensor], {tensor.name: array}, sizes).items():
        if target.shape != (part := parts[name, gate]).shape:
            raise ValueError(f"{name} must have {target.shape} values for a gate, got {part.shape}")
        target[...] = part
    return array


def rows_from_tensors(tensors: Mapping[str, np.ndarray], names) -> dict[str, Rows]:
    """The matrices of a file, from its tensors ``rows.<name>`` and ``rows.<name>.scales``; both may be untrusted."""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"rows must be a list of names, got {str(names)[:200]}")
    found = {}
    for name in names:
        rows, scales = tensors.get(f"rows.{name}"), tensors.get(f"rows.{name}.scales")
        if rows is None or rows.ndim != 2 or rows.size == 0 or rows.dtype not in (np.int8, np.float16, np.float32):
            got = "none" if rows is None else f"{rows.dtype} {rows.shape}"
            raise ValueError(f"rows.{name} must be a matrix of int8, float16 or float32, got {got}")
        quantized = rows.dtype == np.int8
        if quantized != (scales is not None):
            raise ValueError(f"rows.{name}.scales must be there for int8 rows and for no others")
        if quantized and (scales.dtype != np.float32 or scales.shape != rows.shape[:1]):
            raise ValueError(
                f"rows.{name}.scales must be float32 of {rows.shape[:1]}, got {scales.dtype} {scales.shape}"
            )
        if quantized and not (np.isfinite(scales).all() and (scales > 0).all() and (rows > -128).all()):
            raise ValueError(f"rows.{name} must lie within +-127 and its scales be positive and finite")
        if not quantized and not np.isfinite(rows).all():
            raise ValueError(f"rows.{name} must be finite, got NaN or infinity")
        found[name] = Rows(rows, scales)
    return found
