"""`cnorm.Learner`: a stream's bits, exact gradients over its memory, PyTorch's update rules, atomic updates."""

import json
import tracemalloc
import zlib

import cells
import numpy as np
import pytest
import safetensors.numpy

import cnorm
from cnorm.learner import HEAD


def small_model(rng, key=("LSTM", "ba2016"), outputs=3):
    head = cnorm.Linear((rng.standard_normal((outputs, 8)) / 3).astype(np.float32), np.zeros(outputs, np.float32))
    return cnorm.Model([cells.random_cell(key, rng, 5, 8)[0], head])


def frames(rng, steps, inputs=5):
    return rng.standard_normal((steps, inputs)).astype(np.float32)


def weights_of(model):
    return [array.tobytes() for layer in model.layers for array in layer.weights.values()]


def test_repr_names_sizes_optimizer_and_memory(rng):
    learner = cnorm.Learner(small_model(rng), cnorm.SGD(0.1), truncate=4)
    learner.step(frames(rng, 1)[0])
    sgd = "SGD(lr=0.1, momentum=0.0, clip=None)"
    assert repr(learner) == f"Learner(5 -> 3, {sgd}, truncate=4, remembered=1)"


def test_a_step_has_the_bits_of_a_stream_before_and_after_learning(isa, rng):
    learner = cnorm.Learner(small_model(rng), cnorm.Adam(1e-2, clip=1.0), truncate=4)
    for _ in range(3):
        model = learner.model()
        learner.reset()
        stream = model.stream()
        for x in frames(rng, 11):  # more than the learner's memory
            assert learner.step(x).tobytes() == stream.step(x).tobytes()
        learner.learn(loss="cross_entropy", target=1)
        assert weights_of(learner.model()) != weights_of(model)


@pytest.mark.parametrize("key", [("LSTM", "ba2016"), ("LSTM", "ba2016_code"), ("LSTM", "torch"), ("GRU", "keras")])
def test_updates_are_those_of_adam_on_the_models_own_tensors(key, rng):
    """Adam's formula in float64, with the gradient taken from the update of SGD with lr = 1."""
    model = small_model(rng, key)
    x, dy = frames(rng, 6), frames(rng, 6, 3)
    plain, adam = cnorm.Learner(model, cnorm.SGD(2.0**-10)), cnorm.Learner(model, cnorm.Adam(1e-3))
    for learner in (plain, adam):
        for frame in x:
            learner.step(frame)
        learner.learn(dy)
    for before, one, other in zip(model.layers, plain.model().layers, adam.model().layers, strict=True):
        for name, array in before.weights.items():
            gradient = (np.float64(array) - one.weights[name]) * 2**10
            sure = np.abs(gradient) > 1e-2  # the difference of weights determines it to 1e-4
            step = np.float64(array) - other.weights[name]
            wanted = 1e-3 * gradient / (np.abs(gradient) + 1e-8)  # both moments corrected: g / |g|
            assert np.abs(step - wanted)[sure].max(initial=0) < 1e-6, name


def test_gradients_without_an_update_are_added_to_the_next(rng):
    """Two sequences, one update: that of the sum of their gradients, also when saved in between."""
    model, dy = small_model(rng), frames(rng, 1, 3)[0]
    sequences = [frames(rng, 5), frames(rng, 3)]
    alone, together = [], cnorm.Learner(model, cnorm.SGD(1.0))
    for i, x in enumerate(sequences):
        learner = cnorm.Learner(model, cnorm.SGD(1.0))
        for one in (learner, together):
            one.reset()
            for frame in x:
                one.step(frame)
        learner.learn(dy)
        alone.append(learner)
        before = weights_of(together.model())
        together.learn(dy, update=i == 1)
        assert (weights_of(together.model()) == before) == (i == 0)
        together = cnorm.Learner.restore(together.save())
    start, end = model.layers[0].weights, together.model().layers[0].weights
    for name, array in start.items():
        moved = sum(np.float64(one.model().layers[0].weights[name]) - array for one in alone)
        assert np.abs(np.float64(end[name]) - array - moved).max() <= 4 * 2.0**-24 * np.abs(array).max() + 1e-6, name
    together.step(sequences[0][0])
    together.learn(np.zeros(3, np.float32))
    assert weights_of(together.model())[:9] == [array.tobytes() for array in end.values()]  # nothing is left over


