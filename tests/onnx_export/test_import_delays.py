"""`load` of files over an open time axis in which a frame from before is an output, or is what a cell reads."""

import numpy as np
import pytest
from graphs import imported, kinds, node, normal, saved

from onnx_export.errors import NotImported

SIZE, UNITS = 3, 5
FRAMES = 2000  # compared
NEAR, MIDDLE, FAR, LAST = 1, 70, 5000, 19_000  # delays; a trace shows 64 frames at any cost


def delay(by, y="d", x="x"):
    """Zeros in front, and the last frames cut off."""
    return [node("Pad", f"{x} pads", f"{y}p"), node("Slice", f"{y}p from to axis", y)], {
        "pads": np.array([0, by, 0, 0, 0, 0]), "from": np.array([0]), "to": np.array([-by]), "axis": np.array([1]),
    }  # fmt: skip


def behind_zeros(by, y="d"):
    """Zeros by Concat, which stands for no frames if there are fewer."""
    zeros = np.zeros((1, by, SIZE), np.float32)
    return [node("Slice", "x from to axis", "cut"), node("Concat", "zeros cut", y, axis=1)], {
        "zeros": zeros, "from": np.array([0]), "to": np.array([-by]), "axis": np.array([1]),
    }  # fmt: skip


def cell(rng, x, size, last=False):
    """A GRU of x [1, T, size], all of its outputs or the last."""
    made = {"W": normal(rng, 1, 3 * UNITS, size), "R": normal(rng, 1, 3 * UNITS, UNITS), "one": np.array([1])}
    nodes = [node("Transpose", x, "xt", perm=[1, 0, 2]), node("GRU", "xt W R", "Y Yh", hidden_size=UNITS)]
    if last:
        return [*nodes, node("Identity", "Yh", "y")], made
    return [*nodes, node("Squeeze", "Y one", "Y1"), node("Transpose", "Y1", "y", perm=[1, 0, 2])], made


def file(path, nodes, weights, out=("batch", "T", None)):
    return saved(path, nodes, {"x": [1, "T", SIZE]}, {"y": list(out)}, weights)


def same(found, rng, frames=FRAMES):
    x = rng.standard_normal((frames, SIZE)) * (1 + np.arange(frames)[:, None] % 7) + 0.3
    x = x.astype(np.float32)
    return found.model.check(x, found.file.run(x)).ok


@pytest.mark.parametrize("by", [NEAR, 2, 63, MIDDLE, FAR])
def test_a_delay_alone(by, tmp_path, rng):
    nodes, weights = delay(by, "y")
    found = imported(file(tmp_path / "m.onnx", nodes, weights))
    assert kinds(found)[0] == "Delay"
    assert found.time_axis == 1
    assert same(found, rng, FRAMES + by)


@pytest.mark.parametrize(("made", "by"), [(delay, MIDDLE), (behind_zeros, MIDDLE), (delay, FAR), (delay, LAST)])
def test_a_sum_with_a_delay(made, by, tmp_path, rng):
    nodes, weights = made(by)
    found = imported(file(tmp_path / "m.onnx", [*nodes, node("Add", "x d", "y")], weights))
    assert kinds(found) == ["Delay", "Slice", "Add"]
    assert same(found, rng, by + 20)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("by", [NEAR, 3, MIDDLE])
def test_a_frame_and_one_before_in_a_cell(by, last, tmp_path, rng):
    nodes, weights = delay(by)
    more, own = cell(rng, "z", 2 * SIZE, last)
    nodes = [*nodes, node("Concat", "x d", "z", axis=2), *more]
    found = imported(file(tmp_path / "m.onnx", nodes, weights | own, (1, 1, UNITS) if last else ("b", "T", UNITS)))
    assert kinds(found) == ["Delay", "GRU"] if by == 1 else kinds(found)[0] == "Delay"
    x = rng.standard_normal((by + 40, SIZE)).astype(np.float32)
    theirs, ours = found.file.run(x), found.model.run(x)
    assert found.model.check(x, np.concatenate([ours[: -len(theirs)], theirs])).ok


def test_a_cell_of_earlier_frames_alone(tmp_path, rng):
    nodes, weights = delay(2)
    more, own = cell(rng, "d", SIZE)
    found = imported(file(tmp_path / "m.onnx", [*nodes, *more], weights | own))
    assert kinds(found)[-1] == "GRU"
    assert same(found, rng)


def test_frames_behind_one_another(tmp_path, rng):
    nodes, weights = delay(2)
    found = imported(file(tmp_path / "m.onnx", [*nodes, node("Concat", "x d", "y", axis=2)], weights))
    assert kinds(found)[0] == "Delay"
    assert same(found, rng)


