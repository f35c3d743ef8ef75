"""Fixtures of the benchmarks. The variables that set the number of threads must be set before NumPy is imported."""

import os

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"

import pytest  # noqa: E402

import cnorm_bench as bench  # noqa: E402
from cnorm_bench.contenders.operations import check  # noqa: E402
from cnorm_bench.environment import THREADS  # noqa: E402

missing = THREADS.keys() - os.environ.keys()
assert not missing, f"the loop above, which runs before NumPy is imported, lacks {missing}"


@pytest.fixture
def race(benchmark):
    """Check a contender against float64, then time it; the JSON also gets the processor, versions and settings."""

    def run(contender, expected):
        check(contender, expected)
        benchmark.extra_info.update(bench.surroundings(), contender=contender.label, statement=contender.statement)
        with contender.mode():
            benchmark(contender.function())

    return run