def test_memory_is_exact_over_the_last_steps_only(rng):
    """Steps before the memory matter only through the state: a learner started from it makes the same update."""
    model, x = small_model(rng), frames(rng, 9)
    dy = frames(rng, 1, 3)[0]
    long, short = (cnorm.Learner(model, cnorm.SGD(0.5), truncate=4) for _ in range(2))
    for frame in x:
        long.step(frame)
    stream = model.stream()
    stream.process(x[:5])
    state = stream.state()
    for frame in x[:5]:
        short.step(frame)
    short.forget()
    for frame in x[5:]:
        short.step(frame)
    assert state.keys() == {"h0", "c0"}
    long.learn(dy)
    short.learn(dy)
    assert weights_of(long.model()) == weights_of(short.model())


def test_learning_continues_with_the_same_bits_after_restore(rng):
    learner = cnorm.Learner(small_model(rng), cnorm.Adam(1e-2, clip=0.5), truncate=3)
    for t, x in enumerate(frames(rng, 20)):
        learner.step(x)
        if t % 5 == 2:
            learner.learn(loss="squared_error", target=np.ones(3, np.float32))
    other = cnorm.Learner.restore(learner.save())
    assert other.save() == learner.save()
    for x in frames(rng, 5):
        assert learner.step(x).tobytes() == other.step(x).tobytes()
    for one in (learner, other):
        one.learn(loss="cross_entropy", target=[0, 2])
    assert weights_of(learner.model()) == weights_of(other.model())
    assert other.save() == learner.save()


@pytest.mark.parametrize("damage", [b"", b"x" * 100, slice(0, 200), slice(0, -1)], ids=str)
def test_rejects_malformed_saved_learners(damage, rng):
    saved = cnorm.Learner(small_model(rng)).save()
    with pytest.raises(ValueError, match="saved is not what"):
        cnorm.Learner.restore(saved[damage] if isinstance(damage, slice) else damage)
    with pytest.raises(TypeError, match="bytes"):
        cnorm.Learner.restore("saved")


@pytest.mark.parametrize(
    "powers", [["0x1p+5000", "0x1p-1"], ["0x1p-1"], ["nan", "0x1p-1"], ["0x1p+1", "0x1p-1"]], ids=str
)
def test_rejects_saved_learners_with_invalid_powers(powers, rng):
    saved = changed(cnorm.Learner(small_model(rng), cnorm.Adam(1e-2)).save(), powers=powers)
    with pytest.raises(ValueError, match=r"^saved is not what Learner.save wrote: "):
        cnorm.Learner.restore(saved)


def changed(saved, **settings):
    """A save with other settings and a checksum that matches."""
    inner = saved[len(HEAD) : -4]
    metadata = json.loads(inner[8 : 8 + int.from_bytes(inner[:8], "little")])["__metadata__"]
    [(key, text)] = metadata.items()
    tensors = safetensors.numpy.load(inner)
    body = HEAD + safetensors.numpy.save(tensors, {key: json.dumps(json.loads(text) | settings)})
    return body + zlib.crc32(body).to_bytes(4, "little")


def test_every_changed_bit_of_a_save_is_refused(rng):
    """Each bit of the head and of the settings, and others at random: 10^5."""
    learner = cnorm.Learner(small_model(rng), cnorm.Adam(1e-2), truncate=2)
    learner.step(frames(rng, 1)[0])
    saved = learner.save()
    bits = np.arange(8 * len(saved)) if 8 * len(saved) <= 100_000 else rng.permutation(8 * len(saved))[:100_000]
    head = np.arange(8 * 2000)
    for bit in np.unique(np.concatenate([head, bits]))[:100_000].tolist():
        flipped = bytearray(saved)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match=r"^saved is not what Learner.save wrote: "):
            cnorm.Learner.restore(bytes(flipped))


def test_another_format_is_refused(rng):
    learner = cnorm.Learner(small_model(rng))
    with pytest.raises(ValueError, match=r"the format is 2, this version reads 3$"):
        cnorm.Learner.restore(changed(learner.save(), format=2))


@pytest.mark.parametrize("truncate", [10**7, 2**40, 2**70, 0, -1, True, 3.0, "3", None])
def test_a_save_of_other_sizes_is_refused_before_memory_is_taken(truncate, rng):
    saved = changed(cnorm.Learner(small_model(rng), truncate=3).save(), truncate=truncate)
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"^saved is not what Learner.save wrote: truncate and outputs must fit"):
        cnorm.Learner.restore(saved)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * len(saved) + 1_000_000


