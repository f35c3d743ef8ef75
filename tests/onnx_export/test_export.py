"""Exported files: their interface, their arithmetic in float64, and no partial file after an error."""

import json
import os
import stat
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
import reference
from models import random_linear, random_lstm
from ort_stream import OrtStream

import cnorm
import onnx_export
from onnx_export.float64 import Float64
from onnx_export.options import newest_opset

OPSETS = [13, 16, 17, 18, 21, newest_opset()]


@pytest.fixture
def stack(rng):
    """Two recurrent layers with a Linear between and after them."""
    layers = [random_lstm(rng, 5, 7), random_linear(rng, 7, 3, bias=False)]
    layers += [random_lstm(rng, 3, 6, eps=1e-3), random_linear(rng, 6, 4)]
    return cnorm.Model(layers)


def float64_step(model, x, states):
    """One step of the oracle, written from the paper's equations, independently of the exporter."""
    new, recurrent = {}, 0
    for layer in model.layers:
        if layer.kind == "Linear":
            x = reference.linear(layer.weights, x)
            continue
        h, c = f"h{recurrent}", f"c{recurrent}"
        new[h], new[c] = reference.lstm_ba2016(layer.weights, x, states[h], states[c], layer.eps)
        x, recurrent = new[h], recurrent + 1
    return {"y": x} | {f"{name}_out": array for name, array in new.items()}


@pytest.mark.parametrize("opset", OPSETS)
def test_graph_in_float64_matches_the_paper(rng, stack, opset):
    judge = Float64(onnx_export.export(stack, opset=opset, batch="batch"))
    x = rng.standard_normal((3, 5)).astype(np.float32)
    states = {name: rng.standard_normal((3, len(a))) for name, a in stack.stream().state().items()}
    states["c1"][0] = 0.3  # a cell without variance
    got = judge.run({"x": x} | {f"{name}_in": a for name, a in states.items()})
    wanted = float64_step(stack, x, states)
    assert got.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_allclose(got[name], array, rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("opset", OPSETS)
def test_interface(stack, opset):
    exported = onnx_export.export(stack, opset=opset)
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in exported.graph.input}
    assert shapes == {"x": [1, 5], "h0_in": [1, 7], "c0_in": [1, 7], "h1_in": [1, 6], "c1_in": [1, 6]}
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in exported.graph.output}
    assert shapes == {"y": [1, 4], "h0_out": [1, 7], "c0_out": [1, 7], "h1_out": [1, 6], "c1_out": [1, 6]}
    assert [(o.domain, o.version) for o in exported.opset_import] == [("", opset)]
    assert exported.ir_version >= (7 if opset < 15 else 8)
    assert exported.producer_name == "cnorm"
    norms = [node for node in exported.graph.node if node.op_type == "LayerNormalization"]
    assert len(norms) == (6 if opset >= 17 else 0)
    for node in norms:
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        eps = np.float32(1e-3 if node.name.startswith("layers.2/") else 1e-5)
        assert attributes == {"axis": -1, "epsilon": eps, "stash_type": 1}
        assert len(node.input) == 3


def test_default_is_opset_17_and_ir_8():
    exported = onnx_export.export(cnorm.demo_model())
    assert exported.opset_import[0].version == 17
    assert exported.ir_version == 8


def test_metadata_says_how_to_carry_the_states(stack):
    metadata = {entry.key: entry.value for entry in onnx_export.export(stack, batch="batch").metadata_props}
    described = json.loads(metadata["cnorm.model"])
    assert [layer["type"] for layer in described["layers"]] == ["LSTM", "Linear", "LSTM", "Linear"]
    assert [layer["eps"] for layer in described["layers"][::2]] == [float(np.float32(e)) for e in (1e-5, 1e-3)]
    table = [(row["input"], row["output"], row["shape"], row["initial"]) for row in described["states"]]
    assert table == [
        ("h0_in", "h0_out", ["batch", 7], 0),
        ("c0_in", "c0_out", ["batch", 7], 0),
        ("h1_in", "h1_out", ["batch", 6], 0),
        ("c1_in", "c1_out", ["batch", 6], 0),
    ]


