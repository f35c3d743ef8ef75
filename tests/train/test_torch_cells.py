"""`cnorm.torch` step by step: the bits of sequences, and what PyTorch promises of a module and of its gradients."""

import concurrent.futures
import contextlib
import copy
import gc
import pickle
import threading
import weakref

import cells
import numpy as np
import pytest
from perturbed import succeed, succeed_apart

import cnorm

torch = pytest.importorskip("torch")
from torch.nn.utils import parametrizations, prune  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import cnorm.torch as ct  # noqa: E402
from cnorm import _core  # noqa: E402
from cnorm.torch import steps  # noqa: E402

SEQUENCES = {"LSTM": ct.LSTM, "GRU": ct.GRU, "RNN": ct.RNN}
CELLS = {"LSTM": ct.LSTMCell, "GRU": ct.GRUCell, "RNN": ct.RNNCell}


def unrolled(cell, x, state=None):
    """y [steps, batch, units] and the last state of a cell stepped over x."""
    y = []
    for frame in x:
        state = cell(frame, state)
        y.append(state[0] if cell.kind == "LSTM" else state)
    return torch.stack(y), state


def pair(kind, preset, inputs=4, units=10, **options):
    """A sequence module and a cell with the same weights."""
    sequence, cell = (modules[kind](inputs, units, preset=preset, **options) for modules in (SEQUENCES, CELLS))
    cell.load_state_dict(sequence.state_dict())
    return sequence, cell


def gradients(module):
    found = [p.grad for p in module.parameters()]
    module.zero_grad()
    return found


def same(ours, theirs):
    return all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("key", sorted(cnorm.PRESETS), ids="-".join)
def test_cells_sequences_operators_and_streams_have_the_same_bits(key, batch, isa):
    """Also the gradients: over 19 steps, whose rows fill more than one block of 16."""
    sequence, cell = pair(*key, eps=cells.EPS.get(key))
    x, dy = torch.randn(19, batch, 4, requires_grad=True), torch.randn(19, batch, 10)
    runs = [(sequence, lambda: sequence(x)[0]), (cell, lambda: unrolled(cell, x)[0])]
    results = []
    for module, run in [*runs, (sequence, lambda: by_operator(sequence, x))]:
        x.grad = None
        y = run()
        y.backward(dy)
        results.append([y.detach(), x.grad, *gradients(module)])
    assert same(results[0], results[1])
    assert same(results[0], results[2])
    streamed = cnorm.Model(cell.to_layers()).stream().process(np.ascontiguousarray(x.detach()[:, 0].numpy()))
    assert streamed.tobytes() == np.ascontiguousarray(results[1][0][:, 0].numpy()).tobytes()


def by_operator(module, x):
    weights = module.ways[0][0]
    state = torch.zeros(x.shape[1], module.output_size + module.units * (module.kind == "LSTM"))
    return torch.ops.cnorm.recurrent(x, state, weights.tensors(module), weights.text)[0]


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_plain_cells_match_torch(kind):
    ours, theirs = CELLS[kind](5, 12, preset="torch"), getattr(torch.nn, f"{kind}Cell")(5, 12).double()
    theirs.load_state_dict(ours.state_dict())
    x, state = torch.randn(3, 5, requires_grad=True), [torch.randn(3, 12, requires_grad=True) for _ in range(2)]
    x64, state64 = x.detach().double().requires_grad_(), [s.detach().double().requires_grad_() for s in state]
    for module, given, start in ((ours, x, state), (theirs, x64, state64)):
        found = module(given, tuple(start) if kind == "LSTM" else start[0])
        (found[0].square().sum() + found[1].sum() if kind == "LSTM" else found.square().sum()).backward()
    for a, b in zip((x, *state, *ours.parameters()), (x64, *state64, *theirs.parameters()), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-5, atol=1e-6)


