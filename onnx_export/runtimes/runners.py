"""One function for each runtime, and the versions they are pinned to.

`python runners.py NAME FILE OUTPUT...` answers calls for `parity_engines.RuntimeEngine`. It imports the runtime and
NumPy, nothing of cnorm.

To add a runtime, write a function under `@runtime(PINNED PACKAGES)`. It imports the runtime once and returns a function
of a path and the names of outputs, which loads the file and returns a function from arrays by input names to the
outputs; what these raise is a refusal.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

RECURRENT = ("LSTM", "GRU", "RNN")
SECONDS = 60  # of a processor for a file, compilers included, each process of its own
MEMORY = 16 << 30  # bytes of data
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


def left_out(name: str, traits: list[str]) -> bool:
    """Whether a form, its operator among its traits, is not run there."""
    return any(trait in LEFT_OUT[name] for trait in traits)


@runtime("onnxruntime==1.32.0")
def onnxruntime():
    import onnxruntime as ort

    quiet = ort.SessionOptions()
    quiet.log_severity_level, quiet.intra_op_num_threads = 4, 1

    def load(path, outputs):
        session = ort.InferenceSession(path, quiet, providers=["CPUExecutionProvider"])
        return lambda feeds: session.run(outputs, feeds)

    return load


@runtime("onnx==1.23.2", "numpy==2.4.6")
def onnx_reference():
    import onnx
    from onnx.reference import ReferenceEvaluator

    def load(path, outputs):
        evaluator = ReferenceEvaluator(onnx.load(path))
        return lambda feeds: evaluator.run(outputs, feeds)

    return load


@runtime("openvino==2026.4.1")
def openvino():
    import openvino as ov

    def load(path, outputs):
        model = ov.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

        def call(feeds):
            results = model(feeds)
            return [results[place] for place in range(len(outputs))]

        return call

    return load


@runtime("tract==0.23.9")
def tract():
    import tract as engine

    def load(path, outputs):
        runnable = engine.onnx().load(path).into_model().into_runnable()
        return lambda feeds: [each.to_numpy() for each in runnable.run(list(feeds.values()))]

    return load


@runtime("opencv-python-headless==5.0.0.93")
def opencv():
    import cv2

    def load(path, outputs):
        net = cv2.dnn.readNetFromONNX(path)

        def call(feeds):
            for name, value in feeds.items():
                net.setInput(value, name)
            return [np.array(each) for each in net.forward(outputs)]

        return call

    return load


@runtime("mnn==3.6.1", without=(*RECURRENT, "If", "scale of another shape"))
def mnn():
    import _tools  # the converter; the command mnnconvert also installs a package that reports its use to the vendor
    import MNN

    def load(path, outputs):
        _tools.mnnconvert(["", "-f", "ONNX", "--modelFile", path, "--MNNModel", "m.mnn", "--bizCode", "m"])
        types = {"f": MNN.expr.float, "i": MNN.expr.int}  # half types are float32 behind the converter

        def call(feeds):
            net = MNN.nn.load_module_from_file("m.mnn", list(feeds), outputs)
            given = []
            for value in feeds.values():
                variable = MNN.expr.placeholder(list(value.shape), MNN.expr.NCHW, types[value.dtype.kind])
                variable.write(value.ravel().tolist())
                given.append(variable)
            return [np.array(MNN.expr.convert(each, MNN.expr.NCHW).read()) for each in net.forward(given)]

        return call

    return load


@runtime("ncnn==1.0.20261020", "pnnx==20261020", "numpy==2.4.6", "--no-deps", without=(*RECURRENT, "export", "If"))
def ncnn():
    import ncnn as engine

    binary = Path(engine.__file__).parents[1] / "pnnx" / "pnnx"

    def run(path, feeds):
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

    return lambda path, outputs: lambda feeds: run(path, feeds)


@runtime("tinygrad==0.14.0", "numpy==2.4.6")
def tinygrad():
    from tinygrad import Tensor
    from tinygrad.nn.onnx import OnnxRunner

    def load(path, outputs):
        runner = OnnxRunner(path)

        def call(feeds):
            results = runner({name: Tensor(value) for name, value in feeds.items()})
            return [results[name].numpy() for name in outputs]

        return call

    return load


@runtime("iree-base-compiler[onnx]==3.13.0", "iree-base-runtime==3.13.0", "onnx==1.23.2", "numpy==2.4.6")
def iree():
    import iree.compiler as compiler
    import iree.runtime as engine
    from iree.compiler.tools.import_onnx import __main__ as importer

    def load(path, outputs):
        importer.main(importer.parse_arguments([path, "-o", "m.mlir"]))
        code = compiler.compile_file(
            "m.mlir",
            input_type="onnx",
            target_backends=["llvm-cpu"],
            extra_args=["--iree-llvmcpu-target-cpu=host", "--mlir-disable-threading"],
        )
        context = engine.SystemContext(config=engine.Config("local-sync"))
        module = engine.VmModule.copy_buffer(context.instance, code)
        context.add_vm_module(module)
        (entry,) = (name for name in module.function_names if name != "__init" and not name.endswith("$async"))

        def call(feeds):
            results = context.modules[module.name][entry](*feeds.values())
            return [each.to_host() for each in (results if isinstance(results, list | tuple) else [results])]

        return call

    return load


WEB = """
const ort = require('onnxruntime-web');
ort.env.wasm.numThreads = 1; ort.env.logLevel = 'fatal';
const arrays = {float32: Float32Array, float64: Float64Array, int32: Int32Array, int64: BigInt64Array,
                float16: Uint16Array, bool: Uint8Array};
