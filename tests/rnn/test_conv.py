"""CausalConv1d and Conv1d against sums in float64: bits of every path, gradients, files, rounding, export."""

import pickle

import cells
import numpy as np
import pytest
from tapes import back, own_gradients, run, tape_of

import cnorm
import onnx_export
from onnx_export.description import state_table

# outputs, channels, taps, dilation, groups
CAUSAL = [
    (5, 3, 4, 1, 1),
    (5, 3, 4, 3, 1),
    (6, 4, 20, 2, 2),
    (7, 7, 20, 1, 7),
    (4, 4, 1, 1, 1),
    (3, 3, 33, 2, 3),
    (133, 133, 20, 1, 133),
    (64, 64, 5, 3, 64),
    (40, 70, 3, 2, 1),
]
# ..., positions, stride, padding, padding_mode
IN_FRAME = [
    (5, 3, 4, 1, 1, 20, 1, 0, "zeros"),
    (5, 3, 4, 2, 1, 20, 3, (2, 1), "reflect"),
    (6, 6, 3, 1, 6, 100, 2, 1, "zeros"),
    (8, 4, 3, 1, 2, 9, 1, 2, "zeros"),
    (3, 3, 1, 1, 1, 150, 1, 0, "zeros"),
    (9, 1, 6, 1, 1, 22, 2, (3, 2), "reflect"),
    (7, 6, 5, 1, 1, 13, 1, (2, 4), "zeros"),
    (40, 6, 3, 1, 2, 20, 2, 1, "zeros"),  # this and the next two have more outputs than lanes, the positions in lanes
    (40, 2, 5, 2, 1, 26, 1, (2, 3), "zeros"),
    (34, 1, 1, 1, 1, 16, 1, 0, "zeros"),
    (34, 2, 5, 1, 1, 19, 1, 0, "zeros"),  # one place less than lanes
]
U = 2.0**-24


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def causal(rng, shape, bias=True):
    o, c, k, dilation, groups = shape
    return cnorm.CausalConv1d(
        normal(rng, o, c // groups, k), normal(rng, o) if bias else None, dilation=dilation, groups=groups
    )


def in_frame(rng, shape):
    o, c, k, dilation, groups, positions, stride, padding, mode = shape
    options = {"positions": positions, "stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return cnorm.Conv1d(normal(rng, o, c // groups, k), normal(rng, o), padding_mode=mode, **options)


def windows_of(layer, x):
    """[rows, places, taps, channels] in float64: what outputs are computed from; rows are steps of a stream."""
    if layer.kind == "CausalConv1d":
        before = np.concatenate([np.zeros((layer.history, layer.channels)), np.float64(x)])
        at = np.arange(len(x))[:, None] + np.arange(layer.taps) * layer.dilation
        return before[at][:, None]
    grid = np.pad(
        np.float64(x).reshape(len(x), layer.channels, layer.positions), [(0, 0), (0, 0), layer.padding],
        mode="constant" if layer.padding_mode == "zeros" else "reflect",
    )  # fmt: skip
    at = np.arange(layer.places)[:, None] * layer.stride + np.arange(layer.taps) * layer.dilation
    return grid[:, :, at].transpose(0, 2, 3, 1)


def whole_weight(layer):
    """[outputs, taps, channels], zeros between groups."""
    weight, c = np.float64(layer.weights["weight"]), layer.channels // layer.groups
    whole = np.zeros((len(weight), layer.taps, layer.channels))
    for o in range(len(weight)):
        g = o // (len(weight) // layer.groups)
        whole[o, :, g * c : (g + 1) * c] = weight[o].T
    return whole


def exact(layer, x):
    """The outputs, and the sums of the sizes of their terms."""
    windows, weight = windows_of(layer, x), whole_weight(layer)
    bias = np.float64(layer.weights.get("bias", 0.0))
    y = np.einsum("rptc,otc->rpo", windows, weight) + bias
    sizes = np.einsum("rptc,otc->rpo", np.abs(windows), np.abs(weight)) + np.abs(bias)
    return tuple(a.transpose(0, 2, 1).reshape(len(x), -1) for a in (y, sizes))


def chain(layer):
    """The roundings of a term: its product, its block of 16, the blocks, the bias."""
    terms = layer.taps * (1 if layer.depthwise else layer.channels)
    return 2 + min(16, terms) + -(-terms // 16)


LAYERS = [(causal, shape) for shape in CAUSAL] + [(in_frame, shape) for shape in IN_FRAME]
every_layer = pytest.mark.parametrize(
    ("make", "shape"), LAYERS, ids=lambda value: getattr(value, "__name__", str(value))
)


@every_layer
def test_every_path_has_the_same_bits_and_is_right(make, shape, isa, rng):
    layer = make(rng, shape)
    model, x = cnorm.Model([layer]), normal(rng, 90, layer.input_size)
    y = model.run(x)
    wanted, sizes = exact(layer, x)
    assert (np.abs(y - wanted) <= chain(layer) * U * sizes).all()
    stream = model.stream()
    assert np.stack([stream.step(frame) for frame in x]).tobytes() == y.tobytes()
    stream = model.stream()
    parts = [stream.process(x[:2]), stream.process(x[2:71])]
    saved = stream.save()
    again = model.restore(saved)
    assert np.concatenate([*parts, again.process(x[71:])]).tobytes() == y.tobytes()
    streams = [model.stream() for _ in range(70)]
    many = [model.step_many(streams, np.repeat(frame[None], 70, 0)) for frame in x[:40]]
    assert all(np.array_equal(step, np.repeat(row[None], 70, 0)) for step, row in zip(many, y, strict=False))
    if layer.input_size == layer.output_size:
        out = x.copy()
        assert model.stream().process(out, out=out).tobytes() == y.tobytes()


def test_the_state_is_the_last_frames_oldest_first(rng):
    layer = causal(rng, (5, 3, 4, 3, 1))
    model, x = cnorm.Model([layer]), normal(rng, 30, 3)
    stream = model.stream()
    stream.process(x)
    assert stream.state()["f0"].tobytes() == x[-9:].tobytes()
    other = model.stream()
    other.set_state({"f0": x[-9:].ravel()})
    assert other.step(x[0]).tobytes() == stream.step(x[0]).tobytes()


def test_states_are_numbered_with_those_of_cells(rng):
    lstm = cells.random_cell(("LSTM", "torch"), rng, 3, 2)[0]
    layers = [causal(rng, (3, 3, 2, 1, 1)), causal(rng, (3, 3, 1, 1, 1)), lstm]
    assert list(cnorm.Model(layers).stream().state()) == ["f0", "h1", "c1"]
    assert [row["name"] for row in state_table(cnorm.Model(layers))] == ["f0", "h1", "c1"]


@every_layer
def test_gradients(make, shape, isa, rng):
    """dx, dweight and dbias of steps of two streams against sums in float64."""
    layer, steps = make(rng, shape), 21
    x, dy = normal(rng, steps, 2, layer.input_size), normal(rng, steps, 2, layer.output_size)
    tape = tape_of([layer], steps, 2)
    tape.start()
    y = run(tape, x)
    dx, own = back(tape, dy, layer.input_size), own_gradients(layer, tape)
    weight, windows, of_dx, sizes = whole_weight(layer), [], np.zeros(x.shape), np.zeros(x.shape)
    for b in range(2):
        assert (
            np.ascontiguousarray(y[:, b]).tobytes() == cnorm.Model([layer]).run(np.ascontiguousarray(x[:, b])).tobytes()
        )
        windows.append(windows_of(layer, x[:, b]))
        dz = np.float64(dy[:, b]).reshape(steps, layer.out_channels, -1).transpose(0, 2, 1)
        place = np.arange(x[:, b].size).reshape(x[:, b].shape) + 1
        for target, parts in ((of_dx, (dz, weight)), (sizes, (np.abs(dz), np.abs(weight)))):
            flat = np.zeros(place.size + 1)
            np.add.at(flat, np.int64(np.rint(windows_of(layer, place))), np.einsum("rpo,otc->rptc", *parts))
            target[:, b] = flat[1:].reshape(x[:, b].shape)
    roundings = 40 + layer.taps + layer.out_channels / 16
    assert (np.abs(dx - of_dx) <= roundings * U * sizes + 1e-30).all()
    dz = np.float64(dy).reshape(steps, 2, layer.out_channels, -1)
    windows = np.stack(windows, 1)
    rows = windows.shape[0] * windows.shape[1] * windows.shape[2]
    roundings = 3 + 16 + -(-rows // 16)
    for found, terms in ((own["bias"], dz.transpose(0, 1, 3, 2).reshape(rows, -1)),):
        assert (np.abs(found - terms.sum(0)) <= roundings * U * np.abs(terms).sum(0)).all()
    whole = np.einsum("sbop,sbptc->oct", dz, windows)
    most = np.einsum("sbop,sbptc->oct", np.abs(dz), np.abs(windows))
    kept = np.abs(whole_weight(layer)).transpose(0, 2, 1) > 0
    found = own["weight"]
    assert (np.abs(found.ravel() - whole[kept]) <= roundings * U * most[kept]).all()


@pytest.mark.parametrize("shape", CAUSAL)
def test_many_steps_have_the_gradients_of_single_steps(shape, rng):
    layer = causal(rng, shape)
    x, dy = normal(rng, 30, 1, layer.input_size), normal(rng, 30, 1, layer.output_size)
    whole, single = tape_of([layer], 30, 1), tape_of([layer], 1, 1)
    run(whole, x)
    dx = back(whole, dy, layer.input_size, 0.5)
    states, dstate = [], 0.5
    for frame in x:
        states.append(single.state.copy())
        run(single, frame[None])
    for t in reversed(range(30)):
        single.state[...] = states[t]
        run(single, x[t][None])
        assert back(single, dy[t][None], layer.input_size, dstate).tobytes() == dx[t].tobytes()
        dstate = single.dstate.copy()
    assert np.array_equal(dstate, whole.dstate)


def test_every_instruction_set_has_the_same_bits(rng):
    layers, before, found = [make(rng, shape) for make, shape in LAYERS], cnorm.active_isa(), []
    given = [(normal(rng, 12, 2, layer.input_size), normal(rng, 12, 2, layer.output_size)) for layer in layers]
    try:
        for isa in cnorm.available_isas():
            cnorm.use_isa(isa)
            found.append([])
            for layer, (x, dy) in zip(layers, given, strict=True):
                tape = tape_of([layer], 12, 2)
                y, dx = run(tape, x), back(tape, dy, layer.input_size)
                found[-1] += [a.tobytes() for a in (y, dx, tape.dstate, *tape.gradients[0].values())]
    finally:
        cnorm.use_isa(before)
    assert found.count(found[0]) == len(found)


@pytest.mark.exhaustive(one_in=8)
@pytest.mark.parametrize("weights", ["float32", "int8", "float16"])
@every_layer
def test_it_is_saved_packed_pickled_and_exported(make, shape, weights, tmp_path, rng):
    layer = make(rng, shape)
    model = cnorm.Model([layer])
    if weights != "float32":
        if layer.depthwise:
            pytest.skip("a depthwise kernel is no matrix")
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


def test_it_learns(rng):
    layers = [causal(rng, (4, 3, 3, 2, 1)), causal(rng, (4, 4, 3, 1, 4)), causal(rng, (6, 4, 2, 1, 2))]
    learner = cnorm.Learner(cnorm.Model(layers), cnorm.SGD(0.01), truncate=4)
    for frame in normal(rng, 12, 3):
        learner.learn(learner.step(frame))
    for new, old in zip(learner.model().layers, layers, strict=True):
        for name, array in old.weights.items():
            assert (new.weights[name] != array).any()


def test_modules_of_torch(rng):
    torch = pytest.importorskip("torch")
    module = torch.nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2, padding_mode="reflect")
    x = normal(rng, 5, 4 * 11)
    wanted = module(torch.from_numpy(x).reshape(5, 4, 11)).detach().numpy().reshape(5, -1)
    np.testing.assert_allclose(cnorm.Model([cnorm.Conv1d(module, positions=11)]).run(x), wanted, atol=2e-6)
    module = torch.nn.Conv1d(4, 4, 5, dilation=2, groups=4, bias=False)
    frames = normal(rng, 20, 4)
    padded = torch.nn.functional.pad(torch.from_numpy(frames.T[None]), (8, 0))
    np.testing.assert_allclose(
        cnorm.Model([cnorm.CausalConv1d(module)]).run(frames), module(padded)[0].detach().numpy().T, atol=2e-6
    )
    with pytest.raises(ValueError, match="stride 1"):
        cnorm.CausalConv1d(torch.nn.Conv1d(4, 4, 5, stride=2))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"groups": 4}, "groups must divide the 6 outputs"),
        ({"positions": 3}, "at least the 4 that the kernel reaches over, got 3 and 0"),
        ({"padding_mode": "circular"}, "padding_mode must be 'zeros' or 'reflect'"),
        ({"padding": 20, "padding_mode": "reflect"}, "padding must be below the 20 positions"),
        ({"stride": 0}, "stride must be at least 1"),
        ({"padding": -1}, "padding must be at least 0"),
    ],
)
def test_wrong_options(options, says, rng):
    with pytest.raises(ValueError, match=says):
        cnorm.Conv1d(normal(rng, 6, 2, 4), **{"positions": 20} | options)


