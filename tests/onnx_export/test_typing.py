"""A type checker sees the types of the public names, although they are imported lazily."""

import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import onnx_export


def test_public_names_have_types(tmp_path):
    assert files("onnx_export").joinpath("py.typed").is_file()
    lines = [f"reveal_type(onnx_export.{name})" for name in onnx_export.__all__]
    (tmp_path / "user.py").write_text("\n".join(["import onnx_export", *lines, "onnx_export.exprot()"]))
    root = Path(onnx_export.__file__).parents[1]
    # mypy does not find an editable install by itself, and rejects a second path to it
    source = {} if root.name == "site-packages" else {"MYPYPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "mypy", "--follow-imports=silent", "user.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, env={**os.environ, **source},
    )  # fmt: skip
    said = done.stdout.splitlines()
    assert len(said) == len(lines) + 2, done.stdout + done.stderr
    for line in said[: len(lines)]:
        assert 'Revealed type is "def (' in line, line
    assert '"object" not callable' in said[-2]
