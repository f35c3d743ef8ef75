"""The examples of training and of online learning give the documented results."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import cnorm

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name, folder="online"):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_recogniser_adapts_to_a_changed_channel(capsys):
    found = example("adapt").main()
    assert "named on arrival" in capsys.readouterr().out
    assert found["changed"] < found["clean"] - 5
    assert found["adapted"] > found["changed"] + 5


@pytest.mark.exhaustive
def test_training_writes_the_same_file_on_every_instruction_set(tmp_path, capsys):
    train, before, written = example("train", "japanese_vowels"), cnorm.active_isa(), set()
    try:
        for isa in cnorm.available_isas():
            cnorm.use_isa(isa)
            train.main(["--seeds", "1", "--epochs", "2", "--out", str(tmp_path / f"{isa}.safetensors")])
            written.add((tmp_path / f"{isa}.safetensors").read_bytes())
    finally:
        cnorm.use_isa(before)
    assert len(written) == 1
    assert float(capsys.readouterr().out.split()[2]) > 50  # percent; 11 by chance


def test_learn_one_learns(rng):
    """The target is which of two inputs was on two steps ago, which only a recurrent state can tell."""
    spec = cnorm.PRESETS["GRU", "ba2016"]
    sizes = {"H": 16, "2H": 32, "I": 2}
    weights = {
        name: (rng.standard_normal([sizes[a] for a in shape.split()]) / 4).astype(np.float32)
        if "weight" in meaning
        else np.full(sizes[shape], "gain" in meaning, np.float32)
        for name, shape, meaning in spec.weights
    }
    head = cnorm.Linear(np.zeros((2, 16), np.float32), np.zeros(2, np.float32))
    model = cnorm.Model([cnorm.GRU(weights, preset="ba2016"), head])
    one = example("learn_one").OnlineClassifier(
        cnorm.Learner(model, cnorm.Adam(1e-2, clip=1.0), truncate=16), ["a", "b"], ["left", "right"]
    )
    bits = rng.integers(0, 2, 3000)
    right = []
    for t in range(2, len(bits)):
        x, y = {"a": float(bits[t]), "b": 1.0 - bits[t]}, ["left", "right"][bits[t - 2]]
        right.append(one.predict_one(x) == y)
        one.learn_one(x, y)
    assert np.mean(right[:50]) < 0.75
    assert np.mean(right[-500:]) > 0.95
    with pytest.raises(ValueError, match="y must be one of"):
        one.learn_one({"a": 0.0, "b": 1.0}, "neither")
