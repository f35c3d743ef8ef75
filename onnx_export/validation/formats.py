"""A report as lines of text, as GitHub's annotations, as SARIF and as JUnit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from xml.etree import ElementTree

from cnorm.text import printable
from onnx_export.validation.codes import CODES
from onnx_export.validation.findings import facts, failing_levels, many, said
from onnx_export.validation.report import (
    PROBLEMS,
    SOUND,
    UNSOUND,
    ValidationReport,
    all_findings,
    before_conclusion,
    shown_findings,
)

_LEVELS = {"error": "error", "warning": "warning", "note": "notice"}


def lines(report: ValidationReport, *, notes: bool = False, **how: bool) -> Iterator[str]:
    """One line for each norm, recurrent node and finding, and the conclusion; names are not shortened.

    `how` are the options of `ValidationReport.exit_code`.
    """
    path = printable(report.path)
    for each in report.judged:
        yield printable(f"{path}: {each.verdict}: {each.name}: {facts(each)}")
    for finding in before_conclusion(report, notes, **how):
        yield printable(f"{path}: {finding.level}[{finding.code}]: {said(finding)}")
    for line in report.fixed:
        yield printable(f"{path}: {line}")
    yield printable(f"{path}: {report.conclusion(**how)}")


def github(report: ValidationReport, *, notes: bool = False, **how: bool) -> Iterator[str]:
    """GitHub workflow commands, which show as annotations of the file."""
    for finding in shown_findings(report, notes):
        file, title = _escaped(report.path, ",:"), _escaped(f"cnorm {finding.code}", ",:")
        if finding.code != "notes":
            yield f"::{_LEVELS[finding.level]} file={file},title={title}::{_escaped(said(finding))}"
    if _fails_alone(report, **how):
        yield f"::error file={_escaped(report.path, ',:')},title=cnorm::{_escaped(report.conclusion(**how))}"
    yield printable(f"{report.path}: {report.conclusion(**how)}")


def overview(reports: list[ValidationReport], **how: bool) -> str:
    """What became of several files, in one line; `how` are the options of `ValidationReport.exit_code`."""
    outcomes = [report.conclusion(**how).partition(":")[0] for report in reports]
    warned = sum(r.levels()["warning"] > 0 for o, r in zip(outcomes, reports, strict=True) if o == "passed")
    words = {
        "passed": "passed" + f" ({warned} with warnings)" * bool(warned),
        "failed": "failed",
        "cannot validate": "could not be validated",
        "refused": "refused",
        "nothing was checked": "with nothing that was checked",
    }
    counts = [f"{outcomes.count(each)} {said}" for each, said in words.items() if each in outcomes]
    return f"{many(len(reports), 'file')}: {', '.join(counts)}"


def _escaped(text: str, more: str = "") -> str:
    text = printable(text)
    return "".join(f"%{ord(c):02X}" if c in "%\r\n" + more else c for c in text)


def sarif(reports: list[ValidationReport], **how: bool) -> str:
    """SARIF 2.1.0: a result for each finding, an invocation with the exit code and its reason for each file."""
    results = []
    rules: dict[str, None] = {}
    for report in reports:
        for finding in all_findings(report):
            rules.setdefault(finding.code)
            location = {"physicalLocation": {"artifactLocation": {"uri": report.path.replace("\\", "/")}}}
            if finding.norm:
                location["logicalLocations"] = [{"fullyQualifiedName": printable(finding.norm)}]
            text = printable(said(finding)) or finding.code
            results.append(
                {"ruleId": finding.code, "level": finding.level, "message": {"text": text}, "locations": [location]}
            )
    codes = [report.exit_code(**how) for report in reports]
    outcomes = [
        {
            "executionSuccessful": code in (SOUND, UNSOUND),
            "exitCode": code,
            "exitCodeDescription": printable(f"{report.path}: {report.conclusion(**how)}"),
        }
        for code, report in zip(codes, reports, strict=True)
    ]
    described = [{"id": code, "shortDescription": {"text": CODES[code]}} for code in rules]
    driver = {"name": "cnorm validate", "rules": described}
    return json.dumps(
        {
            "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
            "version": "2.1.0",
            "runs": [{"tool": {"driver": driver}, "invocations": outcomes, "results": results}],
        },
        indent=1,
    )


def junit(reports: list[ValidationReport], **how: bool) -> str:
    """JUnit's XML: a suite for each file, a case for each norm and recurrent node and one for the file as a whole.

    Findings of `failing_levels` fail a case; what was not exercised is skipped.
    """
    root = ElementTree.Element("testsuites", name="cnorm validate")
    failing = failing_levels(**how)
    for report in reports:
        names = dict.fromkeys(each.name for each in report.judged)
        cases = {name: ElementTree.Element("testcase", classname=_xml(report.path), name=_xml(name)) for name in names}
        whole = ElementTree.Element("testcase", classname=_xml(report.path), name="file")
        found = all_findings(report)
        failures = 0
        for finding in found:
            place = cases.get(finding.norm, whole)
            if finding.level in failing:
                kind = "error" if finding.code in PROBLEMS else "failure"
                ElementTree.SubElement(place, kind, type=finding.code, message=_xml(said(finding)))
                failures += 1
            elif finding.code in ("not-exercised", "not-judged"):
                ElementTree.SubElement(place, "skipped", message=_xml(finding.message))
        if _fails_alone(report, **how):
            ElementTree.SubElement(whole, "error", type="cannot-validate", message=_xml(report.conclusion(**how)))
            failures += 1
        elif not report.judged and not report.problem and not report.compared:
            ElementTree.SubElement(whole, "skipped", message=_xml(report.summary()))
        told = [f"{each.level}[{each.code}]: {said(each)}" for each in found if each.level not in failing]
        ElementTree.SubElement(whole, "system-out").text = _xml("\n".join([*told, report.conclusion(**how)]), "\n")
        suite = ElementTree.SubElement(root, "testsuite", name=_xml(report.path), tests=str(len(cases) + 1))
        suite.set("failures", str(failures))
        suite.extend([*cases.values(), whole])
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True)


def _fails_alone(report: ValidationReport, **how: bool) -> bool:
    """Whether the exit code is not 0 for a reason that no finding gives, such as a norm that is required."""
    failing = failing_levels(**how)
    return report.exit_code(**how) != SOUND and all(each.level not in failing for each in all_findings(report))


def _xml(text: str, kept: str = "") -> str:
    """Text without the characters that XML forbids; ElementTree escapes the others."""
    return "".join(c if c in kept or c.isprintable() else " " for c in text)
