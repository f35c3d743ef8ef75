"""The documents: every code block of the README and of docs/ runs, and the reference has every public name.

A block that can't run here is marked by a comment before it, `<!-- not run: REASON -->`, and shown as skipped.
"""

import contextlib
import importlib.util
import io
import itertools
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from cells import random_weights
from markdown_it import MarkdownIt
from servers import worker

import cnorm
import onnx_export
from cnorm import analysis
from onnx_export.runtimes.runners import version

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMPILERS = {"c": ["cc", "-x", "c"], "cpp": ["c++", "-std=c++17", "-x", "c++"]}
INCLUDE = f"-I{ROOT / 'src' / 'include'}"
RNG = np.random.default_rng(0)
DATA = {"text", "json", "yaml", "cmake", "toml"}  # no programs


class Block(NamedTuple):
    page: str
    line: int
    language: str
    code: str
    not_run: str | None


def blocks_of(path):
    reason = None
    for token in MarkdownIt("commonmark").parse(path.read_text()):
        if token.type in ("fence", "code_block"):
            yield Block(path.name, token.map[0] + 1, token.info, token.content, reason)
        found = re.fullmatch(r"<!-- not run: (.+) -->\s*", token.content) if token.type == "html_block" else None
        reason = found and found[1]


BLOCKS = [block for path in PAGES for block in blocks_of(path)]
RUN = {
    page: [block for block in found if block.language not in DATA and not block.not_run]
    for page, found in itertools.groupby(BLOCKS, lambda block: block.page)
}


def test_every_block_is_fenced_and_names_its_language():
    assert {block.language for block in BLOCKS} == {"python", "sh", "c", "cpp", "cython", "rust", *DATA}
    assert len(BLOCKS) > 40


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.not_run], ids=lambda b: f"{b.page}:{b.line}")
def test_blocks_that_are_not_run(block):
    pytest.skip(block.not_run)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "json"], ids=lambda b: f"{b.page}:{b.line}")
def test_json(block):
    json.loads(block.code)


# ---- what the pages take as given: files in the current folder, and names --------------------------------------------


def given_readme(names):
    pytest.importorskip("torch")
    onnx_export.export(cnorm.demo_model(), "model.onnx")
    cnorm.demo_model().save_packed("speaker.cnorm")


def given_streaming(names):
    pytest.importorskip("torch")


def given_cells(names):
    pytest.importorskip("torch")
    weights = {name: random_weights(cnorm.PRESETS["LSTM", name], RNG, 3, 4) for name in ("tfa", "keras", "haste")}
    variables = [Variable(f"rnn/layer_norm_lstm_cell/{name}:0", array) for name, array in weights["tfa"].items()]
    order = ("kernel", "recurrent_kernel", "bias")
    file = {f"layers/lstm/cell/vars/{i}": weights["keras"][name] for i, name in enumerate(order)}
    kept = {f"sequential/lstm/lstm_cell/{name}": array for name, array in weights["keras"].items()}
    kept |= {f"sequential/{name}": np.ones(shape, np.float32) for name, shape in KERAS.items()}
    keras = SimpleNamespace(weights=[Saved(path, array) for path, array in kept.items()])
    names |= {"cnorm": cnorm, "np": np, "variables": variables, "file": file, "weights": weights["haste"]}
    names |= {"keras_model": keras}


KERAS = {"dense/kernel": (4, 2), "dense/bias": (2,), "norm/gamma": (2,), "norm/beta": (2,)}


class Saved:
    """A variable of Keras 3."""

    def __init__(self, path, array):
        self.path, self.name, self.array = path, path.split("/")[-1], array

    def __array__(self, dtype=None, copy=None):
        return self.array


class Variable:
    def __init__(self, name, array):
        self.name, self.numpy = name, lambda: array


