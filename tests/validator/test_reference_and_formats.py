"""Comparison with a reference file, many files in one call, machine-readable formats, clean-up after a kill."""

import ast
import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import gallery
import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from corpus import archive, make_transformers
from onnx import numpy_helper

from onnx_export import validate
from onnx_export.float64 import Float64
from onnx_export.validation import codes, command, formats
from onnx_export.validation.examine import examine
from onnx_export.validation.lock import facts, read_lock
from onnx_export.validation.options import Options
from onnx_export.validation.report import UNSOUND, VERDICTS, Finding, NormReport, ValidationReport


def invoke(*arguments):
    return CliRunner().invoke(command.validate, [str(a) for a in arguments])


def saved(model, path):
    onnx.save(model, path)
    return path


@pytest.fixture
def original(tmp_path):
    return saved(gallery.two_norms_in_a_row().model, tmp_path / "original.onnx")


# ------------------------------------------------------------------------------------------------- --like, --lock


def nodes_of(model):
    return [node for node in model.graph.node if node.op_type == "LayerNormalization"]


def edit_tensor(model, name, change):
    tensor = next(t for t in model.graph.initializer if t.name == name)
    tensor.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(tensor)), name))


def remove_first(model):
    first, second = nodes_of(model)
    second.input[0] = first.input[0]
    model.graph.node.remove(first)


def set_eps(model):
    node = nodes_of(model)[0]
    node.ClearField("attribute")
    node.attribute.append(onnx.helper.make_attribute("epsilon", 1e-4))


def half_the_scale(model):
    edit_tensor(model, "scale", lambda value: value / 2)


def flip_the_bias(model):
    edit_tensor(model, "bias", lambda value: -value)


def drop_the_bias(model):
    nodes_of(model)[1].input.pop()


def swap(model):
    for node in nodes_of(model):
        node.input[1], node.input[2] = node.input[2], node.input[1]


FAULTS = {
    remove_first: "1 norms, the reference has 2",
    set_eps: "eps: reference 1e-05, here 0.0001",
    half_the_scale: "scale: reference",
    flip_the_bias: "bias: reference",
    drop_the_bias: "bias: reference",
    swap: "scale: reference",
}


@pytest.mark.exhaustive(one_in=16)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_changes_are_found_by_comparison_with_the_original(fault, original, tmp_path):
    model = onnx.load(original)
    fault(model)
    path = saved(model, tmp_path / "new.onnx")
    lock = tmp_path / "norms.json"
    assert invoke(original, "--lock", lock).exit_code == 0
    assert invoke(path).exit_code == 0
    for reference in (original, lock):
        result = invoke(path, "--like", reference)
        assert result.exit_code == 1
        assert FAULTS[fault] in result.output


def test_a_file_matches_itself_and_its_report(original, tmp_path):
    report = tmp_path / "report.json"
    report.write_text(validate(original).to_json())
    for reference in (original, report):
        assert invoke(original, "--like", reference).exit_code == 0


def test_a_norm_matches_its_decomposed_form(tmp_path):
    """The decomposed form is from an exporter that has no operator for the norm."""
    native = gallery.model([gallery.native()], constants=gallery.weights())
    other = gallery.model(*gallery.parts(gallery.decomposed()))
    result = invoke(saved(other, tmp_path / "d.onnx"), "--like", saved(native, tmp_path / "n.onnx"))
    assert result.exit_code == 0, result.output


@pytest.mark.exhaustive(one_in=8)
@pytest.mark.parametrize(
    "text", ["", "{}", '{"norms": [{}]}', '{"norms": [{"name": "a", "normal": 3}]}', '{"norms": 3}', "[" * 10**5]
)
def test_rejects_malformed_lock_files(text, original, tmp_path):
    path = tmp_path / "lock.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="not a lock file"):
        read_lock(text)
    result = invoke(original, "--like", path)
    assert result.exit_code == 2
    assert "--like: cannot read" in result.output


def test_norm_attributes_are_reported_without_a_run(original):
    assert facts(validate(original, find_only=True)) == facts(validate(original))


# ------------------------------------------------------------------------------------------------------ --outputs


