"""`cnorm bench`: its checks, omissions and reports. No test compares times; they only have to be positive numbers."""

import io
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import time
from importlib import util
from pathlib import Path

import numpy as np
import onnx
import pytest
import reference
from rich.console import Console

import cnorm
import cnorm_bench as bench
from cnorm_bench import cases, contenders, measure_products, report, runners
from cnorm_bench.contenders import numpy_, operations, timing

SIZES = [(2, 8), (3, 5)]


def script(name):
    """The module of a script in benchmarks/."""
    spec = util.spec_from_file_location(f"script_{name}", Path(bench.__file__).parents[1] / f"{name}.py")
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", sorted(Path(bench.__file__).parents[1].glob("*.py")), ids=lambda path: path.stem)
def test_every_script_can_be_imported(path):
    if path.stem == "torch_cells":
        pytest.importorskip("torch")
    assert script(path.stem).__doc__


def test_without_a_checkout_the_command_says_so():
    code = "import sys, cnorm; cnorm.__file__ = '/lib/cnorm/__init__.py'; sys.argv = ['cnorm', 'bench']"
    code += "; from cnorm.tools.cli import main; main()"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("cnorm bench runs from a checkout of cnorm's source")


@pytest.fixture
def timed(monkeypatch):
    """Labels of the contenders that were timed, in order."""
    labels = []

    def times(made, **options):
        labels.extend(contender.label for contender in made)
        return timing.times(made, **options)

    monkeypatch.setattr(contenders, "times", times)
    return labels


@pytest.fixture(scope="module")
def document():
    return bench.norms(SIZES, seconds=0.001)


@pytest.fixture(scope="module")
def steps():
    return bench.recurrent_steps([(3, 4)], seconds=0.001)


def is_time(value):
    return isinstance(value, float) and math.isfinite(value) and value > 0


def check_surroundings(document, kind):
    assert document["format"] == 1
    assert document["kind"] == kind
    assert document["isa"] == cnorm.active_isa()
    assert document["versions"].keys() >= {"cnorm", "python", "numpy"}
    assert isinstance(document["processor"], str)
    assert isinstance(document["memory_kept"], bool)
    assert all(isinstance(sentence, str) for sentence in document["left_out"])
    assert json.loads(json.dumps(document, allow_nan=False)) == document


def test_document_of_norms(document):
    check_surroundings(document, "norms")
    seen = {(bench.case_of(r), r["rows"], r["n"]) for r in document["records"]}
    assert seen == {(case, *size) for case in bench.CASES for size in SIZES}
    for record in document["records"]:
        assert is_time(record["microseconds"])
        assert is_time(record["best"])
        assert record["samples"] >= timing.MIN_SAMPLES
        assert record["best"] <= record["quartiles"][0] <= record["microseconds"] <= record["quartiles"][1]
        assert record["moved_bytes"] % (record["rows"] * record["n"] * 2) == 0
    labels = {r["contender"] for r in document["records"]}
    assert labels >= {"cnorm", "cnorm, new array", "np.copyto", "NumPy"}
    assert "fresh_memory" not in document  # no input here is large enough for page faults to be measurable


@pytest.mark.exhaustive
def test_document_of_steps(steps):
    check_surroundings(steps, "rnn")
    for record in steps["records"]:
        assert (record["input"], record["hidden"]) == (3, 4)
        assert all(is_time(record[name]) for name in ("p50", "p99", "p99.9", "max"))
        assert record["p50"] <= record["p99"] <= record["p99.9"] <= record["max"]
        assert record["samples"] >= 1000  # or p99.9 would be the maximum
        assert 0 < record["error"] < 1e-5
    assert {r["cell"] for r in steps["records"]} == set(operations.CELLS)
    assert steps["records"][0]["contender"] == "cnorm"
    assert [limit["weight_bytes"] for limit in steps["limits"]] == [4 * rows * 7 for rows in (16, 16, 12)]
    for limit in steps["limits"]:
        assert limit["read_by"] in ("np.max", "sum compiled by numba")
        assert is_time(limit["microseconds"])
        assert is_time(limit["product_microseconds"])
    assert [row["streams"] for row in steps["many"]] == [1, 2, 4, 8, 16, 64, 256]
    assert all(is_time(row["step_many"]) and is_time(row["step"]) for row in steps["many"])
    assert steps["call"].keys() == {"step", "inside"}
    assert all(map(is_time, steps["call"].values()))


