"""Reading untrusted safetensors files, and replacing files atomically."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

import numpy as np
import safetensors

from cnorm.text import message_of, quoted

__all__ = [
    "MAX_FILE_BYTES",
    "array_of",
    "is_safetensors",
    "kind_of",
    "open_regular",
    "raw_safetensors",
    "read_safetensors",
    "replaces",
    "replacing",
    "write_whole",
]

MAX_FILE_BYTES = 4 << 30
DTYPES = {f"{kind.upper()}{8 * size}": f"<{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)}
DTYPES |= {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "BOOL": "?"}


def write_whole(path, data: bytes) -> None:
    """Write a file atomically: it appears whole or not at all, see `replacing`."""
    with replacing(path) as file:
        file.write_bytes(data)


@contextlib.contextmanager
def replacing(path):
    """Yield a path in a new temporary folder to write to; then move all files of that folder to the folder of `path`.

    Each file is synced to the disk (fsync) before it replaces an older one, and the folder after. If `path` is a
    symbolic link, the link stays and its target is replaced. A file that is replaced keeps its mode, a new one gets
    that of the umask. If a process is killed, the next one that replaces the same file removes its temporary folder.

    Raises
    ------
    OSError
        Its message names `path`. Anything but a regular file is refused; on any error the older file is unchanged.
    """
    path = decoded(path)
    try:
        if os.path.basename(path) in ("", os.curdir, os.pardir):  # else "new/" would be a file "new"
            raise OSError(errno.EISDIR, "the path is that of a folder")
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            mode = None
        if mode is not None and not stat.S_ISREG(mode):
            folder = stat.S_ISDIR(mode)
            raise OSError(
                errno.EISDIR if folder else errno.EEXIST,
                "a folder, not a regular file" if folder else "not a regular file",
            )
        target = Path(os.path.realpath(path))
        with _temporary_folder(target) as folder:
            yield Path(folder, target.name)
            names = sorted(os.listdir(folder), key=target.name.__eq__)  # the file last: it may need the others
            for name in names:
                if mode is not None:
                    os.chmod(Path(folder, name), stat.S_IMODE(mode) & 0o777)
                _sync(Path(folder, name))
            for name in names:
                os.replace(Path(folder, name), target.with_name(name))
            _sync(target.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), path) from None


def replaces(path: str | os.PathLike, other: str | os.PathLike) -> bool:
    """Whether writing `path` would replace `other`; the files need not exist, and may be links to each other."""
    try:
        if os.path.exists(path) and os.path.exists(other):
            return os.path.samefile(path, other)
        return os.path.realpath(path) == os.path.realpath(other)
    except (OSError, ValueError):  # not a valid path, for example with a NUL in it
        return False


TEMPORARY = ".cnorm-tmp"  # suffix of the temporary folders of `replacing`
UNLOCKED_SECONDS = 2.0  # a folder is locked much sooner after its creation: an older unlocked one is abandoned


@contextlib.contextmanager
def _temporary_folder(target: Path):
    """A new folder beside `target`, locked while it is in use; folders that killed processes left are removed."""
    start = f".{target.name[:32]}."
    with contextlib.suppress(OSError):  # it may be unreadable, or missing, which the next statement reports
        for other in os.scandir(target.parent):
            if other.name.startswith(start) and other.name.endswith(TEMPORARY) and other.is_dir(follow_symlinks=False):
                _remove_if_unlocked(other.path)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=start, suffix=TEMPORARY) as folder:
        handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError):  # no locks on this file system: no process can remove it either
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield folder
        finally:
            os.close(handle)


def _remove_if_unlocked(folder: str) -> None:
    """Remove a folder of this user that no living process has locked and that is older than `UNLOCKED_SECONDS`."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            status = os.fstat(handle)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # a folder that was made just now may not be locked yet
            if status.st_uid == os.geteuid() and abs(time.time() - status.st_mtime) > UNLOCKED_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(handle)