def test_rejected_input_changes_no_state(rng):
    learner = cnorm.Learner(small_model(rng), truncate=4)
    for x in frames(rng, 3):
        learner.step(x)
    before = learner.save()
    wrong = [
        (TypeError, "either dy or loss", {}),
        (TypeError, "either dy or loss", {"dy": np.zeros(3, np.float32), "loss": "squared_error"}),
        (TypeError, "dy must have dtype float32", {"dy": np.zeros(3)}),
        (ValueError, "dy must have shape", {"dy": np.zeros(4, np.float32)}),
        (ValueError, "dy must have shape", {"dy": np.zeros((4, 3), np.float32)}),
        (ValueError, "loss must be", {"loss": "mean", "target": 1}),
        (ValueError, "target must be", {"loss": "cross_entropy", "target": 3}),
        (ValueError, "target must be", {"loss": "cross_entropy", "target": 0.5}),
        (ValueError, "target must be an integer, or one for each .* got None", {"loss": "cross_entropy"}),
        (ValueError, "target must be", {"loss": "cross_entropy", "target": [0] * 4}),
        (ValueError, "target must have shape", {"loss": "squared_error", "target": np.zeros(2, np.float32)}),
    ]
    for error, match, arguments in wrong:
        with pytest.raises(error, match=match):
            learner.learn(**arguments)
    for x in (np.zeros(5), np.zeros(4, np.float32), [0.0] * 5):
        with pytest.raises((TypeError, ValueError), match="x must"):
            learner.step(x)
    assert learner.save() == before
    with pytest.raises(ValueError, match="at least one step"):
        cnorm.Learner(small_model(rng)).learn(np.zeros(3, np.float32))


def test_a_gradient_that_is_not_finite_is_refused_and_named(rng):
    learner = cnorm.Learner(small_model(rng))
    learner.step(frames(rng, 1)[0])
    before = weights_of(learner.model())
    with pytest.raises(FloatingPointError, match=r"the gradient of layers\.\d\.\w+ is not finite"):
        learner.learn(np.array([0, np.inf, 0], np.float32))
    assert weights_of(learner.model()) == before
    assert learner.remembered == 0
    learner.step(frames(rng, 1)[0])
    learner.learn(np.ones(3, np.float32))
    assert weights_of(learner.model()) != before


def test_memory_is_constant(rng):
    learner = cnorm.Learner(small_model(rng), cnorm.Adam(1e-4), truncate=32)
    x = frames(rng, 1)[0]

    def thousand():
        for t in range(1000):
            learner.step(x)
            if t % 32 == 31:
                learner.learn(loss="cross_entropy", target=0)

    for _ in range(40):  # fills CPython's free list of tuples, which keeps up to 2000 of a length
        thousand()
    tracemalloc.start()
    thousand()
    first = tracemalloc.get_traced_memory()[0]
    for _ in range(8):
        thousand()
    assert tracemalloc.get_traced_memory()[0] < first + 20_000
    tracemalloc.stop()


def test_learns_a_learned_initial_state(rng):
    spec = cnorm.PRESETS["GRU", "ba2016"]
    weights = cells.random_weights(spec, rng, 5, 8) | {"h0": np.zeros(8, np.float32)}
    learner = cnorm.Learner(cnorm.Model([cnorm.GRU(weights, preset="ba2016")]), cnorm.SGD(0.1))
    for _ in range(2):
        learner.step(frames(rng, 1)[0])
        learner.learn(np.ones(8, np.float32))
    moved = learner.model().layers[0].weights["h0"]
    assert (moved != 0).any()
    learner.step(frames(rng, 1)[0])
    learner.learn(np.ones(8, np.float32))
    assert np.array_equal(learner.model().layers[0].weights["h0"], moved)  # the state was not the initial one any more


@pytest.mark.parametrize("arguments", [{"lr": 0}, {"lr": float("nan")}, {"betas": (1, 0)}, {"clip": -1}, {"eps": 0}])
def test_optimizers_reject_invalid_settings(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        cnorm.Adam(**arguments)


def test_a_bidirectional_model_is_refused(rng):
    cell = cells.random_cell(("GRU", "ba2016"), rng, 5, 8)[0]
    with pytest.raises(ValueError, match="bidirectional"):
        cnorm.Learner(cnorm.Model([cnorm.Bidirectional(cell, cell)]))
