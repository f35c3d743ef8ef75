"""The operators LSTM, GRU and RNN in float64, with bounds on the error of a step in a narrower type.

Formulas: the ONNX operator documentation. Where bounds are wanted, every value is a pair: the number, and a bound on
its error when the step is computed with the unit roundoff u. A sum of n products is off by at most

    6 u sqrt(n) sum |w| |x|,

by Hoeffding's inequality in 3 of 10^8 sums (its partial sums are at most sum |w| |x|, and their roundings independent:
Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019). An activation f carries an error d of
its argument to max |f(a + d) - f(a)|, |f(a - d) - f(a)|, as it is monotone, and adds 8 u of its own; products and sums
of gates carry errors by the product rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper
from onnx.reference.op_run import OpRun

__all__ = ["ACTIVATIONS", "GATES", "KERNELS", "Cell", "Direction", "State", "is_recurrent", "run"]

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_DEFAULTS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}
_DEVIATIONS = 6.0
ACTIVATION = 8.0  # roundings of an activation, in units: its own and those of a rational approximation

Function = Callable[[np.ndarray], np.ndarray]
# name -> defaults of alpha and beta (None where it takes none), and the function
ACTIVATIONS: dict[str, tuple[float | None, float | None, Callable[..., np.ndarray]]] = {
    "relu": (None, None, lambda x, a, b: np.maximum(x, 0)),
    "tanh": (None, None, lambda x, a, b: np.tanh(x)),
    "sigmoid": (None, None, lambda x, a, b: 0.5 * (1 + np.tanh(0.5 * x))),
    "softsign": (None, None, lambda x, a, b: x / (1 + np.abs(x))),
    "softplus": (None, None, lambda x, a, b: np.logaddexp(0, x)),
    "elu": (1.0, None, lambda x, a, b: np.where(x < 0, a * np.expm1(np.minimum(x, 0)), x)),
    "leakyrelu": (0.01, None, lambda x, a, b: np.where(x < 0, a * x, x)),
    "thresholdedrelu": (1.0, None, lambda x, a, b: np.where(x > a, x, 0.0)),
    "affine": (1.0, 0.0, lambda x, a, b: a * x + b),
    "scaledtanh": (1.0, 1.0, lambda x, a, b: a * np.tanh(b * x)),
    "hardsigmoid": (0.2, 0.5, lambda x, a, b: np.clip(a * x + b, 0, 1)),
}


def is_recurrent(node: onnx.NodeProto) -> bool:
    """Whether a node is one of ONNX's own operators LSTM, GRU and RNN."""
    return node.op_type in GATES and node.domain in ("", "ai.onnx")


