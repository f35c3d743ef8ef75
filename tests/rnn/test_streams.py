"""Streams: bit-identical however steps are chunked, saved, batched or dispatched; and the input they refuse."""

import copy
import dataclasses
import gc
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import weakref
import zlib
from pathlib import Path

import numpy as np
import pytest
from cells import LAYERS, random_cell, random_weights
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from models import deep_model

import cnorm

KEYS = sorted(cnorm.PRESETS)
ISAS = cnorm.available_isas()


def same(one, other):
    """The same names, and the same bits."""
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert array.tobytes() == other[name].tobytes(), name


# ---- the same bits ---------------------------------------------------------------------------------------------------


class Streams(RuleBasedStateMachine):
    """Some streams of one model, each with its history: the frames since its last reset."""

    model = deep_model(np.random.default_rng(1607))
    frames = np.random.default_rng(7).standard_normal((64, 5)).astype(np.float32)
    plain: dict  # history of frame numbers -> the state and output of plain steps on one instruction set

    @initialize()
    def begin(self):
        self.streams = [(self.model.stream(), ()) for _ in range(3)]
        self.saved = None
        self.plain = {(): (self.model.stream().state(), None)}

    def advanced(self, history, frame):
        """The state and output of a plain step, made once on the first instruction set."""
        if (*history, frame) not in self.plain:
            cnorm.use_isa(ISAS[0])
            stream = self.model.stream()
            stream.set_state(self.plain[history][0])
            y = stream.step(self.frames[frame])
            self.plain[*history, frame] = (stream.state(), y)
        return self.plain[*history, frame]

    which = st.integers(0, 2)
    frame_numbers = st.integers(0, 63)

    @rule(isa=st.sampled_from(ISAS))
    def use_isa(self, isa):
        cnorm.use_isa(isa)

    @rule(which=which, frame=frame_numbers, given_out=st.booleans())
    def step(self, which, frame, given_out):
        stream, history = self.streams[which]
        out = np.empty(3, np.float32) if given_out else None
        y = stream.step(self.frames[frame], out=out)
        assert out is None or y is out
        isa = cnorm.active_isa()
        assert y.tobytes() == self.advanced(history, frame)[1].tobytes()
        cnorm.use_isa(isa)
        self.streams[which] = stream, (*history, frame)

    @rule(which=which, frames=st.lists(frame_numbers, max_size=20))
    def process(self, which, frames):
        stream, history = self.streams[which]
        got = stream.process(self.frames[frames])
        isa = cnorm.active_isa()
        for frame, y in zip(frames, got, strict=True):
            assert y.tobytes() == self.advanced(history, frame)[1].tobytes()
            history = (*history, frame)
        cnorm.use_isa(isa)
        self.streams[which] = stream, history

    @rule(subset=st.permutations(range(3)), count=st.integers(0, 3), frames=st.tuples(*[frame_numbers] * 3),
          reset=st.none() | st.tuples(*[st.booleans()] * 3))  # fmt: skip
    def step_many(self, subset, count, frames, reset):
        subset, frames = subset[:count], list(frames[:count])
        mask = None if reset is None else np.array(reset[:count], bool)
        got = self.model.step_many([self.streams[i][0] for i in subset], self.frames[frames].reshape(-1, 5), reset=mask)
        isa = cnorm.active_isa()
        for row, (i, frame) in enumerate(zip(subset, frames, strict=True)):
            stream, history = self.streams[i]
            history = () if reset is not None and reset[row] else history
            assert got[row].tobytes() == self.advanced(history, frame)[1].tobytes()
            self.streams[i] = stream, (*history, frame)
        cnorm.use_isa(isa)

    @rule(which=which)
    def save(self, which):
        stream, history = self.streams[which]
        self.saved = stream.save(), history

    @precondition(lambda self: self.saved is not None)
    @rule(which=which)
    def restore(self, which):
        data, history = self.saved
        self.streams[which] = self.model.restore(data), history

    @rule(which=which)
    def reset(self, which):
        self.streams[which][0].reset()
        self.streams[which] = self.streams[which][0], ()

    @rule(which=which, way=st.sampled_from([copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))]))
    def duplicate(self, which, way):
        stream, history = self.streams[which]
        self.streams[(which + 1) % 3] = way(stream), history
        stream_of_unpickled = self.streams[(which + 1) % 3][0]
        if stream_of_unpickled.model is not self.model:  # an unpickled stream brings its model
            self.streams[(which + 1) % 3] = self.model.restore(stream_of_unpickled.save()), history

    @invariant()
    def states_are_those_of_plain_steps(self):
        for stream, history in getattr(self, "streams", ()):
            same(stream.state(), self.plain[history][0])


