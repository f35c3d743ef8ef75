"""`load` of streaming models that other programs wrote: layers and states by structure, proven against the file."""

import re
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import imported, node, normal, saved
from onnx import helper, numpy_helper

import cnorm
import onnx_export

INPUTS, UNITS = 5, 6
MODELS = Path(__file__).parents[3] / "shared" / "data" / "models"


def written_lstm(order):
    """Nodes of an LSTM step with its gates in some order; x, h, c -> y, h2, c2."""
    gates = " ".join(order)
    return [
        node("Concat", "x h", "xh", axis=1),
        node("MatMul", "xh w", "z"),
        node("Add", "z b", "zb"),
        node("Split", "zb", gates, axis=1),
        *[node("Sigmoid", name, f"{name}s") for name in "ifo"],
        node("Tanh", "g", "gt"),
        node("Mul", "c fs", "kept"),
        node("Mul", "gt is", "added"),
        node("Add", "kept added", "c2"),
        node("Tanh", "c2", "c2t"),
        node("Mul", "c2t os", "h2"),
        node("Gemm", "h2 v", "y", transB=1),
    ]


def lstm_file(path, rng, order="ifgo", nodes=None, **more):
    weights = {"w": normal(rng, INPUTS + UNITS, 4 * UNITS), "b": normal(rng, 4 * UNITS), "v": normal(rng, 3, UNITS)}
    states = {"h": [1, UNITS], "c": [1, UNITS]}
    news = {"h2": [1, UNITS], "c2": [1, UNITS]}
    nodes = written_lstm(order) if nodes is None else nodes
    return saved(path, nodes, {"x": [1, INPUTS]} | states, {"y": [1, 3]} | news, weights | more, opset=11)


@pytest.mark.parametrize("order", ["ifgo", "iofg", "gofi"])
def test_a_written_lstm_is_found_by_what_its_gates_do(tmp_path, rng, order):
    found = imported(lstm_file(tmp_path / "m.onnx", rng, order))
    assert [layer.kind for layer in found.model.layers] == ["LSTM", "Linear"]
    assert found.states == {"h": "h2", "c": "c2"}
    assert found.report.ok


# ONNX operator with its attributes, and what the spec then says
FUNCTIONS = {
    "keras 2": ("HardSigmoid", {"alpha": 0.2, "beta": 0.5}, ("hard_sigmoid", 0.2, 0.5)),
    "keras 3": ("HardSigmoid", {"alpha": 1 / 6, "beta": 0.5}, "hard_sigmoid"),
    "plain": ("Sigmoid", {}, "sigmoid"),
}
CANDIDATES = {"tanh": ("Tanh", {}), "relu": ("Relu", {}), ("elu", 0.5): ("Elu", {"alpha": 0.5})}


@pytest.mark.exhaustive(one_in=3)
@pytest.mark.parametrize("candidate", CANDIDATES)
@pytest.mark.parametrize("gates", FUNCTIONS)
def test_a_written_cell_with_other_functions(gates, candidate, tmp_path, rng):
    (op, attributes, says), (other, more) = FUNCTIONS[gates], CANDIDATES[candidate]
    nodes = written_lstm("ifgo")
    for one in nodes:
        if one.op_type in ("Sigmoid", "Tanh"):
            kind, given = (op, attributes) if one.op_type == "Sigmoid" else (other, more)
            one.CopyFrom(helper.make_node(kind, list(one.input), list(one.output), **given))
    found = imported(lstm_file(tmp_path / "m.onnx", rng, nodes=nodes))
    spec = found.model.layers[0].spec
    assert spec.recurrent_activation == (says if isinstance(says, str) else (says[0], *np.float32(says[1:]).tolist()))
    assert spec.activation == candidate
    assert found.report.ok


