"""The validator's report: plain data, its JSON, its table, its exit code and the reason for it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from io import StringIO
from typing import Any

from cnorm.text import printable
from onnx_export.runtimes import DATA, FAR
from onnx_export.validation.findings import (
    NOT_JUDGED,
    VERDICT_LEVELS,
    VERDICTS,
    CellReport,
    Finding,
    NormReport,
    columns,
    failing_levels,
    many,
    numbers,
    said,
)

SCHEMA = 1
SOUND, UNSOUND, CANNOT, REFUSED = 0, 1, 2, 3
_MOST_NAMES = 3
PROBLEMS = ("cannot-validate", "refused")
_ALWAYS = ("not-exercised", "not-judged", "runtimes", "unclaimed")  # notes that are printed without --notes
_COLOURS = {
    "ok": "green",
    "near miss": "yellow",
    "risky": "yellow",
    "inaccurate": "red",
    "wrong": "bold red",
    "not exercised": "dim",
    NOT_JUDGED: "yellow",
}


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


def all_findings(report: ValidationReport) -> list[Finding]:
    """The findings of a report, its verdicts and its problem among them."""
    found = [
        Finding(
            VERDICT_LEVELS[each.verdict], each.verdict.replace(" ", "-"), each.detail or "it was not run", each.name
        )
        for each in report.judged
        if each.verdict in VERDICT_LEVELS
    ]
    found += report.findings
    if report.problem:
        found.append(Finding("error", "refused" if report.refused else "cannot-validate", report.problem))
    return found


def shown_findings(report: ValidationReport, notes: bool) -> list[Finding]:
    """The findings to print, equal ones merged; with notes, or with one on their number."""
    found = digest(all_findings(report))
    hidden = [] if notes else [each for each in found if each.level == "note" and each.code not in _ALWAYS]
    shown = [each for each in found if each not in hidden]
    if hidden:
        codes = ", ".join(dict.fromkeys(each.code for each in hidden))
        shown.append(Finding("note", "notes", f"{len(hidden)} of {codes}; --notes shows them"))
    return shown


def digest(findings: list[Finding]) -> list[Finding]:
    """Merge findings that several norms share into one."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for finding in findings:
        groups.setdefault((finding.level, finding.code, finding.message), []).append(finding.norm)
    return [Finding(*key, _names(names)) for key, names in groups.items()]


def _names(names: list[str]) -> str:
    if len(names) <= _MOST_NAMES:
        return ", ".join(filter(None, names))
    return f"{', '.join(names[:_MOST_NAMES])} and {len(names) - _MOST_NAMES} more"


def before_conclusion(report: ValidationReport, notes: bool, **how: bool) -> list[Finding]:
    """The findings to print before the conclusion, which says itself why a file could not be validated."""
    said = report.exit_code(**how) in (CANNOT, REFUSED)
    return [each for each in shown_findings(report, notes) if not (said and each.code in PROBLEMS)]


def show(report: ValidationReport, console, *, notes: bool = False, **how: bool) -> None:
    """Print the report on a rich console."""
    from rich.table import Table
    from rich.text import Text

    def text(value: object, style: str = "") -> Text:
        return Text(printable(str(value)), style=style)

    if report.judged:
        table = Table(title=text(report.path), title_justify="left", pad_edge=False)
        for heading in ("norm", "what", "axes", "eps", "error", "bound", "verdict"):
            table.add_column(heading, overflow="fold")
        for each in report.judged:
            table.add_row(
                text(each.name if each.name.startswith(each.scope) else f"{each.name} ({each.scope})"),
                *map(text, columns(each)),
                *map(text, numbers(each)),
                text(f"{each.verdict} ({each.blame})" if each.blame else each.verdict, _COLOURS[each.verdict]),
            )
        console.print(table)
    for finding in before_conclusion(report, notes, **how):
        style = {"error": "red", "warning": "yellow", "note": "dim"}[finding.level]
        if finding.code in PROBLEMS:
            console.print(text(f"{finding.code.replace('-', ' ')}: {finding.message}", "bold red"))
        else:
            console.print(text(f"{finding.level}[{finding.code}] {said(finding)}", style))
    for line in report.fixed:
        console.print(text(line))
    console.print(text(report.conclusion(**how)))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and value - value != 0:
        return repr(value)
    return value
