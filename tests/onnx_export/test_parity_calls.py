"""check_parity on files that are right only for single steps of one row, and on files of other exporters."""

import json

import numpy as np
import onnx
import pytest
from cells import random_cell
from models import random_linear
from onnx import helper
from ort_stream import OrtStream

import cnorm
import onnx_export


def changed(exported, change):
    copy = onnx.ModelProto()
    copy.CopyFrom(exported)
    change(copy.graph)
    return copy


def only(graph, operator):
    (node,) = (node for node in graph.node if node.op_type == operator)
    return node


def attribute(node, name):
    (found,) = (a for a in node.attribute if a.name == name)
    return found


@pytest.fixture
def model(rng):
    return cnorm.Model([random_cell(("LSTM", "ba2016"), rng, 5, 8)[0], random_linear(rng, 8, 3)])


@pytest.fixture
def plain(rng):
    return cnorm.Model([random_cell(("LSTM", "torch"), rng, 5, 8)[0]])


def read_the_outer_cell(graph):
    """Every step reads the sequence's initial c instead of the carried one."""
    body = attribute(only(graph, "Scan"), "body").g
    for node in body.node:
        node.input[:] = ["c0_in" if name == "step/c0_in" else name for name in node.input]


def test_a_scan_that_does_not_carry_the_cell_is_reported(model):
    exported = onnx_export.export(model, form="sequence")
    report = onnx_export.check_parity(model, exported, steps=7)
    assert report.ok, str(report)
    assert {row.against for row in report.rows} >= {"float64", "single steps"}
    report = onnx_export.check_parity(model, changed(exported, read_the_outer_cell), steps=7)
    assert not report.ok
    assert report.first.against == "single steps"
    assert "and single steps go apart first in y at step 1 of recording 0" in report.verdict
    assert report.first.max_abs > 1e-3


def test_a_scan_that_runs_backwards_is_refused_with_a_reason(model):
    def reverse(graph):
        only(graph, "Scan").attribute.append(helper.make_attribute("scan_input_directions", [1]))

    exported = changed(onnx_export.export(model, form="sequence"), reverse)
    with pytest.raises(ValueError, match="the float64 evaluation of the graph fails: RuntimeError: Scan is not"):
        onnx_export.check_parity(model, exported, steps=4)


def test_a_native_lstm_that_runs_backwards_is_reported(plain):
    def reverse(graph):
        only(graph, "LSTM").attribute.append(helper.make_attribute("direction", "reverse"))

    exported = onnx_export.export(plain, form="sequence", native_ops=True)
    assert onnx_export.check_parity(plain, exported, steps=9).ok
    report = onnx_export.check_parity(plain, changed(exported, reverse), steps=9)
    assert not report.ok
    assert report.first.against == "single steps"


def mean_over_rows(graph):
    """A norm's input is averaged with its mean over the batch's rows, which changes nothing in a batch of one."""
    norm = next(node for node in graph.node if node.op_type == "LayerNormalization")
    at = list(graph.node).index(norm)
    x = norm.input[0]
    nodes = [
        helper.make_node("ReduceMean", [x], ["row_mean"], axes=[0], keepdims=1),
        helper.make_node("Sub", [x, "row_mean"], ["off"]),
        helper.make_node("Add", ["row_mean", "off_half"], ["mixed"]),
        helper.make_node("Mul", ["off", "half"], ["off_half"]),
    ]
    half = helper.make_node("Constant", [], ["half"], value_float=0.5)
    for i, node in enumerate([half, nodes[0], nodes[1], nodes[3], nodes[2]]):
        graph.node.insert(at + i, node)
    norm.input[0] = "mixed"


def norm_over_rows(graph):
    """Statistics are taken over all rows of the batch together."""
    norm = next(node for node in graph.node if node.op_type == "LayerNormalization")
    attribute(norm, "axis").i = 0


@pytest.mark.parametrize("change", [mean_over_rows, norm_over_rows])
def test_mixing_between_batch_rows_is_reported(model, change):
    exported = onnx_export.export(model, batch="batch")
    report = onnx_export.check_parity(model, exported, steps=5)
    assert report.ok, str(report)
    assert any(row.against == "float64, batch 3" for row in report.rows)
    report = onnx_export.check_parity(model, changed(exported, change), steps=5)
    assert not report.ok
    assert report.first.against == "float64, batch 3"
    assert report.first.max_abs > 1e-3


def test_one_step_is_enough_for_a_batch(model):
    exported = onnx_export.export(model, batch="batch")
    assert onnx_export.check_parity(model, exported, steps=1).ok
    assert not onnx_export.check_parity(model, changed(exported, mean_over_rows), steps=1).ok


