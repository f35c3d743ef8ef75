"""Runs of a tape, forward and back, shared by the tests of training."""

import numpy as np

from cnorm import _core
from cnorm.cells.parameters import add_gradients
from cnorm.layers.chain import flat


def tape_of(layers, steps, batch):
    layers = list(layers)
    return _core.Tape(flat(layers, layers[0].input_size), steps, batch)


def run(tape, x, first=0):
    y = np.empty((*x.shape[:2], tape.network.output_size), np.float32)
    tape.run(first, len(x), np.ascontiguousarray(x), y)
    return y


def back(tape, dy, inputs, dstate=0.0, first=0):
    """Run a backward pass; return dx. The other gradients are in the tape."""
    dx = np.empty((*dy.shape[:2], inputs), np.float32)
    tape.dstate[...] = dstate
    tape.backward(first, len(dy), np.ascontiguousarray(dy), dx)
    return dx


def own_gradients(layer, tape, index=0):
    """The gradients by the names of the layer's own tensors."""
    into = {name: np.zeros_like(array) for name, array in layer.weights.items()}
    add_gradients(layer.gradient_targets(into), tape.gradients[index])
    return into
