"""Names, the layers that read by them (Add, Multiply, Slice, Concat), and models with several outputs."""

import copy
import inspect
import json
import pickle

import cells
import numpy as np
import onnx
import pytest
from ort_stream import OrtStream
from tapes import back, own_gradients, run, tape_of

import cnorm
import onnx_export
from cnorm.layers.chain import with_outputs
from cnorm.storage.loading import model_of
from cnorm.storage.model_files import configuration
from cnorm.tools.quantize import measured

OUTPUTS = ("mask", "both")


def whole(rng, *shape):
    """Small whole numbers, whose sums of products are exact in float32."""
    return rng.integers(-2, 3, shape).astype(np.float32)


def layers(rng):
    """Every tap, readers of one layer in several places, a Residual with a name of its own, parts that overlap."""
    return [
        cnorm.Linear(whole(rng, 6, 5), name="encoder"),
        cnorm.Linear(whole(rng, 6, 6), name="mask"),
        cnorm.Multiply("encoder"),
        cnorm.Add("mask", name="sum"),
        cnorm.Residual([cnorm.Linear(whole(rng, 6, 6), name="sum"), cnorm.Multiply("input"), cnorm.Add("sum")]),
        cnorm.Add("encoder"),
        cnorm.Linear(whole(rng, 3, 6), name="few"),
        cnorm.Slice("sum", 1, 5, name="part"),
        cnorm.Concat(["input", "part", "few", "part"], name="all"),
        cnorm.Linear(whole(rng, 2, 16), whole(rng, 2)),
        cnorm.Scale(whole(rng, 2), name="both"),
    ]


class Dual:
    """Values [rows, n] and their derivatives [parameters, rows, n], both exact."""

    def __init__(self, value, slope):
        self.value, self.slope = value, slope

    def __add__(self, other):
        return Dual(self.value + other.value, self.slope + other.slope)

    def __mul__(self, other):
        return Dual(self.value * other.value, self.slope * other.value + self.value * other.slope)

    def times(self, matrix):
        slope = self.slope @ matrix.value.T + np.einsum("ri,poi->pro", self.value, matrix.slope)
        return Dual(self.value @ matrix.value.T, slope)


def joined(parts):
    return Dual(*(np.concatenate([getattr(one, key) for one in parts], axis=-1) for key in ("value", "slope")))


def exact(layers, x, weight_of):
    """The outputs of layers for x, by what docs/cells.md says of each."""
    known, y = {"input": x}, x
    for i, layer in enumerate(layers):
        if layer.kind == "Linear":
            y = y.times(weight_of(layer, "weight"))
            y = y + weight_of(layer, "bias") if "bias" in layer.weights else y
        elif layer.kind == "Scale":
            y = y * weight_of(layer, "weight")
        elif layer.kind == "Residual":
            y = y + exact(layer.layers, y, weight_of)
        elif layer.kind == "Add":
            y = y + known[layer.of]
        elif layer.kind == "Multiply":
            y = y * known[layer.of]
        elif layer.kind == "Slice":
            y = known[layer.of]
            y = Dual(y.value[:, layer.start : layer.stop], y.slope[..., layer.start : layer.stop])
        else:
            assert layer.kind == "Concat", i
            y = joined([known[name] for name in layer.reads])
        known[layer.name or i] = y
    return y


def duals(stack, x):
    """The parameters of a stack and x as duals, each with derivatives of its own, and where these are."""
    leaves = [leaf for i, layer in enumerate(stack) for _, leaf in layer.leaves(str(i))]
    arrays = {(id(leaf), name): array for leaf in leaves for name, array in leaf.weights.items()} | {"x": x}
    ends = np.cumsum([array.size for array in arrays.values()])
    places = {key: slice(end - array.size, end) for (key, array), end in zip(arrays.items(), ends, strict=True)}
    found = {}
    for key, array in arrays.items():
        slope = np.zeros((ends[-1], array.size))
        slope[places[key]] = np.eye(array.size)
        shape = np.atleast_2d(array).shape
        found[key] = Dual(np.float64(array).reshape(shape), slope.reshape(-1, *shape))
    return found, places


