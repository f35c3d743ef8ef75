"""The table of norms and near misses: a numerator divided by a statistic over the normalised axes.

A new near miss is one row here and one specimen in the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Axes = tuple[int, ...]


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


def of_power(exponent: int) -> Callable[[np.ndarray, Axes], np.ndarray]:
    """sqrt(|mean((x - mean)^exponent)|)."""
    return lambda x, axes: np.sqrt(np.abs(mean(centred(x, axes) ** exponent, axes)))


@dataclass(frozen=True)
class Law:
    """y = scale * numerator(x) / statistic(x) + bias.

    Attributes
    ----------
    formula : {"layer", "rms"}
        The norm that it is, or resembles.
    numerator, statistic : callable
        Of x [any shape] and axes; the statistic keeps the axes with length 1.
    words : str
        Why it is no norm; empty for a norm.
    error : bool
        Whether a near miss is certainly a mistake.
    """

    formula: str
    numerator: Callable[[np.ndarray, Axes], np.ndarray]
    statistic: Callable[[np.ndarray, Axes], np.ndarray]
    words: str = ""
    error: bool = False


LAWS = (
    Law("layer", centred, deviation),
    Law("rms", itself, root_mean_square),
    Law("layer", itself, deviation, "x is divided by the deviation, not x - mean", error=True),
    Law("rms", centred, root_mean_square, "the numerator is centred, the variance is not", error=True),
    Law("layer", centred, absolute_deviation, "it divides by the mean absolute deviation"),
    Law("layer", centred, lambda x, axes: 1 / deviation(x, axes), "it is multiplied by the deviation", error=True),
    Law("layer", centred, lambda x, axes: deviation(x, axes) ** 2, "it is divided by the variance", error=True),
    Law("rms", itself, lambda x, axes: root_mean_square(x, axes) ** 2, "it is divided by the mean square", error=True),
    Law("layer", centred, of_power(3), "the exponent is 3, not 2", error=True),
    Law("layer", centred, of_power(4), "the exponent is 4, not 2", error=True),
)

# Where eps stands, by what the file divides by, D, where the statistic is S: eps from (D, S), and D from (S, eps).
PLACES = {
    "": (lambda d, s: d * d - s * s, lambda s, e: np.sqrt(s * s + e)),
    "eps is added to the standard deviation": (lambda d, s: d - s, lambda s, e: s + e),
}
