"""check_parity on the demo model and on deliberately wrong files, every one of which it must report."""

import json
from dataclasses import asdict

import numpy as np
import onnx
import pytest
from models import random_linear, random_lstm
from recordings import recordings

import cnorm
import onnx_export
from onnx_export.parity import ParityReport

ENGINES = ("cnorm", "onnxruntime off", "onnxruntime basic", "onnxruntime all")


@pytest.fixture(scope="module")
def utterances():
    return recordings()[0]


@pytest.fixture(scope="module")
def demo():
    model = cnorm.demo_model()
    return model, onnx_export.export(model)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("form", ["step", "sequence"])
def test_every_form_of_the_demo_model(demo, form, dtype):
    exported = onnx_export.export(demo[0], form=form, dtype=dtype, batch="batch")
    report = onnx_export.check_parity(demo[0], exported, steps=8)
    assert report.ok, str(report)


def test_float16_is_judged_by_float16(demo):
    """The bound grows by the ratio of the unit roundoffs, 8192, and no more: a broken file is still reported."""
    half = onnx_export.export(demo[0], dtype="float16")
    single = onnx_export.check_parity(*demo, steps=4)
    report = onnx_export.check_parity(demo[0], half, steps=4)
    assert single.verdict.startswith("equal within float32 rounding")
    assert report.verdict.startswith("equal within float16 rounding")
    for row, other in zip(report.rows, single.rows, strict=True):
        assert row.bound < 8192 * 4 * other.bound
    assert not onnx_export.check_parity(demo[0], broken(half, swap_gates), steps=4).ok
    ulp = {row.engine: row.max_ulp for row in report.rows if row.tensor == "y" and row.against == "float64"}
    assert max(ulp.values()) < 1024  # one unit for all engines: in that of float32 they would be 8192 times as large


def test_bound_covers_the_ill_conditioned_norm_of_two_units(rng):
    """Two cells of nearly equal value: their norm is ill-conditioned and enlarges errors; the bound covers that."""
    model = cnorm.Model([random_lstm(rng, 2, 2), random_linear(rng, 2, 3)])
    report = onnx_export.check_parity(model, onnx_export.export(model), steps=300)
    assert report.ok, str(report)


@pytest.mark.parametrize("scale", [1.0, 0.3, 0.1])
def test_bound_covers_a_norm_of_sums_that_a_common_bias_rounds(rng, scale):
    """A change of the inputs does not show how the sums round: 64 u, which the norm divides by `scale`."""
    weight, gain = (rng.standard_normal((24, 8)) * scale).astype(np.float32), np.ones(24, np.float32)
    model = cnorm.Model([cnorm.Linear(weight, np.full(24, 64, np.float32)), cnorm.LayerNorm(gain, 0 * gain)])
    exported = onnx_export.export(model)
    report = onnx_export.check_parity(model, exported)
    assert report.ok, str(report)
    for initializer in exported.graph.initializer:
        if initializer.name.endswith("weight") and list(initializer.dims) == [24]:
            initializer.raw_data = (gain * np.float32(1 + scale**-1 * 1e-4)).tobytes()
    assert not onnx_export.check_parity(model, exported).ok


@pytest.mark.parametrize("size", [[1] * 8, [1e-2] * 8, [1e5] + [1] * 7, [1] * 7 + [1e5]])
@pytest.mark.parametrize("large", [2.0**14, 2.0**17, 2.0**20])
def test_weights_that_cancel_hide_no_error(rng, large, size):
    """K x - K x is exactly 0; a change of K and -K each by itself is none that float32 has."""
    weight, k = (rng.standard_normal((8, 8)) / 3).astype(np.float32), np.full(8, large, np.float32)
    sizes = np.float32(size)
    model = cnorm.Model([cnorm.Linear(weight), cnorm.Activation("tanh"), cnorm.Scale(sizes)])
    exported = onnx_export.export(model)
    (name,) = [value.name for value in exported.graph.output]
    last = next(node for node in exported.graph.node if name in node.output)
    last.output[0] = "right"
    more = np.where(sizes < 1e5, np.float32(1.001), np.float32(1))
    constants = {"more": more, "k": k, "minus": -k}
    exported.graph.initializer.extend(onnx.numpy_helper.from_array(a, key) for key, a in constants.items())
    for op, inputs, output in (
        ("Mul", ["right", "more"], "wrong"),
        ("Mul", ["x", "k"], "up"),
        ("Mul", ["x", "minus"], "down"),
        ("Add", ["up", "down"], "zero"),
        ("Add", ["wrong", "zero"], name),
    ):
        exported.graph.node.append(onnx.helper.make_node(op, inputs, [output]))
    assert not onnx_export.check_parity(model, exported).ok


