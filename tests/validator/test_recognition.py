"""Every form of norm is recognised, every wrong form is reported, and both are judged in float64."""

import gallery
import numpy as np
import onnx
import pytest
from onnx import TensorProto, defs, helper

from onnx_export.graph.scope import scopes
from onnx_export.nodes import inlined
from onnx_export.validation.examine import examine
from onnx_export.validation.options import Options
from onnx_export.validation.patterns import find

N = 32
node = gallery.node
CONSTANTS = {
    "last": np.int64([-1]),
    "time": np.int64([1]),
    "width": np.int64([2]),
    "two": np.float32(2),
    "eps": np.float32(1e-5),
    "scale": gallery.weights(N)["scale"],
    "n": np.float32(N),
    "root": np.float32(N**0.5),
    "share": np.float32(N**-0.5),
    "tiny": np.float32(1e-12),
    "one": np.float32(1),
    "zero": np.float32(0),
    "average": np.full((N, N), 1 / N, np.float32),
}
CENTRED = [node("ReduceMean", "x last", "mean"), node("Sub", "x mean", "d")]
SQUARES = [node("Mul", "d d", "q"), node("ReduceMean", "q last", "var")]
ROOT = [node("Add", "var eps", "total"), node("Sqrt", "total", "std")]
QUOTIENT = [node("Div", "d std", "xhat"), node("Mul", "xhat scale", "y")]
TAIL = [*ROOT, *QUOTIENT]
SCALED = QUOTIENT[1:]

