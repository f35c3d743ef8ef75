"""Layers of frames [channels, positions] against float64: bits of every path, gradients, files, rounding, export."""

import hashlib
import json
import pickle
from itertools import product
from pathlib import Path

import cells
import numpy as np
import pytest
from tapes import back, own_gradients, run, tape_of

import cnorm
import onnx_export
from onnx_export.description import state_table

GOLDEN = Path(__file__).parents[1] / "golden" / "frames.json"
U = 2.0**-24


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


# (frames, dilation, inputs)
DELAYS = [(3, 2, 5), (2, 1, 33), (1, 1, 3), (5, 7, 2), (3, 5, 528)]

LAYERS = {f"Delay {shape}": lambda rng, shape=shape: delay(*shape) for shape in DELAYS}
every_layer = pytest.mark.parametrize("name", LAYERS)


def delay(frames, dilation, inputs):
    return cnorm.Delay(frames, dilation, input_size=inputs)


def delayed(layer, x):
    """The frames of Delay from those of all steps, float64."""
    before = np.concatenate([np.zeros((layer.history, x.shape[1])), x])
    at = np.arange(len(x))[:, None] + np.arange(layer.frames) * layer.dilation
    return before[at].reshape(len(x), -1)


# ---- what all of them answer


@every_layer
def test_every_path_has_the_same_bits(name, isa, rng):
    layer = LAYERS[name](rng)
    model, x = cnorm.Model([layer]), normal(rng, 90, layer.input_size)
    y = model.run(x)
    stream = model.stream()
    assert np.stack([stream.step(frame) for frame in x]).tobytes() == y.tobytes()
    stream = model.stream()
    parts = [stream.process(x[:2]), stream.process(x[2:71])]
    again = model.restore(stream.save())
    assert np.concatenate([*parts, again.process(x[71:])]).tobytes() == y.tobytes()
    streams = [model.stream() for _ in range(70)]
    given = np.stack([np.roll(x, i, 0) for i in range(70)], 1)
    many = np.stack([model.step_many(streams, frame) for frame in given[:20]])
    for i in range(0, 70, 23):
        assert np.ascontiguousarray(many[:, i]).tobytes() == model.run(np.ascontiguousarray(given[:20, i])).tobytes()
    if layer.input_size == layer.output_size:
        out = x.copy()
        assert model.stream().process(out, out=out).tobytes() == y.tobytes()


@pytest.mark.parametrize("steps", [1, 9])
@every_layer
def test_a_tape_has_the_bits_of_a_stream_and_steps_alone_their_gradients(name, steps, isa, rng):
    layer = LAYERS[name](rng)
    x, dy = normal(rng, steps, 3, layer.input_size), normal(rng, steps, 3, layer.output_size)
    whole, single = tape_of([layer], steps, 3), tape_of([layer], 1, 1)
    whole.start()
    y = run(whole, x)
    dx = back(whole, dy, layer.input_size, 0.5)
    for b in range(3):
        assert np.ascontiguousarray(y[:, b]).tobytes() == cnorm.Model([layer]).run(np.array(x[:, b])).tobytes()
        states, dstate = [], np.full_like(single.dstate, 0.5)
        single.start()
        for frame in x[:, b]:
            states.append(single.state.copy())
            run(single, frame[None, None])
        for t in reversed(range(steps)):
            single.state[...] = states[t]
            run(single, x[t, b][None, None])
            assert back(single, dy[t, b][None, None], layer.input_size, dstate)[0, 0].tobytes() == dx[t, b].tobytes()
            dstate = single.dstate.copy()
        padding = np.ones(dstate.shape[1], bool)
        for _, units, start in whole.state_arrays:
            padding[start : start + units] = False
        assert np.array_equal(dstate[0, ~padding], whole.dstate[b, ~padding])


def test_every_instruction_set_has_the_same_bits_and_the_golden_hash():
    before, found = cnorm.active_isa(), {}
    for name, make in LAYERS.items():
        rng, hashes = np.random.default_rng(5), set()
        layer = make(rng)
        x, dy = normal(rng, 12, 2, layer.input_size), normal(rng, 12, 2, layer.output_size)
        try:
            for isa in cnorm.available_isas():
                cnorm.use_isa(isa)
                tape = tape_of([layer], 12, 2)
                tape.start()
                y = run(tape, x)
                state = tape.state.copy()
                dx = back(tape, dy, layer.input_size)
                arrays = [y, state, dx, tape.dstate, *tape.gradients[0].values()]
                hashes.add(hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()[:16])
        finally:
            cnorm.use_isa(before)
        assert len(hashes) == 1, name
        found[name] = hashes.pop()
    recorded = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if not recorded.keys() >= found.keys():  # a new layer, or the file was deleted by hand to record a change
        GOLDEN.write_text(json.dumps(found | recorded, indent=1) + "\n")
    assert found == found | recorded


