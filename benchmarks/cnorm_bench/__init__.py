"""`cnorm bench`: the time of layer normalisation on this machine in cnorm and in the other installed runtimes.

`norms` and `recurrent_steps` measure and return a document, a dict that is written to JSON; `report` prints and draws
documents. A contender is one way to compute an operation, such as cnorm, PyTorch or np.copyto; each is checked against
float64 before it is timed.
"""

import json as json_module
from pathlib import Path

from cnorm_bench.cases import CASES, FORWARD, HIDDEN, MEAN_SHAPES, SHAPES, case_of, ratio
from cnorm_bench.environment import child, settle, settled_environment, surroundings
from cnorm_bench.measure_norms import fresh_memory, norms
from cnorm_bench.measure_steps import recurrent_steps, step_contenders

__all__ = [
    "CASES",
    "FORWARD",
    "HIDDEN",
    "MEAN_SHAPES",
    "SHAPES",
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


def run(kind="norms", *, out_dir="bench_out", json=False, **options):
    """Measure on this machine, in a process of its own; print tables, write a JSON file and a picture.

    Parameters
    ----------
    kind : str
        "norms" for layer norms, "rnn" for recurrent steps, "training" for forward and backward passes of a recurrent
        cell, "serving" for `cnorm serve` under load, "models" for the streaming models of a folder of ONNX files.
    out_dir : str or path-like
        Folder for `KIND.json` and, but for "training", `KIND.png`; created if it does not exist.
    json : bool
        Print the JSON document to standard output instead of the tables.
    **options
        `sizes`, `seconds` and others of the function that measures: `norms`, `recurrent_steps`, `training`,
        `serving`, `models`.

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
    job = {"kind": kind, "out_dir": str(out_dir), "json": bool(json), "options": options}
    if child(job, settled_environment()).returncode:
        raise RuntimeError("the measurement failed, see above")
    return json_module.loads((Path(out_dir) / f"{kind}.json").read_text())
