"""Sound norms as operators."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper

from gallery.specimen import BFLOAT, DOUBLE, HALF, N, Specimen, model, native, node, rng, rows, specimen, value, weights


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
    """NumPy has no bfloat16: taps and results are widened to float32."""
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
    """Without rows there is no fault, but nothing is proved either."""
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
    # its kernel loses digits at large means, unlike the operator that it replaces
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
