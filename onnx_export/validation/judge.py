"""Errors of one norm on one input, measured against float64, and the bound that they must not exceed.

Two float64 results are computed from the input that the norm had in the run (tapped values):

- C, the claim: the formula of the norm (`JudgedRows.claim`);
- G, the graph: the file's own nodes, evaluated in float64 (`Oracle.graph_result`).

If G differs from C, the file is wrong; if the runtime's result differs from G, the runtime is. The bound is

    B = 8 u (sqrt(n) + max|x| / sqrt(var + eps)) max|scale|  +  half an ulp of the result

where u is the unit roundoff of the dtype of the statistics, n the row length, var the centred variance and eps as
stored in the file. B covers the error that every plain two-pass kernel makes when it rounds the mean to that dtype.
Each later rounding to another type adds u (|xhat scale| + |y|), with the u of that type: |xhat scale| + |y| bounds
every intermediate value. `JudgedRows.sequential` is the additional error of kernels that sum a row sequentially.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from onnx import TensorProto, helper

from onnx_export.float64 import Float64
from onnx_export.graph.scope import Scope, attribute, unit_roundoff
from onnx_export.validation.norm import Norm
from onnx_export.validation.values import unit_of

FACTOR = 8.0
# Times the root of the sum of squared error bounds: by Hoeffding's inequality, a sum of independent errors is larger
# with a probability of at most 2 exp(-6^2 / 2) = 3e-8.
_DEVIATIONS = 6.0
_MOST_POINTS = 200
# Smallest subnormals: the absolute error of a rounding near 0.
_SMALLEST = {TensorProto.FLOAT16: 2.0**-24, TensorProto.BFLOAT16: 2.0**-133}


@dataclass
class JudgedRows:
    """The claimed result C for some rows, and the quantities of the bound. Arrays broadcast against the result.

    Attributes
    ----------
    n : int
        Elements in a row.
    largest : ndarray
        max|x| of each row.
    mean : ndarray
        |mean| of each row.
    variance : ndarray
        Centred variance of each row; for RMS norms the mean square.
    eps : float
    claim : ndarray
        C, the result by the formula.
    scaled : ndarray
        C without the bias: xhat * scale.
    scale : float
        max|scale|, 1 for a norm without a scale.
    """

    n: int
    largest: np.ndarray
    mean: np.ndarray
    variance: np.ndarray
    eps: float
    claim: np.ndarray
    scaled: np.ndarray
    scale: float

    @property
    def conditioning(self) -> np.ndarray:
        """max|x| / sqrt(var + eps) of each row: its largest element in standard deviations."""
        with np.errstate(all="ignore"):
            return self.largest / np.sqrt(self.variance + self.eps)

    def rounding(self, unit: float) -> np.ndarray:
        """The first term of B for this unit roundoff, without the half ulp of the result."""
        return FACTOR * unit * (np.sqrt(self.n) + self.conditioning) * self.scale

    def sequential(self, unit: float) -> np.ndarray:
        """Error, beyond B, of a kernel that adds the elements of a row one after another.

        The partial sum of k elements is at most k max|x| and is rounded by at most u times that. Taken as independent
        (Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019), these errors add up to at
        most 6 u max|x| sqrt(1 + 4 + ... + n^2), so that the mean is off by 6 u sqrt(n / 3) max|x|. The partial sums of
        squares are at most n var, so that the variance is off by 6 u sqrt(n) var and its root by half of that.
        """
        with np.errstate(all="ignore"):
            mean = np.sqrt(self.n / 3) * self.conditioning * self.scale
            return _DEVIATIONS * unit * (mean + 0.5 * np.sqrt(self.n) * np.abs(self.scaled))


@dataclass
class Measure:
    """Error and bound at the element whose ratio error / bound is largest.

    Attributes
    ----------
    error, bound : float
    ratio : float
        Error over bound; infinite if the result is NaN where the float64 result is finite.
    points : list of (float, float)
        (conditioning, ratio) of rows, for the plot.
    judged : int
        Number of elements compared; `compare` says which are left out.
    """

    error: float = 0.0
    bound: float = 0.0
    ratio: float = 0.0
    points: list[tuple[float, float]] = field(default_factory=list)
    judged: int = 0


class Oracle:
    """The float64 results C (claim) and G (graph) for one norm, and errors against them.

    Parameters
    ----------
    norm : Norm
    part : onnx.ModelProto
        The norm's nodes as a model of their own, whose inputs are the values that enter these nodes.
    """

    def __init__(self, norm: Norm, part) -> None:
        self.norm = norm
        self._graph = Float64(part)
        self._scope: Scope = norm.scope

    def graph_result(self, feeds: dict[str, np.ndarray]) -> np.ndarray:
        """G: the result of the file's nodes in float64."""
        return np.asarray(self._graph.run(feeds)[self.norm.y], np.float64)

    def rows(self, feeds: dict[str, np.ndarray]) -> JudgedRows:
        """C, with the quantities of the bound."""
        norm, node = self.norm, self.norm.nodes[0]

        def value(name):
            return feeds[name] if name in feeds else self._scope.constant(name)

        x = norm.operator.rows(node, value) if norm.operator else np.asarray(value(norm.x)).astype(np.float64)
        done = norm.formula.apply(x, norm.axes, norm.eps, node)
        scale, bias = (
            None if name == "" or value(name) is None else np.asarray(value(name)).astype(np.float64)
            for name in (norm.scale, norm.bias)
        )
        top = norm.shrink
        if scale is not None:
            top *= float(np.max(np.abs(scale), where=np.isfinite(scale), initial=0.0))
        xhat = done.xhat * norm.shrink
        scaled = xhat if scale is None else xhat * norm.formula.broadcast_parameter(scale, x)
        claim = scaled if bias is None else scaled + norm.formula.broadcast_parameter(bias, x)
        return JudgedRows(done.n, done.largest, done.mean, done.variance, norm.eps, claim, scaled, top)

    def file_error(self, feeds: dict[str, np.ndarray]) -> Measure:
        """G against C. Above a ratio of 1 the file computes another function: float64 and a stored 1/n round less."""
        return self.equality(feeds, self.rows(feeds).claim)

    def equality(self, feeds: dict[str, np.ndarray], other: np.ndarray) -> Measure:
        """G against another float64 result; the bound is the rounding of float64 and of a stored 1/n."""
        rows, own = self.rows(feeds), self.graph_result(feeds)
        unit = self._stored_unit if self.norm.stored_reciprocal else 2.0**-53
        bound = rows.rounding(unit)
        if self.norm.variance == "one-pass":  # E[x^2] - E[x]^2 cancels: the error grows with its square
            bound = bound * (1 + rows.conditioning)
        if own.shape != other.shape:
            return Measure(np.inf, 0.0, np.inf)
        return compare(own, other, bound + 2.0**-51 * np.abs(other), rows)

    @cached_property
    def _stored_unit(self) -> float:
        """Unit roundoff of a stored 1/n: of the type of x, or of a narrower one that it had before an optimiser."""
        stored = [self._scope.constant(name) for node in self.norm.nodes for name in node.input]
        equal = [value for value in stored if value is not None and value.size and (value == value.flat[0]).all()]
        units = [unit_of(value) for value in equal]
        factors = [2.0**-24 for node in self.norm.nodes if attribute(node, "alpha", 1.0) != 1]
        return max([unit_roundoff(self._scope.dtype(self.norm.x)), *units, *factors])

    def carried(self, feeds: dict[str, np.ndarray]) -> np.ndarray | float:
        """Allowed difference if the runtime kept x in a wider type and never rounded it to its half type.

        The tapped x is rounded, so the two x differ by up to u|x|. This changes (x - mean) / std by at most
        u conditioning (1 + 1 + |xhat|): 1 for x, 1 for the mean, and |xhat| for the standard deviation, since the
        mean of |xhat| is at most 1. Zero for float32 and float64.
        """
        unit = unit_roundoff(self._scope.dtype(self.norm.x))
        if unit <= unit_roundoff(TensorProto.FLOAT):
            return 0.0
        return _of_rounded_rows(self.rows(feeds), unit)

    def sequential(self, rows: JudgedRows) -> np.ndarray:
        """`JudgedRows.sequential` in the precision of the statistics."""
        return np.nan_to_num(rows.sequential(unit_roundoff(self.norm.compute_dtype)), posinf=0.0)

    def claim_error(self, rows: JudgedRows, y: np.ndarray, allowed: np.ndarray | float = 0.0) -> Measure:
        """The runtime's result against C. `allowed` is added to the bound."""
        return self._against(rows, rows.claim, y, allowed)

    def runtime_error(self, feeds: dict[str, np.ndarray], y: np.ndarray, allowed: np.ndarray | float = 0.0) -> Measure:
        """The runtime's result against G. `allowed` is added to the bound."""
        return self._against(self.rows(feeds), self.graph_result(feeds), y, allowed)

    def _against(self, rows: JudgedRows, oracle: np.ndarray, y: np.ndarray, allowed: np.ndarray | float) -> Measure:
        if y.shape != oracle.shape:
            return Measure(np.inf, 0.0, np.inf)
        bound = rows.rounding(unit_roundoff(self.norm.compute_dtype)) * self._size(rows, oracle) + allowed
        bound = bound + 0.5 * _ulp(oracle, self._scope.dtype(self.norm.y), y.dtype)
        within = np.abs(rows.scaled) + np.abs(rows.claim)  # bounds every value between xhat * scale and y
        for dtype in self._roundings():
            bound = bound + unit_roundoff(dtype) * within + _SMALLEST.get(dtype, 0.0)
        bound = bound + _of_rounded_rows(rows, self._input_unit)
        return compare(y.astype(np.float64), oracle, bound, rows, _largest(y.dtype))

    def _size(self, rows: JudgedRows, oracle: np.ndarray) -> float:
        """For near misses, how many times larger than C the result is, and so its rounding errors; else 1."""
        if not self.norm.near_miss:
            return 1.0
        with np.errstate(all="ignore"):
            sizes = [np.abs(oracle - (rows.claim - rows.scaled)), np.abs(rows.scaled)]
            own, norm = (float(np.max(size, where=np.isfinite(size), initial=0.0)) for size in sizes)
        return max(1.0, own / norm) if norm > 0 else 1.0

    @cached_property
    def _input_unit(self) -> float:
        """Unit roundoff of a type to which the nodes round x before statistics in a wider one; 0 for none."""
        scope, norm = self._scope, self.norm
        casts = [node for node in norm.nodes if node.op_type == "Cast"]
        moved = {norm.x}
        for node in casts * len(casts):
            moved |= set(node.output) if node.input[0] in moved else set()
        units = [unit_roundoff(scope.dtype(node.output[0])) for node in casts if node.output[0] in moved]
        widest = max([0.0, *units])
        return widest if widest > unit_roundoff(norm.compute_dtype) else 0.0

    def _roundings(self) -> list[int]:
        """Types of the roundings after the statistics that the first term of B does not cover.

        These are roundings to types narrower than that of the statistics, and, in a folded norm, the rounding of
        `bias - mean * f`, which is large where the bias is.
        """
        norm, scope = self.norm, self._scope
        unit = unit_roundoff(norm.compute_dtype)
        types = [scope.dtype(node.output[0]) for node in norm.nodes if norm.y not in node.output]
        return [t for t in types if unit_roundoff(t) > unit] + norm.folded * [scope.dtype(norm.y)]


