"""Load the model from a file that `export` wrote."""

from __future__ import annotations

import json

import numpy as np
from onnx import numpy_helper

from cnorm.files import MAX_FILE_BYTES
from cnorm.loading import model_of
from cnorm.model import Model
from cnorm.model_files import METADATA_KEY
from cnorm.text import quoted
from onnx_export import model_io
from onnx_export.errors import NotExported
from onnx_export.files import EXTERNAL_ABOVE

__all__ = ["load"]

# The file is read in this process, without limits on time and memory. So its size is limited to that of files that
# `export` writes, whose weights are in a second file above EXTERNAL_ABOVE bytes.
_LIMITS = model_io.Limits(
    file_bytes=EXTERNAL_ABOVE + (64 << 20), tensor_bytes=MAX_FILE_BYTES, messages=100_000, nodes=50_000
)
_FOREIGN = (
    "`export` did not write it. Build the layers from the checkpoint's tensors, cnorm.LSTM(tensors, preset=...), and "
    "let check_parity(model, file) prove them (docs/onnx.md, files of others)"
)


def load(path) -> Model:
    """Read a file that `export` wrote back into a model.

    The weights are the file's initialisers, so float32 files give a model whose steps have the bits of the
    original's. The graph is not looked at: `check_parity` says whether it computes what the model does. The file
    is untrusted input: it is measured and checked before it is used.

    Parameters
    ----------
    path : str or path-like

    Returns
    -------
    cnorm.Model

    Raises
    ------
    OSError
        If the file does not exist.
    TypeError
        If `path` is not a path.
    ValueError
        If the file cannot be read for another reason or is not such a file; the message says what was expected and
        what was found.
    """
    try:
        onnx_model = model_io.load(path, external_data=True, metadata_key=METADATA_KEY, limits=_LIMITS)
    except NotExported as error:
        raise NotExported(f"{error}: {_FOREIGN}") from None
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
