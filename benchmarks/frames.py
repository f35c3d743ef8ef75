"""Layers of frames [channels, positions] at the sizes of speech enhancers, in two builds of cnorm, in turns.

    .venv/bin/python benchmarks/frames.py /tmp/old /tmp/new [--isa avx2] [--only GRU]

`builds.py` says how to install the builds. Microseconds of a step in each, and the time of the second divided by that
of the first: the fastest tenth of samples, taken in turns, without the call from Python (a step of a `Scale` of one
element). The last lines add up GTCRN's frame, which has each layer as often as the table says.
"""

import argparse
import sys
from time import perf_counter

import numpy as np
from builds import parsed

RNG = np.random.default_rng(0)


def normal(*shape):
    """Values of the size of weights."""
    return (RNG.standard_normal(shape) * 0.3).astype(np.float32)


def gru(cnorm, inputs, units):
    """A GRU of PyTorch's form."""
    shapes = {"weight_ih_l0": (3 * units, inputs), "weight_hh_l0": (3 * units, units)}
    shapes |= {"bias_ih_l0": (3 * units,), "bias_hh_l0": (3 * units,)}
    return cnorm.GRU({name: normal(*shape) for name, shape in shapes.items()}, preset="torch")


def lstm(cnorm, inputs, units):
    """An LSTM of PyTorch's form."""
    shapes = {"weight_ih_l0": (4 * units, inputs), "weight_hh_l0": (4 * units, units)}
    shapes |= {"bias_ih_l0": (4 * units,), "bias_hh_l0": (4 * units,)}
    return cnorm.LSTM({name: normal(*shape) for name, shape in shapes.items()}, preset="torch")


def scan(cnorm, cell, inputs, units, positions):
    """A pair of cells, scanned in both directions."""
    return cnorm.OverPositions(cell(cnorm, inputs, units), positions=positions, both=cell(cnorm, inputs, units))


def each(cnorm, layer, positions):
    """The layer at each position."""
    return cnorm.PerPosition(layer, positions=positions)


