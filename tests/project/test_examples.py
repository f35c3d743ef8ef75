"""The examples in docstrings and in the README give the documented output."""

import contextlib
import doctest
import inspect
import io
import re
from pathlib import Path

import pytest

import cnorm
import onnx_export

ROOT = Path(__file__).parents[2]


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
    assert {"cnorm.layer_norm", "cnorm.Model", "onnx_export.OrtStream"} <= EXAMPLES.keys()


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


def test_readme(tmp_path, monkeypatch):
    """The code blocks in order, in one namespace; `# text` after a line is its expected output or value."""
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 4
    names, said = {}, io.StringIO()
    with contextlib.redirect_stdout(said):
        for block in blocks:
            exec(block, names)
    assert names["y"].round(4).tolist() == [[pytest.approx(-1.2247, abs=1e-4), 0, pytest.approx(1.2247, abs=1e-4)]]
    assert names["scores"].shape == (9,)
    verdict, proved = said.getvalue().splitlines()
    assert verdict.startswith("the outputs agree: worst at frame ")
    assert proved == "True"
    assert isinstance(names["stream"], cnorm.Stream)
    assert names["stream"].model.input_size == 12
