"""Graph patterns that some versions of onnxruntime's optimiser miscompute, each tested on the installed version."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnx_export.ort import CannotRun, Session

TRAPS = {
    "eps-first": "eps is the first operand of the addition, and the optimiser replaces it by the default 1e-5",
    "exponent": "the exponent is not 2, but the optimiser fuses the nodes as if it were",
    "keepdims": "a mean without keepdims broadcasts, and the optimiser fuses it as if it did not",
    "skip-axis": "an addition before a LayerNormalization over several axes with a narrow scale, "
    "and the optimiser fuses them into SkipLayerNormalization over the last axis",
}


@cache
def miscomputes(trap: str) -> bool:
    """Whether the installed onnxruntime miscomputes a small model of this pattern, by running it."""
    model, feeds = trap_model(trap)
    try:
        plain, optimised_ = (Session(model, level).run(["y"], feeds)[0] for level in ("off", "all"))
    except CannotRun:
        return False
    return bool(np.max(np.abs(plain - optimised_)) > 1e-3)


def trap_model(trap: str) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A small model of one of the patterns, and an input for it."""
    rng = np.random.default_rng(0)
    constants = {"eps": np.float32(0.1), "power": np.float32(4 if trap == "exponent" else 2)}
    constants |= {"scale": rng.normal(size=4).astype(np.float32), "bias": np.zeros(4, np.float32)}
    node = helper.make_node
    if trap == "skip-axis":
        nodes = [
            node("Add", ["x", "x2"], ["sum"]),
            node("LayerNormalization", ["sum", "scale", "bias"], ["y"], axis=1, epsilon=1e-5),
        ]
        shape, inputs = [2, 4, 4], ["x", "x2"]
    else:
        keep = int(trap != "keepdims")
        nodes = [
            node("ReduceMean", ["x"], ["mean"], axes=[-1], keepdims=keep),
            node("Sub", ["x", "mean"], ["d"]),
            node("Pow", ["d", "power"], ["square"]),
            node("ReduceMean", ["square"], ["var"], axes=[-1], keepdims=keep),
            node("Add", ["eps", "var"] if trap == "eps-first" else ["var", "eps"], ["total"]),
            node("Sqrt", ["total"], ["std"]),
            node("Div", ["d", "std"], ["xhat"]),
            node("Mul", ["xhat", "scale"], ["scaled"]),
            node("Add", ["scaled", "bias"], ["y"]),
        ]
        shape, inputs = [4, 4], ["x"]
    graph = helper.make_graph(
        nodes,
        "trap",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in inputs],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return model, {name: rng.normal(size=shape).astype(np.float32) for name in inputs}
