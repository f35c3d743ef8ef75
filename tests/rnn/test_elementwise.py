"""The functions of `Activation`: error, bits, gradients, files, export and import."""

import math
import pickle
import warnings

import numpy as np
import onnx
import pytest
import reference
import tolerances
from graphs import imported
from tapes import back, own_gradients, run, tape_of

import cnorm
import onnx_export
from cnorm.layers.activation import FUNCTIONS

N = 53
GIVEN = {
    "elu": {"alpha": 1.5},
    "leaky_relu": {"slope": 0.2},
    "hard_sigmoid": {"alpha": 0.2, "beta": 0.5},
    "log": {"eps": 1e-3},
    "clip": {"lo": -0.5, "hi": 1.25},
}
UNARY = [name for name in FUNCTIONS if name not in ("softmax", "prelu")]
NEW = [name for name in FUNCTIONS if name not in ("tanh", "sigmoid")]  # those are in test_activations.py


def layer_of(name, n=N):
    if name == "prelu":
        return cnorm.Activation("prelu", slope=np.linspace(-1, 1, n, dtype=np.float32))
    return cnorm.Activation(name, **GIVEN.get(name, {}))


def model_of(name, n=N):
    return cnorm.Model([cnorm.Scale(np.ones(n, np.float32)), layer_of(name, n)])


def exact(name, x):
    layer = layer_of(name, x.shape[-1])
    slope = {"slope": np.float64(layer.weights["slope"])} if name == "prelu" else dict(layer.parameters)
    return reference.activation(
        name, x, **{{"eps": "alpha", "lo": "alpha", "hi": "beta"}.get(k, k): v for k, v in slope.items()}
    )


def floats(step, n=N):
    """Every `step`-th finite float32, as rows of n."""
    bits = np.arange(0, 0x7F800000, step, np.uint32)
    x = np.concatenate([bits, bits | np.uint32(1 << 31)]).view(np.float32)
    return x[: len(x) // n * n].reshape(-1, n)


@pytest.mark.parametrize("name", [name for name in NEW if name != "softmax"])
def test_at_most_one_ulp(name, isa):
    x = floats(40_009)
    y, right = model_of(name).run(x), exact(name, x)
    with np.errstate(over="ignore", invalid="ignore"):
        beyond = np.isnan(right) | (np.abs(right) >= 2.0**128 * (1 - 2.0**-25))
        assert np.array_equal(y[beyond], right[beyond].astype(np.float32), equal_nan=True)
        error = tolerances.ulps(y[~beyond], right[~beyond])
    worst = np.argmax(error)
    assert error[worst] <= 0.51, (
        f"{name}({x[~beyond][worst]!r}) = {y[~beyond][worst]!r}, wanted {right[~beyond][worst]!r}"
    )


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_a_multiple_of_pi_is_taken_off_exactly(name, isa):
    """Numbers next to n pi/2; 16367173 2^72, the nearest of all; the ends of what needs no reduction."""
    n = np.concatenate([np.arange(1, 3000), 3 ** np.arange(8, 40)]).astype(np.float64)
    near = (n * (np.pi / 2)).astype(np.float32)
    others = np.array([16367173 * 2.0**72, 3.4028235e38, 2.0**126, 0.5, 0.49999997, np.pi / 4, 1e-45], np.float32)
    x = np.concatenate([near, np.nextafter(near, np.float32(0)), others])
    x = np.concatenate([x, -x])
    right = np.array([getattr(math, name)(v) for v in x.tolist()])
    assert tolerances.ulps(model_of(name, len(x)).run(x[None]).ravel(), right).max() <= 0.51


@pytest.mark.parametrize("name", NEW)
def test_limits_zeros_and_nan(name):
    x = np.array([[np.inf, -np.inf, np.nan, 0.0, -0.0]], np.float32)
    y = model_of(name, 1).run(x.T).ravel()
    assert np.isnan(y[2])
    if name != "softmax":
        np.testing.assert_allclose(y[3:], exact(name, x[:, 3:]).ravel(), rtol=1e-6)
    if name in ("sin", "cos"):
        assert np.isnan(y[:2]).all()
    if name == "sin":
        assert np.signbit(y[3:]).tolist() == [False, True]
    if name in ("elu", "selu", "silu", "gelu", "gelu_tanh", "leaky_relu", "prelu", "hard_swish"):
        assert np.signbit(y[3:]).tolist() == [False, True]
        assert y[0] == np.inf


@pytest.mark.parametrize("name", NEW)
def test_the_same_bits_on_every_instruction_set_at_every_length(name, rng):
    x = (10 * rng.standard_normal((7, 200))).astype(np.float32)
    before, found = cnorm.active_isa(), []
    try:
        for isa in cnorm.available_isas():
            cnorm.use_isa(isa)
            found.append([])
            for n in [*range(1, 40), 64, 65, 200]:
                tape = tape_of(model_of(name, n).layers, 7, 1)
                y = run(tape, x[:, None, :n])
                dx = back(tape, x[::-1, None, :n], n)
                found[-1] += [np.nan_to_num(y).tobytes(), np.nan_to_num(dx).tobytes()]
                model = model_of(name, n)
                assert model.run(x[:, :n]).tobytes() == y.tobytes()
                assert model.stream().step(x[3, :n]).tobytes() == y[3].tobytes()
                assert model.step_many([model.stream() for _ in x], x[:, :n]).tobytes() == y.tobytes()
    finally:
        cnorm.use_isa(before)
    assert found.count(found[0]) == len(found)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 100.0, 1e30, 3e38])
