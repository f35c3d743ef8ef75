"""`cnorm bench`: how fast layer normalisation is on this machine, next to whatever else is installed.

`norms` and `recurrent_steps` measure and make a document, a dict that goes to JSON as it is; `bench_report` shows
documents. Contenders are checked against float64 before any of them is timed.
"""

import io
import json as json_module
import math
import os
import platform
import subprocess
import sys
from importlib import util
from pathlib import Path

import numpy as np

import cnorm
from cnorm.files import write_whole
from cnorm.tools import contenders
from cnorm.tools.contenders import memcpy_
from cnorm.tools.contenders.operations import CELLS, OPERATIONS, Case, after, as_dtype, check, check_steps, random_model
from cnorm.tools.info import processor, versions

__all__ = ["CASES", "HIDDEN", "SHAPES", "SIX", "norms", "ratio", "recurrent_steps", "run"]

SHAPES = {
    "call": (1, 256),  # what a call costs
    "tile": (32, 256),
    "sentence": (128, 768),
    "page": (512, 1024),  # the last one well inside the caches of most machines
    "batch": (4096, 768),
    "large batch": (4096, 1024),
    "memory": (16384, 1024),  # beyond any cache
}
SIX = list(SHAPES.values())[1:]  # geometric means run over these
HIDDEN = ((16, 16), (12, 64), (64, 128), (128, 256), (512, 512), (1024, 1024), (2048, 2048))  # input, hidden
# A mean of 10 is where the fastest formula is no longer safe, so that nobody tunes to N(0, 1) alone.
FORWARD, FORWARD_10, BACKWARD = Case("layer_norm"), Case("layer_norm", mean=10), Case("layer_norm_backward")
FLOAT16, BFLOAT16 = Case("layer_norm", "float16"), Case("layer_norm", "bfloat16")
RMS, ADD = Case("rms_norm"), Case("add_layer_norm")
CASES = (FORWARD, FORWARD_10, BACKWARD, FLOAT16, BFLOAT16, RMS, ADD)

# Contenders that return new arrays would pay page faults for each one: the allocator keeps its memory instead.
# What users see without this is reported beside it. And everybody gets one thread.
MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(4 << 30), "MALLOC_TRIM_THRESHOLD_": str(16 << 30)}
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def run(sizes=None, out_dir="bench_out", json=False, rnn=False, *, seconds=None):
    """Measure on this machine, in a process of its own; print tables, write a JSON file and a picture.

    Parameters
    ----------
    sizes : sequence of (int, int), optional
        (rows, n) of the layer norms, or (input, hidden) sizes with `rnn`; `SHAPES` or `HIDDEN` if not given.
    out_dir : str or path-like
        Folder for `norms.json` and `norms.png`, or `rnn.json` and `rnn.png`; made if it is not there.
    json : bool
        Print the JSON document to standard output instead of the tables.
    rnn : bool
        Measure recurrent steps instead of layer norms.
    seconds : float, optional
        For each contender and size; as long as `norms` or `recurrent_steps` think right if not given.

    Returns
    -------
    dict
        The document that the JSON file holds.

    Raises
    ------
    OSError
        If the folder can't be made.
    RuntimeError
        If the measuring process failed; it has said why on standard error.
    """
    Path(out_dir).mkdir(parents=True, exist_ok=True)  # not after minutes of measuring
    job = {"sizes": sizes, "out_dir": str(out_dir), "json": bool(json), "rnn": bool(rnn)}
    job["options"] = {} if seconds is None else {"seconds": seconds}
    if _child(job, settled_environment()).returncode:
        raise RuntimeError("the measurement failed, see above")
    return json_module.loads((Path(out_dir) / f"{'rnn' if rnn else 'norms'}.json").read_text())


def settled_environment():
    """The environment a process has to be started with, for its measurements to count."""
    return {**os.environ, **THREADS, **MEMORY}


def settle():
    """Start this script anew, in that environment, unless it is in it."""
    environment = settled_environment()
    if environment != os.environ:
        sys.exit(subprocess.call([sys.executable, *sys.orig_argv[1:]], env=environment))


def _child(job, environment, **options):
    # -P: a source folder that happens to be the working directory is not the package that runs here
    command = [sys.executable, "-P", "-m", "cnorm.tools.bench", json_module.dumps(job)]
    return subprocess.run(command, env=environment, check=False, **options)


