"""Section 6.2: the attentive reader on cloze questions, with layer norm, batch norm everywhere, and no norm.

The network of Hermann et al., "Teaching machines to read and comprehend", arXiv:1506.03340, section 3: bidirectional
LSTMs read a passage and a question, attention picks words of the passage. Batch norm everywhere is that of Cooijmans et
al., arXiv:1603.09025, which the paper compares with. Smaller than in the paper: 64 units in each direction, not 240;
the answer is compared with the vectors of the names, so that names need not be learned twice. Questions are made from
the King James Bible, because those of the CNN corpus are in no package: a passage is the 64 words before a verse, the
question 16 words of the verse without one name, and names are numbers that change at every use.
"""

import re
from functools import cache

import data
import numpy as np
import torch
from harness import Experiment, Variant
from torch import Tensor, nn
from torch.nn import functional as F
from training import TorchTrainer, check_model
from words import Vocabulary

import cnorm
import cnorm.torch

UNITS, WIDTH, WORDS, BATCH = 64, 64, 1000, 32
PASSAGE, QUESTION, NAMES = 64, 16, 8
BLANK = WORDS + NAMES  # number of the missing name; names are WORDS to WORDS + NAMES - 1
NOT_NAMES = {"I", "O", "God", "LORD", "Lord", "Lords", "GOD", "Spirit", "Son", "Father", "Almighty", "Holy", "Ghost"}


def names(tokens: list[str]) -> set[str]:
    """Words that are always written with a capital letter, and at least three times."""
    counts: dict[str, int] = {}
    for token in tokens:
        counts[token] = counts.get(token, 0) + 1
    upper = (t for t, n in counts.items() if t[0].isupper() and n >= 3 and t.lower() not in counts)
    return set(upper) - NOT_NAMES


