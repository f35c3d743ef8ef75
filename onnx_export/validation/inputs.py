"""Inputs to run a model on: arrays from the user's file, and generated ones for inputs that it lacks."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Collection
from math import prod
from typing import BinaryIO

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnx_export.graph.scope import Scope, op, opset_versions
from onnx_export.graph.sizes import shape_of, size
from onnx_export.graph.tables import RESHAPING, SAME
from onnx_export.model_io import Unreadable, open_untrusted
from onnx_export.validation.options import Options

_MAX_BYTES = 2**31  # of all generated inputs together, and of all stored ones
BOUND = "cnorm: the value of an input"  # the doc_string of a tensor that `bind_eps` added
_EPS = 1e-5  # of an input that is added to a variance, where none is given
_ADDED = frozenset({"Add", "Sum", "Max", "Clip"})
_FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE})


class MissingInput(ValueError):
    """An input that the user's file lacks and that cannot be generated."""


def read(path: str | os.PathLike, wanted: list[str], role: str = "inputs") -> dict[str, np.ndarray]:
    """The arrays of an .npz file by name, or of an .npy file as the only one wanted; `role` is for messages.

    Raises
    ------
    Unreadable
        If it is neither, is no regular file, is too large, holds Python objects, or has arrays that no input wants.
    """
    try:
        file, status = open_untrusted(path)
        with file:
            if status.st_size > _MAX_BYTES:
                raise Unreadable(f"{role}: {path} has {status.st_size} bytes, the limit is {_MAX_BYTES}")
            arrays = _arrays(file, path, wanted, role)
    except Unreadable:
        raise
    except Exception as error:  # numpy and zipfile raise exceptions of many types for a malformed file
        # numpy's message advises to allow pickle, which must not be done here
        pickled = "neither .npz nor .npy, or with pickled objects in it" if "pickle" in str(error) else ""
        reason = pickled or getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise Unreadable(f"{role}: cannot read {path}: {reason}") from error
    verb = "wants" if role == "inputs" else "gives"
    unknown = sorted(set(arrays) - set(wanted))
    if unknown:
        raise Unreadable(f"{role}: {path} has {unknown}, the model {verb} {wanted}")
    return arrays


def bind_eps(model: onnx.ModelProto, options: Options) -> dict[str, float]:
    """Store a value for each input of one number that is added or a limit only, as an eps is: the caller's, or 1e-5.

    Parameters
    ----------
    model : onnx.ModelProto
        Its initialisers are added to.
    options : Options

    Returns
    -------
    dict of str to float
        The values by the names of the inputs.
    """
    stored = {tensor.name for tensor in model.graph.initializer}
    single = [value for value in model.graph.input if _is_number(shape_of(value.type)) and value.name not in stored]
    single = [value for value in single if value.type.tensor_type.elem_type in _FLOATS]
    scope = Scope(model.graph, opset_versions(model), {}) if single else None
    given, bound = _given(model, options) if single else {}, {}
    for value in single:
        if _is_added(scope, value.name):
            kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            array = np.resize(given.get(value.name, _EPS), shape_of(value.type)).astype(kind)
            tensor = numpy_helper.from_array(array, value.name)
            tensor.doc_string = BOUND
            model.graph.initializer.append(tensor)
            bound[value.name] = float(array.ravel()[0])
    return bound


def unbind(model: onnx.ModelProto, names: Collection[str]) -> None:
    """Undo `bind_eps` for some inputs."""
    for tensor in [each for each in model.graph.initializer if each.name in names]:
        model.graph.initializer.remove(tensor)


def _is_number(shape: tuple[int | None, ...] | None) -> bool:
    return shape is not None and set(shape) <= {1}


def _is_added(scope: Scope, name: str) -> bool:
    users = scope.consumers(name)
    return (
        bool(users)
        and name not in scope.outputs
        and all(
            op(node) in _ADDED or (op(node) in SAME | RESHAPING and _is_added(scope, node.output[0])) for node in users
        )
    )


def _given(model: onnx.ModelProto, options: Options) -> dict[str, np.ndarray]:
    """The caller's arrays; none where these cannot be read, which the run reports."""
    try:
        return read(options.input, [value.name for value in model.graph.input]) if options.input else {}
    except Unreadable:
        return {}


def _arrays(file: BinaryIO, path: str | os.PathLike, wanted: list[str], role: str) -> dict[str, np.ndarray]:
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            if sum(member.file_size for member in archive.infolist()) > _MAX_BYTES:
                raise Unreadable(f"{role}: {path} unpacks to more than {_MAX_BYTES} bytes")
        file.seek(0)
        with np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    file.seek(0)
    array = np.load(file, allow_pickle=False)
    if len(wanted) != 1:
        raise Unreadable(f"{role}: an .npy file is for one array, {wanted} are wanted; use .npz")
    return {wanted[0]: array}


