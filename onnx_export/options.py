"""The options of an export, checked, and the versions that a file is written for."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass

import onnx
from onnx import TensorProto, helper

from cnorm.arguments import whole_number

__all__ = ["DTYPES", "FIRST_OPSET", "TIME", "Options", "checked_opset", "ir_version", "newest_opset"]

FIRST_OPSET = 13
SURE_OPSET = 17  # the default: every onnxruntime that the package allows loads it, so it need not be imported to ask
FIRST_IR = 7  # of opset 13, which onnxruntime reads from 1.8 on
FORMS = ("step", "sequence")
LOOPS = ("scan", "loop", "unrolled")
DTYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}
TIME = "T"  # the name of the dimension of steps
MOST_UNROLLED = 10_000  # steps


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `export`. The attributes are its parameters.

    Raises
    ------
    TypeError, ValueError
        As `export`.
    """

    form: str
    opset: int
    batch: int | str
    native_ops: bool
    dtype: str
    portable: bool
    composed_norms: bool
    loop: str
    steps: int | None

    def __post_init__(self):
        for name, known in (("form", FORMS), ("dtype", DTYPES), ("loop", LOOPS)):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in known:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")
        object.__setattr__(self, "opset", checked_opset(self.opset))
        object.__setattr__(self, "batch", _checked_batch(self.batch, self.form))
        if self.steps is not None:
            object.__setattr__(self, "steps", whole_number(self.steps, "steps", 1))
        if self.form == "step" and (self.steps is not None or self.loop != "scan"):
            raise ValueError("steps and loop must be left out in form 'step', which has one step")
        if self.loop == "unrolled" and self.steps is None:
            raise ValueError("steps must be given for loop 'unrolled': the graph has the nodes of each step")
        if self.loop == "unrolled" and self.steps > MOST_UNROLLED:
            raise ValueError(f"steps must be at most {MOST_UNROLLED} for loop 'unrolled', got {self.steps}")
        if self.native_ops and self.loop != "scan":
            raise ValueError("loop must be left out with native_ops: the operators run over the steps themselves")

    @property
    def time(self) -> int | str:
        """The size or name of the dimension of steps."""
        return TIME if self.steps is None else self.steps


def checked_opset(opset) -> int:
    """`opset`, if it can be written and the installed onnxruntime loads it; else an error."""
    if isinstance(opset, bool) or not hasattr(opset, "__index__"):
        raise TypeError(f"opset must be an integer, got {opset!r}")
    opset = operator.index(opset)
    if not (FIRST_OPSET <= opset <= SURE_OPSET or FIRST_OPSET <= opset <= newest_opset()):
        import onnxruntime

        raise ValueError(
            f"opset must be from {FIRST_OPSET} to {newest_opset()}, the newest that the installed "
            f"onnxruntime {onnxruntime.__version__} loads, got {opset}"
        )
    return opset


def _checked_batch(batch, form):
    if form == "sequence" and batch == TIME:
        raise ValueError(f"batch must be another name than {TIME!r}, which a sequence has for its steps, got {batch!r}")
    if isinstance(batch, str):
        if not batch.isidentifier():
            raise ValueError(f"batch must be 1 or the name of a dimension, got {batch!r}")
        return batch
    if isinstance(batch, bool) or not hasattr(batch, "__index__"):
        raise TypeError(f"batch must be 1 or the name of a dimension, got {batch!r}")
    if operator.index(batch) != 1:
        raise ValueError(f"batch must be 1 or the name of a dimension, such as 'batch', got {batch!r}")
    return 1


@functools.cache
def newest_opset() -> int:
    """The newest opset that the onnx package can write and the installed onnxruntime loads."""
    from onnx_export.ort import loads

    for opset in range(onnx.defs.onnx_opset_version(), FIRST_OPSET, -1):
        if loads(opset, ir_version(opset)):
            return opset
    return FIRST_OPSET


def ir_version(opset: int) -> int:
    """The oldest IR version allowed for an opset, because old runtimes refuse IR versions newer than their own."""
    return max(FIRST_IR, helper.find_min_ir_version_for([helper.make_opsetid("", opset)]))
