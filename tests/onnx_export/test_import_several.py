"""`load` of files of which several inputs run over an open number of frames, or of windows of frames."""

import numpy as np
import onnxruntime
import pytest
from graphs import imported, node, normal, saved

from onnx_export.errors import NotImported

FRAMES, UNITS = 2000, 6  # compared; of the GRU
BINS, CHANNELS = 5, 3
A, B, STATE = [1, "T", 4], [1, CHANNELS, "T", BINS], [1, 1, UNITS]
FLAT = (node("Transpose", "b", "bt", perm=[0, 2, 1, 3]), node("Reshape", "bt flat", "bf"))
BOTH = (*FLAT, node("Concat", "a bf", "z", axis=2))


def gru(state="h"):
    """A GRU over z [1, T, n]."""
    cell = node("GRU", f"zt W R B none {state}", "Y h1", hidden_size=UNITS, linear_before_reset=1)
    cell.input[4] = ""
    turn, back = node("Transpose", "z", "zt", perm=[1, 0, 2]), node("Transpose", "ys", "y", perm=[1, 0, 2])
    return [turn, cell, node("Squeeze", "Y one", "ys"), back]


def with_gru(path, rng, nodes, *, inputs=None, outputs=None, size=4 + CHANNELS * BINS, **more):
    """A file of which `nodes` make z [1, T, size] of a and b, the GRU's input."""
    stored = {"W": normal(rng, 1, 3 * UNITS, size), "R": normal(rng, 1, 3 * UNITS, UNITS)}
    stored |= {"B": normal(rng, 1, 6 * UNITS), "one": np.array([1]), "flat": np.array([0, 0, -1])} | more
    inputs = {"a": A, "b": B} | (inputs or {})
    outputs = {"y": [1, "T", UNITS]} | (outputs or {})
    return saved(path, [*nodes, *gru()], inputs | {"h": STATE}, outputs | {"h1": STATE}, stored)


def frames(found, rng):
    """Frames of which no two are alike, in scale and in mean."""
    size = found.model.input_size
    x = rng.standard_normal((FRAMES, size)) * (1 + np.arange(FRAMES)[:, None] % 7) + 0.3 * np.arange(size)
    return x.astype(np.float32)


@pytest.mark.parametrize("name", ["T", "U"])
def test_inputs_that_all_run_over_the_frames_are_x(name, tmp_path, rng):
    """Their numbers of frames may have names of their own, as an exporter is told them."""
    found = imported(with_gru(tmp_path / "m.onnx", rng, BOTH, inputs={"b": [1, CHANNELS, name, BINS]}))
    assert (found.frames, found.time_axis, found.states) == (("a", "b"), 1, {"h": "h1"})
    x = frames(found, rng)
    assert found.model.check(x, found.file.run(x)).ok


REFUSED = {
    "the frame behind": ([node("Pad", "b ahead", "bp"), node("Slice", "bp start end axis", "b2")], {}),
    "a flip": ([node("Slice", "b last first axis back", "b2")], {}),
    "the mean over the frames": ([node("ReduceMean", "b", "m", axes=[2]), node("Sub", "b m", "b2")], {}),
    "another number of frames": (
        [node("ReduceMean", "b", "m", axes=[2]), node("Sub", "b m", "b2")],
        {"b": [1, CHANNELS, "U", BINS]},
    ),
    "one frame for all of a": ([node("Expand", "b shape", "b2")], {"b": [1, CHANNELS, 1, BINS]}),
}  # fmt: skip
WHY = {"one frame for all of a": "so all of x must: 'b' has one element"}
PLACES = {"ahead": [0] * 6 + [1, 0], "start": [1], "end": [1 << 40], "axis": [2], "last": [-1], "first": [-(1 << 40)],
          "back": [-1]}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_inputs_that_are_not_one_frame_are_refused(case, tmp_path, rng):
    made, inputs = REFUSED[case]
    more = {name: np.array(value) for name, value in PLACES.items()} | {"channels": np.array([1, CHANNELS])}
    size = [
        node("Shape", "a", "s"),
        node("Slice", "s one two", "n"),
        node("Concat", "channels n bins", "shape", axis=0),
    ]
    more |= {"two": np.array([2]), "bins": np.array([BINS])}
    nodes = [*(size if inputs else ()), *made, node("Transpose", "b2", "bt", perm=[0, 2, 1, 3]), *BOTH[1:]]
    path = with_gru(tmp_path / "m.onnx", rng, nodes, inputs=inputs, **more)
    with pytest.raises(NotImported, match=WHY.get(case, "several frames|in each of two calls")):
        imported(path)


