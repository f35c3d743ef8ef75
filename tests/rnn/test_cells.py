"""Every preset against its own reference; what a spec refuses; how checkpoints are read."""

import dataclasses
import functools
import importlib
import itertools
import json

import numpy as np
import pytest
import reference
import safetensors.numpy
from cells import EPS, LAYERS, STEPS, random_cell, random_weights

import cnorm
from cnorm.tensors import optional_tensors

KEYS = sorted(cnorm.PRESETS)
PROJECTED = [key for key in KEYS if any("weight_p" in meaning for _, _, meaning in cnorm.PRESETS[key].weights)]


def tolerance(layer, state):
    """A bound on the error of one step: 2e-6 for the cell 12 -> 64, elsewhere by the length of the sums.

    A sum over k inputs in blocks of 16 has 16 + k / 16 roundings one after another; they are as good as random, so the
    error grows with the root of their number. A norm over few values may have to divide by a small deviation, which
    enlarges everything: narrow layers are allowed eight times as much.
    """
    roundings = 16 + max(layer.input_size, layer.output_size) / 16
    narrow = 8 if layer.spec.normalises and layer.units < 32 else 1
    return 2e-6 * np.sqrt(roundings / (16 + 64 / 16)) * narrow * np.maximum(1, np.abs(state))


def walk(layer, advance, rng, steps, scale=1.0):
    """One-step errors over the bound, along the float64 trajectory; the largest."""
    stream = cnorm.Model([layer]).stream()
    state = {name: np.float64(value) for name, value in stream.state().items()}
    worst = 0
    for _ in range(steps):
        x = (scale * rng.standard_normal(layer.input_size)).astype(np.float32)
        start = {name: np.float32(value) for name, value in state.items()}
        stream.set_state(start)
        y = stream.step(x)
        state = advance(x, start)
        for name, wanted in state.items():
            error = np.abs(stream.state()[name] - wanted) / tolerance(layer, wanted)
            assert not np.isnan(error).any()
            worst = max(worst, error.max())
        np.testing.assert_array_equal(y, stream.state()["h0"])
    return worst


def test_every_preset_has_a_reference():
    assert [key for key, step in STEPS.items() if step is None] == []


@pytest.mark.parametrize(("inputs", "units"), [(12, 64), (5, 7), (33, 50)])
@pytest.mark.parametrize("key", KEYS, ids="-".join)
def test_a_preset_computes_its_equations(key, inputs, units, rng):
    """200 random steps, the first from the state zero."""
    layer, advance = random_cell(key, rng, inputs, units)
    assert walk(layer, advance, rng, 200) <= 1


@pytest.mark.parametrize("key", KEYS, ids="-".join)
def test_a_preset_without_its_optional_weights(key, rng):
    layer, advance = random_cell(key, rng, 9, 16, optional=False)
    assert walk(layer, advance, rng, 20) <= 1


@pytest.mark.parametrize("key", PROJECTED, ids="-".join)
def test_a_projection(key, rng):
    layer, advance = random_cell(key, rng, 11, 40, outputs=13)
    assert (layer.input_size, layer.units, layer.output_size) == (11, 40, 13)
    assert walk(layer, advance, rng, 100) <= 1


@pytest.mark.parametrize("units", [1, 2, 15, 16, 17, 31, 33, 48])
@pytest.mark.parametrize("key", KEYS, ids="-".join)
def test_any_width(key, units, isa, rng):
    layer, advance = random_cell(key, rng, 3, units)
    assert walk(layer, advance, rng, 5) <= 1


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_zoneout_of_haste(kind, rng):
    spec = dataclasses.replace(cnorm.PRESETS[kind, "haste"], zoneout=0.25)
    weights = random_weights(spec, rng, 8, 24)
    layer = LAYERS[kind](weights, preset=spec)
    step = functools.partial(STEPS[kind, "haste"], zoneout=0.25)

    def advance(x, state):
        if kind == "GRU":
            return {"h0": step(weights, x, state["h0"])}
        return dict(zip(("h0", "c0"), step(weights, x, state["h0"], state["c0"]), strict=True))

    assert walk(layer, advance, rng, 100) <= 1


def test_clips(rng):
    spec = dataclasses.replace(cnorm.PRESETS["LSTM", "tflite"], cell_clip=0.3, projection_clip=0.05)
    weights = random_weights(spec, rng, 8, 24, outputs=10)
    layer = cnorm.LSTM(weights, preset=spec)
    step = functools.partial(reference.lstm_tflite, cell_clip=0.3, projection_clip=0.05)
    seen = []

    def advance(x, state):
        h, c = step(weights, x, state["h0"], state["c0"])
        seen.append((np.abs(h).max(), np.abs(c).max()))
        return {"h0": h, "c0": c}

    assert walk(layer, advance, rng, 100) <= 1
    assert np.allclose(np.max(seen, axis=0), (0.05, 0.3), rtol=1e-12), "nothing was clipped: the test tests nothing"


@pytest.mark.parametrize("key", [key for key in KEYS if cnorm.PRESETS[key].scope != "none"], ids="-".join)
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_products_whose_squares_leave_float32(key, scale, rng):
    """LN(W x) does not depend on the scale of x but for eps: the float64 way of a row must agree with the reference."""
    spec = cnorm.PRESETS[key]
    weights = random_weights(spec, rng, 6, 10)
    layer = LAYERS[key[0]](weights, preset=spec, eps=1e-37)
    step = functools.partial(STEPS[key], eps=1e-37)
    names = ("h0", "c0") if key[0] == "LSTM" else ("h0",)

    def advance(x, state):
        result = step(weights, x, *(state[name] for name in names))
        return dict(zip(names, result if key[0] == "LSTM" else [result], strict=True))

    assert walk(layer, advance, rng, 10, scale) <= 1


