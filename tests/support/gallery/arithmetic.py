"""Sound norms in primitive operators."""

from __future__ import annotations

import numpy as np
from onnx import numpy_helper

from gallery.specimen import (
    DOUBLE,
    FLOAT,
    HALF,
    N,
    Specimen,
    decomposed,
    model,
    node,
    parts,
    rng,
    rows,
    specimen,
    value,
    weights,
)


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
    """Reducing the first axis needs no keepdims: the result broadcasts correctly without it."""
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
    """Statistics in float64, scale and bias in float32: three roundings count, also where two terms cancel."""
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
    """PyTorch 2.13's export of a float16 norm at opset 14: the exponent is stored as a float64."""
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
    """Keras's form with a bias much larger than the scale: `bias - mean * factor` is rounded as well as the result."""
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
    """Accurate on the rows of its own input; the stress test shows its error on others."""
    return Specimen(model(*parts(flax_nodes())), [ONE_PASS])


@specimen
def one_pass_without_clamp():
    return Specimen(model(*parts(flax_nodes(clamp=False))), [ONE_PASS])


@specimen
def one_pass_close_to_trouble():
    """Accurate at a mean of 8 and not at 100, which is within the factor of ten that the stress test reports."""
    expected = [("layer", "inaccurate", "file")]
    return Specimen(model(*parts(flax_nodes())), expected, exit_code=1, input=rows(8))


@specimen
def one_pass_at_a_large_mean():
    """A mean of 300 costs a one-pass variance five digits."""
    expected = [("layer", "inaccurate", "file")]
    return Specimen(model(*parts(flax_nodes())), expected, exit_code=1, input=rows(300))


@specimen
def one_pass_at_a_huge_mean():
    """A mean of 3000 costs it all digits."""
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
