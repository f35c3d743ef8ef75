"""`cnorm.torch`: gradients against PyTorch's own in float64, state dicts both ways, compile, export, workers."""

import concurrent.futures
import copy
import io
import multiprocessing
import os
import threading

import autodiff
import cells
import numpy as np
import pytest
from perturbed import succeed_apart
from tolerances import assert_within

import cnorm

torch = pytest.importorskip("torch")
import cnorm.torch as ct  # noqa: E402
from cnorm.torch import operators  # noqa: E402

MODULES = {"LSTM": ct.LSTM, "GRU": ct.GRU, "RNN": ct.RNN}


def gap(ours, theirs):
    """The largest difference, relative to the largest element."""
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"batch_first": True}], ids=str)
def test_plain_modules_match_torch(kind, options):
    torch.manual_seed(0)
    ours, theirs = MODULES[kind](5, 12, preset="torch", **options), getattr(torch.nn, kind)(5, 12, **options).double()
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.float().state_dict())
    theirs = theirs.double()
    x = torch.randn(7, 3, 5, requires_grad=True)
    x64 = x.detach().double().requires_grad_()
    weight = torch.randn_like(ours(x)[0])
    (y, state), (y64, state64) = ours(x), theirs(x64)
    for a, b in zip((state,) if kind == "GRU" else state, (state64,) if kind == "GRU" else state64, strict=True):
        assert a.shape == b.shape
        assert gap(a, b) < 2e-6
    (y * weight).sum().backward()
    (y64 * weight).sum().backward()
    assert gap(y, y64) < 2e-6
    assert gap(x.grad, x64.grad) < 1e-5
    for (name, p), (_, q) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert gap(p.grad, q.grad) < 1e-5, name


def reference_module(module, kind, weights, x):
    """y [steps] of a module's layers and directions from zero states: reference.py's steps, on nodes of autodiff.py."""
    step, states = cells.step_of((kind, "torch")), 2 if kind == "LSTM" else 1
    for i in range(module.num_layers):
        ways = []
        for suffix in ("", "_reverse")[: 1 + module.bidirectional]:
            own = {
                name.replace(f"_l{i}{suffix}", "_l0"): w
                for name, w in weights.items()
                if name.endswith(f"_l{i}{suffix}")
            }
            state, outputs = [autodiff.Node(autodiff.Value(np.zeros((x[0].shape[0], module.units))))] * states, []
            for frame in x[::-1] if suffix else x:
                state = step(own, frame, *state)
                outputs.append(state[0])
            ways.append(outputs[::-1] if suffix else outputs)
        x = [np.concatenate(parts, -1) for parts in zip(*ways, strict=True)]
    return x


@pytest.mark.exhaustive(one_in=2)
@pytest.mark.parametrize(("steps", "batch"), [(1, 33), (17, 3)])
@pytest.mark.parametrize(("layers", "bidirectional"), [(1, True), (3, False), (2, True)])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_stacks_and_both_directions_are_within_the_derived_bound(kind, layers, bidirectional, steps, batch):
    """The derivatives of the reference agree with PyTorch's in float64, and ours with them within their bound."""
    torch.manual_seed(steps)
    options = {"num_layers": layers, "bidirectional": bidirectional}
    ours, theirs = MODULES[kind](5, 12, preset="torch", **options), getattr(torch.nn, kind)(5, 12, **options)
    ours.load_state_dict(theirs.state_dict())
    theirs = theirs.double()
    x = torch.randn(steps, batch, 5, requires_grad=True)
    x64 = x.detach().double().requires_grad_()
    dy = torch.randn(steps, batch, 12 * (1 + bidirectional))
    (ours(x)[0] * dy).sum().backward()
    (theirs(x64)[0] * dy).sum().backward()
    weights = {name: autodiff.Node(autodiff.Value(p.detach())) for name, p in ours.named_parameters()}
    frames = [autodiff.Node(autodiff.Value(frame)) for frame in x.detach()]
    outputs = reference_module(ours, kind, weights, frames)
    found = autodiff.gradients(outputs, [autodiff.Value(d) for d in dy], frames + list(weights.values()))
    named = [(f"dx of step {t}", x.grad[t], x64.grad[t]) for t in range(steps)]
    named += [(name, p.grad, q.grad) for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True)]
    for (name, own, wide), wanted in zip(named, found, strict=True):
        assert np.abs(wanted.value - wide.numpy()).max() <= 1e-13 * steps * max(1, np.abs(wanted.value).max()), name
        assert_within(own.numpy(), wanted.value, wanted.bound, name)


