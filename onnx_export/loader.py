"""Load a model from an ONNX file, of `export` or of another program."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np
from onnx import numpy_helper

from cnorm.model import Model
from cnorm.storage.files import MAX_FILE_BYTES
from cnorm.storage.loading import model_of
from cnorm.storage.model_files import METADATA_KEY
from cnorm.text import quoted
from onnx_export import model_io
from onnx_export.errors import NotExported, NotImported
from onnx_export.files import EXTERNAL_ABOVE
from onnx_export.importer import Imported, import_model

__all__ = ["imported", "load"]

# The file is read in this process, without limits on time and memory. So its size is limited to that of files that
# `export` writes, whose weights are in a second file above EXTERNAL_ABOVE bytes.
_LIMITS = model_io.Limits(
    file_bytes=EXTERNAL_ABOVE + (64 << 20), tensor_bytes=MAX_FILE_BYTES, messages=100_000, nodes=50_000
)

_BY_HAND = (
    "by hand: build the layers from the checkpoint's tensors, cnorm.LSTM(tensors, preset=...), and let "
    "check_parity(model, file) prove them (docs/onnx.md, files of others)"
)


def load(
    path,
    *,
    inputs: Mapping[str, object] | None = None,
    states: Mapping[str, str] | None = None,
    dims: Mapping[str, int] | None = None,
    frames: Sequence[str] = (),
    check: bool = True,
) -> Model:
    """Read an ONNX file into a model: a file that `export` wrote, or a streaming model of another program.

    A file of `export` gives its weights back, so float32 files give a model whose steps have the bits of the
    original's. Its graph is not looked at: `check_parity` says whether it computes what the model does.

    In any other file the graph is read. It may be made of LSTM, GRU and RNN operators or such cells written out in
    primitive operators, products, layer norms (native or written out), batch norm, activations, sums and products with
    earlier results, and operators that only move elements. Recurrent state is either inputs and outputs, which are
    paired by what the graph does with their elements, or inside recurrent operators that run over a time axis. The
    model that comes out is compared with the file, step by step, in onnxruntime and float64 (`check_parity`).

    The file is untrusted input: it is measured and checked before it is used.

    Parameters
    ----------
    path : str or path-like
    inputs : mapping of str to number or array, optional
        Values of inputs that are the same for every frame, such as a sampling rate.
    states : mapping of str to str, optional
        Input to output, for states where more than one pairing fits.
    dims : mapping of str to int, optional
        Sizes of symbolic dimensions; the others are taken as 1.
    frames : sequence of str, optional
        The inputs that are x. If not given, those that can't be states, because no output has their size, else one
        input for which everything fits.
    check : bool
        Compare the model with the file. Without it the model's repr says that it was not compared.

    Returns
    -------
    cnorm.Model
        Its frame is the elements of the file's frame, or frames one behind another in the order of the file, y the
        outputs'. Inputs of integers are token ids, where they are the indices of a Gather of a constant table.

    Raises
    ------
    OSError
        If the file does not exist.
    TypeError
        If `path` is not a path.
    ValueError
        If the file cannot be read, has nodes that no layer computes (the message lists all of them), or computes
        something else than the layers; the message says what was expected and what was found.
    """
    found = imported(path, inputs=inputs, states=states, dims=dims, frames=frames, check=check)
    return found.model if isinstance(found, Imported) else found


def imported(path, *, inputs=None, states=None, dims=None, frames=(), check=True) -> Imported | Model:
    """As `load`, with how the file was read if `export` did not write it."""
    given: dict = {"inputs": inputs or {}, "states": states or {}, "dims": dims or {}}
    for name, value in given.items():
        if not isinstance(value, Mapping):
            raise TypeError(f"{name} must be a mapping of names, got {type(value).__name__}")
    given = {name: dict(value) for name, value in given.items()} | {"frames": _names(frames)}
    try:
        onnx_model = model_io.load(path, external_data=True, metadata_key=METADATA_KEY, limits=_LIMITS)
    except NotExported:
        onnx_model = model_io.load(path, external_data=True, limits=_LIMITS)
        try:
            found = import_model(onnx_model, **given, check=check)
        except NotImported as error:
            raise NotImported(f"{path}: {error.summary}", [*error.reasons, _BY_HAND]) from None
        found.model.unproven = not check
        return found
    for name in (name for name, value in given.items() if value):
        raise ValueError(f"{name}: {path} was written by `export`, which says them itself")
    return _exported(path, onnx_model)


def _names(frames) -> tuple[str, ...]:
    if isinstance(frames, str) or not isinstance(frames, Sequence) or not all(isinstance(name, str) for name in frames):
        raise TypeError(f"frames must be a sequence of names, got {frames!r:.200}")
    return tuple(frames)


def _exported(path, onnx_model) -> Model:
    text = {entry.key: entry.value for entry in onnx_model.metadata_props}[METADATA_KEY]
    if _portable(text):
        raise ValueError(
            f"{path}: exported with portable=True, which folds the weights into others: load the model's own file, "
            "or export without it"
        )
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx_model.graph.initializer}
    starts = _starts(path, text)
    for name in starts.keys() & tensors.keys():
        raise ValueError(f"{path}: the state table gives values to {quoted(name)}, which is a weight of the graph")
    return model_of(path, text, tensors | starts)


def _portable(text: str) -> bool:
    try:
        return json.loads(text).get("portable") is True
    except (ValueError, AttributeError, RecursionError):
        return False  # `model_of` raises the error


def _starts(path, text: str | None) -> dict[str, np.ndarray]:
    """Learned initial states, which are in the state table, not among the initialisers."""
    try:
        rows = json.loads(text or "{}").get("states", [])
        with np.errstate(over="ignore"):  # an overflow becomes infinity, which the layer refuses
            return {str(row["tensor"]): np.array(row["initial"], np.float32) for row in rows if "tensor" in row}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        raise ValueError(f"{path}: {METADATA_KEY!r} is not JSON with a table of states") from None
