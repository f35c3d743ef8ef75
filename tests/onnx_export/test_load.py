"""`load` of an exported file gives the model: the same bits at every step."""

import json

import numpy as np
import onnx
import onnxruntime
import pytest
from cells import random_cell
from models import random_linear, random_lstm

import cnorm
import onnx_export


@pytest.mark.parametrize("opset", [13, 17])
@pytest.mark.parametrize("form", ["step", "sequence"])
def test_loaded_model_steps_to_the_same_bits(rng, tmp_path, form, opset):
    model = cnorm.Model([random_lstm(rng, 5, 7, eps=3e-4), random_linear(rng, 7, 3, bias=False)])
    onnx_export.export(model, tmp_path / "m.onnx", form=form, opset=opset)
    again = onnx_export.load(tmp_path / "m.onnx")
    x = rng.standard_normal((50, 5)).astype(np.float32)
    assert again.stream().process(x).tobytes() == model.stream().process(x).tobytes()
    # a saved stream holds its model's hash of configuration and weights, so it is the same model
    stream = model.stream()
    stream.process(x)
    assert again.restore(stream.save()).step(x[0]).tobytes() == stream.step(x[0]).tobytes()


def test_float16_export_loads_back_rounded(tmp_path):
    model = cnorm.demo_model()
    onnx_export.export(model, tmp_path / "m.onnx", dtype="float16")
    again = onnx_export.load(tmp_path / "m.onnx")
    for layer, other in zip(model.layers, again.layers, strict=True):
        for name, array in layer.weights.items():
            np.testing.assert_array_equal(other.weights[name], array.astype(np.float16).astype(np.float32))


READERS = [onnx_export.load, lambda path: onnx_export.check_parity(cnorm.demo_model(), path)]


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
        (lambda _, described: described.pop("layers"), "not JSON with a format and layers"),
        (lambda _, described: described.update(format=99), "format 99"),
        (lambda _, described: described.update(states=[{"tensor": "t"}]), "not JSON with a table of states"),
        (lambda _, described: described.update(states=3), "not JSON with a table of states"),
        (
            lambda _, described: described["states"][0].update(tensor="layers.0.h0", initial=10**400),
            "not JSON with a table of states",
        ),
        (lambda _, described: described["states"][0].update(tensor="layers.0.h0", initial=[1e300] * 64), "finite"),
        (lambda _, described: described["states"][0].update(tensor=1), "tensors that no layer takes: 1"),
        (lambda _, described: described["layers"].pop(), r"layers\.1|no layer takes"),
        (lambda _, described: described["layers"][0].update(preset="mystery"), "preset must be one of"),
        (lambda model, _: model.graph.initializer.pop(0), "which nothing defines"),
    ],
    ids=[
        "no layers",
        "newer format",
        "no initial",
        "no table",
        "an integer that no float holds",
        "beyond float32",
        "a number for a name",
        "a layer short",
        "unknown preset",
        "a tensor short",
    ],
)
def test_rejects_altered_files_by_name(tmp_path, edit, says):
    path = tmp_path / "demo.onnx"
    onnx_export.export(cnorm.demo_model(), path)
    change(path, edit)
    with pytest.raises(ValueError, match=says) as error:
        onnx_export.load(path)
    assert path.name in str(error.value)


def test_load_of_an_absent_file_is_an_oserror(tmp_path):
    """An OSError from every function that reads a file, as from `cnorm.load`."""
    for read in READERS:
        with pytest.raises(FileNotFoundError, match=r"No such file .*nothing\.onnx"):
            read(tmp_path / "nothing.onnx")


def test_rejects_anything_but_a_path():
    for read, name in zip(READERS, ("path", "onnx_model"), strict=True):
        for wrong in 3, None, [b"x"]:
            with pytest.raises(TypeError, match=f"^{name} must be .* str or path-like, got {type(wrong).__name__}"):
                read(wrong)


def test_load_reads_no_weights_outside_the_folder(tmp_path, monkeypatch):
    """Weights outside the model's folder are not read, and files that are not ONNX are refused."""
    monkeypatch.setattr("onnx_export.files.EXTERNAL_ABOVE", 100)
    (tmp_path / "inner").mkdir()
    path = tmp_path / "inner" / "demo.onnx"
    onnx_export.export(cnorm.demo_model(), path)
    (data,) = path.parent.glob("*.data")
    data.rename(tmp_path / data.name)
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        tensor.external_data[0].value = f"../{data.name}"
    path.write_bytes(model.SerializeToString())
    for read in (onnx_export.load, lambda p: onnx_export.check_parity(cnorm.demo_model(), p)):
        with pytest.raises(ValueError, match=data.name):
            read(path)
    path.write_bytes(b"not a model")
    with pytest.raises(ValueError, match="not an ONNX"):
        onnx_export.load(path)


