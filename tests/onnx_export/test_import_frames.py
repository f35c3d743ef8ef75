"""`load` of files whose frame is several inputs, or token ids."""

import re
import shlex

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from graphs import imported, node, normal, saved
from onnx import TensorProto, helper

import cnorm
import onnx_export
from cnorm.tools.commands import commands
from onnx_export.errors import NotImported
from onnx_export.importer.command import import_file

OBSERVED, COMMAND, UNITS, TOKENS = 5, 3, 4, 7


def policy(path, rng, order="observed command", nodes=(), **more):
    """A policy of two inputs that are read one behind another, in some order."""
    weights = {"w": normal(rng, OBSERVED + COMMAND, UNITS), "b": normal(rng, UNITS)}
    nodes = [node("Concat", order, "x", axis=1), node("Gemm", "x w b", "a"), node("Elu", "a", "y"), *nodes]
    return saved(path, nodes, {"observed": [1, OBSERVED], "command": [1, COMMAND]}, {"y": [1, UNITS]} | more, weights)


@pytest.mark.parametrize("order", ["observed command", "command observed", "command observed command"])
def test_inputs_that_can_not_be_states_are_x_together(order, tmp_path, rng):
    if order.count("command") == 2:
        path = tmp_path / "m.onnx"
        weights = {"w": normal(rng, OBSERVED + 2 * COMMAND, UNITS), "b": normal(rng, UNITS)}
        nodes = [node("Concat", order, "x", axis=1), node("Gemm", "x w b", "y")]
        saved(path, nodes, {"observed": [1, OBSERVED], "command": [1, COMMAND]}, {"y": [1, UNITS]}, weights)
    else:
        path = policy(tmp_path / "m.onnx", rng, order)
    found = imported(path)
    assert found.frames == ("observed", "command")
    assert found.report.ok
    x = rng.standard_normal((9, OBSERVED + COMMAND)).astype(np.float32)
    assert found.model.check(x, found.file.run(x)).ok


def test_each_of_several_inputs_is_read_alone(tmp_path, rng):
    """A gate by one input of what another gives, and the sum with the first itself."""
    nodes = [
        node("Gemm", "observed v", "a"),
        node("Gemm", "command u", "g"),
        node("Sigmoid", "g", "gs"),
        node("Mul", "a gs", "ag"),
        node("Add", "ag observed", "y"),
    ]
    weights = {"v": normal(rng, OBSERVED, OBSERVED), "u": normal(rng, COMMAND, OBSERVED)}
    ends = {"command": [1, COMMAND], "observed": [1, OBSERVED]}, {"y": [1, OBSERVED]}
    path = saved(tmp_path / "m.onnx", nodes, *ends, weights)
    with pytest.raises(ValueError, match=r"is named by frames=\["):
        onnx_export.load(path)  # `observed` has the size of y, so it could be a state
    found = imported(path, frames=["observed", "command"])
    assert found.frames == ("command", "observed")  # the order of the file
    x = rng.standard_normal((9, OBSERVED + COMMAND)).astype(np.float32)
    assert found.model.check(x, found.file.run(x)).ok


def test_a_number_that_an_output_gives_back_is_no_frame_by_itself(tmp_path, rng):
    """m' = softmax(0.9 m + 0.1 a) is no cell; without being told, m is not made a part of x."""
    nodes = [
        node("Gemm", "x w", "a"),
        node("Mul", "m keep", "old"),
        node("Mul", "a rest", "new"),
        node("Add", "old new", "sum"),
        node("Softmax", "sum", "m2"),
        node("Tanh", "m2", "y"),
    ]
    weights = {"w": normal(rng, OBSERVED, UNITS), "keep": np.float32(0.9), "rest": np.float32(0.1)}
    ends = {"x": [1, OBSERVED], "m": [1, UNITS]}, {"y": [1, UNITS], "m2": [1, UNITS]}
    path = saved(tmp_path / "m.onnx", nodes, *ends, weights)
    with pytest.raises(ValueError, match="input 'm'"):
        onnx_export.load(path)
    found = imported(path, frames=["x", "m"])
    assert found.outputs == ("y", "m2")
    assert list(found.model.outputs.values()) == [slice(0, UNITS), slice(UNITS, 2 * UNITS)]
    assert "m2" in found.model.outputs


