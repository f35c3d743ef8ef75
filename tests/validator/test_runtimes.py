"""The tables of runtimes, what `cnorm validate --runtime` says of them, and the generator of their files."""

import json
import re

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from exports import names, small_model
from forms import forms
from measure import SENTENCES
from page import PAGE, page
from traps import traps

import cnorm
import onnx_export
from onnx_export import runtimes
from onnx_export.runtimes.runners import PINS, RUNTIMES, left_out, version
from onnx_export.validation import command
from onnx_export.validation.options import Options
from onnx_export.validation.patterns import find
from onnx_export.validation.recurrent import find as find_cells
from onnx_export.validation.runtimes import compare

OUTCOME = re.compile(r"right|refuses|not finite|other shape|off by \d(\.\d+)?(e[+-]\d\d)?|ignores .+|off by 0\.\d+")
NAMES = runtimes.names()
# operator, form, runtime: files that are valid and computed otherwise or refused there
TRAPS = [
    ("LSTM", "P", "openvino"),
    ("LSTM", "input_forget", "openvino"),
    ("LSTM", "batch, layout=1", "openvino"),
    ("LSTM", "clip", "onnxruntime"),
    ("GRU", "direction=reverse", "tract"),
    ("RNN", "activation relu", "tract"),
    ("LSTM", "batch, layout=1", "opencv"),
    ("GRU", "initial_h", "opencv"),
    ("GRU", "batch, sequence_lens", "onnx-reference"),
    ("LpNormalization", "p=1", "onnx-reference"),
    ("MeanVarianceNormalization", "axes", "opencv"),
    ("LayerNormalization", "axis=-2, scale of another shape", "openvino"),
]


@pytest.fixture(scope="module")
def made():
    every = forms()
    found = {(form.operator, form.name): form for form in every}
    assert len(found) == len(every)
    return found


@pytest.fixture
def saved(made, tmp_path):
    def save(operator, form):
        path = tmp_path / "model.onnx"
        path.write_bytes(made[operator, form].model.SerializeToString())
        return str(path)

    return save


def findings(form, *wanted):
    model = form.model
    return list(compare(model, {}, find(model), find_cells(model, {}), wanted))


