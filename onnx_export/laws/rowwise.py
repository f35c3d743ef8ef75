"""Near misses that no row of the table is: along each row, y is slope * (x - zero) for some slope and zero of its own.

The slopes show what x is divided by, the zeros what it loses, whatever the file computes these from.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np

from onnx_export.laws.norms import Axes, Function, Law, centred, deviation, itself, mean, root_mean_square

_FEWEST = 3  # elements of a row: any two are on a line
_POWERS = np.arange(0.5, 6.01, 0.25)
_NARROWED = 40  # steps to the exponent between two of these

Near = tuple[Law, Axes]


def along_rows(xs: np.ndarray, ys: np.ndarray, double: np.ndarray, allowed: float) -> Near | None:
    """The near miss that values are, and its axes.

    Parameters
    ----------
    xs, ys : ndarray
        [probes, shape], of large values of x.
    double : ndarray
        [shape], y for twice the first x.
    allowed : float
        Relative rounding.

    Returns
    -------
    (Law, tuple of int) or None
        None where they are not affine along rows, or with other slopes than statistics of x give.
    """
    long = [axis for axis in range(1, xs.ndim) if xs.shape[axis] > 1]
    for axes in (axes for count in range(1, len(long) + 1) for axes in combinations(long, count)):
        if np.prod([xs.shape[axis] for axis in axes]) < _FEWEST or xs.size < 2 * np.prod([xs.shape[a] for a in axes]):
            continue
        d, centre = centred(xs, axes), mean(ys, axes)
        slope = mean(ys * d, axes) / mean(d * d, axes)
        if not np.max(np.abs(ys - centre - slope * d)) <= allowed * np.max(np.abs(ys)) or not slope.all():
            continue
        rows = Rows(xs, axes, slope, mean(xs, axes) - centre / slope, allowed)
        degree = 1 - np.log2(np.sum(double * d[0]) / np.sum(ys[0] * d[0]))
        law = rows.of_their_own() or rows.of_others() or rows.of_moments() or rows.of_power(degree)
        return law and (law, tuple(axis - 1 for axis in axes))
    return None


class Rows:
    """Slopes and zeros of the rows of x [probes, shape], of length 1 along `axes`."""

    def __init__(self, x: np.ndarray, axes: Axes, slope: np.ndarray, zero: np.ndarray, allowed: float) -> None:
        self.x, self.axes, self.slope, self.zero, self.allowed = x, axes, slope, zero, allowed
        self.mean = mean(x, axes)
        size = allowed * np.max(np.abs(x))
        self.plain = bool(np.max(np.abs(zero)) <= size)
        self.centred = bool(np.max(np.abs(zero - self.mean)) <= size)
        added = slope * (self.mean - zero)
        self.biased = bool(np.max(np.ptp(added, axis=0)) <= allowed * np.max(np.abs(added)))  # the same for any x

    def of_their_own(self) -> Law | None:
        """x less something else than its mean, over its own deviation."""
        ratio = self.slope * deviation(self.x, self.axes)
        if self.plain or self.centred or self.biased or not self._alike(ratio):
            return None
        return Law("layer", centred, deviation, "what is subtracted from x is not its mean")

    def of_others(self) -> Law | None:
        """A division by the statistic of another row."""
        kinds = (("layer", deviation, "deviation"), ("rms", root_mean_square, "root mean square"))
        for formula, statistic, name in kinds[: 1 + self.plain]:
            own = statistic(self.x, self.axes)
            flat, used = own.reshape(len(own), -1), np.abs(1 / self.slope).reshape(len(own), -1)
            off = np.min(np.abs(used[:, :, None] / flat[:, None, :] - 1), axis=2)
            if flat.shape[1] > 1 and np.max(off) <= self.allowed:
                numerator = itself if self.plain else centred
                return Law(formula, numerator, statistic, f"x is divided by the {name} of another row", error=True)
        return None

    def of_moments(self) -> Law | None:
        """The root of another sum of mean(x^2) and mean(x)^2 than the variance is."""
        if not (self.plain or self.centred):
            return None
        terms = np.stack([mean(self.x * self.x, self.axes), self.mean**2]) * self.slope**2
        equations = terms.reshape(2, -1).T
        a, b = np.linalg.lstsq(equations, np.ones(len(equations)), rcond=None)[0]
        if not a > 0 or np.max(np.abs(equations @ (a, b) - 1)) > self.allowed:
            return None
        words, n = f"it is divided by the root of {a:.4g} mean(x^2) {b:+.4g} mean(x)^2", self.x.size // self.mean.size
        if abs(b + 1) <= self.allowed:
            words = f"a sum over {n} elements is divided by {n / a:.6g}"
        formula, numerator = ("rms", itself) if self.plain else ("layer", centred)
        return Law(formula, numerator, lambda x, axes: np.sqrt(a * mean(x * x, axes) + b * mean(x, axes) ** 2), words)

    def of_power(self, degree: float) -> Law | None:
        """A mean of another power of |x - mean|, or |x|, to the power that gives a quotient of this degree."""
        if not (self.plain or self.centred) or not 0.25 < degree < 4:
            return None
        numerator = itself if self.plain else centred
        logs, slopes = np.log(np.abs(numerator(self.x, self.axes)) + np.finfo(float).tiny), np.log(np.abs(self.slope))

        def spread(power: float) -> float:
            return float(np.ptp(slopes + degree / power * np.log(mean(np.exp(power * logs), self.axes))))

        nearest = int(np.argmin([spread(power) for power in _POWERS]))
        low, high = _POWERS[max(nearest - 1, 0)], _POWERS[min(nearest + 1, len(_POWERS) - 1)]
        for _ in range(_NARROWED):
            third = (high - low) / 3
            low, high = (low, high - third) if spread(low + third) < spread(high - third) else (low + third, high)
        power = round((low + high) / 2, 4)
        if spread(power) > 64 * self.allowed:
            return None
        words = f"the exponent is {power:.4g}, not 2"
        if abs(degree / power - 0.5) > self.allowed * 64:
            words = f"it is divided by the mean of powers {power:.4g}, to the power {degree / power:.3g}"
        error = power % 2 not in (0, 1)
        if abs(power - 2) < 1e-3 and not self.plain:
            words, error = f"it is multiplied by the variance to the power {-degree / 2:.3g}, not -0.5", True
        formula = "rms" if self.plain else "layer"
        return Law(formula, numerator, _mean_power(numerator, power, degree), words, error)

    def _alike(self, values: np.ndarray) -> bool:
        return bool(np.ptp(values) <= self.allowed * np.max(np.abs(values)))


def _mean_power(numerator: Function, power: float, degree: float) -> Function:
    return lambda x, axes: mean(np.abs(numerator(x, axes)) ** power, axes) ** (degree / power)
