"""Random causal networks of PyTorch over frames of [channels, positions], by both exporters, T open or 1."""

import logging
import os
import warnings

import numpy as np
import pytest
from graphs import imported

from onnx_export.errors import NotImported

torch = pytest.importorskip("torch", reason="!!! SKIPPED: files of PyTorch's exporters, because torch is not installed")
pytest.importorskip("onnxscript", reason="!!! SKIPPED: files of PyTorch's exporters, because onnxscript is missing")

from torch_frames import Network  # noqa: E402  (it needs torch)

OPSETS = {False: (13, 15, 17, 20), True: (18, 20, 22, 23)}
NETWORKS, FRAMES = 40, 200
EVERY = 2 if os.environ.get("CNORM_ALL_NETWORKS") else 10


class OfAll(torch.nn.Module):
    """A network as a module of all frames alone."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        return self.network(x)


def exported(network, over_time, dynamo, opset, path):
    """Write a network; the names of its states."""
    names, shapes = [], []
    if not over_time:
        network.sizes = network.states()
        shapes = [(1, sum(torch.Size(size).numel() for size in network.sizes))] if network.stacked else network.sizes
        names = [f"state{i}" for i in range(len(shapes) if network.sizes else 0)]
    given = {"input_names": ["x", *names], "output_names": ["y", *(f"{name}_out" for name in names)]}
    given |= {"dynamo": True, "verbose": False} if dynamo else {"dynamo": False}
    axis = network.time_axis()
    if over_time and dynamo:
        given["dynamic_shapes"] = {"x": {axis: torch.export.Dim("T", min=2, max=4000)}}
    elif over_time:
        given["dynamic_axes"] = {"x": {axis: "T"}, "y": {axis: "T"}}
    x = torch.randn(network.frames(7 if over_time else 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        states = [torch.zeros(size) for size in shapes[: len(names)]]
        module = OfAll(network).eval() if over_time else network
        torch.onnx.export(module, (x, *states), path, opset_version=opset, **given)
    return {name: f"{name}_out" for name in names}


def expected(network, x):
    """The outputs [frames, outputs] of all frames x [frames, inputs] in one call."""
    axis = network.time_axis()
    shape = network.frames(1)
    with torch.no_grad():
        joined = torch.cat([torch.from_numpy(frame).reshape(shape) for frame in x], axis)
        y = network(joined)
        return torch.stack([one.ravel() for one in y.unbind(axis)]).numpy()


def network_of(seed):
    """A network, and the generator that made it."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    return Network(rng).eval(), rng


def read(seed, path):
    """A network, its frames, and the model of its file; a reason in the place of a model that is refused."""
    (network, rng), dynamo = network_of(seed), bool(seed % 2)
    opset = int(rng.choice(OPSETS[dynamo]))
    # the newer exporter (torch 2.13) may write the length of its example into what follows a cell
    over_time = bool(seed // 2 % 2) and not (dynamo and network.has_cells())
    states = exported(network, over_time, dynamo, opset, path)
    x = rng.standard_normal((FRAMES, 2 * network.positions)).astype(np.float32)
    try:
        return network, x, imported(path, check=False, states=states).model
    except NotImported as error:
        return network, x, f"{seed}, opset {opset}, {'open' if over_time else 'step'}, {network}: {error}"


@pytest.mark.parametrize("dynamo", [0, 1])
def test_random_networks(dynamo, tmp_path):
    """Every other file is one of the newer exporter, every other pair is over an open number of frames."""
    refused, seeds = [], range(dynamo, NETWORKS, EVERY)
    logging.disable(logging.WARNING)  # torchvision is not installed
    try:
        for seed in seeds:
            network, x, model = read(seed, tmp_path / f"{seed}.onnx")
            if isinstance(model, str):
                refused.append(model)
                continue
            comparison = model.check(x, expected(network, x))
            assert comparison.ok, (seed, network, model, comparison)
    finally:
        logging.disable(logging.NOTSET)
    assert len(refused) <= 0.15 * len(seeds), "\n".join(refused)
