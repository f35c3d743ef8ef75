"""Scripts in processes of their own, in which memory that is freed is overwritten: who reads it gets wrong numbers."""

import os
import subprocess
import sys
import textwrap


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
