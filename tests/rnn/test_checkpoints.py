"""Reading checkpoints of other frameworks and saved files as recurrent layers."""

import dataclasses
import functools
import importlib
import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from cells import EPS, LAYERS, random_cell, random_weights, step_tolerance, worst_step

import cnorm
from cnorm.cells.tensors import optional_tensors

KEYS = sorted(cnorm.PRESETS)


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
    with pytest.raises(ValueError, match="kind is 'LSTM', not 'GRU'") as refused:
        as_layers("torch", kind="GRU")
    assert "weights is" not in str(refused.value)  # a page of tensors


def test_a_saved_file_with_a_spec_of_its_own(tmp_path, rng):
    spec = dataclasses.replace(cnorm.PRESETS["LSTM", "torch_custom"], cell_norm="output")  # the name has stayed
    path = tmp_path / "model.safetensors"
    cnorm.Model([cnorm.LSTM(random_weights(spec, rng, 4, 6), preset=spec)]).save(path)
    assert cnorm.from_safetensors(path, spec, prefix="layers.0.")[0].spec == spec
    with pytest.raises(ValueError, match="cell_norm is 'output', not 'carry'"):
        cnorm.from_safetensors(path, "torch_custom", prefix="layers.0.")


def test_only_the_selected_layer_of_a_saved_file_is_compared(tmp_path, rng):
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
def test_refuses_malformed_configurations(text, tmp_path, rng):
    weights = random_weights(cnorm.PRESETS["LSTM", "torch"], rng, 3, 4)
    safetensors.numpy.save_file(weights, tmp_path / "model", metadata={"cnorm.model": text})
    with pytest.raises(
        ValueError, match=r"model: .*(does not describe layers|no recurrent layer|must have a preset or a spec)"
    ):
        cnorm.from_safetensors(tmp_path / "model", "torch", kind="LSTM")


BIASED = [key for key in KEYS if optional_tensors(cnorm.PRESETS[key].tensors, ())]


@pytest.mark.parametrize("key", BIASED, ids="-".join)
def test_missing_bias_is_reported(key, rng):
    """A state dict with missing biases is not accepted as one of a layer without biases."""
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


def test_projection_bias_without_projection_is_refused(rng):
    given = random_weights(cnorm.PRESETS["LSTM", "tflite"], rng, 5, 8, outputs=8)
    del given["projection_weights"]
    with pytest.raises(ValueError, match="LSTM tflite must have a projection for projection_bias"):
        cnorm.LSTM(given, preset="tflite")


def test_projection_bias_is_given_or_declared_absent(rng):
    given = random_weights(cnorm.PRESETS["LSTM", "tflite"], rng, 5, 8, outputs=3)
    del given["projection_bias"]
    with pytest.raises(ValueError, match="missing: projection_bias"):
        cnorm.from_torch(given, "tflite")
    assert cnorm.from_torch(given, "tflite", bias=False)[0].output_size == 3
    without = {name: array for name, array in given.items() if not name.startswith("projection")}
    with pytest.raises(ValueError, match="recurrent"):  # the recurrent matrix still takes 3 outputs
        cnorm.from_torch(without, "tflite")


@pytest.mark.parametrize("entry", [("b", "4H", "inside_x+bias?"), ("g", "2 4H", "gain_x gain_h?")], ids=str)
def test_missing_optional_tensor_is_reported(entry, rng):
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


def test_refuses_one_bias_of_two(rng):
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


def test_di_engine_stacks_share_a_bias(rng):
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
    """Like PyTorch's tensors, does not support slices with a negative step."""

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


def test_rejects_checkpoints_that_do_not_match_the_preset(rng):
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
def test_type_errors_name_the_argument(options, message, tmp_path, rng):
    layer, _ = random_cell(("GRU", "torch"), rng, 3, 4)
    safetensors.numpy.save_file(dict(layer.weights), tmp_path / "foreign")
    cnorm.Model([layer]).save(tmp_path / "own")
    sources = [(cnorm.from_torch, layer.weights)]
    sources += [(cnorm.from_safetensors, tmp_path / name) for name in ("foreign", "own")]
    for read, source in sources:
        with pytest.raises(TypeError, match=message):
            read(source, **({"preset": "torch", "kind": "GRU"} | options))


def test_a_checkpoint_that_does_not_fit_is_described(rng):
    """The message gives the names found and expected, and suggests a prefix where one would fit."""
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