@pytest.fixture
def model(rng):
    return cnorm.Model(layers(rng), OUTPUTS)


def test_outputs_are_those_of_the_layers(model, isa, rng):
    x = whole(rng, 40, 5)
    found, _ = duals(model.layers, x)
    stack = with_outputs(model.layers, OUTPUTS)
    expected = exact(stack, found["x"], lambda layer, name: found[id(layer), name]).value
    assert np.abs(expected).max() < 2**24
    y = model.run(x)
    assert np.array_equal(y, expected)
    assert y.shape == (40, 8)
    assert model.outputs == {"mask": slice(0, 6), "both": slice(6, 8)}
    named = model.views(y)
    assert named["both"].base is not None
    assert np.array_equal(named["both"], expected[:, 6:])
    stream = model.stream()
    assert b"".join(stream.step(frame).tobytes() for frame in x) == y.tobytes()
    assert model.step_many([model.stream() for _ in x], x).tobytes() == y.tobytes()


@pytest.mark.parametrize(("steps", "batch"), [(1, 1), (5, 7)])
def test_gradients_are_exact_in_whole_numbers(model, steps, batch, isa, rng):
    """All numbers are whole and below 2^24, so float32 has no rounding and any order of a sum has the same bits."""
    stack = with_outputs(model.layers, OUTPUTS)
    x, dy = whole(rng, steps, batch, 5), whole(rng, steps, batch, 8)
    found, places = duals(stack, x.reshape(-1, 5))
    expected = exact(stack, found["x"], lambda layer, name: found[id(layer), name])
    slope = np.einsum("prn,rn->p", expected.slope, dy.reshape(-1, 8))
    assert np.abs(slope).max() < 2**24
    tape = tape_of(stack, steps, batch)
    assert np.array_equal(run(tape, x).reshape(-1, 8), expected.value)
    dx = back(tape, dy, 5)
    assert np.array_equal(dx.ravel(), slope[places["x"]])
    parameters = cnorm.cells.parameters.Parameters(stack, 5)
    parameters.collect(tape, False)
    assert np.array_equal(parameters.gradient, slope[: places["x"].start])


def test_gradients_of_several_readers_add_in_the_order_of_the_list(rng):
    """The layer behind comes first, then the readers in their order: in float32 another order has other bits."""
    a, b, c = (np.float32(one) for one in (1, 2.0**-24, 2.0**-24))
    stack = [
        cnorm.Scale(np.ones(1, np.float32), name="first"),
        cnorm.Scale(np.array([a]), name="zeroth"),
        cnorm.Slice("first", 0, 1),
        cnorm.Scale(np.array([b]), name="second"),
        cnorm.Slice("first", 0, 1),
        cnorm.Scale(np.array([c]), name="third"),
        cnorm.Add("second"),
        cnorm.Add("zeroth"),
    ]
    tape = tape_of(stack, 1, 1)
    run(tape, np.ones((1, 1, 1), np.float32))
    back(tape, np.ones((1, 1, 1), np.float32), 1)
    assert own_gradients(stack[0], tape)["weight"] == (a + b) + c != a + (b + c)


def tapped(rng):
    """A mask over an encoder as in DTLN, with recurrent layers between, and a state in a Residual."""
    lstm = cells.random_cell(("LSTM", "torch"), rng, 12, 20)[0]
    gru = cells.random_cell(("GRU", "torch"), rng, 20, 20)[0]
    w = [rng.standard_normal(shape).astype(np.float32) / 4 for shape in ((12, 7), (12, 20), (3, 12))]
    return [
        cnorm.Linear(w[0], name="encoder"),
        lstm,
        cnorm.Residual([gru, cnorm.Multiply("input")], name="inner"),
        cnorm.Linear(w[1]),
        cnorm.Activation("sigmoid", name="mask"),
        cnorm.Multiply("encoder"),
        cnorm.Linear(w[2], name="y"),
    ]


