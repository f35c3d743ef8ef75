"""Every preset against its own reference, and the weights that a layer accepts."""

import dataclasses
import functools

import numpy as np
import pytest
import reference
from cells import LAYERS, STEPS, random_cell, random_weights, worst_step

import cnorm

KEYS = sorted(cnorm.PRESETS)
PROJECTED = [key for key in KEYS if any("weight_p" in meaning for _, _, meaning in cnorm.PRESETS[key].weights)]


def test_every_preset_has_a_reference():
    assert [key for key, step in STEPS.items() if step is None] == []


@pytest.mark.exhaustive(one_in=3)
@pytest.mark.parametrize(("inputs", "units"), [(12, 64), (5, 7), (33, 50)])
@pytest.mark.parametrize("key", KEYS, ids="-".join)
def test_every_preset_matches_its_reference(key, inputs, units, rng):
    """200 random steps, starting from a state of zeros."""
    layer, advance = random_cell(key, rng, inputs, units)
    assert worst_step(layer, advance, rng, 200) <= 1


@pytest.mark.parametrize("key", KEYS, ids="-".join)
def test_a_preset_without_its_optional_weights(key, rng):
    layer, advance = random_cell(key, rng, 9, 16, optional=False)
    assert worst_step(layer, advance, rng, 20) <= 1


@pytest.mark.parametrize("key", PROJECTED, ids="-".join)
def test_a_projection(key, rng):
    layer, advance = random_cell(key, rng, 11, 40, outputs=13)
    assert (layer.input_size, layer.units, layer.output_size) == (11, 40, 13)
    assert worst_step(layer, advance, rng, 100) <= 1


@pytest.mark.exhaustive(one_in=3)
@pytest.mark.parametrize("units", [1, 2, 15, 16, 17, 31, 33, 48])
@pytest.mark.parametrize("key", KEYS, ids="-".join)
def test_any_width(key, units, isa, rng):
    layer, advance = random_cell(key, rng, 3, units)
    assert worst_step(layer, advance, rng, 5) <= 1


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_haste_zoneout_at_inference(kind, rng):
    spec = dataclasses.replace(cnorm.PRESETS[kind, "haste"], zoneout=0.25)
    weights = random_weights(spec, rng, 8, 24)
    layer = LAYERS[kind](weights, preset=spec)
    step = functools.partial(STEPS[kind, "haste"], zoneout=0.25)

    def advance(x, state):
        if kind == "GRU":
            return {"h0": step(weights, x, state["h0"])}
        return dict(zip(("h0", "c0"), step(weights, x, state["h0"], state["c0"]), strict=True))

    assert worst_step(layer, advance, rng, 100) <= 1


def test_cell_and_projection_clips(rng):
    spec = dataclasses.replace(cnorm.PRESETS["LSTM", "tflite"], cell_clip=0.3, projection_clip=0.05)
    weights = random_weights(spec, rng, 8, 24, outputs=10)
    layer = cnorm.LSTM(weights, preset=spec)
    step = functools.partial(reference.lstm_tflite, cell_clip=0.3, projection_clip=0.05)
    seen = []

    def advance(x, state):
        h, c = step(weights, x, state["h0"], state["c0"])
        seen.append((np.abs(h).max(), np.abs(c).max()))
        return {"h0": h, "c0": c}

    assert worst_step(layer, advance, rng, 100) <= 1
    assert np.allclose(np.max(seen, axis=0), (0.05, 0.3), rtol=1e-12), "nothing was clipped: the test tests nothing"


@pytest.mark.parametrize("key", [key for key in KEYS if cnorm.PRESETS[key].scope != "none"], ids="-".join)
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_products_whose_squares_overflow_float32(key, scale, rng):
    """LN(W x) does not depend on the scale of x apart from eps: the float64 path must agree with the reference."""
    spec = cnorm.PRESETS[key]
    weights = random_weights(spec, rng, 6, 10)
    layer = LAYERS[key[0]](weights, preset=spec, eps=1e-37)
    step = functools.partial(STEPS[key], eps=1e-37)
    names = ("h0", "c0") if key[0] == "LSTM" else ("h0",)

    def advance(x, state):
        result = step(weights, x, *(state[name] for name in names))
        return dict(zip(names, result if key[0] == "LSTM" else [result], strict=True))

    assert worst_step(layer, advance, rng, 10, scale) <= 1


