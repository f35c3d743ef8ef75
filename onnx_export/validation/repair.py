"""Rewrite decomposed layer norms as LayerNormalization operators, each only where it is proved equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from cnorm.storage.files import write_whole
from onnx_export import ort
from onnx_export.float64 import Float64
from onnx_export.graph.scope import FUNCTION_KEY, opset_versions, used
from onnx_export.nodes import free_prefix, model_nodes
from onnx_export.validation import stress
from onnx_export.validation.norm import Norm
from onnx_export.validation.run import Candidate, Case
from onnx_export.validation.values import Values

_FIRST_OPSET = 17
# Tolerances between the outputs of two models. Relative to the largest element of the row: float32 rounding is smaller,
# the error of a wrongly connected model larger.
_AGREE = 1e-3
# Relative to the largest element of the whole output: a row of small values left by cancellation is rounding noise.
_NOISE = 1e-7


class CannotRepair(RuntimeError):
    """The model with its norms replaced could not be shown to compute the same as the original."""


@dataclass(frozen=True)
class Replacement:
    """The replacement of a norm: nodes and the initialisers they need."""

    norm: Norm
    nodes: list[onnx.NodeProto]
    stored: list[onnx.TensorProto]


def repair(
    path: Path, model: onnx.ModelProto, cases: Sequence[Case | Candidate], feeds: dict[str, np.ndarray]
) -> list[str]:
    """Write `model` with its decomposed norms replaced.

    A norm is replaced if the file's nodes and the operator agree in float64 on the stress rows and the tapped rows, up
    to the rounding of float64 (and of a stored 1/n). Where the axes are not the last ones, Transpose nodes are added
    before and after the operator. The file is written if onnx's checker accepts it and its outputs agree with those
    of `model`.

    Parameters
    ----------
    path : Path
        Where to write; replaced in one step, or not at all.
    model : onnx.ModelProto
        The examined model, local functions inlined.
    cases : sequence of Case or Candidate
        Every norm in order; a Candidate is left as it is, because it was not exercised.
    feeds : dict of str to array
        Inputs of the model.

    Returns
    -------
    list of str
        One sentence per decomposed norm, and one for the file.

    Raises
    ------
    OSError
        If the file cannot be written.
    CannotRepair
        If the result does not load, or is not the same model.
    """
    prefix = free_prefix(model, "cnorm_fixed")
    sentences, chosen = [], []
    for case in cases:
        norm = case.norm
        if norm.operator:
            continue
        try:
            reason = _obstacle(model, case)
            if not reason:
                operator = replacement(case, f"{prefix}_{len(chosen)}")
                reason = _difference(model, case, operator)
        except MemoryError:
            raise
        except Exception as error:  # a failure on one norm must not affect the others
            reason = f"it could not be rewritten: {type(error).__name__}: {str(error)[:200]}"
        if reason:
            sentences.append(f"left {norm.name}: {reason}")
            continue
        chosen.append(operator)
        sentences.append(f"rewrote {norm.name} as LayerNormalization over axes {_axes(case)}, eps {norm.eps:.9g}")
    what = "wrote nothing"
    if chosen:
        fixed = replaced(model, chosen)
        what = f"wrote {path}{_proof(model, fixed, feeds)}"
        write_whole(path, fixed.SerializeToString())
    return [*sentences, f"{what}: {len(chosen)} of {len(sentences)} decomposed norms rewritten"]


def _obstacle(model: onnx.ModelProto, case: Case | Candidate) -> str:
    """Why the norm cannot be replaced, empty when it can."""
    norm = case.norm
    if norm.near_miss:
        return f"it is no layer norm: {norm.near_miss}"
    if not norm.formula.centred:
        return "it is an RMS norm, and only layer norms are rewritten"
    if norm.scope.path:
        return f"it lies in {norm.scope.label}; only the main graph is rewritten"
    if opset_versions(model).get("", 0) < _FIRST_OPSET:
        return f"LayerNormalization needs opset {_FIRST_OPSET}, the file has {opset_versions(model).get('')}"
    if case.report.verdict == "wrong" and case.report.blame == "file" and norm.variance == "centred":
        return "it does not compute the layer norm it claims"
    if not isinstance(case, Case) or case.report.verdict == "not exercised" or not case.isolated.can_stress:
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
            if name != norm.y and not _is_copy(norm, name) and (users or name in norm.scope.outputs):
                return f"its inner value {name!r} is used elsewhere"
    if norm.scope.dtype(norm.x) != norm.scope.dtype(norm.y):
        return "its input and result differ in type"
    replaceable = _replaceable(model, norm)
    if replaceable:
        return f"its {replaceable!r} can be replaced by the caller"
    return _misfit(case, "scale") or _misfit(case, "bias")


def _is_copy(norm: Norm, name: str) -> bool:
    """Whether a value is the norm's input behind Identity or Cast: it stays where others use it."""
    return Values(norm.scope).same(name, norm.x)


