"""Run the examination in a child process (`onnx_export.child`), and report what became of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace

from onnx_export import child
from onnx_export.validation.findings import Finding
from onnx_export.validation.options import Options
from onnx_export.validation.report import ValidationReport

_FUNCTION = f"{__name__}:examined"


def run(path: str, options: Options, *, progress: Callable[[str, int, int], None] | None = None) -> ValidationReport:
    """Examine `path` in a child process, with the limits `options.timeout` and `options.memory`.

    `progress` is called with (stage, done, total).
    """
    started = time.monotonic()
    for infer_shapes in (True, False):
        left = options.timeout - (time.monotonic() - started)
        outcome = _Outcome(path, progress)
        request = {"path": path, "options": replace(options, infer_shapes=infer_shapes).to_json()}
        trouble = child.run(_FUNCTION, request, outcome.listen, timeout=left, memory=options.memory)
        if not trouble or outcome.stage != "shapes":
            break
    report = outcome.report
    if not infer_shapes:
        note = "shape inference brought the process down; the file was examined without it"
        report.findings.append(Finding("warning", "shapes", note))
    if trouble:
        report.problem = report.problem or f"{trouble} (stage: {outcome.stage})"
    report.settle()
    return report


class _Outcome:
    """The latest report and stage that a child told."""

    def __init__(self, path: str, progress) -> None:
        self.report, self.stage, self._progress = ValidationReport(path), "start", progress

    def listen(self, kind: str, value, data: bytes) -> None:
        if kind == "stage":
            self.stage = value
        elif kind == "report":
            self.report = ValidationReport.from_dict(value)
        if self._progress and kind in ("stage", "progress"):
            self._progress(self.stage, *(value if kind == "progress" else (0, 0)))


def examined(request, emit) -> None:
    """Examine a file; called in the child."""
    from onnx_export.validation.examine import examine

    def send(kind: str, value: object) -> None:
        emit(kind, asdict(value) if isinstance(value, ValidationReport) else value)

    send("report", examine(request["path"], Options.from_json(request["options"]), send))
