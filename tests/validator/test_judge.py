"""The error bound: correct kernels stay within it, broken ones exceed it. The first test calibrates it."""

import gallery
import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from onnx_export import ort, validate
from onnx_export.graph.scope import unit_roundoff
from onnx_export.validation import stress
from onnx_export.validation.examine import examine
from onnx_export.validation.judge import FACTOR, Measure, Oracle, allowed_change, worst
from onnx_export.validation.options import Options
from onnx_export.validation.patterns import find

LENGTHS = (1, 2, 3, 7, 8, 16, 31, 64, 257, 1024, 4096)
MEANS = (0.0, 1.0, 10.0, 1e2, 1e3, 1e4)
DTYPES = {"float32": (np.float32, gallery.FLOAT), "float64": (np.float64, gallery.DOUBLE)}


def norm_of(n, dtype, onnx_type, decomposed):
    if decomposed:
        nodes, constants = gallery.decomposed(square="Mul", dtype=dtype, width=n)
    else:
        nodes, constants = [gallery.native()], gallery.weights(n, dtype)
    model = onnx.shape_inference.infer_shapes(gallery.model(nodes, (32, n), constants, dtype=onnx_type))
    return model, Oracle(find(model)[0], model)


def rows(n, mean, dtype):
    return {"x": (mean + np.random.default_rng(n).normal(size=(32, n))).astype(dtype)}


def used(oracle: Oracle, feeds, y) -> float:
    """The error as a multiple of u (sqrt(n) + conditioning) max|scale|; FACTOR must exceed it."""
    facts = oracle.rows(feeds)
    unit = unit_roundoff(oracle.norm.compute_dtype)
    half_ulp = 0.5 * np.abs(np.spacing(facts.claim.astype(y.dtype))).astype(float)
    excess = np.maximum(np.abs(y.astype(float) - facts.claim) - half_ulp, 0)
    return float(np.max(excess / (facts.rounding(unit) / FACTOR)))


# onnxruntime sums float64 rows sequentially, so at long rows and large means it exceeds the bound.
CLEAN = {
    ("float32", "kernel"): (max(LENGTHS), max(MEANS), 2.5),
    ("float32", "decomposed"): (max(LENGTHS), max(MEANS), 5.5),
    ("float64", "kernel"): (max(LENGTHS), 1.0, 2.5),
    ("float64", "decomposed"): (64, max(MEANS), 5.5),
}


@pytest.mark.parametrize("case", CLEAN, ids="-".join)
def test_clean_kernels_stay_below_the_calibrated_factor(case):
    """The operator and a centred decomposition, unoptimised: at most 1.84 and 4.50 of 8 in float32."""
    longest, largest, most = CLEAN[case]
    name, form = case
    for n in (n for n in LENGTHS if n <= longest):
        model, oracle = norm_of(n, *DTYPES[name], form == "decomposed")
        session = ort.Session(model, "off")
        for mean in (mean for mean in MEANS if mean <= largest):
            feeds = rows(n, mean, DTYPES[name][0])
            (y,) = session.run(["y"], feeds)
            assert oracle.runtime_error(feeds, y).ratio <= 1, (n, mean)
            assert used(oracle, feeds, y) <= most, (n, mean)


def test_a_fused_residual_norm_is_noted_if_its_kernel_sums_poorly(tmp_path):
    """onnxruntime 1.31.1 sums a row of SkipLayerNormalization sequentially: 2.0 times the bound at n = 1024."""
    n, mean = 1024, 100.0
    nodes = [gallery.node("Add", "x skip", "sum"), gallery.native("sum")]
    inputs = [gallery.value(name, (2, 32, n)) for name in ("x", "skip")]
    model = gallery.model(nodes, constants=gallery.weights(n), inputs=inputs, outputs=[gallery.value("y", (2, 32, n))])
    onnx.save(model, tmp_path / "model.onnx")
    _, oracle = norm_of(n, np.float32, gallery.FLOAT, False)
    x = rows(n, mean, np.float32)["x"]
    both = np.stack([x, x[::-1]])
    (y,) = ort.Session(model, "all").run(["y"], {"x": both, "skip": np.zeros_like(both)})
    poor = oracle.runtime_error({"x": x}, y[0]).ratio > 1
    report = validate(tmp_path / "model.onnx")
    (norm,) = report.norms
    assert norm.became.startswith("SkipLayerNormalization")
    notes = [f.message for f in report.findings if f.code == "optimiser-precision"]
    assert (norm.verdict, norm.risks) == ("ok", [])
    assert bool(notes) == poor
    assert all('disabled_optimizers=["SkipLayerNormFusion"]' in note for note in notes)
    assert report.exit_code(strict=True) == 0


