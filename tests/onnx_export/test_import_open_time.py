"""`load` of files over an open number of frames [1, channels, T, positions]."""

import logging
import warnings

import numpy as np
import pytest
from graphs import imported, kinds

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


@pytest.mark.exhaustive(one_in=6)
@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_a_convolution_in_each_frame(case, dynamo, torch, tmp_path, rng):
    options, wanted = CONVOLUTIONS[case]
    module = of(torch, lambda m, x: torch.relu(m.c(x)), c=torch.nn.Conv2d(CHANNELS, 6, **options))
    found = imported(exported(torch, tmp_path / "m.onnx", module, dynamo))
    assert kinds(found) == wanted
    assert same(found, rng)


@pytest.mark.exhaustive(one_in=2)
@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("kernel", [(1, 3), (1, 4)], ids=str)
def test_a_transposed_convolution_in_each_frame(kernel, dynamo, torch, tmp_path, rng):
    layer = torch.nn.ConvTranspose2d(CHANNELS, 4, kernel, stride=(1, 2), padding=(0, 1))
    found = imported(exported(torch, tmp_path / "m.onnx", of(torch, lambda m, x: m.c(x).tanh(), c=layer), dynamo))
    assert kinds(found) == ["ConvTranspose1d", "Activation"]
    assert same(found, rng)


@pytest.mark.exhaustive(one_in=2)
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


CAUSAL = {
    "dense": ({"kernel_size": (2, 3)}, (1, 1, 1, 0)),
    "dilated": ({"kernel_size": (3, 3), "dilation": (2, 1)}, (1, 1, 4, 0)),
    "depthwise": ({"kernel_size": (3, 3), "groups": CHANNELS}, (1, 1, 2, 0)),
}


@pytest.mark.parametrize("case", CAUSAL)
def test_a_convolution_over_frames_before_and_positions(case, torch, tmp_path, rng):
    """Zeros in front of the first frame and around the positions; batch norm, and a GRU behind it."""
    options, pads = CAUSAL[case]
    module = of(
        torch, lambda m, x: m.cell(torch.relu(m.norm(m.c(m.pad(x, pads)))).permute(0, 2, 1, 3).flatten(2))[0],
        c=torch.nn.Conv2d(CHANNELS, CHANNELS, **options), norm=torch.nn.BatchNorm2d(CHANNELS),
        cell=torch.nn.GRU(CHANNELS * POSITIONS, 5, batch_first=True),
    )  # fmt: skip
    module.pad = torch.nn.functional.pad
    found = imported(exported(torch, tmp_path / "m.onnx", module, False))
    assert kinds(found) == ["Delay", "Permute", "Conv1d", "Activation", "GRU"]
    assert same(found, rng)


@pytest.mark.exhaustive(one_in=2)
@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_convolutions_over_frames_in_a_row(residual, dynamo, torch, tmp_path, rng):
    """The newer exporter makes pads of the Conv of them, so that no other node says how far back it reaches."""

    def forward(m, x):
        y = torch.relu(m.first(m.pad(x, (1, 1, 1, 0))))
        z = m.second(m.pad(y, (0, 0, 4, 0)))
        return z + y if residual else z

    layers = {"first": torch.nn.Conv2d(CHANNELS, 4, (2, 3)), "second": torch.nn.Conv2d(4, 4, (3, 1), dilation=(2, 1))}
    module = of(torch, forward, **layers)
    module.pad = torch.nn.functional.pad
    found = imported(exported(torch, tmp_path / "m.onnx", module, dynamo))
    assert kinds(found).count("Delay") == 2
    assert same(found, rng)


def behind_a_norm(torch, pads):
    """Convolutions of each frame and over frames behind a layer norm of the frame, and a matrix of positions."""

    def forward(m, x):
        y = m.norm(m.first(x).transpose(1, 2)).transpose(1, 2)
        y = m.causal(m.pad(m.second(y), pads))
        return m.matrix(y.tanh())

    module = of(
        torch, forward, first=torch.nn.Conv2d(CHANNELS, 4, (1, 3), padding=(0, 1)),
        second=torch.nn.Conv2d(4, 4, (1, 5), padding=(0, 2)), causal=torch.nn.Conv2d(4, 4, (3, 3), padding=(0, 1)),
        norm=torch.nn.LayerNorm((4, POSITIONS)), matrix=torch.nn.Linear(POSITIONS, 5),
    )  # fmt: skip
    module.pad = torch.nn.functional.pad
    return module


