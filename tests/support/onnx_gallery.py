"""Small models, one for each thing the validator must find, tell apart or leave alone.

Each specimen says what is expected of it: norms in order as (formula, verdict, blame), near misses marked
with "~", finding codes, and the exit code at default settings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnx_export import nodes, ort
from onnx_export.validation import traps

FLOAT, HALF, DOUBLE, BFLOAT = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16
INT64, INT8 = TensorProto.INT64, TensorProto.INT8
N = 16
OK = ("layer", "ok", "")


@dataclass
class Specimen:
    """A model and what is expected of it."""

    model: onnx.ModelProto
    norms: list[tuple[str, str, str]] = field(default_factory=lambda: [OK])
    findings: set[str] = field(default_factory=set)
    exit_code: int = 0
    input: dict[str, np.ndarray] | None = None
    options: dict = field(default_factory=dict)


SPECIMENS: list[Callable[[], Specimen]] = []


def specimen(build: Callable[[], Specimen]) -> Callable[[], Specimen]:
    """Register a builder; the specimen goes by its name."""
    SPECIMENS.append(build)
    return build


def lay_out(specimen: Specimen, folder: Path) -> tuple[Path, dict]:
    """Write a specimen and its input to a folder: (path of the model, options of the validator)."""
    path, options = folder / "model.onnx", dict(specimen.options)
    onnx.save(specimen.model, path)
    if specimen.input is not None:
        np.savez(folder / "input.npz", **specimen.input)
        options["input"] = str(folder / "input.npz")
    return path, options


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def weights(shape=N, dtype=np.float32) -> dict[str, np.ndarray]:
    return {
        "scale": rng().normal(1, 0.2, shape).astype(dtype),
        "bias": rng().normal(0, 1, shape).astype(dtype),
    }


def value(name, shape=None, dtype=FLOAT):
    return helper.make_tensor_value_info(name, dtype, shape)


def node(op, inputs, outputs, **attributes):
    named = attributes.pop("name", None)
    return helper.make_node(op, inputs.split(), outputs.split(), name=named, **attributes)


def model(
    nodes, shape=(3, N), constants=None, *, dtype=FLOAT, opset=17, ir=8, inputs=None, outputs=None, **options
) -> onnx.ModelProto:
    """A model from `x` to `y` unless said otherwise."""
    stored = [numpy_helper.from_array(np.asarray(array), name) for name, array in (constants or {}).items()]
    graph = helper.make_graph(
        nodes,
        "g",
        inputs or [value("x", shape, dtype)],
        outputs or [value("y", None, dtype)],
        stored,
    )
    domains = {node.domain for node in nodes} | {f.domain for f in options.get("functions", ())}
    opsets = [helper.make_opsetid("", opset)] + [helper.make_opsetid(d, 1) for d in sorted(domains - {""})]
    return helper.make_model(graph, opset_imports=opsets, ir_version=ir, **options)


def reduce(op, inputs, output, axes, opset, constants, keepdims=1):
    """A reduction in the form its opset wants."""
    if opset >= (13 if op == "ReduceSum" else 18):
        constants[f"axes_{output}"] = np.array(axes, np.int64)
        return node(op, f"{inputs} axes_{output}", output, keepdims=keepdims)
    return node(op, inputs, output, axes=list(axes), keepdims=keepdims)


def decomposed(
    *,
    x="x",
    y="y",
    axes=(-1,),
    square="Pow",
    power=2.0,
    eps=1e-5,
    eps_first=False,
    affine=True,
    bias=True,
    keepdims=1,
    variance_axes=None,
    opset=17,
    dtype=np.float32,
    mean_of=None,
    prefix="",
    width=N,
):
    """PyTorch's layer norm in primitive operators: (nodes, constants)."""
    constants = {f"{prefix}eps": np.array(eps, dtype)}
    p = prefix
    nodes = [
        reduce("ReduceMean", mean_of or x, f"{p}mean", axes, opset, constants, keepdims),
        node("Sub", f"{x} {p}mean", f"{p}d"),
    ]
    if square == "Pow":
        constants[f"{p}power"] = np.array(power, dtype)
        nodes.append(node("Pow", f"{p}d {p}power", f"{p}square"))
    else:
        nodes.append(node("Mul", f"{p}d {p}d", f"{p}square"))
    nodes += [
        reduce("ReduceMean", f"{p}square", f"{p}var", variance_axes or axes, opset, constants, keepdims),
        node("Add", f"{p}eps {p}var" if eps_first else f"{p}var {p}eps", f"{p}total"),
        node("Sqrt", f"{p}total", f"{p}std"),
        node("Div", f"{p}d {p}std", f"{p}xhat" if affine else y),
    ]
    if affine:
        stored = weights(width, dtype)
        constants[f"{p}scale"] = stored["scale"]
        nodes.append(node("Mul", f"{p}xhat {p}scale", f"{p}scaled" if bias else y))
        if bias:
            constants[f"{p}bias"] = stored["bias"]
            nodes.append(node("Add", f"{p}scaled {p}bias", y))
    return nodes, constants


def parts(built, shape=(3, N)):
    """(nodes, shape, constants), as `model` takes them."""
    nodes, constants = built
    return nodes, shape, constants


def native(x="x", y="y", scale="scale", bias="bias", op="LayerNormalization", **attributes):
    return node(op, f"{x} {scale} {bias}".strip(), y, **attributes)


def rows(mean, count=3, n=N, spread=1.0):
    return {"x": (mean + spread * rng().normal(size=(count, n))).astype(np.float32)}


def trapped(trap: str) -> tuple[list[tuple[str, str, str]], int, set[str]]:
    """What is expected of a trap: it depends on whether the installed onnxruntime falls into it."""
    if traps.miscomputes(trap):
        return [("layer", "wrong", "optimiser")], 1, {"miscomputed"}
    return [OK], 0, set()


# ---------------------------------------------------------------------------------------- clean, by operator


@specimen
def native_layer_norm():
    return Specimen(model([native()], constants=weights()))


@specimen
def native_without_bias():
    return Specimen(model([native(bias="")], constants=weights()))


@specimen
def native_two_axes():
    return Specimen(model([native(axis=1)], (2, 4, N), weights((4, N))))


@specimen
def native_negative_axis_dynamic_shape():
    return Specimen(model([native(axis=-1, epsilon=1e-3)], ("batch", "time", N), weights()))


@specimen
def native_float16():
    constants = weights(dtype=np.float16)
    return Specimen(model([native()], constants=constants, dtype=HALF))


@specimen
def native_float64():
    return Specimen(model([native()], constants=weights(dtype=np.float64), dtype=DOUBLE))


@specimen
def native_bfloat16():
    """numpy has no bfloat16: taps and results are widened on the way."""
    constants = weights(dtype=helper.tensor_dtype_to_np_dtype(BFLOAT))
    return Specimen(model([native()], constants=constants, dtype=BFLOAT))


@specimen
def native_large_mean():
    return Specimen(model([native()], constants=weights()), input=rows(1e3))


@specimen
def native_constant_row():
    return Specimen(model([native()], constants=weights()), input={"x": np.full((3, N), 7, np.float32)})


@specimen
def native_no_rows():
    """Nothing to judge is not a fault, but nothing is proved either."""
    empty = {"x": np.zeros((0, N), np.float32)}
    built = model([native()], ("rows", N), weights())
    return Specimen(built, [("layer", "not exercised", "")], exit_code=2, input=empty)


@specimen
def native_scale_computed_by_the_graph():
    nodes = [node("Sigmoid", "x", "gate"), native(scale="gate", bias="")]
    return Specimen(model(nodes))


@specimen
def native_broadcast_scale():
    """Scale need only broadcast to X; [4, 16] on the last axis of [2, 4, 16] is legal."""
    return Specimen(model([native()], (2, 4, N), weights((4, N))))


@specimen
def rms_norm():
    built = model([native(bias="", op="RMSNormalization")], constants=weights(), opset=23, ir=10)
    return Specimen(built, [("rms", "ok", "")])


@specimen
def simplified_layer_norm():
    built = model([native(bias="", op="SimplifiedLayerNormalization")], constants=weights())
    return Specimen(built, [("rms", "ok", "")])


