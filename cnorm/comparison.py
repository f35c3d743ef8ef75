"""Does a model give what another runtime gives? Its outputs beside somebody else's, with a bound for rounding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["Comparison", "compare"]

UNIT_ROUNDOFF = 2.0**-24  # of float32
SAFETY = 16
PERTURBED_RUNS = 3
UNDECIDED = 0.01  # of the output's scale: beyond this a bound says nothing


@dataclass(frozen=True, eq=False)
class Comparison:
    """What `Model.check` found; ``print`` it, or ask it `ok`.

    Attributes
    ----------
    errors : ndarray, shape (steps,), float64
        The largest difference of each frame.
    bounds : ndarray, shape (steps,), float64
        What rounding in another order may change by that frame.
    judged : int
        Frames before the bound reaches a hundredth of the outputs' scale, after which it says nothing.
    """

    errors: np.ndarray
    bounds: np.ndarray
    judged: int

    @property
    def worst_frame(self) -> int:
        """The judged frame whose error is largest against its bound; NaN counts as infinite."""
        ratio = self.errors[: self.judged] / self.bounds[: self.judged]
        return int(np.nan_to_num(ratio, nan=np.inf).argmax())

    @property
    def error(self) -> float:
        """Of the worst frame."""
        return float(self.errors[self.worst_frame])

    @property
    def bound(self) -> float:
        """Of the worst frame."""
        return float(self.bounds[self.worst_frame])

    @property
    def ok(self) -> bool:
        """Every judged frame is within its bound, and there are at least two: the first says nothing of the state."""
        return self.judged >= 2 and bool((self.errors[: self.judged] <= self.bounds[: self.judged]).all())

    def __bool__(self):
        raise TypeError("ask a Comparison for its attribute ok")

    def __str__(self):
        judged = f"{self.judged} of {len(self.errors)} frames judged"
        if self.judged < 2:
            return f"not decided: {judged}, and it takes two; give more frames, or smaller inputs"
        verdict = "the outputs agree" if self.ok else "the outputs differ"
        worst = f"worst at frame {self.worst_frame}: error {self.error:.1e}, bound {self.bound:.1e}"
        return f"{verdict}: {worst}; {judged}"


def compare(model, x, expected) -> Comparison:
    """See `cnorm.Model.check`.

    The bound of frame t is ``16 u sqrt(16 + n / 16) max(1, |y|)`` for the roundings of one step, with u = 2^-24 and n
    the longest sum of a step, plus 16 times the largest change up to frame t of runs whose inputs are changed by
    ``u sqrt(16 + n / 16) max(1, |x|)`` with random signs: normalised recurrences enlarge the rounding of earlier steps,
    and that is how much.
    """
    y = model.run(x)
    expected = np.asarray(expected)
    if expected.dtype.kind != "f":
        raise TypeError(f"expected must be an array of floats, got {expected.dtype}")
    if expected.shape != y.shape:
        raise ValueError(f"expected must have the shape {y.shape} of the outputs, got {expected.shape}")
    if not len(y):
        raise ValueError("x must have at least one frame, got none")
    longest = max(max(array.shape) for array in model.arrays())
    rounding = UNIT_ROUNDOFF * np.sqrt(16 + longest / 16)
    rng, moved = np.random.default_rng(0), np.zeros(len(y))
    for _ in range(PERTURBED_RUNS):
        signs = rng.choice([-1.0, 1.0], np.shape(x))
        changed = (x + signs * rounding * np.maximum(1, np.abs(x))).astype(np.float32)
        moved = np.maximum(moved, _largest(model.run(changed).astype(np.float64) - y))
    scale = np.maximum(1, _largest(y))
    bounds = SAFETY * (rounding * scale + np.maximum.accumulate(moved))
    beyond = np.flatnonzero(bounds > UNDECIDED * scale)
    judged = int(beyond[0]) if len(beyond) else len(y)
    with np.errstate(invalid="ignore"):
        return Comparison(_largest(y.astype(np.float64) - expected), bounds, judged)


def _largest(frames: np.ndarray) -> np.ndarray:
    """[steps, ...] -> [steps]."""
    return np.abs(frames).max(axis=1).astype(np.float64)
