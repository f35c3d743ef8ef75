"""A step of a recurrent model in each runtime, as a user would call it, timed by `cnorm demo` and `cnorm bench`.

A runner has ``label``; ``mode()``, a context to run the steps in; ``reset()``, which sets its state to zero; and
``step(x)``, which takes x [input_size] float32 and returns y [output_size] float32, an array that the next step may
overwrite. Around the runtime's own call there is as little Python as possible: buffers and bindings are made once.
"""

import gc
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np

__all__ = ["Cnorm", "Interface", "OrtBinding", "OrtRun", "TorchEager", "TorchJit", "latencies", "ort_session"]


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


def _torch_network(model):
    """A torch module (x, h, c) -> (y, h, c): a step of a cell `ba2016` or `torch` and the linear layers after it."""
    import torch
    from torch.nn import functional as F

    cell, *linear = model.layers
    hidden, eps = cell.output_size, cell.eps

    class LayerNormLstm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name, value in cell.weights.items():
                self.register_buffer(name, torch.from_numpy(value.copy()))
            self.readout = torch.nn.Sequential(*map(_torch_linear, linear))

        def forward(self, x, h, c):
            a_h = F.layer_norm(F.linear(h, self.weight_h), [4 * hidden], self.gain_h, self.bias_h, eps)
            a_x = F.layer_norm(F.linear(x, self.weight_x), [4 * hidden], self.gain_x, self.bias_x, eps)
            f, i, o, g = (a_h + a_x + self.bias).chunk(4, dim=-1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * F.layer_norm(c, [hidden], self.gain_c, self.bias_c, eps).tanh()
            return self.readout(h), h, c

    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = getattr(torch.nn, f"{cell.kind}Cell")(cell.input_size, hidden).requires_grad_(False)
            state = {name.removesuffix("_l0"): torch.from_numpy(array.copy()) for name, array in cell.weights.items()}
            self.cell.load_state_dict(state)
            self.readout = torch.nn.Sequential(*map(_torch_linear, linear))

        def forward(self, x, h, c):
            if cell.kind == "LSTM":
                h, c = self.cell(x, (h, c))
            else:
                h = self.cell(x, h)
            return self.readout(h), h, c

    return {"ba2016": LayerNormLstm, "torch": Plain}[cell.spec.name]().eval()


def _torch_linear(layer):
    import torch

    linear = torch.nn.Linear(layer.input_size, layer.output_size).requires_grad_(False)
    linear.weight[:] = torch.from_numpy(layer.weights["weight"].copy())
    linear.bias[:] = torch.from_numpy(np.array(layer.weights.get("bias", 0), np.float32))
    return linear


class TorchEager:
    """The cell written with PyTorch's operators, in inference mode, one thread."""

    label = "PyTorch, eager"

    def __init__(self, model):
        import torch

        torch.set_num_threads(1)
        self.mode = torch.inference_mode
        self.network = _torch_network(model)
        self.x = torch.zeros(1, model.input_size)
        self.x_array = self.x.numpy()[0]
        self.zero = torch.zeros(1, model.layers[0].output_size)
        self.reset()

    def reset(self):
        self.h = self.c = self.zero

    def step(self, x):
        self.x_array[:] = x
        y, self.h, self.c = self.network(self.x, self.h, self.c)
        return y.numpy()[0]


class TorchJit(TorchEager):
    """The same cell traced by torch.jit and optimised for inference, the fastest form of it that we found."""

    label = "PyTorch, torch.jit"

    def __init__(self, model):
        import torch

        super().__init__(model)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # newer versions call torch.jit deprecated
            traced = torch.jit.trace(self.network, (self.x, self.zero, self.zero))
            self.network = torch.jit.optimize_for_inference(traced)


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
