"""Compare two builds of cnorm: the same calls on the same arrays, in one process, in turns.

    git worktree add /tmp/older COMMIT
    .venv/bin/python -m pip install --no-deps --upgrade --target /tmp/old /tmp/older
    .venv/bin/python -m pip install --no-deps --upgrade --target /tmp/new .
    .venv/bin/python benchmarks/builds.py /tmp/old /tmp/new [--isa avx2] [--only backward]

For each shape prints the time of the second build divided by that of the first: the median over several placements of
the arrays in memory, then the minimum and the maximum; below, the geometric mean of the medians. The physical pages of
an array change the time of a call by up to 10 % (Zen 4, 2026-11-24), so two processes, each with its own arrays, cannot
resolve a difference of 3 %. All cases take minutes and over 1 GB.
"""

import argparse
import importlib
import math
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from pathlib import Path

import numpy as np

from cnorm_bench.cases import CASES, MEAN_SHAPES
from cnorm_bench.contenders.operations import check
from cnorm_bench.contenders.timing import Contender, empty_like, times

STATEMENTS = {
    "layer_norm": "cnorm.layer_norm(x, weight, bias, out=y)",
    "layer_norm_backward": "cnorm.layer_norm_backward(dy, x, weight, stats, out=(y, dweight, dbias))",
    "rms_norm": "cnorm.rms_norm(x, weight, out=y)",
    "add_layer_norm": "cnorm.add_layer_norm(x, residual, weight, bias, out=y, sum_out=total)",
}


def installed(folder):
    """The package cnorm in a folder, imported beside those that are loaded already."""
    if not any((folder / "cnorm").glob("_core*.so")):
        sys.exit(f"{folder} holds no built cnorm: install it there with pip install --target, see --help")
    others = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "cnorm"}
    finders, sys.meta_path = sys.meta_path, [BuiltinImporter, FrozenImporter, PathFinder]  # no editable installation
    sys.path.insert(0, str(folder))
    try:
        build = importlib.import_module("cnorm")
    finally:
        sys.path.remove(str(folder))
        sys.meta_path = finders
        for name in [name for name in sys.modules if name.split(".")[0] == "cnorm"]:
            del sys.modules[name]
        sys.modules.update(others)
    return build


def contenders(case, builds, inputs):
    """One `Contender` for each build, all with the same arrays."""
    x = inputs["x"]
    names = inputs | {"y": empty_like(x), "total": empty_like(x)}
    names |= {"dweight": np.empty_like(inputs["weight"]), "dbias": np.empty_like(inputs["weight"])}
    for label, build in builds.items():
        _, stats = build.layer_norm(x, return_stats=True)
        yield Contender(label, STATEMENTS[case.operation], names | {"cnorm": build, "stats": stats})


def ratios(case, builds, shape, rng, placements):
    """Times of the second build divided by those of the first, one for each placement."""
    kept = []  # arrays that are not freed, so that the next ones lie elsewhere
    for _ in range(placements):
        kept.append(np.empty(rng.integers(1, 64) * 4096, np.uint8))
        inputs = case.inputs(rng, *shape)
        both, expected = list(contenders(case, builds, inputs)), case.expected(**inputs)
        for contender in both:
            check(contender, expected)
        old, new = (np.median(samples) for samples in times(both).values())
        kept.append(both)
        yield new / old


def parsed(parser, only):
    """The arguments, and the two builds that they name with their instruction set; `only` is the help of --only."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("builds", nargs=2, metavar="FOLDER", type=lambda folder: Path(folder).resolve())
    parser.add_argument("--isa", help="instruction set; by default the active one of each build")
    parser.add_argument("--only", default="", help=only)
    arguments = parser.parse_args()
    builds = {label: installed(folder) for label, folder in zip(("old", "new"), arguments.builds, strict=True)}
    for label, build in builds.items():
        try:
            build.use_isa(arguments.isa or build.active_isa())
        except ValueError as error:
            parser.error(f"--isa, {label}: {error}")
        print(f"{label}: {build.active_isa()}, {Path(build.__file__).parent}")
    return arguments, builds


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--placements", type=int, default=5)
    arguments, builds = parsed(parser, "part of the name of an operation or dtype")
    cases = [case for case in CASES if arguments.only in str(case)]
    if not cases:
        parser.error(f"no operation or dtype contains {arguments.only!r}")
    rng = np.random.default_rng(0)
    for case in cases:
        print(f"\n{case}", flush=True)
        medians = []
        for rows, n in MEAN_SHAPES:
            each = list(ratios(case, builds, (rows, n), rng, arguments.placements))
            medians.append(float(np.median(each)))
            print(f"{f'{rows}x{n}':>12} {medians[-1]:6.3f}  ({min(each):.3f} to {max(each):.3f})", flush=True)
        print(f"{'geometric':>12} {math.exp(sum(map(math.log, medians)) / len(medians)):6.3f}")


if __name__ == "__main__":
    main()
