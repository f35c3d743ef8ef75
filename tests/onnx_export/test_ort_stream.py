"""OrtStream gives the results of session.run, without creating bindings in a step."""

import doctest

import numpy as np
import onnxruntime
import pytest
from models import random_linear, random_lstm
from ort_stream import OrtStream

import cnorm
import onnx_export


@pytest.fixture
def model(rng):
    return cnorm.Model([random_lstm(rng, 5, 7), random_lstm(rng, 7, 6), random_linear(rng, 6, 4)])


def steps_by_run(exported, x):
    session = onnxruntime.InferenceSession(exported.SerializeToString(), providers=["CPUExecutionProvider"])
    shapes = {v.name: [1 if isinstance(d, str) else d for d in v.shape] for v in session.get_inputs()}
    states = {name: np.zeros(shape, np.float32) for name, shape in shapes.items() if name != "x"}
    result = []
    for frame in x:
        y, *after = session.run(None, {"x": frame.reshape(shapes["x"])} | states)
        states = dict(zip(states, after, strict=True))
        result.append(y.reshape(-1))
    return np.stack(result), {name.removesuffix("_in"): array[0] for name, array in states.items()}


@pytest.mark.parametrize("batch", [1, "batch"])
@pytest.mark.parametrize("form", ["step", "sequence"])
def test_steps_match_session_run_bit_for_bit(rng, model, form, batch):
    exported = onnx_export.export(model, form=form, batch=batch)
    x = rng.standard_normal((11, 5)).astype(np.float32)
    expected, states = steps_by_run(exported, x)
    stream = OrtStream(exported)
    np.testing.assert_array_equal([stream.step(frame) for frame in x], expected)
    for name, array in stream.state().items():
        np.testing.assert_array_equal(array, states[name])
    stream.reset()
    out = np.empty((11, 4), np.float32)
    assert stream.process(x[:4], out=out[:4]) is not None
    stream.process(x[4:4])
    stream.process(x[4:], out=out[4:])
    np.testing.assert_array_equal(out, expected)


def test_results_are_owned_by_the_caller(rng, model):
    stream = OrtStream(onnx_export.export(model))
    x = rng.standard_normal((3, 5)).astype(np.float32)
    first = stream.step(x[0])
    state = stream.state()
    kept, kept_state = first.copy(), {name: array.copy() for name, array in state.items()}
    out = np.empty(4, np.float32)
    assert stream.step(x[1], out=out) is out
    stream.step(x[2])
    np.testing.assert_array_equal(first, kept)
    for name, array in state.items():
        np.testing.assert_array_equal(array, kept_state[name])


def test_set_state_and_reset(rng, model):
    stream = OrtStream(onnx_export.export(model))
    x = rng.standard_normal(5).astype(np.float32)
    first = stream.step(x)
    middle = stream.state()
    second = stream.step(x)
    assert not np.array_equal(first, second)
    stream.set_state(middle)
    np.testing.assert_array_equal(stream.step(x), second)
    stream.reset(middle)
    np.testing.assert_array_equal(stream.step(x), second)
    stream.reset()
    np.testing.assert_array_equal(stream.step(x), first)


def test_nothing_is_bound_in_a_step(model, monkeypatch):
    stream = OrtStream(onnx_export.export(model))

    def forbidden(*_, **__):
        raise AssertionError("a step built something")

    monkeypatch.setattr(onnxruntime.OrtValue, "ortvalue_from_numpy", forbidden)
    monkeypatch.setattr(type(stream.session), "io_binding", forbidden)
    monkeypatch.setattr(type(stream.session), "run", forbidden)
    stream.step(np.zeros(5, np.float32))


def test_float16(model):
    stream = OrtStream(onnx_export.export(model, dtype="float16"), optimisation="off")
    assert stream.dtype == np.float16
    assert stream.step(np.ones(5, np.float16)).dtype == np.float16
    with pytest.raises(TypeError, match="x must be an array of float16, got float32"):
        stream.step(np.ones(5, np.float32))


