"""Write text by hand, live: a trained network of section 6.5 at batch 1, one pen point after the other.

    python examples/paper/writer.py "layer norm" > line.svg

Equations are those of A. Graves, "Generating sequences with recurrent neural networks", arXiv:1308.0850. Needs no
PyTorch. One step: stream of the first LSTM, window over the text (Eq. 46 to 51), stream of the second LSTM with the
output layer, and a point drawn from the mixture (Eq. 17 to 22).
"""

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

import cnorm

ALPHABET = " abcdefghijklmnopqrstuvwxyz"
WINDOWS = 10  # Gaussians of the window
MIXTURE = 20  # bivariate Gaussians of the output
OUTPUTS = 6 * MIXTURE + 1
WEIGHTS = Path(__file__).resolve().parent / "writer_weights"  # trained by `make paper`, licence of the project


def one_hot(text: str) -> np.ndarray:
    """Characters as rows [characters + 1, len(ALPHABET)]; the last row, after the text, is zero."""
    unknown = sorted(set(text) - set(ALPHABET))
    if unknown:
        raise ValueError(f"text must have the letters a to z and spaces only, got {' '.join(map(repr, unknown))}")
    rows = np.zeros((len(text) + 1, len(ALPHABET)), np.float32)
    rows[np.arange(len(text)), [ALPHABET.index(c) for c in text]] = 1
    return rows


class Pen:
    """A pen that writes one line with the models of a `Writer`."""

    def __init__(self, writer: "Writer", text: str) -> None:
        self.first, self.window, self.second = (model.stream() for model in writer.models)
        self.text = one_hot(text)
        self.position = np.zeros(WINDOWS, np.float32)  # kappa, in characters
        self.seen = np.zeros(len(ALPHABET), np.float32)  # the window of the step before

    def step(self, point: np.ndarray) -> np.ndarray:
        """Take the last point [dx, dy, end of stroke]; returns the parameters of the next one's mixture [OUTPUTS]."""
        h = self.first.step(np.concatenate([point, self.seen]))
        alpha, beta, advance = np.exp(self.window.step(h)).reshape(3, WINDOWS)
        self.position += advance
        distance = self.position[:, None] - np.arange(len(self.text), dtype=np.float32)  # [WINDOWS, characters]
        phi = (alpha[:, None] * np.exp(-beta[:, None] * distance**2)).sum(0)
        self.seen = phi @ self.text
        self.reading = int(phi.argmax())  # index of the character that the window is at
        return self.second.step(np.concatenate([point, self.seen, h]))


class Writer:
    """Writes lines with the network of a folder, which `Writer.save` has made.

    Parameters
    ----------
    first : cnorm.Model
        [dx, dy, end of stroke, window over the text] -> h1.
    window : cnorm.Model
        h1 -> parameters of the window [3 * WINDOWS].
    second : cnorm.Model
        [dx, dy, end of stroke, window, h1] -> parameters of the mixture [OUTPUTS].

    Examples
    --------
    >>> for dx, dy, end in Writer.load().write("layer norm", seed=1): ...
    """

    FILES = ("first.safetensors", "window.safetensors", "second.safetensors")

    def __init__(self, first: cnorm.Model, window: cnorm.Model, second: cnorm.Model) -> None:
        self.models = first, window, second

    def with_weights(self, weights: str) -> "Writer":
        """The same with rounded matrices, "int8" or "float16": see `cnorm.Model.with_weights`."""
        return Writer(*(model.with_weights(weights, smallest=1) for model in self.models))

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for model, name in zip(self.models, self.FILES, strict=True):
            model.save(folder / name)

    @classmethod
    def load(cls, folder: Path = WEIGHTS) -> "Writer":
        return cls(*(cnorm.load(Path(folder) / name) for name in cls.FILES))

    def write(self, text: str, seed: int = 0, caution: float = 2.0, longest: int = 40) -> Iterator[tuple]:
        """Yield pen points (dx, dy, end of stroke) until the window is behind the text.

        Parameters
        ----------
        caution : float
            The bias b of Eq. 61 and 62: the greater, the narrower the mixture and the tidier the line.
        longest : int
            Limit of points for each character.
        """
        if not text.strip():
            raise ValueError(f"text must have a letter, got {text!r}")
        pen, rng = Pen(self, text), np.random.default_rng(seed)
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


def svg(points: Iterable[tuple]) -> str:
    """A written line as a picture: one path for each stroke."""
    x = y = 0.0
    strokes, found = [[]], []
    for dx, dy, end in points:
        x, y = x + dx, y + dy
        found.append((x, y))
        strokes[-1].append(f"{x:.2f} {y:.2f}")
        if end:
            strokes.append([])
    (left, top), (right, bottom) = np.min(found, 0) - 1, np.max(found, 0) + 1
    paths = "".join(f'<path d="M{" L".join(stroke)}"/>' for stroke in strokes if stroke)
    view = f"{left:.2f} {top:.2f} {right - left:.2f} {bottom - top:.2f}"
    style = 'fill="none" stroke="#0b6e99" stroke-width="0.5" stroke-linecap="round" stroke-linejoin="round"'
    size = f'viewBox="{view}" width="{12 * (right - left):.0f}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><g {style}>{paths}</g></svg>'


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a line by hand, as an SVG picture on standard output.")
    parser.add_argument("text", help="letters a to z and spaces")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--caution", type=float, default=2.0, help="the greater, the tidier (default 2)")
    arguments = parser.parse_args()
    try:
        print(svg(Writer.load().write(arguments.text, arguments.seed, arguments.caution)))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
