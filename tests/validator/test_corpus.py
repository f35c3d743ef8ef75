"""Norms written by real exporters are found in every form: small files made by the scripts in corpus/."""

import onnx
import pytest
from corpus import archive, make_jax, make_keras, make_paddle, make_pytorch, make_transformers
from corpus.sound_transformers import examined

from onnx_export.model_io import Limits, parse
from onnx_export.nodes import inlined, sort_nodes
from onnx_export.validation.examine import examine
from onnx_export.validation.options import Options
from onnx_export.validation.patterns import find

SCRIPTS = {
    "pytorch": make_pytorch,
    "keras": make_keras,
    "jax": make_jax,
    "paddle": make_paddle,
    "transformers": make_transformers,
}
FILES = [(exporter, name) for exporter in SCRIPTS for name in archive.read(exporter)]
JUDGED = ("-17.onnx", "current-18.onnx", "jax2onnx-21.onnx", "jax2onnx-23-decomposed.onnx")
# Files that are wrong as exported: division by the variance, and a scale of one axis for a norm over two.
WRONG = {("pytorch", "no_root"), ("paddle", "layer_two_axes")}


def form_of(name):
    return name.partition("@")[0]


@pytest.mark.exhaustive(one_in=3)
@pytest.mark.parametrize(("exporter", "name"), FILES)
def test_norms_of_an_exported_file_are_found(exporter, name):
    model = parse(archive.read(exporter)[name], Limits())
    sort_nodes(model)
    model = onnx.shape_inference.infer_shapes(inlined(model), data_prop=True)
    found = ["~" * bool(norm.near_miss) + norm.formula.name for norm in find(model)]
    assert found == SCRIPTS[exporter].FORMS[form_of(name)]


@pytest.mark.exhaustive(one_in=18)
@pytest.mark.parametrize(("exporter", "name"), [file for file in FILES if file[1].endswith(JUDGED)])
def test_an_exported_file_is_judged_sound(exporter, name, tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(archive.read(exporter)[name])
    report = examine(str(path), Options(), lambda *_: None)
    wrong = (exporter, form_of(name)) in WRONG
    assert report.exit_code() == wrong, (report.problem, report.norms)
    assert wrong or {norm.verdict for norm in report.norms} <= {"ok", "risky"}


@pytest.mark.exhaustive(one_in=10)
@pytest.mark.parametrize(("seed", "size"), [(0, (1, 5)), (20, (4, 33))])
@pytest.mark.parametrize("name", archive.read("transformers"))
def test_sound_transformers_pass_with_realistic_inputs(name, seed, size, tmp_path):
    """A small part of the matrix of `corpus.sound_transformers`."""
    path = tmp_path / "model.onnx"
    path.write_bytes(archive.read("transformers")[name])
    report = examined(path, form_of(name), seed, size, tmp_path)
    assert report.exit_code() == 0
    assert {norm.verdict for norm in report.norms} <= {"ok", "risky"}
    assert "trained" not in name or max(norm.conditioning for norm in report.norms) > 10


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_norms_have_the_names_of_their_modules(exporter, tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(archive.read("transformers")[f"bert@{exporter}-random.onnx"])
    names = [norm.name.replace("/", ".") for norm in examine(str(path), Options(find_only=True), lambda *_: None).norms]
    places = ["embeddings", "layer.0.attention.output", "layer.0.output", "layer.1.attention.output", "layer.1.output"]
    assert len(set(names)) == len(places)
    for name, place in zip(names, places, strict=True):
        assert f"{place}.LayerNorm" in name


def test_corpus_has_enough_files():
    assert len(FILES) >= 400
    sizes = {path.name: path.stat().st_size for path in archive.FOLDER.glob("*.xz")}
    assert sizes.pop("recurrent.tar.xz") <= 40_000  # files of recurrent operators, which FILES does not count
    assert sizes.pop("keras_recurrent.tar.xz") <= 30_000
    assert sum(sizes.values()) <= 150_000
