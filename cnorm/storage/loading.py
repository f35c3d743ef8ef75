"""Read models from files, and the packaged demo."""

from __future__ import annotations

import os
from importlib import resources

import numpy as np

from cnorm import _core
from cnorm.layers.chain import slices
from cnorm.model import Model
from cnorm.storage.files import is_safetensors, kind_of, open_regular, read_safetensors
from cnorm.storage.model_files import METADATA_KEY, layers_from
from cnorm.storage.packed import mapped
from cnorm.text import message_of

__all__ = ["demo_model", "load", "model_from", "model_of"]


def load(path: str | os.PathLike[str], weights: str | None = None, *, verify: bool = False) -> Model:
    """Read a model that `Model.save` or `Model.save_packed` wrote, or a streaming ONNX model.

    The file may be untrusted: it must be a regular file. One of `Model.save` has at most 4 GiB, is read whole into
    memory and parsed by the safetensors package, and every name, shape and dtype is checked. Pickle is not used. A
    packed file is mapped into memory, and every size and offset is checked; its model computes, but has no `layers`.
    Don't write over a mapped file: replace it. ONNX is read by `onnx_export.load`, which needs the extra onnx and has
    arguments for files that leave something open.

    Parameters
    ----------
    path : str or path-like
    weights : {"int8", "float16", "float32"}, optional
        Round the matrices, see `Model.with_weights`; if not given, they stay as in the file.
    verify : bool
        Also read a packed file whole and compare the checksum of its weights, at 0.6 ns a byte. Other files are always
        read whole.

    Returns
    -------
    Model

    Raises
    ------
    OSError
        If the file can't be read.
    TypeError
        If `path` is not a str or path-like.
    ModuleNotFoundError
        If the file is ONNX and the extra onnx is not installed.
    ValueError
        If the file is not such a model; the message says what was expected and what was found.
    """
    packed = mapped(path)
    if packed is not None:
        model = _of_packed_file(path, packed, verify)
    elif _is_onnx(path):
        import onnx_export  # not above: only such files need it

        model = onnx_export.load(path)
    else:
        tensors, metadata = read_safetensors(path)
        model = model_of(path, metadata.get(METADATA_KEY), tensors)
    return model if weights is None else model.with_weights(weights)


def _is_onnx(path) -> bool:
    """Whether a file is to be read as ONNX: it begins like a message, or its name says so and it is nothing else."""
    with open_regular(path) as file:
        data = file.read(1 << 16)
    if is_safetensors(data):
        return False
    return data.startswith(b"\x08") or (os.fsdecode(path).lower().endswith(".onnx") and not kind_of(data))


def _of_packed_file(path, packed: _core.PackedModel, verify: bool) -> Model:
    try:
        if verify:
            packed.verify()
        return Model._of_packed(packed)
    except ValueError as error:  # of a changed byte, or of sizes that would fill the memory
        raise ValueError(f"{path}: {message_of(error)}") from None


def model_from(text: str | None, tensors: dict[str, np.ndarray]) -> Model:
    """The model of a configuration and its tensors, both untrusted; ValueError or TypeError if they do not fit."""
    layers, sizes, window = layers_from(text, tensors)
    model = Model(layers, tuple(sizes))
    model.window = window
    if model.outputs != slices(sizes):
        raise ValueError(f"outputs must have the sizes of their layers, got {str(sizes)[:200]}")
    return model


def model_of(path, text: str | None, tensors: dict[str, np.ndarray]) -> Model:
    """The model of a configuration and its tensors, both untrusted; `path` is for messages."""
    try:
        return model_from(text, tensors)
    except RecursionError:
        raise ValueError(f"{path}: the layers are nested too deep") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {message_of(error)}") from None


def demo_model() -> Model:
    """The packaged model: a layer-normalised LSTM, 12 -> 64, and a read-out to 9 speakers.

    Trained on Japanese Vowels by examples/japanese_vowels/train_by_torch.py.

    Returns
    -------
    Model
    """
    with resources.as_file(resources.files("cnorm") / "data" / "demo.safetensors") as path:
        return load(path)