def _replaceable(model: onnx.ModelProto, norm: Norm) -> str:
    """An input of the model with a stored default that the norm's constants are computed from; empty for none."""
    defaults = {value.name for value in model.graph.input} & {tensor.name for tensor in model.graph.initializer}
    inside = {id(node) for node in norm.nodes}
    pending, seen = [norm.y], {norm.x}
    while pending:
        name = pending.pop()
        if name in defaults:
            return name
        node = norm.scope.producer(name)
        if name not in seen and node and (id(node) in inside or norm.scope.constant(name) is not None):
            pending += [each for each in node.input if each not in seen]
        seen.add(name)
    return ""


def _misfit(case: Case, slot: str) -> str:
    """Why the operator cannot take the scale or bias, empty when it can."""
    name, shape, axes = getattr(case.norm, slot), case.feeds[0][case.norm.x].shape, _axes(case)
    if not name:
        return ""
    value = case.norm.scope.constant(name)
    if value is None:
        return f"its {slot} is not stored in the file"
    allowed = [{1, size} if axis in axes else {1} for axis, size in enumerate(shape)]
    fits = value.ndim <= len(shape) and all(map(set.__contains__, allowed[len(shape) - value.ndim :], value.shape))
    return "" if fits else f"its {slot} of shape {list(value.shape)} is not one for the axes {axes} of {list(shape)}"


def _axes(case: Case) -> list[int]:
    rank = len(case.feeds[0][case.norm.x].shape)
    return sorted(axis % rank for axis in (range(rank) if case.norm.axes is None else case.norm.axes))


def replacement(case: Case, prefix: str) -> Replacement:
    """LayerNormalization over the last axes, between two Transpose nodes if the norm's axes are not the last."""
    norm, scope = case.norm, case.norm.scope
    shape = case.feeds[0][norm.x].shape
    rank, axes = len(shape), _axes(case)
    order = [a for a in range(rank) if a not in axes] + axes
    transposed = order != list(range(rank))
    width = [shape[axis] for axis in axes]
    dtype = helper.tensor_dtype_to_np_dtype(scope.dtype(norm.x))
    stored, names = [], [f"{prefix}_x" if transposed else norm.x]
    for slot, default in (("scale", 1.0), ("bias", 0.0)):
        name = getattr(norm, slot)
        if not name and slot == "bias":
            continue
        value = scope.constant(name) if name else np.array(default)
        # broadcast to the shape of x with the other axes of length 1, then move the normalised axes to the end
        full = value.reshape((1,) * (rank - value.ndim) + value.shape)
        full = np.broadcast_to(full, [shape[a] if a in axes else 1 for a in range(rank)])
        flat = np.ascontiguousarray(full.transpose(order).reshape(width)).astype(dtype)
        stored.append(numpy_helper.from_array(flat, f"{prefix}_{slot}"))
        names.append(f"{prefix}_{slot}")
    result = f"{prefix}_y" if transposed else norm.y
    attributes = {"axis": -len(axes), "epsilon": norm.eps, "stash_type": 1}
    nodes = [helper.make_node("LayerNormalization", names, [result], name=norm.name, **attributes)]
    if transposed:
        back = [order.index(axis) for axis in range(rank)]
        nodes.insert(0, helper.make_node("Transpose", [norm.x], [names[0]], perm=order))
        nodes.append(helper.make_node("Transpose", [result], [norm.y], perm=back))
    return Replacement(norm, nodes, stored)


