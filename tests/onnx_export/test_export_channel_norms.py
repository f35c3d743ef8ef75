"""Batch, group, instance, divisive and weight norm as graphs, in onnxruntime and in float64, at every opset."""

import os

import numpy as np
import onnxruntime
import pytest
import reference
import tolerances
from export_norm import export_norm

import cnorm
import onnx_export
from onnx_export.float64 import Float64
from onnx_export.options import newest_opset

OPSETS = [13, 17, 18, 21, 22, newest_opset()]


def run(model, x):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


def check(model, x, exact, ours, weight, slack=0, onnxruntime_slack=0):
    """onnxruntime within layer norm's contract of the oracle, cnorm too, the float64 evaluation far closer."""
    scale = 1 + np.abs(weight).max()
    bound = (tolerances.xhat(exact, np.float32) + slack) * scale
    tolerances.assert_within(run(model, x), exact, bound + onnxruntime_slack * scale, "onnxruntime")
    tolerances.assert_within(ours, exact, bound, "cnorm")
    np.testing.assert_allclose(Float64(model).run({"x": x})["y"], exact, rtol=0, atol=1e-6 if slack else 1e-12)


def random_case(rng, shape):
    x = (0.5 + rng.standard_normal(shape)).astype(np.float32)
    weight = (1 + 0.3 * rng.standard_normal(shape[1])).astype(np.float32)
    return x, weight, rng.standard_normal(shape[1]).astype(np.float32)


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("shape", [(5, 6), (3, 6, 7), (2, 4, 3, 5)], ids=str)
def test_batch_norm(rng, shape, opset):
    x, weight, bias = random_case(rng, shape)
    mean, var = rng.standard_normal(shape[1]).astype(np.float32), rng.uniform(0.5, 2, shape[1]).astype(np.float32)
    options = {"mean": mean, "var": var, "space": len(shape) - 2, "opset": opset, "eps": 1e-3}
    model = export_norm("batch_norm", weight, bias, **options)
    exact = reference.batch_norm_inference(x, mean, var, weight, bias, eps=1e-3)
    ours = cnorm.batch_norm_inference(x, mean, var, weight, bias, eps=1e-3)
    check(model, x, exact, ours, weight)
    assert [node.op_type for node in model.graph.node] == ["BatchNormalization"]


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("shape", [(5, 12), (3, 12, 7), (2, 12, 3, 5)], ids=str)
@pytest.mark.parametrize("groups", [1, 4, 6])
def test_group_norm(rng, shape, groups, opset):
    x, weight, bias = random_case(rng, shape)
    options = {"groups": groups, "space": len(shape) - 2, "opset": opset, "eps": 1e-3}
    model = export_norm("group_norm", weight, bias, **options)
    exact, _, _ = reference.group_norm(x, groups, weight, bias, eps=1e-3)
    cancelled = 0
    operator = opset >= 21 and len(shape) > 2
    if operator:  # its function body computes the variance as E[x^2] - mean^2: n + 3 roundings of E[x^2]
        _, mean, rstd = reference.group_norm(x, groups, eps=1e-3)
        power = ((mean**2 + rstd**-2) * rstd**2).max()
        cancelled = (x[0].size // groups + 3) * 2.0**-24 * power * np.abs(exact).max()
    ours = cnorm.group_norm(x, groups, weight, bias, eps=1e-3)
    check(model, x, exact, ours, weight, onnxruntime_slack=cancelled)
    operators = [node.op_type for node in model.graph.node]
    assert (operators == ["GroupNormalization"]) == operator


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("shape", [(3, 6, 7), (2, 4, 3, 5)], ids=str)
def test_instance_norm(rng, shape, opset):
    x, weight, bias = random_case(rng, shape)
    options = {"space": len(shape) - 2, "opset": opset, "eps": 1e-3}
    model = export_norm("instance_norm", weight, bias, **options)
    exact, _, _ = reference.group_norm(x, shape[1], weight, bias, eps=1e-3)
    check(model, x, exact, cnorm.instance_norm(x, weight, bias, eps=1e-3), weight)


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("fields", [(None, None), (2, 3), (None, 0), (100, 1)], ids=str)
def test_divisive_norm(rng, fields, opset):
    """sigma^2 is a float32 constant in the graph: one rounding more."""
    x, weight, bias = random_case(rng, (4, 20))
    options = {"sigma": 0.5, "mean_radius": fields[0], "radius": fields[1]}
    model = export_norm("divisive_norm", weight, bias, opset=opset, **options)
    exact = reference.divisive_norm(x, weight, bias, **options)
    check(model, x, exact, cnorm.divisive_norm(x, weight, bias, **options), weight, slack=2.0**-22)


def test_weight_norm_is_a_linear_layer(rng):
    w = rng.standard_normal((5, 7)).astype(np.float32)
    gain, bias = rng.standard_normal((2, 5)).astype(np.float32)
    model = cnorm.Model([cnorm.Linear(*cnorm.fold_weight_norm(w, gain, bias))])
    exported = onnx_export.export(model)
    assert onnx_export.check_parity(model, exported, steps=8).ok


def test_bias_is_optional(rng):
    x, weight, _ = random_case(rng, (4, 6))
    model = export_norm("group_norm", weight, groups=2)
    np.testing.assert_allclose(run(model, x), cnorm.group_norm(x, 2, weight), rtol=0, atol=1e-5)


@pytest.mark.exhaustive(one_in=8)
@pytest.mark.parametrize("opset", [17, 21, newest_opset()])
@pytest.mark.parametrize("space", [0, 2])
def test_the_validator_finds_group_norms_sound(tmp_path, space, opset):
    export_norm("group_norm", ONES, path=tmp_path / "g.onnx", groups=2, space=space, opset=opset)
    report = onnx_export.validate(tmp_path / "g.onnx", batch=3)
    assert report.ok, str(report)
    assert not [finding for finding in report.findings if finding.level == "error"]
    assert [norm.formula for norm in report.norms] == [("group" if space and opset >= 21 else "instance")]


def test_batch_norm_without_eps_where_every_channel_varies(rng):
    x, weight, _ = random_case(rng, (5, 6))
    var = np.linspace(0.5, 2, 6, dtype=np.float32)
    model = export_norm("batch_norm", weight, mean=0 * var, var=var, eps=0)
    exact = reference.batch_norm_inference(x, 0 * var, var, weight, eps=0)
    check(model, x, exact, cnorm.batch_norm_inference(x, 0 * var, var, weight, eps=0), weight)


ONES = np.ones(6, np.float32)
FALLING = np.arange(3, -3, -1, dtype=np.float32)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "says"),
    [
        (("weight_norm", ONES), {}, ValueError, "kind must be one of 'layer_norm'"),
        (("batch_norm", ONES), {}, TypeError, "mean must be an array of float32, got NoneType"),
        (("group_norm", ONES), {}, ValueError, "groups must be given"),
        (("group_norm", ONES), {"groups": 4}, ValueError, "groups must divide the number of channels, 6, got 4"),
        (("instance_norm", ONES), {"space": 1, "groups": 2}, ValueError, "groups must be given for 'group_norm'"),
        (("instance_norm", ONES), {}, ValueError, "space must be at least 1"),
        (("instance_norm", ONES), {"space": 1, "mean": ONES}, ValueError, "mean and var must be None"),
        (("divisive_norm", ONES), {"sigma": 0}, ValueError, "sigma must be positive"),
        (("divisive_norm", ONES), {"sigma": 1e-30}, ValueError, "sigma must be positive, and its square a float32"),
        (("divisive_norm", ONES), {"sigma": 1e30}, ValueError, "sigma must be positive, and its square a float32"),
        (("group_norm", ONES), {"groups": 2, "eps": 0}, ValueError, "eps must be positive in float32"),
        (("instance_norm", ONES), {"space": 1, "eps": 1e-46}, ValueError, "eps must be positive in float32"),
        (("batch_norm", ONES), {"mean": ONES, "var": 0 * ONES, "eps": 0}, ValueError, "eps must be positive"),
        (("batch_norm", ONES), {"mean": ONES, "var": FALLING}, ValueError, r"negative, got -1\.0 in channel 4"),
        (("divisive_norm", ONES), {"radius": -1}, ValueError, "radius must be at least 0"),
        (("divisive_norm", ONES), {"radius": 1.0}, TypeError, "radius must be an integer"),
        (("divisive_norm", ONES), {"space": 1}, ValueError, "space must be 0"),
        (("divisive_norm", ONES.astype("d")), {}, TypeError, "weight must be an array of float32, got float64"),
        (("divisive_norm", ONES, ONES[:2]), {}, ValueError, "bias must have one axis"),
        (("divisive_norm", ONES), {"eps": np.nan}, ValueError, "eps must be finite"),
        (("divisive_norm", ONES), {"sigma": 1e300}, ValueError, "sigma must be finite"),
        (("divisive_norm", ONES), {"opset": 12}, ValueError, "opset must be from 13"),
    ],
)
def test_wrong_arguments_leave_no_file(tmp_path, arguments, options, error, says):
    with pytest.raises(error, match=says):
        export_norm(*arguments, path=tmp_path / "norm.onnx", **options)
    assert os.listdir(tmp_path) == []