INSIDE = [key for key in KEYS if any("inside" in meaning for _, _, meaning in cnorm.PRESETS[key].weights)]


@pytest.mark.parametrize("key", INSIDE, ids="-".join)
@pytest.mark.parametrize("scale", [1e-16, 1e20])
def test_a_bias_inside_the_norm_of_products_whose_squares_leave_float32(key, scale, rng):
    """It is part of the row that is done in float64: as large as the product here, from the state zero."""
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

    assert max(walk(layer, advance, rng, 1, scale) for _ in range(10)) <= 1


def test_every_bias_of_a_gate_counts(rng):
    """Those of the input and of the recurrence and one of the sum, beside a bias under the reset gate."""
    spec = cnorm.PRESETS["GRU", "torch"]
    spec = dataclasses.replace(spec, name="mine", weights=(*spec.weights, ("bias", "3H", "bias")))
    weights = random_weights(spec, rng, 9, 16)
    together = weights | {"bias_ih_l0": np.float64(weights["bias_ih_l0"]) + weights["bias"]}
    layer = cnorm.GRU(weights, preset=spec)
    assert walk(layer, lambda x, state: {"h0": reference.gru_torch(together, x, state["h0"])}, rng, 50) <= 1


def test_both_biases_inside_the_norm_of_a_sum_count(rng):
    spec = cnorm.PRESETS["GRU", "dreamer_v2"]
    spec = dataclasses.replace(spec, name="mine", weights=(*spec.weights, ("bias_h", "3H", "inside_h")))
    weights = random_weights(spec, rng, 9, 16)
    weights["bias_h"] = rng.standard_normal(48).astype(np.float32)
    together = weights | {"bias": np.float64(weights["bias"]) + weights["bias_h"]}
    layer = cnorm.GRU(weights, preset=spec)
    assert walk(layer, lambda x, state: {"h0": reference.gru_dreamer_v2(together, x, state["h0"])}, rng, 50) <= 1


def stacked(gates, part, turned=""):
    """A matrix's gates one after the other along an axis of their own."""
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
def test_joined_tensors_are_cut_wherever_they_join(terms, rng):
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
def test_nothing_is_packed_that_the_kernels_would_read_beyond(key, name, rng):
    """Whatever brought the weights into the kernels' form."""

    class Mistaken(LAYERS[key[0]]):
        def packed(self):
            right = super().packed()
            return right | {name: right[name][:, 1:].copy()}

    spec = cnorm.PRESETS[key]
    layer = Mistaken(random_weights(spec, rng, 5, 7, outputs=3 if "lingvo" in key else None), preset=spec)
    with pytest.raises(ValueError, match=rf"{name} of .* must be packed as \(.*\), got \("):
        cnorm.Model([layer])


def test_carrying_the_raw_cell_and_the_normalised_one_differ(rng):
    """The same names, shapes and weights, another recurrence: the reason for presets."""
    carry = cnorm.PRESETS["LSTM", "torch_custom"]
    output = dataclasses.replace(carry, cell_norm="output", name="torch_custom_output")
    weights = random_weights(carry, rng, 12, 64)
    x = rng.standard_normal((3, 12)).astype(np.float32)
    one, other = (cnorm.Model([cnorm.LSTM(weights, preset=spec)]).stream().process(x) for spec in (carry, output))
    np.testing.assert_array_equal(one[0], other[0])  # c starts at zero: the first step is the same
    assert np.abs(one[1] - other[1]).max() > 1e-2


def test_a_saved_file_of_one_preset_is_refused_as_another(tmp_path, rng):
    layer, _ = random_cell(("LSTM", "torch_custom"), rng, 4, 6)
    path = tmp_path / "model.safetensors"
    cnorm.Model([layer]).save(path)
    assert cnorm.load(path).layers[0].spec.cell_norm == "carry"
    cnorm.from_safetensors(path, "torch_custom", prefix="layers.{layer}.")
    as_layers = functools.partial(cnorm.from_safetensors, path, prefix="layers.{layer}.")
    same = dataclasses.replace(layer.spec, name="mine", source="mine")  # only labels
    assert as_layers(same)[0].spec == same
    for name in ("lookalike", "torch_custom"):
        lookalike = dataclasses.replace(layer.spec, cell_norm="output", name=name)
        message = f"not the LSTM {name} asked for: cell_norm is 'carry', not 'output'; read it with cnorm.load"
        with pytest.raises(ValueError, match=message):
            as_layers(lookalike)
    with pytest.raises(ValueError, match=r"the layer's eps is 9\.99.*e-06, not 0\.0009765625"):
        as_layers("torch_custom", eps=2.0**-10)
    with pytest.raises(ValueError, match="kind is 'LSTM', not 'GRU'"):
        as_layers("torch", kind="GRU")


def test_a_saved_file_with_a_spec_of_its_own(tmp_path, rng):
    spec = dataclasses.replace(cnorm.PRESETS["LSTM", "torch_custom"], cell_norm="output")  # the name has stayed
    path = tmp_path / "model.safetensors"
    cnorm.Model([cnorm.LSTM(random_weights(spec, rng, 4, 6), preset=spec)]).save(path)
    assert cnorm.from_safetensors(path, spec, prefix="layers.0.")[0].spec == spec
    with pytest.raises(ValueError, match="cell_norm is 'output', not 'carry'"):
        cnorm.from_safetensors(path, "torch_custom", prefix="layers.0.")


