"""`load` of files whose call takes a chunk of frames, with what was before it in a cache: a chunk is one flat frame."""

import logging
import warnings

import numpy as np
import pytest
from graphs import imported, kinds, node, normal, saved

import cnorm
import onnx_export
from onnx_export.errors import NotImported

CALLS = 200  # compared


def chunked(rng, channels=3, chunk=16, kept=2, kernel=4, stride=2, groups=1, outputs=4):
    """A strided convolution of the frames that are kept and a chunk, and the last frames to keep."""
    nodes = [
        node("Concat", "k x", "z", axis=2),
        node("Conv", "z W B", "c", strides=[stride], group=groups),
        node("Relu", "c", "y"),
        node("Slice", "z from to axis", "k_out"),
    ]
    weights = {"W": normal(rng, outputs, channels // groups, kernel), "B": normal(rng, outputs)}
    weights |= {"from": np.array([-kept]), "to": np.array([2**40]), "axis": np.array([2])}
    frames = (kept + chunk - kernel) // stride + 1
    inputs = {"x": [1, channels, chunk], "k": [1, channels, kept]}
    return nodes, inputs, {"y": [1, outputs, frames], "k_out": [1, channels, kept]}, weights


def same(found, rng):
    x = rng.standard_normal((CALLS, found.model.input_size)) * (1 + np.arange(CALLS)[:, None] % 7) + 0.3
    x = x.astype(np.float32)
    return found.model.check(x, found.file.run(x)).ok


CHUNKS = {
    "a stride of 2": {},
    "no stride": {"stride": 1, "kept": 3},
    "one channel": {"channels": 1},
    "depthwise": {"channels": 4, "groups": 4},
    "two groups": {"channels": 4, "groups": 2},
    "a chunk that is kept twice": {"chunk": 2, "kept": 4, "kernel": 5, "stride": 1},
    "a hop of 8, a window of 20": {"channels": 1, "chunk": 8, "kept": 12, "kernel": 20, "stride": 8},
    "a window of 20 by parts": {"channels": 1, "chunk": 8, "kept": 12, "kernel": 16, "stride": 4},
    "a part of a chunk that is kept twice": {"chunk": 2, "kept": 3, "stride": 1},
    "depthwise, a part kept twice": {"channels": 4, "groups": 4, "chunk": 2, "kept": 3, "stride": 1},
    "80 bands": {"channels": 80, "chunk": 8, "outputs": 32},
}


@pytest.mark.exhaustive(one_in=6)
@pytest.mark.parametrize("case", CHUNKS)
def test_a_chunk_is_a_frame(case, tmp_path, rng):
    nodes, inputs, outputs, weights = chunked(rng, **CHUNKS[case])
    found = imported(saved(tmp_path / "m.onnx", nodes, inputs, outputs, weights))
    assert found.states == {"k": "k_out"}
    assert found.model.input_size == np.prod(inputs["x"])
    assert found.model.output_size == np.prod(outputs["y"])
    assert "Delay" in kinds(found)
    assert same(found, rng)


def test_bands_are_moved_without_a_product(tmp_path, rng):
    """80 bands of 10 frames would be a matrix of 800 x 800."""
    found = imported(saved(tmp_path / "m.onnx", *chunked(rng, channels=80, chunk=8, outputs=32)))
    assert "Linear" not in kinds(found)


def test_a_stream_of_chunks_is_saved_in_the_middle(tmp_path, rng):
    model = imported(saved(tmp_path / "m.onnx", *chunked(rng, channels=1, chunk=8, kept=12, kernel=16, stride=4))).model
    x = rng.standard_normal((20, 8)).astype(np.float32)
    whole, first, second = model.stream(), model.stream(), model.stream()
    expected = [whole.step(frame).copy() for frame in x]
    for frame in x[:9]:
        first.step(frame)
    second.set_state(first.state())
    assert np.array_equal([second.step(frame).copy() for frame in x[9:]], expected[9:])


def test_two_strided_convolutions_and_a_cell(tmp_path, rng):
    nodes, inputs, outputs, weights = chunked(rng)
    nodes += [
        node("Concat", "j y", "w", axis=2),
        node("Conv", "w V", "d", strides=[2]),
        node("Slice", "w last to axis", "j_out"),
        node("Reshape", "d flat", "f"),
        node("GRU", "f Wg Rg Bg  h".replace("  ", " none "), "g h_out", hidden_size=5),
    ]
    nodes[-1].input[4] = ""
    weights |= {"V": normal(rng, 5, 4, 3), "last": np.array([-1]), "flat": np.array([1, 1, 20])}
    weights |= {"Wg": normal(rng, 1, 15, 20), "Rg": normal(rng, 1, 15, 5), "Bg": normal(rng, 1, 30)}
    inputs |= {"j": [1, 4, 1], "h": [1, 1, 5]}
    outputs = {"g": [1, 1, 1, 5], "k_out": outputs["k_out"], "j_out": [1, 4, 1], "h_out": [1, 1, 5]}
    found = imported(saved(tmp_path / "m.onnx", nodes, inputs, outputs, weights))
    assert kinds(found).count("Delay") == 2
    assert kinds(found)[-1] == "GRU"
    assert same(found, rng)


def test_a_cell_over_the_frames_of_a_chunk_is_refused(tmp_path, rng):
    """Its state goes on from chunk to chunk, and no layer does several steps of a frame but from zeros."""
    nodes, inputs, outputs, weights = chunked(rng)
    nodes += [
        node("Transpose", "y", "t", perm=[2, 0, 1]),
        node("GRU", "t Wg Rg Bg  h".replace("  ", " none "), "g h_out", hidden_size=5),
    ]
    nodes[-1].input[4] = ""
    weights |= {"Wg": normal(rng, 1, 15, 4), "Rg": normal(rng, 1, 15, 5), "Bg": normal(rng, 1, 30)}
    outputs = {"g": [8, 1, 1, 5], "k_out": outputs["k_out"], "h_out": [1, 1, 5]}
    with pytest.raises(NotImported, match="it does several steps of a frame, from a state that is no zeros"):
        imported(saved(tmp_path / "m.onnx", nodes, inputs | {"h": [1, 1, 5]}, outputs, weights))


LIKE = {
    "a product is kept": [node("Slice", "z from to axis", "s"), node("Mul", "s k", "k_out")],
    "a sum is kept": [node("Slice", "z from to axis", "s"), node("Add", "s k", "k_out")],
    "the first chunk is kept": [node("Identity", "k", "k_out")],
    "what is kept is turned by each call": [
        node("Slice", "k one to axis", "a"), node("Slice", "k zero one axis", "b"),
        node("Concat", "a b", "k_out", axis=2)
    ],
}  # fmt: skip


@pytest.mark.parametrize("case", LIKE)
def test_what_is_no_cache_of_a_chunk_is_refused(case, tmp_path, rng):
    nodes, inputs, outputs, weights = chunked(rng)
    weights |= {"zero": np.array([0]), "one": np.array([1])}
    with pytest.raises(NotImported):
        imported(saved(tmp_path / "m.onnx", [*nodes[:-1], *LIKE[case]], inputs, outputs, weights))


@pytest.mark.parametrize("kept", [0, 2])
def test_a_stride_over_an_open_axis_says_what_to_do(kept, tmp_path, rng):
    """As a state it has what is before a call, the dimension is the chunk's."""
    nodes, inputs, outputs, weights = chunked(rng)
    inputs["x"][2], outputs["y"][2] = "T", "frames"
    if kept:
        path = saved(tmp_path / "m.onnx", nodes, inputs, outputs, weights)
        wanted = r"output 'y' has 1/2 frames for each of 'T': give it by dims={'T': 2}"
    else:
        nodes = [node("Conv", "x W B", "y", strides=[2], pads=[2, 0])]
        weights = {name: weights[name] for name in "WB"}
        path = saved(tmp_path / "m.onnx", nodes, {"x": inputs["x"]}, {"y": outputs["y"]}, weights)
        wanted = (
            r"1/2 frames for each of 'T': export it with the 2 frames before a call as a state, input and output; give"
        )
    with pytest.raises(NotImported, match=wanted):
        imported(path)
    found = imported(path, dims={"T": 2})
    assert found.model.input_size == 2 * 3
    assert same(found, rng)


RATES = {
    "a mean of two": ([node("AveragePool", "x", "y", kernel_shape=[2], strides=[2])], {}, "1/2", 2),
    "three as one": ([node("Reshape", "x s", "y")], {"s": np.array([1, 9, -1])}, "1/3", 3),
    "two for one": ([node("ConvTranspose", "x U", "y", strides=[2])], {"U": (3, 4, 2)}, "2", 1),
}  # fmt: skip


@pytest.mark.parametrize("case", RATES)
def test_another_rate_says_what_to_do(case, tmp_path, rng):
    nodes, weights, rate, chunk = RATES[case]
    weights = {name: normal(rng, *each) if isinstance(each, tuple) else each for name, each in weights.items()}
    if case == "three as one":
        nodes = [node("Transpose", "x", "t", perm=[0, 2, 1]), node("Reshape", "t s", "r"), node("Tanh", "r", "y")]
        weights = {"s": np.array([1, -1, 9])}
    path = saved(tmp_path / "m.onnx", nodes, {"x": [1, 3, "T"]}, {"y": [1, None, None]}, weights)
    with pytest.raises(NotImported, match=rf"{rate} frames for each of 'T': give it by dims={{'T': {chunk}}}"):
        imported(path)
    assert imported(path, dims={"T": chunk}).model.input_size == 3 * chunk


@pytest.mark.parametrize("dynamo", [False, True])
def test_a_chunk_of_pytorch(dynamo, tmp_path, rng):
    torch = pytest.importorskip("torch", reason="!!! SKIPPED: files of PyTorch, because torch is not installed")
    pytest.importorskip("onnxscript", reason="!!! SKIPPED: files of PyTorch, because onnxscript is missing")

    class Front(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.c, self.l = torch.nn.Conv1d(1, 6, 20, stride=4), torch.nn.Linear(6, 3)

        def forward(self, x, k):
            z = torch.cat([k, x], 2)
            return self.l(self.c(z).relu().mean(2)), z[:, :, -16:]

    given = {"input_names": ["x", "k"], "output_names": ["y", "k_out"], "dynamo": dynamo}
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                Front().eval(), (torch.zeros(1, 1, 8), torch.zeros(1, 1, 16)), tmp_path / "m.onnx", **given
            )
    finally:
        logging.disable(logging.NOTSET)
    found = imported(tmp_path / "m.onnx")
    assert found.states == {"k": "k_out"}
    assert same(found, rng)
    assert isinstance(onnx_export.load(tmp_path / "m.onnx"), cnorm.Model)
