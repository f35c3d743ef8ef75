"""Models with int8 and float16 weights: against float64 steps on the same weights, their files, their refusals."""

import hashlib
import json
import pickle
from pathlib import Path

import cells
import models
import numpy as np
import pytest
import safetensors.numpy
from cells import random_cell

import cnorm
from cnorm.storage.model_files import METADATA_KEY

GOLDEN = Path(__file__).parents[1] / "golden" / "rounded.json"
TABLE = Path(__file__).parents[1] / "c" / "presets.inc"
INPUTS, UNITS = 193, 192  # every matrix is large enough to be rounded; 193 columns fill no whole number of vectors
EVERY_CELL = sorted(cnorm.PRESETS)
ROUNDED = ("int8", "float16")


def layer_of(key, seed=0, outputs=None):
    rng = np.random.default_rng([seed, *map(ord, "".join(key))])
    return random_cell(key, rng, INPUTS, UNITS, outputs)


def frames(steps, inputs=INPUTS, seed=1):
    return np.random.default_rng(seed).standard_normal((steps, inputs)).astype(np.float32)


def one_step_errors(key, model, oracle_layer, steps=12):
    """Root mean square errors of h, each step from the state of float64's trajectory: the model's, and that of float64
    arithmetic on the model's rounded weights.
    """
    step = cells.STEPS[key]
    eps = {} if key not in cells.EPS else {"eps": cells.EPS[key]}
    names = list(model.stream().state())
    state = {name: np.zeros(UNITS) for name in names}
    stream, errors, of_weights = model.stream(), [], []
    for x in frames(steps):
        stream.set_state({name: value.astype(np.float32) for name, value in state.items()})
        y = stream.step(x)
        rounded_state = [np.float64(np.float32(value)) for value in state.values()]
        result = step(oracle_layer.weights, np.float64(x), *rounded_state, **eps)
        same = step(model.layers[0].weights, np.float64(x), *rounded_state, **eps)
        result, same = (value if isinstance(value, tuple) else (value,) for value in (result, same))
        state = dict(zip(names, result, strict=True))
        errors.append(y - result[0])
        of_weights.append(same[0] - result[0])
    return np.sqrt(np.mean(np.square(errors))), np.sqrt(np.mean(np.square(of_weights)))


@pytest.mark.parametrize("key", EVERY_CELL, ids=" ".join)
def test_rounded_activations_add_little_to_the_error_of_rounded_weights(key):
    """int8: rounding activations adds at most 5 % to the error of the rounded weights. float16: at most 3e-4."""
    layer, _ = layer_of(key)
    model = cnorm.Model([layer])
    int8 = model.with_weights("int8")
    assert int8.weights == "int8"
    found, of_weights = one_step_errors(key, int8, layer)
    assert 0 < found <= 1.05 * of_weights
    assert one_step_errors(key, model.with_weights("float16"), layer)[0] <= 3e-4


def hash_of(array):
    return hashlib.sha256(np.where(np.isnan(array), np.float32(np.nan), array).astype("<f4").tobytes()).hexdigest()[:16]


def test_every_preset_has_one_hash_on_every_instruction_set(monkeypatch):
    found = {}
    before = cnorm.active_isa()
    for key in EVERY_CELL:
        for weights in ROUNDED:
            model = cnorm.Model([layer_of(key)[0]]).with_weights(weights)
            hashes = set()
            try:
                for isa in cnorm.available_isas():
                    cnorm.use_isa(isa)
                    hashes.add(hash_of(model.run(frames(9))))
            finally:
                cnorm.use_isa(before)
            assert len(hashes) == 1, (key, weights)
            found[f"{' '.join(key)} {weights}"] = hashes.pop()
    if not GOLDEN.exists():  # deleted by hand, to record an intended change of results
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(GOLDEN.read_text())


def row_of_preset(key, outputs):
    """A preset as a row of tests/c/presets.inc."""
    layer, spec = random_cell(key, np.random.default_rng(0), 5, 7, outputs)[0], cnorm.PRESETS[key]
    packed = layer.packed()
    masks = {"inside_x": 1, "inside_h": 2, "bias_n": 4, "gain_c": 8, "bias_c": 16, "weight_p": 32, "bias_p": 64}
    arrays = sum(bit for name, bit in masks.items() if packed[name] is not None)

    def number(value):
        return "INFINITY" if value is None else f"{float(np.float32(value))!r}f"

    fields = [
        f'"{" ".join(key)}{"" if outputs is None else ", projected"}"',
        f"CNORM_CELL_{spec.kind}", f"CNORM_SCOPE_{spec.scope.upper()}", f"CNORM_CELL_NORM_{spec.cell_norm.upper()}",
        f"CNORM_RESET_{spec.reset.upper()}", f"CNORM_ACTIVATION_{spec.activation.upper()}",
        str(int(spec.update == "keep")),
        number(layer.eps or 0), number(spec.cell_clip), number(spec.projection_clip), number(spec.zoneout),
        str(packed["group"]), str(arrays),
    ]  # fmt: skip
    return "{" + ", ".join(fields) + "},\n"


