"""`load` of functions in other writings, of outputs that are inputs, and what its refusals and models say."""

import numpy as np
import pytest
from graphs import imported, node, normal, saved

import cnorm
import onnx_export
from onnx_export.errors import NotImported

SIZE, UNITS = 4, 6


def kinds(found):
    return [getattr(layer, "function", layer.kind) for layer in found.model.layers]


@pytest.mark.parametrize(("opset", "attributes"), [(17, {"axis": -1}), (17, {}), (12, {"axis": 1}), (12, {})])
@pytest.mark.parametrize("frames", [1, "T"])
def test_log_softmax(frames, opset, attributes, tmp_path, rng):
    nodes = [node("MatMul", "x M", "v"), node("LogSoftmax", "v", "y", **attributes)]
    path = saved(
        tmp_path / "m.onnx",
        nodes,
        {"x": [frames, SIZE]},
        {"y": [frames, UNITS]},
        {"M": normal(rng, SIZE, UNITS)},
        opset,
    )
    found = imported(path)
    assert "MaxPool1d" in kinds(found)
    x = np.float32([[300, -300, 200, 0]])
    with np.errstate(all="ignore"):
        assert np.isfinite(found.model.run(x)).all()


def test_log_softmax_over_frames_is_refused(tmp_path, rng):
    nodes = [node("MatMul", "x M", "v"), node("LogSoftmax", "v", "y", axis=0)]
    path = saved(tmp_path / "m.onnx", nodes, {"x": ["T", SIZE]}, {"y": ["T", 3]}, {"M": normal(rng, SIZE, 3)})
    with pytest.raises(NotImported):
        imported(path)


# ------------------------------------------------------------------------------------------------ affine PReLU


def affine_prelu(path, rng, factor, slope, *, kink="where", other="v", op="Add"):
    """factor v + offset, and v above 0 or slope v below, added up."""
    kinks = {
        "where": [node("Greater", "v zero", "above"), node("Mul", "slope v", "w"), node("Where", "above v w", "k")],
        "prelu": [node("PRelu", "v slope", "k")],
        "relu": [node("Relu", "v", "k")],
    }
    nodes = [node("MatMul", "x M", "v"), node("MatMul", "x N", "u"), *kinks[kink]]
    nodes += [node("Mul", f"factor {other}", "f"), node("Add", "f offset", "o"), node(op, "o k", "y")]
    tensors = {"M": normal(rng, SIZE, UNITS), "N": normal(rng, SIZE, UNITS), "offset": normal(rng, UNITS)}
    tensors |= {"factor": np.full(UNITS, factor, np.float32) * np.float32([1, 1.5, 1, 1, 1, 1])}
    tensors |= {"slope": np.full(UNITS, slope, np.float32), "zero": np.float32(0.0)}
    return saved(path, nodes, {"x": [1, SIZE]}, {"y": [1, UNITS]}, tensors)


def also_right(found, rng):
    """The functions of a proven file whose model computes what it does over frames of several scales."""
    x = (rng.standard_normal((60, SIZE)) * np.geomspace(1e-6, 1e6, 60)[:, None]).astype(np.float32)
    assert found.report.ok
    assert found.model.check(x, found.file.run(x)).ok
    return kinds(found)


@pytest.mark.parametrize("kink", ["where", "prelu", "relu"])
@pytest.mark.parametrize(("factor", "slope"), [(0.5, 0.25), (-0.25, 0.75), (-3.0, -0.5), (1.0, 4.0)], ids=str)
def test_a_line_and_a_prelu_of_the_same_are_one_prelu(kink, factor, slope, tmp_path, rng):
    found = imported(affine_prelu(tmp_path / "m.onnx", rng, factor, slope, kink=kink))
    assert also_right(found, rng) == ["Linear", "prelu", "CausalConv1d"]


@pytest.mark.parametrize(
    "given",
    [{"factor": -1.0}, {"factor": -0.9999999}, {"factor": 0.5, "other": "u"}, {"factor": 0.5, "op": "Sub"}],
    ids=["nothing is left above 0", "next to nothing", "of another", "a difference"],
)
def test_other_sums_with_a_prelu_stay_sums(given, tmp_path, rng):
    found = imported(affine_prelu(tmp_path / "m.onnx", rng, slope=0.25, **given))
    assert "Add" in also_right(found, rng)


# ------------------------------------------------------------------------------------------------ 1 - z


def gru(path, rng, negative):
    """A GRU whose 1 - z is a sigmoid of another vector: `negative` are the nodes that make it of z's."""
    tensors = {f"{letter}{gate}": normal(rng, n, UNITS) for gate in "zrn" for letter, n in (("W", SIZE), ("R", UNITS))}
    tensors |= {"b": normal(rng, UNITS), "c": normal(rng, UNITS)}
    tensors |= {f"-{name}": -tensors[name] for name in ("Wz", "Rz", "b")}
    nodes = [node("MatMul", "x Wz", "xz"), node("MatMul", "h Rz", "hz"), node("Add", "xz hz", "s"),
             node("Add", "s b", "pz"), node("Sigmoid", "pz", "z"), *negative, node("Sigmoid", "nz", "keep"),
             node("MatMul", "x Wr", "xr"), node("MatMul", "h Rr", "hr"), node("Add", "xr hr", "pr"),
             node("Sigmoid", "pr", "r"), node("Mul", "r h", "rh"), node("MatMul", "rh Rn", "hn"),
             node("MatMul", "x Wn", "xn"), node("Add", "xn hn", "pn"), node("Tanh", "pn", "n"),
             node("Mul", "z h", "old"), node("Mul", "keep n", "new"), node("Add", "old new", "y")]  # fmt: skip
    return saved(path, nodes, {"x": [1, SIZE], "h": [1, UNITS]}, {"y": [1, UNITS]}, tensors)


