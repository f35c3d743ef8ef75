"""`load` of linear recurrences, h = a h + b with a and b of the frame alone."""

import numpy as np
import pytest
from graphs import imported, node, normal, saved
from onnx import helper

from onnx_export.errors import NotImported

SIZE, UNITS = 4, 6


def gate(rng):
    tensors = {"Z": normal(rng, SIZE, UNITS), "N": normal(rng, SIZE, UNITS), "one": np.float32(1)}
    return [node("MatMul", "x Z", "p"), node("Sigmoid", "p", "z"), node("MatMul", "x N", "n")], tensors


STEPS = {
    "minGRU": [node("Sub", "one z", "k"), node("Mul", "k h", "a"), node("Mul", "z n", "b"), node("Add", "a b", "h1")],
    "lerp": [node("Sub", "n h", "d"), node("Mul", "z d", "e"), node("Add", "h e", "h1")],
    "decay": [node("Exp", "p", "s"), node("Neg", "s", "m"), node("Exp", "m", "a"), node("Mul", "a h", "k"),
              node("Add", "k n", "h1")],
    "constant": [node("Mul", "h keep", "k"), node("Mul", "n part", "b"), node("Sub", "k b", "h1")],
}  # fmt: skip
CONSTANTS = {"keep": np.float32(0.99), "part": np.float32(0.01)}


def step(path, rng, nodes, names=("h", "h1"), outputs=3):
    first, tensors = gate(rng)
    tensors |= CONSTANTS | {"O": normal(rng, UNITS, outputs)}
    nodes = [*first, *nodes, node("MatMul", "h1 O", "y")]
    old, new = names
    for each in nodes:
        for part in (each.input, each.output):
            part[:] = [{"h": old, "h1": new}.get(name, name) for name in part]
    return saved(path, nodes, {"x": [1, SIZE], old: [1, UNITS]}, {"y": [1, outputs], new: [1, UNITS]}, tensors)


@pytest.mark.exhaustive(one_in=4)
@pytest.mark.parametrize("kind", STEPS)
def test_a_step(kind, tmp_path, rng):
    found = imported(step(tmp_path / "m.onnx", rng, STEPS[kind]))
    assert found.states == {"h": "h1"}
    assert [layer.kind for layer in found.model.layers][-2:] == ["LSTM", "Linear"]
    state, stream = np.zeros((1, UNITS), np.float32), found.model.stream()
    for x in rng.standard_normal((300, SIZE)).astype(np.float32):
        y, state = found.file.call(x, {"h": state})
        assert np.abs(stream.step(x) - y[0]).max() < 1e-5 * max(1, np.abs(y).max())


@pytest.mark.parametrize("frames", [5, "T"])
def test_over_frames_by_a_scan(frames, tmp_path, rng):
    """The state is an input and an output of the file."""
    first, tensors = gate(rng)
    body = helper.make_graph(
        [*first, *STEPS["minGRU"], node("Identity", "h1", "each")],
        "body",
        [helper.make_tensor_value_info(name, 1, None) for name in ("h", "x")],
        [helper.make_tensor_value_info(name, 1, None) for name in ("h1", "each")],
    )
    nodes = [helper.make_node("Scan", ["h0", "v"], ["hT", "y"], body=body, num_scan_inputs=1)]
    inputs = {"v": [frames, 1, SIZE], "h0": [1, UNITS]}
    path = saved(tmp_path / "m.onnx", nodes, inputs, {"y": [frames, 1, UNITS], "hT": [1, UNITS]}, tensors)
    assert [layer.kind for layer in imported(path).model.layers][-1] == "LSTM"


@pytest.mark.parametrize(
    "nodes",
    [
        [node("Mul", "h h", "s"), node("Mul", "s keep", "k"), node("Add", "k n", "h1")],
        [node("Mul", "h keep", "k"), node("Add", "k n", "s"), node("Clip", "s one keep", "h1")],
        [node("Mul", "h keep", "k"), node("Add", "k n", "s"), node("Mul", "s h", "h1")],
        [node("Gather", "h turned", "r", axis=1), node("Mul", "r keep", "k"), node("Add", "k n", "h1")],
        [node("Mul", "h keep", "h1")],
    ],
    ids=["square", "clip", "product", "turned", "without a frame"],
)
def test_what_is_not_linear_is_refused(nodes, tmp_path, rng, monkeypatch):
    monkeypatch.setitem(CONSTANTS, "turned", np.roll(np.arange(UNITS), 1))
    with pytest.raises(NotImported):
        imported(step(tmp_path / "m.onnx", rng, nodes))


def averages(path, rng, inputs):
    """An average of what the output's name says less than the graph does: m = 0.9 p + (1 - 0.9) r."""
    nodes = [node("Mul", f"{inputs[0]} keep", "k"), node("Tanh", inputs[1], "t"), node("Add", "k t", "m1")]
    nodes += [node("MatMul", "m1 O", "y")]
    shapes = {name: [1, SIZE] for name in inputs}
    return saved(path, nodes, shapes, {"y": [1, 3], "m1": [1, SIZE]}, CONSTANTS | {"O": normal(rng, SIZE, 3)})


def test_names_decide_which_part_of_a_sum_is_the_state(tmp_path, rng):
    assert imported(averages(tmp_path / "m.onnx", rng, ["m", "x"])).states == {"m": "m1"}
    for inputs in (["x", "m"], ["p", "q"]):
        path = averages(tmp_path / "n.onnx", rng, inputs)
        with pytest.raises(NotImported, match="say which by states"):
            imported(path)
        assert imported(path, states={inputs[0]: "m1"}).states == {inputs[0]: "m1"}


def test_other_pairings_of_states_search_few_cells_again(tmp_path, rng, monkeypatch):
    """Ten states of one size have millions of pairings; a cell depends only on those of the states behind it."""
    from onnx_export.importer import cells

    searches, search = [], cells._Reading.cell
    monkeypatch.setattr(cells._Reading, "cell", lambda self: (searches.append(0), search(self))[1])
    count, nodes, tensors = 10, [], {"O": normal(rng, UNITS, 3)}
    for i in range(count):
        tensors |= {f"W{i}": normal(rng, UNITS if i else SIZE, UNITS), f"R{i}": normal(rng, UNITS, UNITS)}
        nodes += [node("MatMul", f"{f'g{i - 1}' if i else 'x'} W{i}", f"a{i}"), node("MatMul", f"h{i} R{i}", f"b{i}")]
        nodes += [node("Add", f"a{i} b{i}", f"c{i}"), node("Tanh", f"c{i}", f"g{i}")]
    shape = [1, UNITS]
    inputs = {"x": [1, SIZE]} | {f"h{i}": shape for i in range(count)}
    outputs = {"y": [1, 3]} | {f"g{i}": shape for i in range(count)}
    nodes.append(node("MatMul", f"g{count - 1} O", "y"))
    found = imported(saved(tmp_path / "m.onnx", nodes, inputs, outputs, tensors), check=False)
    assert found.states == {f"h{i}": f"g{i}" for i in range(count)}
    assert len(searches) < 20 * count