def test_presets_of_the_golden_hashes_in_c():
    """tests/c/golden.c hashes every preset with each type of weights, on AArch64 too: its table has all presets."""
    projected = [
        key for key in EVERY_CELL if any("weight_p" in meaning for _, _, meaning in cnorm.PRESETS[key].weights)
    ]
    cases = [(key, None) for key in EVERY_CELL] + [(key, 4) for key in projected]
    text = "/* written by tests/rnn/test_rounded.py from cnorm.PRESETS, if it is missing */\n"
    text += "".join(row_of_preset(*case) for case in cases)
    if not TABLE.exists():  # deleted by hand, after a change of the presets
        TABLE.write_text(text)
    assert TABLE.read_text() == text


@pytest.mark.exhaustive(one_in=2)
@pytest.mark.parametrize("weights", ROUNDED)
@pytest.mark.parametrize("key", EVERY_CELL, ids=" ".join)
def test_files_and_pickles_have_the_same_bits(key, weights, tmp_path):
    layer, _ = layer_of(key)
    model = cnorm.Model([layer, models.random_linear(np.random.default_rng(3), UNITS, 200)]).with_weights(weights)
    model.save(tmp_path / "m")
    loaded, x = cnorm.load(tmp_path / "m"), frames(7)
    assert loaded.weights == weights
    assert loaded.nbytes == model.nbytes
    for other in (loaded, pickle.loads(pickle.dumps(model))):
        assert np.array_equal(other.run(x), model.run(x))
        other.restore(model.stream().save())  # one identity
    float32 = cnorm.Model([layer, models.random_linear(np.random.default_rng(3), UNITS, 200)])
    assert model.nbytes < float32.nbytes * (0.3 if weights == "int8" else 0.55)
    assert (tmp_path / "m").stat().st_size < float32.nbytes * 0.6


def test_projections_residual_and_bidirectional_layers(tmp_path):
    rng = np.random.default_rng(5)
    projected, _ = random_cell(("LSTM", "lingvo"), rng, 192, 256, outputs=192)
    way, back = (random_cell(("GRU", "torch"), rng, 192, 192)[0] for _ in range(2))
    model = cnorm.Model(
        [projected, cnorm.Residual([models.random_linear(rng, 192, 192)]), cnorm.Bidirectional(way, back)]
    )
    x = frames(6, 192)
    for weights in ROUNDED:
        rounded = model.with_weights(weights)
        assert sum(len(layer.all_rows()) for layer in rounded.layers) == 3 + 1 + 4
        assert np.abs(rounded.run(x) - model.run(x)).max() < 0.1
        rounded.save(tmp_path / "m")
        assert np.array_equal(cnorm.load(tmp_path / "m").run(x), rounded.run(x))


@pytest.mark.parametrize("weights", ROUNDED)
def test_step_many_matches_single_steps_and_isolates_nan(weights):
    model = cnorm.Model([layer_of(("LSTM", "ba2016"))[0]]).with_weights(weights)
    x = frames(19)
    x[4, 7], x[11, 0] = np.nan, -np.inf
    alone = [model.stream() for _ in x]
    together = [model.stream() for _ in x]
    for _ in range(2):
        want = np.stack([stream.step(frame) for stream, frame in zip(alone, x, strict=True)])
        assert np.array_equal(model.step_many(together, x), want, equal_nan=True)
    assert np.isnan(want[[4, 11]]).all()
    assert np.isfinite(np.delete(want, [4, 11], 0)).all()
    with pytest.raises(ValueError, match="finite"):
        model.restore(together[4].save())


def test_process_has_the_bits_of_steps():
    model = cnorm.Model([layer_of(("GRU", "torch"))[0]]).with_weights("int8")
    x, stream = frames(21), model.stream()
    assert np.array_equal(model.stream().process(x), np.stack([stream.step(frame) for frame in x]))


