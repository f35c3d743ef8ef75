"""Find the layer norms of a graph: by operator name, and by the shape of their arithmetic.

A decomposed norm is found from its square root outwards: back through `var + eps` to the statistics and the
value they are taken over, forward through the division to scale and bias. The match proposes; whether the
nodes really compute the norm is decided in float64 by `judge`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import onnx
from onnx import TensorProto

from onnx_export.validation.graph import FUNCTION_KEY, Scope, attribute, every, function_key, scopes, unit_roundoff
from onnx_export.validation.graph import op as any_op
from onnx_export.validation.safe_load import model_nodes

# op type: (domains, formula, default epsilon)
_NATIVE = {
    "LayerNormalization": ({"", "com.microsoft"}, "layer", 1e-5),
    "RMSNormalization": ({""}, "rms", 1e-5),
    "SimplifiedLayerNormalization": ({"", "com.microsoft"}, "rms", 1e-5),
    "SkipLayerNormalization": ({"com.microsoft"}, "layer", 1e-12),
    "SkipSimplifiedLayerNormalization": ({"com.microsoft"}, "rms", 1e-12),
    "EmbedLayerNormalization": ({"com.microsoft"}, "layer", 1e-12),
    "GroupNormalization": ({""}, "group", 1e-5),
    "InstanceNormalization": ({""}, "instance", 1e-5),
}

# Between a statistic and its use these change the shape at most.
_RESHAPERS = frozenset({"Reshape", "Unsqueeze", "Squeeze", "Expand"})
_SAME = frozenset({"Identity", "Cast"})
_SUMS = frozenset({"Add", "Sub", "Sum"})
_OF_TWO = frozenset({"Add", "Sub", "Mul", "Div", "Pow"})
_LONGEST_NAME = 250
_MOST_AXES = 64
# Steps from a variance to its root, and from there to the division. A hostile file could take thousands, with two ways
# at each.
_DEEPEST = 5
_FARTHEST = 64  # values that are followed forward from x / std


def op(node: onnx.NodeProto) -> str:
    """The operator of a node; one of two operands that is fed more has no meaning, and is none."""
    kind = any_op(node)
    return "" if kind in _OF_TWO and len(node.input) != 2 else kind


@dataclass(eq=False)
class Norm:
    """One norm, or something that looks like one.

    Attributes
    ----------
    scope : Scope
        The graph it lies in.
    nodes : list of onnx.NodeProto
        The nodes it consists of.
    form : str
        The operator's name, or "decomposed".
    formula : {"layer", "rms", "group", "instance"}
    variance : {"centred", "one-pass", "operator"}
        How the second moment is formed; "operator" leaves it to the runtime.
    x, y : str
        Value normalised and result. Of a Skip or Embed operator `x` is the first of its inputs.
    axes : tuple of int or None
        Normalised axes, non-negative where the rank is known; None stands for all.
    eps : float
        As stored, in the dtype `eps_dtype`.
    scale, bias : str
        Value names, empty where absent.
    compute_dtype : int
        ONNX element type of the statistics.
    near_miss : str
        Why it is no layer norm although one was plausibly meant; empty for a norm.
    eps_first : bool
        Whether the file says eps + var; it is the same sum, but not to every optimiser.
    stored_reciprocal : bool
        Whether a mean is a sum times a stored 1/n, which is rounded.
    floor : float
        What the variance is not allowed below; 0 unless the file says otherwise.
    folded : bool
        Whether mean and bias are put together before they meet x.
    """

    scope: Scope
    nodes: list[onnx.NodeProto]
    form: str
    formula: str
    variance: str
    x: str
    y: str
    axes: tuple[int, ...] | None
    eps: float
    eps_dtype: int
    compute_dtype: int
    scale: str = ""
    bias: str = ""
    near_miss: str = ""
    eps_first: bool = False
    stored_reciprocal: bool = False
    floor: float = 0.0
    folded: bool = False
    name: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self.name = _name(self)[:_LONGEST_NAME]

    @property
    def function(self) -> str:
        """The local function it came from, empty for none."""
        for prop in self.nodes[0].metadata_props:
            if prop.key == FUNCTION_KEY:
                return prop.value.partition("\n")[0]
        return self.scope.graph.name if self.scope.is_function else ""

    @property
    def claimed(self) -> bool:
        """Whether the file says in so many words that this is a layer norm."""
        return self.form != "decomposed" or claims(self.function)


def claims(name: str) -> bool:
    """Whether a function of this name says that it is a layer norm."""
    return "layernorm" in name.lower().replace("_", "")


def unproved_claims(model: onnx.ModelProto, norms: list[Norm]) -> list[str]:
    """Functions of a model, not inlined yet, that are used and named LayerNorm and hold nothing like one.

    Parameters
    ----------
    model : onnx.ModelProto
        With its functions marked.
    norms : list of Norm
        Found in it once it was inlined.
    """
    names = {function_key(f.name, f.domain): f.name for f in model.functions}
    callers: dict[str, set[str]] = defaultdict(set)
    for function in model.functions:
        for node in every(function.node):
            callers[function_key(node.op_type, node.domain)].add(function_key(function.name, function.domain))
    holding = {p.value for norm in norms for node in norm.nodes for p in node.metadata_props if p.key == FUNCTION_KEY}
    graphs = [norm.scope.graph for norm in norms if norm.scope.is_function]
    holding |= {function_key(graph.name, graph.domain) for graph in graphs}
    pending = list(holding)
    while pending:
        more = callers.get(pending.pop(), set()) - holding
        holding |= more
        pending += more
    used = callers.keys() | {function_key(node.op_type, node.domain) for node in model_nodes(model)}
    return [name for key, name in names.items() if claims(name) and key in used and key not in holding]


def find(model: onnx.ModelProto, trouble: Callable[[str, Exception], None] | None = None) -> list[Norm]:
    """Every norm and near miss of the model, in the order of the graph, outer graphs first.

    Parameters
    ----------
    model : onnx.ModelProto
        Best after shape inference, with local functions inlined: without types and ranks less can be said.
    trouble : callable, optional
        Told the name of a node that could not be looked at, and why; by default that is raised.
    """
    return [norm for scope in scopes(model) for norm in _find_in(scope, trouble)]


def _find_in(scope: Scope, trouble: Callable[[str, Exception], None] | None) -> Iterator[Norm]:
    taken: set[int] = set()
    for node in scope.nodes:
        try:
            norm = _native(scope, node) or _Decomposed(scope).match(node)
        except Exception as error:  # what a stranger's file makes us do wrong costs one norm
            if trouble is None or isinstance(error, MemoryError):
                raise
            trouble(node.name or node.output[0], error)
            continue
        if norm and not taken & {id(n) for n in norm.nodes}:
            taken |= {id(n) for n in norm.nodes}
            yield norm


def _name(norm: Norm) -> str:
    """The module path that exporters leave in node names, or else the name of a node or of the result."""
    names = [n.name for n in norm.nodes if n.name and "/" in n.name.strip("/")]
    if norm.form == "decomposed" and names:
        parts = [name.split("/")[:-1] for name in names]
        common = []
        for level in zip(*parts, strict=False):
            if len(set(level)) != 1:
                break
            common.append(level[0])
        if any(common):
            return "/".join(common)
    return (norm.nodes[0].name if norm.form != "decomposed" else "") or norm.y


# ------------------------------------------------------------------------------------------------ operators


def _native(scope: Scope, node: onnx.NodeProto) -> Norm | None:
    domain = "" if node.domain == "ai.onnx" else node.domain
    domains, formula, default = _NATIVE.get(node.op_type, ((), "", 0.0))
    inputs = [*node.input, "", "", "", "", "", "", "", ""]
    if domain not in domains or not inputs[0]:
        return None
    if node.op_type.startswith("Skip"):
        scale = inputs[2]
        bias = inputs[3] if formula == "layer" else ""
    elif node.op_type == "EmbedLayerNormalization":
        scale, bias = inputs[5], inputs[6]
    else:
        scale, bias = inputs[1], inputs[2]
    x = inputs[2] if node.op_type == "EmbedLayerNormalization" else inputs[0]
    shape = scope.shape(inputs[0])
    dtype = scope.dtype(x)
    # statistics of half types are kept in stash_type, float32 unless the file says otherwise
    compute = dtype if dtype == TensorProto.DOUBLE else attribute(node, "stash_type", TensorProto.FLOAT)
    return Norm(
        scope,
        [node],
        node.op_type,
        formula,
        "operator",
        x,
        node.output[0],
        _native_axes(node, formula, None if shape is None else len(shape)),
        float(np.float32(attribute(node, "epsilon", default))),
        TensorProto.FLOAT,
        compute,
        scale,
        bias,
    )


def _native_axes(node: onnx.NodeProto, formula: str, rank: int | None) -> tuple[int, ...]:
    if formula in ("group", "instance"):
        return tuple(range(2, rank or 3))
    if node.op_type == "EmbedLayerNormalization":  # its first input has one axis less than the rows
        return (-1,)
    axis = -1 if node.op_type.startswith("Skip") else attribute(node, "axis", -1)
    if rank is None or not -rank <= axis < rank:  # out of range: lint's business
        return tuple(range(axis, 0)) if -_MOST_AXES <= axis < 0 else (axis,)
    return tuple(range(axis % rank, rank))


# --------------------------------------------------------------------------------------------- decomposition


@dataclass
class _Mean:
    """mean(source) over axes."""

    source: str
    axes: tuple[int, ...] | None
    keepdims: bool
    nodes: list[onnx.NodeProto]
    reshaped: bool = False
    stored_reciprocal: bool = False
    miscount: str = ""

    @property
    def spread(self) -> str:
        """The trap in using it beside its source without the reduced axes; empty when there is none."""
        leading = self.axes is None or self.axes == tuple(range(len(self.axes)))
        if self.keepdims or self.reshaped or leading:
            return ""
        return "keepdims=0: the statistic broadcasts along the wrong axis"


@dataclass
class _Variance:
    """Second moment of x about its mean, or about zero ("rms")."""

    x: str
    centred: str  # the value x - mean, empty where it is not formed for the variance
    formula: str
    variance: str
    mean: _Mean
    nodes: list[onnx.NodeProto]
    near_miss: str = ""
    stored_reciprocal: bool = False
    reshaped: bool = False  # after the mean, on the way to the square root
    floor: float = 0.0


class _Decomposed:
    """Matches the arithmetic round one square root of a scope."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    def match(self, node: onnx.NodeProto) -> Norm | None:
        """The norm whose standard deviation (or its reciprocal) `node` computes, or that divides there without."""
        exponent = self._scalar(node.input[1]) if op(node) == "Pow" else None
        if op(node) == "Sqrt" or exponent in (0.5, -0.5):
            begun = self._begin(node, node.input[0])
            return begun and self._finish(*begun, reciprocal=exponent == -0.5)
        begun = self._begin(node, node.input[1]) if op(node) == "Div" else None
        if begun is None or begun[0].formula != "layer" or begun[0].eps == 0:
            return None
        found, variance = begun
        found = replace(found, near_miss=found.near_miss or "it divides by the variance, not by its root")
        whole = self._numerator(found, variance, node.input[0])
        return whole and self._affine(self._restored(whole, variance))

    def _begin(self, node: onnx.NodeProto, name: str) -> tuple[Norm, _Variance] | None:
        """What `node` begins if it is fed var + eps, called `name`."""
        radicand, nodes = self._strip(name, _SAME | _RESHAPERS)
        total = self.scope.producer(radicand)
        eps, eps_dtype, eps_first = 0.0, self.scope.dtype(radicand), False
        if total is not None and op(total) == "Sub" and self._scalar(total.input[1]) is not None:
            eps, eps_dtype = -self._scalar(total.input[1]), self._dtype(total.input[1])
            radicand, nodes = total.input[0], [*nodes, total]
        if total is not None and op(total) == "Add":
            for index, (a, b) in enumerate((total.input, reversed(total.input))):
                if self._scalar(a) is not None:
                    eps, eps_dtype, eps_first = self._scalar(a), self._dtype(a), index == 0
                    radicand, nodes = b, [*nodes, total]
                    break
        variance = self._variance(radicand)
        if variance is None:
            return None
        found = Norm(
            self.scope,
            [*variance.nodes, *nodes, node],
            "decomposed",
            variance.formula,
            variance.variance,
            variance.x,
            node.output[0],
            self._axes(variance.mean.axes, variance.x),
            eps,
            eps_dtype,
            self._narrowest(variance.centred, variance.mean.source),
            near_miss=variance.near_miss,
            eps_first=eps_first,
            stored_reciprocal=variance.stored_reciprocal,
            floor=variance.floor,
        )
        return found, variance

    # -- forwards: division, scale, bias

    def _finish(self, found: Norm, variance: _Variance, reciprocal: bool) -> Norm | None:
        std = found.y
        for user, path in self._users(std):
            extended = replace(found, nodes=[*found.nodes, *path])
            whole = self._divide(extended, variance, user, path[-1].output[0] if path else std, reciprocal)
            if whole is not None:
                return self._affine(self._restored(whole, variance))
        return None

    def _restored(self, found: Norm, variance: _Variance) -> Norm:
        """Note a standard deviation that lost its axes and never got them back."""
        before = {id(node) for node in variance.nodes}
        after = any(op(n) in _RESHAPERS and id(n) not in before for n in found.nodes)
        near = found.near_miss or ("" if variance.reshaped or after else variance.mean.spread)
        return replace(found, near_miss=near)

    def _divide(
        self, found: Norm, variance: _Variance, user, std: str, reciprocal: bool, depth: int = _DEEPEST
    ) -> Norm | None:
        """`user` applies std (or its reciprocal) to the centred value, by itself or a few nodes on."""
        extended = replace(found, nodes=[*found.nodes, user], y=user.output[0])
        if op(user) == "Div" and not reciprocal and user.input[1] == std:
            if self._scalar(user.input[0]) == 1:
                return self._follow(extended, variance, True, depth)
            return self._numerator(extended, variance, user.input[0]) or self._uncentred(extended, variance, user)
        if op(user) in ("Max", "Clip") and not reciprocal:
            inner, floor = self._clamped(user)
            if inner != std or not floor > 0:
                return None
            near = found.near_miss or f"the deviation is not allowed below {floor:g}"
            return self._follow(replace(extended, near_miss=near, floor=floor), variance, False, depth)
        if op(user) == "Reciprocal" and not reciprocal:
            return self._follow(extended, variance, True, depth)
        if op(user) == "Pow" and not reciprocal and self._scalar(user.input[1]) == -1:
            return self._follow(extended, variance, True, depth)
        if op(user) == "Add" and not reciprocal:
            other = user.input[1] if user.input[0] == std else user.input[0]
            if self._scalar(other) is not None and found.eps == 0:
                note = "eps is added to the standard deviation, not to the variance"
                extended = replace(
                    extended,
                    eps=self._scalar(other),
                    eps_dtype=self._dtype(other),
                    near_miss=found.near_miss or note,
                )
                return self._follow(extended, variance, False, depth)
        if op(user) == "Mul" and reciprocal:
            other = user.input[1] if user.input[0] == std else user.input[0]
            if self.scope.constant(other) is not None and not found.scale:
                return self._follow(replace(extended, scale=other), variance, True, depth)
            return self._numerator(extended, variance, other) or self._folded_mean(found, variance, user, std)
        return None

    def _follow(self, found: Norm, variance: _Variance, reciprocal: bool, depth: int) -> Norm | None:
        if depth == 0:
            return None
        for user, path in self._users(found.y):
            extended = replace(found, nodes=[*found.nodes, *path])
            std = path[-1].output[0] if path else found.y
            whole = self._divide(extended, variance, user, std, reciprocal, depth - 1)
            if whole is not None:
                return whole
        return None

    def _numerator(self, found: Norm, variance: _Variance, numerator: str) -> Norm | None:
        """What is divided must be what the variance was taken of, centred on the same mean."""
        inner, path = self._strip(numerator, _SAME)
        product = self.scope.producer(inner)
        if product is not None and op(product) == "Mul" and not found.scale:  # scale * (x - mean) / std
            for a, b in (product.input, reversed(product.input)):
                value = self.scope.constant(a)
                if value is not None and self._along_row(value, found):
                    extended = replace(found, nodes=[*found.nodes, *path, product], scale=a)
                    return self._numerator(extended, variance, b)
        if found.formula == "rms":
            return replace(found, nodes=[*found.nodes, *path]) if self._same(inner, variance.x) else None
        if variance.centred and self._same(inner, variance.centred):
            return replace(found, nodes=[*found.nodes, *path])
        centred = self._centred(inner)
        if centred is None or not self._same(centred[0], variance.x):
            return None
        mean, nodes = centred[1], centred[2]
        near = found.near_miss or mean.spread
        if self._axes(mean.axes, variance.x) != found.axes:
            near = near or f"the mean is over axes {mean.axes}, the variance over {variance.mean.axes}"
        return replace(
            found,
            nodes=[*found.nodes, *path, *nodes],
            near_miss=near,
            stored_reciprocal=found.stored_reciprocal or mean.stored_reciprocal,
        )

    def _uncentred(self, found: Norm, variance: _Variance, user) -> Norm | None:
        """x / std, unless it meets something that is no constant in a sum afterwards: that may be its mean."""
        if found.formula != "layer" or not self._same(user.input[0], variance.x):
            return None
        reached = [user.output[0]]
        for name in reached:
            for node in self.scope.consumers(name):
                known = all(self.scope.constant(other) is not None for other in node.input if other not in ("", name))
                if len(reached) > _FARTHEST or (op(node) in _SUMS and not known):
                    return None
                if op(node) in _SAME | _RESHAPERS | {"Neg"} or (op(node) in _SUMS | {"Mul", "Div"} and known):
                    reached.append(node.output[0])
        path = self._strip(user.input[0], _SAME)[1]
        near = found.near_miss or "x is divided by the deviation, not x - mean"
        return replace(found, nodes=[*found.nodes, *path], near_miss=near)

    def _folded_mean(self, found: Norm, variance: _Variance, user, rstd: str) -> Norm | None:
        """x * r + (bias - mean * r), r being rstd or rstd * scale: TensorFlow's batch_normalization."""
        if found.formula == "rms":
            return None
        other = user.input[1] if user.input[0] == rstd else user.input[0]
        if not self._same(self._strip(other, _SAME)[0], variance.x):
            return None
        for last in self.scope.consumers(user.output[0]):
            if op(last) not in ("Add", "Sub") or (op(last) == "Sub" and last.input[0] != user.output[0]):
                continue
            rest = last.input[1] if last.input[0] == user.output[0] else last.input[0]
            offset = self._offset(rest, variance.x, rstd, op(last) == "Sub")
            if offset is not None:
                bias, nodes, mean = offset
                nodes = [*found.nodes, user, *nodes, last]
                near = found.near_miss or mean.spread
                return replace(found, nodes=nodes, y=last.output[0], bias=bias, near_miss=near, folded=bool(bias))
        return None

    def _offset(self, name: str, x: str, rstd: str, negated: bool, depth: int = _DEEPEST):
        """bias - mean * rstd (or mean * rstd if negated) as (bias, nodes, mean)."""
        node = self.scope.producer(name)
        if node is None or depth == 0:
            return None
        if op(node) == "Mul":
            for a, b in (node.input, reversed(node.input)):
                if b == rstd:
                    inner, path = self._strip(a, _SAME)
                    flip = self.scope.producer(inner)
                    if not negated and flip is not None and op(flip) == "Neg":
                        path, inner = [*path, flip], flip.input[0]
                    elif not negated:
                        continue
                    mean = self._mean(inner)
                    if mean is not None and self._same(mean.source, x):
                        return "", [node, *path, *mean.nodes], mean
        if op(node) == "Neg" and not negated:
            inner = self._offset(node.input[0], x, rstd, True, depth - 1)
            return inner and (inner[0], [node, *inner[1]], inner[2])
        if op(node) == "Sub" and not negated and self.scope.constant(node.input[0]) is not None:
            inner = self._offset(node.input[1], x, rstd, True, depth - 1)
            return inner and (node.input[0], [node, *inner[1]], inner[2])
        if op(node) == "Add" and not negated:
            for a, b in (node.input, reversed(node.input)):
                if self.scope.constant(a) is not None:
                    inner = self._offset(b, x, rstd, False, depth - 1)
                    return inner and (a, [node, *inner[1]], inner[2])
        return None

    def _affine(self, found: Norm) -> Norm:
        """Take in a following multiplication and addition by constants that vary along the row alone."""
        for wanted, slot in (("Mul", "scale"), ("Add", "bias")):
            if getattr(found, slot):
                continue
            users = self.scope.consumers(found.y)
            path = []
            while len(users) == 1 and op(users[0]) in _SAME and found.y not in self.scope.outputs:
                path.append(users[0])
                users = self.scope.consumers(users[0].output[0])
            last = path[-1].output[0] if path else found.y
            if len(users) != 1 or op(users[0]) != wanted or last in self.scope.outputs or found.y in self.scope.outputs:
                continue
            (node,) = users
            other = node.input[1] if node.input[0] == last else node.input[0]
            value = self.scope.constant(other)
            if value is not None and self._along_row(value, found):
                nodes = [*found.nodes, *path, node]
                found = replace(found, nodes=nodes, y=node.output[0], **{slot: other})
        return found

    def _along_row(self, value: np.ndarray, found: Norm) -> bool:
        shape = self.scope.shape(found.x)
        if found.axes is None:
            return True
        if shape is None:
            return value.size == 1 or value.ndim == 1
        rank = len(shape)
        axes = {axis + rank if axis < 0 else axis for axis in found.axes}
        return value.ndim <= rank and all(
            size == 1 or rank - value.ndim + index in axes for index, size in enumerate(value.shape)
        )

    # -- backwards: variance, mean

    def _variance(self, name: str, depth: int = _DEEPEST) -> _Variance | None:
        inner, path = self._strip(name, _SAME | _RESHAPERS)
        node = self.scope.producer(inner)
        if node is None or depth == 0:
            return None
        if op(node) in ("Max", "Relu", "Clip"):  # rounding can leave a small negative difference
            clamped, floor = self._clamped(node)
            found = self._extended(self._variance(clamped, depth - 1), [*path, node])
            if found is not None and floor > 0:
                found.floor = floor
                found.near_miss = found.near_miss or f"the variance is not allowed below {floor:g}"
            return found
        if op(node) == "Sub":
            return self._extended(self._one_pass(node), [*path, node])
        if op(node) in ("Mul", "Div") and self._mean(inner) is None:
            for a, b in (node.input, reversed(node.input)):
                found = self._variance(a, depth - 1)
                if found and not (op(node) == "Div" and a != node.input[0]):
                    factor = self._scalar(b)
                    found.near_miss = found.near_miss or (
                        "the variance is rescaled before the root (an unbiased estimate divides by n - 1)"
                    )
                    return self._extended(found, [*path, node, *([] if factor else self._scalar_chain(b))])
            return None
        mean = self._mean(inner)
        if mean is None:
            return None
        squared = self._square(mean.source)
        if squared is None:
            return None
        base, exponent, nodes = squared
        near = mean.miscount or ("" if exponent == 2 else f"the exponent is {exponent:g}, not 2")
        nodes = [*nodes, *mean.nodes, *path]
        reshaped = any(op(n) in _RESHAPERS for n in path)
        centred = self._centred(base)
        if centred is None:
            if exponent != 2:  # x / sqrt(mean(x^p)): nothing was plausibly meant
                return None
            return _Variance(base, "", "rms", "centred", mean, nodes, near, mean.stored_reciprocal, reshaped)
        x, inner_mean, centre_nodes = centred
        outer_axes, inner_axes = self._axes(mean.axes, x), self._axes(inner_mean.axes, x)
        if outer_axes != inner_axes:
            near = near or f"the mean is over axes {inner_axes}, the variance over {outer_axes}"
        near = near or inner_mean.spread
        rounded = mean.stored_reciprocal or inner_mean.stored_reciprocal
        if not self._same(x, inner_mean.source):
            return None
        return _Variance(x, base, "layer", "centred", mean, [*centre_nodes, *nodes], near, rounded, reshaped)

    def _one_pass(self, node: onnx.NodeProto) -> _Variance | None:
        """E[x^2] - E[x]^2."""
        second, first = self._mean(node.input[0]), self._square(node.input[1])
        if second is None or first is None:
            return None
        squared, mean = self._square(second.source), self._mean(first[0])
        if squared is None or mean is None or not self._same(squared[0], mean.source):
            return None
        near = second.miscount or mean.miscount
        if squared[1] != 2 or first[1] != 2:
            near = near or f"the exponents are {squared[1]:g} and {first[1]:g}, not 2"
        if self._axes(mean.axes, mean.source) != self._axes(second.axes, mean.source):
            near = near or f"the mean is over axes {mean.axes}, the second moment over {second.axes}"
        nodes = [*squared[2], *second.nodes, *mean.nodes, *first[2]]
        rounded = mean.stored_reciprocal or second.stored_reciprocal
        return _Variance(mean.source, "", "layer", "one-pass", second, nodes, near, rounded)

    def _extended(self, found: _Variance | None, nodes: list[onnx.NodeProto]) -> _Variance | None:
        if found is not None:
            found.nodes = [*found.nodes, *nodes]
            found.reshaped = found.reshaped or any(op(node) in _RESHAPERS for node in nodes)
        return found

    def _clamped(self, node: onnx.NodeProto) -> tuple[str, float]:
        """(v, c) of max(c, v), relu(v) or clip(v, c)."""
        if op(node) == "Max" and len(node.input) == 2:
            for a, b in (node.input, reversed(node.input)):
                floor = self._scalar(a)
                if floor is not None:
                    return b, floor
        if op(node) == "Clip":
            floor = self._scalar(node.input[1]) if len(node.input) > 1 and node.input[1] else None
            return node.input[0], attribute(node, "min", 0.0) if floor is None else floor
        return node.input[0], 0.0

    def _mean(self, name: str) -> _Mean | None:
        inner, path = self._strip(name, _SAME | _RESHAPERS)
        node = self.scope.producer(inner)
        if node is None:
            return None
        reshaped = any(op(n) in _RESHAPERS for n in path)
        if op(node) == "ReduceMean":
            return self._reduction(node, path, reshaped)
        if op(node) in ("Mul", "Div"):
            for a, b in (node.input, reversed(node.input)):
                factor = self._scalar(b)
                if not factor or (op(node) == "Div" and b != node.input[1]):
                    continue
                source, inner_path = self._strip(a, _SAME | _RESHAPERS)
                total = self.scope.producer(source)
                if total is not None and op(total) in ("ReduceSum", "ReduceSumSquare"):
                    reshaped = reshaped or any(op(n) in _RESHAPERS for n in inner_path)
                    mean = self._reduction(total, [*path, *inner_path, node], reshaped)
                    if mean is not None:
                        mean.stored_reciprocal = op(node) == "Mul"
                        mean.miscount = self._miscount(mean, b, 1 / factor if op(node) == "Mul" else factor)
                    return mean
        return None

    def _reduction(self, node: onnx.NodeProto, path: list[onnx.NodeProto], reshaped: bool) -> _Mean | None:
        axes = attribute(node, "axes", ())
        if not axes and len(node.input) > 1 and node.input[1]:
            value = self.scope.constant(node.input[1])
            if value is None or value.dtype.kind not in "iu":
                return None
            axes = value.ravel().tolist()
        if not axes and attribute(node, "noop_with_empty_axes", 0):
            return None
        source = self._strip(node.input[0], _SAME)[0]
        casts = self._strip(node.input[0], _SAME)[1]
        shape = self.scope.shape(source)
        if axes and shape is not None:
            if not all(-len(shape) <= axis < len(shape) for axis in axes):
                return None
            axes = sorted(axis % len(shape) for axis in axes)
        keepdims = bool(attribute(node, "keepdims", 1))
        name = node.input[0] if op(node) == "ReduceSumSquare" else source
        return _Mean(name, tuple(axes) if axes else None, keepdims, [*casts, node, *path], reshaped)

    def _miscount(self, mean: _Mean, factor: str, divisor: float) -> str:
        shape = self.scope.shape(mean.source)
        if shape is None or mean.axes is None or any(not shape[a] for a in mean.axes):
            return ""
        count = int(np.prod([shape[axis] for axis in mean.axes]))
        stored = self._narrowest(factor, self._strip(factor, _SAME)[0])
        unit = max(unit_roundoff(stored), 2.0**-50)  # of float64, our own arithmetic here is the coarser
        unbiased = abs(divisor - count + 1) < abs(divisor - count)
        # n may have been rounded before 1/n was, but what lies nearer to n - 1 has to be 1/n to the last digit
        if divisor > 0 and 1 - min(divisor / count, count / divisor) <= (1 if unbiased else 2) * unit:
            return ""
        kind = " (unbiased)" if abs(divisor - count + 1) <= 2 * unit * count else ""
        return f"a sum over {count} elements is divided by {divisor:.6g}{kind}"

    def _square(self, name: str) -> tuple[str, float, list[onnx.NodeProto]] | None:
        """(base, exponent, nodes) of base^exponent."""
        inner, path = self._strip(name, _SAME | _RESHAPERS)
        node = self.scope.producer(inner)
        if node is None:
            return None
        if op(node) == "Mul" and self._same(*node.input):
            base, more = self._strip(node.input[0], _SAME)
            return base, 2.0, [*path, node, *more]
        if op(node) == "Pow":
            exponent = self._scalar(node.input[1])
            if exponent is not None:
                base, more = self._strip(node.input[0], _SAME)
                return base, exponent, [*path, node, *more]
        return None

    def _centred(self, name: str) -> tuple[str, _Mean, list[onnx.NodeProto]] | None:
        """(x, mean, nodes) of x - mean(x)."""
        inner, path = self._strip(name, _SAME)
        node = self.scope.producer(inner)
        if node is None or op(node) not in ("Sub", "Add"):
            return None
        subtracted, flip = node.input[1], []
        if op(node) == "Add":
            negative = self.scope.producer(subtracted)
            if negative is None or op(negative) != "Neg":
                return None
            subtracted, flip = negative.input[0], [negative]
        mean = self._mean(subtracted)
        if mean is None:
            return None
        x, casts = self._strip(node.input[0], _SAME)
        if not self._same(x, mean.source):
            return None
        return x, mean, [*casts, *mean.nodes, *flip, node, *path]

    # -- small things

    def _strip(self, name: str, ops: frozenset[str]) -> tuple[str, list[onnx.NodeProto]]:
        """Walk up from `name` through nodes that leave the numbers alone."""
        path = []
        node = self.scope.producer(name)
        while node is not None and op(node) in ops and len(path) < 64:
            if op(node) == "Cast" and not self._floating_cast(node):
                break
            path.append(node)
            name = node.input[0]
            node = self.scope.producer(name)
        return name, path

    def _floating_cast(self, node: onnx.NodeProto) -> bool:
        floats = (TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT, TensorProto.DOUBLE)
        source = self.scope.dtype(node.input[0])
        return attribute(node, "to", 0) in floats and source in (*floats, TensorProto.UNDEFINED)

    def _users(self, name: str) -> Iterator[tuple[onnx.NodeProto, list[onnx.NodeProto]]]:
        """Consumers of a value, with the shape and type changes on the way."""
        pending = [(name, [])]
        while pending:
            name, path = pending.pop(0)
            for user in self.scope.consumers(name):
                if op(user) in _SAME | _RESHAPERS and user.input and user.input[0] == name and len(path) < 8:
                    pending.append((user.output[0], [*path, user]))
                else:
                    yield user, path

    def _same(self, a: str, b: str) -> bool:
        return self._strip(a, _SAME)[0] == self._strip(b, _SAME)[0]

    def _scalar(self, name: str) -> float | None:
        value = self.scope.constant(name)
        return float(value.ravel()[0]) if value is not None and value.size == 1 else None

    def _scalar_chain(self, name: str) -> list[onnx.NodeProto]:
        """The nodes that compute a factor from shapes, so that a cut can contain them."""
        nodes, pending = [], [name]
        while pending and len(nodes) < 32:
            node = self.scope.producer(pending.pop())
            if node is not None and op(node) not in ("Constant",) and node not in nodes:
                nodes.append(node)
                if op(node) != "Shape":
                    pending += [i for i in node.input if i]
        return nodes

    def _dtype(self, name: str) -> int:
        dtype = self.scope.dtype(name)
        value = self.scope.constant(name) if dtype == TensorProto.UNDEFINED else None
        return dtype if value is None else onnx.helper.np_dtype_to_tensor_dtype(value.dtype)

    def _narrowest(self, *names: str) -> int:
        """The type of these values that has the fewest digits; of those that are there."""
        return max((self._dtype(name) for name in names if name), key=unit_roundoff)

    def _axes(self, axes: tuple[int, ...] | None, x: str) -> tuple[int, ...] | None:
        shape = self.scope.shape(x)
        if shape is None:
            return axes
        if axes is None:
            return tuple(range(len(shape)))
        return tuple(sorted(axis + len(shape) if axis < 0 else axis for axis in axes))