@specimen
def skip_layer_norm():
    nodes = [node("SkipLayerNormalization", "x skip scale bias", "y", domain="com.microsoft", epsilon=1e-5)]
    inputs = [value("x", (2, 3, N)), value("skip", (2, 3, N))]
    built = model(nodes, constants=weights(), inputs=inputs)
    # its own kernel loses digits at large means, unlike the operator it stands for
    return Specimen(built, [("layer", "ok", "")])


@specimen
def skip_simplified_layer_norm():
    nodes = [node("SkipSimplifiedLayerNormalization", "x skip scale", "y", domain="com.microsoft", epsilon=1e-5)]
    inputs = [value("x", (2, 3, N)), value("skip", (2, 3, N))]
    return Specimen(model(nodes, constants=weights(), inputs=inputs), [("rms", "ok", "")])


@specimen
def embed_layer_norm():
    nodes = [
        node(
            "EmbedLayerNormalization",
            "ids kinds words places types scale bias",
            "y mask",
            domain="com.microsoft",
        )
    ]
    tables = {name: rng().normal(size=(2, N)).astype(np.float32) for name in ("words", "types")}
    tables["places"] = rng().normal(size=(8, N)).astype(np.float32)
    ids = [value("ids", (1, 8), TensorProto.INT32), value("kinds", (1, 8), TensorProto.INT32)]
    return Specimen(model(nodes, constants=weights() | tables, inputs=ids))


@specimen
def group_norm():
    built = model([native(op="GroupNormalization", num_groups=2)], (2, 6, 5), weights(6), opset=21, ir=10)
    # onnxruntime has no kernel for it and computes the one-pass formula of the operator's definition
    return Specimen(built, [("group", "risky", "kernel")])


@specimen
def instance_norm():
    built = model([native(op="InstanceNormalization")], (2, 6, 9), weights(6))
    return Specimen(built, [("instance", "ok", "")])


# -------------------------------------------------------------------------------------- clean, by arithmetic


@specimen
def pytorch_pow():
    return Specimen(model(*parts(decomposed())))


@specimen
def pytorch_mul():
    return Specimen(model(*parts(decomposed(square="Mul"))))


@specimen
def pytorch_opset_18():
    return Specimen(model(*parts(decomposed(opset=18)), opset=18))


@specimen
def pytorch_opset_11():
    return Specimen(model(*parts(decomposed(opset=11)), opset=11))


@specimen
def decomposed_without_affine():
    return Specimen(model(*parts(decomposed(affine=False))))


@specimen
def decomposed_without_bias():
    return Specimen(model(*parts(decomposed(bias=False))))


@specimen
def decomposed_two_axes():
    return Specimen(model(*parts(decomposed(axes=(-2, -1), width=(4, N)), (2, 4, N))))


@specimen
def decomposed_channel_axis():
    return Specimen(model(*parts(decomposed(axes=(1,), width=(6, 1)), (2, 6, 5))))


@specimen
def decomposed_dynamic_shape():
    return Specimen(model(*parts(decomposed(), ("batch", "time", N))))


@specimen
def decomposed_leading_axis_without_keepdims():
    """Reducing the first axis needs no keepdims: what is left broadcasts as it should."""
    built = model(*parts(decomposed(axes=(0,), keepdims=0, square="Mul", affine=False), (N, 5)))
    return Specimen(built)


@specimen
def decomposed_float16():
    built = model(*parts(decomposed(square="Mul", dtype=np.float16)), dtype=HALF)
    return Specimen(built)


@specimen
def decomposed_float64():
    return Specimen(model(*parts(decomposed(square="Mul", dtype=np.float64)), dtype=DOUBLE))


@specimen
def mixed_precision():
    """float16 in and out, statistics in float32."""
    nodes, constants = decomposed(x="wide", y="narrow", affine=False)
    nodes = [
        node("Cast", "x", "wide", to=FLOAT),
        *nodes,
        node("Cast", "narrow", "half", to=HALF),
        node("Mul", "half scale", "scaled"),
        node("Add", "scaled bias", "y"),
    ]
    return Specimen(model(nodes, (3, N), constants | weights(dtype=np.float16), dtype=HALF))


@specimen
def mixed_precision_float64():
    """Statistics in float64, scale and bias in float32: each of three roundings counts, also where two terms cancel."""
    nodes, constants = decomposed(x="wide", y="exact", affine=False, dtype=np.float64, width=64)
    nodes = [
        node("Cast", "x", "wide", to=DOUBLE),
        *nodes,
        node("Cast", "exact", "xhat", to=FLOAT),
        node("Mul", "xhat scale", "scaled"),
        node("Add", "scaled bias", "y"),
    ]
    return Specimen(model(nodes, (256, 64), constants | weights(64)))


@specimen
def float16_mean_float64_variance():
    """PyTorch 2.13 exports a float16 norm so at opset 14: its power is stored as a float64."""
    nodes, constants = decomposed(dtype=np.float16, width=64)
    constants |= {"power": np.float64(2), "eps": np.float64(1e-5)}
    at = next(i for i, n in enumerate(nodes) if n.op_type == "Pow")
    nodes[at : at + 1] = [node("Cast", "d", "wide", to=DOUBLE), node("Pow", "wide power", "square")]
    at = next(i for i, n in enumerate(nodes) if n.op_type == "Div")
    nodes[at : at + 1] = [node("Cast", "std", "half", to=HALF), node("Div", "d half", "xhat")]
    return Specimen(model(nodes, (64, 64), constants, dtype=HALF))


@specimen
def paddle():
    """Two separate subtractions of the mean, Pow of one and Div of the other."""
    constants = {"two": np.float32(2), "eps": np.float32(1e-5)} | weights()
    nodes = [
        node("ReduceMean", "x", "mean", axes=[1], keepdims=1),
        node("Sub", "x mean", "d1"),
        node("Pow", "d1 two", "square"),
        node("ReduceMean", "square", "var", axes=[1], keepdims=1),
        node("Add", "var eps", "total"),
        node("Sqrt", "total", "std"),
        node("Sub", "x mean", "d2"),
        node("Div", "d2 std", "xhat"),
        node("Mul", "xhat scale", "scaled"),
        node("Add", "scaled bias", "y"),
    ]
    return Specimen(model(nodes, constants=constants))


@specimen
def keras_batch_normalization_form():
    """x * (rstd * scale) + (bias - mean * (rstd * scale))."""
    constants = {"eps": np.float32(1e-3)} | weights()
    nodes = [
        node("ReduceMean", "x", "mean", axes=[-1]),
        node("Sub", "x mean", "d"),
        node("Mul", "d d", "square"),
        node("ReduceMean", "square", "var", axes=[-1]),
        node("Add", "var eps", "total"),
        node("Sqrt", "total", "std"),
        node("Reciprocal", "std", "rstd"),
        node("Mul", "rstd scale", "factor"),
        node("Mul", "x factor", "scaled"),
        node("Mul", "mean factor", "moved"),
        node("Sub", "bias moved", "offset"),
        node("Add", "scaled offset", "y"),
    ]
    return Specimen(model(nodes, constants=constants))


@specimen
def keras_3_form():
    """x * f + (-mean * f + bias)."""
    constants = {"eps": np.float32(1e-3), "minus_half": np.float32(-0.5)} | weights()
    nodes = [
        node("ReduceMean", "x", "mean", axes=[-1]),
        node("Sub", "x mean", "d"),
        node("Mul", "d d", "square"),
        node("ReduceMean", "square", "var", axes=[-1]),
        node("Add", "var eps", "total"),
        node("Pow", "total minus_half", "rstd"),
        node("Mul", "rstd scale", "factor"),
        node("Neg", "mean", "negative"),
        node("Mul", "negative factor", "moved"),
        node("Add", "moved bias", "offset"),
        node("Mul", "x factor", "scaled"),
        node("Add", "scaled offset", "y"),
    ]
    return Specimen(model(nodes, constants=constants))


def far_bias(scale):
    """Keras's form where the bias dwarfs the scale: `bias - mean * factor` is rounded as well as the result."""
    specimen = keras_batch_normalization_form()
    for tensor in specimen.model.graph.initializer:
        if tensor.name in ("scale", "bias"):
            values = np.full(N, scale) if tensor.name == "scale" else 3 * rng().normal(size=N)
            tensor.CopyFrom(numpy_helper.from_array(values.astype(np.float32), tensor.name))
    specimen.model.graph.input[0].CopyFrom(value("x", ("rows", N)))
    return Specimen(specimen.model, input=rows(0, 64))


