"""What the experiments share: a network with Adam that can be resumed, and the check of a trained model."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import cnorm
import cnorm.torch
import onnx_export


class TorchTrainer:
    """A `harness.Trainer` of one PyTorch network; a subclass has `loss` and `measure`."""

    def __init__(self, network: nn.Module, seed: int, rate: float, clip: float | None = None) -> None:
        self.network, self.seed, self.clip = network, seed, clip
        self.adam = torch.optim.Adam(network.parameters(), lr=rate)

    def loss(self, n: int) -> Tensor:
        """The loss of the n-th mini-batch, which must depend on the seed and n alone."""
        raise NotImplementedError

    def generator(self, n: int) -> np.random.Generator:
        """Random numbers of the n-th mini-batch."""
        return np.random.default_rng((self.seed, n))

    def update(self, n: int) -> float:
        self.network.train()
        loss = self.loss(n)
        self.adam.zero_grad()
        loss.backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.network.parameters(), self.clip)
        self.adam.step()
        return loss.item()

    def save(self, path: Path) -> None:
        torch.save({"network": self.network.state_dict(), "adam": self.adam.state_dict()}, path)

    def load(self, path: Path) -> None:
        saved = torch.load(path, weights_only=True)
        self.network.load_state_dict(saved["network"])
        self.adam.load_state_dict(saved["adam"])


def unrolled(cell: cnorm.torch.LSTMCell, x: Tensor) -> Tensor:
    """h of each step of a cell over x [steps, inputs], from the initial state."""
    state, found = None, []
    for frame in x:
        state = cell(frame, state)
        found.append(state[0])
    return torch.stack(found)


def layer_norm(module: cnorm.torch.LayerNorm) -> cnorm.LayerNorm:
    """The module as a layer of a `cnorm.Model`."""
    return cnorm.LayerNorm(module.weight.detach().numpy(), module.bias.detach().numpy(), eps=module.eps)


def check_model(model: cnorm.Model, x: Tensor, expected: Tensor) -> None:
    """Raise AssertionError unless a Stream of the model gives the expected outputs and its ONNX file has parity.

    Parameters
    ----------
    x : Tensor [frames, inputs]
    expected : Tensor [frames, outputs]
        Of the network in PyTorch. Normalised recurrences amplify differences, so few frames are compared.
    """
    found = model.stream().process(x.detach().numpy())
    np.testing.assert_allclose(found, expected.detach().numpy(), rtol=1e-3, atol=1e-3)
    report = onnx_export.check_parity(model, onnx_export.export(model))
    assert report.ok, report