@dataclass(frozen=True)
class Cell:
    """The attributes of a node.

    Attributes
    ----------
    kind : {"LSTM", "GRU", "RNN"}
    directions : tuple of {"forward", "reverse"}
    activations : tuple of tuple of (str, float or None, float or None)
        For each direction the name, in lower case, alpha and beta of f, g and h.
    clip : float
        Limit of the arguments of activations, infinite for none.
    input_forget, linear_before_reset : bool
    layout : int
        1 where the batch is the first axis.
    """

    kind: str
    directions: tuple[str, ...]
    activations: tuple[tuple[tuple[str, float | None, float | None], ...], ...]
    clip: float = np.inf
    input_forget: bool = False
    linear_before_reset: bool = False
    layout: int = 0

    @classmethod
    def of(cls, node: onnx.NodeProto) -> Cell:
        """The cell of a node; ValueError for a direction or activation that there is not."""
        return cls.from_attributes(node.op_type, {a.name: helper.get_attribute_value(a) for a in node.attribute})

    @classmethod
    def from_attributes(cls, kind: str, attributes: Mapping[str, Any]) -> Cell:
        """The cell of a kind with these attributes; None and absent ones have their defaults."""
        given = {name: value for name, value in attributes.items() if value is not None}
        direction = _text(given.get("direction", "forward")).lower()
        if direction not in ("forward", "reverse", "bidirectional"):
            raise ValueError(f"{kind}: no direction is named {direction!r}")
        directions = ("forward", "reverse") if direction == "bidirectional" else (direction,)
        return cls(
            kind,
            directions,
            _activations(kind, given, len(directions)),
            float(given.get("clip", np.inf)) or np.inf,  # onnxruntime takes 0 for none
            bool(given.get("input_forget", 0)),
            bool(given.get("linear_before_reset", 0)),
            int(given.get("layout", 0)),
        )


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _activations(kind: str, given: Mapping[str, Any], directions: int):
    """f, g and h of each direction; alpha and beta go, in order, to the functions that take one."""
    names = [_text(name).lower() for name in given.get("activations") or _DEFAULTS[kind] * directions]
    each = len(_DEFAULTS[kind])
    names = names[: each * directions]  # onnx's default for RNN has one for two directions
    if len(names) != each * directions:
        raise ValueError(f"{kind}: {each * directions} activations wanted, {len(names)} given")
    alphas, betas = (iter(given.get(f"activation_{which}") or ()) for which in ("alpha", "beta"))
    found = []
    for name in names:
        if name not in ACTIVATIONS:
            raise ValueError(f"{kind}: no activation is named {name!r}")
        alpha, beta, _ = ACTIVATIONS[name]
        found.append(
            (
                name,
                None if alpha is None else float(next(alphas, alpha)),
                None if beta is None else float(next(betas, beta)),
            )
        )
    return tuple(tuple(found[i : i + each]) for i in range(0, len(found), each))


# ------------------------------------------------------------------------------------------------ one step


@dataclass(frozen=True)
class Approximate:
    """Numbers and bounds on their errors, with the arithmetic that carries both; u is the unit roundoff.

    Where no bounds are wanted, u is 0 and arrays take the place of these: they know the same operators.
    """

    value: np.ndarray
    error: np.ndarray
    unit: float

    def __add__(self, other: Approximate) -> Approximate:
        value = self.value + other.value
        return Approximate(value, self.error + other.error + self.unit * np.abs(value), self.unit)

    def __mul__(self, other: Approximate) -> Approximate:
        value = self.value * other.value
        error = np.abs(self.value) * other.error + np.abs(other.value) * self.error + self.error * other.error
        return Approximate(value, error + self.unit * np.abs(value), self.unit)

    def __rsub__(self, number: float) -> Approximate:
        value = number - self.value
        return Approximate(value, self.error + self.unit * np.abs(value), self.unit)

    def __getitem__(self, part) -> Approximate:
        return Approximate(self.value[part], self.error[part], self.unit)


Number = np.ndarray | Approximate


def _through(number: Number, function: Function) -> Number:
    """A monotone function of a number."""
    if not isinstance(number, Approximate):
        return function(number)
    value, unit = function(number.value), number.unit
    differences = [np.abs(function(number.value + sign * number.error) - value) for sign in (1, -1)]
    return Approximate(value, np.maximum(*differences) + ACTIVATION * unit * np.maximum(np.abs(value), 1), unit)


def _value(number: Number) -> np.ndarray:
    return number.value if isinstance(number, Approximate) else number


@dataclass(frozen=True)
class State:
    """h and, of an LSTM, c [rows, units]."""

    h: Number
    c: Number | None = None

    @classmethod
    def exact(cls, h: np.ndarray, c: np.ndarray | None, unit: float) -> State:
        """A state without errors."""
        return cls(_exact(h, unit), None if c is None else _exact(c, unit))

    @property
    def unit(self) -> float:
        """The unit roundoff of its bounds, 0 if it has none."""
        return self.h.unit if isinstance(self.h, Approximate) else 0.0


def _exact(value: np.ndarray, unit: float) -> Number:
    return Approximate(value, np.zeros_like(value), unit) if unit else value


