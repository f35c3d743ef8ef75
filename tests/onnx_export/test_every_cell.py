"""Every preset in every form at five opsets: checked, run by onnxruntime, judged per step by the oracle.

The 64 steps of a trajectory are 64 rows of one batch here: each starts from the float64 trajectory's state rounded to
float32, so they do not depend on one another.
"""

import functools
import itertools

import cells
import numpy as np
import onnxruntime
import pytest

import cnorm
import onnx_export
from onnx_export.options import newest_opset
from onnx_export.parity_measure import bound

OPSETS = [13, 17, 18, 21, newest_opset()]
LEVELS = ["ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_ALL"]
STEPS, INPUTS, UNITS = 64, 5, 12
NATIVE = {
    ("LSTM", "torch"), ("LSTM", "keras"), ("LSTM", "onnx"), ("GRU", "torch"), ("GRU", "keras"),
    ("GRU", "keras_reset_before"), ("GRU", "onnx"), ("GRU", "onnx_linear_before_reset"),
    ("RNN", "torch"), ("RNN", "torch_relu"), ("RNN", "keras"), ("RNN", "onnx"),
}  # fmt: skip
PROJECTED = [key for key, spec in cnorm.PRESETS.items() if any("weight_p" in m for _, _, m in spec.weights)]
CASES = [(key, None) for key in cnorm.PRESETS] + [(key, 7) for key in PROJECTED]
every_cell = pytest.mark.parametrize(
    ("key", "outputs"), CASES, ids=lambda v: "-".join(v) if isinstance(v, tuple) else v
)


@functools.cache
def trajectory(key, outputs):
    """A model of one cell; x [64, 5], the states before each step rounded to float32, and after it in float64."""
    rng = np.random.default_rng(list(map(ord, "".join(key))))
    eps = 1e-8 if key[1] == "kann" else None  # KANN's eps is 0; in ONNX a row without variance would be NaN
    layer, advance = cells.random_cell(key, rng, INPUTS, UNITS, outputs, eps=eps)
    model = cnorm.Model([layer])
    x = rng.standard_normal((STEPS, INPUTS)).astype(np.float32)
    state = {name: array.astype(np.float64) for name, array in model.stream().state().items()}
    starts = []
    for frame in x:
        starts.append({name: array.astype(np.float32) for name, array in state.items()})
        state = advance(frame.astype(np.float64), state)
    before = {name: np.stack([start[name] for start in starts]) for name in state}
    exact = advance(x, before)
    noise = 2.0**-24 * np.sqrt(64 / 6)  # as the parity check measures how a step enlarges errors
    near = [
        advance(perturbed(x, noise, rng), {n: perturbed(a, noise, rng) for n, a in before.items()}) for _ in range(8)
    ]
    spread = {name: max(np.abs(moved[name] - exact[name]).max() for moved in near) for name in exact}
    return model, x, before, exact, {name: bound(UNITS, exact[name], sensitivity=spread[name]) for name in exact}


def perturbed(array, noise, rng):
    return array * (1 + noise * rng.standard_normal(array.shape))


def run(exported, level, x, before):
    """One step of all rows."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    session = onnxruntime.InferenceSession(exported.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    sequence = len(session.get_inputs()[0].shape) == 3
    feeds = {"x": x[None] if sequence else x} | {f"{name}_in": array for name, array in before.items()}
    result = dict(zip(names, session.run(names, feeds), strict=True))
    return {name: result[f"{name}_out"] for name in before} | {"y": result["y"][0] if sequence else result["y"]}


@pytest.mark.exhaustive(one_in=9)
@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("form", ["step", "sequence"])
@every_cell
def test_every_preset_form_and_opset(key, outputs, form, opset):
    model, x, before, exact, allowed = trajectory(key, outputs)
    variants = [{}] + ([{"native_ops": True}] if key in NATIVE and outputs is None else [])
    for variant, level in itertools.product(variants, LEVELS):
        exported = onnx_export.export(model, form=form, opset=opset, batch="batch", **variant)  # runs onnx.checker
        got = run(exported, level, x, before)
        np.testing.assert_array_equal(got["y"], got["h0"])
        for name, array in exact.items():
            off = np.abs(got[name] - array).max()
            assert off <= allowed[name], f"{name} is off by {off:.3g}, allowed {allowed[name]:.3g} ({variant}, {level})"


@pytest.mark.exhaustive(one_in=5)
@every_cell
def test_parity_of_every_preset(key, outputs):
    model = trajectory(key, outputs)[0]
    for form in ("step", "sequence"):
        report = onnx_export.check_parity(model, onnx_export.export(model, form=form), steps=8)
        assert report.ok, str(report)


@pytest.mark.exhaustive(one_in=15)
@every_cell
def test_float16_of_every_preset(key, outputs):
    model = trajectory(key, outputs)[0]
    variants = [{}] + ([{"native_ops": True}] if key in NATIVE and outputs is None else [])
    for opset, variant in itertools.product((13, 17), variants):
        exported = onnx_export.export(model, dtype="float16", opset=opset, **variant)
        report = onnx_export.check_parity(model, exported, steps=8)
        assert report.ok, str(report)


@every_cell
def test_every_preset_loads_back_to_the_same_bits(tmp_path, key, outputs):
    model, x, *_ = trajectory(key, outputs)
    variants = [{}] + ([{"native_ops": True}] if key in NATIVE and outputs is None else [])
    for variant in variants:
        onnx_export.export(model, tmp_path / "m.onnx", **variant)
        again = onnx_export.load(tmp_path / "m.onnx")
        assert again.stream().process(x).tobytes() == model.stream().process(x).tobytes()


@every_cell
def test_native_operators_are_used_or_refused(key, outputs):
    model = trajectory(key, outputs)[0]
    if key in NATIVE and outputs is None:
        exported = onnx_export.export(model, native_ops=True)
        assert [node.op_type for node in exported.graph.node].count(key[0]) == 1
    else:
        with pytest.raises(ValueError, match=r"native_ops must be False for .*: the operator"):
            onnx_export.export(model, native_ops=True)
