"""Queries about the values of a graph that look through nodes which leave the numbers unchanged, such as Cast."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from onnx_export.graph.scope import Scope, attribute, op, unit_roundoff
from onnx_export.graph.tables import LAYOUT, REPEATING, RESHAPING, SAME
from onnx_export.nodes import subgraphs

QUANTISERS = frozenset({"QuantizeLinear", "DequantizeLinear"})  # passed as a pair
PASSED = SAME | RESHAPING | QUANTISERS  # between a statistic and its use
SUMS = frozenset({"Add", "Sub", "Sum"})
REDUCED_SUMS = ("ReduceSum", "ReduceSumSquare", "Einsum")
_NEUTRAL = {"Mul": 1.0, "Div": 1.0, "Add": 0.0, "Sub": 0.0}
_FLOATS = (TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT, TensorProto.DOUBLE)
_MOST_MOVES = 16
_LONGEST_PATH = 64
_LONGEST_CHAIN = 48


class Values:
    """Questions about the values of one scope."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self._sources: dict[str, str] = {}
        self._counted: dict[str, bool] = {}
        self._stripped: dict[tuple[str, frozenset[str]], tuple[str, list[onnx.NodeProto]]] = {}

    def made_by(self, name: str, *ops: str) -> onnx.NodeProto | None:
        """The producer of a value if it is one of these operators, else None."""
        node = self.scope.producer(name)
        return node if node is not None and op(node) in ops else None

    def strip(self, name: str, ops: frozenset[str] = SAME) -> tuple[str, list[onnx.NodeProto]]:
        """Walk up from `name` through nodes that leave the numbers unchanged and through Where with a constant.

        Returns the first value that is not passed, and the nodes passed.
        """
        key = name, ops
        if key not in self._stripped:
            path: list[onnx.NodeProto] = []
            while len(path) < _LONGEST_PATH:
                node = self.scope.producer(name)
                source = None if node is None else self._unchanged(node, ops)
                if source is None:
                    break
                path.append(node)
                name = source
            self._stripped[key] = name, path
        name, path = self._stripped[key]
        return name, list(path)

    def _unchanged(self, node: onnx.NodeProto, ops: frozenset[str]) -> str | None:
        """The input that the node passes on unchanged, None if there is none."""
        kind = op(node)
        if kind == "Where" and len(node.input) == 3:
            return self._guarded(node)
        if kind in QUANTISERS and kind in ops:
            return node.input[0] if kind == "QuantizeLinear" or self.made_by(node.input[0], "QuantizeLinear") else None
        if kind == "Sum" and len(node.input) == 1:
            return node.input[0]
        if kind in _NEUTRAL:
            return self._with_neutral(node)
        if kind not in ops:
            return None
        return node.input[0] if kind not in ("Cast", "CastLike") or self._floating(node) else None

    def signed(self, name: str, ops: frozenset[str] = SAME) -> tuple[str, int, list[onnx.NodeProto]]:
        """`strip`, also through changes of sign: (value, 1 or -1, nodes passed)."""
        name, path = self.strip(name, ops)
        sign = 1
        while len(path) < _LONGEST_PATH:
            node = self.scope.producer(name)
            negated = None if node is None else self._negated(node)
            if negated is None:
                break
            name, more = self.strip(negated, ops)
            sign, path = -sign, [*path, node, *more]
        return name, sign, path

    def _negated(self, node: onnx.NodeProto) -> str | None:
        """The input that a node returns with the other sign, None if there is none."""
        if op(node) == "Neg":
            return node.input[0]
        if op(node) == "Div" and self.scalar(node.input[1]) == -1:
            return node.input[0]
        for a, b in (node.input, reversed(node.input)) if op(node) == "Mul" else ():
            if self.scalar(b) == -1:
                return a
        return None

    def filled(self, name: str, value: float) -> bool:
        """Whether all elements are this number: a constant, or one that Expand or ConstantOfShape repeats."""
        stored = self.scope.constant(name)
        if stored is not None:
            return bool(np.all(stored == value))
        node = self.made_by(self.strip(name, SAME | RESHAPING)[0], "ConstantOfShape")
        if node is not None:
            given = [numpy_helper.to_array(a.t) for a in node.attribute if a.name == "value"]
            return bool(np.all(given[0] == value)) if given else value == 0
        inner = self.scope.constant(self.strip(name, SAME | RESHAPING)[0])
        return inner is not None and bool(np.all(inner == value))

    def reshaped_back(self, name: str, shape: tuple[int | None, ...] | None, like: str) -> onnx.NodeProto | None:
        """The only consumer of a value if it gives it the shape of `like` again, else None."""
        users = self.scope.consumers(name)
        node = users[0] if len(users) == 1 and op(users[0]) in ("Reshape", "Squeeze") else None
        if node is None or name in self.scope.outputs:
            return None
        source = self.made_by(self.strip(node.input[1])[0], "Shape") if op(node) == "Reshape" else None
        if source is not None and self.same(source.input[0], like):
            return node
        made = self.scope.shape(node.output[0])
        rank = None if shape is None else len(shape)
        fits = made is not None and len(made) == rank
        return node if fits and all(None in (a, b) or a == b for a, b in zip(made, shape, strict=True)) else None

    def _with_neutral(self, node: onnx.NodeProto) -> str | None:
        """The other operand of x * 1, x / 1, x + 0 or x - 0, which PaddlePaddle writes, else None.

        None also if it is a sum, whose divisor is a count.
        """
        for value, constant in (node.input, reversed(node.input)) if op(node) in ("Mul", "Add") else (node.input,):
            stored = self.scope.constant(constant)
            if stored is not None and stored.ndim < 2 and self.scalar(constant) == _NEUTRAL[op(node)]:
                return None if self._sums(value) else value
        return None

    def _sums(self, name: str) -> bool:
        """Whether a value is a sum of elements, perhaps after Identities and Casts."""
        for _ in range(_LONGEST_PATH):
            node = self.scope.producer(name)
            if node is None or op(node) not in SAME:
                return node is not None and op(node) in REDUCED_SUMS
            name = node.input[0]
        return True

    def _guarded(self, node: onnx.NodeProto) -> str | None:
        """The branch of a Where that a constant condition selects, or else the one that is no constant, if one is.

        Where(condition, value, constant) replaces some rows by a constant; the others hold the value unchanged.
        """
        condition, *branches = node.input
        known = self.scope.constant(condition)
        if known is not None and known.size and (known.all() or not known.any()):
            return branches[0 if known.all() else 1]
        stored = [self.scalar(branch) is not None for branch in branches]
        return branches[stored.index(False)] if sorted(stored) == [False, True] else None

    def _floating(self, cast: onnx.NodeProto) -> bool:
        like = cast.input[1] if op(cast) == "CastLike" and len(cast.input) > 1 else ""
        target = self.scope.dtype(like) if like else attribute(cast, "to", 0)
        known = (*_FLOATS, TensorProto.UNDEFINED)
        return target in (known if like else _FLOATS) and self.scope.dtype(cast.input[0]) in known

    def users(self, name: str) -> Iterator[tuple[onnx.NodeProto, str, list[onnx.NodeProto]]]:
        """Consumers of a value, also after changes of shape and type: (consumer, name of its input, nodes passed)."""
        pending: list[tuple[str, list[onnx.NodeProto]]] = [(name, [])]
        while pending:
            name, path = pending.pop(0)
            for user in self.scope.consumers(name):
                if self._unchanged(user, PASSED) == name and len(path) < 8:
                    pending.append((user.output[0], [*path, user]))
                else:
                    yield user, name, path

    def only_user(self, name: str) -> tuple[onnx.NodeProto | None, str, list[onnx.NodeProto]]:
        """The only consumer of a value, also after casts: (consumer, name of its input, casts).

        The consumer is None if there are none or several, or if the value is an output of the graph.
        """
        casts: list[onnx.NodeProto] = []
        while name not in self.scope.outputs and len(casts) < _LONGEST_PATH:
            users = self.scope.consumers(name)
            if len(users) != 1:
                break
            if op(users[0]) not in SAME:
                return users[0], name, casts
            casts.append(users[0])
            name = users[0].output[0]
        return None, name, casts

    def same(self, a: str, b: str) -> bool:
        """Whether two names stand for one value, up to casts and quantisation, or are computed alike twice."""
        a, b = self._source(a), self._source(b)
        if a == b:
            return True
        one, other = self.scope.producer(a), self.scope.producer(b)
        if one is None or other is None or op(one) != op(other) or list(one.input) != list(other.input):
            return False
        alike = one.attribute == other.attribute and list(one.output).index(a) == list(other.output).index(b)
        return alike and len(one.input) > 0 and not any(True for _ in subgraphs(one))

    def _source(self, name: str) -> str:
        """The end of `strip` through casts and quantisers without its limit of steps, remembered for each value."""
        passed: list[str] = []
        while name not in self._sources:
            passed.append(name)
            self._sources[name] = name  # ends the walk where a hostile graph leads back
            name = self.strip(name, SAME | QUANTISERS)[0]
        for each in passed:
            self._sources[each] = self._sources[name]
        return self._sources[name]

    def scalar(self, name: str) -> float | None:
        """The value of a constant of one element, else None."""
        value = self.scope.constant(name)
        return float(value.ravel()[0]) if value is not None and value.size == 1 and value.dtype.kind in "fiu" else None

    def counted(self, name: str) -> bool:
        """Whether a value is computed from shapes and constants alone."""
        if name not in self._counted:
            self._counted[name] = not self.chain(name)[1]
        return self._counted[name]

    def chain(self, name: str) -> tuple[list[onnx.NodeProto], list[str]]:
        """The nodes that compute a value from shapes and constants, and the other values that it depends on."""
        nodes: dict[int, onnx.NodeProto] = {}
        leaves: list[str] = []
        pending = [name]
        while pending:
            current = pending.pop()
            node = self.scope.producer(current)
            if self.scope.constant(current) is not None:
                continue
            if node is None or len(nodes) >= _LONGEST_CHAIN:
                leaves.append(current)
            elif id(node) not in nodes:
                nodes[id(node)] = node
                if op(node) not in ("Shape", "Size"):
                    pending += [i for i in node.input if i]
        return list(nodes.values()), leaves

    def dtype(self, name: str) -> int:
        """ONNX element type of a value; if the file gives none, that of its folded constant."""
        dtype = self.scope.dtype(name)
        value = self.scope.constant(name) if dtype == TensorProto.UNDEFINED else None
        return dtype if value is None else onnx.helper.np_dtype_to_tensor_dtype(value.dtype)

    def narrowest(self, *names: str) -> int:
        """The type with the fewest digits among these values; empty names are skipped."""
        return max((self.dtype(name) for name in names if name), key=unit_roundoff)

    def axes(self, axes: tuple[int, ...] | None, x: str) -> tuple[int, ...] | None:
        """Axes of x, non-negative where its rank is known."""
        shape = self.scope.shape(x)
        if shape is None:
            return axes
        if axes is None:
            return tuple(range(len(shape)))
        return tuple(sorted(axis + len(shape) if axis < 0 else axis for axis in axes))

    def long_axes(self, axes: tuple[int, ...] | None, x: str) -> tuple[int, ...] | None:
        """`axes` without those along which x is known to have one element; those that x lacks stay."""
        shape, axes = self.scope.shape(x), self.axes(axes, x)
        return axes if shape is None else tuple(axis for axis in axes if shape[axis : axis + 1] != (1,))

    def count(self, axes: tuple[int, ...] | None, x: str) -> int | None:
        """Number of elements of x over these axes, None if a size is not fixed in the file."""
        shape = self.scope.shape(x)
        if shape is None or axes is None or any(not -len(shape) <= axis < len(shape) for axis in axes):
            return None
        sizes = [shape[axis] for axis in axes]
        return None if not all(sizes) else int(np.prod(sizes))

    def along_row(self, value: np.ndarray, x: str, axes: tuple[int, ...] | None) -> bool:
        """Whether a scale or bias varies along normalised axes only."""
        shape = self.scope.shape(x)
        if axes is None:
            return True
        if shape is None:
            return value.size == 1 or value.ndim == 1
        return value.ndim <= len(shape) and varying(value, len(shape)) <= set(self.axes(axes, x))