def complete(scope: Scope, given: dict[str, np.ndarray], options: Options) -> dict[str, np.ndarray]:
    """`given`, and a generated array for every other input of the main graph.

    Floats are drawn from N(0, 1), integers from {0, 1} (0 only if they index a table of one row), booleans are true.
    An open dimension takes its size from a given array that has a dimension of the same name.

    Raises
    ------
    MissingInput
        If an input has a type or a size that is not generated, or if no input has a dimension of a name in
        `options.sizes`.
    Unreadable
        If a given array does not hold numbers, or has another shape than the file says.
    """
    graph = scope.graph
    stored = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in stored]
    free = {dim.dim_param for value in inputs for dim in value.type.tensor_type.shape.dim if dim.dim_param}
    strange = sorted(options.sizes.keys() - free)
    if strange:
        raise MissingInput(f"no input has a free dimension named {strange}; there are {sorted(free) or 'none'}")
    known: dict[str, int] = {}
    for value in inputs:
        if value.name in given:
            for dim, length in zip(value.type.tensor_type.shape.dim, given[value.name].shape, strict=False):
                if dim.dim_param:
                    known.setdefault(dim.dim_param, length)
    rng = np.random.default_rng(options.seed)
    feeds, total = {name: array for name, array in given.items() if name not in stored}, 0
    for value in inputs:
        if value.name in feeds:
            feeds[value.name] = _cast(value, feeds[value.name])
            continue
        dims = value.type.tensor_type.shape.dim
        if value.type.WhichOneof("value") != "tensor_type" or not value.type.tensor_type.HasField("shape"):
            raise MissingInput(f"the input {value.name!r} is no tensor of known rank; supply it with --input")
        shape = [
            fixed
            if (fixed := size(d)) is not None
            else known.setdefault(d.dim_param, options.size_of(d.dim_param, i))
            if d.dim_param
            else options.size_of("", i)
            for i, d in enumerate(dims)
        ]
        total += prod(max(length, 1) for length in shape) * 8  # NumPy refuses [0, 2**62], too
        if total > _MAX_BYTES:
            raise MissingInput(f"the input {value.name!r} is too large to make up: {shape}")
        feeds[value.name] = _draw(scope, value, shape, rng)
    return feeds


def _draw(scope: Scope, value: onnx.ValueInfoProto, shape: list[int], rng) -> np.ndarray:
    kind = value.type.tensor_type.elem_type
    if kind == TensorProto.BOOL:
        return np.ones(shape, bool)
    if kind in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16):
        return rng.normal(size=shape).astype(helper.tensor_dtype_to_np_dtype(kind))
    dtype = helper.tensor_dtype_to_np_dtype(kind) if kind in helper.get_all_tensor_dtypes() else None
    if dtype is None or np.dtype(dtype).kind not in "iu":
        name = TensorProto.DataType.Name(kind) if kind in TensorProto.DataType.values() else kind
        raise MissingInput(f"the input {value.name!r} of type {name} can't be generated; supply it with --input")
    return rng.integers(0, max(1, min(2, _rows(scope, value.name))), size=shape).astype(dtype)


def _rows(scope: Scope, name: str) -> int:
    """Rows of the smallest table that this input indexes, directly or after Casts; at most 2."""
    rows = 2
    for node in scope.consumers(name):
        if node.op_type == "Cast":
            rows = min(rows, _rows(scope, node.output[0]))
        if node.op_type == "Gather" and len(node.input) > 1 and node.input[1] == name:
            shape = scope.shape(node.input[0])
            axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
            if shape and -len(shape) <= axis < len(shape) and shape[axis] is not None:
                rows = min(rows, shape[axis])
    return rows


def _cast(value: onnx.ValueInfoProto, array: np.ndarray) -> np.ndarray:
    """The array, checked, cast to the input's type, so that a float64 file serves a float32 model."""
    if array.dtype.kind not in "fiub":
        raise Unreadable(f"inputs: {value.name!r} must hold real numbers or truth values, got dtype {array.dtype}")
    shape = shape_of(value.type) or ()  # empty: of any rank, as onnxruntime takes it
    differ = any(wanted not in (None, got) for wanted, got in zip(shape, array.shape, strict=False))
    if shape and (len(shape) != array.ndim or differ):
        wanted = ", ".join("*" if one is None else str(one) for one in shape)
        raise Unreadable(f"inputs: {value.name!r} must have shape [{wanted}], got {list(array.shape)}")
    kind = value.type.tensor_type.elem_type
    if kind in (TensorProto.STRING, TensorProto.UNDEFINED):
        return array
    return array.astype(helper.tensor_dtype_to_np_dtype(kind))
