"""One step of a layer-normalised LSTM, batch 1, for every contender and size."""

import numpy as np
import pytest

from cnorm import bench, contenders
from cnorm.contenders.operations import check_steps, lstm_reference, random_lstm

MODULES, LEFT_OUT = contenders.importable()


def cases():
    runners, _ = bench.step_contenders(MODULES, random_lstm(np.random.default_rng(0), 2, 2))
    return [pytest.param(runner.label, id=runner.label) for runner in runners] + [
        pytest.param("", id=sentence.split()[0], marks=pytest.mark.skip(reason=sentence)) for sentence in LEFT_OUT
    ]


@pytest.mark.parametrize(("inputs", "hidden"), bench.HIDDEN)
@pytest.mark.parametrize("label", cases())
def bench_step(benchmark, label, inputs, hidden):
    model = random_lstm(np.random.default_rng(0), inputs, hidden)
    runners, _ = bench.step_contenders(MODULES, model)
    (runner,) = (r for r in runners if r.label == label)
    frames = np.random.default_rng(1).standard_normal((50, inputs), dtype=np.float32)
    check_steps(runner, frames[:3], lstm_reference(model, frames[:3]))
    benchmark.extra_info.update(bench.surroundings(), contender=label)
    with runner.mode():
        benchmark(runner.step, frames[0])
