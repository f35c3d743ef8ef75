"""Files of others whose results join: masks, sums, branches, parts; each is a list of layers that read by name."""

from pathlib import Path

import numpy as np
import pytest
from graphs import checked, imported, node, normal, saved
from onnx import helper

import cnorm

INPUTS, UNITS = 5, 6
MODELS = Path(__file__).parents[3] / "shared" / "data" / "models"


def weights(rng):
    found = {"w": normal(rng, INPUTS, UNITS), "u": normal(rng, UNITS, UNITS), "v": normal(rng, 3, UNITS)}
    found |= {"b": normal(rng, UNITS), "one": normal(rng, UNITS, 1), "wide": normal(rng, 2 * UNITS, UNITS)}
    return found | {"first": np.array([0]), "middle": np.array([4]), "axis": np.array([1])}


ENCODER = [node("MatMul", "x w", "a0"), node("Add", "a0 b", "a"), node("MatMul", "a u", "z"), node("Sigmoid", "z", "m")]
PART = node("Slice", "a first middle axis", "part")

CASES = {
    "mask": ([node("Mul", "a m", "y")], UNITS, ["Linear", "Linear", "Activation", "Multiply"]),
    "mask, turned": ([node("Mul", "m a", "y")], UNITS, ["Linear", "Linear", "Activation", "Multiply"]),
    "sum": ([node("Add", "m a", "y")], UNITS, ["Linear", "Linear", "Activation", "Add"]),
    "difference": ([node("Sub", "m a", "y")], UNITS, ["Linear", "Linear", "Activation", "Slice", "Scale", "Add"]),
    "difference, turned": ([node("Sub", "a m", "y")], UNITS, ["Linear", "Linear", "Activation", "Scale", "Add"]),
    "square": ([node("Mul", "m m", "y")], UNITS, None),
    "two branches": (
        [node("Tanh", "a", "t"), node("MatMul", "t u", "t2"), node("Mul", "m t2", "y")],
        UNITS,
        ["Linear", "Linear", "Activation", "Slice", "Activation", "Linear", "Multiply"],
    ),
    "a gate for all": ([node("MatMul", "m one", "g"), node("Mul", "a g", "y")], UNITS, None),
    "one behind another": (
        [node("Concat", "a m", "am", axis=1), node("MatMul", "am wide", "y")],
        UNITS,
        ["Linear", "Linear", "Activation", "Concat", "Linear"],
    ),
    "concatenated outputs": ([node("Concat", "m a x", "y", axis=1)], 2 * UNITS + INPUTS, None),
    "a part": (
        [node("Slice", "m first middle axis", "mp"), PART, node("Mul", "part mp", "y")],
        4,
        ["Linear", "Slice", "Linear", "Linear", "Activation", "Multiply"],
    ),
    "many readers": (
        [
            node("Mul", "a m", "p"),
            node("Add", "p a", "q"),
            node("Add", "q m", "r"),
            node("Tanh", "r", "s"),
            node("Mul", "s p", "y"),
        ],
        UNITS,
        None,
    ),
    "scaled, not multiplied": (
        [node("Mul", "m b", "mb"), node("Add", "mb b", "mc"), node("Mul", "mc a", "y")],
        UNITS,
        None,
    ),
    "products of two results": (
        [node("MatMul", "m u", "p"), node("MatMul", "a u", "q"), node("Add", "p q", "r"), node("Relu", "r", "y")],
        UNITS,
        None,
    ),
}


@pytest.mark.exhaustive(one_in=3)
@pytest.mark.parametrize("case", CASES)
def test_results_that_join(case, tmp_path, rng):
    nodes, size, kinds = CASES[case]
    file = saved(tmp_path / "m.onnx", [*ENCODER, *nodes], {"x": [1, INPUTS]}, {"y": [1, size]}, weights(rng))
    found = imported(file)
    assert kinds is None or [layer.kind for layer in found.model.layers] == kinds
    assert found.report.ok
    names = {layer.name for layer in found.model.layers} - {None}
    assert names == {name for layer in found.model.layers for name in layer.reads} - {"input"}
    x = rng.standard_normal((3, INPUTS)).astype(np.float32)
    np.testing.assert_allclose(found.model.run(x), found.file.run(x), rtol=1e-5, atol=1e-6)
    found.model.save(tmp_path / "m.safetensors")
    assert cnorm.load(tmp_path / "m.safetensors").run(x).tobytes() == found.model.run(x).tobytes()


