"""Layer-normalised cells as people write them in PyTorch, exported by both exporters: read and proven, or refused."""

import inspect
import logging
import os
import warnings

import numpy as np
import pytest
from graphs import imported

torch = pytest.importorskip("torch", reason="!!! SKIPPED: files of PyTorch's exporters, because torch is not installed")
pytest.importorskip("onnxscript", reason="!!! SKIPPED: files of PyTorch's exporters, because onnxscript is missing")
nn = torch.nn
INPUTS, UNITS = 5, 8
GATES = {
    "chunk": lambda z, count: z.chunk(count, 1),
    "split": lambda z, count: torch.split(z, UNITS, 1),
    "slices": lambda z, count: [z[:, at * UNITS : (at + 1) * UNITS] for at in range(count)],
}
UPDATES = {
    "keep": lambda z, h, n: (1 - z) * n + z * h,
    "lerp": lambda z, h, n: n + z * (h - n),
    "step": lambda z, h, n: h + (1 - z) * (n - h),
}


class Moments(nn.Module):
    """A layer norm that is written out."""

    def __init__(self, size, root):
        super().__init__()
        self.root, self.gain, self.bias = root, nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x):
        return (x - x.mean(-1, keepdim=True)) * self.root(x) * self.gain + self.bias


ROOTS = {
    "var": lambda x: 1 / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5),
    "rsqrt": lambda x: torch.rsqrt(((x - x.mean(-1, keepdim=True)) ** 2).mean(-1, keepdim=True) + 1e-5),
    "std": lambda x: 1 / (x.std(-1, keepdim=True) + 1e-5),
}


class LSTM(nn.Module):
    """Norms of the products of x and h (split), of their sum, or of that of h alone, of all gates or of each; of c."""

    def __init__(self, scope="split", gates="chunk", of_c="", each=False, norm=nn.LayerNorm):
        super().__init__()
        self.scope, self.gates, self.of_c = scope, GATES[gates], of_c
        self.of_x, self.of_h = nn.Linear(INPUTS, 4 * UNITS), nn.Linear(UNITS, 4 * UNITS)
        sizes = [UNITS] * 4 if each else [4 * UNITS]
        self.norm_x, self.norm_h = (nn.ModuleList(norm(size) for size in sizes) for _ in range(2))
        self.norm_c = nn.LayerNorm(UNITS)

    def normed(self, norms, z):
        return torch.cat([norm(part) for norm, part in zip(norms, z.chunk(len(norms), 1), strict=True)], 1)

    def forward(self, x, h, c):
        a, b = self.of_x(x), self.of_h(h)
        if self.scope == "sum":
            z = self.normed(self.norm_x, a + b)
        else:
            z = (self.normed(self.norm_x, a) if self.scope == "split" else a) + self.normed(self.norm_h, b)
        i, f, g, o = self.gates(z, 4)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        shown = self.norm_c(c) if self.of_c else c
        return torch.sigmoid(o) * torch.tanh(shown), shown if self.of_c == "carry" else c


class GRU(nn.Module):
    def __init__(self, gates="chunk", update="keep"):
        super().__init__()
        self.gates, self.update = GATES[gates], UPDATES[update]
        self.of_x, self.of_h = nn.Linear(INPUTS, 3 * UNITS), nn.Linear(UNITS, 3 * UNITS)
        self.norm_x, self.norm_h = nn.LayerNorm(3 * UNITS), nn.LayerNorm(3 * UNITS)

    def forward(self, x, h):
        xr, xz, xn = self.gates(self.norm_x(self.of_x(x)), 3)
        hr, hz, hn = self.gates(self.norm_h(self.of_h(h)), 3)
        return self.update(torch.sigmoid(xz + hz), h, torch.tanh(xn + torch.sigmoid(xr + hr) * hn))


class Dreamer(nn.Module):
    """One product and norm of x and h together, the reset gate on the whole candidate, -1 at the update gate."""

    def __init__(self):
        super().__init__()
        self.both, self.norm = nn.Linear(INPUTS + UNITS, 3 * UNITS, bias=False), nn.LayerNorm(3 * UNITS, eps=1e-3)

    def forward(self, x, h):
        r, n, z = self.norm(self.both(torch.cat([x, h], 1))).chunk(3, 1)
        z = torch.sigmoid(z - 1)
        return z * torch.tanh(torch.sigmoid(r) * n) + (1 - z) * h


class ResetBefore(GRU):
    """The reset gate before a product that is normed: no spec has it."""

    def __init__(self):
        super().__init__()
        self.of_rh, self.norm_rh = nn.Linear(UNITS, UNITS), nn.LayerNorm(UNITS)

    def forward(self, x, h):
        xr, xz, xn = self.gates(self.norm_x(self.of_x(x)), 3)
        hr, hz, _ = self.gates(self.norm_h(self.of_h(h)), 3)
        return self.update(
            torch.sigmoid(xz + hz), h, torch.tanh(xn + self.norm_rh(self.of_rh(torch.sigmoid(xr + hr) * h)))
        )


class RNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.of_x, self.of_h, self.norm = nn.Linear(INPUTS, UNITS), nn.Linear(UNITS, UNITS), nn.LayerNorm(UNITS)

    def forward(self, x, h):
        return torch.tanh(self.norm(self.of_x(x) + self.of_h(h)))


class Stack(nn.Module):
    """Two cells, a norm between them, and a head."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second, self.head = LSTM(), nn.LayerNorm(UNITS), GRU(), nn.Linear(UNITS, 3)
        self.second.of_x = nn.Linear(UNITS, 3 * UNITS)

    def forward(self, x, h, c, h2):
        h, c = self.first(x, h, c)
        h2 = self.second(self.norm(h), h2)
        return self.head(h2), h, c, h2


NONE_OF_THOSE = "none of those that a CellSpec describes"
# a module, and what its first cell's spec says of scope, grouping and cell_norm or reset, or why none has it
WRITTEN = {
    "split, chunked, c": (lambda: LSTM(of_c="output"), ("split", "joint", "output")),
    "split, split, c carried": (lambda: LSTM(gates="split", of_c="carry"), ("split", "joint", "carry")),
    "split, slices": (lambda: LSTM(gates="slices"), ("split", "joint", "none")),
    "split, each gate, c": (lambda: LSTM(each=True, of_c="output"), ("split", "per_gate", "output")),
    "sum, chunked": (lambda: LSTM("sum"), ("sum", "joint", "none")),
    "sum, each gate, slices, c": (
        lambda: LSTM("sum", "slices", each=True, of_c="output"),
        ("sum", "per_gate", "output"),
    ),
    "sum, variance": (lambda: LSTM("sum", norm=lambda n: Moments(n, ROOTS["var"])), ("sum", "joint", "none")),
    "sum, reciprocal root": (lambda: LSTM("sum", norm=lambda n: Moments(n, ROOTS["rsqrt"])), ("sum", "joint", "none")),
    "gru, chunked": (GRU, ("split", "joint", "after")),
    "gru, slices, lerp": (lambda: GRU("slices", "lerp"), ("split", "joint", "after")),
    "gru, split, step": (lambda: GRU("split", "step"), ("split", "joint", "after")),
    "gru of dreamer": (Dreamer, ("sum", "joint", "candidate")),
    "rnn": (RNN, ("sum", "joint", "none")),
    "stack": (Stack, ("split", "joint", "none")),
    "norm of h alone": (lambda: LSTM("h"), "the product of h is normalised and that of x is not"),
    "deviation of n - 1": (lambda: LSTM("sum", norm=lambda n: Moments(n, ROOTS["std"])), NONE_OF_THOSE),
    "reset before a norm": (ResetBefore, NONE_OF_THOSE),
}
# one exporter each, or both
CHOSEN = [
    pytest.param(name, dynamo, id=f"{name}-{'new' if dynamo else 'old'}")
    for at, name in enumerate(WRITTEN)
    for dynamo in (False, True)
    if dynamo == at % 2 or os.environ.get("CNORM_ALL_PRESETS")
]


def exported(module, dynamo, path):
    """The file, with the names of the states as the module has them, and their zeros."""
    names = list(inspect.signature(module.forward).parameters)
    zeros = [torch.zeros(1, UNITS) for _ in names[1:]]
    given = {"input_names": names, "output_names": [*["y"] * (len(names) == 4), *(f"{name}_out" for name in names[1:])]}
    given |= {"dynamo": True, "verbose": False} if dynamo else {"dynamo": False, "opset_version": 17}
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(module, (torch.ones(1, INPUTS), *zeros), path, **given)
    finally:
        logging.disable(logging.NOTSET)
    return zeros


@pytest.mark.exhaustive(one_in=5)
@pytest.mark.parametrize(("name", "dynamo"), CHOSEN)
def test_a_cell_written_in_pytorch(name, dynamo, tmp_path):
    torch.manual_seed(0)
    make, says = WRITTEN[name]
    module = make().eval().requires_grad_(False)
    for parameter in module.parameters():
        parameter += 0.2 * torch.randn(parameter.shape)
    zeros = exported(module, dynamo, tmp_path / "m.onnx")
    if isinstance(says, str):
        with pytest.raises(ValueError, match=says):
            imported(tmp_path / "m.onnx")
        return
    found = imported(tmp_path / "m.onnx")
    assert found.report.ok
    layer = found.model.layers[0]
    assert (layer.spec.scope, layer.spec.grouping) == says[:2]
    assert says[2] == (layer.spec.reset if layer.kind == "GRU" else layer.spec.cell_norm)
    x = torch.randn(1, INPUTS)
    result = module(x, *zeros)
    y = result[0] if isinstance(result, tuple) else result
    np.testing.assert_allclose(found.model.run(x.numpy()), y.numpy(), rtol=1e-4, atol=1e-5)
