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


def streamed_layers(rng):
    """A list with each kind of layer that a stream can have, in sizes that are no multiple of a vector or panel."""

    def normal(*shape):
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    inner = [
        cnorm.LayerNorm(1 + normal(19), normal(19)),
        random_linear(rng, 19, 19),
        cnorm.Activation("softmax"),
        cnorm.Multiply("input", name="gated"),
        cnorm.Concat(["gated", "input"]),
        random_linear(rng, 38, 19),
    ]
    return [
        cells.random_cell(("LSTM", "ba2016"), rng, 5, 19)[0],
        cnorm.CausalConv1d(normal(18, 19, 3), normal(18), dilation=2),
        cnorm.CausalConv1d(normal(18, 1, 17), groups=18),
        cnorm.Conv1d(normal(4, 3, 3), normal(4), positions=6, padding=1, padding_mode="reflect"),
        cnorm.Conv1d(normal(4, 1, 2), positions=6, stride=2, groups=4, name="framed"),
        cnorm.Slice("framed", 2, 9),
        cnorm.Activation("prelu", slope=normal(7)),
        cells.random_cell(("GRU", "torch"), rng, 7, 19)[0],
        cnorm.Residual(inner),
        cnorm.Scale(normal(19), name="scaled"),
        cells.random_cell(("RNN", "ba2016"), rng, 19, 19)[0],
        cnorm.Add("scaled"),
        cnorm.Linear(normal(3, 19), normal(3), name="last"),
    ]


def frame_layers(rng):
    """A list with each kind of layer of frames [channels, positions] that came after those of `streamed_layers`."""

    def normal(*shape):
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    return [
        cnorm.Delay(3, 2, input_size=21),
        cnorm.Conv1d(normal(4, 9, 3), normal(4), positions=7, padding=1),
        cnorm.ConvTranspose1d(normal(4, 3, 5), normal(6), positions=7, stride=2, padding=2, groups=2),
        cnorm.ConvTranspose1d(normal(6, 1, 3), positions=13, dilation=2, groups=6),
        cnorm.MaxPool1d(3, channels=6, positions=17, stride=2, padding=1),
        cnorm.Permute((2, 3, 9), (1, 0, 2)),
        cnorm.PerPosition(cells.random_cell(("LSTM", "torch"), rng, 6, 5)[0], positions=9),
        cnorm.OverPositions(
            cells.random_cell(("GRU", "torch"), rng, 5, 4)[0],
            positions=9,
            both=cells.random_cell(("GRU", "ba2016"), rng, 5, 3)[0],
        ),
        cnorm.PerPosition(cnorm.Linear(normal(3, 7), normal(3)), positions=9),
        cnorm.OverPositions(cells.random_cell(("RNN", "torch"), rng, 3, 2)[0], positions=9, reverse=True),
    ]


def token_model(rng):
    """Token ids among other numbers: an embedding and a cell."""
    return cnorm.Model(
        [
            cnorm.Slice("input", 1, 2),
            cnorm.Embedding(rng.standard_normal((50, 6)).astype(np.float32), name="token"),
            cnorm.Concat(["token", "input"]),
            cells.random_cell(("GRU", "torch"), rng, 8, 19)[0],
            random_linear(rng, 19, 3),
        ]
    )


def deep_model(rng):
    """Cells, norms and residual blocks, in sizes that are no multiple of a vector or panel."""
    lstm, _ = cells.random_cell(("LSTM", "ba2016"), rng, 5, 19)
    gru, _ = cells.random_cell(("GRU", "torch"), rng, 19, 19)
    projected, _ = cells.random_cell(("LSTM", "lingvo"), rng, 19, 33, outputs=7)
    norm = cnorm.LayerNorm(*rng.standard_normal((2, 19)).astype(np.float32))
    linear = cnorm.Linear(rng.standard_normal((19, 19)).astype(np.float32))
    out = cnorm.Linear(rng.standard_normal((3, 7)).astype(np.float32), rng.standard_normal(3).astype(np.float32))
    inner = cnorm.Residual([norm, linear, cnorm.Activation("relu")])
    return cnorm.Model([lstm, cnorm.Residual([inner, gru]), cnorm.Activation("tanh"), projected, out])
