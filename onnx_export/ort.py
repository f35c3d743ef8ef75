"""onnxruntime: sessions by optimisation level, and the opset and IR versions that it loads."""

from __future__ import annotations

import ctypes
import os
import tempfile
from functools import cache
from math import prod
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

LEVELS = {
    "off": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
KNOWN_DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft"})


class CannotRun(RuntimeError):
    """onnxruntime cannot load or run the model."""


class Session:
    """A model at one optimisation level, single-threaded on the CPU.

    Raises
    ------
    CannotRun
        With the runtime's reason.
    """

    def __init__(self, model: onnx.ModelProto, level: str, dump: Path | None = None) -> None:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = LEVELS[level]
        options.log_severity_level = 4
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        if dump is not None:
            options.optimized_model_filepath = str(dump)
        try:
            self._session = onnxruntime.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime's pybind exceptions have no common base class but Exception
            raise CannotRun(_reason(error)) from error

    def run(self, outputs: list[str], feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        """Run the model; returns the named outputs in order, bfloat16 ones as float32."""
        fed = {}
        for name, value in feeds.items():
            if value.dtype.name == "bfloat16":
                fed[name] = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(value, TensorProto.BFLOAT16)
            else:
                fed[name] = onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(value).reshape(value.shape))
        try:
            return [_array(value) for value in self._session.run_with_ort_values(outputs, fed)]
        except Exception as error:
            raise CannotRun(_reason(error)) from error


def _array(value: onnxruntime.OrtValue) -> np.ndarray:
    if value.element_type() != TensorProto.BFLOAT16:
        return value.numpy()
    shape = value.shape()  # onnxruntime cannot convert bfloat16 to NumPy: its bits are the upper halves of float32
    halves = np.frombuffer(ctypes.string_at(value.data_ptr(), 2 * prod(shape)), np.uint16)
    return (halves.astype(np.uint32) << 16).view(np.float32).reshape(shape)


def optimised(model: onnx.ModelProto, level: str) -> onnx.ModelProto:
    """`model` after onnxruntime's graph optimisations."""
    if hasattr(os, "memfd_create"):  # an unnamed file disappears with the process, even if it is killed
        with open(os.memfd_create("optimised.onnx"), "rb") as file:
            Session(model, level, Path(f"/proc/self/fd/{file.fileno()}"))
            return onnx.load_model_from_string(file.read())
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder) / "optimised.onnx"
        Session(model, level, dump)
        return onnx.load(dump, load_external_data=False)


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())  # onnxruntime gives the found and expected values on later lines
    return (text or type(error).__name__)[:400]


@cache
def loads(opset: int, ir_version: int) -> bool:
    """Whether the installed onnxruntime loads a model of this opset and IR version."""
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "probe", [value], [out])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)
    try:
        Session(model, "off")
    except CannotRun:
        return False
    return True
