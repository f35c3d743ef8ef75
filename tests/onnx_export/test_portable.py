"""Files for other runtimes: weights folded, primitive operators, separate output nodes, three forms of loop."""

import json

import numpy as np
import onnx
import pytest
from cells import random_cell
from models import deep_model, random_linear

import cnorm
import onnx_export
from onnx_export.nodes import model_graphs, model_nodes
from onnx_export.ort import Session

LOOPS = [{"loop": "scan"}, {"loop": "loop"}, {"loop": "scan", "steps": 6}, {"loop": "loop", "steps": 6}]
LOOPS += [{"loop": "unrolled", "steps": 6}]
KINDS = sorted(cnorm.PRESETS)


def of_preset(key, rng):
    eps = 1e-8 if key[1] == "kann" else None  # KANN's eps is 0; in ONNX a row without variance would be NaN
    layer = random_cell(key, rng, 5, 8, eps=eps)[0]
    return cnorm.Model([layer, random_linear(rng, layer.output_size, 3)])


@pytest.mark.exhaustive(one_in=6)
@pytest.mark.parametrize("options", LOOPS, ids=lambda o: "-".join(map(str, o.values())))
@pytest.mark.parametrize("portable", [False, True])
def test_every_form_of_loop(rng, options, portable):
    model = deep_model(rng)
    for batch in (1, "batch"):
        exported = onnx_export.export(model, form="sequence", portable=portable, batch=batch, **options)
        report = onnx_export.check_parity(model, exported, steps=6)
        assert report.ok, str(report)
        assert report.steps >= 6
        x = exported.graph.input[0].type.tensor_type.shape.dim[0]
        assert (x.dim_value or x.dim_param) == options.get("steps", "T")


@pytest.mark.exhaustive(one_in=5)
@pytest.mark.parametrize("key", KINDS, ids=lambda key: "-".join(key))
@pytest.mark.parametrize("opset", [13, 17])
def test_every_preset_folded(rng, key, opset):
    model = of_preset(key, rng)
    exported = onnx_export.export(model, portable=True, opset=opset)
    report = onnx_export.check_parity(model, exported, steps=4)
    assert report.ok, str(report)
    stored = {tensor.name for tensor in exported.graph.initializer}
    constant = stored | {node.output[0] for node in exported.graph.node if node.op_type == "Constant"}
    for node in exported.graph.node:
        assert node.op_type != "Gemm"
        assert node.op_type == "Constant" or not constant.issuperset(filter(None, node.input)), node.name
    assert {name for node in exported.graph.node for name in node.input} >= stored  # nothing is left over


@pytest.mark.exhaustive(one_in=2)
@pytest.mark.parametrize("key", KINDS, ids=lambda key: "-".join(key))
def test_every_preset_unrolled(rng, key):
    model = of_preset(key, rng)
    exported = onnx_export.export(model, form="sequence", loop="unrolled", steps=3, portable=True)
    assert onnx_export.check_parity(model, exported, steps=3).ok
    step = onnx_export.export(model, portable=True)
    assert sum(len(t.raw_data) for t in exported.graph.initializer) == sum(
        len(t.raw_data) for t in step.graph.initializer
    )


def test_unrolled_steps_share_nodes_on_weights(rng):
    model = of_preset(("LSTM", "tf_contrib"), rng)
    uses = []
    for steps in (1, 3):
        exported = onnx_export.export(model, form="sequence", loop="unrolled", steps=steps)
        stored = {tensor.name for tensor in exported.graph.initializer}
        uses.append(sum(n.op_type == "Split" and not stored.isdisjoint(n.input) for n in exported.graph.node))
    assert uses[0] == uses[1] > 0


@pytest.mark.parametrize("form", [{"form": "step"}, {"form": "sequence"}, {"form": "sequence", "native_ops": True}])
def test_portable_outputs_come_from_separate_nodes(rng, form):
    """Some runtimes name outputs after nodes; type converters need outputs that no other node reads."""
    model = of_preset(("LSTM", "torch"), rng)
    exported = onnx_export.export(model, portable=True, **form)
    names = [value.name for value in exported.graph.output]
    read = {name for node in exported.graph.node for name in node.input}
    assert not read & set(names)
    producers = {node.output[0]: node for node in exported.graph.node}
    assert [producers[name].name for name in names] == names
    assert {producers[name].op_type for name in names} == {"Reshape"}


def test_output_nodes_have_the_names_of_the_outputs():
    exported = onnx_export.export(cnorm.demo_model())
    names = {output: node.name for node in exported.graph.node for output in node.output}
    assert [names[value.name] for value in exported.graph.output] == ["y", "h0_out", "c0_out"]


@pytest.mark.parametrize(("opset", "expected"), [(13, 7), (14, 7), (15, 8), (17, 8)])
def test_ir_version_is_the_oldest_sufficient_one(opset, expected):
    """onnxruntime 1.8 reads IR 7 and opset 13."""
    assert onnx_export.export(cnorm.demo_model(), opset=opset).ir_version == expected