@pytest.mark.exhaustive
def test_arithmetic_is_measured_beside_its_limits(steps):
    rows = steps["lines"]["rows"]
    vectors = {"step_many, 64 streams": 64, "process, 200 frames": 1, "training, 20 steps of 32": 96}
    assert {row["line"]: row["multiply_adds"] for row in rows} == {k: 4 * 4 * 7 * n for k, n in vectors.items()}
    known = cnorm.active_isa() in measure_products.VECTORS and shutil.which(os.environ.get("CC", "cc").split()[0])
    for row in rows:
        assert all(is_time(row[name]) for name in ("microseconds", "product", "read"))
        assert is_time(row["fma"]) if known else row["fma"] is None


def test_without_a_compiler_no_peak_is_named(steps, monkeypatch):
    monkeypatch.setattr(measure_products.shutil, "which", lambda name: None)
    lines = measure_products.at_the_limit([(3, 4)], seconds=0.001)
    assert all(row["fma"] is None for row in lines["rows"])
    file = io.StringIO()
    report.rnn_tables(Console(file=file, width=120), steps | {"lines": lines})
    assert "training, 20 steps of 32" in file.getvalue()


@pytest.mark.exhaustive
def test_rounded_weights_are_measured_with_their_errors():
    document = bench.recurrent_steps([(96, 128)], cells=("LSTM",), seconds=0.001)
    errors = {r["contender"]: r["error"] for r in document["records"]}
    modes = ["per tensor", "per channel", "reduced range"]
    tools = {f"onnxruntime, int8 {mode}" for mode in modes} | {"onnxruntime, cnorm's int8 graph"}
    assert errors.keys() >= {"cnorm", "cnorm, int8", "cnorm, float16"} | tools
    assert 1e-5 < errors["cnorm, float16"] < 3e-4
    assert 3e-4 < errors["cnorm, int8"] < 1e-2
    assert errors["onnxruntime, cnorm's int8 graph"] == pytest.approx(errors["cnorm, int8"], rel=1e-3)
    (limit,) = document["limits"]
    assert limit["int8"]["weight_bytes"] * 4 == limit["weight_bytes"]
    file = io.StringIO()
    report.rnn_tables(Console(file=file, width=120), document)
    assert "cnorm's int8 products alone" in file.getvalue()


def test_wrong_rounded_contenders_are_left_out():
    model = operations.random_model("LSTM", np.random.default_rng(0), 96, 128)
    frames = np.random.default_rng(1).standard_normal((4, 96), dtype=np.float32)
    exact = operations.trajectory("LSTM", model, frames)
    runner = runners.Cnorm(operations.random_model("LSTM", np.random.default_rng(9), 96, 128), "other")
    left_out = []
    assert operations.correct([(runner, frames, exact)], operations.check_rounded_steps, "LSTM", left_out) == []
    assert "other is off by" in left_out[0]


@pytest.mark.parametrize("case", bench.CASES, ids=str)
def test_every_contender_of_the_norms_is_right(case):
    """No importable contender is left out because its formula in the benchmark is wrong."""
    inputs = case.inputs(np.random.default_rng(0), 65, 130)
    for module in contenders.importable()[0]:
        for contender in getattr(module, case.operation, lambda **_: [])(**inputs):
            operations.check(contender, case.expected(**inputs))


def test_large_inputs_have_the_alignment_of_malloc():
    for shape in ((256, 128), (1000, 333)):
        assert timing.empty(shape, np.float32).ctypes.data % 4096 == 16
        assert timing.empty_like(np.zeros(shape, np.float16)).shape == shape


@pytest.mark.parametrize("name", operations.OPERATIONS)
def test_references_agree_with_the_oracle(name):
    inputs = cases.Case(name, mean=3).inputs(np.random.default_rng(1), 300, 7)
    expected = cases.Case(name).expected(**inputs)
    if name == "add_layer_norm":
        total = inputs.pop("x") + inputs.pop("residual")
        truth = reference.layer_norm(total, **inputs)[0], total
    elif name == "layer_norm_backward":
        truth = reference.layer_norm_backward(inputs["dy"], inputs["x"], inputs["weight"])
    else:
        truth = getattr(reference, name)(**inputs)[:1]
    for ours, theirs in zip(expected, truth, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)


