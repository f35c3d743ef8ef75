"""Derivatives of the oracle's steps in float64, with a bound on the error of the same derivatives in float32.

A `Value` is a float64 array and the error that a float32 evaluation of it is expected to have. Every operation passes
on the errors of its operands and adds its own roundings, whose number follows from the length of its sums (running
error analysis: Higham, "Accuracy and Stability of Numerical Algorithms", 2nd edition, section 3.3). Roundings are taken
as independent with mean 0 (Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", SIAM J. Sci.
Comput. 41, 2019): a chain of n counts sqrt(n) times the sum of the terms' sizes, and errors of the terms themselves
add as the root of their squares. `bound` is LAMBDA such errors. So no bound is tuned: it is computed from the data.

A `Node` is a value that remembers how it was computed; the functions of reference.py take nodes as they take arrays.
`gradients` goes back through them (reverse mode), in the same arithmetic.
"""

import itertools
import math

import numpy as np
import reference
import tolerances

U = 2.0**-24
LAMBDA = 4  # of Higham and Mary's Theorem 2.4; each rounding counts with U, although it is U / sqrt(3) on average
TINY = 2.0**-100  # below it the runtime sets a state to 0; products and slopes may be subnormal


class Value:
    """`value`, float64, and `error`, of the same shape: the expected size of float32 evaluation - value."""

    def __init__(self, value, error=0.0):
        self.value = np.asarray(value, np.float64)
        self.error = np.broadcast_to(np.asarray(error, np.float64), self.value.shape)

    bound = property(lambda self: LAMBDA * self.error)

    def rounded(self):
        return Value(self.value, self.error + U * np.abs(self.value) + TINY)

    def __add__(self, other):
        return Value(self.value + other.value, self.error + other.error).rounded()

    def __sub__(self, other):
        return Value(self.value - other.value, self.error + other.error).rounded()

    def __mul__(self, other):
        error = np.abs(self.value) * other.error + self.error * np.abs(other.value)
        return Value(self.value * other.value, error).rounded()

    def __getitem__(self, at):
        return Value(self.value[at], self.error[at])

    def map(self, f):
        """The value and the error rearranged by f."""
        return Value(f(self.value), f(self.error))

    def mean(self):
        """Of each row: lanes added in order, the halving tree over 32 of them, one division and conversion."""
        n = self.value.shape[-1]
        own = math.sqrt(math.ceil(n / 32) + 5 + 2) * U * np.abs(self.value).mean(-1, keepdims=True)
        return Value(self.value.mean(-1, keepdims=True), root_of_squares(self.error, -1) / n + own + TINY)

    def sum_rows(self):
        """Over the rows of a batch: blocks of 16, added in order."""
        own = math.sqrt(chain_of(len(self.value))) * U * np.abs(self.value).sum(0)
        return Value(self.value.sum(0), root_of_squares(self.error, 0)[0] + own + TINY)


def root_of_squares(errors, axis):
    return np.sqrt((errors**2).sum(axis, keepdims=True))


def chain_of(terms):
    """The roundings through which a term of a sum goes: its block of 16, then the blocks. A product is not one: fma."""
    return min(16, terms) + math.ceil(terms / 16)


def product(a, b, chain, sizes=None):
    """a @ b; each term goes through `chain` roundings. sizes: a bound on |b| where the kernel's b is another matrix."""
    sizes = np.abs(b.value) if sizes is None else sizes
    passed = np.sqrt(a.error**2 @ sizes**2 + a.value**2 @ b.error**2)
    return Value(a.value @ b.value, passed + math.sqrt(chain) * U * (np.abs(a.value) @ sizes) + TINY)


def centred_sizes(w):
    """A bound on |w [inputs, rows]| less the mean over the rows of any group: all of them, or a gate of two to four."""
    means = [np.zeros((len(w), 1))]
    for gates in (g for g in (1, 2, 3, 4) if w.shape[1] % g == 0):
        means += [np.abs(part.mean(1, keepdims=True)) for part in np.split(w, gates, axis=1)]
    return np.abs(w) + np.max(means, axis=0)


