"""LSTM, GRU and RNN nodes: sound ones pass, planted faults are found, lost states and frozen lengths are named."""

import io
import json

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner
from corpus import archive
from onnx import TensorProto, helper, numpy_helper

from onnx_export.validation import command, formats
from onnx_export.validation.examine import examine
from onnx_export.validation.lock import compare, facts
from onnx_export.validation.options import Options

INPUTS, UNITS = 5, 4
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
SIDES = {"forward": 1, "reverse": 1, "bidirectional": 2}


def weights_of(rng, kind, sides):
    gates = GATES[kind] * UNITS
    shapes = {"W": (sides, gates, INPUTS), "R": (sides, gates, UNITS), "B": (sides, 2 * gates)}
    return {name: (0.5 * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}


def build(kind, weights, producer="", states=True, steps="steps", lengths=None, names=None, **attributes):
    """A model of one node that takes and returns its states, as exporters write it."""
    sides = SIDES[attributes.get("direction", "forward")]
    given = ["initial_h", "initial_c"][: (2 if kind == "LSTM" else 1) if states else 0]
    inputs = names or ["x", "W", "R", "B", "lengths" if lengths is not None else "", *given]
    results = ["Y", "Y_h", "Y_c"][: 3 if kind == "LSTM" else 2]
    stored = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    if lengths is not None:
        stored.append(numpy_helper.from_array(np.array(lengths, np.int32), "lengths"))
    node = helper.make_node(kind, inputs, results, kind.lower(), hidden_size=UNITS, **attributes)
    shapes = {"x": [steps, 2, INPUTS]} | {name: [sides, 2, UNITS] for name in given}
    graph = helper.make_graph(
        [node],
        "recurrent",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in results],
        stored,
    )
    opsets = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8, producer_name=producer)


def feeds_of(model, rng, steps=6):
    sizes = {
        value.name: [d.dim_value or steps for d in value.type.tensor_type.shape.dim] for value in model.graph.input
    }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in sizes.items()}


def outputs_of(model, feeds):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return dict(zip([value.name for value in model.graph.output], session.run(None, feeds), strict=True))


def examined(model, path, **options):
    onnx.save(model, path)
    report = examine(str(path), Options(**options), lambda *_: None)
    report.settle()
    return report


def codes(report):
    return {finding.code for finding in report.findings if finding.level != "note"}


