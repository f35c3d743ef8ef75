"""`load` of files over an open number of frames [1, channels, T, positions]."""

import logging
import warnings

import numpy as np
import pytest
from graphs import imported

FRAMES, LENGTH = 2000, 9  # compared; of the example that is exported
CHANNELS, POSITIONS = 3, 8
SHAPE = (1, CHANNELS, LENGTH, POSITIONS)


@pytest.fixture(scope="module")
def torch():
    torch = pytest.importorskip("torch", reason="!!! SKIPPED: files of PyTorch, because torch is not installed")
    pytest.importorskip("onnxscript", reason="!!! SKIPPED: files of PyTorch, because onnxscript is missing")
    return torch


def exported(torch, path, module, dynamo, shape=SHAPE, axis=2):
    """Write a module with an open axis by one of PyTorch's exporters."""
    for norm in module.modules():
        if hasattr(norm, "running_var"):
            torch.nn.init.uniform_(norm.running_mean)
            torch.nn.init.uniform_(norm.running_var, 0.5, 2)
    given = {"input_names": ["x"], "output_names": ["y"], "dynamo": dynamo}
    given |= (
        {"dynamic_shapes": (({axis: torch.export.Dim("T", min=2, max=5000)},),), "verbose": False}
        if dynamo
        else {"dynamic_axes": {"x": {axis: "T"}, "y": {axis: "T"}}}
    )
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(module.eval(), (torch.randn(shape),), path, **given)
    finally:
        logging.disable(logging.NOTSET)
    return path


def of(torch, forward, **modules):
    """A module of others; `forward` takes it and x."""

    class Module(torch.nn.Module):
        def forward(self, *x):
            return forward(self, *x)

    made = Module()
    for name, module in modules.items():
        setattr(made, name, module)
    return made


def kinds(found):
    return [layer.kind for layer in found.model.layers]


def same(found, rng):
    """Whether the model computes what the file does over frames of which no two are alike, in scale and in mean."""
    size = found.model.input_size
    x = rng.standard_normal((FRAMES, size)) * (1 + np.arange(FRAMES)[:, None] % 7) + 0.3 * np.arange(size)
    x = x.astype(np.float32)
    return found.model.check(x, found.file.run(x)).ok


# ---------------------------------------------------------------------------------------------- convolutions


CONVOLUTIONS = {
    "pointwise": ({"kernel_size": 1}, ["Conv1d", "Activation"]),
    "along positions": ({"kernel_size": (1, 3), "padding": (0, 1)}, ["Conv1d", "Activation"]),
    "strided": ({"kernel_size": (1, 3), "stride": (1, 2)}, ["Conv1d", "Activation"]),
    "depthwise": ({"kernel_size": (1, 5), "groups": CHANNELS}, ["Conv1d", "Activation"]),
}


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_a_convolution_in_each_frame(case, dynamo, torch, tmp_path, rng):
    options, wanted = CONVOLUTIONS[case]
    module = of(torch, lambda m, x: torch.relu(m.c(x)), c=torch.nn.Conv2d(CHANNELS, 6, **options))
    found = imported(exported(torch, tmp_path / "m.onnx", module, dynamo))
    assert kinds(found) == wanted
    assert same(found, rng)


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("kernel", [(1, 3), (1, 4)], ids=str)
def test_a_transposed_convolution_in_each_frame(kernel, dynamo, torch, tmp_path, rng):
    layer = torch.nn.ConvTranspose2d(CHANNELS, 4, kernel, stride=(1, 2), padding=(0, 1))
    found = imported(exported(torch, tmp_path / "m.onnx", of(torch, lambda m, x: m.c(x).tanh(), c=layer), dynamo))
    assert kinds(found) == ["ConvTranspose1d", "Activation"]
    assert same(found, rng)


@pytest.mark.parametrize("dynamo", [False, True])
def test_a_recurrent_layer_behind_convolutions_of_each_frame(dynamo, torch, tmp_path, rng):
    """Two convolutions, batch norm and prelu, then a GRU over the frames."""

    def forward(m, x):
        x = m.act(m.norm(m.first(x)))
        return m.cell(torch.relu(m.second(x)).permute(0, 2, 1, 3).flatten(2))[0]

    module = of(
        torch, forward, first=torch.nn.Conv2d(CHANNELS, 4, (1, 3), padding=(0, 1)), norm=torch.nn.BatchNorm2d(4),
        act=torch.nn.PReLU(4), second=torch.nn.Conv2d(4, 2, 1), cell=torch.nn.GRU(2 * POSITIONS, 5, batch_first=True),
    )  # fmt: skip
    found = imported(exported(torch, tmp_path / "m.onnx", module, dynamo))
    assert kinds(found) == ["Conv1d", "Activation", "Conv1d", "Activation", "GRU"]
    assert found.time_axis == 2
    assert same(found, rng)


MIXING = {
    "centred over the frames": lambda m, x: m.c(x),
    "frames that are flipped": lambda m, x: m.p(x).flip(2),
    "the mean over the frames": lambda m, x: m.p(x) - x[:, :1].mean(2, keepdim=True),
    "the frame behind": lambda m, x: m.p(x[:, :, 1:]),
}


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("case", MIXING)
def test_what_mixes_frames_is_refused(case, dynamo, torch, tmp_path):
    layers = {"c": torch.nn.Conv2d(CHANNELS, 4, (3, 1), padding=(1, 0)), "p": torch.nn.Conv2d(CHANNELS, 4, 1)}
    path = exported(torch, tmp_path / "m.onnx", of(torch, MIXING[case], **layers), dynamo)
    with pytest.raises(ValueError, match=r"depends on several frames|computed from another frame|not every frame"):
        imported(path)
