"""A checkpoint's tensors: check names, shapes and dtypes; bring a cell's into the one order that the kernels take."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from cnorm.specs import GATES, CellSpec, meant, projected, taken_apart


def checked(weights, entries, layer: str) -> tuple[Mapping[str, np.ndarray], dict[str, int]]:
    """Read-only float32 copies of exactly the named arrays, and the sizes that their shapes agree on.

    Parameters
    ----------
    weights : mapping of str to array
    entries : sequence of (name, shape, meaning)
        As in `CellSpec.weights`.
    layer : str
        For messages.
    """
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights of {layer} must be a mapping of names to arrays, got {type(weights).__name__}")
    shapes = {name: shape for name, shape, _ in entries}
    needed = [name for name, _, meaning in entries if not meaning.endswith("?")]
    missing = [name for name in needed if name not in weights]
    extra = [str(name) for name in weights if name not in shapes]
    if missing or extra:
        raise ValueError(
            f"weights of {layer} must be {', '.join(_with_shape(e) for e in entries)}; "
            f"missing: {', '.join(missing) or 'none'}; unknown: {', '.join(extra) or 'none'}"
        )
    arrays = {name: _float32(weights[name], name, layer) for name in shapes if name in weights}
    if not projected(present(entries, arrays)):
        shapes = {name: shape.replace("P", "H") for name, shape in shapes.items()}
    sizes = _sizes(arrays, shapes, layer)
    if "H" in sizes:
        sizes.setdefault("P", sizes["H"])
    return MappingProxyType(arrays), sizes


def present(entries, weights) -> list:
    """The entries of tensors that are there."""
    return [entry for entry in entries if entry[0] in weights]


def optional_tensors(entries, weights, part: str = "") -> list[str]:
    """Names of what a layer may be without, or of such `part`s; a bias of a projection only where there is one.

    The projection itself and the state at the start are not among them: a layer without is the usual case.
    """
    usual = ("weight_p", "h0", "c0") if projected(present(entries, weights)) else ("weight_p", "h0", "c0", "bias_p")
    optional = [(name, meaning) for name, _, meaning in entries if meaning.endswith("?")]
    return [name for name, meaning in optional if meaning.startswith(part) and not meaning.startswith(usual)]


def _with_shape(entry) -> str:
    name, shape, meaning = entry
    return f"{name} [{', '.join(shape.split())}]{' (optional)' if meaning.endswith('?') else ''}"


def _float32(given, name: str, layer: str) -> np.ndarray:
    if isinstance(given, np.ma.MaskedArray):
        raise TypeError(
            f"weights[{name!r}] of {layer} must be a plain array, got a MaskedArray, whose mask would be ignored; "
            f"pass weights[{name!r}].filled(value)"
        )
    try:
        array = np.asarray(given)
    except Exception as error:  # whatever the other library says about a tensor on a GPU, or one with a gradient
        raise TypeError(
            f"weights[{name!r}] of {layer} must be an array that NumPy can read, got {type(given).__name__}: {error}"
        ) from error
    if array.dtype == np.float64:
        raise TypeError(
            f"weights[{name!r}] of {layer} is float64 and the runtime computes in float32: cast it yourself, "
            f"weights[{name!r}].astype('float32')"
        )
    if array.dtype not in (np.float32, np.float16) and array.dtype.name != "bfloat16":
        raise TypeError(f"weights[{name!r}] of {layer} must be float32, float16 or bfloat16, got {array.dtype}")
    copy = np.array(array, dtype=np.float32, order="C", copy=True)
    if not np.isfinite(copy).all():
        raise ValueError(f"weights[{name!r}] of {layer} must be finite, got NaN or infinity")
    copy.flags.writeable = False
    return copy


def _terms(symbol: str) -> list[tuple[int, str]]:
    """ "I+4H" -> [(1, "I"), (4, "H")]; a number is a factor without a letter."""
    return [(int(re.match(r"\d*", term)[0] or 1), term.lstrip("0123456789")) for term in symbol.split("+")]


def length_of(symbol: str, sizes: Mapping[str, int]) -> int:
    """How long an axis is: "4H" is 4 times H."""
    return sum(factor * sizes[letter] for factor, letter in _terms(symbol))


def _sizes(arrays, shapes, layer: str) -> dict[str, int]:
    """The value of each letter; every axis is one equation."""
    equations = []
    for name, array in arrays.items():
        symbols = shapes[name].split()
        if array.ndim != len(symbols):
            raise ValueError(f"weights[{name!r}] of {layer} must have shape [{', '.join(symbols)}], got {array.shape}")
        equations += [(name, _terms(symbol), length) for symbol, length in zip(symbols, array.shape, strict=True)]
    sizes = {"": 1}
    for _ in equations:  # each round solves at least one letter, or none is left
        for _, terms, length in equations:
            unknown = [(factor, letter) for factor, letter in terms if letter not in sizes]
            if len(unknown) == 1:
                factor, letter = unknown[0]
                rest = length - sum(f * sizes[known] for f, known in terms if known in sizes)
                if rest >= factor:
                    sizes[letter] = rest // factor
    for name, terms, length in equations:
        if any(letter not in sizes for _, letter in terms) or length != sum(f * sizes[letter] for f, letter in terms):
            known = ", ".join(f"{letter} = {size}" for letter, size in sizes.items() if letter) or "sizes of at least 1"
            raise ValueError(
                f"weights[{name!r}] of {layer} must have shape [{', '.join(shapes[name].split())}] with "
                f"{known}, got {arrays[name].shape}"
            )
    return sizes


def packed(spec: CellSpec, entries, weights: Mapping[str, np.ndarray], sizes: dict[str, int]) -> dict:
    """A cell's weights as the kernels take them: gates in their order, biases that meet added up.

    Everything is computed in float64 and rounded to float32 once.

    Returns
    -------
    dict
        group (gates that one layer norm covers, 0 for none); weight_x [gates * H, I], weight_h [gates * H, P],
        weight_n [H, H] or None, weight_p [P, H] or None; inside_x, inside_h, gain_x, gain_h, bias [gates * H],
        bias_n, gain_c, bias_c [H], bias_p, h0 [P], c0 [H], each None if there is none.
    """
    parts = _parts(spec, entries, weights, sizes)
    order, units = GATES[spec.kind], sizes["H"]
    group = {"joint": len(order), "per_gate": 1, "gates_and_candidate": 2}[spec.grouping] if spec.scope != "none" else 0

    def gates(part, otherwise=0.0):
        """[gates, H, ...] of a part that may be missing, for all gates or some."""
        found = {gate: parts[part, gate] for gate in order if (part, gate) in parts}
        if not found:
            return None
        blank = np.full(units, otherwise)
        return np.stack([found.get(gate, blank) for gate in order])

    def centred(bias):
        if bias is None:
            return None
        firsts = range(group, len(order), group)
        return np.concatenate([span - span.mean() for span in np.split(bias, firsts)])

    bias = np.zeros((len(order), units))
    for part in ("bias", "bias_x", "bias_h"):
        given = gates(part)
        bias += 0 if given is None else given
    bias_n = parts.get(("bias_h", "n")) if spec.reset == "after" else None
    if bias_n is not None:  # under the reset gate
        bias[order.index("n")] = sum(parts.get((part, "n"), 0) for part in ("bias", "bias_x"))
    constant = {"LSTM": ("f", spec.forget_bias), "GRU": ("z", spec.update_bias), "RNN": ("a", 0.0)}[spec.kind]
    bias[order.index(constant[0])] += constant[1]

    inside = {"x": gates("inside_x"), "h": gates("inside_h")}
    if spec.scope == "sum" and inside["h"] is not None:
        inside = {"x": inside["h"] + (0 if inside["x"] is None else inside["x"]), "h": None}
    ones = np.ones((len(order), units))
    weight_x, weight_h, weight_n = gates("weight_x"), gates("weight_h"), None
    if spec.kind == "GRU" and spec.reset == "before":
        weight_h, weight_n = weight_h[:2], weight_h[2]
    gain_h = gates("gain" if spec.scope == "sum" else "gain_h", 1.0)
    gain_x = gates("gain_x", 1.0)
    result = {
        "weight_x": weight_x, "weight_h": weight_h, "weight_n": weight_n, "weight_p": parts.get(("weight_p", "")),
        "inside_x": centred(inside["x"]), "inside_h": centred(inside["h"]),
        "gain_x": ones if gain_x is None else gain_x, "gain_h": ones if gain_h is None else gain_h, "bias": bias,
        "bias_n": bias_n,
    }  # fmt: skip
    result |= {name: parts.get((name, "")) for name in ("gain_c", "bias_c", "bias_p", "h0", "c0")}
    for name, array in result.items():
        if array is not None:
            if np.abs(array).max() > np.finfo(np.float32).max:  # a constant or a sum: each tensor is finite
                raise ValueError(f"weights of {spec.kind} {spec.name} leave the range of float32 where they add up")
            array = array.reshape(-1, array.shape[-1]) if name.startswith("weight_") else array.reshape(-1)
            result[name] = np.ascontiguousarray(array, np.float32)
    return result | {"group": group}


def _parts(spec: CellSpec, entries, weights, sizes) -> dict[tuple[str, str], np.ndarray]:
    """float64 arrays by (part, gate), matrices with the outputs first; gate "" for what has no gates."""
    parts = {}
    for name, shape, meaning in entries:
        if name not in weights:
            continue
        array = np.float64(weights[name])
        leading, axis, pieces = taken_apart(shape, meaning)
        array = array[0] if leading else array
        if axis is not None:
            ends = np.cumsum([length_of(symbols[axis], sizes) for _, symbols in pieces])
            cut = np.split(array, ends[:-1], axis)
        elif len(pieces) == 1:
            cut = [array]
        else:  # along an axis of their own, or end to end
            cut = array if array.ndim > 1 else array.reshape(len(pieces), -1)
        for piece, (uses, _) in zip(cut, pieces, strict=True):
            for part, letters, turned in meant(uses, spec.gates):
                outputs_first = piece.T if turned else piece
                rows = np.split(outputs_first, len(letters)) if letters else [outputs_first]
                parts |= {(part, gate): its for gate, its in zip(letters or [""], rows, strict=True)}
    return parts