def _of_rounded_rows(rows: JudgedRows, unit: float) -> np.ndarray:
    """The effect of rounding x, see `Oracle.carried`."""
    with np.errstate(all="ignore"):
        return np.nan_to_num(unit * rows.conditioning * (2 * rows.scale + np.abs(rows.scaled)), posinf=0.0)


def compare(y: np.ndarray, oracle: np.ndarray, bound, rows: JudgedRows, overflow: float = np.inf) -> Measure:
    """Largest |y - oracle| / bound over the elements, `oracle` being the float64 result.

    Left out are elements where the oracle is not finite or larger than `overflow` (the largest number of the result's
    type), rows that hold NaN or Inf, and rows whose variance and eps are both 0, for which the formula gives 0/0.
    """
    with np.errstate(all="ignore"):
        error = np.abs(y - oracle)
        judged = np.isfinite(oracle) & (np.abs(oracle) <= overflow)
        judged &= np.isfinite(rows.largest) & (rows.variance + rows.eps > 0)
        bound = np.broadcast_to(np.asarray(bound, np.float64), error.shape)
        ratio = np.where(np.isnan(error), np.inf, error / np.maximum(bound, np.finfo(float).tiny))
        ratio = np.where(judged, ratio, 0.0)
    if not ratio.size:
        return Measure()
    at = np.unravel_index(np.argmax(ratio), ratio.shape)
    return Measure(
        float(error[at]) if judged[at] else 0.0,
        float(bound[at]),
        float(ratio[at]),
        _points(rows.conditioning, ratio),
        int(np.sum(judged)),
    )


