"""The worst case in time: rows and steps that need float64, beside ordinary ones of the same shape.

    .venv/bin/python benchmarks/worst_case.py [--isa avx2] [--only "layer_norm"]

Prints microseconds a call and the ratio; the table of docs/numerics.md. Each pair is measured alternately, minima.
"""

import argparse
import time

import numpy as np

import cnorm
from cnorm_bench.contenders.operations import random_model

HUGE = {np.float32: 1e25, np.float64: 2.0**600}  # the squares leave the range
SHAPES = [(512, 64), (256, 1024), (64, 8192)]
VOLUME = (8, 64, 196)
STEPS = [(12, 64), (256, 256), (512, 512)]


def shortest(functions, seconds=0.04):
    """The shortest time of each function, called in turns."""
    times = [float("inf")] * len(functions)
    repeats = [max(1, int(1e-3 / _time(f, 2))) for f in functions]
    end = time.perf_counter() + seconds * len(functions)
    while time.perf_counter() < end:
        for i, f in enumerate(functions):
            times[i] = min(times[i], _time(f, repeats[i]))
    return times


def _time(function, repeats):
    start = time.perf_counter()
    for _ in range(repeats):
        function()
    return (time.perf_counter() - start) / repeats


def row_norms(dtype, shape):
    """(name, call) for the ordinary x, then for the huge one."""
    rng = np.random.default_rng(0)
    rows, n = shape
    x, dy = rng.standard_normal((2, *shape)).astype(dtype)
    gain, bias, out = np.ones(n, dtype), np.zeros(n, dtype), np.empty(shape, dtype)
    gradients = (np.empty(shape, dtype), np.empty(n, dtype), np.empty(n, dtype))
    of_rows = (np.empty(shape, dtype), np.empty(rows, dtype))
    huge = (x * dtype(HUGE[dtype])).astype(dtype)
    one_column = x.copy()
    one_column[:, 3] = huge[:, 3]
    large_dy = np.clip(dy, -2, 2) * np.finfo(dtype).max / 4

    def statistics(norm, x):
        return norm(x, gain, bias, return_stats=True)[1]

    layer, batch = statistics(cnorm.layer_norm, x), statistics(cnorm.batch_norm, x)

    def each(name, call, *inputs):
        return name, [lambda x=x: call(x) for x in inputs]

    yield each("layer_norm", lambda x: cnorm.layer_norm(x, gain, bias, out=out), x, huge)
    for name, large in (("layer_norm_backward, x", huge), ("layer_norm_backward, dy", x)):
        st = layer if large is x else statistics(cnorm.layer_norm, huge)
        calls = [
            lambda: cnorm.layer_norm_backward(dy, x, gain, layer, out=gradients),
            lambda d=large_dy if large is x else dy, x=large, st=st: cnorm.layer_norm_backward(
                d, x, gain, st, out=gradients
            ),
        ]
        yield name, calls
    yield each("rms_norm", lambda x: cnorm.rms_norm(x, gain, out=out), x, huge)
    yield each("weight_norm", lambda x: cnorm.weight_norm(x, out=out), x, huge)
    weights = np.ones(rows, dtype)
    yield each("weight_norm_backward", lambda x: cnorm.weight_norm_backward(dy, x, weights, out=of_rows), x, huge)
    yield each("batch_norm", lambda x: cnorm.batch_norm(x, gain, bias, out=out), x, huge)
    yield each("batch_norm, one channel", lambda x: cnorm.batch_norm(x, gain, bias, out=out), x, one_column)
    for name, other in (("batch_norm_backward", huge), ("batch_norm_backward, one channel", one_column)):
        st = statistics(cnorm.batch_norm, other)
        calls = [
            lambda: cnorm.batch_norm_backward(dy, x, gain, batch, out=gradients),
            lambda x=other, st=st: cnorm.batch_norm_backward(dy, x, gain, st, out=gradients),
        ]
        yield name, calls


def volume_norms(dtype):
    """The same for group and instance norm."""
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((2, *VOLUME)).astype(dtype)
    huge = (x * dtype(HUGE[dtype])).astype(dtype)
    gain, bias, out = np.ones(VOLUME[1], dtype), np.zeros(VOLUME[1], dtype), np.empty(VOLUME, dtype)
    gradients = (np.empty(VOLUME, dtype), np.empty(VOLUME[1], dtype), np.empty(VOLUME[1], dtype))
    for groups in (8, 64):
        yield (
            f"group_norm, {groups} groups",
            [lambda x=x, g=groups: cnorm.group_norm(x, g, gain, bias, out=out) for x in (x, huge)],
        )
        st = [cnorm.group_norm(x, groups, gain, bias, return_stats=True)[1] for x in (x, huge)]
        pairs = zip((x, huge), st, strict=True)
        calls = [
            lambda x=x, s=s, g=groups: cnorm.group_norm_backward(dy, x, g, gain, s, out=gradients) for x, s in pairs
        ]
        yield f"group_norm_backward, {groups} groups", calls


def steps(inputs, hidden):
    """One step of a layer-normalised LSTM: ordinary x beside squares or products out of range, and tiny x."""
    rng = np.random.default_rng(0)
    model = random_model("LN-LSTM", rng, inputs, hidden)
    x = rng.standard_normal(inputs).astype(np.float32)
    extremes = [
        ("squares", x * np.float32(1e22)),
        ("products", np.sign(x) * np.float32(3e38)),
        ("tiny", x * np.float32(1e-38)),
    ]

    def step(x):
        stream = model.stream()
        return lambda: stream.step(x)

    for name, extreme in extremes:
        yield f"step, {name}", [step(x), step(extreme)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--isa")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    if options.isa:
        cnorm.use_isa(options.isa)
    print(f"{'':46}{'ordinary':>10}{'float64':>10}{'ratio':>8}   us, {cnorm.active_isa()}")
    for dtype in (np.float32, np.float64):
        cases = [(f"{rows}x{n}", case) for rows, n in SHAPES for case in row_norms(dtype, (rows, n))]
        cases += [("8x64x196", case) for case in volume_norms(dtype)]
        if dtype is np.float32:
            cases += [(f"{inputs}->{hidden}", case) for inputs, hidden in STEPS for case in steps(inputs, hidden)]
        for shape, (name, calls) in cases:
            label = f"{np.dtype(dtype)} {shape} {name}"
            if options.only in label:
                ordinary, rescued = shortest(calls)
                print(f"{label:46}{ordinary * 1e6:10.1f}{rescued * 1e6:10.1f}{rescued / ordinary:8.1f}")


if __name__ == "__main__":
    main()
