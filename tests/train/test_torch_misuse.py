"""What `cnorm.torch` and the tapes below it refuse: shapes, dtypes and transformations that have no right result."""

import cells
import numpy as np
import pytest
from tapes import tape_of

from cnorm import _core

torch = pytest.importorskip("torch")
import cnorm.torch as ct  # noqa: E402


@pytest.fixture
def gru():
    """The arguments of the operator `recurrent`, and its results."""
    module = ct.GRU(8, 16, preset="torch")
    text = module.ways[0][0].text
    x, state = torch.randn(3, 2, 8), torch.randn(2, 16)
    weights = module.ways[0][0].tensors(module)
    return x, state, weights, text, torch.ops.cnorm.recurrent(x, state, weights, text)


@pytest.mark.parametrize("steps", [2, 50])
@pytest.mark.parametrize("assign", ["data", "parameter"])
def test_a_parameter_of_another_shape_is_refused(assign, steps):
    module, wide = ct.GRU(8, 16, preset="torch"), torch.zeros(48, 1 << 14)
    module(torch.ones(steps, 4, 8))
    if assign == "data":
        module.weight_ih_l0.data = wide
    else:
        module.weight_ih_l0 = torch.nn.Parameter(wide)
    with pytest.raises(ValueError, match=r"x must have shape \(\d+, 4, 16384\) for these weights"):
        module(torch.ones(steps, 4, 8))


@pytest.mark.parametrize("shape", [(3, 2, 7), (3, 2, 9), (3, 2), (3, 2, 8, 1), (3, 2, 0)])
def test_the_operator_refuses_x_of_another_shape(gru, shape):
    with pytest.raises(ValueError, match="x must have shape"):
        torch.ops.cnorm.recurrent(torch.zeros(shape), *gru[1:4])


@pytest.mark.parametrize("shape", [(2, 1), (1, 16), (2, 99), (16,), (2, 16, 1)])
def test_the_operator_refuses_a_state_of_another_shape(gru, shape):
    with pytest.raises(ValueError, match="the state must have shape"):
        torch.ops.cnorm.recurrent(gru[0], torch.zeros(shape), *gru[2:4])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dy": torch.zeros(3, 2, 15)}, "dy must have shape"),
        ({"dy": torch.zeros(3, 2, 17)}, "dy must have shape"),
        ({"dy": torch.zeros(3, 16)}, "dy must have shape"),
        ({"dlast": torch.zeros(2, 1)}, "dlast must have shape"),
        ({"dlast": torch.zeros(1, 16)}, "dlast must have shape"),
        ({"dlast": torch.zeros(2, 99)}, "dlast must have shape"),
        ({"tape": torch.zeros(1)}, "memory must have shape"),
        ({"tape": torch.full((1,), float("nan"))}, "memory must have shape"),
        ({"dy": torch.zeros(4, 2, 16)}, "memory must have shape"),
        ({"tape": "double"}, "the tape must have dtype float32"),
        ({"dy": torch.zeros(3, 2, 16).double()}, "dy must have dtype float32"),
    ],
    ids=str,
)
def test_the_backward_operator_refuses_other_shapes_and_dtypes(gru, change, message):
    _, _, weights, text, (y, last, tape) = gru
    given = {"dy": torch.zeros_like(y), "dlast": torch.zeros_like(last), "tape": tape} | change
    if isinstance(given["tape"], str):
        given["tape"] = tape.double()
    with pytest.raises((ValueError, TypeError), match=message):
        torch.ops.cnorm.recurrent_backward(*given.values(), weights, text, True)


FLAT = np.zeros(2 * 3 * 8, np.float32)