def worst(measures: Iterable[Measure]) -> Measure:
    """The measure with the largest ratio; its points and count are those of all measures together."""
    measures = list(measures)
    found = max(measures, key=lambda m: m.ratio, default=Measure())
    points = [point for m in measures for point in m.points][:_MOST_POINTS]
    return replace(found, points=points, judged=sum(m.judged for m in measures))


def allowed_change(one: np.ndarray, other: np.ndarray) -> float:
    """4 times (a safety margin) the largest difference between two results, over the elements where it is finite."""
    with np.errstate(all="ignore"):
        change = np.abs(one.astype(np.float64) - other) if one.shape == other.shape else np.zeros(1)
    return 4 * float(np.max(change, where=np.isfinite(change), initial=0.0))


def _points(conditioning: np.ndarray, ratio: np.ndarray, most: int = 24) -> list[tuple[float, float]]:
    """(conditioning, largest ratio) of each row, reduced to `most` points: the worst of each group of similar rows."""
    conditioning = conditioning.reshape((1,) * (ratio.ndim - conditioning.ndim) + conditioning.shape)
    within = tuple(axis for axis in range(ratio.ndim) if conditioning.shape[axis] == 1)
    highest = np.max(ratio, axis=within, keepdims=True).ravel()
    order = np.argsort(conditioning, axis=None)
    points = []
    for group in np.array_split(order, min(most, order.size)):
        index = group[np.argmax(highest[group])]
        if np.isfinite(conditioning.ravel()[index]):
            points.append((float(conditioning.ravel()[index]), float(highest[index])))
    return points


def _ulp(y: np.ndarray, dtype: int, array: np.dtype) -> np.ndarray:
    if dtype == TensorProto.BFLOAT16:  # held in a float32 array
        return np.abs(y) * 2.0**-7 + 2.0**-133
    kind = array if array.kind == "f" else np.dtype(np.float32)
    with np.errstate(all="ignore"):
        return np.abs(np.spacing(np.abs(y).astype(kind))).astype(np.float64)


def _largest(dtype: np.dtype) -> float:
    return float(np.finfo(dtype).max) if dtype.kind == "f" else np.inf


def type_name(dtype: int) -> str:
    """float32 for TensorProto.FLOAT and so on."""
    known = dtype in helper.get_all_tensor_dtypes() and dtype != TensorProto.UNDEFINED
    return helper.tensor_dtype_to_np_dtype(dtype).name if known else "unknown"