@pytest.mark.parametrize("key", sorted(cnorm.PRESETS), ids="-".join)
def test_every_preset_has_the_bits_of_a_stream_and_can_be_read_by_from_torch(key):
    module = MODULES[key[0]](4, 10, preset=key[1], eps=cells.EPS.get(key))
    x = torch.randn(6, 2, 4)
    y, _ = module(x)
    layers = cnorm.from_torch(module, key[1], kind=key[0], eps=cells.EPS.get(key))
    for read in (layers, module.to_layers()):
        for b in range(2):
            got = cnorm.Model(read).stream().process(np.ascontiguousarray(x[:, b].numpy()))
            assert got.tobytes() == np.ascontiguousarray(y.detach()[:, b].numpy()).tobytes()
    y.sum().backward()
    assert all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize("key", sorted(cnorm.PRESETS), ids="-".join)
def test_the_layers_of_a_stack_share_no_parameter(key):
    """Of sizes at which a shared one would go unnoticed."""
    options = {"preset": key[1], "eps": cells.EPS.get(key)}
    module, single = (MODULES[key[0]](6, 6, num_layers=layers, **options) for layers in (2, 1))
    assert sum(p.numel() for p in module.parameters()) == 2 * sum(p.numel() for p in single.parameters())
    prefix = "layers.{layer}." if hasattr(module, "layers") else ""
    layers = cnorm.from_torch(module, key[1], kind=key[0], prefix=prefix, eps=cells.EPS.get(key))
    x = torch.randn(5, 6)
    assert cnorm.Model(layers).run(x.numpy()).tobytes() == module(x)[0].detach().numpy().tobytes()


def test_a_stack_is_read_by_its_prefix():
    module = ct.LSTM(4, 6, preset="ba2016", num_layers=3)
    layers = cnorm.from_torch(module, "ba2016", kind="LSTM", prefix="layers.{layer}.")
    x = torch.randn(5, 4)
    assert cnorm.Model(layers).stream().process(x.numpy()).tobytes() == module(x)[0].detach().numpy().tobytes()


def test_state_and_its_gradient_are_passed_between_calls():
    module = ct.LSTM(4, 6, preset="ba2016")
    x = torch.randn(8, 2, 4)
    state = tuple(torch.randn(1, 2, 6, requires_grad=True) for _ in range(2))
    whole, last = module(x, state)
    first, middle = module(x[:3], state)
    second, end = module(x[3:], middle)
    assert torch.equal(torch.cat([first, second]), whole)
    assert all(map(torch.equal, end, last))
    one = torch.autograd.grad(whole.sum() + last[1].sum(), state)
    other = torch.autograd.grad(first.sum() + second.sum() + end[1].sum(), state)
    assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("write", ["in place", "data", "numpy", "state dict"])
def test_weights_are_packed_again_however_they_were_written(write):
    """Every way to write a parameter, also those that its version counter does not see."""
    module, other = (ct.LSTM(4, 6, preset="ba2016", num_layers=2) for _ in range(2))
    x = torch.randn(5, 2, 4)
    module(x)
    parameter = module.get_parameter("layers.1.weight_h")
    value = other.get_parameter("layers.1.weight_h").detach()
    with torch.no_grad():
        if write == "in place":
            parameter.copy_(value)
        elif write == "data":
            parameter.data[...] = value
        elif write == "numpy":
            parameter.detach().numpy()[...] = value.numpy()
        else:
            module.load_state_dict(module.state_dict() | {"layers.1.weight_h": value})
    wanted = cnorm.Model(module.to_layers()).stream().process(np.ascontiguousarray(x[:, 0].numpy()))
    assert wanted.tobytes() == np.ascontiguousarray(module(x)[0].detach()[:, 0].numpy()).tobytes()


def test_weights_that_differ_in_the_sign_of_a_zero_only_are_packed_again():
    module = ct.RNN(4, 6, preset="ba2016")
    weights = module.ways[0][0]

    def packed():
        return weights.packed(module, True), operators.packed_cell(weights.text, weights.tensors(module))

    first, again = packed(), packed()
    assert first[0] is again[0]
    assert first[1] is again[1]
    module.bias.data.neg_()
    after = packed()
    assert first[0] is not after[0]
    assert first[1] is not after[1]


def test_rejects_weights_that_are_not_finite_in_the_first_call_and_later():
    module, x = ct.GRU(4, 6, preset="ba2016"), torch.randn(3, 1, 4)
    module(x)
    for one in (module, ct.GRU(4, 6, preset="ba2016")):
        with torch.no_grad():
            one.weight_x[0, 0] = float("nan")
        with pytest.raises(ValueError, match=r"weights\['weight_x'\] of GRU ba2016 must be finite"):
            one(x)