def test_outputs_of_the_last_frame_beside_one_of_each_are_refused(tmp_path, rng):
    nodes = [*BOTH, node("Slice", "z last end one", "e")]
    path = with_gru(tmp_path / "m.onnx", rng, nodes, outputs={"e": [1, 1, 19]}, last=np.array([-1]), end=np.array([99]))
    with pytest.raises(NotImported, match=r"'e'.* choose those of each frame, or of the last, by outputs="):
        imported(path)
    assert imported(path, outputs=["y"]).outputs == ("y",)


# ---------------------------------------------------------------------------------------------- windows

CONVOLUTION = (
    node("Pad", "b front", "bp"),
    node("Relu", "c", "r"),
    node("Transpose", "r", "rt", perm=[0, 2, 1, 3]),
    node("Reshape", "rt flat", "rf"),
    node("Concat", "rf a", "z", axis=2),
)
TAIL = (node("Slice", "r from to two", "y"), node("Slice", "z from to one", "e"))


def window(path, rng, start=-1, stop=1 << 40, front=2, groups=1):
    """A convolution over the frames of b, of which the last, or another, is given back."""
    pad, *others = CONVOLUTION
    conv = node("Conv", "bp K B2", "c", pads=[0, 1, 0, 1], group=groups)
    stored = {"K": normal(rng, 4 * groups, CHANNELS // groups, 3, 3), "B2": normal(rng, 4 * groups)}
    stored |= {"front": np.array([0, 0, front, 0] + [0] * 4), "flat": np.array([0, 0, -1]), "one": np.array([1])}
    stored |= {"two": np.array([2]), "from": np.array([start]), "to": np.array([stop])}
    outputs = {"y": [1, 4 * groups, None, BINS], "e": [1, None, 4 * groups * BINS + 4]}
    return saved(path, [pad, conv, *others, *TAIL], {"a": A, "b": B}, outputs, stored)


@pytest.mark.parametrize("groups", [1, CHANNELS])
def test_the_last_frame_of_a_window_is_a_stream(groups, tmp_path, rng):
    """A caller keeps the frames that the file reads, zeros at first, and takes the last of each window."""
    path = window(tmp_path / "m.onnx", rng, groups=groups)
    found = imported(path)
    assert (found.frames, found.outputs, found.states) == (("a", "b"), ("y", "e"), {})
    assert found.notes == (
        "a call of the file gives its last frame; a step gives what a call with all frames so far would",
    )
    x, keep = frames(found, rng)[:60], 5
    stream, session = found.model.stream(), onnxruntime.InferenceSession(path)
    padded = np.concatenate([np.zeros((keep, x.shape[1]), np.float32), x])
    theirs = []
    for at in range(len(x)):
        a, b = np.split(padded[at : at + keep + 1], [4], axis=1)
        feeds = {"a": a[None], "b": b.reshape(-1, CHANNELS, BINS).transpose(1, 0, 2)[None]}
        theirs.append(np.concatenate([each.ravel() for each in session.run(["y", "e"], feeds)]))
    assert found.model.check(x, np.array(theirs)).ok
    assert np.array_equal(np.array([stream.step(frame) for frame in x]), found.model.run(x))


@pytest.mark.parametrize("places", [{"start": 0, "stop": 1}, {"start": -2, "stop": -1}, {"front": 1}, {"front": 3}])
def test_another_frame_of_a_window_is_refused(places, tmp_path, rng):
    with pytest.raises(NotImported, match=r"several frames|another frame|can't be followed|number of the frames"):
        imported(window(tmp_path / "m.onnx", rng, **places))


FLIP = (node("Slice", "b minus least one minus", "flipped"), node("Concat", "a flipped", "v", axis=2))
MEAN = (node("Concat", "a b", "v0", axis=2), node("ReduceMean", "v0", "m", axes=[1]), node("Sub", "v0 m", "v"))
ROLL = (
    node("Shape", "a", "s"), node("Slice", "s one two", "t"), node("Sub", "t one", "k"),
    node("Slice", "b k most one", "last"), node("Slice", "b zero k one", "rest"),
    node("Concat", "last rest", "rolled", axis=1), node("Add", "a rolled", "v"),
)  # fmt: skip
NAMES = [(["N", "T", 3], ["M", "S", 3]), ([None, None, 3], [None, None, 3]), (["N", "T", 3], [1, "S", 3])]


@pytest.mark.parametrize("nodes", [FLIP, MEAN, ROLL], ids=["flip", "mean", "roll"])
@pytest.mark.parametrize(("a", "b"), [*NAMES, ([1, "T", 3], [1, "S", 3])])
@pytest.mark.exhaustive(one_in=3)
def test_frames_are_mixed_whatever_their_numbers_are_called(a, b, nodes, tmp_path, rng):
    """Rows have a name of their own beside them, and an input may be broadcast along another's alone."""
    tensors = {name: np.array([value]) for name, value in {"one": 1, "two": 2, "zero": 0, "minus": -1}.items()}
    tensors |= {"least": np.array([-(2**62)]), "most": np.array([2**62])}
    tensors["W"] = normal(rng, 3 if nodes is ROLL else 6, UNITS)
    path = tmp_path / "m.onnx"
    saved(path, [*nodes, node("MatMul", "v W", "y")], {"a": a, "b": b}, {"y": ["N", "T", UNITS]}, tensors)
    with pytest.raises(NotImported):
        imported(path)


@pytest.mark.parametrize(("a", "b"), NAMES)
def test_frames_beside_rows_of_other_names_are_read(a, b, tmp_path, rng):
    nodes = [node("Concat", "a b", "v", axis=2), node("MatMul", "v W", "y")]
    tensors = {"W": normal(rng, 6, UNITS)}
    path = saved(tmp_path / "m.onnx", nodes, {"a": a, "b": b}, {"y": ["N", "T", UNITS]}, tensors)
    found = imported(path)
    assert found.frames == ("a", "b")


@pytest.mark.exhaustive
def test_frames_of_many_inputs_without_names_are_mixed(tmp_path, rng):
    names = "abcdefgh"
    nodes = [node("Concat", " ".join(names), "v0", axis=2), *MEAN[1:], node("MatMul", "v W", "y")]
    inputs = {name: [None, None, 2] for name in names}
    path = saved(
        tmp_path / "m.onnx", nodes, inputs, {"y": [None, None, UNITS]}, {"W": normal(rng, 2 * len(names), UNITS)}
    )
    with pytest.raises(NotImported, match="ReduceMean 'm': its result depends on several frames"):
        imported(path)


@pytest.mark.exhaustive(one_in=3)
@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_frames_that_run_together_alone_are_refused(count, state, tmp_path, rng):
    """The length that is stored for the GRU can't be followed with more frames, of which each input has a name."""
    names = "abcd"[:count]
    nodes = [node("Concat", " ".join(names), "z", axis=2), *gru("h" if state else "")]
    nodes[2].input[4] = "length"
    stored = {"W": normal(rng, 1, 3 * UNITS, 2 * count), "R": normal(rng, 1, 3 * UNITS, UNITS)}
    stored |= {"B": normal(rng, 1, 6 * UNITS), "one": np.array([1]), "length": np.array([1], np.int32)}
    inputs, outputs = {name: [1, f"T_{name}", 2] for name in names}, {"y": [1, None, UNITS]}
    ends = (inputs | {"h": STATE}, outputs | {"h1": STATE}) if state else (inputs, outputs)
    path = saved(tmp_path / "m.onnx", nodes, *ends, stored)
    with pytest.raises(NotImported, match="2 elements of a dimension, where it can't be read"):
        imported(path)


def test_frames_along_any_axis_of_three_inputs_are_compared(tmp_path, rng):
    """b is turned by the number of frames of a along the last axis; each alone is broadcast."""
    nodes = [
        node("Shape", "a", "s"), node("Slice", "s two three", "t"), node("Sub", "t one", "k"),
        node("Slice", "b k most two", "last"), node("Slice", "b zero k two", "rest"),
        node("Concat", "last rest", "turned", axis=2), node("Add", "a turned", "v"), node("Add", "v c", "w"),
        node("MatMul", "w W", "y"),
    ]  # fmt: skip
    tensors = {name: np.array([value]) for name, value in {"one": 1, "two": 2, "three": 3, "zero": 0}.items()}
    tensors |= {"most": np.array([2**62]), "W": normal(rng, 3, UNITS)}
    inputs = {name: [None, None, None, 3] for name in "abc"}
    path = saved(tmp_path / "m.onnx", nodes, inputs, {"y": [None, None, None, UNITS]}, tensors)
    with pytest.raises(NotImported, match=r"several frames|another frame"):
        imported(path)


TURNED = (node("Shape", "a", "s"), node("Slice", "s one two", "t"),
          node("Shape", "b", "s2"), node("Slice", "s2 one two", "t2"))  # fmt: skip
AGAIN = (node("Slice", "b k most one", "last"), node("Slice", "b zero k one", "rest"),
         node("Concat", "last rest", "turned", axis=1))  # fmt: skip
LATE = {
    "by frames of both, divided": [
        *TURNED, node("Sub", "t one", "ta"), node("Sub", "t2 one", "tb"), node("Mul", "ta tb", "p"),
        node("Div", "p hundred", "q"), node("Div", "q hundred", "k"), *AGAIN, node("Add", "a turned", "v"),
    ],
    "below a maximum": [*TURNED[:2], node("Sub", "t one", "k"), *AGAIN, node("Max", "turned fifty", "m"),
                        node("Add", "a m", "v")],
    "alone, beside pairs": [*TURNED[:2], node("Sub", "t one", "k"), *AGAIN, node("Identity", "turned", "v"),
                            node("MatMul", "a A", "a1"), node("MatMul", "b A", "b1"),
                            node("Transpose", "b1", "bt", perm=[0, 2, 1]), node("Add", "a1 bt", "z")],
    "beside pairs": [*TURNED[:2], node("Sub", "t one", "k"), *AGAIN, node("Add", "a turned", "v"),
                     node("MatMul", "a A", "a1"), node("MatMul", "b A", "b1"),
                     node("Transpose", "b1", "bt", perm=[0, 2, 1]), node("Add", "a1 bt", "z")],
}  # fmt: skip


@pytest.mark.parametrize("more", [[], ["c"]])
@pytest.mark.parametrize("case", LATE)
def test_frames_of_inputs_that_are_broadcast_are_followed_together(case, more, tmp_path, rng):
    """Each alone is right, and together wrong where no run shows it; c [1, 1, 3] has one frame for all of them."""
    nodes = [*LATE[case], *([node("Add", "v c", "w")] if more else [node("Identity", "v", "w")])]
    nodes.append(node("MatMul", "w W", "y"))
    tensors = {"one": [1], "two": [2], "zero": [0], "most": [2**62], "hundred": [100]}
    tensors = {name: np.array(value) for name, value in tensors.items()} | {
        "fifty": np.float32(50),
        "A": normal(rng, 3, 1),
    }
    read = {name for each in nodes for name in each.input}
    stored = {name: value for name, value in tensors.items() if name in read} | {"W": normal(rng, 3, UNITS)}
    inputs = {"a": [1, "T", 3], "b": [1, "S", 3]} | {name: [1, 1, 3] for name in more}
    outputs = {"y": [1, "T", UNITS]} | ({"z": [1, "T", "S"]} if "beside pairs" in case else {})
    with pytest.raises(NotImported, match=r"several frames|another frame|from the number of"):
        imported(saved(tmp_path / "m.onnx", nodes, inputs, outputs, stored))


@pytest.mark.parametrize("turned", [True, False])
def test_rows_and_frames_along_one_axis_of_an_output_are_in_either_order(turned, tmp_path, rng):
    nodes = [node("Transpose", "x", "t", perm=[1, 0, 2])] if turned else [node("Identity", "x", "t")]
    nodes += [node("Reshape", "t flat", "f"), node("MatMul", "f W", "y")]
    stored = {"flat": np.array([-1, 3]), "W": normal(rng, 3, UNITS)}
    path = saved(tmp_path / "m.onnx", nodes, {"x": ["N", "T", 3]}, {"y": [None, UNITS]}, stored)
    assert imported(path).model.output_size == UNITS


def test_rows_that_are_mixed_with_frames_are_refused(tmp_path, rng):
    """[N, T, 3] read as [T, N, 3] is itself with one row, or one frame."""
    nodes = [
        node("Shape", "x", "s"), node("Gather", "s order", "turned"), node("Reshape", "x turned", "r"),
        node("Transpose", "r", "rt", perm=[1, 0, 2]), node("Concat", "x rt", "v", axis=2), node("MatMul", "v W", "y"),
    ]  # fmt: skip
    tensors = {"order": np.array([1, 0, 2]), "W": normal(rng, 6, UNITS)}
    path = saved(tmp_path / "m.onnx", nodes, {"x": ["N", "T", 3]}, {"y": ["N", "T", UNITS]}, tensors)
    with pytest.raises(NotImported, match=r"in row 0 of \d+ in one call"):
        imported(path)


@pytest.mark.parametrize("b", [["M", "S", 3], [None, None, 3], ["M", "S", 1]])
def test_a_mask_of_other_names_is_read(b, tmp_path, rng):
    """Rows of a beside frames of b give a grid of both, which are no frames."""
    nodes = [node("Sigmoid", "b", "m"), node("Mul", "a m", "v"), node("MatMul", "v W", "y")]
    ends = {"a": ["N", "T", 3], "b": b}, {"y": ["N", "T", UNITS]}
    found = imported(saved(tmp_path / "m.onnx", nodes, *ends, {"W": normal(rng, 3, UNITS)}))
    assert found.frames == ("a", "b")


@pytest.mark.exhaustive
def test_more_open_dimensions_than_can_be_tried_are_refused(tmp_path, rng):
    """Each input has frames of its own, which a constant keeps from being followed."""
    names = [f"x{i}" for i in range(15)]
    nodes = [node("Reshape", f"{name} one_row", f"r{name}") for name in names]
    nodes += [node("Concat", " ".join(f"r{name}" for name in names), "v", axis=1), node("MatMul", "v W", "y")]
    stored = {"one_row": np.array([1, 3]), "W": normal(rng, 3 * len(names), UNITS)}
    path = tmp_path / "m.onnx"
    saved(path, nodes, {name: [None, 3] for name in names}, {"y": [1, UNITS]}, stored)
    with pytest.raises(NotImported, match="15 dimensions of its inputs have no size"):
        imported(path)
    saved(path, nodes, {name: ["N", 3] for name in names}, {"y": [1, UNITS]}, stored)
    assert imported(path).frames == tuple(names)


def test_many_states_without_names_are_read(tmp_path, rng):
    """Each row of a state is broadcast along those of the others."""
    names = [f"h{i}" for i in range(16)]
    nodes = [node("MatMul", "x W", "u")]
    for i, name in enumerate(names):
        z = [
            node("MatMul", f"{name} R", f"r{i}"),
            node("Add", f"{'u' if i == 0 else names[i - 1] + '_out'} r{i}", f"z{i}"),
        ]
        nodes += [*z, node("Tanh", f"z{i}", f"{name}_out")]
    nodes.append(node("Identity", f"{names[-1]}_out", "y"))
    inputs = {"x": [None, UNITS]} | {name: [None, UNITS] for name in names}
    outputs = {"y": [None, UNITS]} | {f"{name}_out": [None, UNITS] for name in names}
    stored = {"W": normal(rng, UNITS, UNITS), "R": normal(rng, UNITS, UNITS)}
    states = {name: f"{name}_out" for name in names}
    assert imported(saved(tmp_path / "m.onnx", nodes, inputs, outputs, stored), states=states).states == states
