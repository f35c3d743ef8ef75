"""Models: a stack of layers, their files, and the packaged demo."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from importlib import resources
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy

from cnorm._core import Network, Stream
from cnorm.layers import LSTM, Linear, _Layer

__all__ = ["Model", "demo_model", "load"]

METADATA_KEY = "cnorm.model"
FORMAT = 1
MAX_FILE_BYTES = 4 << 30


class Model:
    """A stack of layers, immutable and shared by any number of streams and threads.

    Parameters
    ----------
    layers : sequence of layers
        Applied in order; each layer's input_size is the output_size of the one before.

    Attributes
    ----------
    layers : tuple
    input_size, output_size : int

    Raises
    ------
    TypeError
        If an element is not a layer.
    ValueError
        If there is none, or the sizes do not fit.

    Examples
    --------
    >>> model = cnorm.demo_model()
    >>> stream = model.stream()
    >>> stream.step(np.zeros(12, np.float32)).shape
    (9,)
    """

    def __init__(self, layers):
        layers = tuple(layers)
        if not layers:
            raise ValueError("layers must have at least one layer, got none")
        for i, layer in enumerate(layers):
            if not isinstance(layer, _Layer):
                raise TypeError(
                    f"layers[{i}] must be a layer such as cnorm.LSTM or cnorm.Linear, got {type(layer).__name__}"
                )
            if i and layer.input_size != layers[i - 1].output_size:
                raise ValueError(
                    f"layers[{i}] must take the {layers[i - 1].output_size} outputs of layers[{i - 1}], "
                    f"got {layer!r}, which takes {layer.input_size}"
                )
        self._layers = layers
        self._network = Network(layers, _identity(layers))

    @property
    def layers(self):
        return self._layers

    @property
    def input_size(self):
        return self._network.input_size

    @property
    def output_size(self):
        return self._network.output_size

    def stream(self):
        """A new `Stream` with its state at zero."""
        return Stream(self)

    def restore(self, saved):
        """The stream that ``Stream.save`` wrote to bytes.

        Raises
        ------
        TypeError
            If `saved` is not bytes.
        ValueError
            If it is truncated, of another version, or of a model with another configuration or other weights.
        """
        stream = Stream(self)
        stream._restore(saved)
        return stream

    def save(self, path):
        """Write the model to a safetensors file: weights by name, configuration as JSON in the metadata.

        The file appears whole or not at all.
        """
        path = Path(path)
        data = safetensors.numpy.save(_tensors(self._layers), metadata={METADATA_KEY: _configuration(self._layers)})
        handle, temporary = tempfile.mkstemp(dir=path.parent or ".", prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise

    def __repr__(self):
        return f"Model([{', '.join(map(repr, self._layers))}])"

    def __reduce__(self):
        return Model, (self._layers,)


def _configuration(layers) -> str:
    described = []
    for layer in layers:
        entry = {"type": layer.kind}
        if hasattr(layer, "spec"):
            entry |= {"preset": layer.spec.name, "eps": layer.eps}
        described.append(entry)
    return json.dumps({"format": FORMAT, "layers": described})


def _tensors(layers) -> dict[str, np.ndarray]:
    return {f"layers.{i}.{name}": array for i, layer in enumerate(layers) for name, array in layer.weights.items()}


def _identity(layers) -> bytes:
    digest = hashlib.sha256(_configuration(layers).encode())
    for name, array in sorted(_tensors(layers).items()):
        digest.update(f"{name}{array.shape}".encode())
        digest.update(array.astype("<f4").tobytes())
    return digest.digest()


def load(path):
    """Read a model that `Model.save` wrote.

    The file may come from a stranger: it is read whole into memory, at most 4 GiB of a regular file, parsed by the
    safetensors package, and every name, shape and dtype is checked. There is no pickle in it.

    Parameters
    ----------
    path : str or path-like

    Returns
    -------
    Model

    Raises
    ------
    OSError
        If the file can't be read.
    ValueError
        If it is not such a file; the message says what was expected and what was found.
    """
    data = _read(path)
    try:
        tensors = safetensors.numpy.load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from None
    text = header.get("__metadata__", {}).get(METADATA_KEY)
    if text is None:
        raise ValueError(f"{path} is not a cnorm model: the metadata has no {METADATA_KEY!r}")
    try:
        configuration = json.loads(text)
        version, entries = configuration["format"], configuration["layers"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{path}: {METADATA_KEY!r} is not JSON with a format and layers") from None
    if version != FORMAT:
        raise ValueError(f"{path} has format {version!r}; this version reads format {FORMAT}")
    if not isinstance(entries, list) or len(entries) > 10_000:
        raise ValueError(f"{path}: layers must be a list of at most 10000 entries")
    try:
        layers = [_layer(entry, _taken(tensors, f"layers.{i}.")) for i, entry in enumerate(entries)]
        if tensors:
            raise ValueError(f"tensors that no layer takes: {', '.join(sorted(tensors))}")
        return Model(layers)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None


def _read(path) -> bytes:
    # O_NONBLOCK: opening a FIFO must not wait for a writer
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is not a regular file")
        if status.st_size > MAX_FILE_BYTES:
            raise ValueError(f"{path} has {status.st_size} bytes, more than the {MAX_FILE_BYTES} that are read")
        return file.read(status.st_size)


def _taken(tensors: dict, prefix: str) -> dict:
    """Remove the tensors of one layer and return them by their own names."""
    names = [name for name in tensors if name.startswith(prefix)]
    return {name.removeprefix(prefix): tensors.pop(name) for name in names}


def _layer(entry, weights):
    kind = entry.get("type") if isinstance(entry, dict) else None
    if kind == "LSTM" and entry.keys() == {"type", "preset", "eps"}:
        return LSTM(weights, preset=entry["preset"], eps=entry["eps"])
    if kind == "Linear" and entry.keys() == {"type"}:
        if "weight" not in weights or not weights.keys() <= {"weight", "bias"}:
            raise ValueError(
                f"Linear must have the tensors weight and bias, got {', '.join(sorted(weights)) or 'none'}"
            )
        return Linear(**weights)
    raise ValueError(f"unknown layer in the configuration: {str(entry)[:200]}")


def demo_model():
    """The packaged model: a layer-normalised LSTM, 12 -> 64, and a read-out to 9 speakers.

    Trained on Japanese Vowels by examples/japanese_vowels/train.py.

    Returns
    -------
    Model
    """
    with resources.as_file(resources.files("cnorm") / "data" / "demo.safetensors") as path:
        return load(path)