@pytest.mark.exhaustive(one_in=16)
@pytest.mark.parametrize("weights", ["float32", "int8", "float16"])
@every_layer
def test_it_is_saved_packed_pickled_and_exported(name, weights, tmp_path, rng):
    layer = LAYERS[name](rng)
    model = cnorm.Model([layer])
    if weights != "float32":
        if not layer.matrices() or getattr(layer, "positions", 1) > 10:
            pytest.skip("it has no matrix, or is one of many positions, whose graph is large")
        model = model.with_weights(weights, smallest=1)
    x = normal(rng, 9, layer.input_size)
    model.save(tmp_path / "a.safetensors")
    model.save_packed(tmp_path / "a.cnorm")
    others = [
        cnorm.load(tmp_path / "a.safetensors"),
        cnorm.load(tmp_path / "a.cnorm"),
        pickle.loads(pickle.dumps(model)),
    ]
    for form in ("step", "sequence"):
        exported = onnx_export.export(model, tmp_path / "a.onnx", form=form)
        assert onnx_export.check_parity(model, exported, steps=8).ok
        others.append(onnx_export.load(tmp_path / "a.onnx"))
    for other in others:
        assert other.identity == model.identity
        assert other.run(x).tobytes() == model.run(x).tobytes()


# ---- Delay


@pytest.mark.parametrize("shape", DELAYS)
def test_delay_copies_the_frames_and_adds_their_gradients(shape, rng):
    layer = delay(*shape)
    x = normal(rng, 40, layer.input_size)
    assert np.array_equal(cnorm.Model([layer]).run(x), delayed(layer, x))
    # the gradient of a frame is the sum over the windows that have it
    tape, dy = tape_of([layer], 40, 1), normal(rng, 40, 1, layer.output_size)
    run(tape, x[:, None])
    dx = back(tape, dy, layer.input_size)
    place = delayed(layer, 1 + np.arange(x.size, dtype=float).reshape(x.shape)).astype(int)
    wanted, sizes = np.zeros(x.size + 1), np.zeros(x.size + 1)
    np.add.at(wanted, place, dy[:, 0])
    np.add.at(sizes, place, np.abs(dy[:, 0]))
    assert (np.abs(dx.ravel() - wanted[1:]) <= (layer.frames - 1) * U * sizes[1:]).all()


def test_a_delay_and_a_convolution_are_a_causal_convolution_over_two_axes(rng):
    channels, positions, frames, dilation = 3, 11, 3, 2
    weight, bias = normal(rng, 4, channels, frames, 5), normal(rng, 4)
    flat = weight.transpose(0, 2, 1, 3).reshape(4, frames * channels, 5)
    model = cnorm.Model(
        [
            cnorm.Delay(frames, dilation, input_size=channels * positions),
            cnorm.Conv1d(flat, bias, positions=positions, padding=2),
        ]
    )
    x = normal(rng, 20, channels * positions)
    grid = np.zeros((20 + (frames - 1) * dilation, channels, positions + 4))
    grid[(frames - 1) * dilation :, :, 2:-2] = x.reshape(20, channels, positions)
    wanted, most = np.zeros((2, 20, 4, positions))
    for k in range(frames):
        for t in range(5):
            taken = grid[k * dilation :][:20, :, t : t + positions]
            wanted += np.einsum("scp,oc->sop", taken, np.float64(weight[:, :, k, t]))
            most += np.einsum("scp,oc->sop", np.abs(taken), np.abs(np.float64(weight[:, :, k, t])))
    terms = 5 * frames * channels + 1  # of a sum with its bias: each is rounded at most so often
    allowed = terms * 2.0**-24 * (most + np.abs(bias[:, None]))
    error = np.abs(model.run(x).reshape(wanted.shape) - (wanted + bias[:, None]))
    assert np.all(error <= allowed), np.max(error / allowed)


def test_the_state_of_a_delay_is_counted_before_the_initial_state_of_a_cell(rng):
    """A cell behind it learned the gradient of another state, or none: names count all states."""
    gru = cells.random_cell(("GRU", "torch"), rng, 6, 4)[0]
    gru = cnorm.GRU(dict(gru.weights) | {"h0": normal(rng, 4)}, preset="torch")
    layers = [cnorm.Delay(2, input_size=3), gru]
    assert list(cnorm.Model(layers).stream().state()) == ["f0", "h1"]
    assert [row["name"] for row in state_table(cnorm.Model(layers))] == ["f0", "h1"]
    learner = cnorm.Learner(cnorm.Model(layers), cnorm.SGD(0.1), truncate=4)
    for frame in normal(rng, 4, 3):
        learner.learn(learner.step(frame))
    assert (learner.model().layers[1].weights["h0"] != gru.weights["h0"]).all()


def test_the_state_of_a_delay_is_the_last_frames(rng):
    layer = delay(3, 2, 5)
    stream, x = cnorm.Model([layer]).stream(), normal(rng, 30, 5)
    stream.process(x)
    assert stream.state()["f0"].tobytes() == x[-4:].tobytes()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"frames": 0}, "frames must be at least 1"),
        ({"frames": 2.0}, "frames must be an int, got float"),
        ({"dilation": -1}, "dilation must be at least 1"),
        ({"input_size": 0}, "input_size must be at least 1"),
    ],
)
def test_wrong_delays(arguments, says):
    with pytest.raises((TypeError, ValueError), match=says):
        cnorm.Delay(**{"frames": 2, "input_size": 3} | arguments)


# ---- ConvTranspose1d

