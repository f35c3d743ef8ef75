"""Stacks: every kind of layer, nonzero initial states, and layers that have no ONNX form."""

import json
import os
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace

import cells
import numpy as np
import pytest
from models import random_linear
from ort_stream import OrtStream

import cnorm
import onnx_export
from cnorm.cells.tensors import parse
from onnx_export.builders.native import refusal


def layer_norm(rng, n, bias=True):
    weight = (1 + 0.3 * rng.standard_normal(n)).astype(np.float32)
    return cnorm.LayerNorm(weight, rng.standard_normal(n).astype(np.float32) if bias else None, eps=1e-4)


def cell(rng, key, inputs, units, **start):
    layer, _ = cells.random_cell(key, rng, inputs, units)
    if not start:
        return layer
    return cells.LAYERS[key[0]](dict(layer.weights) | start, preset=layer.spec, eps=layer.eps)


@pytest.fixture
def stack(rng):
    """Each kind of layer, nested residuals, cells of three kinds, one with a learned initial state."""
    start = {"h0": rng.uniform(-1, 1, 6).astype(np.float32), "c0": rng.uniform(-1, 1, 6).astype(np.float32)}
    inner = cnorm.Residual([cell(rng, ("RNN", "ba2016"), 6, 6), cnorm.Activation("sigmoid")])
    return cnorm.Model(
        [
            cnorm.Activation("tanh"),
            random_linear(rng, 5, 6),
            layer_norm(rng, 6),
            cnorm.Residual([cell(rng, ("LSTM", "torch_custom"), 6, 6, **start), inner, layer_norm(rng, 6, bias=False)]),
            cell(rng, ("GRU", "torch"), 6, 4),
            cnorm.Activation("relu"),
            random_linear(rng, 4, 3),
        ]
    )


@pytest.mark.exhaustive(one_in=3)
@pytest.mark.parametrize("opset", [13, 17, 23])
@pytest.mark.parametrize("form", ["step", "sequence"])
def test_stack_of_every_kind_of_layer(rng, tmp_path, stack, form, opset):
    path = tmp_path / "stack.onnx"
    exported = onnx_export.export(stack, path, form=form, opset=opset)
    report = onnx_export.check_parity(stack, exported, steps=16)
    assert report.ok, str(report)
    again = onnx_export.load(path)
    x = rng.standard_normal((20, 5)).astype(np.float32)
    assert again.stream().process(x).tobytes() == stack.stream().process(x).tobytes()


def test_learned_initial_states_are_in_the_state_table(rng, stack):
    exported = onnx_export.export(stack)
    described = json.loads(exported.metadata_props[0].value)
    rows = {row["name"]: row for row in described["states"]}
    assert list(rows) == ["h0", "c0", "h1", "h2"]
    start = stack.stream().state()
    for name, row in rows.items():
        np.testing.assert_array_equal(np.full(row["units"], row["initial"], np.float32), start[name])
    assert rows["c0"]["tensor"] == "layers.3.0.c0"
    assert rows["h1"]["initial"] == 0
    read = {name for node in exported.graph.node for name in node.input}
    assert {t.name for t in exported.graph.initializer} <= read  # nothing that no node reads
    stream = OrtStream(exported)
    for name, array in stream.state().items():
        np.testing.assert_array_equal(array, start[name])
    x = rng.standard_normal(5).astype(np.float32)
    np.testing.assert_allclose(stream.step(x), stack.stream().step(x), rtol=0, atol=2e-5)


@pytest.mark.parametrize("form", ["step", "sequence"])
def test_native_operators_in_a_stack(rng, form):
    """With native operators, linear layers and norms act on whole sequences, without Scan."""
    model = cnorm.Model(
        [
            cell(rng, ("LSTM", "keras"), 5, 6),
            cnorm.Residual([layer_norm(rng, 6), random_linear(rng, 6, 6)]),
            cell(rng, ("GRU", "onnx"), 6, 4),
            random_linear(rng, 4, 3),
        ]
    )
    exported = onnx_export.export(model, form=form, native_ops=True)
    operators = [node.op_type for node in exported.graph.node]
    assert operators.count("LSTM") == operators.count("GRU") == 1
    assert "Scan" not in operators
    report = onnx_export.check_parity(model, exported, steps=16)
    assert report.ok, str(report)
    x = rng.standard_normal((9, 5)).astype(np.float32)
    y = OrtStream(exported).process(x)
    np.testing.assert_allclose(y, model.stream().process(x), rtol=0, atol=2e-5)


def test_constants_of_a_spec_reach_the_native_operator(rng):
    """forget_bias and update_bias are constants of the spec, while native operators take tensors only."""
    for key, field in ((("LSTM", "torch"), "forget_bias"), (("GRU", "torch"), "update_bias")):
        layer, _ = cells.random_cell(key, rng, 5, 6)
        spec = replace(layer.spec, **{field: 1.5})
        model = cnorm.Model([cells.LAYERS[key[0]](layer.weights, preset=spec)])
        for native in (False, True):
            report = onnx_export.check_parity(model, onnx_export.export(model, native_ops=native), steps=8)
            assert report.ok, str(report)


