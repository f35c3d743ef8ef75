"""The validator's report: plain data, its JSON, its exit code and its table for the terminal."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from io import StringIO
from typing import Any

from cnorm.text import printable

SCHEMA = 1
VERDICTS = ("ok", "risky", "inaccurate", "wrong", "not exercised")
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
    verdict : {"ok", "risky", "inaccurate", "wrong", "not exercised"}
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
    """

    path: str
    norms: list[NormReport] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    problem: str = ""
    refused: bool = False
    versions: dict[str, str] = field(default_factory=dict)
    fixed: list[str] = field(default_factory=list)
    external_data: list[str] = field(default_factory=list)

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
        show(self, Console(file=text, width=120))
        return text.getvalue().rstrip()

    def exit_code(self, *, strict: bool = False, require_norm: bool = False) -> int:
        """3 refused, 1 unsound, 2 cannot validate, 0 sound; the first that applies, in this order."""
        bad_verdicts = {"wrong", "inaccurate"} | ({"risky"} if strict else set())
        bad_levels = {"error"} | ({"warning"} if strict else set())
        if self.refused:
            return REFUSED
        if any(n.verdict in bad_verdicts for n in self.norms) or any(f.level in bad_levels for f in self.findings):
            return UNSOUND
        judged = [n for n in self.norms if n.verdict != "not exercised"]
        unseen = strict and len(judged) < len(self.norms)
        if self.problem or unseen or (require_norm and all(n.near_miss for n in judged)):
            return CANNOT
        return SOUND

    def summary(self) -> str:
        """The result in one sentence."""
        norms = [n for n in self.norms if not n.near_miss]
        if not self.norms and not self.problem:
            return "no layer norm in this file"
        counts = {verdict: sum(n.verdict == verdict for n in self.norms) for verdict in VERDICTS}
        near = len(self.norms) - len(norms)
        parts = [f"{count} {verdict}" for verdict, count in counts.items() if count]
        text = f"{len(norms)} layer norm{'s' * (len(norms) != 1)}"
        text += f" and {near} near miss{'es' * (near != 1)}" if near else ""
        return f"{text}: {', '.join(parts)}" if parts else text

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ValidationReport:
        """The inverse of `dataclasses.asdict`."""
        norms = [NormReport(**norm) for norm in data["norms"]]
        return cls(**{**data, "norms": norms, "findings": [Finding(**f) for f in data["findings"]]})

    def to_json(self) -> str:
        """The report as JSON (schema: docs/validator.md); NaN and infinities are written as strings."""
        codes = {"exit_code": self.exit_code(), "strict_exit_code": self.exit_code(strict=True)}
        data = {"schema": SCHEMA, **codes, "summary": self.summary(), **asdict(self)}
        return json.dumps(_finite(data), indent=1, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and value - value != 0:
        return repr(value)
    return value


_COLOURS = {
    "ok": "green",
    "risky": "yellow",
    "inaccurate": "red",
    "wrong": "bold red",
    "not exercised": "dim",
}


def show(report: ValidationReport, console) -> None:
    """Print the report on a rich console."""
    from rich.table import Table
    from rich.text import Text

    def text(value: object, style: str = "") -> Text:
        return Text(printable(str(value)), style=style)

    if report.norms:
        table = Table(title=text(report.path), title_justify="left", pad_edge=False)
        for heading in ("norm", "what", "axes", "eps", "error", "bound", "verdict"):
            table.add_column(heading, overflow="fold")
        for norm in report.norms:
            scale, bias = ("·scale" if norm.scale else ""), ("+bias" if norm.bias else "")
            table.add_row(
                text(f"{norm.name} ({norm.scope})" if norm.scope else norm.name),
                text(
                    f"{norm.formula}{scale}{bias}, {norm.variance}, {norm.compute_dtype}"
                    + (", near miss" if norm.near_miss else "")
                ),
                text("all" if norm.axes is None else ",".join(map(str, norm.axes))),
                text(f"{norm.eps:.7g}"),
                text("" if norm.error is None else f"{norm.error:.0e}"),
                text("" if norm.bound is None else f"{norm.bound:.0e}"),
                text(f"{norm.verdict} ({norm.blame})" if norm.blame else norm.verdict, _COLOURS[norm.verdict]),
            )
        console.print(table)
    for norm in report.norms:
        if norm.detail:
            console.print(text(f"{norm.name}: {norm.detail}", _COLOURS[norm.verdict]))
    for finding in report.findings:
        style = {"error": "red", "warning": "yellow", "note": "dim"}[finding.level]
        about = f"{finding.norm}: " if finding.norm else ""
        console.print(text(f"{finding.level}[{finding.code}] {about}{finding.message}", style))
    for line in report.fixed:
        console.print(text(line))
    if report.problem:
        word = "refused" if report.refused else "cannot validate"
        console.print(text(f"{word}: {report.problem}", "bold red"))
    console.print(text(report.summary()))