def exchanged(weights, first, second):
    """Two gates exchanged in all weights."""
    changed = {}
    for name, value in weights.items():
        halves = np.split(value, 2, axis=1) if name == "B" else [value]
        gates = [np.split(half, half.shape[1] // UNITS, axis=1) for half in halves]
        for half in gates:
            half[first], half[second] = half[second], half[first]
        changed[name] = np.concatenate([gate for half in gates for gate in half], axis=1)
    return changed


def without_half(weights, which):
    bias = weights["B"].copy()
    half = bias.shape[1] // 2
    bias[:, which * half : (which + 1) * half] = 0
    return weights | {"B": bias}


def faults(kind, direction, weights):
    """Wrong models by what is wrong with them."""
    right = {"direction": direction} | ({"linear_before_reset": 1} if kind == "GRU" else {})
    sides = SIDES[direction]
    defaults = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}[kind]

    def wrong(new=weights, **options):
        return build(kind, new, **right | options)

    for first in range(GATES[kind]):
        for second in range(first):
            yield f"gates {second} and {first}", wrong(exchanged(weights, first, second))
    for place in range(len(defaults)):
        names = [
            *defaults[:place],
            "HardSigmoid" if defaults[place] == "Sigmoid" else "Softsign",
            *defaults[place + 1 :],
        ]
        yield f"activation {place}", wrong(activations=names * sides)
    yield "clip", wrong(clip=0.25)
    yield "input bias", wrong(without_half(weights, 0))
    yield "recurrent bias", wrong(without_half(weights, 1))
    yield "lengths", wrong(lengths=[3, 3])
    other = {"forward": "reverse", "reverse": "forward"}.get(direction)
    if other:
        yield "direction", wrong(direction=other)
    else:
        yield "directions exchanged", wrong({name: value[::-1].copy() for name, value in weights.items()})
    if kind == "GRU":
        yield "reset", wrong(linear_before_reset=0)
    if kind == "LSTM":
        yield "input_forget", wrong(input_forget=1)
        yield "cell lost", wrong(names=["x", "W", "R", "B", "", "initial_h"])
        yield "states exchanged", wrong(names=["x", "W", "R", "B", "", "initial_c", "initial_h"])
    yield "state lost", wrong(names=["x", "W", "R", "B", "", "", *["initial_c"] * (kind == "LSTM")])


@pytest.mark.exhaustive
def test_planted_faults_are_found_and_sound_files_pass(rng, tmp_path):
    """By the outputs of the right model, and by comparison with it; at most 3 of 100 may be missed by either."""
    missed, total = {"outputs": [], "like": []}, 0
    for kind in GATES:
        for direction in SIDES:
            weights = weights_of(rng, kind, SIDES[direction])
            attributes = {"direction": direction} | ({"linear_before_reset": 1} if kind == "GRU" else {})
            right = build(kind, weights, **attributes)
            feeds = feeds_of(right, rng)
            files = {"input": str(tmp_path / "in.npz"), "outputs": str(tmp_path / "out.npz")}
            np.savez(files["input"], **feeds)
            np.savez(files["outputs"], **outputs_of(right, feeds))
            sound = examined(right, tmp_path / "right.onnx", **files)
            assert sound.exit_code(strict=True) == 0, str(sound)
            for name, model in faults(kind, direction, weights):
                total += 1
                report = examined(model, tmp_path / "wrong.onnx", **files)
                if "outputs-differ" not in codes(report):
                    missed["outputs"].append((kind, direction, name))
                if not list(compare(facts(report), facts(sound))):
                    missed["like"].append((kind, direction, name))
    assert total >= 60
    assert all(len(each) <= 0.05 * total for each in missed.values()), missed
    assert not set(missed["outputs"]) & set(missed["like"])


@pytest.mark.parametrize(("kind", "first", "second", "order"), [("LSTM", 1, 2, "0 2 1 3"), ("GRU", 0, 1, "1 0 2")])
def test_the_order_of_gates_is_named(rng, tmp_path, kind, first, second, order):
    weights = weights_of(rng, kind, 1)
    right = examined(build(kind, weights), tmp_path / "m.onnx")
    wrong = examined(build(kind, exchanged(weights, first, second)), tmp_path / "m.onnx")
    (finding,) = compare(facts(wrong), facts(right))
    assert finding.message == f"its gates are those of the reference in the order {order}"


# ------------------------------------------------------------------------------------------------ the reset gate


@pytest.fixture
def gru(rng, tmp_path):
    """A GRU whose exporter forgot the attribute, and files of the right inputs and outputs."""
    weights = weights_of(rng, "GRU", 1)
    right = build("GRU", weights, "pytorch", linear_before_reset=1)
    wrong = build("GRU", weights, "pytorch")
    feeds = feeds_of(right, rng)
    files = {"input": str(tmp_path / "in.npz"), "outputs": str(tmp_path / "out.npz")}
    np.savez(files["input"], **feeds)
    np.savez(files["outputs"], **outputs_of(right, feeds))
    return right, wrong, files


def test_a_forgotten_reset_is_a_warning_and_with_outputs_an_error_that_is_repaired(gru, tmp_path):
    right, wrong, files = gru
    report = examined(wrong, tmp_path / "wrong.onnx")
    assert (codes(report), report.exit_code(), report.exit_code(strict=True)) == ({"gru-reset"}, 0, 1)
    fixed = tmp_path / "fixed.onnx"
    report = examined(wrong, tmp_path / "wrong.onnx", fix=str(fixed), **files)
    assert codes(report) == {"gru-reset", "outputs-differ"}
    assert report.exit_code() == 1
    assert report.fixed == [f"set linear_before_reset = 1 in 1 GRU: wrote {fixed}"]
    repaired = examined(onnx.load(fixed), tmp_path / "again.onnx", **files)
    assert repaired.exit_code(strict=True) == 0
    assert not list(compare(facts(repaired), facts(examined(right, tmp_path / "right.onnx"))))


def test_no_reset_is_doubted_without_a_reason(gru, rng, tmp_path):
    """Right by its outputs, of another producer, or without a recurrent bias for the candidate."""
    _, wrong, files = gru
    np.savez(files["outputs"], **outputs_of(wrong, dict(np.load(files["input"]))))
    assert not codes(examined(wrong, tmp_path / "m.onnx", **files))
    weights = weights_of(rng, "GRU", 1)
    assert not codes(examined(build("GRU", weights, "cnorm"), tmp_path / "m.onnx"))
    weights["B"][:, -UNITS:] = 0
    assert not codes(examined(build("GRU", weights, "pytorch"), tmp_path / "m.onnx"))


# ------------------------------------------------------------------------------------------- states and lengths


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("how", ["none", "constant", "expanded"])
def test_a_step_that_forgets_is_named(rng, tmp_path, kind, how):
    model = build(kind, weights_of(rng, kind, 1), states=False, steps=1)
    node, graph = model.graph.node[0], model.graph
    if how != "none":
        states = ["initial_h", "initial_c"][: 2 if kind == "LSTM" else 1]
        node.input.extend(states)
        for name in states:
            zero = np.zeros((1, 2, UNITS) if how == "constant" else (1, 1, 1), np.float32)
            graph.initializer.append(numpy_helper.from_array(zero, name if how == "constant" else f"{name}_0"))
            if how == "expanded":
                graph.initializer.append(numpy_helper.from_array(np.array([1, 2, UNITS]), f"{name}_shape"))
                graph.node.insert(0, helper.make_node("Expand", [f"{name}_0", f"{name}_shape"], [name]))
    assert "stateless-step" not in codes(examined(model, tmp_path / "m.onnx"))
    del graph.output[1 if kind == "LSTM" else 0 :]
    graph.node.append(helper.make_node("ReduceMax", ["Y"], ["answer"], keepdims=0))
    graph.output.append(helper.make_tensor_value_info("answer", TensorProto.FLOAT, None))
    if kind == "LSTM":
        del graph.output[0]
    report = examined(model, tmp_path / "m.onnx")
    assert codes(report) == {"stateless-step"}
    many = build(kind, weights_of(rng, kind, 1), states=False)
    assert not codes(examined(many, tmp_path / "m.onnx"))


def reversed_by(kind, step_count=6):
    nodes = {
        "slice": helper.make_node("Slice", ["x", "starts", "ends", "axes", "steps_"], ["reversed"]),
        "gather": helper.make_node("Gather", ["x", "indices"], ["reversed"], axis=0),
        "sequence": helper.make_node("ReverseSequence", ["x", "many"], ["reversed"], time_axis=0, batch_axis=1),
        "open": helper.make_node("Slice", ["x", "last", "ends", "axes", "steps_"], ["reversed"]),
    }
    stored = {
        "starts": np.array([step_count - 1]),
        "ends": np.array([-(2**31)]),
        "axes": np.array([0]),
        "steps_": np.array([-1]),
        "indices": np.arange(step_count)[::-1].copy(),
        "many": np.array([step_count, step_count]),
        "last": np.array([-1]),
    }
    used = {name: value for name, value in stored.items() if name in nodes[kind].input}
    return nodes[kind], [numpy_helper.from_array(value, name) for name, value in used.items()]


@pytest.mark.parametrize("how", ["slice", "gather", "sequence", "open"])
def test_a_reversal_of_fixed_length_is_named(rng, tmp_path, how):
    model = build("LSTM", weights_of(rng, "LSTM", 1), states=False)
    node, stored = reversed_by(how)
    model.graph.node.insert(0, node)
    model.graph.initializer.extend(stored)
    model.graph.node[1].input[0] = "reversed"
    expected = set() if how == "open" else {"frozen-length"}
    assert codes(examined(model, tmp_path / "m.onnx", sizes={"steps": 6})) == expected


def test_constant_lengths_are_named_where_the_steps_are_open_or_others(rng, tmp_path):
    weights = weights_of(rng, "GRU", 1)
    frozen = {"frozen-length"}
    for steps, lengths, expected in (("steps", [6, 6], frozen), (6, [6, 6], set()), (6, [6, 4], frozen)):
        model = build("GRU", weights, states=False, steps=steps, lengths=lengths)
        assert codes(examined(model, tmp_path / "m.onnx")) == expected


# ------------------------------------------------------------------------------------- the runtime, and the report


def test_what_onnxruntime_computes_otherwise_is_said(rng, tmp_path):
    """It does not clip the cell before its activation, and takes other defaults for alpha and beta."""
    weights = {name: 2 * value for name, value in weights_of(rng, "LSTM", 1).items()}
    report = examined(build("LSTM", weights, clip=0.5), tmp_path / "m.onnx")
    (cell,) = report.cells
    assert (cell.verdict, cell.blame, report.exit_code()) == ("wrong", "kernel", 1)
    assert "clip 0.5" in cell.detail
    scaled = build("RNN", weights_of(rng, "RNN", 1), activations=["ScaledTanh"])
    (cell,) = examined(scaled, tmp_path / "m.onnx").cells
    assert (cell.verdict, cell.blame) == ("wrong", "kernel")
    assert "scaledtanh(1, 1)" in cell.detail
    turned = examined(build("RNN", weights_of(rng, "RNN", 1), states=False, layout=1), tmp_path / "m.onnx")
    assert turned.exit_code() == 2
    assert "layout" in turned.problem


def test_nodes_inside_a_loop_are_judged(rng, tmp_path):
    inner = build("RNN", weights_of(rng, "RNN", 1), states=False)
    body = helper.make_graph(
        [*inner.graph.node, helper.make_node("Identity", ["go"], ["on"])],
        "body",
        [
            helper.make_tensor_value_info("index", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
        ],
        [
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("Y", TensorProto.FLOAT, None),
        ],
        list(inner.graph.initializer),
    )
    stored = [numpy_helper.from_array(np.array(3), "times"), numpy_helper.from_array(np.array(True), "yes")]
    graph = helper.make_graph(
        [helper.make_node("Loop", ["times", "yes"], ["all"], "loop", body=body)],
        "main",
        list(inner.graph.input),
        [helper.make_tensor_value_info("all", TensorProto.FLOAT, None)],
        stored,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    report = examined(model, tmp_path / "m.onnx")
    (cell,) = report.cells
    assert (cell.verdict, report.exit_code()) == ("ok", 0), cell.detail
    assert cell.scope == "loop.body"


def test_a_node_with_an_unknown_activation_is_an_error(rng, tmp_path):
    report = examined(build("RNN", weights_of(rng, "RNN", 1), activations=["Swish"]), tmp_path / "m.onnx")
    assert report.exit_code() == 1
    assert "no activation is named 'swish'" in report.findings[0].message


def test_every_format_shows_the_nodes(rng, tmp_path):
    from onnx_export.validation.html import page

    path = tmp_path / "m.onnx"
    report = examined(build("LSTM", weights_of(rng, "LSTM", 1), clip=0.01), path)
    assert f"{path}: failed: 1 error; 1 LSTM: 1 wrong" in list(formats.lines(report))
    assert "failed: 1 error; 1 LSTM: 1 wrong" in str(report)
    assert '<strong class="verdict failed">failed</strong> 1 error; 1 LSTM: 1 wrong' in page(report)
    assert json.loads(report.to_json())["cells"][0]["facts"]["clip"] == "0.01"
    assert '<failure type="wrong"' in formats.junit([report])
    result = CliRunner().invoke(command.validate, [str(path), "--lock", str(tmp_path / "lock.json")])
    assert result.exit_code == 1
    assert CliRunner().invoke(command.validate, [str(path), "--like", str(tmp_path / "lock.json")]).exit_code == 1


# ------------------------------------------------------------------------------------------------ exported files


RECURRENT = sorted(name[:-5] for name in archive.read("recurrent") if name.endswith(".onnx"))


def recurrent(name, tmp_path, source="recurrent"):
    """The report of a file of make_recurrent or make_keras_recurrent, with the framework's inputs and outputs."""
    files = archive.read(source)
    path = tmp_path / "model.onnx"
    path.write_bytes(files[f"{name}.onnx"])
    arrays = np.load(io.BytesIO(files[f"{name}.npz"]))
    wanted = [value.name for value in onnx.load(path).graph.input]
    np.savez(tmp_path / "in.npz", **{each: arrays[each] for each in arrays if each in wanted})
    np.savez(tmp_path / "out.npz", **{each: arrays[each] for each in arrays if each not in wanted})
    options = Options(input=str(tmp_path / "in.npz"), outputs=str(tmp_path / "out.npz"))
    return examine(str(path), options, lambda *_: None)


@pytest.mark.exhaustive(one_in=2)
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_nodes_of_pytorch_are_sound(name, tmp_path):
    report = recurrent(name, tmp_path)
    assert report.exit_code(strict=True) == 0, report.conclusion(strict=True)  # by its outputs, where it is not judged
    unrolled = name.startswith("RNN") and "current" in name  # this exporter writes an RNN as elementary operators
    assert {cell.verdict for cell in report.cells} == ({"not judged"} if unrolled else {"ok"})


KERAS = sorted(name[:-5] for name in archive.read("keras_recurrent") if name.endswith(".onnx"))


@pytest.mark.parametrize("name", KERAS)
def test_recurrent_nodes_of_keras_are_sound(name, tmp_path):
    """Written by tf2onnx: as nodes, or as Loops and elementary operators where it has no node for them."""
    report = recurrent(name, tmp_path, "keras_recurrent")
    assert report.exit_code(strict=True) == 0, (report.conclusion(strict=True), report.findings)
    node = name.startswith("LSTM") and not name.startswith(("LSTM_hard", "LSTM_linear", "LSTM_unrolled"))
    assert {cell.verdict for cell in report.cells} == ({"ok"} if node else {"not judged"})


@pytest.mark.exhaustive(one_in=2)
@pytest.mark.parametrize("name", [name[: -len("@older")] for name in RECURRENT if name.endswith("@older")])
def test_the_older_exporter_is_like_the_current_one(name, tmp_path):
    if name.startswith("RNN"):
        pytest.skip("the current exporter writes an RNN as elementary operators")
    older, current = (facts(recurrent(f"{name}@{which}", tmp_path)) for which in ("older", "current"))
    assert not list(compare(older, current))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("slot", ["W", "R", "B"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_weights_that_are_not_finite_are_an_error(kind, slot, value, rng, tmp_path):
    weights = weights_of(rng, kind, 1)
    weights[slot].flat[1] = value
    report = examined(build(kind, weights), tmp_path / "m.onnx")
    assert "weights-nan" in codes(report)
    assert report.exit_code() == 1
    assert report.cells[0].verdict != "ok" or value == np.inf  # gates of infinite sums are finite


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_the_last_line_says_that_no_norm_was_found(kind, rng, tmp_path):
    report = examined(build(kind, weights_of(rng, kind, 1)), tmp_path / "m.onnx")
    assert report.exit_code(require_norm=True) == 2
    assert report.conclusion(require_norm=True).startswith("cannot validate: no layer norm was found; 1 ")