def test_reference_of_the_ln_lstm_agrees_with_the_oracle():
    model = operations.random_model("LN-LSTM", np.random.default_rng(2), 3, 4)
    frames, h, c = np.ones((2, 3)), np.zeros(4), np.zeros(4)
    for x in frames:
        h, c = reference.lstm_ba2016(model.layers[0].weights, x, h, c)
    np.testing.assert_allclose(operations.trajectory("LN-LSTM", model, frames)[-1], h, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("cell", operations.CELLS)
def test_every_contender_of_the_steps_is_right(cell):
    """Includes cnorm, whose plain cells are also tested against another reference."""
    model = operations.random_model(cell, np.random.default_rng(3), 5, 7)
    frames = np.random.default_rng(4).standard_normal((3, 5), dtype=np.float32)
    runners = bench.step_contenders(contenders.importable()[0], model)
    assert runners
    for runner in runners:
        operations.check_steps(runner, frames, operations.trajectory(cell, model, frames)[-1])


def test_a_wrong_contender_is_reported_and_not_timed(monkeypatch, timed):
    def wrong(x, weight, bias):
        return [timing.Contender("NumPy", "x * weight", {"x": x, "weight": weight})]

    monkeypatch.setattr(numpy_, "layer_norm", wrong)
    document = bench.norms([(4, 8)], cases=[bench.FORWARD], seconds=0.001)
    assert "cnorm" in timed
    assert "NumPy" not in timed
    assert "NumPy" not in {r["contender"] for r in document["records"]}
    (sentence,) = (s for s in document["left_out"] if "4x8" in s)
    assert sentence.startswith("layer_norm 4x8: NumPy is off by ")
    assert sentence.endswith("it is not timed")


def test_a_wrong_cnorm_ends_the_measurement(monkeypatch, timed):
    monkeypatch.setattr(cnorm, "layer_norm", lambda x, weight, bias, out=None: x)
    with pytest.raises(ArithmeticError, match="cnorm is off by"):
        bench.norms([(4, 8)], cases=[bench.FORWARD])
    assert timed == []


@pytest.mark.exhaustive
def test_a_wrong_step_is_reported_and_not_timed(monkeypatch):
    class Wrong(runners.Cnorm):
        def step(self, x):
            return super().step(-x)

    monkeypatch.setattr(numpy_, "steps", lambda model, onnx_model: [Wrong(model, "wrong")], raising=False)
    document = bench.recurrent_steps([(3, 4)], seconds=0.001)
    assert "wrong" not in {r["contender"] for r in document["records"]}
    sentences = [s for s in document["left_out"] if "wrong" in s]
    assert [s.partition(": wrong is off by ")[0] for s in sentences] == [f"{cell} 3 -> 4" for cell in operations.CELLS]


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ((np.zeros((2, 3)), np.zeros(3)), "gives 2 arrays instead of 1"),
        ((np.zeros((3, 2)),), r"gives an array of shape \(3, 2\) instead of \(2, 3\)"),
        ((np.full((2, 3), np.nan),), "is off by nan, more than 0.001"),
        ((np.full((2, 3), 0.0011),), "is off by 0.0011, more than 0.001"),
    ],
)
def test_check(outputs, message):
    contender = timing.Contender("somebody", "outputs", {"outputs": outputs})
    with pytest.raises(ArithmeticError, match="somebody " + message):
        operations.check(contender, (np.zeros((2, 3)),))


