"""Recognise norms in primitive operators, forward from the variance through the quotient to scale and bias."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import onnx

from onnx_export.graph.scope import Scope, attribute, op
from onnx_export.graph.tables import FLOATS, RESHAPING, SAME
from onnx_export.nodes import subgraphs
from onnx_export.operators import CENTRED, LAYER, RMS
from onnx_export.validation.folded import folded_mean
from onnx_export.validation.fused import batch_norm, lp_norm
from onnx_export.validation.match import Match
from onnx_export.validation.moments import Moments
from onnx_export.validation.norm import NONE, NearMiss, Norm
from onnx_export.validation.powers import NEAR, Power, next_power
from onnx_export.validation.radicand import Radicand, radicand
from onnx_export.validation.resembling import absolute, uncentred
from onnx_export.validation.statistic import Mean, Variance
from onnx_export.validation.values import QUANTISERS, Values, fits, following

_LONGEST = 9  # limit on the steps between the variance and the quotient
_STARTS = frozenset({"Sqrt", "Reciprocal", "Pow", "Log", "Mul", "Div", "ReduceL2"})
_STEPS = (_STARTS - {"ReduceL2"}) | {"Neg", "Exp", "Max", "Clip", "Add"}  # on the way from a variance to the quotient
_FUSED = frozenset({"BatchNormalization", "LpNormalization"})
_FIRST = _STARTS | _FUSED


def quantised(values: Values, nodes: Iterable[onnx.NodeProto]) -> NearMiss:
    """Set if one of these nodes rounds the statistics to integers."""
    quantiser = next((node for node in nodes if op(node) == "QuantizeLinear"), None)
    if quantiser is None:
        return NONE
    step = values.scalar(quantiser.input[1]) if len(quantiser.input) > 1 else None
    steps = "" if step is None else f", in steps of {step:.3g}"
    return NearMiss(f"its statistics are quantised{steps}: it is the norm of integers")


class Matcher:
    """Matches decomposed norms, starting where a variance and eps are first used, by a root in most cases."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.values = Values(scope)
        self.moments = Moments(self.values)
        self._radicands: dict[str, Radicand] = {}

    def match(self, node: onnx.NodeProto) -> list[Norm]:
        """The norms and near misses whose variance and eps, or variance, `node` is the first to use."""
        kind = op(node)
        if kind not in _FIRST:
            return []
        wholes: list[Match] = []
        if kind in _FUSED:
            found = batch_norm(self.moments, node) if kind == "BatchNormalization" else lp_norm(self.moments, node)
            wholes = [found] if found else []
        elif kind == "ReduceL2":
            variance = self.moments.l2(node)
            begun = variance and self._begun(variance, node.output[0], Power(0.5), (node,))
            wholes = self._follow(begun, _LONGEST) if begun else []
        else:
            for name in dict.fromkeys(node.input):
                if not self._may_use(node, kind, name):
                    continue
                wholes += self._from(node, name)
            if not wholes and kind == "Div":
                found = absolute(self.moments, node)
                wholes = [found] if found else []
        finished = [(Matcher(each.scope) if each.scope else self)._finished(each) for each in wholes]
        wholes = [found for found in finished if found]
        certain = [found for found in wholes if not found.odd]
        return [self._norm(found) for found in certain or wholes[:1]]

    def _from(self, node: onnx.NodeProto, name: str) -> list[Match]:
        """The matches that begin at `node` if its input `name` is a variance and eps."""
        if name not in self._radicands:
            self._radicands[name] = radicand(self.moments, name)
        variance, nodes, eps = self._radicands[name]
        begun = variance and self._begun(variance, name, Power(), nodes, **eps)
        return self.advance(begun, node, _LONGEST) if begun else []

    def _may_use(self, node: onnx.NodeProto, kind: str, name: str) -> bool:
        """Whether `node` takes a step from a variance if that is its input `name`: not if it scales or divides it."""
        if kind not in ("Mul", "Div") or node.input[0] == node.input[1]:
            return True
        other = self.scope.constant(node.input[1] if name == node.input[0] else node.input[0])
        if kind == "Div" and name == node.input[0]:
            return other is not None and other.size == 1
        return kind == "Div" or other is None or other.size == 1

    def centred(self, norm: Norm) -> Norm:
        """An RMS operator after a subtraction of the mean as the layer norm, or near miss, that both are."""
        before = None if norm.formula is not RMS or norm.operator.added else self.moments.centred(norm.x)
        if before is None or before.negative or before.mean.squared:
            return norm
        axes, other = self.values.axes(norm.axes, norm.x), self.values.axes(before.mean.axes, before.x)
        near = before.mean.miscount.then(before.mean.misbroadcast)
        if self.values.long_axes(axes, norm.x) != self.values.long_axes(other, before.x):
            near = near.then(NearMiss(f"the mean is over axes {other}, the variance over {axes}", error=True))
        if not before.nodes:  # x has another layout
            return replace(norm, formula=LAYER if near.reason else CENTRED, near=near)
        return replace(
            norm,
            operator=None,
            formula=LAYER,
            variance="centred",
            x=before.x,
            nodes=[*before.nodes, *norm.nodes],
            shared=len(before.nodes),
            near=near,
            stored_reciprocal=before.mean.stored_reciprocal,
        )

    def _begun(self, variance: Variance, name: str, power: Power, nodes, eps=0.0, **facts) -> Match | None:
        """The match of the value `name`, this power of the variance and eps; None if a sum's count is not known."""
        excess = None
        if variance.mean.total:
            excess = self.values.count(self.values.axes(variance.mean.axes, variance.x), variance.x)
            if excess is None:
                return None
        return Match(
            variance=variance,
            excess=excess,
            nodes=(*variance.nodes, *nodes),
            shared=len(variance.nodes),
            y=name,
            std=name,
            power=power,
            near=variance.near,
            stored_reciprocal=variance.stored_reciprocal,
            floor=variance.floor,
            eps=eps / excess if excess else eps,
            **{"eps_dtype": self.values.dtype(name)} | facts,
        )

    def _norm(self, found: Match) -> Norm:
        variance = found.variance
        made = [node.output[0] for node in variance.nodes]
        floating = [name for name in made if self.values.dtype(name) in FLOATS]
        return Norm(
            scope=found.scope or self.scope,
            nodes=list(found.nodes),
            formula=CENTRED if variance.x == variance.centred and not found.near.reason else variance.formula,
            variance=variance.form,
            x=variance.x,
            y=found.y,
            axes=found.axes or self.values.axes(variance.mean.axes, variance.x),
            eps=found.eps,
            eps_dtype=found.eps_dtype,
            compute_dtype=self.values.narrowest(variance.centred, variance.mean.source, *floating),
            scale=found.scale,
            bias=found.bias,
            near=found.near,
            eps_first=found.eps_first,
            stored_reciprocal=found.stored_reciprocal,
            floor=found.floor,
            folded=found.folded,
            shrink=found.shrink,
            shared=found.shared,
            moved=bool(variance.order),
        )

    # -- from the deviation to the quotient

    def _follow(self, found: Match, depth: int) -> list[Match]:
        """The match continued through each consumer of the deviation that leads to a norm, in inner graphs too."""
        wholes: list[Match] = []
        for user, std, path in self.values.users(found.std) if depth >= 0 else ():
            wholes += self.advance(found.add(*path, std=std), user, depth)
            for inner in self.scope.inner if any(True for _ in subgraphs(user)) else ():
                if inner.owner is user:
                    inside = Matcher(inner)._follow(found.add(*path, std=std), depth)
                    wholes += [each.but(scope=each.scope or inner) for each in inside]
        return wholes

    def advance(self, found: Match, user: onnx.NodeProto, depth: int) -> list[Match]:
        """The match continued through `user`, which divides by the deviation or is a step towards it."""
        kind = op(user)
        if kind not in _STEPS:
            return []
        extended = found.add(user, y=user.output[0])
        further = extended.but(std=user.output[0])
        power = next_power(self.values, user, found.std, found.power)
        if power is not None:
            return self._follow(further.but(power=power), depth - 1)
        if found.power.logged:
            return []
        if kind == "Mul":
            return self._multiplied(found, extended, user, depth)
        if kind == "Div":
            return self._divided(found, extended, user, depth)
        if found.reciprocal:
            return []
        if kind in ("Max", "Clip"):
            inner, floor = self.moments.clamped(user)
            limited = further.add(near=NearMiss(f"the deviation is not allowed below {floor:g}"), floor=floor)
            return self._follow(limited, depth - 1) if inner == found.std and floor > 0 else []
        other = next((name for name in user.input if name != found.std), "")
        if kind == "Add" and found.eps == 0 and self.values.scalar(other) is not None:
            whole = found.power.is_(1.0)
            near = NONE if whole else NearMiss("eps is added to the standard deviation, not to the variance")
            eps = {"eps": self.values.scalar(other), "eps_dtype": self.values.dtype(other)}
            return self._follow(further.add(near=near, **eps), depth - 1)
        return []

    def _divided(self, found: Match, extended: Match, user: onnx.NodeProto, depth: int) -> list[Match]:
        """The match if `user` divides by the deviation, or the deviation by a factor sqrt(n)."""
        further = extended.but(std=user.output[0])
        if user.input[1] != found.std:
            return self._counted(found, further, self.values.scalar(user.input[1]), depth)
        whole = self._numerator(extended, user.input[0])
        if whole is None and found.power.is_(0.5):
            whole = self._difference(found, user) or uncentred(self.moments, extended, user)
        if whole is not None:
            return self._powered(whole, -found.power.exponent, user, depth)
        if self.scope.constant(user.input[0]) is not None and not found.scale:
            scaled = further.but(power=found.power.times(-1.0), scale=user.input[0])
            return self._follow(scaled, depth - 1)
        return []

    def _counted(self, found: Match, further: Match, factor: float | None, depth: int) -> list[Match]:
        """The match continued if the root of a sum is divided by sqrt(n), or by another number before it is squared."""
        near = NONE
        if not found.excess or not factor:
            return []
        if not self._root_of(found.excess, factor):
            users = self.scope.consumers(further.std)
            if not any(next_power(self.values, user, further.std, Power()) == Power(2.0) for user in users):
                return []
            near = NearMiss(f"a sum over {found.excess} elements is divided by {factor * factor:.6g}", error=True)
        return self._follow(further.add(near=near, excess=None, stored_reciprocal=True), depth - 1)

    def _multiplied(self, found: Match, extended: Match, user: onnx.NodeProto, depth: int) -> list[Match]:
        """The match if `user` multiplies rstd by the centred value, by a scale first, or `std` by a factor sqrt(n)."""
        other = user.input[1] if user.input[0] == found.std else user.input[0]
        further = extended.but(std=user.output[0])
        factor = self.values.scalar(other) if found.excess else None
        counted = self._counted(found, further, factor if found.reciprocal else 1 / factor if factor else None, depth)
        if counted:
            return counted
        divisor = self.values.made_by(self.values.strip(found.variance.x)[0], "Div") if found.rms else None
        if divisor is not None and not found.reciprocal and self.values.same(other, divisor.input[1]):
            near = NearMiss("x is divided before it is squared, so that eps counts relative to the divisor")
            x = self.values.strip(divisor.input[0])[0]
            variance = replace(found.variance, x=x)
            return self._follow(further.add(divisor, near=near, variance=variance), depth - 1)
        whole = self._numerator(extended, other)
        if whole is not None:
            return self._powered(whole, found.power.exponent, user, depth)
        if found.reciprocal and self.scope.constant(other) is not None and not found.scale:
            return self._follow(further.but(scale=other), depth - 1)
        whole = folded_mean(self.moments, found, user) if found.power.is_(-0.5) else None
        return [whole] if whole else []

    def _powered(self, found: Match, exponent: float, last: onnx.NodeProto, depth: int) -> list[Match]:
        """The quotient by var^exponent: a norm for -1/2, else divided once more, or a near miss."""
        if abs(exponent + 0.5) <= NEAR:  # exponents such as a third are rounded, as a stored 1/n is
            return [found if exponent == -0.5 else found.but(stored_reciprocal=True)]
        for user in self.scope.consumers(found.y) if depth > 0 and exponent < 0 else ():
            other = [name for name in user.input if name != found.y]
            again = op(user) == "Div" and user.input[0] == found.y and found.std in other
            again = again or (op(user) == "Mul" and found.reciprocal and found.std in other)
            if again:
                more = found.add(user, y=user.output[0])
                return self._powered(more, exponent - abs(found.power.exponent), user, depth - 1)
        deviation = abs(exponent - 0.5) <= NEAR
        if found.rms and (exponent > 0 or found.excess):
            return []
        if not found.eps > 0 and not deviation:
            return []
        if deviation:
            reason = "it is multiplied by the deviation, not divided"
        elif abs(exponent + 1) <= NEAR:
            reason = "it divides by the variance, not by its root"
        else:
            reason = f"it is multiplied by the variance to the power {exponent:.3g}, not -0.5"
        return [found.add(near=NearMiss(reason, error=not found.rms), odd=True)]

    # -- the numerator

    def _numerator(self, found: Match, numerator: str) -> Match | None:
        """The match if the numerator is the value whose variance was taken, minus its mean; other axes are noted."""
        variance = found.variance
        if variance.order:
            return self._transposed(found, numerator)
        inner, sign, path = self.values.signed(numerator)
        wanted = variance.x if found.rms else variance.centred
        if wanted and self.values.same(inner, wanted):
            one, other = (self.values.strip(each, SAME | QUANTISERS)[0] for each in (inner, wanted))
            again = [] if found.rms or one == other else [self.scope.producer(one)]  # x - mean is computed twice
            return found.add(*path, *again) if sign == (-1 if variance.negative else 1) else None
        inner, path = self.values.strip(numerator, SAME | QUANTISERS)
        product = self.values.made_by(inner, "Mul")
        if product is not None and not found.scale:  # scale * (x - mean) / std
            for a, b in (product.input, reversed(product.input)):
                value = self.scope.constant(a)
                if found.excess and self._root_of(found.excess, self.values.scalar(a)):
                    return self._numerator(found.add(*path, product, excess=None, stored_reciprocal=True), b)
                if value is not None and fits(value, self.scope.shape(variance.x)):
                    return self._numerator(found.add(*path, product, scale=a), b)
        centred = self.moments.centred(inner)
        if centred is None or centred.negative:
            return self._moved(found, inner, path) if found.rms else None
        x, mean, nodes = centred.x, centred.mean, centred.nodes
        if found.rms and self.values.same(x, variance.x):
            return found.add(*path, *nodes, near=NearMiss("the numerator is centred, the variance is not"))
        if not self.values.same(x, variance.x):
            return self._of_another(found, [*path, *nodes], mean)
        own, other = self.values.axes(mean.axes, variance.x), self.values.axes(variance.mean.axes, variance.x)
        near = mean.misbroadcast
        if self.values.long_axes(own, variance.x) != self.values.long_axes(other, variance.x):
            near = near.then(NearMiss(f"the mean is over axes {own}, the variance over {other}", error=True))
        rounded = found.stored_reciprocal or mean.stored_reciprocal
        return found.add(*path, *nodes, near=near, stored_reciprocal=rounded)

    def _transposed(self, found: Match, numerator: str) -> Match | None:
        """The match if a variance was transposed and so was the numerator: the norm of the transposed value."""
        variance, order = found.variance, found.variance.order
        inner, sign, path = self.values.signed(numerator)
        node = self.values.made_by(inner, "Transpose")
        wanted = variance.x if found.rms else variance.centred
        if node is None or attribute(node, "perm", ()) != order or not self.values.same(node.input[0], wanted):
            return None
        axes = [axis % len(order) for axis in variance.mean.axes]
        if sign != (-1 if variance.negative else 1) or not set(axes) <= set(order):
            return None
        axes = tuple(sorted(order.index(axis) for axis in axes))
        moved = replace(variance, x=inner, centred="" if found.rms else inner)
        return found.add(*path, variance=moved, axes=axes)

    def _moved(self, found: Match, numerator: str, path: list[onnx.NodeProto]) -> Match | None:
        """Near miss: x divided by the root of the mean square of x - b, or of another simple function of x."""
        node = self.values.made_by(self.values.strip(found.variance.x)[0], "Sub", "Add")
        if node is None or not any(self.values.same(numerator, each) for each in node.input):
            return None
        other = node.input[1] if self.values.same(numerator, node.input[0]) else node.input[0]
        stored = self.scope.constant(other) is not None or self.scope.producer(other) is None
        if found.excess or not stored:
            return None
        variance = replace(found.variance, x=numerator)
        near = NearMiss("the variance is that of another value than is divided")
        return found.add(node, *path, near=near, variance=variance)

    def _of_another(self, found: Match, nodes: list[onnx.NodeProto], mean: Mean) -> Match | None:
        """Near miss: x - mean(x) divided by the deviation of another value of the same shape."""
        shape = self.scope.shape(mean.source)
        if found.excess or shape is None or shape != self.scope.shape(found.variance.x):
            return None
        if self.values.axes(mean.axes, mean.source) != self.values.axes(found.variance.mean.axes, found.variance.x):
            return None
        variance = replace(found.variance, x=mean.source)
        near = NearMiss("the variance is that of another value than is divided")
        return found.add(*nodes, near=near, variance=variance)

    def _root_of(self, n: int, value: float | None) -> bool:
        """Whether a constant is sqrt(n) up to the rounding of a half type."""
        return value is not None and n > 0 and abs(value - n**0.5) <= 2.0**-10 * n**0.5

    def _compensated(self, found: Match) -> Match | None:
        """Match the factor sqrt(n) after a quotient whose deviation was sqrt(n) times too large; None without it."""
        if not found.excess:
            return found
        for user, name, path in self.values.users(found.y):
            other = user.input[1] if user.input[0] == name else user.input[0]
            factor = self.values.scalar(other) if op(user) in ("Mul", "Div") else None
            if factor and op(user) == "Div":
                factor = 1 / factor if user.input[0] == name else None
            if self._root_of(found.excess, factor):
                return found.add(*path, user, y=user.output[0], excess=None, stored_reciprocal=True)
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

    # -- after the quotient

    def _finished(self, found: Match) -> Match | None:
        """The match with what follows the quotient; None if it lacks a factor sqrt(n)."""
        whole = self._compensated(self._restored(found))
        return whole and self._affine(whole.add(near=quantised(self.values, found.nodes)))

    def _restored(self, found: Match) -> Match:
        """Note a near miss if the deviation lost its reduced axes (keepdims=0) and no node puts them back."""
        variance = found.variance
        before = {id(node) for node in variance.nodes}
        after = any(op(n) in RESHAPING and id(n) not in before for n in found.nodes)
        return found if variance.reshaped or after else found.add(near=variance.mean.misbroadcast)

    def _affine(self, found: Match) -> Match:
        """The match with the scale and bias that follow it."""
        given = {"scale": found.scale, "bias": found.bias}
        nodes, facts = following(self.values, found.variance.x, found.axes or found.variance.mean.axes, found.y, given)
        return found.add(*nodes, **facts) if nodes else found
