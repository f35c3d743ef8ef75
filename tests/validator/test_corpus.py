"""Norms written by real exporters are found in every form: small files made by the scripts in corpus/."""

import zipfile
from pathlib import Path

import onnx
import pytest
from corpus.make_pytorch import FORMS

from onnx_export.model_io import Limits, parse
from onnx_export.nodes import sort_nodes
from onnx_export.validation.examine import Options, examine
from onnx_export.validation.graph import inline
from onnx_export.validation.patterns import find

ARCHIVE = Path(__file__).parents[1] / "support" / "corpus" / "pytorch.zip"
NAMES = zipfile.ZipFile(ARCHIVE).namelist()


def form_of(name):
    return name.partition("@")[0]


@pytest.mark.parametrize("name", NAMES)
def test_norms_of_an_exported_file_are_found(name):
    model = parse(zipfile.ZipFile(ARCHIVE).read(name), Limits())
    sort_nodes(model)
    model = onnx.shape_inference.infer_shapes(inline(model), data_prop=True)
    assert ["~" * bool(norm.near_miss) + norm.formula.name for norm in find(model)] == FORMS[form_of(name)]


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith(("-17.onnx", "current-18.onnx"))])
def test_an_exported_file_is_judged_sound(name, tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(zipfile.ZipFile(ARCHIVE).read(name))
    report = examine(str(path), Options(), lambda *_: None)
    assert report.exit_code() == (1 if form_of(name) == "no_root" else 0), (report.problem, report.norms)
    assert {norm.verdict for norm in report.norms} <= {"ok", "risky"}


def test_corpus_has_enough_files():
    assert len(NAMES) >= 150
    assert ARCHIVE.stat().st_size <= 100_000
