"""Copies of exported files that optimisers and converters made keep their norms: each is found in the copy, too.

A sample of the corpus, or with CNORM_WHOLE_CORPUS=1 all of it.
"""

import os
from contextlib import suppress

import numpy as np
import onnx
import pytest
from corpus import archive
from onnxruntime import quantization
from onnxruntime.transformers.float16 import convert_float_to_float16
from writings import LEVELS, saved

from onnx_export import ort
from onnx_export.model_io import Limits, parse
from onnx_export.nodes import inlined, sort_nodes
from onnx_export.validation.examine import examine
from onnx_export.validation.lint import lint_unclaimed
from onnx_export.validation.lock import compare, facts
from onnx_export.validation.options import Options
from onnx_export.validation.patterns import find

EXPORTERS = ("pytorch", "keras", "jax", "paddle", "transformers")
# Of the files; a run over all 426 of them takes minutes of one core.
EVERY = 1 if os.environ.get("CNORM_WHOLE_CORPUS") else 5


def norms(model):
    """(near miss, formula) of each norm."""
    sort_nodes(model)
    with suppress(onnx.shape_inference.InferenceError):  # the converter leaves types that contradict each other
        model = onnx.shape_inference.infer_shapes(inlined(model), data_prop=True)
    if any(node.domain for node in model.graph.node):
        ort.add_types(model)
    return sorted(bool(norm.near_miss) for norm in find(model))


def sources(exporter, every):
    return list(archive.read(exporter).items())[::every]


@pytest.mark.exhaustive(one_in=5)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("exporter", EXPORTERS)
def test_onnxruntimes_copy_keeps_the_norms(exporter, level, tmp_path):
    for name, data in sources(exporter, EVERY):
        assert norms(saved(parse(data, Limits()), level, tmp_path)) == norms(parse(data, Limits())), name


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_a_copy_in_float16_keeps_the_norms(exporter):
    """Without the near misses, which rounded constants may change."""
    for name, data in sources(exporter, EVERY):
        model = parse(data, Limits())
        half = convert_float_to_float16(parse(data, Limits()), keep_io_types=True)
        assert len(norms(half)) == len(norms(model)), name


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_a_simplified_copy_keeps_the_norms_or_says_that_it_may_not(exporter):
    """onnxsim multiplies the root of n into the gain, after which an RMS norm by its L2 norm is a scaled cosine."""
    onnxsim = pytest.importorskip("onnxsim")
    for name, data in sources(exporter, EVERY):
        simplified, _ = onnxsim.simplify(parse(data, Limits()))
        if name.startswith("normalize_times_root"):
            assert [finding.code for finding in lint_unclaimed(simplified, find(simplified))] == ["unclaimed"], name
        else:
            assert norms(simplified) == norms(parse(data, Limits())), name


@pytest.mark.exhaustive(one_in=12)
@pytest.mark.parametrize("exporter", EXPORTERS)
def test_what_is_repaired_is_like_its_original(exporter, tmp_path):
    original, repaired = tmp_path / "original.onnx", tmp_path / "repaired.onnx"
    for name, data in sources(exporter, 2 * EVERY):
        original.write_bytes(data)
        repaired.unlink(missing_ok=True)
        before = examine(str(original), Options(fix=str(repaired), opset=17), lambda *_: None)
        if repaired.exists():
            after = examine(str(repaired), Options(find_only=True), lambda *_: None)
            assert not [f.message for f in compare(facts(after), facts(before)) if f.level == "error"], name


class Rows(quantization.CalibrationDataReader):
    """Two batches of N(0, 1) for each input, which is float32."""

    def __init__(self, model, seed=0):
        rng, stored = np.random.default_rng(seed), {tensor.name for tensor in model.graph.initializer}
        shapes = {
            value.name: [dim.dim_value or 2 for dim in value.type.tensor_type.shape.dim]
            for value in model.graph.input
            if value.name not in stored
        }
        self.left = [{name: rng.normal(size=s).astype(np.float32) for name, s in shapes.items()} for _ in range(2)]

    def get_next(self):
        return self.left.pop() if self.left else None


def float_inputs(model):
    return all(value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT for value in model.graph.input)


# Quantisers lie between a factor and the quotient, or between eps and the mean's square; a mean of integers by pooling.
QUANTISED_INSIDE = ("scale_first@old-13.onnx", "one_pass@tf2onnx-13.onnx", "pooled@old-13.onnx")


@pytest.mark.exhaustive(one_in=2)
@pytest.mark.parametrize("form", list(quantization.QuantFormat), ids=str)
@pytest.mark.parametrize("exporter", ["pytorch", "keras", "paddle"])
def test_a_statically_quantised_copy_keeps_the_norms_or_says_why_not(exporter, form, tmp_path):
    tried, everything = 0, archive.read(exporter)
    rare = {name: everything[name] for name in QUANTISED_INSIDE if name in everything}
    for name, data in (dict(sources(exporter, 4 * EVERY)) | rare).items():
        model = parse(data, Limits())
        before = norms(parse(data, Limits()))
        if not before or any(before) or not float_inputs(model):
            continue
        onnx.save(model, tmp_path / "float.onnx")
        quantization.quantize_static(
            tmp_path / "float.onnx", tmp_path / "quantised.onnx", Rows(model), quant_format=form
        )
        report = examine(str(tmp_path / "quantised.onnx"), Options(), lambda *_: None)
        assert len(report.norms) == len(before), (name, report.problem, report.norms)
        assert report.exit_code() in (0, 2), (name, report.norms, report.findings)
        tried += 1
    assert tried > 1