def conv(cnorm, outputs, inputs, taps, positions, **options):
    """A convolution in a frame."""
    groups = options.get("groups", 1)
    return cnorm.Conv1d(normal(outputs, inputs // groups, taps), normal(outputs), positions=positions, **options)


def transposed(cnorm, inputs, outputs, taps, positions, **options):
    """A transposed convolution in a frame."""
    groups = options.get("groups", 1)
    weight = normal(inputs, outputs // groups, taps)
    return cnorm.ConvTranspose1d(weight, normal(outputs), positions=positions, **options)


CASES = {  # how many GTCRN has of each in a frame, and the layer
    "GRU 8->4 over 33, both ways": (4, lambda c: scan(c, gru, 8, 4, 33)),
    "GRU 8->8 at each of 33": (4, lambda c: each(c, gru(c, 8, 8), 33)),
    "GRU 8->16, a step": (6, lambda c: gru(c, 8, 16)),
    "Conv1d 9->16, 5 taps, stride 2, 129": (1, lambda c: conv(c, 16, 9, 5, 129, stride=2, padding=2)),
    "Conv1d 16->16, 5, stride 2, 2 groups, 65": (1, lambda c: conv(c, 16, 16, 5, 65, stride=2, padding=2, groups=2)),
    "Conv1d 16->16, 1, 33": (18, lambda c: conv(c, 16, 16, 1, 33)),
    "Conv1d 48->16, 3, 16 groups, 33": (6, lambda c: conv(c, 16, 48, 3, 33, padding=1, groups=16)),
    "ConvTranspose1d 16->16, 5, stride 2, 2 groups, 33": (
        1,
        lambda c: transposed(c, 16, 16, 5, 33, stride=2, padding=2, groups=2),
    ),
    "ConvTranspose1d 16->2, 5, stride 2, 65": (1, lambda c: transposed(c, 16, 2, 5, 65, stride=2, padding=2)),
    "LayerNorm 528": (4, lambda c: c.LayerNorm(normal(528), normal(528), eps=1e-8)),
    "Linear 192->64": (2, lambda c: c.Linear(normal(64, 192), normal(64))),
    "Linear 16->16 at each of 33": (4, lambda c: each(c, c.Linear(normal(16, 16), normal(16)), 33)),
    "PReLU 528": (17, lambda c: c.Activation("prelu", slope=normal(528))),
    "Delay 3 of 528": (6, lambda c: c.Delay(3, input_size=528)),
    "Permute 16, 33": (8, lambda c: c.Permute((16, 33), (1, 0))),
    "Conv1d 16->16, 16 groups, 3, 33": (0, lambda c: conv(c, 16, 16, 3, 33, padding=1, groups=16)),
    "Conv1d 16->16, 3, dilation 2, 129": (0, lambda c: conv(c, 16, 16, 3, 129, padding=2, dilation=2)),
    "Conv1d 64->64, 3, 33": (0, lambda c: conv(c, 64, 64, 3, 33, padding=1)),
    "ConvTranspose1d 16->16, 16 groups, 3, 33": (0, lambda c: transposed(c, 16, 16, 3, 33, padding=1, groups=16)),
    "GRU 8->4 over 33, one way": (0, lambda c: c.OverPositions(gru(c, 8, 4), positions=33)),
    "GRU 16->16 over 33, both ways": (0, lambda c: scan(c, gru, 16, 16, 33)),
    "GRU 64->64 over 33, both ways": (0, lambda c: scan(c, gru, 64, 64, 33)),
    "LSTM 8->8 over 33, both ways": (0, lambda c: scan(c, lstm, 8, 8, 33)),
    "LSTM 8->8 at each of 33": (0, lambda c: each(c, lstm(c, 8, 8), 33)),
    "LSTM 64->64, a step": (0, lambda c: lstm(c, 64, 64)),
}


def stepping(build, layer):
    """A function that takes a step of the layer, whose arguments are made before."""
    step = build.Model([layer]).stream().step
    x = normal(layer.input_size) if hasattr(layer, "input_size") else normal(1)
    y = np.empty(build.Model([layer]).output_size, np.float32)
    return lambda: step(x, out=y)


def microseconds(functions, samples=101, seconds=2e-4):
    """The fastest tenth of samples of one call of each, in turns."""
    counts = []
    for function in functions:
        start = perf_counter()
        for _ in range(20):
            function()
        counts.append(max(1, int(seconds * 20 / (perf_counter() - start))))
    times = [[] for _ in functions]
    for _ in range(samples):
        for function, count, kept in zip(functions, counts, times, strict=True):
            start = perf_counter()
            for _ in range(count):
                function()
            kept.append((perf_counter() - start) / count)
    return [float(np.quantile(kept, 0.1)) * 1e6 for kept in times]


def main():
    """Print the table."""
    global RNG
    arguments, both = parsed(argparse.ArgumentParser(description=__doc__), "part of the name of a layer")
    builds = list(both.values())
    calls = microseconds([stepping(build, build.Scale(np.ones(1, np.float32))) for build in builds])
    sums = np.zeros((2, 2))
    for name, (count, make) in CASES.items():
        if arguments.only not in name:
            continue
        steps = []
        for build in builds:
            RNG = np.random.default_rng(0)
            steps.append(stepping(build, make(build)))
        times = [time - call for time, call in zip(microseconds(steps), calls, strict=True)]
        sums[int("GRU" in name)] += np.multiply(times, count)
        print(f"{times[0]:8.2f} {times[1]:8.2f} us {times[1] / times[0]:6.3f}  {count:3d}  {name}", flush=True)
    for what, (old, new) in zip(("layers but GRUs", "GRUs"), sums, strict=True):
        print(f"{old:8.1f} {new:8.1f} us   {what} of GTCRN's frame, a sum")


if __name__ == "__main__":
    sys.exit(main())