NORMS = {
    "plain": ("layer", [*CENTRED, *SQUARES, *TAIL]),
    "global average pooling": (
        "layer",
        [node("GlobalAveragePool", "x", "mean"), CENTRED[1], SQUARES[0], node("GlobalAveragePool", "q", "var"), *TAIL],
    ),
    "pooling of an unsqueezed value": (
        "layer",
        [
            node("Unsqueeze", "x width", "x4"),
            node("ReduceMean", "x4 wide", "m4", keepdims=1),
            node("Squeeze", "m4 width", "mean"),
            *CENTRED[1:],
            *SQUARES,
            *TAIL,
        ],
    ),
    "ReduceSumSquare": ("layer", [*CENTRED, node("ReduceSumSquare", "d last", "s"), node("Div", "s n", "var"), *TAIL]),
    "eps by CastLike": (
        "layer",
        [*CENTRED, *SQUARES, node("CastLike", "eps x", "e"), node("Add", "var e", "total"), *TAIL[1:]],
    ),
    "RMS after a product": ("rms", [node("Mul", "x n", "d"), *SQUARES, *TAIL]),
    "RMS of an Identity": ("rms", [node("Identity", "x", "d"), *SQUARES, *TAIL]),
    "a mean of a mean": (
        "layer",
        [
            node("ReduceMean", "x time", "m0"),
            node("ReduceMean", "m0 width", "mean"),
            CENTRED[1],
            SQUARES[0],
            node("ReduceMean", "q time", "v0"),
            node("ReduceMean", "v0 width", "var"),
            *TAIL,
        ],
    ),
    "mean by MatMul": ("layer", [node("MatMul", "x average", "mean"), CENTRED[1], *SQUARES, *TAIL]),
    "variance by Einsum": (
        "layer",
        [
            *CENTRED,
            node("Einsum", "d d", "s", equation="bti,bti->bt"),
            node("Unsqueeze", "s last", "s3"),
            node("Div", "s3 n", "var"),
            *TAIL,
        ],
    ),
    "x r - mean r": (
        "layer",
        [
            *CENTRED,
            *SQUARES,
            *ROOT,
            node("Reciprocal", "std", "r"),
            node("Mul", "x r", "a"),
            node("Mul", "mean r", "b"),
            node("Sub", "a b", "xhat"),
            *SCALED,
        ],
    ),
    "x / std - mean / std": (
        "layer",
        [
            *CENTRED,
            *SQUARES,
            *ROOT,
            node("Div", "x std", "a"),
            node("Div", "mean std", "b"),
            node("Sub", "a b", "xhat"),
            *SCALED,
        ],
    ),
    "sqrt(std^2 + eps)": (
        "layer",
        [
            *CENTRED,
            *SQUARES,
            node("Sqrt", "var", "sd"),
            node("Mul", "sd sd", "v2"),
            node("Add", "v2 eps", "total"),
            *TAIL[1:],
        ],
    ),
    "a guard by Where": (
        "layer",
        [
            *CENTRED,
            *SQUARES,
            node("Equal", "var zero", "none"),
            node("Where", "none one var", "v2"),
            node("Add", "v2 eps", "total"),
            *TAIL[1:],
        ],
    ),
    "a count from Shape": (
        "layer",
        [
            *CENTRED,
            SQUARES[0],
            node("ReduceSum", "q last", "s"),
            node("Shape", "x", "shape"),
            node("Gather", "shape last", "count"),
            node("Cast", "count", "countf", to=TensorProto.FLOAT),
            node("Div", "s countf", "var"),
            *TAIL,
        ],
    ),
    "root of a sum over root of n": (
        "rms",
        [
            node("Mul", "x x", "q"),
            node("ReduceSum", "q last", "s"),
            node("Add", "s eps", "total"),
            node("Sqrt", "total", "norm"),
            node("Div", "norm root", "std"),
            node("Div", "x std", "xhat"),
            *SCALED,
        ],
    ),
    "MeanVarianceNormalization": ("layer", [node("MeanVarianceNormalization", "x", "xhat", axes=[-1]), *SCALED]),
}
NEAR = {
    "F.normalize times root of n": (
        "rms",
        "not allowed below 1e-12",
        [
            node("ReduceL2", "x last", "l"),
            node("Max", "l tiny", "std"),
            node("Div", "x std", "h"),
            node("Mul", "h root", "xhat"),
            *SCALED,
        ],
    ),
    "norm over root of n, plus eps": (
        "rms",
        "eps is added to the standard deviation",
        [
            node("ReduceL2", "x last", "l"),
            node("Mul", "l share", "s"),
            node("Add", "s eps", "std"),
            node("Div", "x std", "xhat"),
            *SCALED,
        ],
    ),
    "centred L2": (
        "layer",
        "eps is added to the standard deviation",
        [
            *CENTRED,
            node("ReduceL2", "d last", "l"),
            node("Mul", "l share", "s"),
            node("Add", "s eps", "std"),
            *QUOTIENT,
        ],
    ),
    "variance not centred": (
        "rms",
        "the numerator is centred, the variance is not",
        [*CENTRED, node("Pow", "x two", "q"), *SQUARES[1:], *TAIL],
    ),
    "Mul for Div": ("layer", "multiplied", [*CENTRED, *SQUARES, *ROOT, node("Mul", "d std", "xhat"), *SCALED]),
    "x / std before a residual": (
        "layer",
        "x is divided by the deviation",
        [
            *CENTRED,
            *SQUARES,
            *ROOT,
            node("Div", "x std", "xhat"),
            node("Mul", "xhat scale", "z"),
            node("Add", "z x", "y"),
        ],
    ),
    "mean of |d|": (
        "layer",
        "mean absolute deviation",
        [
            *CENTRED,
            node("Abs", "d", "q"),
            node("ReduceMean", "q last", "var"),
            node("Add", "var eps", "std"),
            *QUOTIENT,
        ],
    ),
    "variance of another tensor": (
        "rms",
        "that of another value",
        [*CENTRED, node("Mul", "other other", "q"), *SQUARES[1:], *TAIL],
    ),
}
NONE = {
    "L2 normalisation": [node("ReduceL2", "x last", "l"), node("Add", "l eps", "std"), node("Div", "x std", "y")],
    "cosine of rows": [
        node("Mul", "x x", "q"),
        node("ReduceSum", "q last", "s"),
        node("Sqrt", "s", "std"),
        node("Div", "x std", "y"),
    ],
    "a new mean and deviation": [
        *CENTRED,
        *SQUARES,
        *ROOT,
        node("Mul", "other std", "z"),
        node("Add", "z mean", "y"),
    ],
}


def built(nodes, shape, opset=18):
    used = {name for each in nodes for name in each.input}
    constants = {name: value for name, value in CONSTANTS.items() if name in used}
    constants |= {"wide": np.int64([2, 3])} if "wide" in used else {}
    inputs = [gallery.value(name, shape) for name in ("x", "other") if name in used]
    return gallery.model(nodes, constants=constants, inputs=inputs, opset=opset)


def examined(model, tmp_path, **options):
    onnx.save(model, tmp_path / "model.onnx")
    return examine(str(tmp_path / "model.onnx"), Options(**options), lambda *_: None)


SHAPES = [(2, 5, N), ("batch", "time", N)]