@pytest.mark.parametrize("change", ["one gate", "the output"])
def test_gates_of_two_functions_are_no_cell(change, tmp_path, rng):
    nodes = written_lstm("ifgo")
    which = "fs" if change == "one gate" else "c2t"
    (one,) = (one for one in nodes if one.output[0] == which)
    one.CopyFrom(node("HardSigmoid" if change == "one gate" else "Relu", one.input[0], which))
    with pytest.raises(ValueError, match="is no frame, and no cell or convolution reads it"):
        onnx_export.load(lstm_file(tmp_path / "m.onnx", rng, nodes=nodes))


def test_a_state_is_paired_by_its_elements_not_by_its_shape(tmp_path, rng):
    """h and c in one tensor [2, 1, units], c first, beside a frame and an output of the same shapes."""
    weights = {
        "w": normal(rng, 2 * UNITS + UNITS, 4 * UNITS),
        "b": normal(rng, 4 * UNITS),
        "v": normal(rng, 2 * UNITS, UNITS),
    }
    shapes = {"flat": np.array([1, 2 * UNITS]), "frame": np.array([2, 1, UNITS])}
    nodes = [
        node("Reshape", "input_1 flat", "x"),
        node("Split", "input_2", "c_row h_row", axis=0),
        node("Squeeze", "c_row", "c", axes=[0]),
        node("Squeeze", "h_row", "h", axes=[0]),
        *written_lstm("ifgo"),
        node("Reshape", "y frame", "output_1"),
        node("Unsqueeze", "c2", "c_out", axes=[0]),
        node("Unsqueeze", "h2", "h_out", axes=[0]),
        node("Concat", "c_out h_out", "output_2", axis=0),
    ]
    shape = [2, 1, UNITS]
    ends = {"input_1": shape, "input_2": shape}, {"output_1": shape, "output_2": shape}
    found = imported(saved(tmp_path / "m.onnx", nodes, *ends, weights | shapes, opset=11))
    assert found.states == {"input_2": "output_2"}
    assert (found.frames, found.outputs) == (("input_1",), ("output_1",))
    assert found.report.ok


@pytest.mark.exhaustive(one_in=5)
@pytest.mark.parametrize("form", ["keep", "move"])
@pytest.mark.parametrize(("reset", "gate"), [("before", "Sigmoid"), ("after", "Sigmoid"), ("after", "HardSigmoid")])
def test_a_written_gru_is_found(tmp_path, rng, reset, form, gate):
    products = [node("MatMul", "x w", "xz"), node("Add", "xz b", "xb"), node("Split", "xb", "xr xn xu", axis=1)]
    if reset == "after":
        inner = [node("MatMul", "h rn", "hn0"), node("Add", "hn0 bn", "hn"), node("Mul", "rs hn", "rh")]
    else:
        inner = [node("Mul", "rs h", "rh0"), node("MatMul", "rh0 rn", "rh")]
    blend = [
        node("Sub", "one us", "keep"),
        node("Mul", "keep nt", "new"),
        node("Mul", "us h", "old"),
        node("Add", "new old", "h2"),
    ]
    if form == "move":
        blend = [node("Sub", "h nt", "apart"), node("Mul", "us apart", "moved"), node("Add", "moved nt", "h2")]
    nodes = [
        *products,
        node("MatMul", "h rr", "hr"),
        node("MatMul", "h ru", "hu"),
        node("Add", "xr hr", "ra"),
        node("Add", "xu hu", "ua"),
        node(gate, "ra", "rs"),
        node(gate, "ua", "us"),
        *inner,
        node("Add", "xn rh", "na"),
        node("Tanh", "na", "nt"),
        *blend,
    ]
    weights = {"w": normal(rng, INPUTS, 3 * UNITS), "b": normal(rng, 3 * UNITS), "bn": normal(rng, UNITS)}
    weights |= {name: normal(rng, UNITS, UNITS) for name in ("rr", "ru", "rn")} | {"one": np.float32(1)}
    nodes.append(node("Identity", "h2", "y"))
    ends = {"x": [1, INPUTS], "h": [1, UNITS]}, {"y": [1, UNITS], "h2": [1, UNITS]}
    found = imported(saved(tmp_path / "m.onnx", nodes, *ends, weights, opset=11), states={"h": "h2"})
    (gru,) = found.model.layers
    assert gru.spec.reset == reset
    assert (gru.spec.recurrent_activation == "sigmoid") == (gate == "Sigmoid")
    assert found.report.ok