@pytest.mark.exhaustive
def test_outputs_of_a_framework_are_compared(original, tmp_path):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(3, gallery.N)).astype(np.float32)
    weights = gallery.weights()
    y = x.astype(np.float64)
    for _ in range(2):
        d = y - y.mean(-1, keepdims=True)
        y = d / np.sqrt((d * d).mean(-1, keepdims=True) + 1e-5) * weights["scale"] + weights["bias"]
    np.savez(tmp_path / "x.npz", x=x)
    np.savez(tmp_path / "y.npz", y=y)
    np.savez(tmp_path / "wrong.npz", y=y * 1.0001)
    np.savez(tmp_path / "other.npz", z=y)
    given = [original, "--input", tmp_path / "x.npz", "--outputs"]
    assert invoke(*given, tmp_path / "y.npz").exit_code == 0
    wrong = invoke(*given, tmp_path / "wrong.npz")
    assert wrong.exit_code == 1
    assert "outputs-differ" in wrong.output
    assert invoke(*given, tmp_path / "other.npz").exit_code == 2


@pytest.mark.exhaustive(one_in=5)
@pytest.mark.parametrize("name", [name for name in archive.read("transformers") if "torchscript" in name])
def test_outputs_may_differ_by_rounding_and_by_no_more(name, tmp_path):
    """The float64 evaluation passes; with one bias changed by a thousandth of the largest output it does not."""
    family = name.partition("@")[0]
    model = onnx.load_model_from_string(archive.read("transformers")[name])
    feeds = make_transformers.inputs(family, 2, 8, 3)
    (exact,) = Float64(model).run(feeds).values()
    (path := tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    np.savez(tmp_path / "x.npz", **feeds)
    for change, found in ((0.0, 0), (1e-3 * np.abs(exact).max(), 1)):
        exact[0, 1, 5] += change
        np.savez(tmp_path / "y.npz", hidden=exact)
        options = Options(input=str(tmp_path / "x.npz"), outputs=str(tmp_path / "y.npz"))
        report = examine(str(path), options, lambda *_: None)
        assert [f.code for f in report.findings if f.level == "error"] == ["outputs-differ"] * found, report.findings


# ---------------------------------------------------------------------------------------------- many files, formats


@pytest.fixture
def folder(tmp_path):
    """A sound file, one with a warning, and one with an error."""
    inner = tmp_path / "models" / "inner"
    inner.mkdir(parents=True)
    saved(gallery.native_layer_norm().model, inner / "a.onnx")
    saved(gallery.not_centred().model, inner / "b.onnx")
    saved(gallery.lint_eps_nan().model, inner.parent / "c.onnx")
    return inner.parent


@pytest.mark.exhaustive
def test_a_folder_validates_all_models_and_returns_the_worst_exit_code(folder):
    result = invoke(folder, "--workers", 2)
    assert result.exit_code == 1
    for name in "abc":
        assert f"{name}.onnx" in result.output
    assert invoke(folder / "inner").exit_code == 0
    assert invoke(folder / "inner", "--strict").exit_code == 1


@pytest.mark.exhaustive
def test_the_current_folder_is_a_folder(folder, monkeypatch):
    monkeypatch.chdir(folder / "inner")
    assert invoke(".").exit_code == invoke("./").exit_code == 0


def test_hidden_folders_are_passed_over(folder):
    """A folder of sources may hold a .venv, with the test files of other packages; it may be hidden itself."""
    hidden = folder / "inner" / ".venv"
    hidden.mkdir()
    saved(gallery.lint_eps_nan().model, hidden / "d.onnx")
    assert invoke(folder / "inner").exit_code == 0
    assert invoke(hidden).exit_code == 1


def test_a_folder_that_can_not_be_read_is_an_error(folder, monkeypatch):
    """Models in it would be missed."""
    scandir = os.scandir

    def refuse(path):
        if Path(path) == folder / "inner":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    result = invoke(folder)
    assert result.exit_code == 2
    assert "cannot read the folder" in result.output
    assert "Permission denied" in result.output


def test_norms_that_were_not_run_say_so(folder):
    output = invoke(folder / "inner" / "a.onnx", "--input", "none.npz").output
    assert "it was not run" in output
    (folder / "empty.onnx").touch()
    assert "not an ONNX file: it is empty" in invoke(folder / "empty.onnx").output


@pytest.mark.parametrize(("kind", "reason"), [("none", "No such file or directory"), ("pipe", "not a regular file")])
def test_text_says_why_a_file_can_not_be_read(kind, reason, tmp_path):
    path = tmp_path / "m.onnx"
    if kind == "pipe":
        os.mkfifo(path)
    result = invoke(path)
    assert result.exit_code == 2
    assert result.output.splitlines() == [f"{path}: cannot validate: cannot open the model: {reason}"]
    assert "title=cnorm cannot-validate::" in invoke(path, "--format", "github").output


@pytest.mark.exhaustive
def test_several_files_end_with_a_line_on_all(folder):
    (folder / "empty.onnx").touch()
    saved(gallery.no_norm_at_all().model, folder / "none.onnx")
    for shape in ("text", "github"):
        last = invoke(folder, "--format", shape).output.splitlines()[-1]
        expected = "5 files: 2 passed (1 with warnings), 1 failed, 1 could not be validated"
        assert last == f"{expected}, 1 with nothing that was checked"
    assert "files:" not in invoke(folder / "none.onnx").output


def test_error_and_bound_that_look_alike_have_more_digits():
    def facts(error, bound):
        norm = NormReport("n", "", "decomposed", "layer", "centred", [1], 1e-5, "float32", "", "", "float16")
        norm.error, norm.bound = error, bound
        return formats.facts(norm)

    assert facts(9.8e-4, 1.2e-3).endswith(", error 9.80e-04 of 1.20e-03")
    assert facts(2e-7, 1.2e-5).endswith(", error 2e-07 of 1e-05")


def test_a_near_miss_is_counted_once(tmp_path):
    report = validate(saved(gallery.not_centred().model, tmp_path / "m.onnx"))
    assert report.conclusion() == "passed: 1 near miss; 1 warning"


def test_piped_text_has_one_line_per_finding_with_full_names(tmp_path):
    model = gallery.native_layer_norm().model
    model.graph.node[0].name = "a/" + "very_long_" * 20 + "name"
    result = invoke(saved(model, tmp_path / "m.onnx"))
    assert any(model.graph.node[0].name in line for line in result.output.splitlines())


@pytest.mark.exhaustive
def test_json_of_many_and_of_one(folder):
    many = json.loads(invoke(folder, "--format", "json").output)
    assert [Path(each["path"]).name for each in many["reports"]] == ["c.onnx", "a.onnx", "b.onnx"]
    one = json.loads(invoke(folder / "inner" / "b.onnx", "--json").output)
    assert (one["exit_code"], one["strict_exit_code"]) == (0, 1)


def test_annotations_for_github_are_escaped(tmp_path):
    model = gallery.not_centred().model
    path = saved(model, tmp_path / "a,b%.onnx")
    output = invoke(path, "--format", "github").output
    line = next(line for line in output.splitlines() if line.startswith("::warning"))
    assert "a%2Cb%25.onnx,title=cnorm near-miss::" in line


@pytest.mark.exhaustive
def test_sarif_names_a_rule_for_each_result(folder):
    log = json.loads(invoke(folder, "--format", "sarif").output)
    (run,) = log["runs"]
    rules = {rule["id"] for rule in run["tool"]["driver"]["rules"]}
    assert {result["ruleId"] for result in run["results"]} == rules
    assert {"near-miss", "eps-nan"} <= rules
    assert {result["level"] for result in run["results"]} <= {"error", "warning", "note"}
    lines = invoke(folder, "--format", "text").output.splitlines()
    told = [each["exitCodeDescription"] for each in run["invocations"]]
    assert told == [line for line in lines if ": passed: " in line or ": failed: " in line]
    placed = [each for each in run["results"] if "logicalLocations" in each["locations"][0]]
    assert any(each["locations"][0]["logicalLocations"] == [{"fullyQualifiedName": "y"}] for each in placed)
    failed = [": failed: " in each for each in told]
    assert any(failed)
    assert [each["exitCode"] for each in run["invocations"]] == failed


def test_junit_fails_what_the_exit_code_fails():
    report = ValidationReport("m.onnx", findings=[Finding("warning", "eps-zero", "eps is 0")])
    for how, failures in (({}, 0), ({"strict": True, "require_norm": False}, 1)):
        assert (report.exit_code(**how) == UNSOUND) == bool(failures)
        assert ElementTree.fromstring(formats.junit([report], **how)).find("testsuite").get("failures") == str(failures)


def test_a_norm_that_is_required_fails_in_every_format():
    report = ValidationReport("m.onnx")
    how = {"strict": False, "require_norm": True}
    assert report.exit_code(**how) == 2
    assert ElementTree.fromstring(formats.junit([report], **how)).find("testsuite").get("failures") == "1"
    (error, _) = formats.github(report, **how)
    assert error.startswith("::error file=m.onnx,title=cnorm::cannot validate: ")
    assert json.loads(report.to_json(require_norm=True))["exit_code"] == 2


def test_options_for_one_file_are_refused_for_many(folder):
    result = invoke(folder, "--html", folder / "x.html")
    assert result.exit_code == 2
    assert "--html must name a folder, with a file for each of several models" in result.output


def codes_in_the_source():
    """The codes of all findings that the validator makes: in the source the second argument of Finding."""
    found = set()
    for path in Path(codes.__file__).parent.glob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "").lower() == "finding" and len(call.args) > 1:
                found |= {each.value for each in ast.walk(call.args[1]) if isinstance(each, ast.Constant)}
    return found