def test_only_what_is_read_of_a_saved_file_has_to_agree(tmp_path, rng):
    carry, _ = random_cell(("LSTM", "torch_custom"), rng, 6, 6)
    spec = dataclasses.replace(carry.spec, cell_norm="output")
    output = cnorm.LSTM(dict(carry.weights), preset=spec)
    path = tmp_path / "model.safetensors"
    model = [carry, cnorm.Residual([output, cnorm.Activation("tanh")]), cnorm.Bidirectional(carry, output)]
    cnorm.Model([*model, cnorm.Linear(np.ones((2, 12), np.float32))]).save(path)
    under = {"layers.0.": carry.spec, "layers.1.0.": spec, "layers.2.forward.": carry.spec, "layers.2.backward.": spec}
    for prefix, preset in under.items():
        assert cnorm.from_safetensors(path, preset, prefix=prefix)[0].spec == preset
        with pytest.raises(ValueError, match="cell_norm"):
            cnorm.from_safetensors(path, spec if preset is carry.spec else carry.spec, prefix=prefix)
    for prefix in ("layers.3.", "layers.0.weight", "model."):
        with pytest.raises(ValueError, match=f"no recurrent layer under '{prefix}'"):
            cnorm.from_safetensors(path, carry.spec, prefix=prefix)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"layers": 1}', '{"layers": [1]}', '{"layers": [{"type": "LSTM"}]}', "[" * 5000]
)
def test_a_saved_file_that_does_not_say_what_it_is(text, tmp_path, rng):
    weights = random_weights(cnorm.PRESETS["LSTM", "torch"], rng, 3, 4)
    safetensors.numpy.save_file(weights, tmp_path / "model", metadata={"cnorm.model": text})
    with pytest.raises(ValueError, match=r"model: .*(does not describe layers|no recurrent layer)"):
        cnorm.from_safetensors(tmp_path / "model", "torch", kind="LSTM")


# ---- specs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", KEYS, ids="-".join)
def test_a_spec_is_json_able_data(key):
    spec = cnorm.PRESETS[key]
    assert cnorm.CellSpec(**json.loads(json.dumps(dataclasses.asdict(spec)))) == spec
    assert spec.refusal() is None


@pytest.mark.parametrize(
    ("key", "changes", "reason"),
    [
        (("LSTM", "ba2016"), {"eps_place": "std"}, "standard deviation"),
        (("LSTM", "ba2016"), {"ddof": 1}, "n - 1"),
        (("GRU", "dreamer_v2"), {"reset": "after"}, "between two products"),
        (("GRU", "ba2016"), {"reset": "before"}, "without layer norm"),
        (("RNN", "ba2016"), {"cell_norm": "carry"}, "cell_norm belongs to the LSTM, got 'carry'"),
        (("LSTM", "ba2016"), {"grouping": "gates_and_candidate"}, "only a GRU"),
        (("LSTM", "ba2016"), {"scope": "none"}, "no use for"),
        (("LSTM", "ba2016"), {"scope": "sum"}, "no use for"),
        (("GRU", "torch"), {"forget_bias": 1.0}, "forget_bias belongs to the LSTM"),
        (("GRU", "torch"), {"cell_clip": 1.0}, "cell_clip belongs to the LSTM"),
        (("RNN", "ba2016"), {"projection_clip": 1.0}, "projection_clip belongs to the LSTM"),
        (("LSTM", "keras"), {"projection_clip": 1.0}, "belongs to a projection"),
        (("LSTM", "torch"), {"reset": "before"}, "reset belongs to the GRU, got 'before'"),
        (("LSTM", "torch"), {"reset": "candidate"}, "reset belongs to the GRU"),
        (("RNN", "ba2016"), {"reset": "before"}, "reset belongs to the GRU"),
        (("LSTM", "torch"), {"update": "keep"}, "update belongs to the GRU"),
        (("LSTM", "torch"), {"activation": "relu"}, "activation belongs to the RNN"),
        (("GRU", "torch"), {"activation": "relu"}, "activation belongs to the RNN"),
        (("LSTM", "torch"), {"update_bias": 1.0}, "update_bias belongs to the GRU"),
    ],
)
def test_a_cell_that_is_not_covered_is_refused_with_a_reason(key, changes, reason, rng):
    spec = dataclasses.replace(cnorm.PRESETS[key], **changes)
    with pytest.raises(ValueError, match=reason):
        LAYERS[key[0]](random_weights(spec, rng, 3, 4), preset=spec)