@pytest.mark.parametrize("zoneout", [0.1, 0.9])
def test_zoneout(rng, tmp_path, zoneout):
    layer, _ = cells.random_cell(("LSTM", "haste"), rng, 5, 6)
    model = cnorm.Model([cnorm.LSTM(layer.weights, preset=replace(layer.spec, zoneout=zoneout))])
    report = onnx_export.check_parity(model, onnx_export.export(model, tmp_path / "m.onnx"), steps=16)
    assert report.ok, str(report)
    assert onnx_export.load(tmp_path / "m.onnx").layers[0].spec == model.layers[0].spec


GATED = (("weight_x", "3H I", "weight_x"), ("weight_h", "3H H", "weight_h"))
VARIANTS = {
    "a cell at its clip": (("LSTM", "lingvo"), {"cell_clip": 0.1}, None),
    "a projection at its clip": (("LSTM", "tflite"), {"projection_clip": 0.05}, 4),
    "zoneout after a projection": (("LSTM", "torch"), {"zoneout": 0.3}, 4),
    "a bias outside two norms": (
        ("GRU", "haste"),
        {"weights": (*GATED, ("bias", "3H", "bias"), ("gain", "6H", "gain_x gain_h"))},
        None,
    ),
    "the candidate between its gates": (
        ("GRU", "haste"),
        {"gates": "rnz", "weights": (*GATED, ("bias", "3H", "bias_h"), ("gain", "3H", "gain_h"))},
        None,
    ),
    "a bias for one gate": (("GRU", "torch"), {"weights": (*GATED, ("bias", "H", "bias_x[z]"))}, None),
    "gains for two gates": (
        ("GRU", "dreamer_v3"),
        {"weights": (*GATED, ("gain", "2H", "gain[zn]"), ("inside", "3H", "inside_h"), ("after", "3H", "bias_h"))},
        None,
    ),
    "a norm for each gate of a split": (
        ("LSTM", "haste"),
        {"grouping": "per_gate"},
        None,
    ),
}


@pytest.mark.exhaustive(one_in=4)
@pytest.mark.parametrize("variant", VARIANTS)
def test_custom_specs_are_exported(rng, tmp_path, variant):
    """The builders follow the spec's fields, not its name."""
    key, changes, outputs = VARIANTS[variant]
    spec = replace(cnorm.PRESETS[key], name="variant", **changes)
    weights = cells.random_weights(spec, rng, 5, 6, outputs)
    model = cnorm.Model([cells.LAYERS[key[0]](weights, preset=spec)])
    for opset in (13, 17):
        exported = onnx_export.export(model, tmp_path / "m.onnx", opset=opset)
        report = onnx_export.check_parity(model, exported, steps=16)
        assert report.ok, str(report)
    assert onnx_export.load(tmp_path / "m.onnx").layers[0].spec == spec


REFUSED = [
    (("LSTM", "ba2016"), {}, "the operators have no layer norm"),
    (("LSTM", "draw"), {}, "the operators have no layer norm"),
    (("GRU", "torch"), {"zoneout": 0.1}, "the operators have no zoneout"),
    (("LSTM", "torch"), {"cell_clip": 3.0}, "the operator LSTM clips what enters its activations, not the cell"),
    (("GRU", "torch"), {"reset": "candidate"}, "does not let the reset gate act on the whole candidate"),
    (("GRU", "torch"), {"update": "new"}, "weighs the candidate with 1 - z, this cell with z"),
]


@pytest.mark.parametrize(("key", "changes", "reason"), REFUSED, ids=[reason for *_, reason in REFUSED])
def test_native_operators_are_refused_with_the_reason(rng, tmp_path, key, changes, reason):
    layer, _ = cells.random_cell(key, rng, 5, 6)
    model = cnorm.Model([cells.LAYERS[key[0]](layer.weights, preset=replace(layer.spec, **changes))])
    with pytest.raises(ValueError, match=f"native_ops must be False for .*{reason}"):
        onnx_export.export(model, tmp_path / "m.onnx", native_ops=True)
    assert os.listdir(tmp_path) == []
    assert onnx_export.check_parity(model, onnx_export.export(model), steps=4).ok


@dataclass(frozen=True)
class Later(cnorm.CellSpec):
    """With an option that no exporter knows."""

    peephole: float = 0.0


