"""Writing models: whole or not at all, large weights in a file beside the model's."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import onnx
from onnx import TensorProto, external_data_helper

__all__ = ["write"]

EXTERNAL_ABOVE = 1 << 30  # bytes of weights; a protobuf message cannot hold 2 GiB
PAGE = 4096  # tensors in the data file begin on a page, so that a runtime can map them


def write(model: onnx.ModelProto, path) -> None:
    """Check the model and write it to `path`, or only check it if that is None.

    Initialisers of more than 1 GiB together go to a second file, ``NAME.<hash of its content>.data``. That
    name makes the pair safe to replace: an older model file keeps the data it was written with until the
    moment the new one takes its place. (The older data then stays behind; delete it when nothing uses it.)

    Raises
    ------
    ValueError
        If weights that need a second file come without a path.
    OSError
        If a file cannot be written. Neither is then there, and an older one is as it was.
    """
    size = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    if size <= EXTERNAL_ABOVE:
        onnx.checker.check_model(model, full_check=True)
        if path is not None:
            path = Path(path)
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
                _write_file(Path(folder, path.name), model.SerializeToString(deterministic=True))
                os.replace(Path(folder, path.name), path)
        return
    if path is None:
        raise ValueError(f"path must be given: {size} bytes of weights need a second file beside the model's")
    path = Path(path)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        data, referring = _write_data(model, Path(folder), path.name)
        _write_file(Path(folder, path.name), referring.SerializeToString(deterministic=True))
        onnx.checker.check_model(Path(folder, path.name), full_check=True)
        os.replace(Path(folder, data), path.with_name(data))
        os.replace(Path(folder, path.name), path)


def _write_data(model: onnx.ModelProto, folder: Path, name: str) -> tuple[str, onnx.ModelProto]:
    """Write the initialisers to a file in `folder`; its name, and the model that refers to it."""
    referring = onnx.ModelProto()
    referring.CopyFrom(model)
    digest = hashlib.sha256()
    places = []
    with open(folder / "data", "wb") as file:
        for tensor in model.graph.initializer:
            start = file.tell() + -file.tell() % PAGE
            for piece in (bytes(start - file.tell()), tensor.raw_data):
                digest.update(piece)
                file.write(piece)
            places.append((start, len(tensor.raw_data)))
    data = f"{name}.{digest.hexdigest()[:16]}.data"
    os.chmod(folder / "data", 0o644)
    os.rename(folder / "data", folder / data)
    for tensor, (start, length) in zip(referring.graph.initializer, places, strict=True):
        external_data_helper.set_external_data(tensor, data, start, length)
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
    return data, referring


def _write_file(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    os.chmod(path, 0o644)
