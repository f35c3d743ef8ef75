"""`load` of frames with constants between their elements, of parts of convolutions, and of sums over large frames."""

import numpy as np
import pytest
from graphs import checked, imported, kinds, node, normal, saved

CHANNELS, POSITIONS, GROUP = 4, 10, 4  # the positions are padded to three groups
FRAME = [1, CHANNELS, 1, POSITIONS]


def attention(path, rng, *, value=0.0, pads=(0, 2), positions=POSITIONS, channels=CHANNELS):
    """A gate for each position by a cell over groups of them, the last of which is filled with a constant."""
    groups = (positions + sum(pads)) // GROUP
    nodes = [
        node("Conv", "x K", "a"),
        node("Mul", "a a", "square"),
        node("ReduceMean", "square", "m", axes=[1], keepdims=0),
        node("Pad", "m pads value", "p"),
        node("Reshape", "p groups", "g"),
        node("Transpose", "g", "t", perm=[1, 0, 2]),
        node("GRU", "t W R B", "all", hidden_size=3, direction="bidirectional"),
        node("Transpose", "all", "ways", perm=[0, 2, 1, 3]),
        node("Reshape", "ways rows", "r"),
        node("Transpose", "r", "s", perm=[1, 0, 2]),
        node("MatMul", "s V", "n"),
        node("Add", "n v", "o"),
        node("Reshape", "o flat", "f"),
        node("Slice", "f first last axis", "cut"),
        node("Sigmoid", "cut", "gate"),
        node("Unsqueeze", "gate one", "u"),
        node("Mul", "a u", "y"),
    ]
    tensors = {"K": normal(rng, channels, channels, 1, 1), "W": normal(rng, 2, 9, GROUP), "R": normal(rng, 2, 9, 3)}
    tensors |= {"B": normal(rng, 2, 18), "V": normal(rng, 6, GROUP), "v": normal(rng, GROUP)}
    tensors |= {"pads": [0, 0, pads[0], 0, 0, pads[1]], "value": np.float32(value), "groups": [1, groups, GROUP]}
    tensors |= {"rows": [groups, 1, 6], "flat": [1, 1, groups * GROUP], "one": [1], "axis": [2]}
    tensors |= {"first": [pads[0]], "last": [pads[0] + positions]}
    frame = [1, channels, 1, positions]
    return saved(path, nodes, {"x": frame}, {"y": frame}, tensors)


@pytest.mark.exhaustive(one_in=3)
@pytest.mark.parametrize("pads", [(0, 2), (2, 0), (1, 1)], ids=str)
@pytest.mark.parametrize("value", [0.0, 0.5])
def test_a_cell_over_groups_of_positions_of_which_the_last_is_filled(value, pads, tmp_path, rng):
    found = imported(attention(tmp_path / "m.onnx", rng, value=value, pads=pads))
    made = checked(found, rng)
    assert made.count("OverPositions") == 1
    assert ("Conv1d" in made[2:5]) == (value == 0 and pads[0] == 0)  # zeros behind are a convolution's padding


def test_sums_over_large_frames_are_convolutions_of_few_weights(tmp_path, rng):
    """Over the channels, and over the positions behind a Permute: no matrix of all their elements."""
    path = attention(tmp_path / "m.onnx", rng, positions=62, channels=24)
    assert checked(imported(path), rng).count("Linear") == 1
    nodes = [node("Conv", "x K", "a"), node("ReduceSum", "a axes", "s", keepdims=1), node("Sub", "a s", "y")]
    frame, tensors = [1, 24, 1, 62], {"K": normal(rng, 24, 24, 1, 1), "axes": [3]}
    found = imported(saved(tmp_path / "n.onnx", nodes, {"x": frame}, {"y": frame}, tensors))
    assert checked(found, rng)[:3] == ["Conv1d", "Permute", "Conv1d"]
    assert max(weight.size for layer in found.model.layers for weight in layer.weights.values()) <= 24 * 62


def test_each_position_twice(tmp_path, rng):
    """As a mask of magnitudes is for real and imaginary parts, which are side by side."""
    nodes = [node("Mul", "x x", "q"), node("ReduceMean", "q", "m", axes=[3]), node("Mul", "x m", "y")]
    found = imported(saved(tmp_path / "m.onnx", nodes, {"x": [1, 257, 1, 2]}, {"y": [1, 257, 1, 2]}, {}))
    assert "Linear" not in checked(found, rng)