INSIDE = [key for key in KEYS if any("inside" in meaning for _, _, meaning in cnorm.PRESETS[key].weights)]


@pytest.mark.parametrize("key", INSIDE, ids="-".join)
@pytest.mark.parametrize("scale", [1e-16, 1e20])
def test_bias_inside_the_norm_of_products_whose_squares_overflow_float32(key, scale, rng):
    """The bias is part of the row that is computed in float64; here it is as large as the product."""
    spec = cnorm.PRESETS[key]
    weights = random_weights(spec, rng, 6, 10)
    for name, _, meaning in spec.weights:
        if "inside" in meaning:
            weights[name] *= np.float32(scale)
    layer = LAYERS[key[0]](weights, preset=spec, eps=1e-37)
    step = functools.partial(STEPS[key], eps=1e-37)
    names = ("h0", "c0") if key[0] == "LSTM" else ("h0",)

    def advance(x, state):
        result = step(weights, x, *(state[name] for name in names))
        return dict(zip(names, result if key[0] == "LSTM" else [result], strict=True))

    assert max(worst_step(layer, advance, rng, 1, scale) for _ in range(10)) <= 1


def test_all_biases_of_a_gate_are_added(rng):
    """The biases of input, recurrence and sum are added, in a cell whose reset gate also acts on a bias."""
    spec = cnorm.PRESETS["GRU", "torch"]
    spec = dataclasses.replace(spec, name="mine", weights=(*spec.weights, ("bias", "3H", "bias")))
    weights = random_weights(spec, rng, 9, 16)
    together = weights | {"bias_ih_l0": np.float64(weights["bias_ih_l0"]) + weights["bias"]}
    layer = cnorm.GRU(weights, preset=spec)
    assert worst_step(layer, lambda x, state: {"h0": reference.gru_torch(together, x, state["h0"])}, rng, 50) <= 1


def test_both_biases_inside_the_norm_of_a_sum_are_added(rng):
    spec = cnorm.PRESETS["GRU", "dreamer_v2"]
    spec = dataclasses.replace(spec, name="mine", weights=(*spec.weights, ("bias_h", "3H", "inside_h")))
    weights = random_weights(spec, rng, 9, 16)
    weights["bias_h"] = rng.standard_normal(48).astype(np.float32)
    together = weights | {"bias": np.float64(weights["bias"]) + weights["bias_h"]}
    layer = cnorm.GRU(weights, preset=spec)
    assert worst_step(layer, lambda x, state: {"h0": reference.gru_dreamer_v2(together, x, state["h0"])}, rng, 50) <= 1


def stacked(gates, part, turned=""):
    """The entry of a matrix whose gates are stacked along an axis of their own."""
    return " ".join(f"{part}{turned}[{gate}]" for gate in gates)


@pytest.mark.parametrize("axes", ["4 H {}", "1 4 H {}"])
@pytest.mark.parametrize("parts", [("weight_x",), ("weight_h",), ("weight_x", "weight_h")])
def test_stacked_matrices_have_the_bits_of_plain_ones(parts, axes, tmp_path, rng):
    plain = cnorm.PRESETS["LSTM", "ba2016"]
    weights = random_weights(plain, rng, 5, 7)
    entries = {
        name: (name, axes.format("IH"[name == "weight_h"]), stacked("fiog", name)) if name in parts else (name, *rest)
        for name, *rest in plain.weights
    }
    spec = dataclasses.replace(plain, name="mine", weights=tuple(entries.values()))
    lead = (1,) * axes.startswith("1")
    given = {name: w.reshape(*lead, 4, 7, -1) if name in parts else w for name, w in weights.items()}
    x = rng.standard_normal((6, 5)).astype(np.float32)
    model = cnorm.Model([cnorm.LSTM(given, preset=spec)])
    model.save(tmp_path / "model")
    wanted = cnorm.Model([cnorm.LSTM(weights, preset=plain)]).run(x).tobytes()
    assert model.run(x).tobytes() == cnorm.load(tmp_path / "model").run(x).tobytes() == wanted


