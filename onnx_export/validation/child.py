"""Run the examination in a child process, with limits on time and memory.

The file is untrusted input, and the C++ code of the parser, shape inference and onnxruntime is not hardened against
it. If that code crashes, hangs or exhausts memory, only the child ends, and the report says so. This protects against
accidents, not against attacks: the child is no sandbox, it has the rights of the user.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from onnx_export.validation.options import Options
from onnx_export.validation.report import Finding, ValidationReport

_MOST_OUTPUT = 2**28
_PR_SET_PDEATHSIG = 1
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {} import main; main()"


def run(path: str, options: Options, *, progress: Callable[[str, int, int], None] | None = None) -> ValidationReport:
    """Examine `path` in a child process, with the limits `options.timeout` and `options.memory`.

    `progress` is called with (stage, done, total).
    """
    started = time.monotonic()
    outcome = _Outcome(ValidationReport(path))
    for infer_shapes in (True, False):
        left = options.timeout - (time.monotonic() - started)
        with _scratch() as scratch:
            request = {
                "path": path,
                "options": replace(options, infer_shapes=infer_shapes).to_json(),
                "seconds": int(max(left, 0)) + 2,
            }
            outcome = _attempt(request, left, scratch, progress)
        if not outcome.trouble or outcome.stage != "shapes":
            break
    if not infer_shapes:
        note = "shape inference brought the process down; the file was examined without it"
        outcome.report.findings.append(Finding("warning", "shapes", note))
    if outcome.trouble:
        outcome.report.problem = outcome.report.problem or outcome.trouble
    outcome.report.settle()
    return outcome.report


@contextmanager
def _scratch() -> Iterator[str]:
    """The child's TMPDIR. With memfd_create, /dev/null is used, so that a child that is killed leaves no files.

    onnxruntime 1.32 writes a file .ses to TMPDIR when it is imported, and continues if it cannot.
    """
    if hasattr(os, "memfd_create"):
        yield os.devnull
        return
    with tempfile.TemporaryDirectory(prefix="cnorm-validate-") as folder:
        yield folder


class _Outcome:
    def __init__(self, report: ValidationReport) -> None:
        self.report, self.stage, self.trouble, self.finished = report, "start", "", False


def _attempt(request: dict[str, Any], timeout: float, scratch: str, progress) -> _Outcome:
    outcome = _Outcome(ValidationReport(request["path"]))
    command = [sys.executable, "-I", "-c", _START.format(__name__), json.dumps(sys.path), str(os.getpid())]
    environment = {**os.environ, "TMPDIR": scratch, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,  # so that Ctrl-C goes to the parent only
    )
    try:
        process.stdin.write(json.dumps(request).encode())
        process.stdin.close()
        outcome.trouble = _listen(process, time.monotonic() + timeout, outcome, progress)
        if outcome.trouble:
            outcome.trouble = f"{outcome.trouble} (stage: {outcome.stage})"
    except BrokenPipeError:
        outcome.trouble = "the examining process did not start"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    if not outcome.trouble and not outcome.finished:
        code = process.returncode
        how = signal.Signals(-code).name if code < 0 else f"exit {code}"
        outcome.trouble = f"the examining process died of {how} (stage: {outcome.stage})"
    return outcome


def _listen(process: subprocess.Popen, deadline: float, outcome: _Outcome, progress) -> str:
    """Read the child's messages until it closes its output; returns a description of the failure, or ""."""
    pending, total = b"", 0
    while True:
        left = deadline - time.monotonic()
        ready = select.select([process.stdout], [], [], max(0.0, left))[0] if left > 0 else []
        if not ready:
            return "the time limit was reached"
        chunk = os.read(process.stdout.fileno(), 1 << 20)
        if not chunk:
            process.wait()
            return ""
        total += len(chunk)
        if total > _MOST_OUTPUT:
            return "the report is too large"
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            kind, value = json.loads(line)
            if kind == "stage":
                outcome.stage = value
            elif kind == "report":
                outcome.report = ValidationReport.from_dict(value)
            elif kind == "done":
                outcome.finished = True
            if progress and kind in ("stage", "progress"):
                progress(outcome.stage, *(value if kind == "progress" else (0, 0)))


# -------------------------------------------------------------------------------------------- in the child


def main() -> None:
    """Entry point of the child: a request on stdin, lines of JSON on stdout."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # native code that prints to stdout must not corrupt the messages

    def emit(kind: str, value: object) -> None:
        value = asdict(value) if isinstance(value, ValidationReport) else value
        channel.write(json.dumps([kind, value]) + "\n")
        channel.flush()

    _end_with_parent(int(sys.argv[2]))
    request = json.load(sys.stdin)
    _limit(resource.RLIMIT_CORE, 0)
    request["memory"] = _limit(resource.RLIMIT_AS, request["options"]["memory"])
    # one thread computes, so the parent's time limit comes first; this one ends a child whose parent is gone
    _limit(resource.RLIMIT_CPU, request["seconds"])
    emit("stage", "start")
    emit("report", _examine(request, emit))
    emit("done", True)


def _end_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when the parent ends, for whatever reason; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the request reached the kernel
            sys.exit(1)


def _limit(kind: int, wanted: int) -> int:
    """Set a resource limit, no higher than the current hard limit; returns the limit set."""
    hard = resource.getrlimit(kind)[1]
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(kind, (most, most))
    return most


def _examine(request: dict[str, Any], emit) -> ValidationReport:
    latest, stage = ValidationReport(request["path"]), "start"

    def remember(kind: str, value: object) -> None:
        nonlocal latest, stage
        if kind == "report":
            latest = value
        elif kind == "stage":
            stage = value
        emit(kind, value)

    try:
        # imported here, under the limits: onnxruntime starts threads and allocates
        from onnx_export.validation.examine import examine

        return examine(request["path"], Options.from_json(request["options"]), remember)
    except MemoryError:
        limit = f"the memory limit of {request['memory'] / 2**30:.3g} GiB"
        return replace(latest, problem=f"{limit} was reached (stage: {stage})")
    except Exception as error:  # a bug of this package, or untrusted input that no test has
        return replace(latest, problem=f"unexpected {type(error).__name__}: {str(error)[:400]}")
