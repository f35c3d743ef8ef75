"""Variances and roots in any writing, which evaluation recognises where no pattern does."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import onnx

from onnx_export.graph.scope import op
from onnx_export.nodes import subgraphs
from onnx_export.operators import LAYER
from onnx_export.validation.evaluated import (
    Evaluated,
    evaluated_mean,
    evaluated_moment,
    evaluated_power,
    squares_before,
)
from onnx_export.validation.match import Match
from onnx_export.validation.norm import NONE
from onnx_export.validation.powers import Power
from onnx_export.validation.statistic import Mean, Variance, miscounted

if TYPE_CHECKING:
    from onnx_export.validation.decomposed import Matcher
    from onnx_export.validation.moments import Moments
    from onnx_export.validation.radicand import Radicand

_MOST_VALUES = 24  # that depend on the variance alone


def moment_of_squares(moments: Moments, name: str) -> tuple[str, float, Mean, list[onnx.NodeProto]] | None:
    """`Moments.second_moment` in any writing whose nodes are linear in the squares."""
    values = moments.values
    squares = squares_before(values, name)
    base, exponent, nodes = (squares and moments.power(squares)) or ("", 0.0, [])
    found = evaluated_mean(values, squares, name, 1) if exponent == 2 else None
    if found is None or not found.direct:
        return None
    return base, exponent, _counted(moments, found), [*nodes, *found.mean.nodes]


def any_radicand(moments: Moments, name: str) -> Radicand:
    """`radicand` in any writing of a mean square or variance, and of eps."""
    found = evaluated_moment(moments.values, name)
    if found is None:
        return None, [], {}
    mean, eps = _counted(moments, found), {"eps": found.eps}
    base, casts = moments.values.strip(mean.source)
    mean = replace(mean, source=base, nodes=(*casts, *mean.nodes))
    if found.about_mean:
        variance = Variance(base, "", LAYER, "one-pass", mean, mean.nodes, mean.miscount, True, reshaped=True)
        return variance, [], eps
    return moments.two_pass((base, 2.0, mean, list(mean.nodes)), []), [], eps


def _counted(moments: Moments, found: Evaluated) -> Mean:
    """The mean with a near miss where it is a multiple of that: a sum over another count."""
    n = moments.values.count(found.mean.axes, found.mean.source)
    miscount = miscounted(n, n / found.factor, 2.0**-11) if n and found.factor != 1 else NONE
    return replace(found.mean, miscount=miscount)


def any_root(matcher: Matcher, begun: Match, depth: int) -> list[Match]:
    """The match through values that are powers of the variance in any writing, as far as they depend on it alone."""
    wholes: list[Match] = []
    scope, alone = matcher.scope, [begun.std]
    for name in alone:
        for user in scope.consumers(name):
            others = [each for each in user.input if each and each not in alone and scope.constant(each) is None]
            if not others and len(alone) < _MOST_VALUES and not any(True for _ in subgraphs(user)):
                alone += [each for each in user.output if each and each not in alone]
            if not others or op(user) not in ("Mul", "Div") or name == begun.std:
                continue
            found = evaluated_power(matcher.values, begun.std, name)
            if found is not None and abs(found[0]) > 0.01:
                reached = begun.add(*found[1], std=name, power=Power(found[0]), y=name, stored_reciprocal=True)
                wholes += matcher.advance(reached, user, depth)
    return wholes