@pytest.mark.parametrize("opset", [13, 17])
def test_wide_layers(rng, opset):
    """The bound follows the length of the sums: 3.8e-6 at 256."""
    model = cnorm.Model([random_lstm(rng, 128, 256), random_linear(rng, 256, 10)])
    report = onnx_export.check_parity(model, onnx_export.export(model, opset=opset), steps=8)
    assert report.ok, str(report)
    (row,) = (r for r in report.rows if (r.engine, r.against, r.tensor) == ("cnorm", "float64", "h0_out"))
    assert row.bound >= 4 * 2.0**-24 * 16


@pytest.mark.parametrize(("form", "opset"), [("step", 13), ("sequence", 17)])
def test_validator_finds_every_norm_and_judges_it_sound(demo, tmp_path, form, opset):
    onnx_export.export(demo[0], tmp_path / "demo.onnx", form=form, opset=opset)
    report = onnx_export.validate(tmp_path / "demo.onnx")
    assert report.ok
    assert [norm.formula for norm in report.norms] == ["layer"] * 3


def with_eps(model, eps):
    lstm, linear = model.layers
    return cnorm.Model([cnorm.LSTM(lstm.weights, preset="ba2016", eps=eps), linear])


def worst(report, engine, against="float64"):
    return max(row.max_abs for row in report.rows if (row.engine, row.against) == (engine, against))


def test_the_demo_model_is_within_2e_6_per_step_over_64_steps(demo, utterances):
    model, exported = demo
    random = onnx_export.check_parity(model, exported, steps=64)
    recorded = onnx_export.check_parity(model, exported, inputs=np.concatenate(utterances[:8])[:64])
    for report in random, recorded:
        assert report.ok, str(report)
        assert report.steps == 64
        assert {row.engine for row in report.rows} == set(ENGINES)
        assert {row.tensor for row in report.rows} == {"y", "h0_out", "c0_out"}
        for engine in ENGINES:
            assert worst(report, engine) <= 2e-6, str(report)


def test_free_runs_of_recorded_utterances_agree_within_5e_6(demo, utterances):
    report = onnx_export.check_parity(*demo, inputs=utterances[::12])
    assert report.ok, str(report)
    assert report.inputs == "recorded"
    for drift in report.drift:
        assert drift.max_abs <= 5e-6, str(report)


def test_the_same_seed_gives_the_same_report(demo):
    assert onnx_export.check_parity(*demo, steps=3) == onnx_export.check_parity(*demo, steps=3)
    assert onnx_export.check_parity(*demo, steps=3) != onnx_export.check_parity(*demo, steps=3, seed=1)


def test_a_path_is_read(demo, tmp_path):
    model, exported = demo
    onnx.save(exported, tmp_path / "demo.onnx")
    expected = onnx_export.check_parity(model, exported, steps=3)
    for path in (tmp_path / "demo.onnx", str(tmp_path / "demo.onnx")):
        assert onnx_export.check_parity(model, path, steps=3) == expected


def broken(exported, change):
    copy = onnx.ModelProto()
    copy.CopyFrom(exported)
    change({node.name: node for node in copy.graph.node}, copy)
    return copy


def swap_gates(nodes, _):
    outputs = nodes["layers.0/gate_f"].output
    outputs[0], outputs[1] = outputs[1], outputs[0]


def drop_norm_of_h(nodes, _):
    nodes["layers.0/norm_h"].op_type = "Identity"
    del nodes["layers.0/norm_h"].input[1:], nodes["layers.0/norm_h"].attribute[:]


def drop_norm_of_c(nodes, _):
    nodes["layers.0/shown"].input[0] = "c0_out"


