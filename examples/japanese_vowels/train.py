"""Train the network that `make demo` runs with `cnorm.Learner` alone: no PyTorch, frame by frame.

Nine speakers say the vowel pair /ae/; the network recognises the speaker while the frames arrive. It is a
layer-normalised LSTM, 12 -> 64 (Eq. 20-22 of arXiv:1607.06450), with a linear read-out, 64 -> 9.

    python examples/japanese_vowels/train.py [--seeds 10] [--epochs 40] [--out japanese_vowels.safetensors] [--torch]

trains the seeds with the recipe of train_by_torch.py and prints their accuracy on the test split. It writes the model
with the least loss on training utterances that no network was trained on: the same file, byte for byte, on every
machine and instruction set. With matplotlib it draws the curves beside the model. --torch trains by cnorm.torch and
PyTorch's Adam instead, from the same weights, batches and noise: a check, whose last bits are those of PyTorch's sums.
"""

import argparse
import hashlib
import math
from dataclasses import replace
from pathlib import Path

import numpy as np

import cnorm
from cnorm.learner import softmax

FOLDER = Path(__file__).parent
INPUT, HIDDEN, SPEAKERS = 12, 64, 9
BATCH, RATE, NOISE, EARLY, HELD_OUT = 30, 3e-3, 0.2, 0.2, 6  # as in train_by_torch.py


def utterances(split):
    """A list with (frames [T, 12], speaker) for each utterance of the split "train" or "test"."""
    with np.load(FOLDER / f"japanese_vowels_{split}.npz") as data:
        pieces = np.split(data["frames"], np.cumsum(data["lengths"])[:-1])
        return list(zip(pieces, map(int, data["labels"]), strict=True))


def held_out(data):
    """The last six utterances of each speaker, and the others."""
    last = {i for k in range(SPEAKERS) for i in [j for j, (_, label) in enumerate(data) if label == k][-HELD_OUT:]}
    return [one for i, one in enumerate(data) if i in last], [one for i, one in enumerate(data) if i not in last]


def network(rng):
    """Random weights, uniform as in torch.nn.LSTM and torch.nn.Linear; gains 1, biases of the cell 0."""
    bound = HIDDEN**-0.5
    zeros = {"bias": 4 * HIDDEN, "bias_x": 4 * HIDDEN, "bias_h": 4 * HIDDEN, "bias_c": HIDDEN}
    ones = {"gain_x": 4 * HIDDEN, "gain_h": 4 * HIDDEN, "gain_c": HIDDEN}
    weights = {
        name: rng.uniform(-bound, bound, (4 * HIDDEN, n)) for name, n in (("weight_x", INPUT), ("weight_h", HIDDEN))
    }
    weights |= {name: np.zeros(n) for name, n in zeros.items()} | {name: np.ones(n) for name, n in ones.items()}
    weights = {name: array.astype(np.float32) for name, array in weights.items()}
    head = rng.uniform(-bound, bound, (SPEAKERS, HIDDEN)).astype(np.float32)
    bias = rng.uniform(-bound, bound, SPEAKERS).astype(np.float32)
    return cnorm.Model([cnorm.LSTM(weights, preset="ba2016"), cnorm.Linear(head, bias)])


def bell(rng, shape):
    """Noise of mean 0 and standard deviation 1: sums of twelve uniform numbers, which are the same on every machine."""
    return rng.random((12, *shape)).sum(0) - 6


def weight_of(frames):
    """The weight of each frame's cross-entropy in the loss [T, 1]: EARLY for their mean, the rest for the last."""
    weight = np.full((len(frames), 1), EARLY / len(frames))
    weight[-1] += 1 - EARLY
    return weight


class ByLearner:
    """Training by `cnorm.Learner`: the utterances of a batch one after the other."""

    def __init__(self, model):
        self.learner = cnorm.Learner(model, cnorm.Adam(RATE, clip=1.0), truncate=32)
        self.model = self.learner.model

    def learn(self, batch, rate):
        """One update with the mean loss of a batch of (frames, speaker)."""
        learner = self.learner
        learner.optimizer = replace(learner.optimizer, lr=rate)
        for i, (frames, speaker) in enumerate(batch):
            learner.reset()
            dy = softmax(np.stack([learner.step(frame) for frame in frames]))
            dy[:, speaker] -= 1
            learner.learn(dy * (weight_of(frames) / len(batch)).astype(np.float32), update=i == len(batch) - 1)


