"""Which law a value follows as a function of another: axes, scale, bias, eps and its place, floor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from onnx_export.laws.norms import LAWS, PLACES, Axes, Law
from onnx_export.laws.probes import LARGE, probes

_MOST_AXES, _MOST_ELEMENTS = 5, 2**16
_ROUNDINGS = 32  # of stored constants, such as 1/n, between x and y
_EXACT = 1e-9  # rounding in float64 of large probes, relative
_SMALLEST = 1e-30  # an eps below it makes no difference to float32


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
        [size of each normalised axis, 1 for others], float64, as measured; a scale of one element is a factor.
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


def what_norm(function: Callable[[list[np.ndarray]], Sequence[np.ndarray]], shape: tuple[int, ...], unit=2.0**-24):
    """The norm that a function computes, by its results on a few probes.

    Parameters
    ----------
    function : callable
        Given a list of float64 arrays [shape], returns as many results. It decides what it costs; it is called once.
    shape : tuple of int
        Of x and y, of at most 5 axes and 65536 elements.
    unit : float
        Unit roundoff of the narrowest stored constant.

    Returns
    -------
    Fit or None
        None where no law fits, or a result is not finite or of another shape.
    """
    if not 0 < len(shape) <= _MOST_AXES or not 2 <= np.prod(shape) <= _MOST_ELEMENTS:
        return None
    xs = probes(shape)
    return fit(xs, list(function(xs)), unit)


def fit(xs: Sequence[np.ndarray], ys: Sequence[np.ndarray], unit: float = 2.0**-24) -> Fit | None:
    """The first law of the table that values follow, over the fewest axes; None if they follow none.

    Parameters
    ----------
    xs : sequence of ndarray
        As `probes.probes` makes them.
    ys : sequence of ndarray
        The values for them.
    unit : float
        Unit roundoff of the narrowest stored constant.
    """
    if any(y.shape != x.shape or not np.isfinite(y).all() for x, y in zip(xs, ys, strict=True)):
        return None
    allowed = max(_EXACT, _ROUNDINGS * unit)
    with np.errstate(all="ignore"):
        for law in LAWS:
            for axes in _subsets(xs[0].shape):
                found = _parameters(law, axes, xs[:LARGE], ys[:LARGE], allowed)
                if found is not None:
                    return _with_eps(law, axes, *found, xs[LARGE:], ys[LARGE:], allowed)
    return None


def _subsets(shape: tuple[int, ...]) -> Iterator[Axes]:
    long = [axis for axis, size in enumerate(shape) if size > 1]
    for count in range(1, len(long) + 1):
        yield from combinations(long, count)


def _parameters(law: Law, axes: Axes, xs, ys, allowed: float) -> tuple[np.ndarray, np.ndarray] | None:
    """(scale, bias) with which all large probes follow a law: one factor, else one of each along the row."""
    h = np.stack([law.numerator(x, axes) / law.statistic(x, axes) for x in xs])
    y = np.stack(ys)
    limit = allowed * float(np.max(np.abs(y)))
    if not limit or not np.isfinite(h).all():
        return None
    ones = (1,) * (h.ndim - 1)
    factor = np.sum(y * h) / np.sum(h * h)
    if np.max(np.abs(y - factor * h)) <= limit:
        return np.full(ones, factor), np.zeros(ones)
    rows = (0, *(axis + 1 for axis in range(h.ndim - 1) if axis not in axes))
    middle, centre = (np.mean(each, axis=rows, keepdims=True) for each in (h, y))
    spread = np.sum((h - middle) ** 2, axis=rows, keepdims=True)
    scale = np.sum((h - middle) * (y - centre), axis=rows, keepdims=True) / spread
    bias = centre - scale * middle
    if not np.max(np.abs(y - scale * h - bias)) <= limit or np.max(np.abs(scale)) <= 1e-9 * np.max(np.abs(y)):
        return None
    noise = np.max(np.abs(bias)) <= _EXACT * np.max(np.abs(y))
    return scale[0], 0 * bias[0] if noise else bias[0]


def _with_eps(law: Law, axes: Axes, scale, bias, xs, ys, allowed: float) -> Fit | None:
    """The law with the eps that small probes show, or a floor; None if what is divided by fits neither."""
    statistics, divisors, weights = [], [], []
    for x, y in zip(xs, ys, strict=True):
        s = law.statistic(x, axes)
        reference = scale * law.numerator(x, axes) / s
        rate = np.sum((y - bias) * reference, axis=axes, keepdims=True)
        rate = rate / np.sum(reference * reference, axis=axes, keepdims=True)
        statistics.append(s)
        divisors.append(s / rate)
        weights.append(rate)
    if law.words:  # its divisor is another one, and its eps does not matter
        return Fit(law, axes, 0.0, "", 0.0, scale, bias)
    (wide, narrow, tiny), (over, under, least) = statistics, divisors
    blurred = 1e-6 if bias.any() else 1e-9  # the bias is measured, too
    for place, (eps_of, divisor) in PLACES.items():
        eps = float(np.median(eps_of(under, narrow)))
        eps = 0.0 if abs(eps) <= max(allowed * float(np.max(narrow)) ** (1 if place else 2), _SMALLEST) else eps
        fitting = all(
            np.max(np.abs(d / divisor(s, eps) - 1)) <= max(allowed, blurred) * 8
            for s, d in ((wide, over), (narrow, under))
        )
        if eps >= 0 and fitting:
            floor = 0.0
            if not bias.any() and eps == 0:
                below = float(np.median(least))
                held = np.max(np.abs(least - below)) <= 1e-6 * below and below > 2 * float(np.max(tiny))
                floor = below if held else 0.0
            return Fit(law, axes, eps, place, floor, scale, bias)
    low = float(np.median(under))
    clamped = low > 0 and np.max(np.abs(under - np.maximum(narrow, low))) <= 1e-6 * low
    return Fit(law, axes, 0.0, "", low, scale, bias) if clamped else None
