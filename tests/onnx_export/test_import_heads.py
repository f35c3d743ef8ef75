"""`load` of files that end in what no layer computes: refused with the outputs to name, and read with them."""

import re
import shlex
import warnings

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner
from graphs import imported, node, normal, saved

import cnorm
import onnx_export
from cnorm.tools.commands import commands
from onnx_export.errors import NotImported
from onnx_export.importer.command import as_options, import_file

SIZE, UNITS, CLASSES = 4, 6, 5

HEADS = {
    "ArgMax": ([node("ArgMax", "z", "class", axis=-1, keepdims=0)], {"class": [1]}),
    "TopK": ([node("TopK", "z two", "best which")], {"best": [1, 2], "which": [1, 2]}),
    "ReduceL2": (
        [node("ReduceL2", "z", "n", axes=[-1]), node("Clip", "n tiny", "c"), node("Div", "z c", "unit")],
        {"unit": [1, CLASSES]},
    ),
    "Greater": ([node("Greater", "z half", "over")], {"over": [1, CLASSES]}),
}


def file(path, rng, head, first="z", with_logits=False):
    """A GRU and a linear layer, x [1, SIZE], and a head."""
    end, shapes = HEADS[head]
    nodes = [
        node("Unsqueeze", "x axis", "x3"), node("GRU", "x3 W R B none h", "Y h_out", hidden_size=UNITS),
        node("Squeeze", "h_out axis", "y2"), node("Gemm", "y2 K", first, transB=1),
        *([node("Identity", first, "z")] if first != "z" else []), *end,
    ]  # fmt: skip
    nodes[1].input[4] = ""
    weights = {"W": (1, 3 * UNITS, SIZE), "R": (1, 3 * UNITS, UNITS), "B": (1, 6 * UNITS), "K": (CLASSES, UNITS)}
    weights = {name: normal(rng, *shape) for name, shape in weights.items()}
    numbers = {"axis": np.array([0]), "two": np.array([2]), "tiny": np.float32(1e-12), "half": np.float32(0.5)}
    read = {name for one in nodes for name in one.input}
    weights |= {name: value for name, value in numbers.items() if name in read}
    shapes = ({"z": [1, CLASSES]} if with_logits else {}) | shapes | {"h_out": [1, 1, UNITS]}
    saved(path, nodes, {"x": [1, SIZE], "h": [1, 1, UNITS]}, shapes, weights, ids=("class", "which"))
    model = onnx.load(path)
    for value in (value for value in model.graph.output if value.name == "over"):
        value.type.tensor_type.elem_type = onnx.TensorProto.BOOL
    onnx.save(model, path)
    return path


def logits(path, x):
    """Those of the file, step by step, by ArgMax's own input."""
    model = onnx.load(path)
    del model.graph.output[:]
    model.graph.output.extend(
        [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in ("z", "h_out")]
    )
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    h, ys = np.zeros((1, 1, UNITS), np.float32), []
    for frame in x:
        y, h = session.run(["z", "h_out"], {"x": frame[None], "h": h})
        ys.append(y[0])
    return np.array(ys)


@pytest.mark.exhaustive(one_in=8)
@pytest.mark.parametrize("with_logits", [False, True])
@pytest.mark.parametrize("head", HEADS)
def test_a_head_is_refused_with_what_to_name(head, with_logits, tmp_path, rng):
    path = file(tmp_path / "m.onnx", rng, head, with_logits=with_logits)
    with pytest.raises(NotImported, match=rf"with outputs=\['z'\], which leaves out {head} '") as error:
        imported(path)
    assert "--output z" in as_options(str(error.value))
    found = imported(path, outputs=["z"])
    assert found.outputs == ("z",)
    assert found.states == {"h": "h_out"}
    x = rng.standard_normal((50, SIZE)).astype(np.float32)
    assert found.model.check(x, logits(path, x)).ok


def test_load_takes_outputs(tmp_path, rng):
    path = file(tmp_path / "m.onnx", rng, "ArgMax", with_logits=True)
    assert onnx_export.load(path, outputs=["z"]).output_size == CLASSES
    with pytest.raises(NotImported, match="no node of the file computes 'x'; its outputs are 'z', 'class', 'h_out'"):
        onnx_export.load(path, outputs=["x"])
    with pytest.raises(TypeError, match="outputs must be a sequence of names, got 'z'"):
        onnx_export.load(path, outputs="z")


def test_several_outputs_and_one_inside(tmp_path, rng):
    path = file(tmp_path / "m.onnx", rng, "ArgMax", first="inside", with_logits=True)
    found = imported(path, outputs=["y2", "inside"])
    assert found.outputs == ("y2", "inside")
    assert found.model.output_size == UNITS + CLASSES


def test_what_would_be_left_of_the_file_must_load(tmp_path, rng):
    """No outputs are proposed where the file without its head is no list of layers either."""
    nodes = [node("MatMul", "x x", "z"), node("ArgMax", "z", "class", axis=-1)]
    path = saved(tmp_path / "m.onnx", nodes, {"x": [4, 4]}, {"class": [4, 1]}, {}, ids=("class",))
    with pytest.raises(NotImported) as error:
        imported(path)
    assert "outputs=" not in str(error.value)


