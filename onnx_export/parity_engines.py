"""The engines that `check_parity` compares, with one interface: x [T, B, inputs], states [B, units] -> y, states."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx
from onnx import TensorProto

from cnorm.text import clip, printable
from onnx_export.float64 import Float64
from onnx_export.graph.sizes import shape_of
from onnx_export.ort import CannotRun, Session
from onnx_export.runtimes import runners

__all__ = ["CnormEngine", "Float64Engine", "Interface", "OrtEngine", "RuntimeEngine", "interface"]

_DTYPES = {TensorProto.FLOAT: np.dtype(np.float32), TensorProto.FLOAT16: np.dtype(np.float16)}


@dataclass(frozen=True)
class Interface:
    """The interface of a file in form "step" or "sequence".

    Attributes
    ----------
    sequence : bool
        Whether x is [T, B, inputs] rather than [B, inputs].
    frames : int or None
        Steps in one call, None for any number.
    open_batch : bool
        Whether one call takes any number of rows.
    dtype : numpy dtype
        Type of all inputs and outputs.
    states : dict of str to int
        "h0", ...: the names of the states' inputs and outputs without _in and _out, and their units.
    parts : mapping of str to slice
        The model's named outputs, which the file gives beside y, as parts of it.
    """

    sequence: bool
    frames: int | None
    open_batch: bool
    dtype: np.dtype
    states: dict[str, int]
    parts: Mapping[str, slice] = field(default_factory=dict)

    def feeds(self, x: np.ndarray, states) -> dict[str, np.ndarray]:
        """The inputs of the file by name, from x [T, B, inputs] and the states."""
        return {"x": x if self.sequence else x[0]} | {f"{name}_in": states[name] for name in self.states}

    def results(self, values, steps: int, rows: int) -> dict[str, np.ndarray]:
        """The outputs as y [T, B, outputs] and the next states [B, units]; ValueError for other shapes."""
        found = dict(values)
        for name, array in found.items():
            of_steps = name == "y" or name in self.parts
            leading = (steps, rows) if of_steps else (rows,)
            fits = array.ndim > 1 and array.size == np.prod(leading, dtype=int) * array.shape[-1]
            units = self.states.get(name.removesuffix("_out"))
            fits = fits and array.shape[-1] == (units or array.shape[-1])
            if not fits or (of_steps and self.sequence and array.shape[:-1] != leading):
                wanted = ", ".join(map(str, (*leading, units or "size")))
                raise ValueError(f"onnx_model must give {name} [{wanted}], got shape {array.shape}")
            found[name] = array.reshape(*leading, array.shape[-1])
        for name, at in self.parts.items():
            if found.pop(name).tobytes() != np.ascontiguousarray(found["y"][..., at]).tobytes():
                raise ValueError(f"onnx_model must give {name} as elements {at.start} to {at.stop} of y")
        return found


def interface(
    onnx_model: onnx.ModelProto,
    input_size: int,
    states: dict[str, int],
    parts: Mapping[str, slice] = MappingProxyType({}),
) -> Interface:
    """The interface of a file, checked against the sizes of a model.

    Parameters
    ----------
    onnx_model : onnx.ModelProto
    input_size : int
    states : dict of str to int
        Name and units of each state.
    parts : mapping of str to slice
        The model's named outputs.

    Raises
    ------
    ValueError
        For other names, types, numbers of axes or sizes.
    """
    stored = {tensor.name for tensor in onnx_model.graph.initializer}
    inputs = {value.name: value for value in onnx_model.graph.input if value.name not in stored}
    outputs = {value.name: value for value in onnx_model.graph.output}
    for kind, found, first, suffix in (("inputs", inputs, "x", "_in"), ("outputs", outputs, "y", "_out")):
        wanted = [first, *(f"{name}{suffix}" for name in states)]
        if set(found) - (parts.keys() if kind == "outputs" else set()) != set(wanted):
            got = clip(printable(", ".join(found)))
            raise ValueError(f"onnx_model must have the {kind} {', '.join(wanted)}, got {got}")
    types = {value.type.tensor_type.elem_type for value in (*inputs.values(), *outputs.values())}
    if len(types) != 1 or not types <= _DTYPES.keys():
        names = sorted(TensorProto.DataType.Name(t) if t in TensorProto.DataType.values() else str(t) for t in types)
        raise ValueError(f"onnx_model must be all float32 or all float16, got {', '.join(names)}")
    x = _shape(inputs["x"])
    if len(x) not in (2, 3):
        raise ValueError(f"onnx_model must have x [batch, size] or [T, batch, size], got {x}")
    for name, shape, size in [("x", x, input_size)] + [
        (f"{name}_in", _shape(inputs[f"{name}_in"]), units) for name, units in states.items()
    ]:
        if name != "x" and len(shape) != 2:
            raise ValueError(f"onnx_model must have {name} [batch, {size}], got {shape}")
        if shape[-2] not in (1, None) or shape[-1] not in (size, None):
            raise ValueError(f"onnx_model must have {name} [..., 1 or an open batch, {size}], got {shape}")
    frames = 1 if len(x) == 2 else x[0]
    if frames is not None and frames < 1:
        raise ValueError(f"onnx_model must take at least one step, got x {x}")
    open_batch = all(_shape(value)[-2] is None for value in inputs.values())
    return Interface(
        len(x) == 3,
        frames,
        open_batch,
        _DTYPES[types.pop()],
        dict(states),
        {name: at for name, at in parts.items() if name in outputs},
    )


def _shape(value: onnx.ValueInfoProto) -> list[int | None]:
    return list(shape_of(value.type) or ())


class Float64Engine:
    """The file's graph in float64."""

    def __init__(self, onnx_model: onnx.ModelProto, given: Interface):
        self._given = given
        with _reasons():
            self._graph = Float64(onnx_model)

    def call(self, x: np.ndarray, states, vary=None) -> dict[str, np.ndarray]:
        """One call; `vary` as of `Float64.run`."""
        with _reasons():
            found = self._graph.run(self._given.feeds(x, states), vary=vary)
        return self._given.results(found.items(), *x.shape[:2])


