"""`load` of files that mix frames: refused with the node, or read as what carries them; nothing is lost in silence."""

import numpy as np
import onnxruntime
import pytest
from graphs import imported, node, normal, saved
from onnx import TensorProto, helper

import onnx_export

UNITS = 8
TURN, BACK = node("Transpose", "x", "xt", perm=[1, 2, 0]), node("Transpose", "ct", "z", perm=[2, 0, 1])  # [T, 1, U]
SIZE = node("Shape", "x", "size"), node("Gather", "size zero", "steps", axis=0)
ZERO = {"zero": np.array(0)}


def cell(x="z", y="y", lengths=""):
    return [node("LSTM", f"{x} W R B {lengths}".strip(), "Y", hidden_size=UNITS), node("Squeeze", "Y one", y)]


def weights(rng):
    sizes = {"W": (1, 4 * UNITS, UNITS), "R": (1, 4 * UNITS, UNITS), "B": (1, 8 * UNITS)}
    return {name: normal(rng, *shape) for name, shape in sizes.items()} | {"one": np.array([1])}


def convolution(kernel, pads, groups=1, **attributes):
    nodes = [TURN, node("Conv", "xt K", "ct", name="mixes", pads=pads, group=groups, **attributes), BACK, *cell()]
    return nodes, {"K": (UNITS, UNITS // groups, kernel)}


def branch(y, scale):
    made = node("Mul", f"y3 {scale}", y) if scale else node("Identity", "y3", y)
    return helper.make_graph([made], y, [], [helper.make_tensor_value_info(y, TensorProto.FLOAT, None)])


def delayed(by):
    nodes = [
        node("Pad", "x pads", "xp"),
        node("Slice", "xp start end start", "xd"),
        node("Add", "x xd", "z", name="mixes"),
    ]
    return [*nodes, *cell()], {"pads": np.array([by, 0, 0, 0, 0, 0]), "start": np.array([0]), "end": np.array([-by])}


def limited(kind):
    """What depends on the number of steps."""
    if kind == "lengths":
        nodes = [*SIZE, node("Min", "steps limit", "n"), node("Reshape", "n one", "n1"), node("Cast", "n1", "ni", to=6)]
        return [*nodes, *cell("x", lengths="ni")], ZERO | {"limit": np.array(40)}
    choose = helper.make_node("If", ["long"], ["y"], then_branch=branch("a", "two"), else_branch=branch("b", ""))
    nodes = [*cell("x", "y3"), *SIZE, node("Greater", "steps limit", "long"), choose]
    return nodes, ZERO | {"limit": np.array(50), "two": np.float32(2)}


MIXED = {
    "padded on both sides": lambda: convolution(3, [1, 1]),
    "depthwise": lambda: convolution(5, [2, 2], UNITS),
    "strided": lambda: convolution(3, [1, 1], strides=[2]),
    "another dilation than its padding": lambda: convolution(2, [20, 0], dilations=[10]),
    "ahead of time": lambda: convolution(3, [20, 20], dilations=[20]),
    "lengths": lambda: limited("lengths"),
    "a branch": lambda: limited("branch"),
    "less the mean": lambda: ([node("ReduceMean", "x", "m", axes=[0]), node("Sub", "x m", "z"), *cell()], {}),
    "the first 40": lambda: (
        [node("Slice", "x start end start", "z"), *cell()],
        {"start": np.array([0]), "end": np.array([40])},
    ),
    "a convolution alone": lambda: ([TURN, node("Conv", "xt K", "ct", pads=[1, 1]), BACK, node("Relu", "z", "y")],
                                    {"K": (UNITS, UNITS, 3)}),
    "a mean alone": lambda: ([node("ReduceMean", "x", "m", axes=[0]), node("Add", "x m", "y")], {}),
    "the first frame": lambda: ([node("Gather", "x zero", "f", axis=0), node("Add", "x f", "y")], ZERO),
    "a flip": lambda: ([node("Slice", "x last end first last", "z"), *cell()],
                       {"last": np.array([-1]), "end": np.array([-(2**31) + 1]), "first": np.array([0])}),
    "a table of positions": lambda: (
        [*SIZE, node("Reshape", "steps one", "n"), node("Slice", "table start n start", "p"), node("Add", "x p", "z"),
         *cell()],
        ZERO | {"table": (200, 1, UNITS), "start": np.array([0])},
    ),
}  # fmt: skip


def written(path, rng, nodes, more, inputs=None, outputs=None):
    stored = {name: normal(rng, *given) if isinstance(given, tuple) else given for name, given in more.items()}
    read = {name for each in nodes for name in each.input}
    stored |= {name: array for name, array in weights(rng).items() if name in read}
    ends = inputs or {"x": ["T", 1, UNITS]}, outputs or {"y": ["T", 1, UNITS]}
    return saved(path, nodes, *ends, stored)


@pytest.mark.parametrize("kind", MIXED)
@pytest.mark.exhaustive(one_in=3)
def test_frames_that_are_mixed_outside_a_cell_are_refused(kind, tmp_path, rng):
    nodes, more = MIXED[kind]()
    path = written(tmp_path / "m.onnx", rng, nodes, more)
    with pytest.raises(
        ValueError, match=r"depends on several frames|number of (the )?frames|in one call the layers|not the \d+ frames"
    ) as error:
        imported(path)
    if any(each.name == "mixes" for each in nodes):
        assert "'mixes'" in str(error.value)


@pytest.mark.parametrize("by", [1, 20, 60, 90])
def test_a_delay_is_a_layer(by, tmp_path, rng):
    found = imported(written(tmp_path / "m.onnx", rng, *delayed(by)))
    assert [layer.kind for layer in found.model.layers] == ["Delay", "Slice", "Add", "LSTM"]
    x = rng.standard_normal((200, UNITS)).astype(np.float32) * (1 + np.arange(200)[:, None] % 7).astype(np.float32)
    assert found.model.check(x, found.file.run(x)).ok


def test_a_batch_that_is_averaged_is_refused(tmp_path, rng):
    nodes = [node("ReduceMean", "x", "m", axes=[0]), node("Sub", "x m", "y")]
    path = written(tmp_path / "m.onnx", rng, nodes, {}, {"x": ["rows", UNITS]}, {"y": ["rows", UNITS]})
    with pytest.raises(ValueError, match=r"ReduceMean 'm': its result depends on several frames.*'rows' has one size"):
        imported(path)
    assert imported(path, dims={"rows": 1}, check=False).model.input_size == UNITS


def test_an_open_dimension_without_a_symbol_is_given_by_its_place(tmp_path, rng):
    nodes = [node("MatMul", "x K", "y")]
    path = written(tmp_path / "m.onnx", rng, nodes, {"K": (6, UNITS)}, {"x": [1, None]}, {"y": [1, UNITS]})
    assert imported(path, dims={"x:1": 6}).model.input_size == 6
    with pytest.raises(ValueError, match="no input has the open dimension 'T'; it has 'x:1'"):
        imported(path, dims={"T": 6})


@pytest.mark.exhaustive(one_in=4)
@pytest.mark.parametrize("units", [16, 17])
@pytest.mark.parametrize("steps", ["T", 40])
def test_states_over_a_time_axis_are_fed(units, steps, tmp_path, rng):
    """PyTorch's export with states; the number of units does not hide the axis of the steps."""
    nodes = [node("LSTM", "x W R B  h c".replace("  ", " none "), "Y h1 c1", hidden_size=units)]
    nodes[0].input[4] = ""
    nodes += [node("Squeeze", "Y one", "y3"), node("Transpose", "y3", "y", perm=[1, 2, 0])]
    sizes = {"W": (1, 4 * units, UNITS), "R": (1, 4 * units, units), "B": (1, 8 * units)}
    state = [1, 1, units]
    inputs = {"x": [steps, 1, UNITS], "h": state, "c": state}
    outputs = {"y": [1, units, steps], "h1": state, "c1": state}
    stored = {name: normal(rng, *shape) for name, shape in sizes.items()} | {"one": np.array([1])}
    path = saved(tmp_path / "m.onnx", nodes, inputs, outputs, stored)
    found = imported(path)
    assert found.states == {"h": "h1", "c": "c1"}
    x = rng.standard_normal((40, UNITS)).astype(np.float32)
    zeros = {name: np.zeros(state, np.float32) for name in "hc"}
    theirs = onnxruntime.InferenceSession(path).run(["y"], {"x": x[:, None]} | zeros)[0][0].T
    assert found.model.check(x, theirs).ok


@pytest.mark.exhaustive(one_in=2)
@pytest.mark.parametrize("steps", ["T", 9])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_the_last_state_of_a_sequence_is_its_last_frame(kind, steps, tmp_path, rng):
    """The plainest export of a layer: y, h_n and, of an LSTM, c_n."""
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    states = ["h_n", "c_n"][: 2 if kind == "LSTM" else 1]
    nodes = [node(kind, "x W R B", " ".join(["Y", *states]), hidden_size=UNITS), node("Squeeze", "Y one", "y")]
    sizes = {"W": (1, gates * UNITS, UNITS), "R": (1, gates * UNITS, UNITS), "B": (1, 2 * gates * UNITS)}
    stored = {name: normal(rng, *shape) for name, shape in sizes.items()} | {"one": np.array([1])}
    outputs = {"y": [steps, 1, UNITS]} | {key: [1, 1, UNITS] for key in states}
    path = saved(tmp_path / "m.onnx", nodes, {"x": [steps, 1, UNITS]}, outputs, stored)
    found = imported(path)
    assert found.outputs == ("y",)
    assert [layer.kind for layer in found.model.layers] == [kind]


def test_an_output_that_equals_a_state_is_kept(tmp_path, rng):
    """An encoder's embedding is its new state, and a second output is computed from it."""
    nodes = [node("GRU", "x W R B none h", "Y h1", hidden_size=UNITS), node("Reshape", "Y row", "e")]
    nodes[0].input[4] = ""
    nodes += [node("Gemm", "e K", "y")]
    sizes = {"W": (1, 3 * UNITS, UNITS), "R": (1, 3 * UNITS, UNITS), "B": (1, 6 * UNITS), "K": (UNITS, 3)}
    stored = {name: normal(rng, *shape) for name, shape in sizes.items()} | {"row": np.array([1, UNITS])}
    state = [1, 1, UNITS]
    outputs = {"e": [1, UNITS], "y": [1, 3], "h1": state}
    found = imported(saved(tmp_path / "m.onnx", nodes, {"x": [1, 1, UNITS], "h": state}, outputs, stored))
    assert found.model.output_size == UNITS + 3
    assert set(found.outputs) == {"e", "y"}


@pytest.mark.parametrize("start", [0.0, 0.2])
def test_a_file_that_keeps_no_state_is_loaded_with_a_word(start, tmp_path, rng):
    """Each call begins anew, the stream goes on."""
    nodes = [node("GRU", "x W R B none h0", "Y", hidden_size=UNITS), node("Reshape", "Y row", "y")]
    nodes[0].input[4] = ""
    sizes = {"W": (1, 3 * UNITS, UNITS), "R": (1, 3 * UNITS, UNITS), "B": (1, 6 * UNITS)}
    stored = {name: normal(rng, *shape) for name, shape in sizes.items()} | {"row": np.array([1, UNITS])}
    stored["h0"] = np.full((1, 1, UNITS), start, np.float32)
    path = saved(tmp_path / "m.onnx", nodes, {"x": [1, 1, UNITS]}, {"y": [1, UNITS]}, stored)
    with pytest.warns(UserWarning, match="keeps no state between calls") as said:
        onnx_export.load(path)
    assert ("a stored initial state of up to 0.2" in str(said[0].message)) == bool(start)


def by_number(*nodes, **constants):
    """y, scaled by what is computed from the number of frames: 1 up to a limit that no stored number has."""
    whole = [
        *cell("x", "y3"),
        *SIZE,
        node("Cast", "steps", "t", to=TensorProto.FLOAT),
        *nodes,
        node("Mul", "y3 g", "y"),
    ]
    return whole, ZERO | {name: np.float32(value) for name, value in constants.items()}


COUNTED = {
    "a limit that is no integer": lambda: by_number(node("Max", "t k", "m"), node("Div", "m k", "g"), k=5000.5),
    "a quotient": lambda: by_number(node("Mul", "t k", "m"), node("Max", "m one1", "g"), k=1e-4, one1=1.0),
    "a floor": lambda: by_number(
        node("Mul", "t k", "m"), node("Floor", "m", "f"), node("Add", "f one1", "g"), k=1e-3, one1=1.0
    ),
    "a difference": lambda: (
        [*cell("x", "y3"), *SIZE, node("Sub", "steps a", "d"), node("Max", "d a", "e"), node("Div", "e a", "q"),
         node("Cast", "q", "g", to=TensorProto.FLOAT), node("Mul", "y3 g", "y")],
        ZERO | {"a": np.array(400)},
    ),
    "a table that begins with zeros": lambda: (
        [*SIZE, node("Reshape", "steps one", "n"), node("Slice", "table start n start", "p"), node("Add", "x p", "z"),
         *cell()],
        ZERO | {"table": np.repeat([0.0, 1.0], [3000, 1000]).astype(np.float32)[:, None, None], "start": np.array([0])},
    ),
}  # fmt: skip


@pytest.mark.exhaustive(one_in=12)
@pytest.mark.parametrize("kind", COUNTED)
def test_what_the_number_of_frames_decides_is_refused(kind, tmp_path, rng):
    """No run of a length that a stored integer suggests differs."""
    nodes, more = COUNTED[kind]()
    path = written(tmp_path / "m.onnx", rng, nodes, more)
    with pytest.raises(ValueError, match=r"number of (the )?frames|does not run the file over"):
        imported(path)


def written_out(steps, own_parts):
    """An RNN of some steps, each on its own part of the frame or all on the whole frame."""
    nodes = [node("Split", "x", " ".join(f"x{t}" for t in range(steps)), axis=1)]
    for t in range(steps):
        before = f"h{t - 1}" if t else "zero"
        nodes += [
            node("MatMul", f"x{t if own_parts else 0} W", f"a{t}"),
            node("MatMul", f"{before} U", f"r{t}"),
            node("Add", f"a{t} r{t}", f"s{t}"),
            node("Tanh", f"s{t}", f"h{t}"),
        ]
    return [*nodes, node("Identity", f"h{steps - 1}", "y")]


@pytest.mark.parametrize("own_parts", [True, False])
def test_a_recurrence_written_out_is_no_network_but_layers_of_one_weight_are(own_parts, tmp_path, rng):
    stored = {"W": normal(rng, 4, UNITS), "U": normal(rng, UNITS, UNITS), "zero": np.zeros((1, UNITS), np.float32)}
    path = saved(tmp_path / "m.onnx", written_out(5, own_parts), {"x": [1, 20]}, {"y": [1, UNITS]}, stored)
    if not own_parts:
        assert imported(path).report.ok
        return
    with pytest.raises(ValueError, match=r"4 copies of one matrix in a chain, .* an unrolled RNN"):
        imported(path)


@pytest.mark.parametrize("mean", [False, True])
def test_rows_beside_a_fixed_number_of_steps_are_rows_in_either_direction(mean, tmp_path, rng):
    """The steps of both directions are no frames by themselves; rows that a file mixes are refused."""
    tensors = {"W": normal(rng, 2, 15, 3), "R": normal(rng, 2, 15, 5), "axis": np.array([1])}
    nodes = [node("GRU", "v W R", "Y", hidden_size=5, direction="bidirectional")]
    if mean:
        nodes = [node("ReduceMean", "x", "m", axes=[1]), node("Add", "x m", "v"), *nodes]
    else:
        nodes = [node("Tanh", "x", "v"), *nodes]
    nodes += [node("Transpose", "Y", "y", perm=[0, 2, 1, 3])]
    path = saved(tmp_path / "m.onnx", nodes, {"x": [7, "N", 3]}, {"y": [7, "N", 2, 5]}, tensors)
    if mean:
        with pytest.raises(ValueError, match="ReduceMean 'm': its result depends on several frames"):
            imported(path)
        return
    found = imported(path)
    assert found.window == 7
    x = rng.standard_normal((7, 3)).astype(np.float32)
    assert found.model.check(x, found.file.run(x)).ok
