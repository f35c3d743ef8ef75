"""The hand-written stubs say what the extension module has."""

import subprocess
import sys

# Cython's own additions
ALLOWED = (
    "cnorm._core.__pyx_capi__\ncnorm._core.__test__\ncnorm._core.*__reduce_cython__\ncnorm._core.*__setstate_cython__\n"
)


def test_stubs_match_the_extension(tmp_path):
    (tmp_path / "allowed").write_text(ALLOWED)
    result = subprocess.run(
        [sys.executable, "-P", "-m", "mypy.stubtest", "cnorm._core", "--allowlist", "allowed",
         "--ignore-unused-allowlist", "--ignore-missing-stub"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
