"""The hand-written stubs match the extension module, and Python code has annotations."""

import inspect
import subprocess
import sys

import pytest

import cnorm
import cnorm.analysis

# names that Cython adds
ALLOWED = (
    "cnorm._core.__pyx_capi__\ncnorm._core.__test__\ncnorm._core.*__reduce_cython__\ncnorm._core.*__setstate_cython__\n"
)


def test_stubs_match_the_extension(tmp_path):
    (tmp_path / "allowed").write_text(ALLOWED)
    result = subprocess.run(
        [sys.executable, "-P", "-m", "mypy.stubtest", "cnorm._core", "--allowlist", "allowed",
         "--ignore-unused-allowlist", "--ignore-missing-stub"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr


def written_in_python():
    """Public functions and methods, but for the extension's, by name."""
    public = [getattr(cnorm, name) for name in cnorm.__all__] + [
        cnorm.analysis.invariance_table,
        cnorm.analysis.fisher_glm,
    ]
    for thing in public:
        if inspect.isfunction(thing):
            yield thing.__name__, thing
        for name, part in inspect.getmembers(thing) if inspect.isclass(thing) else []:
            part = part.fget if isinstance(part, property) else part
            if inspect.isfunction(part) and (name == "__init__" or name[0] != "_"):
                yield f"{thing.__name__}.{name}", part


@pytest.mark.parametrize("function", dict(written_in_python()).values(), ids=dict(written_in_python()))
def test_every_argument_and_result_has_a_type(function):
    types = inspect.get_annotations(function)
    assert {name for name in inspect.signature(function).parameters if name != "self"} | {"return"} == types.keys()
