"""`cnorm.Model` of torch modules: the outputs of torch, and refusals by name."""

from collections import OrderedDict

import numpy as np
import pytest
from torch_modules import doubled, nn, normed, through, torch

import cnorm


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def agrees(model, modules, inputs=5):
    x = torch.randn(20, inputs)
    assert model.check(x.numpy(), through(modules, x)).ok, model


STACKS = {
    "LSTM": lambda: [nn.LSTM(5, 8, num_layers=2, dropout=0.5), nn.Linear(8, 3), nn.Sigmoid()],
    "GRU without biases": lambda: [nn.Linear(5, 6), nn.Tanh(), nn.GRU(6, 4, bias=False)],
    "RNN of relu": lambda: [
        nn.RNN(5, 8, nonlinearity="relu"),
        nn.LayerNorm(8, eps=1e-3),
        nn.Dropout(),
        nn.Linear(8, 2),
    ],
    "LSTMCell": lambda: [nn.LSTMCell(5, 8), nn.Identity(), nn.Linear(8, 3, bias=False)],
    "GRUCell": lambda: [nn.GRUCell(5, 8), nn.LayerNorm(8, elementwise_affine=False), nn.Linear(8, 3)],
    "RNNCell": lambda: [nn.RNNCell(5, 8, nonlinearity="relu"), nn.Linear(8, 3)],
    "batch norm behind a product": lambda: [
        nn.Linear(5, 6, bias=False),
        normed(6),
        nn.ReLU(),
        nn.Linear(6, 6),
        normed(6),
    ],
    "batch norm first": lambda: [normed(5), nn.LSTM(5, 4)],
    "weight norm": lambda: [nn.utils.parametrizations.weight_norm(nn.Linear(5, 6)), nn.ReLU(), nn.Linear(6, 3)],
    "projection": lambda: [nn.LSTM(5, 8, proj_size=3)],
}


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.parametrize("stack", STACKS)
def test_modules_compute_what_torch_does(stack):
    modules = STACKS[stack]()
    agrees(cnorm.Model(modules), modules)
    if not any(isinstance(module, nn.RNNBase | nn.RNNCellBase) for module in modules):
        agrees(cnorm.Model(nn.Sequential(*modules)), modules)


ELU, TIED, NORM = nn.ELU(), nn.Linear(5, 5), nn.LayerNorm(5)
REPEATED = {
    "an activation": lambda: [nn.Linear(5, 8), ELU, nn.Linear(8, 5), ELU, nn.Linear(5, 3), ELU],
    "a product": lambda: [TIED, nn.Tanh(), TIED],
    "a norm": lambda: [NORM, TIED, NORM],
    "a batch norm": lambda: [nn.Linear(5, 5), norm := normed(5), nn.Tanh(), nn.Linear(5, 5), norm],
    "a Sequential": lambda: [inner := nn.Sequential(nn.Linear(5, 5), ELU, nn.Linear(5, 5), ELU), nn.Tanh(), inner],
    "a cell": lambda: [cell := nn.GRU(5, 5), nn.Tanh(), cell],
}


@pytest.mark.parametrize("made", REPEATED)
def test_a_module_that_stands_twice_runs_twice(made):
    """`named_children` leaves out the second place; a Sequential runs both."""
    modules = REPEATED[made]()
    names = [chr(ord("a") + i) for i in range(len(modules))]
    for whole in (modules, nn.Sequential(*modules), [nn.Sequential(*modules)]):
        agrees(cnorm.Model(whole), modules)
    agrees(cnorm.Model(nn.Sequential(OrderedDict(zip(names, modules, strict=True)))), modules)
    agrees(cnorm.Model(nn.Sequential(*modules, nn.Tanh())[:-1]), modules)


def test_a_single_module():
    lstm = nn.LSTM(5, 4)
    agrees(cnorm.Model(lstm), [lstm])


def test_a_batch_norm_is_folded():
    model = cnorm.Model([nn.Linear(5, 6), normed(6), nn.ReLU()])
    assert [layer.kind for layer in model.layers] == ["Linear", "Activation"]
    named = cnorm.Model([("first", nn.Linear(5, 6)), ("second", normed(6)), cnorm.Multiply("first")])
    assert [(layer.kind, layer.name) for layer in named.layers] == [
        ("Linear", "first"), ("Linear", "second"), ("Multiply", None),
    ]  # fmt: skip


