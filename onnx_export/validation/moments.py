"""Recognise means and second moments in primitive operators, the statistics of decomposed norms."""

from __future__ import annotations

import math
from dataclasses import replace

import onnx

from onnx_export.graph.scope import attribute, op, unit_roundoff
from onnx_export.graph.tables import RESHAPING, SAME
from onnx_export.operators import LAYER, RMS
from onnx_export.validation.contractions import WEIGHTED, weighted_sum
from onnx_export.validation.evaluated import evaluated_mean
from onnx_export.validation.norm import NONE, NearMiss
from onnx_export.validation.other_means import other_mean
from onnx_export.validation.statistic import Centred, Mean, Variance, before_unsqueeze, miscounted
from onnx_export.validation.values import PASSED, QUANTISERS, REDUCED_SUMS, Values, unit_of

# Limit on recursion between a variance and its root: an untrusted file may have thousands of steps, two branches each.
DEEPEST = 5
_MOST_NESTED = 8  # means of means; a graph may lead back to itself
_MOST_SIGNS = 64


class Moments:
    """Recognises statistics, walking backwards from their results."""

    def __init__(self, values: Values) -> None:
        self.values, self.scope = values, values.scope
        self._nested = 0  # means of means that are open
        self._means: dict[str, Mean | None] = {}
        self._evaluated: dict[str, Centred | None] = {}

    def mean(self, name: str) -> Mean | None:
        """The mean that a value holds, also after changes of shape; None if it is no mean."""
        if self._nested:  # near the limit its result depends on the depth
            return self._mean(name)
        if name not in self._means:
            self._means[name] = self._mean(name)
        return self._means[name]

    def _mean(self, name: str) -> Mean | None:
        inner, path = self.values.strip(name, PASSED)
        node = self.scope.producer(inner)
        if node is None:
            return None
        reshaped = any(op(n) in RESHAPING for n in path)
        if op(node) == "ReduceMean":
            return self._of_means(self._reduction(node, path, reshaped))
        if op(node) in ("GlobalAveragePool", "AveragePool"):
            return self._pooled(node, path, reshaped)
        if op(node) in WEIGHTED:
            found = self._weighted(node, path, reshaped)
            return found if found and not found.total else None
        return self._divided_sum(node, path, reshaped) if op(node) in ("Mul", "Div") else None

    def total(self, name: str) -> Mean | None:
        """The sum of squares that a value holds, None if it is none."""
        inner, path = self.values.strip(name, PASSED)
        return self._sum(inner, path)

    def _sum(self, name: str, path: list[onnx.NodeProto]) -> Mean | None:
        """The sum that a value is, before a path of other nodes; the square of an L2 norm is a sum of squares."""
        reshaped = any(op(n) in RESHAPING for n in path)
        node = self.values.made_by(name, *REDUCED_SUMS)
        if node is None:
            found = self._weighted(self.scope.producer(name), path, reshaped) if self.scope.producer(name) else None
            return found if found and found.total else self._squared_l2(name, path, reshaped)
        found = self._reduction(node, path, reshaped)
        return replace(found, total=True) if found else self._weighted(node, path, reshaped)

    def _squared_l2(self, name: str, path: list[onnx.NodeProto], reshaped: bool) -> Mean | None:
        squared = self.power(name)
        root = squared and squared[1] == 2 and self.values.made_by(squared[0], "ReduceL2")
        found = root and self._reduction(root, [*squared[2], *path], reshaped)
        return replace(found, total=True) if found else None

    def _divided_sum(self, node: onnx.NodeProto, path: list[onnx.NodeProto], reshaped: bool) -> Mean | None:
        """The mean computed as a sum divided by n or multiplied by 1/n; n may be computed from shapes."""
        for a, b in (node.input, reversed(node.input)):
            factor = self.values.scalar(b)
            counted = factor is None and self.values.counted(b)
            if not (factor or counted) or (op(node) == "Div" and b != node.input[1]):
                continue
            source, inner_path = self.values.strip(a, PASSED)
            if self.values.made_by(source, "ReduceL2"):
                continue
            count_nodes = self.values.chain(b)[0] if counted else []
            found = self._sum(source, [*path, *inner_path, node, *count_nodes])
            if found is None:
                continue
            reshaped = reshaped or any(op(n) in RESHAPING for n in inner_path)
            found = replace(found, total=False, reshaped=reshaped)
            if counted:
                unbiased = NearMiss("a sum is divided by a computed count less 1 (unbiased)")
                return replace(found, miscount=unbiased if self._less_one(b) else NONE)
            miscount = self._miscount(found, b, 1 / factor if op(node) == "Mul" else factor)
            return replace(found, stored_reciprocal=op(node) == "Mul", miscount=miscount)
        return None

    def _less_one(self, name: str) -> bool:
        """Whether a value is another one less 1, perhaps with a lower limit."""
        inner = self.values.strip(name)[0]
        limited = self.values.made_by(inner, "Max")
        if limited is not None:
            inner = self.values.strip(self.clamped(limited)[0])[0]
        node = self.values.made_by(inner, "Add", "Sub")
        less = None if node is None else {"Add": -1.0, "Sub": 1.0}[op(node)]
        return node is not None and any(
            self.values.scalar(each) == less for each in list(node.input)[op(node) == "Sub" :]
        )

    def _reduction(self, node: onnx.NodeProto, path: list[onnx.NodeProto], reshaped: bool) -> Mean | None:
        axes = None if op(node) == "Einsum" else self._reduced_axes(node)
        if axes is None:
            return None
        source, casts = self.values.strip(node.input[0])
        shape = self.scope.shape(source)
        if axes and shape is not None:
            if not all(-len(shape) <= axis < len(shape) for axis in axes):
                return None
            axes = tuple(sorted(axis % len(shape) for axis in axes))
        keepdims = bool(attribute(node, "keepdims", 1))
        squared = op(node) in ("ReduceSumSquare", "ReduceL2")
        found = Mean(source, axes or None, keepdims, (*casts, node, *path), squared=squared, reshaped=reshaped)
        return before_unsqueeze(self.values, found)

    def _reduced_axes(self, node: onnx.NodeProto) -> tuple[int, ...] | None:
        """The axes of a reduction, empty for all axes, None if they are not fixed in the file."""
        axes = attribute(node, "axes", ())
        if not axes and len(node.input) > 1 and node.input[1]:
            value = self.scope.constant(node.input[1])
            if value is None or value.dtype.kind not in "iu":
                return None
            axes = tuple(value.ravel().tolist())
        return None if not axes and attribute(node, "noop_with_empty_axes", 0) else axes

    def _weighted(self, node: onnx.NodeProto, path: list[onnx.NodeProto], reshaped: bool) -> Mean | None:
        """The mean or sum that a product with equal weights computes: MatMul, Gemm, Einsum, or Conv of 1 x 1.

        Weights of 1/n give a mean, weights of 1 the sum (`total`).
        """
        weighing = weighted_sum(self.values, node)
        if weighing is None or not weighing.n:
            return None
        source, casts = self.values.strip(weighing.source)
        axes = self.values.axes(weighing.axes, source)
        total = weighing.weight == 1 and weighing.n != 1
        divisor = 1 / weighing.weight if weighing.weight else math.inf
        miscount = NONE if total else miscounted(weighing.n, divisor, weighing.unit)
        found = Mean(source, axes, weighing.keepdims, (*casts, node, *path), squared=weighing.squared)
        found = replace(found, reshaped=reshaped, total=total, stored_reciprocal=not total, miscount=miscount)
        return before_unsqueeze(self.values, found)

    def _pooled(self, node: onnx.NodeProto, path: list[onnx.NodeProto], reshaped: bool) -> Mean | None:
        """The mean over all axes after the first two, as GlobalAveragePool or as AveragePool with one window."""
        source, casts = self.values.strip(node.input[0])
        shape = self.scope.shape(source)
        if shape is None or len(shape) < 3:
            return None
        window = attribute(node, "kernel_shape", ())
        if op(node) == "AveragePool" and (window != shape[2:] or any(attribute(node, "pads", ()))):
            return None
        axes = tuple(range(2, len(shape)))
        return before_unsqueeze(self.values, Mean(source, axes, True, (*casts, node, *path), reshaped=reshaped))

    def _of_means(self, found: Mean | None) -> Mean | None:
        """Merge nested means: the mean over some axes of a mean over others is the mean over both."""
        if found is None or found.squared or self._nested == _MOST_NESTED:
            return found
        self._nested += 1
        try:
            inner = self.mean(found.source)
        finally:
            self._nested -= 1
        if not inner or not inner.keepdims or inner.axes is None or found.axes is None:
            return found
        axes = tuple(sorted({*inner.axes, *found.axes}))
        rounded = inner.stored_reciprocal or found.stored_reciprocal
        return replace(
            inner,
            axes=axes,
            keepdims=found.keepdims,
            nodes=(*inner.nodes, *found.nodes),
            reshaped=found.reshaped,
            stored_reciprocal=rounded,
            miscount=inner.miscount.then(found.miscount),
        )

    def _miscount(self, mean: Mean, factor: str, divisor: float) -> NearMiss:
        """The `miscount` of a sum that is divided by `divisor`: an error unless that is n - 1."""
        count = self.values.count(mean.axes, mean.source)
        if not count:
            return NONE
        stored = self.values.narrowest(factor, self.values.strip(factor)[0])
        value = self.scope.constant(factor)
        return miscounted(count, divisor, max(unit_roundoff(stored), 0.0 if value is None else unit_of(value)))

    # -- squares

    def power(self, name: str) -> tuple[str, float, list[onnx.NodeProto]] | None:
        """(base, exponent, nodes) if the value is base^exponent."""
        inner, path = self.values.strip(name, PASSED)
        node = self.scope.producer(inner)
        if node is None:
            return None
        twice = op(node) == "Mul" and self.values.same(*node.input)
        exponent = 2.0 if twice else self.values.scalar(node.input[1]) if op(node) == "Pow" else None
        if exponent is None:
            return None
        base, more = self._unsigned(node.input[0]) if exponent % 2 == 0 else self.values.strip(node.input[0])
        return base, exponent, [*path, node, *more]

    def _unsigned(self, name: str) -> tuple[str, list[onnx.NodeProto]]:
        """`strip`, also through Abs and changes of sign, which an even power undoes."""
        name, _, path = self.values.signed(name)
        node = self.values.made_by(name, "Abs")
        while node is not None and len(path) < _MOST_SIGNS:
            name, _, more = self.values.signed(node.input[0])
            path = [*path, node, *more]
            node = self.values.made_by(name, "Abs")
        return name, path

    def second_moment(self, name: str) -> tuple[str, float, Mean, list[onnx.NodeProto]] | None:
        """(base, exponent, mean, nodes) if the value is mean(base^exponent)."""
        mean = self.mean(name) or self.total(name)
        if mean is None:
            return None
        if mean.squared:
            base, path = self._unsigned(mean.source)
            return base, 2.0, mean, [*path, *mean.nodes]
        squared = self.power(mean.source)
        if squared is None:
            return None
        base, exponent, nodes = squared
        return base, exponent, mean, [*nodes, *mean.nodes]

    def centred(self, name: str) -> Centred | None:
        """x - mean(x), in any order and with any signs, if the value is that; with `negative`, mean(x) - x."""
        inner, sign, path = self.values.signed(name, SAME | QUANTISERS)
        node = self.values.made_by(inner, "Sub", "Add")
        if node is None:
            return None
        terms = (node.input[0], 1), (node.input[1], -1 if op(node) == "Sub" else 1)
        for (kept, plus), (subtracted, minus) in (terms, reversed(terms)):
            x, flip, casts = self.values.signed(kept)
            value, turn, more = self.values.signed(subtracted)
            mean = self.mean(value)
            if mean is None or mean.squared:
                continue
            source, around, last = self.values.signed(mean.source)
            if self.values.same(x, source) and plus * flip == -minus * turn * around:
                nodes = (*casts, *last, *mean.nodes, *more, node, *path)
                return Centred(x, replace(mean, source=source), nodes, negative=sign * plus * flip < 0)
        if node.output[0] not in self._evaluated:
            self._evaluated[node.output[0]] = self._by_evaluation(node, terms)
        found = self._evaluated[node.output[0]]
        return found and replace(found, nodes=(*found.nodes, *path), negative=found.negative != (sign < 0))

    def _by_evaluation(self, node: onnx.NodeProto, terms) -> Centred | None:
        """x - mean(x) with a mean in any writing; the difference itself, as centred, where x has another layout."""
        for (kept, plus), (subtracted, minus) in (terms, reversed(terms)):
            x, casts = self.values.strip(kept)
            found = evaluated_mean(self.values, x, subtracted, -plus * minus)
            if found is None:
                unlike = other_mean(self.values, x, subtracted, -plus * minus)
                if unlike is not None:
                    return Centred(x, unlike, (*casts, *unlike.nodes, node), negative=plus < 0)
                continue
            mean = found.mean
            if found.factor != 1:
                reason = f"{found.factor:.4g} times its mean is subtracted from x"
                mean = replace(mean, miscount=NearMiss(reason, error=True))
            if found.direct:
                return Centred(x, mean, (*casts, *mean.nodes, node), negative=plus < 0)
            return Centred(node.output[0], mean, (), negative=plus < 0)
        return None

    # -- variances

    def variance(self, name: str, depth: int = DEEPEST) -> Variance | None:
        """The second moment that a value holds, also after a clamp, a square root and square, or a rescaling."""
        inner, path = self.values.strip(name, PASSED)
        node = self.scope.producer(inner)
        if node is None or depth == 0:
            return None
        turned = self._transposed(node, path, depth) if op(node) == "Transpose" else None
        if turned is not None:
            return turned
        if op(node) in ("Max", "Relu", "Clip"):  # clamped because rounding can make E[x^2] - E[x]^2 negative
            return self._clamped_variance(node, path, depth)
        root = self._squared_root(node)
        if root is not None:
            found = self.variance(root.input[0], depth - 1)
            return found and found.through([root, *path, node])
        if op(node) == "Sub":
            found = self.one_pass(*node.input)
            return found and found.through([*path, node])
        if op(node) in ("Mul", "Div") and self.mean(inner) is None:
            return self._rescaled(node, path, depth)
        moment = self.second_moment(inner)
        return self.two_pass(moment, path) if moment and not self._turned(moment) else None

    def _turned(self, moment) -> bool:
        """Whether squares were given another rank before their mean, whose axes are not those of x then."""
        base, _, mean, _ = moment
        shapes = self.scope.shape(base), self.scope.shape(mean.source)
        return None not in shapes and len(shapes[0]) != len(shapes[1])

    def _transposed(self, node: onnx.NodeProto, path: list[onnx.NodeProto], depth: int) -> Variance | None:
        """A variance before a Transpose, without the nodes that centre x: the numerator has their result transposed."""
        found, order = self.variance(node.input[0], depth - 1), attribute(node, "perm", ())
        if found is None or found.order or not order or found.mean.axes is None or not found.mean.keepdims:
            return None
        before = self.centred(found.centred) if found.centred else None
        dropped = set() if before is None else {id(each) for each in before.nodes}
        kept = tuple(each for each in found.nodes if id(each) not in dropped)
        return replace(found, nodes=kept, order=order).through([*path, node])

    def l2(self, node: onnx.NodeProto) -> Variance | None:
        """The second moment, as a sum, whose root a ReduceL2 computes."""
        found = self._reduction(node, [], False)
        if found is None:
            return None
        base, path = self._unsigned(found.source)
        moment = base, 2.0, replace(found, total=True), [*path, *found.nodes]
        return self.two_pass(moment, [])

    def _squared_root(self, node: onnx.NodeProto) -> onnx.NodeProto | None:
        """The Sqrt whose result `node` squares, else None."""
        twice = op(node) == "Mul" and node.input[0] == node.input[1]
        twice = twice or (op(node) == "Pow" and self.values.scalar(node.input[1]) == 2)
        return self.values.made_by(node.input[0], "Sqrt") if twice else None

    def _clamped_variance(self, node: onnx.NodeProto, path: list[onnx.NodeProto], depth: int) -> Variance | None:
        clamped, floor = self.clamped(node)
        found = self.variance(clamped, depth - 1)
        if found is None:
            return None
        if not floor > 0:
            return found.through([*path, node])
        return found.through([*path, node], NearMiss(f"the variance is not allowed below {floor:g}"), floor=floor)

    def _rescaled(self, node: onnx.NodeProto, path: list[onnx.NodeProto], depth: int) -> Variance | None:
        for a, b in (node.input, reversed(node.input)):
            found = self.variance(a, depth - 1)
            if found and not (op(node) == "Div" and a != node.input[0]):
                near = NearMiss("the variance is rescaled before the root (an unbiased estimate divides by n - 1)")
                return found.through([*path, node, *([] if self.values.scalar(b) else self.values.chain(b)[0])], near)
        return None

    def two_pass(self, moment, path: list[onnx.NodeProto]) -> Variance | None:
        """mean((x - mean(x))^2), or mean(x^2)."""
        base, exponent, mean, nodes = moment
        near = mean.miscount
        if exponent != 2:  # an even power of a deviation may be intended
            near = near.then(NearMiss(f"the exponent is {exponent:g}, not 2", exponent % 2 != 0, trap="exponent"))
        centred = self.centred(base) or self._centred_before_transpose(base)
        if centred is None:
            if exponent != 2:  # x / sqrt(mean(x^p)) resembles no norm
                return None
            found = Variance(base, "", RMS, "centred", mean, tuple(nodes), near)
            return replace(found, stored_reciprocal=mean.stored_reciprocal).through(path)
        x, inner_mean, centre_nodes = centred.x, centred.mean, centred.nodes
        outer, inner = self.values.axes(mean.axes, x), self.values.axes(inner_mean.axes, x)
        if self.values.long_axes(outer, x) != self.values.long_axes(inner, x):
            reason = f"the mean is over axes {_shown(inner)}, the variance over {_shown(outer)}"
            near = near.then(NearMiss(reason, error=True))
        near = near.then(replace(inner_mean.miscount, error=bool(inner_mean.miscount.reason)))
        found = Variance(
            x,
            base,
            LAYER,
            "centred",
            mean,
            (*centre_nodes, *nodes),
            near.then(inner_mean.misbroadcast),
            mean.stored_reciprocal or inner_mean.stored_reciprocal,
            negative=centred.negative,
        )
        return found.through(path)

    def _centred_before_transpose(self, name: str) -> Centred | None:
        """The centred value that a Transpose takes, as one of the result's layout: its x is the transposed value."""
        inner, path = self.values.strip(name, SAME | QUANTISERS)
        node = self.values.made_by(inner, "Transpose")
        found = None if node is None else self.centred(node.input[0])
        order = () if node is None else attribute(node, "perm", ())
        if found is None or found.mean.axes is None or not order:
            return None
        axes = [axis % len(order) for axis in found.mean.axes]
        if not set(axes) <= set(order) or set(order) != set(range(len(order))):
            return None
        mean = replace(found.mean, axes=tuple(sorted(order.index(axis) for axis in axes)), keepdims=True)
        return Centred(inner, mean, tuple(path))

    def one_pass(self, second_moment: str, squared_mean: str) -> Variance | None:
        """The variance E[x^2] - E[x]^2, from its two terms."""
        second, first = self.second_moment(second_moment), self.power(squared_mean)
        mean = first and self.mean(first[0])
        if (
            second is None
            or second[2].total
            or mean is None
            or mean.squared
            or not self.values.same(second[0], mean.source)
        ):
            return None
        _, exponent, outer, nodes = second
        near = outer.miscount.then(mean.miscount)
        if exponent != 2 or first[1] != 2:
            near = near.then(NearMiss(f"the exponents are {exponent:g} and {first[1]:g}, not 2", error=True))
        if self.values.long_axes(mean.axes, mean.source) != self.values.long_axes(outer.axes, mean.source):
            reason = f"the mean is over axes {_shown(mean.axes)}, the second moment over {_shown(outer.axes)}"
            near = near.then(NearMiss(reason, error=True))
        return Variance(
            mean.source,
            "",
            LAYER,
            "one-pass",
            outer,
            (*nodes, *mean.nodes, *first[2]),
            near,
            mean.stored_reciprocal or outer.stored_reciprocal,
        )

    def clamped(self, node: onnx.NodeProto) -> tuple[str, float]:
        """(v, c) of max(c, v), relu(v) or clip(v, c)."""
        if op(node) == "Max" and len(node.input) == 2:
            for a, b in (node.input, reversed(node.input)):
                floor = self.values.scalar(a)
                if floor is not None:
                    return b, floor
        if op(node) == "Clip":
            floor = self.values.scalar(node.input[1]) if len(node.input) > 1 and node.input[1] else None
            return node.input[0], attribute(node, "min", 0.0) if floor is None else floor
        return node.input[0], 0.0


def _shown(axes: tuple[int, ...] | None) -> str:
    return "all" if axes is None else str(axes)
