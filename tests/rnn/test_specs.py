"""Valid cell specs, and the ones that are refused."""

import dataclasses
import json

import numpy as np
import pytest
from cells import LAYERS, random_weights

import cnorm
from cnorm.cells.specs import spec_from_json, spec_to_json

KEYS = sorted(cnorm.PRESETS)


@pytest.mark.parametrize("key", KEYS, ids="-".join)
def test_specs_survive_json(key):
    spec = cnorm.PRESETS[key]
    assert cnorm.CellSpec(**json.loads(json.dumps(dataclasses.asdict(spec)))) == spec
    assert spec.refusal() is None


def test_the_format_of_specs_keeps_its_fields():
    """In this order, which is part of a model's identity, and so of every saved state."""
    spec = cnorm.PRESETS["LSTM", "ba2016"]
    told = spec_to_json(spec)
    assert " ".join(told) == (
        "kind name source gates weights scope grouping cell_norm eps eps_place ddof reset update forget_bias "
        "update_bias activation cell_clip projection_clip zoneout"
    )
    assert (told["eps_place"], told["ddof"]) == ("variance", 0)
    assert spec_from_json(json.loads(json.dumps(told))) == spec


@pytest.mark.parametrize(
    ("key", "changes", "reason"),
    [
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
        (("LSTM", "torch"), {"update_bias": 1.0}, "update_bias belongs to the GRU"),
    ],
)
def test_refuses_cells_that_are_not_computed(key, changes, reason, rng):
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
def test_refuses_shapes_that_contradict_their_meaning(preset, place, entry, reason):
    entries = list(cnorm.PRESETS["LSTM", preset].weights)
    entries[place] = entry
    spec = dataclasses.replace(cnorm.PRESETS["LSTM", preset], weights=tuple(entries))
    with pytest.raises(ValueError, match=f"does not compute this LSTM: .*{reason}"):
        cnorm.LSTM({}, preset=spec)


@pytest.mark.parametrize(
    "name", ["{0}", "{}", "{foo}", "{layer.foo}", "{layer:>300000000}", "{layer!r}", "{{layer}}", "}"]
)
def test_rejects_format_fields_in_tensor_names(name):
    entries = cnorm.PRESETS["LSTM", "ba2016"].weights
    with pytest.raises(ValueError, match="no braces but"):
        dataclasses.replace(cnorm.PRESETS["LSTM", "ba2016"], weights=((name, *entries[0][1:]), *entries[1:]))


@pytest.mark.parametrize(
    "changes",
    [{"scope": "both"}, {"gates": "ifgg"}, {"zoneout": 1.0}, {"cell_clip": -1.0}, {"eps": float("nan")}],
)
def test_rejects_impossible_field_values(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        dataclasses.replace(cnorm.PRESETS["LSTM", "ba2016"], **changes)


@pytest.mark.parametrize("weights", [None, 3, [3], "abc", [("a", "4H")], [("a", "4H", 3)]], ids=str)
def test_rejects_weights_that_are_not_triples(weights):
    with pytest.raises(TypeError, match=r"weights must be \(name, shape, meaning\) triples of strings, got "):
        dataclasses.replace(cnorm.PRESETS["LSTM", "ba2016"], weights=weights)


def test_numpy_scalars_become_python_floats(tmp_path, rng):
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


def test_preset_must_be_named(rng):
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
    for bad in "1e-5", 1j, True, np.True_, [1e-5], np.array([1e-5]):
        with pytest.raises(TypeError, match="eps must be a real number"):
            cnorm.LayerNorm(gain, eps=bad)
    for bad in -1e-5, float("nan"), float("inf"), 10**400:
        with pytest.raises(ValueError, match="eps must be finite and not negative"):
            cnorm.LayerNorm(gain, eps=bad)
    with pytest.raises(ValueError, match=r"eps must be finite in float32, got 1e\+39"):
        cnorm.LayerNorm(gain, eps=1e39)
    for good in 1e-5, np.float32(1e-5), np.array(1e-5):
        assert cnorm.LayerNorm(gain, eps=good).eps == np.float32(1e-5)
