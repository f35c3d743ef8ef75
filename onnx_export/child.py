"""Run a function of this package in a child process, with limits on time and memory.

A file from a stranger is untrusted input, and the C++ code of the parser, shape inference and onnxruntime is not
hardened against it. If that code crashes, hangs or exhausts memory, only the child ends, and the caller is told so.
This protects against accidents, not against attacks: the child is no sandbox, it has the rights of the user.
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
from importlib import import_module
from typing import Any

__all__ = ["Listener", "lower", "run"]

Listener = Callable[[str, Any, bytes], None]

_MOST_TEXT = 2**28  # bytes of messages
_MOST_BYTES = 4 << 30  # of what a message carries
_PR_SET_PDEATHSIG = 1
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from onnx_export.child import main; main()"


class _Trouble(Exception):
    """What ended the listening."""


def run(
    function: str, request: dict[str, Any], listener: Listener, *, timeout: float, memory: int, seconds: float = 0.0
) -> str:
    """Call a function of this package as function(request, emit) in a child process.

    The child is a new interpreter, not a fork: it inherits no locks of other threads and imports nothing of the
    caller's program, so that no ``if __name__`` is needed.

    Parameters
    ----------
    function : str
        "module:name".
    request : dict
        JSON.
    listener : callable
        Called here with (kind, value, data) of each message, for which the function calls emit(kind, value, data):
        a str, JSON and bytes.
    timeout : float
        Seconds until the child is killed.
    memory : int
        Bytes of address space. A lower limit of this process remains in force.
    seconds : float
        Processor time; 0 for none but `timeout`.

    Returns
    -------
    str
        What went wrong with the child, for the user; "" if the function returned.
    """
    deadline = time.monotonic() + timeout
    order = {"function": function, "request": request, "memory": memory, "seconds": int(seconds or timeout) + 2}
    done = trouble = ""

    def listen(kind: str, value, data: bytes) -> None:
        nonlocal done, trouble
        if kind == "done":
            done = kind
        elif kind == "trouble":
            trouble = str(value)
        else:
            listener(kind, value, data)

    with _scratch() as scratch:
        process = _started(scratch)
        try:
            process.stdin.write(json.dumps(order).encode())
            process.stdin.close()
            for message in _messages(process.stdout.fileno(), deadline):
                listen(*message)
            process.wait()
        except _Trouble as error:
            trouble = str(error)
        except BrokenPipeError:
            trouble = "the child process did not start"
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
    return trouble or ("" if done else _death(process.returncode))


def _death(code: int) -> str:
    if code == -signal.SIGXCPU:
        return "the limit of processor time was reached"
    return f"the child process died of {signal.Signals(-code).name if code < 0 else f'exit {code}'}"


@contextmanager
def _scratch() -> Iterator[str]:
    """The child's TMPDIR. With memfd_create, /dev/null is used, so that a child that is killed leaves no files.

    onnxruntime 1.32 writes a file .ses to TMPDIR when it is imported, and continues if it cannot.
    """
    if hasattr(os, "memfd_create"):
        yield os.devnull
        return
    with tempfile.TemporaryDirectory(prefix="cnorm-child-") as folder:
        yield folder


def _started(scratch: str) -> subprocess.Popen:
    command = [sys.executable, "-I", "-c", _START, json.dumps(sys.path), str(os.getpid())]
    environment = {**os.environ, "TMPDIR": scratch, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,  # so that Ctrl-C goes to the parent only
    )


def _messages(source: int, deadline: float) -> Iterator[tuple[str, Any, bytes]]:
    """The child's messages until it closes its output: a line of JSON, and as many bytes as it says."""
    pending, text = bytearray(), 0
    while (end := _filled(pending, source, deadline, lambda start: pending.find(b"\n", start))) >= 0:
        kind, value, size = json.loads(pending[:end])
        del pending[: end + 1]
        text += end
        if text > _MOST_TEXT or size > _MOST_BYTES:
            raise _Trouble("the report is too large")
        if size and _filled(pending, source, deadline, lambda _: size if len(pending) >= size else -1) < 0:  # noqa: B023
            return
        data = bytes(memoryview(pending)[:size])
        del pending[:size]
        yield kind, value, data


def _filled(pending: bytearray, source: int, deadline: float, end: Callable[[int], int]) -> int:
    """Read until `end`, which is told how much it has seen, finds one; -1 at the end of the child's output."""
    seen = 0
    while (found := end(seen)) < 0:
        seen = len(pending)
        if seen > _MOST_TEXT + _MOST_BYTES:
            raise _Trouble("the report is too large")
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([source], [], [], left)[0]:
            raise _Trouble("the time limit was reached")
        chunk = os.read(source, 1 << 20)
        if not chunk:
            return -1
        pending += chunk
    return found


# -------------------------------------------------------------------------------------------- in the child


def main() -> None:
    """Entry point of the child: an order on stdin, messages on stdout."""
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # native code that prints to stdout must not corrupt the messages

    def emit(kind: str, value: object = None, data: bytes = b"") -> None:
        channel.write(json.dumps([kind, value, len(data)]).encode() + b"\n")
        channel.write(data)
        channel.flush()

    _end_with_parent(int(sys.argv[2]))
    order = json.load(sys.stdin)
    lower(resource.RLIMIT_CORE, 0)
    lower(resource.RLIMIT_AS, order["memory"])
    # one thread computes, so the parent's time limit comes first; this one ends a child whose parent is gone
    lower(resource.RLIMIT_CPU, order["seconds"])
    emit("stage", "start")
    module, _, name = order["function"].partition(":")
    try:
        # imported here, under the limits: onnxruntime starts threads and allocates
        getattr(import_module(module), name)(order["request"], emit)
    except MemoryError:
        memory = resource.getrlimit(resource.RLIMIT_AS)[0]
        emit("trouble", f"the memory limit of {memory / 2**30:.3g} GiB was reached")
    except Exception as error:  # a bug of this package, or untrusted input that no test has
        emit("trouble", f"unexpected {type(error).__name__}: {str(error)[:400]}")
    emit("done")


def _end_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when the parent ends, for whatever reason; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the request reached the kernel
            sys.exit(1)


def lower(kind: int, wanted: int) -> None:
    """Set a resource limit, no higher than the current hard limit."""
    hard = resource.getrlimit(kind)[1]
    after = 1 if kind == resource.RLIMIT_CPU else 0  # at the hard limit SIGKILL comes, which tells no reason
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard - after)
    resource.setrlimit(kind, (most, most + after))
