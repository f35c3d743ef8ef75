"""Load a model from an ONNX file, of `export` or of another program."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec

import numpy as np

from cnorm.arguments import whole_number
from cnorm.model import Model
from cnorm.storage.files import open_regular
from cnorm.storage.loading import model_of
from cnorm.storage.model_files import METADATA_KEY
from cnorm.text import quoted
from onnx_export import child, wire
from onnx_export.errors import NotImported
from onnx_export.importer import Imported
from onnx_export.importer.worker import LIMITS, MOST_BYTES, MOST_MEMORY, MOST_SECONDS, Received

__all__ = ["Received", "imported", "load", "received"]

for _package in ("onnx", "onnxruntime"):  # which the child imports
    if find_spec(_package) is None:
        raise ModuleNotFoundError(f"No module named {_package!r}", name=_package)

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
    outputs: Sequence[str] = (),
    check: bool = True,
    external_data: bool = False,
    timeout: float | None = None,
    memory: int | None = None,
) -> Model:
    """Read an ONNX file into a model: a file that `export` wrote, or a streaming model of another program.

    A file of `export` gives its weights back, so float32 files give a model whose steps have the bits of the
    original's. The model is exported once more to see that the graph is still the one that `export` writes.

    In any other file, a changed one of `export` too, the graph is read. It may be made of LSTM, GRU and RNN operators
    or such cells written out in primitive operators, products, layer norms (native or written out), batch norm,
    activations, sums and products with earlier results, and operators that only move elements. Recurrent state is
    either inputs and outputs, which are paired by what the graph does with their elements, or inside recurrent
    operators that run over a time axis. The model that comes out is compared with the file, step by step, in
    onnxruntime and float64 (`check_parity`).

    The file is untrusted input: it is measured and checked before it is used. Its graph is read, run and compared in a
    child process with limits on time and memory, which costs half a second; the model comes back as the bytes of a
    model file. An unchanged file of `export`, whose graph is not run, is read in this process.

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
        The inputs that are x, besides those that can't be states, because no output has their size. If not given, the
        latter, else one input for which everything fits.
    outputs : sequence of str, optional
        The values that are y, outputs of the file or what a node of it computes; what is only behind them, such as an
        ArgMax, is left out. If not given, all outputs that give no state back.
    check : bool
        Compare the model with the file. Without it the model's repr says that it was not compared.
    external_data : bool
        Also read tensors that lie in other files than NAME.onnx.data and NAME.data. All must lie in the file's folder.
    timeout : float, optional
        Seconds after which the child is ended. If not given, 600, and as many of processor time as a file of its size
        should need: 18, and 10 for each MiB.
    memory : int, optional
        Bytes that the child may map. If not given, 2 GiB, and 64 bytes for each of the file, at most 8 GiB.

    Returns
    -------
    cnorm.Model
        Its frame is the elements of the file's frame, or frames concatenated in the order of the file, y the
        outputs'. Inputs of integers are token ids, where they are the indices of a Gather of a constant table.

    Warns
    -----
    UserWarning
        If a call of the file is one step and keeps no state, which the model's stream carries; or a window of a fixed
        number of frames, after which a stream has to be reset: `model.window` is this number; or the names of states
        pair them otherwise than the graph does; or there are frames without y.

    Raises
    ------
    OSError
        If the file does not exist.
    TypeError
        If `path` is not a path.
    ValueError
        If the file cannot be read, has nodes that no layer computes (the message lists all of them), or computes
        something else than the layers, or ends or exhausts its child process; the message says what was expected and
        what was found.
    """
    given = {"inputs": inputs, "states": states, "dims": dims, "frames": frames, "outputs": outputs}
    limits = {"external_data": external_data, "timeout": timeout, "memory": memory}
    found = imported(path, **given, check=check, **limits)
    if not isinstance(found, Imported):
        return found
    alike = found.time_axis is not None and not (found.window or found.states)  # a stream goes on as the file would
    for note in found.warned if alike else found.notes:
        warnings.warn(f"{path}: {note}", stacklevel=2)
    return found.model


def imported(path, **options) -> Imported | Model:
    """As `load`, with how the file was read if `export` did not write it."""
    found = received(path, **options)
    return found.found if isinstance(found, Received) else found


def received(
    path,
    *,
    check: bool = True,
    external_data: bool = False,
    timeout: float | None = None,
    memory: int | None = None,
    progress: Callable[[str], None] | None = None,
    **given,
) -> Received | Model:
    """What a child process sends of a file: see `Received`. A file of `export` is read here: its model.

    `given` are more arguments of `load`, and for the child "recordings", the path of an .npz file, and "timed".
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be a str or path-like, got {type(path).__name__}")
    wanted = {"recordings": given.pop("recordings", None), "timed": given.pop("timed", False)}
    given = _checked(**given)
    os.stat(path)  # OSError if the file does not exist, like other readers
    if _is_exported(path) and (model := _exported(path)):
        for name in (name for name, value in given.items() if value):
            raise ValueError(f"{name}: {path} was written by `export`, which says them itself")
        return model
    request = {"path": os.fsdecode(path), "given": given, "check": bool(check), "external_data": bool(external_data)}
    request |= {"timeout": timeout, "memory": memory} | wanted
    result = Received(path, progress)
    limits = {"timeout": timeout or MOST_SECONDS, "memory": memory or MOST_MEMORY}
    trouble = child.run("onnx_export.importer.worker:work", request, result.listen, **limits)
    if isinstance(result.error, NotImported):
        raise NotImported(f"{path}: {result.error.summary}", [*result.error.reasons, _BY_HAND])
    if result.error:
        raise result.error
    if trouble or result.found is None:
        how = "a longer time is allowed by timeout=SECONDS, more memory by memory=BYTES"
        raise NotImported(f"{path}: {trouble} while {result.stage}", [how] if "limit" in trouble else [])
    result.found.model.unproven, result.found.model.window = not check, result.found.window
    return result


