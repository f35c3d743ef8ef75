"""Arguments that lie, or change each other while they are converted, never reach memory beyond an array."""

import os
from pathlib import Path

import liars
import numpy as np
import pytest
from perturbed import succeed

import cnorm

CASES, PARTS = int(os.environ.get("CNORM_LIES", "2000")), 4

SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import liars
for seed in range(*map(int, sys.argv[2:])):
    sys.stderr.write(f"liars.attempt({seed})\\n")
    liars.attempt(seed)
    print(seed)
"""


@pytest.mark.exhaustive(one_in=4)
@pytest.mark.parametrize("part", range(PARTS))
def test_lying_arguments(part):
    """In a process of its own, which a wrong access ends; the last line of its errors names the call."""
    printed = succeed(SCRIPT, str(Path(liars.__file__).parent), str(part), str(CASES), str(PARTS))
    assert [int(seed) for seed in printed.split()] == list(range(part, CASES, PARTS))


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