class Node:
    """A `Value` of the graph: its parents, and for each a function from the node's gradient to the parent's part."""

    _order = itertools.count()

    def __init__(self, value, parents=()):
        self.of, self.parents, self.at = value, parents, next(Node._order)

    shape = property(lambda self: self.of.value.shape)
    T = property(lambda self: self.rearranged(lambda a: a.T, lambda a: a.T))

    def rearranged(self, f, back):
        return Node(self.of.map(f), [(self, lambda d: d.map(back))])

    def reshape(self, *shape):
        before = self.shape
        return self.rearranged(lambda a: a.reshape(*shape), lambda a: a.reshape(before))

    def __getitem__(self, at):
        def scattered(a):
            whole = np.zeros(self.shape)
            whole[at] = a
            return whole

        return self.rearranged(lambda a: a[at], scattered)

    def _joined(self, other, value, own, others):
        parents = [(self, lambda d: _reduced(own(d), self.shape))]
        if isinstance(other, Node):
            parents.append((other, lambda d: _reduced(others(d), other.shape)))
        return Node(value, parents)

    def __add__(self, other):
        if not isinstance(other, Node) and not np.any(other):
            return self
        return self._joined(other, self.of + _value(other), lambda d: d, lambda d: d)

    def __sub__(self, other):
        return self._joined(other, self.of - _value(other), lambda d: d, _negated)

    def __mul__(self, other):
        factor = _value(other)
        return self._joined(other, self.of * factor, lambda d: d * factor, lambda d: d * self.of)

    __radd__, __rmul__ = __add__, __mul__

    def __rsub__(self, other):
        return Node(_value(other) - self.of, [(self, _negated)])

    def __matmul__(self, w):
        """x [batch, inputs] @ w [inputs, rows]; w may be centred and rounded once more when it is packed."""
        inputs, rows = w.shape
        value = product(self.of, w.of, chain_of(inputs) + 2)
        back = 16 + math.ceil(rows / 256) + 1 + 4 + 2  # 16 lanes in blocks of 16, the blocks, the tree; +=

        def to_x(d):
            return product(d, w.of.map(np.transpose), back, centred_sizes(w.of.value).T)

        def to_w(d):
            return product(self.of.map(np.transpose), d, chain_of(self.shape[0]))

        return Node(value, [(self, to_x), (w, to_w)])

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        a, b = inputs[0], inputs[-1]
        if method == "__call__" and not options:
            if ufunc is np.tanh:
                return _tanh(self)
            if ufunc is np.maximum and b == 0:
                return _clip(a, 0, np.inf)
            binary = {np.add: "__radd__", np.subtract: "__rsub__", np.multiply: "__rmul__"}.get(ufunc)
            if binary:
                return getattr(self, binary)(a)
        return NotImplemented

    def __array_function__(self, function, types, arguments, options):
        return FUNCTIONS[function](*arguments, **options)


def _value(a):
    return a.of if isinstance(a, Node) else Value(a)


def _negated(d):
    return Value(-d.value, d.error)


def _reduced(d, shape):
    """d summed over the axis that was broadcast, if one was."""
    while d.value.ndim > len(shape):
        d = d.sum_rows()
    return d


def _activated(node, f, slope):
    """f has at most 1 ULP of error; the slope is computed from f in the kernels' form."""
    y = f(node.of.value)
    steep = np.abs(slope(Value(y)).value)
    of = Value(y, (steep + node.of.error) * node.of.error + 2 * U * np.abs(y) + TINY)
    return Node(of, [(node, lambda d: d * slope(of))])


def _tanh(node):
    return _activated(node, np.tanh, lambda t: (Value(1) - t) * (Value(1) + t))


