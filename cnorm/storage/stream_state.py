"""The state of a stream by names and as bytes, checked; the extension calls this for `cnorm.Stream`.

`arrays`, everywhere: (name, units, offset) of each array in the memory of a state, where the arrays are padded with
zeros. The extension checks that states are finite.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from cnorm.arguments import as_array, has_dtype, quoted, refuse_frames

# Format 3 of Stream.save, little-endian; docs/cells.md has the table, src/rnn/stream.c the same for C:
#     16 bytes  SAVED
#     32 bytes  identity of the model
#      8 bytes  frames, unsigned
#      4 bytes  ARITHMETIC, unsigned
#      4 bytes  for each float of the state: the arrays of `Stream.state` in their order, without padding
#      4 bytes  CRC-32 (zlib's) of all bytes before it
SAVED = b"cnorm stream 3\n\0"
HEAD = 60
ARITHMETIC = 2  # CNORM_ARITHMETIC of cnorm_model.h: its generation, which grows when results change


def checked_state(state, initial: np.ndarray, arrays: tuple) -> np.ndarray:
    """A state by names, checked to have the right names, shapes and dtypes, in the layout of `initial`."""
    expected = [name for name, _, _ in arrays]
    if not hasattr(state, "keys"):
        raise TypeError(f"state must be a mapping of names to arrays, got {type(state).__name__}")
    if set(state.keys()) != set(expected):
        raise ValueError(f"state must have the names {sorted(expected)}, got {quoted(sorted(map(str, state)))}")
    memory = initial.copy()
    for name, units, offset in arrays:
        label = f"state[{name!r}]"
        array = as_array(state[name], label)
        if not has_dtype(array, initial.dtype) or array.shape != (units,):
            refuse_frames(array, label, 1, units)
        memory[offset : offset + units] = array
    return memory


def saved_state(identity: bytes, frames: int, memory: np.ndarray, arrays: tuple) -> bytes:
    """The bytes of `Stream.save`."""
    floats = [memory[offset : offset + units].astype("<f4").tobytes() for _, units, offset in arrays]
    saved = b"".join([SAVED, identity, frames.to_bytes(8, "little"), ARITHMETIC.to_bytes(4, "little"), *floats])
    return saved + zlib.crc32(saved).to_bytes(4, "little")


def restored_state(saved, identity: bytes, initial: np.ndarray, arrays: tuple) -> tuple[np.ndarray, int]:
    """The state, in the layout of `initial`, and the frames that `saved_state` wrote; the bytes are not trusted."""
    if not isinstance(saved, (bytes, bytearray, memoryview)):
        raise TypeError(f"saved must be bytes, got {type(saved).__name__}")
    saved = memoryview(saved).cast("B")
    size = 4 * sum([units for _, units, _ in arrays])
    if saved[: len(SAVED)] != SAVED:
        raise ValueError(
            f"saved must be what Stream.save returned, beginning {SAVED!r}, got {bytes(saved[: len(SAVED)])!r}"
        )
    if len(saved) < HEAD + 4 or zlib.crc32(saved[:-4]) != int.from_bytes(saved[-4:], "little"):
        raise ValueError("saved is not as Stream.save returned it: its checksum does not match")
    if (arithmetic := int.from_bytes(saved[HEAD - 4 : HEAD], "little")) != ARITHMETIC:
        raise ValueError(
            f"saved is of generation {arithmetic} of the arithmetic, whose bits differ from those of generation "
            f"{ARITHMETIC}, which this version computes: load it with the version that wrote it, and hand over the "
            "stream's state()"
        )
    if saved[len(SAVED) : HEAD - 12] != identity:
        raise ValueError("saved is the stream of another model: the hash of configuration and weights differs")
    if len(saved) != HEAD + size + 4:
        raise ValueError(f"saved must hold {size} bytes of state, got {len(saved) - HEAD - 4}")
    memory, start = initial.copy(), HEAD
    for _, units, offset in arrays:
        memory[offset : offset + units] = np.frombuffer(saved, "<f4", units, start)
        start += 4 * units
    return memory, int.from_bytes(saved[HEAD - 12 : HEAD - 4], "little")


def refuse_infinite_state(memory: np.ndarray, arrays: tuple, saved: bool) -> None:
    """A state given by names, or `saved`, that has a NaN or infinity; the message names the first such array."""
    name = next(name for name, units, offset in arrays if not np.isfinite(memory[offset : offset + units]).all())
    if saved:
        raise ValueError(f"saved must hold a finite state, got NaN or infinity in {name}")
    raise ValueError(f"state[{name!r}] must be finite, got NaN or infinity")


def set_states(streams: Sequence, state: Mapping[str, np.ndarray]) -> None:
    """Set the states of the streams, each from the arrays of `state` that have its names."""
    names = [list(stream.state()) for stream in streams]
    wanted = [name for group in names for name in group]
    if not isinstance(state, Mapping):
        raise TypeError(f"state must be a mapping of names to arrays, got {type(state).__name__}")
    if set(state) != set(wanted):
        raise ValueError(f"state must have the names {wanted}, got {sorted(map(repr, state))}"[:1000])
    for stream, group in zip(streams, names, strict=True):
        stream.set_state({name: state[name] for name in group})