def test_norms_batch_norm_and_residual_sums_become_layers(tmp_path, rng):
    nodes = [
        node("BatchNormalization", "x s t m v", "xb"),
        node("Gemm", "xb w b", "a", transB=1),
        node("ReduceMean", "a", "mean", axes=[-1]),
        node("Sub", "a mean", "d"),
        node("Mul", "d d", "dd"),
        node("ReduceMean", "dd", "var", axes=[-1]),
        node("Add", "var eps", "ve"),
        node("Sqrt", "ve", "root"),
        node("Div", "d root", "n"),
        node("Mul", "n gain", "ng"),
        node("Add", "ng bias", "norm"),
        node("MatMul", "norm u", "p"),
        node("Relu", "p", "q"),
        node("Add", "q a", "y"),
    ]
    weights = {
        "s": rng.random(INPUTS) + 0.5,
        "t": rng.random(INPUTS),
        "m": rng.random(INPUTS),
        "v": rng.random(INPUTS) + 0.5,
    }
    weights |= {"w": normal(rng, UNITS, INPUTS), "b": normal(rng, UNITS), "u": normal(rng, UNITS, UNITS)}
    weights |= {"eps": np.float32(1e-3), "gain": normal(rng, UNITS), "bias": normal(rng, UNITS)}
    weights = {name: np.asarray(array, np.float32) for name, array in weights.items()}
    found = imported(saved(tmp_path / "m.onnx", nodes, {"x": [1, INPUTS]}, {"y": [1, UNITS]}, weights, opset=11))
    first, norm, *_, last = found.model.layers
    assert [layer.kind for layer in found.model.layers] == ["Linear", "LayerNorm", "Linear", "Activation", "Add"]
    assert last.of == first.name
    assert norm.eps == pytest.approx(1e-3)
    np.testing.assert_array_equal(norm.weights["weight"], weights["gain"])
    assert found.report.ok


def sequence_file(path, rng, steps="T", lengths=None, **attributes):
    x = {"x": [steps, 1, INPUTS]}
    weights = {
        "w": normal(rng, 1, 4 * UNITS, INPUTS),
        "r": normal(rng, 1, 4 * UNITS, UNITS),
        "b": normal(rng, 1, 8 * UNITS),
    }
    weights |= {"axes": np.array([1]), "h0": normal(rng, 1, 1, UNITS)}
    weights |= {} if lengths is None else {"lengths": np.array([lengths], np.int32)}
    given = ["x", "w", "r", "b", "" if lengths is None else "lengths", "h0"]
    lstm = helper.make_node("LSTM", given, ["all"], hidden_size=UNITS, **attributes)
    return saved(path, [lstm, node("Squeeze", "all axes", "y")], x, {"y": [steps, 1, UNITS]}, weights)


@pytest.mark.parametrize("steps", ["T", 4])
def test_an_operator_over_time_loads_as_a_stream(tmp_path, rng, steps):
    found = imported(sequence_file(tmp_path / "m.onnx", rng, steps))
    assert (found.time_axis, found.states) == (0, {})
    assert found.report.ok
    assert found.model.stream().state()["h0"].any()  # the operator's initial state


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("attributes", "says"),
    [
        ({"activations": ["Sigmoid", "Softsign", "Softsign"]}, "its activations include softsign"),
        ({"input_forget": 1}, "input_forget"),
        ({"direction": "reverse"}, "reads the sequence from its end only"),
    ],
)
def test_what_no_cell_computes_is_refused_by_name(tmp_path, rng, attributes, says):
    with pytest.raises(ValueError, match=says):
        onnx_export.load(sequence_file(tmp_path / "m.onnx", rng, **attributes))