@specimen
def keras_form_with_a_bias_far_above_the_scale():
    return far_bias(0.03)


@specimen
def keras_form_with_hardly_a_scale():
    return far_bias(0.01)


def flax_nodes(clamp=True):
    constants = {
        "axes": np.array([1]),
        "nth": np.float32(1 / N),
        "zero": np.float32(0),
        "eps": np.float32(1e-6),
    }
    constants |= {"shape": np.array([3, 1])} | weights((1, N))
    nodes = [
        node("ReduceSum", "x axes", "sum", keepdims=0),
        node("Mul", "x x", "square"),
        node("ReduceSum", "square axes", "square_sum", keepdims=0),
        node("Mul", "sum nth", "mean"),
        node("Mul", "square_sum nth", "mean2"),
        node("Mul", "mean mean", "mean_square"),
        node("Sub", "mean2 mean_square", "diff"),
        *([node("Max", "zero diff", "var")] if clamp else []),
        node("Reshape", "var shape" if clamp else "diff shape", "var_column"),
        node("Add", "var_column eps", "total"),
        node("Sqrt", "total", "std"),
        node("Reciprocal", "std", "rstd"),
        node("Mul", "rstd scale", "factor"),
        node("Reshape", "mean shape", "mean_column"),
        node("Sub", "x mean_column", "d"),
        node("Mul", "d factor", "scaled"),
        node("Add", "scaled bias", "y"),
    ]
    return nodes, constants


ONE_PASS = ("layer", "risky", "file")


@specimen
def flax_one_pass_benign():
    """Right on the rows it meets; stress shows what it would do to others."""
    return Specimen(model(*parts(flax_nodes())), [ONE_PASS])


@specimen
def one_pass_without_clamp():
    return Specimen(model(*parts(flax_nodes(clamp=False))), [ONE_PASS])


@specimen
def one_pass_close_to_trouble():
    """A mean of 8 is survived, one of 100 is not, and that is near enough to count."""
    expected = [("layer", "inaccurate", "file")]
    return Specimen(model(*parts(flax_nodes())), expected, exit_code=1, input=rows(8))


@specimen
def one_pass_at_a_large_mean():
    """A mean of 300 costs a one-pass variance five digits."""
    expected = [("layer", "inaccurate", "file")]
    return Specimen(model(*parts(flax_nodes())), expected, exit_code=1, input=rows(300))


@specimen
def one_pass_at_a_huge_mean():
    """A mean of 3000 costs it all of them."""
    expected = [("layer", "wrong", "file")]
    return Specimen(model(*parts(flax_nodes())), expected, exit_code=1, input=rows(3000))


@specimen
def scale_before_the_division():
    """scale * (x - mean) / std + bias, read from left to right as Python does."""
    nodes, constants = decomposed(square="Mul", bias=True)
    at = next(i for i, n in enumerate(nodes) if n.op_type == "Div")
    nodes[at : at + 2] = [node("Mul", "scale d", "scaled_d"), node("Div", "scaled_d std", "scaled")]
    return Specimen(model(nodes, (3, N), constants))


@specimen
def decomposed_rms():
    constants = {"two": np.float32(2), "eps": np.float32(1e-6)} | weights()
    nodes = [
        node("Pow", "x two", "square"),
        node("ReduceMean", "square", "power", axes=[-1]),
        node("Add", "power eps", "total"),
        node("Sqrt", "total", "rms"),
        node("Div", "x rms", "xhat"),
        node("Mul", "xhat scale", "y"),
    ]
    return Specimen(model(nodes, constants=constants), [("rms", "ok", "")])


# ----------------------------------------------------------------------------------------- clean, in context


@specimen
def quantised():
    """DequantizeLinear -> norm -> QuantizeLinear: the float norm between is judged."""
    constants = weights() | {"step": np.float32(0.05), "zero": np.int8(3)}
    nodes = [
        node("QuantizeLinear", "x step zero", "q"),
        node("DequantizeLinear", "q step zero", "dq"),
        native("dq", "n"),
        node("QuantizeLinear", "n step zero", "y"),
    ]
    return Specimen(model(nodes, constants=constants, outputs=[value("y", None, INT8)]))


@specimen
def quantised_scale():
    """A scale stored as integers is still a constant."""
    nodes, constants = decomposed(square="Mul")
    constants["scale_q"] = np.arange(1, N + 1, dtype=np.int8)
    constants["step"] = np.float32(0.1)
    del constants["scale"]
    nodes.insert(0, node("DequantizeLinear", "scale_q step", "scale"))
    return Specimen(model(nodes, (3, N), constants))


@specimen
def residual_before_the_norm():
    nodes = [node("Add", "x skip", "sum"), native("sum")]
    inputs = [value("x", (2, 3, N)), value("skip", (2, 3, N))]
    return Specimen(model(nodes, constants=weights(), inputs=inputs))


@specimen
def norm_whose_input_is_an_output():
    nodes = [node("Relu", "x", "h"), native("h")]
    return Specimen(model(nodes, constants=weights(), outputs=[value("h"), value("y")]))


def if_model(norm_nodes, constants, taken=True):
    then = helper.make_graph(norm_nodes, "then", [], [value("t")])
    other = helper.make_graph([node("Neg", "x", "e")], "else", [], [value("e")])
    nodes = [node("If", "c", "y", then_branch=then, else_branch=other, name="choose")]
    inputs = [value("x", (3, N)), value("c", [], TensorProto.BOOL)]
    feeds = None if taken else {"c": np.array(False)}
    return model(nodes, constants=constants, inputs=inputs), feeds


@specimen
def inside_if():
    built, feeds = if_model([native(y="t")], weights())
    return Specimen(built, input=feeds)


@specimen
def inside_if_decomposed():
    nodes, constants = decomposed(y="t")
    built, feeds = if_model(nodes, constants)
    return Specimen(built, input=feeds)


@specimen
def inside_a_branch_not_taken():
    built, feeds = if_model([native(y="t")], weights(), taken=False)
    return Specimen(built, [("layer", "not exercised", "")], exit_code=2, input=feeds)


@specimen
def inside_loop():
    body = helper.make_graph(
        [node("Add", "h x", "sum"), native("sum", "h_next"), node("Identity", "keep", "keep_next")],
        "body",
        [value("i", [], INT64), value("keep", [], TensorProto.BOOL), value("h", (3, N))],
        [value("keep_next", [], TensorProto.BOOL), value("h_next", (3, N))],
    )
    nodes = [node("Loop", "count true x", "y", body=body, name="loop")]
    return Specimen(model(nodes, constants=weights() | {"count": np.array(3), "true": np.array(True)}))


@specimen
def inside_scan():
    nodes, constants = decomposed(x="sum", y="h_next")
    body = helper.make_graph(
        [node("Add", "h row", "sum"), *nodes, node("Identity", "h_next", "out")],
        "body",
        [value("h", [N]), value("row", [N])],
        [value("h_next", [N]), value("out", [N])],
    )
    nodes = [node("Scan", "h0 x", "h y", body=body, num_scan_inputs=1)]
    constants["h0"] = np.zeros(N, np.float32)
    return Specimen(model(nodes, (5, N), constants, outputs=[value("h"), value("y")]))


@specimen
def inside_scan_with_output_axes():
    """A tap is one more scan output, and each of them has an axis and a direction."""
    body = helper.make_graph(
        [native("row", "n"), node("Identity", "h", "h_next")],
        "body",
        [value("h", [N]), value("row", [N])],
        [value("h_next", [N]), value("n", [N])],
    )
    sides = {"scan_output_axes": [1], "scan_output_directions": [1]}
    nodes = [node("Scan", "h0 x", "h y", body=body, num_scan_inputs=1, **sides)]
    constants = weights() | {"h0": np.zeros(N, np.float32)}
    return Specimen(model(nodes, (5, N), constants, outputs=[value("h"), value("y")]))