def robot(path, rng, kept=11):
    """A policy that sees a phase, a command, two readings and its last action, for the last three steps."""
    nodes = [
        node("Mul", "t around", "turns"), node("Div", "turns period", "phase"),
        node("Sin", "phase", "s"), node("Cos", "phase", "c"), node("Mul", "speed twentieth", "v"),
        node("Concat", "s c command place v last", "now", axis=0), node("Clip", "now low high", "seen"),
        node("Concat", "before seen", "long", axis=0), node("Slice", "long kept end", "after"),
        node("Unsqueeze", "after zero", "row"), node("Gemm", "row K b", "a"), node("Elu", "a", "e"),
        node("Gemm", "e V", "out"), node("Squeeze", "out zero", "action"), node("Mul", "action quarter", "scaled"),
    ]  # fmt: skip
    tensors = {"around": np.float32(6.2831855), "period": np.float32(0.4), "twentieth": np.float32(0.05)}
    tensors |= {"low": np.float32(-18), "high": np.float32(18), "quarter": np.float32(0.25)}
    tensors |= {"kept": np.array([kept]), "end": np.array([2**63 - 1]), "zero": np.array([0])}
    tensors |= {"K": normal(rng, 44 - kept, 7), "b": normal(rng, 7), "V": normal(rng, 7, 2)}
    inputs = {"t": [1], "command": [3], "place": [2], "speed": [2], "last": [2], "before": [33]}
    return saved(path, nodes, inputs, {"scaled": [2], "action": [2], "after": [44 - kept]}, tensors)


@pytest.mark.exhaustive
def test_a_refusal_names_inputs_that_are_frames(tmp_path, rng):
    """Three inputs have the size of the action, so it is not guessed which of them it gives back; here none."""
    path, out = robot(tmp_path / "robot.onnx", rng), str(tmp_path / "o.cnorm")
    given = {"inputs": {}, "states": {}, "dims": {}, "frames": [], "outputs": []}
    with pytest.raises(NotImported, match="the input 'speed' is no frame, and no cell or") as error:
        import_file(None, str(path), out, weights=None, smallest=None, npz=None, table=False, **given)
    assert str(error.value).count("it has layers") == 1
    typed = shlex.split(re.search(r"to type: (.*)", str(error.value))[1])
    assert typed == ["cnorm", "import", str(path), out, *["--frame", "place", "--frame", "speed", "--frame", "last"]]
    result = CliRunner().invoke(commands, typed[1:])
    assert result.exit_code == 0, result.output
    found = imported(path, frames=["place", "speed", "last"])
    assert found.states == {"before": "after"}
    kinds = [(layer.kind, getattr(layer, "function", "")) for layer in found.model.layers]
    assert {("Activation", "sin"), ("Activation", "cos")} < set(kinds)
    x = rng.standard_normal((200, found.model.input_size)).astype(np.float32)
    x[:, 0] = np.arange(200) / 50  # t, in seconds
    assert found.model.check(x, found.file.run(x)).ok


def test_frames_that_are_kept_by_half_are_no_state(tmp_path, rng):
    """What is behind `before` is no delay: with all inputs as frames there are layers, with fewer none."""
    path = robot(tmp_path / "robot.onnx", rng, kept=11)
    model = onnx.load(path)
    moved = next(node for node in model.graph.node if node.op_type == "Concat" and node.output[0] == "long")
    moved.input[:] = ["seen", "before"]  # the newest in front, and cut off
    onnx.save(model, path)
    with pytest.raises(NotImported, match=r"with frames=\['place', 'speed', 'last', 'before'\] it has layers") as error:
        imported(path)
    assert str(error.value).count("it has layers") == 1


@pytest.mark.parametrize(
    ("frames", "error", "says"),
    [
        ("x", TypeError, "frames must be a sequence of names"),
        (["z"], ValueError, "frames: 'z' must be an input"),
        (["h0"], ValueError, "frames: 'h0' must be an input"),
    ],
)
def test_frames_that_are_none(frames, error, says, tmp_path, rng):
    with pytest.raises(error, match=says):
        onnx_export.load(policy(tmp_path / "m.onnx", rng), frames=frames)


