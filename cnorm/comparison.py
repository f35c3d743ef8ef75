"""`Model.check`: compare a model's outputs with those of another runtime, within a bound for rounding errors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cnorm.cells.weights import as_array

__all__ = ["Comparison", "compare"]

UNIT_ROUNDOFF = 2.0**-24  # of float32
SAFETY = 16
PERTURBED_RUNS = 3
BLOCK = 256  # frames that are compared at once
UNDECIDED = 0.01  # share of the output's scale: a larger bound could not tell right outputs from wrong ones


@dataclass(frozen=True, eq=False)
class Comparison:
    """The result of `Model.check`: true if the outputs agree; ``print`` it for the worst frame.

    Attributes
    ----------
    errors : ndarray, shape (steps,), float64
        The largest absolute difference in each frame.
    bounds : ndarray, shape (steps,), float64
        The estimated largest difference in each frame that rounding in another order of summation can cause.
    judged : int
        Number of frames before the first whose bound exceeds a hundredth of the outputs' scale; later ones are not
        judged.
    weights : str
        The type of the model's large matrices, `Model.weights`. The bound has no part for their rounding.
    """

    errors: np.ndarray
    bounds: np.ndarray
    judged: int
    weights: str = "float32"

    @property
    def worst_frame(self) -> int:
        """The judged frame with the largest ratio of error to bound; NaN counts as infinite."""
        ratio = self.errors[: self.judged] / self.bounds[: self.judged]
        return int(np.nan_to_num(ratio, nan=np.inf).argmax())

    @property
    def error(self) -> float:
        """The error of the worst frame."""
        return float(self.errors[self.worst_frame])

    @property
    def bound(self) -> float:
        """The bound of the worst frame."""
        return float(self.bounds[self.worst_frame])

    @property
    def ok(self) -> bool:
        """At least two frames are judged, as the first does not test the recurrence, and each is within its bound."""
        return self.judged >= 2 and bool((self.errors[: self.judged] <= self.bounds[: self.judged]).all())

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self):
        judged = f"{self.judged} of {len(self.errors)} frames judged"
        if self.judged < 2:
            return f"not decided: {judged}, and it takes two; give more frames, or smaller inputs"
        verdict = "the outputs agree" if self.ok else "the outputs differ"
        worst = f"worst at frame {self.worst_frame}: error {self.error:.1e}, bound {self.bound:.1e}"
        rounded = ""
        if not self.ok and self.weights != "float32":
            rounded = f"; the weights are rounded to {self.weights}, which the bound does not allow for"
        return f"{verdict}: {worst}; {judged}{rounded}"


def compare(model, x, expected) -> Comparison:
    """See `cnorm.Model.check`.

    The bound of frame t has two terms. The first is for the rounding errors of one step:
    ``16 u sqrt(16 + n / 16) max(1, |y|)`` with u = 2^-24 and n the longest sum of a step. The second is for the errors
    of earlier steps, which normalised recurrences amplify: 16 times the largest change, up to frame t, of the outputs
    of three runs whose inputs are perturbed by ``u sqrt(16 + n / 16) max(1, |x|)`` with random signs.
    """
    x, expected = as_array(x), as_array(expected)  # tensors too, with recorded gradients or on a GPU
    y = model.run(x)
    if expected.dtype.kind != "f":
        raise TypeError(f"expected must be an array of floats, got {expected.dtype}")
    if expected.shape != y.shape:
        raise ValueError(f"expected must have the shape {y.shape} of the outputs, got {expected.shape}")
    if not len(y):
        raise ValueError("x must have at least one frame, got none")
    rounding = UNIT_ROUNDOFF * np.sqrt(16 + _longest_sum(model) / 16)
    rng, max_change = np.random.default_rng(0), np.zeros(len(y))
    for _ in range(PERTURBED_RUNS):
        signs = rng.choice([-1.0, 1.0], np.shape(x))
        changed = (x + signs * rounding * np.maximum(1, np.abs(x))).astype(np.float32)
        changed[:, list(model.tokens)] = x[:, list(model.tokens)]
        max_change = np.maximum(max_change, _largest(model.run(changed), y))
    scale = np.maximum(1, _largest(y))
    bounds = SAFETY * (rounding * scale + np.maximum.accumulate(max_change))
    beyond = np.flatnonzero(bounds > UNDECIDED * scale)
    judged = int(beyond[0]) if len(beyond) else len(y)
    with np.errstate(invalid="ignore"):
        return Comparison(_largest(y, expected), bounds, judged, model.weights)


def _longest_sum(model) -> int:
    """The most elements that a sum of a step can have."""
    if model._packed is None:
        return max((max(array.shape) for array in model.arrays()), default=1)
    networks = [network for part in model._parts for network in part]  # a packed model has no layers
    return max(model.input_size, model.output_size, *(network.longest for network in networks))


def _largest(frames: np.ndarray, others: np.ndarray | None = None) -> np.ndarray:
    """The largest absolute value of each frame, or of its differences from others: [steps, n] -> [steps] in float64."""
    largest = np.empty(len(frames))
    for at in range(0, len(frames), BLOCK):  # whole recordings in float64 could be more than there is memory
        part = frames[at : at + BLOCK].astype(np.float64)
        if others is not None:
            part -= others[at : at + BLOCK]
        largest[at : at + BLOCK] = np.abs(part, out=part).max(axis=1)
    return largest