@specimen
def inside_if_inside_loop():
    then = helper.make_graph([native("h", "t")], "then", [], [value("t", (3, N))])
    other = helper.make_graph([node("Neg", "h", "e")], "else", [], [value("e", (3, N))])
    body = helper.make_graph(
        [
            node("If", "keep", "h_next", then_branch=then, else_branch=other),
            node("Identity", "keep", "keep_next"),
        ],
        "body",
        [value("i", [], INT64), value("keep", [], TensorProto.BOOL), value("h", (3, N))],
        [value("keep_next", [], TensorProto.BOOL), value("h_next", (3, N))],
    )
    nodes = [node("Loop", "count true x", "y", body=body)]
    return Specimen(model(nodes, constants=weights() | {"count": np.array(2), "true": np.array(True)}))


def function(name, nodes, constants, opset=17):
    stored = [
        helper.make_node("Constant", [], [key], value=numpy_helper.from_array(np.asarray(array)))
        for key, array in constants.items()
    ]
    opsets = [helper.make_opsetid("", opset)]
    return helper.make_function("local", name, ["x"], ["y"], [*stored, *nodes], opsets)


@specimen
def inside_a_local_function():
    calls = [node("Norm", "x", "h", domain="local"), node("Norm", "h", "y", domain="local")]
    built = model(calls, functions=[function("Norm", *decomposed())])
    return Specimen(built, [OK, OK])


@specimen
def inside_a_local_function_native():
    calls = [node("Norm", "x", "y", domain="local")]
    return Specimen(model(calls, functions=[function("Norm", [native()], weights())]))


@specimen
def inside_a_function_of_another_opset():
    """It cannot be written out, so it cannot be tapped; it is found and linted."""
    calls = [node("Norm", "x", "y", domain="local")]
    built = model(calls, functions=[function("Norm", [native(epsilon=0.0)], weights(), opset=18)])
    return Specimen(built, [("layer", "not exercised", "")], {"eps-zero"}, 1)


@specimen
def residual_and_bias_before_the_norm():
    """Two additions that onnxruntime takes into SkipLayerNormalization."""
    nodes = [node("Add", "x b0", "shifted"), node("Add", "shifted skip", "sum"), native("sum")]
    inputs = [value("x", (2, 3, N)), value("skip", (2, 3, N))]
    constants = weights() | {"b0": rng().normal(size=N).astype(np.float32)}
    return Specimen(model(nodes, constants=constants, inputs=inputs))


@specimen
def two_norms_in_a_row():
    nodes = [native(y="h"), native("h", "y")]
    return Specimen(model(nodes, constants=weights()), [OK, OK])


@specimen
def same_names_in_both_branches():
    """Sibling graphs may use the same names for different values."""
    branches = []
    for op in ("Neg", "Abs"):
        body = [node(op, "x", "h"), native("h", "t")]
        branches.append(helper.make_graph(body, op, [], [value("t")]))
    nodes = [node("If", "c", "y", then_branch=branches[0], else_branch=branches[1], name="choose")]
    inputs = [value("x", (3, N)), value("c", [], TensorProto.BOOL)]
    built = model(nodes, constants=weights(), inputs=inputs)
    return Specimen(built, [("layer", "not exercised", ""), OK])  # attributes are sorted: else, then


# ----------------------------------------------------------------- the four shapes the optimiser miscomputes


@specimen
def trap_eps_first():
    norms, code, findings = trapped("eps-first")
    return Specimen(model(*parts(decomposed(eps=0.1, eps_first=True))), norms, findings, code)


@specimen
def trap_exponent_4():
    norms, code, findings = trapped("exponent")
    built = model(*parts(decomposed(power=4.0)))
    return Specimen(built, [("~layer", *norms[0][1:])], findings | {"near-miss"}, code)


@specimen
def trap_keepdims():
    norms, code, findings = trapped("keepdims")
    built = model(*parts(decomposed(keepdims=0), (N, N)))
    return Specimen(built, [("~layer", *norms[0][1:])], findings | {"near-miss"}, code)


@specimen
def trap_skip_axis():
    norms, code, findings = trapped("skip-axis")
    nodes = [node("Add", "x skip", "sum"), native("sum", axis=1)]
    inputs = [value("x", (2, N, N)), value("skip", (2, N, N))]
    return Specimen(model(nodes, constants=weights(), inputs=inputs), norms, findings, code)


@specimen
def norm_after_a_trap_that_looking_springs():
    """Tapping the inputs undoes the wrong fusion, so they do not show that the second norm's was wrong."""
    norms, code, findings = trapped("skip-axis")
    nodes = [node("Add", "x skip", "sum"), native("sum", "h", axis=1), node("Tanh", "h", "t"), native("t")]
    inputs = [value("x", (2, N, N)), value("skip", (2, N, N))]
    return Specimen(model(nodes, constants=weights(), inputs=inputs), [*norms, OK], findings, code)


@specimen
def trap_skip_axis_with_its_sum_as_output():
    """Looking at the sum stops the wrong fusion, in the model as in a tapped run: then all is well."""
    nodes = [node("Add", "x skip", "sum"), native("sum", axis=1)]
    inputs = [value("x", (2, N, N)), value("skip", (2, N, N))]
    built = model(nodes, constants=weights(), inputs=inputs, outputs=[value("sum"), value("y")])
    findings = {"miscomputed"} if traps.miscomputes("skip-axis") else set()
    return Specimen(built, [OK], findings)


@specimen
def trap_inside_if():
    norms, code, findings = trapped("eps-first")
    nodes, constants = decomposed(y="t", eps=0.1, eps_first=True)
    return Specimen(if_model(nodes, constants)[0], norms, findings, code)


@specimen
def trap_inside_a_local_function():
    norms, code, findings = trapped("eps-first")
    built = decomposed(eps=0.1, eps_first=True)
    calls = [node("Norm", "x", "y", domain="local")]
    return Specimen(model(calls, functions=[function("Norm", *built)]), norms, findings, code)


@specimen
def drift_is_not_blamed():
    """Twelve steep layers between norms: optimised and unoptimised inputs part, and no norm is at fault."""
    nodes, constants, x = [], {}, "x"
    draw = rng()
    for i in range(12):
        norm, stored = decomposed(x=x, y=f"n{i}", prefix=f"p{i}_", width=64)
        constants |= stored | {f"w{i}": draw.normal(size=(64, 64)).astype(np.float32)}
        constants[f"b{i}"] = draw.normal(size=64).astype(np.float32)
        nodes += [
            *norm,
            node("MatMul", f"n{i} w{i}", f"m{i}"),
            node("Add", f"m{i} b{i}", f"a{i}"),
            node("Sin", f"a{i}", f"h{i}"),
        ]
        x = f"h{i}"
    nodes.append(node("Identity", x, "y"))
    return Specimen(model(nodes, (4, 64), constants), [OK] * 12)


def half_chain(norm, mean=0.0, count=3, shape=(64, 64), gain=0.125):
    """float16 layers with norms between; onnxruntime keeps float32 from node to node, unless somebody looks."""
    draw = rng()
    nodes, x = [], "x"
    constants = {f"w{i}": (gain * draw.normal(size=(64, 64))).astype(np.float16) for i in range(count)}
    constants |= {"mean": np.full(64, mean, np.float16)}
    for i in range(count):
        more, stored = norm(f"a{i}", f"y{i}", f"p{i}_")
        constants |= stored
        nodes += [node("MatMul", f"{x} w{i}", f"m{i}"), node("Sin", f"m{i}", f"s{i}")]
        nodes += [node("Add", f"s{i} mean", f"a{i}"), *more]
        x = f"y{i}"
    return model([*nodes, node("Identity", x, "y")], shape, constants, dtype=HALF)


def native_float16_norm(x, y, prefix):
    affine = weights(64, np.float16)
    return [native(x, y, f"{prefix}scale", f"{prefix}bias")], {f"{prefix}{name}": a for name, a in affine.items()}


@specimen
def float16_norms_in_a_row():
    """Each is judged on inputs and a result of the same run: another run rounds elsewhere."""
    return Specimen(half_chain(native_float16_norm, 3.0), [OK] * 3)


@specimen
def float16_decomposed_norms_in_a_row():
    def norm(x, y, prefix):
        return decomposed(x=x, y=y, prefix=prefix, dtype=np.float16, width=64)

    return Specimen(half_chain(norm, 3.0), [OK] * 3)