def test_a_missing_clip_is_reported_though_no_input_reaches_it(rng):
    model = cnorm.Model([random_cell(("LSTM", "lingvo"), rng, 5, 8)[0]])
    assert model.layers[0].spec.cell_clip == 10
    exported = onnx_export.export(model)
    assert onnx_export.check_parity(model, exported, steps=4).ok

    def drop(graph):
        clip = only(graph, "Clip")
        clip.op_type = "Identity"
        del clip.input[1:]

    report = onnx_export.check_parity(model, changed(exported, drop), steps=4)
    assert not report.ok
    assert (report.first.engine, report.first.tensor, report.first.recording) == (
        "cnorm",
        "c0_out",
        "cells beyond their clip",
    )
    assert "first in c0_out at the hard call 'cells beyond their clip', by" in report.verdict


def test_metadata_of_another_model_is_reported(model):
    exported = onnx_export.export(model)
    (entry,) = (e for e in exported.metadata_props if e.key == "cnorm.model")
    told = json.loads(entry.value)
    told["layers"][0]["eps"] = 1e-3
    entry.value = json.dumps(told)
    report = onnx_export.check_parity(model, exported, steps=2)
    assert not report.ok
    assert all(row.ok for row in report.rows)
    assert report.verdict.startswith("not equal: the graph computes the model, but its metadata describes another: ")
    assert "layers[0].eps is 0.001, the model's is 9.99" in report.verdict
    assert json.loads(report.to_json())["metadata"] == report.metadata
    entry.value = "{}"
    assert "is not JSON" in onnx_export.check_parity(model, exported, steps=2).metadata
    exported.ClearField("metadata_props")
    assert onnx_export.check_parity(model, exported, steps=2).ok


# ------------------------------------------------------------------------------- files of other exporters


@pytest.fixture
def foreign(model):
    """A file of the same cell without metadata."""
    exported = onnx_export.export(model, form="sequence")
    exported.ClearField("metadata_props")
    return exported


def resize(name, axis, size, side="input"):
    def change(graph):
        (value,) = (v for v in getattr(graph, side) if v.name == name)
        dim = value.type.tensor_type.shape.dim[axis]
        dim.Clear()
        if isinstance(size, int):
            dim.dim_value = size
        elif size:
            dim.dim_param = size

    return change


def test_a_fixed_number_of_steps_is_judged_by_whole_calls(model, foreign):
    foreign = changed(foreign, resize("x", 0, 4))
    foreign = changed(foreign, resize("y", 0, 4, "output"))
    report = onnx_export.check_parity(model, foreign, steps=6)
    assert report.ok, str(report)
    assert report.steps == 8
    assert not onnx_export.check_parity(model, changed(foreign, read_the_outer_cell), steps=6).ok
    with pytest.raises(ValueError, match=r"takes 4 steps in each call: .* got 6 in recording 0"):
        onnx_export.check_parity(model, foreign, inputs=np.ones((6, 5), "f"))
    with pytest.raises(ValueError, match=r"must take single steps, got x .*4 steps in each call"):
        OrtStream(foreign)


def test_an_output_whose_size_has_a_name_is_judged(model, foreign):
    foreign = changed(foreign, resize("y", 2, "size", "output"))
    assert onnx_export.check_parity(model, foreign, steps=3).ok


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (resize("x", 2, 6), r"must have x \[..., 1 or an open batch, 5\], got \[None, 1, 6\]"),
        (resize("x", 1, 2), r"must have x \[..., 1 or an open batch, 5\], got \[None, 2, 5\]"),
        (resize("c0_in", 1, 9), r"must have c0_in \[..., 1 or an open batch, 8\], got \[1, 9\]"),
    ],
)
def test_sizes_that_are_not_the_models_are_refused(model, foreign, change, says):
    with pytest.raises(ValueError, match=says):
        onnx_export.check_parity(model, changed(foreign, change), steps=2)


def test_states_of_three_axes_are_refused(plain):
    """States of shape [1, batch, units], as torch.nn.LSTM has them."""
    exported = onnx_export.export(plain, form="sequence")

    def lengthen(graph):
        for value in (*graph.input, *graph.output):
            if value.name not in ("x", "y"):
                value.type.tensor_type.shape.dim.add(dim_value=1)

    wrong = changed(exported, lengthen)
    with pytest.raises(ValueError, match=r"must have h0_in \[batch, 8\], got \[1, 8, 1\]"):
        onnx_export.check_parity(plain, wrong, steps=2)


def test_a_file_that_onnxruntime_does_not_load_is_a_value_error(model):
    def unknown(graph):
        graph.node[-1].domain = "nobody"

    with pytest.raises(ValueError, match="onnx_model: "):
        onnx_export.check_parity(model, changed(onnx_export.export(model), unknown), steps=2)
