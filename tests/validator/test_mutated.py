"""What tests/fuzz/mutated_onnx.py has found: files that onnxruntime does not load passed, and walks without end."""

import gallery
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from writings import Writing

import onnx_export
from onnx_export.errors import NotImported
from onnx_export.graph.scope import with_shapes
from onnx_export.nodes import drop_omitted
from onnx_export.validation.examine import examine
from onnx_export.validation.options import Options
from onnx_export.validation.patterns import find


def problem(model, folder):
    """The problem of a file whose exit code is 2."""
    onnx.save(model, folder / "model.onnx")
    report = examine(str(folder / "model.onnx"), Options(), lambda *_: None)
    assert report.exit_code() == 2
    return report.problem


@pytest.mark.parametrize("normed", [True, False])
def test_an_output_without_an_element_type_does_not_pass(normed, tmp_path):
    """Shape inference would fill it in, and the runtime then load the model."""
    node = gallery.native() if normed else gallery.node("Relu", "x", "y")
    model = gallery.model([node], constants=gallery.weights())
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.UNDEFINED
    assert "Invalid tensor data type" in problem(model, tmp_path)


def test_a_function_that_contradicts_its_calls_does_not_pass(tmp_path):
    """Inlined, its nodes would be right."""
    then = helper.make_graph([gallery.native(y="t")], "then", [], [gallery.value("t", (64, gallery.N))])
    other = helper.make_graph([gallery.node("Neg", "x", "e")], "else", [], [gallery.value("e", (64, gallery.N))])
    nodes = [gallery.node("If", "yes", "y", then_branch=then, else_branch=other)]
    inner = gallery.function("Norm", nodes, gallery.weights() | {"yes": np.array(True)})
    model = gallery.model([gallery.node("Norm", "x", "y", domain="local")], functions=[inner])
    assert "does not load" in problem(model, tmp_path)


def test_means_that_lead_back_to_themselves_end():
    nodes = [gallery.node("ReduceMean", "a", "b", axes=[-1]), gallery.node("ReduceMean", "b", "a", axes=[-1])]
    nodes += [gallery.node("Sub", "x b", "d"), gallery.node("Mul", "d d", "q")]
    nodes += [gallery.node("ReduceMean", "q", "v", axes=[-1]), gallery.node("Sqrt", "v", "r")]
    assert len(find(gallery.model([*nodes, gallery.node("Div", "d r", "y")]))) == 1


@pytest.mark.parametrize("length", [16, 2**20])
def test_values_of_shapes_are_not_inferred_where_a_dimension_is_long(length, monkeypatch):
    """onnx takes a vector of known length for a shape, and adds up its elements one by one."""
    writing, asked = Writing(), []
    total = writing.op("ReduceSum", writing.input("x", [length, 4]), [1], keepdims=0)
    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", lambda model, *, data_prop: asked.append(data_prop))
    with_shapes(writing.model(writing.op("Mul", total, 0.25)))
    assert asked == [length == 16]


@pytest.mark.parametrize("kinds", [{"Clip"}, None])
def test_omitted_inputs_at_the_end_are_dropped(kinds):
    """The name "" says that an optional input is not given, which at the end nothing needs to say."""
    clip = gallery.node("Clip", "x zero", "y", name="clip")
    clip.input.append("")
    model = gallery.model([clip], constants={"zero": np.float32(0)})
    assert drop_omitted(model, {"Relu"}) == []
    assert drop_omitted(model, kinds) == ["clip"]
    assert list(model.graph.node[0].input) == ["x", "zero"]
    assert drop_omitted(model, kinds) == []


def test_a_split_into_more_parts_than_it_has_outputs_is_refused(tmp_path):
    writing = Writing(opset=18)
    x = writing.input("x", [1, 4])
    halves = writing.op("Split", x, outputs=2, axis=-1, num_outputs=3)
    model = writing.model(writing.op("Add", *halves))
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(ValueError, match="num_outputs of '' is 3, it has 2 outputs"):
        onnx_export.load(tmp_path / "model.onnx")
    assert examine(str(tmp_path / "model.onnx"), Options(), lambda *_: None).refused


def test_a_sum_with_an_input_without_a_name_is_refused(tmp_path):
    nodes = [gallery.node("Concat", "x", "y", name="largest", axis=0)]
    nodes[0].input.append("")
    onnx.save(gallery.model(nodes), tmp_path / "model.onnx")
    report = examine(str(tmp_path / "model.onnx"), Options(), lambda *_: None)
    assert report.refused
    assert "'largest' has no name" in report.problem


def test_an_input_with_an_endless_axis_and_an_empty_one_is_not_made_up(tmp_path):
    model = gallery.model([gallery.native()], (0, 2**62, gallery.N), gallery.weights())
    assert "too large to make up" in problem(model, tmp_path)


def test_a_file_that_onnxruntime_refuses_is_not_loaded(tmp_path):
    writing = Writing()
    x = writing.input("x", [1, 3])
    model = writing.model(writing.op("Tanh", writing.op("MatMul", x, np.eye(3, dtype=np.float32))))
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.UNDEFINED
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(NotImported, match="does not load the file"):
        onnx_export.load(tmp_path / "model.onnx", check=False)