def _difference(model: onnx.ModelProto, case: Case, replacement: Replacement) -> str:
    """Why the operator is not proved equal to the norm's nodes, empty when it is."""
    norm = case.norm
    kind, shape = norm.scope.dtype(norm.x), case.feeds[0][norm.x].shape
    graph = helper.make_graph(
        replacement.nodes,
        "proof",
        [helper.make_tensor_value_info(norm.x, kind, shape)],
        [onnx.ValueInfoProto(name=norm.y)],
        replacement.stored,
    )
    part = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    operator = Float64(part)
    isolated = case.isolated
    trials = list(case.feeds)
    for hard in stress.hard_rows(*isolated.layout, isolated.dtype, norm.eps, seed=0):
        trials.append({**case.feeds[0], norm.x: norm.formula.arrange(hard.rows, shape, norm.axes)})
    for feeds in trials:
        ratio = case.oracle.equality(feeds, operator.run({norm.x: feeds[norm.x]})[norm.y]).ratio
        if ratio > 1:
            message = f"its nodes and the operator differ in float64, by {ratio:.3g} times its rounding"
            half = norm.eps_dtype in (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
            return message + f"; its eps, in a half type, is {norm.eps:.9g}: store it in float32" * half
    return ""


def replaced(model: onnx.ModelProto, chosen: list[Replacement]) -> onnx.ModelProto:
    """A copy of `model` with each operator in place of its norm's last node, without nodes and tensors left unused."""
    ends = {operator.norm.y: operator.nodes for operator in chosen}
    inside = [(operator.norm, node) for operator in chosen for node in operator.norm.nodes]
    gone = {name for norm, node in inside for name in node.output if name and not _is_copy(norm, name)}
    nodes = []
    for node in model.graph.node:
        if gone.isdisjoint(node.output):
            nodes.append(node)
        else:
            nodes += next((ends[name] for name in node.output if name in ends), [])
    before, after = _needed(model.graph, model.graph.node), _needed(model.graph, nodes)
    gone = (gone - ends.keys() | before) - after  # keep what was unused in the original, too
    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    graph = fixed.graph
    del graph.node[:]
    graph.node.extend(node for node in nodes if gone.isdisjoint(node.output) or not after.isdisjoint(node.output))
    gone -= {value.name for value in graph.input}
    for field in (graph.initializer, graph.value_info):
        for index in reversed(range(len(field))):
            if field[index].name in gone:
                del field[index]
    graph.initializer.extend(tensor for operator in chosen for tensor in operator.stored)
    _forget_functions(fixed)
    return fixed


def _needed(graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto]) -> set[str]:
    """The values that an output of the graph depends on; `nodes` are in topological order."""
    needed = {value.name for value in graph.output}
    for node in reversed(nodes):
        if not needed.isdisjoint(node.output):
            needed.update(used(node))
    return needed


def _proof(model: onnx.ModelProto, fixed: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> str:
    """Compare the outputs of the repaired model with the original's; CannotRepair if they differ.

    Returns a remark for the report if they could not be compared, else an empty string.
    """
    fault = _fault(fixed)
    if fault and not _fault(model):
        raise CannotRepair(f"onnx's checker refuses the result: {fault}")
    names = [value.name for value in model.graph.output]
    try:
        session = ort.Session(model, "off")
        before, after = session.run(names, feeds), ort.Session(fixed, "off").run(names, feeds)
        if agree(before, after):
            return _unseen(names, before)
        if not agree(before, session.run(names, feeds)):
            return " (not compared: the model gives other results at each run)"
    except ort.CannotRun as error:
        raise CannotRepair(f"onnxruntime does not run the result: {error}") from error
    # The difference may be float32 rounding, above all of a one-pass variance: compare in float64.
    try:
        exact = [list(Float64(each).run(feeds).values()) for each in (model, fixed)]
    except MemoryError:
        raise
    except Exception as error:  # onnx's evaluator lacks some operators
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise CannotRepair(f"the outputs differ, and could not be compared in float64: {reason}") from error
    if not agree(*exact):
        raise CannotRepair("the outputs of the repaired model differ")
    return _unseen(names, exact[0])


def _unseen(names: list[str], outputs: list[np.ndarray]) -> str:
    """A remark naming an output without a finite element, whose comparison shows nothing; empty if there is none."""
    for name, output in zip(names, map(np.asarray, outputs), strict=True):
        if output.dtype.kind == "f" and output.size and not np.isfinite(output).any():
            return f" (not compared: {name!r} has no finite element)"
    return ""


def _fault(model: onnx.ModelProto) -> str:
    """The error of onnx's checker, empty when it accepts the model."""
    try:
        onnx.checker.check_model(model)
    except Exception as error:  # the C++ layer raises exceptions of many types
        return " ".join(str(error).split())[:200] or type(error).__name__
    return ""


def agree(some: list[np.ndarray], others: list[np.ndarray]) -> bool:
    """Whether all outputs are the same up to rounding."""
    return all(map(_alike, map(np.asarray, some), map(np.asarray, others)))


def _alike(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether one output is the same up to _AGREE and _NOISE; integers must be equal."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.kind != "f":
        return bool(np.all(a == b))
    a, b = np.atleast_1d(a, b)
    with np.errstate(all="ignore"):
        size = np.where(np.isfinite(a), np.abs(a), 0)
        slack = np.maximum(_AGREE * size.max(-1, initial=0, keepdims=True), _NOISE * size.max(initial=0))
        return bool(np.all((np.abs(a - b) <= slack) | (a == b) | (np.isnan(a) & np.isnan(b))))


def _forget_functions(model: onnx.ModelProto) -> None:
    """Remove the metadata that named the local function of each node for the report."""
    for node in model_nodes(model):
        for prop in list(node.metadata_props):
            if prop.key == FUNCTION_KEY:
                node.metadata_props.remove(prop)
