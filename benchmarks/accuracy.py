"""Print the tables of docs/numerics.md: the largest errors of layer_norm in cnorm, PyTorch and onnxruntime.

All runtimes get the same rows, 4096 of each length and mean. Gain 1, bias 0, eps 1e-5.
"""

import itertools
import math

import numpy as np

from cnorm_bench import contenders
from cnorm_bench.contenders.operations import as_dtype

MEANS = (0, 0.5, 1, 2, 3.9, 4.1, 10, 1e2, 1e4, 1e6)
LENGTHS = (100, 1024, 8192)
ROWS, PART = 4096, 256
RUNTIMES = ("cnorm", "PyTorch", "onnxruntime, IO binding")


def exact(x):
    """The reference: layer norm of x, computed in longdouble for float64 x, else in float64."""
    wide, eps = (np.longdouble, 1e-5) if x.dtype == np.float64 else (np.float64, float(np.float32(1e-5)))
    x = x.astype(wide)
    x -= x.mean(-1, keepdims=True)
    x -= x.mean(-1, keepdims=True)  # again, to remove the rounding error of the mean
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps)


def error(y, wanted):
    """The largest error divided by max(1, |y|); for float16 and bfloat16, by the unit in the last place (ULP) of
    max(2^-8, |y|).
    """
    size = np.abs(wanted)
    if y.itemsize == 2:
        unit = np.spacing(np.maximum(2.0**-8, size).astype(y.dtype)).astype(wanted.dtype)
    else:
        unit = np.maximum(1, size)
    return float((np.abs(y.astype(wanted.dtype) - wanted) / unit).max())  # NaN if any output is NaN


def largest_errors(dtype, rows):
    """The largest error of each runtime over all lengths; rows(rng, n) returns rows [PART, n]."""
    dtype, modules, worst = as_dtype(dtype), contenders.importable()[0], {}
    for n in LENGTHS:
        rng = np.random.default_rng(n)
        weight, bias = np.ones(n, dtype), np.zeros(n, dtype)
        for _ in range(0, ROWS, PART):
            with np.errstate(over="ignore"):
                x = rows(rng, n).astype(dtype)
            if not np.isfinite(x).all():
                return {}  # the rows overflow this type
            wanted = exact(x)
            for module in modules:
                for contender in getattr(module, "layer_norm", lambda **_: [])(x=x, weight=weight, bias=bias):
                    if contender.label in RUNTIMES:
                        found = worst.get(contender.label, 0), error(contender.compute()[0], wanted)
                        worst[contender.label] = math.nan if any(map(math.isnan, found)) else max(found)
    return worst


def cases():
    """Yield (name, rows): rows(rng, n) returns rows [PART, n], float64."""
    for mean in MEANS:
        yield (
            (f"{mean:g}" if mean < 100 else f"1e{math.log10(mean):.0f}"),
            lambda rng, n, mean=mean: mean + rng.standard_normal((PART, n)),
        )
    yield "0, all times 1e20", lambda rng, n: 1e20 * rng.standard_normal((PART, n))


def table(*columns):
    """A Markdown table of the largest errors for columns (dtype, runtime); its last row has the worst of each."""
    heads = [f"{dtype}, {runtime.split(',')[0]}" for dtype, runtime in columns]
    print(f"| mean/std | {' | '.join(heads)} |\n|---|{'---:|' * len(heads)}", flush=True)
    worst = [0.0] * len(heads)
    for name, rows in cases():
        errors = {dtype: largest_errors(dtype, rows) for dtype in dict(columns)}
        found = [errors[dtype].get(runtime) for dtype, runtime in columns]
        print(f"| {name} | {' | '.join(map(shown, found))} |", flush=True)
        worst = [w if f is None else f if math.isnan(f) else max(w, f) for w, f in zip(worst, found, strict=True)]
    print(f"| worst | {' | '.join(map(shown, worst))} |\n", flush=True)


def shown(value):
    return "" if value is None else f"{value:.2g}".replace("e-0", "e-").replace("e+0", "e").replace("nan", "NaN")


if __name__ == "__main__":
    table(*itertools.product(["float32", "float64"], RUNTIMES))
    table(*itertools.product(["float16"], RUNTIMES), *itertools.product(["bfloat16"], RUNTIMES[:2]))
