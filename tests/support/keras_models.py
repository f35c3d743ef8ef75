"""Keras 3 for tests of `cnorm.from_keras`; skips where it is missing."""

import os

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
pytest.importorskip("torch")
keras = pytest.importorskip("keras", reason="!!! SKIPPED: from_keras, because keras is not installed")
if not hasattr(keras, "src") or keras.__version__ < "3":
    pytest.skip("!!! SKIPPED: from_keras reads Keras 3", allow_module_level=True)
L = keras.layers


def varied(model):
    """Every weight away from its initial value, so that none is a one or a zero that hides something."""
    rng = np.random.default_rng(0)
    for variable in model.weights:
        if "seed" in variable.path:
            continue
        value = keras.ops.convert_to_numpy(variable.value) + 0.3 * rng.standard_normal(variable.shape)
        variable.assign(np.abs(value) + 0.1 if "variance" in variable.path else value)
    return model
