"""Recognise norms in primitive operators, forward from the square root through the division to scale and bias."""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx
from onnx import TensorProto

from onnx_export.operators import LAYER, RMS
from onnx_export.validation.graph import Scope, op
from onnx_export.validation.moments import DEEPEST, Mean, Moments, Variance
from onnx_export.validation.norm import NONE, NearMiss, Norm
from onnx_export.validation.values import RESHAPERS, SAME, SUMS, Values

_FARTHEST = 64  # limit on the values that `_uncentred` and `_depends` visit


@dataclass(frozen=True)
class Match:
    """A partial match: the nodes recognised so far between the square root and the norm's result.

    Attributes
    ----------
    y : str
        The result of the last node matched.
    std : str
        The standard deviation, or its reciprocal if `reciprocal`, after the nodes matched so far.
    excess : int or None
        n if `std` is the root of a sum rather than of a mean, and so sqrt(n) times too large; None once a factor
        sqrt(n) has been found.
    """

    variance: Variance
    nodes: tuple[onnx.NodeProto, ...]
    y: str
    std: str
    reciprocal: bool
    eps: float = 0.0
    eps_dtype: int = TensorProto.UNDEFINED
    eps_first: bool = False
    scale: str = ""
    bias: str = ""
    near: NearMiss = NONE
    stored_reciprocal: bool = False
    floor: float = 0.0
    folded: bool = False
    excess: int | None = None

    @property
    def rms(self) -> bool:
        """Whether no mean is subtracted."""
        return self.variance.formula is RMS

    def add(self, *nodes: onnx.NodeProto, near: NearMiss = NONE, **changes) -> Match:
        """The match extended by nodes, with a near miss that these make it."""
        return replace(self, nodes=(*self.nodes, *nodes), near=self.near.then(near), **changes)


