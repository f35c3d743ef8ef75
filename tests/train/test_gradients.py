"""Gradients against finite differences of the float64 reference; different paths of cnorm bit for bit."""

import cells
import numpy as np
import pytest

import cnorm
from cnorm import _core
from cnorm.layers import flat
from cnorm.parameters import add_gradients, gradient_targets

STEP = 2.0**-17  # of the central differences: their error is near 1e-10 of the second derivatives' size
KEYS = sorted(cnorm.PRESETS)


def tape_of(layers, steps, batch):
    layers = list(layers)
    return _core.Tape(flat(layers, layers[0].input_size), steps, batch)


def run(tape, x, first=0):
    y = np.empty((*x.shape[:2], tape.network.output_size), np.float32)
    tape.run(first, len(x), np.ascontiguousarray(x), y)
    return y


def back(tape, dy, inputs, dstate=0.0, first=0):
    """Run a backward pass; return dx. The other gradients are in the tape."""
    dx = np.empty((*dy.shape[:2], inputs), np.float32)
    tape.dstate[...] = dstate
    tape.backward(first, len(dy), np.ascontiguousarray(dy), dx)
    return dx


def own_gradients(layer, tape, index=0):
    """The gradients by the names of the layer's own tensors."""
    into = {name: np.zeros_like(array) for name, array in layer.weights.items()}
    add_gradients(gradient_targets(layer, into), tape.gradients[index])
    return into


def reference_loss(key, eps, weights, x, states, dy):
    """The loss sum(dy * y) over the steps of a batch, in float64."""
    step = cells.STEPS[key]
    options = {} if eps is None else {"eps": eps}
    total = 0.0
    for frame, weight in zip(x, dy, strict=True):
        states = step(weights, frame, *states, **options)
        states = states if isinstance(states, tuple) else (states,)
        total += float(np.sum(weight * states[0]))
    return total


def difference(f, array):
    """The gradient of f() in array, float64, by central differences."""
    gradient = np.zeros_like(array)
    for i in np.ndindex(array.shape):
        was = array[i]
        array[i] = was + STEP
        above = f()
        array[i] = was - STEP
        gradient[i] = (above - f()) / (2 * STEP)
        array[i] = was
    return gradient


def close(got, wanted, sums, what):
    """Each product and sum of a backward pass rounds: `sums` additions at most into any element, and the forward pass's
    roundings, which reach a gradient through the slopes of gates and the r of norms; both relative to the largest."""
    bound = 2.0**-24 * (sums + 64) * max(1e-30, np.abs(wanted).max()) + 1e-8
    worst = np.abs(np.float64(got) - wanted).max()
    assert worst <= bound, f"{what}: {worst:.3g} off, {bound:.3g} allowed, of {np.abs(wanted).max():.3g}"


@pytest.mark.parametrize("key", KEYS, ids="-".join)
@pytest.mark.parametrize(("steps", "batch"), [(1, 3), (3, 2)])
def test_every_preset_against_finite_differences(key, steps, batch, rng):
    inputs, units = 3, 5
    outputs = 4 if key in (("LSTM", "torch"), ("LSTM", "lingvo"), ("LSTM", "tflite")) else None
    spec = cnorm.PRESETS[key]
    weights = cells.random_weights(spec, rng, inputs, units, outputs)
    layer = cells.LAYERS[key[0]](weights, preset=spec, eps=cells.EPS.get(key))
    tape = tape_of([layer], steps, batch)
    width = layer.output_size
    x = rng.standard_normal((steps, batch, inputs)).astype(np.float32)
    states = [
        (0.5 * rng.standard_normal((batch, n))).astype(np.float32) for n in (width, units)[: 1 + (key[0] == "LSTM")]
    ]
    for (_, n, start), state in zip(tape.state_arrays, states, strict=True):
        tape.state[:, start : start + n] = state
    dy = rng.standard_normal((steps, batch, width)).astype(np.float32)
    run(tape, x)
    dx = back(tape, dy, inputs)

    wide = {name: np.float64(array) for name, array in weights.items()}
    x64, states64 = np.float64(x), [np.float64(state) for state in states]

    def loss():
        return reference_loss(key, cells.EPS.get(key), wide, x64, states64, dy)

    sums = steps * (4 * units + inputs + steps * batch)
    close(dx, difference(loss, x64), sums, "dx")
    for (name, n, start), state in zip(tape.state_arrays, states64, strict=True):
        close(tape.dstate[:, start : start + n], difference(loss, state), sums, f"d{name}")
    for name, got in own_gradients(layer, tape).items():
        close(got, difference(loss, wide[name]), sums, name)