def test_a_layer_of_constants_alone_is_refused_with_their_node(tmp_path, rng):
    """Each channel is normalised by itself, the padded one, too."""
    nodes = [node("Tanh", "x", "a"), node("Pad", "a pads", "p"), node("LayerNormalization", "p g b", "y", axis=-1)]
    tensors = {"pads": [0, 0, 0, 0, 1, 0], "g": normal(rng, POSITIONS), "b": normal(rng, POSITIONS)}
    ends = {"x": [1, CHANNELS, POSITIONS]}, {"y": [1, CHANNELS + 1, POSITIONS]}
    path = saved(tmp_path / "m.onnx", nodes, *ends, tensors)
    with pytest.raises(ValueError, match="Pad 'p': an output, or all that a layer reads, is constant"):
        imported(path)


def test_constants_between_too_many_elements_are_refused_with_their_node(tmp_path, rng):
    """No layer puts ones between elements but a matrix, which would be too large."""
    nodes = [node("Tanh", "x", "a"), node("Pad", "a pads one", "y")]
    tensors = {"pads": [0, 0, 1, 0, 0, 1], "one": np.float32(1.0)}
    path = saved(tmp_path / "m.onnx", nodes, {"x": [1, 20, 20]}, {"y": [1, 20, 22]}, tensors)
    with pytest.raises(ValueError, match="Pad 'y': it puts 40 constants between 400 elements"):
        imported(path)


@pytest.mark.parametrize("kept", ["c x", "c ones"])
def test_a_state_that_becomes_constants_is_refused(kept, tmp_path, rng):
    """The cache must be given the frame, not constants beside an old one."""
    nodes = [
        node("Concat", "c x", "f", axis=2),
        node("Conv", "f K", "y"),
        node("Concat", kept, "g", axis=2),
        node("Slice", "g one end axis", "c_out"),
    ]
    tensors = {"K": normal(rng, CHANNELS, CHANNELS, 3, 1), "one": [1], "end": [1 << 40], "axis": [2]}
    tensors["ones"] = np.ones(FRAME, np.float32)
    cache = [1, CHANNELS, 2, POSITIONS]
    path = saved(tmp_path / "m.onnx", nodes, {"x": FRAME, "c": cache}, {"y": FRAME, "c_out": cache}, tensors)
    if kept == "c x":
        assert "Delay" in checked(imported(path), rng)
        return
    with pytest.raises(ValueError, match=r"elements are not the state|input 'c' is no frame|is constant"):
        imported(path)


# ---------------------------------------------------------------------------------------------- parts of convolutions