def test_any_interleaving_gives_the_bits_of_plain_steps_on_every_isa():
    before = cnorm.active_isa()
    try:
        run_state_machine_as_test(
            Streams,
            settings=settings(max_examples=40, stateful_step_count=30, suppress_health_check=list(HealthCheck)),
        )
    finally:
        cnorm.use_isa(before)


@pytest.mark.parametrize("units", [3, 16, 40, 65])
@pytest.mark.parametrize("key", KEYS, ids="-".join)
def test_every_preset_has_the_same_bits_everywhere(key, units, rng):
    """Plain steps against process and against many streams, on every instruction set."""
    layer, _ = random_cell(key, rng, 21, units)
    model = cnorm.Model([layer])
    x = rng.standard_normal((21, 21)).astype(np.float32)
    before, seen = cnorm.active_isa(), set()
    try:
        for isa in ISAS:
            cnorm.use_isa(isa)
            stream = model.stream()
            plain = np.stack([stream.step(frame) for frame in x])
            seen.add((plain.tobytes(), stream.save()))
            whole = model.stream()
            seen.add((whole.process(x).tobytes(), whole.save()))
            streams = [model.stream() for _ in range(13)]
            for frame in x:
                rows = model.step_many(streams, np.repeat(frame[None], 13, axis=0))
            assert {row.tobytes() for row in rows} == {plain[-1].tobytes()}
            assert {stream.save() for stream in streams} == {whole.save()}
    finally:
        cnorm.use_isa(before)
    assert len(seen) == 1


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 64])
def test_many_streams_have_the_bits_of_each_alone(count, isa, rng):
    model = deep_model(rng)
    streams = [model.stream() for _ in range(count)]
    x = rng.standard_normal((4, count, 5)).astype(np.float32)
    many = np.stack([model.step_many(streams, frame) for frame in x])
    alone = np.stack([model.stream().process(x[:, i]) for i in range(count)], axis=1)
    assert many.tobytes() == alone.tobytes()
    others, out = [model.stream() for _ in range(count)], np.empty((count, 3, 3), np.float32)
    chunks = [model.step_many(others, x[:3].swapaxes(0, 1), out=out), model.step_many(others, x[3:].swapaxes(0, 1))]
    assert chunks[0] is out
    assert np.concatenate(chunks, axis=1).swapaxes(0, 1).tobytes() == alone.tobytes()
    assert all(stream.frames == 4 for stream in others)


def test_float64_path_rows_have_the_same_bits_in_step_many(isa, rng):
    """Rows whose products leave the range of float32 are computed in float64, one by one."""
    layer, _ = random_cell(("LSTM", "torchaudio"), rng, 6, 20)
    model = cnorm.Model([layer])
    x = (rng.standard_normal((9, 6)) * np.logspace(-30, 37, 9)[:, None]).astype(np.float32)
    many = model.step_many([model.stream() for _ in range(9)], x)
    assert np.isfinite(many).all()
    assert many.tobytes() == b"".join(model.stream().step(frame).tobytes() for frame in x)
    assert model.stream().process(x[::-1].copy())[0].tobytes() == many[-1].tobytes()


def test_gates_longer_than_a_fold_have_the_same_bits_in_step_many(isa, rng):
    """A norm over 4 * 2112 pre-activations: one stream sums their squares during the product, two after it."""
    spec = dataclasses.replace(cnorm.PRESETS["LSTM", "tflite"], name="mine", grouping="joint")
    model = cnorm.Model([cnorm.LSTM(random_weights(spec, rng, 3, 2112, outputs=5), preset=spec)])
    one, streams = model.stream(), [model.stream() for _ in range(2)]
    for x in rng.standard_normal((20, 3)).astype(np.float32):
        rows = model.step_many(streams, np.stack([x, x]))
        assert one.step(x).tobytes() == rows[0].tobytes() == rows[1].tobytes()
        same(one.state(), streams[0].state())


