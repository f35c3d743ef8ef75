"""Second derivatives, freed storage, inference mode and negative bits: right or an error, never a number of nowhere."""

import pytest

torch = pytest.importorskip("torch")

import cnorm.torch as ct  # noqa: E402

SEQUENCES = {"LSTM": ct.LSTM, "GRU": ct.GRU, "RNN": ct.RNN}
CELLS = {"LSTM": ct.LSTMCell, "GRU": ct.GRUCell, "RNN": ct.RNNCell}
FIRST_ORDER = "first-order gradients only"


def made(kind, single, preset="ba2016"):
    module = (CELLS if single else SEQUENCES)[kind](4, 6, preset=preset)
    x = torch.randn(*([] if single else [5]), 3, 4)
    state = [torch.randn(*([] if single else [1]), 3, 6) for _ in range(1 + (kind == "LSTM"))]
    return module, x, state


def output(module, x, state):
    result = module(x, tuple(state) if len(state) == 2 else state[0])
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("kind", SEQUENCES)
def test_second_derivatives_are_refused(kind, single):
    """The gradient of x, of a state or of a weight, differentiated by any of them."""
    module, x, state = made(kind, single)
    leaves = [t.requires_grad_() for t in (x, *state)] + list(module.parameters())
    for first in range(len(leaves)):
        (g,) = torch.autograd.grad(output(module, x, state).square().sum(), leaves[first], create_graph=True)
        for second in leaves:
            with pytest.raises(RuntimeError, match=FIRST_ORDER):
                torch.autograd.grad(g.sum(), second, allow_unused=True, retain_graph=True)


@pytest.mark.parametrize("kind", SEQUENCES)
@pytest.mark.parametrize("second", ["hessian", "hvp", "vhp"])
def test_functional_second_derivatives_are_refused(kind, second):
    module, x, state = made(kind, False)
    given = (x,) if second == "hessian" else (x, torch.ones_like(x))
    with pytest.raises(RuntimeError, match=FIRST_ORDER):
        getattr(torch.autograd.functional, second)(lambda z: output(module, z, state).square().sum(), *given)


def test_second_derivatives_of_checkpointed_cells_are_refused():
    module, x, _ = made("GRU", True)
    x.requires_grad_()
    y = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)
    (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=FIRST_ORDER):
        torch.autograd.grad(g.sum(), module.weight_x, allow_unused=True)


def freed(*shape, offset=False):
    t = torch.randn(shape[0] + offset, *shape[1:])[offset:]
    t.untyped_storage().resize_(0)
    return t


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("kind", SEQUENCES)
def test_freed_storage_is_an_error(kind, single, offset):
    module, x, state = made(kind, single)
    with pytest.raises(RuntimeError, match=r"^x has .* not allocated"):
        output(module, freed(*x.shape, offset=offset), state)
    with pytest.raises(RuntimeError, match=r"^h has .* not allocated"):
        output(module, x, [freed(*state[0].shape, offset=offset), *state[1:]])
    y = output(module, x, state)
    with pytest.raises(RuntimeError, match="not allocated"):
        y.backward(freed(*y.shape, offset=offset))


@pytest.mark.parametrize("offset", [False, True])
def test_freed_storage_of_norms_is_an_error(offset):
    for function in (ct.layer_norm, ct.rms_norm, ct.BatchNorm(8)):
        with pytest.raises(RuntimeError, match="not allocated"):
            function(freed(6, 8, offset=offset))


def test_a_sparse_tensor_is_an_error():
    with pytest.raises(TypeError, match="dense tensor"):
        made("GRU", True)[0](torch.eye(4).to_sparse())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modules_made_in_inference_mode_can_be_called(mode):
    for kind in SEQUENCES:
        with torch.inference_mode():
            module, x, state = made(kind, False, "torch")
        theirs = getattr(torch.nn, kind)(4, 6)
        theirs.load_state_dict(module.state_dict())
        with mode():
            torch.testing.assert_close(output(module, x, state), output(theirs, x, state))


def test_negative_bits_count():
    module, x, _ = made("LSTM", False, "torch")
    module(x)
    module.weight_hh_l0.data = torch._neg_view(module.weight_hh_l0.data)
    theirs = torch.nn.LSTM(4, 6)
    theirs.load_state_dict(module.state_dict())
    torch.testing.assert_close(module(x)[0], theirs(x)[0])
    torch.testing.assert_close(module(torch._neg_view(x))[0], module(-x)[0])
    assert torch.equal(ct.layer_norm(torch._neg_view(x)), ct.layer_norm(-x))