def _main(job):
    """The measuring process."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from cnorm.tools import bench_report

    if "fresh" in job:
        print(json_module.dumps(_fresh(*job["fresh"])))
        return
    console = Console(highlight=False)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)

        def advance(description, total):
            progress.update(task, description=description, total=total, advance=1)

        measure = recurrent_steps if job["rnn"] else norms
        document = measure(job["sizes"] and [tuple(size) for size in job["sizes"]], advance=advance, **job["options"])
    text = json_module.dumps(document, indent=1)
    stem = Path(job["out_dir"]) / ("rnn" if job["rnn"] else "norms")
    write_whole(stem.with_suffix(".json"), text.encode())
    tables = bench_report.rnn_tables if job["rnn"] else bench_report.norms_tables
    picture = bench_report.rnn_picture if job["rnn"] else bench_report.norms_picture
    drawn = util.find_spec("matplotlib") is not None
    if drawn:
        drawing = io.BytesIO()
        picture(document, drawing)
        write_whole(stem.with_suffix(".png"), drawing.getvalue())
    if job["json"]:
        print(text)
        return
    bench_report.header(console, document)
    tables(console, document)
    console.print(f"{stem}.json: every figure")
    console.print(f"{stem}.png: the picture" if drawn else "no picture: pip install matplotlib")


def norms(sizes=None, *, cases=CASES, seconds=0.2, advance=lambda description, total: None):
    """Time layer norms of every importable contender, all in turns.

    Parameters
    ----------
    sizes : sequence of (rows, n), optional
    cases : sequence of Case
    seconds : float
        For each contender of each case and size.
    advance : callable
        Called with a description and the number of calls to expect.

    Returns
    -------
    dict
        "records": one for each case, size and contender, with microseconds a call; "left_out": sentences.

    Raises
    ------
    ArithmeticError
        If cnorm itself computes something wrong. A contender that does is left out with a sentence.
    """
    sizes = list(sizes or SHAPES.values())
    modules, left_out = contenders.importable()
    records, total = [], len(cases) * len(sizes)
    for case in cases:
        if case.dtype == "bfloat16" and not util.find_spec("ml_dtypes"):
            left_out.append("bfloat16 is left out: ml_dtypes can't be imported")
            continue
        for rows, n in sizes:
            advance(f"{case} {rows}x{n}", total)
            inputs = case.inputs(np.random.default_rng(rows + n), rows, n)
            expected, made = case.expected(**inputs), []
            for module in modules:
                new = getattr(module, case.operation, lambda **_: [])(**inputs)
                made += [(contender, expected) for contender in new]
                if not new and module is not memcpy_:
                    left_out.append(f"{module.LABEL} has no {case.operation} in {case.dtype}")
            fit = _fit(made, check, f"{case.operation} {rows}x{n}", left_out)
            moved = OPERATIONS[case.operation].moved * as_dtype(case.dtype).itemsize * rows * n
            shared = {**case._asdict(), "rows": rows, "n": n, "moved_bytes": moved}
            for label, samples in contenders.times(fit, seconds=seconds).items():
                records.append({**shared, "contender": label, **_summary(samples)})
            del inputs, expected, made, fit  # hundreds of MB
    document = (
        {"format": 1, "kind": "norms"}
        | surroundings()
        | {"left_out": list(dict.fromkeys(left_out)), "records": records}
    )
    largest = max(sizes, key=math.prod)
    if math.prod(largest) * 4 >= 8 << 20:  # page faults are what large new arrays cost
        document["fresh_memory"] = {"rows": largest[0], "n": largest[1], "microseconds": fresh_memory(*largest)}
    return document


def _fit(made, judge, what, left_out):
    """The contenders of `made`, each with further arguments of `judge`, that pass; a sentence for each other one."""
    fit = []
    for contender, *arguments in made:
        try:
            judge(contender, *arguments)
        except ArithmeticError as error:
            if contender.label.startswith("cnorm"):
                raise
            left_out.append(f"{what}: {error}; it is not timed")
        else:
            fit.append(contender)
    return fit


def fresh_memory(rows, n):
    """Microseconds of a forward call that makes its output, with the allocator as users have it."""
    environment = {name: value for name, value in settled_environment().items() if name not in MEMORY}
    child = _child({"fresh": [rows, n]}, environment, capture_output=True, text=True)
    if child.returncode:
        raise RuntimeError(f"the measurement with fresh memory failed:\n{child.stderr}")
    return json_module.loads(child.stdout)


def _fresh(rows, n):
    inputs = FORWARD.inputs(np.random.default_rng(0), rows, n)
    modules, _ = contenders.importable()
    made = [c for module in modules for c in module.layer_norm(**inputs) if c.label in NEW_ARRAY]
    return {label: float(np.median(samples)) for label, samples in contenders.times(made).items()}


NEW_ARRAY = ("cnorm, new array", "PyTorch", "onnxruntime, run()")


def _summary(samples):
    low, middle, high = np.percentile(samples, [25, 50, 75])
    return {
        "microseconds": float(middle),
        "quartiles": [float(low), float(high)],
        "best": float(samples.min()),
        "samples": len(samples),
    }


def surroundings():
    """What the figures depend on: processor, caches, instruction set, versions, and whether memory is kept."""
    return {
        "processor": processor(),
        "caches": caches(),
        "isa": cnorm.active_isa(),
        "versions": {"cnorm": cnorm.__version__, "python": sys.version.split()[0]}
        | versions("numpy", "onnxruntime", "torch", "numba"),
        "memory_kept": platform.libc_ver()[0] == "glibc"
        and all(os.environ.get(name) == value for name, value in MEMORY.items()),
    }


def caches():
    """Sizes of the first processor's data caches in bytes, {"L1": 32768, ...}; empty where the system doesn't tell."""
    sizes = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        except OSError:
            continue
        if kind != "Instruction" and size.endswith("K"):
            sizes[f"L{level}"] = int(size[:-1]) * 1024
    return sizes


def case_of(record):
    """The `Case` of a record of `norms`."""
    return Case(record["operation"], record["dtype"], record["mean"])


def ratio(document, contender, *, case=FORWARD, sizes=None, against="cnorm"):
    """Geometric mean over sizes of the contender's time by that of `against`; above 1, `against` is faster.

    NaN if one of the two was not measured at each of the sizes.
    """
    sizes = [tuple(size) for size in sizes or SIX]
    found = {
        (record["contender"], record["rows"], record["n"]): record["microseconds"]
        for record in document["records"]
        if case_of(record) == case
    }
    try:
        logs = [math.log(found[contender, *size] / found[against, *size]) for size in sizes]
    except KeyError:
        return math.nan
    return math.exp(sum(logs) / len(logs))


# Recurrent steps


def recurrent_steps(sizes=None, *, cells=CELLS, seconds=1.0, advance=lambda description, total: None):
    """Time single steps of recurrent cells, batch 1, in every importable contender, all in turns.

    Parameters
    ----------
    sizes : sequence of (input, hidden), optional
    cells : sequence of str in CELLS
    seconds : float
        For each contender, cell and size.
    advance : callable
        As of `norms`.

    Returns
    -------
    dict
        "records": one for each cell, size and contender, with percentiles in microseconds over at least 1000 steps;
        "limits": for each cell and size the time to read the weights once, at the streaming rate measured on an array
        of their size, and the time of the matrix-vector products alone; "many": microseconds a stream of `step_many`
        and of steps one by one, for numbers of streams; "call": what a call of `Stream.step` costs.
    """
    sizes = list(sizes or HIDDEN)
    modules, left_out = contenders.importable()
    records, limits = [], []
    for cell in cells:
        for inputs, hidden in sizes:
            what = f"{cell} {inputs} -> {hidden}"
            advance(what, len(cells) * len(sizes) + 1)
            rng = np.random.default_rng(inputs + hidden)
            model = random_model(cell, rng, inputs, hidden)
            frames = rng.standard_normal((50, inputs), dtype=np.float32)
            expected = after(cell, model, frames[:3])
            made = [(runner, frames[:3], expected) for runner in step_contenders(modules, model)]
            fit = _fit(made, check_steps, what, left_out)
            trial, _ = contenders.latencies(fit, [frames], at_a_time=1)
            a_step = sum(np.median(t) for t in trial.values()) / 1e6
            repeats = int(np.clip(seconds * len(fit) / (a_step * len(frames)), 20, 400))
            measured, _ = contenders.latencies(fit, [frames] * repeats, at_a_time=1, uncounted=2)
            shared = {"cell": cell, "input": inputs, "hidden": hidden}
            records += [{**shared, "contender": label} | _percentiles(t) for label, t in measured.items()]
            limits.append(shared | _limit(model))
    advance("step_many", len(cells) * len(sizes) + 1)
    document = {"format": 1, "kind": "rnn"} | surroundings() | {"left_out": list(dict.fromkeys(left_out))}
    last = {"many": many_streams(seconds=seconds / 4), "call": call_overhead(seconds=seconds / 4)}
    return document | {"records": records, "limits": limits} | last


def step_contenders(modules, model):
    """Contenders for a step of the model; onnxruntime has its own operators for plain cells."""
    onnx_model = None
    if util.find_spec("onnx") and util.find_spec("onnxruntime"):
        import onnx_export

        plain = not any(hasattr(layer, "spec") and layer.spec.normalises for layer in model.layers)
        onnx_model = onnx_export.export(model, form="step", native_ops=plain).SerializeToString()
    return [runner for module in modules if hasattr(module, "steps") for runner in module.steps(model, onnx_model)]


def many_streams(inputs=128, hidden=256, counts=(1, 2, 4, 8, 16, 64, 256), *, seconds=0.5):
    """Microseconds a stream, `step_many` beside steps one by one, of an LN-LSTM."""
    rng, rows = np.random.default_rng(0), []
    model = random_model("LN-LSTM", rng, inputs, hidden)
    for count in counts:
        x, y = rng.standard_normal((count, inputs), dtype=np.float32), np.empty((count, hidden), np.float32)
        names = {"model": model, "streams": [model.stream() for _ in range(count)], "x": x, "y": y}
        steps = [(stream.step, x[k], y[k]) for k, stream in enumerate([model.stream() for _ in range(count)])]
        made = [
            contenders.Contender("step_many", "model.step_many(streams, x, out=y)", names),
            contenders.Contender("step", "[step(x, out=y) for step, x, y in steps]", {"steps": steps}),
        ]
        times = {label: float(np.median(t)) / count for label, t in contenders.times(made, seconds=seconds).items()}
        rows.append({"input": inputs, "hidden": hidden, "streams": count} | times)
    return rows


def call_overhead(*, seconds=0.5):
    """Microseconds of a step of a GRU 1 -> 1: called from Python, and within the C loop of `Stream.process`."""
    stream = random_model("GRU", np.random.default_rng(0), 1, 1).stream()
    many = np.ones((1000, 1), np.float32)
    names = {"stream": stream, "x": many[0], "y": many[0].copy(), "many": many, "out": many.copy()}
    made = [
        contenders.Contender("step", "stream.step(x, out=y)", names),
        contenders.Contender("process", "stream.process(many, out=out)", names),
    ]
    times = {label: float(np.median(t)) for label, t in contenders.times(made, seconds=seconds).items()}
    return {"step": times["step"], "inside": times["process"] / len(many)}


def _percentiles(times):
    row = {"samples": len(times)} | {f"p{q}": float(np.percentile(times, q)) for q in (50, 99, 99.9)}
    return row | {"max": float(times.max())}


def _limit(model):
    """Bytes of the matrices, the fastest streaming read of as many (at least 256 KiB), the time that makes; and the
    time of one matrix-vector product as large as all of them, a `Linear` layer."""
    matrices = [array for layer in model.layers for array in layer.weights.values() if array.ndim == 2]
    joined = np.concatenate(matrices, axis=1)
    x = np.ones(max(joined.nbytes, 256 << 10) // 4, np.float32)
    step = cnorm.Model([cnorm.Linear(joined)]).stream().step
    names = {"step": step, "x": np.ones(joined.shape[1], np.float32), "y": np.empty(len(joined), np.float32)}
    product = contenders.Contender("product", "step(x, out=y)", names)
    measured = contenders.times([product, *memcpy_.streaming_read(x)], seconds=0.3)
    medians = {label: float(np.median(t)) for label, t in measured.items()}
    alone = medians.pop("product")
    how = min(medians, key=medians.get)
    rate = x.nbytes / medians[how]  # bytes a microsecond
    read = {"read_gb_per_s": rate / 1e3, "read_by": how, "microseconds": joined.nbytes / rate}
    return {"weight_bytes": joined.nbytes, **read, "product_microseconds": alone}


if __name__ == "__main__":
    _main(json_module.loads(sys.argv[1]))