def test_step_many_isolates_infinite_inputs(isa, rng):
    model = deep_model(rng)
    good, bad, other = (model.stream() for _ in range(3))
    x = rng.standard_normal((3, 5)).astype(np.float32)
    x[1, 2] = np.inf
    rows = model.step_many([good, bad, other], x)
    assert np.isnan(rows[1]).all()
    assert rows[0].tobytes() == model.stream().step(x[0]).tobytes()
    assert rows[2].tobytes() == model.stream().step(x[2]).tobytes()
    bad.reset()
    assert np.isfinite(bad.step(x[0])).all()


@pytest.mark.parametrize("key", KEYS, ids="-".join)
def test_extreme_pre_activations_saturate(key, isa, rng):
    layer, _ = random_cell(key, rng, 4, 9)
    stream = cnorm.Model([layer]).stream()
    for scale in (1e4, -1e4, 1e30, 0):
        assert np.isfinite(stream.step(np.full(4, scale, np.float32))).all()


# ---- silence ---------------------------------------------------------------------------------------------------------


SOAK_STEPS = int(os.environ.get("CNORM_SOAK_STEPS", "3000"))  # `make soak`: ten million


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def no_subnormal(array):
    return ((array == 0) | (np.abs(array) >= 2.0**-100)).all()


@pytest.mark.parametrize("key", KEYS, ids="-".join)
def test_state_has_no_subnormal_after_silence(key, rng):
    """Some frames, then zeros: decaying states reach zero, memory does not grow, and a saved state replays its bits."""
    spec = cnorm.PRESETS[key]
    weights = random_weights(spec, rng, 6, 24)
    for name, _, meaning in spec.weights:
        name = name.format(layer=0, even=0, odd=1, reverse="")
        if name in weights and meaning.startswith(("bias", "inside")):
            weights[name] = np.zeros_like(weights[name])  # with them, h would not decay to zero
    layer = type(random_cell(key, rng, 6, 24)[0])(weights, preset=spec, eps=1e-3 if spec.normalises else None)
    stream = cnorm.Model([layer]).stream()
    stream.process(rng.standard_normal((50, 6)).astype(np.float32))
    saved = stream.save()
    quiet, y = np.zeros((1000, 6), np.float32), np.empty((1000, 24), np.float32)
    for frame in quiet:  # the state is checked after each step of the decay
        stream.step(frame)
        for name, array in stream.state().items():
            assert no_subnormal(array), name
    kept = None
    for step in range(1000, SOAK_STEPS, 1000):
        stream.process(quiet, out=y)  # y is h
        assert no_subnormal(y)
        for name, array in stream.state().items():
            assert no_subnormal(array), name
        if step == 1000:
            kept = resident_bytes()
    assert resident_bytes() - kept < 1 << 20
    again = stream.model.restore(saved)
    for _ in range(10):
        again.process(np.zeros((SOAK_STEPS // 10, 6), np.float32))
    assert again.save() == stream.save()


def test_a_decaying_state_ends_at_zero():
    """c = 0.9 c would stay at the smallest subnormal for ever, because rounding restores it."""
    weights = {name: np.zeros(shape, np.float32) for name, shape in (("kernel", (1, 4)), ("recurrent_kernel", (1, 4)))}
    stream = cnorm.Model([cnorm.LSTM(weights, preset="keras")]).stream()
    stream.set_state({"h0": np.ones(1, np.float32), "c0": np.ones(1, np.float32)})
    stream.process(np.zeros((200, 1), np.float32))
    same(stream.state(), {"h0": np.zeros(1, np.float32), "c0": np.zeros(1, np.float32)})


TINY = np.float32([2.0**-100, -(2.0**-100), 2.0**-101, -(2.0**-101), 2.0**-149, 0.5])


def without_tiny(array):
    return np.where(np.abs(array) < 2.0**-100, np.float32(0), array)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_subnormal_h_after_zoneout_is_flushed_to_zero(kind, isa, rng):
    """With these weights the new h is zero, so zoneout stores half of the old h."""
    spec = dataclasses.replace(cnorm.PRESETS[kind, "haste"], name="mine", zoneout=0.5)
    weights = {name: np.zeros_like(array) for name, array in random_weights(spec, rng, 3, 6).items()}
    weights["bias"][:6] = -200  # closes the update gate of the GRU
    stream = cnorm.Model([LAYERS[kind](weights, preset=spec)]).stream()
    stream.set_state(stream.state() | {"h0": 2 * TINY})
    assert stream.step(np.zeros(3, np.float32)).tobytes() == without_tiny(TINY).tobytes()


def test_subnormal_c_after_a_norm_is_flushed_to_zero(isa, rng):
    """A cell that carries LN(c) stores its bias where the gain is zero."""
    weights = random_weights(cnorm.PRESETS["LSTM", "torch_custom"], rng, 3, 6)
    weights |= {"layernorm_c.weight": np.zeros(6, np.float32), "layernorm_c.bias": TINY}
    stream = cnorm.Model([cnorm.LSTM(weights, preset="torch_custom")]).stream()
    stream.step(np.ones(3, np.float32))
    assert stream.state()["c0"].tobytes() == without_tiny(TINY).tobytes()


def test_subnormal_h_after_a_projection_is_flushed_to_zero(isa, rng):
    weights = random_weights(cnorm.PRESETS["LSTM", "tflite"], rng, 3, 9, outputs=6)
    weights |= {"projection_weights": np.zeros((6, 9), np.float32), "projection_bias": TINY}
    stream = cnorm.Model([cnorm.LSTM(weights, preset="tflite")]).stream()
    assert stream.step(np.ones(3, np.float32)).tobytes() == without_tiny(TINY).tobytes()


# ---- refused input ---------------------------------------------------------------------------------------------------


@pytest.fixture
def model(rng):
    return deep_model(rng)


def unchanged(*streams):
    """A context that checks that the streams' states have not changed."""

    class Check:
        def __enter__(self):
            self.before = [stream.save() for stream in streams]

        def __exit__(self, *_):
            assert [stream.save() for stream in streams] == self.before

    return Check()


@pytest.mark.parametrize(
    ("x", "error"),
    [
        (np.zeros(6, np.float32), ValueError),
        (np.zeros((1, 4), np.float32), ValueError),
        (np.zeros(5), TypeError),
        (np.zeros(5, np.int32), TypeError),
        (np.zeros(5, ">f4"), TypeError),
        ([0.0] * 5, TypeError),
        (None, TypeError),
        (np.ma.zeros(5, np.float32), TypeError),
    ],
)
def test_rejects_frames_of_another_type_or_shape(model, x, error):
    stream = model.stream()
    stream.step(np.ones(5, np.float32))
    with unchanged(stream):
        with pytest.raises(error, match="x must"):
            stream.step(x)
        with pytest.raises((TypeError, ValueError)):
            stream.process(x)


@pytest.mark.parametrize(
    ("out", "error"),
    [
        (np.zeros(4, np.float32), ValueError),
        (np.zeros(3), TypeError),
        (np.zeros(6, np.float32)[::2], ValueError),
        ([0, 0, 0], TypeError),
        (np.broadcast_to(np.float32(0), 3), ValueError),
    ],
)
def test_rejects_out_of_another_type_or_shape(model, out, error):
    stream = model.stream()
    with unchanged(stream), pytest.raises(error, match="out must"):
        stream.step(np.ones(5, np.float32), out=out)


def test_rejects_an_unwritable_out(model):
    still = np.zeros(3, np.float32)
    still.flags.writeable = False
    for out, given in ((np.zeros(6, np.float32)[::2], r"\(8,\), aligned True, writable True"),
                       (still, r"\(4,\), aligned True, writable False")):  # fmt: skip
        with pytest.raises(ValueError, match=rf"aligned and writable, got shape \(3,\) with strides {given}$"):
            model.stream().step(np.ones(5, np.float32), out=out)


def test_streams_support_weak_references(model):
    streams = weakref.WeakSet([model.stream()])
    gc.collect()
    assert len(streams) == 0
    kept = model.stream()
    assert weakref.ref(kept)() is kept


def test_strided_and_unaligned_frames(model, rng):
    x = rng.standard_normal(5).astype(np.float32)
    wanted = model.stream().step(x).tobytes()
    assert model.stream().step(np.repeat(x, 2)[::2]).tobytes() == wanted
    raw = np.zeros(21, np.uint8)
    raw[1:] = x.view(np.uint8)
    assert model.stream().step(raw[1:].view(np.float32)).tobytes() == wanted


def test_out_may_be_the_input(rng):
    layer, _ = random_cell(("GRU", "torch"), rng, 8, 8)
    model = cnorm.Model([layer])
    x = rng.standard_normal((20, 8)).astype(np.float32)
    wanted = model.stream().process(x)
    overlapping = np.zeros((21, 8), np.float32)
    overlapping[:20] = x
    assert model.stream().process(overlapping[:20], out=overlapping[1:]).tobytes() == wanted.tobytes()
    assert model.stream().process(x, out=x).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("last", ["cell", "linear", "norm", "activation", "residual"])
def test_out_may_lie_partly_over_the_input(last, isa, rng):
    """Layers that read x while they write y, wide enough for several vectors."""
    n = 96
    linear, norm = cnorm.Linear(rng.standard_normal((n, n), np.float32)), cnorm.LayerNorm(np.ones(n, np.float32))
    layers = {
        "cell": [random_cell(("GRU", "torch"), rng, n, n)[0]],
        "linear": [linear],
        "norm": [norm],
        "activation": [norm, cnorm.Activation("tanh")],
        "residual": [cnorm.Residual([linear])],
    }
    model, x = cnorm.Model(layers[last]), rng.standard_normal(n, np.float32)
    wanted = model.stream().step(x).tobytes()
    for shift in (-n, -n + 1, -33, -8, -1, 0, 1, 8, 33, n - 1, n):
        room = np.zeros(3 * n, np.float32)
        room[n : 2 * n] = x
        out = room[n + shift : 2 * n + shift]
        assert model.stream().step(room[n : 2 * n], out=out).tobytes() == wanted, shift
        assert out.tobytes() == wanted


def test_rejects_uninitialised_objects():
    """Without __init__ (a subclass omits it, or __new__ is called): an exception, no uninitialised memory is read."""
    with pytest.raises(TypeError, match="positional argument"):
        cnorm.Stream.__new__(cnorm.Stream)
    norm = cnorm.LayerNorm.__new__(cnorm.LayerNorm)
    with pytest.raises(RuntimeError, match=r"LayerNorm\.__init__ was not called"):
        norm(np.zeros((1, 3), np.float32))


def test_bidirectional_models_have_no_streams(rng):
    cell, _ = random_cell(("GRU", "torch"), rng, 5, 3)
    model = cnorm.Model([cnorm.Bidirectional(cell, cell)])
    with pytest.raises(ValueError, match="has no streams"):
        model.stream()
    with pytest.raises(ValueError, match="has no streams"):
        model.step_many([], np.zeros((0, 5), np.float32))


def test_rejected_step_many_changes_no_state(model, rng):
    streams = [model.stream() for _ in range(3)]
    stranger = deep_model(rng).stream()
    x = np.ones((3, 5), np.float32)
    with unchanged(*streams, stranger):
        for wrong in None, 3, streams[0]:
            with pytest.raises(TypeError, match=r"streams must be a sequence of Stream, got (NoneType|int|Stream)"):
                model.step_many(wrong, x)
        with pytest.raises(ValueError, match=r"same stream twice, got streams\[\d\] again as streams\[\d\]"):
            model.step_many([streams[0], streams[1], streams[0]], x)
        with pytest.raises(ValueError, match=r"streams\[2\] is a stream of another model"):
            model.step_many([*streams[:2], stranger], x)
        with pytest.raises(TypeError, match=r"streams\[1\]"):
            model.step_many([streams[0], None, streams[1]], x)
        with pytest.raises(ValueError, match="a row for each of the 3 streams"):
            model.step_many(streams, x[:2])
        with pytest.raises(ValueError, match="x must"):
            model.step_many(streams, x[:, :4])
        with pytest.raises(TypeError, match="float32"):
            model.step_many(streams, x.astype(np.float64))
        with pytest.raises(ValueError, match="out"):
            model.step_many(streams, x, out=np.zeros((3, 4), np.float32))
        with pytest.raises(TypeError, match="reset"):
            model.step_many(streams, x, reset=np.zeros(3, np.int8))
        with pytest.raises(ValueError, match="reset"):
            model.step_many(streams, x, reset=np.zeros(2, bool))
        with pytest.raises(ValueError, match=r"out must have shape \(3, 1, 3\), got \(3, 2, 3\)"):
            model.step_many(streams, x[:, None], out=np.zeros((3, 2, 3), np.float32))
        with pytest.raises(ValueError, match="x must"):
            model.step_many(streams, x[:, None, None])
    assert model.step_many([], np.zeros((0, 5), np.float32)).shape == (0, 3)


def test_rejects_malformed_states(model):
    stream = model.stream()
    stream.step(np.ones(5, np.float32))
    good = stream.state()
    with unchanged(stream):
        for name in good:
            with pytest.raises(ValueError, match="names"):
                stream.set_state({k: v for k, v in good.items() if k != name})
            with pytest.raises(ValueError, match="finite"):
                stream.set_state(good | {name: np.full_like(good[name], np.nan)})
            with pytest.raises(ValueError, match="shape"):
                stream.set_state(good | {name: good[name][1:]})
            with pytest.raises(TypeError, match="float32"):
                stream.reset(good | {name: good[name].astype(np.float64)})
        with pytest.raises(TypeError, match="mapping"):
            stream.set_state([1])


def test_set_state_is_atomic_if_its_mapping_steps_the_stream(model):
    """The caller's code (here a mapping that steps the stream) runs before the state is changed, not in between."""
    stream = model.stream()

    class Meddling(dict):
        def __getitem__(self, name):
            stream.step(np.ones(5, np.float32))
            stream.reset()
            return super().__getitem__(name)

    stream.step(np.full(5, 2, np.float32))
    wanted = stream.state()
    stream.set_state(Meddling(wanted))
    same(stream.state(), wanted)


def test_a_saved_state_that_is_not_finite(model):
    """A state with NaN can be saved and read, but not restored."""
    stream = model.stream()
    stream.step(np.full(5, np.nan, np.float32))
    with pytest.raises(ValueError, match="finite"):
        model.restore(stream.save())
    saved = model.stream().save()
    for bad in (np.nan, np.inf):
        spoilt = saved[:-8] + np.float32(bad).tobytes()
        with pytest.raises(ValueError, match="finite"):
            model.restore(spoilt + zlib.crc32(spoilt).to_bytes(4, "little"))


def test_rejects_malformed_saved_streams_and_those_of_another_model(model, rng):
    saved = model.stream().save()
    for data in (b"", saved[:-1], saved + b"\0", saved[4:], saved.replace(b"3\n", b"4\n")):
        with pytest.raises(ValueError, match="saved"):
            model.restore(data)
    with pytest.raises(ValueError, match="another model"):
        deep_model(rng).restore(saved)
    with pytest.raises(TypeError, match="bytes"):
        model.restore("text")


def test_the_same_weights_with_another_spec_are_another_model(rng):
    weights = random_weights(cnorm.PRESETS["LSTM", "haste"], rng, 3, 4)
    one, other = (cnorm.Model([cnorm.LSTM(weights, preset="haste", eps=eps)]) for eps in (1e-5, 1e-3))
    with pytest.raises(ValueError, match="another model"):
        other.restore(one.stream().save())


def test_the_same_numbers_in_other_tensors_are_another_model(rng):
    """The identity of a model includes the names and shapes of its tensors."""
    numbers = rng.standard_normal(6).astype(np.float32)
    weights = random_weights(cnorm.PRESETS["LSTM", "torch"], rng, 3, 6)
    cells = [cnorm.LSTM(weights | {start: numbers}, preset="torch") for start in ("h0", "c0")]
    for pair in (cells, [cnorm.Linear(numbers.reshape(shape)) for shape in ((2, 3), (3, 2))]):
        one, other = (cnorm.Model([layer]) for layer in pair)
        with pytest.raises(ValueError, match="another model"):
            other.restore(one.stream().save())


def test_two_threads_on_one_stream(rng):
    """While one thread uses the stream every other use raises, and the first thread's result is right."""
    layer, _ = random_cell(("LSTM", "ba2016"), rng, 64, 256)
    model = cnorm.Model([layer])
    stream = model.stream()
    x = rng.standard_normal((10_000, 64)).astype(np.float32)
    results = []

    def run():
        while not results:
            try:
                results.append(stream.process(x))
            except RuntimeError:  # the other thread was reading the state
                continue

    worker = threading.Thread(target=run)
    worker.start()
    inside = False
    while not inside and not results:
        try:
            stream.state()
        except RuntimeError:
            inside = True
    uses = (lambda: stream.step(x[0]), stream.reset, stream.save, lambda: model.step_many([stream], x[:1]))
    for use in uses:
        with pytest.raises(RuntimeError, match="in use by another thread"):
            use()
    worker.join()
    assert results[0].tobytes() == model.stream().process(x).tobytes()
    stream.step(x[0])


def test_threads_with_streams_of_their_own(model, rng):
    x = rng.standard_normal((200, 5)).astype(np.float32)
    wanted = model.stream().process(x).tobytes()
    got = []

    def run():
        stream = model.stream()
        got.append(np.stack([stream.step(frame) for frame in x]).tobytes())

    workers = [threading.Thread(target=run) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert got == [wanted] * 4


def python(code):
    """Run a script in a process of its own; return its output."""
    script = "import os, sys, numpy as np, cnorm\n" + textwrap.dedent(code)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_streams_continue_in_both_processes_after_a_fork():
    """After the fork each process steps its own copies, one by one and with step_many."""
    printed = python("""
        model = cnorm.demo_model()
        x = np.random.default_rng(0).standard_normal((30, 12)).astype(np.float32)
        wanted = model.stream().process(x)
        streams = [model.stream() for _ in range(9)]
        for frame in x[:10]: model.step_many(streams, np.repeat(frame[None], 9, axis=0))

        def go_on():
            own = np.stack([streams[0].step(frame) for frame in x[10:]])
            others = np.stack([model.step_many(streams[1:], np.repeat(frame[None], 8, axis=0)) for frame in x[10:]])
            return own.tobytes() == wanted[10:].tobytes() and (others == wanted[10:, None]).all()

        child = os.fork()
        if child == 0:
            os._exit(0 if go_on() else 1)
        print(go_on(), os.waitpid(child, 0)[1])
        """)
    assert printed == "True 0\n"


def test_a_hundred_thousand_streams_of_one_model():
    """A stream of a cell with 16 units takes 2 KiB, all of which is freed."""
    printed = python("""
        import gc, resource
        n, model = 100_000, cnorm.Model([cnorm.GRU({
            "weight_ih_l0": np.full((48, 12), 0.1, np.float32), "weight_hh_l0": np.full((48, 16), -0.1, np.float32),
        }, preset="torch")])
        x = np.random.default_rng(0).standard_normal((n, 12)).astype(np.float32)

        def resident():
            gc.collect()
            return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

        y = np.zeros((n, 16), np.float32)
        model.step_many([model.stream() for _ in range(9)], x[:9], out=y[:9])
        sizes = [resident()]
        for _ in range(3):
            streams = [model.stream() for _ in range(n)]
            for _ in range(2): model.step_many(streams, x, out=y)
            right = all(y[i].tobytes() == model.stream().process(x[[i, i]])[1].tobytes() for i in range(0, n, 997))
            sizes.append(resident())
            del streams
        print(right, (sizes[1] - sizes[0]) / n, (sizes[3] - sizes[1]) / n)
        """)
    right, each, more = printed.split()
    assert right == "True"
    assert float(each) < 2048
    assert float(more) < 16


def test_weights_larger_than_memory():
    """Views of one element that claim 2^62 bytes: a MemoryError before anything is touched."""

    def claimed(*shape):
        return np.lib.stride_tricks.as_strided(np.ones(1, np.float32), shape, (0,) * len(shape))

    units = 2**29
    with pytest.raises(MemoryError):
        cnorm.LSTM(
            {"weight_ih_l0": claimed(4 * units, 2**28), "weight_hh_l0": claimed(4 * units, units)}, preset="torch"
        )
    with pytest.raises(MemoryError):
        cnorm.Linear(claimed(2**30, 2**30))
    stream = cnorm.demo_model().stream()
    with unchanged(stream), pytest.raises(MemoryError):
        stream.process(np.lib.stride_tricks.as_strided(np.ones(12, np.float32), (2**56, 12), (0, 4)))


def test_every_allocation_may_fail():
    """The k-th allocation fails, for all k: a MemoryError, no stream has moved, and the next call is right."""
    pytest.importorskip("_testcapi")
    printed = python("""
        from _testcapi import remove_mem_hooks, set_nomemory
        model = cnorm.demo_model()
        x = np.random.default_rng(0).standard_normal((9, 12)).astype(np.float32)
        streams = [model.stream() for _ in range(9)]
        for _ in range(2): model.step_many(streams, x)
        state, saved, mask = streams[0].state(), streams[0].save(), np.arange(9) % 2 == 0
        before, failures = [stream.save() for stream in streams], 0
        calls = [
            lambda: model.stream(),
            lambda: streams[0].step(x[0]),
            lambda: streams[0].process(x),
            lambda: streams[0].reset(),
            lambda: streams[0].reset(state),
            lambda: streams[0].state(),
            lambda: streams[0].save(),
            lambda: model.restore(saved),
            lambda: model.step_many(streams, x, reset=mask),
            lambda: cnorm.Model(model.layers),
        ]
        for call in calls:
            for k in range(10_000):
                set_nomemory(k, k + 1)
                try:
                    call()
                except (MemoryError, SystemError):  # NumPy's all() forgets to say which
                    remove_mem_hooks()
                    failures += 1
                    assert [stream.save() for stream in streams] == before
                else:
                    remove_mem_hooks()
                    break
            for stream, old in zip(streams, before):
                stream.restore(old)
        print(failures > 50, model.step_many(streams, x).tobytes() == np.stack(
            [model.stream().process(x[[i] * 3])[2] for i in range(9)]).tobytes())
        """)
    assert printed == "True True\n"


COUNTER = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
static long calls;
long counted(void) { return calls; }
#define COUNT(result, name, parameters, arguments) \\
    result name parameters { static result (*real) parameters; \\
        if (!real) real = (result (*) parameters)dlsym(RTLD_NEXT, #name); \\
        __atomic_fetch_add(&calls, 1, __ATOMIC_RELAXED); return real arguments; }
COUNT(void *, malloc, (size_t n), (n))
COUNT(void *, realloc, (void *p, size_t n), (p, n))
COUNT(void *, mmap, (void *p, size_t n, int a, int b, int c, long d), (p, n, a, b, c, d))
COUNT(int, pthread_mutex_lock, (void *m), (m))
"""

STEPS_UNDER_COUNT = """
import ctypes, itertools, sys
import numpy as np, cnorm
counted = ctypes.CDLL(sys.argv[1]).counted
counted.restype = ctypes.c_long
model = cnorm.demo_model()
step, x, y = model.stream().step, np.ones(model.input_size, np.float32), np.empty(model.output_size, np.float32)
for _ in itertools.repeat(None, 100): step(x, out=y)
before = counted()
for _ in itertools.repeat(None, 10000): step(x, out=y)
after = counted()
step(x); b"".join([bytes(1 << 20)] * 2)
print(after - before, counted() - after)
"""


def test_a_step_does_not_allocate(tmp_path):
    """Counted by wrapping malloc (LD_PRELOAD) in a process of its own; the second count is a control that allocates."""
    (tmp_path / "counter.c").write_text(COUNTER)
    library = tmp_path / "counter.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", library, tmp_path / "counter.c", "-ldl"], check=True)
    run = subprocess.run(
        [sys.executable, "-c", STEPS_UNDER_COUNT, library],
        env=os.environ | {"LD_PRELOAD": str(library)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    during, allocating = map(int, run.stdout.split())
    assert during < 10  # in 10000 steps: the interpreter's own allocations, not one per step
    assert allocating >= 2


def test_pickled_models_give_the_same_bits(model, rng):
    x = rng.standard_normal((5, 5)).astype(np.float32)
    other = pickle.loads(pickle.dumps(model))
    assert other.stream().process(x).tobytes() == model.stream().process(x).tobytes()
    other.restore(model.stream().save())


def test_rejects_layers_of_mismatched_sizes(rng):
    lstm, _ = random_cell(("LSTM", "torch"), rng, 3, 8)
    with pytest.raises(ValueError, match=r"layers\[1\] must take the 8 outputs"):
        cnorm.Model([lstm, cnorm.Linear(np.zeros((2, 7), np.float32))])
    with pytest.raises(ValueError, match="as many outputs as inputs"):
        cnorm.Residual([lstm])
    with pytest.raises(ValueError, match="at least one layer"):
        cnorm.Model([])
    with pytest.raises(TypeError, match=r"layers\[0\] must be a layer"):
        cnorm.Model([None])
    for bad in lstm, None:
        with pytest.raises(TypeError, match="layers must be a sequence of layers"):
            cnorm.Model(bad)
    with pytest.raises(TypeError, match=r"model must be a cnorm\.Model, got int"):
        cnorm.Stream(1)
    with pytest.raises(ValueError, match="activations only"):
        cnorm.Model([cnorm.Activation("relu")])
    with pytest.raises(ValueError, match="function must be one of"):
        cnorm.Activation("mish")
    for bad in None, np.array(["relu", "tanh"]):
        with pytest.raises(TypeError, match=r"function must be a str, got (NoneType|ndarray)"):
            cnorm.Activation(bad)
    with pytest.raises(TypeError, match="backward must be a recurrent layer"):
        cnorm.Bidirectional(lstm, cnorm.Linear(np.zeros((2, 3), np.float32)))
    with pytest.raises(AttributeError, match="immutable"):
        lstm.eps = 1.0
