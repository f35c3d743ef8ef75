"""Exported files in other runtimes. Each test runs where its runtime is installed (dependency group "runtimes").

An older onnxruntime needs an older numpy, so it has a folder of its own, which CNORM_OLDEST_ONNXRUNTIME names:
pip install --target FOLDER onnxruntime==1.15.1 "numpy<2" (the oldest for Python 3.11; it runs in a child process).
"""

import os
import subprocess
import sys

import numpy as np
import onnx
import pytest
from cells import random_cell
from models import random_linear
from onnx.reference import ReferenceEvaluator

import cnorm
import onnx_export
from onnx_export.float64 import Float64
from onnx_export.parity_measure import bound

STEPS = 6
PRESETS = sorted(cnorm.PRESETS)


class Reference:
    """onnx's reference evaluator."""

    forms = ("step", "step13", "scan", "portable", "unrolled", "float16")

    def __init__(self, model, path):
        self.run = lambda feeds: dict(
            zip([v.name for v in model.graph.output], ReferenceEvaluator(model).run(None, feeds), strict=True)
        )


class OpenVINO:
    forms = ("step", "step13", "scan", "portable", "unrolled", "float16")

    def __init__(self, model, path):
        openvino = pytest.importorskip("openvino")
        compiled = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        self.run = lambda feeds: {name: compiled(feeds)[name] for name in (v.name for v in model.graph.output)}


class Tract:
    """tract: takes inputs and returns outputs in the order of the graph."""

    forms = ("step", "step13", "scan", "portable", "unrolled", "float16")

    def __init__(self, model, path):
        tract = pytest.importorskip("tract")
        runnable = tract.onnx().load(path).into_model().into_runnable()
        names = [value.name for value in model.graph.output]
        order = [value.name for value in model.graph.input]
        self.run = lambda feeds: dict(
            zip(names, (t.to_numpy() for t in runnable.run([feeds[n] for n in order])), strict=True)
        )


class OldOnnxruntime:
    """The oldest onnxruntime that can be installed, in a process of its own."""

    forms = ("step", "step13", "scan", "loop", "portable", "unrolled")

    def __init__(self, model, path):
        self.path, self.folder = path, os.environ.get("CNORM_OLDEST_ONNXRUNTIME")
        if not self.folder:
            pytest.skip("CNORM_OLDEST_ONNXRUNTIME names no folder")

    def run(self, feeds):
        given, results = f"{self.path}.in.npz", f"{self.path}.out.npz"
        np.savez(given, **feeds)
        code = (
            "import sys, numpy as np, onnxruntime as ort\n"
            "s = ort.InferenceSession(sys.argv[1], providers=['CPUExecutionProvider'])\n"
            "names = [v.name for v in s.get_outputs()]\n"
            "np.savez(sys.argv[3], **dict(zip(names, s.run(names, dict(np.load(sys.argv[2]))))))\n"
        )
        environment = os.environ | {"PYTHONPATH": self.folder}
        command = [sys.executable, "-P", "-c", code, self.path, given, results]
        subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        return dict(np.load(results))


FORMS = {
    "step": {},
    "step13": {"opset": 13},
    "scan": {"form": "sequence"},
    "loop": {"form": "sequence", "loop": "loop"},
    "portable": {"portable": True},
    "unrolled": {"form": "sequence", "loop": "unrolled", "steps": STEPS, "portable": True},
    "float16": {"portable": True, "dtype": "float16"},
}
CASES = [(runtime, form) for runtime in (Reference, OpenVINO, Tract, OldOnnxruntime) for form in runtime.forms]


def longest_sum(layer):
    return max(layer.input_size, layer.output_size, layer.units)


@pytest.mark.exhaustive(one_in=24)
@pytest.mark.parametrize(("runtime", "form"), CASES, ids=lambda part: getattr(part, "__name__", part))
@pytest.mark.parametrize("key", PRESETS, ids=lambda key: "-".join(key))
def test_every_preset(key, runtime, form, rng, tmp_path):
    """One call from a given state, each step within the bound of `check_parity`."""
    eps = 1e-8 if key[1] == "kann" else None  # KANN's eps is 0; in ONNX a row without variance would be NaN
    layer = random_cell(key, rng, 12, 16, eps=eps)[0]
    model = cnorm.Model([layer, random_linear(rng, layer.output_size, 5)])
    exported = onnx_export.export(model, tmp_path / "model.onnx", **FORMS[form])
    fixed = onnx.ModelProto()
    fixed.CopyFrom(exported)
    steps = STEPS if FORMS[form].get("form") == "sequence" else 1
    dtype = np.dtype(FORMS[form].get("dtype", "float32"))
    feeds = {}
    for value in fixed.graph.input:
        shape = [dim.dim_value or steps for dim in value.type.tensor_type.shape.dim]
        feeds[value.name] = (rng.standard_normal(shape) * (1 if value.name == "x" else 0.5)).astype(dtype)
    exact = Float64(fixed).run(feeds)
    near = Float64(fixed).run({name: array * (1 + 2.0**-22) for name, array in feeds.items()})
    found = runtime(fixed, str(tmp_path / "model.onnx")).run(feeds)
    unit = float(np.finfo(dtype).eps) / 2
    for name, array in exact.items():
        moved = np.abs(near[name] - array).max() * unit / 2.0**-24
        allowed = steps * bound(longest_sum(layer), array, unit, moved)
        assert found[name].shape == array.shape
        assert np.abs(found[name] - array).max() <= allowed, name
