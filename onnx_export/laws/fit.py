"""Which law a value follows as a function of another: axes, scale, bias, eps and its place, floor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isclose

import numpy as np

from onnx_export.laws.norms import PLACES, Axes, Law, rows
from onnx_export.laws.probes import DOUBLE, LARGE, probes
from onnx_export.laws.rowwise import along_rows

MOST_AXES, MOST_ELEMENTS = 5, 2**16
_ROUNDINGS = 32  # of stored constants, such as 1/n, between x and y
_EXACT = 1e-9  # rounding in float64 of large probes, relative
_SMALLEST = 1e-30  # an eps below it makes no difference to float32
_LEAST_SEEN = 0.25  # of the elements, where a near miss is not a number for others


@dataclass(frozen=True)
class Fit:
    """The norm, or near miss, that a value is of another.

    Attributes
    ----------
    law : Law
        Its formula, and why it is no norm.
    axes : tuple of int
        Normalised axes, not negative.
    eps : float
        In units of the variance, or of the deviation if `place` says so; as measured, to about 8 digits.
    place : str
        Empty where eps is added to the variance; else where it is added.
    floor : float
        Smallest statistic (deviation or root mean square) that is divided by; 0 for none.
    scale, bias : ndarray
        [size of each normalised axis, 1 for others], or of all axes but the first that is not normalised; float64, as
        measured. A scale of one element is a factor.
    count : float
        What a sum over the axes is divided by, where that is not their size; 0 where it is.
    """

    law: Law
    axes: Axes
    eps: float
    place: str
    floor: float
    scale: np.ndarray
    bias: np.ndarray
    count: float = 0.0

    @property
    def words(self) -> str:
        """Why it is no norm, or not everywhere; empty for a norm."""
        if self.law.words or self.place:
            return self.law.words or self.place
        if self.count:
            return f"a sum is divided by {self.count:.6g}, not by the number of its terms"
        return f"the deviation is not allowed below {self.floor:.3g}" if self.floor else ""

    @property
    def factor(self) -> float | None:
        """The one number that all elements are multiplied by; None if there is a scale or a bias."""
        return float(self.scale.flat[0]) if self.scale.size == 1 and not self.bias.any() else None


class Source:
    """Probes of x, and what each law makes of them, which is computed once for all values that may follow one.

    Attributes
    ----------
    xs : list of ndarray
        As `probes.probes` makes them.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.xs = probes(shape)
        self._made: dict[tuple[Law, Axes], _Standardised | None] = {}

    def fit(self, ys: Sequence[np.ndarray], unit: float = 2.0**-24) -> Fit | None:
        """The first law of the table that values for the probes follow, over the fewest axes; None if they follow none.

        `unit` is the unit roundoff of the narrowest stored constant.
        """
        if any(y.shape != x.shape for x, y in zip(self.xs, ys, strict=True)):
            return None
        allowed = max(_EXACT, _ROUNDINGS * unit)
        y = np.stack(ys[:LARGE])
        seen = np.isfinite(y)
        if not seen.all():
            if np.mean(seen) < _LEAST_SEEN:
                return None
            y = np.where(seen, y, 0)
        with np.errstate(all="ignore"):
            doubled = np.where(seen[0], ys[DOUBLE], 0)
            invariant = bool(np.max(np.abs(doubled - y[0])) <= allowed * np.max(np.abs(y[0])))
            for law, axes in rows(self.xs[0].shape):
                if law.invariant != invariant or not (law.words or seen.all()):
                    continue
                made = self._standardised(law, axes)
                found = made.parameters(y, seen, allowed) if made else None
                if found is not None:
                    return _with_eps(law, axes, *found, self.xs[DOUBLE + 1 :], ys[DOUBLE + 1 :], allowed)
            near = along_rows(np.stack(self.xs[:LARGE]), y, ys[DOUBLE], allowed) if seen.all() else None
            one = np.ones((1,) * self.xs[0].ndim)
            return near and Fit(*near, 0.0, "", 0.0, one, 0 * one)

    def _standardised(self, law: Law, axes: Axes) -> _Standardised | None:
        key = law, axes
        if key not in self._made:
            h = np.stack([law.numerator(x, axes) / law.statistic(x, axes) for x in self.xs[:LARGE]])
            self._made[key] = _Standardised(law, axes, h) if np.isfinite(h).all() else None
        return self._made[key]


