"""One function for each runtime, and the versions they are pinned to.

`python runners.py NAME FOLDER` runs every file of a folder, each in a child process with a time limit, in the
environment that measure.py made for that runtime. It imports the runtime and NumPy, nothing of cnorm.

To add a runtime, write a function under `@runtime(PINNED PACKAGES)`. It imports the runtime once and returns a function
that takes a path, arrays by input names and the names of outputs, and returns the outputs; what it raises is a refusal.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

RECURRENT = ("LSTM", "GRU", "RNN")
SECONDS = 60  # a file; compilers take some
RUNTIMES: dict[str, Callable] = {}
PINS: dict[str, tuple[str, ...]] = {}
LEFT_OUT: dict[str, tuple[str, ...]] = {}


def runtime(*pins: str, without: tuple[str, ...] = ()):
    """Register a runtime with its packages, the first of which has its version; "npm:" for those of Node.

    It is not run on files of the operators or with the traits `without`: it does not survive all of them, or what it
    gives does not depend on the file alone, or its Python package takes no such input.
    """

    def register(function):
        name = function.__name__.replace("_", "-")
        RUNTIMES[name], PINS[name], LEFT_OUT[name] = function, pins, without
        return function

    return register


def version(name: str) -> str:
    """The version of the runtime."""
    return PINS[name][0].partition("==")[2]


@runtime("onnxruntime==1.32.0")
def onnxruntime():
    import onnxruntime as ort

    quiet = ort.SessionOptions()
    quiet.log_severity_level, quiet.intra_op_num_threads = 4, 1

    def run(path, feeds, outputs):
        return ort.InferenceSession(path, quiet, providers=["CPUExecutionProvider"]).run(outputs, feeds)

    return run


@runtime("onnx==1.23.2", "numpy==2.4.6")
def onnx_reference():
    import onnx
    from onnx.reference import ReferenceEvaluator

    return lambda path, feeds, outputs: ReferenceEvaluator(onnx.load(path)).run(outputs, feeds)


@runtime("openvino==2026.4.1")
def openvino():
    import openvino as ov

    def run(path, feeds, outputs):
        model = ov.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        results = model(feeds)
        return [results[place] for place in range(len(outputs))]

    return run


@runtime("tract==0.23.9")
def tract():
    import tract as engine

    def run(path, feeds, outputs):
        runnable = engine.onnx().load(path).into_model().into_runnable()
        return [each.to_numpy() for each in runnable.run(list(feeds.values()))]

    return run


@runtime("opencv-python-headless==5.0.0.93")
def opencv():
    import cv2

    def run(path, feeds, outputs):
        net = cv2.dnn.readNetFromONNX(path)
        for name, value in feeds.items():
            net.setInput(value, name)
        return [np.array(each) for each in net.forward(outputs)]

    return run


@runtime("mnn==3.6.1", without=(*RECURRENT, "If", "scale of another shape"))
def mnn():
    import _tools  # the converter; the command mnnconvert also installs a package that reports its use to the vendor
    import MNN

    def run(path, feeds, outputs):
        _tools.mnnconvert(["", "-f", "ONNX", "--modelFile", path, "--MNNModel", "m.mnn", "--bizCode", "m"])
        net = MNN.nn.load_module_from_file("m.mnn", list(feeds), outputs)
        types = {"f": MNN.expr.float, "i": MNN.expr.int}  # half types are float32 behind the converter
        given = []
        for value in feeds.values():
            variable = MNN.expr.placeholder(list(value.shape), MNN.expr.NCHW, types[value.dtype.kind])
            variable.write(value.ravel().tolist())
            given.append(variable)
        return [np.array(MNN.expr.convert(each, MNN.expr.NCHW).read()) for each in net.forward(given)]

    return run


@runtime("ncnn==1.0.20261020", "pnnx==20261020", "numpy==2.4.6", "--no-deps", without=(*RECURRENT, "export", "If"))
def ncnn():
    import ncnn as engine

    binary = Path(engine.__file__).parents[1] / "pnnx" / "pnnx"

    def run(path, feeds, outputs):
        Path("m.onnx").write_bytes(Path(path).read_bytes())
        shapes = [f"[{','.join(map(str, each.shape))}]{each.dtype.kind}{8 * each.itemsize}" for each in feeds.values()]
        _command(binary, "m.onnx", f"inputshape={','.join(shapes)}", "fp16=0")
        kinds = [line.split()[0] for line in Path("m.ncnn.param").read_text().splitlines()[2:]]
        foreign = [kind for kind in kinds if engine.layer_to_index(kind) < 0]
        if foreign:
            raise RuntimeError(f"pnnx leaves unconverted: {foreign}")
        script = Path("m_ncnn.py").read_text()  # says which axis of each array is a batch
        batches = map(int, re.findall(r"Mat\(in\d+\.numpy\(\), batch_index=(\d+)", script))
        returned = map(int, re.findall(r"out\d+\.numpy\(batch_index=(\d+)", script))
        with engine.Net() as net:
            net.opt.num_threads = 1
            net.opt.use_fp16_packed = net.opt.use_fp16_storage = net.opt.use_fp16_arithmetic = False
            if net.load_param("m.ncnn.param") or net.load_model("m.ncnn.bin"):
                raise RuntimeError("ncnn does not load it")
            with net.create_extractor() as extractor:
                for place, (value, batch) in enumerate(zip(feeds.values(), batches, strict=True)):
                    extractor.input(f"in{place}", engine.Mat(_single(value), batch_index=batch).clone())
                found = []
                for place, batch in enumerate(returned):
                    code, result = extractor.extract(f"out{place}")
                    if code:
                        raise RuntimeError("ncnn gives no result")
                    found.append(result.numpy(batch_index=batch).copy())
                return found

    return run


@runtime("tinygrad==0.14.0", "numpy==2.4.6")
def tinygrad():
    from tinygrad import Tensor
    from tinygrad.nn.onnx import OnnxRunner

    def run(path, feeds, outputs):
        results = OnnxRunner(path)({name: Tensor(value) for name, value in feeds.items()})
        return [results[name].numpy() for name in outputs]

    return run


WEB = """
const ort = require('onnxruntime-web');
ort.env.wasm.numThreads = 1; ort.env.logLevel = 'fatal';
const [path, given] = process.argv.slice(2);
const arrays = {float32: Float32Array, float64: Float64Array, int32: Int32Array, int64: BigInt64Array,
                float16: Uint16Array, bool: Uint8Array};
