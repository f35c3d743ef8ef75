"""Section 6.3: skip-thought vectors, a GRU encoder (Eq. 26 to 28) and two decoders, layer norm against none.

The encoder reads a sentence, one decoder predicts the words of the sentence before it, the other those of the next one
(Kiros et al., arXiv:1506.06726). Smaller than in the paper: clauses of the King James Bible stand for the sentences of
the BookCorpus, which is no longer given away; 128 units, not 2400; 1000 words, not 20,000; mini-batches of 32, not 128.
Downstream, ridge regression tells from the frozen encoder's vectors which part of the book a clause is from.
"""

import re
from functools import cache

import data
import numpy as np
import torch
from harness import Experiment, Variant
from torch import Tensor, nn
from torch.nn import functional as F
from training import TorchTrainer
from words import PAD, Encoder, Vocabulary, check_encoder, words

import cnorm.torch

UNITS, WIDTH, WORDS, LONGEST, BATCH = 128, 64, 1000, 16, 32
# the first book of each part: law, history, poetry, prophets, gospels and Acts, letters
PARTS = ("Ge", "Josh", "Job", "Isa", "Mat", "Rom")


@cache
def clauses() -> tuple[Tensor, Tensor, Vocabulary]:
    """Clauses of at least 3 words as numbers [n, LONGEST], in the book's order; the part each is from [n]."""
    found, parts, part = [], [], -1
    for book, verse in data.bible():
        if part + 1 < len(PARTS) and book == PARTS[part + 1]:
            part += 1
        for clause in re.split(r"[.:;?!]", verse):
            if len(words(clause)) >= 3:
                found.append(words(clause)[:LONGEST])
                parts.append(part)
    vocabulary = Vocabulary(found, WORDS)
    return vocabulary(found, LONGEST), torch.tensor(parts), vocabulary


@cache
def places() -> tuple[np.ndarray, np.ndarray]:
    """Indices of clauses with two neighbours: for training, and the 20th block of 200 of each 4000 for tests."""
    at = np.arange(1, len(clauses()[0]) - 1)
    test = at // 200 % 20 == 19
    return at[~test], at[test]


class Network(nn.Module):
    def __init__(self, preset: str) -> None:
        super().__init__()
        self.encoder = Encoder(WORDS, WIDTH, UNITS, preset)
        self.decoders = nn.ModuleList(cnorm.torch.GRU(WIDTH + UNITS, UNITS, preset=preset) for _ in range(2))
        self.output = nn.Linear(UNITS, WORDS)

    def forward(self, before: Tensor, sentence: Tensor, after: Tensor) -> Tensor:
        """Mean negative log likelihood of a word of the neighbours: numbers [batch, LONGEST] each -> nats."""
        thought = self.encoder(sentence)
        losses = []
        for decoder, target in zip(self.decoders, (before, after), strict=True):
            target = target[:, : (target != PAD).sum(1).max()].T  # [words, batch]
            previous = F.pad(target[:-1], (0, 0, 1, 0))  # a padding word stands before the first
            given = torch.cat([self.encoder.vectors(previous), thought.expand(len(target), -1, -1)], -1)
            y, _ = decoder(given)
            known = target != PAD
            losses.append(F.cross_entropy(self.output(y[known]), target[known]))
        return (losses[0] + losses[1]) / 2


class Trainer(TorchTrainer):
    def __init__(self, variant: Variant, seed: int) -> None:
        torch.manual_seed(seed)
        preset = "ba2016" if variant.name == "layer norm" else "torch"
        super().__init__(Network(preset), seed, rate=1e-3, clip=5.0)

    def nll(self, at: np.ndarray) -> Tensor:
        numbers, _, _ = clauses()
        return self.network(numbers[at - 1], numbers[at], numbers[at + 1])

    def loss(self, n: int) -> Tensor:
        return self.nll(self.generator(n).choice(places()[0], BATCH, replace=False))

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        test = places()[1][::8]
        return {"test_nll": self.nll(test).item(), "part_error": self.downstream()}

    def downstream(self) -> float:
        """Error in percent of ridge regression from the frozen encoder's vectors to the part of the book."""
        numbers, parts, _ = clauses()
        sets = []
        for at in (places()[0][::20], places()[1][::2]):
            vectors = self.network.encoder(numbers[at])
            sets.append((F.pad(vectors - vectors.mean(0), (0, 1), value=1.0), parts[at]))
        (x, part), (test_x, test_part) = sets
        ridge = 1e-3 * len(x) * x.var(0).mean() * torch.eye(UNITS + 1)
        weights = torch.linalg.solve(x.T @ x + ridge, x.T @ F.one_hot(part, len(PARTS)).float())
        return 100 * ((test_x @ weights).argmax(1) != test_part).float().mean().item()


EXPERIMENT = Experiment(
    name="skip_thoughts",
    title="6.3 Skip-thought vectors",
    measures={"loss": "training NLL of a word", "test_nll": "test NLL of a word", "part_error": "downstream error (%)"},
    variants=[Variant(name, 600, 100, "mini-batches of 32") for name in ("layer norm", "no norm")],
    trainer=Trainer,
    check=lambda trainer, variant: check_encoder(trainer.network.encoder, clauses()[0]),
    fetch=lambda: data.deb(*data.BIBLE),
)