@pytest.mark.parametrize("operator", ["Mul", "Add"])
def test_the_frame_itself_is_joined(operator, tmp_path, rng):
    """A mask over the frame; and, first of all, parts of the frame that are joined with one another."""
    square = {"w": normal(rng, INPUTS, INPUTS), "b": normal(rng, INPUTS)}
    nodes = [node("MatMul", "x w", "z"), node("Add", "z b", "zb"), node("Tanh", "zb", "m"), node(operator, "x m", "y")]
    found = imported(saved(tmp_path / "a.onnx", nodes, {"x": [1, INPUTS]}, {"y": [1, INPUTS]}, square))
    assert [layer.kind for layer in found.model.layers] == [
        "Linear",
        "Activation",
        {"Mul": "Multiply"}.get(operator, "Add"),
    ]
    halves = [node("Split", "x", "left right", axis=1), node("Tanh", "left", "l"), node("Sigmoid", "right", "r")]
    nodes = [*halves, node(operator, "l r", "lr"), node("MatMul", "lr w", "y")]
    found = imported(saved(tmp_path / "b.onnx", nodes, {"x": [1, 2 * INPUTS]}, {"y": [1, INPUTS]}, square, opset=13))
    assert found.report.ok


def test_a_part_of_an_earlier_result_is_one_slice(tmp_path, rng):
    """The halves of a convolution's channels, one the gate of the other."""
    nodes = [
        node("Conv", "x w", "a"),
        node("Split", "a", "left right", axis=1),
        node("Tanh", "left", "l"),
        node("Sigmoid", "right", "r"),
        node("Mul", "l r", "y"),
    ]
    ends = {"x": [1, 2, 7]}, {"y": [1, 2, 5]}
    found = imported(saved(tmp_path / "m.onnx", nodes, *ends, {"w": normal(rng, 4, 2, 3)}, opset=13))
    kinds = ["Conv1d", "Slice", "Activation", "Slice", "Activation", "Multiply"]
    assert [layer.kind for layer in found.model.layers] == kinds
    assert found.report.ok


@pytest.mark.parametrize("state", [False, True])
def test_several_outputs(state, tmp_path, rng):
    """A mask, the masked encoder and a second head: y is all of them, with their names."""
    nodes = [*ENCODER, node("Mul", "a m", "p"), node("MatMul", "p u", "y:0"), node("MatMul", "m one", "vad")]
    inputs, outputs = {"x": [1, INPUTS]}, {"y:0": [1, UNITS], "m": [1, UNITS], "vad": [1, 1]}
    if state:
        nodes += [node("MatMul", "h u", "hu"), node("Add", "hu a", "s"), node("Tanh", "s", "h2")]
        nodes += [node("Mul", "h2 m", "both")]
        inputs, outputs = inputs | {"h": [1, UNITS]}, outputs | {"h2": [1, UNITS], "both": [1, UNITS]}
    found = imported(
        saved(tmp_path / "m.onnx", nodes, inputs, outputs, weights(rng)), states={"h": "h2"} if state else {}
    )
    assert found.report.ok
    names = ["y_0", "m", "vad", "both"][: 3 + state]
    assert list(found.model.outputs) == names
    x = rng.standard_normal((7, INPUTS)).astype(np.float32)
    np.testing.assert_allclose(found.model.run(x), found.file.run(x), rtol=1e-5, atol=1e-5)
    assert found.model.views(found.model.run(x))["vad"].shape == (7, 1)


def test_a_division_is_refused(tmp_path, rng):
    nodes = [*ENCODER, node("Div", "a m", "y")]
    with pytest.raises(ValueError, match="Div 'y': it divides two results that depend on the frame"):
        imported(saved(tmp_path / "m.onnx", nodes, {"x": [1, INPUTS]}, {"y": [1, UNITS]}, weights(rng)))


@pytest.mark.exhaustive
@pytest.mark.skipif(not MODELS.exists(), reason=f"SKIPPED: {MODELS} with public weight files is not here")
def test_the_second_stage_of_dtln():
    """Two written LSTMs whose states are one stacked input, a written layer norm, and a mask over the encoder."""
    found = imported(MODELS / "dtln_2.onnx")
    assert [layer.kind for layer in found.model.layers] == [
        "Linear", "LayerNorm", "LSTM", "LSTM", "Linear", "Activation", "Multiply", "Linear",
    ]  # fmt: skip
    assert found.states == {"input_5": "tf_op_layer_stack_5"}
    assert found.report.ok


