"""`load` of frames of [channels, positions]: convolutions over two axes, cells over positions, one for each of them."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from cells import random_cell
from graphs import checked, imported, kinds, node, normal, saved

import cnorm
import onnx_export
from onnx_export.importer.selecting import box

MODELS = Path(__file__).parents[3] / "shared" / "data" / "models"

CHANNELS, POSITIONS, UNITS = 4, 9, 3
FRAME = [1, CHANNELS, 1, POSITIONS]


# ---------------------------------------------------------------------------------------------- convolutions


def cached(path, rng, *, groups=1, dilation=1, transposed=False, kept=(1, 1 << 40)):
    """A causal convolution [3, 3] over time and positions, its cache the last frames; `kept`: of cache and frame."""
    history = 2 * dilation
    options = {"group": groups, "dilations": [dilation, 1], "pads": [0, 1, 0, 1]}
    if transposed:
        options["pads"] = [history, 1, history, 1]
    nodes = [
        node("Concat", "c x", "frames", axis=2),
        node("ConvTranspose" if transposed else "Conv", "frames K b", "a", **options),
        node("Tanh", "a", "y"),
        node("Slice", "frames first end axis", "c_out"),
    ]
    tensors = {"K": normal(rng, CHANNELS, CHANNELS // groups, 3, 3), "b": normal(rng, CHANNELS)}
    tensors |= {"first": [kept[0]], "end": [kept[1]], "axis": [2]}
    cache = [1, CHANNELS, history, POSITIONS]
    return saved(path, nodes, {"x": FRAME, "c": cache}, {"y": FRAME, "c_out": cache}, tensors)


@pytest.mark.exhaustive(one_in=10)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("groups", "dilation"), [(1, 1), (2, 1), (CHANNELS, 2), (CHANNELS, 5)])
def test_a_causal_convolution_with_a_cache_is_a_delay_and_one_in_the_frame(groups, dilation, transposed, tmp_path, rng):
    path = cached(tmp_path / "m.onnx", rng, groups=groups, dilation=dilation, transposed=transposed)
    found = imported(path)
    assert checked(found, rng) == ["Delay", "Permute", "Conv1d", "Activation"]
    assert (found.model.layers[0].frames, found.model.layers[0].dilation) == (3, dilation)
    assert found.states == {"c": "c_out"}


def test_a_cache_that_keeps_its_oldest_frames_is_refused(tmp_path, rng):
    with pytest.raises(ValueError, match=r"input '[cx]'"):
        imported(cached(tmp_path / "m.onnx", rng, kept=(0, 2)))


def stacked(path, rng, order=(0, 1)):
    """Two convolutions, whose caches are written into one input by ScatterND; `order` says where."""
    nodes, tensors = [], {"axis": [2], "first": [0], "one": [1], "end": [1 << 40]}
    cache, x = "c", "x"
    for layer, place in enumerate(order):
        tensors |= {f"K{layer}": normal(rng, CHANNELS, CHANNELS, 3, 1), f"at{layer}": np.array([[place]])}
        tensors |= {f"own{layer}": np.array(layer)}
        nodes += [
            node("Gather", f"{cache} own{layer}", f"g{layer}", axis=0),
            node("Concat", f"g{layer} {x}", f"f{layer}", axis=2),
            node("Conv", f"f{layer} K{layer}", f"a{layer}"),
            node("Relu", f"a{layer}", f"r{layer}"),
            node("Slice", f"f{layer} one end axis", f"s{layer}"),
            node("Unsqueeze", f"s{layer} first", f"u{layer}"),
            node("ScatterND", f"{cache} at{layer} u{layer}", f"c{layer}"),
        ]
        cache, x = f"c{layer}", f"r{layer}"
    nodes += [node("Identity", cache, "c_out"), node("Add", f"{x} x", "y")]
    sizes = [2, 1, CHANNELS, 2, POSITIONS]
    return saved(path, nodes, {"x": FRAME, "c": sizes}, {"y": FRAME, "c_out": sizes}, tensors)


def test_caches_that_are_written_into_one_input(tmp_path, rng):
    found = imported(stacked(tmp_path / "m.onnx", rng))
    assert kinds(found).count("Delay") == 2
    checked(found, rng)


def test_caches_that_are_written_to_each_others_places_are_refused(tmp_path, rng):
    with pytest.raises(ValueError, match=r"input 'c'|depends on itself"):
        imported(stacked(tmp_path / "m.onnx", rng, order=(1, 0)))


@pytest.mark.exhaustive(one_in=2)
@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_transposed_convolution_with_a_stride(groups, more, tmp_path, rng):
    """And a skip over it and the convolution that it undoes."""
    strides = {"strides": [1, 2], "pads": [0, 1, 0, 1], "group": groups}
    nodes = [
        node("Conv", "x K", "a", **strides),
        node("BatchNormalization", "a g b m v", "n"),
        node("PRelu", "n p", "r"),
        node("ConvTranspose", "r L", "t", **strides, output_padding=[0, more]),
        node("Tanh", "t", "h"),
        node("Add", "h x", "y"),
    ]
    positions = POSITIONS + more
    tensors = {"K": normal(rng, 6, CHANNELS // groups, 1, 3), "L": normal(rng, 6, CHANNELS // groups, 1, 3)}
    tensors |= {"g": normal(rng, 6), "b": normal(rng, 6), "m": normal(rng, 6), "v": normal(rng, 6) ** 2 + 0.1}
    tensors |= {"p": normal(rng, 6, 1, 1)}
    shape = [1, CHANNELS, 1, positions]
    found = imported(saved(tmp_path / "m.onnx", nodes, {"x": shape}, {"y": shape}, tensors))
    assert checked(found, rng) == ["Conv1d", "Activation", "ConvTranspose1d", "Activation", "Add"]


@pytest.mark.parametrize("op", ["Conv", "ConvTranspose"])
def test_several_places_along_both_axes(op, tmp_path, rng):
    """The rows of the shorter axis are channels, too."""
    nodes = [node(op, "x K b", "a", strides=[2, 1], pads=[1, 1, 0, 2]), node("Sigmoid", "a", "y")]
    tensors = {"K": normal(rng, 2, 2, 3, 4), "b": normal(rng, 2)}
    y = [1, 2, 2, POSITIONS] if op == "Conv" else [1, 2, 8, POSITIONS]
    found = imported(saved(tmp_path / "m.onnx", nodes, {"x": [1, 2, 4, POSITIONS]}, {"y": y}, tensors))
    assert checked(found, rng) == ["Conv1d", "Activation"]


@pytest.mark.parametrize("taps", [1, 3])
def test_rows_that_are_moved_by_a_position(taps, tmp_path, rng):
    """Three copies of each channel, as an unfold writes them: a convolution of one tap takes them over."""
    at = np.arange(3)[:, None] + np.arange(POSITIONS)
    nodes = [
        node("Pad", "x pads", "p"),
        node("Gather", "p at", "g", axis=3),
        node("Transpose", "g", "t", perm=[0, 1, 3, 2, 4]),
        node("Reshape", "t shape", "u"),
        node("Conv", "u K", "a", pads=[0, taps // 2, 0, taps // 2]),
        node("Relu", "a", "y"),
    ]
    tensors = {"pads": [0, 0, 0, 1, 0, 0, 0, 1], "at": at, "shape": [1, 3 * CHANNELS, 1, POSITIONS]}
    tensors |= {"K": normal(rng, 5, 3 * CHANNELS, 1, taps)}
    found = imported(saved(tmp_path / "m.onnx", nodes, {"x": FRAME}, {"y": [1, 5, 1, POSITIONS]}, tensors))
    assert checked(found, rng) == ["Conv1d"] * (1 + (taps > 1)) + ["Activation"]


@pytest.mark.parametrize(("kernel", "stride", "pads"), [(3, 2, (0, 0)), (2, 2, (0, 0)), (4, 3, (1, 1))], ids=str)
def test_a_max_pool_whose_last_window_ends_behind_the_frame(kernel, stride, pads, tmp_path, rng):
    positions = POSITIONS + (kernel == 3)
    options = {"kernel_shape": [1, kernel], "strides": [1, stride], "pads": [0, pads[0], 0, pads[1]], "ceil_mode": 1}
    nodes = [node("Conv", "x K", "a"), node("MaxPool", "a", "m", **options), node("Tanh", "m", "y")]
    ends = {"x": [1, CHANNELS, 1, positions]}, {"y": [1, 2, 1, -(-(positions + sum(pads) - kernel) // stride) + 1]}
    found = imported(saved(tmp_path / "m.onnx", nodes, *ends, {"K": normal(rng, 2, CHANNELS, 1, 1)}))
    assert "MaxPool1d" in checked(found, rng)


def test_a_max_pool_whose_last_window_begins_behind_the_frame_is_refused(tmp_path, rng):
    """Runtimes differ in whether it is one."""
    options = {"kernel_shape": [1, 2], "strides": [1, 5], "pads": [0, 0, 0, 1], "ceil_mode": 1}
    nodes = [node("Conv", "x K", "a"), node("MaxPool", "a", "y", **options)]
    ends = {"x": [1, CHANNELS, 1, 10]}, {"y": [1, 2, 1, None]}
    path = saved(tmp_path / "m.onnx", nodes, *ends, {"K": normal(rng, 2, CHANNELS, 1, 1)})
    with pytest.raises(ValueError, match="a max pool whose last window begins behind its input"):
        imported(path)


def bands(path, rng, start, axis=3):
    """The positions by a matrix to fewer and back, of which those from `start` on are used, behind the first of x."""
    nodes = [
        node("MatMul", "x there", "a"),
        node("Tanh", "a", "t"),
        node("MatMul", "t back", "b"),
        node("Slice", "b start end axis", "high"),
        node("Slice", "x zero start axis", "low"),
        node("Concat", "low high", "y", axis=axis),
    ]
    tensors = {"there": normal(rng, POSITIONS, 4), "back": normal(rng, 4, POSITIONS)}
    tensors |= {"start": [start], "zero": [0], "end": [1 << 40], "axis": [axis]}
    return saved(path, nodes, {"x": FRAME}, {"y": FRAME}, tensors)


def test_a_part_of_what_a_matrix_makes_of_each_channel(tmp_path, rng):
    assert checked(imported(bands(tmp_path / "m.onnx", rng, 2)), rng).count("PerPosition") == 2


def test_a_part_of_the_channels_that_a_matrix_reads(tmp_path, rng):
    """No layer computes some of the rows: nothing needs what the others read."""
    with pytest.raises(ValueError, match="it multiplies 2 parts of the frame by one matrix"):
        imported(bands(tmp_path / "m.onnx", rng, 2, axis=1))


# ---------------------------------------------------------------------------------------------- cells


def recurrent(rng, kind, inputs, directions=1):
    """Weights of a recurrent operator."""
    rows = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind] * UNITS
    shapes = {"W": (directions, rows, inputs), "R": (directions, rows, UNITS), "B": (directions, 2 * rows)}
    return {name: normal(rng, *shape) for name, shape in shapes.items()}


def over_positions(path, rng, kind="GRU", way="bidirectional", start=0.0, **more):
    """A convolution with a cache, a cell over the positions and a product at each of them; y and the cache."""
    directions = 1 + (way == "bidirectional")
    nodes = [
        node("Concat", "c x", "frames", axis=2),
        node("Conv", "frames K", "a", pads=[0, 1, 0, 1]),
        node("Slice", "frames one end time", "c_out"),
        node("Squeeze", "a time", "s"),
        node("Transpose", "s", "t", perm=[2, 0, 1]),
        node(kind, "t W R B  h".replace("  ", " none "), "all", hidden_size=UNITS, direction=way, **more),
        node("Transpose", "all", "ways", perm=[0, 2, 1, 3]),
        node("Reshape", "ways rows", "r"),
        node("MatMul", "r V", "m"),
        node("Add", "m v", "n"),
        node("Transpose", "n", "o", perm=[1, 2, 0]),
        node("Add", "o s", "y"),
    ]
    nodes[5].input[4] = ""
    tensors = recurrent(rng, kind, CHANNELS, directions) | {"K": normal(rng, CHANNELS, CHANNELS, 2, 3)}
    tensors |= {"V": normal(rng, directions * UNITS, CHANNELS), "v": normal(rng, CHANNELS)}
    tensors |= {"one": [1], "end": [1 << 40], "time": [2], "rows": [POSITIONS, 1, directions * UNITS]}
    tensors |= {"h": np.full((directions, 1, UNITS), start, np.float32)}
    ends = {"x": FRAME, "c": FRAME}, {"y": [1, CHANNELS, POSITIONS], "c_out": FRAME}
    return saved(path, nodes, *ends, tensors)


@pytest.mark.exhaustive(one_in=12)
@pytest.mark.parametrize("way", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_a_cell_over_positions(kind, way, tmp_path, rng):
    found = imported(over_positions(tmp_path / "m.onnx", rng, kind, way))
    made = checked(found, rng)
    assert [one for one in made if one not in ("Slice", "Permute")] == [
        "Delay", "Conv1d", "OverPositions", "PerPosition", "Add",
    ]  # fmt: skip
    assert found.time_axis is None


def test_a_cell_over_positions_that_begins_with_no_zeros_is_refused(tmp_path, rng):
    with pytest.raises(ValueError, match="GRU 'all': its 9 steps are positions of a frame, and begin with no zeros"):
        imported(over_positions(tmp_path / "m.onnx", rng, start=0.5))


DELAYED = (node("Pad", "x front", "p"), node("Conv", "p K", "v", dilations=[3, 1]))
FEW = (
    node("Shape", "x", "s"), node("Gather", "s two", "n"), node("Less", "n many", "few"),
    node("Where", "few half whole", "f"), node("Mul", "x f", "v"),
)  # fmt: skip


@pytest.mark.parametrize(("nodes", "why"), [(DELAYED, "depends on several frames"), (FEW, "from the number of frames")])
def test_what_mixes_frames_before_a_cell_over_positions_is_refused(nodes, why, tmp_path, rng):
    """The fixed number of steps, of positions, hides nothing of the open number of frames."""
    cell = [node("Squeeze", "v zero", "q"), node("Transpose", "q", "t", perm=[2, 1, 0]),
            node("GRU", "t W R", "all", hidden_size=UNITS), node("Squeeze", "all one", "r"),
            node("Transpose", "r", "y", perm=[1, 2, 0])]  # fmt: skip
    tensors = {"W": normal(rng, 1, 3 * UNITS, CHANNELS), "R": normal(rng, 1, 3 * UNITS, UNITS)}
    tensors |= {"K": normal(rng, CHANNELS, CHANNELS, 2, 1), "front": [0, 0, 3, 0, 0, 0, 0, 0], "zero": [0], "one": [1]}
    tensors |= {"two": np.array(2), "many": np.array(50_000), "half": np.float32(0.5), "whole": np.float32(1)}
    read = {name for each in [*nodes, *cell] for name in each.input}
    stored = {name: value for name, value in tensors.items() if name in read}
    ends = {"x": [1, CHANNELS, "T", POSITIONS]}, {"y": ["T", UNITS, POSITIONS]}
    path = saved(tmp_path / "m.onnx", [*nodes, *cell], *ends, stored)
    with pytest.raises(ValueError, match=why):
        imported(path)


def per_position(path, rng, kind="GRU", turned=False, rows=POSITIONS):
    """One step of a cell with a state for each position; `turned`: given back from the last to the first."""
    states = ["h", "c"][: 1 + (kind == "LSTM")]
    given = [node("Identity", f"{s}1", f"{s}_out") for s in states]
    if turned:
        given = [node("Gather", f"{s}1 order", f"{s}_out", axis=1) for s in states]
    nodes = [
        node("Squeeze", "x time", "s"),
        node("Transpose", "s", "t", perm=[0, 2, 1]),
        node(kind, "t W R B none " + " ".join(states), "all " + " ".join(f"{s}1" for s in states), hidden_size=UNITS),
        node("Squeeze", "all one", "q"),
        node("MatMul", "q V", "m"),
        node("LayerNormalization", "m gain", "n", axis=-2, epsilon=1e-8),
        node("Add", "n t", "y"),
        *given,
    ]
    nodes[2].input[4] = ""
    tensors = recurrent(rng, kind, CHANNELS) | {"V": normal(rng, UNITS, CHANNELS), "time": [2], "one": [1]}
    tensors |= {"order": np.arange(rows)[::-1]} if turned else {}
    tensors |= {"gain": normal(rng, rows, CHANNELS)}
    state = [1, rows, UNITS]
    inputs = {"x": [1, CHANNELS, 1, rows]} | dict.fromkeys(states, state)
    return saved(path, nodes, inputs, {"y": [1, rows, CHANNELS]} | {f"{s}_out": state for s in states}, tensors)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_a_cell_for_each_position(kind, tmp_path, rng):
    found = imported(per_position(tmp_path / "m.onnx", rng, kind))
    made = checked(found, rng)
    assert [one for one in made if one in ("PerPosition", "LayerNorm", "Add")] == [
        "PerPosition", "PerPosition", "LayerNorm", "Add",
    ]  # fmt: skip


def written_per_position(rng, preset, form="step"):
    """A cell with a state for each position as we write it out, behind a convolution, without our description."""
    cell = cnorm.PerPosition(random_cell(preset, rng, CHANNELS, UNITS)[0], positions=POSITIONS)
    before = cnorm.Conv1d(normal(rng, CHANNELS, 2, 3), positions=POSITIONS, padding=1)
    exported = onnx_export.export(cnorm.Model([before, cell]), form=form)
    del exported.metadata_props[:]
    return exported


@pytest.mark.exhaustive(one_in=8)
@pytest.mark.parametrize("form", ["step", "sequence"])
@pytest.mark.parametrize("preset", [("LSTM", "torch"), ("GRU", "torch"), ("RNN", "torch"), ("LSTM", "ba2016")], ids=str)
def test_a_cell_for_each_position_that_is_written_out(preset, form, tmp_path, rng):
    """All positions are rows of the same products, and of the same norms."""
    onnx.save(written_per_position(rng, preset, form), tmp_path / "m.onnx")
    found = imported(tmp_path / "m.onnx")
    assert [one for one in checked(found, rng) if one != "Permute"] == ["Conv1d", "PerPosition"]
    assert found.model.layers[-1].layer.kind == preset[0]


def test_a_position_whose_cell_is_another_is_refused(tmp_path, rng):
    """A bias that the gates of one position have besides."""
    model = written_per_position(rng, ("LSTM", "torch"))
    more = np.zeros((POSITIONS, 4 * UNITS), np.float32)
    more[2, 1] = 0.25
    model.graph.initializer.append(onnx.numpy_helper.from_array(more, "more"))
    at, split = next((at, one) for at, one in enumerate(model.graph.node) if one.op_type == "Split")
    model.graph.node.insert(at, node("Add", f"{split.input[0]} more", "others"))
    split.input[0] = "others"
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(ValueError, match="the input 'h0_in' is no frame, and no cell or convolution reads it"):
        imported(tmp_path / "m.onnx")


def test_states_of_positions_that_are_given_back_in_another_order_are_refused(tmp_path, rng):
    with pytest.raises(ValueError, match="GRU 'all': its initial h of 9 rows is not what an output gives back"):
        imported(per_position(tmp_path / "m.onnx", rng, turned=True))


def test_a_shuffle_of_channels_between_two_halves(tmp_path, rng):
    """One half is computed and the two alternate afterwards, twice."""
    nodes, tensors, x = [], {"time": [2], "halves": [1, 2, 2, POSITIONS], "whole": FRAME}, "x"
    for layer in range(2):
        tensors[f"K{layer}"] = normal(rng, 2, 2, 1, 3)
        nodes += [
            node("Split", x, f"a{layer} b{layer}", axis=1, num_outputs=2),
            node("Conv", f"a{layer} K{layer}", f"c{layer}", pads=[0, 1, 0, 1]),
            node("Tanh", f"c{layer}", f"t{layer}"),
            node("Concat", f"t{layer} b{layer}", f"j{layer}", axis=1),
            node("Reshape", f"j{layer} halves", f"h{layer}"),
            node("Transpose", f"h{layer}", f"s{layer}", perm=[0, 2, 1, 3]),
            node("Reshape", f"s{layer} whole", f"x{layer}"),
        ]
        x = f"x{layer}"
    nodes += [node("Add", f"{x} x", "y")]
    path = saved(tmp_path / "m.onnx", nodes, {"x": FRAME}, {"y": FRAME}, tensors, opset=18)
    made = checked(imported(path), rng)
    assert "Linear" not in made
    assert made.count("Conv1d") == 2


# ---------------------------------------------------------------------------------------------- a public model


@pytest.mark.exhaustive
@pytest.mark.skipif(not MODELS.exists(), reason=f"SKIPPED: {MODELS} with public weight files is not here")
def test_gtcrn(tmp_path, rng):
    """Proven; beside the file over frames of speech's size; saved half-way, continued by the packed model."""
    found = imported(MODELS / "gtcrn_simple.onnx")
    assert found.report.ok
    assert found.states == {name: f"{name}_out" for name in ("conv_cache", "tra_cache", "inter_cache")}
    made = kinds(found)
    counts = {"Delay": 6, "OverPositions": 4, "PerPosition": 10, "GRU": 6, "ConvTranspose1d": 2, "LayerNorm": 4}
    assert {kind: made.count(kind) for kind in counts} == counts
    x = (0.3 * rng.standard_normal((200, 514))).astype(np.float32)
    y = found.model.run(x)
    assert found.model.check(x, found.file.run(x)).ok
    first = found.model.stream()
    np.testing.assert_array_equal(first.process(x[:100]), y[:100])
    found.model.save_packed(tmp_path / "m.cnorm")
    second = cnorm.load(tmp_path / "m.cnorm").restore(first.save())
    np.testing.assert_array_equal(second.process(x[100:]), y[100:])


# ---------------------------------------------------------------------------------------------- selections


def moved(x, moves):
    for kind, numbers, axes in moves:
        x = x.reshape(numbers).transpose(axes).ravel() if kind == "permute" else x[slice(*numbers)]
    return x


def test_a_box_of_an_array_with_its_axes_in_another_order(rng):
    for _ in range(300):
        array = np.arange(360).reshape(rng.permutation([2, 3, 5, 12]))
        starts = [int(rng.integers(0, n)) for n in array.shape]
        part = tuple(slice(s, int(rng.integers(s, n)) + 1) for s, n in zip(starts, array.shape, strict=True))
        index = array[part].transpose(rng.permutation(4)).ravel()
        np.testing.assert_array_equal(moved(array.ravel(), box(index, array.size)), index)


@pytest.mark.parametrize("index", [[0, 1, 3, 2], [3, 2, 1, 0], [0, 0, 1, 1], [0, 1, 2, 4, 5, 7]], ids=str)
def test_no_box(index):
    assert box(np.array(index), 8) is None
