"""`load` of the same networks in other forms: rows first, frames as rows, narrow ids; and of rounded files."""

import re
from contextlib import suppress
from time import process_time

import numpy as np
import onnx
import onnxruntime
import pytest
from graphs import imported, node, normal, saved
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import onnx_export
from onnx_export.float64 import widen
from onnx_export.importer import dimensions, proposals

SIZE, UNITS, TOKENS = 4, 6, 9
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def cell_weights(rng, kind, size=SIZE, directions=1):
    rows = GATES[kind] * UNITS
    return {"W": normal(rng, directions, rows, size), "R": normal(rng, directions, rows, UNITS),
            "B": normal(rng, directions, 2 * rows)}  # fmt: skip


@pytest.mark.exhaustive(one_in=12)
@pytest.mark.parametrize("frames", [1, "T"])
@pytest.mark.parametrize("states", [True, False])
@pytest.mark.parametrize("kind", GATES)
def test_layout_1_is_layout_0_turned(kind, states, frames, tmp_path, rng):
    """onnxruntime runs no layout 1, so the file is written with layout 0 before it is read and run."""
    letters = "hc" if kind == "LSTM" else "h"
    layer = node(kind, "x W R B", "Y", hidden_size=UNITS, layout=1)
    inputs, outputs = {"x": [1, frames, SIZE]}, {"y": [1, frames, UNITS]}
    if states:
        layer.input.extend(["", *letters])
        layer.output.extend(f"{name}1" for name in letters)
        inputs |= {name: [1, 1, UNITS] for name in letters}
        outputs |= {f"{name}1": [1, 1, UNITS] for name in letters}
    nodes = [layer, node("Squeeze", "Y two", "y")]
    found = imported(
        saved(tmp_path / "m.onnx", nodes, inputs, outputs, cell_weights(rng, kind) | {"two": np.array([2])})
    )
    assert [layer.kind for layer in found.model.layers] == [kind]
    assert list(found.states) == (list(letters) if states else [])
    x = rng.standard_normal((9, SIZE)).astype(np.float32)
    if states or frames == "T":
        assert found.model.check(x, found.file.run(x)).ok
    turned = [node("Transpose", "x", "t", perm=[1, 0, 2]), node(kind, "t W R B", "Y", hidden_size=UNITS)]
    ends = {"x": [1, "T", SIZE]}, {"Y": ["T", 1, 1, UNITS]}
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(tmp_path / "m.onnx").graph.initializer}
    other = imported(saved(tmp_path / "n.onnx", turned, *ends, {name: stored[name] for name in "WRB"}))
    assert other.model.run(x).tobytes() == found.model.run(x).tobytes()


@pytest.mark.parametrize("kind", [TensorProto.UINT8, TensorProto.INT32, TensorProto.INT8, TensorProto.UINT16])
def test_token_ids_may_be_narrow(kind, tmp_path, rng):
    nodes = [node("Cast", "x", "ids", to=TensorProto.INT64), node("Gather", "E ids", "e", axis=0)]
    nodes += [node("GRU", "e W R B", "Y", hidden_size=UNITS), node("Squeeze", "Y axis", "y")]
    tensors = cell_weights(rng, "GRU") | {"E": normal(rng, TOKENS, SIZE), "axis": np.array([1])}
    path = saved(tmp_path / "m.onnx", nodes, {"x": ["T", 1]}, {"y": ["T", 1, UNITS]}, tensors)
    file = onnx.load(path)
    file.graph.input[0].type.tensor_type.elem_type = kind
    onnx.save(file, path)
    found = imported(path)
    assert [layer.kind for layer in found.model.layers] == ["Embedding", "GRU"]
    ids = rng.integers(0, TOKENS, (11, 1)).astype(np.float32)
    assert found.model.check(ids, found.file.run(ids)).ok