def in_folders(rng, *prefixes):
    """A state dict with the tensors of a PyTorch GRU module under each prefix."""
    spec = cnorm.PRESETS["GRU", "torch"]
    return {p + name: w for p in prefixes for name, w in random_weights(spec, rng, 4, 4).items()}


def test_refuses_a_prefix_that_leaves_layers_of_the_stack_unread(rng):
    given = in_folders(rng, "rnn.0.", "rnn.1.", "other.")
    message = r"prefix 'rnn.0.' leaves out the same cell under 'rnn.1.': prefix='rnn.{layer}.' reads all"
    with pytest.raises(ValueError, match=message):
        cnorm.from_torch(given, "torch", kind="GRU", prefix="rnn.0.")
    assert len(cnorm.from_torch(given, "torch", kind="GRU", prefix="rnn.0.", only=True)) == 1
    assert len(cnorm.from_torch(given, "torch", kind="GRU", prefix="rnn.{layer}.")) == 2
    assert len(cnorm.from_torch(given, "torch", kind="GRU", prefix="other.")) == 1
    with pytest.raises(TypeError, match="only must be True, False, got 1"):
        cnorm.from_torch(given, "torch", kind="GRU", prefix="other.", only=1)


def test_a_list_of_modules_is_read_with_the_layer_in_the_prefix(rng):
    """Each module has the tensor names of a layer 0, or of a cell, whose names have no number."""
    given = in_folders(rng, "rnn.0.", "rnn.1.", "rnn.2.")
    cells = {name.replace("_l0", ""): array for name, array in given.items()}
    for tensors in (given, cells):
        layers = cnorm.from_torch(tensors, "torch", kind="GRU", prefix="rnn.{layer}.")
        for i, layer in enumerate(layers):
            np.testing.assert_array_equal(layer.weights["bias_ih_l0"], given[f"rnn.{i}.bias_ih_l0"])
        assert len(layers) == 3


def test_suggests_the_prefix_of_the_whole_stack(rng):
    given = in_folders(rng, "rnn.0.", "rnn.1.", "other.", "a0.")
    with pytest.raises(ValueError, match=r"prefixes that would fit: 'a0.', 'other.', 'rnn.{layer}.'$"):
        cnorm.from_torch(given, "torch", kind="GRU")


class Variable:
    def __init__(self, name, array):
        self.name, self.numpy = name, lambda: array


