"""Recurrent layers from the checkpoints of other frameworks: state dicts and safetensors files. No pickle is read."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from cnorm.cells.hints import also, of_names
from cnorm.cells.presets import PRESETS
from cnorm.cells.specs import INITIAL, CellSpec
from cnorm.cells.tensors import optional_tensors
from cnorm.cells.weights import as_array
from cnorm.layers import CELLS, Bidirectional
from cnorm.layers.base import Layer
from cnorm.layers.cells import check_with, checked_eps, spec_of
from cnorm.storage.files import array_of, each_once, raw_safetensors
from cnorm.storage.model_files import METADATA_KEY
from cnorm.text import listed, message_of, quoted

__all__ = ["from_safetensors", "from_torch"]


def from_torch(
    source: Any,
    preset: str | CellSpec,
    *,
    kind: str | None = None,
    prefix: str = "",
    eps: float | None = None,
    bias: bool | None = None,
    only: bool = False,
) -> tuple[Layer, ...]:
    """Recurrent layers from a PyTorch module or state dict.

    A state dict does not say which equations its cell has: cells with the same names and shapes can differ (see
    docs/cells.md). So the caller names the preset, and only its names and shapes can be checked; `Model.check` compares
    outputs.

    Parameters
    ----------
    source : module or mapping of str to tensor or array
        A module is asked for its state_dict(). float32; float16 and bfloat16 are widened.
    preset : str or CellSpec
        A preset's name such as "torch", or a spec.
    kind : {"LSTM", "GRU", "RNN"}, optional
        Needed if a preset of that name exists for more than one kind.
    prefix : str
        The beginning of the tensors' names. Every tensor whose name begins so must belong to the layers. ``{layer}`` in
        it stands for the number 0, 1, ... of a layer in a stack: ``"rnn.layers.{layer}.cell."``.
    eps : float, optional
        As for `cnorm.LSTM`.
    bias : bool, optional
        Whether the checkpoint has the biases, and any other tensors, that are optional in the spec; a projection and
        the initial state are optional in either case. True: all of them must be there. False: none may be. If not
        given, the attribute `bias` of a module such as torch.nn.LSTM, else True. So a missing bias is an error, never
        taken for zeros.
    only : bool
        False: a prefix such as "rnn.0." is refused if the checkpoint has the same cell under "rnn.1." too, because
        "rnn.{layer}." reads them all. True: read the layer of this prefix and leave the others out.

    Returns
    -------
    tuple of layers
        One for each layer of the checkpoint, for `cnorm.Model`; a `cnorm.Bidirectional` where it has reverse weights.

    Raises
    ------
    TypeError
        For another type or dtype.
    ValueError
        For an unknown or ambiguous preset, or names and shapes that are not the preset's; the message lists what was
        expected and what was found.

    Examples
    --------
    >>> import cnorm, torch
    >>> model = cnorm.Model(cnorm.from_torch(torch.nn.GRU(40, 128, num_layers=2), "torch", kind="GRU"))
    """
    if hasattr(source, "state_dict"):
        own = getattr(source, "bias", None)  # a bool in torch.nn.LSTM; other modules may have a tensor of this name
        bias = own if bias is None and isinstance(own, bool) else bias
        _check_nonlinearity(source, _spec(preset, kind))
        source = source.state_dict()
    if not isinstance(source, Mapping):
        raise TypeError(f"source must be a module or a mapping of names to tensors, got {type(source).__name__}")
    tensors = {str(name): tensor for name, tensor in source.items()}
    return _layers(tensors, _array, _spec(preset, kind), prefix, eps=eps, bias=bias, only=only)


def from_safetensors(
    path: str | os.PathLike[str],
    preset: str | CellSpec,
    *,
    kind: str | None = None,
    prefix: str = "",
    eps: float | None = None,
    bias: bool | None = None,
    only: bool = False,
) -> tuple[Layer, ...]:
    """Recurrent layers from a safetensors file of another framework; parameters as `from_torch`.

    Parameters
    ----------
    path : str or path-like
        Checked as by `cnorm.load`. A file that `cnorm.Model.save` wrote also describes its cells: it is refused if
        their spec or eps differs from the one asked for.

    Returns
    -------
    tuple of layers
        As `from_torch`.

    Raises
    ------
    OSError
        If the file can't be read.
    TypeError, ValueError
        As `from_torch`.
    """
    tensors, metadata = raw_safetensors(path)
    spec = _spec(preset, kind)
    try:
        said = []
        if METADATA_KEY in metadata:
            said = _same_cells(metadata[METADATA_KEY], prefix, spec, checked_eps(eps, spec))
        layers = _layers(tensors, array_of, spec, prefix, eps=eps, bias=bias, only=only)
        for layer, entry in zip(layers, said, strict=False):
            check_with(layer, entry)
        return layers
    except ValueError as error:
        raise ValueError(f"{path}: {message_of(error)}") from None


def _same_cells(text: str, prefix: str, spec: CellSpec, eps: float | None) -> list[dict]:
    """Check that the cells that a model file has under the prefix are of this spec and eps; return their entries."""
    try:
        whole = json.loads(text, object_pairs_hook=each_once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{METADATA_KEY!r} does not describe layers: {error}") from None
    try:
        entries = [cell for i, entry in enumerate(whole["layers"]) for cell in _cells(entry, f"layers.{i}.")]
        said = [(start, _spec(spec_of(entry), entry["type"]), entry) for start, entry in entries]
    except (KeyError, TypeError, RecursionError):
        raise ValueError(f"{METADATA_KEY!r} does not describe layers") from None
    said = [one for one in said if re.match(_pattern(prefix), one[0])]
    if not said:
        raise ValueError(f"this cnorm model has no recurrent layer under {prefix!r}: read it with cnorm.load")
    names = [field.name for field in fields(spec) if field.name not in ("name", "source")]
    for start, its, entry in said:
        pairs = [(name, getattr(its, name), getattr(spec, name)) for name in names]
        pairs.append(("the layer's eps", entry.get("eps"), eps))
        differing = [f"{name} is {theirs!r}, not {ours!r}" for name, theirs, ours in pairs if theirs != ours]
        if differing:
            differing = [one for one in differing if not one.startswith("weights is ")] or differing  # a page long
            raise ValueError(
                f"{start.rstrip('.')} was saved as {its.kind} {its.name} and is not the {spec.kind} {spec.name} asked "
                f"for: {'; '.join(differing)}; read it with cnorm.load"
            )
    return [entry for _, _, entry in said]


def _cells(entry: dict, start: str):
    """(prefix of its tensors' names, entry) for each recurrent layer in an entry of a model file."""
    if entry["type"] in CELLS:
        yield start, entry
    elif entry["type"] == "Residual":
        for i, inner in enumerate(entry["layers"]):
            yield from _cells(inner, f"{start}{i}.")
    elif entry["type"] == "Bidirectional":
        for way in ("forward", "backward"):
            yield from _cells(entry[way], f"{start}{way}.")


def _check_nonlinearity(module, spec: CellSpec) -> None:
    """Compare a torch.nn.RNN's attribute `nonlinearity` with the preset's activation; its tensors do not tell it."""
    its = getattr(module, "nonlinearity", None)
    if spec.kind == "RNN" and its in ("tanh", "relu") and its != spec.activation:
        raise ValueError(f"the module's nonlinearity is {its!r}, that of the preset {spec.name!r} {spec.activation!r}")


def _array(name: str, tensor) -> np.ndarray:
    """A NumPy array of a tensor of a state dict."""
    try:
        return as_array(tensor)
    except Exception as error:  # such as a tensor without data, or of a dtype that NumPy lacks
        raise TypeError(f"source[{quoted(name)}] must be a tensor that NumPy can read: {message_of(error)}") from error


def _spec(preset, kind) -> CellSpec:
    if not isinstance(kind, str | None):
        raise TypeError(f"kind must be a str or None, got {type(kind).__name__}")
    if not isinstance(preset, str | CellSpec):
        raise TypeError(f"preset must be a name or a CellSpec, got {type(preset).__name__}")
    if kind is not None and kind not in CELLS:
        raise ValueError(f"kind must be one of {', '.join(CELLS)}, or None, got {kind!r}")
    if isinstance(preset, CellSpec):
        if kind not in (None, preset.kind):
            raise ValueError(f"kind must be that of the spec, {preset.kind}, or None, got {kind!r}")
        return preset
    kinds = [k for k, name in PRESETS if name == preset and kind in (None, k)]
    if not kinds:
        names = ", ".join(sorted({name for k, name in PRESETS if kind in (None, k)}))
        raise ValueError(f"preset must be one of {names}{f' for {kind}' if kind else ''}, got {preset!r}")
    if len(kinds) > 1:
        raise ValueError(f"kind must be given: there is a preset {preset!r} for {', '.join(kinds)}")
    return PRESETS[kinds[0], preset]


def _pattern(prefix: str) -> str:
    if not isinstance(prefix, str):
        raise TypeError(f"prefix must be a str, got {type(prefix).__name__}")
    return re.escape(prefix).replace(r"\{layer\}", r"\d+")


def _layers(tensors: dict, array, spec: CellSpec, prefix: str, *, eps, bias, only):
    """The layers whose tensors' names begin with the prefix; `array(name, tensor)` converts a tensor to NumPy."""
    bias = True if bias is None else bias
    for name, value in (("bias", bias), ("only", only)):
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True, False{' or None' if name == 'bias' else ''}, got {value!r}")
    pattern = re.compile(_pattern(prefix))
    left = {name: array(name, tensor) for name, tensor in tensors.items() if pattern.match(name)}
    if not left:
        raise ValueError(f"no tensor has a name that begins with {prefix!r}; {_found(tensors, spec, prefix)}")
    layers = []
    while not layers or _has(left, spec, prefix, len(layers), False):
        ways = [_take(left, spec, prefix, len(layers), reverse) for reverse in (False, True)]
        ways = [weights for weights in ways if weights is not None]
        try:
            ways = [CELLS[spec.kind](weights, preset=spec, eps=eps) for weights in ways]
        except ValueError as error:
            if all(weights.keys() >= _needed(spec) for weights in ways):
                raise
            raise ValueError(f"{error}; {_found(tensors, spec, prefix)}") from None
        for way in ways:
            _check_optional(way, bias)
        layers.append(ways[0] if len(ways) == 1 else Bidirectional(*ways))
    for name in _shared(spec, prefix):
        if name in left and len(left.pop(name)) != len(layers):
            raise ValueError(f"{name} must have a row for each of the {len(layers)} layers found")
    if left:
        raise ValueError(
            f"the {len(layers)} layers of {spec.kind} {spec.name} found under {prefix!r} leave over "
            f"{listed(sorted(left))}: give a longer prefix, or this is another cell"
        )
    if not only:
        _refuse_siblings(tensors, spec, prefix, len(layers))
    return tuple(layers)


def _refuse_siblings(names, spec: CellSpec, prefix: str, layers: int) -> None:
    """Refuse if the same cell is also found under a prefix that differs from this one in a single number."""
    read = {prefix.replace("{layer}", str(layer)) for layer in range(layers)}
    others = _prefixes(names, spec) - read
    for match in re.finditer(r"(?<![^./_])[0-9]+(?![^./_])", prefix):
        start, end = re.escape(prefix[: match.start()]), re.escape(prefix[match.end() :])
        if siblings := {other for other in others if re.fullmatch(f"{start}[0-9]+{end}", other)}:
            together = f"{prefix[: match.start()]}{{layer}}{prefix[match.end() :]}"
            raise ValueError(
                f"prefix {prefix!r} leaves out the same cell under {listed(map(repr, sorted(siblings)))}: "
                f"prefix={together!r} reads all of them as a stack, only=True this one alone"
            )


def _needed(spec: CellSpec) -> set[str]:
    """Names of the tensors that are not optional, as in a checkpoint of a single layer."""
    return {tensor.named().name for tensor in spec.tensors if not tensor.optional}


def _prefixes(names, spec: CellSpec) -> set[str]:
    """The prefixes under which all mandatory tensors of a layer of the spec are found."""
    needed, found = _needed(spec), set()
    for form in (needed, {_of_cell(name, spec) for name in needed}):
        first = min(form)
        starts = {name.removesuffix(first) for name in names if name.endswith(first)}
        found |= {start for start in starts if all(start + name in names for name in form)}
    return found


def _found(names, spec: CellSpec, prefix: str) -> str:
    """Text for messages: the names of a checkpoint, and the prefixes under which a layer of the spec is found."""
    fitting = _prefixes(names, spec) - {prefix}
    for start in sorted(fitting):  # "rnn.0." and "rnn.1." as "rnn.{layer}."
        for match in re.finditer(r"(?<![^./_])0(?![^./_])", start):
            stack = (start[: match.start()], start[match.end() :])
            members = {other for other in fitting if re.fullmatch("[0-9]+".join(map(re.escape, stack)), other)}
            if len(members) > 1:
                fitting = (fitting - members) | {"{layer}".join(stack)}
    advice = of_names(name for name in names if re.match(_pattern(prefix), name))
    if fitting and not advice:
        advice = f"prefixes that would fit: {listed(map(repr, sorted(fitting)))}"
    return also(f"the names are {listed(sorted(names))}", advice)


def _check_optional(layer, bias: bool):
    """Check that all optional biases, and other optional tensors, of the spec are there if `bias`, else none."""
    optional = [tensor.name for tensor in optional_tensors(layer.tensors, layer.weights)]
    having = [name for name in optional if name in layer.weights]
    if bias and len(having) < len(optional):
        raise ValueError(
            f"missing: {', '.join(name for name in optional if name not in having)} of a {layer.kind} "
            f"{layer.spec.name}; give bias=False if the checkpoint has no bias"
        )
    if having and not bias:
        raise ValueError(f"bias must not be False: the checkpoint has {', '.join(having)}")


def _names(spec: CellSpec, prefix: str, layer: int, reverse: bool) -> dict[str, str]:
    """The names of a layer's tensors in the checkpoint -> those in a checkpoint of a single layer; with h0 and c0."""
    start, number = prefix.replace("{layer}", str(layer)), 0 if "{layer}" in prefix else layer
    tensors = (*spec.tensors, *INITIAL[spec.kind])
    return {start + tensor.named(number, reverse).name: tensor.named().name for tensor in tensors}


def _of_cell(name: str, spec: CellSpec) -> str:
    """The same tensor's name in torch.nn.LSTMCell and GRUCell, which has no layer number."""
    return name.replace("_l0", "") if spec.name in ("torch", "torch_relu") else name


def _shared(spec: CellSpec, prefix: str) -> set[str]:
    """Names of tensors that hold a row for each layer of the stack."""
    numbered = any("{layer}" in tensor.name or "{even}" in tensor.name for tensor in spec.tensors)
    return {prefix + tensor.name for tensor in spec.tensors if numbered and tensor.leading}


def _has(tensors, spec, prefix, layer: int, reverse: bool) -> bool:
    """Whether the checkpoint has a tensor of this layer and direction that the first layer does not share."""
    own = _names(spec, prefix, layer, reverse).keys()
    if layer or reverse:
        own = own - _names(spec, prefix, 0, False).keys()
    return any(name in tensors or _of_cell(name, spec) in tensors for name in own)


def _take(left: dict, spec: CellSpec, prefix: str, layer: int, reverse: bool) -> dict | None:
    """The weights of one layer and direction, removed from `left`; None where there is no reverse direction."""
    if reverse and not _has(left, spec, prefix, layer, True):
        return None
    weights = {}
    for name, own in _names(spec, prefix, layer, reverse).items():
        if name not in left and not reverse:
            name = _of_cell(name, spec)
        if name in _shared(spec, prefix) and name in left:
            weights[own] = left[name][layer : layer + 1] if left[name].ndim else left[name]
        elif name in left:
            weights[own] = left.pop(name)
    return weights
