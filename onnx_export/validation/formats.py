"""A report as a table, as lines of text, as GitHub's annotations, as SARIF and as JUnit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from xml.etree import ElementTree

from cnorm.text import printable
from onnx_export.validation.codes import CODES
from onnx_export.validation.report import (
    CANNOT,
    NOT_JUDGED,
    RECURRENCE,
    REFUSED,
    SOUND,
    UNSOUND,
    VERDICT_LEVELS,
    CellReport,
    Finding,
    NormReport,
    ValidationReport,
    failing_levels,
    many,
)

_LEVELS = {"error": "error", "warning": "warning", "note": "notice"}
_MOST_NAMES = 3
_PROBLEMS = ("cannot-validate", "refused")
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


def lines(report: ValidationReport, *, notes: bool = False, **how: bool) -> Iterator[str]:
    """One line for each norm, recurrent node and finding, and the conclusion; names are not shortened.

    `how` are the options of `ValidationReport.exit_code`.
    """
    path = printable(report.path)
    for each in report.judged:
        yield printable(f"{path}: {each.verdict}: {each.name}: {facts(each)}")
    for finding in _before_conclusion(report, notes, **how):
        yield printable(f"{path}: {finding.level}[{finding.code}]: {_said(finding)}")
    for line in report.fixed:
        yield printable(f"{path}: {line}")
    yield printable(f"{path}: {report.conclusion(**how)}")


def _before_conclusion(report: ValidationReport, notes: bool, **how: bool) -> list[Finding]:
    """The findings to print before the conclusion, which says itself why a file could not be validated."""
    said = report.exit_code(**how) in (CANNOT, REFUSED)
    return [each for each in shown_findings(report, notes) if not (said and each.code in _PROBLEMS)]


def _said(finding: Finding) -> str:
    return f"{finding.norm}: {finding.message}" if finding.norm else finding.message


def facts(each: NormReport | CellReport) -> str:
    """What a norm or a recurrent node is, and its error, in one line."""
    error = "" if each.error is None or each.bound is None else ", error {} of {}".format(*_numbers(each))
    if isinstance(each, CellReport):
        return f"{cell_facts(each)}{error}"
    axes = "all axes" if each.axes is None else f"axes {','.join(map(str, each.axes))}"
    return f"{formula(each)}, {axes}, eps {each.eps:.7g}, {_variance(each)}{each.compute_dtype}{error}"


def _numbers(each: NormReport | CellReport) -> tuple[str, str]:
    """Error and bound with one digit, with three where they would look alike; empty where there are none."""
    known = each.error is not None and each.bound is not None
    digits = 2 if known and f"{each.error:.0e}" == f"{each.bound:.0e}" else 0
    error, bound = ("" if value is None else f"{value:.{digits}e}" for value in (each.error, each.bound))
    return error, bound


def formula(norm: NormReport) -> str:
    """What a norm is, and of which value."""
    return f"{norm.formula} of {norm.of}" if norm.of else norm.formula


def _variance(norm: NormReport) -> str:
    """How the variance is computed; the mean square of an RMS norm is not centred."""
    return "" if norm.formula == "rms" and norm.variance == "centred" else f"{norm.variance}, "


def cell_facts(cell: CellReport) -> str:
    """What a recurrent node is: its sizes, and the facts that are not what they usually are."""
    usual = {"direction": "forward", "initial_h": "zeros", "initial_c": "zeros", "sequence_lens": "all"}
    told = {name.replace("_", " "): fact for name, fact in cell.facts.items() if usual.get(name) != fact}
    if cell.kind == RECURRENCE:
        return f"{cell.kind}, {', '.join(told.values())}"
    sizes = f"{cell.inputs or '?'} -> {cell.units or '?'}"
    return ", ".join([f"{cell.kind} {sizes}", *(f"{name} {fact}" for name, fact in told.items())])


def github(report: ValidationReport, *, notes: bool = False, **how: bool) -> Iterator[str]:
    """GitHub workflow commands, which show as annotations of the file."""
    for finding in shown_findings(report, notes):
        file, title = _escaped(report.path, ",:"), _escaped(f"cnorm {finding.code}", ",:")
        if finding.code != "notes":
            yield f"::{_LEVELS[finding.level]} file={file},title={title}::{_escaped(_said(finding))}"
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
            text = printable(_said(finding)) or finding.code
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
                kind = "error" if finding.code in _PROBLEMS else "failure"
                ElementTree.SubElement(place, kind, type=finding.code, message=_xml(_said(finding)))
                failures += 1
            elif finding.code in ("not-exercised", "not-judged"):
                ElementTree.SubElement(place, "skipped", message=_xml(finding.message))
        if _fails_alone(report, **how):
            ElementTree.SubElement(whole, "error", type="cannot-validate", message=_xml(report.conclusion(**how)))
            failures += 1
        elif not report.judged and not report.problem and not report.compared:
            ElementTree.SubElement(whole, "skipped", message=_xml(report.summary()))
        told = [f"{each.level}[{each.code}]: {_said(each)}" for each in found if each.level not in failing]
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
                *map(text, _columns(each)),
                *map(text, _numbers(each)),
                text(f"{each.verdict} ({each.blame})" if each.blame else each.verdict, _COLOURS[each.verdict]),
            )
        console.print(table)
    for finding in _before_conclusion(report, notes, **how):
        style = {"error": "red", "warning": "yellow", "note": "dim"}[finding.level]
        if finding.code in _PROBLEMS:
            console.print(text(f"{finding.code.replace('-', ' ')}: {finding.message}", "bold red"))
        else:
            console.print(text(f"{finding.level}[{finding.code}] {_said(finding)}", style))
    for line in report.fixed:
        console.print(text(line))
    console.print(text(report.conclusion(**how)))


def _columns(each: NormReport | CellReport) -> tuple[str, str, str]:
    """What a norm or a recurrent node is, its axes and its eps."""
    if isinstance(each, CellReport):
        return cell_facts(each), "", ""
    scale, bias = ("·scale" if each.scale else ""), ("+bias" if each.bias else "")
    what = f"{formula(each)}{scale}{bias}, {_variance(each)}{each.compute_dtype}"
    axes = "all" if each.axes is None else ",".join(map(str, each.axes))
    return what, axes, f"{each.eps:.7g}"
