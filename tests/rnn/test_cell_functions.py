"""Cells whose gates are not sigmoid or whose candidate is not tanh, and cells that clip the arguments of these."""

import dataclasses
import pickle

import autodiff
import cells
import numpy as np
import pytest
import reference
from tapes import back, own_gradients, run, tape_of
from tolerances import assert_within

import cnorm
from cnorm.cells.functions import FUNCTIONS, OF_CELLS

KEYS = [
    ("LSTM", "ba2016"), ("LSTM", "torchaudio"), ("LSTM", "torch"), ("LSTM", "keras"), ("LSTM", "onnx"),
    ("GRU", "ba2016"), ("GRU", "dreamer_v3"), ("GRU", "keras"), ("GRU", "keras_reset_before"), ("GRU", "onnx"),
    ("RNN", "ba2016"), ("RNN", "onnx"),
]  # fmt: skip
CHANGES = [
    {"recurrent_activation": ("hard_sigmoid", 0.2, 0.5)},
    {"recurrent_activation": "hard_sigmoid", "activation": "relu"},
    {"activation": ("leaky_relu", 1.0), "clip": 0.75},
    {"activation": "silu", "clip": 0.3},
    {"clip": 0.25},
]
PARAMETERS = {"elu": (0.5,), "leaky_relu": (0.3,), "hard_sigmoid": (0.3, 0.4), "clip": (-0.5, 0.25)}


def functions_of(spec):
    """The arguments of the reference step, which autodiff.py can differentiate."""

    def of(function):
        name, *given = (function,) if isinstance(function, str) else function
        alpha, beta = [*map(np.float64, given), np.float64(np.float32(1 / 6)), 0.5][:2]
        return {
            "sigmoid": reference.sigmoid,
            "tanh": np.tanh,
            "relu": lambda a: np.maximum(a, 0),
            "silu": lambda a: a * reference.sigmoid(a),
            "hard_sigmoid": lambda a: np.clip(alpha * a + beta, 0, 1),
            "leaky_relu": lambda a: a,  # with slope 1
        }[name]

    def clipped(function):
        limit = None if spec.clip is None else np.float64(np.float32(spec.clip))
        return function if limit is None else lambda a: function(np.clip(a, -limit, limit))

    given = {"state": clipped(of(spec.activation))}
    return given if spec.kind == "RNN" else given | {"gate": clipped(of(spec.recurrent_activation))}


def cells_with(changes, keys=KEYS):
    return [
        pytest.param(key, change, id=f"{'-'.join(key)}-{' '.join(map(str, change.values()))}")
        for key in keys
        for change in changes
        if key[0] != "RNN" or "recurrent_activation" not in change
    ]


every = pytest.mark.parametrize(("key", "changes"), cells_with(CHANGES))


def layer_of(key, changes, rng, inputs=9, units=20, outputs=None):
    spec = dataclasses.replace(cnorm.PRESETS[key], **changes)
    outputs = outputs if key == ("LSTM", "torch") else None
    weights = cells.random_weights(spec, rng, inputs, units, outputs)
    return cells.LAYERS[key[0]](weights, preset=spec, eps=cells.EPS.get(key)), weights


@pytest.mark.exhaustive(one_in=2)
@every
@pytest.mark.parametrize("units", [7, 32])
def test_steps_match_the_reference(key, changes, units, isa, rng):
    layer, weights = layer_of(key, changes, rng, 9, units, 5)
    step, seen = cells.step_of(key, **functions_of(layer.spec)), []

    def advance(x, state):
        names = ("h0", "c0") if key[0] == "LSTM" else ("h0",)
        seen.append(cells.step_of(key)(weights, x, *(state[name] for name in names))[0])
        after = step(weights, x, *(state[name] for name in names))
        seen.append(after[0])
        return dict(zip(names, after, strict=True))

    assert cells.worst_step(layer, advance, rng, 40) <= 1
    apart = max(np.abs(a - b).max() for a, b in zip(seen[::2], seen[1::2], strict=True))
    assert apart > 1e-3, "the preset's own functions give the same: the test tests nothing"


@every
def test_gradients_match_the_reference(key, changes, rng):
    """As test_gradient_bounds.py does for the presets."""
    layer, weights = layer_of(key, changes, rng, 7, 20, 9)
    step, batch, width = cells.step_of(key, **functions_of(layer.spec)), 3, layer.output_size
    tape = tape_of([layer], 1, batch)
    places = [slice(start, start + n) for _, n, start in tape.state_arrays]
    states = [rng.standard_normal((batch, n)).astype(np.float32) for _, n, _ in tape.state_arrays]
    x = rng.standard_normal((1, batch, 7)).astype(np.float32)
    dy = rng.standard_normal((1, batch, width)).astype(np.float32)
    dstate = [rng.standard_normal(part.shape).astype(np.float32) for part in states]
    first, *rest = map(autodiff.Value, dstate)
    expected = autodiff.cell_gradients(step, weights, x[0], states, [first + autodiff.Value(dy[0]), *rest])
    after = np.zeros_like(tape.dstate)
    for place, before, gradient in zip(places, states, dstate, strict=True):
        tape.state[:, place], after[:, place] = before, gradient
    run(tape, x)
    found = {"dx": back(tape, dy, 7, after)[0]} | own_gradients(layer, tape)
    found |= {f"d{name}": tape.dstate[:, place] for name, place in zip("hc", places, strict=False)}
    for name, wanted in expected.items():
        assert_within(found[name], wanted.value, wanted.bound, name)


