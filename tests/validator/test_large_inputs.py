"""Of a norm's large input some rows are judged: evenly spaced ones, and the one with the largest element."""

import numpy as np
import onnx
import pytest
from writings import Writing

from onnx_export.validation import sampling
from onnx_export.validation.examine import examine
from onnx_export.validation.options import Options
from onnx_export.validation.run import Run
from onnx_export.validation.taps import has_halves

SHAPE = (1, 40, 40, 8)  # 12,800 elements


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Of each norm 2^12 elements are judged, so that these inputs are large."""
    monkeypatch.setattr(sampling, "_JUDGED", 2**12)
    monkeypatch.setattr(sampling, "_SMALL", 2**12)


def layer_norm(w, x, axes=(-1,), gain=None):
    d = w.op("Sub", x, w.mean(x, axes))
    y = w.op("Div", d, w.op("Sqrt", w.op("Add", w.mean(w.op("Mul", d, d), axes), 1e-5)))
    return y if gain is None else w.op("Mul", y, gain)


def one_pass(w, x):
    mean = w.mean(x)
    variance = w.op("Sub", w.mean(w.op("Mul", x, x)), w.op("Mul", mean, mean))
    return w.op("Div", w.op("Sub", x, mean), w.op("Sqrt", w.op("Add", variance, 1e-5)))


def report_of(model, folder, x=None):
    onnx.save(model, folder / "model.onnx")
    if x is not None:
        np.save(folder / "x.npy", x)
    given = str(folder / "x.npy") if x is not None else ""
    return examine(str(folder / "model.onnx"), Options(input=given), lambda *_: None)


def judged(report):
    """How many rows of each norm, from the notes about those of which not all are judged."""
    return [f.message.split()[0] for f in report.findings if "rows were judged" in f.message]


def written(build, shape=SHAPE):
    w = Writing()
    return w.model(build(w, w.input("x", list(shape))))


@pytest.mark.parametrize(
    ("build", "shape", "rows"),
    [
        (lambda w, x: w.op("LayerNormalization", x, np.ones(8, np.float32), axis=-1), SHAPE, "480"),
        (layer_norm, SHAPE, "480"),
        (lambda w, x: layer_norm(w, x, [1], np.full((8, 1, 1), 1.1, np.float32)), (1, 8, 40, 40), "480"),
        (lambda w, x: layer_norm(w, x, [2, 3], np.float32(np.arange(8)).reshape(8, 1, 1)), (1, 8, 40, 40), "2"),
        (
            lambda w, x: w.op("InstanceNormalization", x, np.float32(range(8)), np.float32(range(8)), epsilon=1e-5),
            (1, 8, 40, 40),
            "2",
        ),
        (lambda w, x: layer_norm(w, w.op("Add", x, np.ones((40, 1), np.float32))), SHAPE, "480"),
    ],
    ids=["operator", "decomposed", "channels", "gain of each row", "instance", "behind an addition"],
)
def test_some_rows_of_a_large_input_are_judged(build, shape, rows, tmp_path):
    report = report_of(written(build, shape), tmp_path)
    assert [norm.verdict for norm in report.norms] in (["ok"], ["risky"]), report.norms
    assert report.exit_code() == 0
    assert judged(report) == [rows]


def test_the_row_with_the_largest_element_is_among_them(tmp_path):
    x = np.random.default_rng(0).standard_normal(SHAPE, dtype=np.float32)
    x[0, 13, 34] += 1e5
    report = report_of(written(one_pass), tmp_path, x)
    assert judged(report)
    assert report.norms[0].verdict in ("inaccurate", "wrong")
    assert report.norms[0].conditioning > 1e4


def test_a_fault_is_found_in_the_rows_that_are_judged(tmp_path):
    w = Writing()
    x = w.input("x", list(SHAPE))
    scale, bias = np.ones(8, np.float32), np.zeros(8, np.float32)
    normed = w.op("LayerNormalization", x, scale, bias, axis=-1)
    model = w.model(normed)
    model.graph.node[0].attribute[0].i = 3
    right = report_of(model, tmp_path)
    assert right.exit_code() == 0
    wrong = report_of(written(lambda w, x: layer_norm(w, x, [-1], np.float32([np.nan] * 8))), tmp_path)
    assert wrong.exit_code() == 1


def test_all_rows_are_judged_where_the_nodes_take_no_other_shape(tmp_path):
    def reshaped(w, x):
        shape = np.int64([*SHAPE[:-1], 1])
        d = w.op("Sub", x, w.op("Reshape", w.mean(x, keepdims=0), shape))
        variance = w.op("Reshape", w.mean(w.op("Mul", d, d), keepdims=0), shape)
        return w.op("Div", d, w.op("Sqrt", w.op("Add", variance, 1e-5)))

    report = report_of(written(reshaped), tmp_path)
    assert [norm.verdict for norm in report.norms] == ["ok"]
    assert not judged(report)


def test_indices_are_few_and_in_range():
    class Norm:
        axes, operator = (-1,), None

    x = np.zeros((3, 500, 70, 2), np.float32)
    x[1, 17, 3] = np.nan
    kept = sampling.rows_to_keep(Norm, x, 100)
    left = np.prod([len(kept.get(axis, range(size))) for axis, size in enumerate(x.shape)])
    assert left <= 2**12
    assert all(i in kept[axis] for axis, i in enumerate((1, 17, 3)) if axis in kept)
    assert sampling.rows_to_keep(Norm, x[:, :5], 100) == {}


@pytest.mark.parametrize(("dtype", "unoptimised"), [(np.float32, 1), (np.float16, 3)])
def test_a_model_runs_no_more_often_than_it_must(dtype, unoptimised, tmp_path, monkeypatch):
    """Values that are exposed change nothing unoptimised, except that half types are rounded there."""
    runs = []
    session = Run.session
    monkeypatch.setattr(Run, "session", lambda run, model, level: runs.append(level) or session(run, model, level))
    w = Writing(dtype)
    x = w.input("x", (2, 8))
    report = report_of(w.model(w.op("Mul", layer_norm(w, x), w.gain(8))), tmp_path)
    assert report.exit_code() == 0
    assert [runs.count(level) for level in ("off", "basic", "all")] == [unoptimised, 1, 2]


@pytest.mark.parametrize("source", ["input", "stored", "cast", "attribute"])
def test_half_types_are_seen(source):
    w = Writing(np.float16 if source in ("input", "stored") else np.float32)
    x = w.input("x", (2, 8), 1 if source == "stored" else None)
    if source == "stored":
        w.op("Add", w.gain(8), w.gain(8, 2))
    elif source != "input":
        half = w.op("Cast", x, to=10) if source == "cast" else w.op("EyeLike", x, dtype=10)
        w.op("Exp", half)
    model = w.model(w.op("Relu", x), kind=1)
    assert has_halves(model)
    del model.graph.node[:-1], model.graph.initializer[:]
    assert has_halves(model) == (source == "input")