def test_a_frame_without_a_batch_and_the_state_of_a_call():
    sequence, cell = pair("LSTM", "ba2016")
    x, start = torch.randn(3, 4), (torch.randn(10), torch.randn(10))
    y, last = unrolled(cell, x, start)
    want, end = sequence(x, tuple(part[None] for part in start))
    assert torch.equal(y, want)
    assert same(last, [part[0] for part in end])


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_a_loss_at_some_steps_only(kind):
    """Steps behind the last loss are not reached; their gradient is 0."""
    sequence, cell = pair(kind, "ba2016")
    x, w = torch.randn(9, 2, 4, requires_grad=True), torch.randn(2, 10)
    for function in (lambda: unrolled(cell, x)[0], lambda: sequence(x)[0]):
        (function()[2] * w).sum().backward()
    assert same(gradients(cell), gradients(sequence))
    y, _ = unrolled(cell, x)
    twice = torch.autograd.grad((y[2] * w).sum() + (y[6] * w).sum(), list(cell.parameters()))
    once = torch.autograd.grad((sequence(x)[0][[2, 6]] * w).sum(), list(sequence.parameters()))
    assert same(twice, once)


def test_the_graph_can_be_used_again_and_for_parts():
    """retain_graph, gradients of x alone, of weights alone, and of one weight: all have the same bits."""
    sequence, cell = pair("GRU", "dreamer_torch")
    x, parameters = torch.randn(5, 2, 4, requires_grad=True), list(cell.parameters())
    y = unrolled(cell, x)[0].square().sum()
    want = torch.autograd.grad(sequence(x)[0].square().sum(), [x, *sequence.parameters()])
    for _ in range(3):
        assert same(torch.autograd.grad(y, [x, *parameters], retain_graph=True), want)
        assert torch.equal(torch.autograd.grad(y, x, retain_graph=True)[0], want[0])
        assert torch.equal(torch.autograd.grad(y, parameters[1], retain_graph=True)[0], want[2])
    y.backward()
    assert same(gradients(cell), want[1:])


@pytest.mark.parametrize("saved", ["tape", "offloaded"])
def test_a_graph_that_was_not_retained_is_refused(saved):
    """As in PyTorch: a state that was not detached would have backpropagation go on to the first step of all."""
    cell, state = ct.GRUCell(4, 10, preset="ba2016"), None
    with torch.autograd.graph.save_on_cpu() if saved == "offloaded" else contextlib.nullcontext():
        first = cell(torch.randn(2, 4), state)
    first.sum().backward()
    with pytest.raises(RuntimeError, match="through the graph a second time"):
        cell(torch.randn(2, 4), first).sum().backward()


def test_two_graphs_at_once_and_gradients_that_add_up():
    sequence, cell = pair("LSTM", "ba2016")
    inputs = [torch.randn(4, 2, 4) for _ in range(2)]
    want = [torch.autograd.grad(sequence(x)[0].square().sum(), list(sequence.parameters())) for x in inputs]
    states, losses = [None, None], [0, 0]
    for t in range(4):  # the calls of both graphs alternate
        for k in range(2):
            states[k] = cell(inputs[k][t], states[k])
            losses[k] = losses[k] + states[k][0].square().sum()
    found = [torch.autograd.grad(loss, list(cell.parameters())) for loss in losses]
    for ours, theirs in zip(found, want, strict=True):
        assert same(ours, theirs)
    for x in inputs:
        unrolled(cell, x)[0].square().sum().backward()
    for got, first, second in zip(gradients(cell), *want, strict=True):
        assert torch.equal(got, first + second)


def test_hooks_see_one_gradient_for_each_backward_pass():
    cell, seen = ct.GRUCell(4, 6, preset="ba2016"), []
    parameter = next(cell.parameters())
    parameter.register_hook(lambda g: seen.append(g.clone()))
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    unrolled(cell, torch.randn(5, 2, 4))[0].sum().backward()
    assert len(seen) == 2
    assert torch.equal(*seen)


