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


def deep_model(rng):
    """Every kind of layer, in sizes that are no multiple of a vector or panel."""
    lstm, _ = cells.random_cell(("LSTM", "ba2016"), rng, 5, 19)
    gru, _ = cells.random_cell(("GRU", "torch"), rng, 19, 19)
    projected, _ = cells.random_cell(("LSTM", "lingvo"), rng, 19, 33, outputs=7)
    norm = cnorm.LayerNorm(*rng.standard_normal((2, 19)).astype(np.float32))
    linear = cnorm.Linear(rng.standard_normal((19, 19)).astype(np.float32))
    out = cnorm.Linear(rng.standard_normal((3, 7)).astype(np.float32), rng.standard_normal(3).astype(np.float32))
    inner = cnorm.Residual([norm, linear, cnorm.Activation("relu")])
    return cnorm.Model([lstm, cnorm.Residual([inner, gru]), cnorm.Activation("tanh"), projected, out])
