"""`cnorm bench`: the time of layer normalisation on this machine in cnorm and in the other installed runtimes.

`norms` and `recurrent_steps` measure and return a document, a dict that is written to JSON; `report` prints and draws
documents. A contender is one way to compute an operation, such as cnorm, PyTorch or np.copyto; each is checked against
float64 before it is timed.
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


def run(sizes=None, out_dir="bench_out", json=False, rnn=False, *, train=False, serve=False, seconds=None):
    """Measure on this machine, in a process of its own; print tables, write a JSON file and a picture.

    Parameters
    ----------
    sizes : sequence of (int, int), optional
        (rows, n) of the layer norms, or (input, hidden) sizes with `rnn`; `SHAPES` or `HIDDEN` if not given.
    out_dir : str or path-like
        Folder for `norms.json` and `norms.png`, or `rnn.json` and `rnn.png`; created if it does not exist.
    json : bool
        Print the JSON document to standard output instead of the tables.
    rnn : bool
        Measure recurrent steps instead of layer norms.
    train : bool
        Measure forward and backward passes of a recurrent cell, to `training.json`.
    serve : bool
        Measure `cnorm serve` under load, to `serving.json` and `serving.png`; `sizes` is as in `serving`.
    seconds : float, optional
        For each contender and size; the default of `norms` or `recurrent_steps` if not given.

    Returns
    -------
    dict
        The document that the JSON file holds.

    Raises
    ------
    OSError
        If the folder can't be created.
    RuntimeError
        If the measuring process failed; its reason is on standard error.
    """
    Path(out_dir).mkdir(parents=True, exist_ok=True)  # before measuring, so that an error does not cost minutes
    kind = "serving" if serve else "training" if train else "rnn" if rnn else "norms"
    job = {"sizes": sizes, "out_dir": str(out_dir), "json": bool(json), "kind": kind}
    job["options"] = {} if seconds is None else {"seconds": seconds}
    if child(job, settled_environment()).returncode:
        raise RuntimeError("the measurement failed, see above")
    return json_module.loads((Path(out_dir) / f"{kind}.json").read_text())
