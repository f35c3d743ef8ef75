"""A step of a recurrent model in cnorm and onnxruntime, as users call it, timed by `make demo` and `cnorm bench`.

A runner has ``label``; ``mode()``, a context to run the steps in; ``reset()``, which sets its state to zero; and
``step(x)``, which takes x [input_size] float32 and returns y [output_size] float32, an array that the next step may
overwrite. Around the runtime's own call there is as little Python as possible: buffers and bindings are made once.
"""

import gc
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np

__all__ = ["Cnorm", "Interface", "OrtBinding", "OrtRun", "latencies", "ort_session"]


class Cnorm:
    """`Stream.step` into an output array that is made once."""

    mode = nullcontext

    def __init__(self, model, label="cnorm"):
        self.label = label
        self.stream = model.stream()
        self.y = np.empty(model.output_size, np.float32)

    def reset(self):
        self.stream.reset()

    def step(self, x):
        return self.stream.step(x, out=self.y)


def ort_session(onnx_model):
    """A session of one thread for the bytes of an ONNX file."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(onnx_model, options, providers=["CPUExecutionProvider"])


@dataclass(frozen=True)
class Interface:
    """Of a step model: zeros for its frames and states, outputs, states to what gives them back, constant inputs."""

    frames: dict[str, np.ndarray]
    outputs: tuple[str, ...]
    pairs: dict[str, str]
    zeros: dict[str, np.ndarray]
    constants: dict[str, np.ndarray]

    @staticmethod
    def of(session):
        """That of a model of `export`: x, y, "h0_in" to "h0_out", ..."""
        inputs = {i.name: i.shape for i in session.get_inputs()}
        x = np.zeros(inputs.pop("x"), np.float32)
        zeros = {name: np.zeros(shape, np.float32) for name, shape in inputs.items()}
        return Interface({"x": x}, ("y",), {n: n.removesuffix("_in") + "_out" for n in inputs}, zeros, {})


class OrtRun:
    """`InferenceSession.run` on a step model: states are passed and returned as NumPy arrays."""

    label = "onnxruntime, run()"
    mode = nullcontext

    def __init__(self, onnx_model, face=None):
        self.session = ort_session(onnx_model)
        self.face = face or Interface.of(self.session)
        self.outputs = [*self.face.outputs, *self.face.pairs.values()]
        self.reset()

    def reset(self):
        self.feed = self.face.constants | self.face.zeros

    def step(self, x):
        """The first output."""
        start = 0
        for name, zero in self.face.frames.items():
            self.feed[name] = x[start : start + zero.size].reshape(zero.shape).astype(zero.dtype, copy=False)
            start += zero.size
        made = self.session.run(self.outputs, self.feed)
        self.feed.update(zip(self.face.pairs, made[len(self.face.outputs) :], strict=True))
        return made[0].reshape(-1)


class OrtBinding:
    """The same session with IO binding, its fastest form here.

    Two bindings made once pass the states back and forth: what one writes, the other reads. x and y are plain
    NumPy arrays bound in place.
    """

    mode = nullcontext

    def __init__(self, onnx_model, label="onnxruntime, IO binding", face=None):
        self.label = label
        session = ort_session(onnx_model)
        self.run = session.run_with_iobinding  # without RunOptions, which would make each call 3 times slower
        face = face or Interface.of(session)
        self.frames = {name: zero.copy() for name, zero in face.frames.items()}
        feed = self.frames | face.constants | face.zeros
        made = session.run(list(face.outputs), feed)  # for their shapes, which the file may leave open
        ys = {name: np.zeros(y.shape, np.float32) for name, y in zip(face.outputs, made, strict=True)}
        self.y = ys[face.outputs[0]].reshape(-1)
        self.states = [{name: zero.copy() for name, zero in face.zeros.items()} for _ in range(2)]
        self.bindings = []
        for here, there in (0, 1), (1, 0):
            binding = session.io_binding()
            for name, array in (self.frames | face.constants | self.states[here]).items():
                binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
            given_back = {face.pairs[name]: array for name, array in self.states[there].items()}
            for name, array in (ys | given_back).items():
                binding.bind_output(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)
            self.bindings.append(binding)
        self.turn = 0

    def reset(self):
        for state in self.states[self.turn].values():
            state[:] = 0

    def step(self, x):
        start = 0
        for frame in self.frames.values():
            frame[...] = x[start : start + frame.size].reshape(frame.shape)
            start += frame.size
        self.run(self.bindings[self.turn])
        self.turn ^= 1
        return self.y


def latencies(runners, utterances, *, at_a_time=10, uncounted=0, after=None):
    """Time every step of every runner on the same utterances, the runners interleaved.

    Each runner streams `at_a_time` utterances, then the next runner does, and so on, so that other load affects
    all of them alike. A first turn of each is a warm-up and not counted. The garbage collector is off.

    Parameters
    ----------
    runners : sequence
    utterances : sequence of ndarray, shape (T, input_size), float32
    uncounted : int
        Untimed steps before each turn, which bring the runner's data into the caches.
    after : callable, optional
        Called without arguments after each turn.

    Returns
    -------
    times : dict of label to ndarray, shape (steps,), float64
        Microseconds a step; they include about 0.05 us for reading the clock.
    answers : dict of label to list of ndarray, shape (output_size,)
        y after each utterance's last frame.
    """
    times = {runner.label: [] for runner in runners}
    answers = {runner.label: [] for runner in runners}
    for runner in runners:
        _stream(runner, utterances[:at_a_time], [], [])
    collecting = gc.isenabled()
    gc.disable()
    try:
        for start in range(0, len(utterances), at_a_time):
            for runner in runners:
                turn = utterances[start : start + at_a_time]
                _stream(runner, [turn[0][:uncounted]] if uncounted else [], [], [])
                _stream(runner, turn, times[runner.label], answers[runner.label])
            if after:
                after()
    finally:
        if collecting:
            gc.enable()
    return {label: np.array(t) / 1e3 for label, t in times.items()}, answers


def _stream(runner, utterances, times, answers):
    step = runner.step
    with runner.mode():
        for utterance in utterances:
            runner.reset()
            for x in utterance:
                start = perf_counter_ns()
                y = step(x)
                times.append(perf_counter_ns() - start)
            answers.append(y.copy())