def test_zeros_for_frames_that_are_not_there(tmp_path):
    """In a call of fewer frames than the delay it gives too many."""
    nodes, weights = behind_zeros(MIDDLE, "y")
    with pytest.raises(NotImported, match="over 2 steps in one call the file has 210 outputs, the layers 3"):
        imported(file(tmp_path / "m.onnx", nodes, weights))


def padded(before, behind, start, end, **more):
    pads = {"pads": np.array([0, before, 0, 0, behind, 0]), "from": np.array([start]), "to": np.array([end])}
    nodes = [node("Pad", "x pads" + (" fill" if more else ""), "p"), node("Slice", "p from to axis", "d")]
    return nodes, pads | {"axis": np.array([1])} | more


def in_another_order(places):
    """The first frames in another order, and the others as they are."""
    given = {"axis": np.array([1]), "n": np.array([len(places)]), "end": np.array([2**40]), "at": np.array(places)}
    nodes = [node("Gather", "x at", "head", axis=1), node("Slice", "x n end axis", "tail")]
    return [*nodes, node("Concat", "head tail", "d", axis=1)], given


LIKE = {
    "the frame behind": lambda: padded(0, 1, 1, 2**40),
    "ones in front": lambda: padded(1, 0, 0, -1, fill=np.float32(1)),
    "the first frame in front": lambda: (
        [node("Slice", "x zero one axis", "a"), node("Slice", "x zero last axis", "b"),
         node("Concat", "a b", "d", axis=1)],
        {"zero": np.array([0]), "one": np.array([1]), "last": np.array([-1]), "axis": np.array([1])},
    ),
    "frames in another order": lambda: in_another_order([1, 0]),
    "frames from the end": lambda: (
        [node("Slice", "x last end axis last", "d")],
        {"last": np.array([-1]), "end": np.array([-(2**40)]), "axis": np.array([1])},
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", ["alone", "in a cell", "in a cell, its last state"])
@pytest.mark.parametrize("case", LIKE)
@pytest.mark.exhaustive(one_in=8)
def test_what_is_like_a_delay_is_refused(case, what, tmp_path, rng):
    nodes, weights = LIKE[case]()
    out = ("b", "T", None)
    if what == "alone":
        nodes = [*nodes, node("Identity", "d", "y")]
    else:
        more, own = cell(rng, "z", 2 * SIZE, "last" in what)
        nodes, weights = [*nodes, node("Concat", "x d", "z", axis=2), *more], weights | own
        out = (1, 1, UNITS) if "last" in what else out
    with pytest.raises(NotImported, match=r"frame|number of the frames|do not compute"):
        imported(file(tmp_path / "m.onnx", nodes, weights, out))


def test_a_delay_that_other_frames_have_not(tmp_path):
    """Doubled from frame 100 on: a trace of 64 frames does not show it."""
    nodes, weights = delay(2)
    cut = {"zero": np.array([0]), "n": np.array([100]), "end": np.array([2**40]), "two": np.float32(2)}
    nodes += [node("Slice", "d zero n axis", "a"), node("Slice", "d n end axis", "b"), node("Mul", "b two", "b2")]
    nodes += [node("Concat", "a b2", "y", axis=1)]
    with pytest.raises(NotImported, match="frame"):
        imported(file(tmp_path / "m.onnx", nodes, weights | cut))


def test_a_delay_beyond_what_can_be_compared(tmp_path):
    nodes, weights = delay(20_001, "y")
    with pytest.raises(NotImported, match="20000 frames can be compared"):
        imported(file(tmp_path / "m.onnx", nodes, weights))


@pytest.mark.parametrize(("pads", "says"), [
    ([0, 0, 0, 0, -2, 0], "axis 1, which has 1"), ([0, -2, 0, 0, 0, 0], "axis 1, which has 1"),
    ([0, 0, -1, 0, 0, -4], "axis 2, which has 3"),
])  # fmt: skip
def test_pads_that_cut_off_more_than_there_is(pads, says, tmp_path):
    """Some frames at the end of as many as there are, and elements."""
    weights = {"pads": np.array(pads)}
    with pytest.raises(NotImported, match=rf"Pad 'y': its negative pads cut {-sum(pads)} elements off {says}\n"):
        imported(file(tmp_path / "m.onnx", [node("Pad", "x pads", "y")], weights), check=False)


def test_negative_pads_in_the_frame_by_axes(tmp_path):
    weights = {"pads": np.array([-1, -1]), "zero": np.float32(0), "axes": np.array([-1])}
    nodes = [node("Pad", "x pads zero axes", "y")]
    found = imported(saved(tmp_path / "m.onnx", nodes, {"x": [1, 5]}, {"y": [1, 3]}, weights, opset=18))
    x = np.arange(10, dtype=np.float32).reshape(2, 5)
    assert found.model.run(x).tolist() == x[:, 1:4].tolist()