class ByTorch:
    """The same training by `cnorm.torch`: a batch is padded with zeros, whose outputs have no weight in the loss."""

    def __init__(self, model):
        import torch

        import cnorm.torch

        cell, head = model.layers
        self.lstm, self.head = cnorm.torch.LSTM(INPUT, HIDDEN, preset="ba2016"), torch.nn.Linear(HIDDEN, SPEAKERS)
        for module, layer in ((self.lstm, cell), (self.head, head)):
            module.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in layer.weights.items()})
        self.parameters = [*self.lstm.parameters(), *self.head.parameters()]
        self.adam = torch.optim.Adam(self.parameters, RATE)

    def model(self):
        return cnorm.Model([*self.lstm.to_layers(), cnorm.Linear(self.head)])

    def learn(self, batch, rate):
        import torch
        from torch.nn.utils import clip_grad_norm_, rnn

        frames, weights = ([torch.from_numpy(a) for a in arrays] for arrays in zip(
            *((x, weight_of(x).astype(np.float32)) for x, _ in batch), strict=True))  # fmt: skip
        x, weight = rnn.pad_sequence(frames), rnn.pad_sequence(weights)[..., 0] / len(batch)  # [steps, batch, ...]
        target = torch.tensor([speaker for _, speaker in batch]).expand(x.shape[:2])
        scores = self.head(self.lstm(x)[0])
        entropy = torch.nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten(), reduction="none")
        self.adam.zero_grad()
        self.adam.param_groups[0]["lr"] = rate
        (entropy * weight.flatten()).sum().backward()
        clip_grad_norm_(self.parameters, 1.0)
        self.adam.step()


def judge(model, data):
    """The mean loss, and the share in percent of the utterances that are named correctly at their last frame."""
    losses, right = [], 0
    for frames, speaker in data:
        scores = np.float64(model.stream().process(frames))
        largest = scores.max(1)
        entropy = largest + np.log(np.exp(scores - largest[:, None]).sum(1)) - scores[:, speaker]
        losses.append(float((entropy * weight_of(frames)[:, 0]).sum()))
        right += int(np.argmax(scores[-1])) == speaker
    return float(np.mean(losses)), 100 * right / len(data)


def train(seed, fit, test, epochs, method=ByLearner):
    """Train the network of one seed; returns the model and its accuracy on the test split after each epoch."""
    rng = np.random.default_rng(seed)
    trainer, curve = method(network(rng)), []
    for epoch in range(epochs):
        rate = round(RATE * (1 + math.cos(math.pi * epoch / epochs)) / 2, 12)  # a cosine's last bit is the machine's
        order = rng.permutation(len(fit))
        for start in range(0, len(fit), BATCH):
            chosen = [fit[i] for i in order[start : start + BATCH]]
            trainer.learn([((x + NOISE * bell(rng, x.shape)).astype(np.float32), label) for x, label in chosen], rate)
        curve.append(judge(trainer.model(), test)[1])
    return trainer.model(), curve


def draw(curves, label, path):
    """Picture of curves [seeds, epochs] in percent: their mean, and a band of one standard deviation."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    epochs, mean, deviation = np.arange(1, curves.shape[1] + 1), curves.mean(0), curves.std(0, ddof=1)
    axes.plot(epochs, mean, color="#0b6e99", lw=2, label=f"{label}: {mean[-1]:.1f} ± {deviation[-1]:.1f} %")
    axes.fill_between(epochs, mean - deviation, np.minimum(mean + deviation, 100), color="#0b6e99", alpha=0.2, lw=0)
    axes.set(xlabel="epochs", ylabel="test utterances named correctly (%)", ylim=(0, 100))
    axes.set_title(f"Japanese Vowels, LSTM 12 → 64: mean ± standard deviation of {len(curves)} seeds", fontsize=11)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=130, metadata={"Software": None})


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("japanese_vowels.safetensors"))
    parser.add_argument("--torch", action="store_true", help="train by cnorm.torch, as a check")
    options = parser.parse_args(arguments)
    held, fit = held_out(utterances("train"))
    test, curves, found = utterances("test"), [], []
    for seed in range(options.seeds):
        model, curve = train(seed, fit, test, options.epochs, ByTorch if options.torch else ByLearner)
        loss, _ = judge(model, held)
        curves.append(curve)
        found.append((loss, seed, model))
        print(f"seed {seed}: {curve[-1]:.1f} % of the test split named correctly, held-out loss {loss:.3f}")
    loss, seed, model = min(found, key=lambda one: one[:2])
    model.save(options.out)
    curves = np.array(curves)
    if len(curves) > 1:
        last = curves[:, -1]
        print(f"mean and standard deviation of {len(curves)} seeds: {last.mean():.1f} ± {last.std(ddof=1):.1f} %")
        draw(curves, "cnorm.torch" if options.torch else "cnorm.Learner", options.out.with_suffix(".png"))
    print(f"{options.out}: seed {seed}, sha256 {hashlib.sha256(options.out.read_bytes()).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
