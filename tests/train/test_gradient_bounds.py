"""Every gradient of a step against the derivative of the float64 reference, within the bound that autodiff.py derives.

trajectories.py compares steps one by one. test_gradients.py shows that the gradients of many steps are those of single
steps, bit for bit.
"""

import os

import autodiff
import cells
import numpy as np
import pytest
import reference
from tapes import back, run, tape_of
from tolerances import assert_within
from trajectories import PROJECTED, assert_steps_within_the_bound

import cnorm

KEYS = sorted(cnorm.PRESETS)


def all_steps_and_batches(chosen):
    """The chosen pairs; all sixteen if CNORM_ALL_GRADIENTS is set, as `make gradients` does."""
    every = [(steps, batch) for steps in (1, 2, 17, 100) for batch in (1, 3, 8, 33)]
    return pytest.mark.parametrize(("steps", "batch"), every if os.environ.get("CNORM_ALL_GRADIENTS") else chosen)


@pytest.mark.exhaustive(one_in=6)
@all_steps_and_batches([(1, 3), (2, 33), (17, 8), (50, 1)])
@pytest.mark.parametrize("key", KEYS, ids="-".join)
def test_every_preset(key, steps, batch, rng):
    assert_steps_within_the_bound(key, (steps, batch), rng)


@pytest.mark.parametrize(
    ("key", "options"),
    [
        (("LSTM", "tflite"), {"cell_clip": 0.3, "projection_clip": 0.05}),
        (("LSTM", "haste"), {"zoneout": 0.25}),
        (("GRU", "haste"), {"zoneout": 0.25}),
    ],
    ids=str,
)
def test_clips_and_zoneout(key, options, rng):
    assert_steps_within_the_bound(key, (17, 3), rng, **options)


@pytest.mark.parametrize("rows", [1, 16, 33, 150])
def test_layers_without_state(rows, rng):
    """Linear, Activation, LayerNorm and Residual: tanh(LN(a) gain + bias) + a with a = W x + b, then W2 (...) + b2."""
    x, dy = rng.standard_normal((rows, 1, 7)).astype(np.float32), rng.standard_normal((rows, 1, 5)).astype(np.float32)
    shapes = {"w": (20, 7), "b": (20,), "gain": (20,), "bias": (20,), "w2": (5, 20), "b2": (5,)}
    weights = {name: (0.5 * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
    norm = cnorm.Residual([cnorm.LayerNorm(weights["gain"], weights["bias"]), cnorm.Activation("tanh")])
    layers = [cnorm.Linear(weights["w"], weights["b"]), norm, cnorm.Linear(weights["w2"], weights["b2"])]
    tape = tape_of(layers, rows, 1)
    run(tape, x)
    found = {"x": back(tape, dy, 7)[:, 0]}
    first, normed, last = (tape.gradients[i] for i in (0, 1, 4))
    found |= {"w": first["weight"][0], "b": first["bias"], "gain": normed["gain"], "bias": normed["bias"]}
    found |= {"w2": last["weight"][0], "b2": last["bias"]}
    n = {name: autodiff.Node(autodiff.Value(array)) for name, array in ({"x": x[:, 0]} | weights).items()}
    a = n["x"] @ n["w"].T + n["b"]
    y = (np.tanh(reference.normalised(a, 1e-5) * n["gain"] + n["bias"]) + a) @ n["w2"].T + n["b2"]
    for name, wanted in zip(n, autodiff.gradients([y], [autodiff.Value(dy[:, 0])], n.values()), strict=True):
        assert_within(found[name], wanted.value, wanted.bound, name)


@pytest.mark.parametrize("scale", [2.0**70, 2.0**-70])
@pytest.mark.parametrize(
    "key", [("LSTM", "ba2016"), ("LSTM", "torchaudio"), ("GRU", "ba2016"), ("RNN", "tfa")], ids="-".join
)
def test_rows_whose_squares_leave_the_range_of_float32(key, scale, isa, rng):
    assert_steps_within_the_bound(key, (3, 2), rng, scale)


@pytest.mark.parametrize("key", KEYS, ids="-".join)
def test_the_derivatives_of_the_reference_are_its_differences(key, rng):
    """Those of autodiff.py; the error of central differences is near 1e-10 of the third derivatives."""
    step, weights = (
        cells.step_of(key),
        cells.random_weights(cnorm.PRESETS[key], rng, 3, 5, 4 if key in PROJECTED else None),
    )
    width = 4 if key in PROJECTED else 5
    wide = {name: np.float64(array) for name, array in weights.items()}
    x = rng.standard_normal((2, 3))
    states = [0.5 * rng.standard_normal((2, n)) for n in (width, 5)[: 1 + (key[0] == "LSTM")]]
    cotangents = [rng.standard_normal(state.shape) for state in states]

    def loss():
        return sum(float(np.sum(d * y)) for d, y in zip(cotangents, step(wide, x, *states), strict=True))

    found = autodiff.cell_gradients(step, wide, x, states, [autodiff.Value(d) for d in cotangents])
    arrays = {"dx": x} | {f"d{name}": state for name, state in zip("hc", states, strict=False)} | wide
    for name, array in arrays.items():
        wanted = difference(loss, array)
        assert np.abs(found[name].value - wanted).max() <= 1e-7 * max(1, np.abs(wanted).max()), name


def difference(f, array):
    """The gradient of f() in array, float64, by central differences."""
    gradient, width = np.zeros_like(array), 2.0**-17
    for i in np.ndindex(array.shape):
        was = array[i]
        array[i] = was + width
        above = f()
        array[i] = was - width
        gradient[i] = (above - f()) / (2 * width)
        array[i] = was
    return gradient
