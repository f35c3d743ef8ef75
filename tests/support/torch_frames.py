"""Random causal networks of PyTorch over frames of [channels, positions], frame by frame or over an open time.

Blocks take x [1, channels, T, positions] and a `Past`, which holds what they keep of earlier frames: states given and
returned by the file, or zeros in front of the first frame.
"""

import torch
from torch import nn
from torch.nn import functional

FUNCTIONS = (nn.PReLU, nn.ELU, nn.ReLU, nn.LeakyReLU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Hardswish, nn.GELU, nn.Softplus)


class Past:
    """The states of one call in the order of their use; `given` None: the call has all frames, and begins at zeros."""

    def __init__(self, given=None):
        self.given, self.after, self.sizes = None if given is None else list(given), [], []

    def state(self, *size):
        """The next state [size]; None for a call of all frames."""
        self.sizes.append(size)
        return None if self.given is None else self.given.pop(0)

    def frames(self, x, count):
        """x with the `count` frames before it, [1, channels, count + T, positions]."""
        if count == 0:
            return x
        cache = self.state(x.shape[0], x.shape[1], count, x.shape[3])
        if cache is None:
            return functional.pad(x, (0, 0, count, 0))
        x = torch.cat([cache, x], 2)
        self.after.append(x[:, :, 1:])
        return x

    def cell(self, cell, x):
        """The outputs of a cell over x [T, rows, features]."""
        rows = x.shape[1]
        states = [self.state(1, rows, cell.hidden_size) for _ in range(1 + isinstance(cell, nn.LSTM))]
        if self.given is None:
            return cell(x)[0]
        y, new = cell(x, tuple(states) if len(states) > 1 else states[0])
        self.after += new if isinstance(new, tuple) else [new]
        return y