def test_a_refusal_names_every_node(tmp_path, rng):
    nodes = [node("Gemm", "x w", "a"), node("Erf", "a", "b"), node("Gemm", "b u", "c"), node("Reciprocal", "c", "y")]
    weights = {"w": normal(rng, INPUTS, UNITS), "u": normal(rng, UNITS, UNITS)}
    path = saved(tmp_path / "m.onnx", nodes, {"x": [1, INPUTS]}, {"y": [1, UNITS]}, weights)
    with pytest.raises(ValueError, match=r"m\.onnx") as error:
        onnx_export.load(path)
    lines = str(error.value).split("\n  ")[1:-1]  # without the advice
    assert lines == ["Reciprocal 'y': no layer computes reciprocal", "Erf 'b': no layer computes erf"]


def test_a_refusal_names_nodes_behind_others(tmp_path, rng):
    """Three kinds that no layer computes: each in one line, with names."""
    nodes = [
        node("Hardmax", "x", "a"),
        *[node("Hardmax", before, name) for before, name in ("ab", "bc", "cd", "de", "ef")],
        node("Shape", "f", "size"),
        node("Reshape", "f size", "g"),
        node("MatMul", "g g", "scores"),
        node("MatMul", "scores v", "fine"),
        node("Softsign", "fine", "y"),
    ]
    path = saved(tmp_path / "m.onnx", nodes, {"x": [1, 1, 6, 6]}, {"y": [1, 1, 6, 6]}, {"v": normal(rng, 6, 6)})
    with pytest.raises(ValueError, match=r"m\.onnx") as error:
        onnx_export.load(path)
    assert str(error.value).split("\n  ")[1:-1] == [
        "Hardmax 'a', 'b', 'c', 'd' and 2 more: no layer computes this",
        "MatMul 'scores': it multiplies what depends on the frame by what depends on the frame",
        "Softsign 'y': no layer computes this",
    ]


def test_a_refusal_of_a_damaged_file_names_its_nodes(tmp_path, rng):
    """A convolution without a weight, behind a node that no layer computes."""
    nodes = [node("Mod", "x x", "a"), node("Conv", "a", "y")]
    path = saved(tmp_path / "m.onnx", nodes, {"x": [1, 1, 6]}, {"y": [1, 1, 6]}, {})
    with pytest.raises(ValueError, match="Mod 'a': no layer computes this"):
        onnx_export.load(path)


def test_readings_of_the_same_elements_are_one(tmp_path, rng):
    """Two outputs that are the new state alike: either of them is the result."""
    nodes = [node("MatMul", "x w", "a"), node("MatMul", "h r", "b"), node("Add", "a b", "s"), node("Tanh", "s", "h2")]
    nodes.append(node("Identity", "h2", "y"))
    weights = {"w": normal(rng, INPUTS, UNITS), "r": normal(rng, UNITS, UNITS)}
    ends = {"x": [1, INPUTS], "h": [1, UNITS]}, {"y": [1, UNITS], "h2": [1, UNITS]}
    path = saved(tmp_path / "m.onnx", nodes, *ends, weights)
    assert imported(path).report.ok
    assert imported(path, states={"h": "h2"}).report.ok
    with pytest.raises(ValueError, match="no input 'g'; it has 'x', 'h'"):
        onnx_export.load(path, states={"g": "h2"})


def test_a_state_that_is_lost_is_refused(tmp_path, rng):
    nodes = [*written_lstm("ifgo"), node("Mul", "c2 half", "c3")]
    path = lstm_file(tmp_path / "m.onnx", rng, nodes=nodes, half=np.float32(0.5))
    model = onnx.load(path)
    model.graph.output[2].name = "c3"
    onnx.save(model, path)
    with pytest.raises(ValueError, match="not a list of layers"):
        onnx_export.load(path)