@pytest.mark.parametrize("peephole", [0.0, 1.0])
def test_native_operators_are_refused_for_an_unknown_option(rng, peephole):
    layer, _ = cells.random_cell(("LSTM", "torch"), rng, 5, 6)
    given = {field.name: getattr(layer.spec, field.name) for field in fields(layer.spec)}
    model = cnorm.Model([cnorm.LSTM(layer.weights, preset=Later(**given, peephole=peephole))])
    refused = pytest.raises(ValueError, match="the operators have no peephole") if peephole else nullcontext()
    with refused:
        onnx_export.export(model, native_ops=True)


def test_native_operators_are_refused_for_an_unknown_array(rng):
    layer, _ = cells.random_cell(("LSTM", "torch"), rng, 5, 6)
    assert refusal(layer) is None
    tensors = (*layer.tensors, parse("peephole", "3H", "weight_c[fio]", "ifgo"))
    given = SimpleNamespace(spec=layer.spec, tensors=tensors, weights={**layer.weights, "peephole": np.ones(18)})
    assert refusal(given) == "the operators have no weight_c"


OPTIONS = {  # a value of each field of a spec that changes what a cell computes, and a preset that can have it
    "scope": ("LSTM", "torch", "sum"),
    "grouping": ("LSTM", "haste", "per_gate"),
    "cell_norm": ("LSTM", "ba2016", "carry"),
    "eps": ("LSTM", "ba2016", 0.1),
    "reset": ("GRU", "torch", "candidate"),
    "update": ("GRU", "torch", "new"),
    "forget_bias": ("LSTM", "torch", 1.0),
    "update_bias": ("GRU", "torch", 1.0),
    "activation": ("LSTM", "torch", "elu"),
    "recurrent_activation": ("GRU", "torch", "hard_sigmoid"),
    "clip": ("GRU", "torch", 0.1),
    "cell_clip": ("LSTM", "torch", 0.1),
    "projection_clip": ("LSTM", "torch", 0.05),
    "zoneout": ("LSTM", "torch", 0.5),
}


def test_options_has_each_field():
    assert OPTIONS.keys() | {"kind", "name", "source", "gates", "weights"} == {f.name for f in fields(cnorm.CellSpec)}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_of_a_cell_is_heeded_or_refused(rng, name):
    """By the runtime, the exporter and its native operators: none may compute the cell without it."""
    kind, preset, value = OPTIONS[name]
    before = replace(cnorm.PRESETS[kind, preset], eps=1e-3)
    spec = replace(before, **{name: value})
    weights = cells.random_weights(before, rng, 5, 6, 3 if name == "projection_clip" else None)
    if spec.refusal() is not None:
        with pytest.raises(ValueError, match="the runtime does not compute"):
            cells.LAYERS[kind](weights, preset=spec)
        return
    model, usual = (cnorm.Model([cells.LAYERS[kind](weights, preset=one)]) for one in (spec, before))
    x = rng.standard_normal((9, 5)).astype(np.float32)
    assert not np.array_equal(model.run(x), usual.run(x))
    assert onnx_export.check_parity(model, onnx_export.export(model), steps=4).ok
    if reason := refusal(model.layers[0]):
        with pytest.raises(ValueError, match=f"native_ops must be False for .*: {reason}"):
            onnx_export.export(model, native_ops=True)
    else:
        assert onnx_export.check_parity(model, onnx_export.export(model, native_ops=True), steps=4).ok


def test_native_operators_reject_a_projection(rng):
    layer, _ = cells.random_cell(("LSTM", "torch"), rng, 5, 6, 3)
    with pytest.raises(ValueError, match="the operator LSTM has no projection"):
        onnx_export.export(cnorm.Model([layer]), native_ops=True)


def test_rejects_bidirectional_layers(rng, tmp_path):
    both = cnorm.Bidirectional(cell(rng, ("GRU", "torch"), 5, 4), cell(rng, ("GRU", "torch"), 5, 4))
    with pytest.raises(ValueError, match=r"no ONNX form of Bidirectional.*no states to carry from chunk to chunk"):
        onnx_export.export(cnorm.Model([both]), tmp_path / "m.onnx", form="sequence")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("eps", [0, 1e-46])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_norms_without_eps_are_refused_by_name(rng, tmp_path, dtype, eps):
    """The first step from a zero state would be NaN: the norm of W h = 0 divides 0 by 0."""
    weight = np.ones(6, np.float32)
    recurrent = cnorm.LSTM(cell(rng, ("LSTM", "ba2016"), 6, 6).weights, preset="ba2016", eps=eps)
    layers = (cnorm.LayerNorm(weight, eps=eps), cnorm.Residual([cnorm.LayerNorm(weight, eps=eps)]), recurrent)
    for layer, name in zip(layers, (r"LayerNorm\(6, eps=0\)", r"LayerNorm\(6, eps=0\)", "LSTM"), strict=True):
        with pytest.raises(ValueError, match=f"model: eps of {name}.* must be positive in float32"):
            onnx_export.export(cnorm.Model([layer]), tmp_path / "m.onnx", dtype=dtype)
    assert os.listdir(tmp_path) == []
