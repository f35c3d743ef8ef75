"""Section 6.5: handwriting from text, layer norm against none, mini-batches of 8.

The network of A. Graves, arXiv:1308.0850, section 5: the first LSTM moves a window over the text and sees it at the
next step, the second LSTM gives the parameters of a mixture of 20 bivariate Gaussians and of a Bernoulli variable for
the end of a stroke. Smaller than in the paper: 2 layers of 96 units, not 3 of 400, and the mixture depends on the last
layer alone. Pen strokes of a Hershey font with jitter, slant and speed drawn per line stand for the IAM database, which
only registered users get.
"""

from functools import cache
from pathlib import Path

import data
import numpy as np
import torch
from harness import Experiment, Variant
from torch import Tensor, nn
from torch.nn import functional as F
from training import TorchTrainer, check_model, unrolled
from writer import ALPHABET, MIXTURE, OUTPUTS, WEIGHTS, WINDOWS, Pen, Writer, one_hot

import cnorm
import cnorm.torch

UNITS, BATCH, LETTERS = 96, 8, (5, 9)
SCALE = 3.5  # of the font's units: about the length of one pen point


@cache
def font() -> dict:
    return data.hershey_font("scripts")


def strokes(text: str) -> list[np.ndarray]:
    """Pen strokes [points, 2] of a line of text, joined where a letter begins within 2 units of the last one's end."""
    found, x = [], 0
    for letter in text:
        left, right, parts = font()[letter]
        for part in parts:
            moved = part + np.array([x - left, 0.0])
            if found and np.linalg.norm(found[-1][-1] - moved[0]) <= 2:
                found[-1] = np.concatenate([found[-1], moved])
            else:
                found.append(moved)
        x += right - left
    return found


def pen_line(text: str, rng: np.random.Generator) -> np.ndarray:
    """A line as one hand writes it: [points, 3] with offsets and the end of a stroke.

    Speed (distance between points), slant, size and jitter are drawn once for the line.
    """
    speed, slant = rng.uniform(3.0, 4.0), rng.uniform(-0.1, 0.3)
    size, jitter = rng.uniform(0.9, 1.1), rng.uniform(0.1, 0.25)
    points, ends = [], []
    for stroke in strokes(text):
        along = np.concatenate([[0], np.cumsum(np.linalg.norm(np.diff(stroke, axis=0), axis=1))])
        count = max(2, round(along[-1] / speed) + 1)
        at = np.linspace(0, along[-1], count)
        points.append(np.stack([np.interp(at, along, stroke[:, i]) for i in (0, 1)], 1))
        ends.append(np.arange(count) == count - 1)
    xy = np.concatenate(points) * size
    xy[:, 0] -= slant * xy[:, 1]
    xy += jitter * rng.standard_normal(xy.shape)
    offsets = np.diff(xy, axis=0, prepend=np.zeros((1, 2))) / SCALE
    return np.column_stack([offsets, np.concatenate(ends)]).astype(np.float32)


def random_text(rng: np.random.Generator) -> str:
    """Letters at random, and spaces, none of them at an end."""
    letters = rng.integers(1, len(ALPHABET), rng.integers(LETTERS[0], LETTERS[1] + 1))
    letters[1:-1][rng.random(len(letters) - 2) < 0.1] = 0
    return "".join(ALPHABET[i] for i in letters)


