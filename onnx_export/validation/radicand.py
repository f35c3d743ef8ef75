"""What is under the root of a norm: a variance and eps, however they are added."""

from __future__ import annotations

import onnx

from onnx_export.graph.scope import op
from onnx_export.graph.tables import SAME
from onnx_export.validation.moments import Moments
from onnx_export.validation.statistic import Variance
from onnx_export.validation.values import PASSED, QUANTISERS

Radicand = tuple[Variance | None, list[onnx.NodeProto], dict]
_MOST_ADDED = 3  # constants added one after another


def radicand(moments: Moments, name: str, most: int = _MOST_ADDED) -> Radicand:
    """The variance in var + eps or var - eps, the nodes after it, and the fields eps, eps_dtype, eps_first."""
    values = moments.values
    inner, nodes = _unlimited(moments, name)
    total = moments.scope.producer(inner)
    if total is None:
        return None, nodes, {}
    none = {"eps": 0.0, "eps_dtype": moments.scope.dtype(inner)}
    if op(total) == "Sum":
        return _with_parts_of_eps(moments, total, nodes)
    if op(total) not in ("Add", "Sub"):
        return moments.variance(inner), nodes, none
    if op(total) == "Sub" and values.scalar(total.input[1]) is not None:
        eps = {"eps": -values.scalar(total.input[1]), "eps_dtype": values.dtype(total.input[1])}
        return moments.variance(total.input[0]), [*nodes, total], eps
    for index, (a, b) in enumerate((total.input, reversed(total.input))) if op(total) == "Add" else ():
        variance, path, eps = _with_eps(moments, total, a, b)
        if variance is None and eps and most > 1:
            variance, more, inside = radicand(moments, b, most - 1)
            path, eps = [*more, *path], {**eps, "eps": eps["eps"] + inside.get("eps", 0.0)}
        if variance is not None:
            return variance, [*nodes, *path], {"eps_first": index == 0} | eps
    return moments.variance(inner), nodes, none


def _unlimited(moments: Moments, name: str) -> tuple[str, list[onnx.NodeProto]]:
    """The value before changes of shape and type, and before limits that a positive sum does not reach."""
    inner, nodes = moments.values.strip(name, PASSED)
    node = moments.values.made_by(inner, "Abs", "Relu", "Max", "Clip")
    source = inner if node is None else node.input[0] if op(node) in ("Abs", "Relu") else _above_zero(moments, node)
    total, path = moments.values.strip(source, PASSED)
    if source == inner or not moments.values.made_by(total, "Add", "Sub", "Sum"):
        return inner, nodes  # a limited variance
    return total, [*path, node, *nodes]


def _above_zero(moments: Moments, node: onnx.NodeProto) -> str:
    """The value that a Max or Clip limits to 0 or less, else its result."""
    limited, floor = moments.clamped(node)
    return limited if floor <= 0 and (op(node) == "Max" or len(node.input) < 3) else node.output[0]


def _with_eps(moments: Moments, total: onnx.NodeProto, a: str, b: str) -> Radicand:
    """`radicand` of the sum of a and b if a is eps."""
    values = moments.values
    if values.scalar(a) is not None:
        return moments.variance(b), [total], {"eps": values.scalar(a), "eps_dtype": values.dtype(a)}
    inner, between = values.strip(a, SAME | QUANTISERS)
    rest = values.made_by(inner, "Sub")
    if rest is None or values.scalar(rest.input[0]) is None:
        return None, [], {}
    # E[x^2] + (eps - E[x]^2), as TensorFlow's optimiser writes it
    eps = {"eps": values.scalar(rest.input[0]), "eps_dtype": values.dtype(rest.input[0]), "eps_first": False}
    return moments.one_pass(b, rest.input[1]), [*between, rest, total], eps


def _with_parts_of_eps(moments: Moments, total: onnx.NodeProto, nodes: list[onnx.NodeProto]) -> Radicand:
    """`radicand` of a Sum of a variance and several constants."""
    values = moments.values
    parts = [values.scalar(each) for each in total.input]
    rest = [name for name, part in zip(total.input, parts, strict=True) if part is None]
    if len(rest) != 1 or len(parts) == 1:
        none = {"eps": 0.0, "eps_dtype": moments.scope.dtype(total.output[0])}
        return moments.variance(total.output[0]), nodes, none
    eps = {"eps": sum(part for part in parts if part is not None), "eps_first": parts[0] is not None}
    eps["eps_dtype"] = values.narrowest(*(set(total.input) - {*rest}))
    return moments.variance(rest[0]), [*nodes, total], eps
