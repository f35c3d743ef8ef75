"""Norms that no pattern has: values that follow a law (`onnx_export.laws`), with the stored parameters they show."""

from __future__ import annotations

from collections.abc import Iterator
from math import isclose, prod

import numpy as np
from onnx import TensorProto

from onnx_export.graph.scope import Scope, op, unit_roundoff
from onnx_export.laws import sources
from onnx_export.operators import LAYER, RMS
from onnx_export.validation.decomposed import quantised
from onnx_export.validation.norm import NearMiss, Norm
from onnx_export.validation.statistic import miscounted
from onnx_export.validation.values import Values, following

_FORMULAS = {"layer": LAYER, "rms": RMS}
_SIGNS = {"Add": 1.0, "Sub": -1.0}
_NEARLY = 0.3  # of degree 0: exponents near 2 are mistakes; a variance without eps may be intended


def unexplained(scope: Scope, found: list[Norm], work: sources.Work) -> Iterator[Norm]:
    """Norms and near misses of a graph around reductions that belong to none of those found already."""
    explained = {id(node) for norm in found for node in norm.nodes}
    for each in sources.norms(scope, explained, work):
        if not any(id(node) in explained for node in each.nodes):
            norm = _described(scope, each)
            if norm is not None:
                yield norm


def _described(scope: Scope, found: sources.Found) -> Norm | None:
    """The norm with its parameters by name; None if the file does not store those measured, or for a doubtful law."""
    fit = found.fit
    eps, eps_dtype = _eps(scope, found)
    if fit.words and (fit.factor is None or (abs(fit.law.degree) > _NEARLY and not eps > 0)):
        return None
    ones, zeros = np.ones_like(fit.scale), np.zeros_like(fit.bias)
    factor = fit.scale if fit.factor is None else ones  # a wrong count is no scale
    scale, bias = (_stored(scope, found, *each) for each in ((factor, ones), (fit.bias, zeros)))
    if scale is None or bias is None:
        return None
    values = Values(scope)
    after, names = following(values, found.x, fit.axes, found.y, {"scale": scale, "bias": bias})
    n = prod(found.shape[axis] for axis in fit.axes)
    counted = fit.count > 1.5  # not where a sum is divided by nothing: an L2 norm may be meant
    near = miscounted(n, fit.count, 2.0**-11) if counted else NearMiss(fit.words, fit.law.error)
    statistic = next(node for node in found.nodes if sources.reduces(node))
    x, before = values.strip(found.x)  # rows of the type before a Cast, as the patterns have it
    return Norm(
        scope=scope,
        nodes=[*before[::-1], *found.nodes, *after],
        formula=_FORMULAS[fit.law.formula],
        x=x,
        axes=fit.axes,
        eps=eps,
        eps_dtype=eps_dtype,
        compute_dtype=scope.dtype(statistic.output[0]) or scope.dtype(found.x) or TensorProto.FLOAT,
        variance="one-pass" if fit.law.formula == "layer" and _squares(found) else "centred",
        near=near.then(quantised(values, found.nodes)),
        stored_reciprocal=True,  # any stored number may be rounded
        floor=fit.floor,
        **names,
    )


def _constants(scope: Scope, found: sources.Found) -> Iterator[tuple[str, np.ndarray]]:
    for name in dict.fromkeys(name for node in found.nodes for name in node.input if name):
        value = scope.constant(name)
        if value is not None and value.dtype.kind == "f" and value.size:
            yield name, value


def _stored(scope: Scope, found: sources.Found, wanted: np.ndarray, neutral: np.ndarray) -> str | None:
    """The name of a parameter of these values; empty where it has no effect, None where none is stored."""
    if np.allclose(wanted, neutral, rtol=1e-5, atol=1e-9):
        return ""
    near = {"rtol": 1e-5, "atol": 1e-6 * float(np.max(np.abs(wanted)))}
    alike = ((name, value) for name, value in _constants(scope, found) if value.size == wanted.size > 1)
    return next((name for name, value in alike if np.allclose(value.ravel(), wanted.ravel(), **near)), None)


def _eps(scope: Scope, found: sources.Found) -> tuple[float, int]:
    """eps as stored, and its type; measured if a multiple of it is stored; of near misses what is added last."""
    measured, near = found.fit.eps, max(1e-4, 2 * unit_roundoff(scope.dtype(found.x)))
    sums = [node for node in found.nodes if op(node) in _SIGNS and found.fit.law.words]
    added = {node.input[1]: _SIGNS[op(node)] for node in sums} | {n.input[0]: 1.0 for n in sums if op(n) == "Add"}
    for name, value in reversed(list(_constants(scope, found))):
        stored = float(value.flat[0])
        if value.size == 1 and name in added:
            return added[name] * stored, scope.dtype(name)
        if value.size == 1 and measured and isclose(abs(stored), abs(measured), rel_tol=near):
            return float(np.copysign(stored, measured)), scope.dtype(name)
    return measured, scope.dtype(found.x) or TensorProto.FLOAT


def _squares(found: sources.Found) -> bool:
    """Whether an operator squares x itself, so that the variance may be a difference of large numbers."""
    products = (node for node in found.nodes if op(node) == "Mul")
    powers = (node for node in found.nodes if op(node) in ("Pow", "ReduceSumSquare", "ReduceL2"))
    return any(set(node.input) == {found.x} for node in products) or any(node.input[0] == found.x for node in powers)
