"""The examples in docstrings give the documented output."""

import doctest
import inspect
import io

import pytest

import cnorm
import onnx_export


def examples():
    """Every public docstring with an example, by the name of the object it documents."""
    for package in cnorm, onnx_export:
        for name in package.__all__:
            thing = getattr(package, name)
            parts = inspect.getmembers(thing) if inspect.isclass(thing) else []
            for own, part in [("", thing), *((f".{own}", part) for own, part in parts if own[0] != "_")]:
                if ">>>" in (inspect.getdoc(part) or ""):
                    yield f"{package.__name__}.{name}{own}", inspect.getdoc(part)


EXAMPLES = dict(examples())


def test_there_are_examples():
    assert {"cnorm.layer_norm", "cnorm.Model"} <= EXAMPLES.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_docstring(name, tmp_path, monkeypatch):
    if "torch" in EXAMPLES[name]:
        pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)  # some write files
    example = doctest.DocTestParser().get_doctest(EXAMPLES[name], {}, name, None, 0)
    said = io.StringIO()
    failed, tried = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example, out=said.write)
    assert tried
    assert not failed, said.getvalue()
