"""Files from strangers and files for others: safetensors read with care, replacement that is whole or nothing."""

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

    The data is on the disk (fsync of each file, of the folder after) before it takes the place of older data. A link
    stays and its target is replaced. A file that is there keeps its mode, a new one has the umask's. The folder of a
    process that was killed is removed by the next that replaces the same file.

    Raises
    ------
    OSError
        It names `path`. Anything but a regular file is refused, and on any error the older file stays as it was.
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
            raise OSError(errno.EEXIST, "the path is that of something not a regular file")
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


TEMPORARY = ".cnorm-tmp"  # how the name of a folder that `replacing` writes in ends
UNLOCKED_SECONDS = 2.0  # between making a folder and locking it: far less


@contextlib.contextmanager
def _temporary_folder(target: Path):
    """A new folder beside `target`, locked for as long as this process lives; unlocked ones of others are removed."""
    start = f".{target.name[:32]}."
    with contextlib.suppress(OSError):  # a folder that can be written and not read, or is not there: seen below
        for other in os.scandir(target.parent):
            if other.name.startswith(start) and other.name.endswith(TEMPORARY) and other.is_dir(follow_symlinks=False):
                _remove_if_unlocked(other.path)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=start, suffix=TEMPORARY) as folder:
        handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError):  # a file system without locks: nobody removes it either
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield folder
        finally:
            os.close(handle)


def _remove_if_unlocked(folder: str) -> None:
    """Remove a folder of this user's that no living process holds, and that is older than a few seconds."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            status = os.fstat(handle)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # one just made may not be locked yet
            if status.st_uid == os.geteuid() and abs(time.time() - status.st_mtime) > UNLOCKED_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(handle)


def _sync(path) -> None:
    """Wait until a file, or the names in a folder, are on the disk; some file systems sync no folders."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def read_safetensors(path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The tensors and the metadata of a safetensors file that may come from a stranger."""
    raw, metadata = raw_safetensors(path)
    try:
        return {name: array_of(name, tensor) for name, tensor in raw.items()}, metadata
    except ValueError as error:
        raise ValueError(f"{path}: {message_of(error)}") from None


def raw_safetensors(path) -> tuple[dict[str, dict], dict[str, str]]:
    """What `array_of` makes tensors of, and the metadata: of a dtype that NumPy has not, none need be made."""
    data = read_regular(path)
    try:
        found = safetensors.deserialize(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")], object_pairs_hook=each_once)
    except (safetensors.SafetensorError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not a safetensors file that can be read: {message_of(error)}") from None
    return dict(found), header.get("__metadata__") or {}


def array_of(name: str, tensor: dict) -> np.ndarray:
    """A tensor as NumPy has it, bfloat16 widened because NumPy has none."""
    if tensor["dtype"] not in DTYPES:
        raise ValueError(f"tensor {quoted(name)} has dtype {tensor['dtype']}, none of {', '.join(DTYPES)}")
    array = np.frombuffer(tensor["data"], DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
    return (array.astype(np.uint32) << 16).view(np.float32) if tensor["dtype"] == "BF16" else array


def each_once(pairs: list) -> dict:
    """The object of `json.loads`, duplicate keys refused: readers disagree on which of them counts."""
    names = dict(pairs)
    if len(names) != len(pairs):
        raise ValueError("a key is there twice")
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
