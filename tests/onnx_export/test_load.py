"""An exported file read back is the model: the same bits at every step."""

import json

import numpy as np
import onnx
import pytest
from models import random_linear, random_lstm

import cnorm
import onnx_export


@pytest.mark.parametrize("opset", [13, 17])
@pytest.mark.parametrize("functions", [False, True])
@pytest.mark.parametrize("form", ["step", "sequence"])
def test_loaded_back_it_steps_to_the_same_bits(rng, tmp_path, form, functions, opset):
    model = cnorm.Model([random_lstm(rng, 5, 7, eps=3e-4), random_linear(rng, 7, 3, bias=False)])
    onnx_export.export(model, tmp_path / "m.onnx", form=form, functions=functions, opset=opset)
    again = onnx_export.load(tmp_path / "m.onnx")
    x = rng.standard_normal((50, 5)).astype(np.float32)
    assert again.stream().process(x).tobytes() == model.stream().process(x).tobytes()
    # a saved stream is tied to its model by a hash of configuration and weights: it is the same model
    stream = model.stream()
    stream.process(x)
    assert again.restore(stream.save()).step(x[0]).tobytes() == stream.step(x[0]).tobytes()


def test_float16_comes_back_rounded(rng, tmp_path):
    model = cnorm.demo_model()
    onnx_export.export(model, tmp_path / "m.onnx", dtype="float16")
    again = onnx_export.load(tmp_path / "m.onnx")
    for layer, other in zip(model.layers, again.layers, strict=True):
        for name, array in layer.weights.items():
            np.testing.assert_array_equal(other.weights[name], array.astype(np.float16).astype(np.float32))


def change(path, edit):
    model = onnx.load(path)
    described = json.loads(model.metadata_props[0].value)
    edit(model, described)
    if model.metadata_props:
        model.metadata_props[0].value = json.dumps(described)
    onnx.save(model, path)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda model, _: model.ClearField("metadata_props"), "its metadata has no 'cnorm.model'"),
        (lambda _, described: described.pop("layers"), "not JSON with a format, layers and states"),
        (lambda _, described: described.update(format=99), "format 99"),
        (lambda _, described: described["layers"].pop(), r"layers\.1|no layer takes"),
        (lambda _, described: described["layers"][0].update(preset="mystery"), "preset must be one of"),
        (lambda model, _: model.graph.initializer.pop(0), "missing: weight_x"),
    ],
    ids=["no metadata", "no layers", "newer format", "a layer short", "unknown preset", "a tensor short"],
)
def test_other_files_are_refused_by_name(tmp_path, edit, says):
    path = tmp_path / "demo.onnx"
    onnx_export.export(cnorm.demo_model(), path)
    change(path, edit)
    with pytest.raises(ValueError, match=says) as error:
        onnx_export.load(path)
    assert str(path) in str(error.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(OSError, match="nothing"):
        onnx_export.load(tmp_path / "nothing.onnx")
