"""An exported model in onnxruntime as a stream, with inputs and outputs bound once (IO binding)."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
import onnx
import onnxruntime

from cnorm.storage.model_files import METADATA_KEY
from onnx_export.description import initial_states
from onnx_export.ort import LEVELS

__all__ = ["OrtStream"]

_DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


class OrtStream:
    """One stream through an exported model, run by onnxruntime, with the methods of `cnorm.Stream` but for saving.

    Inputs and outputs are bound once. There are two bindings, each of which reads the states that the other writes, and
    all buffers are NumPy arrays that onnxruntime uses in place: a step copies x in, makes one call, and copies y out.
    `cnorm bench` times a loop over the same two bindings without the checks and the copy of y. Not thread-safe.

    Parameters
    ----------
    onnx_model : onnx.ModelProto, str or path-like
        A file of `export`, form "step" or "sequence", or another with the same interface, float32 or float16.
    optimisation : "off", "basic" or "all"
        onnxruntime's graph optimisations.
    threads : int
        Threads that onnxruntime may use within an operator.

    Attributes
    ----------
    session : onnxruntime.InferenceSession
    input_size, output_size : int
    dtype : numpy dtype
        Of x, y and the states.

    Raises
    ------
    OSError
        If there is no file of the name `onnx_model`.
    TypeError
        If `onnx_model` is neither a model nor a path.
    ValueError
        For an unknown optimisation, or a file with another interface.

    Examples
    --------
    >>> import cnorm, numpy as np, onnx_export, ort_stream
    >>> stream = ort_stream.OrtStream(onnx_export.export(cnorm.demo_model()))
    >>> stream.step(np.zeros(12, np.float32)).shape
    (9,)
    """

    def __init__(self, onnx_model, *, optimisation: str = "all", threads: int = 1):
        if optimisation not in LEVELS:
            raise ValueError(f"optimisation must be one of {', '.join(map(repr, LEVELS))}, got {optimisation!r}")
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = LEVELS[optimisation]
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 3
        if isinstance(onnx_model, onnx.ModelProto):
            source = onnx_model.SerializeToString()
        else:
            source = os.fsdecode(onnx_model)
            os.stat(source)  # OSError if the file does not exist, like other readers
        try:
            self.session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's exceptions have no other common base class
            reason = str(error).splitlines()[0][:300]
            raise ValueError(f"onnx_model: onnxruntime {onnxruntime.__version__} does not load it: {reason}") from None
        self._bind()
        text = self.session.get_modelmeta().custom_metadata_map.get(METADATA_KEY)
        self._initial = initial_states(text, {k: v.shape[1] for k, v in self._buffers[0].items()}, self.dtype)
        self.reset()

    def _bind(self) -> None:
        inputs = {value.name: value for value in self.session.get_inputs()}
        outputs = {value.name: value for value in self.session.get_outputs()}
        self._states = [name.removesuffix("_in") for name in inputs if name != "x"]
        wanted = (
            {"x", *(f"{name}_in" for name in self._states)},
            {"y", *(f"{name}_out" for name in self._states)},
        )
        if inputs.keys() != wanted[0] or not outputs.keys() >= wanted[1]:
            raise ValueError(
                "onnx_model must have the inputs x, STATE_in ... and the outputs y, STATE_out ..., got "
                f"{', '.join(inputs)} and {', '.join(outputs)}"
            )
        # a model's named outputs are parts of y
        outputs = {name: value for name, value in outputs.items() if name in wanted[1]}
        x, y = inputs["x"], outputs["y"]
        if x.type not in _DTYPES or any(v.type != x.type for v in (*inputs.values(), *outputs.values())):
            raise ValueError(f"onnx_model must be all float32 or all float16, got {x.type} for x")
        self.dtype = np.dtype(_DTYPES[x.type])
        _check_shapes(x, y, inputs.values(), outputs.values())
        self._sequence = len(x.shape) == 3
        self.input_size, self.output_size = x.shape[-1], y.shape[-1]
        ones = (1,) * (len(x.shape) - 1)  # one step of one stream
        self._x = np.zeros((*ones, self.input_size), self.dtype)
        self._y = np.zeros((*ones, self.output_size), self.dtype)
        self._current = 0  # which of the two state buffers is current
        self._buffers = [
            {name: np.zeros((1, inputs[f"{name}_in"].shape[-1]), self.dtype) for name in self._states} for _ in range(2)
        ]
        self._bindings = [self._binding(before, 1 - before) for before in range(2)]

    def _binding(self, before: int, after: int):
        binding = self.session.io_binding()
        wrap = onnxruntime.OrtValue.ortvalue_from_numpy  # on the CPU it shares the array's memory
        binding.bind_ortvalue_input("x", wrap(self._x))
        binding.bind_ortvalue_output("y", wrap(self._y))
        for name in self._states:
            binding.bind_ortvalue_input(f"{name}_in", wrap(self._buffers[before][name]))
            binding.bind_ortvalue_output(f"{name}_out", wrap(self._buffers[after][name]))
        return binding

    def step(self, x, out=None):
        """One step.

        Parameters
        ----------
        x : ndarray, shape (input_size,)
        out : ndarray, shape (output_size,), optional

        Returns
        -------
        y : ndarray, shape (output_size,)

        Raises
        ------
        TypeError
            If x or out is not an array of `dtype`.
        ValueError
            For another shape. State and `out` are then unchanged.
        """
        x = self._checked(x, "x", (self.input_size,))
        if out is not None:
            self._checked(out, "out", (self.output_size,))
        self._x[...] = x
        self.session.run_with_iobinding(self._bindings[self._current])
        self._current = 1 - self._current
        if out is None:
            return self._y.reshape(-1).copy()
        out[...] = self._y.reshape(-1)
        return out

    def process(self, x, out=None):
        """Many steps, in one call for a file of form "sequence".

        Parameters
        ----------
        x : ndarray, shape (steps, input_size)
        out : ndarray, shape (steps, output_size), optional

        Returns
        -------
        y : ndarray, shape (steps, output_size)

        Raises
        ------
        TypeError, ValueError
            As `step`.
        """
        x = self._checked(x, "x", (None, self.input_size))
        if out is None:
            out = np.empty((len(x), self.output_size), self.dtype)
        self._checked(out, "out", (len(x), self.output_size))
        if not self._sequence:
            for frame, y in zip(x, out, strict=True):
                self.step(frame, out=y)
        elif len(x):
            states = self._buffers[self._current]
            feeds = {"x": x[:, None]} | {f"{name}_in": states[name] for name in self._states}
            names = ["y", *(f"{name}_out" for name in self._states)]
            y, *after = self.session.run(names, feeds)
            out[...] = y[:, 0]
            for name, array in zip(self._states, after, strict=True):
                states[name][...] = array
        return out

    def state(self) -> dict[str, np.ndarray]:
        """A copy of the states, each [units]."""
        return {name: array[0].copy() for name, array in self._buffers[self._current].items()}

    def set_state(self, state) -> None:
        """Replace all states.

        Parameters
        ----------
        state : mapping of str to ndarray, shape (units,)
            The names and shapes of `state`, all of them.

        Raises
        ------
        TypeError
            If it is not a mapping, or an array is not of `dtype`.
        ValueError
            For other names or shapes. The states are then unchanged.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"state must be a mapping of names to arrays, got {type(state).__name__}")
        if set(state) != set(self._states):
            raise ValueError(f"state must have the names {sorted(self._states)}, got {sorted(state)}")
        current = self._buffers[self._current]
        checked = {
            name: self._checked(state[name], f"state[{name!r}]", current[name].shape[1:]) for name in self._states
        }
        for name, array in checked.items():
            current[name][...] = array

    def reset(self, state=None) -> None:
        """Set the states to the initial ones of the file's table, or to given ones.

        Raises
        ------
        TypeError, ValueError
            As `set_state`.
        """
        self.set_state(self._initial if state is None else state)

    def _checked(self, array, name: str, shape):
        if not isinstance(array, np.ndarray) or array.dtype != self.dtype:
            got = getattr(array, "dtype", type(array).__name__)
            raise TypeError(f"{name} must be an array of {self.dtype}, got {got}")
        if len(array.shape) != len(shape) or any(n not in (None, m) for n, m in zip(shape, array.shape, strict=True)):
            wanted = f"({shape[0]},)" if len(shape) == 1 else f"({'T' if shape[0] is None else shape[0]}, {shape[1]})"
            raise ValueError(f"{name} must have shape {wanted}, got {array.shape}")
        return array


def _check_shapes(x, y, inputs, outputs) -> None:
    """Raise ValueError if the file cannot run one step of one stream."""
    if len(x.shape) not in (2, 3):
        raise ValueError(f"onnx_model must have x [batch, size] or [T, batch, size], got {x.shape}")
    if len(x.shape) == 3 and isinstance(x.shape[0], int) and x.shape[0] != 1:
        raise ValueError(
            f"onnx_model must take single steps, got x {x.shape}, {x.shape[0]} steps in each call: run such a file "
            "with onnxruntime.InferenceSession"
        )
    for value in (*inputs, *outputs):
        if not isinstance(value.shape[-1] if value.shape else None, int):
            raise ValueError(f"onnx_model must have {value.name} of a fixed size, got {value.shape}")
        if value is not x and value is not y and len(value.shape) != 2:
            raise ValueError(f"onnx_model must have {value.name} [batch, units], got {value.shape}")
        if len(value.shape) > 1 and isinstance(value.shape[-2], int) and value.shape[-2] != 1:
            raise ValueError(f"onnx_model must have a batch of 1 or an open one, got {value.name} {value.shape}")
