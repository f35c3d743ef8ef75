"""Rewrite decomposed layer norms as LayerNormalization operators, each only where it is proved equal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from cnorm.model import write_whole
from onnx_export.float64 import Float64
from onnx_export.validation import runtime, stress
from onnx_export.validation.graph import FUNCTION_KEY, Scope, opset_versions
from onnx_export.validation.patterns import Norm
from onnx_export.validation.safe_load import model_nodes

_FIRST_OPSET = 17


def repair(path: Path, model: onnx.ModelProto, cases: Sequence) -> list[str]:
    """Write `model` with its decomposed norms replaced.

    A norm is replaced when the file's nodes and the operator agree in float64 on the stress rows and the
    tapped ones, to the rounding of float64 (and of a stored 1/n). Axes that are not the last ones are moved
    there and back by Transpose nodes.

    Parameters
    ----------
    path : Path
        Where to write; replaced in one step, or not at all.
    model : onnx.ModelProto
        The examined model, local functions inlined.
    cases : sequence
        Norms with their oracles and benches, as `examine` leaves them.

    Returns
    -------
    list of str
        One sentence per decomposed norm, and one for the file.

    Raises
    ------
    OSError
        If the file cannot be written.
    runtime.CannotRun
        If onnxruntime does not load the result.
    """
    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    said, count = [], 0
    for case in cases:
        norm = case.norm
        if norm.form != "decomposed":
            continue
        reason = _obstacle(model, case)
        if not reason:
            nodes, stored = _operator(case, f"cnorm_fixed_{count}")
            reason = _difference(model, case, nodes, stored)
        if reason:
            said.append(f"left {norm.name}: {reason}")
            continue
        _replace(fixed.graph, norm, nodes, stored)
        count += 1
        said.append(f"rewrote {norm.name} as LayerNormalization over axes {_axes(case)}, eps {norm.eps:.9g}")
    if count:
        _forget_functions(fixed)
        runtime.Session(fixed, "off")  # a file that does not load is not written
        write_whole(path, fixed.SerializeToString())
    what = f"wrote {path}" if count else "wrote nothing"
    return [*said, f"{what}: {count} of {len(said)} decomposed norms rewritten"]


def _obstacle(model: onnx.ModelProto, case) -> str:
    norm = case.norm
    if norm.near_miss:
        return f"it is no layer norm: {norm.near_miss}"
    if norm.formula != "layer":
        return "it is an RMS norm, and only layer norms are rewritten"
    if norm.scope.path:
        return f"it lies in {norm.scope.label}; only the main graph is rewritten"
    if opset_versions(model).get("", 0) < _FIRST_OPSET:
        return f"LayerNormalization needs opset {_FIRST_OPSET}, the file has {opset_versions(model).get('')}"
    if case.report.verdict == "wrong" and case.report.blame == "file" and norm.variance == "centred":
        return "it does not compute the layer norm it claims"
    if not case.feeds or not case.bench.can_stress:
        return "it was not exercised, so nothing is proved"
    shape = norm.scope.shape(norm.x)
    if shape is None or any(shape[axis] is None for axis in _axes(case)):
        return "its row length is not fixed in the file"
    if not norm.eps > 0:
        return f"its eps is {norm.eps:g}"
    inside = {id(node) for node in norm.nodes}
    for node in norm.nodes:
        for name in node.output:
            users = [n for n in norm.scope.consumers(name) if id(n) not in inside]
            if name != norm.y and (users or name in norm.scope.outputs):
                return f"its inner value {name!r} is used elsewhere"
    if norm.scope.dtype(norm.x) != norm.scope.dtype(norm.y):
        return "its input and result differ in type"
    return ""


def _axes(case) -> list[int]:
    rank = len(case.feeds[0][case.norm.x].shape)
    return sorted(axis % rank for axis in (range(rank) if case.norm.axes is None else case.norm.axes))


def _operator(case, prefix: str) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
    """LayerNormalization on the trailing axes, with transposes where the norm's are others."""
    norm, scope = case.norm, case.norm.scope
    shape = case.feeds[0][norm.x].shape
    rank, axes = len(shape), _axes(case)
    order = [a for a in range(rank) if a not in axes] + axes
    moved = order != list(range(rank))
    width = [shape[axis] for axis in axes]
    dtype = helper.tensor_dtype_to_np_dtype(scope.dtype(norm.x))
    stored, names = [], [f"{prefix}_x" if moved else norm.x]
    for slot, default in (("scale", 1.0), ("bias", 0.0)):
        name = getattr(norm, slot)
        if not name and slot == "bias":
            continue
        value = scope.constant(name) if name else np.full(width, default)
        # broadcast to the whole shape's trailing part, then bring the normalised axes together
        full = value.reshape((1,) * (rank - value.ndim) + value.shape)
        full = np.broadcast_to(full, [shape[a] if a in axes else 1 for a in range(rank)])
        flat = np.ascontiguousarray(full.transpose(order).reshape(width)).astype(dtype)
        stored.append(numpy_helper.from_array(flat, f"{prefix}_{slot}"))
        names.append(f"{prefix}_{slot}")
    result = f"{prefix}_y" if moved else norm.y
    attributes = {"axis": -len(axes), "epsilon": norm.eps, "stash_type": 1}
    nodes = [helper.make_node("LayerNormalization", names, [result], name=norm.name, **attributes)]
    if moved:
        back = [order.index(axis) for axis in range(rank)]
        nodes.insert(0, helper.make_node("Transpose", [norm.x], [names[0]], perm=order))
        nodes.append(helper.make_node("Transpose", [result], [norm.y], perm=back))
    return nodes, stored


