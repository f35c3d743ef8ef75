"""Train the variants of one experiment from several seeds, keep their curves, and draw them.

A run is one variant from one seed. At each measurement its weights are written to a new file, then its curve, which
tells how many updates the weights have seen: a run that was interrupted at any moment continues from its last
measurement. A finished run is not repeated; after changing an experiment, delete its folder in build/paper.
"""

import glob
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

import cnorm

COLOURS = ("#0b6e99", "#c2571a", "#3f7d3a", "#7a4a9e")
COLUMNS = 3  # axes side by side in a picture


class Trainer(Protocol):
    """One network in training. `update` n must depend on the state and on n alone, so that a run can be resumed."""

    def update(self, n: int) -> float:
        """Train on the n-th mini-batch; returns its loss."""

    def measure(self) -> dict[str, float]:
        """Measures on data that it was not trained on."""

    def save(self, path: Path) -> None: ...

    def load(self, path: Path) -> None: ...


@dataclass(frozen=True)
class Variant:
    """One line of a picture: a network, trained for `updates` mini-batches and measured every `every` of them."""

    name: str
    updates: int
    every: int
    panel: str = ""  # variants of one panel are drawn together


@dataclass(frozen=True)
class Experiment:
    """An experiment of the paper.

    Attributes
    ----------
    name : str
        Of its files.
    title : str
    measures : dict of str to str
        Label of the axis of each measure that is drawn. "loss" is the mean training loss since the last measurement.
    variants : sequence of Variant
    trainer : callable
        ``trainer(variant, seed)`` returns a new `Trainer`.
    check : callable
        ``check(trainer, variant)`` raises AssertionError unless the trained network streams and exports with parity.
    picture : callable, optional
        ``picture(trainer, path)`` shows what the network of the first variant and seed 0 makes.
    fetch : callable
        ``fetch()`` downloads the data that is not there yet.
    """

    name: str
    title: str
    measures: dict[str, str]
    variants: Sequence[Variant]
    trainer: Callable[[Variant, int], Trainer]
    check: Callable[[Trainer, Variant], None]
    picture: Callable[[Trainer, Path], None] | None = None
    fetch: Callable[[], object] = lambda: None


@dataclass
class Curve:
    """Measures of one run by the number of updates, and the processor time that training and measuring took."""

    update: list[int] = field(default_factory=list)
    measures: dict[str, list[float]] = field(default_factory=dict)
    processor_seconds: float = 0.0

    def add(self, update: int, measures: dict[str, float]) -> None:
        self.update.append(update)
        for name, value in measures.items():
            self.measures.setdefault(name, []).append(round(value, 6))


