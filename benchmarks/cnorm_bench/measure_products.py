"""Many streams, sequences and training beside what bounds them: multiply-adds, a dense product, reading the weights."""

import ctypes
import os
import shlex
import shutil
import subprocess
import tempfile
from importlib import util
from pathlib import Path

import numpy as np

import cnorm
from cnorm import _core
from cnorm.layers.chain import flat
from cnorm_bench import contenders
from cnorm_bench.contenders import memcpy_
from cnorm_bench.contenders.operations import random_model

__all__ = ["SIZES", "at_the_limit"]

SIZES = (12, 64), (64, 128), (128, 256), (512, 512)
STREAMS, FRAMES, STEPS, BATCH = 64, 200, 20, 32
TURNS = 20_000

# as many sums in vectors of the instruction set as hide the latency of a multiply-add
PEAK = """
typedef float vector __attribute__((vector_size(BYTES)));
void peak(long turns, float *x)
{
    vector sum[SUMS], total = {0};
    const float a = x[0], b = x[1];
#pragma GCC unroll 32
    for (int i = 0; i < SUMS; ++i) sum[i] = (vector){0} + (float)i; /* equal ones would be computed once */
    for (long t = 0; t < turns; ++t) {
#pragma GCC unroll 32
        for (int i = 0; i < SUMS; ++i) sum[i] = sum[i] * a + b;
        __asm__("" : "+r"(x) : : "memory");
    }
#pragma GCC unroll 32
    for (int i = 0; i < SUMS; ++i) total += sum[i];
    x[2] = total[0];
}
"""
VECTORS = {"avx512": (64, 24, ["-mavx512f"]), "avx2": (32, 12, ["-mavx2", "-mfma"]), "neon": (16, 24, [])}


def at_the_limit(sizes=None, *, seconds=0.3):
    """Time plain LSTMs with 64 streams, over 200 frames and in training, all by turns with their limits.

    Parameters
    ----------
    sizes : sequence of (input, hidden), optional
    seconds : float
        For each line and each limit.

    Returns
    -------
    dict
        "rows": for each size and line the microseconds of a step, its multiply-adds, and the microseconds that three
        limits would take: "fma", its multiply-adds at the processor's peak, None without a C compiler; "product", at
        the rate of a dense product with 64 vectors by "product_by"; "read", reading its weights once.
    """
    rows, by = [], "PyTorch" if util.find_spec("torch") else "NumPy"
    with tempfile.TemporaryDirectory() as folder:
        peak, each = _peak(Path(folder))
        for inputs, hidden in sizes or SIZES:
            model = random_model("LSTM", np.random.default_rng(inputs + hidden), inputs, hidden)
            lines = _lines(model, inputs, hidden)
            made = [contenders.Contender(label, statement, names) for label, (statement, names, *_) in lines.items()]
            limits = [_product(by, inputs, hidden), *_reads(hidden)] + [peak] * (peak is not None)
            medians = {k: float(np.median(t)) for k, t in contenders.times(made + limits, seconds=seconds).items()}
            weights = 4 * hidden * (inputs + hidden)  # of x and h: as many multiply-adds for each vector
            rate = min(medians[limit.label] for limit in _reads(hidden)) / (16 * hidden**2)  # microseconds a byte
            for label, (_, _, steps, vectors, read) in lines.items():
                work = vectors * weights
                rows.append({"line": label, "input": inputs, "hidden": hidden, "microseconds": medians[label] / steps,
                             "multiply_adds": work, "fma": medians["fma"] * work / each if peak else None,
                             "product": medians["product"] * vectors / STREAMS, "read": rate * read})  # fmt: skip
    return {"product_by": by, "rows": rows}