def test_every_code_that_an_output_prints_is_explained_and_documented():
    lines = Path(__file__).parents[2].joinpath("docs/validator.md").read_text().splitlines()
    table = lines[lines.index("| code | level | meaning |") + 2 :]
    rows = [line.split("|")[1] for line in itertools.takewhile(str.strip, table)]
    assert sorted(code.strip() for row in rows for code in row.split(",")) == sorted(codes.CODES)
    verdicts = {verdict.replace(" ", "-") for verdict in VERDICTS} - {"ok"}
    computed = {"-nan": {"scale-nan", "bias-nan"}, "-shape": {"scale-shape", "bias-shape"}}
    wanted = {code for name in codes_in_the_source() for code in computed.get(name, {name})} - {" ", "-"}
    assert len(wanted) > 30
    wanted |= verdicts | {"runtime-limit", "optimiser-precision"}
    assert wanted == codes.CODES.keys()


def test_every_finding_of_the_gallery_is_explained():
    wanted = {code for build in gallery.SPECIMENS for code in build().findings}
    assert wanted <= codes.CODES.keys()
    result = CliRunner().invoke(command.explain, ["eps-zero"])
    assert "constant rows give NaN" in result.output
    assert CliRunner().invoke(command.explain, ["no-such"]).exit_code == 2