def skip_norm(n):
    """SkipLayerNormalization of x and zeros, with its oracle."""
    node = gallery.node("SkipLayerNormalization", "x zeros scale bias", "y", domain="com.microsoft", epsilon=1e-5)
    constants = gallery.weights(n) | {"zeros": np.zeros((1, 32, n), np.float32)}
    model = onnx.shape_inference.infer_shapes(gallery.model([node], (1, 32, n), constants))
    return model, Oracle(find(model)[0], model)


@pytest.mark.parametrize("n", [n for n in LENGTHS if n > 1])
def test_a_kernel_that_sums_sequentially_stays_within_its_derived_bound(n):
    """onnxruntime 1.32.0: at most 0.19 of B + R, where a one-pass variance exceeds it."""
    model, oracle = skip_norm(n)
    session = ort.Session(model, "off")
    for mean in MEANS:
        feeds = {"x": rows(n, mean, np.float32)["x"][None]}
        (y,) = session.run(["y"], feeds)
        facts = oracle.rows(feeds)
        assert oracle.claim_error(facts, y, oracle.sequential(facts)).ratio <= 0.5, mean
    weights = gallery.weights(n)
    y = plain(feeds["x"], weights["scale"], weights["bias"], one_pass=True)
    assert oracle.claim_error(facts, y, oracle.sequential(facts)).ratio > 1


def plain(x, scale, bias, eps=1e-5, *, ddof=0, one_pass=False, dtype=np.float32):
    x = x.astype(dtype)
    mean = x.mean(-1, keepdims=True, dtype=dtype)
    d = x - mean
    var = (d * d).sum(-1, keepdims=True, dtype=dtype) / dtype(x.shape[-1] - ddof)
    if one_pass:
        var = (x * x).mean(-1, keepdims=True, dtype=dtype) - mean * mean
    with np.errstate(all="ignore"):
        return (d / np.sqrt(var + dtype(eps)) * scale + bias).astype(np.float32)