def last_row(path, rng, *, groups=1, stride=1, row=-1, fill=0.0):
    """A transposed convolution over time and positions behind a cache and zeros, of whose frames one is taken."""
    positions = (POSITIONS - 1) * stride + 1
    nodes = [
        node("Concat", "c x", "f", axis=2),
        node("Pad", "f pads fill", "p"),
        node("ConvTranspose", "p K b", "t", group=groups, strides=[1, stride], pads=[2, 1, 2, 1]),
        node("Slice", "t first end axis", "s"),
        node("Tanh", "s", "y"),
        node("Slice", "f one end axis", "c_out"),
    ]
    tensors = {"K": normal(rng, CHANNELS, 6 // groups, 3, 3), "b": normal(rng, 6), "pads": [0, 0, 2, 0, 0, 0, 0, 0]}
    tensors |= {"first": [row], "one": [1], "end": [1 << 40], "axis": [2], "fill": np.float32(fill)}
    cache = [1, CHANNELS, 2, POSITIONS]
    ends = {"x": FRAME, "c": cache}, {"y": [1, 6, 1, positions], "c_out": cache}
    return saved(path, nodes, *ends, tensors)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_part_of_a_convolution_is_one_of_less_outputs_and_rows(groups, stride, tmp_path, rng):
    """The frames behind and the zeros in front of the cache are not computed."""
    found = imported(last_row(tmp_path / "m.onnx", rng, groups=groups, stride=stride))
    made = checked(found, rng)
    assert made == ["Delay", "Permute", "ConvTranspose1d" if stride > 1 else "Conv1d", "Activation"]
    layer = found.model.layers[2]
    assert (layer.channels, layer.out_channels, layer.groups) == (3 * CHANNELS, 6, groups)


def test_a_part_of_a_convolution_behind_other_constants(tmp_path, rng):
    """Of the frames with zeros in front all are the cache's; ones there are read by the first frame alone."""
    found = imported(last_row(tmp_path / "m.onnx", rng, fill=1.0))
    assert checked(found, rng)[:2] == ["Delay", "Permute"]


@pytest.mark.parametrize("taken", [[0, 2, 4], [5, 4, 1, 0], [0, 1]], ids=str)
def test_some_outputs_of_a_convolution(taken, tmp_path, rng):
    """In any order; the last two take not as many of each of the two groups."""
    nodes = [node("Conv", "x K", "a", group=2, pads=[0, 1, 0, 1]), node("Gather", "a taken", "g", axis=1)]
    nodes += [node("Tanh", "g", "y")]
    tensors = {"K": normal(rng, 6, CHANNELS // 2, 1, 3), "taken": taken}
    path = saved(tmp_path / "m.onnx", nodes, {"x": FRAME}, {"y": [1, len(taken), 1, POSITIONS]}, tensors)
    assert "Conv1d" in checked(imported(path), rng)


@pytest.mark.parametrize(("kernel", "stride", "pads"), [(3, 2, (0, 0)), (3, 1, (1, 1)), (2, 3, (0, 1))], ids=str)
def test_a_max_pool_of_windows_that_overlap_is_one_layer(kernel, stride, pads, tmp_path, rng):
    options = {"kernel_shape": [1, kernel], "strides": [1, stride], "pads": [0, pads[0], 0, pads[1]]}
    nodes = [node("Conv", "x K", "a"), node("MaxPool", "a", "m", **options), node("Tanh", "m", "y")]
    places = (POSITIONS + sum(pads) - kernel) // stride + 1
    ends = {"x": FRAME}, {"y": [1, 6, 1, places]}
    found = imported(saved(tmp_path / "m.onnx", nodes, *ends, {"K": normal(rng, 6, CHANNELS, 1, 1)}))
    assert checked(found, rng) == ["Conv1d", "MaxPool1d", "Activation"]


def test_frames_of_positions_as_the_steps_of_cells(tmp_path, rng):
    """Convolutions and a max pool in each of T frames, which are the rows there, then LSTMs over them, with states."""
    cell = {"W": normal(rng, 1, 20, 12), "R": normal(rng, 1, 20, 5), "B": normal(rng, 1, 40)}
    nodes = [
        node("Unsqueeze", "x one", "u"),
        node("Conv", "u K", "a"),
        node("Relu", "a", "r"),
        node("MaxPool", "r", "m", kernel_shape=[1, 3], strides=[1, 2]),
        node("Reshape", "m rows", "s"),
        node("Unsqueeze", "h zero", "h0"),
        node("Unsqueeze", "c zero", "c0"),
        node("LSTM", "s W R B none h0 c0", "y4 h1 c1", hidden_size=5),
        node("Squeeze", "h1 zero", "h_out"),
        node("Squeeze", "c1 zero", "c_out"),
        node("Squeeze", "y4 one", "y3"),
        node("Relu", "y3", "y"),
    ]
    nodes[7].input[4] = ""
    tensors = cell | {"K": normal(rng, 4, 1, 3, 3), "one": [1], "zero": [0], "rows": [-1, 1, 12]}
    state = {"h": [1, 5], "c": [1, 5]}
    ends = {"x": ["T", 3, 9]} | state, {"y": ["T", 1, 5], "h_out": [1, 5], "c_out": [1, 5]}
    found = imported(saved(tmp_path / "m.onnx", nodes, *ends, tensors))
    assert found.report.ok
    assert kinds(found) == ["Conv1d", "Activation", "MaxPool1d", "LSTM", "Activation"]
    assert (found.states, found.time_axis) == ({"h": "h_out", "c": "c_out"}, 0)
