"""Norms whose root is inside another operator: BatchNormalization of computed statistics, and LpNormalization."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import onnx
from onnx import TensorProto

from onnx_export.graph.scope import attribute, op
from onnx_export.operators import LAYER, RMS
from onnx_export.validation.match import Match
from onnx_export.validation.moments import Moments
from onnx_export.validation.norm import NearMiss
from onnx_export.validation.powers import Power
from onnx_export.validation.statistic import Mean, Variance


def batch_norm(moments: Moments, node: onnx.NodeProto) -> Match | None:
    """A BatchNormalization whose channels are rows: its mean and variance are computed from its own input.

    Keras 2 reshapes rows to the channels of one image; the scale and bias of the operator are ones and zeros then.
    """
    values, scope = moments.values, moments.scope
    x, scale, bias = node.input[:3]
    shape = scope.shape(x)
    if shape is None or len(shape) < 3 or shape[0] != 1:
        return None
    if not values.filled(scale, 1.0) or not values.filled(bias, 0.0):
        return None
    axes = (0, *range(2, len(shape)))
    if attribute(node, "training_mode", 0):
        variance = Variance(x, "", LAYER, "operator", Mean(x, axes, True, ()), ())
    else:
        variance = _computed(moments, node, axes)
    if variance is None:
        return None
    eps = float(np.float32(attribute(node, "epsilon", 1e-5)))
    begun = Match(
        variance=variance,
        nodes=(*variance.nodes, node),
        y=node.output[0],
        std="",
        power=Power(-0.5),
        eps=eps,
        eps_dtype=TensorProto.FLOAT,
        near=variance.near,
        stored_reciprocal=variance.stored_reciprocal,
        axes=axes,
        shared=len(variance.nodes),
    )
    return _without_reshapes(moments, begun, shape)


def _computed(moments: Moments, node: onnx.NodeProto, axes: tuple[int, ...]) -> Variance | None:
    """The variance of a BatchNormalization if it and the mean are statistics of each channel of the input."""
    values, shape = moments.values, moments.scope.shape(node.input[0])
    mean, variance = moments.mean(node.input[3]), moments.variance(node.input[4])
    if mean is None or variance is None or mean.squared or variance.order:
        return None
    added = values.made_by(values.strip(node.input[0])[0], "Unsqueeze")
    long = {axis for axis in axes if shape[axis] != 1}
    for found, source in ((mean, mean.source), (variance.mean, variance.x)):
        covered = set(axes if found.axes is None else found.axes)
        inside = added is not None and values.same(source, added.input[0])  # means are restated for what is unsqueezed
        if inside and None not in shape[2:] and values.count(found.axes, source) == prod(shape[2:]):
            continue
        if not values.same(source, node.input[0]) or not long <= covered <= set(axes):
            return None
    raw = NearMiss("the numerator is centred, the variance is not") if variance.formula is RMS else variance.near
    rounded = mean.stored_reciprocal or variance.stored_reciprocal
    nodes = (*mean.nodes, *variance.nodes)
    return replace(variance, nodes=nodes, near=raw.then(mean.miscount), stored_reciprocal=rounded, reshaped=True)


def _without_reshapes(moments: Moments, found: Match, shape: tuple[int | None, ...]) -> Match:
    """The match restated for the value before a change of shape that is undone after the operator."""
    values, scope, x = moments.values, moments.scope, found.variance.x
    before = values.made_by(values.strip(x)[0], "Reshape", "Unsqueeze")
    given = None if before is None else scope.shape(before.input[0])
    back = None if before is None else values.reshaped_back(found.y, given, before.input[0])
    length = None if None in shape[2:] else prod(shape[2:])
    if back is None or length is None or given is None:
        return found
    for kept in range(1, len(given) + 1):
        if None not in given[-kept:] and prod(given[-kept:]) == length:
            axes = tuple(range(len(given) - kept, len(given)))
            variance = replace(found.variance, x=before.input[0])
            return found.add(before, back, y=back.output[0], variance=variance, axes=axes)
    return found


def lp_norm(moments: Moments, node: onnx.NodeProto) -> Match | None:
    """x - mean, or x, divided by its L2 norm and multiplied by sqrt(n), or by a gain that contains this factor.

    A gain alone does not tell an RMS norm from a cosine, so the factor is required there. The operator gives 0 for
    rows of zeros.
    """
    values, source = moments.values, node.input[0]
    axes = values.axes((attribute(node, "axis", -1),), source)
    n = values.count(axes, source)
    if attribute(node, "p", 2) != 2 or n is None:
        return None
    centred = moments.centred(source)
    if centred is not None and (centred.negative or values.axes(centred.mean.axes, centred.x) != axes):
        return None
    gains = []
    for user, name, _ in values.users(node.output[0]):
        others = list(user.input[1:] if op(user) == "Div" else user.input) if op(user) in ("Mul", "Div") else []
        value = next((values.scope.constant(other) for other in others if other != name), None)
        if value is not None and (op(user) == "Mul" or np.all(value != 0)):
            gains.append(1 / value if op(user) == "Div" else value)
    if any(value.size == 1 and abs(float(value.flat[0]) - n**0.5) <= 2.0**-10 * n**0.5 for value in gains):
        factor = {"excess": n}
    elif centred is not None and any(value.size > 1 for value in gains):
        factor = {"shrink": n**-0.5}
    else:
        return None
    x, formula, nodes = (source, RMS, ()) if centred is None else (centred.x, LAYER, centred.nodes)
    variance = Variance(x, source if centred else "", formula, "centred", Mean(source, axes, True, ()), tuple(nodes))
    smallest = float(np.finfo(float).tiny)
    kind, shared = values.dtype(source), len(nodes)
    begun = Match(variance, (*nodes, node), node.output[0], "", Power(-0.5), 0.0, kind, floor=smallest, shared=shared)
    return replace(begun, **factor)