@pytest.mark.parametrize("dynamo", [False, True])
def test_convolutions_behind_a_norm_of_each_frame(dynamo, torch, tmp_path, rng):
    """The norm's first operand is at the border, where a convolution reads zeros around the frame."""
    found = imported(exported(torch, tmp_path / "m.onnx", behind_a_norm(torch, (0, 0, 2, 0)), dynamo))
    assert {"Conv1d", "LayerNorm", "Delay", "PerPosition"} <= set(kinds(found))
    assert same(found, rng)


@pytest.mark.parametrize("dynamo", [False, True])
def test_a_convolution_with_the_frame_behind_after_a_norm_is_refused(dynamo, torch, tmp_path):
    path = exported(torch, tmp_path / "m.onnx", behind_a_norm(torch, (0, 0, 1, 1)), dynamo)
    with pytest.raises(ValueError, match=r"depends on several frames|computed from another frame"):
        imported(path)


IN_A_ROW = {
    "the second is centred": lambda m, x: m.second(m.pad(m.first(m.pad(x, (1, 1, 1, 0))).relu(), (0, 0, 2, 2))),
    "the second is ahead": lambda m, x: m.second(m.pad(m.first(m.pad(x, (1, 1, 1, 0))).relu(), (0, 0, 0, 4))),
    "the first is ahead": lambda m, x: m.second(m.pad(m.first(m.pad(x, (1, 1, 0, 1))).relu(), (0, 0, 4, 0))),
    "ones in front of the second": lambda m, x: m.second(m.pad(m.first(m.pad(x, (1, 1, 1, 0))), (0, 0, 4, 0), value=1)),
}


@pytest.mark.exhaustive(one_in=8)
@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("case", IN_A_ROW)
def test_what_is_like_convolutions_in_a_row_is_refused(case, dynamo, torch, tmp_path):
    layers = {"first": torch.nn.Conv2d(CHANNELS, 4, (2, 3)), "second": torch.nn.Conv2d(4, 4, (3, 1), dilation=(2, 1))}
    module = of(torch, IN_A_ROW[case], **layers)
    module.pad = torch.nn.functional.pad
    with pytest.raises(ValueError, match=r"depends on several frames|computed from another frame|not every frame"):
        imported(exported(torch, tmp_path / "m.onnx", module, dynamo))


def each_position(torch, kind, start=0.0, steps=True):
    """A cell over the frames for each position and a product; or one step of it from zeros for each frame."""

    def forward(m, x):
        rows = x[0].permute(1, 2, 0)  # [T, positions, channels]
        rows = m.cell(m.first(rows))[0]
        if not steps:
            rows = m.second(rows.reshape(1, -1, 5))[0].reshape(-1, POSITIONS, 5)
        elif start:
            rows = m.second(rows, m.start(start))[0]
        return m.last(rows).permute(2, 0, 1)[None]

    module = of(
        torch, forward, first=torch.nn.Linear(CHANNELS, 4), cell=getattr(torch.nn, kind)(4, 5),
        second=torch.nn.GRU(5, 5), last=torch.nn.Linear(5, 3),
    )  # fmt: skip
    module.start = lambda value: torch.full((1, POSITIONS, 5), value)
    return module


@pytest.mark.parametrize("kind", ["GRU", "LSTM", "RNN"])
def test_a_cell_over_the_frames_for_each_position(kind, torch, tmp_path, rng):
    """Of the older exporter: the file of the newer one runs over as many frames as its example alone."""
    found = imported(exported(torch, tmp_path / "m.onnx", each_position(torch, kind), False))
    assert kinds(found).count("PerPosition") == 3
    assert found.time_axis == 2
    assert same(found, rng)


NO_CELLS = {
    "one step for each frame": ({"steps": False}, "it reads 1 steps that are not the"),
    "another beginning": ({"start": 0.5}, "its initial h of 8 rows is not what an output gives back"),
}


@pytest.mark.exhaustive(one_in=2)
@pytest.mark.parametrize("case", NO_CELLS)
def test_what_is_like_a_cell_for_each_position_is_refused(case, torch, tmp_path):
    given, says = NO_CELLS[case]
    path = exported(torch, tmp_path / "m.onnx", each_position(torch, "GRU", **given), False)
    with pytest.raises(ValueError, match=says):
        imported(path)


