"""Judge the differences of engines from float64: the bound of a step, the worst rows, and each element."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from onnx_export.parity_report import Row

__all__ = ["Call", "Elements", "Measure", "bound"]

NEAR_0 = 2.0**-10  # values below are not counted in units in the last place
UNIT = 2.0**-24  # unit roundoff of float32


def bound(longest: int, exact: np.ndarray, unit: float = UNIT, sensitivity: float = 0.0) -> float:
    """Allowed difference of one step from float64: the larger of 4 u sqrt(n) max(1, max|exact|) and 4 `sensitivity`.

    u is the unit roundoff `unit`, n the number of terms `longest`. The first bound is derived as follows.

    - A matrix product adds n terms one after the other. Each addition rounds by at most u times the partial sum, in the
      root mean square by u / sqrt(3) times it. For terms of random sign these errors add up to u sqrt(n / 6) times the
      size of the sum. (Blocked sums have smaller errors.)
    - Normalisation divides the sum and its error alike; sigmoid and tanh do not enlarge an error.
    - A step adds three such errors: two for the gates, one through the norm of the cell. Four standard deviations allow
      for the largest of many elements: 4 u sqrt(n) sqrt(3 / 6), and sqrt(2) for gains above one and elementwise steps.

    Sums shorter than 64 count as 64, because elementwise rounding dominates there. For float32 and n = 64 the bound is
    1.9e-6. Values above 1 (cells, logits) round in proportion to their size.

    A norm over nearly equal numbers enlarges all errors of its input. `sensitivity` measures this on the float64 graph:
    the change of its results when the step's inputs change by u sqrt(n / 6), relatively; and the weights, too, where
    an engine is beyond that: sums round in proportion to their terms, among them a bias that hides the inputs.
    """
    # infinity and NaN do not enlarge the bound
    size = np.max(np.abs(exact), initial=1.0, where=np.isfinite(exact))
    return float(_of_each(longest, size, unit, sensitivity))


def _of_each(longest: int, sizes, unit: float, sensitivity) -> np.ndarray:
    """`bound` of each element alone, from its size and its sensitivity."""
    sizes, changes = (np.where(np.isfinite(each), each, 0.0) for each in (sizes, sensitivity))
    return np.maximum(4 * unit * math.sqrt(max(longest, 64)) * np.maximum(sizes, 1.0), 4 * changes)


@dataclass(frozen=True)
class Call:
    """A call that is judged: the results of every engine by name, and the sensitivity of the float64 ones."""

    x: np.ndarray
    states: dict[str, np.ndarray]
    results: dict[str, dict[str, np.ndarray]]
    sensitivity: dict[str, np.ndarray]


class Measure:
    """Collects the differences of all steps."""

    def __init__(self, longest: int, dtype, frames: int, native: bool):
        self.longest, self.frames, self.native = longest, frames, native
        self.dtype, self.unit = dtype, float(np.finfo(dtype).eps) / 2
        self.noise = self.unit * math.sqrt(max(longest, 64) / 6)
        self.rows: dict[tuple[str, str, str], Row] = {}
        self.drifts: dict[tuple[str, str, str], float] = {}
        self.first: Row | None = None

    def starts(self, ours, files) -> None:
        """A row for each initial state that differs. Nothing has been computed yet, so no difference is allowed."""
        for name, exact in files.items():
            distance = distances(ours[name], exact)
            if distance.any():
                self.add("cnorm", "float64", f"{name}_in", distance, exact, 0.0, (0, 0))

    def judge(self, call: Call, recording, step) -> None:
        """Judge one call. Each engine may differ from float64 by the bound, so two engines by twice the bound."""
        results, exact = call.results, call.results["float64"]
        for engine, against in pairs(results):
            if against == "float64":
                self.row(engine, against, results[engine], (exact, call.sensitivity), (recording, step))
                continue
            for tensor, value in exact.items():
                distance = distances(results[engine][tensor], results[against][tensor])
                allowed = 2 * self.allowed(value, call.sensitivity[tensor])
                self.add(engine, against, tensor, distance, value, allowed, (recording, step))

    def within(self, call: Call) -> bool:
        """Whether every engine is within its bound of float64 in one call."""
        exact = call.results["float64"]
        return all(
            _largest(distances(found[tensor], value)) <= self.allowed(value, call.sensitivity[tensor])
            for found in call.results.values()
            for tensor, value in exact.items()
        )

    def row(self, engine, against, results, judge, place, steps: int = 1) -> None:
        """Compare one engine's call with the float64 results and their sensitivity, `judge`."""
        exact, sensitivity = judge
        for tensor, value in exact.items():
            allowed = steps * self.allowed(value, sensitivity[tensor])
            self.add(engine, against, tensor, distances(results[tensor], value), value, allowed, place)

    def chunks(self, engine, single, whole, recording) -> None:
        """Compare the same steps computed in different calls.

        A Scan or Loop runs the same operators on the same numbers, so its results must be bit-identical. The operators
        LSTM, GRU and RNN multiply all frames of a call at once and may round differently. They have no norm that would
        enlarge an error, so each step adds one allowed error.
        """
        for tensor, exact in single.items():
            distance = np.where(whole[tensor] == exact, 0.0, distances(whole[tensor], exact))
            step = (
                int(np.argmax(distance.reshape(len(distance), -1).any(axis=1)))
                if tensor == "y"
                else len(single["y"]) - 1
            )
            allowed = 2 * len(single["y"]) * bound(self.longest, exact, self.unit) if self.native else 0.0
            self.add(engine, "single steps", tensor, distance, exact, allowed, (recording, step))

    def allowed(self, exact, sensitivity) -> float:
        return self.frames * bound(self.longest, exact, self.unit, _largest(sensitivity))

    def each_allowed(self, sizes, sensitivity) -> np.ndarray:
        """What is allowed of each element alone."""
        return self.frames * _of_each(self.longest, sizes, self.unit, sensitivity)

    def add(self, engine, against, tensor, distance, exact, allowed: float, place: tuple[int, int]) -> None:
        size = np.broadcast_to(np.abs(exact), distance.shape)
        units = np.spacing(size[size >= NEAR_0].astype(self.dtype)).astype(np.float64)
        largest, ulp = _largest(distance), _largest(distance[size >= NEAR_0] / units)
        used = largest / allowed if allowed else math.inf if largest else 0.0
        row = Row(engine, against, tensor, largest, ulp, used, allowed, *place, used <= 1)
        key = engine, against, tensor
        self.rows[key] = _worse(self.rows.get(key, row), row)
        if self.first is None and not row.ok:
            self.first = row

    def drift(self, runs) -> None:
        for engine, against in pairs(runs):
            for tensor, array in runs[engine].items():
                key = engine, against, tensor
                distance = _largest(distances(array, runs[against][tensor]))
                self.drifts[key] = max(self.drifts.get(key, 0.0), distance)


