"""Layer norm forward and backward, and what a call costs, for every contender and named shape."""

import numpy as np
import pytest

from cnorm import bench, contenders

MODULES, LEFT_OUT = contenders.importable()


def cases(operation):
    """The labels of the contenders, and a skipped case for each sentence about an absent one."""
    inputs = bench.OPERATIONS[operation].inputs(np.random.default_rng(0), 1, 8, 0)
    able = [module for module in MODULES if hasattr(module, operation)]
    found = [(module, c.label) for module in able for c in getattr(module, operation)(**inputs)]
    return [pytest.param(module, label, id=label) for module, label in found] + [
        pytest.param(None, "", id=sentence.split()[0], marks=pytest.mark.skip(reason=sentence)) for sentence in LEFT_OUT
    ]


@pytest.mark.parametrize("shape", bench.SHAPES)
@pytest.mark.parametrize(("module", "label"), cases("layer_norm"))
def bench_forward(race, module, label, shape):
    go(race, "layer_norm", module, label, shape, mean=0)


@pytest.mark.parametrize("shape", bench.SHAPES)
@pytest.mark.parametrize(("module", "label"), cases("layer_norm"))
def bench_forward_at_mean_10(race, module, label, shape):
    go(race, "layer_norm", module, label, shape, mean=10)


@pytest.mark.parametrize("shape", bench.SHAPES)
@pytest.mark.parametrize(("module", "label"), cases("layer_norm_backward"))
def bench_backward(race, module, label, shape):
    go(race, "layer_norm_backward", module, label, shape, mean=0)


def go(race, operation, module, label, shape, mean):
    described = bench.OPERATIONS[operation]
    inputs = described.inputs(np.random.default_rng(0), *bench.SHAPES[shape], mean)
    (contender,) = (c for c in getattr(module, operation)(**inputs) if c.label == label)
    race(contender, described.reference(**inputs))