def given_checking(names):
    model = cnorm.demo_model()
    x, start = RNG.standard_normal((1, 12), dtype=np.float32), np.zeros((1, 64), np.float32)
    for name in ("model.onnx", "new.onnx", "original.onnx"):
        onnx_export.export(model, name)
    np.savez("batch.npz", x=x, h0_in=start, c0_in=start)
    np.savez("expected.npz", y=model.run(x))
    Path("models").mkdir()
    onnx_export.export(model, "models/first.onnx")


given_validator = given_checking


def given_embedding(names):
    pytest.importorskip("numba")
    names |= {"cnorm": cnorm, "model": cnorm.demo_model()}
    names["model"].save("model.safetensors")


def given_onnx(names):
    torch = pytest.importorskip("torch")

    class Cell(torch.nn.Module):  # LayerNormLSTMCell of PyTorch's benchmarks
        def __init__(self):
            super().__init__()
            self.weight_ih, self.weight_hh = (torch.nn.Parameter(torch.randn(16, n)) for n in (3, 4))
            self.layernorm_i, self.layernorm_h = torch.nn.LayerNorm(16), torch.nn.LayerNorm(16)
            self.layernorm_c = torch.nn.LayerNorm(4)

        def forward(self, x, h, c):
            gates = self.layernorm_i(x @ self.weight_ih.T) + self.layernorm_h(h @ self.weight_hh.T)
            i, f, g, o = gates.chunk(4, 1)
            c = self.layernorm_c(f.sigmoid() * c + i.sigmoid() * g.tanh())
            h = o.sigmoid() * c.tanh()
            return h + 0, h, c

    x, h, c = torch.randn(1, 3), torch.zeros(1, 4), torch.zeros(1, 4)
    names |= {"torch": torch, "torch_cell": Cell().eval(), "x": x, "h": h, "c": c}
    warnings.simplefilter("ignore")  # those of PyTorch's exporter


def given_paper(names):
    Path("examples").symlink_to(ROOT / "examples")


def given_service(names):
    cnorm.demo_model().save("model.safetensors")


def given_serving(names):
    names["x"] = np.zeros((5, 12), np.float32)
    cnorm.demo_model().save("model.safetensors")


def given_training(names):
    pytest.importorskip("torch")


def test_the_first_python_block_of_a_page_imports_what_it_uses():
    """So that it runs as it stands."""
    for page, found in RUN.items():
        first = next((block.code for block in found if block.language == "python"), None)
        if first is not None and page != "cells.md":  # which begins with the variables of a framework
            assert re.match(r"(import|from) ", first), page


# ---- running them ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The C library from the objects of the editable build."""
    objects = sorted((ROOT / "build" / f"cp{sys.version_info.major}{sys.version_info.minor}" / "src").rglob("*.o"))
    assert objects, "build the project first"
    path = tmp_path_factory.mktemp("library") / "libcnorm.a"
    subprocess.run(["ar", "rcs", path, *objects], check=True)
    return path