def random_stack(rng):
    lstm = cells.random_cell(("LSTM", "ba2016"), rng, 7, 20)[0]
    gru = cells.random_cell(("GRU", "keras_reset_before"), rng, 9, 9)[0]
    norm = cnorm.LayerNorm(rng.standard_normal(9).astype(np.float32), rng.standard_normal(9).astype(np.float32))
    into = cnorm.Linear(rng.standard_normal((9, 20)).astype(np.float32) / 4, rng.standard_normal(9).astype(np.float32))
    return [lstm, into, norm, cnorm.Residual([gru, cnorm.Activation("tanh")]), cnorm.Activation("relu"),
            cells.random_cell(("LSTM", "tflite"), rng, 9, 11, 6)[0]]  # fmt: skip


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


@pytest.mark.parametrize("key", [("LSTM", "ba2016"), ("LSTM", "torchaudio"), ("GRU", "ba2016"), ("GRU", "onnx"),
                                 ("RNN", "tfa")], ids="-".join)  # fmt: skip
@pytest.mark.parametrize(("steps", "batch"), [(2, 1), (17, 3), (100, 1), (100, 8)])
def test_backward_over_many_steps_matches_single_steps(key, steps, batch, rng):
    """dx and dstate bit for bit, as no sum spans steps; weight gradients within the roundings of the sum over rows."""
    layer = cells.random_cell(key, rng, 12, 24)[0]
    x = rng.standard_normal((steps, batch, 12)).astype(np.float32)
    dy = rng.standard_normal((steps, batch, 24)).astype(np.float32)
    whole, single = tape_of([layer], steps, batch), tape_of([layer], 1, batch)
    run(whole, x)
    before = []
    for frame in x:
        before.append(single.state.copy())
        run(single, frame[None])
    dx = back(whole, dy, 12)
    dstate, totals, sizes = np.zeros_like(single.dstate), {}, {}
    for t in reversed(range(steps)):
        single.state[...] = before[t]
        run(single, x[t : t + 1])
        assert np.array_equal(dx[t : t + 1], back(single, dy[t : t + 1], 12, dstate)), f"dx of step {t}"
        dstate = single.dstate.copy()
        for name, array in single.gradients[0].items():
            totals[name] = totals.get(name, 0) + np.float64(array)
            sizes[name] = sizes.get(name, 0) + np.abs(np.float64(array))
    assert np.array_equal(whole.dstate, dstate)
    for name, array in whole.gradients[0].items():
        bound = 2.0**-24 * (16 + batch + steps * batch / 16 + 8) * sizes[name] * np.sqrt(batch) * 4 + 1e-30
        assert (np.abs(array - totals[name]) <= bound).all(), name


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


def test_rows_out_of_range_go_through_float64(isa, rng):
    weights = cells.random_weights(cnorm.PRESETS["LSTM", "ba2016"], rng, 4, 8)
    x = rng.standard_normal((2, 1, 4)).astype(np.float32)
    dy = rng.standard_normal((2, 1, 8)).astype(np.float32)
    found = []
    for scale in (1.0, 2.0**70):  # its squares overflow float32
        tape = tape_of([cnorm.LSTM(weights, preset="ba2016", eps=0.0)], 2, 1)
        run(tape, x * np.float32(scale))
        found.append((back(tape, dy, 4), {name: array.copy() for name, array in tape.gradients[0].items()}))
    (dx, one), (dx_far, far) = found
    close(dx_far * np.float64(2.0**70), np.float64(dx), 64, "dx")
    for name, array in one.items():
        close(far[name], np.float64(array), 64, name)


def test_rejects_invalid_tape_sizes(rng):
    layer = cells.random_cell(("RNN", "ba2016"), rng, 3, 4)[0]
    for steps, batch in ((0, 1), (1, 0), (-1, 1), (2**62, 4)):
        with pytest.raises(ValueError, match="steps and batch"):
            tape_of([layer], steps, batch)
    tape = tape_of([layer], 2, 1)
    for first, steps in ((0, 0), (0, 3), (2, 1), (-1, 1)):
        with pytest.raises(ValueError, match="size"):
            tape.run(first, steps, np.zeros((3, 1, 3), np.float32), np.zeros((3, 1, 4), np.float32))