def test_the_recipes_for_tensorflow_and_keras(rng):
    """The code of docs/cells.md, on stand-ins for the variables and the file."""
    text = (Path(__file__).parents[2] / "docs" / "cells.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    recipes = [block for block in blocks if "tensorflow_layers =" in block or "keras_layer =" in block]
    tfa, keras = (random_weights(cnorm.PRESETS["LSTM", name], rng, 3, 4) for name in ("tfa", "keras"))
    variables = [Variable(f"rnn/layer_norm_lstm_cell/{name}:0", array) for name, array in tfa.items()]
    file = {f"layers/lstm/cell/vars/{i}": keras[name] for i, name in enumerate(("kernel", "recurrent_kernel", "bias"))}
    names = {"cnorm": cnorm, "variables": variables, "file": file}
    for recipe in recipes:
        exec(recipe, names)
    for layer, given in ((names["tensorflow_layers"][0], tfa), (names["keras_layer"], keras)):
        assert layer.weights.keys() == given.keys()
        for name, array in given.items():
            np.testing.assert_array_equal(layer.weights[name], array)


def test_the_activation_of_a_module_is_compared(rng):
    torch = pytest.importorskip("torch")
    module = torch.nn.RNN(3, 4, nonlinearity="relu")
    with pytest.raises(ValueError, match="the module's nonlinearity is 'relu', that of the preset 'torch' 'tanh'"):
        cnorm.from_torch(module, "torch", kind="RNN")
    x = rng.standard_normal((10, 3), dtype=np.float32)
    expected = module(torch.from_numpy(x))[0].detach().numpy()
    assert cnorm.Model(cnorm.from_torch(module, "torch_relu")).check(x, expected).ok


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
    assert np.abs(model.run(x) - wanted).max() <= 4 * step_tolerance(_first_cell(model), 1.0)


def _first_cell(model):
    layer = model.layers[0]
    return layer.forward if isinstance(layer, cnorm.Bidirectional) else layer


def test_rejects_tensors_that_numpy_cannot_represent(tmp_path):
    """Accepted elsewhere in a checkpoint; under the prefix they are an error that names them."""
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
    assert np.abs(cnorm.Model([layer]).stream().step(x) - wanted).max() <= step_tolerance(layer, 1.0)


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

    assert worst_step(layer, advance, rng, 50) <= 1


@pytest.mark.parametrize("key", sorted(EPS), ids="-".join)
def test_presets_without_eps_still_normalise(key):
    assert cnorm.PRESETS[key].eps is None
    assert cnorm.PRESETS[key].normalises


def test_linear_takes_a_module():
    torch = pytest.importorskip("torch")
    for bias in (True, False):
        module = torch.nn.Linear(3, 2, bias=bias)
        x = np.ones((1, 3), np.float32)
        wanted = module(torch.from_numpy(x)).detach().numpy()
        np.testing.assert_allclose(cnorm.Model([cnorm.Linear(module)]).run(x), wanted, rtol=1e-6)
    with pytest.raises(TypeError, match="bias must not be given beside a module"):
        cnorm.Linear(module, np.ones(2, np.float32))
    with pytest.raises(TypeError, match="must be"):  # [rows, n] as well, and something else
        cnorm.Linear(torch.nn.Embedding(3, 2))


# ---- Model.check -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_check_says_that_outputs_of_torch_agree(kind, rng):
    torch = pytest.importorskip("torch")
    module = getattr(torch.nn, kind)(6, 20, num_layers=2, bidirectional=True, batch_first=True)
    x = rng.standard_normal((50, 6), dtype=np.float32)
    expected = module(torch.from_numpy(x)[None])[0][0].detach().numpy()
    report = cnorm.Model(cnorm.from_torch(module, "torch", kind=kind)).check(x, expected)
    assert report.ok
    assert report.judged == 50
    assert str(report).startswith("the outputs agree: worst at frame ")


@pytest.mark.parametrize(
    ("key", "other"),
    [
        (("LSTM", "torch_custom"), {"cell_norm": "output"}),
        (("LSTM", "ba2016"), {"eps": 1e-3}),
        (("GRU", "haste"), {"update": "new"}),
        (("LSTM", "torch"), {"gates": "iofg"}),
        (("GRU", "keras"), {"reset": "before"}),
    ],
    ids=str,
)
def test_check_finds_another_cell_with_the_same_tensors(key, other, rng):
    """Against float64 over 40 frames: the right cell agrees, another preset with the same tensors does not."""
    layer, advance = random_cell(key, rng, 12, 64)
    state = {name: np.float64(value) for name, value in cnorm.Model([layer]).stream().state().items()}
    x, expected = rng.standard_normal((40, 12), dtype=np.float32), []
    for frame in x:
        state = advance(frame, state)
        expected.append(state["h0"])
    report = cnorm.Model([layer]).check(x, np.array(expected))
    assert report.ok, str(report)
    assert report.judged >= 10
    weights = dict(layer.weights)
    spec = dataclasses.replace(layer.spec, name="other", **other)
    if "reset" in other:
        weights["bias"] = weights["bias"][0] + weights["bias"][1]
        entries = [(*entry[:1], "3H", "bias?") if entry[0] == "bias" else entry for entry in spec.weights]
        spec = dataclasses.replace(spec, weights=tuple(entries))
    wrong = cnorm.Model([LAYERS[key[0]](weights, preset=spec)]).check(x, np.array(expected))
    assert not wrong.ok
    assert wrong.error > wrong.bound
    assert str(wrong).startswith("the outputs differ: worst at frame ")


def test_check_is_not_ok_on_too_few_or_nan_frames(rng):
    model = cnorm.Model([random_cell(("GRU", "torch"), rng, 3, 4)[0]])
    x = rng.standard_normal((5, 3), dtype=np.float32)
    y = model.run(x)
    one = model.check(x[:1], y[:1])
    assert not one.ok
    assert str(one).startswith("not decided: 1 of 1 frames judged")
    spoiled = y.copy()
    spoiled[3, 1] = np.nan
    report = model.check(x, spoiled)
    assert not report.ok
    assert report.worst_frame == 3
    assert bool(report) is False
    assert bool(model.check(x, y)) is True
    with pytest.raises(ValueError, match=r"expected must have the shape \(5, 4\) of the outputs, got \(5, 3\)"):
        model.check(x, x)
    with pytest.raises(TypeError, match="expected must be an array of floats, got int64"):
        model.check(x, np.zeros((5, 4), np.int64))
    with pytest.raises(ValueError, match="x must have at least one frame"):
        model.check(x[:0], y[:0])
