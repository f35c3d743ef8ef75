"""Time layer norms, forward and backward, for every contender, case and named shape."""

import numpy as np
import pytest

import cnorm_bench as bench
from cnorm_bench import contenders

MODULES, LEFT_OUT = contenders.importable()


def rows():
    """Parameters of the benchmark: module and label of each contender for each case; absent runtimes are skipped."""
    for case in bench.CASES:
        inputs = case.inputs(np.random.default_rng(0), 1, 8)
        for module in MODULES:
            for contender in getattr(module, case.operation, lambda **_: [])(**inputs):
                yield pytest.param(case, module, contender.label, id=f"{case}-{contender.label}")
    for sentence in LEFT_OUT:
        yield pytest.param(None, None, "", id=sentence, marks=pytest.mark.skip(reason=sentence))


@pytest.mark.parametrize("shape", bench.SHAPES)
@pytest.mark.parametrize(("case", "module", "label"), list(rows()))
def bench_norm(race, case, module, label, shape):
    inputs = case.inputs(np.random.default_rng(0), *bench.SHAPES[shape])
    (contender,) = (c for c in getattr(module, case.operation)(**inputs) if c.label == label)
    race(contender, case.expected(**inputs))