@pytest.mark.exhaustive(one_in=7)
@pytest.mark.parametrize("shape", SHAPES, ids=["fixed", "free"])
@pytest.mark.parametrize("form", NORMS)
def test_a_norm_in_another_form_is_found_and_judged(form, shape, tmp_path):
    formula, nodes = NORMS[form]
    report = examined(built(nodes, shape), tmp_path)
    (norm,) = report.norms
    assert (norm.formula, norm.near_miss) == (formula, "")
    assert norm.verdict in ("ok", "risky"), norm.detail
    assert bool(norm.scale) == (form != "MeanVarianceNormalization")
    assert report.exit_code() == 0, report.problem
    assert not [f for f in report.findings if f.code == "unclaimed"]


@pytest.mark.exhaustive(one_in=2)
@pytest.mark.parametrize("shape", SHAPES, ids=["fixed", "free"])
@pytest.mark.parametrize("form", NEAR)
def test_a_near_miss_in_another_form_is_reported(form, shape, tmp_path):
    formula, says, nodes = NEAR[form]
    report = examined(built(nodes, shape), tmp_path)
    (norm,) = report.norms
    assert norm.formula == formula
    assert says in norm.near_miss
    assert report.exit_code(strict=True) == 1


def test_an_exponent_of_a_one_pass_variance_is_no_pattern_of_the_optimiser(tmp_path):
    """onnxruntime's fusion, which ignores the exponent, matches the centred form alone."""
    powers = [node("Pow", "x four", "p"), node("ReduceMean", "p last", "m4"), node("Pow", "mean two", "m2")]
    nodes = [CENTRED[0], *powers, node("Sub", "m4 m2", "var"), *ROOT, CENTRED[1], *QUOTIENT]
    constants = {name: CONSTANTS[name] for name in ("last", "two", "eps", "scale")} | {"four": np.float32(4)}
    report = examined(gallery.model(nodes, (2, 5, N), constants, opset=18), tmp_path)
    assert {f.code for f in report.findings if f.level != "note"} == {"near-miss"}
    assert "the exponents are 4 and 2" in report.norms[0].near_miss


@pytest.mark.parametrize("form", NONE)
def test_non_norms_are_counted_in_a_note(form, tmp_path):
    report = examined(built(NONE[form], SHAPES[0]), tmp_path)
    assert report.norms == []
    assert report.exit_code(strict=True) == 0
    (note,) = [f for f in report.findings if f.code == "unclaimed"]
    assert "to none" in note.message
    assert report.conclusion() == f"nothing was checked: no norm or recurrent operator was recognised; {note.message}"


OWN = {
    "LayerNormalization": (17, {"axis": -1}, "x scale scale", "layer"),
    "RMSNormalization": (23, {"axis": -1}, "x scale", "rms"),
    "GroupNormalization": (21, {"num_groups": 5}, "x five five", "layer"),
    "MeanVarianceNormalization": (13, {"axes": [-1]}, "x", "layer"),
}


@pytest.mark.parametrize("shape", [(2, 5, N), ("batch", 5, "width")], ids=["fixed", "free"])
@pytest.mark.parametrize("name", OWN)
def test_onnxs_own_expansion_of_an_operator_is_found(name, shape):
    """Axes from Shape and Range, a Cast before the gain."""
    opset, attributes, inputs, formula = OWN[name]
    call = helper.make_node(name, inputs.split(), ["y"], **attributes)
    schema = defs.get_schema(name, opset, "")
    body = onnx.FunctionProto()
    if schema.has_function:
        body.CopyFrom(schema.function_body)
    else:
        types = [helper.make_tensor_type_proto(TensorProto.FLOAT, s) for s in ((2, 5, N), (N,), (N,))]
        types = [each.SerializeToString() for each in types[: len(call.input)]]
        body.ParseFromString(schema.get_context_dependent_function(call.SerializeToString(), types))
    body.name, body.domain = f"{name}Body", "local"
    body.opset_import[0].version = opset
    model = built(
        [helper.make_node(body.name, call.input, ["y"], domain="local", **(attributes if body.attribute else {}))],
        shape,
        opset,
    )
    if "five" in inputs:
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(5, np.float32), "five"))
    model.functions.append(body)
    whole = onnx.shape_inference.infer_shapes(inlined(model), data_prop=True)
    (norm,) = find(whole)
    assert norm.formula.name == formula
    assert bool(norm.scale) == (name in ("LayerNormalization", "RMSNormalization"))


