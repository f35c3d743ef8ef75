"""`cnorm export`: its files, output and exit codes."""

import json
import os
import subprocess
import sys

import pytest

import cnorm
import onnx_export


def command(*arguments, cwd, before="", name="export"):
    code = f"import sys; {before}from cnorm.tools.cli import main; sys.argv[0] = 'cnorm'; main()"
    return subprocess.run([sys.executable, "-P", "-c", code, name, *arguments], capture_output=True, text=True, cwd=cwd)


def test_export_and_check(tmp_path):
    cnorm.demo_model().save(tmp_path / "demo.safetensors")
    done = command("demo.safetensors", "demo.onnx", "--check", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "demo.onnx: step form, opset 17, float32" in done.stdout
    assert "equal within float32 rounding" in " ".join(done.stdout.split())
    assert onnx_export.check_parity(cnorm.demo_model(), tmp_path / "demo.onnx", steps=2).ok


def test_all_export_options_and_the_json_report(tmp_path):
    cnorm.demo_model().save(tmp_path / "demo.safetensors")
    options = ["--form", "sequence", "--opset", "18", "--batch", "n", "--dtype", "float16"]
    done = command("demo.safetensors", "demo.onnx", *options, "--check", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"] is True


def test_portable_options_of_the_command(tmp_path):
    cnorm.demo_model().save(tmp_path / "demo.safetensors")
    options = ["--form", "sequence", "--loop", "unrolled", "--steps", "4", "--portable", "--sidecar"]
    done = command("demo.safetensors", "demo.onnx", *options, "--check", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(tmp_path)) == ["demo.onnx", "demo.onnx.json", "demo.safetensors"]
    assert json.loads((tmp_path / "demo.onnx.json").read_text())["options"]["portable"] is True


def test_errors_are_one_sentence_and_leave_no_file(tmp_path):
    cnorm.demo_model().save(tmp_path / "demo.safetensors")
    wrong = (
        (["--native-ops"], 2, "the operators have no layer norm"),
        (["--opset", "99"], 2, "opset must be"),
        (["--json"], 2, "--json prints the report of --check"),
    )
    for options, code, says in wrong:
        done = command("demo.safetensors", "demo.onnx", *options, cwd=tmp_path)
        assert done.returncode == code
        assert says in done.stderr
        assert "Traceback" not in done.stderr
    done = command("demo.safetensors", "absent/demo.onnx", cwd=tmp_path)
    assert done.returncode == 2
    assert "Invalid value for 'OUT': folder 'absent' does not exist" in done.stderr
    assert os.listdir(tmp_path) == ["demo.safetensors"]


def test_the_model_is_never_replaced_by_its_export(tmp_path):
    cnorm.demo_model().save(tmp_path / "demo.safetensors")
    before = (tmp_path / "demo.safetensors").read_bytes()
    os.symlink(tmp_path / "demo.safetensors", tmp_path / "link")
    for out in "demo.safetensors", "./demo.safetensors", "link":
        done = command("demo.safetensors", out, cwd=tmp_path)
        assert done.returncode == 2
        assert "OUT must be another file than MODEL" in done.stderr
    assert (tmp_path / "demo.safetensors").read_bytes() == before


@pytest.mark.exhaustive
def test_missing_extras_are_named_in_one_line(tmp_path):
    cnorm.demo_model().save(tmp_path / "demo.safetensors")
    for absent in (["onnx"], ["onnxruntime"], ["onnx", "onnxruntime"]):
        before = f"sys.modules |= dict.fromkeys({absent}); "
        says = f"Needs {' and '.join(absent)}: the extra onnx, pip install '.[onnx]' in cnorm's source folder.\n"
        for name, *arguments in (
            ("export", "demo.safetensors", "demo.onnx", "--opset", "17", "--check"),
            ("validate", "demo.onnx", "--html", "demo.html"),
            ("validate",),
        ):
            done = command(*arguments, cwd=tmp_path, before=before, name=name)
            assert (done.returncode, done.stdout, done.stderr) == (2, "", says)
        assert says.split(":")[0] in command(cwd=tmp_path, before=before, name="--help").stdout
    assert os.listdir(tmp_path) == ["demo.safetensors"]


def test_a_name_whose_package_is_not_installed_says_what_to_install():
    code = "import sys; sys.modules['onnx'] = None; import onnx_export; onnx_export."
    for name in set(onnx_export.__all__) - {"validate", "validate_many"}:  # they import onnx in child processes only
        done = subprocess.run([sys.executable, "-P", "-c", code + name], capture_output=True, text=True)
        how = "the extra onnx, pip install '.[onnx]' in cnorm's source folder"
        says = f"ModuleNotFoundError: onnx_export.{name} needs onnx: {how}\n"
        assert done.stderr.endswith(says)