class Normed(nn.Module):
    """A norm of each frame, or of its rows or columns."""

    def __init__(self, rng, channels, positions):
        super().__init__()
        self.kind = int(rng.integers(0, 4))
        sizes = {1: (positions, channels), 2: (channels,), 3: (positions,)}
        self.norm = nn.LayerNorm(sizes[self.kind], eps=1e-5) if self.kind else nn.BatchNorm2d(channels)
        nn.init.uniform_(self.norm.weight, 0.5, 2), nn.init.normal_(self.norm.bias)
        if not self.kind:
            nn.init.uniform_(self.norm.running_mean), nn.init.uniform_(self.norm.running_var, 0.5, 2)

    def forward(self, x, past):
        if self.kind in (0, 3):
            return self.norm(x)
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Causal(nn.Module):
    """A convolution over time and positions, plain or transposed, in any number of groups, a norm and a function."""

    def __init__(self, rng, channels, positions, outputs=None):
        super().__init__()
        outputs, kernel = outputs or channels, (int(rng.integers(1, 4)), int(rng.choice([1, 3, 5])))
        dilation, groups = (int(rng.integers(1, 4)), 1), int(rng.choice([1, 2, channels]))
        self.transposed, self.before = bool(rng.integers(0, 4) == 0), (kernel[0] - 1) * dilation[0]
        groups = groups if outputs % groups == 0 else 1
        options = {"dilation": dilation, "groups": groups, "bias": bool(rng.integers(0, 3))}
        if self.transposed:
            self.conv = nn.ConvTranspose2d(channels, outputs, kernel, padding=(self.before, kernel[1] // 2), **options)
        else:
            self.conv = nn.Conv2d(channels, outputs, kernel, padding=(0, kernel[1] // 2), **options)
        self.norm = Normed(rng, outputs, positions)
        self.after = FUNCTIONS[rng.integers(0, len(FUNCTIONS))]()

    def forward(self, x, past):
        return self.after(self.norm(self.conv(past.frames(x, self.before)), past))


class Skip(nn.Module):
    """A convolution of stride 2 or a max pool, a block of the half, its transpose, and the input besides."""

    def __init__(self, rng, channels, positions, depth=0):
        super().__init__()
        kernel, self.added = int(rng.choice([3, 5])), bool(rng.integers(0, 2))
        inner, half = int(rng.choice([4, 6])), (positions + 1) // 2
        options = {"stride": (1, 2), "padding": (0, kernel // 2)}
        groups = int(rng.choice([1, 2]))
        self.down = nn.Conv2d(channels, inner, (1, kernel), groups=groups, **options)
        if rng.integers(0, 4) == 0:
            self.down = nn.Sequential(nn.Conv2d(channels, inner, 1), nn.MaxPool2d((1, 2), ceil_mode=True))
        kinds = [kind for kind in BLOCKS if kind is not Skip or depth == 0]
        self.middle = nn.ModuleList([kinds[rng.integers(0, len(kinds))](rng, inner, half)])
        self.up = nn.ConvTranspose2d(inner, channels, (1, kernel), groups=groups, **options)
        if positions % 2 == 0:
            self.up.output_padding = (0, 1)
        self.last = nn.Conv2d(channels * (2 - self.added), channels, 1)
        self.after = FUNCTIONS[rng.integers(0, len(FUNCTIONS))]()

    def forward(self, x, past):
        y = self.after(self.down(x))
        for block in self.middle:
            y = block(y, past)
        y = self.up(y)
        return self.last(x + y if self.added else torch.cat([x, y], 1))


class OverPositions(nn.Module):
    """A cell over the positions of each frame in one direction or both, a product, perhaps a norm, and the input."""

    def __init__(self, rng, channels, positions):
        super().__init__()
        units, both = int(rng.integers(2, 6)), bool(rng.integers(0, 2))
        kind = (nn.GRU, nn.LSTM, nn.RNN)[rng.integers(0, 3)]
        self.cell = kind(channels, units, batch_first=True, bidirectional=both)
        self.product = nn.Linear(units * (1 + both), channels)
        self.norm = Normed(rng, channels, positions) if rng.integers(0, 2) else None

    def forward(self, x, past):
        channels, positions = x.shape[1], x.shape[3]
        rows = x.permute(0, 2, 3, 1).reshape(-1, positions, channels)
        y = self.product(self.cell(rows)[0]).reshape(1, -1, positions, channels).permute(0, 3, 1, 2)
        return x + (y if self.norm is None else self.norm(y, past))


class PerPosition(nn.Module):
    """A cell over time for each position, a product, perhaps a norm, and the input."""

    def __init__(self, rng, channels, positions):
        super().__init__()
        self.cell = (nn.GRU, nn.LSTM, nn.RNN)[rng.integers(0, 3)](channels, int(rng.integers(2, 6)))
        self.product = nn.Linear(self.cell.hidden_size, channels)
        self.norm = Normed(rng, channels, positions) if rng.integers(0, 2) else None

    def forward(self, x, past):
        y = past.cell(self.cell, x[0].permute(1, 2, 0))  # [T, positions, channels]
        y = self.product(y).permute(2, 0, 1)[None]
        return x + (y if self.norm is None else self.norm(y, past))


class Grouped(nn.Module):
    """Two cells over time, each of half of the channels of every position, whose outputs alternate."""

    def __init__(self, rng, channels, positions):
        super().__init__()
        kind = (nn.GRU, nn.LSTM)[rng.integers(0, 2)]
        self.cells = nn.ModuleList([kind(channels // 2, channels // 2) for _ in range(2)])

    def forward(self, x, past):
        halves = x[0].permute(1, 2, 0).chunk(2, -1)
        ys = [past.cell(cell, half) for cell, half in zip(self.cells, halves, strict=True)]
        return torch.stack(ys, -1).flatten(-2).permute(2, 0, 1)[None]


class Whole(nn.Module):
    """A cell over time of the whole frame and a product, as a mask."""

    def __init__(self, rng, channels, positions):
        super().__init__()
        self.cell = (nn.GRU, nn.LSTM)[rng.integers(0, 2)](channels * positions, int(rng.integers(3, 9)))
        self.product = nn.Linear(self.cell.hidden_size, channels * positions)

    def forward(self, x, past):
        channels, positions = x.shape[1], x.shape[3]
        rows = x.permute(2, 0, 1, 3).flatten(2)  # [T, 1, channels * positions]
        mask = torch.sigmoid(self.product(past.cell(self.cell, rows)))
        return x * mask.reshape(1, -1, channels, positions).permute(0, 2, 1, 3)


class Gate(nn.Module):
    """Channels by a gate of their means or mean squares, of this frame alone or by a cell over time."""

    def __init__(self, rng, channels, positions):
        super().__init__()
        self.squared, self.cell = bool(rng.integers(0, 2)), None
        if rng.integers(0, 2):
            self.cell = nn.GRU(channels, 2 * channels)
        self.first = nn.Linear(channels * (1 + (self.cell is not None)), channels)
        self.second = nn.Linear(channels, channels)

    def forward(self, x, past):
        rows = (x * x if self.squared else x).mean(3).permute(2, 0, 1)  # [T, 1, channels]
        if self.cell is not None:
            rows = past.cell(self.cell, rows)
        return x * torch.sigmoid(self.second(torch.relu(self.first(rows)))).permute(1, 2, 0)[..., None]


class Glu(nn.Module):
    """Half of the outputs of a convolution, times the sigmoid of the others."""

    def __init__(self, rng, channels, positions):
        super().__init__()
        self.conv = nn.Conv2d(channels, 2 * channels, (1, 3), padding=(0, 1))

    def forward(self, x, past):
        a, b = self.conv(x).chunk(2, 1)
        return a * torch.sigmoid(b)


class Shuffle(nn.Module):
    """A block of half of the channels; the halves alternate behind it."""

    def __init__(self, rng, channels, positions):
        super().__init__()
        self.block = Causal(rng, channels // 2, positions)

    def forward(self, x, past):
        a, b = x.chunk(2, 1)
        return torch.stack([self.block(a, past), b], 2).flatten(1, 2)


class Bands(nn.Module):
    """Positions by a matrix to fewer, a block of these, and by another one back."""

    def __init__(self, rng, channels, positions):
        super().__init__()
        fewer = positions // 2
        self.there, self.back = nn.Linear(positions, fewer, bias=False), nn.Linear(fewer, positions, bias=False)
        self.block = Causal(rng, channels, fewer)

    def forward(self, x, past):
        return torch.cat([x[..., :2], self.back(self.block(self.there(x), past))[..., 2:]], -1)


class Neighbours(nn.Module):
    """The positions beside each as further channels, zeros at the ends, and a convolution of one position."""

    def __init__(self, rng, channels, positions):
        super().__init__()
        self.conv = nn.Conv2d(3 * channels, channels, 1)

    def forward(self, x, past):
        return torch.tanh(self.conv(torch.cat([functional.pad(x, (1, -1)), x, functional.pad(x, (-1, 1))], 1)))


BLOCKS = [Causal, Causal, Skip, Skip, OverPositions, PerPosition, Grouped, Whole, Gate, Glu, Shuffle, Bands, Neighbours]


class Network(nn.Module):
    """Random blocks between a convolution and one whose outputs are a mask of x or y itself, in several layouts.

    x is [1, 2, T, positions], [1, positions, T, 2] or [1, T, 2 * positions], and so is y.
    """

    def __init__(self, rng):
        super().__init__()
        self.channels, self.positions = int(rng.choice([4, 6])), int(rng.integers(7, 14))
        self.layout, self.masked = int(rng.integers(0, 3)), bool(rng.integers(0, 2))
        self.stacked = bool(rng.integers(0, 3) == 0)  # all states are one vector
        self.first = nn.Conv2d(2, self.channels, (1, 3), padding=(0, 1))
        kinds = [BLOCKS[i] for i in rng.integers(0, len(BLOCKS), int(rng.integers(1, 4)))]
        self.blocks = nn.ModuleList([kind(rng, self.channels, self.positions) for kind in kinds])
        self.last = nn.Conv2d(self.channels, 2, 1)

    def frames(self, count):
        """The shape of x of `count` frames."""
        n = self.positions
        return [(1, 2, count, n), (1, n, count, 2), (1, count, 2 * n)][self.layout]

    def time_axis(self):
        return 1 if self.layout == 2 else 2

    def states(self):
        """The shapes of the states."""
        past = Past()
        with torch.no_grad():
            self.of(torch.zeros(self.frames(1)), past)
        return past.sizes

    def has_cells(self):
        """Whether a cell runs over time."""
        return any(len(size) == 3 for size in self.states())

    def of(self, x, past):
        given = x
        if self.layout == 1:
            x = x.permute(0, 3, 2, 1)
        if self.layout == 2:
            x = x.reshape(1, -1, 2, self.positions).permute(0, 2, 1, 3)
        y = self.first(x)
        for block in self.blocks:
            y = block(y, past)
        y = torch.tanh(self.last(y))
        if self.layout == 1:
            y = y.permute(0, 3, 2, 1)
        if self.layout == 2:
            y = y.permute(0, 2, 1, 3).flatten(2)
        return given * y if self.masked else y

    def forward(self, x, *states):
        if not states:
            return self.of(x, Past())
        if self.stacked:
            sizes = self.sizes
            counts = [torch.Size(size).numel() for size in sizes]
            states = [part.reshape(size) for part, size in zip(states[0].split(counts, 1), sizes, strict=True)]
        past = Past(states)
        y = self.of(x, past)
        after = [torch.cat([one.reshape(1, -1) for one in past.after], 1)] if self.stacked else past.after
        return (y, *after)
