"""The validator's report: plain data, its JSON, its exit code and the reason for it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from io import StringIO
from typing import Any

from onnx_export.runtimes import DATA, FAR

SCHEMA = 1
NOT_JUDGED = "not judged"
VERDICTS = ("ok", "near miss", "risky", "inaccurate", "wrong", "not exercised", NOT_JUDGED)
# The verdicts that are findings, too, and their levels
VERDICT_LEVELS = {"wrong": "error", "inaccurate": "error", "risky": "warning"}
VERDICT_LEVELS |= {"not exercised": "note", NOT_JUDGED: "note"}
RECURRENCE = "recurrence"  # the kind of one that no operator names
SOUND, UNSOUND, CANNOT, REFUSED = 0, 1, 2, 3
MOST_RATIO = 1e12  # largest error / bound in a plot, in place of larger values and infinity


@dataclass
class Finding:
    """An observation about the file, a norm or the runtime, apart from the verdicts.

    Attributes
    ----------
    level : {"error", "warning", "note"}
    code : str
        Short and stable, such as "eps-zero"; docs/validator.md lists them.
    message : str
    norm : str
        Name of the norm it is about, empty for the file or the runtime.
    """

    level: str
    code: str
    message: str
    norm: str = ""


@dataclass
class NormReport:
    """One norm and its verdict. Fields up to `near_miss` describe the `norm.Norm`.

    Attributes
    ----------
    verdict : {"ok", "near miss", "risky", "inaccurate", "wrong", "not exercised"}
        "near miss" where the runtime computes the nodes accurately, but they are no norm.
    blame : {"", "file", "kernel", "optimiser"}
    detail : str
        The reason for the verdict, in one sentence.
    error, bound : float or None
        Error against float64, and its bound, at the element where their ratio is largest.
    conditioning : float or None
        Largest max|x| / sqrt(var + eps) of a row seen in the run.
    became : str
        The operator that the optimiser made of it.
    risks : list of str
        Families of stress rows on which it failed.
    points : list of [float, float, str]
        (conditioning, error / bound, origin) of tapped and stress rows, for the plot.
    scale_hash, bias_hash : str
        Hashes of the stored values; "computed" if the graph computes them, empty if there are none.
    of : str
        "x - f(x)" for an RMS norm of such a difference, else empty.
    normal : dict
        What `lock.compare` compares (`normal.normal_form`).
    """

    name: str
    scope: str
    form: str
    formula: str
    variance: str
    axes: list[int] | None
    eps: float
    eps_dtype: str
    scale: str
    bias: str
    compute_dtype: str
    near_miss: str = ""
    verdict: str = "not exercised"
    blame: str = ""
    detail: str = ""
    error: float | None = None
    bound: float | None = None
    conditioning: float | None = None
    became: str = ""
    risks: list[str] = field(default_factory=list)
    points: list[list[Any]] = field(default_factory=list, repr=False)
    scale_hash: str = ""
    bias_hash: str = ""
    of: str = ""
    normal: dict[str, Any] = field(default_factory=dict, repr=False)


@dataclass
class CellReport:
    """One recurrent node and its verdict, or a recurrence that no operator names.

    Attributes
    ----------
    name, scope : str
    kind : str
        "LSTM", "GRU" or "RNN"; or, never judged, an operator of another domain such as "DynamicQuantizeLSTM", or
        "recurrence".
    facts : dict of str to str
        Its attributes and the sources of its states and lengths, in a normal form without defaults.
    inputs, units : int or None
        Length of x and of h, None where the file does not say.
    verdict, blame, detail, error, bound
        As of a `NormReport`, and "not judged"; the error is that of a step, or of a whole run.
    hashes : dict of str to str
        Of W, R and P, and of the bias as it acts: "computed" if the graph computes them, empty if there are none.
    """

    name: str
    scope: str
    kind: str
    facts: dict[str, str]
    inputs: int | None
    units: int | None
    verdict: str = "not exercised"
    blame: str = ""
    detail: str = ""
    error: float | None = None
    bound: float | None = None
    hashes: dict[str, str] = field(default_factory=dict)


@dataclass(repr=False)
class ValidationReport:
    """The result for one file. True in a condition if `ok`; `print` shows the table.

    Attributes
    ----------
    path : str
    norms : list of NormReport
    findings : list of Finding
    problem : str
        Why the file could not be (wholly) validated, empty when it could.
    refused : bool
        Whether the file was refused as unsafe.
    versions : dict of str to str
        Of onnx and onnxruntime.
    fixed : list of str
        The actions of `--fix`, one sentence per norm.
    external_data : list of str
        Paths of the external data files that the model names, whether they were read or not.
    cells : list of CellReport
        The recurrent nodes, and recurrences that no operator names.
    """

    path: str
    norms: list[NormReport] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    problem: str = ""
    refused: bool = False
    versions: dict[str, str] = field(default_factory=dict)
    fixed: list[str] = field(default_factory=list)
    external_data: list[str] = field(default_factory=list)
    cells: list[CellReport] = field(default_factory=list)

    @property
    def judged(self) -> list[NormReport | CellReport]:
        """Everything that has a verdict."""
        return [*self.norms, *self.cells]

    @property
    def unjudged(self) -> bool:
        """Whether something was recognised that is never judged."""
        return any(each.verdict == NOT_JUDGED for each in self.judged)

    @property
    def compared(self) -> bool:
        """Whether the outputs of the whole model are those of a framework."""
        return any(finding.code == "outputs-agree" for finding in self.findings)

    def settle(self) -> None:
        """Give near misses that the runtime computes accurately, and findings on data, what the whole run says."""
        for norm in self.norms:
            if norm.near_miss and norm.verdict == "ok":
                norm.verdict = "near miss"
        far = {norm.name for norm in self.norms if norm.conditioning is not None and norm.conditioning >= FAR}
        for finding in self.findings:
            if finding.code == "runtime-data" and finding.norm in far and DATA["mean 1e4"] in finding.message:
                finding.level = "error"

    @property
    def ok(self) -> bool:
        """Whether `exit_code` is 0: no norm is unsound, and one was judged if there are any."""
        return self.exit_code() == SOUND

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        return f"<ValidationReport {self.path!r}: {self.summary()}{', ' * bool(self.problem)}{self.problem}>"

    def __str__(self) -> str:
        from rich.console import Console

        from onnx_export.validation.formats import show

        text = StringIO()
        show(self, Console(file=text, width=120), notes=True)
        return text.getvalue().rstrip()

    def exit_code(self, *, strict: bool = False, require_norm: bool = False) -> int:
        """3 refused, 1 unsound, 2 cannot validate, 0 sound; the first that applies, in this order."""
        counts = self.levels()
        if self.refused:
            return REFUSED
        if any(counts[level] for level in failing_levels(strict=strict)):
            return UNSOUND
        judged = [each for each in self.judged if each.verdict != "not exercised"]
        unseen = (strict and len(judged) < len(self.judged)) or (self.unjudged and not self.compared)
        norms = [norm for norm in self.norms if norm.verdict != "not exercised"]
        if self.problem or unseen or (require_norm and all(norm.near_miss for norm in norms)):
            return CANNOT
        return SOUND

    def levels(self) -> dict[str, int]:
        """How many errors, warnings and notes there are, verdicts among them."""
        found = [finding.level for finding in self.findings]
        found += [VERDICT_LEVELS[each.verdict] for each in self.judged if each.verdict in VERDICT_LEVELS]
        return {level: found.count(level) for level in ("error", "warning", "note")}

    def summary(self) -> str:
        """What was found, and the verdicts on it, in one sentence."""
        if not self.judged:
            unclaimed = [finding.message for finding in self.findings if finding.code == "unclaimed"]
            text = "; ".join(["no norm or recurrent operator was recognised", *unclaimed])
            return text if self.compared else "nothing was checked" + f": {text}" * (not self.problem)
        norms = [n for n in self.norms if not n.near_miss]
        near = len(self.norms) - len(norms)
        things = [many(len(norms), "layer norm")] if norms else []
        things += [many(near, "near miss", "es")] if near else []
        kinds = [cell.kind for cell in self.cells]
        things += [many(kinds.count(kind), kind) for kind in dict.fromkeys(kinds)]
        counts = {verdict: sum(each.verdict == verdict for each in self.judged) for verdict in VERDICTS}
        parts = [f"{count} {verdict}" for verdict, count in counts.items() if count and verdict != "near miss"]
        text = " and ".join(filter(None, [", ".join(things[:-1]), things[-1]]))
        return f"{text}: {', '.join(parts)}" if parts else text

    def conclusion(self, *, strict: bool = False, require_norm: bool = False) -> str:
        """The outcome and the reason of the exit code, and the summary, in one line."""
        code, counts = self.exit_code(strict=strict, require_norm=require_norm), self.levels()
        found = ", ".join(many(counts[level], level) for level in ("error", "warning") if counts[level])
        lacking = require_norm and all(norm.near_miss for norm in self.norms)
        why = {
            "": not self.judged,  # the summary says it
            "no layer norm was found": lacking,
            "not everything was judged": self.unjudged,
        }
        reason = self.problem or next((text for text, holds in why.items() if holds), "not everything was exercised")
        agree = "the outputs are those of --outputs" if self.compared else ""
        summary = "" if self.problem and not self.judged else self.summary()
        outcome, reasons = {
            SOUND: ("passed", [agree, summary, found]),
            UNSOUND: ("failed", [found, summary]),
            CANNOT: ("cannot validate", [reason, found, summary]),
            REFUSED: ("refused", [self.problem]),
        }[code]
        if code == SOUND and not self.judged and not self.compared:
            return "; ".join(filter(None, [summary, found]))
        return f"{outcome}: {'; '.join(filter(None, reasons))}"

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ValidationReport:
        """The inverse of `dataclasses.asdict`."""
        norms = [NormReport(**norm) for norm in data["norms"]]
        cells = [CellReport(**cell) for cell in data["cells"]]
        findings = [Finding(**finding) for finding in data["findings"]]
        return cls(**{**data, "norms": norms, "cells": cells, "findings": findings})

    def to_json(self, *, require_norm: bool = False) -> str:
        """The report as JSON (schema: docs/validator.md); NaN and infinities are written as strings."""
        codes = {
            name: self.exit_code(strict=strict, require_norm=require_norm)
            for name, strict in (("exit_code", False), ("strict_exit_code", True))
        }
        data = {"schema": SCHEMA, **codes, "summary": self.summary(), **asdict(self)}
        return json.dumps(_finite(data), indent=1, allow_nan=False)


def failing_levels(*, strict: bool = False, **_: bool) -> tuple[str, ...]:
    """The levels of findings that make a file unsound, with the options of `ValidationReport.exit_code`."""
    return ("error", "warning") if strict else ("error",)


def many(count: int, what: str, plural: str = "s") -> str:
    """A number and what it counts, in the plural for other numbers than 1."""
    return f"{count} {what}{plural * (count != 1)}"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and value - value != 0:
        return repr(value)
    return value
