"""One hash of gradients: that of tests/c/test_train.c, from `cnorm.Learner` and from `cnorm.torch`."""

import re
from pathlib import Path

import numpy as np
import pytest

import cnorm

TEST = Path(__file__).parents[1] / "c" / "test_train.c"
STEPS, INPUTS, UNITS = 19, 12, 64
HASHED = ("weight_x", "weight_h", "gain_x", "gain_h", "bias", "gain_c", "bias_c")


def bell(seed):
    """The random numbers of tests/c/check.h: sums of twelve 20-bit numbers of splitmix64."""
    mask = (1 << 64) - 1
    while True:
        total = -6 << 20
        for _ in range(4):
            seed = z = (seed + 0x9E3779B97F4A7C15) & mask
            z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
            z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
            z ^= z >> 31
            total += (z >> 44) + (z >> 24 & 0xFFFFF) + (z >> 4 & 0xFFFFF)
        yield total * 2.0**-20


def drawn(numbers, *shape, mean=0.0, scale=1.0):
    values = [mean + scale * next(numbers) for _ in range(int(np.prod(shape)))]
    return np.array(values).astype(np.float32).reshape(shape)


@pytest.fixture(scope="module")
def case():
    """Weights, x and dy of one_cell in test_train.c."""
    numbers, gates = bell(INPUTS * 10007 + UNITS * 101 + 9), 4 * UNITS
    weights = {
        "weight_x": drawn(numbers, gates, INPUTS, mean=0.1, scale=0.25),
        "weight_h": drawn(numbers, gates, UNITS, mean=-0.1, scale=0.25),
        "gain_x": drawn(numbers, gates, mean=1, scale=0.25),
        "gain_h": drawn(numbers, gates, mean=1, scale=0.25),
        "bias": drawn(numbers, gates, scale=0.5),
        "gain_c": drawn(numbers, UNITS, mean=1, scale=0.25),
        "bias_c": drawn(numbers, UNITS, scale=0.25),
        "bias_x": np.zeros(gates, np.float32),
        "bias_h": np.zeros(gates, np.float32),
    }
    numbers = bell(1607)
    return weights, drawn(numbers, STEPS, INPUTS), drawn(numbers, STEPS, UNITS)


def assert_hash_is_that_of_c(gradients):
    found = 0xCBF29CE484222325  # FNV-1a
    for name in HASHED:
        for byte in gradients[name].tobytes():
            found = (found ^ byte) * 0x100000001B3 & (1 << 64) - 1
    wanted = re.search(r"cell_hash = (0x\w+)u;", TEST.read_text())
    assert wanted, "tests/c/test_train.c has no cell_hash"
    assert f"0x{found:016x}" == wanted[1]


def test_of_a_learner(case, isa):
    weights, x, dy = case
    learner = cnorm.Learner(cnorm.Model([cnorm.LSTM(weights, preset="ba2016")]), cnorm.SGD(1.0), truncate=STEPS)
    for frame in x:
        learner.step(frame)
    learner.learn(dy)
    parameters, start, gradients = learner.parameters, 0, {}
    for name, array in parameters.arrays.items():
        gradients[name.removeprefix("layers.0.")] = parameters.gradient[start : start + array.size]
        start += array.size
    assert_hash_is_that_of_c(gradients)


def test_of_a_module_for_pytorch(case, isa):
    torch = pytest.importorskip("torch")
    import cnorm.torch

    weights, x, dy = case
    module = cnorm.torch.LSTM(INPUTS, UNITS, preset="ba2016")
    module.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    module(torch.from_numpy(x)[:, None])[0].backward(torch.from_numpy(dy)[:, None])
    assert_hash_is_that_of_c({name: p.grad.numpy() for name, p in module.named_parameters()})
