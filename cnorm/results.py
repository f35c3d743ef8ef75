"""Results that NumPy computes for the extension, in the floating-point mode of the kernels.

`mode`, everywhere: a `default_float_env`.
"""

from __future__ import annotations

import numpy as np


def write_result(result: np.ndarray, written: np.ndarray, mode) -> None:
    """Copy `written` to `result`, rounded to its dtype; a float32 too large for float16 becomes infinite."""
    with mode:
        result[...] = written


def running_average(average: np.ndarray, batch: np.ndarray, factor: float, momentum: float, mode) -> None:
    """average = (1 - momentum) average + momentum (factor batch), in float64 and rounded once."""
    with mode:
        average[...] = (1 - momentum) * average.astype(np.float64) + momentum * (factor * batch)


def stats_mean(data: np.ndarray, mode) -> np.ndarray:
    """The mean of `Stats`, whose array is [..., 3]: shift, delta, rstd."""
    with mode:
        return data[..., 0] + data[..., 1]
