"""The state of a stream, the format in which it is saved, and inputs with NaN or infinity."""

import copy
import pickle
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from cells import random_cell
from models import deep_model

import cnorm

HEADER = Path(__file__).parents[2] / "src" / "include" / "cnorm_model.h"


@pytest.fixture
def model(rng):
    return deep_model(rng)


def sealed(body):
    return body + zlib.crc32(body).to_bytes(4, "little")


# ---- format 3 --------------------------------------------------------------------------------------------------------


def test_the_layout_is_that_of_the_documentation(model, rng):
    stream = model.stream()
    stream.process(rng.standard_normal((3, 5)).astype(np.float32))
    saved, state = stream.save(), stream.state()
    floats = np.concatenate(list(state.values())).astype("<f4")
    magic, identity, frames, arithmetic = struct.unpack_from("<16s32sQI", saved)
    assert magic == b"cnorm stream 3\n\0"
    assert identity == model.identity
    assert frames == 3
    assert f"CNORM_ARITHMETIC = {arithmetic}," in HEADER.read_text()
    assert saved[60:-4] == floats.tobytes()
    assert struct.unpack("<I", saved[-4:]) == (zlib.crc32(saved[:-4]),)


def test_every_changed_bit_is_refused(model, rng):
    """CRC-32 detects every burst error of up to 32 bits; here each single bit, and 100,000 random changes."""
    stream = model.stream()
    stream.process(rng.standard_normal((3, 5)).astype(np.float32))
    saved = stream.save()
    bits = np.concatenate([np.arange(8 * len(saved)), rng.integers(0, 8 * len(saved), 100_000)])
    accepted = []
    for bit in bits.tolist():
        changed = bytearray(saved)
        changed[bit // 8] ^= 1 << bit % 8
        try:
            stream.restore(changed)
        except ValueError:
            continue
        accepted.append(bit)
    assert accepted == []


def test_every_changed_byte_is_refused(rng):
    layer, _ = random_cell(("GRU", "torch"), rng, 3, 2)
    stream = cnorm.Model([layer]).stream()
    saved = stream.save()
    for place in range(len(saved)):
        for value in set(range(256)) - {saved[place]}:
            with pytest.raises(ValueError, match="saved"):
                stream.restore(saved[:place] + bytes([value]) + saved[place + 1 :])


def test_mixed_halves_of_two_states_are_refused(model, rng):
    one, other = model.stream(), model.stream()
    one.process(rng.standard_normal((3, 5)).astype(np.float32))
    one, other = one.save(), other.save()
    for cut in range(61, len(one) - 4):
        if one[cut:-4] != other[cut:-4] and one[:cut] != other[:cut]:
            with pytest.raises(ValueError, match="saved"):
                model.restore(one[:cut] + other[cut:])


def test_another_arithmetic_is_refused_by_name(model):
    saved = model.stream().save()
    with pytest.raises(ValueError, match=r"saved must be what Stream\.save returned"):
        model.restore(sealed(b"cnorm stream 2\n\0" + saved[16:-4]))
    with pytest.raises(ValueError, match="saved is of generation 3 of the arithmetic"):
        model.restore(sealed(saved[:56] + struct.pack("<I", 3) + saved[60:-4]))


def test_a_refused_state_leaves_the_stream_as_it_was(model, rng):
    stream = model.stream()
    stream.process(rng.standard_normal((3, 5)).astype(np.float32))
    saved = stream.save()
    spoilt = saved[:-8] + np.float32(np.nan).tobytes()
    for bad in (b"", saved[:-1], saved + b"\0", sealed(spoilt), sealed(saved[:-4] + b"\0" * 4), sealed(saved[:60])):
        with pytest.raises(ValueError, match="saved"):
            stream.restore(bad)
        assert stream.save() == saved


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview, lambda saved: memoryview(saved).cast("f")])
def test_restore_accepts_any_bytes_like_object(model, make):
    assert model.restore(make(model.stream().save())).frames == 0


# ---- identity, frames, repr ------------------------------------------------------------------------------------------


def test_identity_is_that_of_configuration_and_weights(rng, tmp_path):
    layer, _ = random_cell(("GRU", "torch"), rng, 3, 2)
    model = cnorm.Model([layer])
    model.save(tmp_path / "model")
    assert len(model.identity) == 32
    assert cnorm.load(tmp_path / "model").identity == model.identity == cnorm.Model([layer]).identity
    assert cnorm.Model([layer, cnorm.Activation("relu")]).identity != model.identity
    assert cnorm.Model([cnorm.Bidirectional(layer, layer)]).identity != model.identity


def test_frames_counts_steps(model, rng):
    x = rng.standard_normal((6, 5)).astype(np.float32)
    one, other = model.stream(), model.stream()
    assert one.frames == 0
    one.step(x[0])
    one.process(x)
    one.process(x[:0])
    assert one.frames == 7
    model.step_many([one, other], x[:2])
    assert (one.frames, other.frames) == (8, 1)
    model.step_many([one, other], x[:2], reset=np.array([True, False]))
    assert (one.frames, other.frames) == (1, 2)
    other.set_state(one.state())
    assert other.frames == 2
    for again in (
        copy.copy(other),
        copy.deepcopy(other),
        pickle.loads(pickle.dumps(other)),
        model.restore(other.save()),
    ):
        assert again.frames == 2
    with pytest.raises(ValueError, match="x must"):
        other.step(x[0, :4])
    assert other.frames == 2
    one.reset(other.state())
    other.reset()
    assert (one.frames, other.frames) == (0, 0)
    with pytest.raises(AttributeError):
        one.frames = 3


