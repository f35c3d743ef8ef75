"""Modules of PyTorch and Keras in 120 arrangements of repeated, shared, renamed, nested and home-made parts.

Each is right against the framework's own outputs or refused by name, and at least 90 load.
"""

import functools
from collections import OrderedDict

import numpy as np
import pytest
from keras_models import L, keras, varied
from torch_modules import doubled, nn, normed, through, torch

import cnorm

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras' of tensors

N = 6
MODULES = {
    "Linear": lambda: nn.Linear(N, N),
    "Linear without bias": lambda: nn.Linear(N, N, bias=False),
    "Linear, parametrised": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(N, N)),
    "LayerNorm": lambda: nn.LayerNorm(N, eps=1e-3),
    "BatchNorm1d": lambda: normed(N),
    "ELU": lambda: nn.ELU(0.7),
    "PReLU": lambda: nn.PReLU(N),
    "LSTM": lambda: nn.LSTM(N, N),
    "GRU, two layers": lambda: nn.GRU(N, N, num_layers=2),
    "RNN of relu": lambda: nn.RNN(N, N, nonlinearity="relu"),
    "LSTMCell": lambda: nn.LSTMCell(N, N),
    "GRUCell": lambda: nn.GRUCell(N, N),
}


def home_made(module):
    """The same module with a forward that computes twice as much."""
    module.__class__ = doubled(type(module))
    return module


def appended(*modules):
    whole = nn.Sequential()
    for module in modules:
        whole.append(module)
    whole.insert(0, nn.Identity())
    return whole[1:]


# arrangement: what cnorm.Model is given, and the modules in the order in which they run
ARRANGED = {
    "repeated": lambda p, a, other: (nn.Sequential(a, p, a, p, other, p), [a, p, a, p, other, p]),
    "shared": lambda p, a, other: ([inner := nn.Sequential(a, p), other, inner, p], [a, p, other, a, p, p]),
    "renamed": lambda p, a, other: (
        nn.Sequential(OrderedDict([("z", a), ("second", other), ("y", p), ("m", a)])), [a, other, p, a]),
    "nested": lambda p, a, other: (
        nn.Sequential(nn.Sequential(a, nn.Sequential(p)), nn.Dropout(), appended(other, a, p)), [a, p, other, a, p]),
    "home-made": lambda p, a, other: (nn.Sequential(a, p, q := home_made(p)), [a, p, q]),
}  # fmt: skip


def of_torch(kind, arrangement):
    given, modules = ARRANGED[arrangement](MODULES[kind](), nn.Linear(N, N), nn.LayerNorm(N))
    x = torch.randn(20, N)
    return lambda: cnorm.Model(given), x.numpy(), lambda: through(modules, x)


LAYERS = {
    "Dense": lambda of: of(L.Dense)(N),
    "Dense, tanh": lambda of: of(L.Dense)(N, activation="tanh"),
    "LayerNormalization": lambda of: of(L.LayerNormalization)(),
    "BatchNormalization": lambda of: of(L.BatchNormalization)(),
    "ELU": lambda of: of(L.ELU)(),
    "PReLU": lambda of: of(L.PReLU)(shared_axes=[1]),
    "LSTM": lambda of: of(L.LSTM)(N, return_sequences=True),
    "GRU, reset before": lambda of: of(L.GRU)(N, reset_after=False, return_sequences=True),
    "SimpleRNN": lambda of: of(L.SimpleRNN)(N, return_sequences=True),
    "Bidirectional": lambda of: of(L.Bidirectional)(L.GRU(N // 2, return_sequences=True)),
    "Conv1D": lambda of: of(L.Conv1D)(N, 3, padding="causal"),
    "TimeDistributed": lambda of: of(L.TimeDistributed)(L.Dense(N)),
}


def twice(of):
    """A subclass of a layer of Keras, of its name, that computes twice as much."""

    def double(self, *given, **options):
        return 2 * of.call(self, *given, **options)

    return type(of.__name__, (of,), {"call": functools.wraps(of.call)(double)})


def functional(*layers):
    y = x = keras.Input((None, N))
    for layer in layers:
        y = layer(y)
    return keras.Model(x, y)


def stacked(*layers):
    return keras.Sequential([keras.Input((None, N)), *layers])


STACKED = {
    "repeated": lambda p, a, other: stacked(a, p, a, p),
    "shared": lambda p, a, other: functional(inner := functional(a, p), other, inner, p),
    "renamed": lambda p, a, other: keras.models.clone_model(functional(a, p, other, p)),
    "nested": lambda p, a, other: functional(a, stacked(p, L.Dropout(0.5), stacked(other)), stacked(p)),
    "home-made": lambda p, a, other: functional(a, p),
}


def of_keras(kind, arrangement):
    part = LAYERS[kind](twice if arrangement == "home-made" else lambda of: of)
    model = varied(STACKED[arrangement](part, L.Dense(N, name="dense_of_mine"), L.LayerNormalization()))
    x = np.random.default_rng(1).standard_normal((12, N)).astype(np.float32)
    return lambda: cnorm.from_keras(model), x, lambda: keras.ops.convert_to_numpy(model(x[None], training=False))[0]


CASES = [(of_torch, kind, how) for kind in MODULES for how in ARRANGED]
CASES += [(of_keras, kind, how) for kind in LAYERS for how in STACKED]


@pytest.mark.parametrize(("of", "kind", "arrangement"), CASES)
def test_right_or_refused_by_name(of, kind, arrangement):
    torch.manual_seed(0)
    keras.utils.set_random_seed(0)
    make, x, outputs = of(kind, arrangement)
    if arrangement == "home-made":
        with pytest.raises(ValueError, match=kind.split(",")[0].split(" ")[0]):
            make()
        return
    result = make().check(x, outputs())
    assert result.ok, result


def test_most_load():
    """As the test above judges all arrangements but home-made ones: those must agree."""
    assert len(CASES) == 120
    assert sum(how != "home-made" for _, _, how in CASES) >= 90