def test_rejects_files_of_other_exporters_with_advice(tmp_path):
    exported = onnx_export.export(cnorm.demo_model())
    exported.ClearField("metadata_props")
    next(node for node in exported.graph.node if node.op_type == "Tanh").op_type = "Sin"
    onnx.save(exported, tmp_path / "foreign.onnx")
    says = r"not a list of layers(.|\n)* cnorm.LSTM\(tensors, preset=...\), and let check_parity"
    with pytest.raises(ValueError, match=says):
        onnx_export.load(tmp_path / "foreign.onnx")


def test_a_file_named_like_that_error_is_not_taken_for_one_of_others(tmp_path):
    path = tmp_path / "the metadata has no 'cnorm.model'.onnx"
    path.write_bytes(b"no protobuf message")
    with pytest.raises(ValueError, match="not an ONNX file") as raised:
        onnx_export.load(path)
    assert "did not write it" not in str(raised.value)


FORMS = [
    *({"opset": opset} for opset in (13, 17, 20)),
    {"native_ops": True},
    {"batch": "n", "dtype": "float16"},
    {"form": "sequence"},
    {"form": "sequence", "loop": "loop", "composed_norms": True},
    {"form": "sequence", "loop": "unrolled", "steps": 3},
    {"form": "sequence", "native_ops": True, "steps": 3},
]


@pytest.mark.parametrize("options", FORMS, ids=lambda options: "-".join(map(str, options.values())))
def test_an_unchanged_export_is_read_without_a_child(rng, tmp_path, monkeypatch, options):
    monkeypatch.setattr("onnx_export.child.run", None)
    key = ("LSTM", "torch" if "native_ops" in options else "ba2016")
    cell, _ = random_cell(key, rng, 4, 5)
    model = cnorm.Model([cell, random_linear(rng, 5, 3)])
    onnx_export.export(model, tmp_path / "m.onnx", **options)
    assert list(map(repr, onnx_export.load(tmp_path / "m.onnx").layers)) == list(map(repr, model.layers))


def named(graph, kind):
    return next(node for node in graph.node if node.op_type == kind)


def with_epsilon(graph):
    next(each for each in named(graph, "LayerNormalization").attribute if each.name == "epsilon").f = 0.5


def with_function(graph):
    named(graph, "Tanh").op_type = "Relu"


def with_factor(graph):
    graph.initializer.append(onnx.numpy_helper.from_array(np.float32(3.0), "three"))
    last = next(node for node in graph.node if "y" in node.output)
    last.output[list(last.output).index("y")] = "before"
    graph.node.append(onnx.helper.make_node("Mul", ["before", "three"], ["y"]))


@pytest.mark.exhaustive(one_in=3)
@pytest.mark.parametrize("change", [with_epsilon, with_function, with_factor])
def test_an_export_whose_graph_was_changed_is_refused(rng, tmp_path, change):
    exported = onnx_export.export(cnorm.Model([random_lstm(rng, 5, 7), random_linear(rng, 7, 3)]))
    change(exported.graph)
    onnx.save(exported, tmp_path / "m.onnx")
    with pytest.raises(ValueError, match=r"not a list of layers|no layer takes: three"):
        onnx_export.load(tmp_path / "m.onnx")


def test_an_export_whose_graph_was_changed_is_read_by_its_graph(rng, tmp_path):
    """What a tool made of the graph counts, not the metadata that it kept."""
    exported = onnx_export.export(cnorm.Model([random_lstm(rng, 5, 7), random_linear(rng, 7, 3)]))
    gates = named(exported.graph, "Split")
    gates.output[0], gates.output[1] = gates.output[1], gates.output[0]
    path = tmp_path / "m.onnx"
    onnx.save(exported, path)
    again = onnx_export.load(path).stream()
    session = onnxruntime.InferenceSession(path)
    feeds = {value.name: np.zeros(value.shape, np.float32) for value in session.get_inputs()}
    for x in rng.standard_normal((4, 1, 5)).astype(np.float32):
        y, h, c = session.run(["y", "h0_out", "c0_out"], feeds | {"x": x})
        np.testing.assert_allclose(again.step(x[0]), y[0], rtol=1e-4, atol=1e-5)
        feeds |= {"h0_in": h, "c0_in": c}
