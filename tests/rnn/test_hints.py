"""Arguments of PyTorch are taken as they are; refusals of common checkpoints say what to do."""

import dataclasses

import numpy as np
import pytest
from cells import random_weights

import cnorm

H, INPUTS = 4, 3


def normal(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def keras(kind, bias):
    gates = {"LSTM": 4, "GRU": 3}[kind]
    weights = {"kernel": normal(INPUTS, gates * H), "recurrent_kernel": normal(H, gates * H), "bias": bias}
    return getattr(cnorm, kind)(weights, preset="keras")


def of_torch(**more):
    shapes = {
        "weight_ih_l0": (4 * H, INPUTS),
        "bias_ih_l0": (4 * H,),
        "bias_hh_l0": (4 * H,),
    }
    named = {name: normal(*shape) for name, shape in shapes.items()}
    return cnorm.from_torch(named | more, "torch", kind="LSTM")


def onnx(**more):
    weights = {"W": normal(1, 4 * H, INPUTS), "R": normal(1, 4 * H, H), "B": normal(1, 8 * H)}
    return cnorm.LSTM(weights | more, preset="onnx")


def batch_norm_before():
    cnorm.fold_batch_norm(normal(H, INPUTS), None, normal(INPUTS), np.ones(INPUTS, np.float32))


@pytest.mark.parametrize(
    ("call", "advice"),
    [
        (lambda: keras("LSTM", normal(8 * H)), "CuDNNLSTM is two halves to add: bias[:4H] + bias[4H:]"),
        (lambda: keras("GRU", normal(6 * H)), "CuDNNGRU is bias.reshape(2, -1)"),
        (lambda: keras("GRU", normal(3 * H)), 'preset "keras_reset_before"'),
        (lambda: of_torch(weight_hh_l0_g=normal(16, 1), weight_hh_l0_v=normal(16, H)), "remove_weight_norm"),
        (lambda: of_torch(**{"parametrizations.weight_hh_l0.original0": normal(16, 1)}), "remove_parametrizations"),
        (lambda: of_torch(weight_hh_l0_raw=normal(16, H)), "rename weight_hh_l0_raw to weight_hh_l0"),
        (lambda: onnx(P=np.zeros((1, 3 * H), np.float32)), "P holds peepholes"),
        (lambda: onnx(W=normal(2, 4 * H, INPUTS)), "give W[:1] to one cell and W[1:] to the other of a Bidirectional"),
        (batch_norm_before, "a norm before the layer is folded by W * scale"),
        (lambda: cnorm.Linear({"weight": normal(2, 3)}), "give its arrays, such as Linear(tensors['weight']"),
        (lambda: cnorm.Linear(normal(3, 2), normal(2)), "given as its transpose: Linear(kernel.T, bias)"),
    ],
)
def test_a_refusal_says_what_to_do(call, advice):
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    assert advice in str(caught.value)


def test_the_order_of_suffixes_in_a_spec():
    spec = cnorm.PRESETS["GRU", "torch"]
    name, shape, _ = spec.weights[0]
    wrong = dataclasses.replace(spec, name="mine", weights=((name, shape, "weight_x[r].T"), *spec.weights[1:]))
    with pytest.raises(ValueError, match=r"\.T comes first, weight_x\.T\[r\]$"):
        cnorm.GRU(random_weights(spec, np.random.default_rng(0), INPUTS, H), preset=wrong)


@pytest.mark.filterwarnings("ignore")
def test_a_quantised_checkpoint():
    torch = pytest.importorskip("torch")
    cell = torch.nn.Sequential(torch.nn.LSTMCell(INPUTS, H))
    quantised = torch.ao.quantization.quantize_dynamic(cell, {torch.nn.LSTMCell})
    with pytest.raises(ValueError, match=r"it is quantised: give the checkpoint of the float module$") as caught:
        cnorm.from_torch(quantised.state_dict(), "torch", kind="LSTM", prefix="0.")
    assert "prefixes that would fit" not in str(caught.value)


def test_modules_and_their_tensors_are_taken():
    torch = pytest.importorskip("torch")
    norm, linear = torch.nn.LayerNorm(H, eps=1e-3), torch.nn.Linear(H, 2)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(5, H)
    layers = [cnorm.LayerNorm(norm), cnorm.Linear(linear), cnorm.Activation(torch.nn.Sigmoid())]
    assert layers[0].eps == np.float32(1e-3)
    assert layers[2].function == "sigmoid"
    model = cnorm.Model(layers)
    expected = torch.sigmoid(linear(norm(x)))
    report = model.check(x, expected)
    assert report
    assert bool(model.check(x, expected + 1)) is False
    y = cnorm.LayerNorm(norm.weight, norm.bias, eps=1e-3)(x)
    assert y.tobytes() == cnorm.layer_norm(x, norm.weight.detach(), norm.bias.detach(), eps=1e-3).tobytes()
    assert cnorm.Linear(linear.weight, linear.bias).weights.keys() == {"weight", "bias"}
    learner = cnorm.Learner(model, truncate=2)
    learner.step(x[0])
    assert learner.learn(loss="squared_error", target=expected[0].detach()) >= 0


def test_modules_that_do_not_fit_are_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match="bias and eps must not be given beside a module"):
        cnorm.LayerNorm(torch.nn.LayerNorm(H), eps=1e-5)
    with pytest.raises(ValueError, match="the module must normalise one dimension"):
        cnorm.LayerNorm(torch.nn.LayerNorm((2, H)))
    with pytest.raises(TypeError, match=r"function must be a str or a module of torch\.nn .*, got Mish"):
        cnorm.Activation(torch.nn.Mish())
    assert cnorm.LayerNorm(torch.nn.LayerNorm(H, elementwise_affine=False)).weights["weight"].tolist() == [1.0] * H