def test_threads_train_one_cell_with_the_same_bits():
    cell = ct.LSTMCell(4, 6, preset="ba2016")
    inputs = [torch.randn(20, 3, 4) for _ in range(4)]

    def train(x):
        return torch.autograd.grad(unrolled(cell, x)[0].square().sum(), list(cell.parameters()))

    wanted = [train(x) for x in inputs]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for got, one in zip(pool.map(train, inputs * 10), wanted * 10, strict=True):
            assert same(got, one)


@pytest.mark.parametrize("write", ["in place", "data", "numpy", "assigned data", "transposed data"])
def test_weights_written_between_two_steps_count_from_the_next_one(write):
    cell, other = (ct.RNNCell(10, 10, preset="ba2016") for _ in range(2))
    x, value = torch.randn(2, 10), other.weight_h.detach()
    h = cell(x)
    with torch.no_grad():
        if write == "in place":
            cell.weight_h.copy_(value)
        elif write == "data":
            cell.weight_h.data[...] = value
        elif write == "numpy":
            cell.weight_h.detach().numpy()[...] = value.numpy()
        elif write == "assigned data":
            cell.weight_h.data = value
        else:
            cell.weight_h.data = cell.weight_h.data.t()
    fresh = ct.RNNCell(10, 10, preset="ba2016")
    fresh.load_state_dict(cell.state_dict())
    assert torch.equal(cell(x, h), fresh(x, h))


@pytest.mark.parametrize("units", [10, 16])
@pytest.mark.parametrize("key", sorted(cnorm.PRESETS), ids="-".join)
def test_weights_that_change_are_packed_like_new_ones(key, units):
    """As an optimiser changes them; also -0, subnormal values and sums that cancel."""
    cell, fresh = (CELLS[key[0]](4, units, preset=key[1], eps=cells.EPS.get(key)) for _ in range(2))
    x = torch.randn(3, 4)
    cell(x)
    for _ in range(2):
        with torch.no_grad():
            for i, p in enumerate(cell.parameters()):
                p.copy_(torch.randn(p.shape))
                p.view(-1)[i % 3 :: 5] = -0.0
                p.view(-1)[i % 2 :: 7] = 1e-41
                p.view(-1)[::11] = -1.0
        fresh.load_state_dict(cell.state_dict())
        results = []
        for module in (cell, fresh):
            h = module(x)
            (h[0] if cell.kind == "LSTM" else h).square().sum().backward()
            results.append([*gradients(module), h[0] if cell.kind == "LSTM" else h])
        assert same(*results)
        again, anew = (cell._weights._packed.cell, _core.TrainedCell(fresh.to_layers()[0], *plan_of(fresh)))
        assert _core.same_network(again.network, anew.network)
    assert again.repacks or key in CENTRED


def plan_of(module):
    return module._weights._packed.cell.plan, module._weights._packed.cell.whole


CENTRED = {("GRU", "ba2016_code"), ("GRU", "dreamer_v2"), ("LSTM", "ba2016_code")}  # biases before a norm


def test_weights_that_become_nan_are_named():
    cell, x = ct.LSTMCell(4, 6, preset="ba2016"), torch.randn(2, 4)
    cell(x)
    with torch.no_grad():
        cell.gain_h[3] = float("nan")
    with pytest.raises(ValueError, match=r"weights\['gain_h'\] .* must be finite"):
        cell(x)


def test_an_optimiser_step_between_forward_and_backward_is_an_error():
    cell = ct.LSTMCell(4, 6, preset="ba2016")
    y, _ = unrolled(cell, torch.randn(3, 2, 4))
    with torch.no_grad():
        cell.weight_h.mul_(0.5)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: weight_h .*; expected version"):
        y.sum().backward()


