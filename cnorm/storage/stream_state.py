"""The state of a stream by names, checked; the extension calls this for `cnorm.Stream`.

`arrays`, everywhere: (name, units, offset) of each array in the memory of a state, where the arrays are padded with
zeros. The extension checks that states are finite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import numpy as np

from cnorm.arguments import as_array, has_dtype, quoted, refuse_frames

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


def refuse_infinite_state(memory: np.ndarray, arrays: tuple) -> NoReturn:
    """A state given by names that has a NaN or infinity; the message names the first such array."""
    name = next(name for name, units, offset in arrays if not np.isfinite(memory[offset : offset + units]).all())
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
