"""`load` of convolutions: over axes of one position, and causal ones over a time axis."""

import logging
import warnings

import numpy as np
import pytest
from graphs import imported, kinds, node, normal, saved
from onnx import helper

CHANNELS = 6


def same(found, rng, frames=9):
    """Whether the model computes what the file does over some frames."""
    x = rng.standard_normal((frames, found.model.input_size)).astype(np.float32)
    return found.model.check(x, found.file.run(x)).ok


# ---------------------------------------------------------------------------------------------- axes of one position


@pytest.mark.exhaustive(one_in=4)
@pytest.mark.parametrize("groups", [1, CHANNELS])
@pytest.mark.parametrize("last", [True, False])
def test_a_cache_of_frames_with_an_axis_of_one_position(groups, last, tmp_path, rng):
    """A kernel [4, 1] over frames [1, channels, time, 1], or turned."""

    def turned(*shape):
        return shape if last else (*shape[:2], *shape[:1:-1])

    axis = 2 if last else 3
    nodes = [
        node("Concat", "c x", "frames", axis=axis),
        node("Conv", "frames K b", "a", group=groups),
        node("Slice", "frames one end axis", "c_out"),
        node("Flatten", "a", "f"),
        node("Gemm", "f V", "y"),
    ]
    tensors = {"K": normal(rng, *turned(CHANNELS, CHANNELS // groups, 4, 1)), "b": normal(rng, CHANNELS)}
    tensors |= {"V": normal(rng, CHANNELS, 2), "one": [1], "end": [1 << 40], "axis": [axis]}
    cache = turned(1, CHANNELS, 3, 1)
    ends = {"x": [1, CHANNELS, 1, 1], "c": cache}, {"y": [1, 2], "c_out": cache}
    found = imported(saved(tmp_path / "m.onnx", nodes, *ends, tensors))
    assert kinds(found) == ["CausalConv1d", "Linear"]
    assert found.report.ok
    assert same(found, rng)


@pytest.mark.parametrize("pads", [(0, 1, 0, 2), (1, 1, 1, 2), (2, 1, 0, 2)], ids=str)
def test_a_kernel_over_the_padding_of_one_position(pads, tmp_path, rng):
    """Of a kernel [3, 5] over [channels, 1, positions] one row is over the frame, whichever the padding says."""
    rows = 1 + pads[0] + pads[2]
    nodes = [node("Conv", "x K b", "a", pads=pads, strides=[1, 2]), node("Relu", "a", "y")]
    tensors = {"K": normal(rng, 4, 2, rows, 5), "b": normal(rng, 4)}
    found = imported(saved(tmp_path / "m.onnx", nodes, {"x": [1, 2, 1, 9]}, {"y": [1, 4, 1, 4]}, tensors))
    assert kinds(found) == ["Conv1d", "Activation"]
    assert found.report.ok
    assert same(found, rng)


@pytest.mark.parametrize(
    ("pads", "reason"),
    [
        ((0, 1, 0, 1), "'a': its kernel reaches over 3 positions, its input has 1"),
        ((4, 1, 0, 1), "'a': its kernel is over padding alone"),
    ],
    ids=str,
)
def test_a_kernel_that_is_over_no_position_is_refused(pads, reason, tmp_path, rng):
    nodes = [node("Conv", "x K", "a", pads=pads), node("Relu", "a", "y")]
    ends = {"x": [1, 2, 1, 9]}, {"y": [1, 4, 1, 9]}
    if pads[0]:
        nodes[0].attribute.append(helper.make_attribute("strides", [9, 1]))
    with pytest.raises(ValueError, match=reason):
        imported(saved(tmp_path / "m.onnx", nodes, *ends, {"K": normal(rng, 4, 2, 3, 3)}))


# ---------------------------------------------------------------------------------------------- over a time axis


def over_time(path, rng, nodes, tensors, outputs=None, frames="T"):
    """A file over x [1, channels, frames]."""
    tensors = {"K": normal(rng, CHANNELS, CHANNELS, 3), "b": normal(rng, CHANNELS)} | tensors
    read = {name for each in nodes for name in each.input}
    tensors = {name: tensor for name, tensor in tensors.items() if name in read}
    outputs = outputs or {"y": [1, CHANNELS, frames]}
    return saved(path, nodes, {"x": [1, CHANNELS, frames]}, outputs, tensors)


@pytest.mark.parametrize("dilation", [1, 2, 100])
@pytest.mark.parametrize("cut", [False, True])
def test_a_convolution_padded_with_zeros_in_front_is_causal(dilation, cut, tmp_path, rng):
    """By pads, of which those behind are cut off again, or by Pad."""
    reach = 2 * dilation
    tensors = {"pads": np.array([0, 0, reach, 0, 0, 0]), "first": [0], "end": [-reach], "axis": [2]}
    if cut:
        convolved = node("Conv", "x K b", "c", pads=[reach, reach], dilations=[dilation])
        nodes = [convolved, node("Slice", "c first end axis", "a"), node("Relu", "a", "y")]
    else:
        convolved = node("Conv", "p K b", "a", dilations=[dilation])
        nodes = [node("Pad", "x pads", "p"), convolved, node("Relu", "a", "y")]
    found = imported(over_time(tmp_path / "m.onnx", rng, nodes, tensors))
    assert kinds(found) == ["CausalConv1d", "Activation"]
    assert (found.model.layers[0].taps, found.model.layers[0].dilation) == (3, dilation)
    assert found.time_axis == 2
    assert same(found, rng, 2 * reach + 5)


def two(first, second, between=()):
    """Two convolutions with some nodes between, which read c and make m."""
    padded = [node("Pad", "x pads", "p"), node("Conv", "p K b", "c", **first)]
    return [*padded, *between, node("Pad", "m pads", "q"), node("Conv", "q L", "y", **second)]


BETWEEN = {
    "tanh": [node("Tanh", "c", "m")],
    "nothing": [node("Identity", "c", "m")],
    "a residual": [node("Relu", "c", "r"), node("Add", "r x", "m")],
    "a layer norm": [
        node("Transpose", "c", "ct", perm=[0, 2, 1]),
        node("LayerNormalization", "ct b b", "n"),
        node("Transpose", "n", "m", perm=[0, 2, 1]),
    ],
    "an LSTM": [
        node("Transpose", "c", "ct", perm=[2, 0, 1]),
        node("LSTM", "ct W R", "Y", hidden_size=CHANNELS),
        node("Squeeze", "Y axis", "n"),
        node("Transpose", "n", "m", perm=[1, 2, 0]),
    ],
}


@pytest.mark.parametrize("between", BETWEEN)
def test_causal_convolutions_in_a_row(between, tmp_path, rng):
    """One dense, the next depthwise."""
    tensors = {"pads": np.array([0, 0, 2, 0, 0, 0]), "L": normal(rng, CHANNELS, 1, 3), "axis": [1]}
    tensors |= {name: normal(rng, 1, 4 * CHANNELS, CHANNELS) for name in "WR"}
    nodes = two({}, {"group": CHANNELS}, BETWEEN[between])
    found = imported(over_time(tmp_path / "m.onnx", rng, nodes, tensors))
    assert kinds(found).count("CausalConv1d") == 2
    assert found.model.layers[-1].depthwise
    assert same(found, rng, 40)


def test_the_last_frame_of_a_causal_network_is_its_output(tmp_path, rng):
    tensors = {"pads": np.array([0, 0, 2, 0, 0, 0]), "L": normal(rng, CHANNELS, CHANNELS, 3), "last": np.array(-1)}
    nodes = [*two({}, {}, BETWEEN["tanh"])[:-1], node("Conv", "q L", "z"), node("Gather", "z last", "y", axis=2)]
    found = imported(over_time(tmp_path / "m.onnx", rng, nodes, tensors, {"y": [1, CHANNELS]}))
    assert kinds(found) == ["CausalConv1d", "Activation", "CausalConv1d"]
    x = rng.standard_normal((11, CHANNELS)).astype(np.float32)
    np.testing.assert_allclose(found.model.run(x)[-1:], found.file.run(x), rtol=1e-4, atol=1e-5)


PADS = np.array([0, 0, 2, 0, 0, 0])
NEAR = {
    "padded on both sides": ([node("Conv", "x K b", "a", pads=[1, 1]), node("Relu", "a", "y")], {}),
    "ahead of time": ([node("Conv", "x K b", "a", pads=[0, 2]), node("Relu", "a", "y")], {}),
    "padded with ones": ([node("Pad", "x pads one", "p"), node("Conv", "p K b", "y")], {"one": np.float32(1)}),
    "padded with the first frame": ([node("Pad", "x pads", "p", mode="edge"), node("Conv", "p K b", "y")], {}),
    "a bias of each place of the padded": (
        [node("Pad", "x pads", "p"), node("Shape", "x", "s"), node("Slice", "s two three", "n"),
         node("Add", "n two", "m"), node("Slice", "table zero m", "t"), node("Add", "p t", "q"),
         node("Conv", "q K", "y")],
        {"two": [2], "three": [3], "zero": [0], "table": (200,)},
    ),
    "the mean over time behind it": (
        [node("Pad", "x pads", "p"), node("Conv", "p K b", "a"), node("ReduceMean", "a", "m", axes=[2]),
         node("Sub", "a m", "y")], {},
    ),
    "the sum over time": (
        [node("Pad", "x pads", "p"), node("Conv", "p K b", "a"), node("ReduceMean", "a", "y", axes=[2])], {},
    ),
    "another convolution that is not causal": (
        [node("Pad", "x pads", "p"), node("Conv", "p K b", "a"), node("Conv", "a K", "y", pads=[1, 1])], {},
    ),
    "a number for each place": (
        [node("Pad", "x pads", "p"), node("Conv", "p K b", "a"), node("Shape", "x", "s"),
         node("Slice", "s two three", "n"),
         node("Slice", "table zero n", "t"), node("Mul", "a t", "y")],
        {"two": [2], "three": [3], "zero": [0], "table": (200,)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NEAR)
def test_what_is_not_causal_is_refused(case, tmp_path, rng):
    nodes, more = NEAR[case]
    tensors = {name: normal(rng, *value) if isinstance(value, tuple) else value for name, value in more.items()}
    outputs = {"y": [1, CHANNELS, 1 if "sum" in case else "T"]}
    path = over_time(tmp_path / "m.onnx", rng, nodes, {"pads": PADS} | tensors, outputs)
    with pytest.raises(ValueError, match=r"depends on several frames|number of the frames"):
        imported(path)


@pytest.mark.parametrize("function", ["Add", "Sigmoid"])
def test_what_zeros_in_front_become_is_read_before_the_first_frame(function, tmp_path, rng):
    """A bias, and the function of 0, of which a stream's own zeros know nothing."""
    between = node("Add", "p c", "q") if function == "Add" else node(function, "p", "q")
    nodes = [node("Pad", "x pads", "p"), between, node("Conv", "q K", "y")]
    tensors = {"pads": PADS, "c": normal(rng, CHANNELS, 1)}
    found = imported(over_time(tmp_path / "m.onnx", rng, nodes, tensors))
    assert kinds(found)[0] == "Delay"
    assert same(found, rng, 40)


@pytest.mark.parametrize("dynamo", [False, True])
def test_a_temporal_convolutional_network_of_torch(dynamo, tmp_path, rng):
    """Blocks of two dilated convolutions with a residual, as both exporters write them."""
    torch = pytest.importorskip("torch", reason="!!! SKIPPED: files of PyTorch, because torch is not installed")
    pytest.importorskip("onnxscript", reason="!!! SKIPPED: files of PyTorch, because onnxscript is missing")

    class Block(torch.nn.Module):
        def __init__(self, inputs, outputs, dilation):
            super().__init__()
            self.padding = 2 * dilation
            self.first = torch.nn.Conv1d(inputs, outputs, 3, dilation=dilation)
            self.second = torch.nn.Conv1d(outputs, outputs, 3, dilation=dilation, padding=self.padding)
            self.around = torch.nn.Conv1d(inputs, outputs, 1)

        def forward(self, x):
            y = torch.relu(self.first(torch.nn.functional.pad(x, (self.padding, 0))))
            return torch.relu(torch.relu(self.second(y)[:, :, : -self.padding]) + self.around(x))

    torch.manual_seed(0)
    network = torch.nn.Sequential(*(Block(n, 6, 2**i) for i, n in enumerate((5, 6, 6)))).eval()
    given = {"input_names": ["x"], "output_names": ["y"], "dynamo": dynamo}
    given |= (
        {"dynamic_shapes": ({2: torch.export.Dim("T", min=2, max=5000)},), "verbose": False}
        if dynamo
        else {"dynamic_axes": {"x": {2: "T"}, "y": {2: "T"}}}
    )
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(network, (torch.zeros(1, 5, 9),), tmp_path / "m.onnx", **given)
    finally:
        logging.disable(logging.NOTSET)
    found = imported(tmp_path / "m.onnx")
    assert kinds(found).count("CausalConv1d") == 6
    x = rng.standard_normal((50, 5)).astype(np.float32)
    with torch.no_grad():
        theirs = network(torch.from_numpy(x.T[None]))[0].T.numpy()
    assert found.model.check(x, theirs).ok


@pytest.mark.parametrize("order", ["p f", "f p"])
def test_what_is_added_to_its_own_convolution_is_not_computed_twice(order, tmp_path, rng):
    """p + conv(p), p = U relu(V x): the matrix stays in front of a convolution with a kernel for each channel."""
    nodes = [node("MatMul", "x V", "v"), node("Relu", "v", "r"), node("MatMul", "r U", "u")]
    nodes += [node("Transpose", "u", "p", perm=[0, 2, 1]), node("Conv", "p K", "f", pads=[4, 0], group=CHANNELS)]
    nodes += [node("Add", order, "s"), node("Transpose", "s", "t", perm=[0, 2, 1]), node("Tanh", "t", "y")]
    tensors = {"V": normal(rng, 3, 20), "U": normal(rng, 20, CHANNELS), "K": normal(rng, CHANNELS, 1, 5)}
    path = saved(tmp_path / "m.onnx", nodes, {"x": [1, "T", 3]}, {"y": [1, "T", CHANNELS]}, tensors)
    found = imported(path)
    assert kinds(found) == ["Linear", "Activation", "Linear", "CausalConv1d", "Activation"]
    assert found.model.layers[3].weights["weight"].shape == (CHANNELS, 1, 5)
    assert same(found, rng, 40)
