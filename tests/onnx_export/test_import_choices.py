"""`load` of files where sizes do not say which inputs are x, and of calls that see zeros for the frames before them."""

from types import SimpleNamespace

import numpy as np
import pytest
from graphs import imported, node, normal, saved
from onnx import TensorProto, helper

from onnx_export.errors import NotImported
from onnx_export.importer import proposals

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


@pytest.mark.parametrize("result", ["n", "b1"])
def test_of_a_sum_that_either_of_two_may_carry_the_choice_is_the_callers(result, tmp_path, rng):
    nodes = [node("Mul", "a half", "ah"), node("Mul", "b half", "bh"), node("Add", "ah bh", result)]
    nodes += [node("Mul", f"{result} c", "p"), node("MatMul", "p K", "y")]
    more = {"half": np.float32(0.5), "K": normal(rng, UNITS, 3)}
    path = saved(tmp_path / "m.onnx", nodes, dict.fromkeys("abc", ROW), {"y": [1, 3], result: ROW}, more)
    with pytest.raises(NotImported, match=r"more than one reading|say which by states") as error:
        imported(path)
    assert len(set(error.value.reasons)) == len(error.value.reasons)
    found = imported(path, states={"a": result})
    assert (found.frames, found.states) == (("b", "c"), {"a": result})


def test_a_matrix_reads_a_slice_of_a_wide_frame(tmp_path, rng):
    nodes = [node("MatMul", "a K", "p"), node("Relu", "b", "q"), node("Concat", "p q", "y", axis=1)]
    path = saved(tmp_path / "m.onnx", nodes, {"b": [1, 90], "a": ROW}, {"y": [1, 93]}, {"K": normal(rng, UNITS, 3)})
    found = imported(path)
    (matrix,) = [layer for layer in found.model.layers if layer.kind == "Linear"]
    assert matrix.weights["weight"].shape == (3, UNITS)


def test_zeros_stand_behind_a_part_of_the_frame(tmp_path, rng):
    nodes = [node("Slice", "a zero four one", "s"), node("Pad", "s pads", "p"), node("Sigmoid", "p", "y")]
    more = {"zero": np.array([0]), "four": np.array([4]), "one": np.array([1]), "pads": np.array([0, 0, 0, 3])}
    found = imported(saved(tmp_path / "m.onnx", nodes, {"a": [1, 19]}, {"y": [1, 7]}, more))
    assert found.report.ok


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


# ---------------------------------------------------------------------------------------------- calls of one frame


def mixed(path, rng, states=True):
    """A GRU over the frames beside a convolution of earlier ones, which begins at zeros in each call."""
    nodes, more = convolution()
    made = cell("x", "h")[1]
    made.input[:] = ["x", "W", "R", "B", "", *(["h"] if states else [])]
    nodes += [made, node("Squeeze", "Y one", "y")]
    weights = {name: array for name, array in stored(rng).items() if name in "WRB"}
    more |= {"F": filters(rng, 1), "one": np.array([1])} | weights
    inputs = {"x": ["T", 1, UNITS], "b": [1, CHANNELS, "T", BINS]} | ({"h": STATE} if states else {})
    outputs = {"y": ["T", 1, UNITS], "r": [1, 2, "T", BINS]} | ({"h1": STATE} if states else {})
    return saved(path, nodes, inputs, outputs, more)


def test_a_convolution_that_forgets_beside_a_state_is_read_by_calls_of_one_frame(tmp_path, rng):
    """Several frames in a call see the frames before them, those of the call before are lost: two kinds of streams."""
    path = mixed(tmp_path / "m.onnx", rng)
    with pytest.raises(NotImported, match=r"with dims=\{'T': 1\} it has layers: calls of one frame") as error:
        imported(path)
    assert "sizes tried" not in str(error.value)
    found = imported(path, dims={"T": 1})
    assert (found.frames, found.states, found.time_axis) == (("x", "b"), {"h": "h1"}, None)
    assert found.report.ok
    assert not any(layer.kind == "Delay" for layer in found.model.layers)


def test_without_a_state_it_is_a_stream_over_the_frames(tmp_path, rng):
    found = imported(mixed(tmp_path / "m.onnx", rng, states=False))
    assert (found.frames, found.time_axis) == (("x", "b"), 0)
    assert [layer.kind for layer in found.model.layers].count("Delay") == 1


def proposed(offer, read):
    """The lines that are offered for a file of x [1, T] that `read` reads."""
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, "T"])]
    model = helper.make_model(helper.make_graph([], "graph", inputs, []))
    return offer(model, {"inputs": {}, "dims": {}}, read)


@pytest.mark.parametrize("states", [{}, {"h": "h1"}])
def test_one_frame_is_proposed_only_for_files_with_states(states):
    def read(*, dims, **_):
        if dims != {"T": 1}:
            raise NotImported("no")
        return SimpleNamespace(states=states)

    lines = proposed(proposals.one_step, read)
    assert [line.partition(":")[0] for line in lines] == ["with dims={'T'"] * bool(states)


def test_a_size_without_memory_is_not_the_end_of_a_refusal():
    """Sizes are tried in the limits of the child, in which the refusal has to be told, too."""

    def read(*, dims, **_):
        if dims["T"] > 100:
            raise MemoryError
        raise NotImported("no")

    (line,) = proposed(proposals.proposals, read)
    assert line.startswith("sizes tried: 576, ")