def test_streams_tapes_and_learners_have_the_same_bits(isa, rng):
    stack = tapped(rng)
    model = cnorm.Model(stack, ("mask", "y"))
    x = rng.standard_normal((37, 33, 7)).astype(np.float32)
    y = run(tape_of(with_outputs(model.layers, ("mask", "y")), 37, 33), x)
    streams = [model.stream() for _ in range(33)]
    for t, frame in enumerate(x):
        assert model.step_many(streams, frame).tobytes() == y[t].tobytes()
    for b in (0, 32):
        assert model.run(x[:, b]).tobytes() == np.ascontiguousarray(y[:, b]).tobytes()
    learner = cnorm.Learner(model, cnorm.SGD(0.1), truncate=8)
    for frame, row in zip(x[:, 0], y[:, 0], strict=True):
        assert learner.step(frame).tobytes() == row.tobytes()
    learner.learn(np.ones(15, np.float32))
    after = learner.model()
    assert after.outputs == model.outputs
    assert [layer.name for layer in after.layers] == [layer.name for layer in stack]
    again = cnorm.Learner.restore(learner.save())
    assert again.step(x[0, 1]).tobytes() == learner.step(x[0, 1]).tobytes()
    assert not np.array_equal(after.layers[0].weights["weight"], stack[0].weights["weight"])


def test_every_instruction_set_has_the_same_gradients(rng):
    stack = with_outputs(tuple(tapped(rng)), ("mask", "y"))
    x, dy = rng.standard_normal((5, 33, 7)).astype(np.float32), rng.standard_normal((5, 33, 15)).astype(np.float32)
    before, results = cnorm.active_isa(), set()
    try:
        for isa in cnorm.available_isas():
            cnorm.use_isa(isa)
            tape = tape_of(stack, 5, 33)
            tape.start()
            y, dx = run(tape, x), back(tape, dy, 7)
            gradients = [array.tobytes() for named in tape.gradients for array in named.values()]
            results.add((y.tobytes(), dx.tobytes(), tape.dstate.tobytes(), *gradients))
    finally:
        cnorm.use_isa(before)
    assert len(results) == 1


def test_models_are_saved_packed_pickled_and_rounded_with_their_names(tmp_path, rng):
    model = cnorm.Model(tapped(rng), ("mask", "y"))
    x = rng.standard_normal((9, 7)).astype(np.float32)
    model.save(tmp_path / "a.safetensors")
    model.save_packed(tmp_path / "a.cnorm")
    packed = cnorm.load(tmp_path / "a.cnorm")
    others = [cnorm.load(tmp_path / "a.safetensors"), packed, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)]
    for other in others:
        assert other.identity == model.identity
        assert other.outputs == model.outputs
        assert other.run(x).tobytes() == model.run(x).tobytes()
    saved = model.stream()
    saved.process(x)
    assert packed.restore(saved.save()).step(x[0]).tobytes() == saved.step(x[0]).tobytes()
    rounded = model.with_weights("int8", smallest=1)
    assert [layer.name for layer in rounded.layers] == [layer.name for layer in model.layers]
    assert rounded.outputs == model.outputs
    assert rounded.identity != model.identity
    assert repr(model).startswith("Model([encoder = Linear(7 -> 12), ")
    assert "outputs=('mask', 'y')" in repr(model)


