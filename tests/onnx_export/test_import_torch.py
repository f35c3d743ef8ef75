"""Random streaming modules of PyTorch, exported by both of its exporters at many opsets, read as files of strangers."""

import logging
import warnings

import numpy as np
import pytest
from graphs import imported

import onnx_export
from onnx_export.errors import NotImported

torch = pytest.importorskip("torch", reason="!!! SKIPPED: files of PyTorch's exporters, because torch is not installed")
pytest.importorskip("onnxscript", reason="!!! SKIPPED: files of PyTorch's exporters, because onnxscript is missing")
nn = torch.nn
MODELS, WANTED = 40, 36
OPSETS = {False: (11, 13, 15, 17, 18, 20), True: (18, 20, 21, 23)}
FUNCTIONS = (nn.Tanh, nn.Sigmoid, nn.ReLU, nn.ELU, nn.SiLU, nn.GELU, lambda: nn.GELU("tanh"), nn.Hardtanh, nn.SELU,
             nn.LeakyReLU, nn.Softplus, lambda: nn.Softmax(-1))  # fmt: skip


class Streaming(nn.Module):
    """A list of modules and taps: (module, None) or ("add" | "multiply" | "concat", the place of an earlier output).

    With `over_time` x is [frames, 1, inputs] and states are inside; otherwise x [1, inputs], states in and out.
    """

    def __init__(self, parts, over_time):
        super().__init__()
        self.steps = [(what, None) if isinstance(what, str) else (None, what) for what, _ in parts]
        self.places = [place for _, place in parts]
        self.modules_ = nn.ModuleList([what for what, _ in parts if not isinstance(what, str)])
        self.over_time = over_time

    def forward(self, x, *states):
        states, after, seen = list(states), [], [x]
        for (tap, module), place in zip(self.steps, self.places, strict=True):
            if tap == "add":
                x = x + seen[place]
            elif tap == "multiply":
                x = x * seen[place]
            elif tap == "concat":
                x = torch.cat([x, seen[place]], -1)
            elif isinstance(module, nn.RNNBase):
                given = tuple(states.pop(0) for _ in range(1 + isinstance(module, nn.LSTM))) if states else ()
                x, new = self._recurrent(module, x, given)
                after += new
            else:
                x = module(x)
            seen.append(x)
        return (x, *after)

    def _recurrent(self, module, x, given):
        if self.over_time:
            return module(x)[0], []
        y, new = module(x[None], given if len(given) > 1 else given[0])
        return y[0], list(new) if isinstance(new, tuple) else [new]


def random_module(rng):
    size, parts, sizes = int(rng.integers(3, 8)), [], []
    inputs = size
    sizes.append(size)
    for _ in range(int(rng.integers(2, 7))):
        kind, width = rng.integers(0, 9), int(rng.integers(2, 8))
        same = [i for i, other in enumerate(sizes[:-1]) if other == size]
        if kind < 2:
            parts.append((nn.Linear(size, width, bias=bool(rng.integers(0, 2))), None))
        elif kind == 2:
            parts.append((FUNCTIONS[rng.integers(0, len(FUNCTIONS))](), None))
        elif kind == 3:
            parts.append((nn.LayerNorm(size, eps=1e-4), None))
        elif kind < 7:
            of = (nn.LSTM, nn.GRU, nn.RNN)[kind - 4]
            parts.append((of(size, width, bias=bool(rng.integers(0, 4))), None))
        elif kind == 7 and same:
            parts.append((("add", "multiply")[rng.integers(0, 2)], int(rng.choice(same))))
        elif len(sizes) > 1:
            place = int(rng.integers(0, len(sizes) - 1))
            parts.append(("concat", place))
            width = size + sizes[place]
        else:
            continue
        size = width if kind < 2 or kind in (4, 5, 6) or parts[-1][0] == "concat" else size
        sizes.append(size)
    parts.append((nn.Linear(size, 3), None))  # no state is an output as well
    recurrent = any(isinstance(part, nn.RNNBase) for part, _ in parts)  # else a time axis is a batch
    return Streaming(parts, recurrent and bool(rng.integers(0, 2))).eval(), inputs


def exported(module, inputs, dynamo, opset, path):
    """The names of the states."""
    recurrent = [one for one in module.modules_ if isinstance(one, nn.RNNBase)]
    names = [
        f"{letter}{i}" for i, one in enumerate(recurrent) for letter in ("hc" if isinstance(one, nn.LSTM) else "h")
    ]
    zeros = [torch.zeros(1, 1, one.hidden_size) for one in recurrent for _ in range(1 + isinstance(one, nn.LSTM))]
    if module.over_time:
        names, zeros = [], []
    x = torch.zeros(6, 1, inputs) if module.over_time else torch.zeros(1, inputs)
    given = {"input_names": ["x", *names], "output_names": ["y", *(f"{name}_out" for name in names)]}
    given |= {"dynamo": True, "verbose": False} if dynamo else {"dynamo": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, (x, *zeros), path, opset_version=opset, **given)
    return {name: f"{name}_out" for name in names}


def expected(module, states, x):
    """The outputs over a sequence [frames, inputs], from states of zeros."""
    x = torch.from_numpy(x)
    with torch.no_grad():
        if module.over_time:
            return module(x[:, None])[0][:, 0].numpy()
        recurrent = [one for one in module.modules_ if isinstance(one, nn.RNNBase)]
        now = [torch.zeros(1, 1, one.hidden_size) for one in recurrent for _ in range(1 + isinstance(one, nn.LSTM))]
        ys = []
        for frame in x:
            y, *now = module(frame[None], *now)
            ys.append(y)
        return torch.cat(ys).numpy()


@pytest.mark.exhaustive
def test_random_modules(tmp_path):
    """The newer exporter writes nn.RNN out for the frames of its example: the few that are over time are refused."""
    loaded, refused = 0, []
    logging.disable(logging.WARNING)  # torchvision is not installed
    try:
        for seed in range(MODELS):
            torch.manual_seed(seed // 2)
            rng, dynamo = np.random.default_rng(seed // 2), bool(seed % 2)
            module, inputs = random_module(rng)
            path, opset = tmp_path / f"{seed}.onnx", int(rng.choice(OPSETS[dynamo]))
            states = exported(module, inputs, dynamo, opset, path)
            try:
                model = imported(path, check=False).model
            except NotImported as error:
                refused.append(f"{seed}, opset {opset}, {states}, {module}: {error}")
                continue
            x = rng.standard_normal((6 if module.over_time else 20, inputs)).astype(np.float32)
            comparison = model.check(x, expected(module, states, x))
            assert comparison.ok or comparison.judged < 2, (seed, module, model, comparison)
            loaded += 1
    finally:
        logging.disable(logging.NOTSET)
    assert loaded >= WANTED, "\n".join(refused)


def test_softplus_of_the_newer_exporter(tmp_path):
    """Where(x > 20, x, Softplus(x))."""
    module = Streaming([(nn.Linear(4, 4), None), (nn.Softplus(), None), (nn.Linear(4, 2), None)], over_time=False)
    logging.disable(logging.WARNING)
    try:
        exported(module, 4, True, 18, tmp_path / "m.onnx")
    finally:
        logging.disable(logging.NOTSET)
    model = onnx_export.load(tmp_path / "m.onnx")
    assert [layer.kind for layer in model.layers] == ["Linear", "Activation", "Linear"]
