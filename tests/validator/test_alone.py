"""Where the model does not run, each norm is judged as a model of its own."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from writings import Writing

from onnx_export.validation.examine import examine
from onnx_export.validation.options import Options

N = 12


def with_operator(w, x, gain):
    return w.op("LayerNormalization", x, gain, axis=-1, epsilon=1e-5)


def written_out(w, x, gain):
    return w.op("Mul", w.layer_norm(x), gain)


def rms(w, x, gain):
    square = w.op("Add", w.mean(w.op("Mul", x, x)), 1e-5)
    return w.op("Mul", w.op("Div", x, w.op("Sqrt", square)), gain)


FORMS = {"operator": with_operator, "written out": written_out, "rms": rms}


def behind_an_unknown_operator(w):
    """Its type and rank are known to nobody."""
    return w.op("Secret", w.input("x", [2, 3, N]), domain="acme")


def behind_a_string(w):
    text = w.op("StringNormalizer", w.input("words", [2], TensorProto.STRING))
    return w.op("Add", w.input("x", [2, "time", N]), w.op("Cast", w.op("Size", text), to=w.kind))


def behind_a_shape_that_no_size_fits(w):
    return w.op("Reshape", w.input("x", [2, "time", N]), w.input("shape", [2], TensorProto.INT64))


CAUSES = [behind_an_unknown_operator, behind_a_string, behind_a_shape_that_no_size_fits]


def report_of(model, folder):
    onnx.save(model, folder / "model.onnx")
    return examine(str(folder / "model.onnx"), Options(), lambda *_: None)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.__name__)
def test_a_sound_norm_is_judged_and_the_file_does_not_pass(cause, form, dtype, tmp_path):
    w = Writing(dtype)
    report = report_of(w.model(FORMS[form](w, cause(w), w.gain(N))), tmp_path)
    assert report.exit_code() == 2
    assert report.problem
    assert [norm.verdict for norm in report.norms] == ["ok"], report.norms
    assert ["1 of 1" in f.message for f in report.findings if f.code == "alone"] == [True]


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.__name__)
def test_a_norm_that_is_inaccurate_by_itself_is_at_risk(cause, tmp_path):
    w = Writing()
    x = cause(w)
    mean = w.mean(x)
    variance = w.op("Sub", w.mean(w.op("Mul", x, x)), w.op("Mul", mean, mean))
    y = w.op("Div", w.op("Sub", x, mean), w.op("Sqrt", w.op("Add", variance, 1e-5)))
    report = report_of(w.model(y), tmp_path)
    assert [(norm.verdict, norm.blame) for norm in report.norms] == [("risky", "file")]
    assert report.exit_code() == 2


def test_an_error_of_a_norm_precedes_that_the_file_does_not_run(tmp_path):
    w = Writing()
    x = behind_a_shape_that_no_size_fits(w)
    scale = np.full(N, np.nan, np.float32)
    report = report_of(w.model(with_operator(w, x, scale)), tmp_path)
    assert report.exit_code() == 1


def test_a_norm_that_needs_other_values_is_left(tmp_path):
    """Its count comes from an input: any made-up number would make it another function."""
    w = Writing()
    x = behind_an_unknown_operator(w)
    count = w.input("count", [])
    mean = w.op("Div", w.over("ReduceSum", x), count)
    d = w.op("Sub", x, mean)
    variance = w.op("Div", w.over("ReduceSum", w.op("Mul", d, d)), count)
    report = report_of(w.model(w.op("Div", d, w.op("Sqrt", w.op("Add", variance, 1e-5)))), tmp_path)
    assert report.exit_code() == 2
    assert {norm.verdict for norm in report.norms} <= {"not exercised"}


def test_each_of_two_norms_is_judged(tmp_path):
    w = Writing()
    y = w.op("LayerNormalization", w.layer_norm(behind_a_string(w)), w.gain(N), axis=-1)
    report = report_of(w.model(y), tmp_path)
    assert [norm.verdict for norm in report.norms] == ["ok", "ok"]
