"""Norms between and inside quantisers, and operators that nobody knows: neither is passed over in silence."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnxruntime import quantization
from onnxruntime.quantization.shape_inference import quant_pre_process  # noqa: F401  (imports what quantize_static needs)
from writings import LEVELS, Writing, saved

from onnx_export.validation.examine import examine
from onnx_export.validation.options import Options

D = 32
SHAPE = (2, 5, D)


def examined(model, folder, **options):
    onnx.save(model, folder / "model.onnx")
    return examine(str(folder / "model.onnx"), Options(**options), lambda *_: None)


def shown(report):
    findings = [f"{f.level} {f.code}: {f.message}" for f in report.findings]
    return report.problem, findings, [(n.near_miss, n.verdict, n.detail) for n in report.norms]


def pair(w, value, scale, zero=128, dtype=np.uint8):
    parameters = w.constant(np.float32(scale)), w.constant(dtype(zero))
    return w.op("DequantizeLinear", w.op("QuantizeLinear", value, *parameters), *parameters)


PLACES = ("x", "centred", "squares", "variance", "eps", "total", "root", "quotient", "scaled", "result")
EVERYWHERE = frozenset(PLACES)


def written(places, dtype=np.uint8, opset=17, square="Mul", eps_step=1e-5 / 255):
    """A layer norm with a pair of quantisers around each of these values."""
    zero, low = (128, 0) if dtype == np.uint8 else (0, 0)
    steps = {"x": 0.03, "centred": 0.03, "squares": 0.1, "variance": 0.01, "eps": eps_step, "total": 0.01}
    steps |= {"root": 0.01, "quotient": 0.025, "scaled": 0.03, "result": 0.03}
    w = Writing(opset=opset)

    def at(place, value):
        if place not in places:
            return value
        positive = place in ("squares", "variance", "eps", "total", "root")
        return pair(w, value, steps[place], low if positive else zero, dtype)

    x = at("x", w.input("x", SHAPE))
    d = at("centred", w.centred(x))
    q = at("squares", w.op("Mul", d, d) if square == "Mul" else w.op("Pow", d, 2.0))
    total = at("total", w.op("Add", at("variance", w.mean(q)), at("eps", w.constant(1e-5))))
    xhat = at("quotient", w.op("Div", d, at("root", w.op("Sqrt", total))))
    y = at("result", w.op("Add", at("scaled", w.op("Mul", xhat, w.gain(D))), w.gain(D, 2)))
    return w.model(y)


@pytest.mark.exhaustive(one_in=4)
@pytest.mark.parametrize("level", ["none", *LEVELS])
@pytest.mark.parametrize("square", ["Mul", "Pow"])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize(
    "places",
    [EVERYWHERE, {"variance"}, {"total"}, {"root"}, {"squares"}, {"centred"}, EVERYWHERE - {"x", "result"}],
    ids=lambda places: "all" if len(places) == 10 else "-".join(sorted(places)),
)
def test_a_norm_with_quantisers_inside_is_found_and_says_so(places, dtype, square, level, tmp_path):
    report = examined(saved(written(places, dtype, square=square), level, tmp_path), tmp_path)
    assert [norm.formula for norm in report.norms] == ["layer"], shown(report)
    assert "quantised" in report.norms[0].near_miss, shown(report)
    assert report.exit_code() in (0, 2), shown(report)


@pytest.mark.exhaustive(one_in=4)
@pytest.mark.parametrize("places", [{"x"}, {"result"}, {"x", "result"}, {"scaled"}, {"eps"}])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("level", ["none", *LEVELS])
def test_a_float_norm_between_quantisers_is_judged(places, dtype, level, tmp_path):
    """onnxruntime dequantises the input for each of its uses."""
    report = examined(saved(written(places, dtype), level, tmp_path), tmp_path)
    (norm,) = report.norms
    assert (norm.formula, norm.near_miss) == ("layer", "")
    assert norm.verdict in ("ok", "risky"), shown(report)
    assert report.exit_code() == 0, shown(report)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("opset", [14, 17])
def test_an_eps_that_quantisation_makes_zero_is_reported(opset, dtype, tmp_path):
    report = examined(written(EVERYWHERE, dtype, opset, eps_step=0.01), tmp_path)
    assert "eps-zero" in {f.code for f in report.findings}, shown(report)


class Rows(quantization.CalibrationDataReader):
    """Three batches of N(0, 1) for the input x."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.left = [{"x": rng.normal(size=SHAPE).astype(np.float32)} for _ in range(3)]

    def get_next(self):
        return self.left.pop() if self.left else None


