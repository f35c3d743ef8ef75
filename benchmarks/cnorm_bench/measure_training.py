"""Times of forward and backward passes of a layer-normalised LSTM over 50 steps, one thread, cnorm and PyTorch."""

import os
import shutil
import time
from importlib import util

import numpy as np

import cnorm
from cnorm import _core
from cnorm.layers.chain import flat
from cnorm_bench.contenders.operations import random_model
from cnorm_bench.environment import surroundings

__all__ = ["NAMES", "TRAINING", "torch_step", "training", "training_tables"]

TRAINING = (12, 64), (64, 128), (128, 256), (512, 512)
STEPS, BATCHES = 50, (1, 32)


def training(sizes=None, *, seconds=1.0, advance=lambda description, total: None):
    """Time a forward and a backward pass over 50 steps, calls of all contenders interleaved.

    Parameters
    ----------
    sizes : sequence of (input, hidden), optional
    seconds : float
        For each contender, size and batch.
    advance : callable
        As in `norms`.

    Returns
    -------
    dict
        "records": one for each size, batch and contender, with the median in microseconds a step; "limits": three
        times the time of a `Linear` layer with the weights of one step: the forward products, the gradient of their
        inputs and the gradient of the weights have the same number of multiply-adds.
    """
    records, limits = [], []
    sizes = list(sizes or TRAINING)
    for inputs, hidden in sizes:
        for batch in BATCHES:
            advance(f"LSTM {inputs} -> {hidden}, batch {batch}", len(sizes) * len(BATCHES))
            shared = {"input": inputs, "hidden": hidden, "batch": batch}
            made = _contenders(inputs, hidden, batch)
            times = {label: [] for label in made}
            for call in made.values():  # torch.jit and torch.compile take up to a minute for it
                call()
            end = time.perf_counter() + seconds * len(made)
            while time.perf_counter() < end or len(times["cnorm"]) < 5:
                for label, call in made.items():
                    start = time.perf_counter()
                    call()
                    times[label].append((time.perf_counter() - start) / STEPS * 1e6)
            records += [shared | {"contender": label, "p50": float(np.median(t))} for label, t in times.items()]
            limits.append(shared | {"microseconds": _products(inputs, hidden, batch)})
    left_out = []
    if not util.find_spec("torch"):
        left_out.append("PyTorch is not installed: nothing to compare with.")
    elif not _compiler():
        left_out.append("torch.compile is left out: it needs a C++ compiler, g++ or the environment variable CXX.")
    document = {"format": 1, "kind": "training", "left_out": left_out} | surroundings()
    return document | {"records": records, "limits": limits}


def _products(inputs, hidden, batch):
    """Microseconds of the products of one step forward and backward, at the rate of a `Linear` layer."""
    weight = np.ones((4 * hidden, inputs + hidden), np.float32)
    model = cnorm.Model([cnorm.Linear(weight)])
    x = np.ones((max(batch, 1), inputs + hidden), np.float32)
    stream, times = model.stream(), []
    for _ in range(30):
        start = time.perf_counter()
        stream.process(x)
        times.append(time.perf_counter() - start)
    return 3e6 * min(times)


def _contenders(inputs, hidden, batch):
    """Calls by name, each one forward and one backward pass."""
    rng = np.random.default_rng(inputs + hidden)
    layer = random_model("LN-LSTM", rng, inputs, hidden).layers[0]
    x = rng.standard_normal((STEPS, batch, inputs), dtype=np.float32)
    dy = rng.standard_normal((STEPS, batch, hidden), dtype=np.float32)
    tape = _core.Tape(flat([layer], inputs), STEPS, batch)
    y, dx = np.empty_like(dy), np.empty_like(x)

    def own():
        tape.start()
        tape.run(0, STEPS, x, y)
        tape.dstate[...] = 0
        tape.backward(0, STEPS, dy, dx)

    made = {"cnorm": own}
    return made | (_torch_contenders(layer, x, dy) if util.find_spec("torch") else {})


def _compiler():
    """The C++ compiler that torch.compile would call, or None."""
    return shutil.which(os.environ.get("CXX", "g++"))


def _torch_contenders(layer, x, dy):
    import torch

    import cnorm.torch

    torch.set_num_threads(1)
    inputs, hidden = layer.input_size, layer.units
    frames, gradient = torch.from_numpy(x).requires_grad_(), torch.from_numpy(dy)
    ours = cnorm.torch.LSTM(inputs, hidden, preset="ba2016")
    with torch.no_grad():
        for name, p in ours.named_parameters():
            p.copy_(torch.from_numpy(layer.weights[name].copy()))
    weights = dict(ours.named_parameters())
    plain = torch.nn.LSTM(inputs, hidden)

    def unrolled(step):
        def call():
            h = c = torch.zeros(x.shape[1], hidden)
            outputs = []
            for t in range(len(x)):
                h, c = step(frames[t], h, c, *(weights[name] for name in NAMES))
                outputs.append(h)
            torch.stack(outputs).backward(gradient)

        return call

    calls = {
        "cnorm.torch": lambda: ours(frames)[0].backward(gradient),
        "PyTorch, eager": unrolled(torch_step),
        "PyTorch, torch.jit": unrolled(torch.jit.trace(torch_step, _example(frames, hidden, weights))),
    }
    if _compiler():
        torch.compiler.reset()  # otherwise a second shape makes it compile for any shape
        calls["PyTorch, torch.compile"] = unrolled(torch.compile(torch_step, dynamic=False))
    return calls | {"torch.nn.LSTM, not normalised": lambda: plain(frames)[0].backward(gradient)}


NAMES = ("weight_x", "weight_h", "bias", "gain_x", "bias_x", "gain_h", "bias_h", "gain_c", "bias_c")


def _example(frames, hidden, weights):
    state = frames.new_zeros(frames.shape[1], hidden)
    return frames.detach()[0], state, state, *(weights[name].detach() for name in NAMES)


def torch_step(x, h, c, *weights):
    """Eq. 20-22 of arXiv:1607.06450, written with PyTorch's operators."""
    import torch
    from torch.nn.functional import layer_norm

    weight_x, weight_h, bias, gain_x, bias_x, gain_h, bias_h, gain_c, bias_c = weights
    a = layer_norm(x @ weight_x.t(), bias.shape, gain_x, bias_x)
    a = a + layer_norm(h @ weight_h.t(), bias.shape, gain_h, bias_h) + bias
    f, i, o, g = a.chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(layer_norm(c, gain_c.shape, gain_c, bias_c)), c


def training_tables(console, document):
    """A row for each size and batch: microseconds a step of cnorm, and the ratio of each other time to it."""
    from rich.table import Table

    labels = list(dict.fromkeys(r["contender"] for r in document["records"]))
    table = Table(
        title=f"LN-LSTM, forward and backward over {STEPS} steps, microseconds a step; others in times cnorm's"
    )
    for column in ("", "batch", *labels, "products alone"):
        table.add_column(column, justify="right")
    for limit in document["limits"]:
        key = {name: limit[name] for name in ("input", "hidden", "batch")}
        found = {r["contender"]: r["p50"] for r in document["records"] if r.items() >= key.items()}
        own = found["cnorm"]
        cells = [f"{own:.1f}"] + [f"{found[label] / own:.1f}" for label in labels[1:]]
        table.add_row(
            f"{limit['input']} -> {limit['hidden']}", str(limit["batch"]), *cells, f"{limit['microseconds']:.1f}"
        )
    console.print(table)
