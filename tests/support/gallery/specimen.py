"""Building blocks of small models, one for each thing the validator must find, distinguish or ignore.

Each specimen declares the expected report: norms in order as (formula, verdict, blame), near misses marked
with "~", finding codes, and the exit code at default settings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnx_export.validation import traps

FLOAT, HALF, DOUBLE, BFLOAT = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16
INT64, INT8 = TensorProto.INT64, TensorProto.INT8
N = 16
OK = ("layer", "ok", "")


@dataclass
class Specimen:
    """A model and its expected report."""

    model: onnx.ModelProto
    norms: list[tuple[str, str, str]] = field(default_factory=lambda: [OK])
    findings: set[str] = field(default_factory=set)
    exit_code: int = 0
    input: dict[str, np.ndarray] | None = None
    options: dict = field(default_factory=dict)


SPECIMENS: list[Callable[[], Specimen]] = []


def specimen(build: Callable[[], Specimen]) -> Callable[[], Specimen]:
    """Register a builder; the specimen has its name."""
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
    """A model with input `x` and output `y` by default."""
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
    """A reduction in the form that its opset requires."""
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
    """The expectation for a pattern that onnxruntime may miscompute: it depends on the installed version."""
    if traps.miscomputes(trap):
        return [("layer", "wrong", "optimiser")], 1, {"miscomputed"}
    return [OK], 0, set()
