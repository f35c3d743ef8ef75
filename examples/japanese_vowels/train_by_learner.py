"""Train the demo's network with `cnorm.Learner` alone: no PyTorch, one utterance at a time, frame by frame.

    python examples/japanese_vowels/train_by_learner.py

It uses the network, loss and noise of train.py, but batch size 1 instead of 30, and so a smaller learning rate and a
clipped gradient. It trains ten seeds, with layer normalisation, and prints their accuracy on the test split after each
tenth epoch, and a hash of the first seed's weights, which is the same on every machine.
"""

import hashlib
from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np

import cnorm
from cnorm.learner import softmax

TRAIN = Path(__file__).parent / "japanese_vowels_train.npz"
TEST = resources.files("cnorm") / "data" / "japanese_vowels_test.npz"
INPUT, HIDDEN, SPEAKERS = 12, 64, 9
SEEDS, EPOCHS, RATE, NOISE, EARLY = range(10), 40, 1e-3, 0.2, 0.2


def utterances(path):
    """A list with (frames [T, 12], speaker) for each utterance."""
    with path.open("rb") as file, np.load(file) as data:
        pieces = np.split(data["frames"], np.cumsum(data["lengths"])[:-1])
        return list(zip(pieces, map(int, data["labels"]), strict=True))


def network(rng):
    bound = HIDDEN**-0.5
    zeros = {"bias": 4 * HIDDEN, "bias_x": 4 * HIDDEN, "bias_h": 4 * HIDDEN, "bias_c": HIDDEN}
    ones = {"gain_x": 4 * HIDDEN, "gain_h": 4 * HIDDEN, "gain_c": HIDDEN}
    weights = {
        name: rng.uniform(-bound, bound, (4 * HIDDEN, n)) for name, n in (("weight_x", INPUT), ("weight_h", HIDDEN))
    }
    weights |= {name: np.zeros(n) for name, n in zeros.items()} | {name: np.ones(n) for name, n in ones.items()}
    weights = {name: array.astype(np.float32) for name, array in weights.items()}
    head = rng.uniform(-bound, bound, (SPEAKERS, HIDDEN)).astype(np.float32)
    return cnorm.Model([cnorm.LSTM(weights, preset="ba2016"), cnorm.Linear(head, np.zeros(SPEAKERS, np.float32))])


def learn_utterance(learner, frames, speaker):
    """Train on one utterance with the loss of train.py: cross-entropy at the last frame and its mean over all."""
    learner.reset()
    scores = np.stack([learner.step(frame) for frame in frames])
    dy = softmax(scores)
    dy[:, speaker] -= 1
    weight = np.full((len(frames), 1), EARLY / len(frames), np.float32)
    weight[-1] += np.float32(1 - EARLY)
    learner.learn(dy * weight)


def accuracy(model, data):
    return 100 * float(np.mean([int(np.argmax(model.stream().process(x)[-1])) == speaker for x, speaker in data]))


def train(seed, fit, test, epochs=EPOCHS):
    """Train the network of one seed; returns the model and its accuracy on the test split after each tenth epoch."""
    rng = np.random.default_rng(seed)
    learner, curve = cnorm.Learner(network(rng), cnorm.Adam(RATE, clip=1.0), truncate=32), []
    for epoch in range(epochs):
        learner.optimizer = replace(learner.optimizer, lr=RATE * (epochs - epoch) / epochs)
        for i in rng.permutation(len(fit)):
            frames, speaker = fit[i]
            noise = NOISE * rng.standard_normal(frames.shape)
            learn_utterance(learner, (frames + noise).astype(np.float32), speaker)
        if epoch % 10 == 9:
            curve.append(accuracy(learner.model(), test))
    return learner.model(), curve


def main():
    fit, test = utterances(TRAIN), utterances(TEST)
    curves = []
    for seed in SEEDS:
        model, curve = train(seed, fit, test)
        curves.append(curve)
        print(f"seed {seed}: " + "  ".join(f"{value:5.1f} %" for value in curve))
        if seed == 0:
            digest = hashlib.sha256(b"".join(a.tobytes() for layer in model.layers for a in layer.weights.values()))
    last = np.array(curves)[:, -1]
    print(f"after {EPOCHS} epochs {last.mean():.1f} ± {last.std(ddof=1):.1f} %; seed 0: {digest.hexdigest()[:16]}")


if __name__ == "__main__":
    main()