NEGATIVES = {
    "Neg": [node("Neg", "pz", "nz")],
    "weights": [node("MatMul", "x -Wz", "a"), node("MatMul", "h -Rz", "d"), node("Add", "a d", "e"),
                node("Add", "e -b", "nz")],
}  # fmt: skip


@pytest.mark.parametrize("way", NEGATIVES)
def test_one_minus_a_gate_as_the_sigmoid_of_its_negative(way, tmp_path, rng):
    found = imported(gru(tmp_path / "m.onnx", rng, NEGATIVES[way]))
    assert kinds(found) == ["GRU"]
    assert found.states == {"h": "y"}


def test_another_bias_of_the_negative_is_refused(tmp_path, rng):
    nodes = [node("Neg", "s", "t"), node("Add", "t c", "nz")]
    with pytest.raises(NotImported):
        imported(gru(tmp_path / "m.onnx", rng, nodes))


# ------------------------------------------------------------------------------------------------ outputs, models


@pytest.mark.parametrize("frames", [1, "T"])
def test_an_output_may_be_the_input(frames, tmp_path, rng):
    nodes = [node("MatMul", "x M", "y"), node("Identity", "x", "z")]
    inputs, outputs = {"x": [frames, SIZE]}, {"y": [frames, 3], "z": [frames, SIZE]}
    model = imported(saved(tmp_path / "m.onnx", nodes, inputs, outputs, {"M": normal(rng, SIZE, 3)})).model
    x = rng.standard_normal((5, SIZE)).astype(np.float32)
    assert np.array_equal(model.run(x)[:, list(model.outputs.values())[1]], x)


def test_a_window_is_kept_in_files(tmp_path, rng):
    model = cnorm.Model([cnorm.Linear(normal(rng, 3, SIZE))])
    model.window = 30
    model.save(tmp_path / "m.safetensors")
    model.save_packed(tmp_path / "m.cnorm")
    rounded = model.with_weights("int8", smallest=1)
    rounded.save(tmp_path / "r.safetensors")
    for path in ("m.safetensors", "m.cnorm", "r.safetensors"):
        found = cnorm.load(tmp_path / path)
        assert found.window == 30
        assert found.identity == (rounded if path[0] == "r" else model).identity
    assert cnorm.Model([cnorm.Linear(normal(rng, 3, SIZE))]).window is None


@pytest.mark.parametrize("window", [0, -1, 2**40, "30", True, 1.5])
def test_a_window_of_an_untrusted_file_is_checked(window, tmp_path, rng):
    model = cnorm.Model([cnorm.Linear(normal(rng, 3, SIZE))])
    model.window = window or -1
    model.save(tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match="window must be a number of frames from 1"):
        cnorm.load(tmp_path / "m.safetensors")


def test_a_size_that_the_proof_refuses_is_not_proposed(tmp_path, rng, monkeypatch):
    """Wherever the file is read, its layers are tried before its size is proposed."""
    from onnx_export.importer import proof

    tensors = {"M": normal(rng, 40, 3)}
    path = saved(tmp_path / "m.onnx", [node("MatMul", "x M", "y")], {"x": [1, None]}, {"y": [1, 3]}, tensors)
    with pytest.raises(NotImported) as error:
        imported(path)
    assert any("40" in reason for reason in error.value.reasons)
    monkeypatch.setattr(proof, "prove", lambda *given: (_ for _ in ()).throw(NotImported("it is not")))
    with pytest.raises(NotImported) as error:
        imported(path)
    assert not any("has layers" in reason for reason in error.value.reasons)


@pytest.mark.parametrize("fault", ["depth", "empty", "rank"])
def test_a_refusal_is_in_words_of_its_own(fault, tmp_path, rng):
    """Not in those of Python's, NumPy's and onnx's exceptions."""
    nodes, tensors = [node("MatMul", "x M", "v0")], {"M": normal(rng, SIZE, SIZE)}
    if fault == "depth":
        nodes += [node("Add", f"v{i} v{i}", f"v{i + 1}") for i in range(400)]
    elif fault == "empty":
        tensors |= {"a": np.array([5]), "b": np.array([9]), "c": np.array([1])}
        nodes += [node("Slice", "v0 a b c", "e"), node("ReduceMean", "e", "m"), node("Add", "v0 m", "v1")]
    else:
        tensors |= {"s": np.array([1] * 70)}
        nodes += [node("Reshape", "v0 s", "v1")]
    nodes += [node("Identity", nodes[-1].output[0], "y")]
    path = saved(tmp_path / "m.onnx", nodes, {"x": [1, SIZE]}, {"y": [1, SIZE]}, tensors)
    with pytest.raises(NotImported) as error:
        onnx_export.load(path)
    assert not any(word in str(error.value) for word in ("Error", "recursion", "ndarray", "zero-size"))


def test_json_of_rtneural_gets_the_name_of_its_reader(tmp_path):
    (tmp_path / "m.json").write_text('{"in_shape": [null, null, 1], "layers": []}')
    with pytest.raises(ValueError, match="RTNeural"):
        onnx_export.load(tmp_path / "m.json")