@contextmanager
def _reasons():
    """Turn any exception of the evaluator into a ValueError: the file is untrusted input."""
    try:
        yield
    except Exception as error:
        reason = clip(printable(f"{type(error).__name__}: {error}"), 300)
        raise ValueError(f"onnx_model: the float64 evaluation of the graph fails: {reason}") from None


class OrtEngine:
    """The file in onnxruntime at one optimisation level."""

    def __init__(self, onnx_model: onnx.ModelProto, given: Interface, level: str):
        self._given, self._level = given, level
        self._names = ["y", *(f"{name}_out" for name in given.states), *given.parts]
        try:
            self._session = Session(onnx_model, level)
        except CannotRun as error:
            raise ValueError(f"onnx_model: onnxruntime does not load it: {printable(str(error))}") from None

    def call(self, x: np.ndarray, states) -> dict[str, np.ndarray]:
        dtype = self._given.dtype
        feeds = self._given.feeds(x.astype(dtype), {name: array.astype(dtype) for name, array in states.items()})
        try:
            found = self._session.run(self._names, feeds)
        except CannotRun as error:
            shapes = f"x {list(feeds['x'].shape)} at optimisation {self._level!r}"
            raise ValueError(
                f"onnx_model: onnxruntime does not run it with {shapes}: {printable(str(error))}"
            ) from None
        return self._given.results(zip(self._names, found, strict=True), *x.shape[:2])


class RuntimeEngine:
    """The file in another runtime (`runtimes.runners`), in a child process of its own that ends with this one."""

    def __init__(self, onnx_model: onnx.ModelProto, given: Interface, name: str):
        if name not in runners.RUNTIMES:
            raise ValueError(f"runtime must be one of {', '.join(map(repr, runners.RUNTIMES))}, got {name!r}")
        self._given, self._name = given, name
        self._names = ["y", *(f"{state}_out" for state in given.states), *given.parts]
        self._folder = tempfile.TemporaryDirectory(prefix="cnorm-parity-")
        path = Path(self._folder.name, "model.onnx")
        onnx.save(onnx_model, path)
        outputs = [value.name for value in onnx_model.graph.output]
        self._order = [value.name for value in onnx_model.graph.input]
        self._outputs = outputs
        self._child = subprocess.Popen(
            [sys.executable, "-P", runners.__file__, name, path, *outputs],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def call(self, x: np.ndarray, states) -> dict[str, np.ndarray]:
        dtype, message = self._given.dtype, io.BytesIO()
        feeds = self._given.feeds(x.astype(dtype), {name: array.astype(dtype) for name, array in states.items()})
        np.savez(message, **{name: feeds[name] for name in self._order})
        kind, data = self._answer(message.getvalue())
        if kind != b"npz":
            hint = f"; tried with {' '.join(runners.PINS[self._name])}" if b"ModuleNotFoundError" in data else ""
            raise ValueError(
                f"onnx_model: {self._name} does not run it: {printable(data.decode(errors='replace'))}{hint}"
            )
        with np.load(io.BytesIO(data)) as found:
            values = dict(zip(self._outputs, (found[key] for key in found.files), strict=True))
        return self._given.results(((name, values[name]) for name in self._names), *x.shape[:2])

    def close(self) -> None:
        """End the child."""
        self._child.kill()
        self._child.communicate()
        self._folder.cleanup()

    def _answer(self, data: bytes) -> tuple[bytes, bytes]:
        try:
            self._child.stdin.write(b"%d npz\n" % len(data) + data)
            self._child.stdin.flush()
            head = self._child.stdout.readline()
        except BrokenPipeError:
            head = b""
        if not head:
            code = self._child.wait()
            how = signal.Signals(-code).name if code < 0 else f"exit {code}"
            raise ValueError(f"onnx_model: {self._name} ended with {how} on it; a call may take {runners.SECONDS} s")
        size, kind = head.split()
        return kind, self._child.stdout.read(int(size))


class CnormEngine:
    """The model itself, which takes one row at a time."""

    def __init__(self, model):
        self._stream = model.stream()

    def initial(self) -> dict[str, np.ndarray]:
        self._stream.reset()
        return {name: array[None] for name, array in self._stream.state().items()}

    def call(self, x: np.ndarray, states) -> dict[str, np.ndarray]:
        self._stream.set_state({name: array[0].astype(np.float32) for name, array in states.items()})
        y = self._stream.process(np.ascontiguousarray(x[:, 0], np.float32))
        return {"y": y[:, None]} | {f"{name}_out": array[None] for name, array in self._stream.state().items()}
