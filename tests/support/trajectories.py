"""Gradients of a cell's steps along the float64 trajectory, each against the bound that autodiff.py derives.

A normalised recurrence is chaotic, so steps are compared one by one, along the trajectory of the float64 reference:
each begins at its state, and goes back from its gradient of the state, both rounded to float32.
"""

import dataclasses

import autodiff
import cells
import numpy as np
from tapes import back, own_gradients, run, tape_of
from tolerances import assert_within

import cnorm

INPUTS, UNITS, OUTPUTS = 7, 20, 9
PROJECTED = (("LSTM", "torch"), ("LSTM", "lingvo"), ("LSTM", "tflite"))


def scaled_to_one(state):
    """Gradients are linear in those of the state, which may grow with every step: scaled by a power of two."""
    largest = max(np.abs(part).max() for part in state)
    factor = 2.0 ** -np.ceil(np.log2(largest)) if largest > 1 else 1.0
    return [np.float32(part * factor) for part in state]


def by_tape(layer, batch):
    """A function of x [batch, INPUTS], the state, dy and the state's gradient after: gradients of a step, by name."""
    tape = tape_of([layer], 1, batch)
    places = [slice(start, start + n) for _, n, start in tape.state_arrays]

    def gradients(x, state, dy, dstate):
        after = np.zeros_like(tape.dstate)
        for place, start, end in zip(places, state, dstate, strict=True):
            tape.state[:, place], after[:, place] = start, end
        run(tape, x[None])
        found = {"dx": back(tape, dy[None], INPUTS, after)[0]} | own_gradients(layer, tape)
        return found | {f"d{name}": tape.dstate[:, place] for name, place in zip("hc", places, strict=False)}

    return gradients


def assert_steps_within_the_bound(key, shape, rng, scale=1.0, by=by_tape, **options):
    """Forward along the float64 trajectory from the zero state, with x times `scale`, and back, step by step.

    shape: steps and batch. by: as `by_tape`. options: fields of the spec that differ from the preset's, and arguments
    of the reference step.
    """
    (steps, batch), outputs = shape, OUTPUTS if key in PROJECTED else None
    spec, step = dataclasses.replace(cnorm.PRESETS[key], **options), cells.step_of(key, **options)
    weights = cells.random_weights(spec, rng, INPUTS, UNITS, outputs)
    gradients = by(cells.LAYERS[key[0]](weights, preset=spec, eps=cells.EPS.get(key)), batch)
    width = outputs or UNITS
    x = (scale * rng.standard_normal((steps, batch, INPUTS))).astype(np.float32)
    dy = rng.standard_normal((steps, batch, width)).astype(np.float32)
    state, before = [np.zeros((batch, n)) for n in (width, UNITS)[: 1 + (key[0] == "LSTM")]], []
    for frame in x:
        before.append([np.float32(part) for part in state])
        state = step(weights, frame, *state)
    dstate = [np.zeros_like(part) for part in before[0]]
    for t in reversed(range(steps)):
        first, *rest = (autodiff.Value(part) for part in dstate)
        expected = autodiff.cell_gradients(step, weights, x[t], before[t], [first + autodiff.Value(dy[t]), *rest])
        found = gradients(x[t], before[t], dy[t], dstate)
        assert found.keys() == expected.keys()
        for name, wanted in expected.items():
            assert_within(found[name], wanted.value, wanted.bound, f"{name} of step {t}")
        dstate = scaled_to_one([expected[f"d{name}"].value for name, _ in zip("hc", dstate, strict=False)])
