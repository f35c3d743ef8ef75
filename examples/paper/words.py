"""Sentences as numbers, and sentence encoders: shared by sections 6.1 to 6.3."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from training import check_model

import cnorm
import cnorm.torch

PAD, UNKNOWN = 0, 1


def words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


class Vocabulary:
    """The most frequent words; numbers 0 and 1 are padding and unknown words."""

    def __init__(self, sentences: Iterable[Sequence[str]], size: int) -> None:
        common = Counter(word for sentence in sentences for word in sentence).most_common(size - 2)
        self.number = {word: i for i, (word, _) in enumerate(common, start=2)}
        self.size = size

    def __call__(self, sentences: Sequence[Sequence[str]], longest: int) -> Tensor:
        """Numbers [sentences, longest], padded behind."""
        found = np.zeros((len(sentences), longest), np.int64)
        for row, sentence in zip(found, sentences, strict=True):
            row[: len(sentence)] = [self.number.get(word, UNKNOWN) for word in sentence]
        return torch.from_numpy(found)


class Encoder(nn.Module):
    """Word vectors and a GRU of `cnorm.torch`; its state after the last word is the sentence's vector."""

    def __init__(self, vocabulary: int, width: int, units: int, preset: str) -> None:
        super().__init__()
        self.vectors = nn.Embedding(vocabulary, width)
        nn.init.uniform_(self.vectors.weight, -0.1, 0.1)
        self.gru = cnorm.torch.GRU(width, units, preset=preset)

    def forward(self, sentences: Tensor) -> Tensor:
        """Numbers [batch, words], padded behind -> vectors [batch, units]."""
        lengths = (sentences != PAD).sum(1)
        y, _ = self.gru(self.vectors(sentences[:, : lengths.max()].T))  # [words, batch, units]
        return y[lengths - 1, torch.arange(len(lengths))]


@torch.no_grad()
def check_encoder(encoder: Encoder, sentences: Tensor) -> None:
    """One sentence, word by word: the GRU streams and exports with parity."""
    (sentence,) = sentences[:1]
    x = encoder.vectors(sentence[sentence != PAD][:8])
    check_model(cnorm.Model(encoder.gru.to_layers()), x, encoder.gru(x)[0])
