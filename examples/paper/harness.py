"""Train the variants of one experiment from several seeds, keep their curves, and draw them.

A run is one variant from one seed. Its checkpoint and its curve are written together at each measurement, so that an
interrupted run continues from there; a finished run is not repeated.
"""

import json
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

import cnorm

COLOURS = ("#0b6e99", "#c2571a", "#3f7d3a", "#7a4a9e")


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
    """

    name: str
    title: str
    measures: dict[str, str]
    variants: Sequence[Variant]
    trainer: Callable[[Variant, int], Trainer]
    check: Callable[[Trainer, Variant], None]
    picture: Callable[[Trainer, Path], None] | None = None


@dataclass
class Curve:
    """Measures of one run by the number of updates."""

    update: list[int] = field(default_factory=list)
    measures: dict[str, list[float]] = field(default_factory=dict)

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


def run(experiment: Experiment, variant: Variant, seed: int, folder: Path) -> Iterator[tuple[int, Trainer, Curve]]:
    """Train one run; yields (updates so far, trainer, curve) after every update, first where it is resumed."""
    trainer, curve, done = experiment.trainer(variant, seed), Curve(), 0
    state = folder / f"{variant.name.replace(' ', '-')}-{seed}.json"
    weights = state.with_suffix(".pt")
    if state.exists() and weights.exists():
        saved = json.loads(state.read_text())
        last = saved["update"][-1]
        between = last < variant.updates and last % variant.every == 0  # so that a run may be made longer, too
        if saved["every"] == variant.every and (between or last == variant.updates):
            curve, done = Curve(saved["update"], saved["measures"]), last
            trainer.load(weights)
    yield done, trainer, curve
    losses = []
    for n in range(done, variant.updates):
        losses.append(trainer.update(n))
        if (n + 1) % variant.every == 0 or n + 1 == variant.updates:
            curve.add(n + 1, {"loss": float(np.mean(losses)), **trainer.measure()})
            losses.clear()
            temporary = weights.with_suffix(".tmp")
            folder.mkdir(parents=True, exist_ok=True)
            trainer.save(temporary)
            os.replace(temporary, weights)
            write_json(state, {"every": variant.every, "update": curve.update, "measures": curve.measures})
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
            curves.setdefault(variant.name, {})[str(seed)] = {"update": curve.update, **curve.measures}
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
    """Picture of the curves: one row of axes for each measure, one column for each panel; mean and range of seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys(kept["panels"].values()))
    rows = len(kept["measures"])
    size = (4.6 * len(panels) + 0.6, 2.7 * rows + 0.6)
    figure, axes = plt.subplots(rows, len(panels), figsize=size, layout="constrained", squeeze=False)
    for column, panel in enumerate(panels):
        variants = [variant for variant, its_panel in kept["panels"].items() if its_panel == panel]
        for row, (measure, label) in enumerate(kept["measures"].items()):
            ax = axes[row][column]
            for variant, colour in zip(variants, COLOURS, strict=False):
                runs = list(kept["curves"][variant].values())
                values = np.array([one[measure] for one in runs])  # [seeds, measurements]
                ax.plot(runs[0]["update"], values.mean(0), color=colour, lw=1.8, label=variant)
                ax.fill_between(runs[0]["update"], values.min(0), values.max(0), color=colour, alpha=0.2, lw=0)
            ax.set(ylabel=label, xlabel="updates" if row == rows - 1 else "")
            ax.set_title(panel if row == 0 else "", fontsize=10)
            ax.grid(alpha=0.25)
            ax.spines[["top", "right"]].set_visible(False)
            ax.legend(frameon=False, fontsize=9)
    seeds = len(next(iter(kept["curves"].values())))
    spread = f"mean and range of {seeds} seeds" if seeds > 1 else "one seed"
    figure.suptitle(f"{kept['experiment']}: {spread}", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)