# channels, outputs, taps, groups, positions, stride, padding, output_padding, dilation
TRANSPOSED = [
    (4, 6, 5, 1, 7, 2, 2, 0, 1),
    (4, 6, 5, 2, 7, 2, (1, 3), 1, 1),
    (6, 6, 3, 6, 33, 1, 1, 0, 1),
    (5, 5, 3, 5, 9, 3, 0, 2, 2),
    (1, 1, 4, 1, 1, 1, 0, 0, 3),
    (3, 2, 2, 1, 80, 4, 0, 3, 1),
    (40, 33, 3, 1, 5, 1, (2, 0), 0, 2),
]
LAYERS |= {f"ConvTranspose1d {shape}": lambda rng, shape=shape: transposed_conv(rng, shape) for shape in TRANSPOSED}


def transposed_conv(rng, shape):
    c, o, k, groups, positions, stride, padding, more, dilation = shape
    options = {"positions": positions, "stride": stride, "padding": padding, "output_padding": more}
    return cnorm.ConvTranspose1d(
        normal(rng, c, o // groups, k), normal(rng, o), **options, dilation=dilation, groups=groups
    )


def whole_transposed(layer):
    """The weight [channels, outputs, taps], zeros between groups."""
    weight, o = np.float64(layer.weights["weight"]), layer.out_channels // layer.groups
    whole = np.zeros((layer.channels, layer.out_channels, layer.taps))
    for c in range(layer.channels):
        g = c // (layer.channels // layer.groups)
        whole[c, g * o : (g + 1) * o] = weight[c]
    return whole


def spread(layer, windows):
    """[rows, outputs * places] of what the positions [rows, positions, outputs, taps] add to their places."""
    length = (layer.positions - 1) * layer.stride + (layer.taps - 1) * layer.dilation + 1 + layer.output_padding
    whole = np.zeros((len(windows), layer.out_channels, length))
    for p in range(layer.positions):
        for k in range(layer.taps):
            whole[:, :, p * layer.stride + k * layer.dilation] += windows[:, p, :, k]
    return whole[:, :, layer.padding[0] : length - layer.padding[1]].reshape(len(windows), -1)


def gathered(layer, dy):
    """Its transpose: the windows [rows, positions, outputs, taps] of dy."""
    grid = np.pad(dy.reshape(len(dy), layer.out_channels, layer.places), [(0, 0), (0, 0), layer.padding])
    at = np.arange(layer.positions)[:, None] * layer.stride + np.arange(layer.taps) * layer.dilation
    return grid[:, :, at].transpose(0, 2, 1, 3)


@pytest.mark.parametrize("shape", TRANSPOSED)
def test_transposed_convolutions_are_right_and_have_right_gradients(shape, isa, rng):
    layer, rows = transposed_conv(rng, shape), 21
    x, dy = normal(rng, rows, layer.input_size), normal(rng, rows, layer.output_size)
    tape = tape_of([layer], rows, 1)
    y = run(tape, x[:, None])[:, 0]
    dx, own = back(tape, dy[:, None], layer.input_size)[:, 0], own_gradients(layer, tape)
    weight = whole_transposed(layer)
    bias = np.float64(layer.weights["bias"])

    def forward(x, weight, bias):
        turned = np.float64(x).reshape(rows, layer.channels, layer.positions)
        return spread(layer, np.einsum("rcp,cok->rpok", turned, weight)) + np.repeat(bias, layer.places)

    terms = 1 if layer.depthwise else layer.channels
    chain = 2 + min(16, terms) + -(-terms // 16) + layer.taps
    sizes = forward(np.abs(x), np.abs(weight), np.abs(bias))
    assert (np.abs(y - forward(x, weight, bias)) <= chain * U * sizes).all()
    windows = gathered(layer, np.float64(dy))
    for_x = [np.einsum("rpok,cok->rcp", f(windows), f(weight)).reshape(rows, -1) for f in (np.positive, np.abs)]
    chain = 16 + -(-layer.taps * layer.out_channels // 256) + 7 + layer.taps  # as the products of autodiff.py
    assert (np.abs(dx - for_x[0]) <= chain * U * for_x[1] + 1e-30).all()
    turned = np.float64(x).reshape(rows, layer.channels, layer.positions)
    for_w = [np.einsum("rcp,rpok->cok", f(turned), f(windows)) for f in (np.positive, np.abs)]
    chain = 3 + 16 + -(-rows * layer.positions // 16)
    kept = np.abs(weight) > 0
    assert (np.abs(own["weight"].ravel() - for_w[0][kept]) <= chain * U * for_w[1][kept]).all()
    for_b = np.float64(dy).reshape(rows, layer.out_channels, layer.places)
    chain = 3 + 16 + -(-rows * layer.places // 16)
    assert (np.abs(own["bias"] - for_b.sum((0, 2))) <= chain * U * np.abs(for_b).sum((0, 2))).all()


def test_a_transposed_convolution_of_torch(rng):
    torch = pytest.importorskip("torch")
    for options in (
        {"stride": 2, "padding": 1, "output_padding": 1, "groups": 2, "dilation": 2},
        {"stride": 3, "padding": 2, "bias": False},
        {"groups": 4},
    ):
        module = torch.nn.ConvTranspose1d(4, 4, 5, **options)
        x = normal(rng, 5, 4 * 11)
        model = cnorm.Model([cnorm.ConvTranspose1d(module, positions=11)])
        frames, exact = torch.from_numpy(x).reshape(5, 4, 11).double(), module.double()
        wanted = exact(frames).detach().numpy().reshape(5, -1)
        for parameter in exact.parameters():
            parameter.data.abs_()
        most = exact(frames.abs()).detach().numpy().reshape(5, -1)
        allowed = (5 * 4 + 1) * 2.0**-24 * most  # taps, channels and the bias, each rounded at most so often
        assert np.all(np.abs(model.run(x) - wanted) <= allowed)
    with pytest.raises(ValueError, match=r"must be a torch.nn.ConvTranspose1d, got Conv1d"):
        cnorm.ConvTranspose1d(torch.nn.Conv1d(4, 4, 5), positions=11)
    with pytest.raises(ValueError, match=r"must be a torch.nn.Conv1d, got ConvTranspose1d"):
        cnorm.Conv1d(torch.nn.ConvTranspose1d(4, 4, 5), positions=11)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"groups": 3}, "groups must divide the 4 channels, got 3"),
        ({"padding": 30}, r"padding must leave at least one of the 13 places, got \(30, 30\)"),
        ({"output_padding": 1}, "output_padding must be below stride or dilation, got 1"),
        ({"stride": 0}, "stride must be at least 1"),
        ({"bias": np.zeros(3, np.float32)}, r"bias must have the shape \(2,\), got \(3,\)"),
    ],
)
def test_wrong_transposed_convolutions(options, says, rng):
    with pytest.raises(ValueError, match=says):
        cnorm.ConvTranspose1d(normal(rng, 4, 2, 4), **{"positions": 10} | options)


# ---- MaxPool1d and Permute

# channels, positions, taps, stride, padding, dilation
POOLED = [
    (3, 10, 2, None, 0, 1),
    (4, 33, 3, 2, 1, 1),
    (1, 7, 3, 1, (2, 1), 3),
    (2, 1, 3, 1, 2, 1),
    (5, 20, 4, 3, (0, 3), 2),
]
LAYERS |= {f"MaxPool1d {shape}": lambda rng, shape=shape: pool(shape) for shape in POOLED}
PERMUTED = [((2, 8, 5), (1, 0, 2)), ((33, 16), (1, 0)), ((2, 3, 4, 1, 2, 3), (5, 0, 3, 1, 4, 2)), ((7,), (0,))]
LAYERS |= {f"Permute {given}": lambda rng, given=given: cnorm.Permute(*given) for given in PERMUTED}


def pool(shape):
    channels, positions, taps, stride, padding, dilation = shape
    options = {"stride": stride, "padding": padding, "dilation": dilation}
    return cnorm.MaxPool1d(taps, channels=channels, positions=positions, **options)


@pytest.mark.parametrize("shape", POOLED)
def test_pooling_is_exact_and_its_gradient_goes_to_the_first_of_the_largest(shape, rng):
    layer, rows = pool(shape), 30
    x = np.float32(rng.integers(-3, 4, (rows, layer.input_size)))  # with equal ones
    dy = normal(rng, rows, layer.output_size)
    grid = x.reshape(rows, layer.channels, layer.positions)
    padded = np.pad(grid, [(0, 0), (0, 0), layer.padding], constant_values=-np.inf)
    at = np.arange(layer.places)[:, None] * layer.stride + np.arange(layer.taps) * layer.dilation
    tape = tape_of([layer], rows, 1)
    y = run(tape, x[:, None])[:, 0]
    assert np.array_equal(y, padded[:, :, at].max(-1).reshape(rows, -1))
    dx = back(tape, dy[:, None], layer.input_size)
    places = np.take_along_axis(np.broadcast_to(at, (*grid.shape[:2], *at.shape)),
                                padded[:, :, at].argmax(-1)[..., None], -1)[..., 0]  # fmt: skip
    wanted, sizes = np.zeros(padded.shape), np.zeros(padded.shape)
    rows_at, channels_at = np.indices(places.shape)[:2]
    np.add.at(wanted, (rows_at, channels_at, places), dy.reshape(places.shape))
    np.add.at(sizes, (rows_at, channels_at, places), np.abs(dy).reshape(places.shape))
    inside = slice(layer.padding[0], layer.padding[0] + layer.positions)
    assert (np.abs(dx.reshape(grid.shape) - wanted[..., inside]) <= layer.taps * U * sizes[..., inside]).all()


def test_pooling_of_torch_and_numbers_that_are_none(rng):
    torch = pytest.importorskip("torch")
    for options in ({"stride": 2, "ceil_mode": True}, {"padding": 1, "ceil_mode": True, "stride": 2}, {"dilation": 2}):
        module = torch.nn.MaxPool1d(3, **options)
        x = normal(rng, 5, 4 * 10)
        x[0, 17] = np.nan
        wanted = module(torch.from_numpy(x).reshape(5, 4, 10)).numpy().reshape(5, -1)
        assert np.array_equal(
            cnorm.Model([cnorm.MaxPool1d(module, channels=4, positions=10)]).run(x), wanted, equal_nan=True
        )
    with pytest.raises(ValueError, match="returns no indices"):
        cnorm.MaxPool1d(torch.nn.MaxPool1d(3, return_indices=True), channels=4, positions=10)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"padding": 3}, "padding must be below the 3 taps, got 3"),
        ({"padding": 1, "dilation": 12}, "dilation must be at most the 10 positions with padding, got 12"),
        ({"dilation": 5}, "positions and padding must be at least the 11 that a window reaches over, got 10 and 0"),
        ({"stride": 0}, "stride must be at least 1"),
    ],
)
def test_wrong_pools(options, says):
    with pytest.raises(ValueError, match=says):
        cnorm.MaxPool1d(3, channels=2, positions=10, **options)


