"""A report as lines of text, as GitHub's annotations, and as SARIF."""

from __future__ import annotations

import json
from collections.abc import Iterator

from cnorm.text import printable
from onnx_export.validation.codes import CODES
from onnx_export.validation.report import Finding, NormReport, ValidationReport

_LEVELS = {"error": "error", "warning": "warning", "note": "notice"}
_VERDICT_LEVELS = {"wrong": "error", "inaccurate": "error", "risky": "warning", "not exercised": "note"}
_MOST_NAMES = 3


def all_findings(report: ValidationReport) -> list[Finding]:
    """The findings of a report, its verdicts and its problem among them."""
    found = [
        Finding(
            _VERDICT_LEVELS[norm.verdict], norm.verdict.replace(" ", "-"), norm.detail or "it was not run", norm.name
        )
        for norm in report.norms
        if norm.verdict in _VERDICT_LEVELS
    ]
    found += report.findings
    if report.problem:
        found.append(Finding("error", "refused" if report.refused else "cannot-validate", report.problem))
    return found


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


def lines(report: ValidationReport) -> Iterator[str]:
    """One line for each norm and finding, and the summary; names are not shortened."""
    path = printable(report.path)
    for norm in report.norms:
        yield printable(f"{path}: {norm.verdict}: {norm.name}: {_facts(norm)}")
    for finding in digest(all_findings(report)):
        about = f"{finding.norm}: " if finding.norm else ""
        yield printable(f"{path}: {finding.level}[{finding.code}]: {about}{finding.message}")
    for line in report.fixed:
        yield printable(f"{path}: {line}")
    yield f"{path}: {report.summary()}"


def _facts(norm: NormReport) -> str:
    axes = "all axes" if norm.axes is None else f"axes {','.join(map(str, norm.axes))}"
    error = "" if norm.error is None or norm.bound is None else f", error {norm.error:.0e} of {norm.bound:.0e}"
    return f"{norm.formula}, {axes}, eps {norm.eps:.7g}, {norm.variance}, {norm.compute_dtype}{error}"


def github(report: ValidationReport) -> Iterator[str]:
    """GitHub workflow commands, which show as annotations of the file."""
    for finding in digest(all_findings(report)):
        about = f"{finding.norm}: " if finding.norm else ""
        file, title = _escaped(report.path, ",:"), _escaped(f"cnorm {finding.code}", ",:")
        yield f"::{_LEVELS[finding.level]} file={file},title={title}::{_escaped(about + finding.message)}"
    yield f"{printable(report.path)}: {report.summary()}"


def _escaped(text: str, more: str = "") -> str:
    text = printable(text)
    return "".join(f"%{ord(c):02X}" if c in "%\r\n" + more else c for c in text)


def sarif(reports: list[ValidationReport]) -> str:
    """SARIF 2.1.0, one result for each finding."""
    results = []
    rules: dict[str, None] = {}
    for report in reports:
        for finding in all_findings(report):
            rules.setdefault(finding.code)
            about = f"{finding.norm}: " if finding.norm else ""
            location = {"physicalLocation": {"artifactLocation": {"uri": report.path.replace("\\", "/")}}}
            text = printable(about + finding.message) or finding.code
            results.append(
                {"ruleId": finding.code, "level": finding.level, "message": {"text": text}, "locations": [location]}
            )
    described = [{"id": code, "shortDescription": {"text": CODES[code]}} for code in rules]
    driver = {"name": "cnorm validate", "rules": described}
    return json.dumps(
        {
            "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
            "version": "2.1.0",
            "runs": [{"tool": {"driver": driver}, "results": results}],
        },
        indent=1,
    )
