"""A forced instruction set is the one that runs; an unavailable one is an error, never a silent fallback."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest

import cnorm

KNOWN = {"baseline", "avx2", "avx512", "neon"}


def python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_available_isas_have_known_names():
    available = cnorm.available_isas()
    assert set(available) <= KNOWN
    assert len(set(available)) == len(available)
    assert all(type(name) is str for name in available)


@pytest.mark.parametrize("name", cnorm.available_isas())
def test_the_environment_forces_an_isa(name):
    run = python(
        "import cnorm, numpy as np\n"
        "y = cnorm.layer_norm(np.float32([1, 2, 4]))\n"
        "print(cnorm.active_isa(), y.tobytes().hex())",
        CNORM_ISA=name,
    )
    assert run.returncode == 0, run.stderr
    isa, result = run.stdout.split()
    assert isa == name
    assert result == cnorm.layer_norm(np.float32([1, 2, 4])).tobytes().hex()


@pytest.mark.parametrize("name", ["sse9", "AVX2 ", "auto", "avx", *sorted(KNOWN - set(cnorm.available_isas()))])
def test_an_unknown_or_absent_isa_in_the_environment_is_an_import_error(name):
    code = "try:\n    import cnorm\nexcept ImportError as error:\n    print(error)"
    run = python(code, CNORM_ISA=name)
    assert run.returncode == 0, run.stderr
    assert "CNORM_ISA" in run.stdout
    assert name in run.stdout
    for available in cnorm.available_isas():
        assert available in run.stdout


def test_the_command_names_an_unknown_isa_in_one_line():
    run = subprocess.run(
        [sys.executable, "-P", "-m", "cnorm", "--help"],
        env=os.environ | {"CNORM_ISA": "bad"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 2
    assert run.stderr.startswith("cnorm: the environment variable CNORM_ISA is 'bad'; this machine can run baseline")
    assert run.stderr.count("\n") == 1


@pytest.mark.parametrize("name", cnorm.available_isas())
def test_use_isa(name):
    before = cnorm.active_isa()
    try:
        cnorm.use_isa(name)
        assert cnorm.active_isa() == name
    finally:
        cnorm.use_isa(before)


@pytest.mark.parametrize("name", ["sse9", "", "avx", "avx2\0", "\udc80", *sorted(KNOWN - set(cnorm.available_isas()))])
def test_use_isa_of_an_unknown_or_absent_isa_is_a_value_error(name):
    before = cnorm.active_isa()
    with pytest.raises(ValueError, match=re.escape(repr(name)) if name else "isa|ISA|name") as caught:
        cnorm.use_isa(name)
    for available in cnorm.available_isas():
        assert available in str(caught.value)
    assert cnorm.active_isa() == before


@pytest.mark.parametrize("name", [None, 2, b"avx2"])
def test_use_isa_of_something_else_is_a_type_error(name):
    with pytest.raises(TypeError):
        cnorm.use_isa(name)