@pytest.mark.parametrize(
    ("preset", "place", "entry", "reason"),
    [
        ("ba2016", 0, ("weight_x", "4Z I", "weight_x"), "'4Z I' can't be 'weight_x'"),
        ("ba2016", 0, ("weight_x", "0H I", "weight_x"), "'0H I' can't be"),
        ("ba2016", 0, ("weight_x", "-4H I", "weight_x"), "'-4H I' can't be"),
        ("ba2016", 0, ("weight_x", "4H I٤", "weight_x"), "can't be"),
        ("ba2016", 0, ("weight_x", "I 4H", "weight_x"), "can't be"),
        ("ba2016", 0, ("weight_x", "4H 0I", "weight_x"), "can't be"),
        ("ba2016", 0, ("weight_x", "", "weight_x"), "can't be"),
        ("ba2016", 0, ("weight_x", "4H I", "weight_x?"), "can't be 'weight_x\\?'"),
        ("ba2016", 0, ("weight_x", "4H H", "weight_h"), "the same part"),
        ("ba2016", 0, ("weight_x", "4H", "bias"), "the same part"),
        ("ba2016", 0, ("weight_x", "4H", "inside_x"), r"none of its weights is weight_x\[f\]"),
        ("ba2016", 0, ("weight_x", "3H I", "weight_x[fio]"), r"none of its weights is weight_x\[g\]"),
        ("ba2016", 0, ("weight_x", "4H I", "weight_x[ffio]"), "the same part"),
        ("ba2016", 0, ("weight_x", "4H I+H", "weight_x weight_h"), "the same part"),
        ("ba2016", 0, ("weight_x", "2 4H I", "weight_x weight_h"), "can't be"),
        ("ba2016", 0, ("weight_x", "8H", "weight_x weight_h"), "can't be"),
        ("ba2016", 0, ("weight_h", "4H I", "weight_x"), "the same name"),
        ("ba2016", 0, ("h0", "4H I", "weight_x"), "the same name"),
        ("ba2016", -1, ("bias_c", "I", "bias_c"), "'I' can't be 'bias_c'"),
        ("ba2016", -2, ("gain_c", "1", "gain_c"), "can't be"),
        ("ba2016", 3, ("gain_x", "4I", "gain_x"), "can't be"),
        ("torch", 1, ("weight_hh", "4H H", "weight_h"), "can't be"),  # there is a projection
        ("torch", 4, ("weight_hr", "H P", "weight_p?"), "can't be"),
        ("tflite", 0, ("input_to_input_weights", "I H", "weight_x.T[i]"), "inputs first in one"),
        ("tf_contrib", 0, ("kernel", "2I+H 4H", "weight_x.T weight_h.T"), "can't be"),
        ("tf_contrib", 0, ("kernel", "I+H+H 4H", "weight_x.T weight_h.T"), "can't be"),
        ("haste", 3, ("gamma", "3 4H", "gain_x gain_h"), "can't be"),
        ("onnx", 2, ("B", "1 9H", "bias_x bias_h?"), "can't be"),
        ("ba2016", 2, ("bias", "4H", ""), "means '', which"),
        ("ba2016", 2, ("bias", "4H", "?"), "means '', which"),
        ("ba2016", 2, ("bias", "4H", "bias+"), "means '', which"),
        ("ba2016", 2, ("bias", "4H", "+bias"), "means '', which"),
        ("ba2016", 2, ("bias", "4H", "bias  inside_x"), "means '', which"),
    ],
    ids=str,
)
def test_a_spec_whose_weights_can_not_be_what_they_are_said_to_be_is_refused(preset, place, entry, reason):
    entries = list(cnorm.PRESETS["LSTM", preset].weights)
    entries[place] = entry
    spec = dataclasses.replace(cnorm.PRESETS["LSTM", preset], weights=tuple(entries))
    with pytest.raises(ValueError, match=f"does not compute this LSTM: .*{reason}"):
        cnorm.LSTM({}, preset=spec)


@pytest.mark.parametrize(
    "name", ["{0}", "{}", "{foo}", "{layer.foo}", "{layer:>300000000}", "{layer!r}", "{{layer}}", "}"]
)
def test_a_tensor_s_name_is_no_program(name):
    entries = cnorm.PRESETS["LSTM", "ba2016"].weights
    with pytest.raises(ValueError, match="no braces but"):
        dataclasses.replace(cnorm.PRESETS["LSTM", "ba2016"], weights=((name, *entries[0][1:]), *entries[1:]))