def test_names_of_a_sequential_and_of_pairs():
    network = nn.Sequential(OrderedDict(encoder=nn.Linear(5, 6), mask=nn.Sequential(nn.Linear(6, 6), nn.Sigmoid())))
    model = cnorm.Model([*network.named_children(), cnorm.Multiply("encoder", name="y")], ("y", "mask"))
    assert [layer.name for layer in model.layers] == ["encoder", None, "mask", "y"]
    x = torch.randn(7, 5)
    with torch.no_grad():
        encoded = network.encoder(x)
        mask = network.mask(encoded)
    y = model.views(model.run(x.numpy()))
    np.testing.assert_allclose(y["y"], encoded * mask, atol=1e-6)
    np.testing.assert_allclose(y["mask"], mask, atol=1e-6)
    assert [layer.name for layer in cnorm.Model(network).layers] == ["encoder", None, "mask"]


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(5, 4)


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Sequential(nn.Sequential):
    """Of the name of torch's."""

    def forward(self, x):
        return x + super().forward(x)


@pytest.mark.parametrize(
    ("made", "error", "message"),
    [
        (
            Network,
            ValueError,
            r"layers\[0\] must be a module of torch.nn .* got Network: what its forward",
        ),
        (lambda: nn.Sequential(nn.Linear(5, 5), Scaled(5, 5)), ValueError, r"layers\[1\] must be .* got Scaled"),
        (
            lambda: [nn.Linear(5, 5), nn.MultiheadAttention(5, 1)],
            ValueError,
            r"layers\[1\] must be of a class of torch.nn .*LayerNorm, Tanh, .* got MultiheadAttention",
        ),
        (lambda: Sequential(nn.Linear(5, 5)), ValueError, "got Sequential: what its forward computes"),
        (lambda: [nn.Linear], TypeError, r"layers\[0\] must be a layer such as .*, got the class Linear"),
        (lambda: [nn.BatchNorm1d(5, track_running_stats=False)], ValueError, "must have running statistics"),
        (lambda: [nn.Conv1d(5, 5, 3)], ValueError, r"layers\[0\], Conv1d: write cnorm.CausalConv1d\(module\) where"),
        (lambda: [nn.ConvTranspose1d(5, 5, 3)], ValueError, r"write cnorm.ConvTranspose1d\(module, positions=\.\.\.\)"),
        (lambda: [nn.MaxPool1d(2)], ValueError, r"write cnorm.MaxPool1d\(module, channels=\.\.\., positions=\.\.\.\)"),
        (lambda: [nn.BatchNorm1d(500)], ValueError, "must stand behind a Linear"),
        (
            lambda: [nn.LayerNorm((3, 4))],
            ValueError,
            r"\[0\], LayerNorm: the module must normalise one dimension",
        ),
        (lambda: [nn.Linear(5, 5), nn.Linear(4, 5)], ValueError, r"layers\[1\] must take the 5 outputs"),
        (lambda: [("a", nn.Linear(5, 5), 3)], TypeError, r"a pair \(name, module\)"),
        (lambda: [("a", cnorm.Activation("tanh", name="b")), nn.Linear(5, 5)], ValueError, "has the name 'b', got 'a'"),
        (lambda: [nn.Linear(5, 5), "tanh"], TypeError, r"layers\[1\] must be a layer"),
    ],
)
def test_what_has_no_layer_is_refused_by_name(made, error, message):
    with pytest.raises(error, match=message):
        cnorm.Model(made())


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("hooked", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_weights_that_a_hook_computes_are_refused(hooked):
    """A loaded weight_g changes `module.weight` in the next forward only."""
    linear, conv = hooked(nn.Linear(5, 4)), hooked(nn.Conv1d(5, 4, 3))
    for make in (lambda: cnorm.Model([linear]), lambda: cnorm.Linear(linear), lambda: cnorm.CausalConv1d(conv),
                 lambda: cnorm.Conv1d(conv, positions=7)):  # fmt: skip
        with pytest.raises(ValueError, match=r"must have no forward hooks, .* got (WeightNorm|SpectralNorm): remove"):
            make()


def test_a_layer_norm_takes_no_other_norm():
    with pytest.raises(TypeError, match=r"must be a torch.nn.LayerNorm, got RMSNorm$"):
        cnorm.LayerNorm(nn.RMSNorm(4))
    with pytest.raises(TypeError, match=r"got GroupNorm; a module of another kind: give its tensors$"):
        cnorm.LayerNorm(nn.GroupNorm(2, 4))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_frames_that_require_a_gradient_are_refused(bidirectional):
    """The outputs would be arrays without one."""
    model, x = cnorm.Model(nn.GRU(5, 4, bidirectional=bidirectional)), torch.randn(7, 5, requires_grad=True)
    with pytest.raises(TypeError, match=r"^x must .* that requires grad: cnorm.torch has"):
        model.run(x)
    np.testing.assert_array_equal(model.run(x.detach()), model.run(x.detach().numpy()))


def test_a_hook_of_a_sequential_is_refused():
    whole = nn.Sequential(nn.Linear(5, 4))
    whole.register_forward_hook(lambda module, inputs, outputs: 2 * outputs)
    for given in (whole, [nn.Linear(5, 5), whole]):
        with pytest.raises(ValueError, match=r"^layers\[[01]\].* must have no forward hooks, .* got <lambda>"):
            cnorm.Model(given)


def test_a_cell_of_a_module_names_its_state_dict():
    with pytest.raises(TypeError, match=r"^weights of GRU torch must be .* got GRU: pass module.state_dict\(\)$"):
        cnorm.GRU(nn.GRU(5, 4), preset="torch")


def test_a_batch_norm_is_folded_into_a_convolution():
    """Over time and inside a frame, dense and depthwise: x [channels, positions] is torch's own layout."""
    first, second = nn.Conv1d(5, 6, 3, dilation=2, bias=False), nn.Conv1d(6, 6, 2, groups=6)
    one, other = normed(6), normed(6)
    model = cnorm.Model([cnorm.CausalConv1d(first), one, cnorm.CausalConv1d(second), ("last", other)])
    assert [layer.kind for layer in model.layers] == ["CausalConv1d", "CausalConv1d"]
    assert model.layers[1].name == "last"
    x = torch.randn(20, 5)
    with torch.no_grad():
        y = one(first(nn.functional.pad(x.T[None], (4, 0))))
        y = other(second(nn.functional.pad(y, (1, 0))))[0].T
    assert model.check(x.numpy(), y.numpy()).ok
    first, norm = nn.Conv1d(3, 4, 3, padding=1), normed(4)
    model = cnorm.Model([cnorm.Conv1d(first, positions=7), norm])
    assert len(model.layers) == 1
    x = torch.randn(20, 3, 7)
    with torch.no_grad():
        y = norm(first(x)).reshape(20, -1)
    assert model.check(x.reshape(20, -1).numpy(), y.numpy()).ok
    with pytest.raises(ValueError, match=r"layers\[1\], BatchNorm1d: mean must have shape \(4,\)"):
        cnorm.Model([cnorm.Conv1d(first, positions=7), normed(5)])


def test_a_forward_set_on_an_instance_is_refused():
    linear, whole = nn.Linear(5, 5), nn.Sequential(nn.Linear(5, 5))
    for module in (linear, whole):
        module.forward = lambda x: 2 * x
    for make in (lambda: cnorm.Model([linear]), lambda: cnorm.Model(whole), lambda: cnorm.Linear(linear)):
        with pytest.raises(ValueError, match="must have the forward of its class"):
            make()


def hooked(of):
    def make(*given):
        module = of(*given)
        module.register_forward_hook(lambda module, inputs, y: 2 * y)
        return module

    return make


ONE = {
    "Linear": (nn.Linear, (5, 4), cnorm.Linear),
    "LayerNorm": (nn.LayerNorm, (5,), cnorm.LayerNorm),
    "Embedding": (nn.Embedding, (5, 4), cnorm.Embedding),
    "Tanh": (nn.Tanh, (), cnorm.Activation),
    "PReLU": (nn.PReLU, (), cnorm.Activation),
    "CausalConv1d": (nn.Conv1d, (5, 4, 3), cnorm.CausalConv1d),
    "Conv1d": (nn.Conv1d, (5, 4, 3), lambda module: cnorm.Conv1d(module, positions=7)),
    "ConvTranspose1d": (nn.ConvTranspose1d, (5, 4, 3), lambda module: cnorm.ConvTranspose1d(module, positions=7)),
    "MaxPool1d": (nn.MaxPool1d, (2,), lambda module: cnorm.MaxPool1d(module, channels=5, positions=8)),
    "LSTM": (nn.LSTM, (5, 4), None),
    "GRUCell": (nn.GRUCell, (5, 4), None),
    "Sequential": (nn.Sequential, (nn.Linear(5, 5),), None),
}


@pytest.mark.parametrize("kind", ONE)
@pytest.mark.parametrize("change", [doubled, hooked])
def test_what_computes_something_else_than_its_class_is_refused(change, kind):
    """By the layer's own constructor, too."""
    of, given, layer = ONE[kind]
    module = change(of)(*given)
    makes = [lambda: cnorm.Model([module]), lambda: cnorm.Model(nn.Sequential(nn.Identity(), module))]
    for make in makes if layer is None else [*makes, lambda: layer(module), lambda: cnorm.Model([layer(module)])]:
        with pytest.raises(ValueError, match=r"forward|write cnorm\.\w+\(module"):
            make()


def test_parametrised_weights_are_the_computed_ones():
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    for kind, (of, given, layer) in ONE.items():
        if kind in ("Linear", "LayerNorm", "Embedding", "CausalConv1d", "Conv1d", "ConvTranspose1d"):
            module = of(*given)
            weight = module.weight.detach().clone()
            nn.utils.parametrize.register_parametrization(module, "weight", Doubled())
            np.testing.assert_array_equal(layer(module).weights["weight"], 2 * weight.numpy())
