"""Random layers, as training leaves them, for tests of whole models."""

import cells
import numpy as np

import cnorm


def random_lstm(rng, inputs, hidden, eps=1e-5):
    weights = cells.random_weights(cnorm.PRESETS["LSTM", "ba2016"], rng, inputs, hidden)
    return cnorm.LSTM(weights, preset="ba2016", eps=eps)


def random_linear(rng, inputs, outputs, bias=True):
    weight = (rng.standard_normal((outputs, inputs)) / np.sqrt(inputs)).astype(np.float32)
    return cnorm.Linear(weight, rng.standard_normal(outputs).astype(np.float32) if bias else None)
