"""`cnorm.torch` in the place of torch.nn: arguments, names, state dicts, and PyTorch's own module samples.

The samples are those of torch.testing._internal.common_modules, which needs the package expecttest. Every result is
compared with float64: norms within the bounds of tolerances.py, cells within those of autodiff.py.
"""

import copy
import inspect

import autodiff
import cells
import numpy as np
import pytest
import tolerances
from tolerances import assert_within

import cnorm

torch = pytest.importorskip("torch")
import cnorm.torch as ct  # noqa: E402

U, TINY = 2.0**-24, tolerances.smallest(np.float32)  # of a result that is rounded to a subnormal, or to 0
SEQUENCES, CELLS = ("LSTM", "GRU", "RNN"), ("LSTMCell", "GRUCell", "RNNCell")


def samples(*names):
    """(ours, torch.nn's, training, arguments of the constructor, of the call) of PyTorch's module samples."""
    pytest.importorskip("expecttest")
    from torch.testing._internal import common_modules

    found = []
    for info in common_modules.module_db:
        name = info.name.removeprefix("nn.")
        if name not in names:
            continue
        ours = getattr(ct, "BatchNorm" if name.startswith("BatchNorm") else name)
        for training in (False, True):
            options = {"device": "cpu", "dtype": torch.float32, "requires_grad": False, "training": training}
            for sample in info.module_inputs_func(info, **options):
                if sample.forward_input is not None:
                    found.append((ours, info.module_cls, training, sample.constructor_input, sample.forward_input))
    return found


def made(ours, theirs, training, given, **preset):
    """Both modules with the same parameters, theirs in float64; the state dict goes to ours and back."""
    pair = ours(*given.args, **given.kwargs, **preset), theirs(*given.args, **given.kwargs)
    for parameter in pair[1].parameters():
        torch.nn.init.normal_(parameter, 0.2)
    pair[0].load_state_dict(pair[1].state_dict())
    pair[1].load_state_dict(pair[0].state_dict())
    return pair[0].train(training), pair[1].double().train(training)


def wide(t):
    return t.detach().double().numpy()


def named_gradients(module):
    return {name: p.grad for name, p in module.named_parameters()}


# --------------------------------------------------------------------------------------------------- norms


def test_samples_of_layer_and_rms_norm():
    seen = samples("LayerNorm", "RMSNorm")
    for ours, theirs, training, given, call in seen:
        ours, theirs = made(ours, theirs, training, given)
        x = call.args[0].requires_grad_()
        x64 = x.detach().double().requires_grad_()
        y, y64 = ours(x), theirs(x64)
        dy = torch.randn(y.shape)
        y.backward(dy)
        y64.backward(dy.double())
        n = int(np.prod(ours.normalized_shape))
        rows = [wide(t).reshape(-1, n) for t in (x, dy, y64)]
        mean = rows[0].mean(-1, keepdims=True) if isinstance(ours, ct.LayerNorm) else 0
        rstd = 1 / np.sqrt(((rows[0] - mean) ** 2).mean(-1, keepdims=True) + ours.eps)
        xhat = (rows[0] - mean) * rstd
        weight = 1 if ours.weight is None else wide(ours.weight).reshape(-1)
        bias = 0 if getattr(ours, "bias", None) is None else wide(ours.bias).reshape(-1)
        bounds = {
            "y": tolerances.forward(xhat, np.float32, weight, bias).reshape(x.shape),
            "dx": tolerances.dx(rows[1], xhat, rstd, np.float32, weight).reshape(x.shape),
            "weight": tolerances.dweight(rows[1], xhat, np.float32).reshape(ours.normalized_shape),
            "bias": tolerances.dbias(rows[1], np.float32).reshape(ours.normalized_shape),
        }
        results, wanted = {"y": y, "dx": x.grad}, {"y": y64, "dx": x64.grad}
        results |= named_gradients(ours)
        wanted |= named_gradients(theirs)
        assert results.keys() == wanted.keys()
        for name, result in results.items():
            assert_within(result.detach().numpy(), wide(wanted[name]), bounds[name] + TINY, name)
    assert len(seen) >= 26