def test_a_frame_may_be_overwritten_by_the_outputs_that_read_it(rng):
    """The last layer reads the frame, and y is the same memory."""
    w = np.eye(4, dtype=np.float32)
    swapped = [cnorm.Linear(w, name="a"), cnorm.Slice("input", 2, 4, name="b"), cnorm.Slice("a", 0, 2, name="c")]
    model = cnorm.Model([*swapped, cnorm.Concat(["b", "c"])])
    x = rng.standard_normal((20, 4)).astype(np.float32)
    expected, frames = x[:, [2, 3, 0, 1]].copy(), x.copy()
    assert np.array_equal(model.stream().process(frames, out=frames), expected)
    frame = x[0].copy()
    assert np.array_equal(model.stream().step(frame, out=frame), expected[0])


@pytest.mark.parametrize("options", [{}, {"form": "sequence"}, {"form": "sequence", "loop": "loop"},
                                     {"form": "sequence", "loop": "unrolled", "steps": 3}, {"portable": True},
                                     {"opset": 13}], ids=str)  # fmt: skip
def test_it_is_exported(options, tmp_path, rng):
    *layers, last = tapped(rng)
    model = cnorm.Model([*layers, cnorm.Linear(last.weights["weight"], name="y2")], ("mask", "y2"))
    exported = onnx_export.export(model, tmp_path / "a.onnx", **options)
    report = onnx_export.check_parity(model, exported, steps=8)
    assert report.ok, report
    assert [value.name for value in exported.graph.output][-2:] == ["mask", "y2"]
    if not options.get("portable"):
        again = onnx_export.load(tmp_path / "a.onnx")
        assert again.identity == model.identity
        assert again.outputs == model.outputs


def test_an_output_named_like_another_value_is_not_exported(rng):
    with pytest.raises(ValueError, match="an output must have another name in a file, got 'y'"):
        onnx_export.export(cnorm.Model(tapped(rng), ("mask", "y")))


def test_a_file_with_other_elements_as_an_output_fails_parity(model):
    exported = onnx_export.export(model)
    assert OrtStream(exported).step(np.ones(5, np.float32)).shape == (8,)
    (start,) = (node for node in exported.graph.node if node.output[0] == "both_starts")
    start.attribute[0].t.CopyFrom(onnx.numpy_helper.from_array(np.array([5])))
    with pytest.raises(ValueError, match=r"onnx_model must give both as elements 6 to 8 of y|must give both \["):
        onnx_export.check_parity(model, exported, steps=2)


def test_every_tap_is_exported(model, tmp_path):
    exported = onnx_export.export(model, tmp_path / "a.onnx")
    report = onnx_export.check_parity(model, exported, steps=8)
    assert report.ok, report


def test_rounding_is_measured_along_the_taps(rng):
    model = cnorm.Model(tapped(rng), ("mask", "y"))
    x = rng.standard_normal((9, 7)).astype(np.float32)
    report = measured(model, model.with_weights("int8", smallest=1), [x])
    assert np.abs(report.exact[0] - model.run(x)).max() < 1e-4
    assert {layer.name for layer in report.layers} == {"layers.0", "layers.1", "layers.2.0", "layers.3", "layers.6"}


def test_names_behind_a_bidirectional_layer(rng):
    ways = [cells.random_cell(("GRU", "torch"), rng, 4, 3)[0] for _ in range(2)]
    linear = cnorm.Linear(rng.standard_normal((4, 4)).astype(np.float32), name="before")
    behind = cnorm.Activation("tanh", name="behind")
    both = cnorm.Bidirectional(*ways, name="both")
    model = cnorm.Model([linear, both, behind, cnorm.Multiply("both", name="y")], ("behind", "y"))
    x = rng.standard_normal((7, 4)).astype(np.float32)
    y = model.views(model.run(x))
    between = cnorm.Model([linear, both]).run(x)
    assert np.array_equal(y["y"], y["behind"] * between)
    for name in ("before", "input"):
        with pytest.raises(ValueError, match=f"got '{name}'; names before a Bidirectional layer"):
            cnorm.Model([linear, both, behind, cnorm.Multiply(name)])