@pytest.mark.parametrize("form", list(quantization.QuantFormat), ids=str)
@pytest.mark.parametrize("kinds", ["QUInt8", "QInt8", "QInt16"])
@pytest.mark.parametrize("square", ["Mul", "Pow"])
def test_a_statically_quantised_norm_is_found(square, kinds, form, tmp_path):
    if kinds == "QInt16" and form == quantization.QuantFormat.QOperator:
        pytest.skip("onnxruntime has no such operators of 16 bits")
    w = Writing(opset=21 if kinds == "QInt16" else 14)
    d = w.centred(w.op("MatMul", w.input("x", SHAPE), w.gain((D, D))))
    q = w.op("Mul", d, d) if square == "Mul" else w.op("Pow", d, 2.0)
    std = w.op("Sqrt", w.op("Add", w.mean(q), 1e-5))
    y = w.op("Add", w.op("Mul", w.op("Div", d, std), w.gain(D)), w.gain(D, 2))
    onnx.save(w.model(w.op("MatMul", y, w.gain((D, D), 3))), tmp_path / "float.onnx")
    kind = quantization.QuantType[kinds]
    quantization.quantize_static(
        tmp_path / "float.onnx",
        tmp_path / "quantised.onnx",
        Rows(),
        quant_format=form,
        activation_type=kind,
        weight_type=quantization.QuantType.QInt8,
    )
    report = examined(onnx.load(tmp_path / "quantised.onnx"), tmp_path)
    assert [norm.formula for norm in report.norms] == ["layer"], shown(report)
    assert "quantised" in report.norms[0].near_miss
    assert report.exit_code() in (0, 2), shown(report)


# ------------------------------------------------------------------------------------------- unknown operators

UNKNOWN = {
    "iLayerNorm": ("", {}),
    "LayerNorm": ("", {}),
    "RMSNorm": ("", {}),
    "NoSuchOperator": ("", {}),
    "LayerNormalisation": ("", {}),
    "GroupNorm": ("com.microsoft", {"groups": 4, "activation": 0, "channels_last": 1}),
    "SkipGroupNorm": ("com.microsoft", {"groups": 4, "activation": 0, "channels_last": 1}),
    "NoSuchNorm": ("com.microsoft", {}),
}


@pytest.mark.exhaustive(one_in=8)
@pytest.mark.parametrize("besides", [False, True], ids=["alone", "beside a norm"])
@pytest.mark.parametrize("opset", [13, 17, 21])
@pytest.mark.parametrize("name", UNKNOWN)
def test_an_operator_that_no_runtime_here_knows_never_exits_0(name, opset, besides, tmp_path):
    domain, attributes = UNKNOWN[name]
    w = Writing(opset=opset)
    x = w.input("x", (2, 4, 4, D))
    ones, zeros = np.ones(D, np.float32), np.zeros(D, np.float32)
    ys = [w.op(name, x, ones, zeros, domain=domain, **attributes)] + [w.layer_norm(x)] * besides
    report = examined(w.model(*ys), tmp_path)
    assert report.exit_code() == 2, shown(report)
    assert name in report.problem, shown(report)


@pytest.mark.parametrize("opset", [11, 13])
@pytest.mark.parametrize("name", ["Mish", "Gelu", "GroupNormalization"])
def test_an_operator_that_the_opset_does_not_have_never_exits_0(name, opset, tmp_path):
    w = Writing(opset=opset)
    inputs = [np.ones(4, np.float32)] * 2 if name == "GroupNormalization" else []
    report = examined(w.model(w.op(name, w.input("x", (2, 4, D)), *inputs)), tmp_path)
    assert report.exit_code() == 2, shown(report)


@pytest.mark.parametrize("opset", [11, 13, 15])
def test_layer_normalization_below_opset_17_is_a_warning(opset, tmp_path):
    w = Writing(opset=opset)
    report = examined(w.model(w.op("LayerNormalization", w.input("x", SHAPE), w.gain(D))), tmp_path)
    (finding,) = [f for f in report.findings if f.code == "operator-opset"]
    assert (finding.level, "17" in finding.message) == ("warning", True)
    assert report.exit_code() == 0, shown(report)


@pytest.mark.parametrize("name", ["LayerNormalization", "SimplifiedLayerNormalization"])
def test_an_omitted_result_is_reported(name, tmp_path):
    w = Writing(opset=17)
    w.nodes.append(onnx.helper.make_node(name, [w.input("x", SHAPE), w.constant(w.gain(D))], ["", "mean"]))
    report = examined(w.model("mean"), tmp_path)
    assert report.exit_code() != 0, shown(report)
    assert any(f.code == "no-result" for f in report.findings), shown(report)


@pytest.mark.parametrize("level", ["extended", "all"])
def test_a_file_of_the_runtimes_own_layout_is_run(level, tmp_path):
    """Convolutions in the layout of this processor, of the domain com.microsoft.nchwc."""
    w = Writing(opset=17)
    c = w.input("x", (1, 16, 8, 8))
    for channels in (16, 32):
        c = w.op("Relu", w.op("Conv", c, w.gain((32, channels, 3, 3)), pads=[1, 1, 1, 1]))
    y = w.op("LayerNormalization", w.op("Transpose", c, perm=[0, 2, 3, 1]), w.gain(32))
    report = examined(saved(w.model(y), level, tmp_path), tmp_path)
    assert (len(report.norms), report.exit_code()) == (1, 0), shown(report)


@pytest.mark.parametrize("name", ["SkipLayerNormalization", "SkipSimplifiedLayerNormalization"])
def test_a_contrib_norm_without_an_import_of_its_domain_is_judged(name, tmp_path):
    w = Writing(opset=18)
    x = w.input("x", SHAPE)
    model = w.model(w.op(name, x, x, w.gain(D), domain="com.microsoft", epsilon=1e-5))
    del model.opset_import[1]
    report = examined(model, tmp_path)
    assert (len(report.norms), report.exit_code()) == (1, 0), (shown(report), onnxruntime.__version__)
