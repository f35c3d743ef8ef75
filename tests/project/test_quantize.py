"""`cnorm quantize`: its errors against direct computation, its remarks, its files and exit codes."""

import subprocess
import sys

import cells
import models
import numpy as np
import pytest
from cells import random_cell

import cnorm
from cnorm.tools import quantize


def command(*arguments, cwd, name="quantize"):
    code = "import sys; from cnorm.tools.cli import main; sys.argv[0] = 'cnorm'; main()"
    return subprocess.run([sys.executable, "-P", "-c", code, name, *arguments], capture_output=True, text=True, cwd=cwd)


def every_kind_of_layer(rng):
    projected, _ = random_cell(("LSTM", "lingvo"), rng, 40, 64, outputs=40)
    way, back = (random_cell(("GRU", "torch"), rng, 40, 32)[0] for _ in range(2))
    inner = cnorm.Residual([models.random_linear(rng, 40, 40), cnorm.Activation("tanh")])
    return cnorm.Model([projected, inner, cnorm.Bidirectional(way, back), models.random_linear(rng, 64, 5)])


@pytest.mark.parametrize("weights", ["int8", "float16"])
def test_single_step_errors_are_those_of_the_oracle(weights):
    key, rng = ("LSTM", "ba2016"), np.random.default_rng(1)
    layer, advance = random_cell(key, rng, 12, 48)
    model = cnorm.Model([layer])
    rounded = model.with_weights(weights, smallest=0)
    x = rng.standard_normal((10, 12)).astype(np.float32)
    report = quantize.measured(model, rounded, [x])
    (found,) = report.layers
    state, stream = {name: np.zeros(48) for name in ("h0", "c0")}, rounded.stream()
    for frame, error, exact in zip(x, found.errors[0], report.exact[0], strict=True):
        stream.set_state({name: value.astype(np.float32) for name, value in state.items()})
        state = advance(frame, state)
        np.testing.assert_allclose(exact, state["h0"], atol=1e-12)
        np.testing.assert_allclose(error, stream.step(frame) - state["h0"], atol=1e-12)
    assert np.array_equal(report.rounded[0], rounded.run(x))
    assert np.array_equal(report.float32[0], model.run(x))


def test_every_kind_of_layer_is_measured():
    model = every_kind_of_layer(np.random.default_rng(2))
    rounded = model.with_weights("int8", smallest=0)
    inputs = [np.random.default_rng(i).standard_normal((steps, 40)).astype(np.float32) for i, steps in ((3, 7), (4, 5))]
    report = quantize.measured(model, rounded, inputs)
    names = ["layers.0", "layers.1.0", "layers.2.forward", "layers.2.backward", "layers.3"]
    assert [layer.name for layer in report.layers] == names
    for layer in report.layers:
        assert [len(errors) for errors in layer.errors] == [7, 5]
        assert 0 < quantize.root_mean_square(layer.errors) < 0.02
        assert layer.bytes_after < 0.4 * layer.bytes_before
        assert set(layer.types.values()) == {"int8"}
    for exact, float32 in zip(report.exact, report.float32, strict=True):
        assert np.abs(exact - float32).max() < 1e-5


def test_sensitive_gates_and_steps_are_named():
    layer, _ = random_cell(("GRU", "torch"), np.random.default_rng(5), 300, 40)
    spoiled = {name: array.copy() for name, array in layer.weights.items()}
    name = next(name for name, array in spoiled.items() if array.shape == (120, 300))
    spoiled[name][40 + 17, 3] = 1  # PyTorch's gates are r, z, n
    model = cnorm.Model([cnorm.GRU(spoiled, preset="torch")])
    (report,) = quantize.layers_of(model, model.with_weights("int8", smallest=0))
    assert len(report.remarks) == 1
    assert "1 of 40 rows" in report.remarks[0]
    assert "gate z, unit 17" in report.remarks[0]
    report.errors = [np.ones((100, 3)), np.ones((400, 3))]
    report.errors[1][7, 2] = -300
    (remark,) = quantize.far_steps(report)
    assert "sensitive at frame 7 of recording 1" in remark
    assert "norm" not in remark  # PyTorch's GRU has none
    report.errors[1][7, 2] = 1
    assert quantize.far_steps(report) == []