@pytest.mark.parametrize("given", PERMUTED)
def test_permuting_is_exact_forward_and_back(given, rng):
    layer, (shape, axes) = cnorm.Permute(*given), given
    x = normal(rng, 6, layer.input_size)
    tape = tape_of([layer], 6, 1)
    wanted = x.reshape(6, *shape).transpose(0, *(axis + 1 for axis in axes)).reshape(6, -1)
    assert np.array_equal(run(tape, x[:, None])[:, 0], wanted)
    assert np.array_equal(back(tape, wanted[:, None].copy(), layer.input_size)[:, 0], x)


@pytest.mark.parametrize("axes", [(1, 0), (1, 2, 0), (2, 0, 1), (2, 1, 0), (1, 0, 2)], ids=str)
def test_permuting_arrays_of_few_rows_or_columns(axes, rng):
    """Blocks of a transpose that are smaller than 4 x 4, and those of a part of an array, whose rows stand apart."""
    for m, n in product(range(1, 8), repeat=2):
        shape = (m, 2, n) if len(axes) == 3 else (m, n)
        x = normal(rng, 2, np.prod(shape))
        tape = tape_of([cnorm.Permute(shape, axes)], 2, 1)
        wanted = x.reshape(2, *shape).transpose(0, *(axis + 1 for axis in axes)).reshape(2, -1)
        assert np.array_equal(run(tape, x[:, None])[:, 0], wanted)
        assert np.array_equal(back(tape, wanted[:, None].copy(), x.shape[1])[:, 0], x)


