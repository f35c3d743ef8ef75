"""Export of models with int8 and float16 weights: integers in standard operators, judged by the parity check."""

import itertools

import cells
import models
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

import cnorm
import onnx_export
from cnorm.cells.rounded import Rows
from onnx_export.builders import rounded
from onnx_export.float64 import Float64
from onnx_export.graph_builder import GraphBuilder
from onnx_export.options import newest_opset
from onnx_export.quantizer import Variation

INPUTS, UNITS = 13, 24
ROUNDED = ("int8", "float16")
PROJECTED = [key for key, spec in cnorm.PRESETS.items() if any("weight_p" in m for _, _, m in spec.weights)]
CASES = [(key, None) for key in cnorm.PRESETS] + [(key, 7) for key in PROJECTED]
every_cell = pytest.mark.parametrize(
    ("key", "outputs"), CASES, ids=lambda v: "-".join(v) if isinstance(v, tuple) else v
)


def cell(key, outputs=None, inputs=INPUTS, seed=1):
    eps = 1e-8 if key[1] == "kann" else None  # KANN's eps is 0, which has no ONNX form
    return cells.random_cell(key, np.random.default_rng(seed), inputs, UNITS, outputs, eps=eps)[0]


def rounded_model(weights, *layers):
    return cnorm.Model(layers).with_weights(weights, smallest=0)


def stack(weights):
    """A model in which most products have computed inputs."""
    rng = np.random.default_rng(4)
    before_reset = cell(("GRU", "keras_reset_before"), inputs=UNITS, seed=2)
    layers = [
        cell(("LSTM", "ba2016")),
        cnorm.Residual([models.random_linear(rng, UNITS, UNITS), cnorm.Activation("relu")]),
        before_reset,
        cell(("LSTM", "lingvo"), 7, inputs=UNITS, seed=3),
        models.random_linear(rng, 7, 5),
    ]
    return rounded_model(weights, *layers)


@pytest.mark.exhaustive(one_in=28)
@pytest.mark.parametrize("weights", ROUNDED)
@every_cell
def test_parity_and_load_of_every_preset(tmp_path, key, outputs, weights):
    model = rounded_model(weights, cell(key, outputs))
    x = np.random.default_rng(5).standard_normal((6, INPUTS)).astype(np.float32)
    for form in ("step", "sequence"):
        report = onnx_export.check_parity(model, onnx_export.export(model, tmp_path / "m.onnx", form=form), steps=6)
        assert report.ok, str(report)
        again = onnx_export.load(tmp_path / "m.onnx")
        assert again.weights == weights
        assert again.identity == model.identity
        assert np.array_equal(again.run(x), model.run(x))


@pytest.mark.exhaustive
@pytest.mark.parametrize("weights", ROUNDED)
@pytest.mark.parametrize("opset", [13, 17, 18, 21, newest_opset()])
def test_every_form_of_a_stack(weights, opset):
    model = stack(weights)
    options = [
        {"batch": "n"}, {"portable": True}, {"form": "sequence", "batch": "n"},
        {"form": "sequence", "loop": "loop"}, {"form": "sequence", "loop": "unrolled", "steps": 3, "portable": True},
    ]  # fmt: skip
    for given in options:
        report = onnx_export.check_parity(model, onnx_export.export(model, opset=opset, **given), steps=9)
        assert report.ok, f"{given}\n{report}"


@pytest.mark.exhaustive
def test_demo_model_with_recordings():
    """256 steps of the demo, whose read-out rounds a computed h: an element near a tie is met and allowed for."""
    model = cnorm.demo_model().with_weights("int8", smallest=0)
    report = onnx_export.check_parity(model, onnx_export.export(model), steps=256)
    assert report.ok, str(report)


def test_int8_graph_has_integer_products_of_stored_bytes():
    exported = onnx_export.export(rounded_model("int8", cell(("LSTM", "torch"))))
    products = [node for node in exported.graph.node if node.op_type in ("MatMulInteger", "MatMul", "Gemm")]
    assert [node.op_type for node in products] == ["MatMulInteger"] * 4
    stored = {t.name: t.data_type for t in exported.graph.initializer}
    assert stored["layers.0.rows.weight_h"] == onnx.TensorProto.INT8
    assert {node.domain for node in exported.graph.node} == {""}


@pytest.mark.parametrize("level", ["ORT_DISABLE_ALL", "ORT_ENABLE_ALL"])
def test_product_has_the_bits_of_the_library(level):
    """A Linear layer is one product: onnxruntime's integers and both multiplications give cnorm's bits."""
    rng = np.random.default_rng(6)
    for rows, cols in ((7, 5), (96, 300), (40, 2100)):
        model = rounded_model("int8", cnorm.Linear(rng.standard_normal((rows, cols)).astype(np.float32)))
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        exported = onnx_export.export(model, batch="n").SerializeToString()
        session = onnxruntime.InferenceSession(exported, options, providers=["CPUExecutionProvider"])
        x = rng.standard_normal((50, cols)).astype(np.float32) * 10.0 ** rng.integers(-20, 20, (50, 1))
        x = np.float32(np.vstack([x, np.zeros((1, cols)), np.full((1, cols), 2.0**-101), np.eye(1, cols)]))
        assert np.array_equal(session.run(["y"], {"x": x})[0], model.run(x))


