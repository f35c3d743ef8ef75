"""The command, its exit codes and reports, and the child process that isolates crashes and limits."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gallery
import numpy as np
import onnx
import pytest
from click.testing import CliRunner

from onnx_export import validate, validate_many
from onnx_export.validation.command import validate as command
from onnx_export.validation.findings import Finding, NormReport
from onnx_export.validation.report import ValidationReport

CLEAN = [
    gallery.native_layer_norm,
    gallery.pytorch_pow,
    gallery.flax_one_pass_benign,
    gallery.native_float16,
    gallery.quantised,
    gallery.decomposed_dynamic_shape,
    gallery.inside_if,
    gallery.inside_loop,
    gallery.inside_scan,
    gallery.inside_a_local_function,
    gallery.residual_before_the_norm,
]


def invoke(*arguments):
    return CliRunner().invoke(command, [str(a) for a in arguments])


def laid_out(build, folder):
    path, options = gallery.lay_out(build(), folder)
    return [path, *(["--input", options["input"]] if "input" in options else [])]


@pytest.mark.exhaustive(one_in=15)
@pytest.mark.parametrize("build", CLEAN, ids=lambda build: build.__name__)
def test_clean_models_exit_0(build, tmp_path):
    result = invoke(*laid_out(build, tmp_path))
    assert result.exit_code == 0, result.output


@pytest.mark.exhaustive(one_in=24)
@pytest.mark.parametrize(
    ("build", "flags", "code"),
    [
        (gallery.one_pass_at_a_huge_mean, [], 1),
        (gallery.flax_one_pass_benign, ["--strict"], 1),
        (gallery.unbiased_variance, [], 0),
        (gallery.unbiased_variance, ["--strict"], 1),
        (gallery.no_norm_at_all, [], 0),
        (gallery.no_norm_at_all, ["--require-norm"], 2),
        (gallery.inside_a_branch_not_taken, [], 2),
        (gallery.inside_a_branch_not_taken, ["--strict", "--require-norm"], 2),
        (gallery.native_no_rows, ["--require-norm"], 2),
        (gallery.lint_nan_in_every_row, [], 2),
        (gallery.lint_nan_in_every_row, ["--strict"], 1),
        (gallery.same_names_in_both_branches, ["--require-norm"], 0),
        (gallery.same_names_in_both_branches, ["--strict"], 2),
        (gallery.custom_domain, [], 2),
        (gallery.broken_but_linted, [], 1),
        (gallery.native_layer_norm, ["--size", "n"], 2),
        (gallery.native_layer_norm, ["--size", "n=0"], 2),
        (gallery.native_layer_norm, ["--batch", "0"], 2),
        (gallery.native_layer_norm, ["--timeout", "0.01"], 2),
    ],
)
def test_exit_codes(build, flags, code, tmp_path):
    result = invoke(*laid_out(build, tmp_path), *flags)
    assert result.exit_code == code, result.output


def test_reports_that_no_norm_was_exercised(tmp_path):
    result = invoke(*laid_out(gallery.inside_a_branch_not_taken, tmp_path))
    assert "cannot validate: no norm was exercised, so nothing is proved" in result.output


def test_module_runs_as_a_subprocess(tmp_path):
    path, _ = gallery.lay_out(gallery.lint_eps_zero(), tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "onnx_export.validation", str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert done.returncode == 1, done.stderr
    assert "error[eps-zero]: y: eps is 0 as stored" in done.stdout
    assert "1 layer norm: 1 ok" in done.stdout
    assert done.stderr == ""


def test_reports_a_file_without_layer_norm(tmp_path):
    result = invoke(*laid_out(gallery.no_norm_at_all, tmp_path))
    assert result.output.endswith("model.onnx: nothing was checked: no norm or recurrent operator was recognised\n")


def test_json_matches_the_report(tmp_path):
    path, *_ = laid_out(gallery.one_pass_at_a_huge_mean, tmp_path)
    data = json.loads(invoke(*laid_out(gallery.one_pass_at_a_huge_mean, tmp_path), "--json").output)
    report = validate(path, input=tmp_path / "input.npz")
    assert data == json.loads(report.to_json())
    assert data["schema"] == 1
    assert data["exit_code"] == 1
    assert data["norms"][0]["verdict"] == "wrong"
    assert data["norms"][0]["eps"] == float(np.float32(1e-6))
    again = {k: v for k, v in data.items() if k not in ("schema", "exit_code", "strict_exit_code", "summary")}
    assert ValidationReport.from_dict(again).to_json() == report.to_json()


def test_json_has_no_bare_nan(tmp_path):
    text = invoke(*laid_out(gallery.lint_eps_nan, tmp_path), "--json").output
    parsed = json.loads(text, parse_constant=lambda token: pytest.fail(token))
    assert parsed["norms"][0]["eps"] == "nan"


def hostile_report():
    name = "\x1b[2J<script>alert(1)</script>\u202e\u0007&\"'"
    norm = NormReport(
        name, name, name, "layer", "centred", [0], 1e-5, name, name, name, name, near_miss=name, detail=name
    )
    norm.points = [[1.0, 0.5, name], [1e3, float("inf"), "run"], [5.0, 0.0, "run"]]
    return ValidationReport(name, [norm], [Finding("error", name, name, name)], name, fixed=[name])


def test_html_is_static_and_escaped(tmp_path):
    from onnx_export.validation.html import page

    text = page(hostile_report())
    assert "<script" not in text.lower()
    assert not re.search(r"\son\w+\s*=", re.sub(r">[^<]*<", "><", text))
    assert not set("\x1b\x07\u202e") & set(text)
    assert not re.search(r"(src|href)\s*=|url\(|@import", text)
    assert "<svg" in text


def test_terminal_output_has_no_escapes_from_the_file():
    from io import StringIO

    from rich.console import Console

    from onnx_export.validation.report import show

    out = StringIO()
    show(hostile_report(), Console(file=out, force_terminal=True, width=100))
    bare = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())  # rich's own colours
    assert not set("\x1b\x07\u202e") & set(bare)


def test_html_is_written_whole_or_not_at_all(tmp_path):
    target = tmp_path / "report.html"
    arguments = laid_out(gallery.native_layer_norm, tmp_path)
    assert invoke(*arguments, "--html", target).exit_code == 0
    assert target.read_text().startswith("<!doctype html>")
    bad = invoke(*arguments, "--html", tmp_path / "no" / "report.html")
    assert bad.exit_code == 2
    assert "cannot write" in bad.output
    os.mkfifo(tmp_path / "pipe")
    for option in ("--html", "--fix"):
        bad = invoke(laid_out(gallery.decomposed_dynamic_shape, tmp_path)[0], option, tmp_path / "pipe")
        assert bad.exit_code == 2
        assert "not a regular file" in " ".join(bad.output.split())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx", "pipe", "report.html"]


def test_bad_arguments_of_the_function():
    for wrong in ({"batch": 0}, {"dim": -1}, {"timeout": 0}, {"sizes": {"n": 0}}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            validate("x.onnx", **wrong)
    for wrong in ({"batch": 1.5}, {"dim": "8"}, {"sizes": {"n": True}}, {"seed": 0.5}):
        with pytest.raises(TypeError, match=f"{next(iter(wrong))}.* must be an integer"):
            validate("x.onnx", **wrong)
    for name in "timeout", "memory":
        for value in float("nan"), float("inf"), -1.0:
            with pytest.raises(ValueError, match=f"^{name} must be positive and finite, got "):
                validate("x.onnx", **{name: value})
        with pytest.raises(TypeError, match=f"^{name} must be a number, got '9'"):
            validate("x.onnx", **{name: "9"})
    with pytest.raises(ValueError, match=r"^seed must not be negative, got -1"):
        validate("x.onnx", seed=-1)
    for name in "path", "input", "data_root", "fix":
        with pytest.raises(TypeError, match=f"^{name} must be a str or path-like, got int"):
            validate(**{"path": "x.onnx", name: 3})


@pytest.mark.parametrize("option", ["--timeout", "--memory"])
def test_rejects_infinite_limits_and_accepts_huge_ones(option, tmp_path):
    """NaN and infinity are usage errors; a finite limit may be as large as one likes."""
    path = laid_out(gallery.native_layer_norm, tmp_path)[0]
    for value in "nan", "inf":
        result = invoke(path, option, value)
        assert result.exit_code == 2
        assert f"Invalid value for '{option}': {value} given, a finite number wanted" in result.output
    result = invoke(path, option, "1e300")
    assert result.exit_code == 0, result.output
    assert validate(path, **{option.strip("-"): 10**400}).ok


@pytest.mark.exhaustive(one_in=3)
@pytest.mark.parametrize("limit", ["-v 6000000", "-t 300", "-c 0"])
def test_hard_limits_of_the_shell_are_kept(limit, tmp_path):
    """Batch systems and containers set hard limits, which only root can raise."""
    path = laid_out(gallery.native_layer_norm, tmp_path)[0]
    command = ["bash", "-c", f'ulimit {limit}; exec "$0" -P -m onnx_export.validation "$1"', sys.executable, str(path)]
    if os.geteuid() == 0:
        if not shutil.which("setpriv"):
            pytest.skip("root may raise limits, and there is no setpriv to forbid it")
        command = ["setpriv", "--bounding-set", "-sys_resource", "--inh-caps", "-sys_resource", *command]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_report_text_and_truth_value_state_the_verdict(tmp_path):
    wrong, unseen = gallery.one_pass_at_a_huge_mean, gallery.native_no_rows
    for build, sound in ((gallery.native_layer_norm, True), (wrong, False), (unseen, False)):
        path = laid_out(build, tmp_path)
        report = validate(path[0], **({"input": path[2]} if len(path) > 1 else {}))
        assert bool(report) is report.ok is sound
        assert report.norms[0].verdict in str(report)
        assert report.summary() in str(report)


def test_the_model_is_never_replaced_by_a_report(tmp_path):
    path = laid_out(gallery.native_layer_norm, tmp_path)[0]
    before = path.read_bytes()
    for option in "--html", "--fix":
        result = invoke(path, option, path)
        assert result.exit_code == 2
        assert f"{option} must name another file than MODEL" in result.output
    assert path.read_bytes() == before


def test_the_model_is_never_replaced_by_its_repair(tmp_path):
    """Under any path to the same file, from Python as from the command line."""
    path = laid_out(gallery.pytorch_pow, tmp_path)[0]
    before = path.read_bytes()
    (tmp_path / "link.onnx").symlink_to(path)
    for fix in path, str(path), tmp_path / "link.onnx":
        with pytest.raises(ValueError, match="fix must name another file than the model"):
            validate(path, fix=fix)
    assert path.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["link.onnx", "model.onnx"]
    assert validate(path, fix=tmp_path / "fixed.onnx").fixed[-1].startswith("wrote ")


def with_external_data(folder):
    onnx.save(
        gallery.pytorch_pow().model,
        folder / "m.onnx",
        save_as_external_data=True,
        location="w.data",
        size_threshold=0,
    )
    return folder / "m.onnx"


@pytest.mark.exhaustive(one_in=2)
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--input in.npz --html in.npz", "--html must name another file than --input"),
        ("--input in.npz --fix link", "--fix must name another file than --input"),
        ("--fix x.onnx --html ./x.onnx", "--html must name another file than --fix"),
        ("--html -", "--html must name a file, got '-'"),
        ("--fix -", "--fix must name a file, got '-'"),
        ("--external-data --fix w.data", "--fix must name another file than w.data, which holds tensors of the model"),
        ("--external-data --html w.data", "--html: cannot write w.data: it holds tensors of MODEL"),
        ("--html w.data", "--html: cannot write w.data: it holds tensors of MODEL"),
    ],
)
def test_input_files_are_never_overwritten(options, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = with_external_data(tmp_path)
    np.savez("in.npz", x=np.zeros((3, gallery.N), "f"))
    os.symlink("in.npz", "link")
    before = {name: Path(name).read_bytes() for name in os.listdir()}
    result = invoke(path.name, *options.split())
    assert result.exit_code == (3 if options == "--html w.data" else 2)  # without --external-data it is refused
    assert says in " ".join(result.output.split())
    assert {name: Path(name).read_bytes() for name in os.listdir()} == before


def test_input_files_are_never_overwritten_from_python(tmp_path):
    path = with_external_data(tmp_path)
    np.savez(tmp_path / "in.npz", x=np.zeros((3, gallery.N), "f"))
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="fix must name another file than the inputs"):
        validate(path, input=tmp_path / "in.npz", fix=tmp_path / "in.npz", external_data=True)
    report = validate(path, fix=tmp_path / "w.data", external_data=True)
    assert "which holds tensors of the model" in report.problem
    assert report.external_data == [str(tmp_path / "w.data")]
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before


def test_rejects_options_without_effect(tmp_path):
    arguments = laid_out(gallery.decomposed_dynamic_shape, tmp_path)
    result = invoke(*arguments, "--size", "absent=3")
    assert result.exit_code == 2
    assert "no input has a free dimension named ['absent']" in " ".join(result.output.split())
    result = invoke(*arguments, "--data-root", tmp_path)
    assert result.exit_code == 2
    assert "give both" in result.output


def test_error_of_a_wrong_input_shape_names_the_expected_one(tmp_path):
    path = laid_out(gallery.native_layer_norm, tmp_path)[0]
    np.save(tmp_path / "wide.npy", np.zeros((3, gallery.N + 1), "f"))
    problem = validate(path, input=tmp_path / "wide.npy").problem
    assert problem == f"inputs: 'x' must have shape [3, {gallery.N}], got [3, {gallery.N + 1}]"


def test_errors_never_recommend_allow_pickle(tmp_path):
    path = laid_out(gallery.native_layer_norm, tmp_path)[0]
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    (tmp_path / "text.npy").write_text("no array")
    for name in "objects.npy", "text.npy":
        result = invoke(path, "--input", tmp_path / name)
        assert result.exit_code == 2
        assert "neither .npz nor .npy, or with pickled objects" in " ".join(result.output.split())
        assert "allow_pickle" not in result.output


# -- containment


def child_that(does, at):
    """What starts a child which does something, an expression, at a stage."""
    return (
        "import json, os, sys, time; sys.path[:] = json.loads(sys.argv[1])\n"
        "import onnx_export.child as child\n"
        "import onnx_export.validation.examine as module\n"
        "real = module.examine\n"
        "def examine(path, options, emit):\n"
        "    def acting(kind, value):\n"
        "        emit(kind, value)\n"
        f"        if (kind, value) == ('stage', {at!r}): {does}\n"
        "    return real(path, options, acting)\n"
        "module.examine = examine\n"
        "child.main() #{}"
    )


SLEEPS = child_that("time.sleep(600)", "run")


@pytest.mark.exhaustive
def test_a_run_without_end_hits_the_time_limit_and_lints_are_kept(tmp_path, monkeypatch):
    path, _ = gallery.lay_out(gallery.lint_eps_zero(), tmp_path)
    monkeypatch.setattr("onnx_export.child._START", SLEEPS)
    report = validate(path, timeout=10)
    assert "time limit" in report.problem
    assert "stage: run" in report.problem
    assert [f.code for f in report.findings if f.level != "note"] == ["eps-zero"]
    assert report.exit_code() == 1


def test_an_interrupt_ends_the_child_without_a_verdict(tmp_path):
    path, _ = gallery.lay_out(gallery.native_layer_norm(), tmp_path)
    # a shell starts background jobs with interrupts ignored, which their child processes inherit
    heed = (
        "import runpy, signal\n"
        "import onnx_export.child as child\n"
        f"child._START = {SLEEPS!r}\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "runpy.run_module('onnx_export.validation', run_name='__main__')"
    )
    command = [sys.executable, "-P", "-c", heed, str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 60
    child_id = ""
    while time.monotonic() < deadline:
        child_id, *_ = [*children.read_text().split(), ""]
        if child_id and b"-I" in Path(f"/proc/{child_id}/cmdline").read_bytes().split(b"\0"):
            break  # exec has happened
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "interrupted" in said
    assert "Traceback" not in said
    assert not Path(f"/proc/{child_id}").exists()


def test_excessive_allocation_hits_the_memory_limit(tmp_path):
    constants = gallery.weights() | {"shape": np.array([2**16, 2**10, 16])}
    nodes = [
        gallery.node("ConstantOfShape", "shape", "flood"),
        gallery.node("ReduceMax", "flood", "top", axes=[0, 1], keepdims=0),
        gallery.node("Add", "x top", "h"),
        gallery.native("h"),
    ]
    onnx.save(gallery.model(nodes, constants=constants), tmp_path / "m.onnx")
    report = validate(tmp_path / "m.onnx", memory=2 * 2**30, timeout=60)
    assert report.problem
    assert report.exit_code() == 2


def test_the_memory_limit_counts_what_is_needed_and_is_named(tmp_path):
    path = laid_out(gallery.native_layer_norm, tmp_path)[0]
    result = invoke(path, "--memory", "0.5")
    assert result.exit_code == 0, result.output
    os.truncate(path, 2**30)
    report = validate(path, memory=2**29)
    assert report.problem == "the memory limit of 0.5 GiB was reached (stage: read)"
    assert report.exit_code() == 2


@pytest.mark.exhaustive(one_in=4)
@pytest.mark.parametrize("stage", ["find", "shapes", "run", "stress"])
def test_a_crash_loses_only_its_stage(stage, tmp_path, monkeypatch):
    """The child is killed as by a segmentation fault in the runtime."""
    path, _ = gallery.lay_out(gallery.lint_eps_zero(), tmp_path)
    monkeypatch.setattr("onnx_export.child._START", child_that("os.kill(os.getpid(), 11)", stage))
    report = validate(path)
    codes = {f.code for f in report.findings if f.level != "note"}
    if stage == "shapes":  # done again without shape inference
        assert not report.problem
        assert codes == {"eps-zero", "shapes"}
    else:
        assert "SIGSEGV" in report.problem
        assert f"stage: {stage}" in report.problem
        assert codes == (set() if stage == "find" else {"eps-zero"})
    assert report.exit_code() == (2 if stage == "find" else 1)


def test_the_parent_never_imports_onnx(tmp_path):
    path, _ = gallery.lay_out(gallery.native_layer_norm(), tmp_path)
    code = (
        "import sys\n"
        "from onnx_export import validate\n"
        f"assert validate({str(path)!r}).ok\n"
        "assert not {'onnx', 'onnxruntime', 'rich', 'click'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.exhaustive
def test_two_hundred_norms(tmp_path):
    """Models with many norms are judged completely, with progress output."""
    nodes, constants, x = [], gallery.weights(), "x"
    for index in range(200):
        nodes += [gallery.native(x, f"n{index}"), gallery.node("Add", f"{x} n{index}", f"h{index}")]
        x = f"h{index}"
    nodes.append(gallery.node("Identity", x, "y"))
    onnx.save(gallery.model(nodes, (1, "time", gallery.N), constants), tmp_path / "m.onnx")
    seen = []
    report = validate(tmp_path / "m.onnx", progress=lambda *step: seen.append(step))
    assert report.summary() == "200 layer norms: 200 ok"
    assert {stage for stage, *_ in seen} >= {"read", "find", "run", "stress"}
    assert seen[-1] == ("stress", 399, 400)


def test_many_files_in_order_and_a_bad_one_is_one_report(tmp_path):
    for name in "abc":
        onnx.save(gallery.native_layer_norm().model, tmp_path / f"{name}.onnx")
    (tmp_path / "b.onnx").write_bytes(b"no model")
    paths = [tmp_path / f"{name}.onnx" for name in "abcd"]
    with ThreadPoolExecutor(2) as executor:
        reports = list(validate_many(iter(paths), executor, pending=2))
    assert [report.path for report in reports] == [str(path) for path in paths]
    assert [bool(report.problem) for report in reports] == [False, True, False, True]
    assert "seed" in next(validate_many(paths[:1], seed=-1)).problem
