"""Operators that compute: what each makes of numbered elements.

Every function takes the trace, the node's description, its attributes, its inputs and its number of outputs, and
returns its outputs. The blocks that they add have these operations:

    product      rows of `weight` [outputs, terms] times the operand [rows, terms]
    conv         a convolution with `weight` and `options` of `x` [channels, positions], see `_filtered`
    scale        the operand times `factor`, shift: plus `offset`; both [size] in float64
    add, subtract, multiply, divide   of two operands, element by element
    mean         of each row
    square, root, reciprocal          of each element
    norm         layer norm of each row, without gain and bias, with `eps`
    integer      each element as an integer, which only an embedding takes
    embedding    the row of `table` [tokens, outputs] that one element names
    NAME         a function of each element: "sigmoid", "tanh", "relu", ...; its parameters are constants
    LSTM, GRU, RNN, state   a step of a cell: its output, and the other state of an LSTM
    carried      a state of a Scan or Loop behind its first step, of what the step before gave
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np

from onnx_export.importer.elements import MAX_NUMBERED, Cannot, Elements
from onnx_export.importer.operators_of_cells import recurrent

__all__ = ["COMPUTING"]

MAX_WINDOWS = 1 << 22  # elements
MAX_TOKENS = 1 << 14  # of one Gather


def _is_elements(value) -> bool:
    return isinstance(value, Elements)


def _each(value) -> np.ndarray:
    """The operand of an elementwise block: one term in each row."""
    return value.numbers.reshape(-1, 1)


# ---------------------------------------------------------------------------------------------- element by element


def _function(op: str, **defaults) -> Callable:
    def apply(trace, node, attributes, inputs, outputs):
        parameters = {name: float(attributes.get(name, default)) for name, default in defaults.items()}
        return [trace.add(op, node, inputs[0].shape, [_each(inputs[0])], **parameters)]

    return apply


def _shift(trace, node, x, offset):
    offset = np.broadcast_to(np.asarray(offset, np.float64), x.shape).ravel()
    return x if not offset.any() else trace.add("shift", node, x.shape, [_each(x)], offset=offset)


def _scale(trace, node, x, factor):
    factor = np.broadcast_to(np.asarray(factor, np.float64), x.shape).ravel()
    return x if (factor == 1).all() else trace.add("scale", node, x.shape, [_each(x)], factor=factor)


def _expanded(value, shape):
    """Elements or a constant, broadcast to a shape."""
    if not _is_elements(value):
        return np.broadcast_to(value, shape)
    return Elements(np.broadcast_to(value.numbers, shape))


def _binary(op: str) -> Callable:
    def apply(trace, node, attributes, inputs, outputs):
        try:
            shape = np.broadcast_shapes(*(np.shape(value) for value in inputs))
        except ValueError:
            raise Cannot("the shapes of its inputs do not fit") from None
        if prod(shape) > MAX_NUMBERED:
            raise Cannot(f"its result has {prod(shape)} elements, the limit is {MAX_NUMBERED}")
        a, b = (_expanded(value, shape) for value in inputs)
        if _is_elements(a) and _is_elements(b):
            return [trace.add(op, node, shape, [_each(a), _each(b)])]
        return [_with_constant(trace, node, op, a, b)]

    return apply


def _with_constant(trace, node, op, a, b):
    x, constant = (a, b) if _is_elements(a) else (b, a)
    constant = np.asarray(constant, np.float64)
    if op == "add":
        return _shift(trace, node, x, constant)
    if op == "multiply":
        return _scale(trace, node, x, constant)
    if op == "subtract":
        if x is a:
            return _shift(trace, node, x, -constant)
        return _shift(trace, node, _scale(trace, node, x, -1), constant)
    if x is b:  # constant / x
        return _scale(trace, node, trace.add("reciprocal", node, x.shape, [_each(x)]), constant)
    if not constant.all():
        raise Cannot("it divides by 0")
    return _scale(trace, node, x, 1 / constant)


def _negative(trace, node, attributes, inputs, outputs):
    return [_scale(trace, node, inputs[0], -1)]


def _power(trace, node, attributes, inputs, outputs):
    x, exponent = inputs
    if not _is_elements(x) or _is_elements(exponent) or np.size(exponent) != 1:
        raise Cannot("its exponent is not one constant")
    if np.all(exponent == 3):
        square = trace.add("square", node, x.shape, [_each(x)])
        return [trace.add("multiply", node, x.shape, [_each(square), _each(x)])]
    op = {2.0: "square", 0.5: "root", -1.0: "reciprocal"}.get(float(np.asarray(exponent).ravel()[0]))
    if not op:
        raise Cannot(f"no layer computes the power {float(np.asarray(exponent).ravel()[0]):g}")
    return [trace.add(op, node, x.shape, [_each(x)])]


def _clip(trace, node, attributes, inputs, outputs):
    """The limits are inputs, or attributes before opset 11."""
    x, low, high = (*inputs, None, None)[:3]
    if _is_elements(low) or _is_elements(high):
        raise Cannot("its limits depend on the frame")
    low = attributes.get("min", -np.inf) if low is None else low
    high = attributes.get("max", np.inf) if high is None else high
    return [trace.add("clip", node, x.shape, [_each(x)], lo=float(np.asarray(low)), hi=float(np.asarray(high)))]


def _greater(trace, node, attributes, inputs, outputs):
    x, limit = inputs
    if not _is_elements(x) or _is_elements(limit) or np.size(limit) != 1:
        raise Cannot("it compares with more than one constant")
    return [trace.add("greater", node, x.shape, [_each(x)], limit=float(np.ravel(limit)[0]))]


def _where(trace, node, attributes, inputs, outputs):
    """Softplus as an exporter of PyTorch writes it, x where x > 20: softplus(x) is the same number in float32."""
    if all(map(_is_elements, inputs)):
        test, _, soft = (trace.owners(value.numbers)[0] for value in inputs)
        if (test.op, soft.op) == ("greater", "softplus") and test.constants["limit"] >= 20:
            x = test.operands[0].ravel()
            wanted = (test.numbers, x, soft.numbers)
            same = [np.array_equal(one, value.numbers.ravel()) for one, value in zip(wanted, inputs, strict=True)]
            if all(same) and np.array_equal(x, soft.operands[0].ravel()):
                return [inputs[2]]
    raise Cannot("it chooses between two results")


def _prelu(trace, node, attributes, inputs, outputs):
    x, slope = inputs
    if _is_elements(slope) or not _is_elements(x):
        raise Cannot("its slope must be a constant")
    slope = np.broadcast_to(np.asarray(slope), x.shape).ravel()
    return [trace.add("prelu", node, x.shape, [_each(x)], slope=slope)]


def _softmax(trace, node, attributes, inputs, outputs):
    """Over one axis; before opset 13 over all from `axis` on."""
    x = inputs[0]
    axis = int(attributes.get("axis", -1 if trace.opset >= 13 else 1)) % len(x.shape)
    if trace.opset >= 13:
        rows = np.moveaxis(x.numbers, axis, -1)
        y = trace.add("softmax", node, rows.shape, [rows.reshape(-1, rows.shape[-1])])
        return [Elements(np.moveaxis(y.numbers, -1, axis))]
    rows = x.numbers.reshape(int(np.prod(x.shape[:axis], dtype=int)), -1)
    return [trace.add("softmax", node, x.shape, [rows])]


def _gelu(trace, node, attributes, inputs, outputs):
    op = {b"none": "gelu", b"tanh": "gelu_tanh"}[attributes.get("approximate", b"none")]
    return _function(op)(trace, node, {}, inputs, outputs)


def _mish(trace, node, attributes, inputs, outputs):
    """x tanh(softplus(x)), of three layers."""
    x = inputs[0]
    soft = trace.add("softplus", node, x.shape, [_each(x)])
    gate = trace.add("tanh", node, x.shape, [_each(soft)])
    return [trace.add("multiply", node, x.shape, [_each(x), _each(gate)])]


def _celu(trace, node, attributes, inputs, outputs):
    """alpha elu(x / alpha), of an elu whose own alpha is 1."""
    alpha = float(attributes.get("alpha", 1.0))
    inner = _scale(trace, node, inputs[0], 1 / alpha)
    return [_scale(trace, node, trace.add("elu", node, inner.shape, [_each(inner)], alpha=1.0), alpha)]


def _cast(trace, node, attributes, inputs, outputs):
    if attributes["to"] in (1, 10, 11, 16):  # FLOAT, FLOAT16, DOUBLE, BFLOAT16
        return [inputs[0]]
    if attributes["to"] not in (6, 7):  # INT32, INT64
        raise Cannot("it makes small integers or truth values of elements of the frame")
    return [trace.add("integer", node, inputs[0].shape, [_each(inputs[0])])]


def _gather(trace, node, attributes, inputs, outputs):
    """Rows of a constant table, one for each token id."""
    table, ids = inputs
    if np.ndim(table) != 2 or attributes.get("axis", 0) not in (0, -2):
        raise Cannot("an embedding's table must be a matrix, and its rows must be taken")
    if ids.numbers.size > MAX_TOKENS:
        raise Cannot(f"it takes {ids.numbers.size} rows, the limit is {MAX_TOKENS}")
    if ids.numbers.size * table.shape[1] > MAX_NUMBERED:
        size = ids.numbers.size * table.shape[1]
        raise Cannot(f"its result has {size} elements, the limit is {MAX_NUMBERED}")
    rows = []
    for number in ids.numbers.ravel().tolist():
        while (owner := trace.owner(number)).op == "integer":
            number = int(owner.operands[0][number - owner.first, 0])
        if owner.op != "input":
            raise Cannot("its token ids must be elements of the frame, as they are or as integers")
        rows.append(trace.add("embedding", node, [table.shape[1]], [np.array([[number]])], table=table).numbers)
    return [Elements(np.reshape(rows, (*ids.shape, table.shape[1])))]


# ---------------------------------------------------------------------------------------------- products


def _product(trace, node, rows, weight):
    """rows: numbers [..., terms]; weight [outputs, terms] -> [..., outputs]."""
    if rows.shape[-1] != weight.shape[1]:
        raise Cannot(f"it multiplies {rows.shape[-1]} elements by a matrix with {weight.shape[1]}")
    operand = rows.reshape(-1, rows.shape[-1])
    return trace.add("product", node, (*rows.shape[:-1], len(weight)), [operand], weight=np.asarray(weight))


def _matmul(trace, node, attributes, inputs, outputs):
    a, b = inputs
    if _is_elements(a) and _is_elements(b):
        raise Cannot("it multiplies what depends on the frame by what depends on the frame")
    if _is_elements(a):
        if np.ndim(b) != 2:
            raise Cannot(f"its constant has {np.ndim(b)} axes, wanted 2")
        return [_product(trace, node, np.atleast_1d(a.numbers), np.asarray(b).T)]
    if np.ndim(a) != 2 or len(b.shape) < 2:
        raise Cannot("its constant must be a matrix, and the other input a matrix, too")
    y = _product(trace, node, np.moveaxis(b.numbers, -2, -1), np.asarray(a))
    return [Elements(np.moveaxis(y.numbers, -1, -2))]


def _gemm(trace, node, attributes, inputs, outputs):
    a, b, c = (*inputs, None)[:3]
    if _is_elements(b) or _is_elements(c) or not _is_elements(a):
        raise Cannot("its second and third input must be constants")
    rows = a.numbers.T if attributes.get("transA") else a.numbers
    weight = np.asarray(b) if attributes.get("transB") else np.asarray(b).T
    y = _scale(trace, node, _product(trace, node, rows, weight), attributes.get("alpha", 1.0))
    return [y if c is None else _shift(trace, node, y, attributes.get("beta", 1.0) * np.asarray(c, np.float64))]


def _conv(trace, node, attributes, inputs, outputs):
    """A convolution, a product where its kernel has one place. x [1, channels, positions]."""
    x, weight, bias = (*inputs, None)[:3]
    if _is_elements(weight) or _is_elements(bias) or not _is_elements(x):
        raise Cannot("its weights must be constants")
    if len(x.shape) != 3 or np.ndim(weight) != 3:
        raise Cannot(f"a convolution over {len(x.shape) - 2} axes; only one over one axis is a layer")
    if x.shape[0] != 1:
        if not trace.rows:
            raise Cannot(f"it takes {x.shape[0]} rows at once, wanted 1")
        rows = [_conv(trace, node, attributes, [Elements(row[None]), weight, bias], 1)[0] for row in x.numbers]
        return [Elements(np.concatenate([row.numbers for row in rows]))]
    kernel, stride = weight.shape[2], int(attributes.get("strides", [1])[0])
    dilation, groups = int(attributes.get("dilations", [1])[0]), int(attributes.get("group", 1))
    reach = (kernel - 1) * dilation + 1
    before, after = _conv_pads(attributes, x.shape[2], reach, stride)
    places = (x.shape[2] + before + after - reach) // stride + 1
    if places < 1:
        raise Cannot(f"its kernel reaches over {reach} positions, its input has {x.shape[2]}")
    if x.shape[1] != weight.shape[1] * groups or len(weight) % groups:
        raise Cannot(f"its weight has {weight.shape[1]} channels for each of {groups} groups, its input {x.shape[1]}")
    size = places * kernel * x.shape[1]
    if size > MAX_WINDOWS:
        raise Cannot(f"its windows have {size} elements in all, the limit is {MAX_WINDOWS}")
    at = stride * np.arange(places)[:, None] + dilation * np.arange(kernel) - before
    if places == 1 and groups == 1:
        inside = (at[0] >= 0) & (at[0] < x.shape[2])
        taps = x.numbers[0][:, at[0, inside]].reshape(1, -1)
        y = _product(trace, node, taps, np.asarray(weight)[:, :, inside].reshape(len(weight), -1))
        y = Elements(y.numbers.reshape(1, -1, 1))
    else:
        options = {"stride": stride, "dilation": dilation, "groups": groups, "padding": (before, after)}
        y = _filtered(trace, node, x, np.asarray(weight), at, options)
    return [y if bias is None else _shift(trace, node, y, np.asarray(bias)[:, None])]


def _filtered(trace, node, x, weight, at, options):
    """A block `conv`; its operand has the window [channels / groups, taps] of each place and group, in this order."""
    groups = options["groups"]
    zero = trace.lift(np.zeros(1, np.float32), node).numbers
    outside = (at < 0) | (at >= x.shape[2])
    windows = np.where(outside, zero, x.numbers[0][:, np.where(outside, 0, at)])  # [channels, places, taps]
    windows = windows.reshape(groups, -1, *at.shape).transpose(2, 0, 1, 3).reshape(len(at) * groups, -1)
    return trace.add("conv", node, (1, len(weight), len(at)), [windows], weight=weight, x=x.numbers[0], options=options)


def _conv_pads(attributes, length: int, reach: int, stride: int) -> tuple[int, int]:
    auto = attributes.get("auto_pad", b"NOTSET")
    if auto in (b"NOTSET", b"VALID"):
        return tuple(map(int, attributes.get("pads", [0, 0]))) if auto == b"NOTSET" else (0, 0)
    total = max((-(-length // stride) - 1) * stride + reach - length, 0)
    less, more = total // 2, total - total // 2
    return (less, more) if auto == b"SAME_UPPER" else (more, less)


# ---------------------------------------------------------------------------------------------- norms


def _reduce_mean(trace, node, attributes, inputs, outputs):
    x = inputs[0]
    axes = attributes.get("axes", inputs[1] if len(inputs) > 1 else None)
    axes = range(len(x.shape)) if axes is None else [int(axis) % len(x.shape) for axis in np.ravel(axes)]
    kept = [axis for axis in range(len(x.shape)) if axis not in axes]
    rows = x.numbers.transpose([*kept, *axes]).reshape(int(np.prod([x.shape[i] for i in kept], dtype=int)), -1)
    shape = [1 if axis in axes else size for axis, size in enumerate(x.shape)]
    if not attributes.get("keepdims", 1):
        shape = [x.shape[axis] for axis in kept]
    return [trace.add("mean", node, shape, [rows])] if rows.shape[1] != 1 else [Elements(x.numbers.reshape(shape))]


def _layer_norm(trace, node, attributes, inputs, outputs):
    x, scale, bias = (*inputs, None)[:3]
    if outputs > 1 or _is_elements(scale) or _is_elements(bias):
        raise Cannot("its scale and bias must be constants, its statistics unused")
    axis = attributes.get("axis", -1) % len(x.shape)
    rows = x.numbers.reshape(int(np.prod(x.shape[:axis], dtype=int)), -1)
    y = trace.add("norm", node, x.shape, [rows], eps=float(attributes.get("epsilon", 1e-5)))
    y = _scale(trace, node, y, scale)
    return [y if bias is None else _shift(trace, node, y, bias)]


def _batch_norm(trace, node, attributes, inputs, outputs):
    x, *constants = inputs
    if attributes.get("training_mode") or any(_is_elements(value) for value in constants):
        raise Cannot("batch norm with statistics of the batch")
    channel = (-1,) + (1,) * (len(x.shape) - 2)
    scale, bias, mean, variance = (np.asarray(value, np.float64).reshape(channel) for value in constants)
    factor = scale / np.sqrt(variance + np.float64(np.float32(attributes.get("epsilon", 1e-5))))
    return [_shift(trace, node, _scale(trace, node, x, factor), bias - mean * factor)]


COMPUTING: dict[str, Callable] = {
    "Add": _binary("add"),
    "Sub": _binary("subtract"),
    "Mul": _binary("multiply"),
    "Div": _binary("divide"),
    "Neg": _negative,
    "Pow": _power,
    "Sqrt": _function("root"),
    "Reciprocal": _function("reciprocal"),
    "Cast": _cast,
    "Gather": _gather,
    "CastLike": lambda trace, node, attributes, inputs, outputs: [inputs[0]],
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Conv": _conv,
    "ReduceMean": _reduce_mean,
    "LayerNormalization": _layer_norm,
    "BatchNormalization": _batch_norm,
    "LSTM": recurrent("LSTM"),
    "GRU": recurrent("GRU"),
    "RNN": recurrent("RNN"),
    "Sigmoid": _function("sigmoid"),
    "Tanh": _function("tanh"),
    "Relu": _function("relu"),
    "Clip": _clip,
    "Greater": _greater,
    "Where": _where,
    "PRelu": _prelu,
    "Softmax": _softmax,
    "Gelu": _gelu,
    "Erf": _function("erf"),
    "Elu": _function("elu", alpha=1.0),
    "Celu": _celu,
    "Mish": _mish,
    "LeakyRelu": _function("leaky_relu", alpha=0.01),
    "Softplus": _function("softplus"),
    "Exp": _function("exp"),
    "Log": _function("log"),
    "Abs": _function("abs"),
    "HardSigmoid": _function("hard_sigmoid", alpha=0.2, beta=0.5),
    "HardSwish": _function("hard_swish"),
    "Selu": _function("selu", alpha=1.6732632, gamma=1.0507010),
}
