"""The report as one static HTML page without scripts or other files; every string from the model is escaped."""

from __future__ import annotations

from html import escape
from math import isfinite, log10

from cnorm.text import printable
from onnx_export.validation.findings import CellReport, NormReport, cell_facts, formula
from onnx_export.validation.report import ValidationReport, all_findings

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72em; margin: 2em auto; padding: 0 1em;
  color: #1b1f24; background: #fff; }
h1 { font-size: 1.4em; overflow-wrap: anywhere; }
h2 { font-size: 1.05em; margin: 0; overflow-wrap: anywhere; }
.norm { display: flex; flex-wrap: wrap; gap: 1.5em; border-top: 1px solid #d0d7de; padding: 1em 0; }
.norm > div { flex: 1 1 24em; min-width: 0; }
svg { flex: none; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1em; margin: .5em 0 0; }
dt { color: #59636e; }
dd { margin: 0; overflow-wrap: anywhere; }
.verdict { display: inline-block; padding: 0 .6em; border-radius: 1em; font-weight: 600; }
.ok, .passed { background: #dafbe1; color: #116329; }
.risky, .near, .cannot, .judged { background: #fff8c5; color: #7d4e00; }
.inaccurate, .wrong, .failed, .refused { background: #ffebe9; color: #a40e26; }
.exercised, .nothing { background: #eaeef2; color: #59636e; }
.error { color: #a40e26; }
.warning { color: #7d4e00; }
.note { color: #59636e; }
svg text { font: 11px system-ui, sans-serif; fill: #59636e; }
footer { border-top: 1px solid #d0d7de; margin-top: 1em; padding-top: .5em; color: #59636e; }
"""
_RUN, _STRESS = "#0969da", "#bc4c00"


def _text(value: object) -> str:
    return escape(printable(str(value)), quote=True)


def page(report: ValidationReport, **how: bool) -> str:
    """The whole page; `how` are the options of `ValidationReport.exit_code`."""
    findings = "".join(
        f"<li class={f.level}>{_text(f.level)} [{_text(f.code)}] {_text(f.norm + ': ' if f.norm else '')}"
        f"{_text(f.message)}</li>"
        for f in sorted(all_findings(report), key=lambda f: ("error", "warning", "note").index(f.level))
    )
    outcome, _, reason = report.conclusion(**how).partition(": ")
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{_text(report.path)}</title><style>{_STYLE}</style></head><body>"
        f'<h1>{_text(report.path)}</h1><p><strong class="verdict {_text(outcome)}">{_text(outcome)}</strong> '
        f"{_text(reason)}</p>"
        + (f"<ul>{findings}</ul>" if findings else "")
        + "".join(map(_norm, report.norms))
        + "".join(map(_cell, report.cells))
        + "".join(f"<p>{_text(line)}</p>" for line in report.fixed)
        + "<footer>Plots: error against float64 as a multiple of the bound, "
        f"over conditioning max|x| / sqrt(var + eps). {_text(versions)}</footer></body></html>\n"
    )


def _norm(norm: NormReport) -> str:
    facts = {
        "where": norm.scope,
        "form": f"{formula(norm)}, {norm.form}",
        "near miss": norm.near_miss,
        "axes": "all" if norm.axes is None else ", ".join(map(str, norm.axes)),
        "eps": f"{norm.eps:.9g} ({norm.eps_dtype})",
        "variance": f"{norm.variance}, {norm.compute_dtype}",
        "scale, bias": " / ".join(filter(None, (norm.scale, norm.bias))),
        "error / bound": "" if norm.error is None else f"{norm.error:.2e} / {norm.bound:.2e}",
        "conditioning": "" if norm.conditioning is None else f"{norm.conditioning:.3g}",
        "optimised into": norm.became,
        "fails on": ", ".join(norm.risks),
        "why": norm.detail,
    }
    return _section(norm, facts, _plot(norm))


def _cell(cell: CellReport) -> str:
    facts = {
        "where": cell.scope,
        "what": cell_facts(cell),
        "error / bound": "" if cell.error is None else f"{cell.error:.2e} / {cell.bound:.2e}",
        "why": cell.detail,
    }
    return _section(cell, facts, "")


def _section(each: NormReport | CellReport, facts: dict[str, str], plot: str) -> str:
    rows = "".join(f"<dt>{_text(key)}</dt><dd>{_text(value)}</dd>" for key, value in facts.items() if value)
    blame = f" ({each.blame})" if each.blame else ""
    return (
        f'<section class=norm><div><h2>{_text(each.name)}</h2><span class="verdict {_text(each.verdict)}">'
        f"{_text(each.verdict + blame)}</span><dl>{rows}</dl></div>{plot}</section>"
    )


def _plot(norm: NormReport, width: int = 340, height: int = 220) -> str:
    """Error over bound against conditioning, both logarithmic; the line is the bound."""
    left, right, top, bottom = 62, 10, 20, 34
    points = [(c, r, kind) for c, r, kind in norm.points if c > 0 and isfinite(c)]
    if not points:
        return ""
    low_x, high_x = -1.0, max(2.0, *(log10(c) for c, _, _ in points))
    low_y, high_y = -6.0, 6.0

    def place(conditioning: float, ratio: float) -> tuple[float, float]:
        x = (min(max(log10(conditioning), low_x), high_x) - low_x) / (high_x - low_x)
        level = log10(ratio) if 0 < ratio < float("inf") else (low_y if ratio <= 0 else high_y)
        y = (min(max(level, low_y), high_y) - low_y) / (high_y - low_y)
        return left + x * (width - left - right), height - bottom - y * (height - top - bottom)

    marks = []
    for c, r, kind in points:
        x, y = place(c, r)
        colour = _RUN if kind.startswith("run") else _STRESS
        marks.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}" fill-opacity=".6">'
            f"<title>{_text(kind)}</title></circle>"
        )
    ticks = []
    for power in range(int(low_x) + 1, int(high_x) + 1, max(1, int(high_x) // 4)):
        x, _ = place(10.0**power, 1.0)
        ticks.append(f'<text x="{x:.1f}" y="{height - bottom + 14}" text-anchor="middle">1e{power}</text>')
    for power in range(-6, 7, 3):
        _, y = place(1.0, 10.0**power)
        ticks.append(f'<text x="{left - 5}" y="{y + 4:.1f}" text-anchor="end">1e{power}</text>')
    _, bound = place(1.0, 1.0)
    inner_width, inner_height = width - left - right, height - top - bottom
    return (
        f'<svg width="{width}" height="{height}" role="img" aria-label="error against conditioning">'
        f'<rect x="{left}" y="{top}" width="{inner_width}" height="{inner_height}" fill="none" '
        'stroke="#d0d7de"/>'
        f'<line x1="{left}" x2="{width - right}" y1="{bound:.1f}" y2="{bound:.1f}" stroke="#a40e26" '
        'stroke-dasharray="4 3"/>'
        + "".join(ticks)
        + "".join(marks)
        + f'<text x="{left + inner_width / 2}" y="{height - 4}" text-anchor="middle">conditioning</text>'
        f'<text transform="translate(12 {top + inner_height / 2}) rotate(-90)" text-anchor="middle">'
        "error / bound</text>"
        f'<text x="{width - right}" y="{top - 7}" text-anchor="end"><tspan fill="{_RUN}">● run</tspan> '
        f'<tspan fill="{_STRESS}">● stress</tspan></text></svg>'
    )
