"""`export(..., runtime=)` writes what a runtime was seen to compute right; `check_parity` runs it there."""

from pathlib import Path

import numpy as np
import pytest
from exports import small_model

import cnorm
import onnx_export
from onnx_export import runtimes
from onnx_export.runtimes import RIGHT, runners
from onnx_export.runtimes.ways import STEPS, WAYS

MODEL = small_model(("LSTM", "ba2016"))
FORMS = [{}, {"form": "sequence"}, {"form": "sequence", "steps": STEPS}]


def ways_of(given):
    """The ways of a form, by name."""
    kept = ("form", "steps")
    wanted = {"form": "step"} | given
    return [way for way, options in WAYS.items() if {k: options[k] for k in kept if k in options} == wanted]


@pytest.mark.parametrize("given", FORMS, ids=str)
@pytest.mark.parametrize("name", runtimes.names())
def test_the_file_is_one_that_was_right(name, given):
    seen = {each.traits: each.outcome for each in runtimes.table(name).observations if each.operator == "export"}
    right = [way for way in ways_of(given) if seen.get(frozenset({"LSTM ba2016", way})) == RIGHT]
    if right:
        made = onnx_export.export(MODEL, runtime=name, **given)
        assert made == onnx_export.export(MODEL, **WAYS[right[0]])
    else:
        with pytest.raises(ValueError, match=f"runtime: {name} .* was not seen to compute form"):
            onnx_export.export(MODEL, runtime=name, **given)


def test_sequences_of_every_preset_are_written_for_six_other_runtimes():
    for given in FORMS[1:]:
        found = set()
        for name in runtimes.names():
            seen = {each.traits: each.outcome for each in runtimes.table(name).observations}
            if all(
                any(seen.get(frozenset({" ".join(key), way})) == RIGHT for way in ways_of(given))
                for key in cnorm.PRESETS
            ):
                found.add(name)
        assert len(found - {"onnxruntime"}) >= 6, (given, found)


def test_a_refusal_names_the_forms_that_were_right():
    with pytest.raises(
        ValueError, match=r"tinygrad .* form 'sequence' of LSTM torch right, but form 'sequence' with steps, form"
    ):
        onnx_export.export(small_model(("LSTM", "torch")), form="sequence", runtime="tinygrad")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"runtime": "caffe"}, "runtime must be one of 'iree', 'mnn', .*, got 'caffe'"),
        ({"runtime": "tract", "opset": 13}, "opset must be left out with runtime"),
        ({"runtime": "tract", "portable": True, "native_ops": True}, "native_ops, portable must be left out"),
    ],
    ids=str,
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        onnx_export.export(MODEL, **options)


def test_a_warning_names_what_was_not_tried():
    rng = np.random.default_rng(0)
    norm = cnorm.LayerNorm(rng.normal(size=5).astype("f4"), np.zeros(5, "f4"))
    with pytest.warns(
        UserWarning, match="tract .* was not tried with LayerNorm, dtype 'float16', batch 'b': check_pari"
    ):
        onnx_export.export(cnorm.Model([*MODEL.layers, norm]), runtime="tract", dtype="float16", batch="b")


@pytest.mark.exhaustive(one_in=5)
@pytest.mark.parametrize("given", FORMS, ids=str)
@pytest.mark.parametrize("name", ["onnx-reference", "openvino", "tract"])
def test_parity_there(name, given):
    if name != "onnx-reference":
        pytest.importorskip(name)
    report = onnx_export.check_parity(
        MODEL, onnx_export.export(MODEL, runtime=name, **given), steps=STEPS, runtime=name
    )
    assert report, report.table()
    assert {row.tensor for row in report.rows if row.engine == name} == {"y", "h0_out", "c0_out"}


# what a runtime might do, in the words of runners.py
FAULTS = {
    "one step": "lambda results: [np.concatenate([results[0][:1], 0 * results[0][1:]]), *results[1:]]",
    "a unit in the third digit": "lambda results: [each * np.float32(1.001) for each in results]",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_parity_finds_a_fault_of_the_runtime(fault, tmp_path, monkeypatch):
    source = Path(runners.__file__).read_text()
    wrong = tmp_path / "runners.py"
    right = "return lambda feeds: evaluator.run(outputs, feeds)"
    assert source.count(right) == 1
    wrong.write_text(source.replace(right, f"return lambda feeds: ({FAULTS[fault]})(evaluator.run(outputs, feeds))"))
    monkeypatch.setattr(runners, "__file__", str(wrong))
    made = onnx_export.export(MODEL, form="sequence")
    report = onnx_export.check_parity(MODEL, made, steps=2, runtime="onnx-reference")
    assert not report
    assert report.first.engine == "onnx-reference"


def test_a_runtime_that_is_not_installed_or_known():
    made = onnx_export.export(MODEL)
    with pytest.raises(ValueError, match=r"ncnn does not run it: ModuleNotFoundError.* tried with ncnn==1"):
        onnx_export.check_parity(MODEL, made, steps=1, runtime="ncnn")
    with pytest.raises(ValueError, match="runtime must be one of"):
        onnx_export.check_parity(MODEL, made, steps=1, runtime="caffe")


def test_a_runtime_that_ends(tmp_path, monkeypatch):
    script = tmp_path / "runners.py"
    script.write_text("import signal, os; os.kill(os.getpid(), signal.SIGALRM)")
    monkeypatch.setattr(runners, "__file__", str(script))
    with pytest.raises(ValueError, match="ended with SIGALRM on it; a call may take 60 s"):
        onnx_export.check_parity(MODEL, onnx_export.export(MODEL), steps=1, runtime="onnx-reference")