@pytest.mark.parametrize("kernel", ["K", "K2"])
def test_frames_that_are_rows_of_a_convolution_are_steps_of_a_cell(kernel, tmp_path, rng):
    """x [T, 2, 8]: each frame is convolved by itself, then the frames are the steps of an LSTM."""
    nodes = [
        node("Conv", f"x {kernel}", "a", pads=[1, 1] if kernel == "K" else [0, 0]),
        node("Relu", "a", "r"),
        node("Reshape", "r shape", "s"),
        node("LSTM", "s W R B", "Y", hidden_size=UNITS),
        node("Squeeze", "Y axis", "y"),
    ]
    places = 8 if kernel == "K" else 6
    tensors = cell_weights(rng, "LSTM", 3 * places) | {"shape": np.array([-1, 1, 3 * places]), "axis": np.array([1])}
    tensors |= {kernel: normal(rng, 3, 2, 3)}
    found = imported(saved(tmp_path / "m.onnx", nodes, {"x": ["T", 2, 8]}, {"y": ["T", 1, UNITS]}, tensors))
    assert [layer.kind for layer in found.model.layers] == ["Conv1d", "Activation", "LSTM"]
    assert found.time_axis == 0
    x = rng.standard_normal((9, 16)).astype(np.float32)
    assert found.model.check(x, found.file.run(x)).ok


def test_rows_that_are_mixed_are_refused(tmp_path, rng):
    """The same with the mean of all rows taken off."""
    nodes = [node("Conv", "x K", "a"), node("ReduceMean", "a", "m", axes=[0]), node("Sub", "a m", "r")]
    nodes += [node("Reshape", "r shape", "s"), node("LSTM", "s W R B", "y", hidden_size=UNITS)]
    tensors = cell_weights(rng, "LSTM", 18) | {"shape": np.array([-1, 1, 18]), "K": normal(rng, 3, 2, 3)}
    path = saved(tmp_path / "m.onnx", nodes, {"x": ["T", 2, 8]}, {"y": ["T", 1, 1, UNITS]}, tensors)
    with pytest.raises(ValueError, match="ReduceMean 'm': its result depends on several frames"):
        imported(path)


def test_a_file_of_quantize_dynamic_is_refused_with_its_name(tmp_path, rng):
    quantization = pytest.importorskip("onnxruntime.quantization")
    nodes = [node("MatMul", "x K", "a"), node("Tanh", "a", "y")]
    path = saved(tmp_path / "m.onnx", nodes, {"x": [1, SIZE]}, {"y": [1, UNITS]}, {"K": normal(rng, SIZE, UNITS)})
    quantization.quantize_dynamic(path, tmp_path / "q.onnx")
    with pytest.raises(ValueError, match=r"quantize_dynamic(.|\n)*Linear(.|\n)*import the file that it was made of"):
        onnx_export.load(tmp_path / "q.onnx")


@pytest.mark.parametrize("symbol", ["samples", None])
def test_a_refusal_names_sizes_that_are_read(symbol, tmp_path, rng):
    """A kernel of 9 positions that leaves [1, 6, 4] of 40, and a product with all of it."""
    nodes = [node("Conv", "x K", "a", strides=[8]), node("Reshape", "a row", "r"), node("Gemm", "r V", "y")]
    tensors = {"K": normal(rng, 6, 1, 9), "row": np.array([1, 24]), "V": normal(rng, 24, 2)}
    path = saved(tmp_path / "m.onnx", nodes, {"x": [1, 1, symbol]}, {"y": [1, 2]}, tensors)
    label = symbol or "x:2"
    with pytest.raises(ValueError, match="its kernel reaches over 9 positions") as error:
        imported(path)
    assert f"with dims={{{label!r}: 40}} it has layers" in str(error.value)
    assert str(error.value).count("it has layers") == 1
    assert re.search(r"sizes tried: 576, 512, [\d, ]*\b40\b", str(error.value))
    assert imported(path, dims={label: 40}).report.ok