W = np.ones((3, 3), np.float32)
A = cnorm.Linear(W, name="a")


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: [A, cnorm.Add("b")], r"layers\[1\], Add\('b'\), must read one of input, a, got 'b'"),
        (lambda: [cnorm.Linear(W), cnorm.Add("a"), A], "must read one of input, got 'a'"),
        (lambda: [A, cnorm.Add("a")], "must read another layer than the one before it"),
        (lambda: [A, A, cnorm.Add("a")], r"layers\[1\] must have a name of its own, got 'a'"),
        (lambda: [A, cnorm.Linear(W[:2]), cnorm.Multiply("a")], "must read 2 elements, as many as it takes, got the 3"),
        (lambda: [A, cnorm.Linear(W), cnorm.Slice("a", 1, 4)], "must end within the 3 elements of 'a'"),
        (lambda: [A, cnorm.Linear(W), cnorm.Slice("a", 0, 2)], r"layers\[1\], Linear\(3 -> 3\), must have a reader"),
        (lambda: [cnorm.Concat(["input"]), cnorm.Linear(W)], "does not say how long the frame is"),
        (lambda: [cnorm.Residual([A]), cnorm.Add("a")], "must read one of input, got 'a'"),
        (lambda: [A, cnorm.Residual([cnorm.Linear(W), cnorm.Add("a")])], "must read one of input, got 'a'"),
        (lambda: [cnorm.Residual([A, cnorm.Linear(W), cnorm.Slice("a", 0, 3)])], "must have a reader"),
        (lambda: [cnorm.Linear(W, name="input")], "another than 'input'"),
        (lambda: [cnorm.Linear(W, name="0 a")], "name must be at most 64 letters"),
        (lambda: [cnorm.Slice("a", 2, 2)], "start must be at least 0 and below stop"),
        (lambda: [cnorm.Concat([])], "1 to 8 names"),
        (lambda: [cnorm.Concat(["a"] * 9)], "1 to 8 names"),
    ],
)
def test_lists_that_do_not_fit(made, message):
    with pytest.raises(ValueError, match=message):
        cnorm.Model(made())


@pytest.mark.parametrize(
    ("outputs", "error", "message"),
    [
        ("ab", TypeError, "outputs must be a sequence of names, got str"),
        (3, TypeError, "outputs must be a sequence of names, got int"),
        (("a", "c"), ValueError, r"outputs must be names of layers, each once, of a, b, got \('a', 'c'\)"),
        (("a", "a"), ValueError, "each once"),
        (("a",), ValueError, "must have a reader"),
    ],
)
def test_outputs_that_do_not_fit(outputs, error, message):
    with pytest.raises(error, match=message):
        cnorm.Model([A, cnorm.Linear(W, name="b")], outputs)


def test_every_layer_takes_a_name():
    for kind in cnorm.layers.KINDS.values():
        name = inspect.signature(kind.__init__).parameters["name"]
        assert (name.default, name.kind) == (None, inspect.Parameter.KEYWORD_ONLY), kind


@pytest.mark.parametrize("wrong", [{"of": 3}, {"of": "a", "more": 1}, {"of": None}, {"name": 3, "of": "a"}])
def test_damaged_configurations_are_refused(wrong):
    model = cnorm.Model([A, cnorm.Linear(W, name="b"), cnorm.Add("a", name="c")], ("a", "c"))
    whole = json.loads(configuration(model.layers, model.outputs))
    tensors = {"layers.0.weight": W, "layers.1.weight": W}
    assert model_of("file", json.dumps(whole), tensors).identity == model.identity
    damaged = whole | {"layers": [*whole["layers"][:2], {"type": "Add"} | wrong]}
    for config in (
        damaged,
        whole | {"outputs": {"a": 4, "c": 2}},
        whole | {"outputs": ["a"]},
        whole | {"outputs": {"a": -3}},
    ):
        with pytest.raises(ValueError, match="file: "):
            model_of("file", json.dumps(config), tensors)
