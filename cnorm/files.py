"""Files from strangers and files for others: safetensors read with care, replacement that is whole or nothing."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import tempfile
from pathlib import Path

import numpy as np
import safetensors

__all__ = ["MAX_FILE_BYTES", "array_of", "raw_safetensors", "read_safetensors", "replacing", "write_whole"]

MAX_FILE_BYTES = 4 << 30
DTYPES = {f"{kind.upper()}{8 * size}": f"<{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)}
DTYPES |= {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "BOOL": "?"}


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
    path = decoded(path)
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


def read_safetensors(path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The tensors and the metadata of a safetensors file that may come from a stranger."""
    raw, metadata = raw_safetensors(path)
    try:
        return {name: array_of(name, tensor) for name, tensor in raw.items()}, metadata
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def raw_safetensors(path) -> tuple[dict[str, dict], dict[str, str]]:
    """What `array_of` makes tensors of, and the metadata: of a dtype that NumPy has not, none need be made."""
    data = read_regular(path)
    try:
        found = safetensors.deserialize(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")], object_pairs_hook=each_once)
    except (safetensors.SafetensorError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not a safetensors file that can be read: {error}") from None
    return dict(found), header.get("__metadata__") or {}


def array_of(name: str, tensor: dict) -> np.ndarray:
    """A tensor as NumPy has it, bfloat16 widened because NumPy has none."""
    if tensor["dtype"] not in DTYPES:
        raise ValueError(f"tensor {name!r} has dtype {tensor['dtype']}, none of {', '.join(DTYPES)}")
    array = np.frombuffer(tensor["data"], DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
    return (array.astype(np.uint32) << 16).view(np.float32) if tensor["dtype"] == "BF16" else array


def each_once(pairs: list) -> dict:
    """Of a JSON object: a name twice would mean what its reader likes."""
    names = dict(pairs)
    if len(names) != len(pairs):
        raise ValueError("a name is there twice")
    return names


def decoded(path) -> str:
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(f"path must be a str or path-like, got {type(path).__name__}")
    return os.fsdecode(path)


def read_regular(path) -> bytes:
    # O_NONBLOCK: opening a FIFO must not wait for a writer
    handle = os.open(decoded(path), os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        raise ValueError(f"{path} is not a regular file")
    with os.fdopen(handle, "rb") as file:
        if status.st_size > MAX_FILE_BYTES:
            raise ValueError(f"{path} has {status.st_size} bytes, more than the {MAX_FILE_BYTES} that are read")
        return file.read(status.st_size)