@pytest.mark.parametrize(
    "changes",
    [{"scope": "both"}, {"gates": "ifgg"}, {"ddof": 2}, {"zoneout": 1.0}, {"cell_clip": -1.0}, {"eps": float("nan")}],
)
def test_a_spec_that_means_nothing_is_a_value_error(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        dataclasses.replace(cnorm.PRESETS["LSTM", "ba2016"], **changes)


@pytest.mark.parametrize("weights", [None, 3, [3], "abc", [("a", "4H")], [("a", "4H", 3)]], ids=str)
def test_weights_of_a_spec_that_are_none(weights):
    with pytest.raises(TypeError, match=r"weights must be \(name, shape, meaning\) triples of strings, got "):
        dataclasses.replace(cnorm.PRESETS["LSTM", "ba2016"], weights=weights)


def test_numbers_of_a_spec_may_be_numpy_s(tmp_path, rng):
    """They become Python's, which JSON has."""
    changes = {"eps": np.float32(2.0**-20), "forget_bias": np.int64(1), "cell_clip": np.float16(2), "zoneout": 0}
    spec = dataclasses.replace(cnorm.PRESETS["LSTM", "haste"], name="mine", **changes)
    assert {name: type(getattr(spec, name)) for name in changes} == dict.fromkeys(changes, float)
    assert (spec.eps, spec.forget_bias, spec.cell_clip) == (2.0**-20, 1.0, 2.0)
    cnorm.Model([cnorm.LSTM(random_weights(spec, rng, 3, 4), preset=spec)]).save(tmp_path / "model")
    assert cnorm.load(tmp_path / "model").layers[0].spec == spec
    for bad in "1e-5", True, -1.0, np.float32("nan"), 10**400, 1j, np.ones(1):
        with pytest.raises(ValueError, match="eps must be a finite number, not negative, or None, got "):
            dataclasses.replace(spec, eps=bad)


def test_the_preset_is_never_guessed(rng):
    weights = random_weights(cnorm.PRESETS["LSTM", "ba2016"], rng, 3, 4)
    with pytest.raises(TypeError, match="preset"):
        cnorm.LSTM(weights)
    with pytest.raises(ValueError, match=r"preset must be one of the LSTM presets ba2016,.*got 'lstm'"):
        cnorm.LSTM(weights, preset="lstm")
    with pytest.raises(ValueError, match="kind"):
        cnorm.LSTM(weights, preset=cnorm.PRESETS["GRU", "ba2016"])


def test_eps(rng):
    weights = random_weights(cnorm.PRESETS["LSTM", "torchaudio"], rng, 3, 4)
    with pytest.raises(ValueError, match="eps must be given"):
        cnorm.LSTM(weights, preset="torchaudio")
    plain = random_weights(cnorm.PRESETS["LSTM", "torch"], rng, 3, 4)
    assert cnorm.LSTM(plain, preset="torch").eps is None
    with pytest.raises(ValueError, match="normalises nothing"):
        cnorm.LSTM(plain, preset="torch", eps=1e-5)
    gain = np.ones(4, np.float32)
    for bad in None, "1e-5", 1j, True, np.True_, [1e-5], np.array([1e-5]):
        with pytest.raises(TypeError, match="eps must be a real number"):
            cnorm.LayerNorm(gain, eps=bad)
    for bad in -1e-5, float("nan"), float("inf"), 1e39, 10**400:
        with pytest.raises(ValueError, match="eps must be finite and not negative"):
            cnorm.LayerNorm(gain, eps=bad)
    for good in 1e-5, np.float32(1e-5), np.array(1e-5):
        assert cnorm.LayerNorm(gain, eps=good).eps == np.float32(1e-5)


# ---- weights ---------------------------------------------------------------------------------------------------------


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


def test_biases_whose_sum_leaves_float32_are_refused(rng):
    weights = random_weights(cnorm.PRESETS["LSTM", "torch"], rng, 3, 4)
    large = {name: np.full(16, 3e38, np.float32) for name in ("bias_ih_l0", "bias_hh_l0")}
    with pytest.raises(ValueError, match="LSTM torch leave the range of float32"):
        cnorm.Model([cnorm.LSTM(weights | large, preset="torch")])


def test_a_module_of_another_kind():
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match=r"weights of LSTM torch must be weight_ih_l0 .* missing: weight_ih_l0"):
        cnorm.from_torch(torch.nn.Linear(3, 4), "torch", kind="LSTM")
    with pytest.raises(ValueError, match="kind must be one of LSTM, GRU, RNN, or None, got 'lstm'"):
        cnorm.from_torch(torch.nn.LSTM(3, 4), "torch", kind="lstm")


def test_a_tensor_with_a_gradient_is_named():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"weights\['weight_ih_l0'\] of GRU torch must be an array that NumPy can read"):
        cnorm.GRU(dict(torch.nn.GRU(3, 4).named_parameters()), preset="torch")


def test_weights_are_copies_that_nobody_can_write(rng):
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


def test_the_state_at_the_start_can_be_part_of_the_weights(rng):
    layer, _ = random_cell(("LSTM", "torch"), rng, 3, 5)
    start = {"h0": rng.standard_normal(5).astype(np.float32), "c0": rng.standard_normal(5).astype(np.float32)}
    stream = cnorm.Model([cnorm.LSTM(dict(layer.weights) | start, preset="torch")]).stream()
    stream.step(np.ones(3, np.float32))
    stream.reset()
    for name, values in start.items():
        np.testing.assert_array_equal(stream.state()[name], values)


@pytest.mark.parametrize("key", [("GRU", "torch"), ("RNN", "tfa")], ids="-".join)
def test_only_an_lstm_has_a_c_at_the_start(key, rng):
    weights = random_weights(cnorm.PRESETS[key], rng, 3, 5) | {"c0": np.zeros(5, np.float32)}
    with pytest.raises(ValueError, match="unknown: c0"):
        LAYERS[key[0]](weights, preset=cnorm.PRESETS[key])
    with pytest.raises(ValueError, match="leave over c0"):
        cnorm.from_torch(weights, cnorm.PRESETS[key])


def test_a_clip_of_a_projection_that_is_missing(rng):
    spec = dataclasses.replace(cnorm.PRESETS["LSTM", "torch"], name="mine", projection_clip=0.5)
    with pytest.raises(ValueError, match="LSTM mine must have a projection for projection_clip"):
        cnorm.LSTM(random_weights(spec, rng, 3, 4), preset=spec)
    assert cnorm.LSTM(random_weights(spec, rng, 3, 4, 2), preset=spec).output_size == 2


# ---- checkpoints -----------------------------------------------------------------------------------------------------


BIASED = [key for key in KEYS if optional_tensors(cnorm.PRESETS[key].tensors, ())]


@pytest.mark.parametrize("key", BIASED, ids="-".join)
def test_a_bias_is_never_missing_quietly(key, rng):
    """A state dict that has lost its biases is no state dict of a layer without."""
    spec = cnorm.PRESETS[key]
    given = random_weights(spec, rng, 5, 8)
    names = [tensor.named().name for tensor in optional_tensors(spec.tensors, ())]
    bare = {name: array for name, array in given.items() if name not in names}
    read = functools.partial(cnorm.from_torch, preset=spec, eps=EPS.get(key))
    for some in ([name] for name in names):
        with pytest.raises(ValueError, match=f"missing: {some[0]}"):
            read({name: array for name, array in given.items() if name not in some})
    with pytest.raises(ValueError, match=f"missing: {', '.join(names)} .*give bias=False"):
        read(bare)
    with pytest.raises(ValueError, match=f"bias must not be False: the checkpoint has {', '.join(names)}"):
        read(given, bias=False)
    assert read(given)[0].absent_biases == ()
    assert read(bare, bias=False)[0].absent_biases == tuple(names)
    with pytest.raises(TypeError, match="bias must be True, False or None"):
        read(given, bias="no")


