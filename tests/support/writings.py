"""A builder of small graphs, for tests that write one norm in many ways: form, dtype, opset, optimiser level."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

from onnx_export import ort
from onnx_export.validation.examine import examine
from onnx_export.validation.options import Options

LEVELS = {
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
_AXES_AS_INPUT = {"ReduceSum": 13, "Squeeze": 13, "Unsqueeze": 13}  # others from opset 18 on


class Writing:
    """A graph under construction. Methods return the names of values; numbers and arrays become constants.

    Parameters
    ----------
    dtype : dtype
        Of the inputs and of constants given as Python floats.
    opset : int
    """

    def __init__(self, dtype=np.float32, opset=17):
        self.dtype, self.opset = np.dtype(dtype), opset
        self.nodes, self.stored, self.inputs, self.functions = [], [], [], []

    @property
    def kind(self):
        return helper.np_dtype_to_tensor_dtype(self.dtype)

    def input(self, name, shape, kind=None):
        self.inputs.append(helper.make_tensor_value_info(name, self.kind if kind is None else kind, shape))
        return name

    def constant(self, value):
        value = np.asarray(value, self.dtype if isinstance(value, float) else None)
        self.stored.append(numpy_helper.from_array(value, f"c{len(self.stored)}"))
        return self.stored[-1].name

    def op(self, kind, *inputs, outputs=1, domain="", **attributes):
        names = [each if isinstance(each, str) else self.constant(each) for each in inputs]
        made = [f"v{len(self.nodes)}" + f"_{i}" * bool(i) for i in range(outputs)]
        self.nodes.append(helper.make_node(kind, names, made, domain=domain, **attributes))
        return made[0] if outputs == 1 else made

    def over(self, kind, x, axes=(-1,), **attributes):
        """A node with axes, in the form of the opset: ReduceMean and its like, Squeeze, Unsqueeze."""
        if self.opset >= _AXES_AS_INPUT.get(kind, 18):
            return self.op(kind, x, np.int64(axes), **attributes)
        return self.op(kind, x, axes=list(axes), **attributes)

    def mean(self, x, axes=(-1,), **attributes):
        return self.over("ReduceMean", x, axes, **attributes)

    def centred(self, x, axes=(-1,)):
        return self.op("Sub", x, self.mean(x, axes))

    def variance(self, d, axes=(-1,)):
        return self.mean(self.op("Mul", d, d), axes)

    def layer_norm(self, x, axes=(-1,), eps=1e-5):
        d = self.centred(x, axes)
        return self.op("Div", d, self.op("Sqrt", self.op("Add", self.variance(d, axes), eps)))

    def gain(self, shape, seed=1):
        return np.random.default_rng(seed).normal(1, 0.2, shape).astype(self.dtype)

    def model(self, *results, kind=None):
        outputs = [helper.make_tensor_value_info(name, kind or self.kind, None) for name in results]
        graph = helper.make_graph(self.nodes, "g", self.inputs, outputs, self.stored)
        domains = {node.domain for node in self.nodes} - {""}
        opsets = [helper.make_opsetid("", self.opset), *(helper.make_opsetid(each, 1) for each in sorted(domains))]
        return helper.make_model(graph, opset_imports=opsets, ir_version=8, functions=self.functions)


def saved(model, level, folder):
    """The model as onnxruntime saves it at an optimisation level; as it is for "none"."""
    if level == "none":
        return model
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = LEVELS[level]
    options.optimized_model_filepath = str(folder / f"{level}.onnx")
    options.log_severity_level = 4
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return onnx.load(folder / f"{level}.onnx")


def result(model, feeds):
    """The first output of the unoptimised runtime."""
    return ort.Session(model, "off").run([model.graph.output[0].name], feeds)[0]


def examined(model, folder, **options):
    """The report of a model, as `cnorm validate` would make it."""
    onnx.save(model, folder / "model.onnx")
    return examine(str(folder / "model.onnx"), Options(**options), lambda *_: None)


def shown(report):
    """What a failed assertion about a report prints."""
    findings = [f"{f.level} {f.code}: {f.message}" for f in report.findings]
    return report.problem, findings, [(n.near_miss, n.verdict, n.detail) for n in report.norms]
