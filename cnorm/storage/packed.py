"""Packed models: files in the layout of the kernels, mapped into memory and used where they lie. docs/embedding.md."""

from __future__ import annotations

import json
import mmap

import numpy as np

from cnorm import _core
from cnorm.cells.presets import PRESETS
from cnorm.layers import KINDS
from cnorm.storage.files import open_regular
from cnorm.storage.model_files import outputs_from, window_from
from cnorm.text import message_of

__all__ = ["c_array", "from_bytes", "mapped", "outputs_of", "packed_file", "summary", "unchanged_bytes"]

MAGIC = b"\x89cnorm\r\n"
DIRECTIONS = {1: ["streamed"], 2: ["forward", "backward"]}  # by the number of networks that run side by side


def mapped(path) -> _core.PackedModel | None:
    """The packed model of a file, mapped into memory; None if the file does not begin as one."""
    with open_regular(path) as file:
        if file.read(len(MAGIC)) != MAGIC:
            return None
        data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    try:
        return _core.PackedModel(data)
    except ValueError as error:
        raise ValueError(f"{path}: not a packed model that can be used: {message_of(error)}") from None


def from_bytes(data: bytes) -> _core.PackedModel:
    """The packed model in bytes, which may come from an untrusted source."""
    return _core.PackedModel(np.frombuffer(data, np.uint8))


def unchanged_bytes(packed: _core.PackedModel) -> bytes:
    """The bytes of a packed model's file; ValueError if it was written over since it was opened."""
    data = packed.file.tobytes()
    try:
        copy = from_bytes(data)
        copy.verify()
        if (copy.identity, copy.configuration) != (packed.identity, packed.configuration):
            raise ValueError("it is another model now")
    except ValueError as error:
        raise ValueError(
            f"the packed file was changed after it was loaded, and its model with it: {message_of(error)}; "
            "replace a mapped file, don't write over it"
        ) from None
    return data


def packed_file(configuration: str, parts, identity: bytes) -> bytes:
    """The packed file of a model; `parts` are its networks, two of them for a bidirectional layer."""
    networks = [network for part in parts for network in part]
    directions = [direction for part in parts for direction in DIRECTIONS[len(part)]]
    return _core.pack_model(networks, directions, identity, configuration.encode())


def outputs_of(packed: _core.PackedModel, size: int) -> tuple[dict[str, int], int | None]:
    """Names and sizes of the outputs that a packed model's configuration, which is untrusted, names, `size` in all, and
    the frames of its window.
    """
    try:
        whole = json.loads(packed.configuration)
    except (ValueError, RecursionError):
        whole = None
    if not isinstance(whole, dict):
        return {}, None
    sizes = outputs_from(whole)
    if sizes and sum(sizes.values()) != size:
        raise ValueError(f"outputs must have {size} elements in all, got {str(sizes)[:200]}")
    return sizes, window_from(whole)


def summary(text: bytes) -> str:
    """The layers that an untrusted configuration names: kinds and presets that cnorm knows, "?" for others."""
    try:
        entries = json.loads(text)["layers"]
        return ", ".join(map(_named, entries[:6])) + (f", ... {len(entries) - 6} more" if len(entries) > 6 else "")
    except (ValueError, KeyError, TypeError, RecursionError):
        return "?"


def _named(entry) -> str:
    kind, preset = entry["type"], entry.get("preset")
    if kind not in KINDS:
        return "?"
    return f"{kind} {preset}" if isinstance(preset, str) and (kind, preset) in PRESETS else kind


def c_array(data: bytes, name: str) -> str:
    """C source of a constant array of these bytes, aligned as `cnorm_model_open` needs it; C11 and C++11."""
    rows = (", ".join(map(str, data[i : i + 24])) for i in range(0, len(data), 24))
    return (
        "/* A packed cnorm model, for cnorm_model_open; written by `cnorm pack --c-array`. */\n"
        "#ifdef __cplusplus\nalignas(64)\n#else\n_Alignas(64)\n#endif\n"
        f"static const unsigned char {name}[{len(data)}] = {{\n" + ",\n".join(rows) + "};\n"
    )
