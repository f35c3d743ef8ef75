"""Times of layer norms of rows, forward and backward, for every contender that can be imported."""

import json
import math
from importlib import util

import numpy as np

from cnorm_bench import contenders
from cnorm_bench.cases import CASES, FORWARD, SHAPES
from cnorm_bench.contenders import memcpy_
from cnorm_bench.contenders.operations import OPERATIONS, as_dtype, check, correct
from cnorm_bench.environment import MEMORY, child, settled_environment, surroundings

__all__ = ["fresh", "fresh_memory", "norms"]

NEW_ARRAY = ("cnorm, new array", "PyTorch", "onnxruntime, run()")


def norms(sizes=None, *, cases=CASES, seconds=0.2, advance=lambda description, total: None):
    """Time layer norms of every importable contender, samples of all contenders interleaved.

    Parameters
    ----------
    sizes : sequence of (rows, n), optional
    cases : sequence of Case
    seconds : float
        For each contender of each case and size.
    advance : callable
        Called with a description and the number of calls to expect.

    Returns
    -------
    dict
        "records": one for each case, size and contender, with microseconds a call; "left_out": a sentence for each
        contender that was not timed.

    Raises
    ------
    ArithmeticError
        If cnorm computes something wrong. Another contender that does is left out, with a sentence in "left_out".
    """
    sizes = list(sizes or SHAPES.values())
    modules, left_out = contenders.importable()
    records, total = [], len(cases) * len(sizes)
    for case in cases:
        if case.dtype == "bfloat16" and not util.find_spec("ml_dtypes"):
            left_out.append("bfloat16 is left out: ml_dtypes can't be imported")
            continue
        for rows, n in sizes:
            advance(f"{case} {rows}x{n}", total)
            inputs = case.inputs(np.random.default_rng(rows + n), rows, n)
            expected, made = case.expected(**inputs), []
            for module in modules:
                new = getattr(module, case.operation, lambda **_: [])(**inputs)
                made += [(contender, expected) for contender in new]
                if not new and module is not memcpy_:
                    left_out.append(f"{module.LABEL} has no {case.operation} in {case.dtype}")
            passed = correct(made, check, f"{case.operation} {rows}x{n}", left_out)
            moved = OPERATIONS[case.operation].moved * as_dtype(case.dtype).itemsize * rows * n
            shared = {**case._asdict(), "rows": rows, "n": n, "moved_bytes": moved}
            for label, samples in contenders.times(passed, seconds=seconds).items():
                records.append({**shared, "contender": label, **_summary(samples)})
            del inputs, expected, made, passed  # hundreds of MB, freed before the next size
    document = (
        {"format": 1, "kind": "norms"}
        | surroundings()
        | {"left_out": list(dict.fromkeys(left_out)), "records": records}
    )
    largest = max(sizes, key=math.prod)
    if math.prod(largest) * 4 >= 8 << 20:  # only for large new arrays do page faults count
        document["fresh_memory"] = {"rows": largest[0], "n": largest[1], "microseconds": fresh_memory(*largest)}
    return document


def fresh_memory(rows, n):
    """Microseconds of a forward call that allocates its output, with the allocator's default settings."""
    environment = {name: value for name, value in settled_environment().items() if name not in MEMORY}
    process = child({"fresh": [rows, n]}, environment, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(f"the measurement with fresh memory failed:\n{process.stderr}")
    return json.loads(process.stdout)


def fresh(rows, n):
    inputs = FORWARD.inputs(np.random.default_rng(0), rows, n)
    modules, _ = contenders.importable()
    made = [c for module in modules for c in module.layer_norm(**inputs) if c.label in NEW_ARRAY]
    return {label: float(np.median(samples)) for label, samples in contenders.times(made).items()}


def _summary(samples):
    low, middle, high = np.percentile(samples, [25, 50, 75])
    return {
        "microseconds": float(middle),
        "quartiles": [float(low), float(high)],
        "best": float(samples.min()),
        "samples": len(samples),
    }