def _checked(inputs=None, states=None, dims=None, frames=(), outputs=()) -> dict:
    """The arguments of `load` that are sent to the child, as JSON."""
    given = {"inputs": inputs or {}, "states": states or {}, "dims": dims or {}}
    for name, value in given.items():
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise TypeError(f"{name} must be a mapping of names, got {type(value).__name__}")
    if not all(isinstance(name, str) for name in given["states"].values()):
        raise TypeError("states must map names of inputs to names of outputs")
    return {
        "inputs": {name: _numbers(name, value) for name, value in given["inputs"].items()},
        "states": dict(given["states"]),
        "dims": {name: whole_number(size, f"dims[{name!r}]", 1) for name, size in given["dims"].items()},
        "frames": _names("frames", frames),
        "outputs": _names("outputs", outputs),
    }


def _numbers(name: str, value) -> object:
    array = np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise TypeError(f"inputs[{name!r}] must be a number or an array of numbers, got {type(value).__name__}")
    return array.tolist()


def _names(argument: str, names) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{argument} must be a sequence of names, got {names!r:.200}")
    return tuple(names)


def _is_exported(path) -> bool:
    """Whether a file has the metadata of `export`; what else is wrong with it, its reader says."""
    try:
        with open_regular(path) as file:
            size = min(os.fstat(file.fileno()).st_size, MOST_BYTES)
            return any(key == METADATA_KEY for key, _ in wire.metadata(file.read(size)))
    except (ValueError, OSError):
        return False


def _exported(path) -> Model | None:
    """The model that the metadata describes; None if the graph is not what `export` writes of it."""
    from onnx import numpy_helper

    from onnx_export import model_io
    from onnx_export.exporter import is_export

    onnx_model = model_io.load(path, external_data=True, metadata_key=METADATA_KEY, limits=model_io.Limits(**LIMITS))
    text = {entry.key: entry.value for entry in onnx_model.metadata_props}[METADATA_KEY]
    options = _options(text)
    if options.get("portable") is True:
        raise ValueError(
            f"{path}: exported with portable=True, which folds the weights into others: load the model's own file, "
            "or export without it"
        )
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx_model.graph.initializer}
    starts = _starts(path, text)
    for name in starts.keys() & tensors.keys():
        raise ValueError(f"{path}: the state table gives values to {quoted(name)}, which is a weight of the graph")
    model = model_of(path, text, tensors | starts)
    return model if is_export(onnx_model, model, options) else None


def _options(text: str) -> Mapping:
    """The options of `export` that the metadata names, whatever they are."""
    try:
        options = json.loads(text)["options"]
    except (ValueError, KeyError, TypeError, RecursionError):
        options = None
    return options if isinstance(options, dict) else {}


def _starts(path, text: str | None) -> dict[str, np.ndarray]:
    """Learned initial states, which are in the state table, not among the initialisers."""
    try:
        rows = json.loads(text or "{}").get("states", [])
        with np.errstate(over="ignore"):  # an overflow becomes infinity, which the layer refuses
            return {str(row["tensor"]): np.array(row["initial"], np.float32) for row in rows if "tensor" in row}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        raise ValueError(f"{path}: {METADATA_KEY!r} is not JSON with a table of states") from None