@pytest.mark.parametrize(
    ("groups", "error", "says"),
    [
        (0, ValueError, r"groups must be at least 1 and below 2\^28, got 0"),
        (-2, ValueError, r"groups must be at least 1 and below 2\^28, got -2"),
        (1 << 28, ValueError, r"groups must be at least 1 and below 2\^28, got 268435456"),
        (4, ValueError, r"groups must divide the 6 (outputs|channels), got 4"),
        (2.0, TypeError, "groups must be an int, got float"),
        ("2", TypeError, "groups must be an int, got str"),
        (True, TypeError, "groups must be an int, got bool"),
        (None, TypeError, "groups must be an int, got NoneType"),
    ],
)
@pytest.mark.parametrize("kind", ["CausalConv1d", "Conv1d", "ConvTranspose1d"])
def test_groups_that_are_none(kind, groups, error, says, rng):
    where = {} if kind == "CausalConv1d" else {"positions": 20}
    make = getattr(cnorm, kind)
    assert make(normal(rng, 6, 2, 4), groups=np.int64(3), **where).groups == 3
    with pytest.raises(error, match=says):
        make(normal(rng, 6, 2, 4), groups=groups, **where)


@pytest.mark.parametrize("padding", [((1 << 26) - 3, 0), (0, (1 << 26) - 3), (1 << 25, (1 << 25) - 3)])
def test_a_padded_frame_has_at_most_2_to_the_28_elements(padding, rng):
    """So that its size can be computed; one of fewer has its scratch limited as any layer, in a packed file."""
    weight, options = normal(rng, 6, 4, 4), {"positions": 4, "stride": 1 << 26}
    for fewer, says in ((0, "sizes that do not fit"), (1, "more than 64 MiB")):
        given = (max(padding[0] - fewer, 0), padding[1] - (fewer if padding[0] == 0 else 0))
        with pytest.raises(ValueError, match=says):
            cnorm.Model([cnorm.Conv1d(weight, **options, padding=given)]).packed_bytes()