def test_command_writes_model_table_and_picture(tmp_path):
    cnorm.demo_model().save(tmp_path / "m")
    np.savez(tmp_path / "x.npz", a=np.zeros((3, 12)), b=np.random.default_rng(0).standard_normal((9, 12)))
    done = command("m", "out", "--smallest", "4000", "--input", "x.npz", "--picture", "p.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    kept = "weight_x stays float32: 256x12, fewer weights than --smallest"
    for text in ("layers.0 LSTM", "int8/float32", kept, "of 12 frames", "recording frame"):
        assert text in " ".join(done.stdout.split()).replace("float32/int8", "int8/float32"), text
    assert cnorm.load(tmp_path / "out").weights == "int8"
    assert (tmp_path / "p.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.exhaustive(one_in=5)
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["m", "out"], "matrices have 20032 weights, fewer than 32768"),
        (["m", "out", "--smallest", "0", "--picture", "p.jpg"], "must end in .png, got 'p.jpg'"),
        (["m", "m", "--smallest", "0"], "must be another file than MODEL"),
        (["m.png", "out", "--smallest", "0", "--picture", "m.png"], "must be another file than MODEL"),
        (["int8", "out", "--smallest", "0"], "its weights are int8, give the float32 model"),
        (["m", "out", "--smallest", "0", "--input", "m"], "m is not an .npz file"),
        (
            ["m", "out", "--smallest", "0", "--input", "wide.npz"],
            "'x' must be [frames, 12] numbers, got float64 (3, 13)",
        ),
        (["m", "out", "--smallest", "0", "--input", "nan.npz"], "must be finite"),
        (["m", "out", "--smallest", "0", "--input", "pickled.npz"], "is not an .npz file of numbers"),
        (["m", "absent/out", "--smallest", "0"], "Invalid value for 'OUT': folder 'absent' does not exist"),
    ],
)
def test_errors_are_one_line_and_leave_no_file(tmp_path, arguments, says):
    model = cnorm.demo_model()
    for name in ("m", "m.png"):
        model.save(tmp_path / name)
    model.with_weights("int8", smallest=0).save(tmp_path / "int8")
    np.savez(tmp_path / "wide.npz", x=np.zeros((3, 13)))
    np.savez(tmp_path / "nan.npz", x=np.full((3, 12), np.nan))
    np.savez(tmp_path / "pickled.npz", x=np.array([{}], object))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    done = command(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_norm_over_nearly_equal_numbers_is_measured_without_failing():
    layer, _ = random_cell(("RNN", "ba2016"), np.random.default_rng(6), 8, 2, eps=cells.EPS.get(("RNN", "ba2016")))
    model = cnorm.Model([layer])
    report = quantize.measured(model, model.with_weights("int8", smallest=0), [np.zeros((4, 8), np.float32)])
    assert np.isfinite(report.layers[0].errors[0]).all()


def test_pack_refuses_to_round_nothing(tmp_path):
    """As quantize does: the demo has fewer than 32768 weights."""
    cnorm.demo_model().save(tmp_path / "m")
    done = command("m", "out", "--weights", "int8", cwd=tmp_path, name="pack")
    assert (done.returncode, done.stdout) == (2, "")
    assert "the model's matrices have 20032 weights, fewer than 32768" in done.stderr
    assert not (tmp_path / "out").exists()
    assert command("m", "out", "--smallest", "4096", cwd=tmp_path, name="pack").returncode == 2  # of --weights
    done = command("m", "out", "--weights", "int8", "--smallest", "4096", cwd=tmp_path, name="pack")
    assert done.returncode == 0, done.stderr
    assert cnorm.load(tmp_path / "out").weights == "int8"


def test_an_input_that_drowns_the_others_is_named(rng):
    model = cnorm.Model([random_cell(("GRU", "torch"), rng, 6, 16)[0]])
    rounded = model.with_weights("int8", smallest=1)
    frames = rng.standard_normal((8, 6)).astype(np.float32)
    assert not [r for r in quantize.measured(model, rounded, [frames]).layers[0].remarks if r.startswith("input")]
    frames[:, 2] *= 2000
    [remark] = [r for r in quantize.measured(model, rounded, [frames, frames]).layers[0].remarks if "input" in r[:5]]
    assert remark.startswith("input 2 reaches ")
    assert "so that the others lose their digits; scale it down" in remark


@pytest.mark.exhaustive(one_in=2)
@pytest.mark.parametrize("name", ["pack", "quantize", "export", "time"])
def test_a_file_name_does_not_reach_the_terminal_raw(name, tmp_path):
    path = tmp_path / "red\x1b[31m.safetensors"
    path.write_text("no model")
    done = command(path.name, *["out.onnx"] * (name != "time"), cwd=tmp_path, name=name)
    assert (done.returncode, done.stdout) == (2, "")
    assert "red\N{REPLACEMENT CHARACTER}[31m.safetensors is not a safetensors file" in done.stderr