def test_sizes_of_a_batch_are_tried_last(tmp_path, rng, monkeypatch):
    """Each element of x of several rows depends on its row alone: n is given a size, and the refusal says how."""
    nodes = [node("Pad", "x pads", "p", mode="reflect"), node("Conv", "p K", "a", strides=[8])]
    nodes += [node("ReduceMean", "a", "m", axes=[2], keepdims=0), node("Gemm", "m V", "y")]
    tensors = {"K": normal(rng, 6, 1, 9), "V": normal(rng, 6, 2), "pads": np.array([0, 0, 0, 0, 0, 2])}
    path = saved(tmp_path / "m.onnx", nodes, {"x": ["rows", 1, "n"]}, {"y": ["rows", 2]}, tensors)
    tried, found = [], proposals._found
    monkeypatch.setattr(proposals, "SIZES", (4, 32))
    monkeypatch.setattr(proposals, "_found", lambda read, more, *late: tried.append(more) or found(read, more, *late))
    with pytest.raises(ValueError, match=r"'n' has one size, dims={'n': SIZE} gives it") as error:
        imported(path)
    assert "with dims={'n': 32} it has layers" in str(error.value)
    assert [list(given["dims"]) for given in tried if 1 not in given["dims"].values()] == [
        ["n"],
        ["n"],
        ["rows"],
        ["rows"],
    ]


def test_what_no_size_mends_is_told_at_once(tmp_path, rng, monkeypatch):
    """Of a large file without following its open dimension; no sizes are tried."""
    nodes = [node("Transpose", "x", "t", perm=[0, 2, 1]), node("MatMul", "x t", "m"), node("MatMul", "m x", "y")]
    path = saved(tmp_path / "m.onnx", nodes, {"x": ["rows", 3, 4]}, {"y": ["rows", 3, 4]}, {})
    monkeypatch.setattr(dimensions, "LARGE", 0)
    monkeypatch.setattr(dimensions, "_reach", None)
    with pytest.raises(ValueError, match=r"MatMul 'm'.*: it multiplies what depends on the fr") as error:
        imported(path)
    assert "sizes tried" not in str(error.value)


def test_a_size_that_takes_too_much_memory_hides_no_reason():
    graph = helper.make_graph([], "g", [helper.make_tensor_value_info("x", 1, ["T"])], [])

    def read(**given):
        raise MemoryError

    (line,) = proposals.proposals(helper.make_model(graph), {"inputs": {}, "dims": {}}, read)
    assert line.startswith("sizes tried: 576, ")


@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
def test_both_directions_of_one_frame_carry_nothing(kind, tmp_path, rng):
    """The frames of a call are rows: each is read by itself."""
    both = {"hidden_size": UNITS, "direction": "bidirectional"}
    nodes = [node("Transpose", "x", "t", perm=[1, 0, 2]), node(kind, "t W R B", "Y", **both)]
    nodes += [node("Transpose", "Y", "z", perm=[0, 2, 1, 3]), node("Reshape", "z flat", "y")]
    tensors = cell_weights(rng, kind, SIZE, 2) | {"flat": np.array([-1, 2 * UNITS])}
    found = imported(saved(tmp_path / "m.onnx", nodes, {"x": ["B", 1, SIZE]}, {"y": ["B", 2 * UNITS]}, tensors))
    assert [layer.kind for layer in found.model.layers] == ["OverPositions"]
    x = rng.standard_normal((9, SIZE)).astype(np.float32)
    assert found.model.check(x, found.file.run(x)).ok


def test_a_negative_size_is_an_open_one(tmp_path, rng):
    """As exporters wrote them; onnxruntime reads it so, too."""
    nodes = [node("Unsqueeze", "x axes", "s"), node("LSTM", "s W R B", "Y", hidden_size=UNITS)]
    nodes += [node("Squeeze", "Y both", "y")]
    tensors = cell_weights(rng, "LSTM", SIZE) | {"axes": np.array([1]), "both": np.array([1, 2])}
    path = saved(tmp_path / "m.onnx", nodes, {"x": [-1, SIZE]}, {"y": [-1, UNITS]}, tensors)
    found = imported(path)
    assert found.time_axis == 0
    x = rng.standard_normal((9, SIZE)).astype(np.float32)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert found.model.check(x, session.run(None, {"x": x})[0]).ok


def test_a_refusal_names_a_node_that_rounds_the_frame(tmp_path, rng):
    nodes = [node("QuantizeLinear", "x step zero", "q"), node("DequantizeLinear", "q step zero", "y")]
    tensors = {"step": np.float32(0.1), "zero": np.int8(0)}
    path = saved(tmp_path / "m.onnx", nodes, {"x": [1, SIZE]}, {"y": [1, SIZE]}, tensors)
    with pytest.raises(ValueError, match="QuantizeLinear 'q': it rounds what depends on the frame to small integers"):
        imported(path)