def test_a_token_may_be_permuted(rng):
    """The runtime knows where it is in the frame."""
    layers = [
        cnorm.Permute((2, 3), (1, 0), name="turned"),
        cnorm.Slice("turned", 3, 4),
        cnorm.Embedding(normal(rng, 5, 2)),
    ]
    model = cnorm.Model(layers)
    assert dict(model.tokens) == {4: 5}
    assert np.array_equal(model.run(np.float32([[9, 9, 9, 9, 2, 9]])), layers[2].weights["weight"][2:3])


@pytest.mark.parametrize(
    ("shape", "axes", "says"),
    [
        ((2, 3), (0, 0), r"axes must be an order of 0 to 1, got \(0, 0\)"),
        ((2, 0), (1, 0), r"shape\[1\] must be at least 1"),
        ((1,) * 7, range(7), "shape must have 1 to 6 axes, got 7"),
        ((1 << 20, 1 << 20), (1, 0), "the product of shape must be at least 1 and below 2"),
        (6, (0,), "shape must be a sequence of integers, got int"),
    ],
)
def test_wrong_orders(shape, axes, says):
    with pytest.raises((TypeError, ValueError), match=says):
        cnorm.Permute(shape, axes)


# ---- PerPosition and OverPositions

# preset, channels, units, outputs, positions
AT_POSITIONS = [
    (("GRU", "torch"), 8, 4, None, 33),
    (("LSTM", "torch"), 5, 19, None, 7),
    (("LSTM", "lingvo"), 3, 17, 6, 5),
    (("GRU", "keras_reset_before"), 1, 3, None, 1),
    (("RNN", "ba2016"), 4, 5, None, 70),
    (("GRU", "ba2016"), 16, 16, None, 3),
    (("GRU", "torch"), 17, 18, None, 70),
    (("LSTM", "torch"), 18, 16, None, 50),
]
LAYERS |= {f"PerPosition {shape}": lambda rng, shape=shape: per_position(rng, shape) for shape in AT_POSITIONS}
LAYERS |= {
    f"OverPositions {shape} {reverse}": lambda rng, shape=shape, reverse=reverse: over_positions(rng, shape, reverse)
    for shape, reverse in zip(AT_POSITIONS, [False, True] * 4, strict=True)
}
LAYERS["PerPosition Linear"] = lambda rng: cnorm.PerPosition(
    cnorm.Linear(normal(rng, 6, 4), normal(rng, 6)), positions=9
)


def one_cell(rng, shape):
    key, channels, units, outputs, _ = shape
    return cells.random_cell(key, rng, channels, units, outputs)[0]


def per_position(rng, shape):
    return cnorm.PerPosition(one_cell(rng, shape), positions=shape[-1])


def over_positions(rng, shape, reverse=False):
    return cnorm.OverPositions(one_cell(rng, shape), positions=shape[-1], reverse=reverse)


def in_positions(layer, frames):
    """Frames [..., channels, positions], flat, as [..., positions, channels]."""
    return np.ascontiguousarray(np.swapaxes(frames.reshape(*frames.shape[:-1], -1, layer.positions), -1, -2))


def in_frames(rows):
    """And back."""
    return np.ascontiguousarray(np.swapaxes(rows, -1, -2)).reshape(*rows.shape[:-2], -1)


@pytest.mark.parametrize("shape", AT_POSITIONS)
def test_each_position_has_the_bits_of_a_stream_of_the_cell(shape, isa, rng):
    layer = per_position(rng, shape)
    x = normal(rng, 20, layer.input_size)
    stream = cnorm.Model([layer]).stream()
    y, rows = in_positions(layer, stream.process(x)), in_positions(layer, x)
    streams = [cnorm.Model([layer.layer]).stream() for _ in range(layer.positions)]
    for p, one in enumerate(streams):
        assert one.process(np.array(rows[:, p])).tobytes() == np.array(y[:, p]).tobytes()
    for name, array in stream.state().items():
        assert in_positions(layer, array).tobytes() == np.stack([one.state()[name] for one in streams]).tobytes()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shape", AT_POSITIONS)