ROWS = {
    "a layer norm of positions": (lambda m, x: m.positions(x), "LayerNorm", CHANNELS),
    "a layer norm of channels": (lambda m, x: m.channels(x.transpose(1, 3)).transpose(1, 3), "LayerNorm", POSITIONS),
    "a softmax of positions": (lambda m, x: x.softmax(3), "Activation", CHANNELS),
    "a softmax of channels": (lambda m, x: x.softmax(1), "Activation", POSITIONS),
    "a softmax before a linear layer": (lambda m, x: m.linear(x.softmax(3)), "Activation", CHANNELS),
    "a layer norm before a GRU": (
        lambda m, x: m.cell(m.positions(x).permute(0, 2, 1, 3).flatten(2))[0], "LayerNorm", CHANNELS,
    ),
    "a max pool": (lambda m, x: m.pool(x), "MaxPool1d", 1),
    "a max pool behind a convolution": (lambda m, x: m.pool(m.c(x)), "MaxPool1d", 1),
    "a max pool that overlaps": (lambda m, x: m.overlap(m.c(x)).tanh(), "MaxPool1d", 1),
    "the largest position": (lambda m, x: m.c(x).amax(3).tanh(), "MaxPool1d", 1),
}  # fmt: skip


def of_rows(torch, forward):
    return of(
        torch, forward, positions=torch.nn.LayerNorm(POSITIONS), channels=torch.nn.LayerNorm(CHANNELS),
        linear=torch.nn.Linear(POSITIONS, 5), cell=torch.nn.GRU(CHANNELS * POSITIONS, 5, batch_first=True),
        pool=torch.nn.MaxPool2d((1, 2)), overlap=torch.nn.MaxPool2d((1, 3), (1, 2), (0, 1)),
        c=torch.nn.Conv2d(CHANNELS, 4, 1),
    )  # fmt: skip


@pytest.mark.exhaustive(one_in=12)
@pytest.mark.parametrize("case", ROWS)
def test_parts_of_each_frame(case, torch, tmp_path, rng):
    forward, kind, count = ROWS[case]
    module = of_rows(torch, forward)
    for norm in (module.positions, module.channels):
        torch.nn.init.uniform_(norm.weight)
        torch.nn.init.uniform_(norm.bias)
    found = imported(exported(torch, tmp_path / "m.onnx", module, "linear" in case))
    assert kinds(found).count(kind) == count
    assert same(found, rng)


MIXING = {
    "a softmax of the frames": lambda m, x: m.p(x).softmax(2),
    "the largest of three frames": lambda m, x: m.p(m.largest(x)),
    "the largest frame": lambda m, x: m.p(x) - x[:, :1].amax(2, keepdim=True),
    "centred over the frames": lambda m, x: m.c(x),
    "frames that are flipped": lambda m, x: m.p(x).flip(2),
    "the mean over the frames": lambda m, x: m.p(x) - x[:, :1].mean(2, keepdim=True),
    "the frame behind": lambda m, x: m.p(x[:, :, 1:]),
}


@pytest.mark.exhaustive(one_in=20)
@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("case", MIXING)
def test_what_mixes_frames_is_refused(case, dynamo, torch, tmp_path):
    layers = {"c": torch.nn.Conv2d(CHANNELS, 4, (3, 1), padding=(1, 0)), "p": torch.nn.Conv2d(CHANNELS, 4, 1)}
    layers["largest"] = torch.nn.MaxPool2d((3, 1), 1, (1, 0))
    path = exported(torch, tmp_path / "m.onnx", of(torch, MIXING[case], **layers), dynamo)
    with pytest.raises(ValueError, match=r"depends on several frames|computed from another frame|not every frame"):
        imported(path)


# ---------------------------------------------------------------------------------------------- delays


def before(x, by=1):
    """x [1, T, n] of some frames before, zeros at first."""
    from torch.nn.functional import pad

    return pad(x, (0, 0, by, 0))[:, :-by]