def test_a_bias_of_a_projection_that_is_missing(rng):
    given = random_weights(cnorm.PRESETS["LSTM", "tflite"], rng, 5, 8, outputs=8)
    del given["projection_weights"]
    with pytest.raises(ValueError, match="LSTM tflite must have a projection for projection_bias"):
        cnorm.LSTM(given, preset="tflite")


def test_a_projection_has_its_bias_or_says_that_it_has_none(rng):
    given = random_weights(cnorm.PRESETS["LSTM", "tflite"], rng, 5, 8, outputs=3)
    del given["projection_bias"]
    with pytest.raises(ValueError, match="missing: projection_bias"):
        cnorm.from_torch(given, "tflite")
    assert cnorm.from_torch(given, "tflite", bias=False)[0].output_size == 3
    without = {name: array for name, array in given.items() if not name.startswith("projection")}
    with pytest.raises(ValueError, match="recurrent"):  # its matrix is still for 3 outputs
        cnorm.from_torch(without, "tflite")


@pytest.mark.parametrize("entry", [("b", "4H", "inside_x+bias?"), ("g", "2 4H", "gain_x gain_h?")], ids=str)
def test_whatever_is_optional_is_never_missing_quietly(entry, rng):
    plain = cnorm.PRESETS["LSTM", "ba2016"]
    spec = dataclasses.replace(plain, name="mine", weights=(*plain.weights[:2], entry))
    given = random_weights(spec, rng, 5, 8)
    bare = {name: array for name, array in given.items() if name != entry[0]}
    with pytest.raises(ValueError, match=f"missing: {entry[0]} of a LSTM mine"):
        cnorm.from_torch(bare, spec)
    with pytest.raises(ValueError, match=f"bias must not be False: the checkpoint has {entry[0]}"):
        cnorm.from_torch(given, spec, bias=False)
    assert cnorm.from_torch(given, spec)[0].weights.keys() == given.keys()
    assert cnorm.from_torch(bare, spec, bias=False)[0].weights.keys() == bare.keys()


def test_half_of_the_biases_is_a_mistake(rng):
    weights = random_weights(cnorm.PRESETS["GRU", "torch"], rng, 3, 4)
    del weights["bias_hh_l0"]
    with pytest.raises(ValueError, match="all of bias_ih_l0, bias_hh_l0 or none of them; missing: bias_hh_l0"):
        cnorm.GRU(weights, preset="torch")


def numbered(weights, layer, reverse=""):
    return {name.replace("_l0", f"_l{layer}{reverse}"): array for name, array in weights.items()}


def test_a_stack(rng):
    spec = cnorm.PRESETS["LSTM", "torch"]
    weights = [random_weights(spec, rng, inputs, 8) for inputs in (5, 8, 8)]
    given = {f"encoder.{name}": array for i, w in enumerate(weights) for name, array in numbered(w, i).items()}
    layers = cnorm.from_torch(given, "torch", kind="LSTM", prefix="encoder.")
    assert [layer.input_size for layer in layers] == [5, 8, 8]
    x = rng.standard_normal((6, 5)).astype(np.float32)
    wanted = cnorm.Model([cnorm.LSTM(w, preset="torch") for w in weights]).run(x)
    np.testing.assert_array_equal(cnorm.Model(layers).run(x), wanted)


def test_a_stack_with_the_layer_in_the_prefix(rng):
    spec = cnorm.PRESETS["LSTM", "torch_custom"]
    weights = [random_weights(spec, rng, inputs, 8) for inputs in (5, 8)]
    given = {f"layers.{i}.cell.{name}": array for i, w in enumerate(weights) for name, array in w.items()}
    layers = cnorm.from_torch(given, "torch_custom", prefix="layers.{layer}.cell.")
    assert [layer.input_size for layer in layers] == [5, 8]
    np.testing.assert_array_equal(layers[1].weights["weight_hh"], weights[1]["weight_hh"])


def test_the_stack_of_di_engine_shares_a_bias(rng):
    spec = cnorm.PRESETS["LSTM", "di_engine"]
    one, two = (random_weights(spec, rng, inputs, 8) for inputs in (5, 8))
    given = one | {name.replace(".0", ".1"): array for name, array in two.items() if name.startswith("w")}
    given |= {"norm.2.weight": two["norm.0.weight"], "norm.2.bias": two["norm.0.bias"]}
    given |= {"norm.3.weight": two["norm.1.weight"], "norm.3.bias": two["norm.1.bias"]}
    given["bias"] = np.concatenate([one["bias"], two["bias"]])
    layers = cnorm.from_torch(given, "di_engine")
    for layer, weights in zip(layers, (one, two), strict=True):
        assert layer.weights.keys() == weights.keys()
        for name, array in weights.items():
            np.testing.assert_array_equal(layer.weights[name], array)
    for rows in (one["bias"], one["bias"][0, 0], np.concatenate([given["bias"], two["bias"]])):
        with pytest.raises(ValueError, match="bias"):
            cnorm.from_torch(given | {"bias": rows}, "di_engine")


