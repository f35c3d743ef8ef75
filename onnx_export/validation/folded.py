"""Norms whose mean is folded into the bias: bias - mean * rstd is computed first, then added to x * rstd."""

from __future__ import annotations

import onnx

from onnx_export.graph.scope import op
from onnx_export.graph.tables import SAME
from onnx_export.validation.match import Match
from onnx_export.validation.moments import DEEPEST, Moments
from onnx_export.validation.values import QUANTISERS


def folded_mean(moments: Moments, found: Match, user: onnx.NodeProto) -> Match | None:
    """x * r + (bias - mean * r), as TensorFlow's batch_normalization computes it; r is rstd or rstd * scale."""
    variance = found.variance
    other = user.input[1] if user.input[0] == found.std else user.input[0]
    if found.rms or not moments.values.same(other, variance.x):
        return None
    for last, product, path in moments.values.users(user.output[0]):
        if op(last) not in ("Add", "Sub") or (op(last) == "Sub" and last.input[0] != product):
            continue
        rest = last.input[1] if last.input[0] == product else last.input[0]
        offset = _offset(moments, rest, found, op(last) == "Sub")
        if offset is not None:
            bias, nodes, mean = offset
            nodes = (user, *path, *nodes, last)
            return found.add(*nodes, near=mean.misbroadcast, y=last.output[0], bias=bias, folded=bool(bias))
    return None


def _offset(moments: Moments, name: str, found: Match, negated: bool, depth: int = DEEPEST):
    """(bias, nodes, mean) if the value is bias - mean * rstd, or mean * rstd if `negated`; bias may be empty."""
    name, passed = moments.values.strip(name, SAME | QUANTISERS)
    node = moments.scope.producer(name)
    if node is None or depth == 0:
        return None
    offset = _unpassed(moments, node, found, negated, depth)
    return offset and (offset[0], [*passed, *offset[1]], offset[2])


def _unpassed(moments: Moments, node: onnx.NodeProto, found: Match, negated: bool, depth: int):
    """`_offset` of the result of a node."""
    if op(node) == "Mul":
        return _scaled_mean(moments, node, found, negated)
    if op(node) == "Neg" and not negated:
        inner = _offset(moments, node.input[0], found, True, depth - 1)
        return inner and (inner[0], [node, *inner[1]], inner[2])
    if op(node) == "Sub" and not negated and moments.scope.constant(node.input[0]) is not None:
        inner = _offset(moments, node.input[1], found, True, depth - 1)
        return inner and (node.input[0], [node, *inner[1]], inner[2])
    if op(node) == "Add" and not negated:
        for a, b in (node.input, reversed(node.input)):
            if moments.scope.constant(a) is not None:
                inner = _offset(moments, b, found, False, depth - 1)
                return inner and (a, [node, *inner[1]], inner[2])
    return None


def _scaled_mean(moments: Moments, node: onnx.NodeProto, found: Match, negated: bool):
    """As `_offset`, for the product alone: mean * rstd if `negated`, else -mean * rstd."""
    for a, b in (node.input, reversed(node.input)):
        if not moments.values.same(b, found.std):
            continue
        inner, path = moments.values.strip(a, SAME | QUANTISERS)
        flip = None if negated else moments.values.made_by(inner, "Neg")
        if flip is not None:
            path, inner = [*path, flip], flip.input[0]
        elif not negated:
            continue
        mean = moments.mean(inner)
        if mean is not None and moments.values.same(mean.source, found.variance.x):
            return "", [node, *path, *mean.nodes], mean
    return None