def test_repr_names_the_model_and_the_position(model):
    stream = model.stream()
    stream.process(np.zeros((4, 5), np.float32))
    assert repr(stream) == f"Stream({model!r}, frames=4)"


# ---- NaN and infinity ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_is_finite(model, bad):
    stream = model.stream()
    assert stream.is_finite is True
    stream.step(np.array([0, 0, bad, 0, 0], np.float32))
    assert stream.is_finite is False
    stream.process(np.zeros((1000, 5), np.float32))
    assert stream.is_finite is False
    stream.reset()
    assert stream.is_finite is True


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_check_rejects_input_before_the_state_changes(model, rng, bad):
    stream, other = model.stream(check=True), model.stream()
    x = rng.standard_normal((6, 5)).astype(np.float32)
    assert stream.process(x).tobytes() == other.process(x).tobytes()
    saved = stream.save()
    x[4, 2] = bad
    with pytest.raises(ValueError, match=rf"^x must be finite, got {bad} in x\[4, 2\]$"):
        stream.process(x)
    with pytest.raises(ValueError, match=rf"^x must be finite, got {bad} in x\[2\]$"):
        stream.step(x[4])
    with pytest.raises(ValueError, match=rf"^x\[1\] must be finite, got {bad} in x\[1\]\[2\]$"):
        model.step_many([other, stream], x[3:5])
    assert stream.save() == saved == other.save()
    model.step_many([stream, other], x[3:5])  # the row of the stream that does not check
    assert stream.is_finite
    assert not other.is_finite


def test_copies_of_a_checking_stream_check(model):
    stream = model.stream(check=True)
    bad = np.full(5, np.nan, np.float32)
    for again in (copy.copy(stream), pickle.loads(pickle.dumps(stream)), model.restore(stream.save(), check=True)):
        with pytest.raises(ValueError, match="finite"):
            again.step(bad)
    model.restore(stream.save()).step(bad)


# ---- initial states of whole sequences -------------------------------------------------------------------------------


def test_initial_states_of_a_bidirectional_model(rng):
    """Each direction is a model by itself, the backward one on the reversed sequence."""
    first, _ = random_cell(("LSTM", "torch"), rng, 5, 3)
    forward, _ = random_cell(("GRU", "torch"), rng, 3, 4)
    backward, _ = random_cell(("LSTM", "ba2016"), rng, 3, 2)
    last, _ = random_cell(("GRU", "torch"), rng, 6, 2)
    model = cnorm.Model([first, cnorm.Bidirectional(forward, backward), last])
    names = {"h0": (first, "h0"), "c0": (first, "c0"), "h1": (forward, "h0"), "h2": (backward, "h0")}
    names |= {"c2": (backward, "c0"), "h3": (last, "h0")}
    state = {
        name: rng.uniform(-1, 1, layer.units if own[0] == "c" else layer.output_size).astype(np.float32)
        for name, (layer, own) in names.items()
    }

    def run(layer, x):
        stream = cnorm.Model([layer]).stream()
        stream.set_state({own: state[name] for name, (its, own) in names.items() if its is layer})
        return stream.process(np.ascontiguousarray(x))

    x = rng.standard_normal((7, 5)).astype(np.float32)
    h = run(first, x)
    h = np.concatenate([run(forward, h), run(backward, h[::-1])[::-1]], axis=1)
    assert model.run(x, state).tobytes() == run(last, h).tobytes()
    assert model.run(x, state).tobytes() != model.run(x).tobytes()
    with pytest.raises(ValueError, match=r"state must have the names \['h0', 'c0', 'h1', 'h2', 'c2', 'h3'\]"):
        model.run(x, {"h0": state["h0"]})
    with pytest.raises(TypeError, match="state must be a mapping"):
        model.run(x, [1])
    with pytest.raises(ValueError, match=r"state\['c2'\] must be finite"):
        model.run(x, state | {"c2": np.full(2, np.nan, np.float32)})


def test_an_initial_state_of_a_plain_model(model, rng):
    x, stream = rng.standard_normal((4, 5)).astype(np.float32), model.stream()
    stream.process(x)
    state = stream.state()
    assert model.run(x, state).tobytes() == stream.process(x).tobytes()


def test_the_weights_of_a_layer_stay_read_only(rng):
    """The flag of an array with memory of its own could be set again, and the model's hash was no longer its own."""
    layer, _ = random_cell(("GRU", "torch"), rng, 3, 2)
    for array in layer.weights.values():
        while isinstance(array, np.ndarray):
            with pytest.raises(ValueError, match="WRITEABLE"):
                array.flags.writeable = True
            array = array.base


def test_a_model_in_a_notebook(model):
    text = model._repr_html_()  # IPython calls it
    assert model.identity.hex()[:12] in text
    assert text.count("<tr>") == len(model.layers)
    assert "5 -> " not in text


def test_is_finite_ignores_the_padding(rng):
    """An infinite input makes the padding NaN, 0 times infinity, but not the state, as sigmoid and tanh saturate."""
    layer, _ = random_cell(("GRU", "torch"), rng, 3, 2)
    stream = cnorm.Model([layer]).stream()
    stream.step(np.float32([np.inf, 0, 0]))
    assert all(np.isfinite(array).all() for array in stream.state().values())
    assert stream.is_finite