const fs = require('fs');
async function run([path, given, results]) {
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
  await session.release();
  fs.writeFileSync(results, JSON.stringify(found));
}
(async () => {
  for await (const line of require('readline').createInterface({input: process.stdin})) {
    const said = await run(JSON.parse(line)).then(() => '', error => String(error));
    process.stdout.write(JSON.stringify(said) + '\\n');
  }
})();
"""


@runtime("npm:onnxruntime-web==1.30.0", "numpy==2.4.6")
def onnxruntime_web():
    modules = {"NODE_PATH": str(Path(sys.executable).parents[1] / "node_modules")}
    node = subprocess.Popen(  # one process for all files: it takes a second to start
        ["node", "-e", WEB], stdin=-1, stdout=-1, stderr=subprocess.DEVNULL, text=True, env=modules | os.environ
    )

    def run(path, outputs, feeds):
        given, results = Path("in.json").absolute(), Path("out.json").absolute()
        given.write_text(json.dumps({name: _text(value) for name, value in feeds.items()}))
        node.stdin.write(json.dumps([str(path), str(given), str(results)]) + "\n")
        node.stdin.flush()
        said = node.stdout.readline()
        if not said:
            os.kill(os.getpid(), signal.SIGPIPE)  # it has ended, so this is no refusal
        if json.loads(said):
            raise RuntimeError(json.loads(said))
        found = json.loads(results.read_text())
        return [_array(found[name]) for name in outputs]

    return lambda path, outputs: lambda feeds: run(path, outputs, feeds)


def _text(value):
    return {"type": value.dtype.name, "shape": list(value.shape), "data": base64.b64encode(value.tobytes()).decode()}


def _array(told):
    return np.frombuffer(base64.b64decode(told["data"]), told["type"]).reshape(told["shape"])


def _single(value):
    """float32 of a half type."""
    return value.astype(np.float32) if value.dtype == np.float16 else value


def _command(*words):
    """Run a converter; what it says where it fails is the refusal."""
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, errors="replace")
    if done.returncode < 0:
        os.kill(os.getpid(), -done.returncode)  # it was killed, so this is no refusal
    if done.returncode:
        raise RuntimeError((done.stderr or done.stdout).strip()[-400:])
    return done.stdout


# -------------------------------------------------------------------------------------------------- calls of a file


def limit(kind: int, most: int) -> None:
    """Set the soft limit of a resource, below its hard one."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def answer(name: str, path: str, outputs: list[str]) -> None:
    """Load a file, then answer each call on stdin by its outputs on stdout; ends with stdin.

    Both ways a message is a line of its length and of "npz" or, for what went wrong, "text", and its bytes.
    """
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a runtime prints is no message
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_DATA, MEMORY)
    call = None
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        while head := source.readline():
            given = np.load(io.BytesIO(source.read(int(head.split()[0]))))
            signal.alarm(SECONDS)
            try:
                call = call or RUNTIMES[name]()(path, outputs)
                reply = io.BytesIO()
                np.savez(reply, *call(dict(given)))
                kind, data = "npz", reply.getvalue()
            except BaseException as error:  # a runtime may raise anything, such as pyo3's panic
                kind, data = "text", f"{type(error).__name__}: {error}".encode()[:400]
            signal.alarm(0)
            sink.write(f"{len(data)} {kind}\n".encode() + data)
            sink.flush()


if __name__ == "__main__":
    answer(sys.argv[1], sys.argv[2], sys.argv[3:])