def test_composed_norms_at_any_opset(rng):
    model = of_preset(("GRU", "ba2016"), rng)
    exported = onnx_export.export(model, composed_norms=True)
    assert "LayerNormalization" not in {node.op_type for node in model_nodes(exported)}
    assert onnx_export.check_parity(model, exported, steps=3).ok


@pytest.mark.parametrize("options", [{}, {"form": "sequence"}, {"form": "sequence", "loop": "loop"}])
def test_every_value_has_a_shape(rng, options):
    exported = onnx_export.export(deep_model(rng), **options)
    for graph in model_graphs(exported):
        known = {value.name for value in (*graph.value_info, *graph.output)}
        for node in graph.node:
            assert known.issuperset(node.output), node.name
    assert exported.graph.input[0].name == "x"
    assert all(value.doc_string for value in (*exported.graph.input, *exported.graph.output))
    assert exported.doc_string
    assert exported.graph.doc_string


def test_flat_metadata():
    lstm = cnorm.demo_model().layers[0]
    lstm = cnorm.LSTM({**lstm.weights, "h0": np.full(64, 0.25, "f")}, preset="ba2016")
    exported = onnx_export.export(cnorm.Model([lstm]), form="sequence", steps=4)
    flat = {entry.key: entry.value for entry in exported.metadata_props}
    assert (flat["model_type"], flat["form"], flat["steps"], flat["states"]) == ("cnorm", "sequence", "4", "h0,c0")
    assert (flat["h0_units"], flat["c0_initial"]) == ("64", "0.0")
    assert flat["h0_initial"] == ",".join(["0.25"] * 64)


def test_the_sidecar_has_the_metadata_and_the_interface(tmp_path):
    exported = onnx_export.export(cnorm.demo_model(), tmp_path / "demo.onnx", sidecar=True, batch="batch")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo.onnx", "demo.onnx.json"]
    told = json.loads((tmp_path / "demo.onnx.json").read_text())
    (whole,) = (json.loads(e.value) for e in exported.metadata_props if e.key == "cnorm.model")
    assert {key: told[key] for key in whole} == whole
    assert told["inputs"][0] == {"name": "x", "shape": ["batch", 12], "dtype": "float32", "about": "the input"}
    assert [value["name"] for value in told["outputs"]] == ["y", "h0_out", "c0_out"]
    with pytest.raises(ValueError, match="path must be given for a sidecar"):
        onnx_export.export(cnorm.demo_model(), sidecar=True)


def test_load_rejects_portable_files_with_the_reason(tmp_path):
    onnx_export.export(cnorm.demo_model(), tmp_path / "demo.onnx", portable=True)
    with pytest.raises(ValueError, match="exported with portable=True, which folds the weights"):
        onnx_export.load(tmp_path / "demo.onnx")


@pytest.mark.parametrize("loop", ["loop", "unrolled"])
def test_load_reads_every_loop(tmp_path, loop):
    model = cnorm.demo_model()
    onnx_export.export(model, tmp_path / "demo.onnx", form="sequence", loop=loop, steps=3)
    x = np.random.default_rng(0).standard_normal((3, 12)).astype(np.float32)
    assert (onnx_export.load(tmp_path / "demo.onnx").run(x) == model.run(x)).all()


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        (
            {"form": "sequence", "loop": "while"},
            ValueError,
            "loop must be one of 'scan', 'loop', 'unrolled', got 'while'",
        ),
        ({"loop": "loop"}, ValueError, "steps and loop must be left out in form 'step'"),
        ({"steps": 4}, ValueError, "steps and loop must be left out in form 'step'"),
        ({"form": "sequence", "loop": "unrolled"}, ValueError, "steps must be given for loop 'unrolled'"),
        ({"form": "sequence", "loop": "unrolled", "steps": 10**6}, ValueError, "steps must be at most 10000"),
        ({"form": "sequence", "steps": 0}, ValueError, "steps must be at least 1, got 0"),
        ({"form": "sequence", "steps": 1.5}, TypeError, "steps must be an integer, got 1.5"),
        ({"form": "sequence", "loop": "loop", "native_ops": True}, ValueError, "loop must be left out with native_ops"),
    ],
)
def test_options_that_exclude_each_other(options, error, says):
    with pytest.raises(error, match=says):
        onnx_export.export(cnorm.demo_model(), **options)


def test_loop_of_zero_steps_keeps_the_states():
    """onnxruntime's Scan rejects an empty sequence; Loop accepts it."""
    exported = onnx_export.export(cnorm.demo_model(), form="sequence", loop="loop")
    h, c = (np.full((1, 64), v, np.float32) for v in (0.5, -0.5))
    session = Session(exported, "all")
    y, h_out, c_out = session.run(["y", "h0_out", "c0_out"], {"x": np.zeros((0, 1, 12), "f"), "h0_in": h, "c0_in": c})
    assert y.shape[0] == 0
    assert (h_out == h).all()
    assert (c_out == c).all()
    assert onnx.checker.check_model(exported) is None
