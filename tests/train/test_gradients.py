"""Gradients of different paths of cnorm, bit for bit: many steps and single ones, stacks and their layers."""

import cells
import numpy as np
import pytest
from tapes import back, own_gradients, run, tape_of
from tolerances import assert_within

import cnorm
from cnorm import _core
from cnorm.layers.chain import flat, sizes_of

KEYS = sorted(cnorm.PRESETS)


def random_stack(rng):
    lstm = cells.random_cell(("LSTM", "ba2016"), rng, 7, 20)[0]
    gru = cells.random_cell(("GRU", "keras_reset_before"), rng, 9, 9)[0]
    norm = cnorm.LayerNorm(rng.standard_normal(9).astype(np.float32), rng.standard_normal(9).astype(np.float32))
    into = cnorm.Linear(rng.standard_normal((9, 20)).astype(np.float32) / 4, rng.standard_normal(9).astype(np.float32))
    scale = cnorm.Scale(rng.standard_normal(9).astype(np.float32))
    learned = cnorm.Activation("prelu", slope=rng.standard_normal(9).astype(np.float32))
    inner = [gru, scale, cnorm.Activation("tanh"), cnorm.Multiply("input")]

    def filtered(*shape):
        return (rng.standard_normal(shape) / 2).astype(np.float32)

    both = [
        norm,
        cnorm.Activation("softmax", name="gate"),
        cnorm.Concat(["input", "gate"]),
        cnorm.Linear(filtered(9, 18)),
    ]
    convolutions = [
        cnorm.CausalConv1d(filtered(9, 9, 3), filtered(9), dilation=2),
        cnorm.CausalConv1d(filtered(9, 1, 17), filtered(9), groups=9),
        cnorm.Conv1d(filtered(3, 3, 3), filtered(3), positions=3, padding=1, padding_mode="reflect"),
        cnorm.Conv1d(filtered(3, 1, 2), filtered(3), positions=3, padding=(1, 0), groups=3),
    ]
    frames = [cnorm.Delay(3, 2, input_size=9), cnorm.Conv1d(filtered(3, 9, 3), positions=3, padding=1)]
    return [lstm, into, norm, cnorm.Residual(inner), scale, cnorm.Activation("gelu"), learned, *convolutions, *frames,
            cnorm.Residual(both), cells.random_cell(("LSTM", "tflite"), rng, 9, 11, 6)[0]]  # fmt: skip


def everything(layers, x, dy):
    tape = tape_of(layers, len(x), x.shape[1])
    tape.start()
    y = run(tape, x)
    state = tape.state.copy()
    dx = back(tape, dy, x.shape[2])
    gradients = [array for named in tape.gradients for array in named.values()]
    return [array.tobytes() for array in (y, state, dx, tape.dstate, *gradients)]


@pytest.mark.parametrize(("steps", "batch"), [(1, 1), (2, 3), (17, 8), (5, 33)])
def test_every_instruction_set_has_the_same_bits(steps, batch, rng):
    layers = random_stack(rng)
    x = rng.standard_normal((steps, batch, 7)).astype(np.float32)
    dy = rng.standard_normal((steps, batch, 6)).astype(np.float32)
    before, results = cnorm.active_isa(), {}
    try:
        for isa in cnorm.available_isas():
            cnorm.use_isa(isa)
            results[isa] = everything(layers, x, dy)
    finally:
        cnorm.use_isa(before)
    assert len(set(map(tuple, results.values()))) == 1


@pytest.mark.parametrize("batch", [1, 3, 8, 33])
def test_forward_has_the_bits_of_a_stream(batch, isa, rng):
    layers = random_stack(rng)
    model = cnorm.Model(layers)
    x = rng.standard_normal((17, batch, 7)).astype(np.float32)
    y = run(tape_of(layers, 17, batch), x)
    for b in range(batch):
        assert model.stream().process(x[:, b]).tobytes() == np.ascontiguousarray(y[:, b]).tobytes()


@pytest.mark.parametrize("inputs", [37, 64])
def test_gradients_of_a_large_batch_are_those_of_each_row(inputs, isa, rng):
    """600 outputs are three blocks of panels; of 16 rows and more, blocks of 64 inputs are copied."""
    weight = rng.standard_normal((600, inputs)).astype(np.float32)
    x = rng.standard_normal((1, 35, inputs)).astype(np.float32)
    dy = rng.standard_normal((1, 35, 600)).astype(np.float32)

    def gradient(rows):
        tape = tape_of([cnorm.Linear(weight)], 1, x[:, rows].shape[1])
        tape.start()
        run(tape, x[:, rows])
        return back(tape, np.ascontiguousarray(dy[:, rows]), inputs)

    dx = gradient(slice(None))
    assert_within(dx[0], dy[0].astype(np.float64) @ weight, 600 * 2.0**-24 * (np.abs(dy[0]) @ np.abs(weight)))
    for b in range(35):
        assert dx[:, b].tobytes() == gradient(slice(b, b + 1)).tobytes()


