"""Models: a stack of layers, their files, and the packaged demo."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import itertools
import json
import os
import stat
import tempfile
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy

from cnorm import _core
from cnorm.layers import (
    GRU,
    LSTM,
    RNN,
    Activation,
    Bidirectional,
    Layer,
    LayerNorm,
    Linear,
    Residual,
    chained,
    ends,
    flat,
)
from cnorm.specs import PRESETS, _from_json

__all__ = ["Model", "demo_model", "load"]

METADATA_KEY = "cnorm.model"
FORMAT = 1
MAX_FILE_BYTES = 4 << 30
MAX_LAYERS = 10_000


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
    >>> import cnorm, numpy as np
    >>> model = cnorm.demo_model()
    >>> stream = model.stream()
    >>> stream.step(np.zeros(12, np.float32)).shape
    (9,)
    """

    def __init__(self, layers: Iterable[Layer]) -> None:
        self._layers = layers = chained(layers)
        self._input_size, self._output_size = ends(layers)
        self._parts, self._network = [], None
        identity = _identity(layers)
        size = self._input_size
        for bidirectional, group in itertools.groupby(layers, lambda layer: isinstance(layer, Bidirectional)):
            for part in ([layer] for layer in group) if bidirectional else [list(group)]:
                if bidirectional:
                    ways = (part[0].forward, part[0].backward)
                    self._parts.append(tuple(_core.Network(flat([way], size), b"") for way in ways))
                else:
                    self._parts.append(_core.Network(flat(part, size), identity))
                size = ends(part)[1] if any(layer.output_size for layer in part) else size
        if len(self._parts) == 1 and not isinstance(self._parts[0], tuple):
            self._network = self._parts[0]

    @property
    def layers(self) -> tuple[Layer, ...]:
        return self._layers

    @property
    def input_size(self) -> int:
        return self._input_size

    @property
    def output_size(self) -> int:
        return self._output_size

    def stream(self) -> _core.Stream:
        """A new `Stream`, its state at the start: zero, or what the cells have learned.

        Returns
        -------
        Stream

        Raises
        ------
        ValueError
            If a layer is bidirectional: it needs the whole sequence, see `run`.
        """
        return _core.Stream(self)

    def step_many(
        self,
        streams: Sequence[_core.Stream],
        x: np.ndarray,
        out: np.ndarray | None = None,
        reset: np.ndarray | None = None,
    ) -> np.ndarray:
        """One step of each of some streams of this model; the weights are read once for all.

        Parameters
        ----------
        streams : sequence of Stream
            Any of this model's, each once, in any order.
        x : ndarray, shape (len(streams), input_size), float32
        out : ndarray, shape (len(streams), output_size), float32, contiguous, optional
        reset : ndarray, shape (len(streams),), bool, optional
            Streams to reset before the step.

        Returns
        -------
        y : ndarray, shape (len(streams), output_size), float32
            Each row has the same bits as that stream's own `step`.

        Raises
        ------
        TypeError
            If something is not a stream, or of another dtype.
        ValueError
            For a stream twice or of another model, or another shape.
        RuntimeError
            If another thread is using one of the streams. On any error no stream has moved.
        """
        return _core.step_many(self, streams, x, out, reset)

    def run(self, x: np.ndarray) -> np.ndarray:
        """A whole sequence from the state at the start; the only way to run bidirectional layers.

        Parameters
        ----------
        x : ndarray, shape (steps, input_size), float32

        Returns
        -------
        y : ndarray, shape (steps, output_size), float32

        Raises
        ------
        TypeError, ValueError
            For another dtype or shape.
        """
        for part in self._parts:
            if isinstance(part, tuple):
                forward, backward = (_core.Stream(self, way) for way in part)
                x = np.concatenate([forward.process(x), backward.process(np.asarray(x)[::-1])[::-1]], axis=1)
            else:
                x = _core.Stream(self, part).process(x)
        return x

    def restore(self, saved: bytes) -> _core.Stream:
        """The stream that ``Stream.save`` wrote to bytes.

        Parameters
        ----------
        saved : bytes

        Returns
        -------
        Stream

        Raises
        ------
        TypeError
            If `saved` is not bytes.
        ValueError
            If it is truncated, of another version, or of a model with another configuration or other weights, or if its
            state is not finite.
        """
        stream = self.stream()
        stream._restore(saved)
        return stream

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model to a safetensors file: weights by name, configuration as JSON in the metadata.

        The file appears whole or not at all; one that is there keeps its mode.

        Parameters
        ----------
        path : str or path-like

        Raises
        ------
        OSError
            If it can't be written, is a folder's name, or what is there is not a regular file.
        TypeError
            If `path` is no path.
        """
        data = safetensors.numpy.save(named_tensors(self._layers), metadata={METADATA_KEY: configuration(self._layers)})
        write_whole(path, data)

    def __repr__(self):
        return f"Model([{', '.join(map(repr, self._layers))}])"

    def __reduce__(self):
        return Model, (self._layers,)


def write_whole(path, data: bytes) -> None:
    """Write a file that appears whole or not at all, as `replacing` says."""
    with replacing(path) as file:
        file.write_bytes(data)


@contextlib.contextmanager
def replacing(path):
    """A path in a folder of its own, to write to; then all that lies in that folder goes to where `path` is.

    A link stays and what it leads to is replaced. What is there keeps its mode, what is new has the umask's.

    Raises
    ------
    OSError
        It names `path`. What is no regular file is refused, and on any error what was there stays as it was.
    """
    path = _decoded(path)
    try:
        if os.path.basename(path) in ("", os.curdir, os.pardir):  # else "new/" would be a file "new"
            raise OSError(errno.EISDIR, "the path is that of a folder")
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            mode = None
        if mode is not None and not stat.S_ISREG(mode):
            raise OSError(errno.EEXIST, "what is there is not a regular file")
        target = Path(os.path.realpath(path))
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name[:32]}.") as folder:
            yield Path(folder, target.name)
            for name in sorted(os.listdir(folder), key=target.name.__eq__):  # the file last: it may need the others
                if mode is not None:
                    os.chmod(Path(folder, name), stat.S_IMODE(mode) & 0o777)
                os.replace(Path(folder, name), target.with_name(name))
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), path) from None


def configuration(layers) -> str:
    """What a file says of the layers beside their tensors, as JSON."""
    return json.dumps({"format": FORMAT, "layers": [_entry(layer) for layer in layers]})


def _entry(layer) -> dict:
    """What the file says of one layer beside its tensors."""
    entry = {"type": layer.kind}
    if isinstance(layer, (LSTM, GRU, RNN)):
        preset = PRESETS.get((layer.kind, layer.spec.name)) == layer.spec
        entry |= {"preset": layer.spec.name} if preset else {"spec": dataclasses.asdict(layer.spec)}
        if layer.eps is not None:
            entry["eps"] = layer.eps
        if with_ := _with(layer):
            entry["with"] = with_
    elif isinstance(layer, LayerNorm):
        entry["eps"] = layer.eps
    elif isinstance(layer, Activation):
        entry["function"] = layer.function
    elif isinstance(layer, Residual):
        entry["layers"] = [_entry(inner) for inner in layer.layers]
    elif isinstance(layer, Bidirectional):
        entry |= {"forward": _entry(layer.forward), "backward": _entry(layer.backward)}
    return entry | ({"without": list(layer.absent_biases)} if layer.absent_biases else {})


def _with(layer) -> list[str]:
    """The optional tensors that a cell has, but for biases: "without" says which of those it has not."""
    optional = (name for name, _, meaning in layer.entries() if meaning[-1:] == "?" and not meaning.startswith("bias"))
    return [name for name in optional if name in layer.weights]


def named_tensors(layers) -> dict[str, np.ndarray]:
    """All weights under the names they have in a file: ``layers.<i>.<name>``."""
    return {f"layers.{i}.{name}": array for i, layer in enumerate(layers) for name, array in _tensors_of(layer)}


def _tensors_of(layer):
    """(name, array) of one layer; those of inner layers have a prefix."""
    if isinstance(layer, Residual):
        inner = {str(i): one for i, one in enumerate(layer.layers)}
    elif isinstance(layer, Bidirectional):
        inner = {"forward": layer.forward, "backward": layer.backward}
    else:
        yield from layer.weights.items()
        return
    for prefix, one in inner.items():
        for name, array in _tensors_of(one):
            yield f"{prefix}.{name}", array


def _identity(layers) -> bytes:
    digest = hashlib.sha256(configuration(layers).encode())
    for name, array in sorted(named_tensors(layers).items()):
        digest.update(f"{name}{array.shape}".encode())
        digest.update(array.astype("<f4").tobytes())
    return digest.digest()


def load(path: str | os.PathLike[str]) -> Model:
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
    TypeError
        If `path` is no path.
    ValueError
        If it is not such a file; the message says what was expected and what was found.
    """
    tensors, metadata = read_safetensors(path)
    return from_tensors(path, metadata.get(METADATA_KEY), tensors)