def carry_the_normalised_cell(nodes, _):
    """Make the graph carry the normalised cell: another preset with weights of the same names and shapes."""
    nodes["c0_out"].output[0] = "raw"
    nodes["layers.0/norm_c"].input[0] = "raw"
    nodes["layers.0/norm_c"].output[0] = "c0_out"
    nodes["layers.0/shown"].input[0] = "c0_out"


def forget_the_bias(nodes, _):
    nodes["layers.0/biased_fiog"].op_type = "Identity"
    del nodes["layers.0/biased_fiog"].input[1:]


def stale_state(nodes, _):
    nodes["layers.0/kept"].input[1] = "h0_in"


def one_weight_off(_, copy):
    tensor = next(t for t in copy.graph.initializer if t.name == "layers.0.weight_h")
    array = onnx.numpy_helper.to_array(tensor).copy()
    array[100, 30] += 0.01
    tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))


BREAKS = [
    swap_gates,
    drop_norm_of_h,
    drop_norm_of_c,
    carry_the_normalised_cell,
    forget_the_bias,
    stale_state,
    one_weight_off,
]


@pytest.mark.parametrize("change", BREAKS, ids=lambda change: change.__name__)
def test_a_broken_graph_is_reported(demo, change):
    model, exported = demo
    report = onnx_export.check_parity(model, broken(exported, change), steps=8)
    assert not report.ok
    assert not report
    # onnxruntime computes the file correctly; it is the file that differs from cnorm's model
    assert report.first.engine == "cnorm"
    assert all(row.ok for row in report.rows if row.engine != "cnorm")
    assert f"cnorm and float64 go apart first in {report.first.tensor} at step" in report.verdict


def test_a_missing_eps_is_reported(demo):
    model = with_eps(demo[0], 1e-3)
    exported = onnx_export.export(model)
    assert onnx_export.check_parity(model, exported, steps=8).ok

    def lose(nodes, _):
        for node in nodes.values():
            if node.op_type == "LayerNormalization":
                del node.attribute[[a.name for a in node.attribute].index("epsilon")]

    report = onnx_export.check_parity(model, broken(exported, lose), steps=8)
    assert not report.ok


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_different_initial_state_is_reported(demo, dtype):
    """Each step agrees from any state: only the state table and the free runs show the difference."""
    lstm, linear = demo[0].layers
    started = cnorm.LSTM({**lstm.weights, "h0": np.full(64, 0.3, "f")}, preset="ba2016")
    other = cnorm.Model([started, linear])
    exported = onnx_export.export(other, dtype=dtype)
    assert onnx_export.check_parity(other, exported, steps=4).ok
    for model, of in ((demo[0], exported), (other, onnx_export.export(demo[0], dtype=dtype))):
        report = onnx_export.check_parity(model, of, steps=4)
        assert not report.ok
        assert [row.tensor for row in report.rows if not row.ok] == ["h0_in"]
        assert report.verdict.startswith("not equal: cnorm and float64 go apart first in h0_in at step 0")
        assert max(drift.max_abs for drift in report.drift) > 0.1
        assert json.loads(report.to_json())["first"]["used"] is None
        assert "inf%" in report.table()


def test_first_diverging_step_is_reported(demo):
    """A file that clips its cell at 1 is right until a cell exceeds 1."""
    model, exported = demo

    def clip(nodes, copy):
        nodes["c0_out"].output[0] = "raw"
        limits = [onnx.numpy_helper.from_array(np.float32(v), n) for n, v in (("low", -1), ("high", 1))]
        copy.graph.initializer.extend(limits)
        at = next(i for i, node in enumerate(copy.graph.node) if node.name == "c0_out")
        copy.graph.node.insert(at + 1, onnx.helper.make_node("Clip", ["raw", "low", "high"], ["c0_out"]))

    x = np.random.default_rng(0).standard_normal((40, 12)).astype(np.float32)
    stream, largest = model.stream(), []
    for frame in x:
        stream.step(frame)
        largest.append(np.abs(stream.state()["c0"]).max())
    expected = next(i for i, v in enumerate(largest) if v > 1)
    assert expected > 0
    report = onnx_export.check_parity(model, broken(exported, clip), inputs=[x[:expected], x])
    assert (report.first.recording, report.first.step) == (1, expected)
    assert f"at step {expected} of recording 1" in report.verdict