@pytest.mark.parametrize("name", OF_CELLS)
@pytest.mark.parametrize("units", [1, 16, 19])
def test_every_function_has_the_bits_of_the_activation(name, units, isa, rng):
    """An RNN without recurrent weights is a Linear and an Activation, whose functions test_elementwise.py checks."""
    given = PARAMETERS.get(name, ())
    w, b = rng.standard_normal((units, 5)).astype(np.float32), rng.standard_normal(units).astype(np.float32)
    spec = dataclasses.replace(cnorm.PRESETS["RNN", "torch"], activation=(name, *given))
    tensors = {"weight_ih_l0": w, "weight_hh_l0": np.zeros((units, units), np.float32), "bias_ih_l0": b}
    cell = cnorm.RNN(tensors | {"bias_hh_l0": np.zeros_like(b)}, preset=spec)
    layers = [cnorm.Linear(w, b), cnorm.Activation(name, **dict(zip(FUNCTIONS[name], given, strict=bool(given))))]
    x = rng.standard_normal((6, 2, 5)).astype(np.float32)
    dy = rng.standard_normal((6, 2, units)).astype(np.float32)
    whole, parts = tape_of([cell], 6, 2), tape_of(layers, 6, 2)
    assert np.array_equal(run(whole, x), run(parts, x))
    assert np.array_equal(back(whole, dy, 5), back(parts, dy, 5))


@every
def test_every_path_has_the_same_bits(key, changes, tmp_path, rng):
    for weights in ("float32", "int8", "float16"):
        assert_the_same_bits(layer_of(key, changes, rng, 9, 20, 5)[0], weights, tmp_path, rng)


def assert_the_same_bits(layer, weights, tmp_path, rng):
    model = cnorm.Model([layer])
    model = model if weights == "float32" else model.with_weights(weights, smallest=1)
    x = rng.standard_normal((7, 9)).astype(np.float32)
    before, found = cnorm.active_isa(), set()
    model.save(tmp_path / "m.safetensors")
    model.save_packed(tmp_path / "m.cnorm")
    others = [
        cnorm.load(tmp_path / "m.safetensors"),
        cnorm.load(tmp_path / "m.cnorm"),
        pickle.loads(pickle.dumps(model)),
    ]
    try:
        for isa in cnorm.available_isas():
            cnorm.use_isa(isa)
            found.add(model.run(x).tobytes())
            stream = model.stream()
            found.add(np.stack([stream.step(frame) for frame in x]).tobytes())
            streams = [model.stream() for _ in range(3)]
            found.add(np.stack([model.step_many(streams, np.stack([frame] * 3))[1] for frame in x]).tobytes())
            found |= {other.run(x).tobytes() for other in others}
            if weights == "float32":
                found.add(run(tape_of([layer], 7, 1), x[:, None]).tobytes())
    finally:
        cnorm.use_isa(before)
    assert len(found) == 1
    assert {other.identity for other in others[::2]} == {model.identity}


def test_a_cell_with_the_usual_functions_is_the_preset(rng):
    """However they are written: the same spec, hence the same files and saved streams."""
    preset = cnorm.PRESETS["LSTM", "keras"]
    spec = dataclasses.replace(preset, activation=("tanh",), recurrent_activation=["sigmoid"], clip=None)
    assert spec == preset
    assert (
        dataclasses.replace(preset, recurrent_activation=("hard_sigmoid", 1 / 6, 0.5)).recurrent_activation
        == "hard_sigmoid"
    )
    other = dataclasses.replace(preset, name="mine")
    entry = cnorm.LSTM(cells.random_weights(other, rng, 3, 4), preset=other).entry()
    assert not entry["spec"].keys() & {"recurrent_activation", "clip"}


@pytest.mark.parametrize(
    ("key", "changes", "says"),
    [
        (("LSTM", "keras"), {"activation": "softsign"}, "activation must be one of tanh, relu, .*, got 'softsign'"),
        (("LSTM", "keras"), {"activation": "softmax"}, "activation must be one of"),
        (("GRU", "keras"), {"recurrent_activation": "prelu"}, "recurrent_activation must be one of"),
        (("GRU", "keras"), {"recurrent_activation": ("elu", 1, 2)}, "elu takes 1 parameters, got 2"),
        (("GRU", "keras"), {"recurrent_activation": ("hard_sigmoid", np.inf)}, "recurrent_activation: alpha must be"),
        (("GRU", "keras"), {"activation": "clip"}, "activation: clip of a cell needs finite lo and hi"),
        (("GRU", "keras"), {"clip": 0.0}, "clip must be a positive number or None"),
        (("GRU", "keras"), {"recurrent_activation": "tanh"}, "the runtime has no gates of tanh"),
        (
            ("RNN", "keras"),
            {"recurrent_activation": "relu"},
            "recurrent_activation belongs to LSTM and GRU, got 'relu'",
        ),
    ],
)
def test_refuses_other_functions(key, changes, says, rng):
    with pytest.raises(ValueError, match=says):
        layer_of(key, changes, rng)


@pytest.mark.parametrize("value", [None, 1, (), (1, "relu"), {"relu": 1}])
def test_refuses_what_is_no_function(value):
    with pytest.raises(TypeError, match="activation must be a name or"):
        dataclasses.replace(cnorm.PRESETS["LSTM", "keras"], activation=value)
