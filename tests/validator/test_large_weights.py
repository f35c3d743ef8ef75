"""Large initialisers are held outside the message, and every session and lookup still sees them."""

import os
import stat

import gallery
import numpy as np
import onnx
import pytest

from onnx_export import ort, validate
from onnx_export.graph.scope import scopes
from onnx_export.validation.examine import examine
from onnx_export.validation.options import Options
from onnx_export.validation.weights import put_back, set_aside

WIDTH = 128  # a matrix of 64 KiB


def block(width=WIDTH):
    """A product with a large matrix, a residual addition, and a norm in primitive operators."""
    rng = np.random.default_rng(2)
    nodes, constants = gallery.decomposed(x="s", width=width)
    constants["w"] = rng.normal(0, width**-0.5, (width, width)).astype(np.float32)
    nodes = [gallery.node("MatMul", "x w", "m"), gallery.node("Add", "x m", "s"), *nodes]
    return gallery.model(nodes, (2, 4, width), constants)


def test_the_message_gets_small_and_is_restored_byte_for_byte():
    model = block()
    before = model.SerializeToString()
    rest, weights = set_aside(model)
    assert list(weights) == ["w"]
    assert rest.ByteSize() < 4000
    put_back(rest, weights)
    assert rest.graph.initializer[-1].raw_data == weights["w"].tobytes()
    assert rest == onnx.load_model_from_string(before)


@pytest.mark.parametrize("level", ort.LEVELS)
def test_sessions_and_optimised_graphs_are_those_of_the_whole_model(level):
    whole = block()
    rest, weights = set_aside(block())
    feeds = {"x": np.random.default_rng(0).normal(size=(2, 4, WIDTH)).astype(np.float32)}
    (expected,) = ort.Session(whole, level).run(["y"], feeds)
    (y,) = ort.Session(rest, level, weights).run(["y"], feeds)
    assert y.tobytes() == expected.tobytes()
    graphs = [ort.optimised(whole, level).graph, ort.optimised(rest, level, weights).graph]
    plain, held = ([(node.op_type, list(node.input), list(node.output)) for node in graph.node] for graph in graphs)
    assert held == plain
    assert graphs[1].ByteSize() < 8000


@pytest.mark.parametrize("used", [True, False])
def test_no_device_or_file_is_deleted_or_left(tmp_path, monkeypatch, used):
    """onnxruntime deletes a file of weights that it finds empty; as root it would delete /dev/null."""
    monkeypatch.chdir(tmp_path)
    rest, weights = set_aside(block())
    if not used:
        rest.graph.node[0].CopyFrom(gallery.node("Identity", "x", "m"))
    ort.optimised(rest, "all", weights)
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    assert list(tmp_path.iterdir()) == []


def test_values_set_aside_are_constants_of_the_main_graph():
    rest, weights = set_aside(block())
    (scope,) = scopes(rest, weights)
    assert scope.constant("w") is weights["w"]
    assert scope.shape("w") == (WIDTH, WIDTH)


def test_inputs_with_a_default_stay_in_the_message():
    """The caller may override them."""
    model = block()
    model.graph.input.append(gallery.value("w", (WIDTH, WIDTH)))
    assert set_aside(model)[1] == {}


def test_a_norm_whose_own_scale_is_large_is_judged(tmp_path):
    width = 1 << 15
    model = gallery.model(*gallery.parts(gallery.decomposed(width=width), (1, width)))
    onnx.save(model, tmp_path / "m.onnx")
    report = examine(str(tmp_path / "m.onnx"), Options(fix=str(tmp_path / "fixed.onnx")), lambda *_: None)
    (norm,) = report.norms
    assert norm.verdict in ("ok", "risky")
    assert (norm.scale, norm.bias) == ("scale", "bias")
    assert norm.scale_hash not in ("", "computed")
    fixed = validate(tmp_path / "fixed.onnx")
    assert [each.form for each in fixed.norms] == ["LayerNormalization"]
    assert fixed.norms[0].scale_hash == norm.scale_hash
