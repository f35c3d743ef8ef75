"""Stress rows, on which inaccurate norms fail, and models of the plain operator to compare with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper

from onnx_export.validation.judge import JudgedRows
from onnx_export.validation.norm import Norm

# The measure by which a family of rows is hard; `reached` compares the rows of the run by the same measure.
CONDITIONING, MAGNITUDE, SMALLEST_STD, OFFSET = "conditioning", "magnitude", "smallest std", "offset"


@dataclass(frozen=True)
class HardRows:
    """Stress rows of one family.

    Attributes
    ----------
    family : str
        Name for reports, such as "large mean".
    hard_by : str
        CONDITIONING (max|x| / sqrt(var + eps)), MAGNITUDE (max|x|), SMALLEST_STD (of the rows), or OFFSET
        (|mean| / sqrt(var + eps)).
    rows : ndarray [rows, n]
    """

    family: str
    hard_by: str
    rows: np.ndarray


def hard_rows(rows: int, n: int, dtype: np.dtype, eps: float, seed: int) -> Iterator[HardRows]:
    """Every family of stress rows for a norm over n elements.

    Parameters
    ----------
    rows, n : int
        Shape of each case.
    dtype : dtype
        Type of the norm's input. Its range decides the scales.
    eps : float
        The norm's eps: one family has a standard deviation of sqrt(eps).
    seed : int
        Seed of the generator.
    """
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=(rows, n))
    half = dtype.itemsize == 2
    tiny_scales = (1e-4, 1e-7) if half else (1e-6, 1e-20, 1e-38)
    huge_scales = (300.0, 7500.0) if half else (1e10, 1e18, 1e25, 3e37)
    if dtype == np.float64:
        tiny_scales, huge_scales = (*tiny_scales, 1e-300), (*huge_scales, 1e150, 1e300)

    def case(family: str, hard_by: str, values: np.ndarray) -> HardRows:
        with np.errstate(all="ignore"):
            return HardRows(family, hard_by, values.astype(dtype))

    for mean in (1e2, 1e3) if half else (1e2, 1e3, 1e4, 1e6):
        yield case("large mean", CONDITIONING, mean + noise)
    for level in (0.0, 1.0, -3.5, 1e4):
        yield case("constant rows", CONDITIONING, np.full((rows, n), level))
    for level, measure in ((0.0, SMALLEST_STD), (1.0, OFFSET)):
        yield case("near-constant rows", measure, level + np.sqrt(max(eps, 1e-12)) * noise)
    for scale in tiny_scales:
        yield case("tiny values", SMALLEST_STD, scale * noise)
    for scale in huge_scales:
        limit = float(np.finfo(dtype).max) if dtype.kind == "f" else 3e38
        yield case("float16 edge" if half else "huge values", MAGNITUDE, np.clip(scale * noise, -limit, limit))
    outlier = noise.copy()
    outlier[:, n // 2] = 1e4
    yield case("one-hot outlier", CONDITIONING, outlier)
    outlier = np.zeros((rows, n))
    outlier[:, 0] = 1.0
    yield case("one-hot outlier", CONDITIONING, outlier)
    if rows > 1:
        for poison in (np.nan, np.inf):
            spoiled = noise.copy()
            spoiled[0, n // 2] = poison
            yield case("NaN or Inf in another row", CONDITIONING, spoiled)


def hardness(rows: Iterable[JudgedRows]) -> dict[str, float]:
    """The hardest value among these rows of each measure."""
    rows = list(rows)
    with np.errstate(all="ignore"):
        return {
            CONDITIONING: max(float(np.nanmax(r.conditioning, initial=0.0)) for r in rows),
            MAGNITUDE: max(float(np.nanmax(r.largest, initial=0.0)) for r in rows),
            OFFSET: max(float(np.nanmax(r.mean / np.sqrt(r.variance + r.eps), initial=0.0)) for r in rows),
            SMALLEST_STD: min(float(np.sqrt(np.nanmin(r.variance, initial=np.inf))) for r in rows),
        }


def reached(hard_by: str, failing: dict[str, float], seen: dict[str, float]) -> bool:
    """Whether the rows of the run are, by the measure `hard_by`, within a factor of ten of the failing ones.

    The error of E[x^2] - E[x]^2 grows with the square of the offset, so that its factor is the root of ten.
    """
    if hard_by == OFFSET:
        return seen[hard_by] >= failing[hard_by] / 10**0.5
    if hard_by == SMALLEST_STD:
        return seen[hard_by] <= 10 * failing[hard_by]
    return seen[hard_by] >= failing[hard_by] / 10


def bare(norm: Norm, rows: int, n: int, dtype: int) -> onnx.ModelProto:
    """A model of the runtime's plain operator for such rows: LayerNormalization, or its RMS form."""
    ones = np.ones(n, helper.tensor_dtype_to_np_dtype(dtype))
    scale = helper.make_tensor("scale", dtype, [n], ones.tobytes(), raw=True)
    node = helper.make_node(norm.formula.bare, ["x", "scale"], ["y"], axis=-1, epsilon=norm.eps, stash_type=1)
    graph = helper.make_graph(
        [node],
        "bare",
        [helper.make_tensor_value_info("x", dtype, [rows, n])],
        [helper.make_tensor_value_info("y", dtype, [rows, n])],
        [scale],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def producers(norm: Norm) -> list[onnx.NodeProto]:
    """The additions, up to three, that compute the norm's input: optimisers fuse them with the norm."""
    found, names = [], [norm.x]
    while names and len(found) < 3:
        node = norm.scope.producer(names.pop(0))
        if node is not None and node.op_type == "Add" and norm.scope.dtype(node.output[0]) != TensorProto.BFLOAT16:
            found.append(node)
            names += node.input
    return found
