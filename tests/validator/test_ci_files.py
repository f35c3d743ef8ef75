"""The action and the pre-commit hook run the validator; steps and entry are taken from the files and executed."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import gallery
import onnx
import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


@pytest.fixture
def models(tmp_path):
    """A folder whose name has a space, with a sound model and one with a warning."""
    folder = tmp_path / "my models"
    folder.mkdir()
    onnx.save(gallery.native_layer_norm().model, folder / "sound.onnx")
    onnx.save(gallery.not_centred().model, folder / "near miss.onnx")
    return folder


@pytest.mark.exhaustive
def test_the_action_validates_a_folder_and_passes_its_arguments_on(models):
    text = (ROOT / "action.yml").read_text()
    install, run = re.findall(r"^      run: (.*)$", text, re.MULTILINE)
    assert install == 'python -m pip install "$ACTION_PATH[onnx]"'
    for arguments, code in (("", 0), ("--strict --batch 2", 1)):
        given = ENVIRONMENT | {"MODELS": str(models), "ARGUMENTS": arguments}
        done = subprocess.run(["bash", "-c", run], env=given, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        assert "::warning" in done.stdout
        assert "near miss.onnx" in done.stdout


def test_inputs_reach_the_shell_as_variables_only():
    """An expression inside a script would be executed as part of it."""
    text = (ROOT / "action.yml").read_text()
    assert all("${{" not in line for line in re.findall(r"run: .*", text))


@pytest.mark.exhaustive
def test_the_pre_commit_hook_takes_several_files(models):
    text = (ROOT / ".pre-commit-hooks.yaml").read_text()
    (entry,) = re.findall(r"^  entry: (.*)$", text, re.MULTILINE)
    (pattern,) = re.findall(r"^  files: (.*)$", text, re.MULTILINE)
    files = sorted(str(path) for path in models.iterdir())
    assert re.search(pattern, "model.onnx.data")
    assert all(re.search(pattern, file) for file in files)
    for more, code in ([], 0), (["--strict"], 1):
        done = subprocess.run([*shlex.split(entry), *more, *files], env=ENVIRONMENT, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["onnx"]
    assert all(f'"{each}"' in text for each in needed)
