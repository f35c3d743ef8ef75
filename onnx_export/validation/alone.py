"""Norms as models of their own, for files that do not run as a whole."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from onnx_export.graph.scope import Scope, boundary, cut, with_shapes
from onnx_export.validation.norm import Norm
from onnx_export.validation.options import Options
from onnx_export.validation.patterns import find

_LENGTH = 64  # of a row whose length the file does not say
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)


def alone(norm: Norm, options: Options) -> tuple[onnx.ModelProto, Norm] | None:
    """A norm's nodes as a model, and the norm found in it; None if its inputs cannot be made up.

    The inputs may be the values whose sum is normalised, scale and bias, of floating types. Where the file does not
    say them, the rank is 2 and the length that of a stored scale; open sizes are those of `options`.
    """
    names = boundary(norm.scope, norm.nodes)
    if norm.scope.is_function or norm.quantised or norm.x not in names:
        return None
    if set(names) - {*norm.terms, norm.scale, norm.bias} or (norm.operator and norm.operator.lookup):
        return None
    shape = _shape(norm, options)
    kinds = {name: (_kind(norm, name), shape if name in norm.terms else norm.scope.shape(name)) for name in names}
    if any(kind not in _FLOATS or sizes is None or None in sizes for kind, sizes in kinds.values()):
        return None
    part = with_shapes(cut(norm.scope, norm.nodes, [norm.y], kinds))
    found = [each for each in find(part) if each.y == norm.y and each.formula == norm.formula]
    return (part, found[0]) if found else None


def _shape(norm: Norm, options: Options) -> tuple[int, ...] | None:
    """The shape of rows for a norm."""
    shape, stored = norm.scope.shape(norm.x), _stored(norm.scope, norm.scale)
    if shape is None:
        last = norm.axes in ((-1,), None) or (norm.operator is not None and not norm.formula.channels)
        return (options.dim, stored.size if stored is not None and stored.size > 1 else _LENGTH) if last else None
    rank = len(shape)
    normalised = range(rank) if norm.axes is None else {axis % rank for axis in norm.axes if -rank <= axis < rank}
    sizes = []
    for axis, known in enumerate(shape):
        own = None if stored is None or stored.ndim < rank - axis else stored.shape[axis - rank]
        length = own if own not in (None, 1) else _LENGTH
        sizes.append(known if known is not None else length if axis in normalised else options.size_of("", axis))
    return tuple(sizes)


def _stored(scope: Scope, name: str) -> np.ndarray | None:
    return scope.constant(name) if name else None


def _kind(norm: Norm, name: str) -> int:
    """The type of an input; where the file does not give it, that of a stored scale, or of eps among nodes."""
    kind = norm.scope.dtype(name)
    if kind == TensorProto.UNDEFINED and norm.scale:
        kind = norm.scope.dtype(norm.scale)
    return norm.eps_dtype if kind == TensorProto.UNDEFINED and not norm.operator else kind
