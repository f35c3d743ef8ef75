"""Recordings that a model and the file it was made of are compared on, with or without a framework's outputs."""

from __future__ import annotations

import numpy as np

from cnorm.text import clip

__all__ = ["recorded"]


def recorded(path: str, model) -> list[tuple[str, np.ndarray, np.ndarray | None]]:
    """The recordings of an untrusted .npz file: name, x [frames, inputs], and y [frames, outputs] or None.

    An array whose name begins with "y" has the expected outputs of the one that has "x" there: y of x, y_1 of x_1.
    """
    from cnorm.tools.quantize import arrays_of, frames_of  # the commands' reader of .npz files

    arrays = arrays_of(path)
    expected = {name: f"y{name[1:]}" for name in arrays if name.startswith("x") and f"y{name[1:]}" in arrays}
    found = []
    for name in [name for name in arrays if name not in expected.values()]:
        x = frames_of(path, name, arrays[name], model.input_size)
        y = arrays[expected[name]] if name in expected else None
        if y is not None:
            y = frames_of(path, expected[name], y, model.output_size)
        if y is not None and len(y) != len(x):
            raise ValueError(
                f"{path}: {clip(repr(expected[name]), 100)} has {len(y)} frames, {clip(repr(name), 100)} {len(x)}"
            )
        found.append((name, x, y))
    return found