def test_the_gradient_of_x_is_computed_only_if_it_is_needed():
    module, x = ct.LSTM(4, 6, preset="ba2016", num_layers=2), torch.randn(5, 2, 4)
    module(x)[0].sum().backward()
    gradients = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    module(x.requires_grad_())[0].sum().backward()
    assert all(map(torch.equal, gradients, [p.grad for p in module.parameters()]))
    assert x.grad.shape == x.shape


def test_backward_twice_gives_the_same():
    module = ct.GRU(4, 6, preset="ba2016")
    y = module(torch.randn(5, 2, 4))[0].sum()
    y.backward(retain_graph=True)
    first = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    y.backward()
    assert all(map(torch.equal, first, [p.grad for p in module.parameters()]))


def test_rejects_invalid_input():
    module = ct.LSTM(4, 6, preset="ba2016")
    with pytest.raises(TypeError, match="float32, got float64"):
        module(torch.zeros(3, 1, 4, dtype=torch.float64))
    with pytest.raises(TypeError, match="x must be a tensor, got ndarray"):
        module(np.zeros((3, 1, 4), np.float32))
    for shape in ((0, 1, 4), (3, 1, 5), (4,)):
        with pytest.raises(ValueError, match="x must have"):
            module(torch.zeros(shape))
    with pytest.raises(ValueError, match="a state must have shape"):
        module(torch.zeros(3, 1, 4), (torch.zeros(1, 1, 5), torch.zeros(1, 1, 6)))
    x = torch.randn(3, 1, 4, requires_grad=True)
    gradient = torch.autograd.grad(module(x)[0].sum(), x, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="backward"):
        gradient.sum().backward()


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "BatchNorm"])
def test_norms_in_float64_pass_gradcheck(name):
    module = getattr(ct, name)(7).double()
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(module, (x,), eps=1e-6, atol=1e-6)
    for p in module.parameters():
        assert torch.autograd.gradcheck(lambda _, m=module: m(x), (p,), eps=1e-6, atol=1e-6)


@pytest.mark.exhaustive(one_in=2)
@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "BatchNorm"])
@pytest.mark.parametrize("compiled", [False, True])
def test_norms_compute_in_float32_under_autocast(name, compiled):
    norm, linear, x = getattr(ct, name)(5), torch.nn.Linear(5, 5), torch.randn(4, 5)
    net = torch.nn.Sequential(linear, norm)
    net = torch.compile(net, backend="aot_eager", fullgraph=True) if compiled else net
    with torch.autocast("cpu", dtype=torch.bfloat16):
        given, y = linear(x), net(x)
    assert (given.dtype, y.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(y, norm(given.float()))
    y.square().sum().backward()
    assert linear.weight.grad is not None
    with pytest.raises(TypeError, match="float32 or float64, got bfloat16"):
        norm(given)


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "BatchNorm"])
def test_second_derivatives_of_norms_are_refused(name):
    x = torch.randn(4, 5, requires_grad=True)
    gradient = torch.autograd.grad(getattr(ct, name)(5)(x).square().sum(), x, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="first-order gradients only"):
        gradient.sum().backward()


def test_norms_match_torch_and_have_the_bits_of_cnorm():
    x, residual = torch.randn(5, 9), torch.randn(5, 9)
    assert torch.equal(ct.layer_norm(x), torch.from_numpy(cnorm.layer_norm(x.numpy())))
    assert torch.equal(ct.rms_norm(x), torch.from_numpy(cnorm.rms_norm(x.numpy())))
    assert gap(ct.layer_norm(x), torch.nn.functional.layer_norm(x, (9,))) < 1e-6
    y, total = ct.add_layer_norm(x, residual)
    want, want_total = cnorm.add_layer_norm(x.numpy(), residual.numpy())
    assert torch.equal(total, torch.from_numpy(want_total))
    assert torch.equal(y, torch.from_numpy(want))
    ours, theirs = ct.BatchNorm(9), torch.nn.BatchNorm1d(9)
    for module in (ours, theirs):
        module(x)
    for name, value in theirs.state_dict().items():
        assert torch.allclose(ours.state_dict()[name], value, atol=1e-6), name
    assert gap(ours.eval()(residual), theirs.eval()(residual)) < 1e-5