def test_layers_that_compute_something_else_are_refused(tmp_path, rng, monkeypatch):
    """The proof runs the file itself: a finder that swapped two gates would not pass."""
    from onnx_export.importer import chain

    written_cell = chain.written_cell

    def swapped(*given):
        found = written_cell(*given)
        return found and replace(found, parts={name: array[[1, 0, 2, 3]] for name, array in found.parts.items()})

    path = lstm_file(tmp_path / "m.onnx", rng)
    monkeypatch.setattr(chain, "written_cell", swapped)
    with pytest.raises(ValueError, match="the layers do not compute what the file does"):
        imported(path)
    unproven = onnx_export.load(path, check=False)
    assert "not compared with its file" in repr(unproven)
    assert "not compared" not in repr(cnorm.demo_model())


def test_a_file_that_only_onnxruntime_gets_wrong_is_refused_as_that(tmp_path, rng, monkeypatch):
    from onnx_export.importer import proof

    def failing(model, copy, **_):
        report = onnx_export.check_parity(model, copy, steps=2)
        rows = [replace(row, ok="onnxruntime all" not in (row.engine, row.against)) for row in report.rows]
        return replace(report, rows=tuple(rows), first=next(row for row in rows if not row.ok))

    monkeypatch.setattr(proof, "check_parity", failing)
    with pytest.raises(ValueError, match="agree with float64, but onnxruntime is beyond the bound"):
        imported(lstm_file(tmp_path / "m.onnx", rng))


def test_a_recurrent_node_without_hidden_size_is_refused(tmp_path, rng):
    """onnxruntime wants the attribute, although the weights say it."""
    weights = {"W": normal(rng, 1, UNITS, INPUTS), "R": normal(rng, 1, UNITS, UNITS)}
    nodes = [node("RNN", "x W R", "y"), node("Identity", "y", "z")]
    path = saved(tmp_path / "m.onnx", nodes, {"x": [1, 1, INPUTS]}, {"z": [1, 1, 1, UNITS]}, weights)
    with pytest.raises(ValueError, match="hidden_size"):
        onnx_export.load(path)


def test_constants_of_any_size_are_refused_before_they_are_made(tmp_path):
    nodes = [node("ConstantOfShape", "shape", "huge"), node("Add", "x huge", "y")]
    path = saved(tmp_path / "m.onnx", nodes, {"x": [1]}, {"y": [1]}, {"shape": np.array([1 << 40])})
    with pytest.raises(ValueError, match="elements, the limit is"):
        onnx_export.load(path)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "bidirectional", "last"])
def test_files_of_the_exporter_of_torch(tmp_path, kind):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            options = {"bidirectional": True} if kind == "bidirectional" else {}
            name = {"bidirectional": "LSTM", "last": "LSTM"}.get(kind, kind)
            self.cell = getattr(torch.nn, name)(INPUTS, UNITS, **options)
            size = UNITS * (2 if options else 1)
            self.head = torch.nn.Sequential(torch.nn.LayerNorm(size), torch.nn.Linear(size, 3), torch.nn.Sigmoid())

        def forward(self, x, *states):
            if kind == "LSTMCell":
                h, c = self.cell(x, states)
                return self.head(h), h, c
            if kind == "GRUCell":
                h = self.cell(x, *states)
                return self.head(h), h
            y = self.cell(x)[0]
            return self.head(y[-1] if kind == "last" else y)

    cell = kind.endswith("Cell")
    state = [torch.zeros(1, UNITS)] * (2 if kind == "LSTMCell" else 1)
    given = (torch.zeros(1, INPUTS), *state) if cell else (torch.zeros(4, 1, INPUTS),)
    names = ["x", "h", "c"][: len(given)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Network().eval(), given, tmp_path / "m.onnx", dynamo=False, input_names=names,
            output_names=["y", "h_out", "c_out"][: len(given)], dynamic_axes=None if cell else {"x": {0: "T"}},
        )  # fmt: skip
    found = imported(tmp_path / "m.onnx")
    assert [layer.kind for layer in found.model.layers[-3:]] == ["LayerNorm", "Linear", "Activation"]
    assert found.states == ({"h": "h_out", "c": "c_out"} if kind == "LSTMCell" else {"h": "h_out"} if cell else {})
    assert kind == "bidirectional" or found.report.ok


