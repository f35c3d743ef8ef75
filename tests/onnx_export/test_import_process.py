"""The child process that reads files of others: what ends it is a refusal, and its limits and its caller's ways."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hostile
import numpy as np
import onnx
import pytest
from graphs import imported, node, normal, saved

import cnorm
import onnx_export
from onnx_export.errors import NotImported
from onnx_export.importer.command import OPTIONS, as_options

INPUTS, UNITS = 3, 4
# The child, with another function in the place of the one that runs onnxruntime and the evaluator
STUB = """
import json, sys; sys.path[:] = json.loads(sys.argv[1])
import os, resource, time
from onnx_export import importer
from onnx_export.importer import worker
def stub(model, *, stage, **given):
    stage("finding the layers")
    {}
worker.import_model = stub
from onnx_export.child import main; main()
"""


@pytest.fixture
def path(tmp_path, rng):
    weights = {"w": normal(rng, INPUTS, UNITS), "u": normal(rng, UNITS, 2)}
    nodes = [node("MatMul", "x w", "a"), node("Tanh", "a", "b"), node("MatMul", "b u", "y")]
    return saved(tmp_path / "m.onnx", nodes, {"x": [1, INPUTS]}, {"y": [1, 2]}, weights)


@pytest.mark.exhaustive(one_in=4)
@pytest.mark.parametrize(
    ("body", "options", "says"),
    [
        ("os.kill(os.getpid(), 11)", {}, "the child process died of SIGSEGV while finding the layers"),
        ("os.abort()", {}, "the child process died of SIGABRT while finding the layers"),
        ("os._exit(3)", {}, "the child process died of exit 3 while finding the layers"),
        ("time.sleep(60)", {"timeout": 3}, r"the time limit was reached while \w+(.|\n)* allowed by timeout=SECONDS"),
        ("raise KeyError('c')", {}, r"a fault of cnorm, please report it with the file \(KeyError: 'c'\)"),
        (
            "a = b''\n    while True: a += bytes(1 << 27)",
            {"memory": 1 << 30},
            "the memory limit of 1 GiB was reached while",
        ),
        (
            "resource.setrlimit(resource.RLIMIT_CPU, (1, 2))\n    while True: pass",
            {},
            "the limit of processor time was reached while finding the layers",
        ),
    ],
)
def test_a_child_that_ends_is_a_refusal(path, body, options, says, monkeypatch):
    monkeypatch.setattr("onnx_export.child._START", STUB.format(body))
    with pytest.raises(NotImported, match=says) as raised:
        onnx_export.load(path, **options)
    assert str(raised.value).startswith(f"{path}: ")


@pytest.mark.parametrize("given", ["h", "c"])
def test_one_state_of_an_lstm_as_an_input_is_a_refusal(given, tmp_path, rng):
    weights = {"w": normal(rng, 1, 4 * UNITS, INPUTS), "r": normal(rng, 1, 4 * UNITS, UNITS)}
    inputs = ["x", "w", "r", "", "", "h"] if given == "h" else ["x", "w", "r", "", "", "", "c"]
    nodes = [onnx.helper.make_node("LSTM", inputs, ["y", "h2", "c2"], hidden_size=UNITS), node("Add", "y y", "z")]
    ends = {"x": [1, 1, INPUTS], given: [1, 1, UNITS]}, {"z": [1, 1, 1, UNITS], f"{given}2": [1, 1, UNITS]}
    with pytest.raises(NotImported, match="make both inputs, or none"):
        onnx_export.load(saved(tmp_path / "m.onnx", nodes, *ends, weights))


def test_limits_follow_the_size_of_the_file(path, monkeypatch):
    body = "raise ValueError([resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU)])"
    monkeypatch.setattr("onnx_export.child._START", STUB.format(body))
    with pytest.raises(ValueError, match=rf"^\[{(2 << 30) + 64 * os.path.getsize(path)}, 18\]$"):
        onnx_export.load(path)
    with pytest.raises(ValueError, match=rf"^\[{3 << 30}, 902\]$"):
        onnx_export.load(path, timeout=900, memory=3 << 30)


def test_the_model_is_the_one_that_was_proven(path, rng):
    x = rng.standard_normal((20, INPUTS)).astype(np.float32)
    model, own = onnx_export.load(path), imported(path).model
    assert model.identity == own.identity
    assert model.run(x).tobytes() == own.run(x).tobytes() == cnorm.load(path).run(x).tobytes()
    assert not model.unproven
    assert onnx_export.load(path, check=False).unproven


@pytest.mark.exhaustive
def test_many_threads_at_once(path):
    with ThreadPoolExecutor(4) as pool:
        assert len({model.identity for model in pool.map(onnx_export.load, [path] * 4)}) == 1


@pytest.mark.exhaustive
def test_a_script_needs_no_main_and_imports_neither_onnx_nor_onnxruntime(path, tmp_path):
    onnx_export.export(cnorm.demo_model(), tmp_path / "ours.onnx")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, onnx_export\n"
        f"print(onnx_export.load({str(path)!r}))\n"
        "assert not {'onnx', 'onnxruntime'} & set(sys.modules)\n"
        f"onnx_export.load({str(tmp_path / 'ours.onnx')!r})\n"
        "assert 'onnxruntime' not in sys.modules\n"
    )
    for command in [script], ["-c", script.read_text()]:
        done = subprocess.run([sys.executable, "-P", *command], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("Model([Linear(3 -> 4)")


def test_an_interrupt_ends_the_child_too(path):
    """As Ctrl-C does: a KeyboardInterrupt here, the child killed."""
    # a shell starts background jobs with interrupts ignored, which their child processes inherit
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += f"import onnx_export.child as c, onnx_export; c._START = {STUB.format('time.sleep(60)')!r}\n"
    code += f"onnx_export.load({str(path)!r})"
    process = subprocess.Popen([sys.executable, "-P", "-c", code], stderr=subprocess.PIPE, text=True)
    children, child = Path(f"/proc/{process.pid}/task/{process.pid}/children"), ""
    if not children.exists():
        process.kill()
        pytest.skip("SKIPPED: the system does not list child processes")
    for _ in range(600):
        child = next((c for c in children.read_text().split() if b"-I" in Path(f"/proc/{c}/cmdline").read_bytes()), "")
        if child:
            break
        time.sleep(0.1)
    assert child
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20)[1].endswith("KeyboardInterrupt\n")
    assert not Path(f"/proc/{child}").exists()


@pytest.mark.exhaustive(one_in=16)
@pytest.mark.parametrize("number", range(len(hostile.KINDS)), ids=list(hostile.KINDS))
def test_small_files_that_ask_for_much(number, tmp_path):
    """tests/fuzz/hostile_onnx.py tries hundreds, with their time and memory."""
    hostile.written(number, tmp_path / "m.onnx")
    with contextlib.suppress(ValueError):
        onnx_export.load(tmp_path / "m.onnx", timeout=10)


def test_arguments_in_messages_are_options_in_those_of_the_command():
    for text, wanted in (
        ("give it as inputs={'sr': VALUE}; then", "give it as --input sr=VALUE; then"),
        ("choose one by states={...}:", "choose one by --state IN=OUT:"),
        ("dims={'S': 1, 'T': 2}", "--dim S=1 --dim T=2"),
        ("is named by frames=[...]", "is named by --frame NAME"),
        ("frames=['a', 'b']", "--frame a --frame b"),
        ("dims: no input has 'T'", "--dim: no input has 'T'"),
        ("dims['T'] must be", "--dim T must be"),
        ("by timeout=SECONDS, by memory=BYTES", "by --timeout SECONDS, by --memory GIB"),
        ("the states: of a cell", "the states: of a cell"),
    ):
        assert as_options(text) == wanted


def test_every_argument_that_a_message_names_is_an_option():
    """In the form that `as_options` knows."""
    folder = Path(onnx_export.__file__).parent
    files = [folder / "loader.py", *(folder / "importer").glob("*.py")]
    text = "\n".join(path.read_text() for path in files if path.name != "command.py")
    for name in ("inputs", "states", "dims", "frames"):
        assert name in OPTIONS
        assert f"`{name}`" not in "\n".join(line for line in text.splitlines() if "NotImported(" in line)


@pytest.mark.exhaustive
def test_data_files_of_other_names_are_read_if_that_is_allowed(path, tmp_path, rng):
    model = onnx.load(path)
    for name, needs in (("m.onnx.data", False), ("m.data", False), ("weights.bin", True)):
        onnx.save(model, path, save_as_external_data=True, location=name, size_threshold=0)
        if needs:
            with pytest.raises(ValueError, match="--external-data allows that"):
                onnx_export.load(path, check=False)
        assert onnx_export.load(path, check=False, external_data=needs).input_size == INPUTS
        model = onnx.load(path)
        (tmp_path / name).unlink()