SPLIT = [node("Conv", "frames wide", "all"), node("Split", "all", "f g", axis=1, num_outputs=2)]
GATED = {
    "halves": (SPLIT, "f", "g", 1),
    "two convolutions": ([node("Conv", "frames w", "f"), node("Conv", "frames v", "g")], "f", "g", 1),
    "other dilations": (
        [node("Conv", "frames w", "f"), node("Conv", "frames v2", "g", dilations=[2]), node("Add", "g bias", "gb")],
        "f",
        "gb",
        1,
    ),
    "f times its own sigmoid": ([node("Conv", "frames w", "f"), node("Mul", "f factor", "g")], "f", "g", 1),
    "another order": ([*SPLIT, node("Gather", "all turned", "h", axis=1)], "all", "h", 2),
}


@pytest.mark.exhaustive(one_in=3)
@pytest.mark.parametrize("case", GATED)
def test_convolutions_with_one_cache_are_one_layer(case, tmp_path, rng):
    """tanh(f) sigmoid(g), where f and g read the same frames of before."""
    nodes, f, g, width = GATED[case]
    nodes = [
        node("Concat", "cache x", "frames", axis=2),
        node("Slice", "frames one end two", "cache_out"),
        *nodes,
        node("Tanh", f, "t"),
        node("Sigmoid", g, "s"),
        node("Mul", "t s", "y"),
    ]
    tensors = {"w": normal(rng, UNITS, INPUTS, 5), "v": normal(rng, UNITS, INPUTS, 5)}
    tensors |= {"v2": normal(rng, UNITS, INPUTS, 3), "wide": normal(rng, 2 * UNITS, INPUTS, 5)}
    tensors |= {"bias": normal(rng, UNITS, 1), "factor": np.float32(2)}
    tensors |= {"turned": np.arange(2 * UNITS)[::-1].copy(), "one": [1], "end": [1 << 40], "two": np.array([2])}
    used = {name for one in nodes for name in one.input}
    tensors = {name: np.asarray(tensor) for name, tensor in tensors.items() if name in used}
    ends = {"x": [1, INPUTS, 1], "cache": [1, INPUTS, 4]}, {"y": [1, width * UNITS, 1], "cache_out": [1, INPUTS, 4]}
    found = imported(saved(tmp_path / "m.onnx", nodes, *ends, tensors, opset=18))
    assert [layer.kind for layer in found.model.layers].count("CausalConv1d") == 1
    assert found.states == {"cache": "cache_out"}
    assert found.report.ok


@pytest.mark.parametrize("function", [("Mish", {}), ("Celu", {}), ("Celu", {"alpha": 0.3})], ids=str)
def test_functions_of_several_layers(function, tmp_path, rng):
    op, attributes = function
    nodes = [node("Gemm", "x w", "a"), node(op, "a", "m", **attributes), node("Gemm", "m u", "y")]
    weights = {"w": normal(rng, INPUTS, UNITS), "u": normal(rng, UNITS, UNITS)}
    file = saved(tmp_path / "m.onnx", nodes, {"x": [1, INPUTS]}, {"y": [1, UNITS]}, weights, opset=18)
    assert imported(file).report.ok


# Functions of rows of an array that two nodes transpose: (its rows, row of the transpose, function) twice
COMPUTED_ONCE = {
    "a transpose": ((4, 0, "Tanh"), (4, 1, "Sigmoid"), "Permute Slice tanh Slice sigmoid Concat"),
    "and its row": ((4, 0, "Tanh"), (4, 0, "Sigmoid"), "Permute Slice tanh Slice sigmoid Concat"),
    "and its function": ((4, 0, "Tanh"), (4, 0, "Tanh"), "Permute Slice tanh Concat"),
    "another order": ((4, 0, "Tanh"), (2, 0, "Tanh"), "Permute Slice tanh Slice Permute Slice tanh Concat"),
}