@specimen
def float16_norms_without_a_kernel_of_that_type():
    """An InstanceNormalization in float32 takes the sum before it unrounded: nobody's fault, at any mean."""

    def norm(x, y, prefix):
        affine = {f"{prefix}ones": np.ones(8, np.float16), f"{prefix}zeros": np.zeros(8, np.float16)}
        return [native(x, y, f"{prefix}ones", f"{prefix}zeros", op="InstanceNormalization")], affine

    return Specimen(half_chain(norm, 3.0, shape=(2, 8, 64)), [("instance", "ok", "")] * 3)


@specimen
def float16_drift_by_looking():
    """Reshaped sums are rounded to float16 only where they are looked at."""

    def norm(x, y, prefix):
        constants = {"ones": np.ones(8, np.float16), "zeros": np.zeros(8, np.float16)}
        constants |= {"split": np.array([8, 8, -1]), "joined": np.array([64, 64])}
        reshape = node("Reshape", f"{x} split", f"{prefix}x"), node("Reshape", f"{prefix}y joined", y)
        inner = native(f"{prefix}x", f"{prefix}y", "ones", "zeros", op="InstanceNormalization")
        return [reshape[0], inner, reshape[1]], constants

    return Specimen(half_chain(norm, 3.0, count=6, gain=0.5), [("instance", "ok", "")] * 6)


@specimen
def float16_norms_in_a_row_at_a_large_mean():
    return Specimen(half_chain(native_float16_norm, 30.0), [OK] * 3)


def group_norm_chain(mean, count):
    def norm(x, y, prefix):
        affine = {f"{prefix}ones": np.ones(8, np.float16), f"{prefix}zeros": np.zeros(8, np.float16)}
        return [native(x, y, f"{prefix}ones", f"{prefix}zeros", op="GroupNormalization", num_groups=2)], affine

    built = half_chain(norm, mean, count, shape=(2, 8, 64))
    built.opset_import[0].version, built.ir_version = 21, 10
    return built


@specimen
def float16_kernel_that_is_at_fault():
    """GroupNormalization's one-pass variance at a mean of 100, by itself as in its model: not for want of rounding."""
    return Specimen(group_norm_chain(100.0, 2), [("group", "wrong", "kernel")] * 2, exit_code=1)


@specimen
def float16_kernel_that_is_at_risk():
    """The same on hard rows alone: an addition before it excuses nothing that it gets wrong by itself."""
    return Specimen(group_norm_chain(0.0, 1), [("group", "risky", "kernel")])


@specimen
def float16_trap_between_sound_norms():
    """Drift is measured, so a norm that the optimiser breaks is still seen, in float16 as well."""
    norms, code, findings = trapped("exponent")

    def norm(x, y, prefix):
        power = 4.0 if prefix == "p1_" else 2.0
        return decomposed(x=x, y=y, prefix=prefix, dtype=np.float16, width=64, power=power)

    broken = ("~layer", *norms[0][1:])
    return Specimen(half_chain(norm, 1.0), [OK, broken, OK], findings | {"near-miss"}, code)


@specimen
def eps_first_of_the_default_size():
    """The optimiser puts 1e-5 in place of 1e-5: no harm done, none reported."""
    return Specimen(model(*parts(decomposed(eps=1e-5, eps_first=True))))


@specimen
def trap_in_the_second_of_two_norms():
    """The sound norm before the broken one keeps its verdict, and so does the one after."""
    norms, code, findings = trapped("eps-first")
    first, constants = decomposed(y="h", prefix="a_", square="Mul")
    second, more = decomposed(x="h", y="h2", prefix="b_", eps=0.1, eps_first=True)
    third, last = decomposed(x="h2", y="y", prefix="c_", square="Mul")
    built = model([*first, *second, *third], (3, N), constants | more | last)
    return Specimen(built, [OK, *norms, OK], findings, code)


# ---------------------------------------------------------------------------------- near misses, look-alikes


NEAR = ("~layer", "ok", "")


@specimen
def unbiased_variance():
    nodes, constants = decomposed(square="Mul")
    constants["correction"] = np.float32(N / (N - 1))
    at = next(i for i, n in enumerate(nodes) if n.op_type == "Add")
    nodes.insert(at, node("Mul", "var correction", "unbiased"))
    nodes[at + 1] = node("Add", "unbiased eps", "total")
    return Specimen(model(nodes, (3, N), constants), [NEAR], {"near-miss"})


@specimen
def unbiased_sum():
    """sum / (n - 1)."""
    constants = {"axes": np.array([-1]), "dof": np.float32(N - 1), "eps": np.float32(1e-5)}
    nodes = [
        node("ReduceMean", "x", "mean", axes=[-1]),
        node("Sub", "x mean", "d"),
        node("Mul", "d d", "square"),
        node("ReduceSum", "square axes", "sum"),
        node("Div", "sum dof", "var"),
        node("Add", "var eps", "total"),
        node("Sqrt", "total", "std"),
        node("Div", "d std", "y"),
    ]
    return Specimen(model(nodes, constants=constants), [NEAR], {"near-miss"})


def sum_nodes(divide, count, n=N, dtype=np.float32, centred=True):
    """A norm whose second moment is a sum divided by, or multiplied with one over, a stored count."""
    constants = {"axes": np.array([-1]), "eps": np.array(1e-3, dtype)}
    constants["count"] = np.array(count if divide else 1 / count, dtype)
    nodes = [
        *([node("ReduceMean", "x", "mean", axes=[-1]), node("Sub", "x mean", "d")] if centred else ()),
        node("Mul", "d d" if centred else "x x", "square"),
        node("ReduceSum", "square axes", "sum"),
        node("Div" if divide else "Mul", "sum count", "var"),
        node("Add", "var eps", "total"),
        node("Sqrt", "total", "std"),
        node("Div", "d std" if centred else "x std", "y"),
    ]
    return model(nodes, (3, n), constants, dtype=HALF if dtype == np.float16 else FLOAT)


@specimen
def one_over_n_in_float16():
    """1/768 is not a float16, and 1/767 is another one."""
    return Specimen(sum_nodes(False, 768, 768, np.float16))


@specimen
def one_over_n_minus_1_in_float16():
    return Specimen(sum_nodes(False, 767, 768, np.float16), [NEAR], {"near-miss"})


@specimen
def rms_with_one_over_n_in_float16():
    return Specimen(sum_nodes(False, 768, 768, np.float16, centred=False), [("rms", "ok", "")])


@specimen
def rms_over_n_minus_1():
    return Specimen(sum_nodes(True, N - 1, centred=False), [("~rms", "ok", "")], {"near-miss"})


@specimen
def annotated_transformer():
    """(x - mean) / (std + eps), the std unbiased: a well-known norm, but no layer norm."""
    nodes, constants = decomposed(square="Mul", eps=1e-6)
    constants["correction"] = np.float32(N / (N - 1))
    at = next(i for i, n in enumerate(nodes) if n.op_type == "Add")
    nodes[at : at + 3] = [
        node("Mul", "var correction", "unbiased"),
        node("Sqrt", "unbiased", "std"),
        node("Add", "std eps", "total"),
        node("Div", "d total", "xhat"),
    ]
    return Specimen(model(nodes, (3, N), constants), [NEAR], {"near-miss"})


@specimen
def eps_on_the_deviation():
    nodes, constants = decomposed(square="Mul", eps=1e-3)
    at = next(i for i, n in enumerate(nodes) if n.op_type == "Add")
    nodes[at : at + 3] = [
        node("Sqrt", "var", "std"),
        node("Add", "std eps", "total"),
        node("Div", "d total", "xhat"),
    ]
    return Specimen(model(nodes, (3, N), constants), [NEAR], {"near-miss"})


@specimen
def clamped_variance():
    """max(0, var) guards against rounding; max(1e-5, var) in place of an eps is another norm."""
    nodes, constants = decomposed(square="Mul")
    at = next(i for i, n in enumerate(nodes) if n.op_type == "Add")
    nodes[at] = node("Max", "var eps", "total")
    return Specimen(model(nodes, (3, N), constants), [NEAR], {"near-miss"})


def misspelt(*instead, of, **constants):
    """A decomposed norm with some nodes in place of those that make these values."""
    nodes, more = decomposed(square="Mul", eps=1e-3)
    at = next(i for i, n in enumerate(nodes) if n.output[0] in of)
    nodes = [n for n in nodes if n.output[0] not in of]
    nodes[at:at] = instead
    return nodes, more | constants