def test_a_size_that_takes_too_long_is_given_up(monkeypatch):
    """The reasons of the refusal are told; later nothing is interrupted."""
    monkeypatch.setattr(proposals, "SECONDS", 0.05)
    graph = helper.make_graph([], "g", [helper.make_tensor_value_info("x", 1, ["T"])], [])
    given = {"inputs": {}, "dims": {}}
    for read in (spin, swallowing):
        assert proposals.proposals(helper.make_model(graph), given, lambda read=read, **more: read(30.0)) == [
            "sizes tried: 576"
        ]
    spin(0.2)


def swallowing(seconds):
    """As the trace of a node, where any Exception is a fault of the file."""
    with suppress(Exception):
        spin(seconds)
    spin(seconds)


def spin(seconds):
    until = process_time() + seconds
    while process_time() < until:
        pass


@pytest.mark.parametrize("states", [True, False])
def test_a_window_says_when_to_reset(states, tmp_path, rng):
    """A file with a fixed number of frames begins each call from its initial state, if it has no states."""
    nodes = [node("GRU", "x W R B", "Y", hidden_size=UNITS), node("Squeeze", "Y axis", "y")]
    inputs, outputs = {"x": [7, 1, SIZE]}, {"y": [7, 1, UNITS]}
    if states:
        nodes[0].input.extend(["", "h"])
        nodes[0].output.append("h1")
        inputs, outputs = inputs | {"h": [1, 1, UNITS]}, outputs | {"h1": [1, 1, UNITS]}
    path = saved(tmp_path / "m.onnx", nodes, inputs, outputs, cell_weights(rng, "GRU") | {"axis": np.array([1])})
    if states:
        assert onnx_export.load(path).window is None
    else:
        with pytest.warns(UserWarning, match="reset the stream every 7 frames"):
            assert onnx_export.load(path).window == 7


@pytest.mark.parametrize("states", [True, False])
def test_shapes_that_say_the_example_take_a_size(states, tmp_path, rng):
    """An open number of frames of which the recorded shapes say 7, as PyTorch's newer exporter writes it behind a cell:
    onnxruntime's optimiser believes the shapes, so the file runs over 7 frames only, which dims says."""
    gru = node("GRU", "t W R B", "Y", hidden_size=UNITS)
    nodes = [node("Transpose", "x", "t", perm=[1, 0, 2]), gru, node("Squeeze", "Y one", "s")]
    nodes += [node("Transpose", "s", "u", perm=[1, 0, 2]), node("MatMul", "u M", "v"), node("Add", "v b", "y")]
    inputs, outputs = {"x": [1, "T", SIZE]}, {"y": [1, 7, 2]}
    if states:
        gru.input.extend(["", "h"])
        gru.output.append("h1")
        inputs, outputs = inputs | {"h": [1, 1, UNITS]}, outputs | {"h1": [1, 1, UNITS]}
    tensors = cell_weights(rng, "GRU") | {"M": normal(rng, UNITS, 2), "b": normal(rng, 2), "one": np.array([1])}
    path = saved(tmp_path / "m.onnx", nodes, inputs, outputs, tensors)
    model = onnx.load(path)
    model.graph.value_info.append(helper.make_tensor_value_info("u", TensorProto.FLOAT, [1, 7, UNITS]))
    onnx.save(model, path)
    found = imported(path, dims={"T": 7})
    assert [layer.kind for layer in found.model.layers] == ["GRU", "Linear"]
    assert found.window == (None if states else 7)
    with pytest.raises(ValueError, match="give the open dimension by dims="):
        imported(path)


