"""One step of cnorm is as accurate as one of onnxruntime, judged by float64."""

import numpy as np
import pytest
import reference
from models import random_lstm

import cnorm
import onnx_export
from cnorm_bench.runners import ort_session


@pytest.mark.exhaustive(one_in=9)
@pytest.mark.parametrize(("inputs", "units", "steps"), [(12, 64, 200), (128, 256, 60), (1024, 1024, 20)])
def test_root_mean_square_error_of_a_step(inputs, units, steps, isa, rng):
    """h and c after each step from the float64 trajectory's state, rounded: at most 1.25 times onnxruntime's error.

    No absolute bound: two float32 computations of the same equations, whose errors are taken as random.
    """
    layer = random_lstm(rng, inputs, units)
    model = cnorm.Model([layer])
    stream = model.stream()
    session = ort_session(onnx_export.export(model).SerializeToString())
    squares = np.zeros((2, 2))  # of cnorm and onnxruntime; of h and c
    exact = np.zeros((2, units))
    for _ in range(steps):
        x = rng.standard_normal(inputs).astype(np.float32)
        h, c = exact.astype(np.float32)
        exact = np.stack(reference.lstm_ba2016(layer.weights, x, h, c))
        stream.set_state({"h0": h, "c0": c})
        stream.step(x)
        ours = [stream.state()[name] for name in ("h0", "c0")]
        theirs = session.run(["h0_out", "c0_out"], {"x": x[None], "h0_in": h[None], "c0_in": c[None]})
        for squared, got in zip(squares, (ours, np.concatenate(theirs)), strict=True):
            squared += np.sum((got - exact) ** 2, axis=1)
    ours, theirs = np.sqrt(squares / (steps * units))
    assert (theirs > 0).all()
    assert (ours <= 1.25 * theirs).all(), (ours, theirs)
