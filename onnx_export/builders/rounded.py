"""Products of rounded matrices: int8 weights in exact integers, float16 weights widened to float32.

For int8 weights w [outputs, inputs] with one scale per output, and each row of x [..., inputs]:

    (1) m = max |x|,  q = round(x levels/m),  q = 0 where m < 2^-100
    (2) q = lo + 128 (hi - 64) with 0 <= lo, hi < 128
    (3) z = float(lo w + 128 (hi w - 64 sum w)) (scale m/levels)

These are the integers of docs/numerics.md. Each of the two products is a MatMulInteger of unsigned with signed bytes.
Both digits have 7 bits, so that the sum of two products fits 16 bits: runtimes that add pairs with saturation
(vpmaddubsw) compute it exactly, too.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

TINY = 2.0**-100


def product(graph, x: str, rows, value: str, scales: str | None, name: str, bias: str | None = None) -> str:
    """x [..., inputs] by a rounded matrix -> [..., outputs].

    Parameters
    ----------
    graph : GraphBuilder
    x : str
    rows : cnorm.cells.rounded.Rows
        The type of the matrix, and the levels of x.
    value, scales : str
        The values [outputs, inputs] and [outputs] of the graph; their rows may be in another order than in `rows`.
    name : str
    bias : str, optional
    """
    if rows.scales is None:
        if rows.rows.dtype == np.float16:
            value = graph.add("Cast", value, name=f"{name}_wide", to=TensorProto.FLOAT)
        return graph.product(x, value, bias, name)
    q, step = _quantized(graph, x, rows.levels, name)
    sums = _integer_product(graph, q, value, name)
    scaled = graph.add("Mul", scales, step, name=f"{name}_scales")
    z = graph.add("Cast", sums, name=f"{name}_float", to=TensorProto.FLOAT)
    if bias is None:
        return graph.add("Mul", z, scaled, name=name)
    return graph.add("Add", graph.add("Mul", z, scaled, name=f"{name}_product"), bias, name=name)


def _quantized(graph, x: str, levels: int, name: str) -> tuple[str, str]:
    """(1): q [..., inputs] as floats, and m/levels [..., 1]. `onnx_export.quantizer` recognises these nodes."""
    largest = _largest(graph, graph.add("Abs", x, name=f"{name}_abs"), f"{name}_max")
    top = graph.constant(levels, f"{name}_levels")
    tiny = graph.add("Less", largest, graph.constant(TINY, f"{name}_least"), name=f"{name}_tiny")
    ratio = graph.add("Div", top, largest, name=f"{name}_levels_per_unit")
    ratio = graph.add("Where", tiny, graph.constant(0, f"{name}_zero"), ratio, name=f"{name}_to_levels")
    q = graph.add("Round", graph.add("Mul", x, ratio, name=f"{name}_unrounded"), name=f"{name}_q")
    return q, graph.add("Div", largest, top, name=f"{name}_step")


def _integer_product(graph, q: str, rows: str, name: str) -> str:
    """(2) and (3): q [..., inputs] by w [outputs, inputs] -> int32 [..., outputs]. sum w depends on weights only."""
    base = graph.constant(128, f"{name}_base")
    hi = graph.add("Floor", graph.add("Div", q, base, name=f"{name}_shifted"), name=f"{name}_hi")
    lo = graph.add("Sub", q, graph.add("Mul", hi, base, name=f"{name}_upper"), name=f"{name}_lo")
    hi = graph.add("Add", hi, graph.constant(64, f"{name}_offset"), name=f"{name}_hi_unsigned")
    matrix = graph.add("Transpose", rows, name=f"{name}_weight", perm=[1, 0])
    of = {}
    for digit, value in (("lo", lo), ("hi", hi)):
        digits = graph.add("Cast", value, name=f"{name}_{digit}_byte", to=TensorProto.UINT8)
        of[digit] = graph.add("MatMulInteger", digits, matrix, name=f"{name}_of_{digit}")
    wide = graph.add("Cast", rows, name=f"{name}_weight_int32", to=TensorProto.INT32)
    axes = graph.constant([1], f"{name}_row_axis", np.int64)
    sums = graph.add("ReduceSum", wide, axes, name=f"{name}_row_sums", keepdims=0)
    sums = graph.add("Mul", sums, graph.constant(64, f"{name}_offset_int32", np.int32), name=f"{name}_offset_sums")
    upper = graph.add("Sub", of["hi"], sums, name=f"{name}_of_signed_hi")
    upper = graph.add("Mul", upper, graph.constant(128, f"{name}_base_int32", np.int32), name=f"{name}_of_upper")
    return graph.add("Add", of["lo"], upper, name=f"{name}_sum")


def _largest(graph, x: str, name: str) -> str:
    """The largest element over the last axis, which stays with length 1."""
    if graph.opset >= 18:  # from here on axes are an input, not an attribute
        return graph.add("ReduceMax", x, graph.constant([-1], f"{name}_axes", np.int64), name=name, keepdims=1)
    return graph.add("ReduceMax", x, name=name, axes=[-1], keepdims=1)
