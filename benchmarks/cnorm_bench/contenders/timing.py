"""How contenders are described and timed. Their samples are interleaved, so that other load affects all of them alike.

A `Contender` is a statement, timed as a user would write it. Those for recurrent steps are in `cnorm_bench.runners`.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from timeit import Timer

import numpy as np

__all__ = ["Contender", "empty", "empty_like", "times"]

SAMPLE = 1e-3  # seconds: the least length of a sample, so that the cost of reading the clock is negligible
MIN_SAMPLES = 11  # even if they take longer than the given seconds


def _arrays(value):
    """The statement's value, an array or several, as a tuple of arrays."""
    return tuple(np.asarray(array) for array in (value if isinstance(value, tuple) else (value,)))


@dataclass(frozen=True)
class Contender:
    """One way to compute an operation: a statement and the names in it.

    Parameters
    ----------
    label : str
        For tables and pictures.
    statement : str
        The expression that is timed, ``f(x, weight, bias, out=y)``.
    names : dict
        The values of the names in the statement.
    outputs : callable
        Converts the expression's value to a tuple of arrays.
    mode : callable
        Returns the context manager in which the statement is timed.
    limit : bool
        It only moves memory and computes nothing: a lower bound on time, whose results are not checked.
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
    """A new array at the page offset that the allocator's default settings give: large ones 16 bytes into a page.

    `environment.MEMORY` makes glibc place large arrays elsewhere, and the offset changes the speed of kernels.
    """
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if size < 128 << 10:  # larger blocks glibc maps as pages of their own, with a header of 16 bytes
        return np.empty(shape, dtype)
    memory = np.empty(size + 4096, np.uint8)
    start = (16 - memory.ctypes.data) % 4096
    return memory[start : start + size].view(dtype).reshape(shape)


def empty_like(array):
    return empty(array.shape, array.dtype)


def times(contenders, *, seconds=0.3):
    """Time contenders, their samples interleaved.

    Each takes one sample, then the next contender takes one, and so on. Before each sample the statement runs once
    untimed, which brings its data into the caches. The garbage collector is off while a sample is taken.

    Parameters
    ----------
    contenders : sequence of Contender
    seconds : float
        For each contender, roughly; at least `MIN_SAMPLES` samples are taken, even if that takes longer.

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
            k = (k + turn) % len(timers)  # rotate the order in each round
            with contenders[k].mode():
                timers[k].timeit(1)
                samples[k, turn] = timers[k].timeit(numbers[k]) / numbers[k]
    return {contender.label: 1e6 * row for contender, row in zip(contenders, samples, strict=True)}
