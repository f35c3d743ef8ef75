"""`cnorm time`: how long a step of a model takes, one frame after another or at a rate, with the slowest ones."""

from __future__ import annotations

import io
import time

import numpy as np

from cnorm.layers.embedding import in_tokens
from cnorm.storage.files import write_whole

__all__ = ["histogram", "measured", "picture", "show"]

FRAMES = 1024  # different inputs, repeated
WARM = 100  # steps that are not counted
WIDTH = 40  # columns of the longest bar


def measured(model, rate: float | None, seconds: float) -> np.ndarray:
    """Microseconds of each step of a stream, for so many seconds; `rate` frames a second, or one after another."""
    frames = np.random.default_rng(0).standard_normal((FRAMES, model.input_size)).astype(np.float32)
    frames = in_tokens(frames, model.tokens)
    stream, y = model.stream(), np.empty(model.output_size, np.float32)
    for frame in frames[:WARM]:
        stream.step(frame, out=y)
    times, start = [], time.perf_counter()
    while (now := time.perf_counter()) - start < seconds or not times:
        if rate and (left := start + len(times) / rate - now) > 0:
            time.sleep(left)
        frame = frames[len(times) % FRAMES]
        before = time.perf_counter_ns()
        stream.step(frame, out=y)
        times.append((time.perf_counter_ns() - before) / 1e3)
    return np.array(times)


def histogram(times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Counts between powers of 2, and these, in microseconds."""
    times = np.maximum(times, 1e-3)
    low, high = np.floor(np.log2([times.min(), times.max()]))
    return np.histogram(times, 2.0 ** np.arange(low, high + 2))


def show(console, model, times: np.ndarray, rate: float | None) -> None:
    """The percentiles in a line, and the histogram: a bar for each range of times that occurred."""
    p50, p99, p999 = np.percentile(times, [50, 99, 99.9])
    how = f"at {rate:g} a second" if rate else "one after another"
    console.print(f"{len(times)} steps {how}, one thread, {model.weights} weights", markup=False, soft_wrap=True)
    slowest = f"max {times.max():.1f} us"
    console.print(f"p50 {p50:.1f} us, p99 {p99:.1f} us, p99.9 {p999:.1f} us, {slowest}", markup=False, soft_wrap=True)
    if rate and (late := np.mean(times > 1e6 / rate)):
        console.print(
            f"{late:.3%} of the steps took longer than the {1e6 / rate:g} us of a frame", markup=False, soft_wrap=True
        )
    counts, edges = histogram(times)
    for count, low, high in zip(counts, edges[:-1], edges[1:], strict=True):
        bar = "#" * int(np.ceil(WIDTH * np.log1p(count) / np.log1p(counts.max())))
        console.print(f"{low:9.1f} to {high:9.1f} us {count:8} {bar}".rstrip(), markup=False, soft_wrap=True)
    console.print("(a bar's length is the logarithm of its count)", markup=False, soft_wrap=True)


def picture(times: np.ndarray, path) -> None:
    """Draw the histogram as a PNG."""
    from matplotlib.figure import Figure

    counts, edges = histogram(times)
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.add_subplot()
    axes.stairs(counts, edges, fill=True)
    axes.set(xscale="log", yscale="log", xlabel="time of a step (us)", ylabel="steps")
    for share, name in ((50, "p50"), (99, "p99"), (99.9, "p99.9")):
        at = np.percentile(times, share)
        axes.axvline(at, color="black", linewidth=0.8, linestyle="--")
        axes.annotate(name, (at, 1), xycoords=("data", "axes fraction"), rotation=90, ha="right", va="top")
    drawing = io.BytesIO()
    figure.savefig(drawing, dpi=150, format="png")
    write_whole(path, drawing.getvalue())