class Unsliceable:
    """As PyTorch's tensors, which have no slices with a negative step."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


def test_a_bidirectional_stack(rng):
    spec = cnorm.PRESETS["GRU", "torch"]
    weights = [[random_weights(spec, rng, inputs, 6) for _ in range(2)] for inputs in (4, 12)]
    given = {}
    for i, (forward, backward) in enumerate(weights):
        given |= numbered(forward, i) | numbered(backward, i, "_reverse")
    model = cnorm.Model(cnorm.from_torch(given, "torch", kind="GRU"))
    assert model.output_size == 12
    x = rng.standard_normal((7, 4)).astype(np.float32)
    wanted = x
    for forward, backward in weights:
        f = cnorm.Model([cnorm.GRU(forward, preset="torch")]).run(wanted)
        b = cnorm.Model([cnorm.GRU(backward, preset="torch")]).run(wanted[::-1])[::-1]
        wanted = np.concatenate([f, b], axis=1)
    np.testing.assert_array_equal(model.run(x), wanted)
    np.testing.assert_array_equal(model.run(Unsliceable(x)), wanted)
    with pytest.raises(ValueError, match="bidirectional"):
        model.stream()


def test_both_directions_read_the_same_sequence(rng):
    forward, backward = (random_cell(("GRU", "torch"), rng, inputs, 6)[0] for inputs in (4, 5))
    with pytest.raises(ValueError, match="backward must take the 4 inputs that forward takes, got 5"):
        cnorm.Bidirectional(forward, backward)


def test_checkpoints_that_do_not_fit(rng):
    good = random_weights(cnorm.PRESETS["GRU", "torch"], rng, 3, 4)
    with pytest.raises(ValueError, match="kind must be given"):
        cnorm.from_torch(good, "torch")
    with pytest.raises(ValueError, match=r"leave over fc\.weight"):
        cnorm.from_torch(good | {"fc.weight": good["weight_ih_l0"]}, "torch", kind="GRU")
    with pytest.raises(ValueError, match=r"no tensor has a name that begins with 'rnn\.'"):
        cnorm.from_torch(good, "torch", kind="GRU", prefix="rnn.")
    with pytest.raises(ValueError, match="missing: weight_hh_l0"):
        cnorm.from_torch({k: v for k, v in good.items() if k != "weight_hh_l0"}, "torch", kind="GRU")
    with pytest.raises(ValueError, match=r"weight_(ih|hh)_l0"):
        cnorm.from_torch(good, "torch", kind="LSTM")
    with pytest.raises(ValueError, match="preset must be one of"):
        cnorm.from_torch(good, "pytorch")
    with pytest.raises(TypeError, match="source"):
        cnorm.from_torch(list(good), "torch", kind="GRU")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefix": 3}, "prefix must be a str, got int"),
        ({"kind": ["GRU"]}, "kind must be a str or None, got list"),
        ({"preset": 3}, "preset must be a name or a CellSpec, got int"),
        ({"preset": np.array(["torch", "keras"])}, "preset must be a name or a CellSpec, got ndarray"),
    ],
    ids=str,
)
def test_a_wrong_type_is_named(options, message, tmp_path, rng):
    layer, _ = random_cell(("GRU", "torch"), rng, 3, 4)
    safetensors.numpy.save_file(dict(layer.weights), tmp_path / "foreign")
    cnorm.Model([layer]).save(tmp_path / "own")
    sources = [(cnorm.from_torch, layer.weights)]
    sources += [(cnorm.from_safetensors, tmp_path / name) for name in ("foreign", "own")]
    for read, source in sources:
        with pytest.raises(TypeError, match=message):
            read(source, **({"preset": "torch", "kind": "GRU"} | options))


def test_a_checkpoint_that_does_not_fit_is_described(rng):
    """What was found stands beside what was expected, and a prefix where one would do."""
    good = random_weights(cnorm.PRESETS["GRU", "torch"], rng, 3, 4)
    cell = {name.replace("_l0", ""): array for name, array in good.items()}
    net = {"fc.weight": good["weight_ih_l0"]} | {f"rnn.{name}": array for name, array in good.items()}
    found = r"the names are fc\.weight, rnn\.bias_hh_l0, rnn\.bias_ih_l0, rnn\.weight_hh_l0, rnn\.weight_ih_l0"
    for prefix in ("", "rnn", "lstm."):
        with pytest.raises(ValueError, match=rf"{found}; prefixes that would fit: 'rnn\.'$"):
            cnorm.from_torch(net, "torch", kind="GRU", prefix=prefix)
    with pytest.raises(ValueError, match=rf"missing: .*{found}$"):
        cnorm.from_torch(net, "haste", kind="GRU", prefix="rnn.")
    with pytest.raises(ValueError, match=r"would fit: ''$"):
        cnorm.from_torch(good, "torch", kind="GRU", prefix="rnn.")
    two = {f"{way}.{name}": array for name, array in cell.items() for way in "ab"}
    with pytest.raises(ValueError, match=r"would fit: 'a\.', 'b\.'$"):
        cnorm.from_torch(two, "torch", kind="GRU")
    many = {f"conv.{i:02}": good["bias_hh_l0"] for i in range(30)}
    with pytest.raises(ValueError, match=r"the names are conv\.00, .*, conv\.11 and 18 more$"):
        cnorm.from_torch(many, "torch", kind="GRU")
    with pytest.raises(ValueError, match=r"leave over conv\.00, .*, conv\.11 and 18 more: give"):
        cnorm.from_torch(many | good, "torch", kind="GRU")
    with pytest.raises(ValueError, match=r"must be finite, got NaN or infinity$"):  # the names are not wrong
        cnorm.from_torch({name: np.full_like(a, np.nan) for name, a in good.items()}, "torch", kind="GRU")


# ---- PyTorch ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (kind, dict(zip(("num_layers", "bias", "bidirectional"), values, strict=True)))
        for kind, *values in itertools.product(("LSTM", "GRU"), (1, 2), (True, False), (True, False))
    ]
    + [("LSTM", {"proj_size": 5})],
)
def test_torch_modules(kind, options, rng):
    torch = pytest.importorskip("torch")
    torch.manual_seed(1607)
    module = getattr(torch.nn, kind)(6, 16, **options)
    model = cnorm.Model(cnorm.from_torch(module, "torch", kind=kind))
    x = rng.standard_normal((20, 6)).astype(np.float32)
    with torch.no_grad():
        wanted = module.double()(torch.from_numpy(x).double())[0].numpy()
    # a plain cell with PyTorch's initial weights contracts: the error of a step does not grow
    assert np.abs(model.run(x) - wanted).max() <= 4 * tolerance(_first_cell(model), 1.0)


def _first_cell(model):
    layer = model.layers[0]
    return layer.forward if isinstance(layer, cnorm.Bidirectional) else layer


def test_tensors_that_no_array_can_be_made_of(tmp_path):
    """They may be elsewhere in a checkpoint; under the prefix they are an error that names them."""
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Embedding(3, 4), torch.nn.GRU(4, 5))
    state = module.state_dict() | {"0.weight": torch.zeros(3, 4).to(torch.float8_e4m3fn)}
    (layer,) = cnorm.from_torch(state, "torch", kind="GRU", prefix="1.")
    importlib.import_module("safetensors.torch").save_file(state, tmp_path / "file")
    (other,) = cnorm.from_safetensors(tmp_path / "file", "torch", kind="GRU", prefix="1.")
    assert layer.weights["weight_ih_l0"].tobytes() == other.weights["weight_ih_l0"].tobytes()
    with pytest.raises(TypeError, match=r"source\['0.weight'\] must be a tensor that NumPy can read: .*Float8"):
        cnorm.from_torch(state, "torch", kind="GRU")
    with pytest.raises(ValueError, match=r"file: tensor '0.weight' has dtype F8_E4M3"):
        cnorm.from_safetensors(tmp_path / "file", "torch", kind="GRU")
    with pytest.raises(TypeError, match=r"source\['weight_ih_l0'\] must be a tensor that NumPy can read: .* meta"):
        cnorm.from_torch(torch.nn.GRU(3, 4, device="meta"), "torch", kind="GRU")


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_torch_cells(kind, rng):
    torch = pytest.importorskip("torch")
    torch.manual_seed(1607)
    module = getattr(torch.nn, f"{kind}Cell")(6, 16)
    (layer,) = cnorm.from_torch(module, "torch", kind=kind)
    x = rng.standard_normal(6).astype(np.float32)
    with torch.no_grad():
        wanted = module.double()(torch.from_numpy(x).double()[None])
    wanted = (wanted[0] if kind == "LSTM" else wanted)[0].numpy()
    assert np.abs(cnorm.Model([layer]).stream().step(x) - wanted).max() <= tolerance(layer, 1.0)


def torch_layer_norm_lstm(torch, split, carry, bias_after, w, x, h, c, eps):
    """A straightforward layer-normalised LSTM of F.linear and F.layer_norm; gates i, f, g, o."""
    norm = torch.nn.functional.layer_norm
    wide = (len(w["wx"]),)
    if split:
        gates = norm(x @ w["wx"].T, wide, w["gx"], w["bx"], eps) + norm(h @ w["wh"].T, wide, w["gh"], w["bh"], eps)
    else:
        gates = norm(x @ w["wx"].T + h @ w["wh"].T, wide, w["gx"], w["bx"], eps)
    i, f, g, o = (gates + bias_after).chunk(4, dim=-1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    normed = norm(c, c.shape[-1:], w["gc"], w["bc"], eps)
    return torch.sigmoid(o) * torch.tanh(normed), normed if carry else c


@pytest.mark.parametrize("preset", ["torch_custom", "torchaudio", "tfa"])
def test_layer_norm_cells_written_in_torch(preset, rng):
    torch = pytest.importorskip("torch")
    spec = cnorm.PRESETS["LSTM", preset]
    own = random_weights(spec, rng, 6, 16)
    names = {"wx": "weight_x", "wh": "weight_h", "gx": "gain_x", "bx": "bias_x", "gh": "gain_h", "bh": "bias_h"}
    names |= {"gc": "gain_c", "bc": "bias_c"}
    if spec.scope == "sum":
        names |= {"gx": "gain", "bx": "bias"}
    by_meaning = {meaning.removesuffix("?"): own[name] for name, _, meaning in spec.weights}
    by_meaning = {m.removesuffix(".T"): a.T if m.endswith(".T") else a for m, a in by_meaning.items()}
    w = {short: torch.tensor(by_meaning[long]).double() for short, long in names.items() if long in by_meaning}
    after = torch.tensor(by_meaning["bias"]).double() if spec.scope == "split" and "bias" in by_meaning else 0
    layer = cnorm.LSTM(own, preset=preset, eps=1e-3)

    def advance(x, state):
        x, h, c = (torch.tensor(np.float64(a)) for a in (x, state["h0"], state["c0"]))
        h, c = torch_layer_norm_lstm(torch, spec.scope == "split", True, after, w, x, h, c, 1e-3)
        return {"h0": h.numpy(), "c0": c.numpy()}

    assert walk(layer, advance, rng, 50) <= 1


@pytest.mark.parametrize("key", sorted(EPS), ids="-".join)
def test_a_preset_without_eps_names_the_reason(key):
    assert cnorm.PRESETS[key].eps is None
    assert cnorm.PRESETS[key].normalises