def tokens_file(path, rng, shape, nodes, y, ids=("ids",), **inputs):
    weights = {"table": normal(rng, TOKENS, UNITS), "w": normal(rng, UNITS, 2), "one": np.array([0])}
    return saved(path, nodes, {"ids": shape} | inputs, {"y": y}, weights, ids=ids)


@pytest.mark.parametrize("form", ["plain", "moved", "int32", "of a float"])
def test_token_ids_are_an_embedding(form, tmp_path, rng):
    front = {
        "plain": [node("Gather", "table ids", "e")],
        "moved": [node("Unsqueeze", "ids one", "i"), node("Squeeze", "i one", "j"), node("Gather", "table j", "e")],
        "int32": [node("Cast", "ids", "i", to=TensorProto.INT32), node("Gather", "table i", "e", axis=-2)],
        "of a float": [node("Cast", "ids", "i", to=TensorProto.INT64), node("Gather", "table i", "e")],
    }[form]
    nodes = [*front, node("MatMul", "e w", "y")]
    ids = () if form == "of a float" else ("ids",)
    found = imported(tokens_file(tmp_path / "m.onnx", rng, [1], nodes, [1, 2], ids))
    assert [layer.kind for layer in found.model.layers] == ["Embedding", "Linear"]
    assert found.model.tokens == {0: TOKENS}
    assert found.report.ok
    x = np.arange(TOKENS, dtype=np.float32)[:, None]
    assert found.model.check(x, found.file.run(x)).ok


def test_tokens_beside_numbers(tmp_path, rng):
    """Two ids with one table, and three numbers before them."""
    nodes = [
        node("Gather", "table ids", "e"),
        node("Flatten", "e", "row"),
        node("Concat", "numbers row", "x", axis=1),
        node("Gemm", "x v", "y"),
    ]
    weights = {"table": normal(rng, TOKENS, UNITS), "v": normal(rng, 3 + 2 * UNITS, 2)}
    ends = {"numbers": [1, 3], "ids": [1, 2]}, {"y": [1, 2]}
    found = imported(saved(tmp_path / "m.onnx", nodes, *ends, weights, ids=["ids"]))
    assert found.frames == ("numbers", "ids")
    assert found.model.tokens == {3: TOKENS, 4: TOKENS}
    x = np.hstack([rng.standard_normal((9, 3)), rng.integers(0, TOKENS, (9, 2))]).astype(np.float32)
    assert found.model.check(x, found.file.run(x)).ok
    with pytest.raises(ValueError, match="token"):
        found.model.run(x + 0.5)


@pytest.mark.parametrize("steps", ["T", 4])
def test_token_ids_over_time(steps, tmp_path, rng):
    weights = {"table": normal(rng, TOKENS, UNITS), "w": normal(rng, 1, 3 * 6, UNITS), "r": normal(rng, 1, 3 * 6, 6)}
    nodes = [
        node("Gather", "table ids", "e"),
        helper.make_node("GRU", ["e", "w", "r"], ["all"], hidden_size=6),
        node("Squeeze", "all axes", "y"),
    ]
    weights["axes"] = np.array([1])
    ends = {"ids": [steps, 1]}, {"y": [steps, 1, 6]}
    found = imported(saved(tmp_path / "m.onnx", nodes, *ends, weights, ids=["ids"]))
    assert found.time_axis == 0
    assert [layer.kind for layer in found.model.layers] == ["Embedding", "GRU"]
    x = rng.integers(0, TOKENS, (4, 1)).astype(np.float32)
    assert found.model.check(x, found.file.run(x)).ok


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        ([node("Add", "ids one", "i"), node("Gather", "table i", "e")], "give it as inputs="),
        (
            [node("Gather", "table ids", "e"), node("Shape", "ids", "s"), node("Add", "ids s", "z")],
            "give it as inputs=",
        ),
    ],
)
def test_other_integers_are_refused(nodes, says, tmp_path, rng):
    path = tokens_file(tmp_path / "m.onnx", rng, [1], [*nodes, node("MatMul", "e w", "y")], [1, 2])
    with pytest.raises(ValueError, match=says):
        onnx_export.load(path)


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        ([node("Gemm", "x v", "a"), node("Cast", "a", "i", to=TensorProto.INT64)], "must be elements of the frame"),
        (
            [node("Cast", "x", "i", to=TensorProto.INT64), node("Cast", "i", "y", to=TensorProto.FLOAT)],
            "makes integers",
        ),
    ],
)
def test_integers_that_are_computed_are_refused(nodes, says, tmp_path, rng):
    if nodes[-1].output[0] == "i":
        nodes = [*nodes, node("Gather", "table i", "e"), node("MatMul", "e w", "y")]
    weights = {"v": normal(rng, OBSERVED, 1), "table": normal(rng, TOKENS, UNITS), "w": normal(rng, UNITS, 2)}
    with pytest.raises(ValueError, match=says):
        onnx_export.load(saved(tmp_path / "m.onnx", nodes, {"x": [1, OBSERVED]}, {"y": [1, OBSERVED]}, weights))


