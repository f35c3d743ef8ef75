"""Section 6.6: permutation invariant MNIST, layer norm against batch norm at mini-batches of 128 and of 4.

The network is the paper's, 784-1000-1000-10 with rectified linear units. Layer norm is on the two hidden layers, batch
norm on all three, as in the paper. Smaller than in the paper: the number of epochs.
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

UNITS, PIXELS, DIGITS = 1000, 784, 10
RATE = {128: 1e-3, 4: 2e-4}  # of Adam, the same for both norms


@cache
def images():
    """Training and test sets as tensors."""
    training, _, test = data.mnist()
    return [tuple(map(torch.from_numpy, part)) for part in (training, test)]


def network(norm: str) -> nn.Sequential:
    make = cnorm.torch.LayerNorm if norm == "layer norm" else cnorm.torch.BatchNorm
    layers = []
    for inputs, outputs in (PIXELS, UNITS), (UNITS, UNITS):
        layers += [nn.Linear(inputs, outputs, bias=False), make(outputs), nn.ReLU()]
    layers.append(nn.Linear(UNITS, DIGITS))
    if norm == "batch norm":
        layers.append(make(DIGITS))
    return nn.Sequential(*layers)


class Trainer(TorchTrainer):
    def __init__(self, variant: Variant, seed: int) -> None:
        torch.manual_seed(seed)
        self.norm = variant.name.partition(",")[0]
        self.batch = int(variant.name.rpartition(" ")[2])
        self.order, self.epoch = None, -1
        super().__init__(network(self.norm), seed, RATE[self.batch])

    def loss(self, n: int) -> Tensor:
        (x, digit), _ = images()
        epoch, place = divmod(n, len(x) // self.batch)
        if epoch != self.epoch:
            self.order, self.epoch = self.generator(epoch).permutation(len(x)), epoch
        rows = torch.from_numpy(self.order[place * self.batch :][: self.batch])
        return F.cross_entropy(self.network(x[rows]), digit[rows])

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        _, (x, digit) = images()
        self.network.eval()
        scores = self.network(x)
        return {
            "test_nll": F.cross_entropy(scores, digit).item(),
            "test_error": 100 * (scores.argmax(1) != digit).float().mean().item(),
        }


def model(trainer: Trainer) -> cnorm.Model:
    """The trained network with layer norm as a `cnorm.Model`."""
    layers = []
    for module in trainer.network:
        if isinstance(module, nn.Linear):
            layers.append(cnorm.Linear(module))
        elif isinstance(module, nn.ReLU):
            layers.append(cnorm.Activation("relu"))
        else:
            layers.append(layer_norm(module))
    return cnorm.Model(layers)


def check(trainer: Trainer, variant: Variant) -> None:
    """With layer norm the network runs as a Stream, one image at a time, and its ONNX file has parity."""
    if trainer.norm != "layer norm":
        return
    _, (x, _) = images()
    trainer.network.eval()
    check_model(model(trainer), x[:8], trainer.network(x[:8]))


EXPERIMENT = Experiment(
    name="mnist",
    title="6.6 Permutation invariant MNIST, 784-1000-1000-10",
    measures={"loss": "training NLL", "test_nll": "test NLL", "test_error": "test error (%)"},
    variants=[
        Variant(f"{norm}, batch {batch}", updates, every, f"mini-batches of {batch}")
        for batch, updates, every in ((128, 1950, 195), (4, 6000, 500))
        for norm in ("layer norm", "batch norm")
    ],
    trainer=Trainer,
    check=check,
    fetch=lambda: data.wheel(*data.MNIST),
)
