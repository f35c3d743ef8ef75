"""`cnorm.torch` called as torch.nn: PackedSequence, dropout, names of arguments; batch norm in eval mode."""

import cells
import pytest

torch = pytest.importorskip("torch")
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence  # noqa: E402

import cnorm.torch as ct  # noqa: E402

SEQUENCES = {"LSTM": ct.LSTM, "GRU": ct.GRU, "RNN": ct.RNN}
LENGTHS = [5, 9, 9, 2, 1]


def tensors(state):
    return list(state) if isinstance(state, tuple) else [state]


def run(module, x, state, pack):
    """Padded y, the last state and all gradients of a module on sequences of different lengths."""
    x, state = x.clone().requires_grad_(), [part.clone().requires_grad_() for part in state]
    given = pack(x)
    y, last = module(given, tuple(state) if len(state) == 2 else state[0])
    assert (y.sorted_indices is None) == (given.sorted_indices is None)
    y = pad_packed_sequence(y)[0]
    weight = torch.arange(y.numel(), dtype=y.dtype).reshape(y.shape).sin()
    ((y * weight).sum() + sum(part.square().sum() for part in tensors(last))).backward()
    found = [y, *tensors(last), x.grad, *(part.grad for part in state), *(p.grad for p in module.parameters())]
    module.zero_grad()
    return found


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"proj_size": 3}], ids=str)
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_packed_sequences_match_torch(kind, options):
    """Sorted or not; lengths that occur twice, once, and the length 1."""
    if kind == "GRU" and "proj_size" in options:
        pytest.skip("a projection belongs to the LSTM")
    torch.manual_seed(0)
    ours, theirs = SEQUENCES[kind](4, 6, preset="torch", **options), getattr(torch.nn, kind)(4, 6, **options)
    theirs.load_state_dict(ours.state_dict())
    theirs = theirs.double()
    x, rows = torch.randn(9, 5, 4), options.get("num_layers", 1) * (1 + options.get("bidirectional", False))
    state = [torch.randn(rows, 5, options.get("proj_size", 6))] + [torch.randn(rows, 5, 6)] * (kind == "LSTM")
    for sort in (False, True):
        lengths = sorted(LENGTHS, reverse=True) if sort else LENGTHS

        def pack(x, lengths=lengths, sort=sort):
            return pack_padded_sequence(x, lengths, enforce_sorted=sort)

        found = run(ours, x, state, pack)
        want = run(theirs, x.double(), [part.double() for part in state], pack)
        for a, b in zip(found, want, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


def test_compiled_models_run_packed_sequences_without_a_graph_of_them():
    """Lengths differ from batch to batch: a graph of the calls would be compiled anew for each, which takes minutes."""
    torch.manual_seed(0)
    module, graphs = ct.LSTM(4, 6, 2, preset="ba2016", bidirectional=True), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda given: module(given)[0].data.square(), backend=backend)
    for lengths in (LENGTHS, [9, 3, 4, 7, 1]):
        given = pack_padded_sequence(torch.randn(9, 5, 4), lengths, enforce_sorted=False)
        with torch.no_grad():  # PyTorch 2.13 warns of its own reading of a gradient
            assert torch.equal(compiled(given), module(given)[0].data.square())
    assert not any("cnorm" in str(node.target) for graph in graphs for node in graph.graph.nodes)


def test_repr_says_what_is_not_the_default():
    assert repr(ct.GRU(4, 6, preset="torch")) == repr(ct.GRU(4, 6, preset="torch", bias=True))
    text = repr(ct.LSTM(4, 6, 2, False, True, 0.5, True, preset="torch"))
    for given in ("num_layers=2", "bias=False", "batch_first=True", "dropout=0.5", "bidirectional=True"):
        assert given in text


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_each_row_of_a_packed_sequence_has_the_bits_of_its_own_run(kind):
    module = SEQUENCES[kind](4, 6, preset="ba2016")
    rows = [torch.randn(n, 4) for n in LENGTHS]
    y, last = module(pack_sequence(rows, enforce_sorted=False))
    padded, lengths = pad_packed_sequence(y)
    assert lengths.tolist() == LENGTHS
    for b, row in enumerate(rows):
        want, end = module(row)
        assert torch.equal(padded[: len(row), b], want)
        assert all(torch.equal(a[:, b], e) for a, e in zip(tensors(last), tensors(end), strict=True))