def write_json(path: Path, value) -> None:
    """Replace a file by the JSON of a value, or leave it as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(temporary, path)


@dataclass(frozen=True)
class Checkpoint:
    """Where a run is kept: its curve in a JSON file, its weights in a file for each number of updates."""

    folder: Path
    variant: Variant
    seed: int

    @property
    def stem(self) -> str:
        return f"{self.variant.name.replace(' ', '-')}-{self.seed}"

    @property
    def curve(self) -> Path:
        return self.folder / f"{self.stem}.json"

    def weights(self, update: int) -> Path:
        return self.folder / f"{self.stem}-{update}.pt"

    def load(self, trainer: Trainer) -> Curve:
        """The curve so far, with the trainer's state at its end; an empty one if the run can't be continued."""
        if not self.curve.exists():
            return Curve()
        saved = json.loads(self.curve.read_text())
        every, curve = saved.pop("every"), Curve(**saved)
        last, updates = curve.update[-1], self.variant.updates
        between = last < updates and last % every == 0  # so that a run may be made longer, too
        if every != self.variant.every or not (between or last == updates) or not self.weights(last).exists():
            return Curve()
        trainer.load(self.weights(last))
        return curve

    def save(self, trainer: Trainer, curve: Curve) -> None:
        """Keep a run; when this is interrupted, what was kept before still is."""
        self.folder.mkdir(parents=True, exist_ok=True)
        weights = self.weights(curve.update[-1])
        temporary = weights.with_suffix(".tmp")
        trainer.save(temporary)
        os.replace(temporary, weights)
        write_json(self.curve, {"every": self.variant.every, **vars(curve)})
        for other in self.folder.glob(f"{glob.escape(self.stem)}-*"):
            if other != weights:
                other.unlink()


def run(experiment: Experiment, variant: Variant, seed: int, folder: Path) -> Iterator[tuple[int, Trainer, Curve]]:
    """Train one run; yields (updates so far, trainer, curve) after every update, first where it is resumed."""
    trainer, checkpoint = experiment.trainer(variant, seed), Checkpoint(folder, variant, seed)
    curve = checkpoint.load(trainer)
    done = curve.update[-1] if curve.update else 0
    yield done, trainer, curve
    losses, before, start = [], curve.processor_seconds, time.process_time()
    for n in range(done, variant.updates):
        losses.append(trainer.update(n))
        if (n + 1) % variant.every == 0 or n + 1 == variant.updates:
            curve.add(n + 1, {"loss": float(np.mean(losses)), **trainer.measure()})
            curve.processor_seconds = round(before + time.process_time() - start, 2)
            losses.clear()
            checkpoint.save(trainer, curve)
        yield n + 1, trainer, curve


def run_all(experiment: Experiment, seeds: Sequence[int], folder: Path, advance=lambda updates: None) -> dict:
    """Train every variant from every seed; returns {variant: {seed: {"update": [...], measure: [...]}}}."""
    curves: dict[str, dict[str, dict]] = {}
    for seed in seeds:
        for variant in experiment.variants:
            updates = 0
            for now in run(experiment, variant, seed, folder):
                advance(now[0] - updates)
                updates = now[0]
            _, trainer, curve = now
            experiment.check(trainer, variant)
            found = {"processor_seconds": curve.processor_seconds, "update": curve.update, **curve.measures}
            curves.setdefault(variant.name, {})[str(seed)] = found
    return curves


def summary(experiment: Experiment, curves: dict) -> dict:
    """What is kept of an experiment: all that its picture and table need, and the versions that the curves are from."""
    import torch

    return {
        "experiment": experiment.title,
        "versions": {"cnorm": cnorm.__version__, "torch": torch.__version__, "numpy": np.__version__},
        "python": platform.python_version(),
        "isa": cnorm.active_isa(),
        "measures": experiment.measures,
        "panels": {variant.name: variant.panel for variant in experiment.variants},
        "curves": curves,
    }


def table(kept: dict) -> list[str]:
    """Lines of a Markdown table: each variant's last measures, mean and range of the seeds."""
    lines = [f"| at the end, mean (range) | {' | '.join(kept['measures'].values())} |"]
    lines.append("|---" * (1 + len(kept["measures"])) + "|")
    for variant, seeds in kept["curves"].items():
        last = [[curve[measure][-1] for curve in seeds.values()] for measure in kept["measures"]]
        cells = [f"{np.mean(values):.3g}" for values in last]
        if len(seeds) > 1:
            cells = [f"{cell} ({min(v):.3g} to {max(v):.3g})" for cell, v in zip(cells, last, strict=True)]
        lines.append(f"| {variant}, {len(seeds)} seed{'s' * (len(seeds) > 1)} | {' | '.join(cells)} |")
    return lines


def draw(kept: dict, path: Path) -> None:
    """Picture of the curves, mean and range of seeds: one row of axes for each panel, or two where one is too wide."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys(kept["panels"].values()))
    places = [(panel, measure) for panel in panels for measure in kept["measures"]]
    columns = min(len(kept["measures"]), COLUMNS)
    rows = -(-len(places) // columns)
    size = (4.0 * columns, 2.9 * rows + 0.5)
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for ax in axes.flat[len(places) :]:
        ax.axis("off")
    for ax, (panel, measure) in zip(axes.flat, places, strict=False):
        variants = [variant for variant, its_panel in kept["panels"].items() if its_panel == panel]
        draw_measure(ax, kept, measure, variants)
        if measure == next(iter(kept["measures"])):
            ax.legend(title=panel, frameon=False, fontsize=9, title_fontsize=9)
    seeds = len(next(iter(kept["curves"].values())))
    spread = f"mean and range of {seeds} seeds" if seeds > 1 else "one seed"
    figure.suptitle(f"{kept['experiment']}: {spread}", fontsize=12)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def draw_measure(ax, kept: dict, measure: str, variants: Sequence[str]) -> None:
    """One measure of the variants: a line for the mean of the seeds, a band for their range.

    The scale is logarithmic where values fall, are positive, and differ by more than a factor of 5.
    """
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    values = {v: np.array([one[measure] for one in kept["curves"][v].values()]) for v in variants}  # [seeds, points]
    for variant, colour in zip(variants, COLOURS, strict=False):
        updates = next(iter(kept["curves"][variant].values()))["update"]
        ax.plot(updates, values[variant].mean(0), color=colour, lw=1.8, label=variant)
        ax.fill_between(updates, values[variant].min(0), values[variant].max(0), color=colour, alpha=0.25, lw=0)
    least, most = min(v.min() for v in values.values()), max(v.max() for v in values.values())
    if 0 < 5 * least < most and all(v[:, -1].max() < v[:, 0].min() for v in values.values()):
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set_title(kept["measures"][measure], fontsize=10)
    ax.set_xlabel("updates")
    ax.set_xlim(left=0)
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
