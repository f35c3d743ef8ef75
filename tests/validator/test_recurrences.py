"""Recurrences that are easily overlooked: unnamed results, quantised operators, Loops, steps written out."""

import json

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic

from onnx_export.validation import command, formats, validate
from onnx_export.validation.html import page
from onnx_export.validation.lock import compare, facts

INPUTS, UNITS, STEPS = 5, 6, 4
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def value(name, shape, kind=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, kind, shape)


def saved(path, nodes, inputs, outputs, stored):
    """A file of nodes; inputs and outputs by name and shape."""
    tensors = [numpy_helper.from_array(np.asarray(each), name) for name, each in stored.items()]
    ends = ([value(name, shape) for name, shape in each.items()] for each in (inputs, outputs))
    graph = helper.make_graph(nodes, "g", *ends, tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def weights(kind, seed=0):
    rng, rows = np.random.default_rng(seed), GATES[kind] * UNITS
    shapes = {"W": (1, rows, INPUTS), "R": (1, rows, UNITS), "B": (1, 2 * rows)}
    return {name: (0.4 * rng.standard_normal(shape)).astype("f") for name, shape in shapes.items()}


def sequence(path, kind, outputs, stored=None, **attributes):
    node = helper.make_node(kind, ["x", "W", "R", "B"], outputs, hidden_size=UNITS, **attributes)
    shape = [7, 1, 1, UNITS] if outputs[-1] == "Y" else [1, 1, UNITS]
    return saved(path, [node], {"x": [7, 1, INPUTS]}, {outputs[-1]: shape}, stored or weights(kind))


def warned(report):
    return {finding.code for finding in report.findings if finding.level != "note"}


# ------------------------------------------------------------------------------------------------ unnamed results

UNNAMED = [("LSTM", ["", "h"]), ("LSTM", ["", "", "c"]), ("GRU", ["", "h"]), ("RNN", ["", "h"])]


@pytest.mark.exhaustive(one_in=8)
@pytest.mark.parametrize(("kind", "outputs"), UNNAMED)
def test_a_node_without_a_name_for_y_is_judged(kind, outputs, tmp_path):
    sound = validate(sequence(tmp_path / "m.onnx", kind, outputs))
    assert ([cell.verdict for cell in sound.cells], sound.exit_code(strict=True)) == (["ok"], 0), str(sound)
    stored = weights(kind)
    turned = validate(sequence(tmp_path / "m.onnx", kind, outputs, stored | {"R": -stored["R"]}))
    assert [finding.code for finding in compare(facts(turned), facts(sound))] == ["like-differs"]
    stored["R"][0, 0, 0] = np.nan
    assert warned(validate(sequence(tmp_path / "m.onnx", kind, outputs, stored))) == {"weights-nan"}


def test_a_clip_and_a_step_that_forgets_are_found_without_a_name_for_y(tmp_path):
    stored = {name: 4 * each for name, each in weights("LSTM").items()}
    (cell,) = validate(sequence(tmp_path / "m.onnx", "LSTM", ["", "h"], stored, clip=0.5)).cells
    assert cell.blame == "kernel"  # onnxruntime does not clip the cell
    node = helper.make_node("GRU", ["x", "W", "R", "B"], ["", "h"], hidden_size=UNITS)
    nodes = [node, helper.make_node("ReduceSum", ["h"], ["y"], keepdims=0)]
    report = validate(saved(tmp_path / "m.onnx", nodes, {"x": [1, 1, INPUTS]}, {"y": []}, weights("GRU")))
    assert warned(report) == {"stateless-step"}


@pytest.mark.exhaustive(one_in=2)
@pytest.mark.parametrize("weight", [0.3, 0.45])
def test_the_rounding_of_a_saturated_output_is_no_difference(weight, tmp_path):
    stored = {"W": np.full((1, 4, 2), weight, "f"), "R": np.full((1, 4, 4), weight, "f")}
    node = helper.make_node("RNN", ["x", "W", "R"], ["", "h"], hidden_size=4)
    path = saved(tmp_path / "m.onnx", [node], {"x": [3, 1, 2]}, {"h": [1, 1, 4]}, stored)
    x, h = np.array([[[1, 2]], [[3, 4]], [[5, 6]]], "f"), np.zeros((1, 4))
    for t in range(3):
        h = np.tanh(x[t] @ stored["W"][0].astype(float).T + h @ stored["R"][0].astype(float).T)
    np.savez(tmp_path / "in.npz", x=x)
    for off, code in ((0.0, 0), (2e-6, 1)):
        np.savez(tmp_path / "out.npz", h=(h[None] - off).astype("f"))
        assert validate(path, input=tmp_path / "in.npz", outputs=tmp_path / "out.npz").exit_code() == code


# ------------------------------------------------------------------------------------------------ other domains


@pytest.fixture
def quantised(tmp_path):
    """An LSTM, and what quantize_dynamic makes of it."""
    plain = sequence(tmp_path / "plain.onnx", "LSTM", ["Y"])
    quantize_dynamic(plain, tmp_path / "quantised.onnx", weight_type=QuantType.QInt8)
    return plain, tmp_path / "quantised.onnx"


def test_a_quantised_lstm_is_seen_and_not_judged(quantised):
    plain, path = quantised
    report = validate(path)
    (cell,) = report.cells
    assert (cell.kind, cell.inputs, cell.units, cell.verdict) == ("DynamicQuantizeLSTM", INPUTS, UNITS, "not judged")
    assert (report.exit_code(), report.exit_code(strict=True)) == (2, 2)
    assert report.conclusion().endswith("not everything was judged; 1 DynamicQuantizeLSTM: 1 not judged")
    found = CliRunner().invoke(command.validate, [str(path), "--like", str(plain)])
    assert (found.exit_code, "like-" in found.output) == (2, False), found.output
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        if tensor.name == "R_scale":
            tensor.CopyFrom(numpy_helper.from_array(np.full(tensor.dims, np.nan, "f"), tensor.name))
    onnx.save(model, path)
    assert warned(validate(path)) == {"weights-nan"}


def test_any_recurrent_operator_of_another_domain_is_seen(tmp_path):
    path = sequence(tmp_path / "m.onnx", "LSTM", ["", "h"])
    model = onnx.load(path)
    model.graph.node[0].domain, model.graph.node[0].op_type = "com.microsoft", "AttnLSTM"
    onnx.save(model, path)
    report = validate(path)
    assert ([cell.verdict for cell in report.cells], report.exit_code()) == (["not judged"], 2)


# ------------------------------------------------------------------------------------------------ shared states


def stepped(path, second="c", source="h"):
    """One step of an LSTM, its initial c from the input `second`."""
    given = ["x", "W", "R", "B", "", "h", second]
    nodes = [helper.make_node("LSTM", given, ["Y", "h_out", "c_out"], hidden_size=UNITS)]
    inputs = {"x": [1, 1, INPUTS], "h": [1, 1, UNITS], "c": [1, 1, UNITS]}
    return saved(path, nodes, inputs, {name: [1, 1, UNITS] for name in ["h_out", "c_out"]}, weights("LSTM"))


def test_one_value_for_h_and_c_and_an_input_that_no_node_reads_are_named(tmp_path):
    assert not warned(validate(stepped(tmp_path / "m.onnx")))
    report = validate(stepped(tmp_path / "m.onnx", second="h"))
    assert (warned(report), report.exit_code()) == ({"shared-state", "unused-input"}, 0)
    assert "no node reads the input 'c'" in str(report)


@pytest.mark.parametrize("second", ["h", "other"])
def test_one_state_for_two_layers_is_named(second, tmp_path):
    nodes = [
        helper.make_node("RNN", ["x", "W", "R", "B", "", "h"], ["", "a"], hidden_size=UNITS),
        helper.make_node("RNN", ["a", "V", "R", "B", "", second], ["", "b"], hidden_size=UNITS),
    ]
    inputs = {"x": [1, 1, INPUTS], "h": [1, 1, UNITS], "other": [1, 1, UNITS]}
    stored = weights("RNN") | {"V": weights("RNN")["R"]}
    report = validate(saved(tmp_path / "m.onnx", nodes, inputs, {name: [1, 1, UNITS] for name in "ab"}, stored))
    assert warned(report) == ({"shared-state", "unused-input"} if second == "h" else set())


# ---------------------------------------------------------------------------------------------- without an operator


def lstm_step(x, h, c, suffix=""):
    """The nodes of an LSTM cell in elementary operators, and the names of its states."""
    n = {name: name + suffix for name in ("a", "b", "s", "i", "f", "g", "o", "fc", "ig", "c1", "t", "h1")}
    make = [
        ("MatMul", [x, "W"], ["a"]),
        ("MatMul", [h, "R"], ["b"]),
        ("Add", ["a", "b"], ["s"]),
        ("Split", ["s"], ["i", "f", "g", "o"]),
        *(("Sigmoid", [each], [f"{each}_"]) for each in "ifo"),
        ("Tanh", ["g"], ["g_"]),
        ("Mul", ["f_", c], ["fc"]),
        ("Mul", ["i_", "g_"], ["ig"]),
        ("Add", ["fc", "ig"], ["c1"]),
        ("Tanh", ["c1"], ["t"]),
        ("Mul", ["o_", "t"], ["h1"]),
    ]
    own = {*n, "i_", "f_", "g_", "o_"}

    def named(names):
        return [name + suffix if name in own else name for name in names]

    nodes = [helper.make_node(kind, named(ins), named(outs)) for kind, ins, outs in make]
    for node in nodes:
        if node.op_type == "Split":
            node.attribute.append(helper.make_attribute("axis", 1))
    return nodes, n["h1"], n["c1"]


def step_weights():
    stored = weights("LSTM")
    return {"W": stored["W"][0].T.copy(), "R": stored["R"][0].T.copy()}


STATES = {"h": [1, UNITS], "c": [1, UNITS]}


def one_step(path, stored):
    nodes, h, c = lstm_step("x", "h", "c")
    return saved(path, nodes, {"x": [1, INPUTS], **STATES}, {name: [1, UNITS] for name in [h, c]}, stored)


def written_out(path, stored):
    nodes, h, c = [], "h", "c"
    for t in range(STEPS):
        nodes.append(helper.make_node("Gather", ["x", f"at{t}"], [f"x{t}"], axis=0))
        more, h, c = lstm_step(f"x{t}", h, c, f"_{t}")
        nodes += more
    places = {f"at{t}": np.array(t) for t in range(STEPS)}
    return saved(path, nodes, {"x": [STEPS, 1, INPUTS], **STATES}, {h: [1, UNITS]}, stored | places)


def looped(path, stored):
    nodes, h, c = lstm_step("xt", "hi", "ci")
    nodes = [helper.make_node("Gather", ["x", "at"], ["xt"], axis=0), *nodes]
    nodes.append(helper.make_node("Identity", ["go"], ["on"]))
    ins = [value("at", [], TensorProto.INT64), value("go", [], TensorProto.BOOL)]
    ins += [value("hi", [1, UNITS]), value("ci", [1, UNITS])]
    outs = [value("on", [], TensorProto.BOOL), value(h, [1, UNITS]), value(c, [1, UNITS])]
    body = helper.make_graph(nodes, "body", ins, outs)
    loop = helper.make_node("Loop", ["times", "yes", "h", "c"], ["y", "z"], "rnn", body=body)
    stored = stored | {"times": np.array(STEPS), "yes": np.array(True)}
    return saved(path, [loop], {"x": [STEPS, 1, INPUTS], **STATES}, {"y": [1, UNITS]}, stored)


FORMS = {"one step, its state an input": one_step, f"{STEPS} steps written out": written_out, "in a Loop": looped}


@pytest.mark.exhaustive(one_in=6)
@pytest.mark.parametrize("form", FORMS)
def test_a_recurrence_without_an_operator_is_seen_and_proved_by_its_outputs_alone(form, tmp_path):
    path = FORMS[form](tmp_path / "m.onnx", step_weights())
    report = validate(path)
    (cell,) = report.cells
    assert (cell.kind, cell.facts, cell.verdict) == ("recurrence", {"form": form}, "not judged")
    assert (report.exit_code(), report.exit_code(strict=True)) == (2, 2)
    assert report.conclusion() == "cannot validate: not everything was judged; 1 recurrence: 1 not judged"
    assert not facts(report)["cells"]  # a lock file of an older version has none

    model = onnx.load(path)
    rng = np.random.default_rng(1)
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input}
    feeds = {name: rng.standard_normal(shape).astype("f") for name, shape in shapes.items()}
    np.savez(tmp_path / "in.npz", **feeds)
    results = onnx.reference.ReferenceEvaluator(model).run(None, feeds)
    np.savez(tmp_path / "out.npz", **{v.name: r for v, r in zip(model.graph.output, results, strict=True)})
    report = validate(path, input=tmp_path / "in.npz", outputs=tmp_path / "out.npz")
    assert report.exit_code(strict=True) == 0, str(report)
    assert report.conclusion().startswith("passed: the outputs are those of --outputs; 1 recurrence")

    stored = step_weights()
    stored["R"][0, 0] = np.nan
    assert validate(FORMS[form](tmp_path / "m.onnx", stored)).exit_code() == 2


