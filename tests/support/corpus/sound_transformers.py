"""Examine sound transformers with many seeds and sizes: each must exit with 0. Needs torch and transformers; minutes.

    PYTHONPATH=tests/support python -P -m corpus.sound_transformers [--hidden 64 256] [--seeds 21] [--family bert]

One line for each file: the codes of all runs, the conditioning that they reached, and the largest error in bounds.
"""

import argparse
import itertools
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime
from corpus.make_transformers import EXPORTERS, FAMILIES, HEADS, NORMS, WEIGHTS, build, export, inputs

from onnx_export.validation.examine import examine
from onnx_export.validation.options import Options

SIZES = ((1, 5), (2, 16), (4, 33))  # batch, length
# As exported, saved by onnxruntime after its own optimisation, and fused by onnxruntime.transformers.
OPTIMISERS = ("none", "onnxruntime", "transformers")


def optimise(file, family, hidden, optimiser):
    """The file after an optimiser, None if the optimiser fails."""
    if optimiser == "none":
        return file
    target = file.with_suffix(f".{optimiser}.onnx")
    if optimiser == "onnxruntime":
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.optimized_model_filepath = str(target)
        options.log_severity_level = 4
        onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        return target
    from onnxruntime.transformers.optimizer import optimize_model

    try:
        optimised = optimize_model(
            str(file), FAMILIES[family][0], num_heads=HEADS, hidden_size=hidden, opt_level=0, use_gpu=False
        )
    except IndexError:  # its GPT-2 fusion expects PyTorch's older exporter
        return None
    optimised.save_model_to_file(str(target))
    return target


def examined(file, family, seed, size, folder):
    """The report of one run with realistic inputs."""
    given = Path(folder) / "inputs.npz"
    np.savez(given, **inputs(family, *size, seed))
    return examine(str(file), Options(input=str(given), seed=seed), lambda *_: None)


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, nargs="+", default=[64])
    parser.add_argument("--seeds", type=int, default=21)
    parser.add_argument("--family", nargs="+", default=list(FAMILIES))
    parser.add_argument("--weights", nargs="+", default=list(WEIGHTS))
    parser.add_argument("--optimiser", nargs="+", default=list(OPTIMISERS))
    chosen = parser.parse_args(arguments)
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        cases = itertools.product(chosen.hidden, chosen.family, chosen.weights, EXPORTERS)
        for hidden, family, weights, exporter in cases:
            file = Path(folder) / f"{family}-{hidden}-{weights}-{exporter}.onnx"
            export(build(family, hidden, weights), family, exporter, file)
            for optimiser in chosen.optimiser:
                made = optimise(file, family, hidden, optimiser)
                bad += 0 if made is None else _row(made, family, chosen.seeds, folder)
    return bool(bad)


def _row(file, family, seeds, folder):
    """Examine a file with all seeds and sizes and print the outcome; returns the number of runs that failed."""
    codes, conditioning, ratio, complaints, norms = {}, 0.0, 0.0, {}, set()
    for seed, size in itertools.product(range(seeds), SIZES):
        report = examined(file, family, seed, size, folder)
        code = report.exit_code()
        codes[code] = codes.get(code, 0) + 1
        norms.add(sum(not norm.near_miss for norm in report.norms))
        conditioning = max([conditioning, *(norm.conditioning for norm in report.norms)])
        ratio = max([ratio, *(norm.error / norm.bound for norm in report.norms if norm.bound)])
        if code:
            for norm in report.norms:
                if norm.verdict in ("wrong", "inaccurate", "not exercised"):
                    complaints[f"{norm.form}: {norm.verdict} ({norm.blame}): {norm.detail}"] = norm.name
            complaints |= {f"{f.code}: {f.message}": f.norm for f in report.findings if f.level == "error"}
            complaints |= {report.problem: ""} if report.problem else {}
    found = "".join(str(n) + " " for n in sorted(norms)) + f"norms of {NORMS[family]}"
    print(f"{file.stem:40} {found:14} codes {codes}  conditioning {conditioning:.3g}  {ratio:.2f} B", flush=True)
    for complaint, name in list(complaints.items())[:6]:
        print(f"    {name}: {complaint}", flush=True)
    return sum(count for code, count in codes.items() if code) + (norms != {NORMS[family]})


if __name__ == "__main__":
    sys.exit(main())
