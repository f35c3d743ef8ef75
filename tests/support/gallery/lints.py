"""Faults that show without running the file."""

from __future__ import annotations

import numpy as np
import onnx

from gallery.near_misses import misspelt
from gallery.specimen import (
    FLOAT,
    HALF,
    OK,
    N,
    Specimen,
    decomposed,
    model,
    native,
    node,
    parts,
    rows,
    specimen,
    weights,
)
from onnx_export import ort


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
    """A float32 constant that becomes 0 in a Cast."""
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
    """The column with NaN is left out, the others are judged."""
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
    """InstanceNormalization normalises the axes after batch and channels: here there are none."""
    built = model([native(op="InstanceNormalization")], (2, N), weights())
    return Specimen(built, [("instance", "not exercised", "")], {"axis"}, 1)


@specimen
def lint_nan_in_a_row():
    """The row with NaN is left out, which is reported; the others are judged."""
    spoiled = rows(0)
    spoiled["x"][1, 2] = np.nan
    return Specimen(model([native()], constants=weights()), [OK], {"non-finite"}, input=spoiled)


@specimen
def lint_nan_in_every_row():
    """NaN in both results proves nothing."""
    nodes = [node("Log", "negative", "h"), native("h")]
    constants = weights() | {"minus": np.float32(-1)}
    nodes = [node("Abs", "x", "a"), node("Mul", "a minus", "negative"), *nodes]
    return Specimen(model(nodes, constants=constants), [("layer", "not exercised", "")], {"non-finite"}, 2)


@specimen
def lint_stash_type():
    built = model([native(stash_type=16)], constants=weights())
    return Specimen(built, [OK], {"stash-type"})


def beside_a_norm(nodes, constants):
    """A native norm y of h, which the given nodes compute."""
    more = {f"n_{name}": array for name, array in weights().items()}
    return model([*nodes, native("h", "y", "n_scale", "n_bias")], constants=constants | more)


@specimen
def axes_that_are_floats():
    """No runtime accepts float axes, so there is no valid mean; the norm that follows is still found and judged."""
    nodes, constants = decomposed(y="h", opset=18)
    constants["axes_mean"] = np.array([-1.0], np.float32)
    built = beside_a_norm(nodes, constants)
    built.opset_import[0].version = 18
    return Specimen(built, [("rms", "ok", ""), OK], exit_code=2)


@specimen
def three_terms_in_the_addition_of_the_eps():
    nodes, constants = misspelt(node("Add", "var eps eps", "total"), of=["total"])
    nodes[-1].output[0] = "h"
    return Specimen(beside_a_norm(nodes, constants), exit_code=2)


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
    """No runtime loads the file; its norm is judged by itself."""
    built = model([native()], constants=weights(), ir=99)
    return Specimen(built, [OK], {"ir"}, 2)


@specimen
def lint_float16_overflow():
    """Squares of deviations of 300 overflow float16; onnxruntime's CPU kernels compute it in float32."""
    wide = {"x": rows(0, spread=300.0)["x"].astype(np.float16)}
    built = model(*parts(decomposed(square="Mul", dtype=np.float16)), dtype=HALF)
    return Specimen(built, [OK], {"float16-overflow"}, input=wide)
