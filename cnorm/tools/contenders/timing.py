"""How contenders are described and timed: in turns, so that whatever else the machine does meets all of them.

A `Contender` is a statement that is timed as a user would write it. A step contender has ``label``; ``mode()``, a
context to stream in; ``reset()``, its state to zero; ``step(x)``, x [input_size] float32 in, y [output_size] float32
out, which the next step may overwrite. What lies around the runtime's own call is the least that a careful user
would write: buffers and bindings are made once.
"""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter_ns
from timeit import Timer

import numpy as np

__all__ = ["Contender", "empty", "empty_like", "latencies", "times"]

SAMPLE = 1e-3  # seconds that one sample takes at least, so that the clock does not count
MIN_SAMPLES = 11  # whatever it costs


def _arrays(value):
    """The statement's value, an array or several, as a tuple of arrays."""
    return tuple(np.asarray(array) for array in (value if isinstance(value, tuple) else (value,)))


@dataclass(frozen=True)
class Contender:
    """One way to compute something, ready to run.

    Parameters
    ----------
    label : str
        For tables and pictures.
    statement : str
        The expression that is timed, ``f(x, weight, bias, out=y)``.
    names : dict
        The names in it.
    outputs : callable
        Makes a tuple of arrays of the expression's value.
    mode : callable
        Makes the context it is timed in.
    limit : bool
        It computes nothing, it only moves the memory: a bound, not a rival, and not checked.
    """

    label: str
    statement: str
    names: dict
    outputs: Callable = _arrays
    mode: Callable = nullcontext
    limit: bool = False

    def function(self):
        """The statement as a function without arguments."""
        return eval(f"lambda: ({self.statement})", dict(self.names))

    def compute(self):
        """Run once; a tuple of arrays."""
        with self.mode():
            return self.outputs(self.function()())


def empty(shape, dtype):
    """A new array that lies where NumPy's do without our environment: large ones 16 bytes into a page."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if size < 128 << 10:  # from there on glibc maps pages for an array, and writes 16 bytes of its own before it
        return np.empty(shape, dtype)
    memory = np.empty(size + 4096, np.uint8)
    start = (16 - memory.ctypes.data) % 4096
    return memory[start : start + size].view(dtype).reshape(shape)


def empty_like(array):
    return empty(array.shape, array.dtype)


def times(contenders, *, seconds=0.3):
    """Time contenders in turns.

    Each takes one sample, then the next one does, and so on; before each sample it runs once uncounted, to have
    its own data in the caches. The garbage collector rests.

    Parameters
    ----------
    contenders : sequence of Contender
    seconds : float
        For each contender, roughly; at least `MIN_SAMPLES` samples are taken whatever it costs.

    Returns
    -------
    dict of label to ndarray, shape (samples,), float64
        Microseconds a call: each sample is the mean over calls that take a millisecond together.
    """
    timers = [Timer(contender.statement, globals=dict(contender.names)) for contender in contenders]
    numbers, cost = [], 0.0
    for contender, timer in zip(contenders, timers, strict=True):
        with contender.mode():
            timer.timeit(1)
            number = 1
            while (took := timer.timeit(number)) < SAMPLE / 4:
                number *= 2
        numbers.append(max(1, round(number * SAMPLE / took)))
        cost += took / number * (numbers[-1] + 1)
    rounds = int(np.clip(seconds * len(timers) / cost, MIN_SAMPLES, 300))
    samples = np.empty((len(timers), rounds))
    for turn in range(rounds):
        for k in range(len(timers)):
            k = (k + turn) % len(timers)  # nobody always comes after the same neighbour
            with contenders[k].mode():
                timers[k].timeit(1)
                samples[k, turn] = timers[k].timeit(numbers[k]) / numbers[k]
    return {contender.label: 1e6 * row for contender, row in zip(contenders, samples, strict=True)}


def latencies(contenders, utterances, *, at_a_time=10, uncounted=0, after=None):
    """Time every step of every contender on the same utterances, in turns.

    Each contender streams `at_a_time` utterances, then the next one does, and so on: whatever else the
    machine does meets all of them. A first turn warms up and is not counted. The garbage collector rests.

    Parameters
    ----------
    contenders : sequence
    utterances : sequence of ndarray, shape (T, input_size), float32
    uncounted : int
        Steps before each turn that bring a contender's own data back into the caches.
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
                _stream(contender, [turn[0][:uncounted]] if uncounted else [], [], [])
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
