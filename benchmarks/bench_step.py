"""Time one step of a recurrent cell, batch 1, for every contender and size."""

import numpy as np
import pytest

import cnorm_bench as bench
from cnorm_bench import contenders
from cnorm_bench.contenders.operations import CELLS, check_steps, random_model, trajectory

MODULES, LEFT_OUT = contenders.importable()


def labels():
    model = random_model("LN-LSTM", np.random.default_rng(0), 2, 2)
    for runner in bench.step_contenders(MODULES, model):
        yield pytest.param(runner.label, id=runner.label)
    for sentence in LEFT_OUT:
        yield pytest.param("", id=sentence, marks=pytest.mark.skip(reason=sentence))


@pytest.mark.parametrize(("inputs", "hidden"), bench.HIDDEN)
@pytest.mark.parametrize("label", list(labels()))
@pytest.mark.parametrize("cell", CELLS)
def bench_step(benchmark, cell, label, inputs, hidden):
    model = random_model(cell, np.random.default_rng(0), inputs, hidden)
    (runner,) = (r for r in bench.step_contenders(MODULES, model) if r.label == label)
    frames = np.random.default_rng(1).standard_normal((3, inputs), dtype=np.float32)
    check_steps(runner, frames, trajectory(cell, model, frames)[-1])
    benchmark.extra_info.update(bench.surroundings(), contender=label)
    with runner.mode():
        benchmark(runner.step, frames[0])
