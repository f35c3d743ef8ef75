"""The layer Scale, whose every use the generic code must know: runs, files, packing, rounding, training, export."""

import pickle

import numpy as np
import pytest
from tapes import back, own_gradients, run, tape_of

import cnorm
import onnx_export


@pytest.fixture
def weight(rng):
    return rng.standard_normal(19).astype(np.float32)


def test_it_multiplies_each_frame(weight, isa, rng):
    x = rng.standard_normal((21, 19)).astype(np.float32)
    model = cnorm.Model([cnorm.Scale(weight)])
    assert model.run(x).tobytes() == (x * weight).tobytes()
    assert model.stream().step(x[0]).tobytes() == (x[0] * weight).tobytes()
    streams = [model.stream() for _ in range(21)]
    assert model.step_many(streams, x).tobytes() == (x * weight).tobytes()


def test_it_is_saved_packed_pickled_and_not_rounded(weight, tmp_path, rng):
    linear = cnorm.Linear(rng.standard_normal((19, 19)).astype(np.float32))
    model = cnorm.Model([linear, cnorm.Residual([cnorm.Scale(weight)])]).with_weights("int8", smallest=1)
    assert model.layers[1].layers[0].weights["weight"].tobytes() == weight.tobytes()
    x = rng.standard_normal((5, 19)).astype(np.float32)
    model.save(tmp_path / "a.safetensors")
    model.save_packed(tmp_path / "a.cnorm")
    for other in (
        cnorm.load(tmp_path / "a.safetensors"), cnorm.load(tmp_path / "a.cnorm"), pickle.loads(pickle.dumps(model)),
    ):  # fmt: skip
        assert other.identity == model.identity
        assert other.run(x).tobytes() == model.run(x).tobytes()


@pytest.mark.parametrize(("steps", "batch"), [(1, 1), (5, 7), (40, 3)])
def test_gradients(weight, steps, batch, isa, rng):
    """dx is one product. dweight adds rows in blocks of 16: a rounding for each product and addition."""
    layer, rows = cnorm.Scale(weight), steps * batch
    x, dy = (rng.standard_normal((steps, batch, 19)).astype(np.float32) for _ in range(2))
    tape = tape_of([layer], steps, batch)
    tape.start()
    assert run(tape, x).tobytes() == (x * weight).tobytes()
    assert back(tape, dy, 19).tobytes() == (dy * weight).tobytes()
    terms = np.float64(x) * np.float64(dy)
    bound = (1 + min(16, rows) + -(-rows // 16)) * 2.0**-24 * np.abs(terms).sum((0, 1))
    error = np.abs(own_gradients(layer, tape)["weight"] - terms.sum((0, 1)))
    assert (error <= bound).all(), (error / bound).max()


def test_it_learns(weight, rng):
    learner = cnorm.Learner(cnorm.Model([cnorm.Scale(weight)]), cnorm.SGD(0.1), truncate=1)
    x = rng.standard_normal(19).astype(np.float32)
    y = learner.step(x)
    learner.learn(y)
    assert not np.array_equal(learner.model().layers[0].weights["weight"], weight)


def test_it_is_exported(weight, tmp_path):
    model = cnorm.Model([cnorm.Scale(weight), cnorm.Residual([cnorm.Scale(weight)])])
    exported = onnx_export.export(model, tmp_path / "a.onnx")
    assert [node.op_type for node in exported.graph.node] == ["Mul", "Mul", "Add"]
    assert onnx_export.check_parity(model, exported).ok
    assert onnx_export.load(tmp_path / "a.onnx").identity == model.identity


def test_a_parameter_of_torch_is_taken(weight):
    torch = pytest.importorskip("torch")
    assert cnorm.Scale(torch.nn.Parameter(torch.from_numpy(weight))).weights["weight"].tobytes() == weight.tobytes()


@pytest.mark.parametrize("wrong", [np.ones((3, 3), np.float32), np.float32(2), np.array([np.nan], np.float32)])
def test_other_weights_are_refused(wrong):
    with pytest.raises(ValueError, match=r"weights\['weight'\] of Scale"):
        cnorm.Scale(wrong)
