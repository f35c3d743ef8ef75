"""Our own exports of presets, as forms of the operator "export"."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
from cells import random_cell
from forms import Form, recurrent_bound
from models import random_linear

import cnorm
import onnx_export
from onnx_export.float64 import Float64
from onnx_export.runtimes import Traits
from onnx_export.runtimes.ways import STEPS, WAYS


def exports() -> list[Form]:
    """Every preset in each way."""
    return [_export(key, way) for way in WAYS for key in sorted(cnorm.PRESETS)]


def names() -> Iterator[Traits]:
    """The traits of `exports`, which take a second to make."""
    return (_traits(key, way) for way in WAYS for key in sorted(cnorm.PRESETS))


def small_model(key) -> cnorm.Model:
    """A cell of 8 units behind 6 inputs, and a product."""
    rng = np.random.default_rng(7)
    layer = random_cell(key, rng, 6, 8, eps=1e-8 if key[1] == "kann" else None)[0]
    return cnorm.Model([layer, random_linear(rng, layer.output_size, 5)])


def _traits(key, way) -> Traits:
    return frozenset([" ".join(key), way])


def _export(key, way) -> Form:
    model = onnx_export.export(small_model(key), **WAYS[way])
    rng, feeds = np.random.default_rng(8), {}
    for value in model.graph.input:
        shape = [dim.dim_value or STEPS for dim in value.type.tensor_type.shape.dim]
        feeds[value.name] = rng.normal(size=shape).astype(np.float32) * np.float32(1 if value.name == "x" else 0.5)
    onnx.checker.check_model(model, full_check=True)
    expected = list(Float64(model).run(feeds).values())
    bound = 8 * recurrent_bound(expected, "float32")  # norms amplify what the steps before them round
    return Form("export", _traits(key, way), model, feeds, expected, bound)
