"""Make the layers of a model from the blocks between a frame and an output.

The blocks are walked from the output back to the frame, as links; the links are then joined into layers: a product
with the shifts and scales around it is one `Linear`, a norm with the scale and shift behind it one `LayerNorm`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

import cnorm
from onnx_export.importer.activations import activation
from onnx_export.importer.cells import affine, written_cell
from onnx_export.importer.elements import Block, Cannot, Elements

__all__ = ["Cell", "Chain"]


@dataclass(frozen=True, eq=False)
class Cell:
    """A recurrent layer's states: numbers of the new ones, and of the old ones or None where they are constants."""

    new: dict[str, np.ndarray]
    old: dict[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class _Link:
    """One step of the way: `join` gives it to the layers."""

    join: Callable[[_Layers], None]


class Chain:
    """The layers between the frame and an output.

    Parameters
    ----------
    trace : Trace
    frame : ndarray of int64
        Numbers of the frame's elements, in their order.
    old : dict of int to int
        For each element of a state's output that of its input.
    y : ndarray of int64
        Numbers of the output's elements, in their order.

    Attributes
    ----------
    layers : list of cnorm layers
    cells : list of Cell
        In the order of the layers.
    faults : list of str
        What has no layer.
    depth : int
        Links found on the way from the output.
    """

    def __init__(self, trace, frame: np.ndarray, old: dict[int, int], y: np.ndarray):
        self.trace, self.old, self.faults, self.depth = trace, old, [], 0
        links = self._way(y, frame) or []
        self.layers: list = []
        self.cells: list[Cell] = []
        if not self.faults:
            try:
                joined = _Layers(len(frame), self.cells)
                for link in links:
                    link.join(joined)
                joined.flush()
                self.layers = joined.layers
            except Cannot as error:
                self.faults.append(str(error))

    def _way(self, numbers: np.ndarray, target: np.ndarray) -> list[_Link] | None:
        """The links from `target` to some elements; with a fault noted and None where there is no way."""
        links: list[_Link] = []
        found, numbers = True, np.ravel(numbers)
        while not np.array_equal(numbers, target):
            try:
                link, numbers = self._last(numbers, target)
            except Cannot as error:
                self.faults.append(str(error))
                found = False
                if error.behind is None:
                    break
                numbers = error.behind  # there may be more faults
                continue
            links.append(link)
            self.depth += 1
        return links[::-1] if found else None

    def _last(self, numbers: np.ndarray, target: np.ndarray) -> tuple[_Link, np.ndarray]:
        """The last link before some elements, and the elements that it reads."""
        owners = self.trace.owners(numbers)
        if found := self._cell(numbers, owners):
            return found
        block = self._block(numbers)
        if block and block.op == "add" and (found := self._residual(block, target)):
            return found
        if linear := affine(self.trace, numbers):
            return _Link(lambda to: to.product(linear.weight, linear.bias)), linear.terms
        if len(owners) > 1:
            if all(owner.op == "constant" for owner in owners):
                raise Cannot("an output is constant")
            raise Cannot(f"{owners[-1].node} and {owners[0].node}: the results of both are read together")
        return self._single(block) if block else self._taken(numbers, owners[0], target)

    def _block(self, numbers: np.ndarray) -> Block | None:
        """The block, or the part of one, that computes just these elements in this order."""
        owners = self.trace.owners(numbers)
        if len(owners) != 1:
            return None
        whole = np.array_equal(numbers, owners[0].numbers)
        return owners[0] if whole else owners[0].part(numbers - owners[0].first)

    def _taken(self, numbers, block: Block, target) -> tuple[_Link, np.ndarray]:
        """Some elements of a block, or all in another order."""
        at = numbers - block.first
        if block.op == "input" and set(numbers.tolist()) <= set(target.tolist()):
            place = {number: index for index, number in enumerate(target.tolist())}
            at = np.array([place[number] for number in numbers.tolist()])
            return _Link(lambda to: to.take(at)), target
        if block.op == "input":
            raise Cannot(f"a part of the input {block.node!r} is read directly")
        return _Link(lambda to: to.take(at)), block.numbers

    def _single(self, block: Block) -> tuple[_Link, np.ndarray]:
        op, constants = block.op, block.constants
        if op in ("input", "constant"):
            raise Cannot(f"the {op} {block.node!r} is read where only the frame is")
        if op in ("scale", "shift"):
            values = constants["factor" if op == "scale" else "offset"]
            return _Link(lambda to: getattr(to, op)(values, block.node)), block.operands[0].ravel()
        if op == "norm":
            return self._norm(block.node, block.operands[0], constants["eps"])
        if op == "divide" and (found := self._written_norm(block)):
            return found
        if found := activation(self._block, block):
            layer, factor, x = found
            return _Link(lambda to: to.activation(layer, factor, block.node)), x
        reason = f"no layer computes {op.replace('_', ' ')}"
        if op in ("multiply", "add", "subtract", "divide"):
            reason = "it joins two results that depend on the frame"
        elif op == "product":
            reason = f"it multiplies {len(block.operands[0])} parts of the frame by one matrix"
        raise Cannot(f"{block.node}: {reason}", behind=block.operands[0].ravel())

    def _norm(self, node: str, rows: np.ndarray, eps: float) -> tuple[_Link, np.ndarray]:
        if len(rows) != 1:
            raise Cannot(f"{node}: it normalises {len(rows)} parts of the frame")
        return _Link(lambda to: to.norm(eps)), rows[0]

    def _written_norm(self, block: Block) -> tuple[_Link, np.ndarray] | None:
        """(x - mean) / sqrt(mean((x - mean)^2) + eps)."""
        d, s = (operand.ravel() for operand in block.operands)
        x, root = self._centred(d), self._block(s[:1])
        if x is None or (s != s[0]).any() or not root or root.op != "root":
            return None
        inner, eps = self._block(root.operands[0].ravel()), 0.0
        if inner and inner.op == "shift":
            inner, eps = self._block(inner.operands[0].ravel()), float(inner.constants["offset"][0])
        squares = self._block(inner.operands[0].ravel()) if inner and inner.op == "mean" else None
        if not squares or squares.op not in ("multiply", "square") or squares.size != len(x):
            return None
        if any(not np.array_equal(self._centred(operand.ravel()), x) for operand in squares.operands):
            return None
        return self._norm(block.node, x[None], eps)

    def _centred(self, d: np.ndarray) -> np.ndarray | None:
        """x of x - mean(x)."""
        block = self._block(d)
        if not block or block.op != "subtract":
            return None
        x, m = (operand.ravel() for operand in block.operands)
        mean = self._block(m[:1]) if (m == m[0]).all() else None
        same = mean and mean.op == "mean" and np.array_equal(np.sort(mean.operands[0].ravel()), np.sort(x))
        return x if same else None

    def _residual(self, block: Block, target) -> tuple[_Link, np.ndarray] | None:
        """x + f(x)."""
        a, b = (operand.ravel() for operand in block.operands)
        for start, end in ((a, b), (b, a)):
            known = len(self.faults)
            links = self._way(start, end)
            if links:
                return _Link(lambda to, links=links: to.residual(links)), end
            del self.faults[known:]
        return None

    # ------------------------------------------------------------------ cells

    def _cell(self, numbers, owners) -> tuple[_Link, np.ndarray] | None:
        nodes = [block for block in owners if block.op in ("LSTM", "GRU", "RNN")]
        if nodes and np.array_equal(numbers, np.concatenate([block.numbers for block in nodes])):
            return self._node_cell(nodes)
        if len(owners) == 1 and (found := written_cell(self.trace, numbers, self.old)):
            kind, x, (h, c), new_c, weights, after = found
            layer = _layer_of(kind, weights, after)
            states = {"h": numbers} | ({} if c is None else {"c": new_c})
            cell = Cell(states, {"h": h} | ({} if c is None else {"c": c}))
            return _Link(lambda to: to.cell(layer, cell)), x
        return None

    def _node_cell(self, nodes: list[Block]) -> tuple[_Link, np.ndarray]:
        x = nodes[0].operands[0].ravel()
        made = [self._from_node(block) for block in nodes]
        backward = [block.constants["backward"] for block in nodes]
        if len(nodes) == 2 and backward == [False, True] and np.array_equal(x, nodes[1].operands[0].ravel()):
            return _Link(lambda to: to.both([layer for layer, _ in made])), x
        if backward != [False]:
            raise Cannot(f"{nodes[0].node}: a cell that reads the sequence from its end only")
        return _Link(lambda to: to.cell(*made[0])), x

    def _from_node(self, block: Block):
        names = ["h", "c"][: len(block.operands) - 1]
        new = {"h": block.numbers}
        if "c" in names:
            new["c"] = self.trace.blocks[self.trace.blocks.index(block) + 1].numbers
        old, weights = {}, dict(block.constants["weights"])
        for name, operand, start in zip(names, block.operands[1:], block.constants["start"], strict=False):
            before = operand.ravel()
            if np.array_equal(before, [self.old.get(number, -1) for number in new[name].tolist()]):
                old[name] = before
            elif any(owner.op != "constant" for owner in self.trace.owners(before)):
                raise Cannot(f"{block.node}: its initial {name} is not what an output gives back")
            values = self.trace.lowered(Elements(start))
            if isinstance(values, np.ndarray) and values.any():
                weights[f"{name}0"] = values.astype(np.float32)
        kind, constants = block.op, block.constants
        preset = "onnx_linear_before_reset" if constants["reset_after"] and kind == "GRU" else "onnx"
        if constants["relu"]:
            preset = "torch_relu"
            weights = _as_torch(weights)
        return (kind, weights, preset), Cell(new, old)


def _layer_of(kind: str, weights: dict, after: bool):
    """Kind, tensors and preset of a written cell, whose gates are in the order of ONNX."""
    stacked = {name: np.asarray(weights[name], np.float32) for name in ("x", "h", "b")}
    units = stacked["h"].shape[1]
    recurrent = np.zeros((len(stacked["b"]), units), np.float32)
    if "b_h" in weights:
        recurrent[2] = weights["b_h"]
    tensors = {
        "W": stacked["x"].reshape(1, -1, stacked["x"].shape[2]),
        "R": stacked["h"].reshape(1, -1, units),
        "B": np.concatenate([stacked["b"].ravel(), recurrent.ravel()])[None],
    }
    if weights.get("function") == "relu":
        return kind, _as_torch(tensors), "torch_relu"
    return kind, tensors, "onnx_linear_before_reset" if after else "onnx"


def _as_torch(weights: dict) -> dict:
    """The tensors of an ONNX RNN by PyTorch's names, whose preset has relu."""
    units = weights["R"].shape[2]
    bias = np.asarray(weights["B"], np.float32)[0] if "B" in weights else np.zeros(2 * units, np.float32)
    named = {"weight_ih_l0": weights["W"][0], "weight_hh_l0": weights["R"][0]}
    named |= {"bias_ih_l0": bias[:units], "bias_hh_l0": bias[units:]}
    return named | {name: value for name, value in weights.items() if name in ("h0", "c0")}


# ---------------------------------------------------------------------------------------------- joining links


@dataclass
class _Layers:
    """Layers so far, and what is not yet one: a product, a norm, or elements that are selected, scaled and shifted."""

    size: int
    cells: list[Cell]
    layers: list = field(default_factory=list)
    weight: np.ndarray | None = None
    eps: float | None = None
    index: np.ndarray | None = None
    factor: np.ndarray | None = None
    offset: np.ndarray | None = None
    place: str = ""

    def take(self, at: np.ndarray) -> None:
        if self.eps is not None:
            self.flush()
        self._start()
        for name in ("weight", "index", "factor", "offset"):
            if getattr(self, name) is not None and (name != "index" or self.weight is None):
                setattr(self, name, getattr(self, name)[at])

    def scale(self, factor, place: str) -> None:
        self._start()
        self.place = place
        self.factor, self.offset = self.factor * factor, self.offset * factor

    def shift(self, offset, place: str) -> None:
        self._start()
        self.place = place
        self.offset = self.offset + offset

    def product(self, weight: np.ndarray, bias: np.ndarray) -> None:
        weight, bias = self._absorbed(weight, bias)
        self.weight, self.size = weight, len(weight)
        self.factor, self.offset = np.ones(self.size), bias

    def norm(self, eps: float) -> None:
        self.flush()
        self.eps = eps
        self._start()

    def add(self, layer) -> None:
        self.flush()
        self.layers.append(layer)
        self.size = layer.output_size or self.size

    def activation(self, layer, factor: float, place: str) -> None:
        self.add(layer)
        self.scale(factor, place)

    def cell(self, made, cell: Cell) -> None:
        self.add(self._cell_layer(made))
        self.cells.append(cell)

    def both(self, made: list) -> None:
        self.flush()
        self.add(cnorm.Bidirectional(*(self._cell_layer(one) for one in made)))

    def residual(self, links: list[_Link]) -> None:
        self.flush()
        inner = _Layers(self.size, self.cells)
        for link in links:
            link.join(inner)
        inner.flush()
        self.layers.append(cnorm.Residual(inner.layers))

    def _cell_layer(self, made):
        """A cell, whose product with its input takes over what is selected, scaled and shifted before it."""
        kind, weights, preset = made
        if self.weight is not None or self.eps is not None:
            self.flush()
        name, bias = ("W", "B") if "W" in weights else ("weight_ih_l0", "bias_ih_l0")
        if self.index is not None:
            whole = weights[name].astype(np.float64)
            rows, old = whole.reshape(-1, whole.shape[-1]), self.offset
            wide, extra = self._absorbed(rows, np.zeros(len(rows)))
            weights = weights | {name: wide.reshape(*whole.shape[:-1], -1).astype(np.float32)}
            if old.any():
                given = np.array(weights.get(bias, np.zeros((1, 2 * len(rows)))), np.float64)
                given.reshape(-1)[: len(rows)] += extra
                weights |= {bias: given.astype(np.float32)}
        return getattr(cnorm, kind)(weights, preset=preset)

    def _absorbed(self, weight, bias):
        """A product behind elements that are selected, scaled and shifted, as one of all elements before."""
        if self.weight is not None or self.eps is not None:
            self.flush()
        if self.index is None:
            return np.asarray(weight, np.float64), np.asarray(bias, np.float64)
        wide = np.zeros((len(weight), self.size))
        np.add.at(wide, (slice(None), self.index), weight * self.factor)
        bias = bias + weight @ self.offset
        self._forget()
        return wide, bias

    def _start(self) -> None:
        if self.factor is None:
            self.factor, self.offset = np.ones(self.size), np.zeros(self.size)
            if self.weight is None and self.eps is None:
                self.index = np.arange(self.size)

    def _forget(self) -> None:
        self.weight = self.eps = self.index = self.factor = self.offset = None

    def flush(self) -> None:
        """Make a layer of what is not yet one."""
        if self.factor is None:
            return
        neutral = (self.factor == 1).all() and not self.offset.any()
        with np.errstate(over="ignore", under="ignore"):
            factor, offset = self.factor.astype(np.float32), self.offset.astype(np.float32)
            if self.weight is not None:
                weight = (self.weight * self.factor[:, None]).astype(np.float32)
                self.layers.append(cnorm.Linear(weight, offset if offset.any() else None))
                self.size = len(weight)
            elif self.eps is not None:
                self.layers.append(cnorm.LayerNorm(factor, offset if offset.any() else None, eps=self.eps))
            elif not (neutral and np.array_equal(self.index, np.arange(self.size))):
                what = "it scales or shifts elements" if not neutral else "elements are selected or reordered"
                raise Cannot(f"{self.place or 'the way of the frame'}: {what} where no product follows")
        self._forget()