@pytest.mark.parametrize("terms", ["3H+H fio g", "2H+2H fi og", "H+3H f iog", "H+H+2H f i og", "H+2H+H f io g"])
def test_joined_tensors_are_split_along_their_joined_axis(terms, rng):
    axis, *gates = terms.split()
    plain = cnorm.PRESETS["LSTM", "ba2016"]
    shapes = {"weight_x": f"{axis} I", "weight_h": f"{axis} H", "bias": axis}
    joined = [(name, shapes.get(name, shape), " ".join(f"{name}[{g}]" for g in gates) if name in shapes else meaning)
              for name, shape, meaning in plain.weights]  # fmt: skip
    weights = random_weights(plain, rng, 5, 7)
    x = rng.standard_normal((6, 5)).astype(np.float32)
    spec = dataclasses.replace(plain, name="mine", weights=tuple(joined))
    one, other = (cnorm.Model([cnorm.LSTM(weights, preset=p)]).run(x) for p in (spec, plain))
    assert one.tobytes() == other.tobytes()


def test_stacked_matrices_with_the_inputs_first(rng):
    plain = cnorm.PRESETS["LSTM", "torch"]
    weights = random_weights(plain, rng, 5, 7)
    entry = ("weight_ih_l0", "4 I H", stacked("ifgo", "weight_x", ".T"))
    spec = dataclasses.replace(plain, name="mine", weights=(entry, *plain.weights[1:]))
    given = weights | {"weight_ih_l0": weights["weight_ih_l0"].reshape(4, 7, 5).swapaxes(1, 2)}
    x = rng.standard_normal((6, 5)).astype(np.float32)
    one, other = (cnorm.Model([cnorm.LSTM(w, preset=p)]).run(x) for w, p in ((given, spec), (weights, plain)))
    assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize(
    ("key", "name"),
    [(("LSTM", "lingvo"), "weight_x"), (("LSTM", "lingvo"), "weight_h"), (("LSTM", "lingvo"), "weight_p"),
     (("GRU", "onnx"), "weight_n")],
)  # fmt: skip
def test_packing_rejects_shapes_the_kernels_would_read_past(key, name, rng):
    """Shapes are checked again after packing, for layers that override `packed`."""

    class Mistaken(LAYERS[key[0]]):
        def packed(self):
            right = super().packed()
            return right | {name: right[name][:, 1:].copy()}

    spec = cnorm.PRESETS[key]
    layer = Mistaken(random_weights(spec, rng, 5, 7, outputs=3 if "lingvo" in key else None), preset=spec)
    with pytest.raises(ValueError, match=rf"{name} of .* must be packed as \(.*\), got \("):
        cnorm.Model([layer])


def test_carrying_the_raw_or_the_normalised_cell_gives_different_outputs(rng):
    """The same names, shapes and weights give another recurrence: why the preset has to be named."""
    carry = cnorm.PRESETS["LSTM", "torch_custom"]
    output = dataclasses.replace(carry, cell_norm="output", name="torch_custom_output")
    weights = random_weights(carry, rng, 12, 64)
    x = rng.standard_normal((3, 12)).astype(np.float32)
    one, other = (cnorm.Model([cnorm.LSTM(weights, preset=spec)]).stream().process(x) for spec in (carry, output))
    np.testing.assert_array_equal(one[0], other[0])  # c starts at zero: the first step is the same
    assert np.abs(one[1] - other[1]).max() > 1e-2


def test_names_and_shapes_are_checked(rng):
    good = random_weights(cnorm.PRESETS["LSTM", "lingvo"], rng, 5, 8)
    for name in ("wm", "ln_scale"):
        without = {k: v for k, v in good.items() if k != name}
        with pytest.raises(ValueError, match=f"missing: {name}; unknown: none"):
            cnorm.LSTM(without, preset="lingvo")
        with pytest.raises(ValueError, match=name):
            cnorm.LSTM(good | {name: good[name][..., 1:]}, preset="lingvo")
        with pytest.raises(ValueError, match=name):
            cnorm.LSTM(good | {name: good[name][None]}, preset="lingvo")
        with pytest.raises(ValueError, match="finite"):
            cnorm.LSTM(good | {name: np.full_like(good[name], np.nan)}, preset="lingvo")
        with pytest.raises(TypeError, match="float64"):
            cnorm.LSTM(good | {name: good[name].astype(np.float64)}, preset="lingvo")
    with pytest.raises(ValueError, match="unknown: peephole"):
        cnorm.LSTM(good | {"peephole": good["ln_scale"]}, preset="lingvo")
    masked = good | {"wm": np.ma.masked_less(good["wm"], 0)}
    for read in (cnorm.LSTM, cnorm.from_torch):
        with pytest.raises(TypeError, match=r"weights\['wm'\] of LSTM lingvo must be a plain array, got a MaskedArray"):
            read(masked, preset="lingvo")
    with pytest.raises(TypeError, match="mapping"):
        cnorm.LSTM(list(good.values()), preset="lingvo")
    for shape in 8, (8,):
        with pytest.raises(TypeError, match=r"weight must be an array, got .* no normalized_shape"):
            cnorm.LayerNorm(shape)


