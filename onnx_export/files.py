"""Write models atomically, with large weights in a second file in the same folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from cnorm.storage.files import replacing

__all__ = ["write"]

EXTERNAL_ABOVE = 1 << 30  # bytes of weights; a protobuf message cannot hold 2 GiB
_NONE: Mapping[str, bytes] = {}
PAGE = 4096  # tensors in the data file begin on a page, so that a runtime can map them


def write(model: onnx.ModelProto, weights: dict[str, np.ndarray], path, beside: Mapping[str, bytes] = _NONE) -> None:
    """Give the model its weights as initialisers, check it, and write it to `path` if that is not None.

    Weights of more than 1 GiB together go to a second file, ``NAME.<hash of its content>.data``, to which the model
    then refers. As the name depends on the content, the two files can be replaced safely: the older model file refers
    to the older data until the new model file replaces it. (The older data file is not deleted.)

    Parameters
    ----------
    model : onnx.ModelProto
        Completed in place, the shapes of all its values included.
    weights : dict of str to ndarray
        The initialisers.
    path : str, path-like or None
    beside : mapping of str to bytes
        More files to write, by the suffix that is added to the name of the model's file.

    Raises
    ------
    ValueError
        If weights that need a second file come without a path.
    OSError
        If a file cannot be written. No new file is then left, and older ones are unchanged.
    """
    _infer_shapes(model, weights)
    size = sum(array.nbytes for array in weights.values())
    external = size > EXTERNAL_ABOVE
    if not external:
        model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
        onnx.checker.check_model(model, full_check=True)
    if path is None:
        if external:
            raise ValueError(f"path must be given: {size} bytes of weights need a second file beside the model's")
        return
    with replacing(path) as file:
        data = _write_data(model, weights, file.parent, file.name) if external else None
        for suffix, content in beside.items():
            file.with_name(file.name + suffix).write_bytes(content)
        file.write_bytes(model.SerializeToString(deterministic=True))
        if data:
            onnx.checker.check_model(file, full_check=True)


def _infer_shapes(model: onnx.ModelProto, weights: dict[str, np.ndarray]) -> None:
    """Infer the type and shape of every value. Weights are declared as inputs, so that they are not copied."""
    inputs = len(model.graph.input)
    for name, array in weights.items():
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        model.graph.input.append(helper.make_tensor_value_info(name, kind, array.shape))
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    model.graph.CopyFrom(inferred.graph)
    del model.graph.input[inputs:]


def _write_data(model: onnx.ModelProto, weights: dict[str, np.ndarray], folder: Path, name: str) -> str:
    """Write the weights to a file in `folder` and make the model refer to it; returns its name."""
    digest, places = hashlib.sha256(), {}
    with open(folder / "data", "wb") as file:
        for weight, array in weights.items():
            start = file.tell() + -file.tell() % PAGE
            for piece in (bytes(start - file.tell()), np.ascontiguousarray(array.astype(_little(array), copy=False))):
                digest.update(piece)
                file.write(piece)
            places[weight] = start
    data = f"{name}.{digest.hexdigest()[:16]}.data"
    os.rename(folder / "data", folder / data)
    for weight, array in weights.items():
        tensor = model.graph.initializer.add(
            name=weight, dims=array.shape, data_type=helper.np_dtype_to_tensor_dtype(array.dtype)
        )
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", data), ("offset", places[weight]), ("length", array.nbytes)):
            tensor.external_data.add(key=key, value=str(value))
    return data


def _little(array: np.ndarray) -> np.dtype:
    return array.dtype.newbyteorder("<")