class Matcher:
    """Matches decomposed norms, starting from the square roots, L2 norms and divisions of a scope."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.values = Values(scope)
        self.moments = Moments(self.values)

    def match(self, node: onnx.NodeProto) -> Norm | None:
        """The norm or near miss whose standard deviation, reciprocal deviation or quotient `node` computes."""
        exponent = self.values.scalar(node.input[1]) if op(node) == "Pow" else None
        if op(node) == "Sqrt" or exponent in (0.5, -0.5):
            begun = self._begin(node, node.input[0], reciprocal=exponent == -0.5)
            whole = begun and (self._follow(begun, DEEPEST) or self._multiplied_by_deviation(begun))
        elif op(node) == "ReduceL2":
            begun = self._begin(node, node.output[0], reciprocal=False)
            whole = begun and self._follow(begun, DEEPEST)
        else:
            whole = self._without_root(node) if op(node) == "Div" else None
        whole = whole and self._compensated(self._restored(whole))
        return self._norm(self._affine(whole)) if whole else None

    def _without_root(self, node: onnx.NodeProto) -> Match | None:
        """Near misses: a centred value divided by its variance + eps, or by its mean absolute deviation."""
        begun = self._begin(node, node.input[1], reciprocal=False)
        if begun is None:
            return self._absolute(node)
        if begun.rms or begun.eps == 0:
            return None
        begun = begun.add(near=NearMiss("it divides by the variance, not by its root", error=True))
        return self._numerator(begun, node.input[0])

    def _begin(self, node: onnx.NodeProto, name: str, reciprocal: bool) -> Match | None:
        """The match that starts at `node`, if its input `name` is var + eps; else None."""
        variance, nodes, eps = self._with_eps(name)
        if variance is None:
            return None
        excess = None
        if variance.mean.total:
            excess = self.values.count(self.values.axes(variance.mean.axes, variance.x), variance.x)
            if excess is None:
                return None
            eps |= {"eps": eps["eps"] / excess}
        own = [] if any(node is each for each in variance.nodes) else [node]
        return Match(
            variance=variance,
            excess=excess,
            nodes=(*variance.nodes, *nodes, *own),
            y=node.output[0],
            std=node.output[0],
            reciprocal=reciprocal,
            near=variance.near,
            stored_reciprocal=variance.stored_reciprocal,
            floor=variance.floor,
            **eps,
        )

    def _with_eps(self, name: str) -> tuple[Variance | None, list[onnx.NodeProto], dict]:
        """The variance in var + eps or var - eps, the nodes after it, and the fields eps, eps_dtype, eps_first."""
        radicand, nodes = self.values.strip(name, SAME | RESHAPERS)
        total = self.scope.producer(radicand)
        none = {"eps": 0.0, "eps_dtype": self.scope.dtype(radicand)}
        if total is None or op(total) not in ("Add", "Sub"):
            return self.moments.variance(radicand), nodes, none
        if op(total) == "Sub" and self.values.scalar(total.input[1]) is not None:
            eps = {"eps": -self.values.scalar(total.input[1]), "eps_dtype": self.values.dtype(total.input[1])}
            return self.moments.variance(total.input[0]), [*nodes, total], eps
        for index, (a, b) in enumerate((total.input, reversed(total.input))) if op(total) == "Add" else ():
            if self.values.scalar(a) is not None:
                eps = {"eps": self.values.scalar(a), "eps_dtype": self.values.dtype(a), "eps_first": index == 0}
                return self.moments.variance(b), [*nodes, total], eps
            rest = self.values.made_by(a, "Sub")  # E[x^2] + (eps - E[x]^2), as TensorFlow's optimiser writes it
            if rest is not None and self.values.scalar(rest.input[0]) is not None:
                eps = {"eps": self.values.scalar(rest.input[0]), "eps_dtype": self.values.dtype(rest.input[0])}
                return self.moments.one_pass(b, rest.input[1]), [*nodes, rest, total], eps
        return self.moments.variance(radicand), nodes, none

    def _norm(self, found: Match) -> Norm:
        variance = found.variance
        return Norm(
            scope=self.scope,
            nodes=list(found.nodes),
            formula=variance.formula,
            variance=variance.form,
            x=variance.x,
            y=found.y,
            axes=self.values.axes(variance.mean.axes, variance.x),
            eps=found.eps,
            eps_dtype=found.eps_dtype,
            compute_dtype=self.values.narrowest(variance.centred, variance.mean.source),
            scale=found.scale,
            bias=found.bias,
            near=found.near,
            eps_first=found.eps_first,
            stored_reciprocal=found.stored_reciprocal,
            floor=found.floor,
            folded=found.folded,
        )

    # -- from the deviation to the quotient

    def _follow(self, found: Match, depth: int) -> Match | None:
        """The match continued through the first consumer of the deviation that leads to a norm."""
        if depth < 0:
            return None
        for user, std, path in self.values.users(found.std):
            whole = self._divide(found.add(*path, std=std), user, depth)
            if whole is not None:
                return whole
        return None

    def _divide(self, found: Match, user: onnx.NodeProto, depth: int) -> Match | None:
        """The match if `user` divides the centred value by the deviation, or is a step towards it (floor, 1/std)."""
        extended = found.add(user, y=user.output[0])
        further = replace(extended, std=user.output[0])
        if op(user) == "Mul":
            return self._multiplied(found, extended, user, depth)
        if found.reciprocal:
            return None
        if op(user) == "Div" and user.input[1] == found.std:
            if self.values.scalar(user.input[0]) == 1:
                return self._follow(replace(further, reciprocal=True), depth - 1)
            whole = self._numerator(extended, user.input[0]) or self._difference(found, user)
            return whole or self._uncentred(extended, user)
        if op(user) == "Div" and found.excess and self._root_of(found.excess, self.values.scalar(user.input[1])):
            return self._follow(replace(further, excess=None, stored_reciprocal=True), depth - 1)
        if op(user) in ("Max", "Clip"):
            inner, floor = self.moments.clamped(user)
            limited = further.add(near=NearMiss(f"the deviation is not allowed below {floor:g}"), floor=floor)
            return self._follow(limited, depth - 1) if inner == found.std and floor > 0 else None
        if op(user) == "Reciprocal" or (op(user) == "Pow" and self.values.scalar(user.input[1]) == -1):
            return self._follow(replace(further, reciprocal=True), depth - 1)
        if op(user) == "Add" and found.eps == 0:
            other = user.input[1] if user.input[0] == found.std else user.input[0]
            if self.values.scalar(other) is not None:
                near = NearMiss("eps is added to the standard deviation, not to the variance")
                eps = {"eps": self.values.scalar(other), "eps_dtype": self.values.dtype(other)}
                return self._follow(further.add(near=near, **eps), depth - 1)
        return None

    def _multiplied(self, found: Match, extended: Match, user: onnx.NodeProto, depth: int) -> Match | None:
        """The match if `user` multiplies rstd by the centred value, by a scale first, or `std` by a factor sqrt(n)."""
        other = user.input[1] if user.input[0] == found.std else user.input[0]
        factor = self.values.scalar(other) if found.excess else None
        if found.excess and self._root_of(found.excess, factor if found.reciprocal else 1 / factor if factor else None):
            return self._follow(replace(extended, excess=None, stored_reciprocal=True, std=user.output[0]), depth - 1)
        if not found.reciprocal:
            return None
        if self.scope.constant(other) is not None and not found.scale:
            return self._follow(replace(extended, scale=other, std=user.output[0]), depth - 1)
        return self._numerator(extended, other) or self._folded_mean(found, user)

    # -- the numerator

    def _numerator(self, found: Match, numerator: str) -> Match | None:
        """The match if the numerator is the value whose variance was taken, minus its mean; other axes are noted."""
        variance = found.variance
        inner, path = self.values.strip(numerator)
        wanted = variance.x if found.rms else variance.centred
        if wanted and self.values.same(inner, wanted):
            return found.add(*path)
        product = self.values.made_by(inner, "Mul")
        if product is not None and not found.scale:  # scale * (x - mean) / std
            for a, b in (product.input, reversed(product.input)):
                value = self.scope.constant(a)
                if value is not None and self.values.along_row(value, variance.x, variance.mean.axes):
                    return self._numerator(found.add(*path, product, scale=a), b)
        centred = self.moments.centred(inner)
        if centred is None:
            return None
        x, mean, nodes = centred
        if found.rms and self.values.same(x, variance.x):
            return found.add(*path, *nodes, near=NearMiss("the numerator is centred, the variance is not"))
        if not self.values.same(x, variance.x):
            return self._of_another(found, [*path, *nodes], mean)
        own, other = self.values.axes(mean.axes, variance.x), self.values.axes(variance.mean.axes, variance.x)
        near = mean.misbroadcast
        if own != other:
            near = near.then(NearMiss(f"the mean is over axes {own}, the variance over {other}", error=True))
        rounded = found.stored_reciprocal or mean.stored_reciprocal
        return found.add(*path, *nodes, near=near, stored_reciprocal=rounded)

    def _of_another(self, found: Match, nodes: list[onnx.NodeProto], mean: Mean) -> Match | None:
        """Near miss: x - mean(x) divided by the deviation of another value of the same shape."""
        shape = self.scope.shape(mean.source)
        if found.excess or shape is None or shape != self.scope.shape(found.variance.x):
            return None
        if self.values.axes(mean.axes, mean.source) != self.values.axes(found.variance.mean.axes, found.variance.x):
            return None
        return found.add(*nodes, near=NearMiss("the variance is that of another value than is divided"))

    def _root_of(self, n: int, value: float | None) -> bool:
        """Whether a constant is sqrt(n) up to the rounding of a half type."""
        return value is not None and abs(value - n**0.5) <= 2.0**-10 * n**0.5

    def _compensated(self, found: Match) -> Match | None:
        """Match the factor sqrt(n) after a quotient whose deviation was sqrt(n) times too large; None without it."""
        if not found.excess:
            return found
        for user in self.scope.consumers(found.y):
            for a, b in (user.input, reversed(user.input)) if op(user) == "Mul" else ():
                if a == found.y and self._root_of(found.excess, self.values.scalar(b)):
                    return found.add(user, y=user.output[0], excess=None, stored_reciprocal=True)
        return None

    def _difference(self, found: Match, user: onnx.NodeProto) -> Match | None:
        """x / std - mean / std."""
        if found.rms or not self.values.same(user.input[0], found.variance.x):
            return None
        for last in self.scope.consumers(user.output[0]):
            other = self.values.made_by(last.input[1], "Div") if op(last) == "Sub" else None
            if other is None or last.input[0] != user.output[0] or other.input[1] != found.std:
                continue
            mean = self.moments.mean(other.input[0])
            if mean is not None and not mean.squared and self.values.same(mean.source, found.variance.x):
                nodes = (user, *mean.nodes, other, last)
                return found.add(*nodes, near=mean.misbroadcast, y=last.output[0])
        return None

    def _multiplied_by_deviation(self, found: Match) -> Match | None:
        """Near miss: (x - mean) * std."""
        for user, std, path in self.values.users(found.std):
            if op(user) == "Mul" and not found.reciprocal and not found.rms:
                other = user.input[1] if user.input[0] == std else user.input[0]
                if found.variance.centred and self.values.same(other, found.variance.centred):
                    near = NearMiss("it is multiplied by the deviation, not divided", error=True)
                    return found.add(*path, user, *self.values.strip(other)[1], near=near, y=user.output[0])
        return None

    def _absolute(self, node: onnx.NodeProto) -> Match | None:
        """Near miss: (x - mean) / mean(|x - mean|)."""
        name, nodes = self.values.strip(node.input[1], SAME | RESHAPERS)
        total, eps = self.values.made_by(name, "Add"), 0.0
        for a, b in (total.input, reversed(total.input)) if total is not None else ():
            if self.values.scalar(a) is not None:
                name, nodes, eps = b, [*nodes, total], self.values.scalar(a)
        mean = self.moments.mean(name)
        sizes = None if mean is None or mean.squared else self.values.made_by(mean.source, "Abs")
        centred = None if sizes is None else self.moments.centred(sizes.input[0])
        if centred is None or not self.values.same(sizes.input[0], node.input[0]):
            return None
        x, inner, more = centred
        miscount = mean.miscount.then(inner.miscount)
        reason = "it divides by the mean absolute deviation, not by the standard deviation"
        near = NearMiss(", and ".join(filter(None, (reason, miscount.reason))), miscount.error)
        variance = Variance(x, sizes.input[0], LAYER, "centred", mean, (*more, sizes, *mean.nodes, *nodes), near)
        everything = (*variance.nodes, node, *self.values.strip(node.input[0])[1])
        kind = self.values.dtype(x)
        return Match(variance, everything, node.output[0], "", False, eps, kind, near=near)

    def _uncentred(self, found: Match, user: onnx.NodeProto) -> Match | None:
        """Near miss: x / std. None if a later sum adds a value computed from the mean or std: it may be mean / std."""
        variance = found.variance
        if found.rms or not self.values.same(user.input[0], variance.x):
            return None
        reached = [user.output[0]]
        for name in reached:
            for node in self.scope.consumers(name):
                known = all(self.scope.constant(other) is not None for other in node.input if other not in ("", name))
                others = [other for other in node.input if other not in ("", name)]
                if len(reached) > _FARTHEST:
                    return None
                if op(node) in SUMS and not known:
                    if any(self._depends(other, found, reached) for other in others):
                        return None
                    continue
                if op(node) in SAME | RESHAPERS | {"Neg"} or (op(node) in SUMS | {"Mul", "Div"} and known):
                    reached.append(node.output[0])
        path = self.values.strip(user.input[0])[1]
        return found.add(*path, near=NearMiss("x is divided by the deviation, not x - mean"))

    def _depends(self, name: str, found: Match, quotients: list[str]) -> bool:
        """Whether a value is computed from the deviation or mean of a match, other than through its quotient.

        True also for a mean of one of `quotients` (the quotient and its multiples), which may centre it afterwards, and
        if _FARTHEST values leave it open.
        """
        inside = {out for node in found.nodes for out in node.output if out} - {found.y, found.variance.x}
        pending, seen = [name], set()
        while pending and len(seen) < _FARTHEST:
            current = pending.pop()
            node = self.scope.producer(current)
            mean = self.moments.mean(current)
            centres = mean is not None and any(
                self.values.same(mean.source, each) for each in (found.variance.x, *quotients)
            )
            if current in inside or centres:
                return True
            stop = current == found.y or self.values.same(current, found.variance.x)
            if node is not None and current not in seen and not stop:
                pending += [each for each in node.input if each]
            seen.add(current)
        return len(seen) >= _FARTHEST

    # -- folded: bias - mean * rstd is computed first, then added to x * rstd

    def _folded_mean(self, found: Match, user: onnx.NodeProto) -> Match | None:
        """x * r + (bias - mean * r), as TensorFlow's batch_normalization computes it; r is rstd or rstd * scale."""
        variance = found.variance
        other = user.input[1] if user.input[0] == found.std else user.input[0]
        if found.rms or not self.values.same(other, variance.x):
            return None
        product = user.output[0]
        for last in self.scope.consumers(product):
            if op(last) not in ("Add", "Sub") or (op(last) == "Sub" and last.input[0] != product):
                continue
            rest = last.input[1] if last.input[0] == product else last.input[0]
            offset = self._offset(rest, found, op(last) == "Sub")
            if offset is not None:
                bias, nodes, mean = offset
                nodes = (user, *nodes, last)
                return found.add(*nodes, near=mean.misbroadcast, y=last.output[0], bias=bias, folded=bool(bias))
        return None

    def _offset(self, name: str, found: Match, negated: bool, depth: int = DEEPEST):
        """(bias, nodes, mean) if the value is bias - mean * rstd, or mean * rstd if `negated`; bias may be empty."""
        node = self.scope.producer(name)
        if node is None or depth == 0:
            return None
        if op(node) == "Mul":
            return self._scaled_mean(node, found, negated)
        if op(node) == "Neg" and not negated:
            inner = self._offset(node.input[0], found, True, depth - 1)
            return inner and (inner[0], [node, *inner[1]], inner[2])
        if op(node) == "Sub" and not negated and self.scope.constant(node.input[0]) is not None:
            inner = self._offset(node.input[1], found, True, depth - 1)
            return inner and (node.input[0], [node, *inner[1]], inner[2])
        if op(node) == "Add" and not negated:
            for a, b in (node.input, reversed(node.input)):
                if self.scope.constant(a) is not None:
                    inner = self._offset(b, found, False, depth - 1)
                    return inner and (a, [node, *inner[1]], inner[2])
        return None

    def _scaled_mean(self, node: onnx.NodeProto, found: Match, negated: bool):
        """As `_offset`, for the product alone: mean * rstd if `negated`, else -mean * rstd."""
        for a, b in (node.input, reversed(node.input)):
            if b != found.std:
                continue
            inner, path = self.values.strip(a)
            flip = None if negated else self.values.made_by(inner, "Neg")
            if flip is not None:
                path, inner = [*path, flip], flip.input[0]
            elif not negated:
                continue
            mean = self.moments.mean(inner)
            if mean is not None and self.values.same(mean.source, found.variance.x):
                return "", [node, *path, *mean.nodes], mean
        return None

    # -- after the quotient

    def _restored(self, found: Match) -> Match:
        """Note a near miss if the deviation lost its reduced axes (keepdims=0) and no node puts them back."""
        variance = found.variance
        before = {id(node) for node in variance.nodes}
        after = any(op(n) in RESHAPERS and id(n) not in before for n in found.nodes)
        return found if variance.reshaped or after else found.add(near=variance.mean.misbroadcast)

    def _affine(self, found: Match) -> Match:
        """Match a following multiplication (scale) and addition (bias) with constants that vary along the row only."""
        for wanted, slot in (("Mul", "scale"), ("Add", "bias")):
            if getattr(found, slot):
                continue
            node, last, casts = self.values.only_user(found.y)
            if node is None or op(node) != wanted:
                continue
            other = node.input[1] if node.input[0] == last else node.input[0]
            value = self.scope.constant(other)
            if value is not None and self.values.along_row(value, found.variance.x, found.variance.mean.axes):
                found = found.add(*casts, node, y=node.output[0], **{slot: other})
        return found
