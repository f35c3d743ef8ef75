"""`cnorm.from_keras`: the outputs of Keras 3, and refusals by name."""

import numpy as np
import pytest
from keras_models import L, keras, varied

import cnorm

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras' of tensors


@pytest.fixture(autouse=True)
def _seed():
    keras.utils.set_random_seed(0)


def sequential(*layers, inputs=5):
    return varied(keras.Sequential([keras.Input((None, inputs)), *layers]))


def agrees(model, ours, inputs=5):
    x = np.random.default_rng(1).standard_normal((12, inputs)).astype(np.float32)
    expected = np.asarray(keras.ops.convert_to_numpy(model(x[None], training=False)))[0]
    result = ours.check(x, expected)
    assert result.ok, result


STACKS = {
    "LSTM, Dense": lambda: [L.LSTM(8, return_sequences=True), L.Dense(3, activation="sigmoid")],
    "LSTM, hard sigmoid and relu": lambda: [
        L.LSTM(8, activation="relu", recurrent_activation="hard_sigmoid", return_sequences=True)
    ],
    "LSTM, linear and silu": lambda: [
        L.LSTM(4, activation="linear", recurrent_activation="sigmoid", use_bias=False, return_sequences=True),
        L.LSTM(4, activation="silu", return_sequences=True),
    ],
    "GRU": lambda: [L.GRU(8, return_sequences=True), L.Dropout(0.5), L.Dense(3, use_bias=False)],
    "GRU, reset before": lambda: [
        L.GRU(8, reset_after=False, recurrent_activation="hard_sigmoid", return_sequences=True),
        L.GRU(6, reset_after=False, use_bias=False, return_sequences=True),
    ],
    "GRU, elu": lambda: [L.GRU(8, activation="elu", use_bias=False, return_sequences=True)],
    "SimpleRNN": lambda: [
        L.SimpleRNN(8, return_sequences=True), L.SimpleRNN(4, activation="relu", return_sequences=True)
    ],
    "both directions": lambda: [
        L.Bidirectional(L.LSTM(4, return_sequences=True)),
        L.Bidirectional(L.GRU(3, return_sequences=True)),
    ],
    "convolutions": lambda: [
        L.Conv1D(6, 3, padding="causal", activation="relu"),
        L.Conv1D(6, 2, padding="causal", dilation_rate=3, groups=2),
        L.Conv1D(4, 1, use_bias=False),
    ],
    "norms": lambda: [
        L.Dense(6),
        L.BatchNormalization(),
        L.LayerNormalization(),
        L.BatchNormalization(scale=False, epsilon=1e-2),
        L.LayerNormalization(center=False, scale=False, epsilon=1e-5),
        L.Dense(6, activation="tanh"),
        L.BatchNormalization(center=False),
        L.LayerNormalization(center=False),
    ],
    "activations": lambda: [
        *(L.Activation(name) for name in ("elu", "selu", "silu", "gelu", "softplus", "hard_sigmoid", "relu6")),
        L.Dense(6, activation="leaky_relu"), L.ReLU(), L.Dense(6), L.ReLU(max_value=1.0), L.Dense(6),
        L.ReLU(negative_slope=0.2), L.LeakyReLU(negative_slope=0.1), L.ELU(alpha=0.7), L.PReLU(shared_axes=[1]),
        L.Dense(6, activation="hard_silu"), L.Activation("exponential"), L.Softmax(), L.Dense(3, activation="softmax"),
    ],
    "wrapped and nested": lambda: [
        L.TimeDistributed(L.Dense(6, activation="tanh")),
        keras.Sequential([L.GRU(4, return_sequences=True), L.GaussianNoise(0.1), L.Dense(3)]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("stack", STACKS)
def test_it_computes_what_keras_does(stack):
    model = sequential(*STACKS[stack]())
    agrees(model, cnorm.from_keras(model))


def test_a_functional_chain():
    x = keras.Input((None, 5))
    y = L.Dense(3)(L.Dropout(0.2)(L.LSTM(8, return_sequences=True, name="recurrent")(x)))
    model = varied(keras.Model(x, y))
    agrees(model, cnorm.from_keras(model))


def test_tokens():
    model = varied(keras.Sequential([keras.Input((None,)), L.Embedding(9, 4), L.GRU(6, return_sequences=True)]))
    ids = np.random.default_rng(1).integers(0, 9, 12)
    expected = keras.ops.convert_to_numpy(model(ids[None]))[0]
    assert cnorm.from_keras(model).check(ids[:, None].astype(np.float32), expected).ok


def test_the_last_frame_of_a_model_without_sequences():
    model = sequential(L.LSTM(8), L.Dense(2))
    x = np.random.default_rng(1).standard_normal((12, 5)).astype(np.float32)
    expected = np.stack([keras.ops.convert_to_numpy(model(x[None, :frames]))[0] for frames in range(1, 13)])
    result = cnorm.from_keras(model).check(x, expected)
    assert result.ok, result


def refuses(model, error, says):
    with pytest.raises(error, match=says):
        cnorm.from_keras(model)


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (lambda: L.Conv1D(4, 3, name="c"), "layer 'c', Conv1D: padding must be 'causal', got 'valid'"),
        (lambda: L.Conv1D(4, 3, padding="causal", strides=2), r"strides must be \(1,\)"),
        (lambda: L.LSTM(4, activation="softsign", name="r"), "layer 'r', LSTM: activation must be one of"),
        (lambda: L.GRU(4, recurrent_activation="tanh"), "no gates of tanh"),
        (lambda: L.LSTM(4, go_backwards=True), "go_backwards must be False"),
        (lambda: L.LayerNormalization(axis=1), "axis must be -1"),
        (lambda: L.Dense(4, activation="softsign"), "activation must be one of"),
        (lambda: L.Bidirectional(L.LSTM(4, return_sequences=True), merge_mode="sum"), "merge_mode must be 'concat'"),
        (lambda: L.GlobalAveragePooling1D(name="g"), "layer 'g', GlobalAveragePooling1D, must be one of LSTM"),
        (lambda: L.RNN(L.LSTMCell(4)), "write cnorm.LSTM"),
        (lambda: L.TimeDistributed(L.Embedding(4, 4, mask_zero=True)), "mask_zero must be False"),
        (lambda: L.Masking(), "Masking, must be one of"),
    ],
)
def test_refusals_name_the_layer(layer, says):
    x = keras.Input((6, 5))
    refuses(keras.Model(x, layer()(x)), ValueError, says)


def test_what_is_no_chain_is_refused():
    x = keras.Input((None, 5))
    hidden = L.Dense(5)(x)
    refuses(keras.Model(x, L.Add(name="sum")([x, hidden])), ValueError, r"'sum', Add, reads 2 layers: write cnorm.Add")
    refuses(keras.Model(x, [hidden, L.Dense(2)(hidden)]), ValueError, "outputs of the model must be one, got 2")
    other = keras.Input((None, 5))
    refuses(keras.Model([x, other], hidden), ValueError, "inputs of the model must be one, got 2")


def test_what_is_no_model_is_refused():
    class Own(keras.Model):
        def call(self, x):
            return x

    refuses(Own(), TypeError, "call of a subclass")
    refuses(L.Dense(3), TypeError, "must be a Sequential or functional model of Keras 3")
    refuses([], TypeError, r"got builtins.list")


def test_a_model_takes_no_keras_model_itself():
    with pytest.raises(TypeError, match=r"cnorm\.from_keras takes a model of Keras"):
        cnorm.Model(sequential(L.Dense(2)))


@pytest.mark.parametrize("layer", [L.LSTM(4, return_sequences=True), L.Conv1D(4, 2, padding="causal")])
def test_memory_inside_a_frame_is_refused(layer):
    x = keras.Input((None, 1, 5))
    refuses(keras.Model(x, L.TimeDistributed(layer)(x)), ValueError, "its layer must have no memory, got (LSTM|Conv1D)")


def test_a_model_that_is_not_built_is_refused():
    refuses(keras.Sequential([L.Dense(2)], name="m"), ValueError, "model 'm' must be built")


def tanh(x):
    return 1.7159 * keras.ops.tanh(0.6667 * x)


class Tanh(L.Activation):
    def __init__(self):
        super().__init__("tanh")

    def call(self, x):
        return 2 * super().call(x)


def patched():
    layer = L.Dense(4)
    layer.call = lambda x: x
    return layer


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (lambda: L.Dense(4, activation=tanh), "activation must be one of keras.activations, got .*tanh"),
        (lambda: L.Dense(4, activation=keras.ops.gelu), "got keras.src.ops.nn.gelu"),
        (lambda: L.Activation(tanh), "activation must be one of keras.activations"),
        (lambda: L.LSTM(4, activation=tanh), "activation must be one of keras.activations"),
        (lambda: L.LSTM(4, dtype="float16"), "its weights must be float32, got float16: build it with dtype='float32'"),
        (lambda: L.Dense(4, dtype="float8_from_float32"), "its dtype policy must not be quantised, got float8"),
        (Tanh, "Tanh, must be one of"),
        (patched, "it must have the call of its class"),
    ],
)
def test_what_has_the_name_of_a_function_of_keras_is_refused(layer, says):
    refuses(keras.Sequential([keras.Input((None, 5)), layer()]), ValueError, says)