def batch_bounds(module, x, dy, momentum):
    """Bounds of a batch norm in training mode, as tests/norms/test_batch_norm.py has them."""

    def rows(a):
        return np.moveaxis(a, 1, 0).reshape(a.shape[1], -1)

    def back(a):
        return np.moveaxis(a.reshape(x.shape[1], x.shape[0], *x.shape[2:]), 0, 1)

    u, sums = tolerances.unit_roundoff(np.float32), tolerances.channel_sum(x, np.float32)
    r, d = rows(x), rows(dy)
    mean, var = r.mean(-1), r.var(-1)
    rstd = 1 / np.sqrt(var + module.eps)
    xhat = (r - mean[:, None]) * rstd[:, None]
    from_xhat = tolerances.batch_xhat(xhat, x, np.float32)
    weight, bias = (1 if module.weight is None else wide(module.weight)[:, None],
                    0 if module.bias is None else wide(module.bias)[:, None])  # fmt: skip
    g = np.abs(d * weight)
    of_mean, of_products = g.mean(-1, keepdims=True), (g * np.abs(xhat)).mean(-1, keepdims=True)
    terms = g + of_mean + np.abs(xhat) * of_products
    inside = from_xhat * of_products + np.abs(xhat) * (g * from_xhat).mean(-1, keepdims=True) + 2.42 * sums * terms
    dx = tolerances.dx(d * weight, xhat, rstd[:, None], np.float32, sums=sums + u) + rstd[:, None] * inside
    unbiased = var * (r.shape[1] / (r.shape[1] - 1))
    # the mean and the variance as in tolerances.any_row; then n / (n - 1), and the sum of two products by lerp
    off_mean = 1.42 * sums * np.sqrt(var) + 2 * u * np.abs(mean)
    off_var = (4.84 * sums + 6 * u) * unbiased
    return {
        "y": back(tolerances.affine(xhat, from_xhat, np.float32, weight, bias)),
        "dx": back(dx),
        "weight": (np.abs(d) * from_xhat).sum(-1) + (sums + 2 * u) * np.abs(d * xhat).sum(-1),
        "bias": (sums + u) * np.abs(d).sum(-1),
        "running_mean": momentum * (off_mean + 4 * u * np.abs(mean)),
        "running_var": momentum * (off_var + 4 * u * unbiased) + 4 * u,
    }


def running_bounds(module, x, dy):
    """Bounds with running statistics: 6 roundings of y; torch sums the gradients in any order."""
    shape = (-1, *[1] * (x.ndim - 2))
    centred = x - wide(module.running_mean).reshape(shape)
    standard = centred / np.sqrt(wide(module.running_var) + module.eps).reshape(shape)
    weight = np.ones(1) if module.weight is None else wide(module.weight)
    bias = np.zeros(1) if module.bias is None else wide(module.bias)
    axes, n = (0, *range(2, x.ndim)), x.size / max(x.shape[1], 1)
    rstd = 1 / np.sqrt(wide(module.running_var) + module.eps)
    return {
        "y": 6 * U * (np.abs(standard * weight.reshape(shape)) + np.abs(bias.reshape(shape))),
        "dx": 6 * U * np.abs(dy * (weight * rstd).reshape(shape)),
        "weight": (n + 6) * U * np.abs(dy * standard).sum(axes),
        "bias": (n + 1) * U * np.abs(dy).sum(axes),
        "running_mean": 0,
        "running_var": 0,
    }


