"""LSTM, GRU and RNN with other functions than sigmoid and tanh, and with a clip: out to ONNX and in from it."""

import dataclasses

import cells
import numpy as np
import onnx
import onnxruntime
import pytest
from graphs import imported
from onnx import TensorProto, helper, numpy_helper

import cnorm
import onnx_export

HARD = ("hard_sigmoid", 0.2, 0.5)
COMPOSED = [
    (("LSTM", "ba2016"), {"recurrent_activation": HARD, "activation": "relu", "clip": 1.5}),
    (("LSTM", "keras"), {"recurrent_activation": "hard_sigmoid", "activation": "gelu_tanh"}),
    (("LSTM", "tflite"), {"activation": "selu", "clip": 0.5}),
    (("GRU", "ba2016"), {"recurrent_activation": HARD, "activation": ("elu", 0.5)}),
    (("GRU", "dreamer_v3"), {"activation": "hard_swish", "clip": 1.0}),
    (("GRU", "keras_reset_before"), {"activation": ("clip", 0.0, 0.5), "recurrent_activation": "exp", "clip": 0.5}),
    (("RNN", "ba2016"), {"activation": "silu"}),
]
NATIVE = [
    ("LSTM", "onnx", {"recurrent_activation": HARD, "activation": ("leaky_relu", 0.3)}),
    ("LSTM", "keras", {"activation": "softplus"}),
    ("GRU", "onnx", {"recurrent_activation": HARD, "activation": ("elu", 0.5), "clip": 0.5}),
    ("GRU", "onnx_linear_before_reset", {"activation": "relu"}),
    ("GRU", "keras", {"clip": 0.5}),
    ("RNN", "onnx", {"activation": "sigmoid", "clip": 0.5}),
    ("RNN", "onnx", {"activation": "relu"}),
]


def model_of(kind, preset, changes, rng):
    spec = dataclasses.replace(cnorm.PRESETS[kind, preset], **changes)
    layer = cells.LAYERS[kind](cells.random_weights(spec, rng, 5, 16), preset=spec)
    return cnorm.Model([layer, cnorm.Linear((rng.standard_normal((7, 16)) / 4).astype(np.float32))])


def stripped(exported, path):
    del exported.metadata_props[:]
    onnx.save(exported, path)
    return imported(path)


@pytest.mark.exhaustive(one_in=3)
@pytest.mark.parametrize(("key", "changes"), COMPOSED, ids=str)
def test_the_written_out_cell_is_the_cell(key, changes, tmp_path, rng):
    model = model_of(*key, changes, rng)
    for options in ({}, {"form": "sequence"}, {"portable": True}):
        exported = onnx_export.export(model, tmp_path / "m.onnx", **options)
        assert onnx_export.check_parity(model, exported, steps=8).ok
    x = rng.standard_normal((6, 5)).astype(np.float32)
    onnx_export.export(model, tmp_path / "m.onnx")
    assert onnx_export.load(tmp_path / "m.onnx").run(x).tobytes() == model.run(x).tobytes()


@pytest.mark.exhaustive(one_in=5)
@pytest.mark.parametrize(("kind", "preset", "changes"), NATIVE, ids=str)
def test_the_operators_and_back(kind, preset, changes, tmp_path, rng):
    model = model_of(kind, preset, changes, rng)
    exported = onnx_export.export(model, tmp_path / "m.onnx", native_ops=True)
    assert onnx_export.check_parity(model, exported, steps=8).ok
    found = stripped(exported, tmp_path / "b.onnx")
    spec = found.model.layers[0].spec
    given = dataclasses.replace(cnorm.PRESETS[kind, preset], **changes)
    assert (spec.activation, spec.recurrent_activation) == (given.activation, given.recurrent_activation)
    assert spec.clip == given.clip
    assert found.report.ok


def node_file(path, kind, rng, **attributes):
    gates, directions = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind], 2 if "direction" in attributes else 1
    shapes = {"W": (directions, gates * 6, 4), "R": (directions, gates * 6, 6), "B": (directions, 2 * gates * 6)}
    weights = [numpy_helper.from_array((0.5 * rng.standard_normal(s)).astype(np.float32), n) for n, s in shapes.items()]
    node = helper.make_node(kind, ["x", *shapes], ["y"], name="cell", hidden_size=6, **attributes)
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", ["T", 1, 4]), ("y", None))]
    graph = helper.make_graph([node], "g", ends[:1], ends[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.mark.exhaustive(one_in=8)
@pytest.mark.parametrize(
    ("kind", "attributes"),
    [
        ("LSTM", {"activations": ["HardSigmoid", "Relu", "Relu"], "activation_alpha": [0.3], "activation_beta": [0.4]}),
        ("LSTM", {"activations": ["Sigmoid", "Elu", "Elu"], "activation_alpha": [0.5, 0.5]}),
        ("GRU", {"activations": ["HardSigmoid", "Softplus"], "clip": 0.7}),
        ("GRU", {"activations": ["Sigmoid", "Affine"], "activation_alpha": [1.0], "activation_beta": [0.0]}),
        ("RNN", {"activations": ["LeakyRelu"], "activation_alpha": [0.1], "clip": 0.7}),
        ("GRU", {"direction": "bidirectional", "activations": ["Sigmoid", "Tanh", "HardSigmoid", "Relu"]}),
    ],
    ids=str,
)
def test_a_file_of_others(kind, attributes, tmp_path, rng):
    """Over a time axis: the numbers are onnxruntime's."""
    path = node_file(tmp_path / "m.onnx", kind, rng, **attributes)
    x = rng.standard_normal((9, 4)).astype(np.float32)
    y = onnxruntime.InferenceSession(path).run(None, {"x": x[:, None]})[0]
    model = onnx_export.load(path)
    assert np.abs(model.run(x) - y.reshape(9, -1)).max() < 1e-5


@pytest.mark.exhaustive(one_in=5)
@pytest.mark.parametrize(
    ("kind", "attributes", "says"),
    [
        ("LSTM", {"input_forget": 1}, "input_forget"),
        (
            "LSTM",
            {"activations": ["Sigmoid", "Tanh", "Relu"]},
            "its candidate and its output have two functions, tanh and",
        ),
        ("LSTM", {"activations": ["Tanh", "Tanh", "Tanh"]}, "its gates are tanh"),
        ("GRU", {"activations": ["Sigmoid", "Softsign"]}, "its activations include softsign"),
        ("RNN", {"activations": ["ScaledTanh"], "activation_alpha": [1.0]}, "its activations include scaledtanh"),
    ],
    ids=str,
)
def test_what_no_spec_computes_is_refused_by_name(kind, attributes, says, tmp_path, rng):
    with pytest.raises(ValueError, match=says):
        onnx_export.load(node_file(tmp_path / "m.onnx", kind, rng, **attributes))


def test_the_clip_of_an_lstm_is_the_standards(tmp_path, rng):
    """onnxruntime does not clip the cell before its activation: the export writes it out, and a node is not proven."""
    model = model_of("LSTM", "onnx", {"clip": 0.25}, rng)
    with pytest.raises(ValueError, match="onnxruntime does not clip the cell"):
        onnx_export.export(model, native_ops=True)
    assert onnx_export.check_parity(model, onnx_export.export(model), steps=8).ok
    path = node_file(tmp_path / "m.onnx", "LSTM", rng, clip=0.25)
    with pytest.raises(ValueError, match="onnxruntime"):
        onnx_export.load(path)
    assert onnx_export.load(path, check=False).layers[0].spec.clip == 0.25
