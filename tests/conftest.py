"""Fixtures shared by all test files."""

import collections
import importlib
import os
import platform
import sys

import hypothesis
import numpy as np
import pytest

import cnorm

# deterministic examples, no deadline; a function-scoped fixture sets the instruction set for all examples of a test
hypothesis.settings.register_profile(
    "cnorm",
    max_examples=50,
    derandomize=True,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("cnorm")


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="every case of the tests that are marked exhaustive")


def pytest_collection_modifyitems(config, items):
    """Leave out what is exhaustive, without --all and where no test or word is asked for by name."""
    if config.getoption("--all") or config.getoption("keyword") or any("::" in given for given in config.args):
        return
    kept, left, cases = [], [], collections.Counter()
    for item in items:
        mark = item.get_closest_marker("exhaustive")
        part = mark.kwargs.get("one_in") if mark else 1
        name = item.nodeid.partition("[")[0]
        # multiples of the golden ratio spread evenly, whatever the period of the parameters
        here = part and int(cases[name] * 0.6180339887498949 % 1 * part) == 0
        cases[name] += 1
        (kept if here else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


@pytest.fixture(params=cnorm.available_isas())
def isa(request):
    """Run the test once on each instruction set of this machine."""
    before = cnorm.active_isa()
    cnorm.use_isa(request.param)
    yield request.param
    cnorm.use_isa(before)


@pytest.fixture
def rng():
    """A seeded generator; pytest prints the seed of a failed test, and CNORM_TEST_SEED sets it."""
    seed = int(os.environ.get("CNORM_TEST_SEED", "1607"))
    print(f"rng seed: {seed} (CNORM_TEST_SEED={seed} repeats it)")
    return np.random.default_rng(seed)


@pytest.fixture
def fails_once(monkeypatch):
    """Make a function of the validator, given as "module.function", raise an error on its first call."""

    def arrange(step, error):
        module, name = step.split(".")
        module = importlib.import_module(f"onnx_export.validation.{module}")
        real, calls = getattr(module, name), []

        def failing(*arguments, **options):
            calls.append(arguments)
            if len(calls) == 1:
                raise error
            return real(*arguments, **options)

        monkeypatch.setattr(module, name, failing)

    return arrange


@pytest.fixture
def work():
    """Count the Python and C function calls that `call` makes: unlike time, the same on every machine."""

    def count(call):
        counted = []
        sys.setprofile(lambda _, event, __: counted.append(event))
        try:
            call()
        finally:
            sys.setprofile(None)
        return len(counted)

    return count


def pytest_terminal_summary(terminalreporter):
    """Name the instruction sets of this architecture that no test ran on, because the processor lacks them."""
    wanted = {"x86_64": ["baseline", "avx2", "avx512"]}.get(platform.machine(), [])
    for name in wanted:
        if name not in cnorm.available_isas():
            terminalreporter.write_line(f"!!! NOT RUN: instruction set {name}, which this processor lacks", red=True)