def test_batch_norm_with_running_statistics_is_accurate_at_large_means():
    """x - mean is exact within a factor of 2 of the mean; the scale, the product and the sum have 6 roundings."""
    module = ct.BatchNorm(9).eval()
    with torch.no_grad():
        module.running_mean.copy_(1e6 + torch.randn(9))
        for values in (module.running_var, module.weight, module.bias):
            values.uniform_(0.5, 2)
    x, exact = 1e6 + torch.randn(64, 9), copy.deepcopy(module).double()
    standard = (x.double() - exact.running_mean) / torch.sqrt(exact.running_var + exact.eps) * exact.weight
    bound = 6 * 2**-24 * (standard.abs() + exact.bias)
    assert ((module(x).double() - exact(x.double())).abs() <= bound).all()


def test_a_batch_norm_is_read_by_model():
    linear, norm = torch.nn.Linear(4, 5), ct.BatchNorm(5)
    for _ in range(3):
        norm(torch.randn(20, 5) * 3 + 1)
    model, x = cnorm.Model([linear, norm.eval()]), torch.randn(8, 4)
    assert [layer.kind for layer in model.layers] == ["Linear"]
    assert model.check(x.numpy(), norm(linear(x)).detach().numpy()).ok


def test_a_subclass_with_another_forward_is_refused_by_model():
    class Doubled(ct.LSTM):
        def forward(self, x):
            return 2 * super().forward(x)[0]

    with pytest.raises(ValueError, match="got Doubled: what its forward computes"):
        cnorm.Model(Doubled(4, 6, preset="torch"))


def test_running_variance_of_a_constant_channel_is_never_negative():
    module = ct.BatchNorm(2, momentum=1.0)
    x = torch.randn(8, 2)
    x[:, 0] = 3.0
    module(x)
    assert module.running_var[0] == 0
    assert gap(module.running_var[1], x[:, 1].var()) < 1e-6


def test_biases_of_a_normalised_cell_begin_at_zero():
    module = ct.LSTM(4, 6, preset="di_engine")
    assert module.bias.shape == (1, 24)
    assert not module.bias.any()


def test_operators_pass_pytorchs_own_checks():
    module = ct.LSTM(4, 6, preset="torchaudio", eps=1e-3)
    weights = module.ways[0][0]
    arguments = (torch.randn(3, 2, 4, requires_grad=True), torch.randn(2, 12, requires_grad=True),
                 weights.tensors(module), weights.text)  # fmt: skip
    torch.library.opcheck(torch.ops.cnorm.recurrent.default, arguments)
    x, w = torch.randn(3, 5, requires_grad=True), torch.randn(5, requires_grad=True)
    torch.library.opcheck(torch.ops.cnorm.normalise.default, (x, w, w, 1e-5, True))
    torch.library.opcheck(torch.ops.cnorm.batch_norm.default, (x, w, w, 1e-5))


def test_compile_and_export_give_the_same_bits():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.norm = ct.LSTM(4, 6, preset="ba2016"), ct.LayerNorm(6)

        def forward(self, x):
            return self.norm(self.lstm(x)[0])

    net, x = Net(), torch.randn(5, 2, 4)
    wanted = net(x)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    got = compiled(x)
    assert torch.equal(got, wanted)
    got.sum().backward()
    gradients = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    wanted.sum().backward()
    assert all(map(torch.equal, gradients, [p.grad for p in net.parameters()]))
    assert torch.equal(torch.export.export(net, (x,)).module()(x), wanted)


class Sequences(torch.utils.data.Dataset):
    def __init__(self):
        self.module = ct.GRU(4, 6, preset="ba2016")

    def __len__(self):
        return 4

    def __getitem__(self, i):
        with torch.no_grad():
            return self.module(torch.full((3, 1, 4), float(i)))[0]


def trained(module, learner):
    """Bits of a module's gradients, and of a learner after one update."""
    module.zero_grad()
    module(torch.full((3, 2, 12), 0.5))[0].square().sum().backward()
    for _ in range(5):
        learner.step(np.full(12, 0.25, np.float32))
    learner.learn(loss="cross_entropy", target=4)
    return b"".join(p.grad.numpy().tobytes() for p in module.parameters()) + learner.save()


def train_in_both_processes():
    module, learner = ct.LSTM(12, 8, preset="ba2016"), cnorm.Learner(cnorm.demo_model(), cnorm.Adam(1e-3), truncate=8)
    trained(module, learner)
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=lambda: results.put(trained(module, learner)))
    child.start()
    wanted = trained(module, learner)
    assert results.get() == wanted
    child.join()
    assert child.exitcode == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_process_trains_with_the_same_bits():
    """The child uses weights, tapes and caches that its parent had before the fork; the parent goes on, too."""
    succeed_apart(train_in_both_processes)


