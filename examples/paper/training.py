"""What the experiments share: a network with Adam that can be resumed, and the check of a trained model."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

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


def parameters(cell: cnorm.torch.LSTM) -> tuple[cnorm.torch.LSTM, dict[str, Tensor]]:
    """A cell for `lstm_step`."""
    return cell, dict(cell.named_parameters())


def lstm_step(cell: tuple, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """One step of an LSTM of `cnorm.torch` by PyTorch's operators: x [batch, inputs], h and c [batch, units].

    For networks that feed what a step gives into the next one's input: a call of the module runs a whole sequence, and
    prepares its weights each time. Presets "torch", "draw" (Eq. 29 to 31 of the paper) and "ba2016" (Eq. 20 to 22).
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
