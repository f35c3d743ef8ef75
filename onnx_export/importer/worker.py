"""The import in a child process: `work` reads the file there, `received` takes here what it sends.

Nothing of the file but its names, and the layers as a model file, which is read as any other, comes back.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import asdict, fields
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from cnorm.storage.files import MAX_FILE_BYTES, read_safetensors
from cnorm.storage.loading import model_of
from cnorm.storage.model_files import METADATA_KEY, saved
from onnx_export import child
from onnx_export.errors import NotImported, Refused, Unreadable
from onnx_export.importer import Imported, import_model
from onnx_export.parity_report import ParityReport

__all__ = ["Received", "work"]

MOST_BYTES = (1 << 30) + (64 << 20)  # of a file: `export` writes more than 1 GiB of weights to a second one
LIMITS = {"file_bytes": MOST_BYTES, "tensor_bytes": MAX_FILE_BYTES, "messages": 100_000, "nodes": 50_000}
CALLS = 300  # timed steps
# What a child may take unless its caller says otherwise: so much, and for each byte of the file so much more.
MEMORY, MEMORY_OF_A_BYTE = 2 << 30, 64
SECONDS, SECONDS_OF_A_MIB = 18, 10  # of processor time
MOST_SECONDS, MOST_MEMORY = 600.0, 8 << 30
_RAISED = {kind.__name__: kind for kind in (Refused, Unreadable, TypeError, ValueError, OSError)}
_KEPT = ("model", "file", "report")  # attributes of Imported that are not sent as JSON


class Received:
    """What a child has sent so far.

    Attributes
    ----------
    found : Imported or None
    runs : list of ndarray
        The file's outputs for each recording.
    step : float or None
        Microseconds of a step of the file in onnxruntime.
    """

    def __init__(self, path, progress=None) -> None:
        self._path, self._progress, self.stage = path, progress, "start"
        self.found: Imported | None = None
        self.error: Exception | None = None
        self.runs: list[np.ndarray] = []
        self.step: float | None = None

    def listen(self, kind: str, value: Any, data: bytes) -> None:
        if kind == "stage":
            self.stage = str(value)
            if self._progress:
                self._progress(self.stage)
        elif kind == "refused":
            name, text, reasons = value
            self.error = _RAISED[name](text) if name in _RAISED else NotImported(text, reasons)
        elif kind == "found":
            self.found = self._imported(value, data)
        elif kind == "run":
            self.runs.append(np.frombuffer(data, np.float32).reshape(value))
        elif kind == "step":
            self.step = float(value)

    def _imported(self, sent: Mapping, data: bytes) -> Imported:
        tensors, metadata = read_safetensors(self._path, data)
        model = model_of(self._path, metadata.get(METADATA_KEY), tensors)
        given = {name: tuple(value) if isinstance(value, list) else value for name, value in sent["given"].items()}
        report = sent["report"] and ParityReport.from_dict(sent["report"])
        return Imported(model=model, report=report, **given)


# -------------------------------------------------------------------------------------------- in the child


def work(request: Mapping, emit) -> None:
    """Read and prove the file of a request, run recordings through it and time it, and send what comes of it."""
    try:
        found = _found(request, partial(emit, "stage"))
        _send(found, request, emit)
    except NotImported as error:
        emit("refused", [type(error).__name__, error.summary, error.reasons])
    except (OSError, TypeError, ValueError) as error:
        kind = next(name for name, kind in _RAISED.items() if isinstance(error, kind))
        emit("refused", [kind, str(error), []])
    except MemoryError:
        raise
    except Exception as error:
        text = f"a fault of cnorm, please report it with the file ({type(error).__name__}: {error})"
        emit("refused", [NotImported.__name__, text, []])


def _found(request: Mapping, stage) -> Imported:
    from onnx_export import model_io

    stage("reading the file")
    limits = model_io.Limits(**LIMITS)
    onnx_model = model_io.load(request["path"], external_data=request["external_data"], limits=limits)
    size = onnx_model.ByteSize()
    if request["memory"] is None:
        child.lower(resource.RLIMIT_AS, MEMORY + MEMORY_OF_A_BYTE * size)
    if request["timeout"] is None:
        child.lower(resource.RLIMIT_CPU, SECONDS + SECONDS_OF_A_MIB * (size >> 20))
    return import_model(onnx_model, check=request["check"], stage=stage, **request["given"])


def _send(found: Imported, request: Mapping, emit) -> None:
    given = {field.name: getattr(found, field.name) for field in fields(found) if field.name not in _KEPT}
    report = found.report and asdict(found.report)
    emit("found", {"given": given, "report": report}, saved(found.model.layers, found.model.outputs))
    if request["recordings"]:
        emit("stage", "running the recordings")
    for ran in _runs(found, request["recordings"]):
        emit("run", ran.shape, np.ascontiguousarray(ran, np.float32).tobytes())
    if request["timed"] and found.time_axis is None:
        emit("stage", "timing the file")
        emit("step", _step_of(found))


def _runs(found: Imported, npz: str | None):
    """The file's outputs for each recording."""
    from onnx_export.importer.recorded import recorded
    from onnx_export.ort import CannotRun

    for name, x, _ in recorded(npz, found.model) if npz else ():
        steps = found.file.steps
        if found.time_axis is not None and steps is not None and len(x) != steps:
            raise ValueError(f"{npz}: recording {name!r} has {len(x)} frames, the file takes {steps}")
        try:
            yield found.file.run(np.ascontiguousarray(x, np.float32))
        except CannotRun as error:
            raise ValueError(f"onnxruntime does not run the file on recording {name!r}: {error}") from None


def _step_of(found: Imported) -> float:
    """The median of a step of the file in onnxruntime, in microseconds."""
    from cnorm.layers.embedding import in_tokens

    frames = np.random.default_rng(0).standard_normal((CALLS, found.model.input_size)).astype(np.float32)
    frames, states = in_tokens(frames, found.model.tokens), found.file.zeros(found.states)
    times = []
    for frame in frames:
        start = perf_counter()
        found.file.call(frame, states)
        times.append(perf_counter() - start)
    return median(times) * 1e6
