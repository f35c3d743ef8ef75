"""Random lists of layers that read by name, exported, stripped of our metadata, and read as a stranger's file."""

import cells
import numpy as np
import onnx
import pytest
from graphs import imported, node, normal, saved

import cnorm
import onnx_export
from onnx_export.errors import NotImported

MODELS, WANTED = 40, 36
FUNCTIONS = ("tanh", "sigmoid", "relu", "elu", "silu")


def one(rng, size, names, last):
    """A random layer behind one of `size` outputs and the name `last`; None where it does not fit."""
    same = [name for name, other in names.items() if other == size and name != last]
    kind = rng.integers(0, 11)
    if kind == 0:
        return cnorm.Linear(normal(rng, int(rng.integers(2, 9)), size))
    if kind == 1:
        return cnorm.Activation(str(rng.choice(FUNCTIONS)))
    if kind == 2:
        return cnorm.LayerNorm(1 + normal(rng, size), normal(rng, size))
    if kind in (3, 4):
        return (cnorm.Multiply if kind == 3 else cnorm.Add)(str(rng.choice(same))) if same else None
    if kind in (5, 6):
        return cells.random_cell(("LSTM" if kind == 5 else "GRU", "torch"), rng, size, kind)[0]
    if kind == 7:
        return cnorm.Scale(normal(rng, size))
    if kind == 8:
        return cnorm.Concat(list(dict.fromkeys([last, str(rng.choice(list(names)))])))
    if kind == 9:
        return cnorm.Slice(last, 0, size - 1) if size > 2 else None
    return cnorm.Residual([cnorm.Linear(normal(rng, size, size)), cnorm.Activation("tanh")])


def random_model(rng):
    size = int(rng.integers(3, 9))
    layers, names = [cnorm.Linear(normal(rng, size, size), name="n0")], {"input": size, "n0": size}
    for _ in range(int(rng.integers(2, 9))):
        layer = one(rng, names[f"n{len(layers) - 1}"], names, f"n{len(layers) - 1}")
        if layer is not None:
            name = f"n{len(layers)}"
            names[name] = layer.outputs(names[f"n{len(layers) - 1}"], names)
            layers.append(cnorm.layers.base.with_name(layer, name))
    return cnorm.Model(layers)


@pytest.mark.exhaustive
def test_random_models(tmp_path):
    loaded, refused = 0, []
    for seed in range(MODELS):
        rng = np.random.default_rng(seed)
        model, path = random_model(rng), tmp_path / f"{seed}.onnx"
        exported = onnx_export.export(model, opset=int(rng.choice([13, 17, 21])))
        states = {f"{name}_in": f"{name}_out" for name in model.stream().state()}
        del exported.metadata_props[:]
        onnx.save(exported, path)
        try:
            found = imported(path, states=states, check=False)
        except NotImported as error:
            refused.append(f"{seed}, {model}: {error}")
            continue
        x = rng.standard_normal((20, model.input_size)).astype(np.float32)
        comparison = model.check(x, found.model.run(x))
        assert comparison.ok or comparison.judged < 2, (seed, model, found.model, comparison)
        loaded += 1
    assert loaded >= WANTED, "\n".join(refused)


@pytest.mark.exhaustive(one_in=4)
@pytest.mark.parametrize("operator", ["Add", "Mul"])
@pytest.mark.parametrize("depth", [60, 400])
def test_nested_sums_and_products_take_bounded_time(operator, depth, tmp_path, rng):
    """Each doubles the terms of the one before: expanded without a limit, 60 of them would take years."""
    nodes = [node("MatMul", "x w", "a0")] + [node(operator, f"a{i} a{i}", f"a{i + 1}") for i in range(depth)]
    path = saved(tmp_path / "m.onnx", nodes, {"x": [1, 5]}, {f"a{depth}": [1, 5]}, {"w": normal(rng, 5, 5)})
    if operator == "Mul":
        assert len(imported(path, check=False).model.layers) == depth + 1
        return
    with pytest.raises(ValueError, match=r"would be expanded|nested too deep"):
        imported(path)