@pytest.mark.exhaustive
def test_absent_packages_are_reported(monkeypatch):
    there = contenders.util.find_spec
    absent = ("torch", "onnx", "onnxruntime", "numba", "ncnn")
    monkeypatch.setattr(contenders.util, "find_spec", lambda name: None if name in absent else there(name))
    document = bench.norms([(2, 8)], cases=[bench.FORWARD], seconds=0.001)
    assert document["left_out"] == [
        "ncnn is left out: ncnn can't be imported",
        "numba is left out: numba can't be imported",
        "onnxruntime is left out: onnx and onnxruntime can't be imported",
        "PyTorch is left out: torch can't be imported",
    ]
    labels = {r["contender"].split(",")[0] for r in document["records"]}
    assert labels == {"cnorm", "np.copyto", "NumPy"}
    steps = bench.recurrent_steps([(3, 4)], seconds=0.001)
    assert {r["contender"] for r in steps["records"]} == {"cnorm"}


def test_contenders_are_timed_in_rotation():
    """After calibration every round starts with another contender; each has one untimed call before its sample."""
    calls = []

    def slow(label):
        calls.append(label)
        time.sleep(0.005)  # longer than the minimum duration of a sample, so every sample is one call

    made = [timing.Contender(label, f"slow({label!r})", {"slow": slow}) for label in "abc"]
    samples = timing.times(made, seconds=1e-9)
    assert [len(samples[label]) for label in "abc"] == [timing.MIN_SAMPLES] * 3
    rounds = ("aabbcc", "bbccaa", "ccaabb")
    expected = ["aabbcc", *(rounds[turn % 3] for turn in range(timing.MIN_SAMPLES))]
    assert "".join(calls) == "".join(expected)


def test_warm_up_steps_precede_each_turn():
    steps = []

    class Runner:
        label, mode, reset = "runner", timing.nullcontext, lambda self: steps.append("reset")

        def step(self, x):
            steps.append(float(x[0]))
            return x

    utterances = [np.full((3, 1), k, np.float32) for k in range(2)]
    times, answers = runners.latencies([Runner()], utterances, at_a_time=1, uncounted=2)
    turns = [["reset", k, k, "reset", k, k, k] for k in range(2)]
    assert steps == [*["reset", 0, 0, 0], *turns[0], *turns[1]]
    assert len(times["runner"]) == 6
    assert [y.tolist() for y in answers["runner"]] == [[0], [1]]


def test_ratio_is_a_geometric_mean():
    def record(contender, rows, microseconds, case=bench.FORWARD):
        return {**case._asdict(), "rows": rows, "n": 8} | {
            "contender": contender,
            "microseconds": microseconds,
        }

    records = [record("cnorm", 1, 1.0), record("cnorm", 2, 2.0), record("slow", 1, 2.0), record("slow", 2, 16.0)]
    document = {"records": [*records, record("slow", 1, 99.0, cases.BACKWARD)]}
    assert bench.ratio(document, "slow", sizes=[(1, 8), (2, 8)]) == pytest.approx(4)
    assert bench.ratio(document, "cnorm", sizes=[(1, 8)], against="slow") == pytest.approx(0.5)
    assert math.isnan(bench.ratio(document, "slow", sizes=[(3, 8)]))
    assert math.isnan(bench.ratio(document, "absent", sizes=[(1, 8)]))


def test_tables_and_pictures(document, steps):
    from rich.console import Console

    console = Console(width=100, file=io.StringIO(), highlight=False)
    report.header(console, document | {"left_out": ["somebody is left out"]})
    report.norms_tables(console, document | {"fresh_memory": {"rows": 2, "n": 8, "microseconds": {"x": 1.5}}})
    report.rnn_tables(console, steps)
    text = console.file.getvalue()
    expected = ["somebody is left out", "2x8", "3x5", "mean/std = 10", "layer_norm_backward", "x 1.50 us"]
    expected += ["LN-LSTM step, 3 -> 4", "p99.9", "limit: 448 B read at", "products alone", "call costs", "a second"]
    expected += ["3 -> 4 process, 200 frames", "FMA peak"]
    for words in expected:
        assert words in text, words
    for draw, of in ((report.norms_picture, document), (report.rnn_picture, steps)):
        file = io.BytesIO()
        draw(of, file)
        assert file.getvalue().startswith(b"\x89PNG")