@pytest.mark.skipif(not MODELS.exists(), reason=f"SKIPPED: {MODELS} with public weight files is not here")
def test_the_first_stage_of_dtln():
    found = imported(MODELS / "dtln_1.onnx")
    assert [layer.kind for layer in found.model.layers] == ["LSTM", "LSTM", "Linear", "Activation"]
    assert found.states == {"input_3": "tf_op_layer_stack_2"}
    assert found.report.ok


@pytest.mark.exhaustive(one_in=4)
@pytest.mark.skipif(not MODELS.exists(), reason=f"SKIPPED: {MODELS} with public weight files is not here")
@pytest.mark.parametrize(
    ("file", "kinds", "options"),
    [
        ("b2w.onnx", ["LSTM", *["Linear", "Activation"] * 4, "Linear"], {}),
        ("firered.onnx", None, {}),
        ("silero_16k_op15.onnx", None, {"inputs": {"sr": 16000}, "dims": {"sequence": 576}}),
        (
            "silero_vad.onnx",
            None,
            {"inputs": {"sr": 16000}, "dims": {"input:0": 1, "state:1": 1, "input:1": 576}},
        ),
    ],
)
def test_public_models(file, kinds, options):
    found = imported(MODELS / file, **options)
    own = [layer.kind for layer in found.model.layers]
    assert kinds in (None, own)
    assert own.count("CausalConv1d") == (8 if file == "firered.onnx" else 0)
    assert own.count("Conv1d") == (3 if file.startswith("silero") else 0)
    assert found.report.ok


def gain(result, name, inner):
    """A branch that stores a gain under the same name as every other, and an If in it or the product."""
    stored = [numpy_helper.from_array(np.float32(name), "gain")]
    nodes = [inner] if inner else [node("Mul", "x gain", "scaled"), node("Add", "scaled gain", result)]
    return helper.make_graph(nodes, "branch", [], [helper.make_tensor_value_info(result, 1, None)], stored)


