"""Operators that compute: what each makes of numbered elements.

Every function takes the trace, the node's description, its attributes, its inputs and its number of outputs, and
returns its outputs. The blocks that they add have these operations:

    product      rows of `weight` [outputs, terms] times the operand [rows, terms]
    conv         a convolution with `weight` and `options` of `x` [channels, positions], see `windows.py`
    scale        the operand times `factor`, shift: plus `offset`; both [size] in float64
    add, subtract, multiply, divide   of two operands, element by element
    mean, sum, max    of each row; those of a max may be windows of `x` [channels, positions] with `options`
    square, root, reciprocal          of each element
    norm         layer norm of each row, without gain and bias, with `eps`
    integer      each element as an integer, which only an embedding takes
    embedding    the row of `table` [tokens, outputs] that one element names
    NAME         a function of each element: "sigmoid", "tanh", "relu", ...; its parameters are constants
    carried      what a Loop carries to a step, see `loops.py`
    LSTM, GRU, RNN, state   a step of a cell: its output, and the other state of an LSTM
    carried      a state of a Scan or Loop behind its first step, of what the step before gave
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np
from onnx import helper

from onnx_export.importer.blocks import each, is_elements, product, scale, shift
from onnx_export.importer.elements import MAX_NUMBERED, Cannot, Elements
from onnx_export.importer.matrices import average_pool, einsum, global_pool, reduction
from onnx_export.importer.norms import distributed_norm
from onnx_export.importer.operators_of_cells import recurrent
from onnx_export.importer.pools import max_pool
from onnx_export.importer.transposed import transposed
from onnx_export.importer.windows import convolution

__all__ = ["COMPUTING"]

MAX_TOKENS = 1 << 14  # of one Gather


# ---------------------------------------------------------------------------------------------- element by element


def _function(op: str, **defaults) -> Callable:
    def apply(trace, node, attributes, inputs, outputs):
        parameters = {name: float(attributes.get(name, default)) for name, default in defaults.items()}
        return [trace.add(op, node, inputs[0].shape, [each(inputs[0])], **parameters)]

    return apply


def _expanded(value, shape):
    """Elements or a constant, broadcast to a shape."""
    if not is_elements(value):
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
        if is_elements(a) and is_elements(b):
            y = trace.add(op, node, shape, [each(a), each(b)])
            return [distributed_norm(trace, node, y) if op in ("add", "subtract") else y]
        return [_with_constant(trace, node, op, a, b)]

    return apply


def _with_constant(trace, node, op, a, b):
    x, constant = (a, b) if is_elements(a) else (b, a)
    constant = np.asarray(constant, np.float64)
    if op == "add":
        return shift(trace, node, x, constant)
    if op == "multiply":
        return scale(trace, node, x, constant)
    if op == "subtract":
        if x is a:
            return shift(trace, node, x, -constant)
        return shift(trace, node, scale(trace, node, x, -1), constant)
    if x is b:  # constant / x
        return scale(trace, node, trace.add("reciprocal", node, x.shape, [each(x)]), constant)
    if not constant.all():
        raise Cannot("it divides by 0")
    return scale(trace, node, x, 1 / constant)


def _negative(trace, node, attributes, inputs, outputs):
    return [scale(trace, node, inputs[0], -1)]


def _power(trace, node, attributes, inputs, outputs):
    x, exponent = inputs
    if not is_elements(x) or is_elements(exponent) or np.size(exponent) != 1:
        raise Cannot("its exponent is not one constant")
    if np.all(exponent == 3):
        square = trace.add("square", node, x.shape, [each(x)])
        return [trace.add("multiply", node, x.shape, [each(square), each(x)])]
    op = {2.0: "square", 0.5: "root", -1.0: "reciprocal"}.get(float(np.asarray(exponent).ravel()[0]))
    if not op:
        raise Cannot(f"no layer computes the power {float(np.asarray(exponent).ravel()[0]):g}")
    return [trace.add(op, node, x.shape, [each(x)])]


def _clip(trace, node, attributes, inputs, outputs):
    """The limits are inputs, or attributes before opset 11."""
    x, low, high = (*inputs, None, None)[:3]
    if is_elements(low) or is_elements(high):
        raise Cannot("its limits depend on the frame")
    low = attributes.get("min", -np.inf) if low is None else low
    high = attributes.get("max", np.inf) if high is None else high
    return [trace.add("clip", node, x.shape, [each(x)], lo=float(np.asarray(low)), hi=float(np.asarray(high)))]


def _one_value(limit, shape: tuple[int, ...]) -> float:
    """What every element of a constant is that elements of a shape are compared with."""
    values = np.empty(0) if is_elements(limit) else np.unique(limit)
    if len(values) != 1 or np.broadcast_shapes(np.shape(limit), shape) != shape:
        raise Cannot("it compares with more than one constant")
    return float(values[0])


def _comparison(greater: bool) -> Callable:
    """x > limit or x < limit. Whether it is met at the limit matters to no function that `_where` knows."""

    def apply(trace, node, attributes, inputs, outputs):
        x, limit = inputs if is_elements(inputs[0]) else inputs[::-1]
        limit = _one_value(limit, x.shape)
        op = "greater" if greater == is_elements(inputs[0]) else "less"
        return [trace.add(op, node, x.shape, [each(x)], limit=limit)]

    return apply


def _where(trace, node, attributes, inputs, outputs):
    """Relu, and x where x > 0 or else x times slopes; softplus as an exporter of PyTorch writes it, x where x > 20."""
    test, *results = inputs
    tests = trace.owners(test.numbers) if is_elements(test) else []
    if (
        len(tests) == 1
        and tests[0].op in ("greater", "less")
        and np.array_equal(test.numbers.ravel(), tests[0].numbers)
    ):
        x, limit = tests[0].operands[0].ravel(), tests[0].constants["limit"]
        above, below = results if tests[0].op == "greater" else results[::-1]
        if is_elements(above) and np.array_equal(above.numbers.ravel(), x) and prod(np.shape(below)) in (1, len(x)):
            shape = np.broadcast_shapes(test.shape, above.shape, np.shape(below))
            if limit == 0 and (slope := _slope(trace, below, x)) is not None:
                return [_kinked(trace, node, Elements(x.reshape(shape)), slope)]
            if limit >= 20 and is_elements(below) and _is_function(trace, "softplus", below, x):
                return [Elements(below.numbers.reshape(shape))]
    raise Cannot("it chooses between two results")


def _kinked(trace, node, x: Elements, slope: np.ndarray) -> Elements:
    """x above 0, x times slopes below."""
    if not slope.any():
        return trace.add("relu", node, x.shape, [each(x)])
    return trace.add("prelu", node, x.shape, [each(x)], slope=np.asarray(slope, np.float32))


def _is_function(trace, op: str, value: Elements, x: np.ndarray) -> bool:
    owners = trace.owners(value.numbers)
    whole = len(owners) == 1 and owners[0].op == op and np.array_equal(value.numbers.ravel(), owners[0].numbers)
    return whole and np.array_equal(owners[0].operands[0].ravel(), x)


def _slope(trace, value, x: np.ndarray) -> np.ndarray | None:
    """What elements x are multiplied by; None if they are not."""
    if not is_elements(value):
        return None if np.any(value) else np.zeros(len(x))
    return trace.owners(value.numbers)[0].constants["factor"] if _is_function(trace, "scale", value, x) else None


def _limit(op: str) -> Callable:
    """Max or Min with one constant; or with x times a slope from 0 to 1."""

    def apply(trace, node, attributes, inputs, outputs):
        if len(inputs) != 2:
            raise Cannot(f"it compares {len(inputs)} values, wanted 2")
        if all(map(is_elements, inputs)):
            for x, other in (inputs, inputs[::-1]):
                slope = _slope(trace, other, x.numbers.ravel()) if op == "Max" and x.shape == other.shape else None
                if slope is not None and ((slope >= 0) & (slope <= 1)).all():
                    return [_kinked(trace, node, x, slope)]
            raise Cannot("it chooses between two results")
        x, limit = inputs if is_elements(inputs[0]) else inputs[::-1]
        limit = _one_value(limit, x.shape)
        limits = {"lo": limit, "hi": np.inf} if op == "Max" else {"lo": -np.inf, "hi": limit}
        return [trace.add("clip", node, x.shape, [each(x)], **limits)]

    return apply


def _prelu(trace, node, attributes, inputs, outputs):
    x, slope = inputs
    if is_elements(slope) or not is_elements(x):
        raise Cannot("its slope must be a constant")
    slope = np.broadcast_to(np.asarray(slope), x.shape).ravel()
    return [trace.add("prelu", node, x.shape, [each(x)], slope=slope)]


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


def _log_softmax(trace, node, attributes, inputs, outputs):
    """x - m - log(sum(exp(x - m))) with the largest m of each row: the log of a softmax would be -inf below -103."""
    (p,) = _softmax(trace, node, attributes, inputs, outputs)  # for the places of the rows
    block = trace.owner(int(p.numbers.flat[0]))
    rows = block.operands[0]
    x = Elements(rows)
    top = trace.add("max", node, (len(rows), 1), [rows])
    d = trace.add("subtract", node, x.shape, [each(x), np.repeat(top.numbers, rows.shape[1], axis=1).reshape(-1, 1)])
    e = trace.add("exp", node, x.shape, [each(d)])
    total = trace.add("sum", node, (len(rows), 1), [e.numbers])
    log = trace.add("log", node, total.shape, [each(total)])
    y = trace.add("subtract", node, x.shape, [each(d), np.repeat(log.numbers, rows.shape[1], axis=1).reshape(-1, 1)])
    return [Elements(y.numbers.ravel()[p.numbers - block.first])]


def _gelu(trace, node, attributes, inputs, outputs):
    op = {b"none": "gelu", b"tanh": "gelu_tanh"}[attributes.get("approximate", b"none")]
    return _function(op)(trace, node, {}, inputs, outputs)


def _mish(trace, node, attributes, inputs, outputs):
    """x tanh(softplus(x)), of three layers."""
    x = inputs[0]
    soft = trace.add("softplus", node, x.shape, [each(x)])
    gate = trace.add("tanh", node, x.shape, [each(soft)])
    return [trace.add("multiply", node, x.shape, [each(x), each(gate)])]


def _celu(trace, node, attributes, inputs, outputs):
    """alpha elu(x / alpha), of an elu whose own alpha is 1."""
    alpha = float(attributes.get("alpha", 1.0))
    inner = scale(trace, node, inputs[0], 1 / alpha)
    return [scale(trace, node, trace.add("elu", node, inner.shape, [each(inner)], alpha=1.0), alpha)]


def _cast(trace, node, attributes, inputs, outputs):
    to = attributes["to"]
    if to in (10, 16) and not trace.halves:  # FLOAT16, BFLOAT16
        raise Cannot("it rounds to 16 bits, in a file whose inputs are wider")
    if to in (1, 10, 11, 16):  # FLOAT, DOUBLE
        return [inputs[0]]
    if to not in (6, 7):  # INT32, INT64
        raise Cannot("it makes small integers or truth values of elements of the frame")
    return [trace.add("integer", node, inputs[0].shape, [each(inputs[0])])]


def _cast_like(trace, node, attributes, inputs, outputs):
    x, like = inputs
    if isinstance(like, Elements):
        if any(block.op == "integer" for block in trace.owners(like.numbers)):
            raise Cannot("it makes integers of elements of the frame")
        return [x]
    return _cast(trace, node, {"to": helper.np_dtype_to_tensor_dtype(like.dtype)}, [x], outputs)


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


def _matmul(trace, node, attributes, inputs, outputs):
    a, b = inputs
    if is_elements(a) and is_elements(b):
        raise Cannot("it multiplies what depends on the frame by what depends on the frame")
    if is_elements(a):
        if np.ndim(b) != 2:
            raise Cannot(f"its constant has {np.ndim(b)} axes, wanted 2")
        return [product(trace, node, np.atleast_1d(a.numbers), np.asarray(b).T)]
    if np.ndim(a) != 2 or len(b.shape) < 2:
        raise Cannot("its constant must be a matrix, and the other input a matrix, too")
    y = product(trace, node, np.moveaxis(b.numbers, -2, -1), np.asarray(a))
    return [Elements(np.moveaxis(y.numbers, -1, -2))]


def _gemm(trace, node, attributes, inputs, outputs):
    a, b, c = (*inputs, None)[:3]
    if is_elements(b) or not is_elements(a):
        raise Cannot("its first input must depend on the frame, its second be a constant")
    rows = a.numbers.T if attributes.get("transA") else a.numbers
    weight = np.asarray(b) if attributes.get("transB") else np.asarray(b).T
    y = scale(trace, node, product(trace, node, rows, weight), attributes.get("alpha", 1.0))
    if is_elements(c):
        return _binary("add")(trace, node, {}, [y, scale(trace, node, c, attributes.get("beta", 1.0))], 1)
    return [y if c is None else shift(trace, node, y, attributes.get("beta", 1.0) * np.asarray(c, np.float64))]


# ---------------------------------------------------------------------------------------------- norms


def _batch_norm(trace, node, attributes, inputs, outputs):
    x, *constants = inputs
    if attributes.get("training_mode") or any(is_elements(value) for value in constants):
        raise Cannot("batch norm with statistics of the batch")
    channel = (-1,) + (1,) * (len(x.shape) - 2)
    gain, bias, mean, variance = (np.asarray(value, np.float64).reshape(channel) for value in constants)
    factor = gain / np.sqrt(variance + np.float64(np.float32(attributes.get("epsilon", 1e-5))))
    return [shift(trace, node, scale(trace, node, x, factor), bias - mean * factor)]


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
    "CastLike": _cast_like,
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Conv": convolution,
    "ConvTranspose": transposed,
    "Einsum": einsum,
    "ReduceMean": reduction("mean"),
    "ReduceSum": reduction("sum"),
    "ReduceMax": reduction("max"),
    "GlobalAveragePool": global_pool("mean"),
    "GlobalMaxPool": global_pool("max"),
    "AveragePool": average_pool,
    "MaxPool": max_pool,
    "BatchNormalization": _batch_norm,
    "LSTM": recurrent("LSTM"),
    "GRU": recurrent("GRU"),
    "RNN": recurrent("RNN"),
    "Sigmoid": _function("sigmoid"),
    "Tanh": _function("tanh"),
    "Relu": _function("relu"),
    "Clip": _clip,
    "Greater": _comparison(True),
    "GreaterOrEqual": _comparison(True),
    "Less": _comparison(False),
    "LessOrEqual": _comparison(False),
    "Max": _limit("Max"),
    "Min": _limit("Min"),
    "Where": _where,
    "PRelu": _prelu,
    "Softmax": _softmax,
    "LogSoftmax": _log_softmax,
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
    "Sin": _function("sin"),
    "Cos": _function("cos"),
    "HardSigmoid": _function("hard_sigmoid", alpha=0.2, beta=0.5),
    "HardSwish": _function("hard_swish"),
    "Selu": _function("selu", alpha=1.6732632, gamma=1.0507010),
}