def test_gain_carried_unchanged_through_a_loop(tmp_path):
    """tf2onnx writes Keras' recurrent layers this way: all weights are carried by the loop."""
    body = [*CENTRED, *SQUARES, *ROOT, node("Reciprocal", "std", "r"), node("Mul", "r gain", "f")]
    body += [node("Mul", "x f", "a"), node("Mul", "mean f", "b"), node("Sub", "a b", "y0")]
    body += [node("Identity", "gain", "gain_out"), node("Identity", "cond", "cond_out")]
    names = [gallery.value("i", [], TensorProto.INT64), gallery.value("cond", [], TensorProto.BOOL)]
    names += [gallery.value("x", [3, N]), gallery.value("gain", [N])]
    out = [gallery.value("cond_out", [], TensorProto.BOOL), gallery.value("y0", [3, N]), gallery.value("gain_out", [N])]
    graph = helper.make_graph(body, "body", names, out)
    loop = helper.make_node("Loop", ["count", "true", "start", "scale"], ["y", "g"], body=graph)
    constants = {name: CONSTANTS[name] for name in ("last", "eps", "scale")}
    constants |= {"count": np.int64(3), "true": np.bool_(True)}
    model = gallery.model([loop], constants=constants, inputs=[gallery.value("start", (3, N))], opset=18)
    report = examined(model, tmp_path)
    (norm,) = report.norms
    assert (norm.scale, norm.verdict) == ("gain", "ok")


def test_squares_rounded_to_a_narrower_type_than_x_are_a_warning(tmp_path):
    nodes = [node("ReduceMean", "x last", "mean"), node("Sub", "x mean", "d"), node("Mul", "d d", "q")]
    nodes += [node("Cast", "q", "q16", to=TensorProto.FLOAT16), node("ReduceMean", "q16 last", "v16")]
    nodes += [node("Cast", "v16", "var", to=TensorProto.FLOAT), *TAIL]
    report = examined(built(nodes, (2, 5, N)), tmp_path)
    assert "narrow-statistics" in {f.code for f in report.findings if f.level == "warning"}


def test_statistics_in_a_narrower_type_than_x_are_a_warning(tmp_path):
    nodes = [node("Cast", "x", "x16", to=TensorProto.FLOAT16), node("ReduceMean", "x16 last", "mean")]
    nodes += [node("Sub", "x16 mean", "d16"), node("Mul", "d16 d16", "q"), node("ReduceMean", "q last", "v16")]
    nodes += [node("Cast", "v16", "var", to=TensorProto.FLOAT), node("Cast", "d16", "d", to=TensorProto.FLOAT), *TAIL]
    report = examined(built(nodes, (2, 5, N)), tmp_path)
    assert "narrow-statistics" in {f.code for f in report.findings if f.level == "warning"}


def test_a_norm_that_differs_from_the_others_is_noted(tmp_path):
    nodes, x = [], "x"
    for layer, eps in enumerate((1e-5, 1e-5, 5e-2, 1e-5)):
        y = "y" if layer == 3 else f"h{layer}"
        nodes.append(helper.make_node("LayerNormalization", [x, "scale"], [y], epsilon=eps, name=f"norm{layer}"))
        x = y
    report = examined(built(nodes, (2, 5, N)), tmp_path)
    notes = {(f.code, f.norm) for f in report.findings}
    assert {("unlike-others", "norm2"), ("eps-large", "norm2")} <= notes
    assert report.exit_code(strict=True) == 0


@pytest.mark.exhaustive(one_in=3)
@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize(
    ("formula", "axis", "shape", "noted"),
    [
        ("rms", -2, [N], True),  # the mean is over the wrong axis, or the gain
        ("rms", -1, [N, 1], True),  # a gain for each head
        ("layer", -1, [2, 1, 1], True),
        ("rms", -2, [N, 1], False),
        ("rms", -1, [N, N], False),  # along both axes: a mask
        ("rms", -1, [1], False),
    ],
)
def test_a_gain_along_another_axis_than_the_mean_is_noted(formula, axis, shape, noted, cast, tmp_path):
    """Gains for each channel or head are sound; one along a later axis than the mean's is none of these: a warning."""
    nodes = [*CENTRED] if formula == "layer" else [node("Identity", "x", "d")]
    nodes += [*SQUARES, *TAIL[:-2], node("Div", "d std", "xhat")]
    nodes += [node("Cast", "xhat", "h", to=TensorProto.FLOAT)] * cast + [
        node("Mul", f"{'h' if cast else 'xhat'} gain", "y")
    ]
    constants = {"last": np.int64([axis]), "eps": CONSTANTS["eps"]}
    constants["gain"] = np.random.default_rng(0).normal(1, 0.2, shape).astype(np.float32)
    model = gallery.model(nodes, constants=constants, inputs=[gallery.value("x", (2, N, N))], opset=18)
    report = examined(model, tmp_path)
    (norm,) = report.norms
    assert (norm.formula, bool(norm.scale)) == (formula, shape in ([N, 1], [1]) and not noted)
    notes = [f.message for f in report.findings if f.code == "scale-axis"]
    varies = {1: 2, 2: 1, 3: 0}[len(shape)]
    assert notes == [f"its mean is over axes [{axis + 3}], but its scale varies along [{varies}]"] * noted
    assert (report.exit_code(), report.exit_code(strict=True)) == (0, int(noted and varies > axis + 3))