def test_biases_whose_sum_overflows_float32_are_refused(rng):
    weights = random_weights(cnorm.PRESETS["LSTM", "torch"], rng, 3, 4)
    large = {name: np.full(16, 3e38, np.float32) for name in ("bias_ih_l0", "bias_hh_l0")}
    with pytest.raises(ValueError, match="LSTM torch leave the range of float32"):
        cnorm.Model([cnorm.LSTM(weights | large, preset="torch")])


def test_rejects_a_module_of_another_type():
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match=r"weights of LSTM torch must be weight_ih_l0 .* missing: weight_ih_l0"):
        cnorm.from_torch(torch.nn.Linear(3, 4), "torch", kind="LSTM")
    with pytest.raises(ValueError, match="kind must be one of GRU, LSTM, RNN, or None, got 'lstm'"):
        cnorm.from_torch(torch.nn.LSTM(3, 4), "torch", kind="lstm")


def test_tensors_with_gradients_are_read():
    torch = pytest.importorskip("torch")
    network = torch.nn.GRU(3, 4)
    x = np.ones((5, 3), np.float32)
    recorded = cnorm.Model([cnorm.GRU(dict(network.named_parameters()), preset="torch")]).run(x)
    assert recorded.tobytes() == cnorm.Model([cnorm.GRU(network.state_dict(), preset="torch")]).run(x).tobytes()


def test_weights_are_read_only_copies(rng):
    given = random_weights(cnorm.PRESETS["GRU", "torch"], rng, 3, 4)
    layer = cnorm.GRU(given, preset="torch")
    kept = layer.weights["weight_ih_l0"].copy()
    given["weight_ih_l0"][:] = 0
    np.testing.assert_array_equal(layer.weights["weight_ih_l0"], kept)
    with pytest.raises(ValueError, match="read-only"):
        layer.weights["weight_ih_l0"][0] = 1
    with pytest.raises(TypeError):
        layer.weights["weight_ih_l0"] = kept


def test_half_precision_weights_are_widened(rng):
    given = random_weights(cnorm.PRESETS["GRU", "torch"], rng, 3, 4)
    half = {name: array.astype(np.float16) for name, array in given.items()}
    wide = {name: array.astype(np.float32) for name, array in half.items()}
    x = rng.standard_normal((4, 3)).astype(np.float32)
    one, other = (cnorm.Model([cnorm.GRU(w, preset="torch")]).run(x) for w in (half, wide))
    np.testing.assert_array_equal(one, other)


def test_initial_state_can_be_part_of_the_weights(rng):
    layer, _ = random_cell(("LSTM", "torch"), rng, 3, 5)
    start = {"h0": rng.standard_normal(5).astype(np.float32), "c0": rng.standard_normal(5).astype(np.float32)}
    stream = cnorm.Model([cnorm.LSTM(dict(layer.weights) | start, preset="torch")]).stream()
    stream.step(np.ones(3, np.float32))
    stream.reset()
    for name, values in start.items():
        np.testing.assert_array_equal(stream.state()[name], values)


@pytest.mark.parametrize("key", [("GRU", "torch"), ("RNN", "tfa")], ids="-".join)
def test_only_an_lstm_accepts_an_initial_c(key, rng):
    weights = random_weights(cnorm.PRESETS[key], rng, 3, 5) | {"c0": np.zeros(5, np.float32)}
    with pytest.raises(ValueError, match="unknown: c0"):
        LAYERS[key[0]](weights, preset=cnorm.PRESETS[key])
    with pytest.raises(ValueError, match="leave over c0"):
        cnorm.from_torch(weights, cnorm.PRESETS[key])


def test_rejects_a_projection_clip_without_a_projection(rng):
    spec = dataclasses.replace(cnorm.PRESETS["LSTM", "torch"], name="mine", projection_clip=0.5)
    with pytest.raises(ValueError, match="LSTM mine must have a projection for projection_clip"):
        cnorm.LSTM(random_weights(spec, rng, 3, 4), preset=spec)
    assert cnorm.LSTM(random_weights(spec, rng, 3, 4, 2), preset=spec).output_size == 2