def side_by_side(path, rng, kinds, flipped=()):
    """Cells that read the same frames, those in `flipped` from the last to the first, one behind another in y."""
    nodes, w = [], {"one": np.array([1]), "last": np.array([-1]), "before": np.array([-1000]), "time": np.array([0])}

    for i, kind in enumerate(kinds):
        weights = cell_weights(rng, kind)
        w |= {f"{name}{i}": weights[name] for name in "WRB"}
        x, y = (f"x{i}", f"z{i}") if i in flipped else ("x", f"y{i}")
        if i in flipped:
            nodes.append(node("Slice", "x last before time last", x))
        nodes.append(node(kind, f"{x} W{i} R{i} B{i}", f"h{i}", hidden_size=UNITS, name=f"cell{i}"))
        nodes.append(node("Squeeze", f"h{i} one", y))
        if i in flipped:
            nodes.append(node("Slice", f"{y} last before time last", f"y{i}"))
    nodes.append(node("Concat", " ".join(f"y{i}" for i in range(len(kinds))), "y", axis=-1))
    return saved(path, nodes, {"x": ["T", 1, SIZE]}, {"y": ["T", 1, UNITS * len(kinds)]}, w)


@pytest.mark.exhaustive(one_in=2)
@pytest.mark.parametrize("kinds", [("LSTM", "LSTM"), ("LSTM", "GRU", "RNN")])
def test_cells_side_by_side_are_joined(kinds, tmp_path, rng):
    path = side_by_side(tmp_path / "side.onnx", rng, kinds)
    model, x = onnx_export.load(path), normal(rng, 40, 1, SIZE)
    (y,) = onnxruntime.InferenceSession(path).run(None, {"x": x})
    assert model.check(x[:, 0], y[:, 0])


def test_a_cell_that_reads_flipped_frames_is_named(tmp_path, rng):
    path = side_by_side(tmp_path / "flip.onnx", rng, ("LSTM", "LSTM"), flipped=[1])
    says = r"LSTM 'cell1': it reads \d+ steps that are not the \d+ frames in order"
    with pytest.raises(ValueError, match=says) as refused:
        onnx_export.load(path)
    assert "cell0" not in str(refused.value)


def test_the_state_c_alone_is_refused_by_the_name_of_its_node(tmp_path, rng):
    """The node has neither a name nor a first output."""
    cell = helper.make_node("LSTM", ["x", "W", "R", "B"], ["", "", "c"], hidden_size=UNITS)
    path = saved(tmp_path / "c.onnx", [cell], {"x": [1, 1, SIZE]}, {"c": [1, 1, UNITS]}, cell_weights(rng, "LSTM"))
    with pytest.raises(ValueError, match="LSTM 'c': its c is read without its h"):
        onnx_export.load(path)


@pytest.mark.exhaustive(one_in=5)
@pytest.mark.parametrize("head", ["LSTM", "MatMul", "Tanh"])
@pytest.mark.parametrize("form", ["sub, div", "sub", "batch norm"])
def test_a_mean_far_from_zero_is_subtracted_before_anything_is_scaled(form, head, tmp_path, rng):
    """Positions in metres, pressure, time: W (x - mean) / std as one product would cancel, 0.01 off outputs of 0.3."""
    mean = np.array([[4.2e6, -1013.0, 1e5, 0.3]], np.float32)
    std = np.array([[1.0 if form == "sub" else 50.0, 0.5, 1.0, 2.0]], np.float32)
    tensors = {"mean": mean, "std": std, "two": np.array([1]), "M": normal(rng, SIZE, UNITS)}
    tensors |= cell_weights(rng, "LSTM")
    nodes = [node("Sub", "x mean", "d"), *([node("Div", "d std", "z")] if form == "sub, div" else [])]
    z = "d" if form == "sub" else "z"
    if form == "batch norm":
        tensors |= {"g": np.ones(SIZE), "b": np.zeros(SIZE), "m": mean[0], "v": std[0] ** 2}
        tensors |= {name: tensors[name].astype(np.float32) for name in "gbmv"}
        nodes = [node("BatchNormalization", "x g b m v", "z", epsilon=0.0)]
    if head == "LSTM":
        nodes += [node("Unsqueeze", f"{z} two", "u"), node("LSTM", "u W R B", "Y", hidden_size=UNITS)]
        nodes += [node("Squeeze", "Y two", "y3"), node("Squeeze", "y3 two", "y")]
    else:
        nodes += [node("MatMul", f"{z} M", "y") if head == "MatMul" else node("Tanh", z, "y")]
    ends = {"x": ["T", SIZE]}, {"y": ["T", SIZE if head == "Tanh" else UNITS]}
    path = saved(tmp_path / "m.onnx", nodes, *ends, tensors)
    found = imported(path)
    x = (mean + std * rng.standard_normal((200, SIZE))).astype(np.float32)
    exact = ReferenceEvaluator(widen(onnx.load(path))).run(None, {"x": x.astype(np.float64)})[0]
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    theirs, ours = (np.abs(y - exact).max() for y in (session.run(None, {"x": x})[0], found.model.run(x)))
    assert ours <= 1.5 * theirs + 2**-22 * np.abs(exact).max()