@pytest.mark.parametrize(
    "x",
    [
        FLAT.reshape(2, 3, 8)[:, :, :7],
        FLAT.reshape(2, 3, 8).astype(np.float64),
        FLAT.reshape(2, 3, 8).astype(">f4"),
        FLAT.reshape(3, 2, 8),
        FLAT[:-8],
        FLAT.reshape(8, 3, 2).T,
        np.frombuffer(b"\0" * (4 * 48 + 1), np.uint8)[1:].view(np.float32).reshape(2, 3, 8),
    ],
    ids=lambda x: f"{x.dtype}{x.shape}{x.flags.carray}",
)
def test_a_tape_compares_every_array_with_its_sizes(x, rng):
    """Each of x, y, dy and dx, before its data is used; the layer has as many outputs as inputs."""
    tape = tape_of([cells.random_cell(("GRU", "torch"), rng, 8, 8)[0]], 2, 3)
    good = np.zeros((2, 3, 8), np.float32)
    calls = [(tape.run, (x, good)), (tape.run, (good, x)), (tape.backward, (x,)), (tape.backward, (good, x))]
    for call, arrays in calls:
        with pytest.raises((ValueError, TypeError), match=r"\b(x|y|dy|dx) must"):
            call(0, 2, *arrays)
    for read_only in (good[:], np.frombuffer(good.tobytes(), np.float32).reshape(2, 3, 8)):
        tape.run(0, 2, read_only, good)
    with pytest.raises(ValueError, match=r"y must be .*writable"):
        tape.run(0, 2, good, read_only)
    for memory in (tape.memory[:-1], tape.memory.astype(np.float64), np.zeros(1, np.float32)):
        with pytest.raises((ValueError, TypeError), match="memory must"):
            _core.Tape([(cells.random_cell(("GRU", "torch"), rng, 8, 8)[0], 8)], 2, 3, None, memory)


def test_a_vector_of_another_length_is_not_loaded(rng):
    layer = cells.random_cell(("GRU", "torch"), rng, 8, 8)[0]
    tape, packed = tape_of([layer], 2, 3), layer.packed()
    for name in ("bias", "bias_n"):
        for size in (1, 1 << 20):
            with pytest.raises(ValueError, match="a vector must have"):
                tape.load(0, packed | {name: np.zeros(size, np.float32)})


def norm_and_input(name):
    x = torch.randn(5, 7)
    if name in ("layer_norm", "rms_norm"):
        return getattr(ct, name), x
    if name == "BatchNorm":
        return ct.BatchNorm(7), x
    module = getattr(ct, name)(7, 6, preset="torch")
    return lambda x: module(x[:, None])[0], x


@pytest.mark.parametrize("norm", [ct.layer_norm, ct.rms_norm])
def test_norms_of_what_is_no_tensor_are_refused_by_name(norm):
    x = torch.randn(5, 7)
    with pytest.raises(TypeError, match=r"^x must be a tensor, got ndarray$"):
        norm(x.numpy())
    with pytest.raises(TypeError, match=r"^weight must be a tensor, got tuple; its shape is the normalised one$"):
        norm(x, (7,))


@pytest.mark.filterwarnings("ignore")  # of PyTorch, in torch.func
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "BatchNorm", "GRU", "LSTM"])
def test_forward_mode_derivatives_are_refused(name):
    """PyTorch takes the derivative of a custom operator for zero, without an error."""
    function, x = norm_and_input(name)
    with pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
        torch.func.jvp(function, (x,), (torch.ones_like(x),))
    with pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
        torch.func.jacfwd(function)(x)
    with pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
        torch.func.linearize(function, x)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode"):
        function(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
    with torch.autograd.forward_ad.dual_level():
        function(x)  # without a tangent


@pytest.mark.filterwarnings("ignore")
def test_forward_mode_derivatives_by_weights_are_refused():
    norm, x = ct.LayerNorm(7), torch.randn(5, 7)
    with pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
        torch.func.jvp(lambda w: ct.layer_norm(x, w, norm.bias), (norm.weight.detach(),), (torch.ones(7),))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["layer_norm", "GRU"])
def test_reverse_mode_by_torch_func_is_refused(name):
    function, x = norm_and_input(name)
    for transform in (torch.func.grad, lambda f: lambda x: torch.func.vjp(f, x)):
        with pytest.raises(NotImplementedError, match=r"use torch\.autograd\.grad or backward"):
            transform(lambda x: function(x).sum())(x)
