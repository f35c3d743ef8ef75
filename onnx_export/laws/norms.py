"""The table of norms and near misses: a numerator divided by a statistic over the normalised axes.

A new near miss that no pattern of validation/ meets is one row here and one specimen in the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations, permutations, product

import numpy as np

_MOST_APART = 3  # axes of more than one element, for a mean over others than the variance
Axes = tuple[int, ...]
Function = Callable[[np.ndarray, Axes], np.ndarray]


def mean(x: np.ndarray, axes: Axes) -> np.ndarray:
    """The mean over `axes`, which stay with length 1."""
    return np.mean(x, axis=axes, keepdims=True)


def itself(x: np.ndarray, _axes: Axes) -> np.ndarray:
    """x."""
    return x


def centred(x: np.ndarray, axes: Axes) -> np.ndarray:
    """x minus its mean."""
    return x - mean(x, axes)


def root_mean_square(x: np.ndarray, axes: Axes) -> np.ndarray:
    """sqrt(mean(x^2))."""
    return np.sqrt(mean(x * x, axes))


def deviation(x: np.ndarray, axes: Axes) -> np.ndarray:
    """sqrt(mean((x - mean)^2))."""
    return root_mean_square(centred(x, axes), axes)


def absolute_deviation(x: np.ndarray, axes: Axes) -> np.ndarray:
    """mean(|x - mean|)."""
    return mean(np.abs(centred(x, axes)), axes)


def of_power(exponent: int) -> Function:
    """sqrt(|mean((x - mean)^exponent)|)."""
    return lambda x, axes: np.sqrt(np.abs(mean(centred(x, axes) ** exponent, axes)))


def dropped(statistic: Function) -> Function:
    """A statistic without its axes, which broadcasting aligns with the last ones of x; NaN where they don't fit."""

    def function(x: np.ndarray, axes: Axes) -> np.ndarray:
        value = np.squeeze(statistic(x, axes), axes)
        fits = all(a in (1, b) for a, b in zip(value.shape[::-1], x.shape[::-1], strict=False))
        return value.reshape((1,) * (x.ndim - value.ndim) + value.shape) if fits else np.full((1,) * x.ndim, np.nan)

    return function


def shifted(x: np.ndarray, axes: Axes) -> np.ndarray:
    """x minus its mean along the wrong axis."""
    return x - dropped(mean)(x, axes)


@dataclass(frozen=True)
class Law:
    """y = scale * numerator(x) / statistic(x) + bias.

    Attributes
    ----------
    formula : {"layer", "rms"}
        The norm that it is, or resembles.
    numerator, statistic : callable
        Of x [any shape] and axes; the statistic broadcasts to x.
    words : str
        Why it is no norm; empty for a norm.
    error : bool
        Whether a near miss is certainly a mistake.
    """

    formula: str
    numerator: Function
    statistic: Function
    words: str = ""
    error: bool = False

    @cached_property
    def degree(self) -> float:
        """The power of k by which y is multiplied where x is; 0 for a norm."""
        x = np.arange(243.0).reshape(3, 3, 3, 3, 3) ** 1.5
        one, two = (np.abs(self.numerator(each, (1,)) / self.statistic(each, (1,))).max() for each in (x, 2 * x))
        return float(np.log2(two / one))

    @property
    def invariant(self) -> bool:
        """Whether 2 x gives the same as x."""
        return abs(self.degree) < 1e-6


_KEEPDIMS = "keepdims=0: the statistic broadcasts along the wrong axis"
_ABSOLUTE = "it divides by the mean absolute deviation, not by the standard deviation"
_MULTIPLIED = "it is multiplied by the deviation, not divided"
_NO_ROOT = "it divides by the variance, not by its root"
LAWS = (
    Law("layer", centred, deviation),
    Law("rms", itself, root_mean_square),
    Law("layer", itself, deviation, "x is divided by the deviation, not x - mean"),
    Law("rms", centred, root_mean_square, "the numerator is centred, the variance is not"),
    Law("layer", centred, absolute_deviation, _ABSOLUTE),
    Law("layer", centred, lambda x, axes: 1 / deviation(x, axes), _MULTIPLIED, error=True),
    Law("layer", centred, lambda x, axes: deviation(x, axes) ** 2, _NO_ROOT, error=True),
    Law("rms", itself, lambda x, axes: root_mean_square(x, axes) ** 2, "it is divided by the mean square", error=True),
    Law("layer", centred, of_power(3), "the exponent is 3, not 2", error=True),
    Law("layer", centred, of_power(4), "the exponent is 4, not 2", error=True),
    Law("layer", centred, dropped(deviation), _KEEPDIMS, error=True),
    Law("layer", shifted, lambda x, axes: root_mean_square(shifted(x, axes), axes), _KEEPDIMS, error=True),
    Law("layer", shifted, dropped(lambda x, a: root_mean_square(shifted(x, a), a)), _KEEPDIMS, error=True),
    Law("rms", itself, dropped(root_mean_square), _KEEPDIMS, error=True),
)

# Where eps stands, by what the file divides by, D, where the statistic is S: eps from (D, S), and D from (S, eps).
PLACES = {
    "": (lambda d, s: d * d - s * s, lambda s, e: np.sqrt(s * s + e)),
    "eps is added to the standard deviation": (lambda d, s: d - s, lambda s, e: s + e),
}


@lru_cache(maxsize=64)
def rows(shape: tuple[int, ...]) -> tuple[tuple[Law, Axes], ...]:
    """Every law over every axes, the fewest first; then those of a mean over other axes than the variance."""
    long = [axis for axis, size in enumerate(shape) if size > 1]
    subsets = [axes for count in range(1, len(long) + 1) for axes in combinations(long, count)]
    apart = permutations(subsets, 2) if len(long) <= _MOST_APART else ()
    return (*product(LAWS, subsets), *((_apart(of_mean, axes), axes) for of_mean, axes in apart))


def _apart(of_mean: Axes, axes: Axes) -> Law:
    def numerator(x: np.ndarray, _axes: Axes) -> np.ndarray:
        return centred(x, of_mean)

    def statistic(x: np.ndarray, axes: Axes) -> np.ndarray:
        return root_mean_square(centred(x, of_mean), axes)

    return Law("layer", numerator, statistic, f"the mean is over axes {of_mean}, the variance over {axes}", error=True)