def test_the_repr_of_a_report_is_one_line(original):
    report = validate(original)
    assert len(repr(report)) < 300
    assert "2 layer norms: 2 ok" in repr(report)
    assert len(repr(report.norms[0])) < 800


# ------------------------------------------------------------------------------------------------------- processes


def test_opset_conversion_enables_the_rewrite(tmp_path):
    path = saved(gallery.model(*gallery.parts(gallery.decomposed(opset=11)), opset=11), tmp_path / "m.onnx")
    assert "wrote nothing" in validate(path, fix=tmp_path / "f.onnx").fixed[-1]
    report = validate(path, fix=tmp_path / "f.onnx", opset=17)
    assert report.fixed[-1].startswith("wrote "), (report.fixed, report.problem)
    fixed = onnx.load(tmp_path / "f.onnx")
    assert fixed.opset_import[0].version == 17
    assert "LayerNormalization" in {node.op_type for node in fixed.graph.node}


def children(pid):
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) == pid:
                    is_python = b"json" in (entry / "cmdline").read_bytes()  # others, such as uname, end at once
                    found += [int(entry.name)] if is_python else []
            except OSError:
                continue
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own means, of Linux alone")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_child_process_ends_and_cleans_up_with_its_parent(how, tmp_path):
    width = 4096
    nodes, constants = gallery.decomposed(width=width)
    path = saved(gallery.model(nodes, (256, width), constants), tmp_path / "m.onnx")  # some seconds of stress
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command_line = [sys.executable, "-P", "-m", "onnx_export.validation", str(path)]
    parent = subprocess.Popen(command_line, env=os.environ | {"TMPDIR": str(scratch)}, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (found := children(parent.pid)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1.0)  # by now the child has read its request
    (child,) = found
    parent.send_signal(how)
    parent.wait()
    deadline = time.monotonic() + 1
    while Path(f"/proc/{child}").exists() and Path(f"/proc/{child}/cmdline").read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert list(scratch.iterdir()) == []