def test_samples_of_batch_norm():
    seen = samples("BatchNorm1d", "BatchNorm2d", "BatchNorm3d")
    for ours, theirs, training, given, call in seen:
        ours, theirs = made(ours, theirs, training, given)
        x = call.args[0].requires_grad_()
        x64 = x.detach().double().requires_grad_()
        y, y64 = ours(x), theirs(x64)
        dy = torch.randn(y.shape)
        y.backward(dy)
        y64.backward(dy.double())
        results = {"y": y, "dx": x.grad} | named_gradients(ours) | dict(ours.named_buffers())
        wanted = {"y": y64, "dx": x64.grad} | named_gradients(theirs) | dict(theirs.named_buffers())
        assert results.keys() == wanted.keys()
        assert results.pop("num_batches_tracked", 0) == wanted.pop("num_batches_tracked", 0)
        if not x.numel():
            bounds = dict.fromkeys(results, 0)
        elif training or ours.running_mean is None:
            bounds = batch_bounds(ours, wide(x), wide(dy), 1.0 if ours.momentum is None else ours.momentum)
        else:
            bounds = running_bounds(ours, wide(x), wide(dy))
        for name, result in results.items():
            assert_within(result.detach().numpy(), wide(wanted[name]), bounds[name] + TINY, name)
    assert len(seen) >= 44


# --------------------------------------------------------------------------------------------------- cells


def reference(module, weights, frames, states):
    """y [steps] and the last states [layers * directions] of a module of preset torch, on nodes of autodiff.py."""
    step, layers = cells.step_of((module.kind, module.spec.name)), getattr(module, "num_layers", 1)
    suffixes, last = ("", "_reverse")[: 1 + getattr(module, "bidirectional", False)], []
    for i in range(layers):
        ways = []
        for suffix in suffixes:
            end = f"_l{i}{suffix}" if isinstance(module, getattr(ct, module.kind)) else ""
            own = {f"{name.removesuffix(end)}_l0": w for name, w in weights.items() if name.endswith(end)}
            state, outputs = states[len(last)], []
            for frame in frames[::-1] if suffix else frames:
                state = step(own, frame, *state)
                outputs.append(state[0])
            ways.append(outputs[::-1] if suffix else outputs)
            last.append(state)
        frames = [np.concatenate(parts, -1) for parts in zip(*ways, strict=True)]
    return frames, last


def nodes_of(module, x, hx, count, batch):
    """The weights, the frames [batch, inputs] and the states of a call as nodes, by the names of their tensors."""
    weights = {name: autodiff.Node(autodiff.Value(wide(p))) for name, p in module.named_parameters()}
    frames = [autodiff.Node(autodiff.Value(frame)) for frame in x]
    widths = module._widths
    parts = [np.zeros((count, batch, n)) for n in widths] if hx is None else hx
    states = [[autodiff.Node(autodiff.Value(part[k])) for part in parts] for k in range(count)]
    return weights, frames, states


def parts_of(result):
    return list(result) if isinstance(result, (tuple, list)) else [result]


def checked_sample(ours, theirs, x, hx):
    """One call of both modules, forward and backward, against the reference and its bounds."""
    single, sequence = x.ndim == (2 if hasattr(ours, "num_layers") else 1), hasattr(ours, "num_layers")
    first = sequence and ours.batch_first and not single
    x = x.requires_grad_()
    x64 = x.detach().double().requires_grad_()
    hx64 = None if hx is None else tuple(part.double() for part in parts_of(hx))
    given64 = hx64 if hx64 is None or ours.kind == "LSTM" else hx64[0]
    found, found64 = ours(x, hx), theirs(x64, given64)
    y, last = (found[0], parts_of(found[1])) if sequence else (parts_of(found)[0], parts_of(found))
    y64 = found64[0] if sequence else parts_of(found64)[0]
    dy = torch.randn(y.shape)
    y.backward(dy)
    y64.backward(dy.double())

    def framed(a):  # [steps, batch, ...]
        a = wide(a) if isinstance(a, torch.Tensor) else a
        a = a[:, None] if sequence and single else a[None] if single else a
        return a.swapaxes(0, 1) if first else a if sequence else a.reshape(1, -1, a.shape[-1])

    count = len(ours.ways) * len(ours.ways[0])
    batch = framed(x).shape[1]
    states = None if hx64 is None else [wide(part).reshape(count, batch, -1) for part in hx64]
    weights, frames, nodes = nodes_of(ours, framed(x), states, count, batch)
    outputs, ends = reference(ours, weights, frames, nodes)
    for t, (node, own, want) in enumerate(zip(outputs, framed(y), framed(y64), strict=True)):
        assert np.abs(node.of.value - want).max() <= 1e-13 * max(1, np.abs(want).max())
        assert_within(own.astype(np.float32), node.of.value, node.of.bound, f"y of step {t}")
    for k, end in enumerate(ends):
        for part, node in zip(last, end, strict=True):
            assert_within(part.detach().numpy().reshape(count, batch, -1)[k], node.of.value, node.of.bound, "state")
    gradients = [*framed(x.grad), *(wide(p.grad) for p in ours.parameters())]
    wanted = [*framed(x64.grad), *(wide(p.grad) for p in theirs.parameters())]
    derived = autodiff.gradients(
        outputs, [autodiff.Value(d) for d in framed(dy)], [*frames, *(weights[n] for n, _ in ours.named_parameters())]
    )
    for own, want, value in zip(gradients, wanted, derived, strict=True):
        assert np.abs(value.value - want).max() <= 1e-12 * max(1, np.abs(want).max())
        assert_within(own.astype(np.float32), value.value, value.bound, "gradient")


