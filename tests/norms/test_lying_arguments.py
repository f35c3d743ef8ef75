"""Arguments that lie, or change each other while they are converted, never reach memory beyond an array."""

import os
import signal
import traceback

import liars
import numpy as np
import pytest

import cnorm

CASES, PARTS = int(os.environ.get("CNORM_LIES", "2000")), 4


@pytest.mark.exhaustive(one_in=4)
@pytest.mark.parametrize("part", range(PARTS))
def test_lying_arguments(part):
    """In a child process, which a wrong access ends."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for seed in range(part, CASES, PARTS):
                os.write(write, seed.to_bytes(4, "little"))
                liars.attempt(seed)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        seeds = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    last = int.from_bytes(seeds[-4:], "little")
    assert status == 0, f"liars.attempt({last}): " + (signal.Signals(-status).name if status < 0 else f"exit {status}")
    assert len(seeds) // 4 == len(range(part, CASES, PARTS))


def test_an_axis_that_changes_x():
    """The array is what it is after every argument has been converted."""
    x = np.arange(32, dtype=np.float64).reshape(4, 8)

    class Axis:
        def __index__(self):
            x.dtype = np.float32
            return -1

    assert cnorm.layer_norm(x, axis=Axis()).shape == (4, 16)


def test_a_bias_that_changes_the_weight():
    x, weight, bias = np.ones((4, 64), np.float16), np.ones(64, np.float32), np.ones(64, np.float32)

    class Bias:
        def __array__(self, dtype=None, copy=None):
            weight.dtype = np.float64
            return bias

    with pytest.raises(TypeError, match=r"^weight must have the dtype of x, float16 or float32, got float64$"):
        cnorm.layer_norm(x, weight, Bias())


def test_an_object_that_claims_to_be_a_stream():
    class Claimant:
        __class__ = cnorm.Stream

    model = cnorm.demo_model()
    with pytest.raises(TypeError, match=r"^streams\[0\] must be a Stream, got Claimant$"):
        model.step_many([Claimant()], np.zeros((1, model.input_size), np.float32))
