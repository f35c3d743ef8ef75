"""Random weights and the reference step of every preset, shared by the tests of recurrent cells."""

import functools

import numpy as np
import reference

import cnorm

# (kind, preset) -> its step in tests/support/reference.py
STEPS = {key: getattr(reference, f"{key[0].lower()}_{key[1]}", None) for key in cnorm.PRESETS}
STEPS["RNN", "ba2016_relu"] = functools.partial(reference.rnn_ba2016, activation="relu")
STEPS["RNN", "torch_relu"] = functools.partial(reference.rnn_torch, activation="relu")
STEPS["GRU", "onnx_linear_before_reset"] = functools.partial(reference.gru_onnx, linear_before_reset=True)
LAYERS = {"LSTM": cnorm.LSTM, "GRU": cnorm.GRU, "RNN": cnorm.RNN}
EPS = {("LSTM", "torchaudio"): 1e-3}  # presets without a default eps


def step_of(key, **options):
    """The reference step of a preset with its default eps: (weights, x, *states) -> tuple of states."""
    options = options | ({"eps": EPS[key]} if key in EPS else {})

    def step(weights, x, *states):
        after = STEPS[key](weights, x, *states, **options)
        return after if isinstance(after, tuple) else (after,)

    return step


def random_weights(spec, rng, inputs, units, outputs=None, optional=True):
    """float32 weights as training leaves them, in the spec's own names and layout; `outputs` with a projection."""
    sizes = {"I": inputs, "H": units, "P": outputs or units, "": 1}
    weights = {}
    for template, shape, meaning in spec.weights:
        if meaning.endswith("?") and ("weight_p" in meaning or "bias_p" in meaning):
            if outputs is None:
                continue
        elif meaning.endswith("?") and not optional:
            continue
        name = template.format(layer=0, even=0, odd=1, reverse="")
        lengths = [
            sum(_factor(term) * sizes[term.lstrip("0123456789")] for term in axis.split("+")) for axis in shape.split()
        ]
        values = rng.standard_normal(lengths)
        if "weight" in meaning:
            values *= 0.5 / np.sqrt(inputs + units)
        elif "gain" in meaning:
            values = 1 + 0.2 * values
        else:
            values *= 0.3
        weights[name] = values.astype(np.float32)
    return weights


def _factor(term):
    digits = term.rstrip("IHP")
    return int(digits) if digits else 1


def random_cell(key, rng, inputs, units, outputs=None, *, optional=True, eps=None):
    """A layer and its float64 step, taking and returning a dict of states."""
    spec = cnorm.PRESETS[key]
    weights = random_weights(spec, rng, inputs, units, outputs, optional)
    eps = EPS.get(key) if eps is None else eps
    layer = LAYERS[key[0]](weights, preset=spec, eps=eps)
    step = STEPS[key] if eps is None else functools.partial(STEPS[key], eps=eps)

    def advance(x, state):
        if key[0] == "LSTM":
            h, c = step(weights, x, state["h0"], state["c0"])
            return {"h0": h, "c0": c}
        return {"h0": step(weights, x, state["h0"])}

    return layer, advance


def step_tolerance(layer, state):
    """A bound on the error of one step: 2e-6 for the cell 12 -> 64, elsewhere by the length of the sums.

    A sum over k inputs in blocks of 16 has a chain of 16 + k / 16 roundings, taken as independent, so the
    error grows with the square root of their number. A norm over few values may divide by a small deviation, which
    enlarges everything: narrow layers are allowed eight times as much.
    """
    roundings = 16 + max(layer.input_size, layer.output_size) / 16
    narrow = 8 if layer.spec.normalises and layer.units < 32 else 1
    return 2e-6 * np.sqrt(roundings / (16 + 64 / 16)) * narrow * np.maximum(1, np.abs(state))


def worst_step(layer, advance, rng, steps, scale=1.0):
    """The largest one-step error along the float64 trajectory, relative to the bound."""
    stream = cnorm.Model([layer]).stream()
    state = {name: np.float64(value) for name, value in stream.state().items()}
    worst = 0
    for _ in range(steps):
        x = (scale * rng.standard_normal(layer.input_size)).astype(np.float32)
        start = {name: np.float32(value) for name, value in state.items()}
        stream.set_state(start)
        y = stream.step(x)
        state = advance(x, start)
        for name, wanted in state.items():
            error = np.abs(stream.state()[name] - wanted) / step_tolerance(layer, wanted)
            assert not np.isnan(error).any()
            worst = max(worst, error.max())
        np.testing.assert_array_equal(y, stream.state()["h0"])
    return worst
