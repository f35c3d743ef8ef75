"""The model file: convert layers to tensors and a JSON configuration, and back. `cnorm.model` calls this."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from types import MappingProxyType

import numpy as np

from cnorm.files import each_once
from cnorm.layers import GRU, LSTM, RNN, Activation, Bidirectional, Layer, LayerNorm, Linear, Residual, cell_spec
from cnorm.presets import PRESETS
from cnorm.rounded import cell_weights, is_matrix, rows_from_tensors
from cnorm.specs import spec_from_json
from cnorm.stream_state import ARITHMETIC
from cnorm.text import listed

__all__ = ["METADATA_KEY", "check_with", "configuration", "identity", "layers_from", "named_tensors", "spec_of"]

METADATA_KEY = "cnorm.model"
FORMAT = 1
MAX_LAYERS = 10_000
CELLS = {"LSTM": LSTM, "GRU": GRU, "RNN": RNN}


def configuration(layers) -> str:
    """The configuration of the layers, all that their tensors do not tell, as JSON."""
    return json.dumps({"format": FORMAT, "layers": [_entry(layer) for layer in layers]})


def _entry(layer) -> dict:
    """The configuration of one layer."""
    entry = {"type": layer.kind} | ({"rows": list(layer.rows)} if layer.rows else {})
    if isinstance(layer, (LSTM, GRU, RNN)):
        preset = PRESETS.get((layer.kind, layer.spec.name)) == layer.spec
        entry |= {"preset": layer.spec.name} if preset else {"spec": dataclasses.asdict(layer.spec)}
        if layer.eps is not None:
            entry["eps"] = layer.eps
        if with_ := _with(layer):
            entry["with"] = with_
    elif isinstance(layer, LayerNorm):
        entry["eps"] = layer.eps
    elif isinstance(layer, Activation):
        entry["function"] = layer.function
    elif isinstance(layer, Residual):
        entry["layers"] = [_entry(inner) for inner in layer.layers]
    elif isinstance(layer, Bidirectional):
        entry |= {"forward": _entry(layer.forward), "backward": _entry(layer.backward)}
    return entry | ({"without": list(layer.absent_biases)} if layer.absent_biases else {})


def _with(layer) -> list[str]:
    """Names of the optional tensors that a cell has, except biases: "without" lists the biases that it lacks."""
    return [t.name for t in layer.tensors if t.optional and not t.is_bias() and t.name in layer.weights]


def named_tensors(layers) -> dict[str, np.ndarray]:
    """All weights by their names in the file: ``layers.<i>.<name>``."""
    return {f"layers.{i}.{name}": array for i, layer in enumerate(layers) for name, array in _tensors_of(layer)}


def _tensors_of(layer):
    """Yield (name, array) of one layer; names of inner layers' tensors have a prefix."""
    if isinstance(layer, Residual):
        inner = {str(i): one for i, one in enumerate(layer.layers)}
    elif isinstance(layer, Bidirectional):
        inner = {"forward": layer.forward, "backward": layer.backward}
    else:
        matrices = _matrices(layer) if layer.rows else ()
        yield from ((name, array) for name, array in layer.weights.items() if name not in matrices)
        for name, matrix in layer.rows.items():
            yield f"rows.{name}", matrix.rows
            if matrix.scales is not None:
                yield f"rows.{name}.scales", matrix.scales
        return
    for prefix, one in inner.items():
        for name, array in _tensors_of(one):
            yield f"{prefix}.{name}", array


def _matrices(layer) -> tuple[str, ...]:
    """Names of the tensors that a rounded layer's rows replace in the file."""
    return ("weight",) if isinstance(layer, Linear) else tuple(t.name for t in layer.tensors if is_matrix(t))


def identity(layers) -> bytes:
    """SHA-256 of the arithmetic's generation, the configuration and all tensors.

    Tensors in the order of their names, in little-endian float32.
    """
    digest = hashlib.sha256(f"arithmetic {ARITHMETIC}\n{configuration(layers)}".encode())
    for name, array in sorted(named_tensors(layers).items()):
        digest.update(f"{name}{array.shape}".encode())
        digest.update(array.astype("<f4").tobytes())
    return digest.digest()


def layers_from(text: str | None, tensors: dict[str, np.ndarray]) -> list[Layer]:
    """The layers of a configuration and its tensors, both untrusted; ValueError if they do not fit."""
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
    return [_layer(*pair) for pair in zip(entries, _shares(tensors, len(entries), "layers."), strict=True)]


def _count(entries: list) -> int:
    """The number of layers in a configuration, nested ones included."""
    nested = (entry["layers"] for entry in entries if isinstance(entry, dict) and isinstance(entry.get("layers"), list))
    return len(entries) + sum(map(_count, nested))