@pytest.mark.parametrize("axis", [-1, -2])
def test_a_gain_before_the_division_is_found_over_any_axis(axis, tmp_path):
    """`scale * (x - mean) / sqrt(var + eps) + bias`, as the Annotated Transformer writes it; -2 is the wrong axis."""
    nodes = [
        *CENTRED,
        *SQUARES,
        *ROOT,
        node("Mul", "scale d", "e"),
        node("Div", "e std", "z"),
        node("Add", "z bias", "y"),
    ]
    constants = {"last": np.int64([axis]), "bias": np.float32(0.5)} | {k: CONSTANTS[k] for k in ("eps", "scale")}
    report = examined(gallery.model(nodes, (2, 5, N), constants, opset=18), tmp_path)
    (norm,) = report.norms
    assert (norm.formula, norm.axes, norm.scale, norm.verdict) == ("layer", [axis + 3], "scale", "ok"), norm.detail
    assert [f.level for f in report.findings if f.code == "scale-axis"] == ["warning"] * (axis == -2)
    assert report.exit_code(strict=True) == int(axis == -2)


def test_a_gain_of_the_reciprocal_deviation_along_another_axis_is_noted(tmp_path):
    nodes = [*CENTRED, *SQUARES, *ROOT, node("Reciprocal", "std", "r"), node("Mul", "r gain", "f")]
    constants = {
        "last": np.int64([-1]),
        "eps": CONSTANTS["eps"],
        "gain": np.linspace(1, 2, 5, dtype=np.float32)[:, None],
    }
    model = gallery.model([*nodes, node("Mul", "d f", "y")], (2, 5, N), constants, opset=18)
    report = examined(model, tmp_path)
    assert [n.scale for n in report.norms] == ["gain"]
    assert "scale-axis" in {f.code for f in report.findings}
    assert report.exit_code(strict=True) == 0


def test_whether_a_value_is_constant_does_not_depend_on_the_order_of_queries():
    count = 3000
    nodes = [node("Neg", f"v{i}", f"v{i + 1}") for i in range(count)] + [node("Add", f"x v{count}", "y")]
    model = gallery.model(nodes, constants={"v0": np.float32(3)})
    for order in (range(1, count), range(count, 0, -1)):
        scope = next(scopes(model))
        assert all(scope.constant(f"v{i}") == 3 * (-1) ** i for i in order)
        assert scope.constant("y") is None


@pytest.mark.parametrize("operator", ["Neg", "CastLike"])
def test_values_that_depend_on_themselves_are_not_constant(operator):
    circle = [node(operator, "a x" if operator == "CastLike" else "a", "b"), node("Neg", "b", "a")]
    scope = next(scopes(gallery.model([*circle, node("Add", "x a", "y")])))
    assert scope.constant("a") is None
    assert scope.constant("b") is None


def test_an_input_carried_through_a_circle_is_not_constant():
    body = [node("Identity", "a", "b"), node("Identity", "b", "a"), node("Identity", "cond", "cond_out")]
    ins = [gallery.value("i", [], TensorProto.INT64), gallery.value("cond", [], TensorProto.BOOL)]
    outs = [gallery.value("cond_out", [], TensorProto.BOOL), gallery.value("a", [N])]
    graph = helper.make_graph(body, "body", [*ins, gallery.value("w", [N])], outs)
    loop = helper.make_node("Loop", ["count", "true", "scale"], ["y"], body=graph)
    constants = {"count": np.int64(3), "true": np.bool_(True), "scale": CONSTANTS["scale"]}
    _, inner = scopes(gallery.model([loop], constants=constants))
    assert inner.constant("w") is None


def test_folding_takes_time_linear_in_the_nodes(work):
    """Each value depends on two before it, so that there are 2^depth paths; none is constant."""

    def steps(count):
        nodes = [node("Add", f"v{i} v{i + 1}", f"v{i + 2}") for i in range(count)]
        model = gallery.model(nodes, inputs=[gallery.value(name, []) for name in ("v0", "v1")])
        scope = next(scopes(model))
        return work(lambda: [scope.constant(f"v{i}") for i in reversed(range(count + 2))])

    assert steps(400) < 2.2 * steps(200)
