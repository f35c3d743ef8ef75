"""Scripts in processes of their own, in which memory that is freed is overwritten: who reads it gets wrong numbers."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path


def succeed(script: str, *arguments: str) -> str:
    """What the script writes; AssertionError with its errors if it fails."""
    options = ["-S"] if sys.flags.no_site else []  # `make sanitize`, whose extension the editable install would hide
    result = subprocess.run(
        [sys.executable, *options, "-P", "-c", textwrap.dedent(script), *arguments],
        env={**os.environ, "MALLOC_PERTURB_": "165"},  # of glibc
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, f"exit code {result.returncode}\n{result.stderr[-2000:]}"
    return result.stdout


APART = """
    import importlib, os, sys
    sys.path[:0] = sys.argv[1:3]
    getattr(importlib.import_module(sys.argv[3]), sys.argv[4])(*sys.argv[5:])
    os._exit(0)
"""


def succeed_apart(function, *arguments: str) -> None:
    """Call a function of a test file in an interpreter of its own, which ends at once behind it.

    Where a process forks, threads of other tests may hold locks that its child then waits for; and PyTorch's process
    groups may wait for their own threads when they are destroyed.
    """
    file = Path(function.__code__.co_filename)
    succeed(APART, str(file.parent), str(Path(__file__).parent), file.stem, function.__name__, *arguments)