@pytest.mark.parametrize("n", [1, 2, 17, 1000])
def test_softmax_at_any_magnitude(scale, n, isa, rng):
    """In float64 and rounded once; the sum of n numbers in float64 adds less than a thousandth of that."""
    x = (scale * rng.uniform(-1, 1, (5, n))).astype(np.float32)
    y, right = model_of("softmax", n).run(x), exact("softmax", x)
    assert (np.abs(y - right) <= 0.51 * 2.0**-23 * right + 2.0**-149).all()


@pytest.mark.parametrize("name", NEW)
def test_gradients(name, isa, rng):
    """Against central differences of the oracle in float64, whose own error is h^2 and 2^-53 / h."""
    layers, h = model_of(name).layers, 1e-5
    x = rng.uniform(-4, 4, (5, 3, N)).astype(np.float32)
    x = np.abs(x) + np.float32(0.1) if name in ("log", "sqrt") else x
    dy = rng.standard_normal(x.shape).astype(np.float32)
    tape = tape_of(layers, 5, 3)
    run(tape, x)
    dx = back(tape, dy, N)
    if name == "softmax":
        wanted = np.zeros(x.shape)
        for j in range(N):
            step = h * (np.arange(N) == j)
            wanted[..., j] = ((exact(name, x + step) - exact(name, x - step)) * dy).sum(-1) / (2 * h)
    else:
        wanted = dy * (exact(name, x + np.float64(h)) - exact(name, x - np.float64(h))) / (2 * h)
    assert (np.abs(dx - wanted) <= 2.0**-22 * np.abs(wanted) + 1e-7 * np.maximum(1, np.abs(exact(name, x)))).all()
    if name == "prelu":
        terms = np.float64(dy) * np.minimum(np.float64(x), 0)
        bound = (1 + 15 + 1) * 2.0**-24 * np.abs(terms).sum((0, 1))
        assert (np.abs(own_gradients(layers[1], tape, 1)["slope"] - terms.sum((0, 1))) <= bound).all()


@pytest.mark.exhaustive(one_in=9)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_saved_packed_pickled_exported_and_imported(name, tmp_path, rng):
    linear = cnorm.Linear(
        (rng.standard_normal((9, 9)) / 9).astype(np.float32), rng.standard_normal(9).astype(np.float32)
    )
    before = [cnorm.Activation("abs")] if name in ("log", "sqrt") else []
    bounded = [cnorm.Activation("tanh")] if name == "exp" else []  # parity calls with x of scale 100
    model = cnorm.Model([linear, *before, *bounded, layer_of(name, 9), linear])
    x = rng.standard_normal((6, 9)).astype(np.float32)
    model.save(tmp_path / "a.safetensors")
    model.save_packed(tmp_path / "a.cnorm")
    exported = onnx_export.export(model, tmp_path / "a.onnx")
    files = ("a.safetensors", "a.cnorm")
    others = [*(cnorm.load(tmp_path / file) for file in files), pickle.loads(pickle.dumps(model))]
    for other in [*others, onnx_export.load(tmp_path / "a.onnx")]:
        assert other.identity == model.identity
        assert other.run(x).tobytes() == model.run(x).tobytes()
    assert onnx_export.check_parity(model, exported, steps=8).ok
    del exported.metadata_props[:]
    onnx.save(exported, tmp_path / "b.onnx")
    kinds = [layer.kind for layer in imported(tmp_path / "b.onnx").model.layers]
    assert kinds == [layer.kind for layer in model.layers]


