"""Exported norms against the oracle: onnxruntime's results at every opset, and the operators' attributes."""

import os

import numpy as np
import onnx
import onnxruntime
import pytest
import reference
import tolerances
from export_norm import export_norm

from onnx_export.float64 import Float64
from onnx_export.options import newest_opset

OPSETS = [13, 17, 18, 21, 22, 23, newest_opset()]
LEVELS = ["ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_ALL"]


def run(model, x, level="ORT_ENABLE_ALL"):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("shape", [(1,), (7,), (256,), (3, 5)])
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_onnxruntime_agrees_with_the_oracle(rng, kind, shape, opset, level):
    weight = (1 + 0.3 * rng.standard_normal(shape)).astype(np.float32)
    bias = rng.standard_normal(shape).astype(np.float32) if kind == "layer_norm" else None
    x = (0.5 + rng.standard_normal((6, *shape))).astype(np.float32)
    model = export_norm(kind, weight, bias, opset=opset, eps=1e-3)
    axis = -len(shape)
    if kind == "layer_norm":
        exact, _, _ = reference.layer_norm(x, weight, bias, eps=1e-3, axis=axis)
    else:
        exact, _ = reference.rms_norm(x, weight, eps=1e-3, axis=axis)
    xhat = (exact - (0 if bias is None else bias)) / weight
    bound = tolerances.forward(xhat, np.float32, weight, 0 if bias is None else bias)
    tolerances.assert_within(run(model, x, level), exact, bound)
    np.testing.assert_allclose(Float64(model).run({"x": x})["y"], exact, rtol=0, atol=1e-13)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("opset", [13, 16, 17])
def test_a_large_mean_is_subtracted_before_squaring(rng, opset, level):
    """A float32 sum of n numbers near 1e3 puts the mean off by up to 1e3 u sqrt(n); E[x^2] - E[x]^2 loses all."""
    x = (1e3 + rng.standard_normal((32, 1024))).astype(np.float32)
    ones = np.ones(1024, np.float32)
    y = run(export_norm("layer_norm", ones, opset=opset), x, level)
    exact, _, _ = reference.layer_norm(x)
    assert np.abs(y - exact).max() < 1e3 * 2.0**-24 * 32


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_float16_squares_do_not_overflow(rng, kind, opset):
    x = (1000 * rng.standard_normal((4, 32))).astype(np.float16)
    model = export_norm(kind, np.ones(32, np.float16), opset=opset)
    exact = (reference.layer_norm if kind == "layer_norm" else reference.rms_norm)(x.astype(np.float32))[0]
    np.testing.assert_allclose(run(model, x), exact, rtol=2.0**-10, atol=2.0**-12)
    operators = {node.op_type for node in model.graph.node}
    native = {"layer_norm": ("LayerNormalization", 17), "rms_norm": ("RMSNormalization", 23)}[kind]
    assert operators == {native[0]} if opset >= native[1] else "Cast" in operators


def test_operators_have_every_attribute_and_input(rng):
    weight = rng.standard_normal((3, 5)).astype(np.float32)
    (node,) = export_norm("layer_norm", weight, weight, eps=1e-6).graph.node
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    assert attributes == {"axis": -2, "epsilon": np.float32(1e-6), "stash_type": 1}
    assert list(node.input) == ["x", "weight", "bias"]
    (node,) = export_norm("rms_norm", weight, opset=23).graph.node
    assert node.op_type == "RMSNormalization"


@pytest.mark.parametrize(
    ("arguments", "options", "error", "says"),
    [
        (("weight_norm", np.ones(3, np.float32)), {}, ValueError, "kind must be one of 'layer_norm', 'rms_norm'"),
        (("layer_norm", np.ones(3)), {}, TypeError, "weight must be an array of float32 or float16, got float64"),
        (("layer_norm", [1.0]), {}, TypeError, "weight must be an array of float32 or float16, got list"),
        (("layer_norm", np.ones(3, "f"), np.ones(3, "e")), {}, TypeError, "bias must have the dtype of weight"),
        (("layer_norm", np.ones(3, "f"), np.ones(2, "f")), {}, ValueError, "bias must have the shape of weight"),
        (("layer_norm", np.float32(1) * np.ones(())), {}, (TypeError, ValueError), "weight"),
        (("layer_norm", np.ones(0, "f")), {}, ValueError, "weight must have at least one element"),
        (("rms_norm", np.ones(3, "f"), np.ones(3, "f")), {}, ValueError, "bias must be None for 'rms_norm'"),
        (("layer_norm", np.ones(3, "f")), {"eps": -1}, ValueError, "eps must be finite and not negative"),
        (("layer_norm", np.ones(3, "f")), {"eps": np.nan}, ValueError, "eps must be finite and not negative"),
        (("layer_norm", np.ones(3, "f")), {"eps": 1e300}, ValueError, "eps must be finite in float32"),
        (("layer_norm", np.ones(3, "f")), {"eps": 10**400}, ValueError, "eps must be finite and not negative"),
        (("layer_norm", np.ones(3, "f")), {"eps": 0}, ValueError, "eps must be positive in float32"),
        (("rms_norm", np.ones(3, "e")), {"eps": 1e-46}, ValueError, "eps must be positive in float32"),
        (("layer_norm", np.ones(3, "f")), {"eps": "1"}, TypeError, "eps must be a real number"),
        (("layer_norm", np.ones(3, "f")), {"opset": 12}, ValueError, "opset must be from 13"),
    ],
)
def test_wrong_arguments_leave_no_file(tmp_path, arguments, options, error, says):
    with pytest.raises(error, match=says):
        export_norm(*arguments, path=tmp_path / "norm.onnx", **options)
    assert os.listdir(tmp_path) == []