def test_initialisers_are_the_models_own_tensors(stack):
    exported = onnx_export.export(stack)
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in exported.graph.initializer}
    wanted = {f"layers.{i}.{n}": w for i, layer in enumerate(stack.layers) for n, w in layer.weights.items()}
    assert stored.keys() == wanted.keys()
    for name, array in wanted.items():
        assert stored[name].tobytes() == array.tobytes()


def test_symbolic_batch_runs_at_any_batch(rng, stack):
    session = onnxruntime.InferenceSession(
        onnx_export.export(stack, batch="batch").SerializeToString(), providers=["CPUExecutionProvider"]
    )
    for batch in (1, 4):
        feeds = {"x": rng.standard_normal((batch, 5)).astype(np.float32)}
        for value in session.get_inputs()[1:]:
            assert value.shape[0] == "batch"
            feeds[value.name] = np.zeros((batch, value.shape[1]), np.float32)
        assert session.run(["y"], feeds)[0].shape == (batch, 4)


def test_a_model_that_ends_in_its_recurrent_layer(rng):
    model = cnorm.Model([random_lstm(rng, 3, 4)])
    result = Float64(onnx_export.export(model)).run(
        {"x": np.ones((1, 3)), "h0_in": np.zeros((1, 4)), "c0_in": np.zeros((1, 4))}
    )
    np.testing.assert_array_equal(result["y"], result["h0_out"])


def test_a_model_without_states(rng):
    model = cnorm.Model([random_linear(rng, 3, 4)])
    exported = onnx_export.export(model)
    assert [value.name for value in exported.graph.input] == ["x"]
    assert onnx_export.check_parity(model, exported).ok


def test_file_is_the_returned_model_and_deterministic(tmp_path):
    model = cnorm.demo_model()
    exported = onnx_export.export(model, tmp_path / "a.onnx")
    onnx_export.export(model, str(tmp_path / "b.onnx"))
    assert onnx.load(tmp_path / "a.onnx") == exported
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["a.onnx", "b.onnx"]


def test_path_without_a_folder_part(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx_export.export(cnorm.demo_model(), "demo.onnx")
    assert os.listdir(tmp_path) == ["demo.onnx"]


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"form": "loop"}, ValueError, "form must be .*got 'loop'"),
        ({"form": 1}, (TypeError, ValueError), "form"),
        ({"opset": 12}, ValueError, "opset must be from 13 to .*got 12"),
        ({"opset": newest_opset() + 1}, ValueError, f"onnxruntime {onnxruntime.__version__} loads"),
        ({"opset": 10**30}, ValueError, "opset"),
        ({"opset": "17"}, TypeError, "opset must be an integer"),
        ({"opset": True}, TypeError, "opset must be an integer"),
        ({"opset": 17.0}, TypeError, "opset must be an integer"),
        ({"dtype": "bfloat16"}, ValueError, "dtype must be one of 'float32', 'float16', got 'bfloat16'"),
        ({"dtype": np.float16}, ValueError, "dtype must be one of 'float32', 'float16'"),
        ({"batch": 2}, ValueError, "batch must be 1 or the name"),
        ({"batch": "a b"}, ValueError, "batch must be 1 or the name"),
        ({"batch": None}, TypeError, "batch must be 1 or the name"),
        ({"batch": "T", "form": "sequence"}, ValueError, "batch must be another name than 'T'"),
    ],
)
def test_wrong_options_leave_no_file(tmp_path, options, error, says):
    with pytest.raises(error, match=says):
        onnx_export.export(cnorm.demo_model(), tmp_path / "demo.onnx", **options)
    assert os.listdir(tmp_path) == []


