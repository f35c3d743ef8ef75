"""`cnorm export`: what it writes, prints and returns."""

import json
import os
import subprocess
import sys

import cnorm
import onnx_export


def command(*arguments, cwd):
    code = "import sys; from cnorm.cli import main; sys.argv[0] = 'cnorm'; main()"
    return subprocess.run(
        [sys.executable, "-P", "-c", code, "export", *arguments], capture_output=True, text=True, cwd=cwd
    )


def test_export_and_check(tmp_path):
    cnorm.demo_model().save(tmp_path / "demo.safetensors")
    done = command("demo.safetensors", "demo.onnx", "--check", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "demo.onnx: step form, opset 17, float32" in done.stdout
    assert "equal within float32 rounding" in " ".join(done.stdout.split())
    assert onnx_export.check_parity(cnorm.demo_model(), tmp_path / "demo.onnx", steps=2).ok


def test_every_option_and_the_report_as_json(tmp_path):
    cnorm.demo_model().save(tmp_path / "demo.safetensors")
    options = ["--form", "sequence", "--opset", "18", "--batch", "n", "--functions", "--dtype", "float16"]
    done = command("demo.safetensors", "demo.onnx", *options, "--check", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"] is True


def test_errors_are_one_sentence_and_leave_no_file(tmp_path):
    cnorm.demo_model().save(tmp_path / "demo.safetensors")
    for options, says in ((["--native-ops"], "the operators have no layer norm"), (["--opset", "99"], "opset must be")):
        done = command("demo.safetensors", "demo.onnx", *options, cwd=tmp_path)
        assert done.returncode == 1
        assert says in done.stderr
        assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == ["demo.safetensors"]
