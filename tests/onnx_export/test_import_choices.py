"""`load` of files where sizes do not say which inputs are x, and of zeros in front of a frame."""

import numpy as np
import pytest
from graphs import imported, node, normal, saved

from onnx_export.errors import NotImported

UNITS = 4
ROW, STATE = [1, UNITS], [1, 1, UNITS]


def cell(x="x", h="h"):
    """A GRU of one step, of x [1, UNITS]."""
    made = node("GRU", f"x3 W R B none {h}", "Y h1", hidden_size=UNITS, linear_before_reset=1)
    made.input[4] = ""
    return [node("Unsqueeze", f"{x} zero", "x3"), made, node("Squeeze", "Y two", "y1")]


def stored(rng, **more):
    weights = {"W": normal(rng, 1, 3 * UNITS, UNITS), "R": normal(rng, 1, 3 * UNITS, UNITS)}
    return weights | {"B": normal(rng, 1, 6 * UNITS), "zero": np.array([0]), "two": np.array([0, 1])} | more


def of_a_size(path, rng, inputs=("a", "b", "h", "c")):
    """Inputs of one size, of which the output of a GRU gives one back; y is of another."""
    nodes = [node("Mul", "a b", "ab"), node("Sub", "ab c", "z"), *cell("z"), node("Add", "y1 c", "s"),
             node("MatMul", "s K", "y")]  # fmt: skip
    shapes = {name: STATE if name == "h" else ROW for name in inputs}
    return saved(path, nodes, shapes, {"y": [1, 3], "h1": STATE}, stored(rng, K=normal(rng, UNITS, 3)))


@pytest.mark.parametrize("inputs", ["abhc", "habc", "cbah"])
def test_of_inputs_of_one_size_more_than_outputs_the_graph_says_which_are_x(inputs, tmp_path, rng):
    found = imported(of_a_size(tmp_path / "m.onnx", rng, inputs))
    assert (found.frames, found.states) == (tuple(inputs.replace("h", "")), {"h": "h1"})
    assert found.report.ok


def test_of_a_sum_that_either_of_two_may_carry_the_choice_is_the_callers(tmp_path, rng):
    nodes = [node("Mul", "a half", "ah"), node("Mul", "b half", "bh"), node("Add", "ah bh", "n")]
    nodes += [node("Mul", "n c", "p"), node("MatMul", "p K", "y")]
    more = {"half": np.float32(0.5), "K": normal(rng, UNITS, 3)}
    path = saved(tmp_path / "m.onnx", nodes, dict.fromkeys("abc", ROW), {"y": [1, 3], "n": ROW}, more)
    with pytest.raises(NotImported, match=r"more than one reading|say which by states"):
        imported(path)
    found = imported(path, states={"a": "n"})
    assert (found.frames, found.states) == (("b", "c"), {"a": "n"})


def test_a_matrix_reads_a_slice_of_a_wide_frame(tmp_path, rng):
    nodes = [node("MatMul", "a K", "p"), node("Relu", "b", "q"), node("Concat", "p q", "y", axis=1)]
    path = saved(tmp_path / "m.onnx", nodes, {"b": [1, 90], "a": ROW}, {"y": [1, 93]}, {"K": normal(rng, UNITS, 3)})
    found = imported(path)
    (matrix,) = [layer for layer in found.model.layers if layer.kind == "Linear"]
    assert matrix.weights["weight"].shape == (3, UNITS)


# ---------------------------------------------------------------------------------------------- zeros in front

BINS, CHANNELS, TAPS = 6, 4, 3


def convolution(groups=1, value=0.0, front=TAPS - 1):
    """Over frames and bins of b [1, CHANNELS, T, BINS], with frames in front of the first."""
    tensors = {"front": np.array([0, 0, front, 0] + [0] * 4), "value": np.float32(value)}
    return [
        node("Pad", "b front value", "bp"),
        node("Conv", "bp F", "c", pads=[0, 1, 0, 1], group=groups),
        node("Relu", "c", "r"),
    ], tensors


def filters(rng, groups):
    return normal(rng, 2 * groups, CHANNELS // groups, TAPS, 3)


@pytest.mark.parametrize("groups", [1, 2, CHANNELS])
def test_zeros_in_front_of_a_frame_are_no_channels(groups, tmp_path, rng):
    nodes, more = convolution(groups)
    shapes = {"b": [1, CHANNELS, 1, BINS]}, {"r": [1, 2 * groups, 1, BINS]}
    found = imported(saved(tmp_path / "m.onnx", nodes, *shapes, more | {"F": filters(rng, groups)}))
    assert [layer.kind for layer in found.model.layers] == ["Conv1d", "Activation"]
    assert found.model.layers[0].weights["weight"].shape == (2 * groups, CHANNELS // groups, 3)
    assert found.report.ok


def test_ones_in_front_of_a_frame_are_read(tmp_path, rng):
    nodes, more = convolution(value=1.0)
    shapes = {"b": [1, CHANNELS, 1, BINS]}, {"r": [1, 2, 1, BINS]}
    found = imported(saved(tmp_path / "m.onnx", nodes, *shapes, more | {"F": filters(rng, 1)}))
    assert found.report.ok
