"""Find the layer norms of a graph: by operator name, and for norms in primitive operators by patterns, then by laws.

Matching of a decomposed norm starts at its square root: `moments` walks back through var + eps to the statistics and
the value they are taken over, `decomposed` walks forward through the division to scale and bias. A match is only a
candidate: `judge` evaluates its nodes in float64 and decides whether they compute the norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import onnx
from onnx import TensorProto

from onnx_export.graph.scope import Scope, attribute, scopes
from onnx_export.laws.sources import Work
from onnx_export.operators import operator_of
from onnx_export.validation import by_law
from onnx_export.validation.decomposed import Matcher
from onnx_export.validation.norm import Norm, name_steps


def find(
    model: onnx.ModelProto,
    trouble: Callable[[str, Exception], None] | None = None,
    weights: dict[str, np.ndarray] | None = None,
    *,
    laws: bool = True,
) -> list[Norm]:
    """Every norm and near miss of the model, in the order of the graph, outer graphs first.

    Parameters
    ----------
    model : onnx.ModelProto
        Preferably after shape inference and inlining of local functions: fewer norms are found without types and ranks.
    trouble : callable, optional
        Called with the name of a node whose matching failed, and the exception; by default the exception is raised.
    weights : dict of str to ndarray, optional
        As returned by `weights.set_aside`.
    laws : bool
        Whether values that follow a law are found where no pattern fits.
    """
    found: list[Norm] = []
    work = Work()
    for scope in scopes(model, weights):
        found += (own := list(_find_in(scope, trouble)))
        found += _by_law(scope, own, work, trouble) if laws else ()
    name_steps(found)
    return found


def _find_in(scope: Scope, trouble: Callable[[str, Exception], None] | None) -> Iterator[Norm]:
    """The norms of one graph. Norms may share nodes, but neither the root nor the result of another."""
    taken: set[int] = set()
    results: set[str] = set()
    matcher = Matcher(scope)
    for node in scope.nodes:
        if id(node) in taken:
            continue
        try:
            named = _by_name(scope, node)
            norms = [matcher.centred(named)] if named else matcher.match(node)
        except Exception as error:  # untrusted input: a failure costs one norm, not the report
            if trouble is None or isinstance(error, MemoryError):
                raise
            trouble(node.name or node.output[0], error)
            continue
        for norm in norms:
            if norm.y not in results:
                results |= {name for each in _core(norm) for name in each.output}
                taken |= {id(each) for each in _core(norm)}
                yield norm


def _by_law(scope: Scope, found: list[Norm], work: Work, trouble) -> list[Norm]:
    """What follows a law around reductions that belong to none of the norms found by patterns."""
    try:
        return list(by_law.unexplained(scope, found, work))
    except Exception as error:  # as in `_find_in`
        if trouble is None or isinstance(error, MemoryError):
            raise
        trouble(scope.label or "laws", error)
        return []


def _core(norm: Norm) -> list[onnx.NodeProto]:
    """The nodes that belong to one norm only: those after its variance, which it may share."""
    return norm.nodes[norm.shared :]


def _by_name(scope: Scope, node: onnx.NodeProto) -> Norm | None:
    operator = operator_of(node)
    if operator is None or not node.input or not node.input[0]:
        return None
    x = operator.input(node, operator.x)
    shape, dtype = scope.shape(x), scope.dtype(x)
    default = operator.eps
    # statistics of half types are kept in stash_type, float32 unless the file says otherwise
    compute = dtype if dtype == TensorProto.DOUBLE else attribute(node, "stash_type", TensorProto.FLOAT)
    return Norm(
        scope=scope,
        nodes=[node],
        operator=operator,
        formula=operator.formula,
        x=x,
        y=node.output[0],
        axes=operator.axes(node, None if shape is None else len(shape)),
        eps=float(np.float32(attribute(node, "epsilon", default))),
        eps_dtype=TensorProto.FLOAT,
        compute_dtype=compute,
        scale=operator.input(node, operator.scale),
        bias=operator.input(node, operator.bias),
    )
