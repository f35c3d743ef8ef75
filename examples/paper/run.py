"""Re-run experiments of Ba, Kiros, Hinton, "Layer Normalization", arXiv:1607.06450, section 6.

    python examples/paper/run.py                  all of them, 3 seeds; an interrupted run continues where it was
    python examples/paper/run.py --quick          each for a few updates: the loss must fall
    python examples/paper/run.py mnist --seeds 5
    python examples/paper/run.py --long           6.1 and 6.2 for 5 times the updates: NAME_long.json and its picture
    python examples/paper/run.py --draw           no training: the pictures of the curves from docs/paper/NAME.json

Curves go to docs/paper/NAME.json and docs/pictures/paper_NAME.png, what a network draws or writes to
docs/pictures/paper_NAME_made.png, checkpoints to build/paper.
"""

import argparse
import dataclasses
import importlib
import json
import resource
import tempfile
import time
from pathlib import Path

import data
import harness
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

ROOT = Path(__file__).resolve().parents[2]
KEPT, PICTURES = ROOT / "docs" / "paper", ROOT / "docs" / "pictures"
NAMES = (
    "order_embeddings", "attentive_reader", "skip_thoughts", "draw", "handwriting", "mnist", "convolution",
)  # fmt: skip
QUICK_UPDATES = 60
LONG_NAMES, LONGER = ("order_embeddings", "attentive_reader"), 5  # what `make paper` does not reproduce


def shortened(experiment: harness.Experiment) -> harness.Experiment:
    """The experiment with few updates, measured three times."""
    variants = [dataclasses.replace(v, updates=QUICK_UPDATES, every=QUICK_UPDATES // 3) for v in experiment.variants]
    return dataclasses.replace(experiment, variants=variants)


def lengthened(experiment: harness.Experiment) -> harness.Experiment:
    """The experiment with LONGER times the updates, kept in files of its own."""
    variants = [dataclasses.replace(v, updates=LONGER * v.updates, every=2 * v.every) for v in experiment.variants]
    name, title = f"{experiment.name}_long", f"{experiment.title}, {LONGER} times the updates"
    return dataclasses.replace(experiment, name=name, title=title, variants=variants, picture=None)


def falls(curves: dict) -> None:
    """Refuse a curve whose training loss did not fall."""
    for variant, seeds in curves.items():
        for seed, curve in seeds.items():
            if not curve["loss"][-1] < curve["loss"][0]:
                raise SystemExit(f"{variant}, seed {seed}: the loss did not fall: {curve['loss']}")


def train(experiment: harness.Experiment, seeds: int, folder: Path) -> dict:
    """Curves of an experiment, with a progress bar."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns) as progress:
        total = seeds * sum(variant.updates for variant in experiment.variants)
        task = progress.add_task(experiment.name, total=total)
        return harness.run_all(experiment, range(seeds), folder, lambda updates: progress.advance(task, updates))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--quick", action="store_true", help="a few updates of one seed; writes no picture")
    parser.add_argument("--long", action="store_true", help=f"{LONGER} times the updates of {' and '.join(LONG_NAMES)}")
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    parser.add_argument("--draw", action="store_true", help="draw the curves that are kept; trains nothing")
    arguments = parser.parse_args()
    if set(arguments.names) - set(NAMES):
        parser.error(f"NAME must be one of {', '.join(NAMES)}, got {' '.join(arguments.names)}")
    torch.set_num_threads(1)  # the order of PyTorch's sums must not depend on the number of cores
    names = arguments.names or (LONG_NAMES if arguments.long else NAMES)
    if arguments.draw:
        for name in (f"{name}_long" for name in names) if arguments.long else names:
            harness.draw(json.loads((KEPT / f"{name}.json").read_text()), PICTURES / f"paper_{name}.png")
        return
    experiments = [importlib.import_module(name).EXPERIMENT for name in names]
    try:
        for experiment in experiments:
            experiment.fetch()
    except data.DataError as error:
        raise SystemExit(f"{experiment.name}: {error}") from None
    for experiment in map(lengthened, experiments) if arguments.long else experiments:
        if arguments.quick:
            with tempfile.TemporaryDirectory() as folder:
                falls(train(shortened(experiment), 1, Path(folder)))
            continue
        folder = ROOT / "build" / "paper" / experiment.name
        kept = harness.summary(experiment, train(experiment, arguments.seeds, folder))
        harness.write_json(KEPT / f"{experiment.name}.json", kept)
        harness.draw(kept, PICTURES / f"paper_{experiment.name}.png")
        if experiment.picture:
            *_, (_, trainer, _) = harness.run(experiment, experiment.variants[0], 0, folder)
            experiment.picture(trainer, PICTURES / f"paper_{experiment.name}_made.png")
        print(*harness.table(kept), sep="\n")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # the unit on Linux is KiB
    print(f"{time.process_time():.0f} s of processor time, {peak:.0f} MiB of memory at most")


if __name__ == "__main__":
    main()
