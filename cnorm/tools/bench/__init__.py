"""`cnorm bench`: how fast layer normalisation is on this machine, next to whatever else is installed.

`norms` and `recurrent_steps` measure and make a document, a dict that goes to JSON as it is; `report` shows
documents. Contenders are checked against float64 before any of them is timed.
"""

import json as json_module
from pathlib import Path

from cnorm.tools.bench.cases import CASES, FORWARD, HIDDEN, SHAPES, SIX, case_of, ratio
from cnorm.tools.bench.environment import child, settle, settled_environment, surroundings
from cnorm.tools.bench.measure_norms import fresh_memory, norms
from cnorm.tools.bench.measure_steps import recurrent_steps, step_contenders

__all__ = [
    "CASES",
    "FORWARD",
    "HIDDEN",
    "SHAPES",
    "SIX",
    "case_of",
    "fresh_memory",
    "norms",
    "ratio",
    "recurrent_steps",
    "run",
    "settle",
    "step_contenders",
    "surroundings",
]


def run(sizes=None, out_dir="bench_out", json=False, rnn=False, *, train=False, seconds=None):
    """Measure on this machine, in a process of its own; print tables, write a JSON file and a picture.

    Parameters
    ----------
    sizes : sequence of (int, int), optional
        (rows, n) of the layer norms, or (input, hidden) sizes with `rnn`; `SHAPES` or `HIDDEN` if not given.
    out_dir : str or path-like
        Folder for `norms.json` and `norms.png`, or `rnn.json` and `rnn.png`; made if it is not there.
    json : bool
        Print the JSON document to standard output instead of the tables.
    rnn : bool
        Measure recurrent steps instead of layer norms.
    train : bool
        Measure forward and backward passes of a recurrent cell, to `training.json`.
    seconds : float, optional
        For each contender and size; as long as `norms` or `recurrent_steps` think right if not given.

    Returns
    -------
    dict
        The document that the JSON file holds.

    Raises
    ------
    OSError
        If the folder can't be made.
    RuntimeError
        If the measuring process failed; it has said why on standard error.
    """
    Path(out_dir).mkdir(parents=True, exist_ok=True)  # not after minutes of measuring
    kind = "training" if train else "rnn" if rnn else "norms"
    job = {"sizes": sizes, "out_dir": str(out_dir), "json": bool(json), "kind": kind}
    job["options"] = {} if seconds is None else {"seconds": seconds}
    if child(job, settled_environment()).returncode:
        raise RuntimeError("the measurement failed, see above")
    return json_module.loads((Path(out_dir) / f"{kind}.json").read_text())
