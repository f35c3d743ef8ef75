"""The demo's network trained by `cnorm.Learner` and, as a check, by `cnorm.torch`."""

import hashlib
import importlib.util
from pathlib import Path

import numpy as np
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples/japanese_vowels/train.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("japanese_vowels_train", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_learner_and_torch_make_the_same_updates(example):
    """The same weights, batches and noise. Adam divides by |g|, so weights whose gradient is nearly 0 are left out."""
    pytest.importorskip("torch")
    batches = np.array_split(np.arange(12), 3)
    data = example.utterances("train")[::20]
    start = example.network(np.random.default_rng(0))
    one, other = example.ByLearner(start), example.ByTorch(start)
    for batch in batches:
        for trainer in (one, other):
            trainer.learn([data[i] for i in batch], 1e-3)
    for before, ours, theirs in zip(start.layers, one.model().layers, other.model().layers, strict=True):
        assert ours.weights.keys() == theirs.weights.keys()
        for name, array in ours.weights.items():
            moved, gap = np.abs(array - before.weights[name]), np.abs(array - theirs.weights[name])
            assert moved.max() > 1e-3, name
            assert np.quantile(gap, 0.99) < 1e-6, name


def test_a_seed_is_trained_to_the_same_bits_on_every_instruction_set(example, isa):
    data = example.utterances("train")[::20]
    model, curve = example.train(3, data, data[:4], 2)
    assert len(curve) == 2
    bits = b"".join(array.tobytes() for layer in model.layers for array in layer.weights.values())
    assert hashlib.sha256(bits).hexdigest()[:16] == "f3549dc49fe4f17e"
