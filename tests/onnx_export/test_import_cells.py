"""Every preset, exported without metadata, is read back from its nodes alone: the same equations, the same bits."""

import dataclasses
import os

import numpy as np
import onnx
import pytest
from cells import EPS, random_cell

import cnorm
import onnx_export
from onnx_export.options import newest_opset

OF_THE_FILE = {"name", "source", "gates", "weights", "eps"}  # eps is compared as the layer's
EXPORTS = {
    "17": {},
    "composed": {"composed_norms": True},
    "13": {"opset": 13},
    "newest": {"opset": newest_opset()},
    "scan": {"form": "sequence"},
    "loop": {"form": "sequence", "loop": "loop", "composed_norms": True},
}
# one a preset, or all of them
CHOSEN = [
    pytest.param(key, how, id=f"{'/'.join(key)}-{how}")
    for at, key in enumerate(cnorm.PRESETS)
    for place, how in enumerate(EXPORTS)
    if place == at % len(EXPORTS) or os.environ.get("CNORM_ALL_PRESETS")
]


def equations(layer):
    return {
        field.name: getattr(layer.spec, field.name)
        for field in dataclasses.fields(layer.spec)
        if field.name not in OF_THE_FILE
    }


def eps_of(key):
    return 1e-8 if key[1] == "kann" else EPS.get(key)  # kann has 0, which ONNX has not


@pytest.mark.parametrize(("key", "how"), CHOSEN)
def test_every_preset_is_read_back(key, how, tmp_path):
    rng = np.random.default_rng(0)
    layer, _ = random_cell(key, rng, 5, 8, eps=eps_of(key))
    model = cnorm.Model([layer])
    exported = onnx_export.export(model, **EXPORTS[how])
    del exported.metadata_props[:]
    onnx.save(exported, tmp_path / "cell.onnx")
    read = onnx_export.load(tmp_path / "cell.onnx")
    (found,) = read.layers
    assert equations(found) == equations(layer)
    assert found.eps == layer.eps
    x = rng.standard_normal((20, 5)).astype(np.float32)
    np.testing.assert_array_equal(read.run(x), model.run(x))
