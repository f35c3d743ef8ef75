"""From an exported ONNX file back to the model."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import onnx
import safetensors.numpy
from onnx import numpy_helper

import cnorm
from cnorm.model import METADATA_KEY

__all__ = ["load"]


def load(path) -> cnorm.Model:
    """Read a file that `export` wrote back into a model.

    The weights are the file's initialisers, so float32 files give a model whose steps have the bits of the
    original's. The graph is not looked at: `check_parity` says whether it computes what the model does.

    Parameters
    ----------
    path : str or path-like

    Returns
    -------
    cnorm.Model

    Raises
    ------
    OSError
        If the file cannot be read.
    ValueError
        If it is not such a file; the message says what was expected and what was found.
    """
    onnx_model = onnx.load(path)
    described = {entry.key: entry.value for entry in onnx_model.metadata_props}
    if METADATA_KEY not in described:
        raise ValueError(f"{path} is not an export of cnorm: its metadata has no {METADATA_KEY!r}")
    try:
        whole = json.loads(described[METADATA_KEY])
        configuration = {key: whole[key] for key in ("format", "layers")}
        starts = {row["tensor"]: np.float32(row["initial"]) for row in whole["states"] if "tensor" in row}
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{path}: {METADATA_KEY!r} is not JSON with a format, layers and states") from None
    tensors = {t.name: numpy_helper.to_array(t) for t in onnx_model.graph.initializer} | starts
    # names, layout and configuration are the model file's own, so its reader checks and reads them
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.safetensors")
        safetensors.numpy.save_file(tensors, file, metadata={METADATA_KEY: json.dumps(configuration)})
        try:
            return cnorm.load(file)
        except ValueError as error:
            raise ValueError(str(error).replace(str(file), str(path))) from None