def test_a_packed_sequence_of_equal_lengths_is_a_batch():
    module, x = ct.GRU(4, 6, preset="ba2016"), torch.randn(7, 3, 4)
    y, last = module(pack_padded_sequence(x, [7] * 3))
    want, end = module(x)
    assert torch.equal(pad_packed_sequence(y)[0], want)
    assert torch.equal(last, end)
    gradients = [torch.autograd.grad(out.square().sum(), list(module.parameters())) for out in (y.data, want)]
    assert all(map(torch.equal, *gradients))


def test_dropout_between_the_layers():
    module = ct.LSTM(4, 64, preset="torch", num_layers=3, dropout=0.5)
    x = torch.randn(5, 2, 4)
    torch.manual_seed(3)
    first = module(x)[0]
    torch.manual_seed(3)
    assert torch.equal(module(x)[0], first)
    assert not torch.equal(module(x)[0], first)
    plain = ct.LSTM(4, 64, preset="torch", num_layers=3)
    plain.load_state_dict(module.state_dict())
    assert torch.equal(module.eval()(x)[0], plain(x)[0])
    whole = ct.LSTM(4, 64, preset="torch", num_layers=2, dropout=1.0)
    assert torch.equal(whole(x)[0], whole(torch.zeros_like(x))[0])  # the second layer sees zeros only
    with pytest.warns(UserWarning, match="num_layers is 1: got dropout=0.5"):
        single = ct.LSTM(4, 64, preset="torch", dropout=0.5)
    assert torch.equal(single(x)[0], single(x)[0])


def test_arguments_of_torch_nn():
    module = ct.LSTM(4, hidden_size=6, preset="torch", num_layers=2, batch_first=True)
    assert module.hidden_size == module.units == 6
    assert ct.GRUCell(4, hidden_size=6, preset="torch").units == 6
    for make in (ct.LSTM, ct.LSTMCell):
        with pytest.raises(TypeError, match="hidden_size, or units"):
            make(4, preset="torch")
        with pytest.raises(TypeError, match="hidden_size, or units"):
            make(4, 6, preset="torch", units=6)
        for name, value in (("input_size", 0), ("units", 2.5), ("proj_size", -1)):
            given = {"input_size": 4, "units": 6, "preset": "torch"} | {name: value}
            with pytest.raises(ValueError, match=f"{name} must be an integer"):
                make(**given)
        with pytest.raises(ValueError, match="hidden_size must be an integer of at least 1, got 0"):
            make(4, 0, preset="torch")
    with pytest.raises(ValueError, match="dropout must be a probability"):
        ct.LSTM(4, 6, preset="torch", dropout=1.5)
    with pytest.raises(ValueError, match="has no projection"):
        ct.LSTM(4, 6, preset="ba2016", proj_size=2)
    with pytest.raises(ValueError, match="a state must have shape"):
        module(torch.zeros(2, 3, 4), (torch.zeros(2, 3, 6), torch.zeros(1, 3, 6)))


@pytest.mark.parametrize("key", [("LSTM", "ba2016"), ("GRU", "torch")], ids="-".join)
def test_a_state_may_have_any_strides(key):
    module, x = SEQUENCES[key[0]](4, 6, preset=key[1], eps=cells.EPS.get(key), batch_first=True), torch.randn(3, 5, 4)
    state = [torch.randn(3, 1, 6).transpose(0, 1) for _ in range(1 + (key[0] == "LSTM"))]
    given = tuple(state) if len(state) == 2 else state[0]
    whole = [part.contiguous() for part in state]
    assert torch.equal(module(x, given)[0], module(x.clone(), tuple(whole) if len(whole) == 2 else whole[0])[0])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(4, 1), (4, 1, 7), (5,), (4, 6), ()])
def test_batch_norm_refuses_other_numbers_of_channels(training, shape):
    with pytest.raises(ValueError, match=r"x must have shape \(samples, 5, \.\.\.\)"):
        ct.BatchNorm(5).train(training)(torch.zeros(shape))


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_refuses_half_types(training):
    with pytest.raises(TypeError, match="x must have dtype float32 or float64, got float16"):
        ct.BatchNorm(5).train(training)(torch.zeros(4, 5, dtype=torch.float16))
