"""onnxruntime: sessions by optimisation level, and the opset and IR versions that it loads."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

from onnx_export.nodes import model_graphs, model_nodes

LEVELS = {
    "off": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
_TYPES = {
    f"tensor({name})": getattr(TensorProto, kind)
    for name, kind in (("float", "FLOAT"), ("float16", "FLOAT16"), ("bfloat16", "BFLOAT16"), ("double", "DOUBLE"))
} | {f"tensor({kind.lower()})": getattr(TensorProto, kind) for kind in ("INT64", "INT32", "INT8", "UINT8", "BOOL")}
_SAVED = "session.optimized_model_external_initializers"
# Those whose operators the installed onnxruntime has, also the ones of its saved files.
KNOWN_DOMAINS = frozenset({"", "ai.onnx"} | {schema.domain for schema in get_all_operator_schema()})


class CannotRun(RuntimeError):
    """onnxruntime cannot load or run the model."""


class Session:
    """A model at one optimisation level, single-threaded on the CPU.

    Parameters
    ----------
    model : onnx.ModelProto
    level : str
        A key of LEVELS.
    weights : mapping of str to ndarray, optional
        Values of initialisers that are external data in the message. They are not copied.
    dump : _Dump, optional
        Where to write the optimised model.
    disabled : sequence of str
        Optimisers to leave out.

    Raises
    ------
    CannotRun
        With the runtime's reason.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        level: str,
        weights: Mapping[str, np.ndarray] | None = None,
        dump=None,
        disabled: Sequence[str] = (),
    ) -> None:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = LEVELS[level]
        options.enable_cpu_mem_arena = False
        options.log_severity_level = 4
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        weights = {name: weights[name] for name in sorted(_read(model) & weights.keys())} if weights else {}
        if dump is not None:
            options.optimized_model_filepath = str(dump.model)
        if dump is not None and weights:
            options.add_session_config_entry(f"{_SAVED}_file_name", dump.weights)
            options.add_session_config_entry(
                f"{_SAVED}_min_size_in_bytes", str(min(w.nbytes for w in weights.values()))
            )
        if weights:
            # the values must live as long as the session
            self._weights = list(map(onnxruntime.OrtValue.ortvalue_from_numpy, weights.values()))
            options.add_external_initializers(list(weights), self._weights)
        try:
            self._session = onnxruntime.InferenceSession(
                model.SerializeToString(),
                options,
                providers=["CPUExecutionProvider"],
                disabled_optimizers=list(disabled) or None,
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
            values = self._session.run_with_ort_values(outputs, fed)
            return [_array(values.pop(0)) for _ in range(len(values))]  # each is freed when it is copied
        except Exception as error:
            raise CannotRun(_reason(error)) from error

    def outputs(self) -> dict[str, tuple[str, list]]:
        """Type, such as "tensor(float)", and shape of each output, as onnxruntime infers them."""
        return {value.name: (value.type, value.shape) for value in self._session.get_outputs()}


def _read(model: onnx.ModelProto) -> set[str]:
    """Names that nodes or outputs of the model read: onnxruntime refuses values for initialisers that nobody reads."""
    names = {name for node in model_nodes(model) for name in node.input}
    return names | {value.name for graph in model_graphs(model) for value in graph.output}


def _array(value: onnxruntime.OrtValue) -> np.ndarray:
    if value.element_type() != TensorProto.BFLOAT16:
        return value.numpy()
    shape = value.shape()  # onnxruntime cannot convert bfloat16 to NumPy: its bits are the upper halves of float32
    halves = np.frombuffer(ctypes.string_at(value.data_ptr(), 2 * prod(shape)), np.uint16)
    return (halves.astype(np.uint32) << 16).view(np.float32).reshape(shape)


@dataclass(frozen=True)
class _Dump:
    """Where onnxruntime writes the optimised model, and its weights by a path relative to the folder of the model."""

    model: Path
    weights: str


def optimised(model: onnx.ModelProto, level: str, weights: Mapping[str, np.ndarray] | None = None) -> onnx.ModelProto:
    """`model` after onnxruntime's graph optimisations; with `weights`, large initialisers are not in the result."""
    if hasattr(os, "memfd_create"):  # unnamed files disappear with the process, even if it is killed
        with open(os.memfd_create("optimised.onnx"), "rb") as file, tempfile.TemporaryFile() as unused:
            # not /dev/null: onnxruntime 1.32 deletes a file of weights that is empty when it has written it
            Session(model, level, weights, _Dump(Path(f"/proc/self/fd/{file.fileno()}"), str(unused.fileno())))
            return onnx.load_model_from_string(file.read())
    with tempfile.TemporaryDirectory() as folder:
        dump = _Dump(Path(folder) / "optimised.onnx", "weights")
        Session(model, level, weights, dump)
        return onnx.load(dump.model, load_external_data=False)


def add_types(model: onnx.ModelProto, weights: Mapping[str, np.ndarray] | None = None) -> None:
    """Add the types and shapes that onnxruntime infers for values of the main graph, also behind its own operators.

    Nothing is run. A model that onnxruntime refuses stays as it is.
    """
    graph = model.graph
    values = (*graph.input, *graph.output, *graph.value_info)
    known = {value.name for value in values if value.type.tensor_type.HasField("shape")}
    unknown = [name for node in graph.node for name in node.output if name and name not in known]
    exposed = onnx.ModelProto()
    exposed.CopyFrom(model)
    exposed.graph.output.extend(onnx.ValueInfoProto(name=name) for name in unknown)
    try:
        inferred = Session(exposed, "off", weights).outputs()
    except CannotRun:
        return
    for name in unknown:
        kind, shape = inferred.get(name, ("", []))
        if kind in _TYPES and shape:
            sizes = [size if isinstance(size, int) else None for size in shape]
            graph.value_info.append(helper.make_tensor_value_info(name, _TYPES[kind], sizes))


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