def test_what_returns_without_a_product_or_gate_is_no_recurrence(tmp_path):
    """A deep network, tied weights, a residual, a counter."""
    nodes = [
        helper.make_node("MatMul", ["h", "R"], ["a"]),
        helper.make_node("Tanh", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "R"], ["d"]),
        helper.make_node("Add", ["d", "h"], ["e"]),
        helper.make_node("Sigmoid", ["c"], ["s"]),
        helper.make_node("Add", ["e", "s"], ["y"]),
    ]
    report = validate(saved(tmp_path / "m.onnx", nodes, STATES, {"y": [1, UNITS]}, {"R": np.eye(UNITS, dtype="f")}))
    assert (report.cells, report.exit_code(strict=True)) == ([], 0)


# ------------------------------------------------------------------------------------------------ nothing recognised


def test_a_file_in_which_nothing_is_recognised_does_not_pass(tmp_path):
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["m"], axes=[-1]),
        helper.make_node("Mul", ["m", "m"], ["q"]),
        helper.make_node("Sqrt", ["q"], ["y"]),
    ]
    path = saved(tmp_path / "m.onnx", nodes, {"x": [2, 8]}, {"y": [2, 1]}, {})
    report, line = validate(path), "nothing was checked: no norm or recurrent operator was recognised; "
    line += "1 root and 1 mean belong to none"
    assert (report.exit_code(), report.exit_code(require_norm=True)) == (0, 2)
    assert report.conclusion() == line
    assert report.conclusion(require_norm=True) == f"cannot validate: {line}"
    assert list(formats.lines(report))[-1] == f"{path}: {line}"
    assert list(formats.github(report))[-1] == f"{path}: {line}"
    assert str(report).endswith(line)
    assert json.loads(report.to_json())["summary"] == line
    assert json.loads(formats.sarif([report]))["runs"][0]["invocations"][0]["exitCodeDescription"] == f"{path}: {line}"
    assert f'<skipped message="{line}"' in formats.junit([report])
    assert '<strong class="verdict nothing was checked">nothing was checked</strong>' in page(report)
    np.savez(tmp_path / "in.npz", x=np.ones((2, 8), "f"))
    np.savez(tmp_path / "out.npz", y=np.ones((2, 1), "f"))
    report = validate(path, input=tmp_path / "in.npz", outputs=tmp_path / "out.npz")
    assert report.conclusion().startswith("passed: the outputs are those of --outputs; no norm or recurrent operator")
