"""The model file: convert layers to tensors and a JSON configuration, and back. `cnorm.model` calls this."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import safetensors.numpy

from cnorm.cells.rounded import rows_from_tensors
from cnorm.layers import KINDS
from cnorm.layers.base import Layer, name_of, with_name, with_type
from cnorm.storage.files import each_once
from cnorm.storage.stream_state import ARITHMETIC
from cnorm.text import listed

__all__ = [
    "METADATA_KEY",
    "configuration",
    "identity",
    "layers_from",
    "named_tensors",
    "outputs_from",
    "saved",
    "window_from",
]

METADATA_KEY = "cnorm.model"
FORMAT = 1
MAX_LAYERS = 10_000
MAX_WINDOW = 2**31 - 1  # frames


def configuration(layers, outputs: Mapping[str, slice] = MappingProxyType({}), window: int | None = None) -> str:
    """The configuration of a model, all that the tensors of its layers do not tell, as JSON."""
    named = {"outputs": {name: at.stop - at.start for name, at in outputs.items()}} if outputs else {}
    named |= {"window": window} if window else {}
    return json.dumps({"format": FORMAT, "layers": [with_type(layer) for layer in layers]} | named)


def saved(layers, outputs: Mapping[str, slice], window: int | None = None) -> bytes:
    """A model as the bytes of a safetensors file."""
    text = configuration(layers, outputs, window)
    return safetensors.numpy.save(named_tensors(layers), metadata={METADATA_KEY: text})


def named_tensors(layers) -> dict[str, np.ndarray]:
    """All weights by their names in the file: ``layers.<i>.<name>``."""
    return {f"layers.{i}.{name}": array for i, layer in enumerate(layers) for name, array in _tensors_of(layer)}


def _tensors_of(layer):
    """Yield (name, array) of one layer; names of inner layers' tensors have a prefix."""
    for prefix, one in layer.inner().items():
        for name, array in _tensors_of(one):
            yield f"{prefix}.{name}", array
    replaced = layer.replaced() if layer.rows else ()
    yield from ((name, array) for name, array in layer.weights.items() if name not in replaced)
    for name, matrix in layer.rows.items():
        yield f"rows.{name}", matrix.rows
        if matrix.scales is not None:
            yield f"rows.{name}.scales", matrix.scales


def identity(layers, outputs: Mapping[str, slice]) -> bytes:
    """SHA-256 of the arithmetic's generation, the configuration and all tensors.

    Tensors in the order of their names, in little-endian float32.
    """
    digest = hashlib.sha256(f"arithmetic {ARITHMETIC}\n{configuration(layers, outputs)}".encode())
    for name, array in sorted(named_tensors(layers).items()):
        digest.update(f"{name}{array.shape}".encode())
        digest.update(array.astype("<f4").tobytes())
    return digest.digest()


def outputs_from(whole: Mapping) -> dict[str, int]:
    """Names and sizes of the outputs of an untrusted configuration."""
    sizes = whole.get("outputs", {})
    if not isinstance(sizes, dict) or not all(type(size) is int and size > 0 for size in sizes.values()):
        raise ValueError(f"outputs must be an object of names and sizes, got {str(sizes)[:200]}")
    return {name_of(name, "a name of outputs"): size for name, size in sizes.items()}


def window_from(whole: Mapping) -> int | None:
    """The frames of a window that an untrusted configuration names."""
    window = whole.get("window")
    if window is not None and (type(window) is not int or not 0 < window <= MAX_WINDOW):
        raise ValueError(f"window must be a number of frames from 1 to {MAX_WINDOW}, got {str(window)[:200]}")
    return window


def layers_from(text: str | None, tensors: dict[str, np.ndarray]) -> tuple[list[Layer], dict[str, int], int | None]:
    """The layers of a configuration and its tensors, names and sizes of outputs, and the window; ValueError if they do
    not fit.

    Both are untrusted.
    """
    if text is None:
        raise ValueError(
            f"not a cnorm model, of Model.save: the metadata has no {METADATA_KEY!r}; cnorm.from_safetensors reads "
            "checkpoints of other frameworks"
        )
    try:
        whole = json.loads(text, object_pairs_hook=each_once)
        version, entries = whole["format"], whole["layers"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{METADATA_KEY!r} is not JSON with a format and layers") from None
    if version != FORMAT:
        raise ValueError(f"the file has format {version!r}; this version reads format {FORMAT}")
    if not isinstance(entries, list):
        raise ValueError(f"layers must be a list, got {str(entries)[:200]}")
    if (count := _count(entries)) > MAX_LAYERS:
        raise ValueError(f"layers must have at most {MAX_LAYERS} entries, nested ones included, got {count}")
    return (
        _read({str(i): entry for i, entry in enumerate(entries)}, tensors, "layers."),
        outputs_from(whole),
        window_from(whole),
    )


def _count(entries: list) -> int:
    """The number of layers in a configuration, nested ones included."""
    nested = (entry["layers"] for entry in entries if isinstance(entry, dict) and isinstance(entry.get("layers"), list))
    return len(entries) + sum(map(_count, nested))


def _read(entries: dict, tensors: dict, start: str = "") -> list[Layer]:
    """The layers of entries by name, and their tensors, whose names begin with `start` and the layer's name."""
    shares = {f"{start}{name}.": {} for name in entries}
    left = []
    for name, tensor in tensors.items():
        prefix = name[: name.find(".", len(start)) + 1]
        if prefix in shares:
            shares[prefix][name.removeprefix(prefix)] = tensor
        else:
            left.append(name)
    if left:
        raise ValueError(f"tensors that no layer takes: {listed(sorted(left))}")
    return [_layer(*pair) for pair in zip(entries.values(), shares.values(), strict=True)]


def _layer(entry, weights):
    """The layer of one entry; the names in `weights` have no prefix."""
    kind = KINDS.get(entry["type"]) if isinstance(entry, dict) and isinstance(entry.get("type"), str) else None
    if kind is None:
        raise ValueError(f"unknown layer in the configuration: {str(entry)[:200]}")
    options = {key: value for key, value in entry.items() if key not in ("type", "name", "without", "rows")}
    rows = None
    if "rows" in entry:
        rows = rows_from_tensors(weights, entry["rows"])
        names = {f"rows.{name}{end}" for name in rows for end in ("", ".scales")}
        weights = kind.filled(options, rows, {name: array for name, array in weights.items() if name not in names})
    layer = kind.from_entry(options, weights, _read)
    if layer is None:
        raise ValueError(f"unknown layer in the configuration: {str(entry)[:200]}")
    if weights and not (layer.weights or layer.inner()):
        raise ValueError(f"tensors that {layer.kind} does not take: {listed(sorted(weights))}")
    if list(layer.absent_biases) != entry.get("without", []):
        raise ValueError(
            f"the biases that {layer!r} is without must be those that the configuration names, "
            f"{str(entry.get('without', []))[:200]}, got {list(layer.absent_biases)}"
        )
    if rows is not None:
        layer.rows = MappingProxyType(rows)
    return with_name(layer, entry.get("name"))
