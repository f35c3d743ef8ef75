"""Which operations at which sizes are measured, and the ratio that a document of measurements holds."""

import math

from cnorm.tools.contenders.operations import Case

__all__ = ["CASES", "HIDDEN", "SHAPES", "SIX", "case_of", "ratio"]

SHAPES = {
    "call": (1, 256),  # what a call costs
    "tile": (32, 256),
    "sentence": (128, 768),
    "page": (512, 1024),  # the last one well inside the caches of most machines
    "batch": (4096, 768),
    "large batch": (4096, 1024),
    "memory": (16384, 1024),  # beyond any cache
}
SIX = list(SHAPES.values())[1:]  # geometric means run over these
HIDDEN = ((16, 16), (12, 64), (64, 128), (128, 256), (512, 512), (1024, 1024), (2048, 2048))  # input, hidden
# A mean of 10 is where the fastest formula is no longer safe, so that nobody tunes to N(0, 1) alone.
FORWARD, FORWARD_10, BACKWARD = Case("layer_norm"), Case("layer_norm", mean=10), Case("layer_norm_backward")
FLOAT16, BFLOAT16 = Case("layer_norm", "float16"), Case("layer_norm", "bfloat16")
RMS, ADD = Case("rms_norm"), Case("add_layer_norm")
CASES = (FORWARD, FORWARD_10, BACKWARD, FLOAT16, BFLOAT16, RMS, ADD)


def case_of(record):
    """The `Case` of a record of `norms`."""
    return Case(record["operation"], record["dtype"], record["mean"])


def ratio(document, contender, *, case=FORWARD, sizes=None, against="cnorm"):
    """Geometric mean over sizes of the contender's time by that of `against`; above 1, `against` is faster.

    NaN if one of the two was not measured at each of the sizes.
    """
    sizes = [tuple(size) for size in sizes or SIX]
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