def _difference(model: onnx.ModelProto, case, nodes, stored) -> str:
    """Why the operator is not proved equal to the norm's nodes, empty when it is."""
    norm = case.norm
    kind, shape = norm.scope.dtype(norm.x), case.feeds[0][norm.x].shape
    graph = helper.make_graph(
        nodes,
        "proof",
        [helper.make_tensor_value_info(norm.x, kind, shape)],
        [onnx.ValueInfoProto(name=norm.y)],
        stored,
    )
    part = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    operator = Float64(part)
    bench = case.bench
    trials = list(case.feeds)
    for hard in stress.hard_rows(*bench.layout, bench.dtype, norm.eps, seed=0):
        trials.append({**case.feeds[0], norm.x: stress.arrange(norm, hard.rows, shape)})
    for feeds in trials:
        ratio = case.oracle.equality(feeds, operator.run({norm.x: feeds[norm.x]})[norm.y]).ratio
        if ratio > 1:
            return f"its nodes and the operator differ in float64, by {ratio:.3g} times its rounding"
    return ""


def _replace(graph: onnx.GraphProto, norm: Norm, nodes, stored) -> None:
    """Put the operator where the last node of the norm was, and drop the others."""
    made = {name for node in norm.nodes for name in node.output if name}
    kept, placed = [], False
    for node in graph.node:
        if not made.isdisjoint(node.output):
            if norm.y in node.output:
                kept += nodes
                placed = True
            continue
        kept.append(node)
    assert placed
    copies = []
    for node in kept:
        copies.append(onnx.NodeProto())
        copies[-1].CopyFrom(node)
    graph.ClearField("node")
    graph.node.extend(copies)
    graph.initializer.extend(stored)
    _sweep(graph)


def _sweep(graph: onnx.GraphProto) -> None:
    """Remove what nothing uses any more: nodes, initialisers, and types of values that are gone."""
    while True:
        scope = Scope(graph, {}, {})
        idle = [
            node
            for node in scope.nodes
            if not any(scope.consumers(name) or name in scope.outputs for name in node.output)
        ]
        if not idle:
            break
        for node in idle:
            graph.node.remove(node)
    named = scope.outputs | {value.name for value in graph.input}
    for tensor in list(graph.initializer):
        if not scope.consumers(tensor.name) and tensor.name not in named:
            graph.initializer.remove(tensor)
    made = {name for node in graph.node for name in node.output}
    for value in list(graph.value_info):
        if value.name not in made:
            graph.value_info.remove(value)


def _forget_functions(model: onnx.ModelProto) -> None:
    """Remove the marks that inlining left for the report."""
    for node in model_nodes(model):
        for prop in list(node.metadata_props):
            if prop.key == FUNCTION_KEY:
                node.metadata_props.remove(prop)
