"""52 faults planted in a transformer's third norm: what the file shows by itself, and what only a reference shows."""

import gallery
import numpy as np
import onnx
import pytest

from onnx_export.nodes import sort_nodes
from onnx_export.validation.examine import examine
from onnx_export.validation.lock import compare, facts
from onnx_export.validation.options import Options

N, TARGET, NORMS = 24, 2, 5
FLOAT16 = onnx.TensorProto.FLOAT16

# A norm of s [2, 6, N] as lines "operator inputs attributes" by result; numbers are constants.
DECOMPOSED = {
    "m": "ReduceMean s axes=-1",
    "d": "Sub s m",
    "two": 2.0,
    "q": "Pow d two",
    "v": "ReduceMean q axes=-1",
    "eps": 1e-5,
    "t": "Add v eps",
    "r": "Sqrt t",
    "h": "Div d r",
    "z": "Mul h scale",
    "y": "Add z bias",
}
OPERATOR = {"y": "LayerNormalization s scale bias epsilon=1e-12"}


def decomposed(**changes):
    """The operator's norm in nodes of its own, with changes."""
    return DECOMPOSED | {"eps": 1e-12} | changes


def no_norm(last):
    return dict.fromkeys(DECOMPOSED) | {"y": last}


def values(name, place=TARGET):
    mean, spread = {"scale": (1, 0.2), "bias": (0, 1)}[name]
    return np.random.default_rng([place, name == "bias"]).normal(mean, spread, N).astype(np.float32)


def with_nan():
    scale = values("scale")
    scale[3] = np.nan
    return scale


def in_int8():
    scale = values("scale")
    step = np.abs(scale).max() / 127
    return {"codes": np.round(scale / step).astype(np.int8), "step": step, "scale": "DequantizeLinear codes step"}


TOTAL = {"minus_one": np.array([-1]), "total": "ReduceSum q minus_one", "v": "Div total count"}
NARROW = {"d16": "Cast d to=10", "q": "Mul d16 d16", "v16": "ReduceMean q axes=-1", "v": "Cast v16 to=1"}
OTHER = {"m2": "ReduceMean w axes=-1", "d2": "Sub w m2", "q": "Pow d2 two"}

# What the file shows by itself, at least: "error" (exit 1), "warning", "note"; else why it cannot show anything.
VALUES = "any values are possible"
DECOMPOSED_FAULTS = {
    "eps dropped": ({"t": None, "r": "Sqrt v"}, "error"),
    "eps negative": ({"eps": -1e-5}, "error"),
    "exponent 3": ({"two": 3.0}, "error"),
    "exponent 1.99": ({"two": 1.99}, "error"),
    "one-pass": ({"q": "Mul s s", "e": "ReduceMean q axes=-1", "mm": "Mul m m", "v": "Sub e mm"}, "risky"),
    "sum over padded n": (TOTAL | {"count": 32.0}, "error"),
    "NaN in the scale": ({"scale": with_nan}, "error"),
    "unbiased": (TOTAL | {"count": N - 1.0}, "warning"),
    "variance over another axis": ({"v": "ReduceMean q axes=1"}, "error"),
    "x over std": ({"h": "Div s r"}, "warning"),
    "eps outside": ({"r0": "Sqrt v", "r": "Add r0 eps", "t": None}, "warning"),
    "clamp": ({"floor": 1e-3, "t": "Max v floor"}, "warning"),
    "root dropped": ({"h": "Div d t", "r": None}, "error"),
    "eps 1e-2": ({"eps": 1e-2}, "note"),
    "variance not centred": ({"q": "Pow s two"}, "warning"),
    "float16 statistics": (NARROW, "warning"),
    "mean absolute deviation": ({"q": "Abs d", "h": "Div d t", "r": None}, "warning"),
    "product for quotient": ({"h": "Mul d r"}, "error"),
    "variance of another tensor": (OTHER, "warning"),
    "eps times ten": ({"eps": 1e-4}, "note"),
    "eps 1e-12": ({"eps": 1e-12}, "note"),
    "both axes wrong": ({"m": "ReduceMean s axes=1", "v": "ReduceMean q axes=1"}, "note"),
    "scale dropped": ({"z": None, "y": "Add h bias"}, "note"),
    "bias dropped": ({"z": None, "y": "Mul h scale"}, "note"),
    "bias before scale": ({"z": "Add h bias", "y": "Mul z scale"}, "note"),
    "another norm's scale": ({"scale": lambda: values("scale", 0)}, "note"),
    "scale plus one": ({"scale": lambda: values("scale") + 1}, VALUES),
    "bias negated": ({"bias": lambda: -values("bias")}, VALUES),
    "scale in int8": (in_int8, VALUES),
    "norm removed": (no_norm("Identity s"), "a model may have any number of norms"),
}
OPERATOR_FAULTS = {
    "eps 0": ({"y": "LayerNormalization s scale bias epsilon=0.0"}, "error"),
    "axis 1": ({"y": "LayerNormalization s scale bias epsilon=1e-12 axis=1"}, "note"),
    "axis 5": ({"y": "LayerNormalization s scale bias epsilon=1e-12 axis=5"}, "error"),
    "scale too short": ({"scale": lambda: values("scale")[1:]}, "error"),
    "NaN in the scale": ({"scale": with_nan}, "error"),
    "statistics in float16": ({"y": "LayerNormalization s scale bias epsilon=1e-12 stash_type=10"}, "warning"),
    "statistics in bfloat16": ({"y": "LayerNormalization s scale bias epsilon=1e-12 stash_type=16"}, "warning"),
    "unbiased": (decomposed(**TOTAL, count=N - 1.0), "warning"),
    "eps outside": (decomposed(r0="Sqrt v", r="Add r0 eps", t=None), "warning"),
    "eps 0.1": ({"y": "LayerNormalization s scale bias epsilon=0.1"}, "note"),
    "x over std": (decomposed(h="Div s r"), "warning"),
    "variance not centred": (decomposed(q="Pow s two"), "warning"),
    "eps times ten": ({"y": "LayerNormalization s scale bias epsilon=1e-11"}, "note"),
    "default eps": ({"y": "LayerNormalization s scale bias"}, "note"),
    "bias dropped": ({"y": "LayerNormalization s scale epsilon=1e-12"}, "note"),
    "RMS norm for it": ({"y": "SimplifiedLayerNormalization s scale epsilon=1e-12"}, "note"),
    "another norm's scale": ({"scale": lambda: values("scale", 0)}, "note"),
    "scale and bias swapped": ({"y": "LayerNormalization s bias scale epsilon=1e-12"}, VALUES),
    "scale plus one": ({"scale": lambda: values("scale") + 1}, VALUES),
    "scale of ones": ({"scale": lambda: np.ones(N, np.float32)}, "note"),
    "norm removed": ({"y": "Identity s"}, "a model may have any number of norms"),
    "Erf for it": ({"y": "Erf s"}, "a model may have any number of norms"),
}
FORMS = {"decomposed": (DECOMPOSED, DECOMPOSED_FAULTS), "operator": (OPERATOR, OPERATOR_FAULTS)}
CASES = [(form, fault, order) for form, (_, faults) in FORMS.items() for fault in faults for order in ("post", "pre")]
SEVERITY = ["", "note", "warning", "risky", "error"]