def test_a_scan_has_the_bits_of_a_run_over_the_positions(shape, reverse, isa, rng):
    layer, order = over_positions(rng, shape, reverse), -1 if reverse else 1
    model, x = cnorm.Model([layer]), normal(rng, 5, layer.input_size)
    y, rows = in_positions(layer, model.run(x)), in_positions(layer, x)
    for frame, wanted in zip(rows[:, ::order], y[:, ::order], strict=True):
        assert cnorm.Model([layer.layer]).run(np.array(frame)).tobytes() == np.array(wanted).tobytes()
    assert model.stream().state() == {}


@pytest.mark.parametrize("shape", AT_POSITIONS)
def test_cells_per_position_have_the_gradients_of_as_many_streams(shape, isa, rng):
    """The gradients of cells are compared with float64 in test_gradient_bounds.py."""
    layer, steps, batch = per_position(rng, shape), 7, 3
    x, dy = normal(rng, steps, batch, layer.input_size), normal(rng, steps, batch, layer.output_size)
    whole, cell = tape_of([layer], steps, batch), tape_of([layer.layer], steps, batch * layer.positions)
    run(whole, x)
    run(cell, in_positions(layer, x).reshape(steps, -1, shape[1]))
    dx = back(whole, dy, layer.input_size)
    rows = back(cell, in_positions(layer, dy).reshape(steps, batch * layer.positions, -1), shape[1])
    assert in_positions(layer, dx).tobytes() == rows.tobytes()
    for name, array in cell.gradients[0].items():
        assert whole.gradients[0][name].tobytes() == array.tobytes(), name
    for (_, units, start), (_, own, at) in zip(whole.state_arrays, cell.state_arrays, strict=True):
        found = in_positions(layer, whole.dstate[:, start : start + units])
        assert found.reshape(-1, own).tobytes() == np.array(cell.dstate[:, at : at + own]).tobytes()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shape", AT_POSITIONS)