@pytest.mark.exhaustive(one_in=16)
@pytest.mark.parametrize("page", [page for page, found in RUN.items() if found])
def test_page(page, request, tmp_path, monkeypatch):
    """The blocks of a page in order: Python in one namespace, programs and commands in one folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    names = {}
    globals().get(f"given_{page.removesuffix('.md').lower()}", lambda names: None)(names)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.ExitStack() as running:
        for block in RUN[page]:
            if block.language == "python":
                code = block.code
                if "ws://127.0.0.1:8765/stream" in code:
                    code = code.replace("ws://127.0.0.1:8765/stream", running.enter_context(worker()).url)
                exec(compile("\n" * block.line + code, page, "exec"), names)
            elif block.language == "sh":
                execute(["bash", "-euc", block.code], block)
            else:
                link = ["-x", "none", request.getfixturevalue("library"), "-lm", "-o", "program"]
                execute([*COMPILERS[block.language], "-", INCLUDE, *link], block, program(block.code))
                execute(["./program"], block)
    for output in re.findall(r"print\(.*\)  # (.*?)(?:\.\.\.)?$", "".join(block.code for block in RUN[page]), re.M):
        assert output in said.getvalue()


def program(code):
    """A C or C++ block as a program: statements without a `main` get one, with the arrays x and y."""
    if "int main" in code:
        return code
    includes = "".join(re.findall(r"^#include.*\n", code, re.M)) or "#include <cnorm.hpp>\n"
    statements = re.sub(r"^#include.*\n", "", code, flags=re.M)
    head = f"#include <stdlib.h>\n{includes}static float x[4096], y[4096];\n"
    return f"{head}int main(void)\n{{\n{statements}return 0;\n}}\n"


def execute(command, block, text=None):
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, f"{block.page}:{block.line}: {done.stdout}{done.stderr}"


# ---- the reference ---------------------------------------------------------------------------------------------------


def test_the_reference_has_every_public_name():
    documented = set()
    for path in (ROOT / "docs" / "reference").glob("*.rst"):
        module = None
        for kind, name in re.findall(r"^\.\. (currentmodule|auto\w+):: (\S+)", path.read_text(), re.M):
            module = name if kind == "currentmodule" else module
            documented |= {f"{module}.{name}"} if kind != "currentmodule" else set()
    modules = ["cnorm", "cnorm.serving", "cnorm.scoring", "cnorm.client", "onnx_export"]
    modules += ["cnorm.torch"] if importlib.util.find_spec("torch") else []
    public = {f"{module}.{name}" for module in modules for name in importlib.import_module(module).__all__}
    defined = {name for name, value in vars(analysis).items() if getattr(value, "__module__", "") == analysis.__name__}
    public |= {f"cnorm.analysis.{name}" for name in defined if not name.startswith("_")}
    assert public - documented == set()


def test_the_reference_has_every_public_header():
    text = (ROOT / "docs" / "reference" / "c.rst").read_text()
    shown = re.findall(r"literalinclude:: /src/include/(\S+)", text)
    assert sorted(shown) == sorted(path.name for path in (ROOT / "src" / "include").iterdir())


def test_the_guide_names_what_exists():
    """Files, functions and constants that CONTRIBUTING.md and docs/recipes.md have in backticks."""
    folders = (".ci", "benchmarks", "cnorm", "docs", "examples", "onnx_export", "rust/cnorm/src", "src", "tests")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.*") if path.is_file()]
    text = "".join(path.read_text() for path in paths if path.suffix[1:] in ("py", "c", "h", "inc", "pxi", "pyx", "rs"))
    places = [f"/{path.relative_to(ROOT)}" for path in [*paths, *ROOT.glob("*"), ROOT / ".ci" / "run"]]
    pages = (ROOT / "CONTRIBUTING.md", ROOT / "docs" / "recipes.md")
    guide = re.sub(r"```.*?```", "", "".join(page.read_text() for page in pages), flags=re.S)
    missing = []
    for name in set(re.findall(r"`(\w[\w./*]+)`", guide)):
        is_file = any(place.endswith(f"/{name}") or f"/{name.rstrip('/')}/" in place for place in places)
        known = "/" not in name and all(word in text for word in re.findall(r"\w+", name))
        if not (is_file or known or "NAME" in name):
            missing.append(name)
    assert not missing, sorted(missing)


def test_presets_name_the_versions_that_were_run():
    """Those of docs/cells.md, on the pages that `make frameworks` and `make runtimes` write from their pins."""
    named = set(re.findall(r"\b(keras|torch|onnx) (\d+\.\d+\.\d+)", (ROOT / "docs" / "cells.md").read_text()))
    run = set(re.findall(r"^\| (\S+) (\S+) \|", (ROOT / "docs" / "frameworks.md").read_text(), re.M))
    assert named == {each for each in run if each[0] in ("keras", "torch")} | {("onnx", version("onnx-reference"))}
