"""Small ONNX files that ask for much: sizes that this package refuses before anything is made. None is stored.

A file follows from its number alone. None is malformed in a way that is known to end other software.
"""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

KINDS = {}


def kind(build):
    KINDS[build.__name__] = build
    return build


class Draft:
    """A graph that is written node by node."""

    def __init__(self, rng):
        self.rng, self.nodes, self.stored, self.inputs = rng, [], {}, {}

    def input(self, name, shape, data=TensorProto.FLOAT):
        self.inputs[name] = helper.make_tensor_value_info(name, data, shape)
        return name

    def store(self, array):
        name = f"c{len(self.stored)}"
        self.stored[name] = np.asarray(array)
        return name

    def op(self, op, *inputs, outputs=1, **attributes):
        names = [each if isinstance(each, str) else self.store(each) for each in inputs]
        results = [f"n{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op, names, results, **attributes))
        return results[0]

    def saved(self, path, *outputs):
        ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
        stored = [numpy_helper.from_array(array, name) for name, array in self.stored.items()]
        graph = helper.make_graph(self.nodes, "g", list(self.inputs.values()), ends, stored)
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def some(rng, least, most):
    """A whole number, uniform in its logarithm."""
    return int(np.exp(rng.uniform(np.log(least), np.log(most))))


def ints(*values):
    return np.array(values, np.int64)


def expanded(draft):
    """A constant of many elements, by one of the operators that make one of few."""
    rng, n = draft.rng, some(draft.rng, 1 << 22, 1 << 44)
    small = np.ones((1, 1), np.float32)
    side = min(n, 1 << 40)
    ways = (
        lambda: draft.op("Expand", small, ints(side, 1)),
        lambda: draft.op("ConstantOfShape", ints(side)),
        lambda: draft.op("Tile", small, ints(side, 1)),
        lambda: draft.op("Cast", draft.op("Range", np.int64(0), np.int64(side), np.int64(1)), to=1),
        lambda: draft.op("Pad", small, ints(0, 0, side, 0)),
        lambda: draft.op("OneHot", ints(0, 1), np.int64(side), np.array([0, 1], np.float32)),
        lambda: draft.op("Resize", small, "", np.array([1, side], np.float32), mode="nearest"),
        lambda: draft.op(
            "Cast", draft.op("EyeLike", draft.op("ConstantOfShape", ints(1 << 11, 1 << 11)), dtype=1), to=1
        ),
        lambda: draft.op("RandomNormal", shape=[min(side, 1 << 40)]),
        lambda: draft.op("HannWindow", np.int64(side)),
    )
    return ways[rng.integers(len(ways))]()


@kind
def constant(draft):
    """A constant that no memory holds, added to x."""
    draft.input("x", [1, 1])
    return draft.op("Add", "x", expanded(draft))


@kind
def product(draft):
    """A product of two constants, a column and a row, or a sum of them."""
    draft.input("x", [1, 1])
    n = some(draft.rng, 1 << 11, 1 << 15)
    column, row = np.ones((n, 1), np.float32), np.ones((1, n), np.float32)
    op = ("MatMul", "Add", "Mul", "Less")[draft.rng.integers(4)]
    made = draft.op(op, column, row)
    made = draft.op("Cast", made, to=1) if op == "Less" else made
    return draft.op("Add", "x", draft.op("ReduceMax", made))


@kind
def doubling(draft):
    """A constant or a frame that is joined with itself again and again."""
    draft.input("x", [1, 4])
    value = "x" if draft.rng.integers(2) else draft.store(np.ones((1, 4), np.float32))
    for _ in range(draft.rng.integers(18, 40)):
        value = draft.op("Concat", value, value, axis=1)
    return draft.op("Add", "x", draft.op("ReduceMean", value, axes=[1]))


@kind
def wide(draft):
    """A frame of many elements, through a few operators."""
    n = some(draft.rng, 1 << 17, 1 << 26)
    value = draft.input("x", [1, n])
    for _ in range(draft.rng.integers(1, 6)):
        ways = (("Tanh", (value,)), ("Add", (value, np.float32(0.5))), ("Mul", (value, value)))
        op, inputs = ways[draft.rng.integers(3)]
        value = draft.op(op, *inputs)
    return value


@kind
def broadcast(draft):
    """A frame that is broadcast against a constant, or against itself."""
    n = some(draft.rng, 1 << 8, 1 << 16)
    draft.input("x", [1, n])
    column = draft.op("Reshape", "x", ints(n, 1))
    other = "x" if draft.rng.integers(2) else draft.store(np.ones((1, n), np.float32))
    return draft.op("ReduceMean", draft.op(("Add", "Mul", "Where")[draft.rng.integers(2)], column, other), axes=[0])


@kind
def norm(draft):
    """A layer norm, written out or as an operator, over many elements."""
    n = some(draft.rng, 1 << 16, 1 << 22)
    draft.input("x", [1, n])
    if draft.rng.integers(2):
        ones = draft.op("Expand", np.ones(1, np.float32), ints(n))
        return draft.op("LayerNormalization", "x", ones)
    centred = draft.op("Sub", "x", draft.op("ReduceMean", "x", axes=[1]))
    variance = draft.op("ReduceMean", draft.op("Mul", centred, centred), axes=[1])
    return draft.op("Div", centred, draft.op("Sqrt", draft.op("Add", variance, np.float32(1e-5))))


@kind
def chain(draft):
    """Thousands of layers."""
    value = draft.input("x", [1, 2])
    for index in range(some(draft.rng, 300, 20000)):
        value = draft.op("Tanh", value) if index % 2 else draft.op("Neg", value)
    return value


@kind
def windows(draft):
    """A convolution whose windows are many times its input."""
    positions, taps = some(draft.rng, 1 << 8, 1 << 18), some(draft.rng, 2, 1 << 8)
    x = draft.input("x", [1, 1, positions])
    weight = np.ones((1, 1, taps), np.float32)
    options = {"dilations": [some(draft.rng, 1, 1 << 30)], "strides": [some(draft.rng, 1, 1 << 20)]}
    options = {name: value for name, value in options.items() if draft.rng.integers(2)}
    side = some(draft.rng, 1, 1 << 40)
    return draft.op("Conv", x, weight, **options | ({"pads": [side, side]} if draft.rng.integers(2) else {}))


@kind
def taps(draft):
    """A frame that is shifted by a padding and a slice, and a symbolic size."""
    draft.input("x", ["T", 4])
    far = some(draft.rng, 1, 1 << 40)
    late = draft.op("Pad", "x", ints(far, 0, 0, 0))
    late = draft.op("Slice", late, ints(0), ints(-far), ints(0))
    return draft.op("Add", "x", late)


@kind
def lookup(draft):
    """Token ids that take many rows of a table."""
    n, width = some(draft.rng, 1 << 10, 1 << 22), some(draft.rng, 1, 1 << 10)
    draft.input("x", [1, n], TensorProto.INT64)
    table = np.ones((2, width), np.float32)
    return draft.op("Gather", table, "x")


@kind
def cells(draft):
    """A cell with a time axis of any length, or with sizes that its weights do not have."""
    rng, steps, units = draft.rng, some(draft.rng, 1, 1 << 24), 4
    draft.input("x", [steps, 1, 3])
    w, r = rng.standard_normal((1, 4 * units, 3)), rng.standard_normal((1, 4 * units, units))
    size = units if rng.integers(2) else some(rng, 1, 1 << 30)
    return draft.op("LSTM", "x", w.astype(np.float32), r.astype(np.float32), hidden_size=size)


@kind
def selected(draft):
    """Operators whose result depends on their input's values."""
    draft.input("x", [1, 1])
    n = some(draft.rng, 1 << 10, 1 << 23)
    ones = draft.op("ConstantOfShape", ints(n), value=numpy_helper.from_array(np.ones(1, np.float32)))
    op = ("NonZero", "Unique", "TopK", "Shape")[draft.rng.integers(4)]
    inputs = (ones, ints(n)) if op == "TopK" else (ones,)
    found = draft.op(op, *inputs, outputs=2 if op == "TopK" else 1)
    return draft.op("Add", "x", draft.op("Cast", draft.op("ReduceMax", draft.op("Cast", found, to=1)), to=1))


def written(number, path):
    """Write the file of a number; its kind."""
    rng = np.random.default_rng(number)
    build = list(KINDS.values())[number % len(KINDS)]
    draft = Draft(rng)
    draft.saved(path, build(draft))
    return build.__name__
