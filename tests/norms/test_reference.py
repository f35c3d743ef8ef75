"""The oracle itself, against exact arithmetic and finite differences."""

from fractions import Fraction

import numpy as np
import pytest
import reference


def test_layer_norm_against_exact_fractions():
    x = np.array([1e6, 1e6 + 0.25, 1e6 - 3, 1e6 + 7.5], np.float32)
    exact = [Fraction(float(v)) for v in x]
    mean = sum(exact) / 4
    variance = float(sum((v - mean) ** 2 for v in exact) / 4)
    y, got_mean, rstd = reference.layer_norm(x, eps=0)
    np.testing.assert_allclose(y, [float(v - mean) / variance**0.5 for v in exact], rtol=4e-16)
    np.testing.assert_allclose(got_mean, [float(mean)], rtol=2e-16)
    np.testing.assert_allclose(rstd, [variance**-0.5], rtol=4e-16)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_layer_norm_at_the_ends_of_the_range(dtype):
    signs = np.array([1, -1, 1, -1, 1, -1])
    for scale in (np.finfo(dtype).max, np.finfo(dtype).smallest_subnormal):
        y, _, _ = reference.layer_norm(signs.astype(dtype) * scale, eps=0)
        np.testing.assert_allclose(y, signs, rtol=1e-15)
        assert not reference.layer_norm(np.full(7, scale, dtype), eps=0)[0].any()


@pytest.mark.parametrize("axis", [-1, 1, 0, -3])
def test_backward_is_the_derivative_of_forward(rng, axis):
    x, dy = rng.standard_normal((2, 3, 4, 5))
    weight, bias = rng.standard_normal((2, *x.shape[axis:]))
    _check_gradients(
        lambda x, weight, bias: reference.layer_norm(x, weight, bias, axis=axis)[0],
        reference.layer_norm_backward(dy, x, weight, axis=axis),
        (x, weight, bias),
        dy,
    )
    _check_gradients(
        lambda x, weight: reference.rms_norm(x, weight, axis=axis)[0],
        reference.rms_norm_backward(dy, x, weight, axis=axis),
        (x, weight),
        dy,
    )


def _check_gradients(forward, gradients, arguments, dy):
    """Central differences with h = 2^-10: their error is h^2 / 6 times a third derivative of order 10^2."""
    h = 2.0**-10
    for i, (argument, gradient) in enumerate(zip(arguments, gradients, strict=True)):
        for at in np.ndindex(argument.shape):
            values = []
            for step in (h, -h):
                moved = [a.copy() for a in arguments]
                moved[i][at] += step
                values.append((dy * forward(*moved)).sum())
            assert abs((values[0] - values[1]) / (2 * h) - gradient[at]) < 1e-4


def test_sigmoid_and_tanh_of_large_arguments():
    x = np.array([-np.inf, -1000, 0, 1000, np.inf])
    np.testing.assert_array_equal(reference.sigmoid(x), [0, reference.sigmoid(x)[1], 0.5, 1, 1])
    np.testing.assert_array_equal(reference.tanh(x), [-1, -1, 0, 1, 1])


def test_lstm_step_matches_a_hand_computation():
    """Two hidden units: LN of any two numbers a > b is (1, -1) with eps = 0, so every gate is known."""
    hidden = 2
    ones, zeros = np.ones(4 * hidden), np.zeros(4 * hidden)
    weights = {
        "weight_x": np.repeat([[1.0], [-1.0]], 4, axis=0),
        "weight_h": np.zeros((4 * hidden, hidden)),
        "bias": np.arange(4 * hidden) / 10,
        "gain_x": ones,
        "bias_x": zeros,
        "gain_h": ones,
        "bias_h": zeros,
        "gain_c": np.ones(hidden),
        "bias_c": np.zeros(hidden),
    }
    h, c = reference.lstm_ba2016(weights, [3.0], [0.5, 0.5], [0.2, -0.2], eps=0)
    f, i, o, g = (np.array([1, 1, 1, 1, -1, -1, -1, -1]) + weights["bias"]).reshape(4, hidden)

    def sigmoid(v):
        return 1 / (1 + np.exp(-v))

    expected_c = sigmoid(f) * [0.2, -0.2] + sigmoid(i) * np.tanh(g)
    np.testing.assert_allclose(c, expected_c, rtol=1e-14)
    order = np.where(expected_c > expected_c.mean(), 1, -1)
    np.testing.assert_allclose(h, sigmoid(o) * np.tanh(order), rtol=1e-14)