def test_wrong_arguments_change_nothing(model):
    exported = onnx_export.export(model)
    stream = OrtStream(exported)
    stream.step(np.ones(5, np.float32))
    before = stream.state()
    for x, error, says in [
        (np.ones(5), TypeError, "x must be an array of float32, got float64"),
        ([1.0] * 5, TypeError, "x must be an array of float32, got list"),
        (np.float32(1), TypeError, "got float32|x must"),
        (np.ones(4, np.float32), ValueError, r"x must have shape \(5,\), got \(4,\)"),
        (np.ones((1, 5), np.float32), ValueError, r"x must have shape \(5,\), got \(1, 5\)"),
    ]:
        with pytest.raises(error, match=says):
            stream.step(x)
    with pytest.raises(ValueError, match=r"x must have shape \(T, 5\), got \(5,\)"):
        stream.process(np.ones(5, np.float32))
    size = stream.output_size
    for out, error, says in [
        (np.ones(size), TypeError, "out must be an array of float32, got float64"),
        (np.ones(1, np.float32), ValueError, r"out must have shape \(\d+,\), got \(1,\)"),
    ]:
        with pytest.raises(error, match=says):
            stream.step(np.ones(5, np.float32), out=out)
    with pytest.raises(ValueError, match=r"out must have shape \(2, \d+\), got \(1, \d+\)"):
        stream.process(np.ones((2, 5), np.float32), out=np.ones((1, size), np.float32))
    for state, says in [
        ({}, "state must have the names"),
        (before | {"z": before["h0"]}, "state must have the names"),
        (before | {"c1": before["c1"][:3]}, r"state\['c1'\] must have shape \(6,\), got \(3,\)"),
    ]:
        with pytest.raises(ValueError, match=says):
            stream.set_state(state)
    for name, array in stream.state().items():
        np.testing.assert_array_equal(array, before[name])
    with pytest.raises(ValueError, match="optimisation must be one of 'off', 'basic', 'all', got 'on'"):
        OrtStream(exported, optimisation="on")


def test_rejects_a_file_with_another_interface(model):
    exported = onnx_export.export(model)
    exported.graph.output[1].name = "state"
    for node in exported.graph.node:
        for names in (node.input, node.output):
            names[:] = ["state" if n == "h0_out" else n for n in names]
    with pytest.raises(ValueError, match="onnx_model must have the inputs x, STATE_in"):
        OrtStream(exported)


def test_rejects_files_that_onnxruntime_does_not_load(model, tmp_path):
    exported = onnx_export.export(model)
    exported.opset_import[0].version = 99
    with pytest.raises(ValueError, match=f"onnxruntime {onnxruntime.__version__} does not load it"):
        OrtStream(exported)
    (tmp_path / "text.onnx").write_text("no model")
    with pytest.raises(ValueError, match="does not load it"):
        OrtStream(tmp_path / "text.onnx")


@pytest.mark.parametrize(
    "text",
    ["[", "[]", '{"states": [{}]}']
    + [
        f'{{"states": [{{"name": "h0", "initial": {value}}}]}}' for value in ("[1, 2]", "NaN", "1e300", "1" + 400 * "0")
    ],
    ids=lambda text: text[:50],
)
def test_rejects_a_mismatched_state_table(model, text):
    exported = onnx_export.export(model)
    exported.metadata_props[0].value = text
    with pytest.raises(ValueError, match="has no state table that fits the inputs"):
        OrtStream(exported)


def test_the_example_in_the_docstring():
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner()
    (example,) = finder.find(OrtStream, "OrtStream", globs={})
    assert runner.run(example) == (0, 3)


def test_rejects_a_state_that_is_not_a_mapping(model):
    with pytest.raises(TypeError, match=r"^state must be a mapping of names to arrays, got int"):
        OrtStream(onnx_export.export(model)).set_state(3)
