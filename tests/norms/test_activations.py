"""sigmoid and tanh in float32: at most 1 ULP, monotone, exact in the limits."""

import numpy as np
import pytest
import reference
import tolerances

from cnorm import _core

pytestmark = pytest.mark.usefixtures("isa")
both = pytest.mark.parametrize("name", ["sigmoid", "tanh"])
LARGEST = np.finfo(np.float32).max
SMALLEST = np.finfo(np.float32).smallest_subnormal


def positive_floats(step):
    """Every `step`-th positive float32, 0 and infinity included, in increasing order."""
    bits = np.append(np.arange(0, 0x7F800000, step, np.uint32), np.uint32(0x7F800000))
    return bits.view(np.float32)


@both
def test_at_most_one_ulp(name):
    x = positive_floats(1499)
    for sign in 1, -1:
        y = getattr(_core, name)(sign * x)
        exact = getattr(reference, name)(sign * x)
        error = tolerances.ulps(y, exact)
        worst = np.argmax(error)
        assert error[worst] <= 1, f"{name}({sign * x[worst]!r}) = {y[worst]!r}, wanted {exact[worst]!r}"


@both
def test_monotone_over_neighbouring_floats(rng, name):
    """4000 runs of 256 consecutive floats, of every magnitude at which the function is not yet constant."""
    function = getattr(_core, name)
    highest = int(np.float32(110).view(np.uint32))
    starts = np.concatenate([rng.integers(0, highest, 2000), np.float32(rng.uniform(0, 20, 2000)).view(np.uint32)])
    x = (starts[:, None] + np.arange(256)).astype(np.uint32).view(np.float32)
    assert (np.diff(function(x), axis=1) >= 0).all()
    assert (np.diff(function(-x), axis=1) <= 0).all()


@both
def test_monotone_over_the_whole_range(name):
    x = positive_floats(1499)
    x = np.concatenate([-x[::-1], x])
    assert (np.diff(getattr(_core, name)(x)) >= 0).all()


def test_saturated_values_are_exact():
    far = np.array([110, 1e3, 1e10, LARGEST, np.inf], np.float32)
    assert (_core.tanh(far) == 1).all()
    assert (_core.tanh(-far) == -1).all()
    assert (_core.sigmoid(far) == 1).all()
    np.testing.assert_array_equal(_core.sigmoid(-far), np.zeros(5))
    assert not np.signbit(_core.sigmoid(-far)).any()
    assert (_core.sigmoid(np.array([0, -0.0], np.float32)) == 0.5).all()


def test_tanh_keeps_the_sign_of_zero_and_subnormals():
    y = _core.tanh(np.array([0, -0.0, SMALLEST, -SMALLEST], np.float32))
    np.testing.assert_array_equal(y, np.array([0, 0, SMALLEST, -SMALLEST], np.float32))
    assert np.signbit(y).tolist() == [False, True, False, True]


@both
def test_nan_propagates_to_its_own_element_only(name):
    for n in range(1, 40):
        x = np.linspace(-3, 3, n, dtype=np.float32)
        x[n // 2] = np.nan
        assert np.isnan(getattr(_core, name)(x)).tolist() == (np.arange(n) == n // 2).tolist()


@both
def test_bits_do_not_depend_on_length_position_or_output(rng, name):
    function = getattr(_core, name)
    x = rng.uniform(-10, 10, 200).astype(np.float32)
    whole = function(x)
    for n in range(70):
        assert function(x[n:]).tobytes() == whole[n:].tobytes()
        assert function(x[:n]).tobytes() == whole[:n].tobytes()
    out = np.empty_like(x)
    assert function(x, out=out) is out
    assert out.tobytes() == whole.tobytes()
    assert function(x, out=x) is x
    assert x.tobytes() == whole.tobytes()


@both
def test_rejects_other_dtypes_and_shapes(name):
    function = getattr(_core, name)
    with pytest.raises(TypeError):
        function(np.zeros(3, np.int32))
    with pytest.raises(TypeError):
        function(np.zeros(3, np.float32), out=np.zeros(3, np.float64))
    with pytest.raises(ValueError, match="out"):
        function(np.zeros(3, np.float32), out=np.zeros(4, np.float32))
