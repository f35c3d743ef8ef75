"""The report of `check_parity`: an object, JSON, text and a table."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

__all__ = ["ELEMENT", "Drift", "ParityReport", "Row"]

ELEMENT = "each element"  # the recording of a row for elements by themselves


@dataclass(frozen=True)
class Row:
    """One tensor of one engine against another, the worst over all steps.

    Attributes
    ----------
    engine : str
        "cnorm", "onnxruntime off", "onnxruntime basic" or "onnxruntime all".
    against : str
        "float64", or an engine; "float64, batch 3" where rows of one call are compared with calls of one row each;
        "single steps" where a call of many steps is compared with the same engine's calls of one step.
    tensor : str
        The graph's name of an output or next state, or of a state's input whose initial value differs from the
        model's.
    max_abs, max_ulp : float
        Largest absolute difference, and largest in units in the last place of the judge's value in the file's dtype,
        for values of at least 2**-10: near 0, where these units vanish, a step rounds by those of what it adds.
    used : float
        Largest difference / bound of a step; 1 is the limit.
    bound : float
        The absolute difference allowed in that step.
    recording : int or str
        The number of the recording that holds that step, or the name of a hard call: "zeros" (from zero states),
        "scale 100" (from zero states), "repeated values", "scale 1e-04", "cells beyond their clip", ...; "each element"
        for the largest difference of an element in all steps, judged beside the largest value of this element;
        "negative elements" for a value where the model has no number.
    step : int
        Its number in the recording.
    ok : bool
        Every step was within its bound.
    """

    engine: str
    against: str
    tensor: str
    max_abs: float
    max_ulp: float
    used: float
    bound: float
    recording: int | str
    step: int
    ok: bool


@dataclass(frozen=True)
class Drift:
    """Largest absolute difference of two engines running freely, each from its own state. Not judged."""

    engine: str
    against: str
    tensor: str
    max_abs: float


@dataclass(frozen=True)
class ParityReport:
    """The result of `check_parity`. True in a condition if the file and the model agree; as text three lines.

    Attributes
    ----------
    ok : bool
        Every row is within its bound, and the metadata describes the model.
    rows : tuple of Row
    drift : tuple of Drift
    first : Row or None
        The first step and tensor beyond its bound, with the differences of that step.
    steps : int
        Steps of the recordings; each is judged. A recording ends where a state is no longer finite.
    inputs : str
        "random" or "recorded".
    onnxruntime : str
        Its version.
    dtype : str
        Of the file: "float32" or "float16", whose rounding the bounds allow for.
    metadata : str or None
        How the configuration in the file's metadata differs from the model's; None if it does not, or if the file has
        none.
    positive : tuple of int
        Elements of a frame that random calls have positive, as negative ones give no numbers in the model (log, sqrt).
    """

    rows: tuple[Row, ...]
    drift: tuple[Drift, ...]
    first: Row | None
    steps: int
    inputs: str
    onnxruntime: str
    dtype: str = "float32"
    metadata: str | None = None
    positive: tuple[int, ...] = ()

    @property
    def ok(self) -> bool:
        return self.metadata is None and all(row.ok for row in self.rows)

    def __bool__(self) -> bool:
        return self.ok

    @property
    def verdict(self) -> str:
        """One sentence."""
        setting = f"{self.steps} {self.inputs} steps, onnxruntime {self.onnxruntime}"
        if self.first is None and self.metadata:
            return f"not equal: the graph computes the model, but its metadata describes another: {self.metadata}"
        if self.first is None:
            return f"equal within {self.dtype} rounding: {setting}"
        f = self.first
        place = f"step {f.step} of recording {f.recording}"
        if f.recording == ELEMENT:
            place = "an element, beside its own largest value"
        elif isinstance(f.recording, str):
            place = f"the hard call {f.recording!r}"
        return (
            f"not equal: {f.engine} and {f.against} go apart first in {f.tensor} at {place}, "
            f"by {f.max_abs:.3g} where {f.bound:.3g} is allowed ({setting})"
        )

    @classmethod
    def from_dict(cls, given: dict) -> ParityReport:
        """The report that `dataclasses.asdict` took apart."""
        parts = {
            "rows": tuple(Row(**row) for row in given["rows"]),
            "drift": tuple(Drift(**row) for row in given["drift"]),
            "first": given["first"] and Row(**given["first"]),
            "positive": tuple(given["positive"]),
        }
        return cls(**given | parts)

    def to_json(self) -> str:
        """The whole report as JSON; an infinite or undefined difference is null."""
        report = {"ok": self.ok, "verdict": self.verdict} | asdict(self)
        return json.dumps(_without_nan(report), indent=1, allow_nan=False)

    def table(self) -> str:
        """Every row, a line each, and the drift."""
        lines = [f"{'engine':<18} {'against':<18} {'tensor':<8} {'max abs':>9} {'ULP':>9} {'used':>6}"]
        lines += [
            f"{r.engine:<18} {r.against:<18} {r.tensor:<8} {r.max_abs:9.2e} {r.max_ulp:9.3g} {r.used:6.0%}"
            + ("" if r.ok else "  too far")
            for r in self.rows
        ]
        lines += [f"{d.engine:<18} {d.against:<18} {d.tensor:<8} {d.max_abs:9.2e}  drift" for d in self.drift]
        return "\n".join([*lines, self.verdict])

    def __str__(self) -> str:
        """Three lines: the verdict, the largest error of a step, and the drift."""
        lines = [self.verdict]
        exact = [row for row in self.rows if row.against.startswith("float64")]
        if exact:
            most = max(exact, key=lambda row: row.used)
            ours = max((row.max_abs for row in exact if row.engine == "cnorm"), default=0.0)
            engine = most.engine.replace("onnxruntime off", "onnxruntime without optimisations")
            lines.append(
                f"  a step's error against float64: at most {ours:.1e} in cnorm; the most of its bound, "
                f"{most.used:.0%}, at {most.tensor} in {engine}"
            )
        drift = max((each.max_abs for each in self.drift if each.against == "float64"), default=0.0)
        lines.append(f"  running freely, the engines are within {drift:.1e} of float64 (not judged)")
        return "\n".join(lines)

    def __rich__(self) -> str:
        return str(self)


def _without_nan(value):
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
