"""Times of the cells at the sizes of the paper, beside PyTorch: prints a table, writes docs/paper/shapes.json.

    python examples/paper/shapes.py

One step at batch 1 is that of a `Stream`; PyTorch makes the same step of the same weights by its operators, without
gradients. A training step is the forward and the backward pass of `cnorm.torch` over 20 steps of 8 sequences; PyTorch's
is autograd through the same 20 steps. One thread each.
"""

import time
from pathlib import Path

import numpy as np
import torch
from harness import write_json
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F

import cnorm
import cnorm.torch

STEPS, BATCH, SECONDS = 20, 8, 0.35
# name, kind, inputs, units, preset, layers
SHAPES = (
    ("6.1 GRU", "GRU", 300, 1024, "ba2016", 1),
    ("6.2 LSTM", "LSTM", 240, 240, "ba2016", 1),
    ("LSTM of 256", "LSTM", 256, 256, "ba2016", 1),
    ("6.3 GRU", "GRU", 620, 2400, "ba2016", 1),
    ("6.4 DRAW's decoder", "LSTM", 100, 256, "draw", 1),
    ("6.5 handwriting", "LSTM", 60, 400, "ba2016", 3),
)


def parameters(cell: cnorm.torch.LSTM) -> tuple[cnorm.torch.LSTM, dict[str, Tensor]]:
    """A cell for `lstm_step`."""
    return cell, dict(cell.named_parameters())


def lstm_step(cell: tuple, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """One step of an LSTM of `cnorm.torch` by PyTorch's operators: x [batch, inputs], h and c [batch, units].

    Presets "torch", "draw" (Eq. 29 to 31 of the paper) and "ba2016" (Eq. 20 to 22).
    """
    module, p = cell
    name, units = module.spec.name, module.units
    if name == "torch":
        a = F.linear(x, p["weight_ih_l0"], p["bias_ih_l0"]) + F.linear(h, p["weight_hh_l0"], p["bias_hh_l0"])
        i, f, g, o = a.chunk(4, -1)
    elif name == "draw":
        f, i, o, g = (F.linear(x, p["weight_x"], p["bias"]) + F.linear(h, p["weight_h"])).chunk(4, -1)
    else:
        a = F.layer_norm(F.linear(h, p["weight_h"]), (4 * units,), p["gain_h"], p["bias_h"], module.eps)
        a = a + F.layer_norm(F.linear(x, p["weight_x"]), (4 * units,), p["gain_x"], p["bias_x"], module.eps)
        f, i, o, g = (a + p["bias"]).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    shown = c if name == "torch" else F.layer_norm(c, (units,), p["gain_c"], p["bias_c"], module.eps)
    return torch.sigmoid(o) * torch.tanh(shown), c


def gru_step(cell: tuple, x: Tensor, h: Tensor) -> Tensor:
    """One step of a GRU by PyTorch's operators: Eq. 26 to 28 of the paper, preset "ba2016"."""
    module, p = cell
    units, eps = module.units, module.eps
    a = F.layer_norm(F.linear(h, p["weight_h"]), (2 * units,), p["gain_h"], p["bias_h"], eps)
    a = a + F.layer_norm(F.linear(x, p["weight_x"]), (2 * units,), p["gain_x"], p["bias_x"], eps)
    z, r = torch.sigmoid(a).chunk(2, -1)
    new = r * F.layer_norm(F.linear(h, p["weight_hn"]), (units,), p["gain_hn"], p["bias_hn"], eps)
    new = new + F.layer_norm(F.linear(x, p["weight_xn"]), (units,), p["gain_xn"], p["bias_xn"], eps)
    return (1 - z) * h + z * torch.tanh(new)


class Stepper:
    """A stack of cells stepped by PyTorch's operators."""

    def __init__(self, cells: list[nn.Module], batch: int) -> None:
        self.cells = [parameters(cell) for cell in cells]
        zero = torch.zeros(batch, cells[0].units)
        self.states = [(zero,) if cell.kind == "GRU" else (zero, zero) for cell in cells]

    def step(self, x: Tensor) -> Tensor:
        for i, cell in enumerate(self.cells):
            state = self.states[i]
            self.states[i] = (gru_step(cell, x, *state),) if len(state) == 1 else lstm_step(cell, x, *state)
            x = self.states[i][0]
        return x


def stack(kind: str, inputs: int, units: int, preset: str, layers: int) -> list[nn.Module]:
    torch.manual_seed(0)
    make = getattr(cnorm.torch, kind)
    return [make(inputs if i == 0 else units, units, preset=preset) for i in range(layers)]


def alternating(*calls) -> list[float]:
    """Least seconds of each call, which take turns for SECONDS, three times at least."""
    times = [[] for _ in calls]
    until = time.perf_counter() + SECONDS * len(calls)
    while time.perf_counter() < until or len(times[0]) < 3:
        for call, found in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            found.append(time.perf_counter() - start)
    return [min(found) for found in times]


@torch.no_grad()
def step_times(cells: list[nn.Module]) -> list[float]:
    stream = cnorm.Model([layer for cell in cells for layer in cell.to_layers()]).stream()
    x = np.random.default_rng(0).standard_normal(cells[0].input_size, np.float32)
    stepper, given = Stepper(cells, 1), torch.from_numpy(x)[None]
    for _ in range(3):
        np.testing.assert_allclose(stream.step(x), stepper.step(given)[0].numpy(), rtol=1e-3, atol=1e-3)
    return alternating(lambda: stream.step(x), lambda: stepper.step(given))


def training_times(cells: list[nn.Module]) -> list[float]:
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((STEPS, BATCH, cells[0].input_size), np.float32))

    def forward_cnorm():
        y = x
        for cell in cells:
            y, _ = cell(y)
        return y

    def forward_torch():
        stepper = Stepper(cells, BATCH)
        return torch.stack([stepper.step(frame) for frame in x])

    def training(forward):
        for cell in cells:
            cell.zero_grad()
        forward().square().mean().backward()

    np.testing.assert_allclose(forward_cnorm()[:3].detach(), forward_torch()[:3].detach(), rtol=1e-3, atol=1e-3)
    return alternating(lambda: training(forward_cnorm), lambda: training(forward_torch))


def table(found: dict) -> list[str]:
    """Lines of a Markdown table: times of cnorm, and those of PyTorch as multiples of them."""
    lines = ["| cell | step, µs | PyTorch | training step, ms | PyTorch |", "|---|---|---|---|---|"]
    for name, row in found.items():
        _, inputs, units, preset, layers = row["shape"]
        (step, other), (training, torchs) = row["step_seconds"], row["training_seconds"]
        size = f"{inputs} -> {f'{layers} x ' if layers > 1 else ''}{units}"
        times = f"{step * 1e6:.1f} | {other / step:.1f}x | {training * 1e3:.1f} | {torchs / training:.1f}x"
        lines.append(f"| {name}, {size}, `{preset}` | {times} |")
    return lines


def main() -> None:
    torch.set_num_threads(1)
    found = {}
    for name, *shape in track(SHAPES, "shapes"):
        cells = stack(*shape)
        step, training = step_times(cells), training_times(cells)
        found[name] = {"shape": shape, "step_seconds": step, "training_seconds": training}
    write_json(Path(__file__).resolve().parents[2] / "docs" / "paper" / "shapes.json", found)
    print(*table(found), sep="\n")


if __name__ == "__main__":
    main()
