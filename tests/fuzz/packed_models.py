"""Write small packed models of every preset and kind of layer to a folder, and files of version 1: the seeds of
fuzz_model_open.

python tests/fuzz/packed_models.py FOLDER
"""

import dataclasses
import sys
from pathlib import Path

import numpy as np

import cnorm

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from cells import random_cell


def models(rng):
    for key in sorted(cnorm.PRESETS):
        layer, _ = random_cell(key, rng, 2, 3)
        yield cnorm.Model([layer])
    gru, _ = random_cell(("GRU", "torch"), rng, 2, 2)
    other = dataclasses.replace(gru.spec, activation="relu", recurrent_activation=("hard_sigmoid", 0.2, 0.5), clip=2.0)
    yield cnorm.Model([cnorm.GRU(dict(gru.weights), preset=other)])
    projected, _ = random_cell(("LSTM", "lingvo"), rng, 2, 3, outputs=2)
    norm, linear = cnorm.LayerNorm(np.ones(2, np.float32)), cnorm.Linear(np.ones((2, 2), np.float32))
    plain = cnorm.Model(
        [
            cnorm.Residual([norm, linear, cnorm.Scale(np.ones(2, np.float32)), cnorm.Multiply("input")]),
            projected,
            cnorm.Activation("relu", name="relu"),
            cnorm.Activation("clip", lo=-1, hi=2),
            cnorm.Activation("prelu", slope=np.ones(2, np.float32)),
            cnorm.Activation("softmax", name="softmax"),
            cnorm.Concat(["input", "softmax"]),
            cnorm.Activation("tanh", name="tanh"),
        ],
        ("relu", "tanh"),
    )
    yield plain
    convolutions = cnorm.Model(
        [
            cnorm.CausalConv1d(rng.standard_normal((4, 2, 2)).astype(np.float32), np.ones(4, np.float32), dilation=2),
            cnorm.CausalConv1d(rng.standard_normal((4, 1, 3)).astype(np.float32), groups=4),
            cnorm.Conv1d(rng.standard_normal((2, 2, 2)).astype(np.float32), positions=2, padding=1),
            cnorm.Conv1d(
                rng.standard_normal((2, 1, 2)).astype(np.float32), positions=3, stride=2, padding=1, groups=2,
                padding_mode="reflect",
            ),
        ]
    )  # fmt: skip
    yield convolutions
    yield cnorm.Model([cnorm.Delay(3, 2, input_size=2), cnorm.Linear(np.ones((2, 6), np.float32))])
    frames = [
        cnorm.ConvTranspose1d(rng.standard_normal((2, 2, 2)).astype(np.float32), positions=2, stride=2, padding=1),
        cnorm.ConvTranspose1d(rng.standard_normal((2, 1, 2)).astype(np.float32), positions=2, groups=2),
        cnorm.MaxPool1d(2, channels=2, positions=3, stride=1, padding=(1, 0)),
        cnorm.Permute((3, 2), (1, 0)),
        cnorm.PerPosition(gru, positions=3),
        cnorm.OverPositions(gru, positions=3, reverse=True),
        cnorm.OverPositions(gru, positions=3, both=random_cell(("LSTM", "torch"), rng, 2, 1)[0]),
        cnorm.PerPosition(cnorm.Linear(np.ones((2, 3), np.float32)), positions=3),
        cnorm.OverPositions(random_cell(("RNN", "ba2016"), rng, 2, 2)[0], positions=3),
    ]
    yield cnorm.Model(frames)
    yield cnorm.Model(frames).with_weights("int8", smallest=1)
    tokens = cnorm.Embedding(rng.standard_normal((5, 2)).astype(np.float32))
    yield cnorm.Model([cnorm.Slice("input", 1, 2), tokens, gru])
    for weights in ("int8", "float16"):
        yield cnorm.Model([tokens, gru]).with_weights(weights, smallest=1)
    yield convolutions.with_weights("int8", smallest=1)
    yield cnorm.Model([cnorm.Bidirectional(gru, projected), cnorm.Activation("sigmoid")])
    for weights in ("int8", "float16"):
        yield plain.with_weights(weights, smallest=1)


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for i, model in enumerate(models(np.random.default_rng(0))):
        model.save_packed(folder / f"{i}.cnorm")


if __name__ == "__main__":
    main()