def test_a_write_of_the_same_values_ends_a_graph_and_not_the_next_one():
    cell, x = ct.LSTMCell(4, 6, preset="ba2016"), torch.randn(2, 4)
    before = cell(x)[0]
    with torch.no_grad():
        cell.weight_h.mul_(1.0)
        cell(x)
    cell(x)[0].sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation: weight_h"):
        before.sum().backward()


def test_requires_grad_toggled_in_the_middle():
    cell, x = ct.GRUCell(4, 6, preset="ba2016"), torch.randn(2, 4)
    parameter = next(cell.parameters())
    cell(x).sum().backward()
    want = gradients(cell)
    parameter.requires_grad_(False)
    cell(x).sum().backward()
    found = gradients(cell)
    assert found[0] is None
    assert same(found[1:], want[1:])
    parameter.requires_grad_(True)
    cell(x).sum().backward()
    assert same(gradients(cell), want)
    cell.requires_grad_(False)
    x = x.clone().requires_grad_()
    cell(x, cell(x)).sum().backward()
    assert all(p.grad is None for p in cell.parameters())
    assert x.grad.abs().max() > 0
    assert not cell(x.detach()).requires_grad


def test_without_gradients_there_is_no_graph():
    cell, x = ct.LSTMCell(4, 6, preset="ba2016"), torch.randn(2, 4)
    with torch.no_grad():
        assert not cell(x)[0].requires_grad
    with torch.inference_mode():
        assert torch.equal(cell(x)[0], cell(x)[0])
    assert cell(x)[0].requires_grad


def test_second_derivatives_are_refused_by_name():
    cell, x = ct.LSTMCell(4, 6, preset="ba2016"), torch.randn(2, 4, requires_grad=True)
    for target in (x, cell.weight_x):
        gradient = torch.autograd.grad(cell(x)[0].sum(), target, create_graph=True)[0]
        with pytest.raises(RuntimeError, match="first-order gradients only"):
            gradient.sum().backward()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [ct.GRU, ct.GRUCell])
def test_transformations_of_torch_func_are_refused(make):
    module, x = make(4, 6, preset="torch"), torch.randn(5, 3, 4)
    with pytest.raises(NotImplementedError, match=r"vmap: give it a batch"):
        torch.func.vmap(lambda x: module(x)[0])(x)
    with pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
        torch.func.jvp(lambda x: module(x)[0], (x[0],), (torch.ones(3, 4),))
    with pytest.raises(NotImplementedError, match=r"torch\.autograd\.grad"):
        torch.func.grad(lambda x: module(x)[0].sum())(x[0])


@pytest.mark.parametrize("make", [ct.GRU, ct.GRUCell])
def test_functional_call_computes_with_the_given_weights_and_their_gradients(make):
    module, other, x = make(4, 6, preset="ba2016"), make(4, 6, preset="ba2016"), torch.randn(3, 4)
    given = {name: p.detach().clone().requires_grad_() for name, p in other.named_parameters()}
    for _ in range(2):
        y = torch.func.functional_call(module, {k: v * 1.0 for k, v in given.items()}, (x,))
        y, want = (y, other(x)) if make is ct.GRUCell else (y[0], other(x)[0])
        assert torch.equal(y, want)
        found = torch.autograd.grad(y.sum(), list(given.values()))
        assert same(found, torch.autograd.grad(want.sum(), list(other.parameters())))