class _Standardised:
    """numerator / statistic of a law on the large probes, [probes, shape], and its moments along the rows."""

    def __init__(self, law: Law, axes: Axes, h: np.ndarray) -> None:
        self.h, one = h, np.ones((1,) * (h.ndim - 1))
        self.factor_only = one, 0 * one
        rows = (0, *(axis + 1 for axis in range(h.ndim - 1) if axis not in axes))
        # a parameter of each element of a row; of each channel, too, for a norm of groups or of single channels
        self.ways = [_Affine(h, rows)] + [_Affine(h, rows[:2])] * (not law.words and len(rows) > 2)

    def parameters(self, y: np.ndarray, seen: np.ndarray, allowed: float) -> tuple[np.ndarray, np.ndarray] | None:
        """(scale, bias) with which y [probes, shape] follows: one factor, else one of each along the row."""
        limit = allowed * float(np.max(np.abs(y)))
        if not limit:
            return None
        h = self.h * seen
        factor = np.sum(y * h) / np.sum(h * h)
        if np.max(np.abs(y - factor * h)) <= limit:
            one, none = self.factor_only
            return factor * one, none
        found = (way.parameters(h, y, limit) for way in self.ways if seen.all())
        return next((each for each in found if each), None)


class _Affine:
    """Regression of y on h [probes, shape], with a scale and a bias of each element along other axes than `rows`."""

    def __init__(self, h: np.ndarray, rows: tuple[int, ...]) -> None:
        self.rows, self.middle = rows, np.mean(h, axis=rows, keepdims=True)
        self.apart = h - self.middle
        self.spread = np.sum(self.apart**2, axis=rows, keepdims=True)

    def parameters(self, h: np.ndarray, y: np.ndarray, limit: float) -> tuple[np.ndarray, np.ndarray] | None:
        centre = np.mean(y, axis=self.rows, keepdims=True)
        scale = np.sum(self.apart * (y - centre), axis=self.rows, keepdims=True) / self.spread
        bias = centre - scale * self.middle
        largest = np.max(np.abs(y))
        if not np.max(np.abs(y - scale * h - bias)) <= limit or np.max(np.abs(scale)) <= 1e-9 * largest:
            return None
        return scale[0], 0 * bias[0] if np.max(np.abs(bias)) <= _EXACT * largest else bias[0]


def _with_eps(law: Law, axes: Axes, scale, bias, xs, ys, allowed: float) -> Fit | None:
    """The law with the eps that small probes show, or a floor; None if what is divided by fits neither."""
    if law.words:  # its divisor is another one, and its eps does not matter
        return Fit(law, axes, 0.0, "", 0.0, scale, bias)
    if scale.size == 1 and abs(float(scale.flat[0]) - 1) <= 10 * _EXACT:
        scale = np.ones_like(scale)  # not 1 less what eps makes of large rows
    statistics, divisors = [], []
    for x, y in zip(xs, ys, strict=True):
        s = law.statistic(x, axes)
        reference = scale * law.numerator(x, axes) / s
        rate = np.sum((y - bias) * reference, axis=axes, keepdims=True)
        statistics.append(s)
        divisors.append(s * np.sum(reference * reference, axis=axes, keepdims=True) / rate)
    (wide, narrow, tiny), (over, under, least) = statistics, divisors
    if not np.isfinite(under).any():  # roots of negative numbers
        narrow, under = wide, over
    blurred = 1e-6 if bias.any() else 1e-9  # the bias is measured, too
    for place, (eps_of, divisor) in PLACES.items():
        eps = float(np.median(eps_of(under, narrow)))
        eps = 0.0 if abs(eps) <= max(allowed * float(np.max(narrow)) ** (1 if place else 2), _SMALLEST) else eps
        fitting = all(
            np.max(np.abs(d / divisor(s, eps) - 1)) <= max(allowed, blurred) * 8
            for s, d in ((wide, over), (narrow, under))
        )
        if fitting:
            floor = 0.0
            if eps > 0 and not bias.any():  # of which tiny rows leave all digits
                exact = float(np.median(eps_of(least, tiny)))
                eps = exact if isclose(exact, eps, rel_tol=1e-4) else eps
            if not bias.any() and eps == 0:
                below = float(np.median(least))
                held = np.max(np.abs(least - below)) <= 1e-6 * below and below > 2 * float(np.max(tiny))
                floor = below if held else 0.0
            return Fit(law, axes, eps, place, floor, scale, bias)
    low = float(np.median(under))
    clamped = low > 0 and np.max(np.abs(under - np.maximum(narrow, low))) <= 1e-6 * low
    return Fit(law, axes, 0.0, "", low, scale, bias) if clamped else None
