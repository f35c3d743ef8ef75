"""Time recurrent modules of `cnorm.torch` that train a step or a short sequence at a time, beside PyTorch.

Each module takes turns, call by call, with the same in PyTorch: an LSTM `ba2016` written with PyTorch's operators, or a
cell of torch.nn. Prints a Markdown table: microseconds of the fastest call, in brackets the median, and how many times
as long the other takes. It is the processor time of the thread, in which everything runs, so that others' load counts
less. A backward pass starts from the gradient of the last h, of a sequence from those of y, and leaves the gradients of
all weights. The first row is the floor: an `autograd.Function` that computes nothing, for as many weights as an LSTM
`ba2016` has, beside the step of such a cell.

    python benchmarks/torch_cells.py [INPUTS,UNITS ...]
"""

import sys
import time

import numpy as np
import torch

import cnorm
import cnorm.torch
import cnorm_bench as bench
from cnorm_bench.measure_training import NAMES, torch_step

SIZES, BATCHES, STEPS = ((12, 64), (64, 128), (128, 256)), (1, 16), 20
SECONDS = 1.5  # for each contender


class Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, *weights):
        ctx.weights = weights
        return torch.empty_like(h)

    @staticmethod
    def backward(ctx, dh):
        return (None, *[torch.empty_like(w) for w in ctx.weights])


def measured(calls):
    """Microseconds by name: the fastest call and the median."""
    times = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + SECONDS * len(calls)
    while time.perf_counter() < end:
        for name, call in calls.items():
            start = time.thread_time()
            call()
            times[name].append((time.thread_time() - start) * 1e6)
    return {name: (min(found), float(np.median(found))) for name, found in times.items()}


def contenders(inputs, units, batch):
    """Steps (x, state) -> (h, c) by name, and the parameters of each."""
    ours = cnorm.torch.LSTMCell(inputs, units, preset="ba2016")
    weights = [ours.get_parameter(name).detach().clone().requires_grad_() for name in NAMES]
    plain, theirs = cnorm.torch.LSTMCell(inputs, units, preset="torch"), torch.nn.LSTMCell(inputs, units)
    gru, their_gru = cnorm.torch.GRUCell(inputs, units, preset="torch"), torch.nn.GRUCell(inputs, units)
    return {
        "LSTMCell ba2016": (ours, list(ours.parameters())),
        "the same by operators": (lambda x, state: torch_step(x, *state, *weights), weights),
        "LSTMCell torch": (plain, list(plain.parameters())),
        "torch.nn.LSTMCell": (theirs, list(theirs.parameters())),
        "GRUCell torch": (lambda x, state: (gru(x, state[0]), None), list(gru.parameters())),
        "torch.nn.GRUCell": (lambda x, state: (their_gru(x, state[0]), None), list(their_gru.parameters())),
    }


def unrolled(step, weights, frames, state, gradient):
    """A call that takes these steps and, with a gradient, their backward pass."""

    def forward():
        last = state
        for x in frames:
            last = step(x, last)
        return last[0]

    def both():
        for w in weights:
            w.grad = None
        forward().backward(gradient)

    def alone():
        with torch.no_grad():
            forward()

    return alone if gradient is None else both


def row(what, times, other=None):
    fastest, median = times
    ratio = "" if other is None else f"{other[0] / fastest:.1f} ({other[1] / median:.1f})"
    print(f"| {what} | {fastest:.1f} ({median:.1f}) | {ratio} |", flush=True)


def cells(inputs, units, batch):
    state = torch.zeros(batch, units), torch.zeros(batch, units)
    gradient = torch.randn(batch, units)
    made = contenders(inputs, units, batch)
    names = list(made)
    for what, steps, dh in (
        ("a step without gradients", 1, None),
        ("a step, forward and backward", 1, gradient),
        (f"{STEPS} steps, forward and backward", STEPS, gradient),
    ):
        frames = list(torch.randn(steps, batch, inputs))
        for pair in zip(names[::2], names[1::2], strict=True):
            times = measured({name: unrolled(*made[name], frames, state, dh) for name in pair})
            row(f"{inputs} -> {units}, batch {batch}, {what}: {pair[0]}", *(times[name] for name in pair))


def sequences(inputs, units, batch):
    """`cnorm.torch.LSTM` beside the same by operators, over 1, 20 and 50 steps."""
    lstm = cnorm.torch.LSTM(inputs, units, preset="ba2016")
    parameters = list(lstm.parameters())
    weights = [lstm.get_parameter(name).detach().clone().requires_grad_() for name in NAMES]
    for steps in (1, STEPS, 50):
        frames, gradient = torch.randn(steps, batch, inputs), torch.randn(steps, batch, units)

        def ours(frames=frames, gradient=gradient):
            for w in parameters:
                w.grad = None
            lstm(frames)[0].backward(gradient)

        def theirs(frames=frames, gradient=gradient):
            for w in weights:
                w.grad = None
            h = c = torch.zeros(batch, units)
            outputs = []
            for x in frames:
                h, c = torch_step(x, h, c, *weights)
                outputs.append(h)
            torch.stack(outputs).backward(gradient)

        times = measured({"ours": ours, "theirs": theirs})
        row(f"{inputs} -> {units}, batch {batch}: LSTM ba2016 over {steps} steps", times["ours"], times["theirs"])


def floor():
    cell = cnorm.torch.LSTMCell(12, 64, preset="ba2016")
    weights = [torch.zeros_like(p, requires_grad=True) for p in cell.parameters()]
    state, gradient, frames = (torch.zeros(1, 64),) * 2, torch.zeros(1, 64), [torch.zeros(1, 12)]
    nothing = unrolled(lambda x, state: (Nothing.apply(state[0], *weights),), weights, frames, state, gradient)
    times = measured({"": nothing, "cell": unrolled(cell, list(cell.parameters()), frames, state, gradient)})
    row("an empty autograd.Function of 9 weights", times[""])


def main():
    bench.settle()
    torch.set_num_threads(1)
    sizes = [tuple(map(int, size.split(","))) for size in sys.argv[1:]] or SIZES
    print(f"cnorm {cnorm.__version__}, {cnorm.active_isa()}, PyTorch {torch.__version__}, one thread\n")
    print("| | us, fastest (median) | the other's time / ours |\n|---|---:|---:|")
    floor()
    for inputs, units in sizes:
        for batch in BATCHES:
            cells(inputs, units, batch)
            sequences(inputs, units, batch)


if __name__ == "__main__":
    main()