def ancestors(scope: Scope, name: str, most: int = 64) -> list[str]:
    """The values from which one is computed, nearest first, up to a limit."""
    reached, seen = [name], {name}
    for current in reached:
        node = scope.producer(current)
        for each in node.input if node is not None and len(reached) < most else ():
            if each and each not in seen and scope.constant(each) is None:
                seen.add(each)
                reached.append(each)
    return reached[1:]


def following(
    values: Values, x: str, axes: tuple[int, ...] | None, y: str, given: dict[str, str]
) -> tuple[list[onnx.NodeProto], dict[str, str]]:
    """The multiplication by a scale and the addition of a bias after y: nodes, and the names of y, scale and bias.

    They are constants that vary along normalised axes of x only; those `given` are not looked for.
    """
    nodes, names = [], given | {"y": y}
    for wanted, slot in (("Mul", "scale"), ("Add", "bias")):
        node, last, casts = (None, "", []) if given[slot] else values.only_user(names["y"])
        if node is None or op(node) != wanted:
            continue
        other = node.input[1] if node.input[0] == last else node.input[0]
        value = values.scope.constant(other)
        if value is not None and values.along_row(value, x, axes):
            nodes, names = [*nodes, *casts, node], names | {slot: other, "y": node.output[0]}
    return nodes, names