const fs = require('fs');
(async () => {
  const model = new Uint8Array(fs.readFileSync(path));
  const session = await ort.InferenceSession.create(model, {executionProviders: ['wasm']});
  const feeds = {};
  for (const [name, {type, shape, data}] of Object.entries(JSON.parse(fs.readFileSync(given)))) {
    const bytes = new Uint8Array(Buffer.from(data, 'base64'));
    feeds[name] = new ort.Tensor(type, new arrays[type](bytes.buffer), shape);
  }
  const found = {};
  for (const [name, tensor] of Object.entries(await session.run(feeds))) {
    const bytes = Buffer.from(tensor.data.buffer, tensor.data.byteOffset, tensor.data.byteLength);
    found[name] = {type: tensor.type, shape: tensor.dims, data: bytes.toString('base64')};
  }
  fs.writeFileSync('out.json', JSON.stringify(found));
})().catch(error => { console.error(String(error)); process.exit(1); });
"""


@runtime("npm:onnxruntime-web==1.30.0", "numpy==2.4.6")
def onnxruntime_web():
    def run(path, feeds, outputs):
        Path("web.cjs").write_text(WEB)
        Path("in.json").write_text(json.dumps({name: _text(value) for name, value in feeds.items()}))
        modules = Path(sys.executable).parents[1] / "node_modules"
        _command("node", "web.cjs", path, "in.json", environment={"NODE_PATH": str(modules)})
        found = json.loads(Path("out.json").read_text())
        return [_array(found[name]) for name in outputs]

    return run


def _text(value):
    return {"type": value.dtype.name, "shape": list(value.shape), "data": base64.b64encode(value.tobytes()).decode()}


def _array(told):
    return np.frombuffer(base64.b64decode(told["data"]), told["type"]).reshape(told["shape"])


def _single(value):
    """float32 of a half type."""
    return value.astype(np.float32) if value.dtype == np.float16 else value


def _command(*words, environment=None):
    """Run a converter; what it says where it fails is the refusal."""
    done = subprocess.run(
        list(map(str, words)), capture_output=True, text=True, errors="replace", env=os.environ | (environment or {})
    )
    if done.returncode < 0:
        os.kill(os.getpid(), -done.returncode)  # it was killed, so this is no refusal
    if done.returncode:
        raise RuntimeError((done.stderr or done.stdout).strip()[-400:])
    return done.stdout


# ------------------------------------------------------------------------------------------------ a whole folder


def left_out(name: str, traits: list[str]) -> bool:
    """Whether a form, its operator among its traits, is not run there."""
    return any(trait in LEFT_OUT[name] for trait in traits)


def run_folder(name: str, folder: Path) -> None:
    """Run every file NUMBER.onnx with the inputs of NUMBER.npz, and write NAME.json: what became of each."""
    run, told = RUNTIMES[name](), {}
    for path in sorted(folder.glob("*.onnx")):
        if not left_out(name, json.loads(path.with_suffix(".json").read_text())["traits"]):
            told[path.stem] = _in_child(run, path, folder / f"{path.stem}.{name}.npz")
    (folder / f"{name}.json").write_text(json.dumps(told, indent=1))


def _in_child(run, path: Path, result: Path) -> str:
    """Empty where the runtime gave results, else its refusal, "killed by SIGNAL" or "took too long"."""
    result.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        child = os.fork()
        if not child:
            _child(run, path, result, Path(scratch))
        status = os.waitpid(child, 0)[1]
        refusal = Path(scratch) / "refusal"
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            return "took too long" if number == signal.SIGALRM else f"killed by {signal.Signals(number).name}"
        return refusal.read_text() if refusal.exists() else ""


def _child(run, path: Path, result: Path, scratch: Path) -> None:
    os.setpgid(0, 0)
    signal.alarm(SECONDS)
    os.chdir(scratch)
    sink = os.open("log", os.O_WRONLY | os.O_CREAT)
    os.dup2(sink, 1), os.dup2(sink, 2)
    try:
        outputs = json.loads(path.with_suffix(".json").read_text())["outputs"]
        np.savez(result, *run(str(path), dict(np.load(path.with_suffix(".npz"))), outputs))
    except BaseException as error:  # a runtime may raise anything, such as pyo3's panic
        Path("refusal").write_text(" ".join(f"{type(error).__name__}: {error}".split())[:400])
    os._exit(0)


if __name__ == "__main__":
    run_folder(sys.argv[1], Path(sys.argv[2]))
