"""onnxruntime as the validator uses it: a session per optimisation level, and what it is known to break."""

from __future__ import annotations

import ctypes
import tempfile
from functools import cache
from math import prod
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

LEVELS = {
    "off": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
KNOWN_DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft"})


class CannotRun(RuntimeError):
    """onnxruntime refuses the model or the run."""


class Session:
    """A model at one optimisation level, single-threaded on the CPU.

    Raises
    ------
    CannotRun
        With the runtime's reason.
    """

    def __init__(self, model: onnx.ModelProto, level: str, dump: Path | None = None) -> None:
        options = ort.SessionOptions()
        options.graph_optimization_level = LEVELS[level]
        options.log_severity_level = 4
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        if dump is not None:
            options.optimized_model_filepath = str(dump)
        try:
            self._session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # pybind exceptions of onnxruntime share no base class of their own
            raise CannotRun(_reason(error)) from error

    def run(self, outputs: list[str], feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        """Evaluate; outputs in the order asked for, bfloat16 ones as float32."""
        fed = {}
        for name, value in feeds.items():
            if value.dtype.name == "bfloat16":
                fed[name] = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(value, TensorProto.BFLOAT16)
            else:
                fed[name] = ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(value).reshape(value.shape))
        try:
            return [_array(value) for value in self._session.run_with_ort_values(outputs, fed)]
        except Exception as error:
            raise CannotRun(_reason(error)) from error


def _array(value: ort.OrtValue) -> np.ndarray:
    if value.element_type() != TensorProto.BFLOAT16:
        return value.numpy()
    shape = value.shape()  # onnxruntime has no way to give numpy this type: take the upper halves of float32
    halves = np.frombuffer(ctypes.string_at(value.data_ptr(), 2 * prod(shape)), np.uint16)
    return (halves.astype(np.uint32) << 16).view(np.float32).reshape(shape)


def optimised(model: onnx.ModelProto, level: str) -> onnx.ModelProto:
    """The graph onnxruntime makes of `model`."""
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder) / "optimised.onnx"
        Session(model, level, dump)
        return onnx.load(dump, load_external_data=False)


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())  # what was got and what was expected stand on later lines
    return (text or type(error).__name__)[:400]


@cache
def loads(opset: int, ir_version: int) -> bool:
    """Whether the installed onnxruntime takes a model of this opset and IR version."""
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "probe", [value], [out])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)
    try:
        Session(model, "off")
    except CannotRun:
        return False
    return True


# ------------------------------------------------------------------------------- graph shapes it miscomputes

TRAPS = {
    "eps-first": "eps is the first operand of the addition, and the optimiser puts its default in its place",
    "exponent": "the exponent is not 2, and the optimiser does not look",
    "keepdims": "a mean without keepdims broadcasts, and the optimiser fuses it as if it did not",
    "skip-axis": "an addition before a LayerNormalization over several axes with a narrow scale, "
    "and the optimiser fuses them into SkipLayerNormalization over the last axis",
}


@cache
def miscomputes(trap: str) -> bool:
    """Whether the installed onnxruntime gets a small model of this shape wrong; measured, not looked up."""
    model, feeds = trap_model(trap)
    try:
        plain, optimised_ = (Session(model, level).run(["y"], feeds)[0] for level in ("off", "all"))
    except CannotRun:
        return False
    return bool(np.max(np.abs(plain - optimised_)) > 1e-3)


def trap_model(trap: str) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A small model of a graph shape that optimisers have got wrong, and an input for it."""
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
