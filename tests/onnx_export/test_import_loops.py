"""`load` of recurrent layers that are written as a Loop, as tf2onnx writes those of Keras 3."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import imported, node, normal, saved
from onnx import TensorProto, helper, numpy_helper

STEPS, SIZE, UNITS = 7, 5, 4
MODELS = Path(__file__).parents[3] / "shared" / "data" / "models"


def lstm(p, units):
    """Gates i, f, c, o in one product; the state is squeezed, and y is the new h."""
    return [
        node("MatMul", f"{p}h {p}U", f"{p}hU"),
        node("Gemm", f"{p}x {p}W {p}hU", f"{p}a"),
        node("Add", f"{p}a {p}b", f"{p}z"),
        node("Split", f"{p}z", f"{p}zi {p}zf {p}zg {p}zo", axis=1),
        *[node("Sigmoid", f"{p}z{gate}", f"{p}{gate}") for gate in "ifo"],
        node("Tanh", f"{p}zg", f"{p}g"),
        node("Mul", f"{p}f {p}c", f"{p}fc"),
        node("Mul", f"{p}i {p}g", f"{p}ig"),
        node("Add", f"{p}fc {p}ig", f"{p}c_new"),
        node("Tanh", f"{p}c_new", f"{p}t"),
        node("Mul", f"{p}o {p}t", f"{p}h_new"),
    ]


def gru(p, units):
    """Gates z, r, h with the reset gate behind the product (reset_after)."""
    return [
        node("Gemm", f"{p}x {p}W {p}b", f"{p}a"),
        node("Split", f"{p}a", f"{p}az {p}ar {p}ag", axis=1),
        node("Gemm", f"{p}h {p}U {p}bU", f"{p}u"),
        node("Split", f"{p}u", f"{p}uz {p}ur {p}ug", axis=1),
        *[node("Add", f"{p}a{gate} {p}u{gate}", f"{p}s{gate}") for gate in "zr"],
        *[node("Sigmoid", f"{p}s{gate}", f"{p}{gate}") for gate in "zr"],
        node("Mul", f"{p}r {p}ug", f"{p}ru"),
        node("Add", f"{p}ag {p}ru", f"{p}sg"),
        node("Tanh", f"{p}sg", f"{p}g"),
        node("Mul", f"{p}z {p}h", f"{p}zh"),
        node("Sub", f"{p}one {p}z", f"{p}y"),
        node("Mul", f"{p}y {p}g", f"{p}yg"),
        node("Add", f"{p}yg {p}zh", f"{p}h_new"),
    ]


CELLS = {"LSTM": (lstm, 4, "hc"), "GRU": (gru, 3, "h")}


def infos(names, kind=TensorProto.FLOAT, shape=None):
    return [helper.make_tensor_value_info(name, kind, shape) for name in names]


def loop(kind, p, read, units, more=()):
    """A Loop over `read` [steps, 1, n]; weights go through as carried values. `more`: nodes that make x of `xi`."""
    made, _, states = CELLS[kind]
    weights = [f"{p}W", f"{p}U"]
    body = [
        node("Add", f"{p}time {p}step", f"{p}time_new"),
        node("Gather", f"{read} {p}time", f"{p}xi", axis=0),
        *(more or [node("Identity", f"{p}xi", f"{p}x")]),
        *made(p, units),
        node("Identity", f"{p}h_new", f"{p}y_i"),
        node("Less", f"{p}time_new {p}steps", f"{p}go_new"),
        *[node("Identity", name, f"{name}_out") for name in weights],
    ]
    new = [f"{p}{name}_new" for name in states]
    stored = [
        numpy_helper.from_array(np.array(n, np.int32), f"{p}{name}") for name, n in (("step", 1), ("steps", STEPS))
    ]
    inputs = [*infos([f"{p}counter"], TensorProto.INT64, []), *infos([f"{p}go"], TensorProto.BOOL, [])]
    inputs += [*infos([f"{p}time"], TensorProto.INT32, []), *infos([f"{p}{name}" for name in states]), *infos(weights)]
    outputs = [*infos([f"{p}go_new"], TensorProto.BOOL, []), *infos([f"{p}time_new"], TensorProto.INT32, [])]
    outputs += infos([*new, *(f"{name}_out" for name in weights), f"{p}y_i"])
    graph = helper.make_graph(body, f"{p}body", inputs, outputs, stored)
    given = ["most", "yes", "zero", *(f"{p}{name}0" for name in states), *(f"{name}0" for name in weights)]
    results = [f"{p}end{i}" for i in range(len(given) - 2)] + [f"{p}Y"]
    return helper.make_node("Loop", given, results, body=graph, name=f"{p}while")


def tensors(rng, kind, p, size, units):
    _, gates, states = CELLS[kind]
    shapes = {"W0": (size, gates * units), "U0": (units, gates * units), "b": (gates * units,), "bU": (gates * units,)}
    found = {p + name: normal(rng, *shape) for name, shape in shapes.items()}
    found |= {f"{p}{name}0": np.zeros((1, units), np.float32) for name in states}
    return found | {f"{p}one": np.float32(1)}


def window(path, rng, kind, *, every=True, more=(), frames=STEPS, **changed):
    """x [1, STEPS, SIZE] -> two layers in a Loop each -> a product, of each step or the last."""
    nodes = [
        node("Transpose", "x", "xt", perm=[1, 0, 2]),
        loop(kind, "a_", "xt", UNITS, more),
        loop(kind, "b_", "a_Y", 3),
        *([node("Transpose", "b_Y", "t", perm=[1, 0, 2])] if every else [node("Gather", "b_Y last", "t", axis=0)]),
        node("MatMul", "t V", "y"),
    ]
    stored = tensors(rng, kind, "a_", SIZE, UNITS) | tensors(rng, kind, "b_", UNITS, 3) | {"V": normal(rng, 3, 2)}
    stored |= {"most": np.array(STEPS), "yes": np.array(True), "zero": np.array(0, np.int32), "last": np.array(-1)}
    stored |= changed
    text = b"".join(each.SerializeToString() for each in nodes)
    stored = {name: array for name, array in stored.items() if name.encode() in text}
    return saved(path, nodes, {"x": [1, frames, SIZE]}, {"y": [1, frames, 2] if every else [1, 2]}, stored, opset=13)


@pytest.mark.parametrize("every", [True, False])
@pytest.mark.parametrize("kind", CELLS)
def test_a_loop_over_a_window_is_a_cell(kind, every, tmp_path, rng):
    found = imported(window(tmp_path / "m.onnx", rng, kind, every=every))
    assert [layer.kind for layer in found.model.layers] == [kind, kind, "Linear"]
    assert found.time_axis == 1
    assert "takes 7 frames" in found.notes[0]
    assert found.window == 7
    x = rng.standard_normal((STEPS, SIZE)).astype(np.float32)
    theirs = found.file.run(x)
    np.testing.assert_allclose(found.model.run(x)[-len(theirs) :], theirs, rtol=1e-5, atol=1e-6)


BY_STEP = [node("Cast", "a_time", "a_number", to=TensorProto.FLOAT)]
NEAR = {
    "a factor of each step": ({"more": [*BY_STEP, node("Mul", "a_xi a_number", "a_x")]}, "steps are not all the same"),
    "another first step": (
        {
            "more": [*BY_STEP, node("Min", "a_number a_one", "a_m"), node("Mul", "a_xi a_m", "a_x")],
            "a_one": np.float32(1),
        },
        "steps are not all the same",
    ),
    "a state that begins elsewhere": ({"a_h0": np.full((1, UNITS), 0.5, np.float32)}, "do not begin with zeros"),
    "fewer steps than frames": ({"most": np.array(STEPS - 2)}, "that are not the 7 frames|another frame"),
    "another layer's frames": ({"more": [node("Gather", "xt last", "a_x", axis=0)]}, "it is not a list of layers"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", NEAR)
def test_a_loop_that_is_no_cell_is_refused(case, tmp_path, rng):
    given, reason = NEAR[case]
    path = window(tmp_path / "m.onnx", rng, "LSTM", **given)
    with pytest.raises(ValueError, match=reason):
        imported(path)


def test_a_loop_whose_states_begin_as_zeros_of_each_row_is_read(tmp_path, rng):
    """Keras makes the zeros of an open batch from its size."""
    file = onnx.load(window(tmp_path / "m.onnx", rng, "LSTM"))
    graph, states = file.graph, [tensor for tensor in file.graph.initializer if tensor.name[2:] in ("h0", "c0")]
    graph.input[0].type.tensor_type.shape.dim[0].dim_param = "N"
    nodes = [node("Shape", "x", "sizes"), node("Slice", "sizes at0 at1", "rows")]
    for tensor in states:
        nodes += [node("Concat", f"rows {tensor.name}units", f"{tensor.name}shape", axis=0),
                  node("ConstantOfShape", f"{tensor.name}shape", tensor.name)]  # fmt: skip
        graph.initializer.append(numpy_helper.from_array(np.array(tensor.dims[1:]), f"{tensor.name}units"))
        graph.initializer.remove(tensor)
    graph.initializer.extend(numpy_helper.from_array(np.array([i]), f"at{i}") for i in (0, 1))
    whole = [*nodes, *graph.node]
    del graph.node[:]
    graph.node.extend(whole)
    onnx.save(file, tmp_path / "n.onnx")
    assert imported(tmp_path / "n.onnx").window == STEPS


@pytest.mark.exhaustive
def test_a_loop_over_an_open_number_of_frames_is_refused(tmp_path, rng):
    with pytest.raises(ValueError, match=r"m\.onnx: it is not a list of layers"):
        imported(window(tmp_path / "m.onnx", rng, "GRU", frames="T"))


@pytest.mark.skipif(not MODELS.exists(), reason=f"SKIPPED: {MODELS} with public weight files is not here")
def test_three_layers_of_keras_3():
    found = imported(MODELS / "quant_lstm.onnx")
    assert [layer.kind for layer in found.model.layers[:3]] == ["LSTM"] * 3
    x = np.random.default_rng(0).standard_normal((60, 36)).astype(np.float32)
    np.testing.assert_allclose(found.model.run(x)[-1:], found.file.run(x), rtol=1e-5, atol=1e-6)