def test_threads_train_one_module_with_the_same_bits():
    module = ct.LSTM(4, 6, preset="ba2016", num_layers=2)
    inputs = [torch.randn(7, 3, 4) for _ in range(4)]

    def gradients(x):
        return torch.autograd.grad(module(x)[0].square().sum(), list(module.parameters()))

    wanted = [gradients(x) for x in inputs]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for got, one in zip(pool.map(gradients, inputs * 20), wanted * 20, strict=True):
            assert all(map(torch.equal, got, one))


def load_with_workers():
    data = Sequences()
    loader = torch.utils.data.DataLoader(data, num_workers=2, multiprocessing_context="fork")
    assert all(torch.equal(batch[0], data[i]) for i, batch in enumerate(loader))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_workers_have_the_same_bits():
    succeed_apart(load_with_workers)


def test_threads_learn_with_the_same_bits():
    results = [None, None]

    def learn(k):
        rng = np.random.default_rng(5)
        learner = cnorm.Learner(cnorm.demo_model(), truncate=8)
        for t in range(200):
            learner.step(rng.standard_normal(12).astype(np.float32))
            if t % 8 == 7:
                learner.learn(loss="cross_entropy", target=t % 9)
        results[k] = learner.save()

    threads = [threading.Thread(target=learn, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[0] == results[1] is not None


def test_modules_can_be_saved_and_copied():
    module = ct.RNN(4, 6, preset="tfa")
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    other = ct.RNN(4, 6, preset="tfa")
    other.load_state_dict(torch.load(buffer))
    x = torch.randn(3, 1, 4)
    assert torch.equal(module(x)[0], other(x)[0])


def test_a_model_takes_modules():
    """Alone, and beside those of torch.nn."""
    lstm, cell, norm = ct.LSTM(5, 12, preset="ba2016", num_layers=2), ct.GRUCell(12, 7, preset="torch"), ct.LayerNorm(7)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    head, x = torch.nn.Linear(7, 3), torch.randn(6, 5)
    assert len(cnorm.Model(lstm).layers) == 2
    model = cnorm.Model([("encoder", lstm), cell, norm, head])
    assert [layer.name for layer in model.layers] == [None, "encoder", None, None, None]
    h, states = lstm(x)[0], None
    states = [states := cell(frame, states) for frame in h]
    assert model.check(x.numpy(), head(norm(torch.stack(states))).detach().numpy())
    with pytest.raises(ValueError, match=r"layers\[0\] must be a module .* got RMSNorm"):
        cnorm.Model([ct.RMSNorm(5)])


@pytest.mark.parametrize(("kind", "preset", "layers"), [("LSTM", "ba2016", 2), ("GRU", "ba2016", 1), ("RNN", "tfa", 1)])
def test_a_trained_module_is_exported_with_standard_operators(kind, preset, layers, tmp_path):
    onnx_export = pytest.importorskip("onnx_export")
    module = MODULES[kind](5, 12, preset=preset, num_layers=layers)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    module(torch.randn(9, 2, 5))[0].square().mean().backward()
    optimizer.step()
    model = cnorm.Model(module.to_layers())
    for form in ("step", "sequence"):
        exported = onnx_export.export(model, tmp_path / "module.onnx", form=form)
        assert {node.domain for node in exported.graph.node} <= {"", "ai.onnx"}
        report = onnx_export.check_parity(model, exported, steps=8)
        assert report.ok, str(report)


@pytest.mark.filterwarnings("ignore")  # of PyTorch, about its exporters
@pytest.mark.parametrize("dynamo", [True, False])
def test_torch_onnx_export_of_a_cell_names_the_function_to_call(dynamo, tmp_path):
    pytest.importorskip("onnxscript")
    with pytest.raises(Exception, match=r"onnx_export\.export\(cnorm\.Model\(module\.to_layers\(\)\), path\)"):
        torch.onnx.export(
            ct.LSTM(4, 6, preset="ba2016"), (torch.randn(3, 1, 4),), tmp_path / "m.onnx", dynamo=dynamo, verbose=False
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive(one_in=2)
@pytest.mark.filterwarnings("ignore")  # of PyTorch, about its exporters
@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "BatchNorm"])
def test_torch_onnx_export_of_norms_writes_standard_operators(name, dynamo, tmp_path):
    ort, _ = pytest.importorskip("onnxruntime"), pytest.importorskip("onnxscript")
    module, x = getattr(ct, name)(7).eval(), torch.randn(5, 7)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.rand(7) + 0.5)
    path = tmp_path / "norm.onnx"
    torch.onnx.export(module, (x,), path, dynamo=dynamo, verbose=False, **({} if dynamo else {"opset_version": 17}))
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    got = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    assert gap(torch.from_numpy(got), module(x)) < 1e-6
