"""Recurrent cells in two builds of cnorm, in turns: steps, sequences, many streams and training.

    .venv/bin/python benchmarks/cells.py /tmp/old /tmp/new [--isa avx2] [--only training]

`builds.py` says how to install the builds. Microseconds of a call in each, and the time of the second divided by that
of the first: the fastest tenth of samples, taken in turns. Both must compute the same bits, gradients included, before
they are timed.
"""

import argparse
import sys

import frames
import numpy as np
from builds import parsed
from frames import gru, lstm, microseconds, normal

SIZES = (12, 64), (64, 128), (128, 256), (512, 512)
FRAMES, STREAMS, STEPS, BATCH = 200, 64, 20, 32


def step(build, cell, inputs, units):
    """One step of one stream."""
    stream, x, y = build.Model([cell]).stream(), normal(inputs), np.empty(units, np.float32)
    return lambda: stream.step(x, out=y), [y]


def sequence(build, cell, inputs, units):
    """`process` of FRAMES frames."""
    stream, x, y = build.Model([cell]).stream(), normal(FRAMES, inputs), np.empty((FRAMES, units), np.float32)
    return lambda: stream.process(x, out=y), [y]


def many(build, cell, inputs, units, weights="float32"):
    """A step of STREAMS streams."""
    model = build.Model([cell])
    model = model if weights == "float32" else model.with_weights(weights, smallest=0)
    streams, x, y = [model.stream() for _ in range(STREAMS)], normal(STREAMS, inputs), np.empty((STREAMS, units), "f")
    return lambda: model.step_many(streams, x, out=y), [y]


def training(build, cell, inputs, units):
    """Forward and backward passes of STEPS steps of a batch of BATCH."""
    x, dy = normal(STEPS, BATCH, inputs), normal(STEPS, BATCH, units)
    y, dx = np.empty_like(dy), np.empty_like(x)
    tape = build._core.Tape(build.layers.chain.flat([cell], inputs), STEPS, BATCH)

    def call():
        tape.start()
        tape.run(0, STEPS, x, y)
        tape.dstate[...] = 0
        tape.backward(0, STEPS, dy, dx)

    return call, [y, dx, *tape.gradients[0].values()]


CALLS = {
    "a step": step,
    "200 frames": sequence,
    "64 streams": many,
    "64 streams, float16": lambda *call: many(*call, "float16"),
    "64 streams, int8": lambda *call: many(*call, "int8"),
    "training": training,
}


def main():
    """Print the table."""
    arguments, both = parsed(argparse.ArgumentParser(description=__doc__), "part of a line, as printed")
    builds = list(both.values())
    for kind, (inputs, units), (what, make) in (
        (kind, sizes, call) for kind in (lstm, gru) for sizes in SIZES for call in CALLS.items()
    ):
        line = f"{kind.__name__.upper()} {inputs}->{units}, {what}"
        if arguments.only not in line:
            continue
        calls, outputs = [], []
        for build in builds:
            frames.RNG = np.random.default_rng(0)
            call, arrays = make(build, kind(build, inputs, units), inputs, units)
            call()
            calls.append(call)
            outputs.append([array.tobytes() for array in arrays])
        if outputs[0] != outputs[1]:
            sys.exit(f"{line}: the builds have other bits")
        old, new = microseconds(calls, samples=31, seconds=1e-3)
        print(f"{old:9.2f} {new:9.2f} us {new / old:6.3f}  {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
