"""Lists of layers: names, sizes, and what the runtime runs of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import numpy as np

from cnorm.layers.base import INPUT, Layer, Scope
from cnorm.layers.taps import Concat, Slice
from cnorm.text import listed, quoted

UNSEEN = "; names before a Bidirectional layer are not visible behind it"


def chained(layers) -> tuple[Layer, ...]:
    """The layers as a tuple; each must take as many inputs as the layer before has outputs, and be read."""
    if not isinstance(layers, Iterable):
        raise TypeError(f"layers must be a sequence of layers, got {type(layers).__name__}")
    layers = tuple(layers)
    if not layers:
        raise ValueError("layers must have at least one layer, got none")
    for i, layer in enumerate(layers):
        if not isinstance(layer, Layer):
            got = f"the class {layer.__name__}" if isinstance(layer, type) else type(layer).__name__
            raise TypeError(f"layers[{i}] must be a layer such as cnorm.LSTM or cnorm.Linear, got {got}")
    sizes_of(layers)
    return layers


def sizes_of(layers) -> list[int]:
    """The size of the frame, and that of each layer's outputs."""
    size = _frame_size(layers)
    sizes, known, names, before = [size], {INPUT: size}, {INPUT}, INPUT
    for i, layer in enumerate(layers):
        if layer.name in names:
            raise ValueError(f"layers[{i}] must have a name of its own, got {layer.name!r} for the second time")
        for name in layer.reads:
            if name not in known:
                unseen = UNSEEN if name in names else ""
                raise ValueError(
                    f"layers[{i}], {layer!r}, must read one of {listed(known)}, got {quoted(name)}{unseen}"
                )
        if layer.continues and before is not None and before in layer.reads:
            raise ValueError(f"layers[{i}], {layer!r}, must read another layer than the one before it, its own input")
        if layer.input_size is not None and layer.input_size != size:
            raise ValueError(
                f"layers[{i}] must take the {size} outputs of the layers before it, got {layer!r}, "
                f"which takes {layer.input_size}"
            )
        try:
            size = layer.outputs(size, known)
        except ValueError as error:
            raise ValueError(f"layers[{i}], {layer!r}, {error}") from None
        if layer.whole_sequence:
            known = {}
        before = layer.name
        if before is not None:
            names.add(before)
            known[before] = size
        sizes.append(size)
    return sizes


def _frame_size(layers) -> int:
    """The inputs of the first layer with a size, if those before it keep it; else where the last `Slice` of x ends."""
    for i, layer in enumerate(layers):
        if not layer.continues:
            ends = [layer.stop for layer in layers if isinstance(layer, Slice) and layer.of == INPUT]
            if ends:
                return max(ends)
            raise ValueError(
                f"layers[{i}], {layer!r}, must stand behind a layer that takes a frame of a certain size, such as "
                "cnorm.Linear: it does not say how long the frame is"
            )
        if layer.input_size is not None:
            return layer.input_size
    raise ValueError("layers must have a layer with a size, got activations only")


def check_read(layers) -> None:
    """Refuse layers whose outputs nobody reads."""
    places = {layer.name: i for i, layer in enumerate(layers) if layer.name is not None}
    read = {places[name] for layer in layers for name in layer.reads if name != INPUT}
    read |= {i - 1 for i, layer in enumerate(layers) if layer.continues} | {len(layers) - 1}
    for i, layer in enumerate(layers):
        if i not in read:
            raise ValueError(f"layers[{i}], {layer!r}, must have a reader, got none for its outputs")


def with_outputs(layers, outputs) -> tuple[Layer, ...]:
    """The layers that compute a model's frame of outputs: those named `outputs`, concatenated."""
    if not outputs or outputs == (layers[-1].name,):
        return layers
    return (*layers, Concat(outputs))


def named_outputs(layers: tuple[Layer, ...], outputs: Sequence[str]) -> tuple[tuple[Layer, ...], Mapping[str, slice]]:
    """The layers with one that concatenates the named outputs, and where each output then is."""
    if isinstance(outputs, str) or not isinstance(outputs, Iterable):
        raise TypeError(f"outputs must be a sequence of names, got {type(outputs).__name__}")
    outputs, sizes = tuple(outputs), sizes_of(layers)
    named = {layer.name: size for layer, size in zip(layers, sizes[1:], strict=True) if layer.name is not None}
    for name in outputs:
        if name not in named or outputs.count(name) > 1:
            raise ValueError(f"outputs must be names of layers, each once, of {listed(named)}, got {outputs!r:.200}")
    layers = with_outputs(layers, outputs)
    check_read(layers)
    return layers, slices({name: named[name] for name in outputs})


def slices(sizes: Mapping[str, int]) -> Mapping[str, slice]:
    """The slice of each of several concatenated outputs."""
    ends = list(accumulate(sizes.values()))
    return MappingProxyType({name: slice(end - sizes[name], end) for name, end in zip(sizes, ends, strict=True)})


def ends(layers) -> tuple[int, int]:
    """The size of the frame, and of the last layer's outputs."""
    sizes = sizes_of(layers)
    return sizes[0], sizes[-1]


def flat(layers, size: int, frame: str | None = INPUT) -> list[tuple[Any, int]]:
    """The layers as the runtime takes them: (object with `parts`, outputs); `size` and `frame`: of their input."""
    flattened: list[tuple[Any, int]] = []
    scope = Scope({frame: size}, {frame: 0})
    for layer in layers:
        scope.here = len(flattened)
        flattened += layer.flat(size, scope)
        size = flattened[-1][1]
        if layer.name is not None:
            scope.sizes[layer.name], scope.places[layer.name] = size, len(flattened)
    return flattened


def followed(
    name: str, layers: Mapping[str, Layer], x: np.ndarray, run: Callable[[str, Layer, np.ndarray], np.ndarray]
) -> np.ndarray:
    """The outputs [frames, outputs] of layers in order; run(name, layer, x) gives those of one that reads x alone."""
    known = {INPUT: x}
    for key, layer in layers.items():
        x = layer.joined(x, known) if layer.reads else run(f"{name}.{key}", layer, x)
        if layer.name is not None:
            known[layer.name] = x
    return x


def shown(layer: Layer) -> str:
    """A layer with its name, for the repr of a list."""
    return repr(layer) if layer.name is None else f"{layer.name} = {layer!r}"