@specimen
def variance_minus_eps():
    """Rows of small variance give NaN, and that is an error by itself."""
    nodes, constants = misspelt(node("Sub", "var eps", "total"), of=["total"])
    return Specimen(model(nodes, (3, N), constants), [OK], {"eps-negative"}, 1)


@specimen
def clipped_deviation():
    clipped = node("Sqrt", "total", "root"), node("Clip", "root floor", "std")
    nodes, constants = misspelt(*clipped, of=["std"], floor=np.float32(1e-2))
    return Specimen(model(nodes, (3, N), constants), [NEAR], {"near-miss"})


@specimen
def divided_by_the_variance():
    """Much larger than the norm where rows vary little, and its roundings with it."""
    nodes, constants = misspelt(node("Div", "d total", "xhat"), of=["std", "xhat"])
    small = {"x": 0.05 * rows(0)["x"]}
    return Specimen(model(nodes, (3, N), constants), [NEAR], {"near-miss"}, 1, input=small)


@specimen
def not_centred():
    nodes, constants = misspelt(node("Div", "x std", "xhat"), of=["xhat"])
    return Specimen(model(nodes, (3, N), constants), [NEAR], {"near-miss"})


@specimen
def not_centred_by_claim():
    nodes, constants = misspelt(node("Div", "x std", "xhat"), of=["xhat"])
    calls = [node("LayerNormalization", "x", "y", domain="local")]
    built = model(calls, functions=[function("LayerNormalization", nodes, constants)])
    return Specimen(built, [("~layer", "wrong", "file")], {"near-miss"}, 1)


@specimen
def not_centred_without_an_eps():
    """What a near miss lacks is a warning, too."""
    nodes, constants = misspelt(node("Sqrt", "var", "std"), node("Div", "x std", "xhat"), of=["total", "std", "xhat"])
    return Specimen(model(nodes, (3, N), constants), [NEAR], {"near-miss", "eps-zero"})


@specimen
def not_centred_with_a_negative_eps():
    instead = node("Sub", "var eps", "total"), node("Sqrt", "total", "std"), node("Div", "x std", "xhat")
    nodes, constants = misspelt(*instead, of=["total", "std", "xhat"])
    return Specimen(model(nodes, (3, N), constants), [NEAR], {"near-miss", "eps-negative"})


@specimen
def not_centred_without_an_eps_by_claim():
    nodes, constants = misspelt(node("Sqrt", "var", "std"), node("Div", "x std", "xhat"), of=["total", "std", "xhat"])
    built = model([node("LayerNorm", "x", "y", domain="local")], functions=[function("LayerNorm", nodes, constants)])
    return Specimen(built, [("~layer", "wrong", "file")], {"near-miss", "eps-zero"}, 1)


@specimen
def centred_after_the_division():
    """x / std - mean / std."""
    split = node("Div", "x std", "a"), node("Div", "mean std", "b"), node("Sub", "a b", "xhat")
    nodes, constants = misspelt(*split, of=["xhat"])
    return Specimen(model(nodes, (3, N), constants))


def centred_later(name):
    """Functions in which the mean over the deviation meets x over the deviation a few nodes on: sound norms all."""
    scaled = node("Mul", "a scale", "sa"), node("Mul", "b scale", "sb")
    affine = node("Mul", "xhat scale", "scaled"), node("Add", "scaled bias", "y")
    ends = [
        [*scaled, node("Sub", "sa sb", "scaled"), node("Add", "scaled bias", "y")],
        [*scaled, node("Sub", "bias sb", "offset"), node("Add", "sa offset", "y")],
        [node("Identity", "a", "same"), node("Sub", "same b", "xhat"), *affine],
        [node("Neg", "b", "minus"), node("Sum", "a minus", "xhat"), *affine],
    ]
    functions, calls = [], []
    for i, end in enumerate(ends):
        split = node("Div", "x std", "a"), node("Div", "mean std", "b")
        functions.append(function(f"{name}{i}", *misspelt(*split, *end, of=["xhat", "scaled", "y"])))
        calls.append(node(f"{name}{i}", "x", f"y{i}", domain="local"))
    return model([*calls, node("Concat", "y0 y1 y2 y3", "y", axis=0)], functions=functions)


@specimen
def centred_some_nodes_after_the_division():
    return Specimen(centred_later("Norm"), [])


@specimen
def centred_some_nodes_after_the_division_by_claim():
    """Not recognised, which is what is said of them; they are not called wrong."""
    return Specimen(centred_later("LayerNorm"), [], {"unproved-claim"}, 2)


@specimen
def softmax_spelled_out():
    constants = {"axes": np.array([-1])}
    nodes = [
        node("ReduceMax", "x", "top", axes=[-1]),
        node("Sub", "x top", "d"),
        node("Exp", "d", "e"),
        node("ReduceSum", "e axes", "sum"),
        node("Div", "e sum", "y"),
    ]
    return Specimen(model(nodes, constants=constants), [])


@specimen
def slope_of_a_regression():
    """A covariance over a variance with an eps: divided is no deviation."""
    nodes, constants = decomposed(square="Mul", affine=False)
    nodes = nodes[:-2]
    nodes += [node("Mul", "d z", "product"), node("ReduceMean", "product", "cov", axes=[-1])]
    nodes += [node("Div", "cov total", "y")]
    inputs = [value("x", (3, N)), value("z", (3, N))]
    return Specimen(model(nodes, (3, N), constants, inputs=inputs), [])


@specimen
def subtracted_the_other_way_round():
    """mean * r - x * r: minus a norm, and not mistaken for one."""
    specimen = keras_batch_normalization_form()
    nodes = specimen.model.graph.node
    nodes[-2].CopyFrom(node("Sub", "moved scaled", "minus"))
    nodes[-1].CopyFrom(node("Add", "minus bias", "y"))
    return Specimen(specimen.model, [])


@specimen
def mismatched_axes():
    built = model(*parts(decomposed(axes=(-1,), variance_axes=(-2, -1), square="Mul"), (2, 4, N)))
    return Specimen(built, [NEAR], {"near-miss"}, 1)


@specimen
def exponent_3():
    """Without a scale it is not what the optimiser looks for."""
    built = model(*parts(decomposed(power=3.0, affine=False, eps=50.0)))
    return Specimen(built, [NEAR], {"near-miss"}, 1)


@specimen
def keepdims_on_a_rectangle_by_mul():
    """The wrong broadcast without the form the optimiser looks for."""
    built = model(*parts(decomposed(keepdims=0, square="Mul"), (N, N)))
    return Specimen(built, [NEAR], {"near-miss"})


@specimen
def stft_magnitude():
    constants = {"two": np.float32(2)}
    nodes = [
        node("Pow", "re two", "re2"),
        node("Pow", "im two", "im2"),
        node("Add", "re2 im2", "power"),
        node("Sqrt", "power", "magnitude"),
        node("ReduceMean", "magnitude", "mean", axes=[-1]),
        node("Sub", "magnitude mean", "y"),
    ]
    inputs = [value("re", (3, N)), value("im", (3, N))]
    return Specimen(model(nodes, constants=constants, inputs=inputs), [])


@specimen
def l2_normalisation():
    constants = {"axes": np.array([-1]), "eps": np.float32(1e-12)}
    nodes = [
        node("Mul", "x x", "square"),
        node("ReduceSum", "square axes", "sum"),
        node("Add", "sum eps", "total"),
        node("Sqrt", "total", "norm"),
        node("Div", "x norm", "y"),
    ]
    return Specimen(model(nodes, constants=constants), [])


@specimen
def standard_deviation_pooling():
    """Statistics that are returned, not divided by."""
    nodes, constants = decomposed(affine=False)
    nodes[-1] = node("Concat", "mean std", "y", axis=-1)
    return Specimen(model(nodes, (3, N), constants), [])


@specimen
def batch_normalisation_spelled_out():
    constants = weights() | {"mean": rng().normal(size=N).astype(np.float32), "var": np.ones(N, np.float32)}
    constants["eps"] = np.float32(1e-5)
    nodes = [
        node("Sub", "x mean", "d"),
        node("Add", "var eps", "total"),
        node("Sqrt", "total", "std"),
        node("Div", "d std", "xhat"),
        node("Mul", "xhat scale", "scaled"),
        node("Add", "scaled bias", "y"),
    ]
    return Specimen(model(nodes, constants=constants), [])


