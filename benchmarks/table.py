"""`make bench`: one table of ratios from one run on one thread, samples of all contenders interleaved.

Each figure is the other time divided by cnorm's, a geometric mean over the shapes in `cnorm_bench.MEAN_SHAPES`
unless the row names a shape. The last column is the project's target on an AVX-512 machine. `cnorm bench` prints the
times of every shape.
"""

import math
import sys
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import cnorm
import cnorm_bench as bench
from cnorm_bench import cases, contenders, report
from cnorm_bench.runners import latencies

sys.path.append(str(Path(__file__).parents[1] / "examples/demo"))
from recordings import recordings


def main():
    bench.settle()
    console = Console(highlight=False)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("")

        def advance(description, total):
            progress.update(task, description=description, total=total + 1, advance=1)

        document = bench.norms([bench.SHAPES["call"], *bench.MEAN_SHAPES], seconds=0.5, advance=advance)
        progress.update(task, description="steps of the demo model")
        steps = demo_steps()
    report.header(console, document)
    console.print(ratios(document, steps))


def demo_steps():
    """Median microseconds of a step of the packaged model on recorded speech, for each contender."""
    model, (utterances, _) = cnorm.demo_model(), recordings()
    modules, _ = contenders.importable()
    runners = bench.step_contenders(modules, model)
    times, _ = latencies(runners, utterances)
    return {label: float(np.median(samples)) for label, samples in times.items()}


def ratios(document, steps):
    """The table: a row for each comparison, a column for each variant of cnorm."""
    labels = dict.fromkeys(r["contender"] for r in document["records"])
    variants = [(document["isa"], "cnorm", 0)]
    variants += [(label.split(", ")[1], label, 0) for label in labels if label.startswith("cnorm, avx")]
    variants += [("mean/std = 10", "cnorm", 10)]
    table = Table("cnorm is that many times faster", box=None, pad_edge=False, header_style="dim")
    for title, _, _ in variants:
        table.add_column(title, justify="right")
    table.add_column("wanted", justify="right", style="dim")

    def row(what, contender, wanted, sizes=bench.MEAN_SHAPES, case=bench.FORWARD):
        cells = []
        for _, own, mean in variants:
            ratio = bench.ratio(document, contender, case=case._replace(mean=mean), sizes=sizes, against=own)
            cells.append(_ratio(ratio, wanted))
        table.add_row(f"  {what}", *cells, f"{wanted:.2f}")

    caches = document["caches"].get("L3", 32 << 20)
    cached = [(rows, n) for rows, n in bench.MEAN_SHAPES if 2 * 4 * rows * n < caches / 2]
    beyond = [bench.SHAPES["memory"]]
    table.add_row("[bold]forward, float32")
    row("PyTorch", "PyTorch", 2.2)
    row("onnxruntime, IO binding", "onnxruntime, IO binding", 3)
    row("numba, fastmath, unsafe formula", "numba", 1)
    row("the same, 16384x1024", "numba", 1.3, beyond)
    row("np.copyto, inside the caches", "np.copyto", 1 / 1.5, cached)
    row("np.copyto, 16384x1024", "np.copyto", 1 / 0.85, beyond)
    table.add_row("[bold]backward, float32")
    row("PyTorch", "PyTorch", 2, case=cases.BACKWARD)
    for case in (cases.FLOAT16, cases.BFLOAT16):
        table.add_row(f"[bold]forward, {case.dtype}")
        row("PyTorch", "PyTorch", 3, case=case)
        over_float32 = _time(document, bench.FORWARD) / _time(document, case)
        table.add_row("  its own float32, 16384x1024", _ratio(over_float32, 1), *[""] * (len(variants) - 1), "1.00")
    table.add_row("[bold]add_layer_norm, float32")
    row("np.add, then layer_norm, 16384x1024", "cnorm, after np.add", 1 / 0.85, beyond, cases.ADD)
    row("PyTorch", "PyTorch", 1, case=cases.ADD)
    table.add_row("[bold]rms_norm, float32")
    row("PyTorch", "PyTorch", 1, case=cases.RMS)
    table.add_row("[bold]one call, 1x256, microseconds")
    calls = [_time(document, bench.FORWARD._replace(mean=mean), own, bench.SHAPES["call"]) for _, own, mean in variants]
    table.add_row("  layer_norm, out=", *(f"{time:.2f}" for time in calls), "<= 0.20")
    table.add_row(f"[bold]one step of the demo model, {steps['cnorm']:.2f} us")
    for label, wanted in (("onnxruntime, IO binding", 5), ("PyTorch, torch.jit", 10), ("PyTorch, eager", 20)):
        against = steps.get(label, math.nan) / steps["cnorm"]
        table.add_row(f"  {label}", _ratio(against, wanted), *[""] * (len(variants) - 1), f"{wanted:.2f}")
    return table


def _time(document, case, contender="cnorm", size=bench.SHAPES["memory"]):
    for record in document["records"]:
        if (bench.case_of(record), record["contender"], record["rows"], record["n"]) == (case, contender, *size):
            return record["microseconds"]
    return math.nan


def _ratio(value, wanted):
    if math.isnan(value):
        return "-"
    return f"[{'green' if value >= wanted else 'red'}]{value:.2f}[/]"


if __name__ == "__main__":
    main()