def test_what_has_matrices_behind_it_is_no_head(tmp_path, rng):
    """A product of frames in the middle of a network: what is in front of it alone is nobody's model."""
    nodes = [node("Gemm", "x K", "a"), node("Mul", "a a", "s"), node("MatMul", "s a", "m"), node("Gemm", "m V", "y")]
    tensors = {"K": normal(rng, 4, 4), "V": normal(rng, 4, 2)}
    path = saved(tmp_path / "m.onnx", nodes, {"x": [4, 4]}, {"y": [4, 2]}, tensors)
    with pytest.raises(NotImported, match="MatMul 'm': it multiplies what depends on the frame by what") as error:
        imported(path)
    assert "it has layers" not in str(error.value)


def test_outputs_beside_the_first_may_be_left_out(tmp_path, rng):
    """The last three frames, for a cache that the file does not read: no frame of y, and no state."""
    nodes = [node("MatMul", "x V", "v"), node("Transpose", "v", "t", perm=[0, 2, 1])]
    nodes += [
        node("Conv", "t K", "f", pads=[2, 0], group=4),
        node("Transpose", "f", "y", perm=[0, 2, 1]),
        node("Slice", "t three end last", "cache"),
    ]
    tensors = {
        "V": normal(rng, 5, 4),
        "K": normal(rng, 4, 1, 3),
        "three": np.array([-3]),
        "end": np.array([2**62]),
        "last": np.array([2]),
    }
    path = saved(tmp_path / "m.onnx", nodes, {"x": [1, "T", 5]}, {"y": [1, "T", 4], "cache": [1, 4, "C"]}, tensors)
    with pytest.raises(NotImported, match=r"with outputs=\['y'\], which leaves out the others, it has layers"):
        imported(path)
    found = imported(path, outputs=["y"])
    assert found.model.layers[-1].kind == "CausalConv1d"


def counted(path, rng, name):
    """An LSTM over rows of padded frames, and a linear layer of the last frame that is none."""
    nodes = [
        node("Transpose", "x", "t", perm=[1, 0, 2]), node("LSTM", "t W R B", "Y", hidden_size=UNITS),
        node("Squeeze", "Y one", "z"), node("Transpose", "z", "h", perm=[1, 0, 2]), node("Sub", f"{name} i", "last"),
        node("Reshape", "last shape", "at"), node("Expand", "at size", "all"),
        node("GatherElements", "h all", "g", axis=1), node("Squeeze", "g one", "v"), node("Gemm", "v K", "y"),
    ]  # fmt: skip
    tensors = {"W": normal(rng, 1, 4 * UNITS, SIZE), "R": normal(rng, 1, 4 * UNITS, UNITS)}
    tensors |= {"B": normal(rng, 1, 8 * UNITS), "K": normal(rng, UNITS, 2), "i": np.int64(1), "one": np.array([1])}
    tensors |= {"shape": np.array([-1, 1, 1]), "size": np.array([1, 1, UNITS])}
    inputs = {"x": ["rows", "T", SIZE], name: ["rows"]}
    return saved(path, nodes, inputs, {"y": ["rows", 2]}, tensors, ids=(name,))


def test_a_file_that_wants_lengths_is_read_frame_by_frame(tmp_path, rng):
    """Over a window of the file the stream's last frame is its y."""
    path = counted(tmp_path / "m.onnx", rng, "lengths")
    with pytest.raises(NotImported, match=r"with (inputs=.*1}), (dims=.*1}) it has layers, and a call is one") as error:
        imported(path)
    given = eval("dict({}, {})".format(*re.search("with (inputs=.*}), (dims=.*}) it", str(error.value)).groups()))
    assert given == {"inputs": {"lengths": 1}, "dims": {"rows": 1, "T": 1}}
    model = imported(path, **given).model
    x = rng.standard_normal((9, SIZE)).astype(np.float32)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    ends = [session.run(None, {"x": x[None], "lengths": np.array([many])})[0] for many in range(1, 10)]
    assert model.check(x, np.concatenate(ends)).ok


def test_another_number_of_integers_is_no_length(tmp_path, rng):
    with pytest.raises(NotImported, match=r"give it as inputs={'shift': VALUE}") as error:
        imported(counted(tmp_path / "m.onnx", rng, "shift"))
    assert "it has layers" not in str(error.value)


def test_a_single_step_that_does_not_run_is_a_refusal(tmp_path, rng):
    path = counted(tmp_path / "m.onnx", rng, "lengths")
    with pytest.raises(NotImported, match="a single step of it does not run, so nothing can be proved: onnx_model: "):
        imported(path, inputs={"lengths": 4}, dims={"rows": 1, "T": 4})


def test_a_head_of_the_frame_alone_is_not_cut(tmp_path, rng):
    """Its input is x itself: nothing would be left."""
    nodes = [node("ArgMax", "x", "class", axis=-1)]
    path = saved(tmp_path / "m.onnx", nodes, {"x": [1, 4]}, {"class": [1, 1]}, {}, ids=("class",))
    with pytest.raises(NotImported, match="ArgMax 'class': no layer computes this") as error:
        imported(path)
    assert "outputs=" not in str(error.value)


