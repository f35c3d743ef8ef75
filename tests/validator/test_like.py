"""--like compares what norms do: neither the form, the layout nor the precision of a file is a difference."""

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner
from corpus import archive
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

from onnx_export.validation import command
from onnx_export.validation.examine import examine
from onnx_export.validation.lock import compare, facts
from onnx_export.validation.options import Options

D = 32


def norm_of(rng, axes=(-1,), gain=None, bias=None, eps=1e-6, shape=(2, 5, D), power=2.0):
    """x normalised by elementary operators."""
    stored = {"power": np.float32(power), "eps": np.float32(eps), "gain": gain, "bias": bias}
    stored = {name: value for name, value in stored.items() if value is not None}
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], axes=list(axes)),
        helper.make_node("Sub", ["x", "mean"], ["d"]),
        helper.make_node("Pow", ["d", "power"], ["squares"]),
        helper.make_node("ReduceMean", ["squares"], ["variance"], axes=list(axes)),
        helper.make_node("Add", ["variance", "eps"], ["sum"]),
        helper.make_node("Sqrt", ["sum"], ["root"]),
        helper.make_node("Div", ["d", "root"], ["xhat"]),
    ]
    y = "xhat"
    for name, kind in (("gain", "Mul"), ("bias", "Add")):
        if name in stored:
            nodes.append(helper.make_node(kind, [y, name], [f"with_{name}"]))
            y = f"with_{name}"
    return model_of(nodes, y, stored, shape)


def operator_of(gain, bias=None, eps=1e-6, shape=(2, 5, D), axis=-1, before=(), x="x"):
    stored = {"gain": gain} | ({} if bias is None else {"bias": bias})
    node = helper.make_node("LayerNormalization", [x, *stored], ["y"], axis=axis, epsilon=eps)
    return model_of([*before, node], "y", stored, shape)


