"""`make bench`: one table of ratios, all from one interleaved run on one thread.

Each figure says how many times faster cnorm is, geometric means over the shapes in `cnorm.bench.SIX`; the last column
is what the project wants on an AVX-512 machine. Times and every shape for itself: `cnorm bench`.
"""

import math
import os
import subprocess
import sys
from importlib import util

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import cnorm
from cnorm import bench, bench_report, contenders, demo


def main():
    if any(os.environ.get(name) != value for name, value in bench.settled_environment().items()):
        sys.exit(subprocess.call([sys.executable, *sys.orig_argv[1:]], env=bench.settled_environment()))
    console = Console(highlight=False)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("")

        def advance(description, total):
            progress.update(task, description=description, total=total + 1, advance=1)

        document = bench.norms([bench.SHAPES["call"], *bench.SIX], seconds=0.5, advance=advance)
        progress.update(task, description="steps of the demo model")
        steps = demo_steps()
    bench_report.header(console, document)
    console.print(ratios(document, steps))


def demo_steps():
    """Median microseconds of a step of the packaged model, streaming recorded speech, for each contender."""
    model, (utterances, _) = cnorm.demo_model(), demo.recordings()
    onnx_model = None
    if util.find_spec("onnx") and util.find_spec("onnxruntime"):
        import onnx_export

        onnx_model = onnx_export.export(model).SerializeToString()
    modules, _ = contenders.importable()
    runners = [r for module in modules if hasattr(module, "steps") for r in module.steps(model, onnx_model)]
    times, _ = contenders.latencies(runners, utterances[:200])
    return {label: float(np.median(samples)) for label, samples in times.items()}


def ratios(document, steps):
    """The table: a row for each claim, a column for each variant of cnorm."""
    labels = dict.fromkeys(r["contender"] for r in document["records"])
    variants = [(document["isa"], "cnorm", 0)]
    variants += [(label.split(", ")[1], label, 0) for label in labels if label.startswith("cnorm, avx")]
    variants += [("mean/std = 10", "cnorm", 10)]
    table = Table("cnorm is that many times faster", box=None, pad_edge=False, header_style="dim")
    for title, _, _ in variants:
        table.add_column(title, justify="right")
    table.add_column("wanted", justify="right", style="dim")

    def row(what, contender, wanted, sizes=bench.SIX, operation="layer_norm"):
        cells = [
            _ratio(bench.ratio(document, contender, operation=operation, mean=mean, sizes=sizes, against=own), wanted)
            for _, own, mean in variants
        ]
        table.add_row(f"  {what}", *cells, f"{wanted:.2f}")

    caches = document["caches"].get("L3", 32 << 20)
    cached = [(rows, n) for rows, n in bench.SIX if 2 * 4 * rows * n < caches / 2]
    beyond = [bench.SHAPES["memory"]]
    table.add_row("[bold]forward, float32")
    row("PyTorch", "PyTorch", 2.2)
    row("onnxruntime, IO binding", "onnxruntime, IO binding", 3)
    row("numba, fastmath, unsafe formula", "numba", 1)
    row("the same, 16384x1024", "numba", 1.3, beyond)
    row("np.copyto, inside the caches", "np.copyto", 1 / 1.5, cached)
    row("np.copyto, 16384x1024", "np.copyto", 1 / 0.85, beyond)
    table.add_row("[bold]backward, float32")
    row("PyTorch", "PyTorch", 2, operation="layer_norm_backward")
    table.add_row("[bold]one call, 1x256, microseconds")
    calls = {(r["contender"], r["mean"]): r["microseconds"] for r in document["records"] if r["rows"] == 1
             and r["operation"] == "layer_norm"}  # fmt: skip
    table.add_row("  layer_norm, out=", *(f"{calls[own, mean]:.2f}" for _, own, mean in variants), "<= 0.20")
    table.add_row(f"[bold]one step of the demo model, {steps['cnorm']:.2f} us")
    for label, wanted in (("onnxruntime, IO binding", 5), ("PyTorch, torch.jit", 10), ("PyTorch, eager", 20)):
        against = steps.get(label, math.nan) / steps["cnorm"]
        table.add_row(f"  {label}", _ratio(against, wanted), *[""] * (len(variants) - 1), f"{wanted:.2f}")
    return table


def _ratio(value, wanted):
    if math.isnan(value):
        return "-"
    return f"[{'green' if value >= wanted else 'red'}]{value:.2f}[/]"


if __name__ == "__main__":
    main()