def _sync(path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk; some file systems can't sync folders."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def read_safetensors(path, data: bytes | None = None) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The tensors and the metadata of an untrusted safetensors file; of its bytes where they are given."""
    raw, metadata = raw_safetensors(path, data)
    try:
        return {name: array_of(name, tensor) for name, tensor in raw.items()}, metadata
    except ValueError as error:
        raise ValueError(f"{path}: {message_of(error)}") from None


def raw_safetensors(path, data: bytes | None = None) -> tuple[dict[str, dict], dict[str, str]]:
    """The tensors of an untrusted safetensors file, not yet converted by `array_of`, and the metadata.

    So a tensor of a dtype that NumPy lacks does no harm unless it is used.
    """
    data = read_regular(path) if data is None else data
    try:
        found = safetensors.deserialize(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")], object_pairs_hook=each_once)
    except (safetensors.SafetensorError, ValueError, TypeError, RecursionError) as error:
        onnx = "perhaps ONNX, which cnorm.load reads" if data.startswith(b"\x08") else ""
        kind = "" if is_safetensors(data) else kind_of(data) or onnx
        reason = f"it is {kind}" if kind else message_of(error)
        raise ValueError(f"{path} is not a safetensors file that can be read: {reason}") from None
    return dict(found), header.get("__metadata__") or {}


_PICKLE = "a pickle, which is not read, as it can run code"
# How a file begins, what else is in its first or last 64 kB, what it is, and who reads it; the first that fits counts.
KINDS = (
    (b"\x89cnorm\r\n", b"", "a packed model, which cnorm.load reads"),
    (b"PK\3\4", b"/code/__torch__", "TorchScript: examples/models/policy.py reads a policy's layers out of one"),
    (
        b"PK\3\4",
        b"data.pkl",
        "a file of torch.save: load it with torch; cnorm.Model takes a module, cnorm.from_torch a dict",
    ),
    (b"PK\3\4", b"model.weights.h5", "a Keras model: give cnorm.from_keras what keras.saving.load_model reads of it"),
    (b"PK\3\4", b".npy", "a file of numpy.savez"),
    (b"PK\3\4", b"", "a zip archive, such as torch.save, numpy.savez and Keras write"),
    (b"\x89HDF", b"", "an HDF5 file: read it with Keras, and give cnorm.from_keras the model"),
    (b"\x93NUMPY", b"", "a file of numpy.save"),
    *((start, b"", _PICKLE) for start in (b"\x80\2", b"\x80\3", b"\x80\4", b"\x80\5")),
    (b"{", b'"architecture"', "JSON as of a .nam file: examples/models/amplifier.py reads one of an LSTM"),
    (b"{", b'"in_shape"', "JSON as RTNeural reads it: give cnorm.from_keras the Keras model that it was written of"),
    (b"{", b"", "JSON"),
)


def kind_of(data: bytes) -> str:
    """What a file is and who reads it, by its first bytes; "" if they are not known, or are as of ONNX."""
    if not data:
        return "empty"
    if is_safetensors(data):
        return "a safetensors file, which cnorm.load reads"
    ends = data[: 1 << 16] + data[-(1 << 16) :]
    return next((kind for start, inside, kind in KINDS if data.startswith(start) and inside in ends), "")


def is_safetensors(data: bytes) -> bool:
    """Whether a file begins with the length of a header, which may be damaged, and JSON."""
    return data[8:9] == b"{" and int.from_bytes(data[:8], "little") <= 100_000_000


def array_of(name: str, tensor: dict) -> np.ndarray:
    """A tensor of `raw_safetensors` as a NumPy array; bfloat16, which NumPy lacks, is widened to float32."""
    if tensor["dtype"] not in DTYPES:
        raise ValueError(f"tensor {quoted(name)} has dtype {tensor['dtype']}, none of {', '.join(DTYPES)}")
    array = np.frombuffer(tensor["data"], DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
    return (array.astype(np.uint32) << 16).view(np.float32) if tensor["dtype"] == "BF16" else array


def each_once(pairs: list) -> dict:
    """object_pairs_hook for `json.loads` that rejects duplicate keys: JSON readers disagree on which one wins."""
    names = dict(pairs)
    if len(names) != len(pairs):
        raise ValueError("duplicate key")
    return names


def decoded(path) -> str:
    """The path as a str; anything that is not a path is refused."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(f"path must be a str or path-like, got {type(path).__name__}")
    return os.fsdecode(path)


def open_regular(path):
    """A regular file, opened for reading; the path may name anything else, which is refused."""
    # O_NONBLOCK: opening a FIFO must not wait for a writer
    handle = os.open(decoded(path), os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        folder = stat.S_ISDIR(os.fstat(handle).st_mode)
        os.close(handle)
        raise ValueError(f"{path} is {'a folder, ' if folder else ''}not a regular file")
    return os.fdopen(handle, "rb")


def read_regular(path) -> bytes:
    """The content of a regular file of at most `MAX_FILE_BYTES`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_FILE_BYTES:
            raise ValueError(f"{path} has {size} bytes, more than the {MAX_FILE_BYTES} that are read")
        return file.read(size)