@specimen
def attention_scaling():
    constants = {"width": np.float32(N)}
    nodes = [node("Sqrt", "width", "root"), node("Div", "x root", "y")]
    return Specimen(model(nodes, constants=constants), [])


@specimen
def namesakes_of_another_domain():
    """acme's Sqrt is not the Sqrt of a norm."""
    nodes, constants = decomposed()
    next(n for n in nodes if n.op_type == "Sqrt").domain = "acme"
    return Specimen(model(nodes, (3, N), constants), [], exit_code=2)


@specimen
def no_norm_at_all():
    return Specimen(model([node("Relu", "x", "y")]), [])


# ----------------------------------------------------------------------------------------- the file is wrong


@specimen
def stored_count_of_another_width():
    """A Flax norm exported with 1/n for another n: structurally a norm, numerically none."""
    nodes, constants = flax_nodes()
    constants["nth"] = np.float32(1 / (2 * N))
    inputs = [value("x", (3, "n"))]
    built = model(nodes, constants=constants, inputs=inputs)
    return Specimen(built, [("layer", "wrong", "file")], exit_code=1, options={"dim": N})


@specimen
def claim_broken_in_the_eighth_digit():
    """std + eps for sqrt(var + eps), eps 1e-7: no float32 run can tell, float64 can."""
    nodes, constants = decomposed(square="Mul", eps=1e-7)
    at = next(i for i, n in enumerate(nodes) if n.op_type == "Add")
    nodes[at : at + 3] = [
        node("Sqrt", "var", "std"),
        node("Add", "std eps", "total"),
        node("Div", "d total", "xhat"),
    ]
    calls = [node("layer_norm", "x", "y", domain="local")]
    built = model(calls, functions=[function("layer_norm", nodes, constants)])
    return Specimen(built, [("~layer", "wrong", "file")], {"near-miss"}, 1)


@specimen
def function_named_layer_norm_that_is_none():
    """A near miss that claims by its function's name to be a layer norm."""
    nodes, constants = decomposed(square="Mul")
    constants["correction"] = np.float32(N / (N - 1))
    at = next(i for i, n in enumerate(nodes) if n.op_type == "Add")
    nodes.insert(at, node("Mul", "var correction", "unbiased"))
    nodes[at + 1] = node("Add", "unbiased eps", "total")
    calls = [node("LayerNorm", "x", "y", domain="local")]
    built = model(calls, functions=[function("LayerNorm", nodes, constants)])
    return Specimen(built, [("~layer", "wrong", "file")], {"near-miss"}, 1)


def broken_claim(*instead, of):
    nodes, constants = misspelt(*instead, of=of)
    built = model([node("LayerNorm", "x", "y", domain="local")], functions=[function("LayerNorm", nodes, constants)])
    return Specimen(built, [], {"unproved-claim"}, 2)


@specimen
def claim_without_a_root_or_an_eps():
    return broken_claim(node("Div", "d var", "xhat"), of=["total", "std", "xhat"])


@specimen
def claim_that_multiplies_by_the_deviation():
    broken = broken_claim(node("Mul", "d std", "xhat"), of=["xhat"])
    return Specimen(broken.model, [("~layer", "wrong", "file")], {"near-miss"}, 1)


@specimen
def claim_that_does_nothing():
    calls = [node("LayerNorm", "x", "y", domain="local")]
    built = model(calls, functions=[function("LayerNorm", [node("Identity", "x", "y")], {})])
    return Specimen(built, [], {"unproved-claim"}, 2)


@specimen
def claim_kept_by_a_function_it_calls():
    """Nothing is wrong with a LayerNorm that leaves the arithmetic to another function, be it in a branch."""
    inner = function("Normalise", *decomposed())
    branch = helper.make_graph([node("Normalise", "x", "t", domain="local")], "then", [], [value("t", (3, N))])
    other = helper.make_graph([node("Neg", "x", "e")], "else", [], [value("e", (3, N))])
    body = [node("If", "taken", "y", then_branch=branch, else_branch=other)]
    outer = function("LayerNorm", body, {"taken": np.array(True)})
    outer.opset_import.append(helper.make_opsetid("local", 1))
    built = model([node("LayerNorm", "x", "y", domain="local")], functions=[inner, outer])
    return Specimen(built)


@specimen
def claim_kept_by_a_namesake_of_another_domain():
    idle = function("LayerNorm", [node("Identity", "x", "y")], {})
    idle.domain = "other"
    calls = [node("LayerNorm", "x", "h", domain="local"), node("LayerNorm", "h", "y", domain="other")]
    return Specimen(model(calls, functions=[function("LayerNorm", *decomposed()), idle]), [OK], {"unproved-claim"}, 2)


@specimen
def claim_of_an_unused_function():
    idle = function("LayerNorm", [node("Identity", "x", "y")], {})
    return Specimen(model([native()], constants=weights(), functions=[idle]))


# ----------------------------------------------------------------------------------------------------- lints


@specimen
def lint_eps_zero():
    return Specimen(model([native(epsilon=0.0)], constants=weights()), [OK], {"eps-zero"}, 1)


@specimen
def lint_eps_negative():
    built = model([native(epsilon=-1e-3)], constants=weights())
    return Specimen(built, [OK], {"eps-negative"}, 1)


@specimen
def lint_eps_nan():
    built = model([native(epsilon=float("nan"))], constants=weights())
    return Specimen(built, [("layer", "not exercised", "")], {"eps-nan"}, 1)


@specimen
def lint_eps_lost_in_float16():
    """1e-8 is 0 in float16."""
    built = model(*parts(decomposed(square="Mul", eps=1e-8, dtype=np.float16)), dtype=HALF)
    return Specimen(built, [OK], {"eps-zero"}, 1)


@specimen
def lint_eps_lost_in_a_cast():
    """A float32 constant that a Cast makes 0."""
    nodes, constants = decomposed(square="Mul", dtype=np.float16)
    constants["eps_wide"] = np.float32(1e-8)
    del constants["eps"]
    nodes.insert(0, node("Cast", "eps_wide", "eps", to=HALF))
    return Specimen(model(nodes, (3, N), constants, dtype=HALF), [OK], {"eps-zero"}, 1)


@specimen
def eps_added_in_float32_to_a_float16_variance():
    """1e-8 would be lost in float16, but is added after a Cast."""
    nodes, constants = decomposed(square="Mul", dtype=np.float16)
    constants["eps"] = np.float32(1e-8)
    at = next(i for i, n in enumerate(nodes) if n.op_type == "Add")
    nodes[at : at + 2] = [
        node("Cast", "var", "var_wide", to=FLOAT),
        node("Add", "var_wide eps", "total"),
        node("Sqrt", "total", "std_wide"),
        node("Cast", "std_wide", "std", to=HALF),
    ]
    return Specimen(model(nodes, (3, N), constants, dtype=HALF))


@specimen
def lint_eps_absent():
    nodes, constants = decomposed(square="Mul", affine=False)
    at = next(i for i, n in enumerate(nodes) if n.op_type == "Add")
    nodes[at : at + 2] = [node("Sqrt", "var", "std")]
    del constants["eps"]
    return Specimen(model(nodes, (3, N), constants), [OK], {"eps-zero"}, 1)


@specimen
def lint_scale_shape():
    built = model([native(bias="")], constants={"scale": np.ones(N - 1, np.float32)})
    return Specimen(built, [("layer", "not exercised", "")], {"scale-shape"}, 1)


@specimen
def lint_bias_shape():
    built = model([native()], constants={"scale": np.ones(N, np.float32), "bias": np.ones((3, 3, N), np.float32)})
    return Specimen(built, [("layer", "not exercised", "")], {"bias-shape"}, 1)


@specimen
def lint_nan_in_the_scale():
    """The column it spoils is left out, the others are judged."""
    constants = weights()
    constants["scale"][3] = np.nan
    return Specimen(model([native()], constants=constants), [OK], {"scale-nan"}, 1)


@specimen
def lint_inf_in_the_bias():
    nodes, constants = decomposed(square="Mul")
    constants["bias"][3] = np.inf
    return Specimen(model(nodes, (3, N), constants), [OK], {"bias-nan"}, 1)


@specimen
def lint_axis():
    built = model([native(axis=5)], constants=weights())
    return Specimen(built, [("layer", "not exercised", "")], {"axis"}, 1)