def from_tensors(path, text: str | None, tensors: dict[str, np.ndarray]) -> Model:
    """The model of a configuration and its tensors, both perhaps from a stranger; `path` is for messages."""
    if text is None:
        raise ValueError(f"{path} is not a cnorm model: the metadata has no {METADATA_KEY!r}")
    try:
        whole = json.loads(text, object_pairs_hook=_each_once)
        version, entries = whole["format"], whole["layers"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{path}: {METADATA_KEY!r} is not JSON with a format and layers") from None
    if version != FORMAT:
        raise ValueError(f"{path} has format {version!r}; this version reads format {FORMAT}")
    if not isinstance(entries, list):
        raise ValueError(f"{path}: layers must be a list, got {str(entries)[:200]}")
    try:
        if (count := _count(entries)) > MAX_LAYERS:
            raise ValueError(f"layers must have at most {MAX_LAYERS} entries, nested ones included, got {count}")
        return Model(map(_layer, entries, _shares(tensors, len(entries), "layers.")))
    except RecursionError:
        raise ValueError(f"{path}: the layers are nested too deep") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None


def read_safetensors(path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The tensors and the metadata of a safetensors file that may come from a stranger."""
    raw, metadata = raw_safetensors(path)
    try:
        return {name: array_of(name, tensor) for name, tensor in raw.items()}, metadata
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def raw_safetensors(path) -> tuple[dict[str, dict], dict[str, str]]:
    """What `array_of` makes tensors of, and the metadata: of a dtype that NumPy has not, none need be made."""
    data = _read(path)
    try:
        found = safetensors.deserialize(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")], object_pairs_hook=_each_once)
    except (safetensors.SafetensorError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not a safetensors file that can be read: {error}") from None
    return dict(found), header.get("__metadata__") or {}


DTYPES = {f"{kind.upper()}{8 * size}": f"<{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)}
DTYPES |= {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "BOOL": "?"}


def array_of(name: str, tensor: dict) -> np.ndarray:
    """A tensor as NumPy has it, bfloat16 widened because NumPy has none."""
    if tensor["dtype"] not in DTYPES:
        raise ValueError(f"tensor {name!r} has dtype {tensor['dtype']}, none of {', '.join(DTYPES)}")
    array = np.frombuffer(tensor["data"], DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
    return (array.astype(np.uint32) << 16).view(np.float32) if tensor["dtype"] == "BF16" else array


def _each_once(pairs: list) -> dict:
    """Of a JSON object: a name twice would mean what its reader likes."""
    names = dict(pairs)
    if len(names) != len(pairs):
        raise ValueError("a name is there twice")
    return names


def _decoded(path) -> str:
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(f"path must be a str or path-like, got {type(path).__name__}")
    return os.fsdecode(path)


def _read(path) -> bytes:
    # O_NONBLOCK: opening a FIFO must not wait for a writer
    handle = os.open(_decoded(path), os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        raise ValueError(f"{path} is not a regular file")
    with os.fdopen(handle, "rb") as file:
        if status.st_size > MAX_FILE_BYTES:
            raise ValueError(f"{path} has {status.st_size} bytes, more than the {MAX_FILE_BYTES} that are read")
        return file.read(status.st_size)


def _count(entries: list) -> int:
    """How many layers a file describes, nested ones included."""
    nested = (entry["layers"] for entry in entries if isinstance(entry, dict) and isinstance(entry.get("layers"), list))
    return len(entries) + sum(map(_count, nested))


def _shares(tensors: dict, layers: int | tuple, start: str = "") -> list[dict]:
    """The tensors of each of some layers, numbered or named, by their own names; all must be one's."""
    shares = {f"{start}{layer}.": {} for layer in (range(layers) if isinstance(layers, int) else layers)}
    left = []
    for name, tensor in tensors.items():
        prefix = name[: name.find(".", len(start)) + 1]
        if prefix in shares:
            shares[prefix][name.removeprefix(prefix)] = tensor
        else:
            left.append(name)
    if left:
        raise ValueError(f"tensors that no layer takes: {', '.join(sorted(left))}")
    return list(shares.values())


CELLS = {"LSTM": LSTM, "GRU": GRU, "RNN": RNN}


def _layer(entry, weights):
    """The layer of one entry; `weights` by its own names."""
    kind = entry["type"] if isinstance(entry, dict) and isinstance(entry.get("type"), str) else None
    rest = set(entry) - {"type", "without", *(["with"] if kind in CELLS else [])} if kind else set()
    inner = None
    if kind in CELLS and rest - {"eps"} in ({"preset"}, {"spec"}):
        inner = CELLS[kind](weights, preset=spec_of(entry), eps=entry.get("eps"))
        weights = {}
    elif kind == "Linear" and not rest:
        inner, weights = Linear(**_weight_and_bias(kind, weights)), {}
    elif kind == "LayerNorm" and rest == {"eps"}:
        inner, weights = LayerNorm(**_weight_and_bias(kind, weights), eps=entry["eps"]), {}
    elif kind == "Activation" and rest == {"function"}:
        inner = Activation(entry["function"])
    elif kind == "Residual" and rest == {"layers"} and isinstance(entry["layers"], list):
        inner, weights = Residual(map(_layer, entry["layers"], _shares(weights, len(entry["layers"])))), {}
    elif kind == "Bidirectional" and rest == {"forward", "backward"}:
        ways = ("forward", "backward")
        inner, weights = Bidirectional(*map(_layer, map(entry.get, ways), _shares(weights, ways))), {}
    if inner is None:
        raise ValueError(f"unknown layer in the configuration: {str(entry)[:200]}")
    if weights:
        raise ValueError(f"tensors that {kind} does not take: {', '.join(sorted(weights))}")
    if list(inner.absent_biases) != entry.get("without", []):
        raise ValueError(
            f"the biases that {inner!r} is without must be those that the configuration names, "
            f"{str(entry.get('without', []))[:200]}, got {list(inner.absent_biases)}"
        )
    check_with(inner, entry)
    return inner


def check_with(layer, entry: dict):
    """See that a layer has the optional tensors that its entry names; an older file does not say it."""
    if "with" in entry and _with(layer) != entry["with"]:
        raise ValueError(
            f"the optional tensors of {layer!r} must be those that the configuration names, "
            f"{str(entry['with'])[:200]}, got {_with(layer)}"
        )


def spec_of(entry):
    """Preset or spec of a recurrent layer's entry."""
    return entry["preset"] if "preset" in entry else _from_json(entry["spec"])


def _weight_and_bias(kind: str, weights: dict) -> dict:
    if "weight" not in weights or not weights.keys() <= {"weight", "bias"}:
        raise ValueError(f"{kind} must have the tensors weight and bias, got {', '.join(sorted(weights)) or 'none'}")
    return weights


def demo_model() -> Model:
    """The packaged model: a layer-normalised LSTM, 12 -> 64, and a read-out to 9 speakers.

    Trained on Japanese Vowels by examples/japanese_vowels/train.py.

    Returns
    -------
    Model
    """
    with resources.as_file(resources.files("cnorm") / "data" / "demo.safetensors") as path:
        return load(path)
