"""One step of one model in each runtime that a user might use instead, for `cnorm demo` and `cnorm bench`.

Every contender has the same names: ``label``; ``mode()``, a context to stream in; ``reset()``, its state to
zero; ``step(x)``, x [input_size] float32 in, y [output_size] float32 out, which the next step may overwrite.
What lies around the runtime's own call is the least that a careful user would write: buffers and bindings are
made once.

This module is in the package, not in benchmarks/, because an installed `cnorm demo` needs it. It imports the
other runtimes only when their contender is made.
"""

import gc
import warnings
from contextlib import nullcontext
from time import perf_counter_ns

import numpy as np

__all__ = ["Cnorm", "OrtBinding", "OrtRun", "TorchEager", "TorchJit", "latencies", "ort_session"]


class Cnorm:
    """`Stream.step` with an output array of its own."""

    label = "cnorm"
    mode = nullcontext

    def __init__(self, model):
        self.stream = model.stream()
        self.y = np.empty(model.output_size, np.float32)

    def reset(self):
        self.stream.reset()

    def step(self, x):
        return self.stream.step(x, out=self.y)


def ort_session(onnx_model):
    """An onnxruntime session, one thread, of the bytes of an ONNX file."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(onnx_model, options, providers=["CPUExecutionProvider"])


def _state_names(session):
    """Names of the states of a step model, ("h0_in", "h0_out"), ..., and their zero arrays [1, H]."""
    inputs = [i for i in session.get_inputs() if i.name != "x"]
    pairs = [(i.name, i.name.removesuffix("_in") + "_out") for i in inputs]
    return pairs, [np.zeros(i.shape, np.float32) for i in inputs]


class OrtRun:
    """`InferenceSession.run` on the exported step model: the states go in and out as NumPy arrays."""

    label = "onnxruntime, run()"
    mode = nullcontext

    def __init__(self, onnx_model):
        self.session = ort_session(onnx_model)
        pairs, self.zeros = _state_names(self.session)
        self.inputs = [name for name, _ in pairs]
        self.outputs = ["y", *(name for _, name in pairs)]
        self.reset()

    def reset(self):
        self.feed = dict(zip(self.inputs, self.zeros, strict=True))

    def step(self, x):
        self.feed["x"] = x[np.newaxis]
        y, *states = self.session.run(self.outputs, self.feed)
        self.feed.update(zip(self.inputs, states, strict=True))
        return y[0]


class OrtBinding:
    """The same session with IO binding, its fastest form here.

    Two bindings made once pass the states back and forth: what one writes, the other reads. x and y are plain
    NumPy arrays bound in place.
    """

    label = "onnxruntime, IO binding"
    mode = nullcontext

    def __init__(self, onnx_model):
        session = ort_session(onnx_model)
        self.run = session.run_with_iobinding  # without RunOptions: giving them makes each call 3 times slower
        pairs, zeros = _state_names(session)
        self.x = np.zeros(session.get_inputs()[0].shape, np.float32)
        self.y = np.zeros(session.get_outputs()[0].shape, np.float32)
        self.states = [[zero.copy() for zero in zeros] for _ in range(2)]
        self.bindings = []
        for here, there in (0, 1), (1, 0):
            binding = session.io_binding()
            arrays = [
                ("x", self.x),
                *((pair[0], state) for pair, state in zip(pairs, self.states[here], strict=True)),
            ]
            for name, array in arrays:
                binding.bind_input(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)
            arrays = [
                ("y", self.y),
                *((pair[1], state) for pair, state in zip(pairs, self.states[there], strict=True)),
            ]
            for name, array in arrays:
                binding.bind_output(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)
            self.bindings.append(binding)
        self.turn = 0

    def reset(self):
        for state in self.states[self.turn]:
            state[:] = 0

    def step(self, x):
        self.x[0] = x
        self.run(self.bindings[self.turn])
        self.turn ^= 1
        return self.y[0]


def _torch_network(model):
    """A step of an LSTM `ba2016` and a read-out as a torch module: (x, h, c) -> (y, h, c)."""
    import torch
    from torch.nn import functional as F

    lstm, linear = model.layers
    hidden, eps = lstm.output_size, lstm.eps

    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name, value in lstm.weights.items():
                self.register_buffer(name, torch.from_numpy(value.copy()))
            self.readout = torch.nn.Linear(hidden, linear.output_size).requires_grad_(False)
            self.readout.weight[:] = torch.from_numpy(linear.weights["weight"].copy())
            self.readout.bias[:] = torch.from_numpy(np.array(linear.weights.get("bias", 0), np.float32))

        def forward(self, x, h, c):
            a_h = F.layer_norm(F.linear(h, self.weight_h), [4 * hidden], self.gain_h, self.bias_h, eps)
            a_x = F.layer_norm(F.linear(x, self.weight_x), [4 * hidden], self.gain_x, self.bias_x, eps)
            f, i, o, g = (a_h + a_x + self.bias).chunk(4, dim=-1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * F.layer_norm(c, [hidden], self.gain_c, self.bias_c, eps).tanh()
            return self.readout(h), h, c

    return Step().eval()


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
    """The same cell traced by torch.jit and optimised for inference, its fastest form that we found."""

    label = "PyTorch, torch.jit"

    def __init__(self, model):
        import torch

        super().__init__(model)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # newer versions call torch.jit deprecated
            traced = torch.jit.trace(self.network, (self.x, self.zero, self.zero))
            self.network = torch.jit.optimize_for_inference(traced)


def latencies(contenders, utterances, *, at_a_time=10, after=None):
    """Time every step of every contender on the same utterances, in turns.

    Each contender streams `at_a_time` utterances, then the next one does, and so on: whatever else the
    machine does meets all of them. A first turn warms up and is not counted. The garbage collector rests.

    Parameters
    ----------
    contenders : sequence
    utterances : sequence of ndarray, shape (T, input_size), float32
    after : callable, optional
        Called without arguments after each turn.

    Returns
    -------
    times : dict of label to ndarray, shape (steps,), float64
        Microseconds a step, the clock's own 0.05 us or so included.
    answers : dict of label to list of ndarray, shape (output_size,)
        y after each utterance's last frame.
    """
    times = {contender.label: [] for contender in contenders}
    answers = {contender.label: [] for contender in contenders}
    for contender in contenders:
        _stream(contender, utterances[:at_a_time], [], [])
    collecting = gc.isenabled()
    gc.disable()
    try:
        for start in range(0, len(utterances), at_a_time):
            for contender in contenders:
                turn = utterances[start : start + at_a_time]
                _stream(contender, turn, times[contender.label], answers[contender.label])
            if after:
                after()
    finally:
        if collecting:
            gc.enable()
    return {label: np.array(t) / 1e3 for label, t in times.items()}, answers


def _stream(contender, utterances, times, answers):
    step = contender.step
    with contender.mode():
        for utterance in utterances:
            contender.reset()
            for x in utterance:
                start = perf_counter_ns()
                y = step(x)
                times.append(perf_counter_ns() - start)
            answers.append(y.copy())
