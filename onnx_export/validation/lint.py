"""Findings about norms that need no run of the model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from math import isnan

import numpy as np
import onnx
from onnx import TensorProto, helper

from cnorm.text import quoted
from onnx_export import ort
from onnx_export.graph.scope import attribute, op, opset_versions, scopes, unit_roundoff, used
from onnx_export.nodes import model_nodes
from onnx_export.operators import LAYER, RMS, operator_of
from onnx_export.validation import traps
from onnx_export.validation.findings import Finding, many
from onnx_export.validation.judge import type_name
from onnx_export.validation.norm import Norm
from onnx_export.validation.values import Values, varying

# Operators named norms that are no layer norms; the first two are looked into where their inputs are computed.
_OTHER_NORMS = frozenset({"BatchNormalization", "LpNormalization", "MeanVarianceNormalization", "LRN"})
_NORM_NAME = re.compile(r"norm(ali[sz](ation|e))?$", re.IGNORECASE)
_STATISTICS = {"Sqrt": "root", "ReduceL2": "root", "ReduceMean": "mean"}
_SMALLEST_NORMAL = 2.0**-126  # of float32
LARGE_EPS = 1e-2  # ten times the largest default of a framework, 1e-3 of Keras


def lint_siblings(norms: list[Norm]) -> Iterator[Finding]:
    """Norms that differ in one property from the others of their formula; at least three must share its usual value.

    The formulas themselves are compared between layer and RMS norms. A scale that two norms share, where at least three
    others have one of their own, may be in the wrong place.
    """
    common = [norm for norm in norms if norm.formula in (LAYER, RMS)]
    yield from _odd_ones(common, "formula", lambda norm: norm.formula.name)
    facts = {
        "eps": lambda norm: f"{norm.eps:g}",
        "axes": _axes_from_end,
        "scale": lambda norm: _filling(norm, norm.scale, 1.0, "ones"),
        "bias": lambda norm: _filling(norm, norm.bias, 0.0, "zeros"),
    }
    for name in dict.fromkeys(norm.formula.name for norm in norms):
        alike = [norm for norm in norms if norm.formula.name == name]
        for label, fact in facts.items():
            yield from _odd_ones(alike, label, fact)
    yield from _shared_scales(norms)


def _odd_ones(norms: list[Norm], label: str, fact: Callable[[Norm], str]) -> Iterator[Finding]:
    """Notes on the few norms whose property differs from that of the others; an empty property is unknown."""
    known = {norm: fact(norm) for norm in norms}
    known = {norm: value for norm, value in known.items() if value}
    (usual, count), *others = Counter(known.values()).most_common() or [("", 0)]
    odd = [norm for norm, value in known.items() if value != usual] if count >= 3 and others else []
    for norm in odd if 4 * len(odd) <= len(known) else []:
        yield Finding("note", "unlike-others", f"its {label} is {known[norm]}, of {count} others {usual}", norm.name)


def _axes_from_end(norm: Norm) -> str:
    """The axes counted from the last one; empty if the rank is not known."""
    shape = norm.scope.shape(norm.x)
    if norm.axes is None or shape is None:
        return "all" if norm.axes is None else ""
    return str(sorted(axis - len(shape) if axis >= 0 else axis for axis in norm.axes))


def _filling(norm: Norm, name: str, value: float, plural: str) -> str:
    """ "none", "one", or that the parameter has no effect."""
    stored = norm.scope.constant(name) if name else None
    return "none" if not name else f"all {plural}" if stored is not None and (stored == value).all() else "one"


def _shared_scales(norms: list[Norm]) -> Iterator[Finding]:
    groups: dict[bytes, list[Norm]] = {}
    for norm in norms:
        scale = norm.scope.constant(norm.scale) if norm.scale else None
        if scale is not None and scale.size > 1 and (scale != scale.ravel()[0]).any():
            groups.setdefault(scale.tobytes(), []).append(norm)
    for group in groups.values():
        if len(group) == 2 and len(groups) >= 4:
            yield Finding("note", "unlike-others", f"its scale is that of {group[0].name} too", group[1].name)


def lint_unclaimed(model: onnx.ModelProto, norms: list[Norm]) -> Iterator[Finding]:
    """A note on square roots and means that are part of no recognised norm: some may be norms that were not found.

    Roots of sizes, by which attention is scaled, do not count, nor means alone, which are poolings, beside norms.
    """
    claimed = {id(node) for norm in norms for node in norm.nodes}
    counts = Counter()
    for scope in scopes(model):
        values = Values(scope)
        for node in scope.nodes:
            what = _STATISTICS.get(op(node), "") if id(node) not in claimed else ""
            counts[what] += bool(what) and not values.counted(node.input[0])
    found = [many(counts[what], what) for what in ("root", "mean") if counts[what]]
    if counts["root"] or (found and not norms):
        verb = "belongs" if counts.total() == 1 else "belong"
        yield Finding("note", "unclaimed", f"{' and '.join(found)} {verb} to none" + " of the norms" * bool(norms))


def lint_inputs(model: onnx.ModelProto) -> Iterator[Finding]:
    """A warning for each input of the model that no node reads."""
    graph = model.graph
    read = {name for node in graph.node for name in used(node)} | {value.name for value in graph.output}
    read |= {tensor.name for tensor in graph.initializer}
    for value in graph.input:
        if value.name not in read:
            yield Finding("warning", "unused-input", f"no node reads the input {quoted(value.name)}")


def lint_model(model: onnx.ModelProto) -> Iterator[Finding]:
    """Findings about the file as a whole."""
    yield from lint_inputs(model)
    opset = opset_versions(model).get("", 0)
    if opset and not ort.loads(opset, 8):
        yield Finding("warning", "opset", f"opset {opset} is newer than the installed onnxruntime takes")
    if not ort.loads(17, model.ir_version):
        yield Finding("warning", "ir", f"IR {model.ir_version} is not one the installed onnxruntime takes")
    local = {function.domain for function in model.functions}
    for node in model_nodes(model):
        if node.domain not in local:
            yield from _lint_operator(node, opset)


def _lint_operator(node: onnx.NodeProto, opset: int) -> Iterator[Finding]:
    """Findings about a node that is a norm by its operator, or calls itself one."""
    kind, name = op(node), node.name or next(filter(None, node.output), "")
    known = operator_of(node) is not None
    if known and not (node.output and node.output[0]):
        yield Finding("error", "no-result", f"{kind} does not give its first output, which it must", name)
    first = _first_opset(kind) if known else 0
    if opset < first:
        message = f"{kind} is an operator of opset {first}, the file has {opset}: only onnxruntime runs it"
        yield Finding("warning", "operator-opset", message, name)
    if not known and _NORM_NAME.search(node.op_type) and node.op_type not in _OTHER_NORMS:
        message = f"an operator named {kind}, which is not one of the known norms: what it computes is not proved"
        yield Finding("warning", "unproved-claim", message, name)


@cache
def _first_opset(kind: str) -> int:
    """The opset that introduced an operator of ONNX; 0 for one of onnxruntime."""
    versions = [schema.since_version for schema in onnx.defs.get_all_schemas_with_history() if schema.name == kind]
    return min(versions, default=0)


def lint_norm(norm: Norm) -> Iterator[Finding]:
    """Findings about one norm or near miss."""

    def finding(level: str, code: str, message: str) -> Finding:
        return Finding(level, code, message, norm.name)

    if norm.near_miss:
        level = "error" if norm.near.error else "warning"
        yield finding(level, "near-miss", f"looks like a layer norm, but {norm.near_miss}")
    yield from _epsilon(norm, finding)
    yield from _shapes(norm, finding)
    yield from _scale_axis(norm, finding)
    for slot in ("scale", "bias"):
        value = norm.scope.constant(getattr(norm, slot)) if getattr(norm, slot) else None
        with np.errstate(all="ignore"):
            bad = 0 if value is None else int(np.sum(~np.isfinite(value.astype(np.float64))))
        if bad:
            yield finding("error", f"{slot}-nan", f"{slot} holds NaN or Inf, {bad} of {value.size} values")
    node = norm.nodes[0]
    stash = attribute(node, "stash_type", TensorProto.FLOAT) if norm.operator else TensorProto.FLOAT
    if stash != TensorProto.FLOAT:
        name = type_name(stash) if stash in helper.get_all_tensor_dtypes() else stash
        yield finding("warning", "stash-type", f"stash_type {name}: runtimes support float32 alone")
    if not norm.operator and unit_roundoff(norm.compute_dtype) > unit_roundoff(norm.scope.dtype(norm.x)):
        kinds = type_name(norm.compute_dtype), type_name(norm.scope.dtype(norm.x))
        yield finding("warning", "narrow-statistics", "the statistics are {} where x is {}".format(*kinds))
    if norm.eps >= LARGE_EPS:
        yield finding("note", "eps-large", f"eps is {norm.eps:g}: rows of a standard deviation below 0.1 shrink")
    trap = trap_of(norm)
    if trap and traps.miscomputes(trap):
        yield finding("warning", "miscomputed", f"the installed onnxruntime gets this wrong: {traps.TRAPS[trap]}")


def _epsilon(norm: Norm, finding) -> Iterator[Finding]:
    level = "warning" if norm.near_miss and not norm.claimed else "error"  # a near miss may be intended as it is
    if isnan(norm.eps):
        yield finding("error", "eps-nan", "eps is NaN: every result will be NaN")
    elif norm.eps < 0:
        yield finding(level, "eps-negative", f"eps is {norm.eps:g}: rows of small variance give NaN")
    elif norm.floor > 0:
        return
    elif norm.eps == 0:
        half = norm.eps_dtype == TensorProto.FLOAT16
        kind = type_name(norm.eps_dtype) + ", where numbers below 3e-08 are 0: keep it in float32" * half
        yield finding(level, "eps-zero", f"eps is 0 as stored ({kind}): constant rows give NaN")
    elif norm.eps < _SMALLEST_NORMAL and TensorProto.DOUBLE not in (norm.eps_dtype, norm.compute_dtype):
        message = f"eps is {norm.eps:.3g}, subnormal: where these are taken for 0, constant rows give NaN"
        yield finding("warning", "eps-subnormal", message)


def _shapes(norm: Norm, finding) -> Iterator[Finding]:
    node, scope = norm.nodes[0], norm.scope
    shape = scope.shape(norm.x)
    operator = norm.operator
    if shape is None or operator is None or operator.lookup:
        return
    fault = operator.axis_error(node, len(shape))
    if fault:
        yield finding("error", "axis", fault)
        return
    for slot in ("scale", "bias"):
        given = scope.shape(getattr(norm, slot)) if getattr(norm, slot) else None
        if given is not None and not norm.formula.accepts(given, shape, node):
            sizes = ["?" if size is None else size for size in shape]
            yield finding("error", f"{slot}-shape", f"{slot} of shape {list(given)} does not broadcast to {sizes}")


def _scale_axis(norm: Norm, finding) -> Iterator[Finding]:
    """A constant that multiplies the result and varies along other axes than the normalised ones only.

    A note where these come before the normalised ones: gains for each channel or head are such constants. Else a
    warning: the norm is over the wrong axis.
    """
    shape = norm.scope.shape(norm.x)
    if norm.operator or norm.axes is None or shape is None:
        return
    value = norm.scope.constant(norm.scale or _multiplier(norm))
    axes = set() if value is None or value.ndim > len(shape) else varying(value, len(shape))
    if axes and axes.isdisjoint(norm.axes):
        message = f"its mean is over axes {list(norm.axes)}, but its scale varies along {sorted(axes)}"
        yield finding("warning" if max(axes) > min(norm.axes) else "note", "scale-axis", message)


def _multiplier(norm: Norm) -> str:
    """The value that the result of a norm is multiplied by, if that is its only use; else empty."""
    node, name, _ = Values(norm.scope).only_user(norm.y)
    if node is None or op(node) != "Mul":
        return ""
    return node.input[1] if node.input[0] == name else node.input[0]


def trap_of(norm: Norm) -> str:
    """The key in `traps.TRAPS` of the pattern that this norm has, empty for none."""
    if norm.operator:
        producer = norm.scope.producer(norm.x)
        scale = norm.scope.shape(norm.scale)
        several = norm.axes is not None and len(norm.axes) > 1
        if producer is not None and producer.op_type == "Add" and several and scale is not None and len(scale) == 1:
            return norm.operator.trap_behind_add
        return ""
    # onnxruntime's fusion matches only with a Pow and a scale
    if not norm.scale or not any(n.op_type == "Pow" for n in norm.nodes):
        return ""
    # harmless if eps equals the default 1e-5 by which the fusion replaces it
    return norm.near.trap or ("eps-first" if norm.eps_first and abs(norm.eps - 1e-5) > 1e-9 else "")