def test_levels_are_those_of_the_library_for_long_rows():
    """Rows so long that 14 bits could overflow: fewer levels, and the bits agree."""
    rows = np.where(np.random.default_rng(7).random((3, 5000)) < 0.5, -1.0, 1.0).astype(np.float32)
    model = rounded_model("int8", cnorm.Linear(rows))
    assert model.layers[0].rows["weight"].levels == (2**31 - 1) // (127 * 5000)
    x = np.sign(rows) * np.float32(3)
    session = onnxruntime.InferenceSession(onnx_export.export(model, batch="n").SerializeToString())
    assert np.array_equal(session.run(["y"], {"x": x})[0], model.run(x))


def spoiled(model, change):
    exported = onnx_export.export(model)
    change(exported.graph)
    return exported


def constant(graph, ending):
    node = next(node for node in graph.node if node.op_type == "Constant" and node.output[0].endswith(ending))
    return node.attribute[0].t


def set_constant(graph, ending, value):
    tensor = constant(graph, ending)
    array = numpy_helper.to_array(tensor)
    tensor.CopyFrom(numpy_helper.from_array(np.full_like(array, value), tensor.name))


def swap_scales(graph):
    tensor = next(t for t in graph.initializer if t.name.endswith("rows.weight_h.scales"))
    array = numpy_helper.to_array(tensor).copy()
    array[[0, 1]] = array[[1, 0]]
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def floor_for_round(graph):
    for node in graph.node:
        node.op_type = "Floor" if node.op_type == "Round" else node.op_type


@pytest.mark.exhaustive(one_in=8)
@pytest.mark.parametrize(
    "change",
    [
        lambda graph: set_constant(graph, "from_h_offset_int32", 63),
        lambda graph: set_constant(graph, "from_h_offset_int32", 0),
        lambda graph: set_constant(graph, "from_h_base_int32", 127),
        lambda graph: set_constant(graph, "from_x_levels", 8190),
        lambda graph: set_constant(graph, "from_x_levels", 127),
        swap_scales,
        floor_for_round,
    ],
    ids=["offset", "no-offset", "base", "levels", "8-bit", "scales", "floor"],
)
@pytest.mark.parametrize("key", [("LSTM", "torch"), ("LSTM", "ba2016"), ("GRU", "torch")], ids=" ".join)
def test_parity_sees_a_fault_in_the_integers(key, change):
    model = rounded_model("int8", cell(key))
    assert onnx_export.check_parity(model, onnx_export.export(model), steps=8).ok
    assert not onnx_export.check_parity(model, spoiled(model, change), steps=8).ok


def test_rounding_decisions_in_float64_are_those_of_float32():
    """For inputs of the graph the judge takes float32's integers; its result differs by rounding of (3) alone."""
    rng = np.random.default_rng(8)
    model = rounded_model("int8", cnorm.Linear(rng.standard_normal((20, 700)).astype(np.float32)))
    graph = Float64(onnx_export.export(model, batch="n"))
    x = rng.standard_normal((200, 700)).astype(np.float32)
    y, exact = model.run(x), graph.run({"x": x})["y"]
    assert np.abs(y - exact).max() <= 3 * 2.0**-24 * np.abs(exact).max()
    again = graph.run({"x": x * (1 + 1e-7)}, vary=Variation(rng, 1e-3, 0.5))["y"]
    assert np.abs(again - exact).max() <= 1e-6 * np.abs(exact).max()  # the decisions are kept


def test_decisions_for_computed_inputs_vary_near_ties_only():
    rng = np.random.default_rng(9)
    matrix = cnorm.Linear(rng.standard_normal((20, 300)).astype(np.float32))
    model = rounded_model("int8", cnorm.Activation("relu"), matrix)
    graph = Float64(onnx_export.export(model, batch="n"))
    x = rng.standard_normal((40, 300)).astype(np.float32)
    exact = graph.run({"x": x})["y"]
    assert np.array_equal(graph.run({"x": x}, vary=Variation(rng, 0.0, 1.0))["y"], exact)
    moved = np.abs(graph.run({"x": x}, vary=Variation(rng, 1e-5, 0.5))["y"] - exact).max()
    step = np.abs(x).max() / 8191 * np.abs(matrix.weights["weight"]).max()
    assert 0 < moved < 12 * step  # 8 % of 300 elements are that near, half of them change, signs differ


def test_refusals():
    model = rounded_model("int8", cell(("LSTM", "torch")))
    with pytest.raises(ValueError, match="dtype must be 'float32' for a model with int8 weights, got 'float16'"):
        onnx_export.export(model, dtype="float16")
    with pytest.raises(ValueError, match=r"native_ops must be False for LSTM.*: its matrices are rounded"):
        onnx_export.export(model, native_ops=True)


def test_digits_cover_every_level():
    """lo + 128 (hi - 64) = q, and both digits have 7 bits, for all 16383 values of q."""
    q = np.arange(-8191, 8192, dtype=np.float32)
    rows = Rows(np.ones((1, 1), np.int8), np.ones(1, np.float32))
    graph = GraphBuilder(17)
    value = rounded._integer_product(graph, "q", "rows", "z")
    made = onnx.helper.make_graph(
        graph.nodes,
        "digits",
        [onnx.helper.make_tensor_value_info("q", onnx.TensorProto.FLOAT, [len(q), 1])],
        [onnx.helper.make_tensor_value_info(n, t, None) for n, t in ((value, 6), ("z_lo_byte", 2), ("z_hi_byte", 2))],
        [numpy_helper.from_array(rows.rows, "rows")],
    )
    model = onnx.helper.make_model(made, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    z, lo, hi = session.run(None, {"q": q[:, None]})
    assert np.array_equal(z[:, 0], q)
    for digit in itertools.chain(lo.flat, hi.flat):
        assert 0 <= digit < 128