def model_of(nodes, y, stored, shape):
    graph = helper.make_graph(
        nodes,
        "norm",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(y, TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in stored.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def found(model, path, **options):
    onnx.save(model, path)
    report = examine(str(path), Options(find_only="fix" not in options, **options), lambda *_: None)
    assert report.norms
    return facts(report)


@pytest.fixture
def alike(tmp_path):
    """What differs between two models."""

    def differences(one, other):
        return [finding.message for finding in compare(found(one, tmp_path / "a"), found(other, tmp_path / "b"))]

    return differences


def test_neutral_parameters_are_none(rng, alike):
    plain = norm_of(rng)
    assert not alike(plain, operator_of(np.ones(D, "f"), np.zeros(D, "f")))
    assert not alike(plain, norm_of(rng, gain=np.ones((1, 1, D), "f")))
    assert alike(plain, norm_of(rng, gain=np.full(D, 0.5, "f")))
    assert alike(plain, operator_of(np.ones(D, "f"), np.full(D, 1e-3, "f")))


def test_axes_are_counted_from_the_last_and_through_transposes(rng, alike):
    gain = rng.standard_normal(D).astype("f")
    assert not alike(norm_of(rng, (-1,), gain), norm_of(rng, (2,), gain))
    assert alike(norm_of(rng, (-1,), shape=(2, D, D)), norm_of(rng, (1,), shape=(2, D, D)))
    transposed = helper.make_node("Transpose", ["x"], ["turned"], perm=[0, 2, 1])
    over_axis_1 = norm_of(rng, (1,), gain.reshape(1, D, 1), shape=(2, D, 7))
    assert not alike(over_axis_1, operator_of(gain, shape=(2, D, 7), before=[transposed], x="turned"))
    assert alike(over_axis_1, operator_of(gain[:7], shape=(2, D, 7)))


def test_a_gain_is_compared_as_it_acts(rng, alike):
    gain = rng.standard_normal((1, D, 1)).astype("f")
    expanded = np.broadcast_to(gain[0], (D, 7)).copy()
    one, other = (norm_of(rng, (1, 2), each, shape=(2, D, 7)) for each in (gain, expanded))
    assert not alike(one, other)
    expanded[3, 4] += 1e-3
    assert alike(one, norm_of(rng, (1, 2), expanded, shape=(2, D, 7)))


def test_half_precision_is_no_difference_but_another_gain_is(rng, alike):
    gain = (1 + 0.1 * rng.standard_normal(D)).astype("f")
    half = norm_of(rng, gain=gain.astype(np.float16), eps=1e-5)
    for tensor in half.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    for value in (*half.graph.input, *half.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    assert not alike(norm_of(rng, gain=gain, eps=1e-5), half)
    other = (1 + 0.1 * rng.standard_normal(D)).astype("f")
    assert alike(norm_of(rng, gain=other, eps=1e-5), half)
    assert alike(norm_of(rng, gain=gain, eps=2e-5), half)


@pytest.mark.parametrize("change", ["eps", "power", "bias"])
def test_what_differs_is_named_on_both_sides(rng, alike, change):
    one = norm_of(rng)
    other = norm_of(rng, **{"eps": {"eps": 1e-3}, "power": {"power": 3.0}, "bias": {"bias": np.ones(D, "f")}}[change])
    (message,) = alike(other, one)
    assert {"eps": "eps: reference 1e-06, here 0.001", "power": "near_miss", "bias": "bias: reference none"}[
        change
    ] in message


@pytest.mark.parametrize("axes", [(-1,), (1,), (1, 2)])
def test_every_repaired_file_is_like_its_original(rng, tmp_path, axes):
    shape = {(-1,): (2, 5, D), (1,): (2, D, 5), (1, 2): (2, D, 5)}[axes]
    gain = rng.standard_normal(D).astype("f").reshape((D,) if axes == (-1,) else (1, D, 1))
    original, fixed = tmp_path / "m.onnx", tmp_path / "fixed.onnx"
    before = found(norm_of(rng, axes, gain, shape=shape), original, fix=str(fixed))
    assert fixed.exists()
    assert not list(compare(found(onnx.load(fixed), fixed), before))


class Reader(CalibrationDataReader):
    def __init__(self, x):
        self.left = [{"x": each} for each in x]

    def get_next(self):
        return self.left.pop() if self.left else None


def test_files_that_onnxruntime_saved_or_quantised_are_like_their_source(rng, tmp_path):
    gain, bias = (1 + 0.1 * rng.standard_normal(D)).astype("f"), rng.standard_normal(D).astype("f")
    model = operator_of(gain, bias, eps=1e-5)
    product = helper.make_node("MatMul", ["y", "weight"], ["z"])
    model.graph.node.append(product)
    model.graph.initializer.append(numpy_helper.from_array(rng.standard_normal((D, D)).astype("f"), "weight"))
    model.graph.output[0].name = "z"
    source = tmp_path / "m.onnx"
    reference = found(model, source)
    for level in ("BASIC", "EXTENDED", "ALL"):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
        options.optimized_model_filepath = str(tmp_path / f"{level}.onnx")
        onnxruntime.InferenceSession(str(source), options)
        saved = onnx.load(options.optimized_model_filepath)
        assert not list(compare(found(saved, tmp_path / "saved.onnx"), reference)), level
    for form in (QuantFormat.QDQ, QuantFormat.QOperator):
        reader = Reader(rng.standard_normal((4, 2, 5, D)).astype("f"))
        quantize_static(str(source), str(tmp_path / "q.onnx"), reader, quant_format=form)
        differences = list(compare(found(onnx.load(tmp_path / "q.onnx"), tmp_path / "q2.onnx"), reference))
        assert all(each.level == "note" for each in differences), (form, differences)


@pytest.mark.parametrize("exporter", ["pytorch", "jax", "paddle", "keras"])
def test_the_files_of_a_form_are_alike(exporter, tmp_path):
    """Old exporters and new ones, of every opset."""
    forms = {}
    for name, data in archive.read(exporter).items():
        (tmp_path / "m.onnx").write_bytes(data)
        report = examine(str(tmp_path / "m.onnx"), Options(find_only=True), lambda *_: None)
        first = forms.setdefault(name.partition("@")[0], facts(report))
        assert not list(compare(facts(report), first)), name


# ------------------------------------------------------------------------------------------------ several models


def invoke(*arguments):
    return CliRunner().invoke(command.validate, [str(argument) for argument in arguments])


@pytest.mark.exhaustive
def test_several_models_have_their_files_in_folders(rng, tmp_path):
    models, locks, data = tmp_path / "models", tmp_path / "locks", tmp_path / "data"
    (models / "inner").mkdir(parents=True)
    data.mkdir()
    (data / "inner").mkdir()
    for name, eps in (("a", 1e-5), ("inner/b", 1e-6)):
        onnx.save(operator_of(np.ones(D, "f"), eps=eps), models / f"{name}.onnx")
        np.save(data / f"{name}.npy", rng.standard_normal((2, 5, D)).astype("f"))
    result = invoke(models, "--lock", locks, "--input", data, "--html", tmp_path / "pages")
    assert result.exit_code == 0, result.output
    assert {path.relative_to(locks).as_posix() for path in locks.rglob("*.json")} == {"a.json", "inner/b.json"}
    assert (tmp_path / "pages/inner/b.html").exists()
    assert invoke(models, "--like", locks).exit_code == 0
    assert invoke(models, "--like", models).exit_code == 0
    assert invoke(models / "*.onnx", models / "inner/*.onnx", "--like", locks / "a.json").exit_code == 2
    onnx.save(operator_of(np.ones(D, "f"), eps=1e-3), models / "a.onnx")
    result = invoke(models, "--like", locks)
    assert result.exit_code == 1
    assert f"{models / 'a.onnx'}: failed: 1 error; 1 layer norm: 1 ok" in result.output
    assert "eps: reference 1e-05, here 0.001" in result.output
    (locks / "a.json").unlink()
    result = invoke(models, "--like", locks)
    assert (result.exit_code, "--like: there is no" in result.output) == (2, True)
    assert "no file is named like" in invoke(models / "*.none").output


def test_outputs_of_other_names_are_called_outputs(rng, tmp_path):
    onnx.save(operator_of(np.ones(D, "f")), tmp_path / "m.onnx")
    np.savez(tmp_path / "out.npz", x=np.zeros((2, 5, D), "f"))
    result = invoke(tmp_path / "m.onnx", "--outputs", tmp_path / "out.npz")
    assert "outputs: " in result.output
    assert "has ['x'], the model gives ['y']" in result.output


def test_another_reset_gate_is_not_another_bias():
    """The halves of a GRU's bias add up elsewhere, so their hashes differ where the biases do not."""
    new, old = ({"norms": [], "cells": [{"name": "g", "kind": "GRU", "facts": {"reset": reset} if reset else {},
                 "hashes": {"B": bias}}]} for reset, bias in (("", "a b c"), ("after", "a b d e")))  # fmt: skip
    (finding,) = compare(new, old)
    assert "reset" in finding.message
    assert "bias" not in finding.message
