"""Every preset, exported without metadata, is read back from its nodes alone: the same equations, the same bits."""

import dataclasses
import os

import numpy as np
import onnx
import pytest
from cells import EPS, random_cell
from graphs import imported, node, normal, saved

import cnorm
import onnx_export
from onnx_export.options import newest_opset

OF_THE_FILE = {"name", "source", "gates", "weights", "eps"}  # eps is compared as the layer's
FORMS = {"step": {}, "scan": {"form": "sequence"}, "loop": {"form": "sequence", "loop": "loop"}}
NORMS = {
    "17": {"opset": 17},
    "newest": {"opset": newest_opset()},
    "composed-13": {"opset": 13},
    "composed-17": {"opset": 17, "composed_norms": True},
    "composed-newest": {"opset": newest_opset(), "composed_norms": True},
}
EXPORTS = {f"{form}-{norms}": FORMS[form] | NORMS[norms] for form in FORMS for norms in NORMS}
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


def read_back(model, how, path):
    """A model, exported and read from its nodes, which has the same bits."""
    exported = onnx_export.export(model, **EXPORTS[how])
    del exported.metadata_props[:]
    onnx.save(exported, path)
    read = onnx_export.load(path)
    x = np.random.default_rng(1).standard_normal((20, 5)).astype(np.float32)
    np.testing.assert_array_equal(read.run(x), model.run(x))
    return read.layers


@pytest.mark.exhaustive(one_in=44)
@pytest.mark.parametrize(("key", "how"), CHOSEN)
def test_every_preset_is_read_back(key, how, tmp_path):
    layer, _ = random_cell(key, np.random.default_rng(0), 5, 8, eps=eps_of(key))
    (found,) = read_back(cnorm.Model([layer]), how, tmp_path / "cell.onnx")
    assert equations(found) == equations(layer)
    assert found.eps == layer.eps


@pytest.mark.exhaustive(one_in=2)
@pytest.mark.parametrize("how", EXPORTS if os.environ.get("CNORM_ALL_PRESETS") else ["step-composed-17", "scan-17"])
def test_a_stack_is_read_back(how, tmp_path):
    rng = np.random.default_rng(0)
    keys = [("LSTM", "ba2016"), ("GRU", "haste")] if "scan" not in how else [("GRU", "dreamer_v2"), ("LSTM", "torch")]
    first, second = random_cell(keys[0], rng, 5, 8)[0], random_cell(keys[1], rng, 8, 6)[0]
    norm = cnorm.LayerNorm(*(rng.standard_normal(8).astype(np.float32) for _ in range(2)))
    head = cnorm.Linear(rng.standard_normal((3, 6)).astype(np.float32), rng.standard_normal(3).astype(np.float32))
    layers = [first, norm, second, head]
    found = read_back(cnorm.Model(layers), how, tmp_path / "stack.onnx")
    assert [one.kind for one in found] == [one.kind for one in layers]
    assert [equations(found[at]) for at in (0, 2)] == [equations(first), equations(second)]


HALVES = [(kind, 0, start) for kind in ("LSTM", "GRU", "RNN") for start in (False, True)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "half", "start"), [*HALVES, ("GRU", 1, False)])
def test_the_first_half_of_both_directions_is_a_cell(kind, half, start, tmp_path, rng):
    """Over an open number of steps, from zeros or a stored state; the other half is refused by name."""
    rows, stored = {"LSTM": 20, "GRU": 15, "RNN": 5}[kind], ["h", "c"][: 1 + (kind == "LSTM")] if start else []
    tensors = {"W": normal(rng, 2, rows, 3), "R": normal(rng, 2, rows, 5), "half": np.array(half)}
    tensors |= {name: normal(rng, 2, 1, 5) for name in stored}
    nodes = [node(kind, "x W R", "Y", hidden_size=5, direction="bidirectional"), node("Gather", "Y half", "y", axis=1)]
    nodes[0].input.extend(["", "", *stored] if start else [])
    path = saved(tmp_path / "m.onnx", nodes, {"x": ["T", 1, 3]}, {"y": ["T", 1, 5]}, tensors)
    if half:
        with pytest.raises(ValueError, match="a cell that reads the sequence from its end only"):
            imported(path)
        return
    found = imported(path)
    assert found.report.ok
    x = rng.standard_normal((9, 3)).astype(np.float32)
    assert found.model.check(x, found.file.run(x)).ok