@pytest.mark.parametrize(("rate", "factor"), [(8, 3), (16, 5)])
def test_branches_of_an_input_that_is_given_are_taken(rate, factor, tmp_path, rng):
    inner = helper.make_node("If", ["is16"], ["b"], then_branch=gain("r", 5, None), else_branch=gain("r", 3, None))
    outer = helper.make_node("If", ["yes"], ["z"], then_branch=gain("b", 2, inner), else_branch=gain("r", 7, None))
    nodes = [node("Equal", "rate sixteen", "is16"), outer, node("Gemm", "z W B", "y")]
    weights = {"W": normal(rng, INPUTS, 4), "B": normal(rng, 4), "yes": np.array(True), "sixteen": np.array(16)}
    path = saved(tmp_path / "m.onnx", nodes, {"x": [1, INPUTS], "rate": []}, {"y": [1, 4]}, weights, ids=["rate"])
    found = imported(path, inputs={"rate": rate})
    x = normal(rng, 1, INPUTS)
    expected = (x * factor + factor) @ weights["W"] + weights["B"]
    np.testing.assert_allclose(found.model.run(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.exhaustive(one_in=5)
@pytest.mark.parametrize(("groups", "dilation"), [(1, 1), (1, 3), (INPUTS, 2)])
@pytest.mark.parametrize("over", ["window", "padded"])
def test_a_convolution_with_a_cache_of_frames(tmp_path, rng, groups, dilation, over):
    """x is put behind the cache, filtered, and the oldest frame dropped."""
    taps, outputs = 4, INPUTS if groups > 1 else UNITS
    history = (taps - 1) * dilation
    pads = [history, history] if over == "padded" else [0, 0]
    nodes = [
        node("Gemm", "x p", "xp"),
        node("Unsqueeze", "xp two", "column"),
        node("Concat", "cache column", "frames", axis=2),
        node("Conv", "frames w b", "all", group=groups, dilations=[dilation], pads=pads),
        node("Slice", "all from to two", "last") if over == "padded" else node("Identity", "all", "last"),
        node("Relu", "last", "r"),
        node("Squeeze", "r two", "y"),
        node("Slice", "frames one end two", "cache_out"),
    ]
    weights = {
        "w": normal(rng, outputs, INPUTS // groups, taps),
        "b": normal(rng, outputs),
        "p": normal(rng, INPUTS, INPUTS),
    }
    numbers = {"two": 2, "one": 1, "end": 1 << 40, "from": history, "to": history + 1}
    weights |= {name: np.array([value]) for name, value in numbers.items()}
    cache = [1, INPUTS, history]
    ends = {"x": [1, INPUTS], "cache": cache}, {"y": [1, outputs], "cache_out": cache}
    found = imported(saved(tmp_path / "m.onnx", nodes, *ends, weights))
    _, layer, _ = found.model.layers
    assert (layer.kind, layer.dilation, layer.groups, layer.taps) == ("CausalConv1d", dilation, groups, taps)
    np.testing.assert_array_equal(layer.weights["weight"], weights["w"])
    assert found.states == {"cache": "cache_out"}
    assert found.report.ok


def test_convolutions_inside_a_frame(tmp_path, rng):
    """Padding by a node of its own, strides, groups, a scale for each channel, and a part of the channels."""
    nodes = [
        node("Pad", "x around", "padded", mode="reflect"),
        node("Conv", "padded w b", "a", strides=[3]),
        node("BatchNormalization", "a s t m v", "n"),
        node("Slice", "n zero four one", "part"),
        node("Abs", "part", "p"),
        node("Conv", "p u", "c", group=2, pads=[2, 1], dilations=[2]),
        node("Flatten", "c", "flat"),
        node("Gemm", "flat z", "y"),
    ]
    weights = {"w": normal(rng, 6, 2, 5), "b": normal(rng, 6), "u": normal(rng, 4, 2, 3), "z": normal(rng, 24, 3)}
    weights |= {"s": rng.random(6), "t": rng.random(6), "m": rng.random(6), "v": rng.random(6) + 0.5}
    weights = {name: np.asarray(array, np.float32) for name, array in weights.items()}
    numbers = {"around": [0, 0, 1, 0, 0, 2], "zero": [0], "four": [4], "one": [1]}
    weights |= {name: np.array(value) for name, value in numbers.items()}
    found = imported(saved(tmp_path / "m.onnx", nodes, {"x": [1, 2, 20]}, {"y": [1, 3]}, weights))
    first, *_, second, _ = found.model.layers
    assert (first.padding_mode, first.padding, first.stride, first.positions) == ("reflect", (1, 2), 3, 20)
    assert (second.padding, second.dilation, second.groups) == ((2, 1), 2, 2)
    assert found.report.ok


def test_the_command(tmp_path, rng, capsys):
    from cnorm.tools import cli

    path, frames = lstm_file(tmp_path / "m.onnx", rng), tmp_path / "frames.npz"
    np.savez(frames, x=rng.standard_normal((20, INPUTS)).astype(np.float32))
    with pytest.raises(SystemExit) as done:
        cli.run(["import", str(path), str(tmp_path / "m.cnorm"), "--check", str(frames)])
    assert done.value.code == 0
    printed = capsys.readouterr().out
    for text in (
        "x is x, y is y",
        "state h, given back by h2",
        "0: LSTM(5 -> 6",
        "recording x against the file: the outputs agree",
        "a step: ",
    ):
        assert text in printed
    loaded = cnorm.load(tmp_path / "m.cnorm")
    x = rng.standard_normal((20, INPUTS)).astype(np.float32)
    assert loaded.run(x).tobytes() == onnx_export.load(path).run(x).tobytes()


@pytest.mark.exhaustive(one_in=2)
@pytest.mark.parametrize(("wrong", "code"), [(False, 0), (True, 1)])
def test_the_command_takes_a_frameworks_outputs(wrong, code, tmp_path, rng, capsys):
    from cnorm.tools import cli

    path, frames = lstm_file(tmp_path / "m.onnx", rng), tmp_path / "frames.npz"
    x = rng.standard_normal((20, INPUTS)).astype(np.float32)
    y = onnx_export.load(path, check=False).run(x)
    np.savez(frames, x=x, y=y + wrong * np.float32(1e-3), x_2=x[:5])
    options = ["--check", str(frames), "--table", "--weights", "int8", "--smallest", "1"]
    with pytest.raises(SystemExit) as done:
        cli.run(["import", str(path), str(tmp_path / "m.cnorm"), *options])
    assert done.value.code == code
    printed = " ".join(capsys.readouterr().out.split())
    assert f"frames.npz: the outputs {'differ' if wrong else 'agree'}" in printed
    assert "recording x_2 against the file: the outputs agree" in printed
    assert re.search(r"with int8 weights: off by at most \S+ in 200 random frames", printed)
    assert "engine against tensor" in printed
    assert (tmp_path / "m.cnorm").exists() != wrong


def test_messages_of_the_command_name_its_options(tmp_path, rng, capsys):
    from cnorm.tools import cli

    nodes = [node("Cast", "x", "f", to=1), node("MatMul", "f w", "y")]
    path = saved(tmp_path / "m.onnx", nodes, {"x": [1, 2]}, {"y": [1, 3]}, {"w": normal(rng, 2, 3)}, ids=["x"])
    with pytest.raises(SystemExit) as done:
        cli.run(["import", str(path), str(tmp_path / "m.cnorm")])
    assert done.value.code == 2
    assert "give it as --input x=VALUE" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(ValueError, match=r"give it as inputs=\{'x': VALUE\}"):
        onnx_export.load(path)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--input", "sr"], "wanted NAME=VALUE, got 'sr'"),
        (["--input", "sr=fast"], "sr must be a number, got 'fast'"),
        (["--dim", "T=1.5"], "T must be an integer, got '1.5'"),
        (["--dim", "T=2"], "no input has the open dimension 'T'; it has 'batch', 'width'"),
        (["--dim", "batch=0"], "--dim batch must be at least 1, got 0"),
        (["--smallest", "1"], "--smallest is an option of --weights"),
        (["../absent/m.cnorm"], "Invalid value for 'OUT': folder '../absent' does not exist"),
        (["m.onnx"], "Invalid value for 'OUT': must end in .safetensors or .cnorm, got 'm.onnx'"),
        (["--weights", "int8", "--dim", f"width={INPUTS}"], "(in a command --smallest 1) rounds them all the same"),
    ],
)
def test_options_of_the_command_that_do_not_fit(options, says, tmp_path, rng, capsys):
    from cnorm.tools import cli

    weights = {"w": normal(rng, INPUTS, UNITS)}
    path, out = tmp_path / "m.onnx", tmp_path / "m.cnorm"
    saved(path, [node("MatMul", "x w", "y")], {"x": ["batch", "width"]}, {"y": ["batch", UNITS]}, weights)
    try:
        named = not options[0].startswith("--")
        code = cli.run(["import", str(path), *([] if named else [str(out)]), *options])
    except SystemExit as done:
        code = done.code
    assert code == 2
    assert says in " ".join(capsys.readouterr().err.split())
    assert not out.exists()


def test_the_command_rounds_small_models_where_it_is_told_to(tmp_path, rng):
    from cnorm.tools import cli

    path, out = lstm_file(tmp_path / "m.onnx", rng), tmp_path / "m.cnorm"
    with pytest.raises(SystemExit) as done:
        cli.run(["import", str(path), str(out), "--weights", "int8", "--smallest", "1"])
    assert done.value.code == 0
    assert cnorm.load(out).weights == "int8"