def test_rounding_is_decided_by_the_weights_of_the_model():
    """None of a small model, which is an error; else all, also matrices that are small; `smallest` sets a limit."""
    small = cnorm.demo_model()
    with pytest.raises(ValueError, match="the model's matrices have 20032 weights, fewer than 32768"):
        small.with_weights("int8")
    assert repr(small.with_weights("int8", smallest=1)).endswith(", weights='int8')")
    with pytest.raises(ValueError, match=r"no matrix has at least 16385 weights"):
        small.with_weights("float16", smallest=16385)
    part = small.with_weights("int8", smallest=16384)
    assert part.layers[1].rows == {}
    assert part.weights == "int8"
    rng = np.random.default_rng(1)
    kws = cnorm.Model([random_cell(("GRU", "torch"), rng, n, 96)[0] for n in (40, 96)])  # of at most 27,648 weights
    assert all(len(layer.all_rows()) == 2 for layer in kws.with_weights("int8").layers)
    assert repr(kws).endswith(")])")


def test_int8_and_float32_models_exchange_states_only_by_set_state():
    model = cnorm.Model([layer_of(("LSTM", "ba2016"))[0]])
    int8 = model.with_weights("int8")
    stream = model.stream()
    stream.step(frames(1)[0])
    with pytest.raises(ValueError, match="another model"):
        int8.restore(stream.save())
    moved = int8.stream()
    moved.set_state(stream.state())
    assert np.array_equal(moved.state()["h0"], stream.state()["h0"])


def test_keep_original_keeps_the_float32_model(tmp_path):
    model = cnorm.Model([layer_of(("LSTM", "ba2016"))[0]])
    int8 = model.with_weights("int8", keep_original=True)
    assert int8.with_weights("float32") is model
    assert int8.with_weights("float16").weights == "float16"
    assert int8.with_weights("int8") is int8
    with pytest.raises(ValueError, match="keep_original=True"):
        model.with_weights("int8").with_weights("float32")
    with pytest.raises(ValueError, match="weights must be one of float32, float16, int8, got 'int4'"):
        model.with_weights("int4")
    for smallest in (-1, 1.5, "1"):
        with pytest.raises(ValueError, match="smallest must be an integer of at least 0"):
            model.with_weights("int8", smallest=smallest)
    model.save(tmp_path / "m")
    assert np.array_equal(cnorm.load(tmp_path / "m", weights="int8").run(frames(3)), int8.run(frames(3)))


def test_weights_beyond_float16_are_refused():
    layer = cnorm.Linear(np.full((256, 256), 1e5, np.float32))
    with pytest.raises(ValueError, match=r"weight of Linear\(256 -> 256\) .* float16, its largest weight is 100000"):
        cnorm.Model([layer]).with_weights("float16")
    assert cnorm.Model([layer]).with_weights("int8").weights == "int8"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda t: t.update({"layers.0.rows.weight_h": t["layers.0.rows.weight_h"].astype(np.int16)}),
            "must be a matrix of int8",
        ),
        (lambda t: t.pop("layers.0.rows.weight_h.scales"), "must be there for int8 rows"),
        (
            lambda t: t.update({"layers.0.rows.weight_h.scales": -t["layers.0.rows.weight_h.scales"]}),
            "positive and finite",
        ),
        (lambda t: t.update({"layers.0.rows.weight_h": t["layers.0.rows.weight_h"][:, :-1]}), "must"),
        (lambda t: t.update({"layers.0.rows.weight_h": np.full_like(t["layers.0.rows.weight_h"], -128)}), "within"),
        (lambda t: t.update({"layers.0.rows.weight_z": t["layers.0.rows.weight_h"]}), "does not take|must"),
        (lambda t: t.pop("layers.0.rows.weight_x"), "must be a matrix"),
    ],
)
def test_rejects_malformed_int8_tensors(tmp_path, spoil, message):
    model = cnorm.Model([layer_of(("LSTM", "ba2016"))[0]]).with_weights("int8")
    model.save(tmp_path / "m")
    tensors = safetensors.numpy.load_file(tmp_path / "m")
    with safetensors.safe_open(tmp_path / "m", "numpy") as file:
        metadata = file.metadata()
    assert METADATA_KEY in metadata
    spoil(tensors)
    safetensors.numpy.save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, tmp_path / "n", metadata)
    with pytest.raises(ValueError, match=message):
        cnorm.load(tmp_path / "n")