BROKEN = {
    "eps ten times too large": (lambda x, s, b: plain(x, s, b, eps=1e-4), 0.0),
    "no eps": (lambda x, s, b: plain(1e-3 * x, s, b, eps=0) + 0 * x, 0.0),
    "unbiased": (lambda x, s, b: plain(x, s, b, ddof=1), 0.0),
    "one-pass at mean 100": (lambda x, s, b: plain(x, s, b, one_pass=True), 100.0),
    "float16 inside": (lambda x, s, b: plain(x, s, b, dtype=np.float16), 0.0),
    "scale forgotten": (lambda x, s, b: plain(x, 1, b), 0.0),
    "bias forgotten": (lambda x, s, b: plain(x, s, 0), 0.0),
    "one element wrong": (
        lambda x, s, b: plain(x, s, b) + 1e-3 * (np.arange(x.size) == 5).reshape(x.shape),
        0.0,
    ),
    "rows mixed up": (lambda x, s, b: plain(x, s, b)[::-1], 0.0),
    "one NaN": (
        lambda x, s, b: np.where(np.arange(x.size).reshape(x.shape) == 9, np.nan, plain(x, s, b)),
        0.0,
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_kernels_exceed_the_bound(name):
    kernel, mean = BROKEN[name]
    _, oracle = norm_of(64, np.float32, gallery.FLOAT, False)
    feeds = rows(64, mean, np.float32)
    weights = gallery.weights(64)
    assert oracle.runtime_error(feeds, plain(feeds["x"], *weights.values())).ratio <= 1
    y = np.asarray(kernel(feeds["x"], *weights.values()), np.float32)
    assert oracle.runtime_error(feeds, y).ratio > 1


def test_bound_allows_one_unrounded_half_input_and_no_more():
    """A float32 kernel may use the preceding node's result before it is rounded to the float16 x."""
    _, oracle = norm_of(64, np.float16, gallery.HALF, False)
    affine = [value.astype(np.float16) for value in gallery.weights(64).values()]
    for mean in (0.0, 3.0, 100.0):
        x = mean + np.random.default_rng(3).normal(size=(32, 64))
        feeds = {"x": x.astype(np.float16)}
        y = plain(x, *affine, dtype=np.float64).astype(np.float16)
        assert oracle.runtime_error(feeds, y).ratio > 1
        assert oracle.runtime_error(feeds, y, oracle.carried(feeds)).ratio <= 1
        if mean <= 3:
            for broken in (plain(x, 1, affine[1]), plain(x, affine[0], 0), y[::-1]):
                assert oracle.runtime_error(feeds, broken.astype(np.float16), oracle.carried(feeds)).ratio > 1
    _, single = norm_of(64, np.float32, gallery.FLOAT, False)
    assert single.carried(rows(64, 3.0, np.float32)) == 0


def test_bound_of_an_unrounded_half_input():
    """u conditioning (2 max|scale| + |xhat scale|) with float16's u, computed independently."""
    _, oracle = norm_of(64, np.float16, gallery.HALF, False)
    feeds = rows(64, 30.0, np.float16)
    x, scale = feeds["x"].astype(float), gallery.weights(64)["scale"].astype(np.float16).astype(float)
    std = np.sqrt(x.var(-1, keepdims=True) + float(np.float32(1e-5)))
    scaled = (x - x.mean(-1, keepdims=True)) / std * scale
    conditioning = np.abs(x).max(-1, keepdims=True) / std
    expected = 2.0**-11 * conditioning * (2 * np.abs(scale).max() + np.abs(scaled))
    np.testing.assert_allclose(oracle.carried(feeds), expected, rtol=1e-9)


def test_largest_change_of_a_result():
    one = np.array([1.0, 2.0, np.nan, np.inf, 3.0], np.float16)
    assert allowed_change(one, np.array([1.5, 2.0, 7.0, 7.0, 2.75], np.float16)) == 4 * 0.5
    assert allowed_change(one, one) == 0
    assert allowed_change(one, one[1:]) == 0


ROUNDED = {
    gallery.native_float16: [],  # the operator's own: the result alone is rounded
    gallery.pytorch_mul: [],  # the type of its statistics throughout
    gallery.keras_batch_normalization_form: [gallery.FLOAT],  # bias - mean * f
    gallery.mixed_precision: [gallery.HALF, gallery.HALF],  # xhat, and xhat * scale
    gallery.mixed_precision_float64: [gallery.FLOAT, gallery.FLOAT],
}


@pytest.mark.parametrize("build", ROUNDED, ids=lambda build: build.__name__)
def test_the_bound_counts_each_intermediate_rounding(build):
    """B with its terms written out: u of the statistics, half an ulp, and u (|xhat scale| + |y|) a rounding."""
    model = onnx.shape_inference.infer_shapes(build().model)
    oracle = Oracle(find(model)[0], model)
    (x,) = model.graph.input
    dtype = onnx.helper.tensor_dtype_to_np_dtype(x.type.tensor_type.elem_type)
    feeds = rows(x.type.tensor_type.shape.dim[1].dim_value, 1.0, dtype)
    facts, own = oracle.rows(feeds), oracle.graph_result(feeds)
    bound = 8 * unit_roundoff(oracle.norm.compute_dtype) * (np.sqrt(facts.n) + facts.conditioning) * facts.scale
    bound = bound + 0.5 * np.spacing(np.abs(own).astype(dtype)).astype(float)
    assert oracle._roundings() == ROUNDED[build]
    for rounded in ROUNDED[build]:
        bound = bound + unit_roundoff(rounded) * (np.abs(facts.scaled) + np.abs(facts.claim))
        bound = bound + (2.0**-24 if rounded == gallery.HALF else 0)
    measure = oracle.runtime_error(feeds, np.zeros_like(own, dtype))
    assert measure.ratio == pytest.approx(np.max(np.abs(own) / bound), rel=1e-9)


def without_bias(norm):
    return [gallery.native(norm.input[0], norm.output[0], norm.input[1], "")]


def over_the_other_axis(norm):
    flips = [gallery.node("Transpose", norm.input[0], "flipped", perm=[1, 0])]
    flips += [gallery.node("Transpose", "wrong", norm.output[0], perm=[1, 0])]
    return [flips[0], gallery.native("flipped", "wrong", *norm.input[1:]), flips[1]]


@pytest.mark.parametrize("mistake", [without_bias, over_the_other_axis])
def test_optimiser_error_of_a_half_norm_within_its_model_is_reported(mistake, tmp_path, monkeypatch):
    """The error does not occur with the norm isolated; the allowances for drift and rounding must not cover it."""

    class Session(ort.Session):
        def __init__(self, model, level, weights=None, dump=None):
            made = [node.output[0] for node in model.graph.node]
            if level != "off" and dump is None and {"y0", "y1", "y2"} <= set(made):  # the whole model, not a cut
                whole, model = model, onnx.ModelProto()
                model.CopyFrom(whole)
                at = made.index("y1")
                nodes = [*whole.graph.node[:at], *mistake(whole.graph.node[at]), *whole.graph.node[at + 1 :]]
                del model.graph.node[:]
                model.graph.node.extend(nodes)
            super().__init__(model, level, weights, dump)

    monkeypatch.setattr(ort, "Session", Session)
    onnx.save(gallery.half_chain(gallery.native_float16_norm, 3.0), tmp_path / "model.onnx")
    report = examine(str(tmp_path / "model.onnx"), Options(), lambda kind, value: None)
    assert [(n.verdict, n.blame) for n in report.norms] == [("ok", ""), ("wrong", "optimiser"), ("ok", "")]


def test_statistics_are_as_precise_as_their_narrowest_type():
    """A variance in float64 does not make a mean and deviations in float16 more precise."""
    model = onnx.shape_inference.infer_shapes(gallery.float16_mean_float64_variance().model)
    oracle = Oracle(find(model)[0], model)
    feeds = {"x": rows(64, 3.0, np.float16)["x"].repeat(2, axis=0)}
    (y,) = ReferenceEvaluator(model).run(["y"], feeds)
    assert oracle.runtime_error(feeds, y).ratio <= 1


def test_a_wrong_shape_counts_as_an_infinite_error():
    _, oracle = norm_of(8, np.float32, gallery.FLOAT, False)
    assert oracle.runtime_error(rows(8, 0, np.float32), np.zeros((32, 9), np.float32)).ratio == np.inf


def test_rows_with_nan_or_inf_inputs_are_not_judged():
    model, oracle = norm_of(8, np.float32, gallery.FLOAT, False)
    feeds = rows(8, 0, np.float32)
    feeds["x"][3, 2] = np.nan
    feeds["x"][4, 1] = np.inf
    (y,) = ort.Session(model, "off").run(["y"], feeds)
    assert oracle.runtime_error(feeds, y).ratio <= 1
    y[5, 0] = np.nan
    assert oracle.runtime_error(feeds, y).ratio == np.inf


def test_worst_merges_measures():
    assert worst([]).ratio == 0
    both = worst([Measure(1, 1, 0.5, [(1, 2)], 3), Measure(2, 1, 2.0, [(3, 4)], 4)])
    assert both == Measure(2, 1, 2.0, [(1, 2), (3, 4)], 7)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_stress_families_are_finite_in_their_dtype(dtype):
    families = set()
    for case in stress.hard_rows(4, 16, np.dtype(dtype), 1e-5, seed=0):
        families.add(case.family)
        assert case.rows.shape == (4, 16)
        assert case.rows.dtype == dtype
        assert case.family.startswith("NaN") or np.isfinite(case.rows).all()
    assert {"large mean", "constant rows", "near-constant rows", "tiny values", "one-hot outlier"} < families
    assert ("float16 edge" in families) == (dtype == np.float16)
    assert ("huge values" in families) == (dtype != np.float16)


def test_rows_within_a_factor_of_ten_of_failing_ones_count_as_reached():
    for hard_by in (stress.CONDITIONING, stress.MAGNITUDE):
        assert stress.reached(hard_by, {hard_by: 100.0}, {hard_by: 11.0})
        assert not stress.reached(hard_by, {hard_by: 100.0}, {hard_by: 9.0})
    assert stress.reached(stress.SMALLEST_STD, {stress.SMALLEST_STD: 1e-3}, {stress.SMALLEST_STD: 9e-3})
    assert not stress.reached(stress.SMALLEST_STD, {stress.SMALLEST_STD: 1e-3}, {stress.SMALLEST_STD: 11e-3})