@pytest.mark.exhaustive
@pytest.mark.parametrize("stem", ["norms", "rnn"])
def test_run_measures_in_a_process_of_its_own(tmp_path, capfd, stem):
    document = bench.run(stem, sizes=[(2, 3)], out_dir=tmp_path / "out", json=stem == "rnn", seconds=0.001)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [f"{stem}.json", f"{stem}.png"]
    assert document == json.loads((tmp_path / "out" / f"{stem}.json").read_text())
    assert document["memory_kept"] == (platform.libc_ver()[0] == "glibc")
    printed = capfd.readouterr().out
    if stem == "rnn":
        assert json.loads(printed) == document
    else:
        assert "geometric" in printed


@pytest.mark.exhaustive
def test_training_is_measured_and_printed(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")  # compiling takes a minute
    document = bench.run("training", sizes=[(3, 4)], out_dir=tmp_path / "out", seconds=0.001)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["training.json"]
    assert {(r["batch"], r["contender"]) for r in document["records"]} >= {(1, "cnorm"), (32, "cnorm")}
    assert all(is_time(r["p50"]) for r in document["records"])
    assert all(is_time(limit["microseconds"]) for limit in document["limits"])
    printed = " ".join(capfd.readouterr().out.split())  # a narrow table, without PyTorch, wraps its title
    assert "3 -> 4" in printed
    assert "50 steps" in printed


def linear_file(path, size=8):
    """A file that no `export` wrote, of one product, with its declared size of x; its weight."""
    weight = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    node = onnx.helper.make_node("MatMul", ["frame", "w"], ["out"])
    value = [onnx.helper.make_tensor_value_info(name, 1, [1, n]) for name, n in (("frame", size), ("out", 4))]
    graph = onnx.helper.make_graph([node], "g", value[:1], value[1:], [onnx.numpy_helper.from_array(weight, "w")])
    opset = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=8), path)
    return weight


def test_errors_of_single_steps_of_files(tmp_path, capsys):
    weight = linear_file(tmp_path / "linear.onnx")
    script("step_errors").main([str(tmp_path), "--frames", "50", "--scale", "3", "--seed", "1"])
    x = (3 * np.random.default_rng(1).standard_normal((50, 8))).astype(np.float32)
    y = cnorm.Model([cnorm.Linear(weight.T)]).run(x)
    wanted = np.abs(y - np.float64(x) @ np.float64(weight)).max()
    name, tensor, ours, theirs, _, _, ratio, *_ = capsys.readouterr().out.splitlines()[1].split()
    assert (name, tensor, ours) == ("linear.onnx", "y", f"{wanted:.2e}")
    assert float(ratio) == pytest.approx(float(ours) / float(theirs), abs=0.02)


@pytest.mark.exhaustive
def test_models_of_a_folder_are_measured_and_printed(tmp_path, capfd):
    """A file of another program beside one that is no model; onnxruntime steps the file itself."""
    linear_file(tmp_path / "linear.onnx", None)
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    dims = {"frame:1": 8, "of another file": 3}
    document = bench.run("models", out_dir=tmp_path, folder=str(tmp_path), dims=dims, seconds=0.001)
    check_surroundings(document, "models")
    records = {r["contender"]: r for r in document["records"]}
    assert records.keys() == {"cnorm", "onnxruntime, run()", "onnxruntime, IO binding"}
    assert all(is_time(r["p50"]) and r["file"] == "linear.onnx" for r in records.values())
    assert 0 <= records["cnorm"]["error"] < 1e-3  # its largest is at inputs of scale 100
    assert [limit["weight_bytes"] for limit in document["limits"]] == [1024]  # one panel
    assert len(document["left_out"]) == 1
    assert "broken.onnx is left out" in document["left_out"][0]
    assert "linear.onnx: a step" in capfd.readouterr().out
    assert (tmp_path / "models.png").stat().st_size > 1000
    with pytest.raises(RuntimeError):
        bench.run("models", out_dir=tmp_path, folder=str(tmp_path / "absent"))


@pytest.mark.exhaustive
def test_fresh_memory_is_measured_in_another_process():
    found = bench.fresh_memory(2, 8)
    assert "cnorm, new array" in found
    assert all(is_time(value) for value in found.values())


def test_a_failed_measurement_raises(tmp_path):
    with pytest.raises(RuntimeError, match="measurement failed"):
        bench.run(sizes=[(0, 0)], out_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []
