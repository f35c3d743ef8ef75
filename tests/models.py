"""Random models, as training leaves them."""

import numpy as np

import cnorm


def random_lstm(rng, inputs, hidden, eps=1e-5):
    scale = {"weight_x": 1 / np.sqrt(inputs), "weight_h": 1 / np.sqrt(hidden)}
    shapes = {"weight_x": (4 * hidden, inputs), "weight_h": (4 * hidden, hidden)}
    shapes |= dict.fromkeys(("bias", "gain_x", "bias_x", "gain_h", "bias_h"), (4 * hidden,))
    shapes |= dict.fromkeys(("gain_c", "bias_c"), (hidden,))
    weights = {n: scale.get(n, 0.3) * rng.standard_normal(s) for n, s in shapes.items()}
    for name in ("gain_x", "gain_h", "gain_c"):
        weights[name] += 1
    return cnorm.LSTM({n: w.astype(np.float32) for n, w in weights.items()}, preset="ba2016", eps=eps)


def random_linear(rng, inputs, outputs, bias=True):
    weight = (rng.standard_normal((outputs, inputs)) / np.sqrt(inputs)).astype(np.float32)
    return cnorm.Linear(weight, rng.standard_normal(outputs).astype(np.float32) if bias else None)
