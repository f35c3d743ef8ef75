"""Near misses that resemble a norm but lack its root or its centring: found where a deviation is used otherwise."""

from __future__ import annotations

import onnx

from onnx_export.graph.scope import op
from onnx_export.operators import LAYER
from onnx_export.validation.match import Match
from onnx_export.validation.moments import Moments
from onnx_export.validation.norm import NearMiss
from onnx_export.validation.powers import Power
from onnx_export.validation.statistic import Variance
from onnx_export.validation.values import PASSED, SUMS

_FARTHEST = 64  # limit on the values that `uncentred` and `_depends` visit


def absolute(moments: Moments, node: onnx.NodeProto) -> Match | None:
    """Near miss: (x - mean) / mean(|x - mean|)."""
    name, nodes = moments.values.strip(node.input[1], PASSED)
    total, eps = moments.values.made_by(name, "Add"), 0.0
    for a, b in (total.input, reversed(total.input)) if total is not None else ():
        if moments.values.scalar(a) is not None:
            name, nodes, eps = b, [*nodes, total], moments.values.scalar(a)
    mean = moments.mean(name)
    sizes = None if mean is None or mean.squared else moments.values.made_by(mean.source, "Abs")
    centred = None if sizes is None else moments.centred(sizes.input[0])
    if centred is None or not moments.values.same(sizes.input[0], node.input[0]):
        return None
    x, inner, more = centred.x, centred.mean, centred.nodes
    miscount = mean.miscount.then(inner.miscount)
    reason = "it divides by the mean absolute deviation, not by the standard deviation"
    near = NearMiss(", and ".join(filter(None, (reason, miscount.reason))), miscount.error)
    variance = Variance(x, sizes.input[0], LAYER, "centred", mean, (*more, sizes, *mean.nodes, *nodes), near)
    everything = (*variance.nodes, node, *moments.values.strip(node.input[0])[1])
    kind = moments.values.dtype(x)
    return Match(variance, everything, node.output[0], "", Power(), eps, kind, near=near)


def uncentred(moments: Moments, found: Match, user: onnx.NodeProto) -> Match | None:
    """Near miss: x / std. None if a later sum adds a value computed from the mean or std: it may be mean / std."""
    variance = found.variance
    if found.rms or not moments.values.same(user.input[0], variance.x):
        return None
    reached = [user.output[0]]
    for name in reached:
        for node in moments.scope.consumers(name):
            known = all(moments.scope.constant(other) is not None for other in node.input if other not in ("", name))
            others = [other for other in node.input if other not in ("", name)]
            if len(reached) > _FARTHEST:
                return None
            if op(node) in SUMS and not known:
                if any(_depends(moments, other, found, reached) for other in others):
                    return None
                continue
            if op(node) in PASSED | {"Neg"} or (op(node) in SUMS | {"Mul", "Div"} and known):
                reached.append(node.output[0])
    path = moments.values.strip(user.input[0])[1]
    return found.add(*path, near=NearMiss("x is divided by the deviation, not x - mean"))


def _depends(moments: Moments, name: str, found: Match, quotients: list[str]) -> bool:
    """Whether a value is computed from the deviation or mean of a match, other than through its quotient.

    True also for a mean of one of `quotients` (the quotient and its multiples), which may centre it afterwards, and
    if _FARTHEST values leave it open.
    """
    inside = {out for node in found.nodes for out in node.output if out} - {found.y, found.variance.x}
    pending, seen = [name], set()
    while pending and len(seen) < _FARTHEST:
        current = pending.pop()
        node = moments.scope.producer(current)
        mean = moments.mean(current)
        centres = mean is not None and any(
            moments.values.same(mean.source, each) for each in (found.variance.x, *quotients)
        )
        if current in inside or centres:
            return True
        stop = current == found.y or moments.values.same(current, found.variance.x)
        if node is not None and current not in seen and not stop:
            pending += [each for each in node.input if each]
        seen.add(current)
    return len(seen) >= _FARTHEST
