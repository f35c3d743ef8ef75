"""The operations and sizes that are measured, and `ratio`, which compares two contenders of a document."""

import math

from cnorm_bench.contenders.operations import Case

__all__ = ["CASES", "HIDDEN", "MEAN_SHAPES", "SHAPES", "case_of", "ratio"]

SHAPES = {
    "call": (1, 256),  # mostly the overhead of the call
    "tile": (32, 256),
    "sentence": (128, 768),
    "page": (512, 1024),  # the largest that fits the caches of most machines
    "batch": (4096, 768),
    "large batch": (4096, 1024),
    "memory": (16384, 1024),  # larger than any cache
}
MEAN_SHAPES = list(SHAPES.values())[1:]  # the shapes of the geometric means
HIDDEN = ((16, 16), (12, 64), (64, 128), (128, 256), (512, 512), (1024, 1024), (2048, 2048))  # input, hidden
# At a mean of 10 standard deviations E[x^2] - E[x]^2 in one float32 sweep is no longer accurate: this case keeps
# kernels from being tuned to N(0, 1) alone.
FORWARD, FORWARD_10, BACKWARD = Case("layer_norm"), Case("layer_norm", mean=10), Case("layer_norm_backward")
FLOAT16, BFLOAT16 = Case("layer_norm", "float16"), Case("layer_norm", "bfloat16")
RMS, ADD = Case("rms_norm"), Case("add_layer_norm")
CASES = (FORWARD, FORWARD_10, BACKWARD, FLOAT16, BFLOAT16, RMS, ADD)


def case_of(record):
    """The `Case` of a record of `norms`."""
    return Case(record["operation"], record["dtype"], record["mean"])


def ratio(document, contender, *, case=FORWARD, sizes=None, against="cnorm"):
    """Geometric mean over sizes of the contender's time divided by that of `against`; above 1, `against` is faster.

    NaN if either was not measured at every size.
    """
    sizes = [tuple(size) for size in sizes or MEAN_SHAPES]
    found = {
        (record["contender"], record["rows"], record["n"]): record["microseconds"]
        for record in document["records"]
        if case_of(record) == case
    }
    try:
        logs = [math.log(found[contender, *size] / found[against, *size]) for size in sizes]
    except KeyError:
        return math.nan
    return math.exp(sum(logs) / len(logs))