@pytest.mark.parametrize("make", [ct.LSTM, ct.LSTMCell])
def test_pruned_and_parametrized_weights(make):
    module, x, number = make(4, 6, preset="torch"), torch.randn(3, 4), "_l0" if make is ct.LSTM else ""
    of_h, of_x = f"weight_hh{number}", f"weight_ih{number}"
    prune.random_unstructured(module, of_h, 0.5)
    parametrizations.weight_norm(module, of_x)
    plain = make(4, 6, preset="torch")
    plain.load_state_dict({name: getattr(module, name).detach() for name in plain.state_dict()})
    assert torch.equal(module(x)[0], plain(x)[0])
    module(x)[0].square().sum().backward()
    plain(x)[0].square().sum().backward()
    of_module, mask = getattr(module, f"{of_h}_orig").grad, getattr(module, f"{of_h}_mask")
    assert torch.equal(of_module, plain.get_parameter(of_h).grad * mask)
    assert getattr(module.parametrizations, of_x).original1.grad.abs().max() > 0
    with pytest.raises(ValueError, match="must have no forward hooks"):  # its weight is that of the last call
        cnorm.Model(module)
    prune.remove(module, of_h)
    assert cnorm.Model(module).run(x.numpy()).shape == (3, 6)


@pytest.mark.parametrize("make", [ct.LSTM, ct.LSTMCell])
def test_a_parametrization_is_computed_once_a_call(make):
    """Because it may have a state, such as the vectors of a spectral norm."""
    calls = []

    class Counted(torch.nn.Module):
        def forward(self, w):
            calls.append(1)
            return w * 1.0

    module = make(4, 6, preset="ba2016")
    torch.nn.utils.parametrize.register_parametrization(module, "weight_h", Counted())
    for _ in range(3):
        calls.clear()
        module(torch.randn(3, 4))
        assert len(calls) == 1