@dataclass(frozen=True)
class Direction:
    """One direction of a node: its activations and weights, in float64.

    Attributes
    ----------
    w, r : ndarray [gates * units, inputs], [gates * units, units]
    wb, rb : ndarray [gates * units]
    peepholes : ndarray [3, units]
        Of i, o and f; zeros for none.
    """

    cell: Cell
    activations: tuple[Function, ...] = field(repr=False)
    w: np.ndarray
    r: np.ndarray
    wb: np.ndarray
    rb: np.ndarray
    peepholes: np.ndarray

    @property
    def units(self) -> int:
        """Length of h."""
        return self.r.shape[1]

    def step(self, x: np.ndarray, before: State) -> State:
        """The next state, from x [rows, inputs]."""
        return getattr(self, f"_{self.cell.kind.lower()}")(x, before)

    def _clipped(self, index: int) -> Function:
        """An activation behind the clip."""
        function, limit = self.activations[index], self.cell.clip
        return function if math.isinf(limit) else lambda a: function(np.clip(a, -limit, limit))

    def _sum(self, terms: Sequence[tuple[Number, np.ndarray]], bias: np.ndarray, unit: float) -> Number:
        """sum of x @ w.T for (x, w), and a bias."""
        value = bias
        for x, w in terms:
            value = value + _value(x) @ w.T
        if not unit:
            return value
        size, carried, n = np.abs(bias), np.zeros_like(bias), 2
        for x, w in terms:
            x = x if isinstance(x, Approximate) else _exact(x, unit)
            size = size + np.abs(x.value) @ np.abs(w).T
            carried = carried + x.error @ np.abs(w).T
            n += w.shape[1]
        return Approximate(value, carried + _DEVIATIONS * unit * np.sqrt(n) * size, unit)

    def _gate(self, index: int) -> slice:
        return slice(index * self.units, (index + 1) * self.units)

    def _rnn(self, x: np.ndarray, before: State) -> State:
        total = self._sum([(x, self.w), (before.h, self.r)], self.wb + self.rb, before.unit)
        return State(_through(total, self._clipped(0)))

    def _gru(self, x: np.ndarray, before: State) -> State:
        unit, h, both, last = before.unit, before.h, 2 * self.units, self._gate(2)
        gates = self._sum([(x, self.w[:both]), (h, self.r[:both])], (self.wb + self.rb)[:both], unit)
        gates = _through(gates, self._clipped(0))
        z, r = gates[..., : self.units], gates[..., self.units :]
        if self.cell.linear_before_reset:
            inner = r * self._sum([(h, self.r[last])], self.rb[last], unit)
            total = self._sum([(x, self.w[last])], self.wb[last], unit) + inner
        else:
            total = self._sum([(x, self.w[last]), (r * h, self.r[last])], (self.wb + self.rb)[last], unit)
        return State((1 - z) * _through(total, self._clipped(1)) + z * h)

    def _lstm(self, x: np.ndarray, before: State) -> State:
        unit, h, c = before.unit, before.h, before.c
        assert c is not None
        total = self._sum([(x, self.w), (h, self.r)], self.wb + self.rb, unit)
        i, o, f, g = (total[..., self._gate(k)] for k in range(4))
        p_i, p_o, p_f = (_exact(p, unit) for p in self.peepholes)
        i = _through(i + p_i * c, self._clipped(0))
        f = 1 - i if self.cell.input_forget else _through(f + p_f * c, self._clipped(0))
        c = f * c + i * _through(g, self._clipped(1))
        o = _through(o + p_o * c, self._clipped(0))
        return State(o * _through(c, self._clipped(2)), c)


def directions(cell: Cell, w, r, b=None, p=None) -> list[Direction]:
    """The directions of a node from its inputs W, R, B and P."""
    found = []
    for i, functions in enumerate(cell.activations):
        units, gates = r.shape[2], r.shape[1]
        wb, rb = np.split(np.zeros(2 * gates) if b is None else np.asarray(b[i], np.float64), 2)
        peepholes = np.zeros((3, units)) if p is None else np.asarray(p[i], np.float64).reshape(3, units)
        weights = (np.asarray(each[i], np.float64) for each in (w, r))
        found.append(Direction(cell, tuple(map(_function, functions)), *weights, wb, rb, peepholes))
    return found


def _function(activation: tuple[str, float | None, float | None]) -> Function:
    name, alpha, beta = activation
    function = ACTIVATIONS[name][2]
    return lambda x: function(x, alpha, beta)