def question(before: list[str], verse: list[str], known: set[str]) -> tuple[list[str], list[str], str] | None:
    """Passage, question and answer of a verse; None if no name of it is in the passage, or there are too many."""
    passage = before[-PASSAGE:]
    inside = {token for token in passage if token in known}
    places = [i for i, token in enumerate(verse) if token in inside]
    if len(passage) < PASSAGE or len(inside) < 2 or not places:
        return None
    at = places[len(verse) % len(places)]
    first = min(max(0, at - QUESTION // 2), max(0, len(verse) - QUESTION))
    asked = verse[first : first + QUESTION]
    asked[at - first] = "?"
    return (passage, asked, verse[at]) if len(inside | (set(asked) & known)) <= NAMES else None


@cache
def questions() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Passages [n, PASSAGE], questions [n, QUESTION] and answers [n] as numbers; names are numbered by first use."""
    verses = [(book, re.findall(r"[A-Za-z]+", text)) for book, text in data.bible()]
    known = names([token for _, tokens in verses for token in tokens])
    found, before, last = [], [], None
    for book, tokens in verses:
        before = before if book == last else []
        made = question(before, tokens, known)
        if made:
            found.append(made)
        before, last = [*before[-PASSAGE:], *tokens], book
    plain = ([t.lower() for t in passage if t not in known] for passage, _, _ in found)
    vocabulary = Vocabulary(plain, WORDS)
    passages, asked, answers = [], [], []
    for passage, text, answer in found:
        order = list(dict.fromkeys(t for t in passage + text if t in known))
        number = {name: WORDS + i for i, name in enumerate(order)} | {"?": BLANK}
        rows = [[number.get(t, vocabulary.number.get(t.lower(), 1)) for t in part] for part in (passage, text)]
        passages.append(rows[0])
        asked.append(rows[1] + [0] * (QUESTION - len(rows[1])))
        answers.append(order.index(answer))
    return np.array(passages), np.array(asked), np.array(answers)


class BatchNormLSTM(nn.Module):
    """An LSTM with batch norm of both products and of the cell, with the statistics of the mini-batch at each step."""

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.x, self.h = nn.Linear(inputs, 4 * units), nn.Linear(units, 4 * units, bias=False)
        self.gains = nn.ParameterList(torch.full((n,), 0.1) for n in (4 * units, 4 * units, units))
        self.bias = nn.Parameter(torch.zeros(units))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """x [steps, batch, inputs] -> y [steps, batch, units]."""
        h = c = x.new_zeros(x.shape[1], self.h.in_features)
        y = []
        for given in self.x(x):
            a = normed(given, self.gains[0]) + normed(self.h(h), self.gains[1]) + self.x.bias
            f, i, o, g = a.chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(normed(c, self.gains[2], self.bias))
            y.append(h)
        return torch.stack(y), None


def normed(x: Tensor, gain: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.batch_norm(x, None, None, gain, bias, training=True)


class Reader(nn.Module):
    """Two LSTMs that read a text in both directions."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        presets = {"layer norm": "ba2016", "no norm": "torch"}
        for way in ("forwards", "backwards"):
            if norm in presets:
                self.add_module(way, cnorm.torch.LSTM(WIDTH, UNITS, preset=presets[norm]))
            else:
                self.add_module(way, BatchNormLSTM(WIDTH, UNITS))

    def forward(self, x: Tensor) -> Tensor:
        """x [words, batch, WIDTH] -> y [words, batch, 2 * UNITS]."""
        return torch.cat([self.forwards(x)[0], self.backwards(x.flip(0))[0].flip(0)], -1)


class Network(nn.Module):
    def __init__(self, norm: str) -> None:
        super().__init__()
        self.vectors = nn.Embedding(BLANK + 1, WIDTH)
        self.passage, self.question = Reader(norm), Reader(norm)
        both = 2 * UNITS
        self.y, self.u = nn.Linear(both, UNITS), nn.Linear(both, UNITS, bias=False)
        self.score = nn.Linear(UNITS, 1, bias=False)
        self.r, self.g = nn.Linear(both, UNITS), nn.Linear(both, UNITS, bias=False)
        self.answer = nn.Linear(UNITS, WIDTH)
        made = cnorm.torch.BatchNorm if norm == "batch norm" else nn.Identity
        self.attention_norm, self.answer_norm = made(UNITS), made(UNITS)

    def forward(self, passage: Tensor, question: Tensor) -> Tensor:
        """Numbers [batch, PASSAGE] and [batch, QUESTION] -> scores of the names [batch, NAMES]."""
        y = self.passage(self.vectors(passage.T))
        asked = self.question(self.vectors(question.T))
        u = torch.cat([asked[-1, :, :UNITS], asked[0, :, UNITS:]], -1)
        m = (self.y(y) + self.u(u)).flatten(0, 1)
        m = torch.tanh(self.attention_norm(m)).view(*y.shape[:2], UNITS)
        s = torch.softmax(self.score(m), 0)  # over the words
        r = (s * y).sum(0)
        g = self.answer(torch.tanh(self.answer_norm(self.r(r) + self.g(u))))
        return g @ self.vectors.weight[WORDS : WORDS + NAMES].T


class Trainer(TorchTrainer):
    def __init__(self, variant: Variant, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(Network(variant.name), seed, rate=2e-3, clip=5.0)

    def scores(self, at: np.ndarray, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Scores of the names and the right answers, after the names have been given other numbers."""
        *texts, answers = (part[at] for part in questions())
        other = rng.permuted(np.tile(np.arange(NAMES), (len(at), 1)), axis=1)
        rows = np.arange(len(at))
        renamed = []
        for text in texts:
            local = np.clip(text - WORDS, 0, NAMES - 1)
            is_name = (text >= WORDS) & (text < BLANK)
            renamed.append(torch.from_numpy(np.where(is_name, WORDS + other[rows[:, None], local], text)))
        return self.network(*renamed), torch.from_numpy(other[rows, answers])

    def loss(self, n: int) -> Tensor:
        rng = self.generator(n)
        count = len(questions()[2]) * 9 // 10  # the last tenth is for validation
        return F.cross_entropy(*self.scores(rng.choice(count, BATCH, replace=False), rng))

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """Error in percent on questions from the end of the book; batch norm has the statistics of those."""
        count = len(questions()[2])
        scores, answers = self.scores(np.arange(count * 9 // 10, count), np.random.default_rng(0))
        return {"validation_error": 100 * (scores.argmax(1) != answers).float().mean().item()}


def check(trainer: Trainer, variant: Variant) -> None:
    """The forward LSTM of the passage streams and exports with parity; one with batch norm has no preset."""
    if variant.name == "batch norm":
        return
    with torch.no_grad():
        lstm = trainer.network.passage.forwards
        x = trainer.network.vectors(torch.from_numpy(questions()[0][0, :8]))
        check_model(cnorm.Model(lstm.to_layers()), x, lstm(x)[0])


EXPERIMENT = Experiment(
    name="attentive_reader",
    title="6.2 Attentive reader on cloze questions",
    measures={"loss": "training NLL", "validation_error": "validation error (%)"},
    variants=[Variant(name, 600, 60, "mini-batches of 32") for name in ("layer norm", "batch norm", "no norm")],
    trainer=Trainer,
    check=check,
    fetch=lambda: data.deb(*data.BIBLE),
)