@pytest.mark.parametrize("case", COMPUTED_ONCE)
def test_what_two_nodes_compute_is_one_layer(case, tmp_path, rng):
    *reads, kinds = COMPUTED_ONCE[case]
    nodes, tensors = [], {f"row{i}": np.array(i) for i in range(2)}
    for i, (rows, row, function) in enumerate(reads):
        tensors |= {f"shape{rows}": np.array([rows, 8 // rows])}
        nodes += [node("Reshape", f"x shape{rows}", f"a{i}"), node("Transpose", f"a{i}", f"t{i}", perm=[1, 0])]
        nodes += [node("Gather", f"t{i} row{row}", f"r{i}", axis=0), node(function, f"r{i}", f"f{i}")]
    nodes += [node("Concat", "f0 f1", "y", axis=0)]
    size = sum(rows for rows, *_ in reads)
    found = imported(saved(tmp_path / "m.onnx", nodes, {"x": [1, 8]}, {"y": [size]}, tensors))
    assert found.report.ok
    assert " ".join(getattr(layer, "function", layer.kind) for layer in found.model.layers) == kinds
    x = rng.standard_normal((3, 8)).astype(np.float32)
    found.model.save(tmp_path / "m.safetensors")
    assert cnorm.load(tmp_path / "m.safetensors").run(x).tobytes() == found.model.run(x).tobytes()


# Functions of the frame, of which no layer has a size, and what else reads them
WITHOUT_SIZES = {
    "their sum": ([node("Tanh", "x", "b"), node("Add", "a b", "y")], {"y": [1, INPUTS]}),
    "a function and a product": (
        [
            node("Sigmoid", "a", "s"),
            node("Tanh", "x", "b"),
            node("MatMul", "b w", "m"),
            node("Concat", "s m", "y", axis=1),
        ],
        {"y": [1, INPUTS + UNITS]},
    ),
    "both of one": (
        [node("Sigmoid", "a", "s"), node("MatMul", "a w", "m"), node("Concat", "s m", "y", axis=1)],
        {"y": [1, INPUTS + UNITS]},
    ),
    "two outputs": ([node("Tanh", "x", "b"), node("Sigmoid", "b", "y")], {"a": [1, INPUTS], "y": [1, INPUTS]}),
}


@pytest.mark.parametrize("case", WITHOUT_SIZES)
def test_functions_of_the_frame_are_computed_once(case, tmp_path, rng):
    """The list begins with a layer that has a size."""
    nodes, outputs = WITHOUT_SIZES[case]
    tensors = {"w": normal(rng, INPUTS, UNITS)} if "MatMul" in {one.op_type for one in nodes} else {}
    file = saved(tmp_path / "m.onnx", [node("Tanh", "x", "a"), *nodes], {"x": [1, INPUTS]}, outputs, tensors)
    functions = [getattr(layer, "function", None) for layer in imported(file).model.layers]
    assert functions.count("tanh") == 1


@pytest.mark.parametrize("second", ["m", "n"])
def test_two_outputs_of_one_layer(second, tmp_path, rng):
    """What two nodes compute is one layer, but each output has a name of its own."""
    nodes = [*ENCODER, node("Sigmoid", "z", "n"), node("MatMul", f"{second} u", "z2")]
    outputs = {name: [1, UNITS] for name in ("m", "n", "z2")}
    used = {name: array for name, array in weights(rng).items() if name in "wub"}
    found = imported(saved(tmp_path / "m.onnx", nodes, {"x": [1, INPUTS]}, outputs, used))
    assert checked(found, rng).count("Activation") == 1
    assert list(found.model.outputs) == list(outputs)


def test_cells_with_the_same_weights_are_two(tmp_path, rng):
    """Each has a state of its own, which another caller may set."""
    nodes, inputs, outputs = [node("Unsqueeze", "x first", "xt")], {"x": [1, INPUTS]}, {"y": [1, UNITS]}
    for i in "ab":
        nodes.append(helper.make_node("GRU", ["xt", "w", "u", "", "", i], [f"{i}_y", f"{i}_out"], hidden_size=UNITS))
        inputs[i] = outputs[f"{i}_out"] = [1, 1, UNITS]
    nodes += [node("Mul", "a_out b_out", "h"), node("Squeeze", "h first", "y")]
    tensors = {"w": normal(rng, 1, 3 * UNITS, INPUTS), "u": normal(rng, 1, 3 * UNITS, UNITS), "first": np.array([0])}
    found = imported(saved(tmp_path / "m.onnx", nodes, inputs, outputs, tensors))
    assert checked(found, rng).count("GRU") == len(found.states) == 2