@pytest.mark.exhaustive(one_in=6)
@pytest.mark.parametrize("frames", [9, "T"])
@pytest.mark.parametrize("kind", GATES)
def test_a_stored_number_of_steps_behind_a_cell_is_any(kind, frames, tmp_path, rng):
    """As PyTorch's newer exporter writes y; with states a call of nine frames is nine steps."""
    letters = "hc" if kind == "LSTM" else "h"
    layer = node(kind, f"x W R B - {' '.join(letters)}".replace("-", "lengths"), "Y", hidden_size=UNITS)
    layer.input[4] = ""
    layer.output.extend([*["Yh"], *["Yc"] * (kind == "LSTM")])
    nodes = [layer, node("Transpose", "Y", "t", perm=[0, 2, 1, 3]), node("Reshape", "t shape", "y")]
    tensors = cell_weights(rng, kind) | {"shape": np.array([9, 1, UNITS])}
    inputs = {"x": [frames, 1, SIZE]} | {name: [1, 1, UNITS] for name in letters}
    outputs = {"y": [9, 1, UNITS]} | {f"Y{name}": [1, 1, UNITS] for name in letters}
    found = imported(saved(tmp_path / "m.onnx", nodes, inputs, outputs, tensors))
    assert ([layer.kind for layer in found.model.layers], list(found.states)) == ([kind], list(letters))
    x = rng.standard_normal((9, SIZE)).astype(np.float32)
    feeds = {"x": x[:, None]} | {name: np.zeros((1, 1, UNITS), np.float32) for name in letters}
    (y,) = onnxruntime.InferenceSession(tmp_path / "m.onnx").run(["y"], feeds)
    assert found.model.check(x, y[:, 0]).ok


def test_the_states_of_all_layers_are_no_other_result(tmp_path, rng):
    """y is the last h of two cells whose h are an output, too: y loses nothing, and comes first."""
    tensors = cell_weights(rng, "GRU") | {f"{n}2": a for n, a in cell_weights(rng, "GRU", UNITS).items()}
    nodes = [node("GRU", "x W R B", "Y h1", hidden_size=UNITS), node("Squeeze", "Y one", "z")]
    nodes += [node("GRU", "z W2 R2 B2", "Y2 h2", hidden_size=UNITS), node("Squeeze", "Y2 one", "y")]
    nodes += [node("Concat", "h1 h2", "hn", axis=0)]
    ends = {"x": [1, 1, SIZE]}, {"y": [1, 1, UNITS], "hn": [2, 1, UNITS]}
    path = saved(tmp_path / "m.onnx", nodes, *ends, tensors | {"one": np.array([1])})
    found = imported(path)
    assert (found.outputs, found.model.output_size) == (("y",), UNITS)
    assert any("'hn'" in note for note in found.notes)
    file = onnx.load(path)
    file.graph.output.reverse()
    onnx.save(file, path)
    with pytest.raises(ValueError, match="more than one reading"):
        imported(path)


def test_a_result_that_is_two_outputs_is_one(tmp_path, rng):
    nodes = [node("MatMul", "x W", "a"), node("Tanh", "a", "y"), node("Identity", "y", "z"), node("Exp", "y", "e")]
    ends = {"x": [1, SIZE]}, {name: [1, UNITS] for name in "yez"}
    found = imported(saved(tmp_path / "m.onnx", nodes, *ends, {"W": normal(rng, SIZE, UNITS)}))
    assert found.outputs == ("y", "e")
    assert any("'z'" in note for note in found.notes)