def test_scans_have_the_gradients_of_runs_over_the_positions(shape, reverse, isa, rng):
    """Each frame is a sequence of its own, and a gradient of weights the sum over all their steps: each term rounds
    once in the run of its own step, and then goes through the blocks of the sum."""
    layer, order, steps, batch = over_positions(rng, shape, reverse), -1 if reverse else 1, 2, 3
    x, dy = normal(rng, steps, batch, layer.input_size), normal(rng, steps, batch, layer.output_size)
    whole, single = tape_of([layer], steps, batch), tape_of([layer.layer], 1, 1)
    run(whole, x)
    dx = in_positions(layer, back(whole, dy, layer.input_size))[..., ::order, :]
    rows, cotangents = (in_positions(layer, a)[..., ::order, :] for a in (x, dy))
    total = {name: np.zeros(array.shape) for name, array in single.gradients[0].items()}
    sizes = {name: np.zeros(array.shape) for name, array in single.gradients[0].items()}
    for at in np.ndindex(steps, batch):
        states, dstate = [], 0.0
        single.start()
        for row in rows[at]:
            states.append(single.state.copy())
            run(single, row[None, None])
        for p in reversed(range(layer.positions)):
            single.state[...] = states[p]
            run(single, rows[at][p][None, None])
            assert np.array_equal(back(single, cotangents[at][p][None, None], shape[1], dstate)[0, 0], dx[at][p])
            dstate = single.dstate.copy()
            for name, array in single.gradients[0].items():
                total[name] += array
                sizes[name] += np.abs(np.float64(array))
    terms = steps * batch * layer.positions
    roundings = 2 + min(16, terms) + -(-terms // 16)
    for name, array in whole.gradients[0].items():
        assert (np.abs(array - total[name]) <= roundings * U * sizes[name] + 1e-40).all(), name


@pytest.mark.parametrize(
    ("key", "units", "other_key", "others"),
    [
        (("GRU", "torch"), 4, ("LSTM", "torch"), 6),
        (("GRU", "torch"), 4, ("GRU", "torch"), 4),  # from here on side by side in a kernel
        (("GRU", "torch"), 3, ("GRU", "torch"), 7),
        (("GRU", "torch"), 16, ("GRU", "torch"), 2),
        (("LSTM", "torch"), 2, ("LSTM", "torch"), 1),
        (("LSTM", "torch"), 8, ("LSTM", "torch"), 5),
        (("LSTM", "torch"), 11, ("LSTM", "torch"), 16),
    ],
)
def test_two_cells_scan_both_ways(key, units, other_key, others, isa, rng):
    cell, other = (cells.random_cell(*one)[0] for one in ((key, rng, 8, units), (other_key, rng, 8, others)))
    for reverse in (False, True):
        layer = cnorm.OverPositions(cell, positions=33, reverse=reverse, both=other)
        x = normal(rng, 5, layer.input_size)
        x[2] *= 2.0**-60
        x[3, ::2] = 0
        ways = [
            cnorm.Model([cnorm.OverPositions(one, positions=33, reverse=way)]).run(x)
            for one, way in ((cell, reverse), (other, not reverse))
        ]
        assert np.array_equal(cnorm.Model([layer]).run(x), np.concatenate(ways, axis=1))
        assert layer.output_size == 33 * (units + others)


@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
@pytest.mark.parametrize("units", [(4,) * 4, (4, 3, 2), (8, 5, 6, 7), (16, 3), (2, 4, 17, 3), (1,) * 6])
def test_cells_scan_parts_of_a_frame_side_by_side(kind, units, isa, rng):
    """A kernel takes up to four, with a frame each, which must be there before the first is scanned."""
    parts = [cells.random_cell((kind, "torch"), rng, 8, n)[0] for n in units]
    x = normal(rng, 6, len(units) * 8 * 33)
    x[2] *= 2.0**-60
    x[3, : 8 * 33] *= 2.0**-60
    x[4, 8 * 33 : 16 * 33] *= 2.0**-60
    x[5, 8 * 33 + 40] = np.inf  # sigmoid and tanh are finite there
    layers, ways = [cnorm.Scale(np.ones(x.shape[1], np.float32), name="x")], []
    for k, cell in enumerate(parts):
        scan = cnorm.OverPositions(cell, positions=33, reverse=k % 3 == 1, name=f"part{k}")
        start = k * 8 * 33
        layers += [cnorm.Slice("x", start, start + 8 * 33), scan]
        ways.append(cnorm.Model([scan]).run(x[:, start : start + 8 * 33]))
    names = [f"part{k}" for k in range(len(units))]
    whole = cnorm.Model([*layers, cnorm.Concat(names)])
    expected = np.concatenate(ways, axis=1)
    assert np.isfinite(expected).all()
    assert np.array_equal(whole.run(x), expected)
    stream = whole.stream()
    assert np.array_equal([stream.step(frame) for frame in x], expected)
    chain = cnorm.OverPositions(parts[0], positions=33, name="first")
    if units[0] == 8:  # a scan of another one's result waits for it
        again = cnorm.Model([chain, cnorm.Slice("first", 0, 264), cnorm.OverPositions(parts[0], positions=33),
                             cnorm.Add("first")])  # fmt: skip
        once = cnorm.Model([chain]).run(x[:, :264])
        assert np.array_equal(again.run(x[:, :264]), cnorm.Model([chain]).run(once) + once)


@pytest.mark.parametrize("key", [("GRU", "torch"), ("LSTM", "torch")])
@pytest.mark.parametrize("reverse", [None, False, True])
def test_tiny_states_and_inputs_have_the_bits_of_a_tape(key, reverse, isa, rng):
    """Cells without biases, whose state falls below 2^-40, where products are scaled: in one unit, at one position, in
    all. A tape does not take the kernels of small cells."""
    biased = cells.random_cell(key, rng, 5, 6)[0]
    cell = type(biased)({name: w for name, w in biased.weights.items() if "bias" not in name}, preset="torch")
    make = cnorm.PerPosition if reverse is None else cnorm.OverPositions
    layer = make(cell, positions=37, **({} if reverse is None else {"reverse": reverse}))
    for scale in (1.0, 2.0**-30, 2.0**-45, 2.0**-100, 2.0**-130):
        x = normal(rng, 12, 1, 5, 37)
        x[3:] *= scale
        x[6:, ..., 11:] = 0  # after the last input a scan decays
        x[9:, ..., 20] = normal(rng, 5)
        x = x.reshape(12, 1, -1)
        assert cnorm.Model([layer]).run(x[:, 0]).tobytes() == run(tape_of([layer], 12, 1), x).tobytes()


@pytest.mark.exhaustive
def test_two_cells_are_saved_rounded_exported_and_learn(tmp_path, rng):
    cell, other = (one_cell(rng, AT_POSITIONS[i]) for i in (0, 0))
    layer = cnorm.OverPositions(cell, positions=5, both=other, name="scanned")
    layers = [layer, cnorm.Permute((8, 5), (1, 0)), cnorm.Add("scanned"), cnorm.Linear(normal(rng, 2, 40))]
    whole, x = cnorm.Model(layers), normal(rng, 9, 40)
    for model in (whole, *(whole.with_weights(weights, smallest=1) for weights in ("int8", "float16"))):
        model.save(tmp_path / "a.safetensors")
        model.save_packed(tmp_path / "a.cnorm")
        exported = onnx_export.export(model, tmp_path / "a.onnx")
        assert onnx_export.check_parity(model, exported, steps=8).ok
        others = [cnorm.load(tmp_path / f"a.{end}") for end in ("safetensors", "cnorm")]
        for one in (*others, onnx_export.load(tmp_path / "a.onnx"), pickle.loads(pickle.dumps(model))):
            assert one.identity == model.identity
            assert one.run(x).tobytes() == model.run(x).tobytes()
    learner = cnorm.Learner(whole, cnorm.SGD(0.1), truncate=4)
    for frame in x:
        learner.learn(learner.step(frame))
    for new, old in zip(learner.model().layers[0].inner().values(), layer.inner().values(), strict=True):
        assert all((new.weights[name] != array).any() for name, array in old.weights.items())


def test_a_linear_layer_per_position(rng):
    linear = cnorm.Linear(normal(rng, 6, 4), normal(rng, 6))
    layer = cnorm.PerPosition(linear, positions=9)
    x = normal(rng, 7, 36)
    rows = cnorm.Model([linear]).run(in_positions(layer, x).reshape(-1, 4)).reshape(7, 9, 6)
    assert np.array_equal(cnorm.Model([layer]).run(x), in_frames(rows))
    assert not cnorm.Model([layer]).stream().state()


def test_wrong_layers_at_positions(rng):
    gru = one_cell(rng, AT_POSITIONS[0])
    started = cnorm.GRU(dict(gru.weights) | {"h0": normal(rng, 4)}, preset="torch")
    cases = [
        (TypeError, "layer must be a recurrent layer or a Linear, got LayerNorm",
         lambda: cnorm.PerPosition(cnorm.LayerNorm(normal(rng, 4)), positions=3)),
        (TypeError, "cell must be a recurrent layer such as cnorm.GRU, got Linear",
         lambda: cnorm.OverPositions(cnorm.Linear(normal(rng, 4, 4)), positions=3)),
        (ValueError, "must have no initial state", lambda: cnorm.OverPositions(started, positions=3)),
        (ValueError, "must have no initial state", lambda: cnorm.PerPosition(started, positions=3)),
        (ValueError, "positions must be at least 1", lambda: cnorm.PerPosition(gru, positions=0)),
        (ValueError, "both must take the 8 inputs of cell, got 3",
         lambda: cnorm.OverPositions(gru, positions=3, both=cells.random_cell(("GRU", "torch"), rng, 3, 4)[0])),
        (TypeError, "reverse must be a bool", lambda: cnorm.OverPositions(gru, positions=3, reverse=1)),
    ]  # fmt: skip
    for kind, says, make in cases:
        with pytest.raises(kind, match=says):
            make()


# ---- the positions in lanes: the bits of products of single windows

# channels, outputs, taps, groups, positions, stride, padding, dilation
CONVOLUTIONS = [
    (16, 16, 1, 1, 33, 1, 0, 1),
    (9, 16, 5, 1, 129, 2, 2, 1),
    (16, 16, 5, 2, 65, 2, 2, 1),
    (48, 16, 3, 16, 33, 1, 1, 1),
    (6, 9, 4, 3, 20, 3, (5, 1), 2),
    (17, 5, 3, 1, 7, 1, 0, 3),
    (4, 2, 2, 2, 3, 8, (2, 9), 1),
    (5, 3, 2, 1, 40, 9, 0, 1),
    (1, 1, 1, 1, 1, 1, 0, 1),
]


def unsettling(rng, rows, channels, positions):
    """Frames, of which some have tiny positions, a zero or a subnormal number."""
    x = normal(rng, rows, channels, positions)
    x[1] *= 2.0**-60
    x[2, :, positions // 2] *= 2.0**-50
    x[3, channels // 2] = 2.0**-140
    x[4, :, : positions // 2] = 0
    return x


def products(matrix, rows):
    """The product of each row, by a layer of its own kind."""
    layer = cnorm.Model([cnorm.Linear(np.ascontiguousarray(matrix))])
    flat = np.ascontiguousarray(rows).reshape(-1, rows.shape[-1])
    return layer.run(flat).reshape(*rows.shape[:-1], -1)


@pytest.mark.parametrize("shape", CONVOLUTIONS)
def test_a_convolution_has_the_bits_of_products_of_its_windows(shape, isa, rng):
    channels, outputs, taps, groups, positions, stride, padding, dilation = shape
    options = {"stride": stride, "padding": padding, "groups": groups, "dilation": dilation, "positions": positions}
    weight, bias = normal(rng, outputs, channels // groups, taps), normal(rng, outputs)
    for mode in ("zeros", "reflect") if np.max(padding) < positions else ("zeros",):
        layer = cnorm.Conv1d(weight, bias, padding_mode=mode, **options)
        x = unsettling(rng, 6, channels, positions)
        at = layer.window_positions()
        windows = np.where(at < 0, 0, x[:, :, at]).transpose(0, 2, 3, 1).reshape(len(x), layer.places, -1)
        wanted = products(layer.packed()["weight"], np.float32(windows)) + bias
        found = cnorm.Model([layer]).run(x.reshape(len(x), -1))
        assert np.array_equal(found.reshape(len(x), outputs, -1), wanted.swapaxes(1, 2))


@pytest.mark.parametrize("shape", CONVOLUTIONS)
def test_a_transposed_convolution_adds_the_products_of_positions_in_their_order(shape, isa, rng):
    channels, outputs, taps, groups, positions, stride, padding, dilation = shape
    padding = (taps - 1) * dilation // 2
    weight, bias = normal(rng, channels, outputs // groups, taps), normal(rng, outputs)
    layer = cnorm.ConvTranspose1d(
        weight, bias, positions=positions, stride=stride, padding=padding, groups=groups, dilation=dilation
    )
    x = unsettling(rng, 6, channels, positions)
    windows = products(layer.packed()["weight"], x.swapaxes(1, 2)).reshape(len(x), positions, taps, outputs)
    wanted = np.zeros((len(x), layer.places, outputs), np.float32)
    for p, t in np.ndindex(positions, taps):
        place = p * stride + t * dilation - padding
        if 0 <= place < layer.places:
            wanted[:, place] += windows[:, p, t]
    found = cnorm.Model([layer]).run(x.reshape(len(x), -1))
    assert np.array_equal(found.reshape(len(x), outputs, -1), (wanted + bias).swapaxes(1, 2))