def test_samples_of_cells():
    seen = samples(*CELLS)
    for ours, theirs, training, given, call in seen:
        ours, theirs = made(ours, theirs, training, given, preset="torch")
        hx = call.args[1] if len(call.args) > 1 else call.kwargs.get("hx")
        checked_sample(ours, theirs, call.args[0], hx)
    assert len(seen) >= 14


@pytest.mark.parametrize("kind", SEQUENCES)
@pytest.mark.filterwarnings("ignore:.*dropout", "ignore:LSTM with projections")
def test_samples_of_sequence_modules(kind):
    seen = samples(kind)
    for ours, theirs, training, given, call in seen:
        ours, theirs = made(ours, theirs, training, given, preset="torch")
        hx = call.args[1] if len(call.args) > 1 else call.kwargs.get("hx")
        checked_sample(ours, theirs, call.args[0], hx)
    assert len(seen) >= 32


# --------------------------------------------------------------------------------------------------- arguments


OPTIONS = [
    {}, {"num_layers": 2}, {"bidirectional": True}, {"num_layers": 3, "bidirectional": True, "bias": False},
    {"bias": False}, {"proj_size": 3, "num_layers": 2, "bidirectional": True}, {"nonlinearity": "relu"},
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", SEQUENCES)
def test_state_dicts_and_initial_values_are_those_of_torch(kind, options):
    if ("proj_size" in options and kind != "LSTM") or ("nonlinearity" in options and kind != "RNN"):
        pytest.skip("not an argument of this module")
    torch.manual_seed(7)
    ours = getattr(ct, kind)(4, 6, **options, preset="torch")
    torch.manual_seed(7)
    theirs = getattr(torch.nn, kind)(4, 6, **options)
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name
    theirs.reset_parameters()
    assert str(ours.load_state_dict(theirs.state_dict())) == "<All keys matched successfully>"
    x = torch.randn(5, 3, 4)
    torch.testing.assert_close(ours(x)[0], theirs(x)[0])
    ours.reset_parameters()
    assert str(theirs.load_state_dict(ours.state_dict())) == "<All keys matched successfully>"
    torch.testing.assert_close(ours(input=x, hx=None)[0], theirs(input=x, hx=None)[0])
    assert [[tuple(w.shape) for w in ws] for ws in ours.all_weights] == [
        [tuple(w.shape) for w in ws] for ws in theirs.all_weights
    ]
    ours.flatten_parameters()
    for name in ("mode", "input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional",
                 "proj_size"):  # fmt: skip
        assert getattr(ours, name) == getattr(theirs, name), name


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", SEQUENCES)
def test_cells_exchange_state_dicts_with_torch_and_with_sequences(kind, bias):
    cell, theirs = getattr(ct, f"{kind}Cell")(4, 6, bias, preset="torch"), getattr(torch.nn, f"{kind}Cell")(4, 6, bias)
    theirs.load_state_dict(cell.state_dict())
    assert cell.bias is theirs.bias
    for module in (getattr(ct, kind)(4, 6, bias=bias, preset="torch"), getattr(torch.nn, kind)(4, 6, bias=bias)):
        cell.load_state_dict(module.state_dict())
        nested = torch.nn.ModuleDict({"inner": getattr(ct, f"{kind}Cell")(4, 6, bias, preset="torch")})
        nested.load_state_dict({f"inner.{name}": p for name, p in module.state_dict().items()})
        for one in (cell, nested["inner"]):
            assert all(map(torch.equal, one.state_dict().values(), module.state_dict().values()))
    sequence = getattr(ct, kind)(4, 6, bias=bias, preset="torch")
    sequence.load_state_dict(theirs.state_dict())
    assert torch.equal(sequence.weight_hh_l0, theirs.weight_hh)
    layers = cnorm.from_torch(cell, "torch", kind=kind)
    x = torch.randn(3, 4)
    want = cnorm.Model(cell).run(x.numpy())
    assert cnorm.Model(layers).run(x.numpy()).tobytes() == want.tobytes()
    stack = getattr(ct, kind)(4, 6, 2, preset="torch")
    with pytest.raises(RuntimeError, match="Missing key"):
        stack.load_state_dict(theirs.state_dict(), strict=True)


@pytest.mark.parametrize("name", [*SEQUENCES, *CELLS, "LayerNorm", "RMSNorm", "BatchNorm"])
def test_arguments_have_the_names_order_and_defaults_of_torch(name):
    theirs = getattr(torch.nn, {"BatchNorm": "BatchNorm1d"}.get(name, name))
    if name in SEQUENCES:
        names = list(inspect.signature(torch.nn.RNNBase).parameters)[1:]
        if name == "RNN":
            names.insert(3, "nonlinearity")
    else:
        names = list(inspect.signature(theirs).parameters)
    ours = inspect.signature(getattr(ct, name)).parameters
    assert [n for n in ours if ours[n].kind is not inspect.Parameter.KEYWORD_ONLY][: len(names)] == [
        n for n in names if n != "bias" or name != "BatchNorm"
    ]
    if name not in SEQUENCES:
        for argument, parameter in inspect.signature(theirs).parameters.items():
            if argument not in ("hidden_size", "nonlinearity"):
                assert ours[argument].default == parameter.default, argument
    assert list(inspect.signature(getattr(ct, name).forward).parameters) == list(
        inspect.signature(theirs.forward).parameters
    )


@pytest.mark.parametrize("key", sorted(cnorm.PRESETS), ids="-".join)
def test_every_preset_can_be_bidirectional(key):
    """The bits of two modules, one of which runs backwards, and of the `cnorm.Model` of both."""
    kind, preset = key
    make, options = getattr(ct, kind), {"preset": preset, "eps": cells.EPS.get(key)}
    both = make(4, 6, bidirectional=True, **options)
    names = {False: [], True: []}
    for name in both.state_dict():
        names[name.endswith("_reverse")].append(name)
    x, results = torch.randn(5, 3, 4), []
    for reverse in (False, True):
        one = make(4, 6, **options)
        values = [both.get_parameter(name).detach() for name in names[reverse]]
        one.load_state_dict(dict(zip(one.state_dict(), values, strict=True)))
        y, _ = one(x.flip(0) if reverse else x)
        results.append(y.flip(0) if reverse else y)
    y, last = both(x)
    assert torch.equal(y, torch.cat(results, -1))
    assert parts_of(last)[0].shape == (2, 3, 6)
    y.square().sum().backward()
    assert all(p.grad is not None for p in both.parameters())
    for layers in (both.to_layers(), cnorm.from_torch(both, preset, kind=kind, eps=options["eps"])):
        run = cnorm.Model(layers).run(np.ascontiguousarray(x[:, 1].numpy()))
        assert run.tobytes() == y[:, 1].detach().contiguous().numpy().tobytes()
    stack = make(4, 6, 2, bidirectional=True, **options)
    assert len(set(stack.state_dict())) == 4 * len(names[False])
    prefix = "layers.{layer}." if hasattr(stack, "layers") else ""
    layers = cnorm.from_torch(stack, preset, kind=kind, prefix=prefix, eps=options["eps"])
    run = cnorm.Model(layers).run(np.ascontiguousarray(x[:, 1].numpy()))
    assert run.tobytes() == stack(x)[0][:, 1].detach().contiguous().numpy().tobytes()


LISTED = r"preset must be one of the LSTM presets ba2016, .*torch, torch_custom, torchaudio or a CellSpec, got None"


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ct.LSTM(4, 6), TypeError, LISTED),
        (lambda: ct.LSTMCell(4, 6), TypeError, LISTED),
        (lambda: ct.RNN(4, 6, nonlinearity="relu"), TypeError, "one of the RNN presets ba2016, "),
        (lambda: ct.RNN(4, 6, 1, "sigmoid", preset="torch"), ValueError, "must be 'tanh' or 'relu' for preset 'torch'"),
        (lambda: ct.RNNCell(4, 6, nonlinearity="relu", preset="tfa"), ValueError, "must be 'tanh' for preset 'tfa'"),
        (lambda: ct.RNN(4, 6, nonlinearity="tanh", preset="torch_relu"), ValueError, "must be 'relu' for preset"),
        (lambda: ct.LSTM(4, 6, nonlinearity="relu", preset="torch"), TypeError, "nonlinearity"),
        (lambda: ct.LSTM(4, 6, bias=False, preset="ba2016"), ValueError, "bias must be True for preset 'ba2016'"),
        (lambda: ct.LSTM(4, 6, 1, 0.5, preset="torch"), TypeError, "bias must be True or False, got 0.5"),
        (lambda: ct.LSTM(4, 6, batch_first=1, preset="torch"), TypeError, "batch_first must be True or False, got 1"),
        (lambda: ct.LSTM(4, 6, bidirectional=2, preset="torch"), TypeError, "bidirectional must be True or False"),
        (lambda: ct.GRU(4, 6, proj_size=2, preset="torch"), ValueError, "has no projection, got proj_size=2"),
        (lambda: ct.GRU(4, 6, device="cuda", preset="torch"), ValueError, "device must be the CPU, got 'cuda'"),
        (lambda: ct.GRU(4, 6, dtype=torch.float64, preset="torch"), ValueError, "dtype must be torch.float32, got"),
        (lambda: ct.LayerNorm(5, dtype=torch.half), ValueError, "dtype must be torch.float32 or torch.float64, got"),
        (lambda: ct.RMSNorm(5, device="cuda:1"), ValueError, "device must be the CPU, got 'cuda:1'"),
        (lambda: ct.BatchNorm(5, dtype=torch.float16), ValueError, "dtype must be torch.float32 or torch.float64, got"),
        (lambda: ct.LayerNorm(2.5), ValueError, "normalized_shape must be integers of at least 1, got 2.5"),
        (lambda: ct.RMSNorm(()), ValueError, r"normalized_shape must be integers of at least 1, got \(\)"),
        (lambda: ct.LayerNorm((2, 5))(torch.zeros(5, 2)), ValueError, r"shape \(\.\.\., 2, 5\), got \(5, 2\)"),
        (lambda: ct.RMSNorm(5)(None), TypeError, "x must be a tensor, got NoneType"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_an_unbatched_call_names_the_shape_of_its_state():
    lstm, x = ct.LSTM(5, 4, 2, preset="torch"), torch.zeros(3, 5)
    with pytest.raises(ValueError, match=r"a state must have shape \(2, 4\), got \(2, 1, 4\)"):
        lstm(x, (torch.zeros(2, 1, 4), torch.zeros(2, 1, 4)))
    assert lstm(x, (torch.zeros(2, 4), torch.zeros(2, 4)))[1][0].shape == (2, 4)


def test_nonlinearity_chooses_the_preset():
    for make in (ct.RNN, ct.RNNCell):
        assert make(4, 6, nonlinearity="relu", preset="torch").spec.name == "torch_relu"
        assert make(4, 6, nonlinearity="relu", preset="ba2016").spec.name == "ba2016_relu"
        assert make(4, 6, nonlinearity="tanh", preset="tfa").nonlinearity == "tanh"
    assert ct.RNN(4, 6, 2, "relu", False, True, preset="torch").batch_first
    assert ct.RNNCell(4, 6, False, "relu", preset="torch").nonlinearity == "relu"


def test_modules_are_made_without_memory_and_filled_later():
    for made_so in (
        ct.LSTM(4, 6, 2, bidirectional=True, preset="ba2016", device="meta"),
        ct.LayerNorm(5, device="meta"),
    ):
        assert all(p.is_meta for p in made_so.parameters())
    lstm = torch.nn.utils.skip_init(ct.LSTM, 4, 6, preset="torch")
    lstm.reset_parameters()
    assert lstm(torch.zeros(3, 4))[0].shape == (3, 6)


def test_norms_are_known_as_those_of_torch():
    """What PyTorch and others do to its norms: update_bn, checkpoints of the first version."""
    assert isinstance(ct.LayerNorm(5), torch.nn.LayerNorm)
    assert isinstance(ct.RMSNorm(5), torch.nn.RMSNorm)
    network, data = torch.nn.Sequential(ct.BatchNorm(5)), [torch.randn(9, 5) for _ in range(3)]
    torch.optim.swa_utils.update_bn(data, network)
    torch.testing.assert_close(network[0].running_mean, torch.stack([x.mean(0) for x in data]).mean(0))
    first = {n: p for n, p in torch.nn.BatchNorm1d(5).state_dict().items() if n != "num_batches_tracked"}
    network[0].load_state_dict(first)
    assert ct.BatchNorm(5, bias=False).bias is None


def test_rms_norm_without_eps_takes_that_of_the_dtype():
    x = 1e-3 * torch.randn(3, 5)
    for given in (x, x.double()):
        module = ct.RMSNorm(5, dtype=given.dtype)
        torch.testing.assert_close(module(given), torch.nn.RMSNorm(5, dtype=given.dtype)(given))


@pytest.mark.parametrize("made", [ct.LSTM(4, 6, preset="torch"), ct.GRUCell(4, 6, preset="torch"), ct.LayerNorm(4)])
def test_a_module_in_another_dtype_names_the_remedy(made):
    with pytest.raises(TypeError, match=r"weight.* must have dtype float32.*, got bfloat16: use float\(\), as"):
        copy.deepcopy(made).bfloat16()(torch.zeros(3, 4))


@pytest.mark.parametrize("name", [*SEQUENCES, *CELLS])
@pytest.mark.parametrize("given", [False, True], ids=["from_zeros", "from_a_state"])
def test_a_batch_of_no_rows(name, given):
    """Results have no elements, gradients are zeros, as of torch.nn."""
    sequence = name in SEQUENCES
    options = {"num_layers": 2, "bidirectional": True, "batch_first": True} if sequence else {}
    found = []
    for module in (getattr(ct, name)(5, 6, preset="torch", **options), getattr(torch.nn, name)(5, 6, **options)):
        x = torch.zeros(*(0, 3, 5) if sequence else (0, 5), requires_grad=True)
        shape = (4, 0, 6) if sequence else (0, 6)
        parts = [torch.zeros(shape, requires_grad=True) for _ in range(1 + ("LSTM" in name))]
        y = module(x, tuple(parts) if len(parts) == 2 else parts[0]) if given else module(x)
        results = torch.utils._pytree.tree_leaves(y)
        sum(r.sum() for r in results).backward()
        gradients = [t.grad for t in (x, *parts * given, *module.parameters())]
        assert not any(g.any() for g in gradients)
        found.append([(r.shape, r.dtype) for r in (*results, *gradients)])
    assert found[0] == found[1]
    with pytest.raises(TypeError, match="x must have dtype float32"):
        getattr(ct, name)(5, 6, preset="torch")(torch.zeros(*(3, 0, 5) if sequence else (0, 5), dtype=torch.float64))
