"""Frames and weights with numbers near the end of the range of float32, whose products would be subnormal."""

import numpy as np
import pytest
from cells import random_cell

import cnorm

U = 2.0**-24
INPUTS, UNITS, FRAMES = 75, 37, 40
FAMILIES = {
    "subnormal": lambda v, rng: v * 2.0**-135,
    "small": lambda v, rng: v * 2.0**-100,
    "some subnormal": lambda v, rng: np.where(rng.random(v.shape) < 0.3, v * 2.0**-135, v),
    "decaying": lambda v, rng: v * 2.0 ** (-4.0 * np.arange(len(v)))[:, None],
    "any magnitude": lambda v, rng: np.sign(v) * 2.0 ** rng.uniform(-149, 60, v.shape),
    "large and tiny": lambda v, rng: v * np.where(rng.random(v.shape) < 0.5, 2.0**-110, 2.0**110),
}
every_family = pytest.mark.parametrize("family", FAMILIES)


def frames(family, rng):
    return FAMILIES[family](rng.standard_normal((FRAMES, INPUTS)), rng).astype(np.float32)


def linear(rng, bias=None):
    return cnorm.Linear((rng.standard_normal((UNITS, INPUTS)) / 8).astype(np.float32), bias)


def allowed(layer, x):
    """Roundings of a term, what is below 2^-63 of the largest of its frame or matrix, and results below 2^-126."""
    weight, x = np.abs(np.float64(layer.weights["weight"])), np.abs(np.float64(x))
    roundings = 1 + min(16, INPUTS) + -(-INPUTS // 16) + 1
    left_out = INPUTS * 2.0**-62 * x.max(axis=1, keepdims=True) * weight.max()
    return roundings * U * (x @ weight.T) + left_out + 2.0**-126


@every_family
def test_products_are_right(family, isa, rng):
    layer, x = linear(rng), frames(family, rng)
    y = cnorm.Model([layer]).run(x)
    exact = np.float64(x) @ np.float64(layer.weights["weight"]).T
    assert (np.abs(y - exact) <= allowed(layer, x)).all()
    assert family != "small" or np.abs(y).max() > 2.0**-100


@pytest.mark.parametrize(
    ("family", "key"),
    [(family, ("LSTM", "torch")) for family in FAMILIES] + [("some subnormal", key) for key in sorted(cnorm.PRESETS)],
    ids=str,
)
def test_neighbours_and_paths_change_no_bit(family, key, rng):
    model = cnorm.Model([random_cell(key, rng, INPUTS, 20)[0]])
    x = frames(family, rng)
    x[::3] = rng.standard_normal(x[::3].shape)  # ordinary ones between them
    results = []
    for isa in cnorm.available_isas():
        cnorm.use_isa(isa)
        y = model.run(x)
        stream = model.stream()
        assert np.stack([stream.step(frame) for frame in x]).tobytes() == y.tobytes()
        streams, alone = [model.stream() for _ in x], [model.stream() for _ in x]
        for first, second in zip(streams[::2], alone[::2], strict=True):
            state = {name: np.full_like(value, 2.0**-60) for name, value in first.state().items()}
            first.set_state(state)
            second.set_state(state)
        for _ in range(3):
            many = model.step_many(streams, x)
            single = np.stack([stream.step(frame) for stream, frame in zip(alone, x, strict=True)])
            assert many.tobytes() == single.tobytes()
        results.append(y.tobytes())
    assert len(set(results)) == 1


def test_an_ordinary_frame_beside_a_tiny_one_keeps_its_subnormal_results(rng):
    model = cnorm.Model([cnorm.Linear((rng.standard_normal((UNITS, INPUTS)) * 2.0**-100).astype(np.float32), None)])
    x = (rng.uniform(1, 2, (4, INPUTS)) * 2.0**-35).astype(np.float32)
    alone = model.run(x[1:])
    assert (np.abs(alone) < 2.0**-126).any()
    assert alone.any(axis=1).all()
    x[0] = 2.0**-140
    assert model.run(x)[1:].tobytes() == alone.tobytes()


def test_a_power_of_two_changes_no_bit(rng):
    """The units that a frame is multiplied in are not seen: tiny and ordinary frames have the same significands."""
    model, x = cnorm.Model([linear(rng)]), rng.standard_normal((FRAMES, INPUTS)).astype(np.float32)
    y = model.run(x)
    assert model.run(x * np.float32(2.0**-80)).tobytes() == (y * np.float32(2.0**-80)).tobytes()


def test_an_infinity_or_nan_is_seen(rng):
    layer = linear(rng)
    x = frames("some subnormal", rng)
    x[3, 5], x[4, 6] = np.inf, np.nan
    y = cnorm.Model([layer]).run(x)
    column = layer.weights["weight"][:, 5]
    assert (y[3] == np.where(column > 0, np.inf, -np.inf)).all()
    assert np.isnan(y[4]).all()
    assert np.isfinite(np.delete(y, [3, 4], axis=0)).all()


def test_weights_that_are_tiny_beside_the_largest_are_zero(rng):
    weight = rng.standard_normal((UNITS, INPUTS)).astype(np.float32)
    tiny = rng.random(weight.shape) < 0.1
    zeros = np.where(tiny, np.float32(0), weight)
    x = rng.standard_normal((FRAMES, INPUTS)).astype(np.float32)
    wanted = cnorm.Model([cnorm.Linear(zeros, None)]).run(x).tobytes()
    for scale in (1e-39, 2.0**-68):
        layer = cnorm.Linear(np.where(tiny, weight * np.float32(scale), weight), None)
        assert cnorm.Model([layer]).run(x).tobytes() == wanted
        assert (layer.weights["weight"][tiny] != 0).all()
    kept = cnorm.Linear(weight * np.float32(2.0**-90), None)
    assert np.abs(cnorm.Model([kept]).run(x)).max() > 2.0**-90


@pytest.mark.parametrize("largest", [2.0**20, 2.0**57, 2.0**100])
def test_a_large_weight_takes_nothing_from_others(largest, rng):
    """Of an output that does not read it, and of a token that is another row."""
    weight, x = rng.standard_normal((UNITS, INPUTS)).astype(np.float32), rng.standard_normal((FRAMES, INPUTS))
    x = x.astype(np.float32)
    wanted = cnorm.Model([cnorm.Linear(weight, None)]).run(x)
    large = weight.copy()
    large[3, 5] = largest
    found = cnorm.Model([cnorm.Linear(large, None)]).run(x)
    assert np.delete(found, 3, axis=1).tobytes() == np.delete(wanted, 3, axis=1).tobytes()
    x[:, 5] = 0
    assert (
        cnorm.Model([cnorm.Linear(large, None)]).run(x).tobytes()
        == cnorm.Model([cnorm.Linear(weight, None)]).run(x).tobytes()
    )
    tokens = np.arange(UNITS, dtype=np.float32)[:, None]
    assert cnorm.Model([cnorm.Embedding(large)]).run(tokens).tobytes() == large.tobytes()
