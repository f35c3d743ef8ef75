"""Every file of a folder in a runtime, each in a child process with a time limit.

    python -P folder.py NAME FOLDER

It runs in the environment that measure.py made for the runtime, which has no cnorm: onnx_export/runtimes/runners.py is
imported by its path.
"""

import json
import os
import resource
import signal
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[2] / "onnx_export" / "runtimes"))
import runners

WAIT = 600  # seconds of wall time for a file: a busy machine gives few of a processor


def run_folder(name: str, folder: Path) -> None:
    """Run every file NUMBER.onnx with the inputs of NUMBER.npz, and write NAME.json: what became of each."""
    load, told = runners.RUNTIMES[name](), {}
    for path in sorted(folder.glob("*.onnx")):
        if not runners.left_out(name, json.loads(path.with_suffix(".json").read_text())["traits"]):
            told[path.stem] = _in_child(load, path, folder / f"{path.stem}.{name}.npz")
    (folder / f"{name}.json").write_text(json.dumps(told, indent=1))


def _in_child(load, path: Path, result: Path) -> str:
    """Empty where the runtime gave results, else its refusal, "killed by SIGNAL" or "took too long"."""
    result.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        child = os.fork()
        if not child:
            _child(load, path, result, Path(scratch))
        status = os.waitpid(child, 0)[1]
        refusal = Path(scratch) / "refusal"
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            late = number in (signal.SIGALRM, signal.SIGXCPU)
            return "took too long" if late else f"killed by {signal.Signals(number).name}"
        return refusal.read_text() if refusal.exists() else ""


def _child(load, path: Path, result: Path, scratch: Path) -> None:
    os.setpgid(0, 0)
    runners.limit(resource.RLIMIT_CPU, runners.SECONDS)
    signal.alarm(WAIT)
    os.chdir(scratch)
    sink = os.open("log", os.O_WRONLY | os.O_CREAT)
    os.dup2(sink, 1), os.dup2(sink, 2)
    try:
        outputs = json.loads(path.with_suffix(".json").read_text())["outputs"]
        np.savez(result, *load(str(path), outputs)(dict(np.load(path.with_suffix(".npz")))))
    except BaseException as error:  # a runtime may raise anything, such as pyo3's panic
        if resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime >= runners.SECONDS:
            os.kill(os.getpid(), signal.SIGXCPU)  # its compiler was ended, so this is no refusal
        Path("refusal").write_text(" ".join(f"{type(error).__name__}: {error}".split())[:400])
    os._exit(0)


if __name__ == "__main__":
    run_folder(sys.argv[1], Path(sys.argv[2]))