@pytest.mark.parametrize("inner", [L.LayerNormalization, L.BatchNormalization, L.Softmax])
def test_norms_of_each_frame(inner):
    model = sequential(L.Dense(4), L.TimeDistributed(inner()))
    agrees(model, cnorm.from_keras(model))


def test_a_shared_layer_and_a_state_that_nothing_reads():
    x, dense, act = keras.Input((None, 5)), L.Dense(5), L.Activation("elu")
    y, *_ = L.LSTM(5, return_sequences=True, return_state=True)(act(dense(act(dense(x)))))
    model = varied(keras.Model(x, L.LayerNormalization()(dense(y))))
    agrees(model, cnorm.from_keras(model))


@pytest.mark.parametrize("kind", [L.Dense, L.Dropout, L.Identity])
@pytest.mark.parametrize("whole", [False, True])
def test_a_hook_or_a_call_of_its_own_is_refused(kind, whole):
    """Of a layer, of one that does nothing at inference, and of a model inside another."""
    for change, says in (
        (lambda one: one.register_forward_hook(lambda module, inputs, y: 2 * y), "must have no forward hooks"),
        (lambda one: setattr(one, "call", lambda x: 2 * x), "must have the call of its class"),
    ):
        layer = kind(5) if kind is L.Dense else kind(0.5) if kind is L.Dropout else kind()
        inner = keras.Sequential([keras.Input((None, 5)), layer, L.Dense(5)])
        model = keras.Sequential([keras.Input((None, 5)), inner, L.Dense(3)])
        change(inner if whole else layer)
        refuses(model, ValueError, says)
        if whole:
            refuses(inner, ValueError, says)


@pytest.mark.parametrize("layer", [L.Dense, L.GRU])
def test_a_policy_of_mixed_precision_is_told(layer):
    model = keras.Sequential([keras.Input((None, 4)), layer(3, dtype="mixed_bfloat16", name="mixed")])
    with pytest.warns(UserWarning, match="layer 'mixed', .* computes in bfloat16 in Keras, in float32 here"):
        cnorm.from_keras(model)