def lines(rng: np.random.Generator, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pen points [steps + 1, count, 3] from [0, 0, 1] on, their mask [steps, count], texts [count, characters, 27]."""
    texts = [random_text(rng) for _ in range(count)]
    drawn = [pen_line(text, rng) for text in texts]
    steps, longest = max(map(len, drawn)), max(map(len, texts)) + 1
    points, mask = np.zeros((steps + 1, count, 3), np.float32), np.zeros((steps, count), np.float32)
    points[0, :, 2] = 1
    letters = np.zeros((count, longest, len(ALPHABET)), np.float32)
    for i, (text, line) in enumerate(zip(texts, drawn, strict=True)):
        points[1 : len(line) + 1, i], mask[: len(line), i] = line, 1
        letters[i, : len(text) + 1] = one_hot(text)
    return torch.from_numpy(points), torch.from_numpy(mask), torch.from_numpy(letters)


def mixture_nll(y: Tensor, points: Tensor) -> Tensor:
    """-log Pr(points | y), Graves Eq. 23 to 26: y [..., OUTPUTS], points [..., 3] -> [...]."""
    end, score = y[..., 0], y[..., 1 : 1 + MIXTURE]
    mean_x, mean_y, log_x, log_y, slope = y[..., 1 + MIXTURE :].chunk(5, -1)
    rho = torch.tanh(slope) * 0.999
    x, y = (points[..., :1] - mean_x) * torch.exp(-log_x), (points[..., 1:2] - mean_y) * torch.exp(-log_y)
    rest = 1 - rho * rho
    z = x * x + y * y - 2 * rho * x * y
    log_normal = -z / (2 * rest) - log_x - log_y - 0.5 * torch.log(rest) - float(np.log(2 * np.pi))
    log_point = torch.logsumexp(F.log_softmax(score, -1) + log_normal, -1)
    return F.binary_cross_entropy_with_logits(end, points[..., 2], reduction="none") - log_point


class Network(nn.Module):
    """Two LSTMs of `cnorm.torch`; the first is stepped, because a step sees the window of the step before."""

    def __init__(self, preset: str) -> None:
        super().__init__()
        inputs = 3 + len(ALPHABET)
        self.first = cnorm.torch.LSTMCell(inputs, UNITS, preset=preset)
        self.window = nn.Linear(UNITS, 3 * WINDOWS)
        self.second = cnorm.torch.LSTM(inputs + UNITS, UNITS, preset=preset)
        self.output = nn.Linear(UNITS, OUTPUTS)
        nn.init.normal_(self.window.weight, std=0.02)
        with torch.no_grad():  # at the start the window moves by one character in 14 points
            self.window.bias.copy_(torch.tensor([0.0, -1.0, float(np.log(1 / 14))]).repeat_interleave(WINDOWS))

    def forward(self, points: Tensor, text: Tensor) -> Tensor:
        """points [steps, batch, 3], text [batch, characters, 27] -> parameters of mixtures [steps, batch, OUTPUTS]."""
        batch = points.shape[1]
        state = None
        seen, position = points.new_zeros(batch, len(ALPHABET)), points.new_zeros(batch, WINDOWS, 1)
        places = torch.arange(text.shape[1], dtype=torch.float32)
        hidden, windows = [], []
        for point in points:
            state = h, _ = self.first(torch.cat([point, seen], -1), state)
            alpha, beta, advance = torch.exp(self.window(h)).unsqueeze(-1).chunk(3, 1)  # [batch, WINDOWS, 1] each
            position = position + advance
            phi = (alpha * torch.exp(-beta * (position - places) ** 2)).sum(1, keepdim=True)  # Graves Eq. 46
            seen = (phi @ text).squeeze(1)  # Eq. 47
            hidden.append(h)
            windows.append(seen)
        y, _ = self.second(torch.cat([points, torch.stack(windows), torch.stack(hidden)], -1))
        return self.output(y)

    def writer(self) -> Writer:
        """The network for `writer.py`, without PyTorch."""
        first, window = cnorm.Model(self.first.to_layers()), cnorm.Model([cnorm.Linear(self.window)])
        return Writer(first, window, cnorm.Model([*self.second.to_layers(), cnorm.Linear(self.output)]))


class Trainer(TorchTrainer):
    def __init__(self, variant: Variant, seed: int) -> None:
        torch.manual_seed(seed)
        preset = "ba2016" if variant.name == "layer norm" else "torch"
        super().__init__(Network(preset), seed, rate=2e-3, clip=5.0)

    def nll(self, points: Tensor, mask: Tensor, text: Tensor) -> Tensor:
        """Mean negative log likelihood of a pen point."""
        return (mixture_nll(self.network(points[:-1], text), points[1:]) * mask).sum() / mask.sum()

    def loss(self, n: int) -> Tensor:
        return self.nll(*lines(self.generator(n), BATCH))

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        return {"test_nll": self.nll(*lines(np.random.default_rng(10**6), 64)).item()}


def check(trainer: Trainer, variant: Variant) -> None:
    """The writer's streams give the mixtures of the network; both parts export with parity."""
    network = trainer.network.eval()
    points, _, text = lines(np.random.default_rng(7), 1)
    with torch.no_grad():
        expected = network(points[:12], text)[:, 0].numpy()
    writer = network.writer()
    letters = text[0, :-1].argmax(-1)
    pen = Pen(writer, "".join(ALPHABET[i] for i in letters))
    found = np.stack([pen.step(point) for point in points[:12, 0].numpy()])
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
    first, _, second = writer.models
    x = torch.from_numpy(np.random.default_rng(8).standard_normal((6, second.input_size), np.float32))
    check_model(first, x[:, : first.input_size], unrolled(network.first, x[:, : first.input_size]))
    check_model(second, x, network.output(network.second(x)[0]))


def picture(trainer: Trainer, path: Path) -> None:
    """Lines written live by weights rounded to int8, which are kept, one colour for each stroke."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    writer = trainer.network.writer().with_weights("int8")
    writer.save(WEIGHTS)
    texts = ("layer norm", "a quick brown fox", "jumps over", "the lazy dogs")
    figure, axes = plt.subplots(len(texts), 1, figsize=(8, 6), layout="constrained")
    for ax, text in zip(axes, texts, strict=True):
        points = np.array(list(writer.write(text, seed=3)))
        xy = np.cumsum(points[:, :2], axis=0)
        ends = np.flatnonzero(points[:, 2]) + 1
        for stroke in np.split(xy, ends):
            ax.plot(stroke[:, 0], -stroke[:, 1], lw=1.8, solid_capstyle="round")
        ax.set_aspect("equal")
        ax.axis("off")
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


EXPERIMENT = Experiment(
    name="handwriting",
    title="6.5 Handwriting from text",
    measures={"loss": "training NLL of a point", "test_nll": "test NLL of a point"},
    variants=[Variant(name, 1000, 125, "mini-batches of 8") for name in ("layer norm", "no norm")],
    trainer=Trainer,
    check=check,
    picture=picture,
    fetch=lambda: data.wheel(*data.HERSHEY),
)
