"""The demo: its claims about the packaged model hold, and it runs from end to end."""

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import demo
import numpy as np
import pytest
from rich.console import Console

import cnorm
import onnx_export
from cnorm_bench import runners
from cnorm_bench.contenders import torch_

TEST_SPLIT = Path(__file__).parents[2] / "examples/japanese_vowels/japanese_vowels_test.npz"


@pytest.fixture(scope="module")
def recordings():
    return demo.recordings()


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=80)


def test_accuracy_on_the_test_split(recordings):
    """Of all 370 utterances; those of each speaker that are packaged are the first twelve of them."""
    with np.load(TEST_SPLIT) as data:
        utterances, labels = np.split(data["frames"], np.cumsum(data["lengths"])[:-1]), data["labels"]
    answers = demo.stream_all(cnorm.demo_model(), utterances)
    named = [y[-1].argmax() for y in answers]
    assert len(labels) == 370
    assert np.mean(named == labels) == 353 / 370
    packaged = [i for speaker in range(9) for i in np.flatnonzero(labels == speaker)[:12]]
    assert np.array_equal(recordings[1], labels[packaged])
    for frames, i in zip(recordings[0], packaged, strict=True):
        assert frames.tobytes() == utterances[i].tobytes()


def test_utterance_continues_in_another_process_and_isa(console, recordings):
    assert demo.hand_over(console, cnorm.demo_model(), recordings[0][:20])


def test_isa_hashes_agree_and_the_isa_is_restored(isa, console, recordings):
    model, utterances = cnorm.demo_model(), recordings[0][:20]
    answers = demo.stream_all(model, utterances)
    assert demo.isa_hashes(console, model, utterances, answers)
    assert cnorm.active_isa() == isa
    assert not demo.isa_hashes(console, model, utterances, answers[::-1])
    assert "NOT" in console.file.getvalue()


def test_the_recogniser_learns_another_channel(console, recordings):
    assert demo.adapt(console, cnorm.demo_model(), *recordings)
    assert "learning included" in console.file.getvalue()


def test_onnxruntime_contenders_match(recordings):
    onnx_model = onnx_export.export(cnorm.demo_model()).SerializeToString()
    check([runners.OrtRun(onnx_model), runners.OrtBinding(onnx_model)], recordings[0][::6])


def test_torch_contenders_match(recordings):
    pytest.importorskip("torch")
    check(torch_.steps(cnorm.demo_model(), None), recordings[0][::6])


def check(others, utterances):
    """Free runs over recordings differ by at most 5e-6: 29 steps and no more, each within 2e-6."""
    engines = [runners.Cnorm(cnorm.demo_model()), *others]
    times, answers = runners.latencies(engines, utterances, at_a_time=4)
    for other in others:
        assert len(times[other.label]) == sum(map(len, utterances))
        np.testing.assert_allclose(answers[other.label], answers["cnorm"], rtol=0, atol=5e-6)


def test_demo_runs_from_end_to_end(tmp_path, capsys):
    assert demo.run(tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"demo.onnx", "demo.png"}
    assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    for expected in cnorm.__version__, "108/108", "95.4%", "onnxruntime, IO binding", "everything held":
        assert expected in printed


def test_without_the_optional_packages(tmp_path, capsys, monkeypatch):
    find_spec = demo.util.find_spec
    absent = "onnx", "onnxruntime", "torch", "matplotlib"
    monkeypatch.setattr(demo.util, "find_spec", lambda name: None if name in absent else find_spec(name))
    assert demo.run(tmp_path)
    printed = capsys.readouterr().out
    assert "pip install onnx onnxruntime" in printed
    assert "pip install matplotlib" in printed
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_can_not_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    code = "import sys; from cnorm.tools.cli import main; sys.argv = ['cnorm', 'bench', '--out', 'file']; main()"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert "file" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("command", "to", "encoding", "message"),
    [
        ("info", "/dev/full", "utf-8", "No space left on device"),
        ("--help", "/dev/full", "utf-8", "No space left on device"),
        ("info", os.devnull, "ascii", "can't encode"),
    ],
)
def test_output_that_can_not_be_written_is_one_line(command, to, encoding, message, tmp_path):
    if not os.path.exists(to):
        pytest.skip(f"there is no {to}")
    code = (
        "import sys; from cnorm.tools import cli, info; info.processor = lambda: '\\u00b5'\n"
        f"sys.argv = ['cnorm', {command!r}]; cli.main()"
    )
    with open(to, "w") as out:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code], stdout=out, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
            env=os.environ | {"PYTHONIOENCODING": encoding},
        )  # fmt: skip
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["info", "--help", "--version"])
def test_a_closed_pipe_is_not_a_failed_check(command):
    """A closed pipe does not give exit code 1, which means that a check failed."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as out:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "cnorm", command], stdout=out, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2
    assert done.stderr == "cnorm: [Errno 32] Broken pipe\n"


def test_an_interrupted_command_ends_with_one_line():
    code = (
        "import sys; from cnorm.tools import cli, info; sys.argv = ['cnorm', 'info']\n"
        "def show(): raise KeyboardInterrupt\n"
        "info.show = show; cli.main()"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "cnorm: interrupted\n")


@pytest.mark.exhaustive
def test_commands_run_with_closed_standard_streams(tmp_path):
    onnx_export = pytest.importorskip("onnx_export")
    onnx_export.export(cnorm.demo_model(), tmp_path / "m.onnx")
    for arguments in (["validate", "m.onnx"], ["explain"], ["export", "none", "out"]):
        for closed, code in (("<&-", 0), (">&-", 0), (">&- 2>&-", 0)):
            command = [sys.executable, "-P", "-m", "cnorm", *arguments]
            done = subprocess.run(
                ["sh", "-c", f'exec "$@" {closed}', "sh", *command], capture_output=True, text=True, cwd=tmp_path
            )
            assert done.returncode == (2 if arguments[0] == "export" else code), (arguments, closed, done.stderr)
            assert "Traceback" not in done.stderr


def test_the_command_line_without_its_packages():
    code = "import sys; sys.modules['click'] = None; from cnorm.tools.cli import main; main()"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    says = "Needs click: the extra cli, pip install '.[cli]' in cnorm's source folder.\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", says)


def test_a_source_folder_says_why_it_can_not_be_imported(tmp_path):
    """The current folder precedes installed packages on sys.path, unless Python is run with -P."""
    shutil.copytree(Path(cnorm.__file__).parent, tmp_path / "cnorm", ignore=shutil.ignore_patterns("*.so", "data"))
    done = subprocess.run([sys.executable, "-S", "-c", "import cnorm"], capture_output=True, text=True, cwd=tmp_path)
    assert "run Python from another folder, or with -P" in done.stderr