@pytest.mark.parametrize(("steps", "batch"), [(2, 33), (17, 3), (100, 1), (50, 8)])
@pytest.mark.parametrize("key", KEYS, ids="-".join)
def test_many_steps_have_the_gradients_of_single_steps(key, steps, batch, rng):
    """dx and dstate bit for bit, as no sum spans steps. A gradient of weights is a sum over all rows: each term rounds
    once in the run of its own row, and then goes through the blocks of the sum."""
    layer = cells.random_cell(key, rng, 12, 24)[0]
    x = rng.standard_normal((steps, batch, 12)).astype(np.float32)
    dy = rng.standard_normal((steps, batch, 24)).astype(np.float32)
    whole, single = tape_of([layer], steps, batch), tape_of([layer], 1, 1)
    run(whole, x)
    dx = back(whole, dy, 12)
    totals = {name: np.zeros(array.shape) for name, array in whole.gradients[0].items()}
    sizes = {name: np.zeros(array.shape) for name, array in whole.gradients[0].items()}
    for b in range(batch):
        before, dstate = [], np.zeros_like(single.dstate)
        single.start()
        for frame in x:
            before.append(single.state.copy())
            run(single, frame[None, b : b + 1])
        for t in reversed(range(steps)):
            single.state[...] = before[t]
            run(single, x[t : t + 1, b : b + 1])
            got = back(single, dy[t : t + 1, b : b + 1], 12, dstate)
            assert np.array_equal(dx[t, b], got[0, 0]), f"dx of step {t}, row {b}"
            dstate = single.dstate.copy()
            for name, array in single.gradients[0].items():
                totals[name] += np.float64(array)
                sizes[name] += np.abs(np.float64(array))
        assert np.array_equal(whole.dstate[b : b + 1], dstate)
    for name, array in whole.gradients[0].items():
        roundings = 2 + min(16, steps * batch) + -(-steps * batch // 16)
        assert_within(array, totals[name], roundings * 2.0**-24 * sizes[name] + 1e-40, name)


@pytest.mark.parametrize(("steps", "batch"), [(1, 3), (17, 8), (5, 33)])
def test_a_stack_has_the_gradients_of_its_layers(steps, batch, rng):
    """Layer after layer by itself, forward and back: so the bounds of single cells hold for stacks."""
    layers = [layer for layer in random_stack(rng) if layer.kind != "Residual"]
    x = rng.standard_normal((steps, batch, 7)).astype(np.float32)
    dy = rng.standard_normal((steps, batch, 6)).astype(np.float32)
    whole, sizes = tape_of(layers, steps, batch), sizes_of(layers)
    y = run(whole, x)
    dx = back(whole, dy, 7)
    tapes, at = [_core.Tape(flat([layer], n), steps, batch) for layer, n in zip(layers, sizes[:-1], strict=True)], x
    for tape in tapes:
        at = run(tape, at)
    assert np.array_equal(at, y)
    d = dy
    for i in reversed(range(len(tapes))):
        d = back(tapes[i], d, sizes[i])
        for name, array in tapes[i].gradients[0].items():
            assert np.array_equal(array, whole.gradients[i][name]), f"{name} of layer {i}"
    assert np.array_equal(d, dx)


@pytest.mark.parametrize("key", [("LSTM", "ba2016"), ("GRU", "ba2016"), ("LSTM", "torchaudio")], ids="-".join)
def test_rescaled_weights_scale_their_gradient_inversely(key, rng):
    """Table 1 of arXiv:1607.06450. The factor is a power of two and eps is 0, so results are bit-identical."""
    spec = cnorm.PRESETS[key]
    weights = cells.random_weights(spec, rng, 12, 24)
    x = rng.standard_normal((9, 2, 12)).astype(np.float32)
    dy = rng.standard_normal((9, 2, 24)).astype(np.float32)
    found = []
    for factor in (1, 64):
        scaled = {n: w * np.float32(factor) if n in ("weight_x", "weight_h", "weight_xn", "weight_hn", "x2g.weight",
                                                      "p2g.weight") else w for n, w in weights.items()}  # fmt: skip
        layer = cells.LAYERS[key[0]](scaled, preset=spec, eps=0.0)
        tape = tape_of([layer], 9, 2)
        found.append((run(tape, x), back(tape, dy, 12), own_gradients(layer, tape)))
    (y, dx, one), (y64, dx64, other) = found
    assert np.array_equal(y, y64)
    assert np.array_equal(dx, dx64)
    for name, array in one.items():
        factor = 64 if name.startswith("weight") or name.endswith("2g.weight") else 1
        assert np.array_equal(array, other[name] * np.float32(factor)), name


def test_rejects_invalid_tape_sizes(rng):
    layer = cells.random_cell(("RNN", "ba2016"), rng, 3, 4)[0]
    for steps, batch in ((0, 1), (1, 0), (-1, 1), (2**62, 4)):
        with pytest.raises(ValueError, match="steps and batch"):
            tape_of([layer], steps, batch)
    tape = tape_of([layer], 2, 1)
    for first, steps in ((0, 0), (0, 3), (2, 1), (-1, 1)):
        with pytest.raises(ValueError, match="size"):
            tape.run(first, steps, np.zeros((3, 1, 3), np.float32), np.zeros((3, 1, 4), np.float32))


@pytest.mark.parametrize("steps", [380, 420, 510, 640])
def test_the_memory_of_a_long_tape_is_whole(steps, rng):
    """More than 4 MiB is aligned to huge pages; a part of the last one was missing, by chance of the address."""
    layer = cells.random_cell(("LSTM", "ba2016"), rng, 16, 64)[0]
    row = tape_of([layer], 1, 1).memory.size
    for _ in range(8):
        assert tape_of([layer], steps, 8).memory.size == steps * 8 * row
