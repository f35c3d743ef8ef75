"""Random weights for every preset, and its reference: what the tests of recurrent cells share."""

import functools

import numpy as np
import reference

import cnorm

# (kind, preset) -> its step in tests/support/reference.py
STEPS = {key: getattr(reference, f"{key[0].lower()}_{key[1]}", None) for key in cnorm.PRESETS}
STEPS["RNN", "ba2016_relu"] = functools.partial(reference.rnn_ba2016, activation="relu")
STEPS["GRU", "onnx_linear_before_reset"] = functools.partial(reference.gru_onnx, linear_before_reset=True)
LAYERS = {"LSTM": cnorm.LSTM, "GRU": cnorm.GRU, "RNN": cnorm.RNN}
EPS = {("LSTM", "torchaudio"): 1e-3}  # presets that must be told


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


def random_cell(key, rng, inputs, units, outputs=None, optional=True):
    """A layer and its float64 step, taking and returning a dict of states."""
    spec = cnorm.PRESETS[key]
    weights = random_weights(spec, rng, inputs, units, outputs, optional)
    layer = LAYERS[key[0]](weights, preset=spec, eps=EPS.get(key))
    step = STEPS[key] if key not in EPS else functools.partial(STEPS[key], eps=EPS[key])

    def advance(x, state):
        if key[0] == "LSTM":
            h, c = step(weights, x, state["h0"], state["c0"])
            return {"h0": h, "c0": c}
        return {"h0": step(weights, x, state["h0"])}

    return layer, advance