def _lines(model, inputs, hidden):
    """By label a statement, its names, the steps it takes, the vectors that a step multiplies, the bytes it must read.

    A sequence multiplies its inputs many at a time, and must read the recurrent weights in each step.
    """
    rng = np.random.default_rng(0)
    both, recurrent = 16 * hidden * (inputs + hidden), 16 * hidden**2
    x, y = rng.standard_normal((STREAMS, inputs), dtype=np.float32), np.empty((STREAMS, hidden), np.float32)
    lines = {}
    for weights, size in (("float32", 4), ("float16", 2), ("int8", 1)):
        try:
            rounded = model if weights == "float32" else model.with_weights(weights)
        except ValueError:  # matrices so small that they stay float32
            continue
        names = {"model": rounded, "streams": [rounded.stream() for _ in range(STREAMS)], "x": x, "y": y}
        label = f"step_many, {STREAMS} streams" + (f", {weights}" if size < 4 else "")
        lines[label] = ("model.step_many(streams, x, out=y)", names, 1, STREAMS, both * size // 4)
    frames = rng.standard_normal((FRAMES, inputs), dtype=np.float32)
    names = {"stream": model.stream(), "x": frames, "y": np.empty((FRAMES, hidden), np.float32)}
    lines[f"process, {FRAMES} frames"] = ("stream.process(x, out=y)", names, FRAMES, 1, recurrent)
    names = {"train": _training(model.layers[0], rng)}
    lines[f"training, {STEPS} steps of {BATCH}"] = ("train()", names, STEPS, 3 * BATCH, 3 * both)
    return lines


def _training(layer, rng):
    """A forward and a backward pass of the C tape."""
    x = rng.standard_normal((STEPS, BATCH, layer.input_size), dtype=np.float32)
    dy = rng.standard_normal((STEPS, BATCH, layer.units), dtype=np.float32)
    tape, y, dx = _core.Tape(flat([layer], layer.input_size), STEPS, BATCH), np.empty_like(dy), np.empty_like(x)

    def call():
        tape.start()
        tape.run(0, STEPS, x, y)
        tape.dstate[...] = 0
        tape.backward(0, STEPS, dy, dx)

    return call


def _product(by, inputs, hidden):
    """The dense product of all weights with 64 vectors."""
    w, x = np.ones((4 * hidden, inputs + hidden), np.float32), np.ones((inputs + hidden, STREAMS), np.float32)
    y, product = np.empty((4 * hidden, STREAMS), np.float32), np.matmul
    if by == "PyTorch":
        import torch

        torch.set_num_threads(1)
        w, x, y, product = torch.from_numpy(w), torch.from_numpy(x), torch.from_numpy(y), torch.mm
    names = {"product": product, "w": w, "x": x, "y": y}
    return contenders.Contender("product", "product(w, x, out=y)", names, limit=True)


def _reads(hidden):
    """Streaming reads of an array as large as the recurrent weights"""
    return memcpy_.streaming_read(np.ones(4 * hidden**2, np.float32))


def _peak(folder):
    """The contender that only multiplies and adds, in vectors of cnorm's instruction set, and how many of both it does;
    None and 0 without a C compiler or without FMA."""
    bytes_, sums, flags = VECTORS.get(cnorm.active_isa(), (0, 0, None))
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if flags is None or not shutil.which(compiler[0]):
        return None, 0
    options = ["-O2", "-ffp-contract=fast", "-shared", "-fPIC", f"-DBYTES={bytes_}", f"-DSUMS={sums}", *flags]
    library = folder / "peak.so"
    command = [*compiler, *options, "-x", "c", "-", "-o", library]
    if subprocess.run(command, input=PEAK.encode(), capture_output=True).returncode:
        return None, 0
    function = ctypes.CDLL(str(library)).peak
    function.argtypes = [ctypes.c_long, ctypes.c_void_p]
    x = np.ones(4, np.float32)
    names = {"peak": function, "turns": TURNS, "x": x.ctypes.data, "kept": x}
    return contenders.Contender("fma", "peak(turns, x)", names, limit=True), TURNS * sums * bytes_ // 4
