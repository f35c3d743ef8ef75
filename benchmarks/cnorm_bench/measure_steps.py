"""Times of single steps of recurrent cells, batch 1, for every contender that can be imported."""

from importlib import util

import numpy as np

import cnorm
from cnorm_bench import contenders
from cnorm_bench.cases import HIDDEN
from cnorm_bench.contenders import memcpy_
from cnorm_bench.contenders.operations import (
    CELLS,
    check_rounded_steps,
    check_steps,
    correct,
    measured_error,
    random_model,
    trajectory,
)
from cnorm_bench.environment import surroundings
from cnorm_bench.measure_products import at_the_limit
from cnorm_bench.runners import latencies

__all__ = ["percentiles", "recurrent_steps", "rounded_contenders", "step_contenders"]

FRAMES = 16  # of the free run whose error is given beside the time


def recurrent_steps(sizes=None, *, cells=CELLS, seconds=1.0, advance=lambda description, total: None):
    """Time single steps of recurrent cells, batch 1, samples of all importable contenders interleaved.

    Parameters
    ----------
    sizes : sequence of (input, hidden), optional
    cells : sequence of str in CELLS
    seconds : float
        For each contender, cell and size.
    advance : callable
        As in `norms`.

    Returns
    -------
    dict
        "records": one for each cell, size and contender, with percentiles in microseconds over at least 1000 steps, and
        the root mean square error of the outputs of a free run of 16 frames against float64;
        "limits": for each cell and size the time to read the weights once, at the streaming rate measured on an array
        of their size, the time of the matrix-vector products alone, and "int8", both for int8 weights; "many": for
        several numbers of streams the microseconds a stream of `step_many` and of steps one by one; "call": the time
        of a step of a GRU 1 -> 1 called from Python and inside `Stream.process`; "lines": what `at_the_limit` returns.
    """
    lines = at_the_limit(sizes, seconds=seconds / 4)
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
            few = frames[:FRAMES]
            exact = trajectory(cell, model, few)
            made = [(runner, few[:3], exact[2]) for runner in step_contenders(modules, model)]
            passed = correct(made, check_steps, what, left_out)
            made = [(runner, few, exact) for runner in rounded_contenders(modules, model)]
            passed += correct(made, check_rounded_steps, what, left_out)
            errors = {runner.label: measured_error(runner, few, exact) for runner in passed}
            trial, _ = latencies(passed, [frames], at_a_time=1)
            a_step = sum(np.median(t) for t in trial.values()) / 1e6
            repeats = int(np.clip(seconds * len(passed) / (a_step * len(frames)), 20, 400))
            measured, _ = latencies(passed, [frames] * repeats, at_a_time=1, uncounted=2)
            shared = {"cell": cell, "input": inputs, "hidden": hidden}
            for label, t in measured.items():
                records.append({**shared, "contender": label, "error": errors[label]} | percentiles(t))
            limits.append(shared | _limit(model, "float32"))
            if any("int8" in runner.label for runner in passed):
                limits[-1]["int8"] = _limit(model, "int8")
    advance("step_many", len(cells) * len(sizes) + 1)
    document = {"format": 1, "kind": "rnn"} | surroundings() | {"left_out": list(dict.fromkeys(left_out))}
    last = {"many": many_streams(seconds=seconds / 4), "call": call_overhead(seconds=seconds / 4), "lines": lines}
    return document | {"records": records, "limits": limits} | last


def step_contenders(modules, model):
    """Contenders for a step of the model; onnxruntime runs plain cells by its operators LSTM and GRU."""
    onnx_model = None
    if util.find_spec("onnx") and util.find_spec("onnxruntime"):
        import onnx_export

        plain = not any(hasattr(layer, "spec") and layer.spec.normalises for layer in model.layers)
        onnx_model = onnx_export.export(model, form="step", native_ops=plain).SerializeToString()
    return [runner for module in modules if hasattr(module, "steps") for runner in module.steps(model, onnx_model)]


def rounded_contenders(modules, model):
    """Contenders with int8 or float16 weights; none for a model whose matrices are so small that they stay float32."""
    try:
        model.with_weights("int8")
    except ValueError:
        return []
    return [runner for module in modules if hasattr(module, "rounded_steps") for runner in module.rounded_steps(model)]


def many_streams(inputs=128, hidden=256, counts=(1, 2, 4, 8, 16, 64, 256), *, seconds=0.5):
    """Microseconds a stream of an LN-LSTM: `step_many`, and steps of the same streams one by one."""
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


def percentiles(times):
    """The number of samples, p50, p99, p99.9 and the maximum of times."""
    row = {"samples": len(times)} | {f"p{q}": float(np.percentile(times, q)) for q in (50, 99, 99.9)}
    return row | {"max": float(times.max())}


def _limit(model, weights):
    """The lower bounds of a step: the time to read the matrices once, and the time of the products alone.

    The reading rate is that of the fastest streaming read of an array of as many bytes, at least 256 KiB. The products
    are one matrix-vector product as large as all matrices together, a `Linear` layer of the type `weights`.
    """
    matrices = [array for layer in model.layers for array in layer.weights.values() if array.ndim == 2]
    joined = np.concatenate(matrices, axis=1)
    size = joined.size * (1 if weights == "int8" else 4)
    x = np.ones(max(size, 256 << 10) // 4, np.float32)
    step = cnorm.Model([cnorm.Linear(joined)]).with_weights(weights, smallest=1).stream().step
    names = {"step": step, "x": np.ones(joined.shape[1], np.float32), "y": np.empty(len(joined), np.float32)}
    product = contenders.Contender("product", "step(x, out=y)", names)
    measured = contenders.times([product, *memcpy_.streaming_read(x)], seconds=0.3)
    medians = {label: float(np.median(t)) for label, t in measured.items()}
    alone = medians.pop("product")
    how = min(medians, key=medians.get)
    rate = x.nbytes / medians[how]  # bytes a microsecond
    read = {"read_gb_per_s": rate / 1e3, "read_by": how, "microseconds": size / rate}
    return {"weight_bytes": size, **read, "product_microseconds": alone}
