"""Write text by hand, live: a trained network of section 6.5 at batch 1, one pen point after the other.

Equations are those of A. Graves, "Generating sequences with recurrent neural networks", arXiv:1308.0850. Needs no
PyTorch. One step: stream of the first LSTM, window over the text (Eq. 46 to 51), stream of the second LSTM with the
output layer, and a point drawn from the mixture (Eq. 17 to 22).
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

import cnorm

ALPHABET = " abcdefghijklmnopqrstuvwxyz"
WINDOWS = 10  # Gaussians of the window
MIXTURE = 20  # bivariate Gaussians of the output
OUTPUTS = 6 * MIXTURE + 1


def one_hot(text: str) -> np.ndarray:
    """Characters as rows [characters + 1, len(ALPHABET)]; the last row, after the text, is zero."""
    unknown = sorted(set(text) - set(ALPHABET))
    if unknown:
        raise ValueError(f"text must have the letters a to z and spaces only, got {' '.join(map(repr, unknown))}")
    rows = np.zeros((len(text) + 1, len(ALPHABET)), np.float32)
    rows[np.arange(len(text)), [ALPHABET.index(c) for c in text]] = 1
    return rows


class Pen:
    """A pen that writes one line.

    Parameters
    ----------
    first : cnorm.Model
        [dx, dy, end of stroke, window over the text] -> h1.
    window : array [3 * WINDOWS, units], bias [3 * WINDOWS]
        Parameters of the window from h1.
    second : cnorm.Model
        [dx, dy, end of stroke, window, h1] -> parameters of the mixture.
    text : str
    """

    def __init__(self, first, window, bias, second, text: str) -> None:
        self.first, self.second = first.stream(), second.stream()
        self.weight, self.bias, self.text = window, bias, one_hot(text)
        self.position = np.zeros(WINDOWS, np.float32)  # kappa, in characters
        self.seen = np.zeros(len(ALPHABET), np.float32)  # the window of the step before

    def step(self, point: np.ndarray) -> np.ndarray:
        """Take the last point [dx, dy, end of stroke]; returns the parameters of the next one's mixture [OUTPUTS]."""
        h = self.first.step(np.concatenate([point, self.seen]))
        alpha, beta, advance = np.exp(self.weight @ h + self.bias).reshape(3, WINDOWS)
        self.position += advance
        distance = self.position[:, None] - np.arange(len(self.text), dtype=np.float32)  # [WINDOWS, characters]
        phi = (alpha[:, None] * np.exp(-beta[:, None] * distance**2)).sum(0)
        self.seen = phi @ self.text
        self.reading = int(phi.argmax())  # index of the character that the window is at
        return self.second.step(np.concatenate([point, self.seen, h]))


class Writer:
    """Writes lines with the network of a file, which `Writer.save` has made.

    Examples
    --------
    >>> writer = Writer.load("handwriting.safetensors")
    >>> for dx, dy, end in writer.write("layer norm", seed=1): ...
    """

    def __init__(self, first: cnorm.Model, window: np.ndarray, bias: np.ndarray, second: cnorm.Model) -> None:
        self.first, self.window, self.bias, self.second = first, window, bias, second

    def pen(self, text: str) -> Pen:
        return Pen(self.first, self.window, self.bias, self.second, text)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.first.save(folder / "first.safetensors")
        self.second.save(folder / "second.safetensors")
        np.savez(folder / "window.npz", weight=self.window, bias=self.bias)

    @classmethod
    def load(cls, folder: Path) -> "Writer":
        folder = Path(folder)
        with np.load(folder / "window.npz", allow_pickle=False) as arrays:
            window = arrays["weight"], arrays["bias"]
        return cls(cnorm.load(folder / "first.safetensors"), *window, cnorm.load(folder / "second.safetensors"))

    def write(self, text: str, seed: int = 0, caution: float = 1.0, longest: int = 40) -> Iterator[tuple]:
        """Yield pen points (dx, dy, end of stroke) until the window is behind the text.

        Parameters
        ----------
        caution : float
            The bias b of Eq. 61 and 62: the greater, the narrower the mixture and the tidier the line.
        longest : int
            Limit of points for each character.
        """
        pen, rng = self.pen(text), np.random.default_rng(seed)
        point = np.array([0, 0, 1], np.float32)
        for _ in range(longest * len(text)):
            point = sample(pen.step(point), rng, caution)
            yield tuple(point.tolist())
            if pen.reading == len(text) and point[2]:
                return


def sample(y: np.ndarray, rng: np.random.Generator, caution: float) -> np.ndarray:
    """Draw [dx, dy, end of stroke] from the mixture with parameters y [OUTPUTS]."""
    end, scores = y[0], y[1 : 1 + MIXTURE] * (1 + caution)
    weights = np.exp(np.float64(scores - scores.max()))
    j = rng.choice(MIXTURE, p=weights / weights.sum())
    mean_x, mean_y, log_x, log_y, slope = y[1 + MIXTURE :].reshape(5, MIXTURE)[:, j]
    rho = np.tanh(slope)
    a, b = rng.standard_normal(2)
    dx = mean_x + np.exp(log_x - caution) * a
    dy = mean_y + np.exp(log_y - caution) * (rho * a + np.sqrt(1 - rho * rho) * b)
    return np.array([dx, dy, rng.random() < 1 / (1 + np.exp(-end))], np.float32)
