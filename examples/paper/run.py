"""Re-run experiments of Ba, Kiros, Hinton, "Layer Normalization", arXiv:1607.06450, section 6.

    python examples/paper/run.py                  all of them, 3 seeds; an interrupted run continues where it was
    python examples/paper/run.py --quick          each for a few updates: the loss must fall
    python examples/paper/run.py mnist --seeds 5
    python examples/paper/run.py --draw           no training: the pictures of the curves from docs/paper/NAME.json

Curves go to docs/paper/NAME.json and docs/pictures/paper_NAME.png, what a network draws or writes to
docs/pictures/paper_NAME_made.png, checkpoints to build/paper.
"""

import argparse
import dataclasses
import importlib
import json
from pathlib import Path

import harness
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

ROOT = Path(__file__).resolve().parents[2]
KEPT, PICTURES = ROOT / "docs" / "paper", ROOT / "docs" / "pictures"
NAMES = (
    "order_embeddings", "attentive_reader", "skip_thoughts", "draw", "handwriting", "mnist", "convolution",
)  # fmt: skip
QUICK_UPDATES = 60


def shortened(experiment: harness.Experiment) -> harness.Experiment:
    """The experiment with few updates, measured three times."""
    variants = [dataclasses.replace(v, updates=QUICK_UPDATES, every=QUICK_UPDATES // 3) for v in experiment.variants]
    return dataclasses.replace(experiment, variants=variants)


def falls(curves: dict) -> None:
    """Refuse a curve whose training loss did not fall."""
    for variant, seeds in curves.items():
        for seed, curve in seeds.items():
            if not curve["loss"][-1] < curve["loss"][0]:
                raise SystemExit(f"{variant}, seed {seed}: the loss did not fall: {curve['loss']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--quick", action="store_true", help="a few updates of one seed; writes no picture")
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    parser.add_argument("--draw", action="store_true", help="draw the curves that are kept; trains nothing")
    arguments = parser.parse_args()
    if set(arguments.names) - set(NAMES):
        parser.error(f"NAME must be one of {', '.join(NAMES)}, got {' '.join(arguments.names)}")
    torch.set_num_threads(1)  # the order of PyTorch's sums must not depend on the number of cores
    for name in arguments.names or NAMES:
        if arguments.draw:
            harness.draw(json.loads((KEPT / f"{name}.json").read_text()), PICTURES / f"paper_{name}.png")
            continue
        experiment = importlib.import_module(name).EXPERIMENT
        seeds, folder = range(arguments.seeds), ROOT / "build" / "paper" / name
        if arguments.quick:
            experiment, seeds, folder = shortened(experiment), range(1), ROOT / "build" / "paper" / "quick" / name
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns) as progress:
            total = len(seeds) * sum(variant.updates for variant in experiment.variants)
            task = progress.add_task(name, total=total)
            curves = harness.run_all(experiment, seeds, folder, lambda n, task=task: progress.advance(task, n))
        if arguments.quick:
            falls(curves)
            continue
        kept = harness.summary(experiment, curves)
        harness.write_json(KEPT / f"{name}.json", kept)
        harness.draw(kept, PICTURES / f"paper_{name}.png")
        if experiment.picture:
            *_, (_, trainer, _) = harness.run(experiment, experiment.variants[0], 0, folder)
            experiment.picture(trainer, PICTURES / f"paper_{name}_made.png")
        print(*harness.table(kept), sep="\n")


if __name__ == "__main__":
    main()
