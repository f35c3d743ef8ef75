"""`load` and `check_parity` of models that have no outputs for negative frames."""

import numpy as np
import pytest
from graphs import imported, node, normal, saved

import cnorm
import onnx_export

SIZE, UNITS = 4, 6


def gru(rng, size):
    tensors = {"W": normal(rng, 1, 3 * UNITS, size), "R": normal(rng, 1, 3 * UNITS, UNITS), "axis": np.array([1])}
    return [node("GRU", "v W R", "Y", hidden_size=UNITS), node("Squeeze", "Y axis", "y")], tensors


@pytest.mark.exhaustive(one_in=8)
@pytest.mark.parametrize("first", ["Log", "Sqrt", "mel"])
@pytest.mark.parametrize("frames", [1, "T"])
def test_frames_that_must_be_positive(frames, first, tmp_path, rng):
    nodes, tensors = gru(rng, 3 if first == "mel" else SIZE)
    if first == "mel":
        tensors |= {"M": np.abs(normal(rng, SIZE, 3)), "eps": np.float32(1e-6)}
        nodes = [node("MatMul", "x M", "bands"), node("Add", "bands eps", "e"), node("Log", "e", "v"), *nodes]
    else:
        nodes = [node(first, "x", "v"), *nodes]
    path = saved(tmp_path / "m.onnx", nodes, {"x": [frames, 1, SIZE]}, {"y": [frames, 1, UNITS]}, tensors)
    found = imported(path)
    with pytest.warns(UserWarning, match=path.name) as said:
        onnx_export.load(path)
    assert any("elements 0 to 3 of x must be positive" in str(each.message) for each in said)
    assert found.report.positive == tuple(range(SIZE))
    assert "elements 0 to 3 of x must be positive, as Log or Sqrt has no value for others" in found.notes


@pytest.mark.parametrize("first", ["Softplus", "Relu"])
@pytest.mark.parametrize("frames", [1, "T"])
def test_frames_for_which_what_a_log_reads_underflows(frames, first, tmp_path, rng):
    """softplus(-200) is 0 in float32."""
    nodes = [node(first, "x", "s"), node("Add", "s b", "p"), node("Log", "p", "l"), node("MatMul", "l M", "y")]
    tensors = {"b": np.float32(first == "Relu"), "M": normal(rng, SIZE, 3)}
    found = imported(saved(tmp_path / "m.onnx", nodes, {"x": [frames, SIZE]}, {"y": [frames, 3]}, tensors))
    assert any("has underflowed there" in note for note in found.warned) == (first == "Softplus")
    assert found.report.positive == ()


def test_only_what_must_be_positive_is(tmp_path, rng):
    """The proof tries negative numbers wherever they have a value."""
    parts = [node("Split", "x sizes", "a b c", axis=1), node("Log", "b", "l"), node("Relu", "c", "r")]
    nodes = [*parts, node("Concat", "a l r", "v", axis=1), node("MatMul", "v M", "y")]
    tensors = {"sizes": np.array([1, 2, 1]), "M": normal(rng, SIZE, 3)}
    found = imported(saved(tmp_path / "m.onnx", nodes, {"x": [1, SIZE]}, {"y": [1, 3]}, tensors))
    assert found.report.positive == (1, 2)


def test_a_file_with_numbers_where_the_model_has_none_is_not_equal(rng):
    """sqrt(|x|) is sqrt(x) on all frames for which the latter has a value."""
    linear = cnorm.Linear(normal(rng, 3, SIZE))
    model = cnorm.Model([cnorm.Activation("sqrt"), linear])
    same, other = (
        onnx_export.export(cnorm.Model([*before, cnorm.Activation("sqrt"), linear]))
        for before in ([], [cnorm.Activation("abs")])
    )
    assert onnx_export.check_parity(model, same).ok
    for key in other.metadata_props:
        key.value = next(entry.value for entry in same.metadata_props if entry.key == key.key)
    report = onnx_export.check_parity(model, other)
    assert not report.ok
    assert report.first.recording == "negative elements"


@pytest.mark.parametrize("eps", [1e-5, 1e-4])
def test_the_rounding_of_a_log_is_enlarged_by_the_norm_behind_it(eps, rng):
    """Frames near 0 give nearly equal logs far from 0; another eps of the norm shows as ever."""

    def model(of_norm):
        norm = cnorm.LayerNorm(np.ones(8, np.float32), eps=of_norm)
        return cnorm.Model([cnorm.Activation("abs"), cnorm.Activation("log", eps=eps), norm, linear])

    linear = cnorm.Linear(rng.standard_normal((6, 8)).astype(np.float32))
    exported = onnx_export.export(model(1e-5))
    assert onnx_export.check_parity(model(1e-5), exported, steps=4).ok
    assert not onnx_export.check_parity(model(2e-5), exported, steps=4).ok
