"""Near misses, and values that only look like norms."""

from __future__ import annotations

import numpy as np

from gallery.arithmetic import keras_batch_normalization_form
from gallery.context import function
from gallery.specimen import (
    FLOAT,
    HALF,
    OK,
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
    """1/768 is not exact in float16, and 1/767 rounds to another number."""
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
def rms_over_half_of_n():
    """No estimate of the mean square divides by it."""
    return Specimen(sum_nodes(True, N / 2, centred=False), [("~rms", "ok", "")], {"near-miss"}, 1)


@specimen
def one_pass_over_half_of_n():
    """E[x^2] - mean^2 with a wrong count in the first term."""
    constants = {"axes": np.array([-1]), "half": np.float32(N / 2), "eps": np.float32(1e-3)}
    nodes = [
        node("ReduceMean", "x", "mean", axes=[-1]),
        node("Mul", "x x", "square"),
        node("ReduceSum", "square axes", "sum"),
        node("Div", "sum half", "moment"),
        node("Mul", "mean mean", "mean2"),
        node("Sub", "moment mean2", "var"),
        node("Add", "var eps", "total"),
        node("Sqrt", "total", "std"),
        node("Sub", "x mean", "d"),
        node("Div", "d std", "y"),
    ]
    return Specimen(model(nodes, constants=constants), [NEAR], {"near-miss"}, 1)


@specimen
def annotated_transformer():
    """(x - mean) / (std + eps) with the unbiased std: a well-known norm, but not layer norm."""
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
    """A decomposed norm in which the given nodes replace those that compute the same values."""
    nodes, more = decomposed(square="Mul", eps=1e-3)
    at = next(i for i, n in enumerate(nodes) if n.output[0] in of)
    nodes = [n for n in nodes if n.output[0] not in of]
    nodes[at:at] = instead
    return nodes, more | constants


@specimen
def variance_minus_eps():
    """Rows of small variance give NaN, which is an error of its own."""
    nodes, constants = misspelt(node("Sub", "var eps", "total"), of=["total"])
    return Specimen(model(nodes, (3, N), constants), [OK], {"eps-negative"}, 1)


@specimen
def clipped_deviation():
    clipped = node("Sqrt", "total", "root"), node("Clip", "root floor", "std")
    nodes, constants = misspelt(*clipped, of=["std"], floor=np.float32(1e-2))
    return Specimen(model(nodes, (3, N), constants), [NEAR], {"near-miss"})


@specimen
def divided_by_the_variance():
    """Where rows vary little the result, and its rounding errors, are much larger than the norm's."""
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
    """The missing eps of a near miss is a warning, too."""
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
    """Functions that subtract mean / std from x / std a few nodes later: all sound norms."""
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
    """Four sound norms that no pattern has; they are found by what they compute."""
    return Specimen(centred_later("Norm"), [OK] * 4)


@specimen
def centred_some_nodes_after_the_division_by_claim():
    return Specimen(centred_later("LayerNorm"), [OK] * 4)


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
    """A covariance over a variance with an eps: the numerator is not a deviation from the mean."""
    nodes, constants = decomposed(square="Mul", affine=False)
    nodes = nodes[:-2]
    nodes += [node("Mul", "d z", "product"), node("ReduceMean", "product", "cov", axes=[-1])]
    nodes += [node("Div", "cov total", "y")]
    inputs = [value("x", (3, N)), value("z", (3, N))]
    return Specimen(model(nodes, (3, N), constants, inputs=inputs), [])


@specimen
def subtracted_the_other_way_round():
    """mean * r - x * r: a negated norm, and not mistaken for a norm."""
    specimen = keras_batch_normalization_form()
    nodes = specimen.model.graph.node
    nodes[-2].CopyFrom(node("Sub", "moved scaled", "minus"))
    nodes[-1].CopyFrom(node("Add", "minus bias", "y"))
    return Specimen(specimen.model, [])


@specimen
def mean_absolute_deviation_over_a_quarter_of_n():
    """Two near misses, of which the count is certainly a mistake."""
    constants = {"axes": np.array([-1]), "quarter": np.float32(N / 4), "eps": np.float32(1e-3)}
    nodes = [
        node("ReduceMean", "x", "mean", axes=[-1]),
        node("Sub", "x mean", "d"),
        node("Abs", "d", "size"),
        node("ReduceSum", "size axes", "sum"),
        node("Div", "sum quarter", "deviation"),
        node("Add", "deviation eps", "total"),
        node("Div", "d total", "y"),
    ]
    return Specimen(model(nodes, constants=constants), [NEAR], {"near-miss"}, 1)


@specimen
def mismatched_axes():
    built = model(*parts(decomposed(axes=(-1,), variance_axes=(-2, -1), square="Mul"), (2, 4, N)))
    return Specimen(built, [NEAR], {"near-miss"}, 1)


@specimen
def exponent_3():
    """Without a scale the optimiser's pattern does not match."""
    built = model(*parts(decomposed(power=3.0, affine=False, eps=50.0)))
    return Specimen(built, [NEAR], {"near-miss"}, 1)


@specimen
def keepdims_on_a_rectangle_by_mul():
    """The wrong broadcast in a form that the optimiser's pattern does not match."""
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
    """Sqrt of the domain acme is not ONNX's Sqrt."""
    nodes, constants = decomposed()
    next(n for n in nodes if n.op_type == "Sqrt").domain = "acme"
    return Specimen(model(nodes, (3, N), constants), [], exit_code=2)


@specimen
def no_norm_at_all():
    return Specimen(model([node("Relu", "x", "y")]), [])
