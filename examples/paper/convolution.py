"""Section 6.7: a convolutional network on MNIST with layer norm, batch norm and no norm, mini-batches of 64.

The paper reports preliminary experiments without figures, so the network is ours: two 3x3 convolutions of 16 and 32
channels, each with 2x2 max pooling, norm and rectified linear units, and a linear layer. Layer norm has the statistics
of all channels and places of one image, batch norm those of one channel.
"""

from functools import cache

import data
import torch
from harness import Experiment, Variant
from torch import Tensor, nn
from torch.nn import functional as F
from training import TorchTrainer, check_model, layer_norm

import cnorm
import cnorm.torch

BATCH, CHANNELS, DIGITS = 64, (16, 32), 10


@cache
def images():
    """Training and test images [n, 1, 28, 28] with their digits."""
    training, _, test = data.mnist()
    return [(torch.from_numpy(x).view(-1, 1, 28, 28), torch.from_numpy(digit)) for x, digit in (training, test)]


class ImageNorm(cnorm.torch.LayerNorm):
    """Layer norm over the channels and places of an image."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1)).view_as(x)


def network(norm: str) -> nn.Sequential:
    layers, inputs, side = [], 1, 28
    for channels in CHANNELS:
        side //= 2
        made = {"layer norm": lambda n=channels * side**2: ImageNorm(n)}
        made |= {"batch norm": lambda n=channels: cnorm.torch.BatchNorm(n), "no norm": nn.Identity}
        layers += [nn.Conv2d(inputs, channels, 3, padding=1), nn.MaxPool2d(2), made[norm](), nn.ReLU()]
        inputs = channels
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(inputs * side**2, DIGITS))


class Trainer(TorchTrainer):
    def __init__(self, variant: Variant, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(network(variant.name), seed, rate=1e-3)

    def loss(self, n: int) -> Tensor:
        x, digit = images()[0]
        rows = torch.from_numpy(self.generator(n).choice(len(x), BATCH, replace=False))
        return F.cross_entropy(self.network(x[rows]), digit[rows])

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        x, digit = images()[1]
        self.network.eval()
        scores = torch.cat([self.network(part) for part in x.split(500)])
        error = 100 * (scores.argmax(1) != digit).float().mean().item()
        return {"test_nll": F.cross_entropy(scores, digit).item(), "test_error": error}


def check(trainer: Trainer, variant: Variant) -> None:
    """What follows the last convolution streams and exports with parity; a `cnorm.Model` has no convolutions."""
    if variant.name != "layer norm":
        return
    *convolutions, norm, _, _, output = trainer.network.eval()
    model = cnorm.Model([layer_norm(norm), cnorm.Activation("relu"), cnorm.Linear(output)])
    with torch.no_grad():
        x = images()[1][0][:8]
        check_model(model, nn.Sequential(*convolutions)(x).flatten(1), trainer.network(x))


EXPERIMENT = Experiment(
    name="convolution",
    title="6.7 Convolutional network on MNIST",
    measures={"loss": "training NLL", "test_nll": "test NLL", "test_error": "test error (%)"},
    variants=[Variant(name, 546, 78, "mini-batches of 64") for name in ("layer norm", "batch norm", "no norm")],
    trainer=Trainer,
    check=check,
    fetch=lambda: data.wheel(*data.MNIST),
)
