"""The example runs, and its second half really does without cnorm."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "onnx"
WITHOUT_CNORM = """
import runpy, sys
sys.modules["cnorm"] = sys.modules["onnx_export"] = None  # importing them is now an ImportError
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_export_and_run_elsewhere(tmp_path):
    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-P", *arguments], capture_output=True, text=True, check=True, cwd=tmp_path
        ).stdout

    assert "equal within float32 rounding" in run(EXAMPLE / "export.py", tmp_path / "out")
    said = run("-c", WITHOUT_CNORM, EXAMPLE / "run.py", tmp_path / "out")
    right, total, largest = re.search(r"(\d+) of (\d+) named; at most (\S+) from", said).groups()
    assert int(total) == 10
    assert int(right) >= 9
    assert float(largest) <= 5e-6