def transformer(form, fault, order):
    """Five residual blocks, each with a norm after the addition (post) or before the product (pre)."""
    right, faults = FORMS[form]
    nodes, constants, x = [], {}, "x"
    rng = np.random.default_rng(0)
    for place in range(NORMS):
        changes = faults[fault][0] if fault and place == TARGET else {}
        lines = right | {"scale": values("scale", place), "bias": values("bias", place)}
        lines |= changes() if callable(changes) else changes
        w, out = f"w{place}", "y" if place == NORMS - 1 else f"x{place + 1}"
        constants[f"weight{place}"] = rng.normal(0, N**-0.5, (N, N)).astype(np.float32)
        if order == "post":
            product, outer = gallery.node("MatMul", f"{x} weight{place}", w), {"s": f"s{place}", "y": out, "w": w}
            nodes += [product, gallery.node("Add", f"{x} {w}", f"s{place}")]
        else:
            product, outer = gallery.node("MatMul", f"y{place} weight{place}", f"p{place}"), {"s": x, "y": f"y{place}"}
            outer["w"] = f"{w}_other"
            nodes += [gallery.node("Mul", f"{x} {x}", outer["w"]), product, gallery.node("Add", f"{x} p{place}", out)]
        _add(nodes, constants, lines, outer, f"norm{place}")
        x = out
    model = gallery.model(nodes, (2, 6, N), constants)
    sort_nodes(model)
    return model


def _add(nodes, constants, lines, outer, prefix):
    """Append the nodes and constants of a norm; `outer` renames its input and result, others get the prefix."""
    for result, line in lines.items():
        line = line() if callable(line) else line
        if isinstance(line, str):
            operator, *words = line.split()
            attributes = dict(word.split("=") for word in words if "=" in word)
            typed = {key: float(text) if key == "epsilon" else int(text) for key, text in attributes.items()}
            typed |= {"axes": [typed["axes"]]} if "axes" in typed else {}
            names = [outer.get(word, f"{prefix}.{word}") for word in words if "=" not in word]
            nodes.append(gallery.node(operator, " ".join(names), outer.get(result, f"{prefix}.{result}"), **typed))
        elif line is not None:
            constants[f"{prefix}.{result}"] = np.asarray(line, getattr(line, "dtype", np.float32))


def report_of(model, folder):
    path = folder / "model.onnx"
    onnx.save(model, path)
    return examine(str(path), Options(), lambda *_: None)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Reports of the models without a fault."""
    folder = tmp_path_factory.mktemp("sound")
    return {key: report_of(transformer(key[0], None, key[1]), folder) for key in {(form, o) for form, _, o in CASES}}


def shown(report, sound):
    """The most severe that a report says more than that of the sound model."""
    known = {(f.code, f.message) for f in sound.findings}
    levels = [f.level for f in report.findings if f.code != "model-drift" and (f.code, f.message) not in known]
    levels += ["error"] * (report.exit_code() == 1) + ["risky"] * any(n.verdict == "risky" for n in report.norms)
    return max(levels, key=SEVERITY.index, default="")


@pytest.mark.parametrize(("form", "order"), sorted({(form, o) for form, _, o in CASES}))
def test_the_sound_models_say_nothing(form, order, sound):
    report = sound[form, order]
    assert report.exit_code(strict=True) == 0
    assert len(report.norms) == NORMS
    assert {f.level for f in report.findings} <= {"note"}


@pytest.mark.exhaustive(one_in=39)
@pytest.mark.parametrize(("form", "fault", "order"), CASES)
def test_a_planted_fault_is_shown_or_found_by_comparison(form, fault, order, sound, tmp_path):
    report, right = report_of(transformer(form, fault, order), tmp_path), sound[form, order]
    expected = FORMS[form][1][fault][1]
    severity = SEVERITY.index(shown(report, right))
    assert severity >= SEVERITY.index(expected) if expected in SEVERITY else severity == 0, report.findings
    assert list(compare(facts(report), facts(right)))


def test_fifty_two_faults_are_planted():
    assert len(DECOMPOSED_FAULTS) + len(OPERATOR_FAULTS) == 52