def test_modules_of_torch(rng):
    torch = pytest.importorskip("torch")
    x = rng.standard_normal((40, N)).astype(np.float32)
    nn = torch.nn
    modules = [nn.ReLU(), nn.ReLU6(), nn.Tanh(), nn.Sigmoid(), nn.ELU(0.7), nn.SELU(), nn.SiLU(), nn.GELU(),
               nn.GELU("tanh"), nn.LeakyReLU(0.3), nn.PReLU(), nn.PReLU(N), nn.Softplus(), nn.Hardsigmoid(),
               nn.Hardswish(), nn.Hardtanh(-0.5, 0.25), nn.Softmax(-1)]  # fmt: skip
    for module in modules:
        model = cnorm.Model([cnorm.Scale(np.ones(N, np.float32)), cnorm.Activation(module)])
        wanted = module.double()(torch.from_numpy(np.float64(x))).detach().numpy()
        np.testing.assert_allclose(model.run(x), wanted, rtol=1e-6, atol=1e-7, err_msg=str(module))
    for wrong in (nn.Softplus(2.0), nn.Softmax(0)):
        with pytest.raises(ValueError, match="must have"):
            cnorm.Activation(wrong)


@pytest.mark.parametrize("opset", [11, 13, 17, 20])
def test_files_of_torch(opset, tmp_path):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    nn = torch.nn
    parts = [nn.ELU(), nn.Linear(9, 9), nn.GELU(), nn.Linear(9, 9), nn.SiLU(), nn.Linear(9, 9), nn.PReLU(9),
             nn.Linear(9, 9), nn.Hardtanh(-0.5, 0.25), nn.Linear(9, 9), nn.SELU(), nn.Softmax(-1)]  # fmt: skip
    parts += [nn.Linear(9, 9), nn.Hardswish()] if opset > 13 else []
    parts += [nn.Linear(9, 9), nn.GELU("tanh")]
    parts[6].weight.data = torch.linspace(-1, 1, 9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(nn.Sequential(nn.Linear(9, 9), *parts).eval(), torch.zeros(1, 9), tmp_path / "m.onnx",
                          dynamo=False, opset_version=opset)  # fmt: skip
    found = imported(tmp_path / "m.onnx")
    functions = [layer.function for layer in found.model.layers if layer.kind == "Activation"]
    assert functions[:6] == ["elu", "gelu", "silu", "prelu", "clip", "selu"]
    assert functions[-1] == "gelu_tanh"
    assert found.report.ok


def test_prelu_learns(rng):
    model = model_of("prelu")
    learner = cnorm.Learner(model, cnorm.SGD(0.1), truncate=1)
    learner.learn(learner.step(-np.ones(N, np.float32)))
    assert (learner.model().layers[1].weights["slope"] != model.layers[1].weights["slope"]).any()


@pytest.mark.parametrize(
    ("function", "given", "error", "says"),
    [
        ("elu", {"slope": 1}, ValueError, "the parameters of elu must be among alpha, got 'slope'"),
        ("relu", {"alpha": 1}, ValueError, "the parameters of relu must be among none, got 'alpha'"),
        ("elu", {"alpha": np.nan}, ValueError, "alpha must be finite in float32, got nan"),
        ("elu", {"alpha": 1e39}, ValueError, "alpha must be finite in float32"),
        ("elu", {"alpha": "1"}, TypeError, "alpha must be a number, got str"),
        ("clip", {"lo": 2, "hi": 1}, ValueError, "lo must be at most hi"),
        ("clip", {"lo": np.nan}, ValueError, "lo must be at most hi"),
        ("prelu", {}, ValueError, r"weights of prelu must be slope \[N\]; missing: slope"),
        ("prelu", {"slope": np.ones((2, 2), np.float32)}, ValueError, "slope"),
        ("swish", {}, ValueError, "function must be one of tanh, relu"),
    ],
)
def test_wrong_arguments(function, given, error, says):
    with pytest.raises(error, match=says):
        cnorm.Activation(function, **given)
