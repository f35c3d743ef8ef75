"""Random streaming modules of PyTorch over frames of [channels, positions], exported by both of its exporters."""

import logging
import warnings

import numpy as np
import pytest
from graphs import imported

from onnx_export.errors import NotImported

torch = pytest.importorskip("torch", reason="!!! SKIPPED: files of PyTorch's exporters, because torch is not installed")
pytest.importorskip("onnxscript", reason="!!! SKIPPED: files of PyTorch's exporters, because onnxscript is missing")
nn = torch.nn
OPSETS = {False: (13, 16, 17, 20), True: (18, 20, 23)}
MODELS = 6
CHANNELS, POSITIONS = 4, 9
FRAME = (1, CHANNELS, 1, POSITIONS)


class Block(nn.Module):
    """Frames [1, channels, 1, positions] to frames of the same size; `states` has the sizes of its states."""

    states: tuple[tuple[int, ...], ...] = ()


class Causal(Block):
    """A convolution over time and positions behind a cache of frames, a batch norm and PReLU."""

    def __init__(self, rng):
        super().__init__()
        taps, dilation = int(rng.integers(2, 4)), int(rng.integers(1, 4))
        groups = int(rng.choice([1, 2, CHANNELS]))
        options = {"dilation": (dilation, 1), "padding": (0, 1), "groups": groups}
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, (taps, 3), **options)
        self.norm, self.after = nn.BatchNorm2d(CHANNELS), nn.PReLU(int(rng.choice([1, CHANNELS])))
        nn.init.uniform_(self.norm.running_mean), nn.init.uniform_(self.norm.running_var, 0.5, 2)
        self.states = ((1, CHANNELS, (taps - 1) * dilation, POSITIONS),)

    def forward(self, x, cache):
        frames = torch.cat([cache, x], 2)
        return self.after(self.norm(self.conv(frames))), frames[:, :, 1:]


class Unet(Block):
    """A convolution of stride 2, one of the half, its transpose, and a skip over them."""

    def __init__(self, rng):
        super().__init__()
        self.down = nn.Conv2d(CHANNELS, 6, (1, 3), stride=(1, 2), padding=(0, 1), groups=int(rng.choice([1, 2])))
        self.middle = nn.Conv2d(6, 6, 1)
        self.up = nn.ConvTranspose2d(6, CHANNELS, (1, 3), stride=(1, 2), padding=(0, 1), groups=int(rng.choice([1, 2])))

    def forward(self, x):
        return (x + torch.tanh(self.up(torch.relu(self.middle(torch.relu(self.down(x)))))),)


class Over(Block):
    """A cell over the positions, a product, a layer norm of the frame, and x."""

    def __init__(self, rng):
        super().__init__()
        both = bool(rng.integers(0, 2))
        self.cell = (nn.GRU, nn.LSTM)[rng.integers(0, 2)](CHANNELS, 5, batch_first=True, bidirectional=both)
        self.product, self.norm = nn.Linear(5 * (1 + both), CHANNELS), nn.LayerNorm((POSITIONS, CHANNELS), eps=1e-6)

    def forward(self, x):
        rows = x[:, :, 0].transpose(1, 2)
        return (x + self.norm(self.product(self.cell(rows)[0])).transpose(1, 2)[:, :, None],)


class Per(Block):
    """A cell for each position, with a state each, a product, and x."""

    states = ((1, POSITIONS, 3),)

    def __init__(self, rng):
        super().__init__()
        self.cell, self.product = nn.GRU(CHANNELS, 3), nn.Linear(3, CHANNELS)

    def forward(self, x, h):
        y, h = self.cell(x[:, :, 0].permute(0, 2, 1), h)
        return x + self.product(y).permute(0, 2, 1)[:, :, None], h


class Gate(Block):
    """Channels by a gate of their means."""

    def __init__(self, rng):
        super().__init__()
        self.product = nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x):
        return (x * torch.sigmoid(self.product(x.mean((2, 3))))[:, :, None, None],)


class Shuffle(Block):
    """Half of the channels is computed, and the two halves alternate."""

    def __init__(self, rng):
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS // 2, CHANNELS // 2, (1, 3), padding=(0, 1))

    def forward(self, x):
        a, b = x.chunk(2, 1)
        return (torch.stack([torch.tanh(self.conv(a)), b], 2).reshape(FRAME),)


class Net(nn.Module):
    def __init__(self, rng):
        super().__init__()
        kinds = [Causal, *rng.choice([Causal, Unet, Over, Per, Gate, Shuffle], int(rng.integers(1, 4)))]
        self.blocks = nn.ModuleList([kind(rng) for kind in kinds])
        self.states = [size for block in self.blocks for size in block.states]

    def forward(self, x, *states):
        states, after = list(states), []
        for block in self.blocks:
            x, *new = block(x, *(states.pop(0) for _ in block.states))
            after += new
        return (torch.tanh(x), *after)


def expected(module, x):
    """The outputs over frames [n, inputs], from states of zeros."""
    now, ys = [torch.zeros(size) for size in module.states], []
    with torch.no_grad():
        for frame in torch.from_numpy(x):
            y, *now = module(frame.reshape(FRAME), *now)
            ys.append(y.ravel())
    return torch.stack(ys).numpy()


def read(seed, path):
    """A module, its frames and the model of its file; a reason in the place of a model that is refused."""
    torch.manual_seed(seed)
    rng, dynamo = np.random.default_rng(seed), bool(seed % 2)
    module, opset = Net(rng).eval(), int(rng.choice(OPSETS[dynamo]))
    names = [f"state{i}" for i in range(len(module.states))]
    given = {"input_names": ["x", *names], "output_names": ["y", *(f"{name}_out" for name in names)]}
    given |= {"dynamo": True, "verbose": False} if dynamo else {"dynamo": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        states = [torch.zeros(size) for size in module.states]
        torch.onnx.export(module, (torch.zeros(FRAME), *states), path, opset_version=opset, **given)
    x = rng.standard_normal((20, CHANNELS * POSITIONS)).astype(np.float32)
    try:
        return module, x, imported(path, check=False, states={name: f"{name}_out" for name in names}).model
    except NotImported as error:
        return module, x, f"{seed}, opset {opset}, {module}: {error}"


@pytest.mark.parametrize("first", [0, 1])
def test_random_modules_over_frames(first, tmp_path):
    """Every other file is one of the newer exporter."""
    refused = []
    logging.disable(logging.WARNING)  # torchvision is not installed
    try:
        for seed in range(first, MODELS, 2):
            module, x, model = read(seed, tmp_path / f"{seed}.onnx")
            if isinstance(model, str):
                refused.append(model)
                continue
            comparison = model.check(x, expected(module, x))
            assert comparison.ok, (seed, module, model, comparison)
    finally:
        logging.disable(logging.NOTSET)
    assert len(refused) <= 0.15 * MODELS / 2, "\n".join(refused)