def test_forms_are_as_many_as_promised_and_differ(made):
    assert len(made) >= 80
    for form in made.values():
        onnx.checker.check_model(form.model, full_check=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_table_has_a_line_for_each_form_in_its_words(name, made):
    table = runtimes.table(name)
    assert table.version == version(name)
    run = {(form.operator, form.traits) for form in made.values()} | {("export", traits) for traits in names()}
    run = {(operator, traits) for operator, traits in run if not left_out(name, [operator, *traits])}
    seen = {(each.operator, each.traits) for each in table.observations}
    assert len(seen) == len(table.observations)
    assert seen <= run
    assert all(operator == "export" for operator, _ in run - seen)  # SENTENCES says which a runtime lacks
    for each in table.observations:
        assert OUTCOME.fullmatch(each.outcome), each


def test_every_runtime_has_a_runner_and_pins():
    assert set(NAMES) <= RUNTIMES.keys() == PINS.keys()


def test_the_page_shows_the_tables():
    assert PAGE.read_text() == page(SENTENCES), "make runtimes rewrites it"


@pytest.mark.exhaustive(one_in=3)
@pytest.mark.parametrize("name", NAMES)
def test_the_validator_reads_every_line(name, made):
    for each in runtimes.table(name).observations:
        if each.operator == "export":
            continue  # no operator names it
        form = made[each.operator, ", ".join(sorted(each.traits))]
        about = [f for f in findings(form, name) if each.operator in f.message and f.code != "runtime-untried"]
        levels = {finding.level for finding in about if finding.code != "runtime-data"}
        data = bool(each.traits & runtimes.DATA.keys() - {"a length of 0"})
        if each.outcome == runtimes.RIGHT:
            assert not levels or data, (each, about)  # without such data the file is a plain one
        elif data:
            assert about, each
        else:
            assert levels == {"error"} or any(f.code == "runtime-data" for f in about), (each, about)


@pytest.mark.exhaustive(one_in=16)
@pytest.mark.parametrize("trap", TRAPS, ids="-".join)
def test_traps_are_said(trap, saved):
    operator, form, name = trap
    said_of(saved(operator, form), name)


@pytest.mark.exhaustive(one_in=16)
@pytest.mark.parametrize("trap", list(traps()), ids=lambda trap: trap.name)
def test_files_with_a_trap_are_told(trap, tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(trap.model.SerializeToString())
    said_of(str(path), trap.operator)


def said_of(path, name):
    """An error that names the runtime, its version and the script."""
    result = CliRunner().invoke(command.validate, [path, "--runtime", name])
    table = runtimes.table(name)
    assert re.search(rf"error\[runtime-(differs|refuses)\].*{re.escape(f'{name} {table.version}')}", result.output)
    assert runtimes.SCRIPT in result.output
    assert result.exit_code == 1


def test_every_runtime_has_a_trap():
    assert {trap.operator for trap in traps()} == set(NAMES)


@pytest.mark.exhaustive(one_in=5)
@pytest.mark.parametrize("shape", ["text", "json", "github", "sarif", "junit"])
def test_every_format_says_it(shape, saved, tmp_path):
    page = tmp_path / "page.html"
    arguments = [saved("LSTM", "P"), "--runtime", "openvino", "--format", shape, "--html", str(page)]
    result = CliRunner().invoke(command.validate, arguments)
    assert "runtime-differs" in result.output
    assert "ignores P" in result.output
    assert "ignores P" in page.read_text()


def test_another_version_is_a_warning_that_names_the_one_seen(saved):
    path = saved("LSTM", "P")
    result = CliRunner().invoke(command.validate, [path, "--runtime", "openvino@2020.1", "--notes"])
    assert "warning[runtime-differs]: Y: openvino 2026.4.1 ignores P" in result.output
    assert "openvino 2020.1 was not tried" in result.output
    assert result.exit_code == 0


def test_without_the_option_one_line_names_the_runtimes(saved):
    output = CliRunner().invoke(command.validate, [saved("LSTM", "P")]).output
    (line,) = [line for line in output.splitlines() if "[runtimes]" in line]
    assert "openvino 2026.4.1" in line
    assert "onnxruntime" not in line


def test_sound_files_are_silent(made):
    silent = 0
    for (operator, _), form in made.items():
        for name in NAMES:
            right = [each for each in runtimes.table(name).observations if each.operator == operator]
            right = {each.traits for each in right if each.outcome == runtimes.RIGHT}
            if form.traits in right and not form.traits & runtimes.DATA.keys():
                assert not [each for each in findings(form, name) if each.level != "note"], (
                    name,
                    operator,
                    form.traits,
                )
                silent += 1
    assert silent >= 60


@pytest.mark.exhaustive(one_in=11)
@pytest.mark.parametrize("key", sorted(cnorm.PRESETS), ids="-".join)
def test_files_written_for_a_runtime_are_silent(key):
    model, silent = small_model(key), 0
    for name in NAMES:
        for given in ({"form": "step"}, {"form": "sequence"}, {"form": "sequence", "steps": 6}):
            try:
                made = onnx_export.export(model, runtime=name, **given)
            except ValueError:  # no way was right
                continue
            told = compare(made, {}, find(made), find_cells(made, {}), [name])
            assert not [each for each in told if each.level != "note"]
            silent += 1
    assert silent >= 6 * 3  # runtimes


def test_combinations_that_were_not_tried_are_warnings(made):
    form = made["LSTM", "direction=reverse"]
    model = onnx.ModelProto()
    model.CopyFrom(form.model)
    model.graph.node[0].attribute.append(onnx.helper.make_attribute("clip", 0.5))
    model.graph.node[0].attribute.append(onnx.helper.make_attribute("input_forget", 1))
    (found,) = compare(model, {}, [], find_cells(model, {}), ["onnxruntime"])
    assert found.level == "error"  # of the clip
    del model.graph.node[0].attribute[-2]
    (found,) = compare(model, {}, [], find_cells(model, {}), ["onnxruntime"])
    assert (found.level, found.code) == ("warning", "runtime-untried")
    assert "LSTM with direction=reverse, input_forget" in found.message


def test_magnitudes_are_an_error_where_such_rows_were_seen(made, saved, tmp_path):
    path = saved("InstanceNormalization", "")
    output = CliRunner().invoke(command.validate, [path, "--runtime", "opencv", "--notes"]).output
    assert "note[runtime-data]" in output
    np.savez(tmp_path / "far.npz", **made["InstanceNormalization", "mean 1e4"].feeds)
    arguments = [path, "--runtime", "opencv", "--input", str(tmp_path / "far.npz")]
    assert "error[runtime-data]" in CliRunner().invoke(command.validate, arguments).output


def test_an_unknown_runtime_is_refused(saved):
    result = CliRunner().invoke(command.validate, [saved("LSTM", ""), "--runtime", "nosuch@1"])
    assert result.exit_code == 2
    assert "a runtime must be one of" in result.output
    with pytest.raises(ValueError, match="'nosuch'"):
        Options.checked(runtimes=["nosuch"])
    assert Options.from_json(json.loads(json.dumps(Options.checked(runtimes=["tract"]).to_json()))).runtimes == (
        "tract",
    )
