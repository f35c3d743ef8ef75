"""Section 6.1: order embeddings of glosses and their hypernyms, a GRU encoder (Eq. 26 to 28), layer norm against none.

Vendrov et al., arXiv:1511.06361, embed captions by a GRU and images by a linear map of a convolutional network's
features, so that a caption lies above its images. Here nouns of WordNet stand for them: a gloss for a caption, and for
an image the set of all hypernyms of the noun, as a vector of zeros and ones. The hypernyms are the more general side,
so they lie above the gloss. Smaller than in the paper: 128 units, not 1024, and mini-batches of 64, not 128.
"""

from collections import Counter, defaultdict
from functools import cache

import data
import numpy as np
import torch
from harness import Experiment, Variant
from torch import Tensor, nn
from torch.nn import functional as F
from training import TorchTrainer
from words import Encoder, Vocabulary, check_encoder, words

UNITS, WIDTH, WORDS, BATCH, MARGIN = 128, 64, 3000, 64, 0.05
RATE, GAIN = 1e-2, 0.1  # of Adam; at the start: both were searched, docs/paper.md has the results
GLOSS, FREQUENT, HELD_OUT = (4, 20), 5, 300  # words of a gloss; occurrences of a hypernym; sets for tests


@cache
def pairs() -> tuple[np.ndarray, list[Tensor], Vocabulary]:
    """Sets of hypernyms [sets, hypernyms] in a fixed random order, and the glosses of each as numbers [n, words]."""
    nouns, above = data.wordnet_nouns(), {}

    def hypernyms(noun: str) -> frozenset:
        if noun not in above:
            above[noun] = frozenset().union(*({h} | hypernyms(h) for h in nouns[noun][0]))
        return above[noun]

    usable = {n: words(gloss) for n, (parents, gloss) in nouns.items() if parents}
    usable = {n: gloss for n, gloss in usable.items() if GLOSS[0] <= len(gloss) <= GLOSS[1]}
    counts = Counter(h for found in {hypernyms(n) for n in usable} for h in found)
    column = {h: i for i, h in enumerate(sorted(h for h, n in counts.items() if n >= FREQUENT))}
    groups = defaultdict(list)
    for n, gloss in usable.items():
        groups[tuple(sorted(column[h] for h in hypernyms(n) if h in column))].append(gloss)
    vocabulary = Vocabulary(usable.values(), WORDS)
    keys = sorted(key for key in groups if key)
    keys = [keys[i] for i in np.random.default_rng(0).permutation(len(keys))]
    sets = np.zeros((len(keys), len(column)), np.float32)
    for row, key in zip(sets, keys, strict=True):
        row[list(key)] = 1
    return sets, [vocabulary(groups[key], GLOSS[1]) for key in keys], vocabulary


def violation(below: Tensor, above: Tensor) -> Tensor:
    """Order violation of each pair, ||max(0, above - below)||^2: [n, units], [m, units] -> [n, m]."""
    return F.relu(above[None] - below[:, None]).square().sum(-1)


class Network(nn.Module):
    def __init__(self, preset: str) -> None:
        super().__init__()
        self.encoder = Encoder(WORDS, WIDTH, UNITS, preset)
        for name, parameter in self.encoder.named_parameters():
            if "gain" in name:
                nn.init.constant_(parameter, GAIN)
        self.embedding = nn.Linear(pairs()[0].shape[1], UNITS)

    def forward(self, glosses: Tensor, sets: Tensor) -> Tensor:
        """Order violations of all pairs [glosses, sets]; embeddings are positive and of length 1."""
        below = F.normalize(self.encoder(glosses).abs(), dim=-1)
        return violation(below, F.normalize(self.embedding(sets).abs(), dim=-1))


class Trainer(TorchTrainer):
    def __init__(self, variant: Variant, seed: int) -> None:
        torch.manual_seed(seed)
        preset = "ba2016" if variant.name == "layer norm" else "torch"
        super().__init__(Network(preset), seed, RATE, clip=5.0)

    def loss(self, n: int) -> Tensor:
        """The ranking loss: a pair's violation is to be less than that of a wrong gloss or set, by the margin."""
        (sets, glosses, _), rng = pairs(), self.generator(n)
        chosen = HELD_OUT + rng.choice(len(sets) - HELD_OUT, BATCH, replace=False)
        gloss = torch.stack([glosses[i][rng.integers(len(glosses[i]))] for i in chosen])
        costs = self.network(gloss, torch.from_numpy(sets[chosen]))
        right = costs.diagonal()
        wrong = F.relu(MARGIN + right[:, None] - costs) + F.relu(MARGIN + right[None] - costs)
        return (wrong * (1 - torch.eye(BATCH))).sum() / BATCH

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """Rank of the right set among those held out, for one gloss of each."""
        sets, glosses, _ = pairs()
        gloss = torch.stack([found[0] for found in glosses[:HELD_OUT]])
        costs = self.network(gloss, torch.from_numpy(sets[:HELD_OUT]))
        rank = 1 + (costs < costs.diagonal()[:, None]).sum(1)
        recall = {f"recall_{k}": 100 * (rank <= k).float().mean().item() for k in (1, 5, 10)}
        return {**recall, "mean_rank": rank.float().mean().item()}


EXPERIMENT = Experiment(
    name="order_embeddings",
    title="6.1 Order embeddings of WordNet's nouns",
    measures={
        "loss": "training loss",
        "recall_1": "Recall@1 (%)",
        "recall_5": "Recall@5 (%)",
        "recall_10": "Recall@10 (%)",
        "mean_rank": "mean rank of 300",
    },
    variants=[Variant(name, 1000, 100, "mini-batches of 64") for name in ("layer norm", "no norm")],
    trainer=Trainer,
    check=lambda trainer, variant: check_encoder(trainer.network.encoder, pairs()[1][0]),
    fetch=lambda: data.deb(*data.WORDNET),
)