@specimen
def lint_no_axis_left():
    """InstanceNormalization normalises what follows batch and channels: here nothing does."""
    built = model([native(op="InstanceNormalization")], (2, N), weights())
    return Specimen(built, [("instance", "not exercised", "")], {"axis"}, 1)


@specimen
def lint_nan_in_a_row():
    """The row is left out and said to be; the others are judged."""
    spoiled = rows(0)
    spoiled["x"][1, 2] = np.nan
    return Specimen(model([native()], constants=weights()), [OK], {"non-finite"}, input=spoiled)


@specimen
def lint_nan_in_every_row():
    """NaN on both sides is agreement about nothing."""
    nodes = [node("Log", "negative", "h"), native("h")]
    constants = weights() | {"minus": np.float32(-1)}
    nodes = [node("Abs", "x", "a"), node("Mul", "a minus", "negative"), *nodes]
    return Specimen(model(nodes, constants=constants), [("layer", "not exercised", "")], {"non-finite"}, 2)


@specimen
def lint_stash_type():
    built = model([native(stash_type=16)], constants=weights())
    return Specimen(built, [OK], {"stash-type"})


def beside_a_norm(nodes, constants):
    """A native norm y after something strange that ends in h."""
    more = {f"n_{name}": array for name, array in weights().items()}
    return model([*nodes, native("h", "y", "n_scale", "n_bias")], constants=constants | more)


@specimen
def axes_that_are_floats():
    """No runtime takes them, so there is no mean; the norm that follows is still found."""
    nodes, constants = decomposed(y="h", opset=18)
    constants["axes_mean"] = np.array([-1.0], np.float32)
    built = beside_a_norm(nodes, constants)
    built.opset_import[0].version = 18
    return Specimen(built, [("rms", "not exercised", ""), ("layer", "not exercised", "")], exit_code=2)


@specimen
def three_terms_in_the_addition_of_the_eps():
    nodes, constants = misspelt(node("Add", "var eps eps", "total"), of=["total"])
    nodes[-1].output[0] = "h"
    return Specimen(beside_a_norm(nodes, constants), [("layer", "not exercised", "")], exit_code=2)


@specimen
def stash_type_of_no_type():
    nodes = [native("x", "h", "n_scale", "n_bias", stash_type=99)]
    return Specimen(beside_a_norm(nodes, {}), [OK, OK], {"stash-type"})


@specimen
def a_thousand_additions_to_a_deviation():
    nodes, constants = decomposed(y="h", affine=False)
    constants["nothing"] = np.float32(0)
    division = nodes.pop()
    at, last = next(i for i, n in enumerate(nodes) if n.op_type == "Add"), "s0"
    nodes[at:] = [node("Sqrt", "var", last)]
    for i in range(1, 1500):
        nodes.append(node("Add", f"{last} nothing", f"s{i}"))
        last = f"s{i}"
    division.input[1] = last
    return Specimen(beside_a_norm([*nodes, division], constants))


@specimen
def lint_opset():
    built = model([native()], constants=weights(), opset=onnx.defs.onnx_opset_version(), ir=8)
    if ort.loads(onnx.defs.onnx_opset_version(), 8):
        return Specimen(built)
    return Specimen(built, [("layer", "not exercised", "")], {"opset"}, 2)


@specimen
def lint_ir():
    built = model([native()], constants=weights(), ir=99)
    return Specimen(built, [("layer", "not exercised", "")], {"ir"}, 2)


@specimen
def lint_float16_overflow():
    """Deviations of 300 square to more than float16 holds; onnxruntime's CPU computes it in float32."""
    wide = {"x": rows(0, spread=300.0)["x"].astype(np.float16)}
    built = model(*parts(decomposed(square="Mul", dtype=np.float16)), dtype=HALF)
    return Specimen(built, [OK], {"float16-overflow"}, input=wide)


# ------------------------------------------------------------------------------------------- cannot validate


@specimen
def custom_domain():
    nodes = [node("Magic", "x", "h", domain="acme"), native("h")]
    return Specimen(model(nodes, constants=weights()), [("layer", "not exercised", "")], exit_code=2)


@specimen
def input_that_cannot_be_made_up():
    nodes = [node("StringNormalizer", "words", "lower"), native()]
    inputs = [value("x", (3, N)), value("words", (2,), TensorProto.STRING)]
    outputs = [value("y"), value("lower", None, TensorProto.STRING)]
    built = model(nodes, constants=weights(), inputs=inputs, outputs=outputs)
    return Specimen(built, [("layer", "not exercised", "")], exit_code=2)


@specimen
def made_up_input_that_does_not_fit():
    """A shape given as input: any made-up value is wrong, and the report names it."""
    nodes = [node("Reshape", "x shape", "h"), native("h")]
    inputs = [value("x", (3, N)), value("shape", (1,), INT64)]
    built = model(nodes, constants=weights(), inputs=inputs)
    return Specimen(built, [("layer", "not exercised", "")], exit_code=2)


@specimen
def broken_but_linted():
    """An error lint outranks that the model cannot run."""
    nodes = [node("Magic", "x", "h", domain="acme"), native("h", epsilon=-1.0)]
    built = model(nodes, constants=weights())
    return Specimen(built, [("layer", "not exercised", "")], {"eps-negative"}, 1)


@specimen
def dropout_in_training():
    """A Dropout told to train draws another mask in every run."""
    constants = weights() | {"ratio": np.float32(0.5), "training": np.array(True)}
    return Specimen(model([node("Dropout", "x ratio training", "h"), native("h")], constants=constants))


@specimen
def random_operator():
    """Two runs see different rows; the norm is then judged on its own."""
    nodes = [node("RandomNormalLike", "x", "noise"), node("Add", "x noise", "h"), native("h")]
    return Specimen(model(nodes, constants=weights()))


def shuffled(nodes):
    """The same nodes, each before what it uses."""
    return list(reversed(nodes))


@specimen
def nodes_out_of_order():
    """onnxruntime sorts them itself, so converters get away with it."""
    nodes, constants = decomposed()
    return Specimen(model(shuffled(nodes), constants=constants), findings={"order"})


@specimen
def nodes_out_of_order_in_a_branch():
    """The branch uses a value of the outer graph that is made behind it there."""
    then = helper.make_graph([native("h", "t"), node("Add", "later x", "h")], "then", [], [value("t", (3, N))])
    other = helper.make_graph([node("Neg", "x", "e")], "else", [], [value("e", (3, N))])
    nodes = [node("If", "yes", "y", then_branch=then, else_branch=other), node("Abs", "x", "later")]
    return Specimen(model(nodes, constants=weights() | {"yes": np.array(True)}), findings={"order"})


@specimen
def nodes_out_of_order_in_a_local_function():
    nodes, constants = decomposed()
    calls = [node("Norm", "x", "y", domain="local")]
    return Specimen(model(calls, functions=[function("Norm", shuffled(nodes), constants)]), findings={"order"})


def long_domain(built):
    """`built` with the operators' domain by its other name wherever it stands."""
    for owner in (built, *built.functions):
        for opset in owner.opset_import:
            opset.domain = opset.domain or "ai.onnx"
    for each in nodes.model_nodes(built):
        each.domain = each.domain or "ai.onnx"
    return built


@specimen
def domain_by_its_long_name():
    return Specimen(long_domain(model(*parts(decomposed()))))


@specimen
def domain_by_both_names():
    """Nodes by one name and the import by the other, and the import twice."""
    built = model([native(y="h"), native("h", "y")], constants=weights())
    built.graph.node[0].domain = "ai.onnx"
    built.opset_import.add(domain="ai.onnx", version=17)
    return Specimen(built, [OK, OK])


@specimen
def domain_by_its_long_name_in_a_branch_and_in_a_function():
    nodes, constants = decomposed(y="t")
    built, feeds = if_model([*nodes[:-1], node("Norm", "scaled", "t", domain="local")], constants)
    built.functions.append(function("Norm", [native()], weights()))
    built.opset_import.add(domain="local", version=1)
    return Specimen(long_domain(built), [OK, OK], input=feeds)


@specimen
def negative_dimension():
    """Some exporters write -1 for a dimension that is free."""
    return Specimen(model(*parts(decomposed(), (-1, N))))