class Elements:
    """Each element beside its own largest value in all calls of the recordings, so that larger ones hide no error."""

    def __init__(self) -> None:
        self.exact: dict[str, np.ndarray] = {}
        self.sensitivity: dict[str, np.ndarray] = {}
        self.distance: dict[tuple[str, str], np.ndarray] = {}

    def add(self, call: Call) -> None:
        """Raise what is kept to the values of a call."""
        for tensor, exact in call.results["float64"].items():
            _keep(self.exact, tensor, np.abs(exact))
            _keep(self.sensitivity, tensor, call.sensitivity[tensor])
            for engine in call.results.keys() - {"float64"}:
                _keep(self.distance, (engine, tensor), distances(call.results[engine][tensor], exact))

    def worst(self, measure: Measure) -> Iterator[tuple]:
        """Of each tensor the element that uses most of its bound: arguments of `Measure.add`."""
        for (engine, tensor), distance in sorted(self.distance.items()):
            allowed = measure.each_allowed(self.exact[tensor], self.sensitivity[tensor])
            worst = int(np.argmax(distance / allowed))
            near = slice(worst, worst + 1)
            yield engine, "float64", tensor, distance[near], self.exact[tensor][near], float(allowed[worst])


def _keep(kept: dict, key, values: np.ndarray) -> None:
    """Raise what is kept for each element, the last axis, to the largest of some values that are numbers."""
    largest = np.fmax.reduce(values.reshape(-1, values.shape[-1]), axis=0)
    kept[key] = np.fmax(kept.get(key, 0.0), largest)


def pairs(results) -> list[tuple[str, str]]:
    """Each engine and float64, cnorm and each onnxruntime."""
    engines = [name for name in results if name != "float64"]
    return [(name, "float64") for name in engines] + [("cnorm", name) for name in engines if name != "cnorm"]


def _worse(old: Row, new: Row) -> Row:
    """The row that used more of its bound, with the largest differences of both."""
    head = new if new.used > old.used else old
    max_abs, max_ulp = max(old.max_abs, new.max_abs), max(old.max_ulp, new.max_ulp)
    return replace(head, max_abs=max_abs, max_ulp=max_ulp)


def distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.abs(a.astype(np.float64) - b.astype(np.float64))


def _largest(differences: np.ndarray) -> float:
    """The largest element; infinity if one is NaN, so that NaN is within no bound."""
    return float(np.max(np.where(np.isnan(differences), np.inf, differences), initial=0.0))
