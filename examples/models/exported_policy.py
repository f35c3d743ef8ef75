"""From a PyTorch policy to a model: export a recurrent actor as rsl_rl has it, load the file, compare.

The actor is an LSTM and linear layers with ELU, exported by torch.onnx.export with h and c as inputs and outputs, as
robots' deployment code wants it. `onnx_export.load` pairs the states by what the graph does with them, makes the layers
and proves them against the file. The weights are random.

    python examples/models/exported_policy.py [--out policy.onnx]
"""

import argparse
import warnings
from itertools import pairwise

import torch

import onnx_export

OBSERVATIONS, UNITS, ACTIONS = 48, 128, 12


class Policy(torch.nn.Module):
    """The actor of rsl_rl's recurrent policies: observations to actions."""

    def __init__(self):
        super().__init__()
        self.memory = torch.nn.LSTM(OBSERVATIONS, UNITS)
        sizes = [UNITS, 256, 128]
        layers = [part for a, b in pairwise(sizes) for part in (torch.nn.Linear(a, b), torch.nn.ELU())]
        self.actor = torch.nn.Sequential(*layers, torch.nn.Linear(sizes[-1], ACTIONS))

    def forward(self, observations, h, c):
        memory, (h, c) = self.memory(observations.unsqueeze(0), (h, c))
        return self.actor(memory.squeeze(0)), h, c


def exported(policy, path):
    """Write the ONNX file of one step."""
    arguments = torch.zeros(1, OBSERVATIONS), torch.zeros(1, 1, UNITS), torch.zeros(1, 1, UNITS)
    names = {"input_names": ["observations", "h_in", "c_in"], "output_names": ["actions", "h_out", "c_out"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own, of its age
        torch.onnx.export(policy.eval(), arguments, path, dynamo=False, opset_version=17, **names)


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Export a policy from PyTorch and load it.")
    parser.add_argument("--out", default="policy.onnx")
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    policy = Policy()
    exported(policy, given.out)
    model = onnx_export.load(given.out)
    frames = torch.randn(200, OBSERVATIONS)
    with torch.no_grad():
        memory, _ = policy.memory(frames)
        expected = policy.actor(memory).numpy()
    print(model)
    print(model.check(frames.numpy(), expected))


if __name__ == "__main__":
    main()