def test_nan_counts_as_an_infinite_error(demo):
    model, exported = demo

    def poison(_, copy):
        tensor = next(t for t in copy.graph.initializer if t.name == "layers.1.bias")
        array = onnx.numpy_helper.to_array(tensor).copy()
        array[0] = np.nan
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))

    report = onnx_export.check_parity(model, broken(exported, poison), steps=2)
    assert not report.ok
    assert report.first.tensor == "y"
    assert json.loads(report.to_json())["first"]["max_abs"] is None
    assert 0 < report.first.bound < 1e-3


def test_steps_after_a_state_that_is_not_finite_are_not_counted(demo):
    """NaN weights reach the cell in the first step: two recordings, one counted step each."""
    model, exported = demo

    def poison(_, copy):
        tensor = next(t for t in copy.graph.initializer if t.name == "layers.0.weight_h")
        tensor.CopyFrom(onnx.numpy_helper.from_array(np.full(tensor.dims, np.nan, "f"), tensor.name))

    report = onnx_export.check_parity(model, broken(exported, poison), inputs=2 * [np.ones((5, 12), "f")])
    assert not report.ok
    assert report.steps == 2
    assert "2 recorded steps" in report.verdict


def test_the_report_as_json_text_and_table(demo):
    report = onnx_export.check_parity(*demo, steps=4)
    data = json.loads(report.to_json())
    assert data["ok"] is True
    assert data["steps"] == 4
    assert data["first"] is None
    assert len(data["rows"]) == len(report.rows) == 21
    assert {
        "engine",
        "against",
        "tensor",
        "max_abs",
        "max_ulp",
        "used",
        "bound",
        "recording",
        "step",
        "ok",
    } == set(data["rows"][0])
    first, *more = str(report).splitlines()
    assert (first, len(more)) == (report.verdict, 2)
    heading, *rows, last = report.table().splitlines()
    assert (len(rows), last) == (21 + len(report.drift), report.verdict)
    assert all(len(line) <= 80 for line in [heading, *rows])
    assert ParityReport.from_dict(asdict(report)) == report


def test_units_in_the_last_place_are_not_counted_near_0(demo):
    report = onnx_export.check_parity(*demo, steps=4)
    assert max(row.max_ulp for row in report.rows) < 2**14  # the bound of a step, in units of 2**-10


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"inputs": np.zeros((3, 12))}, TypeError, r"inputs\[0\] must be a float32 array, got float64"),
        ({"inputs": [np.zeros((3, 12), "f"), 3]}, TypeError, r"inputs\[1\] must be a float32 array, got int"),
        ({"inputs": np.zeros((3, 11), "f")}, ValueError, r"inputs\[0\] must have shape \(steps, 12\)"),
        ({"inputs": [np.diag([0, 0, np.nan] + 9 * [0.0]).astype("f")]}, ValueError, r"finite, got NaN .* at step 2"),
        ({"inputs": []}, ValueError, "at least one step"),
        ({"inputs": "recording.npz"}, TypeError, "inputs must be an array or a list"),
        ({"steps": 0}, ValueError, "steps must be at least 1"),
        ({"steps": 1.5}, TypeError, "steps must be an integer"),
    ],
)
def test_wrong_arguments(demo, options, error, says):
    with pytest.raises(error, match=says):
        onnx_export.check_parity(*demo, **options)


def test_rejects_anything_but_a_model(demo):
    with pytest.raises(TypeError, match="model must be a cnorm"):
        onnx_export.check_parity(demo[1], demo[1])


def test_another_interface_is_refused(demo):
    model, exported = demo
    copy = onnx.ModelProto()
    copy.CopyFrom(exported)
    copy.graph.output[1].name = "state"
    for node in copy.graph.node:
        for names in (node.input, node.output):
            names[:] = ["state" if n == "h0_out" else n for n in names]
    with pytest.raises(ValueError, match="must have the outputs y, h0_out, c0_out, got y, state, c0_out"):
        onnx_export.check_parity(model, copy)
    with pytest.raises(ValueError, match="must have the inputs x, got"):
        onnx_export.check_parity(cnorm.Model([cnorm.Linear(np.ones((3, 2), "f"))]), exported)