def fits(value: np.ndarray, shape: tuple[int | None, ...] | None) -> bool:
    """Whether a constant may multiply values of this shape without making them larger."""
    if shape is None:
        return value.size == 1 or value.ndim == 1
    pairs = zip(reversed(value.shape), reversed(shape), strict=False)
    return value.ndim <= len(shape) and all(own == 1 or size in (None, own) for own, size in pairs)


def varying(value: np.ndarray, rank: int) -> set[int]:
    """The axes of x, of this rank, along which a scale or bias varies."""
    return {rank - value.ndim + index for index, size in enumerate(value.shape) if size != 1}


def unit_of(stored: np.ndarray) -> float:
    """Unit roundoff of the type that a stored reciprocal, such as 1/n, was rounded to; 0 for integers.

    An optimiser turns constants of float16 into float32: only the digits show it. They do not for powers of two.
    """
    if stored.dtype.kind != "f" or not stored.size:
        return 0.0
    value, unit = float(stored.flat[0]), float(np.finfo(stored.dtype).eps) / 2
    exact = value.is_integer() or abs(np.frexp(value)[0]) == 0.5
    with np.errstate(over="ignore"):
        return unit if exact or float(np.float16(value)) != value else 2.0**-11


def stored(scope: Scope, name: str) -> np.ndarray | None:
    """The constant that a value repeats or moves, whatever its shape; None if there is none."""
    for _ in range(_MOST_MOVES):
        value = scope.constant(name)
        node = None if value is not None else scope.producer(name)
        if node is None:
            return value
        if op(node) == "ConstantOfShape":
            return next((numpy_helper.to_array(a.t) for a in node.attribute if a.name == "value"), np.zeros(1))
        if op(node) not in LAYOUT | REPEATING | {"Slice", "Concat"} or not node.input:
            return None
        if op(node) == "Concat":
            parts = [stored(scope, each) for each in node.input[:_MOST_MOVES]]
            return None if any(part is None for part in parts) else np.concatenate([np.ravel(part) for part in parts])
        name = node.input[0]
    return None