@pytest.mark.parametrize("make", [ct.LSTM, ct.LSTMCell])
@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_are_independent(make, how):
    module, x = make(4, 6, preset="ba2016"), torch.randn(3, 4)
    y = module(x)[0]
    other = how(module)
    assert torch.equal(other(x)[0], y)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1.0)
    assert torch.equal(module(x)[0], y)
    assert not torch.equal(other(x)[0], y)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_gives_the_same_gradients(reentrant):
    _, cell = pair("LSTM", "ba2016")
    x, w = torch.randn(6, 2, 4, requires_grad=True), torch.randn(6, 2, 10)

    def piece(x, h, c):
        y, (h, c) = unrolled(cell, x, (h, c))
        return y, h, c

    results = []
    for run in (lambda *a: checkpoint(piece, *a, use_reentrant=reentrant), piece):
        x.grad, state, y = None, (torch.zeros(2, 10),) * 2, []
        for k in (0, 3):
            out, *state = run(x[k : k + 3], *state)
            y.append(out)
        (torch.cat(y) * w).sum().backward()
        results.append([torch.cat(y), x.grad, *gradients(cell)])
    assert same(results[0][:2], results[1][:2])
    for got, want in zip(results[0], results[1], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_saved_tensors_may_be_offloaded():
    sequence, cell = pair("GRU", "ba2016")
    x = torch.randn(5, 2, 4, requires_grad=True)
    want = torch.autograd.grad(sequence(x)[0].square().sum(), [x, *sequence.parameters()])
    with torch.autograd.graph.save_on_cpu():
        y = unrolled(cell, x)[0]
    assert same(torch.autograd.grad(y.square().sum(), [x, *cell.parameters()]), want)


def test_autocast_computes_in_float32():
    cell, linear, x = ct.LSTMCell(4, 6, preset="ba2016"), torch.nn.Linear(4, 4), torch.randn(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        given = linear(x)
        assert given.dtype == torch.bfloat16
        h, _ = cell(given)
    assert h.dtype == torch.float32
    assert torch.equal(h, cell(given.float())[0])
    h.sum().backward()
    assert linear.weight.grad is not None


@pytest.mark.parametrize("half", ["x", "state", "both"])
@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_widens_what_is_half(half, compiled):
    cell, x, state = ct.LSTMCell(4, 6, preset="ba2016"), torch.randn(2, 4), (torch.randn(2, 6), torch.randn(2, 6))
    x = x.bfloat16() if half != "state" else x
    state = tuple(part.bfloat16() for part in state) if half != "x" else state
    step = torch.compile(cell, backend="aot_eager", fullgraph=True) if compiled else cell
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = step(x, state)
    assert same(got, cell(x.float(), tuple(part.float() for part in state)))


def test_default_dtype_and_device_do_not_matter():
    cell, x = ct.LSTMCell(4, 6, preset="ba2016"), torch.randn(2, 4)
    want = cell(x)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            got = cell(x)
            got[0].sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)
    assert same(got, want)


@pytest.mark.parametrize(
    ("x", "state", "error"),
    [
        (torch.zeros(2, 5), None, "x must have shape"),
        (torch.zeros(1, 2, 4), None, "x must have shape"),
        (np.zeros((2, 4), np.float32), None, "x must be a tensor, got ndarray"),
        (torch.zeros(2, 4).double(), None, "x must have dtype float32, got float64"),
        (torch.zeros(2, 4, device="meta"), None, "x must be a CPU tensor"),
        (torch.zeros(2, 4), torch.zeros(2, 6), "pair of tensors"),
        (torch.zeros(2, 4), (torch.zeros(2, 6), torch.zeros(1, 6)), "c must have shape"),
        (torch.zeros(2, 4), (torch.zeros(2, 5), torch.zeros(2, 6)), "h must have shape"),
        (torch.zeros(2, 4), (torch.zeros(2, 6), 5), "c must be a tensor"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(x, state, error):
    with pytest.raises((ValueError, TypeError), match=error):
        ct.LSTMCell(4, 6, preset="ba2016")(x, state)


@pytest.fixture
def no_exchange():
    _core.use_tensors(*steps.TENSORS, None)
    yield
    _core.use_tensors(*steps.TENSORS, steps.EXCHANGE)


def test_tensors_are_read_by_their_methods_where_torch_has_no_exchange_api(no_exchange):
    """As before PyTorch 2.10."""
    cell, x = ct.LSTMCell(4, 6, preset="ba2016"), torch.randn(3, 4)
    want = ct.LSTM(4, 6, preset="ba2016")
    want.load_state_dict(cell.state_dict())
    given = x.t().contiguous().t(), x.double()
    assert torch.equal(cell(given[0])[0], want(x[None])[0][0])
    with pytest.raises(TypeError, match="x must have dtype float32, got float64"):
        cell(given[1])
    cell(x)[0].square().sum().backward()
    want(x[None])[0].square().sum().backward()
    assert same(gradients(cell), gradients(want))
    cell.weight_h.detach().numpy()[...] *= 2
    want.load_state_dict(cell.state_dict())
    assert torch.equal(cell(x)[0], want(x[None])[0][0])


def test_tensors_that_outlive_a_transformation():
    """PyTorch's own operators unwrap them; so does a cell."""
    cell, x, kept = ct.GRUCell(4, 6, preset="ba2016"), torch.randn(3, 4), []
    torch.func.grad(lambda x: (kept.append(x), x.sum())[1])(x)
    assert torch.equal(cell(kept[0]), cell(x))
    with torch.no_grad():
        assert torch.equal(cell(kept[0]), cell(x))


def test_any_strides_and_views_give_the_same_bits():
    cell, x = ct.GRUCell(4, 6, preset="ba2016"), torch.randn(3, 4)
    want = cell(x)
    assert torch.equal(cell(x.t().contiguous().t()), want)
    assert torch.equal(cell(torch.randn(3, 8)[:, ::2].copy_(x)), want)
    negated = torch.complex(torch.zeros(3, 4), -x).conj().imag
    assert negated.is_neg()
    assert torch.equal(cell(negated), want)
    assert torch.equal(cell(x[:1].expand(3, 4)), cell(x[:1].repeat(3, 1)))


def reduce_gradients(store):
    """One process; the reduction is that of gradients as autograd accumulates them."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    _, cell = pair("LSTM", "ba2016")
    x = torch.randn(5, 2, 4)
    unrolled(cell, x)[0].sum().backward()
    want = gradients(cell)
    parallel = torch.nn.parallel.DistributedDataParallel(Unrolled(cell))
    for _ in range(2):
        parallel(x).sum().backward()
        assert same(gradients(cell), want)


def test_distributed_data_parallel(tmp_path):
    succeed_apart(reduce_gradients, str(tmp_path / "store"))


class Unrolled(torch.nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        return unrolled(self.cell, x)[0]


def test_deleted_modules_leave_nothing():
    kept = []
    for make in (ct.LSTM, ct.LSTMCell):
        module = make(4, 6, preset="ba2016")
        module(torch.randn(3, 4))[0].sum().backward()
        weights = module.ways[0][0] if make is ct.LSTM else module._weights
        kept += [weakref.ref(weights._packed), weakref.ref(module.get_parameter("weight_h"))]
        del module, weights
    gc.collect()
    assert [ref() for ref in kept] == [None] * 4


def test_compiled_cells_have_the_same_bits():
    cell, x = ct.LSTMCell(4, 6, preset="ba2016"), torch.randn(3, 2, 4)
    net = Unrolled(cell)
    net(x).square().sum().backward()
    want = gradients(cell)
    got = torch.compile(net, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(got, net(x))
    got.square().sum().backward()
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(gradients(cell), want, strict=True))
    assert torch.equal(torch.export.export(net, (x,)).module()(x), net(x))


@pytest.fixture
def results_made_by():
    """Set the function that makes the tensors of results; it runs in the middle of each call."""
    shape, _, readable = steps.TENSORS[2]
    yield lambda function: _core.use_tensors(*steps.TENSORS[:2], (shape, function, readable), steps.EXCHANGE)
    _core.use_tensors(*steps.TENSORS, steps.EXCHANGE)


def test_two_threads_in_the_backward_pass_of_one_graph(results_made_by):
    """Both were in it when each overwrote the tape of the call."""
    cell, x = ct.LSTMCell(4, 6, preset="ba2016"), torch.randn(3, 4, requires_grad=True)
    results, given = cell(x), [torch.randn(3, 6) for _ in range(2)]
    barrier = threading.Barrier(2, timeout=60)

    def meet(*_):
        barrier.wait()

    def grads(g):
        return torch.autograd.grad(results, [x, *cell.parameters()], [g, g], retain_graph=True)

    wanted = [grads(g) for g in given]
    results = cell(x)
    node = next(node for node, _ in results[0].grad_fn.next_functions if node.name() == "_PackBackward")
    hook = node.register_prehook(meet)
    results_made_by(lambda like: (meet(), torch.empty_like(like))[1])
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = list(pool.map(grads, given))
    hook.remove()
    assert all(map(same, found, wanted))


OTHER_MEMORY = """
    import gc, torch
    import cnorm.torch as ct
    from cnorm import _core
    from cnorm.torch import steps

    cell, x = ct.GRUCell(1 << 12, 16, preset="torch"), torch.ones(1, 1 << 12)
    for parameter in cell.parameters():
        parameter.data *= 0.001  # so that gates are not saturated
    wanted = [cell(x), cell(torch.zeros_like(x))]

    class Finaliser:
        def __init__(self):
            self.me = self

        def __del__(self):
            x.set_(torch.zeros_like(x))

    def result(like):
        gc.collect()  # as any object that it makes may do
        return torch.empty_like(like)

    _core.use_tensors(*steps.TENSORS[:2], (steps.TENSORS[2][0], result, steps.TENSORS[2][2]), steps.EXCHANGE)
    gc.disable()
    Finaliser()
    found = cell(x)
    assert not x.any()
    assert any(torch.equal(found, one) for one in wanted), "freed memory was read"
"""


def test_a_finaliser_that_gives_the_frame_other_memory():
    """The memory of arguments is asked for when all results are there."""
    succeed(OTHER_MEMORY)
