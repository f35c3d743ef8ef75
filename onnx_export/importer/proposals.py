"""Sizes of open dimensions with which a file can be read that is refused with 1 in their place."""

from __future__ import annotations

from collections.abc import Callable
from time import process_time

import onnx

from onnx_export.importer.dimensions import open_dimensions

__all__ = ["proposals"]

# Frames of audio at common rates, with and without context; bands of spectra; windows. The likely ones first.
SIZES = (512, 576, 160, 256, 320, 480, 80, 40, 64, 257, 128, 400, 640, 960, 1024, 513, 16, 10, 20, 30, 32, 50, 60, 100,
         8, 4, 2, 96, 192, 240, 384, 768, 800, 1280, 1536, 1600, 2048)  # fmt: skip
SECONDS = 6.0  # of processor time
MOST = 3


def proposals(model: onnx.ModelProto, given: dict, read: Callable[..., object]) -> list[str]:
    """Lines for a refusal: sizes of one open dimension, the others being 1, with which the file can be imported.

    The last names the sizes that were tried.

    Parameters
    ----------
    model : onnx.ModelProto
    given : dict
        How the file was read, as arguments of `read`.
    read : callable
        Raises an error if the file has no layers, or they do not compute what it does.
    """
    stored = {tensor.name for tensor in model.graph.initializer}
    varying = {
        value.name: value
        for value in model.graph.input
        if value.name not in stored and value.name not in given["inputs"]
    }
    until, lines, tried = process_time() + SECONDS, [], []
    labels = open_dimensions(varying, given["dims"])
    for size in SIZES:
        for label in labels:
            if len(lines) == MOST or process_time() > until:
                return [*lines, f"sizes tried: {', '.join(map(str, dict.fromkeys(tried)))}"]
            tried.append(size)
            try:
                read(**given | {"dims": given["dims"] | {label: size}})
            except MemoryError:
                raise
            except Exception:  # whatever the file, which is untrusted, does with this size
                continue
            lines.append(f"with dims={{{label!r}: {size}}} it has layers")
    return [*lines, f"sizes tried: {', '.join(map(str, SIZES))}"] if labels else []