BESIDE = "beside the frame, before a GRU"
DELAYED = {
    "a sum": lambda m, x: m.l(x + before(x)),
    "a product": lambda m, x: m.l(x * before(x, 3)),
    "zeros by Concat": lambda m, x: m.l(x + m.cat([m.zeros(x[:, :1]), x[:, :-1]], 1)),
    "a difference beside it": lambda m, x: m.l(x) * m.l(x - before(x)),
    "a sum of linear layers with a bias": lambda m, x: (m.l(x) + before(m.l(x))).relu(),
    "a sigmoid of zeros": lambda m, x: m.l(x * before(x).sigmoid()),
    "several": lambda m, x: m.l(x + before(x) + before(x, 2) * before(x, 3)),
    "one far back": lambda m, x: m.l(x + before(x) + before(x, 100)),
    "alone": lambda m, x: before(x, 2),
    BESIDE: lambda m, x: m.r(m.cat([x, before(x, 70)], 2))[0],
    "a delay of a delay": lambda m, x: m.l(before((x + before(x)).tanh(), 2) + x),
    "before a GRU": lambda m, x: m.r(x + 0.5 * before(x))[0],
    "behind a GRU": lambda m, x: (lambda h: h - before(h))(m.r(x)[0]),
    "a mix for each of two branches": lambda m, x: (
        m.l(0.6 * x + 0.4 * before(x)).sigmoid() * m.l(0.3 * x + 0.7 * before(x)).relu()
    ),
}


def layers_of(torch, forward):
    units = 5
    cell = torch.nn.GRU((1 + (forward is DELAYED[BESIDE])) * CHANNELS, units, batch_first=True)
    module = of(torch, forward, l=torch.nn.Linear(CHANNELS, units), r=cell)
    module.cat, module.zeros = torch.cat, torch.zeros_like
    return module


@pytest.mark.exhaustive(one_in=2)
@pytest.mark.parametrize("case", DELAYED)
def test_frames_before_are_a_delay(case, torch, tmp_path, rng):
    dynamo = case in ("a sum", "before a GRU", "several", "alone")
    module, length = layers_of(torch, DELAYED[case]), {"one far back": 110, BESIDE: 80}.get(case, LENGTH)
    found = imported(exported(torch, tmp_path / "m.onnx", module, dynamo, (1, length, CHANNELS), 1))
    assert "Delay" in kinds(found)
    assert found.time_axis == 1
    assert same(found, rng)


LIKE_DELAYS = {
    "the frame behind": lambda m, x: m.l(x + m.pad(x, (0, 0, 0, 1))[:, 1:]),
    "ones in front": lambda m, x: m.l(x + m.pad(x, (0, 0, 1, 0), value=1.0)[:, :-1]),
    "the first frame in front": lambda m, x: m.l(x + m.cat([x[:, :1], x[:, :-1]], 1)),
    "the last frame in front": lambda m, x: m.l(x + m.cat([x[:, -1:], x[:, :-1]], 1)),
    "a flip": lambda m, x: m.l(x + x.flip(1)),
    "the first frame": lambda m, x: m.l(x + before(x) + x[:, :1]),
    "the last frame": lambda m, x: m.l(x + before(x) * x[:, -1:]),
    "the mean": lambda m, x: m.l(x + before(x) - x.mean(1, keepdim=True)),
    "a softmax over the frames": lambda m, x: m.l((x + before(x)).softmax(1)),
    "a first frame of its own": lambda m, x: m.l(m.cat([2 * x[:, :1], x[:, 1:]], 1) + before(x)),
    "a delay that is doubled at first": lambda m, x: m.l(x + m.cat([before(x)[:, :2], 2 * before(x)[:, 2:]], 1)),
    "fewer frames": lambda m, x: m.l(x[:, 1:] + x[:, :-1]),
    "a GRU of the frame behind": lambda m, x: m.r(x + m.pad(x, (0, 0, 0, 1))[:, 1:])[0],
    "as many frames as there are": lambda m, x: m.l(x + before(x)) / x.shape[1],
}


@pytest.mark.parametrize("case", LIKE_DELAYS)
@pytest.mark.exhaustive(one_in=3)
def test_what_is_like_a_delay_is_refused(case, torch, tmp_path):
    module = layers_of(torch, LIKE_DELAYS[case])
    module.pad = torch.nn.functional.pad
    path = exported(torch, tmp_path / "m.onnx", module, False, (1, LENGTH, CHANNELS), 1)
    with pytest.raises(ValueError, match=r"several frames|another frame|number of the frames|in one call the layers"):
        imported(path)