# ------------------------------------------------------------------------------------------------ a whole run


@dataclass(frozen=True)
class Step:
    """A step of one direction: its number in the sequence, which rows [rows, 1] take part, and states.

    `kept` is the state that the next step begins with: rows that have ended keep theirs.
    """

    time: int
    active: np.ndarray
    before: State
    after: State
    kept: State


def steps(
    direction: Direction, reverse: bool, x: np.ndarray, lengths: np.ndarray, start: State, move: Callable | None = None
) -> Iterator[Step]:
    """Every step over x [T, rows, inputs]; `move` may change the state after a step."""
    state = start
    order = range(len(x) - 1, -1, -1) if reverse else range(len(x))
    for time in order:
        after = direction.step(x[time], state)
        after = move(after) if move else after
        active = (time < lengths)[:, None]
        pairs = [(new, old) for new, old in ((after.h, state.h), (after.c, state.c)) if new is not None]
        kept = State(*(_exact(np.where(active, _value(new), _value(old)), start.unit) for new, old in pairs))
        yield Step(time, active, state, after, kept)
        state = kept


def run(cell: Cell, inputs: Sequence[np.ndarray | None], *, unit: float = 0.0, move: Callable | None = None):
    """Y, Y_h and Y_c of a node in float64.

    Parameters
    ----------
    cell : Cell
    inputs : list of ndarray or None
        X, W, R, B, sequence_lens, initial_h, initial_c and P of the node.
    unit : float
        The unit roundoff of the bounds that `move` sees.
    move : callable, optional
        Takes the State after each step and returns the one to continue from.

    Returns
    -------
    list of ndarray
        Two arrays for GRU and RNN.
    """
    x, w, r, b, lengths, h0, c0, p = (*inputs, *[None] * (8 - len(inputs)))
    x = _wide(x)
    x = np.swapaxes(x, 0, 1) if cell.layout else x
    rows, sides = x.shape[1], directions(cell, w, r, b, p)
    lengths = np.full(rows, len(x)) if lengths is None else np.asarray(lengths).reshape(-1)
    ys, last = [], []
    for i, direction in enumerate(sides):
        start = initial(cell, direction, i, rows, (h0, c0), unit)
        y, state = np.zeros((len(x), rows, direction.units)), start
        for step in steps(direction, cell.directions[i] == "reverse", x, lengths, start, move):
            y[step.time] = np.where(step.active, _value(step.after.h), 0.0)
            state = step.kept
        ys.append(y)
        last.append(state)
    finals = [np.stack([_value(s.h) for s in last])]
    finals += [np.stack([_value(s.c) for s in last])] if cell.kind == "LSTM" else []
    y = np.stack(ys, axis=1)
    if cell.layout:
        return [np.transpose(y, (2, 0, 1, 3)), *(np.swapaxes(each, 0, 1) for each in finals)]
    return [y, *finals]


def initial(cell: Cell, direction: Direction, index: int, rows: int, given, unit: float) -> State:
    """The initial state of one direction; `given` are initial_h and initial_c or None."""
    h, c = (None if each is None else np.swapaxes(_wide(each), 0, 1) if cell.layout else _wide(each) for each in given)
    zeros = np.zeros((rows, direction.units))
    h, c = (zeros if each is None else each[index] for each in (h, c))
    return State.exact(h, c if cell.kind == "LSTM" else None, unit)


def _wide(value: np.ndarray | None) -> np.ndarray:
    return np.asarray(value).astype(np.float64)


def _kernel(kind: str) -> type[OpRun]:
    """A kernel for onnx's reference evaluator, whose own ones lack directions, clips and most activations."""

    def _run(self, *inputs, **attributes):
        results = run(Cell.from_attributes(kind, attributes), inputs)
        dtype = inputs[0].dtype
        return tuple(each.astype(dtype) for each in results[: max(1, len(self.onnx_node.output))])

    return type(kind, (OpRun,), {"op_domain": "", "_run": _run})


KERNELS = [_kernel(kind) for kind in GATES]