def test_rejects_anything_but_a_model(tmp_path):
    for wrong in (None, "demo.safetensors", cnorm.demo_model().layers, cnorm.demo_model().layers[0]):
        with pytest.raises(TypeError, match="model must be a cnorm"):
            onnx_export.export(wrong, tmp_path / "demo.onnx")
    assert os.listdir(tmp_path) == []


def test_a_layer_without_an_onnx_form(tmp_path, monkeypatch):
    model = cnorm.demo_model()
    monkeypatch.setattr(type(model.layers[1]), "kind", "Mystery")
    with pytest.raises(ValueError, match="there is no ONNX form of Linear"):
        onnx_export.export(model, tmp_path / "demo.onnx")
    assert os.listdir(tmp_path) == []


def test_unwritable_paths_leave_nothing_behind(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    for path in ("folder", "missing/demo.onnx", "file/demo.onnx"):
        with pytest.raises(OSError, match=str(tmp_path)):
            onnx_export.export(cnorm.demo_model(), tmp_path / path)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]
    assert os.listdir(tmp_path / "folder") == []


def test_an_interrupted_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "demo.onnx"
    path.write_bytes(b"the file of before")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        onnx_export.export(cnorm.demo_model(), path)
    assert path.read_bytes() == b"the file of before"
    assert os.listdir(tmp_path) == ["demo.onnx"]


def test_importing_the_package_does_not_import_onnx():
    code = "import sys, onnx_export; print(sorted({'onnx', 'onnxruntime', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.strip() == "[]"


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'exprot'"):
        _ = onnx_export.exprot
    assert {"export", "check_parity", "validate"} <= set(dir(onnx_export))