def _clip(node, low, high):
    """Where a limit is within the error, the gradient may be passed on or not."""
    v, e = node.of.value, node.of.error
    passes = (v > low) & (v < high)
    open_ = (np.abs(v - low) <= LAMBDA * e) | (np.abs(v - high) <= LAMBDA * e)

    def back(d):
        return Value(
            np.where(passes, d.value, 0), np.where(passes | open_, d.error, 0) + np.where(open_, np.abs(d.value), 0)
        )

    return Node(Value(np.clip(v, low, high), e), [(node, back)])


def _split(node, parts, axis=0):
    edges = np.linspace(0, node.shape[axis], parts + 1).astype(int)
    lead = (slice(None),) * (axis % len(node.shape))
    return [node[(*lead, slice(start, end))] for start, end in itertools.pairwise(edges)]


def _concatenate(nodes, axis=-1):
    ends = np.cumsum([0] + [n.shape[-1] for n in nodes])
    value = Value(*(np.concatenate([getattr(n.of, part) for n in nodes], -1) for part in ("value", "error")))
    parts = zip(nodes, ends[:-1], ends[1:], strict=True)
    return Node(value, [(n, lambda d, a=a, b=b: d[..., a:b]) for n, a, b in parts])


FUNCTIONS = {np.split: _split, np.concatenate: _concatenate, np.clip: _clip, np.zeros_like: lambda a: np.zeros(a.shape)}


@reference.float64.register
def _(node: Node):
    return node


@reference.sigmoid.register
def _(node: Node):
    return _activated(node, reference.sigmoid, lambda s: s * (Value(1) - s))


@reference.normalised.register
def _(node: Node, eps):
    """xhat of rows: an error e of x moves it by rstd (e - mean(e) - xhat mean(xhat e)); then the kernel's own."""
    x = node.of
    xhat = reference.normalised(x.value, eps)
    centred = x.value - x.value.mean(-1, keepdims=True)
    r = reference.reciprocal_root((centred**2).mean(-1, keepdims=True), np.float64(np.float32(eps)))
    n = xhat.shape[-1]
    along = root_of_squares(xhat * x.error, -1) / n
    moved = r * (x.error + root_of_squares(x.error, -1) / n + np.abs(xhat) * along)
    assert (r * x.error).max() < 0.05, "an error of first order would say too little"
    q = Value(xhat, moved + tolerances.any_row(xhat, np.float32))
    sums = 2.42 * (tolerances.row_sum(n, np.float32) + 2 * U)
    rstd = Value(r, r * (r * along + sums + 4 * U))

    def back(d):
        return rstd * ((d - d.mean()) - q * (d * q).mean())

    return Node(q, [(node, back)])


def gradients(outputs, cotangents, inputs):
    """The `Value`s of d sum(outputs * cotangents) / d input for each input."""
    found, waiting = {}, {}

    def add(node, part):
        found[node.at] = found[node.at] + part if node.at in found else part
        waiting[node.at] = node

    for node, cotangent in zip(outputs, cotangents, strict=True):
        add(node, cotangent)
    while waiting:
        node = waiting.pop(max(waiting))  # the last one made: nothing that used it is left
        for parent, back in node.parents:
            add(parent, back(found[node.at]))
    return [found.get(node.at, Value(np.zeros(node.shape))) for node in inputs]


def cell_gradients(step, weights, x, states, cotangents):
    """The gradients of one step of a cell, by name: `dx`, `dh`, `dc` and those of the weights.

    step(weights, x, *states) -> states; cotangents: the gradients of those, as `Value`s.
    """
    named = {"dx": x} | {f"d{name}": state for name, state in zip("hc", states, strict=False)} | weights
    nodes = {name: Node(Value(array)) for name, array in named.items()}
    before = [nodes[f"d{name}"] for name, _ in zip("hc", states, strict=False)]
    after = step({name: nodes[name] for name in weights}, nodes["dx"], *before)
    return dict(zip(nodes, gradients(after, cotangents, nodes.values()), strict=True))