def _shares(tensors: dict, layers: int | tuple, start: str = "") -> list[dict]:
    """The tensors of each layer, numbered or named, with the layer's prefix removed; no tensor may be left over."""
    shares = {f"{start}{layer}.": {} for layer in (range(layers) if isinstance(layers, int) else layers)}
    left = []
    for name, tensor in tensors.items():
        prefix = name[: name.find(".", len(start)) + 1]
        if prefix in shares:
            shares[prefix][name.removeprefix(prefix)] = tensor
        else:
            left.append(name)
    if left:
        raise ValueError(f"tensors that no layer takes: {listed(sorted(left))}")
    return list(shares.values())


def _layer(entry, weights):
    """The layer of one entry; the names in `weights` have no prefix."""
    kind = entry["type"] if isinstance(entry, dict) and isinstance(entry.get("type"), str) else None
    if kind in (*CELLS, "Linear") and "rows" in entry:
        return _rounded(kind, entry, weights)
    rest = set(entry) - {"type", "without", *(["with"] if kind in CELLS else [])} if kind else set()
    inner = None
    if kind in CELLS and rest - {"eps"} in ({"preset"}, {"spec"}):
        inner = CELLS[kind](weights, preset=spec_of(entry), eps=entry.get("eps"))
        weights = {}
    elif kind == "Linear" and not rest:
        inner, weights = Linear(**_weight_and_bias(kind, weights)), {}
    elif kind == "LayerNorm" and rest == {"eps"}:
        inner, weights = LayerNorm(**_weight_and_bias(kind, weights), eps=entry["eps"]), {}
    elif kind == "Activation" and rest == {"function"}:
        inner = Activation(entry["function"])
    elif kind == "Residual" and rest == {"layers"} and isinstance(entry["layers"], list):
        inner, weights = Residual(map(_layer, entry["layers"], _shares(weights, len(entry["layers"])))), {}
    elif kind == "Bidirectional" and rest == {"forward", "backward"}:
        ways = ("forward", "backward")
        inner, weights = Bidirectional(*map(_layer, map(entry.get, ways), _shares(weights, ways))), {}
    if inner is None:
        raise ValueError(f"unknown layer in the configuration: {str(entry)[:200]}")
    if weights:
        raise ValueError(f"tensors that {kind} does not take: {listed(sorted(weights))}")
    if list(inner.absent_biases) != entry.get("without", []):
        raise ValueError(
            f"the biases that {inner!r} is without must be those that the configuration names, "
            f"{str(entry.get('without', []))[:200]}, got {list(inner.absent_biases)}"
        )
    check_with(inner, entry)
    return inner


def _rounded(kind: str, entry: dict, weights: dict):
    """The layer of an entry with rounded matrices."""
    rows = rows_from_tensors(weights, entry["rows"])
    names = {f"rows.{name}{end}" for name in rows for end in ("", ".scales")}
    others = {name: array for name, array in weights.items() if name not in names}
    if kind == "Linear":
        if rows.keys() != {"weight"} or "weight" in others:
            raise ValueError(f"the matrix of a rounded Linear must be rows.weight, got {sorted(rows)}")
        filled = others | {"weight": rows["weight"].values()}
    else:
        spec = cell_spec(kind, spec_of(entry))
        tensors = [tensor.named() for tensor in spec.tensors]
        if twice := [t.name for t in tensors if is_matrix(t) and t.name in others]:
            raise ValueError(f"tensors stored both whole and as rows: {', '.join(twice)}")
        filled = cell_weights(spec, tensors, rows, others)
    layer = _layer({key: value for key, value in entry.items() if key != "rows"}, filled)
    layer.rows = MappingProxyType(rows)
    return layer


def check_with(layer, entry: dict):
    """Check that a layer has the optional tensors that its entry lists; older files have no such list."""
    if "with" in entry and _with(layer) != entry["with"]:
        raise ValueError(
            f"the optional tensors of {layer!r} must be those that the configuration names, "
            f"{str(entry['with'])[:200]}, got {_with(layer)}"
        )


def spec_of(entry):
    """Preset or spec of a recurrent layer's entry."""
    if not entry.keys() & {"preset", "spec"}:
        raise ValueError(f"a recurrent layer must have a preset or a spec, got {str(entry)[:200]}")
    return entry["preset"] if "preset" in entry else spec_from_json(entry["spec"])


def _weight_and_bias(kind: str, weights: dict) -> dict:
    if "weight" not in weights or not weights.keys() <= {"weight", "bias"}:
        raise ValueError(f"{kind} must have the tensors weight and bias, got {listed(sorted(weights))}")
    return weights