def run(exported, feeds):
    session = onnxruntime.InferenceSession(exported.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


@pytest.mark.parametrize("opset", OPSETS)
def test_a_sequence_is_its_steps_and_its_chunks(rng, stack, opset):
    """Sequences of any length; the final states of one chunk are the initial states of the next."""
    sequence = onnx_export.export(stack, form="sequence", opset=opset, batch="batch")
    step = onnx_export.export(stack, opset=opset, batch="batch")
    assert [n.op_type for n in sequence.graph.node] == ["Scan"]
    states = {row: np.zeros((2, n), np.float32) for row, n in (("h0", 7), ("c0", 7), ("h1", 6), ("c1", 6))}
    x = rng.standard_normal((9, 2, 5)).astype(np.float32)

    stepped, now = [], states
    for frame in x:
        result = run(step, {"x": frame} | {f"{name}_in": a for name, a in now.items()})
        now = {name: result[f"{name}_out"] for name in states}
        stepped.append(result["y"])

    chunked, after = [], states
    for chunk in (x[:5], x[5:6], x[6:]):
        result = run(sequence, {"x": chunk} | {f"{name}_in": a for name, a in after.items()})
        after = {name: result[f"{name}_out"] for name in states}
        chunked.append(result["y"])
    np.testing.assert_array_equal(np.concatenate(chunked), np.stack(stepped))
    for name, array in now.items():
        np.testing.assert_array_equal(after[name], array)


@pytest.mark.parametrize("opset", OPSETS)
def test_float16_norms_are_computed_in_float32(rng, opset):
    """Pre-activations of 1000: their squares overflow float16, and the norm must not."""
    lstm = random_lstm(rng, 4, 8)
    weights = dict(lstm.weights) | {"weight_x": 1000 * lstm.weights["weight_x"]}
    model = cnorm.Model([cnorm.LSTM(weights, preset="ba2016")])
    exported = onnx_export.export(model, opset=opset, dtype="float16")
    assert {value.type.tensor_type.elem_type for value in exported.graph.input} == {onnx.TensorProto.FLOAT16}
    assert {tensor.data_type for tensor in exported.graph.initializer} == {onnx.TensorProto.FLOAT16}
    from onnx.reference import ReferenceEvaluator  # computes in float16, unlike onnxruntime's CPU kernels

    x = rng.standard_normal((1, 4)).astype(np.float16)
    zero = np.zeros((1, 8), np.float16)
    if opset < 17:  # the evaluator's own LayerNormalization ignores stash_type
        y = ReferenceEvaluator(exported).run(["y"], {"x": x, "h0_in": zero, "c0_in": zero})[0]
        exact = Float64(exported).run({"x": x, "h0_in": zero, "c0_in": zero})["y"]
        np.testing.assert_allclose(y, exact, rtol=0, atol=2e-2)
    report = onnx_export.check_parity(model, exported, steps=8)
    assert report.ok, str(report)


def test_weights_beyond_float16_are_refused(tmp_path):
    model = cnorm.Model([cnorm.Linear(np.full((2, 3), 7e4, np.float32))])
    with pytest.raises(ValueError, match=r"layers\.0\.weight has weights beyond the 65504 of float16"):
        onnx_export.export(model, tmp_path / "m.onnx", dtype="float16")
    assert os.listdir(tmp_path) == []


@pytest.fixture
def small_limit(monkeypatch):
    """Lower the size limit so that every model's weights go to a second file."""
    monkeypatch.setattr("onnx_export.files.EXTERNAL_ABOVE", 100)


def test_large_weights_go_to_a_second_file(tmp_path, small_limit):
    model = cnorm.demo_model()
    path = tmp_path / "demo.onnx"
    exported = onnx_export.export(model, path)
    data, _ = sorted(tmp_path.iterdir(), key=lambda p: p != path and -1)
    assert data.name.startswith("demo.onnx.")
    assert data.name.endswith(".data")
    assert path.stat().st_size < 20_000
    assert onnx.load(path, load_external_data=False) == exported
    for tensor in onnx.load(path, load_external_data=False).graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        assert entries["location"] == data.name
        assert int(entries["offset"]) % 4096 == 0
    assert onnx_export.check_parity(model, path, steps=3).ok
    assert OrtStream(path).step(np.zeros(12, np.float32)).shape == (9,)
    np.testing.assert_array_equal(
        onnx_export.load(path).layers[0].weights["weight_h"], model.layers[0].weights["weight_h"]
    )


def test_file_modes_links_and_special_files(tmp_path, small_limit):
    """As for `cnorm.Model.save`; the second file has the mode of the first and lies beside a link's target."""
    (tmp_path / "folder").mkdir()
    os.symlink("folder/real.onnx", tmp_path / "link")
    before = os.umask(0o077)
    try:
        for mode in (0o600, 0o640):
            onnx_export.export(cnorm.demo_model(), tmp_path / "link")
            files = sorted((tmp_path / "folder").iterdir())
            assert [file.suffix for file in files] == [".onnx", ".data"]
            assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {mode}
            os.chmod(files[0], 0o640)
    finally:
        os.umask(before)
    assert os.readlink(tmp_path / "link") == "folder/real.onnx"
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "folder"):
        with pytest.raises(OSError, match=rf"not a regular file: '{tmp_path / name}'$"):
            onnx_export.export(cnorm.demo_model(), tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["folder", "link", "pipe"]


def test_interrupted_write_keeps_the_old_pair_of_files(tmp_path, small_limit, monkeypatch, rng):
    path = tmp_path / "demo.onnx"
    onnx_export.export(cnorm.demo_model(), path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    real, calls = os.replace, []

    def stop_at_the_model(source, target):
        calls.append(target)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "replace", stop_at_the_model)
    with pytest.raises(OSError, match="No space"):
        onnx_export.export(cnorm.Model([random_linear(rng, 12, 9)]), path)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert onnx_export.check_parity(cnorm.demo_model(), path, steps=2).ok


def test_weights_that_need_a_second_file_need_a_path(monkeypatch):
    monkeypatch.setattr("onnx_export.files.EXTERNAL_ABOVE", 100)
    with pytest.raises(ValueError, match="path must be given"):
        onnx_export.export(cnorm.demo_model())