def test_an_exported_embedding_is_read_as_a_strangers_file(tmp_path, rng):
    import onnx

    layers = [cnorm.Embedding(normal(rng, TOKENS, UNITS)), cnorm.Linear(normal(rng, 3, UNITS))]
    model = cnorm.Model(layers)
    exported = onnx_export.export(model)
    del exported.metadata_props[:]
    onnx.save(exported, tmp_path / "m.onnx")
    found = imported(tmp_path / "m.onnx")
    x = np.arange(TOKENS, dtype=np.float32)[:, None]
    assert found.model.run(x).tobytes() == model.run(x).tobytes()


@pytest.mark.parametrize("outputs", [3, OBSERVED])  # as many as inputs: x could be a state, too
def test_a_state_that_two_layers_read_is_refused(outputs, tmp_path, rng):
    """The old h beside the new one is a convolution over time, whose cache would be a second copy of h."""
    nodes = [
        node("Gemm", "x w", "a"),
        node("Gemm", "h u", "b"),
        node("Add", "a b", "s"),
        node("Tanh", "s", "h2"),
        node("Concat", "h h2", "both", axis=1),
        node("Gemm", "both v", "y"),
    ]
    weights = {"w": normal(rng, OBSERVED, UNITS), "u": normal(rng, UNITS, UNITS), "v": normal(rng, 2 * UNITS, outputs)}
    ends = {"x": [1, OBSERVED], "h": [1, UNITS]}, {"y": [1, outputs], "h2": [1, UNITS]}
    with pytest.raises(ValueError, match="input 'h': it is the state of two layers"):
        onnx_export.load(saved(tmp_path / "m.onnx", nodes, *ends, weights))


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_files_of_half_and_double_precision(dtype, tmp_path, rng):
    """Their states and outputs are of that type; the layers and the proof are in float32."""
    nodes = [
        node("Gemm", "x w", "a"),
        node("Gemm", "h u", "b"),
        node("Add", "a b", "s"),
        node("Tanh", "s", "h2"),
        node("Gemm", "h2 v", "y"),
    ]
    weights = {"w": normal(rng, OBSERVED, UNITS), "u": normal(rng, UNITS, UNITS), "v": normal(rng, UNITS, 3)}
    weights = {name: array.astype(dtype) for name, array in weights.items()}
    ends = {"x": [1, OBSERVED], "h": [1, UNITS]}, {"y": [1, 3], "h2": [1, UNITS]}
    path = saved(tmp_path / "m.onnx", nodes, *ends, weights)
    model = onnx.load(path)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    onnx.save(model, path)
    found = imported(path)
    assert [layer.kind for layer in found.model.layers] == ["RNN", "Linear"]
    assert found.states == {"h": "h2"}
    assert found.report.ok


def test_options_of_another_type_are_refused(tmp_path):
    for name in ("inputs", "states", "dims"):
        with pytest.raises(TypeError, match=f"^{name} must be a mapping of names, got int$"):
            onnx_export.load(tmp_path / "m.onnx", **{name: 3})
    with pytest.raises(TypeError, match=r"^frames must be a sequence of names, got 3$"):
        onnx_export.load(tmp_path / "m.onnx", frames=3)