def test_a_refusal_has_the_command_to_type(tmp_path, rng):
    """With the options that were given, quoted, and those that help."""
    path = str(file(tmp_path / "my file.onnx", rng, "ArgMax"))
    given = {"inputs": {}, "states": {"h": "h_out"}, "dims": {}, "frames": ["x"], "outputs": []}
    with pytest.raises(NotImported, match=r"  to type: (cnorm import .*)\n") as error:
        import_file(None, path, "o.cnorm", weights=None, smallest=None, npz=None, table=False, **given)
    typed = re.search(r"to type: (.*)", str(error.value))[1]
    options = ["--state", "h=h_out", "--frame", "x", "--output", "z"]
    assert shlex.split(typed) == ["cnorm", "import", path, "o.cnorm", *options]


def scaled(path, name):
    """A frame times an input of one integer."""
    nodes = [node("Cast", name, "r", to=1), node("Mul", "x r", "y")]
    return saved(path, nodes, {"x": [1, "n"], name: [1]}, {"y": [1, "n"]}, {}, ids=(name,))


def test_no_value_is_guessed_but_a_rate(tmp_path, rng):
    with pytest.raises(NotImported, match=r"give it as inputs={'gain': VALUE}") as error:
        imported(scaled(tmp_path / "m.onnx", "gain"))
    assert "sizes tried" not in str(error.value)
    assert "it has layers" not in str(error.value)
    with pytest.raises(NotImported, match=r"with inputs={'sample_rate': 16000} it has layers"):
        imported(scaled(tmp_path / "m.onnx", "sample_rate"))


@pytest.mark.exhaustive(one_in=2)
@pytest.mark.parametrize("as_node", [False, True])
def test_a_value_is_one_that_the_file_compares_with(as_node, tmp_path, rng):
    """With the size of an open dimension, as of Silero's file; the command of the refusal imports the file."""
    nodes = [
        node("Equal", "mode seven", "is"), node("Where", "is K L", "kernel"),
        node("Conv", "x kernel", "a", strides=[8]), node("Reshape", "a row", "r"), node("Gemm", "r V", "y"),
    ]  # fmt: skip
    tensors = {"K": normal(rng, 6, 1, 9), "L": normal(rng, 6, 1, 9), "seven": np.int64(7)}
    tensors |= {"row": np.array([1, 24]), "V": normal(rng, 24, 2)}
    if as_node:
        value = onnx.numpy_helper.from_array(tensors.pop("seven"))
        nodes.insert(0, node("Constant", "", "seven", value=value))
        del nodes[0].input[:]
    path = saved(tmp_path / "m.onnx", nodes, {"x": [1, 1, "n"], "mode": []}, {"y": [1, 2]}, tensors, ids=("mode",))
    with pytest.raises(NotImported, match=r"with inputs={'mode': 7}, dims={'n': 40} it has layers"):
        imported(path)
    given = {"inputs": {}, "states": {}, "dims": {}, "frames": [], "outputs": []}
    out = str(tmp_path / "o.cnorm")
    with pytest.raises(NotImported, match=r"  to type: (cnorm import .*)\n") as error:
        import_file(None, str(path), out, weights=None, smallest=None, npz=None, table=False, **given)
    typed = shlex.split(re.search(r"to type: (.*)", str(error.value))[1])
    assert typed == ["cnorm", "import", str(path), out, "--input", "mode=7", "--dim", "n=40"]
    assert CliRunner().invoke(commands, typed[1:]).exit_code == 0
    assert cnorm.load(out).input_size == 40


def test_outputs_of_each_frame_beside_a_head_of_the_last_are_told(tmp_path, rng):
    """y holds states of the cell, so nothing of it is lost but its place among the outputs."""
    nodes = [node("GRU", "x W R", "Y h1", hidden_size=UNITS), node("Squeeze", "Y one", "y")]
    tensors = {"W": normal(rng, 1, 3 * UNITS, 5), "R": normal(rng, 1, 3 * UNITS, UNITS), "one": np.array([1])}
    ends = {"x": ["T", 1, 5]}, {"y": ["T", 1, UNITS], "h1": [1, 1, UNITS]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        onnx_export.load(saved(tmp_path / "m.onnx", nodes, *ends, tensors))
    nodes += [node("Squeeze", "h1 zero", "h"), node("MatMul", "h V", "z")]
    tensors |= {"V": normal(rng, UNITS, 2), "zero": np.array([0])}
    path = saved(tmp_path / "m.onnx", nodes, ends[0], {"y": ["T", 1, UNITS], "z": [1, 2]}, tensors)
    with pytest.warns(UserWarning, match="y is 'z', of the last frame; outputs of each frame are left out: 'y'"):
        model = onnx_export.load(path)
    assert model.output_size == 2
    assert onnx_export.load(path, outputs=["y"]).output_size == UNITS
