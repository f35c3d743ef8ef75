"""Our own exports of presets, as forms of the operator "export"."""

from __future__ import annotations

import numpy as np
import onnx
from cells import random_cell
from forms import STEPS, Form, recurrent_bound
from models import random_linear

import cnorm
import onnx_export
from onnx_export.float64 import Float64

WAYS = {
    "step": {"portable": True},
    "sequence of 6": {"portable": True, "form": "sequence", "loop": "unrolled", "steps": STEPS},
    "sequence": {"portable": True, "form": "sequence"},
}


def exports() -> list[Form]:
    """Every eighth preset in each way, all of them as a step."""
    found = []
    for number, key in enumerate(sorted(cnorm.PRESETS)):
        for way, options in WAYS.items():
            if way == "step" or number % 8 == 0:
                found.append(_export(key, way, options))
    return found


def _export(key, way, options) -> Form:
    rng = np.random.default_rng(7)
    layer = random_cell(key, rng, 6, 8, eps=1e-8 if key[1] == "kann" else None)[0]
    model = onnx_export.export(cnorm.Model([layer, random_linear(rng, layer.output_size, 5)]), **options)
    feeds = {}
    for value in model.graph.input:
        shape = [dim.dim_value or STEPS for dim in value.type.tensor_type.shape.dim]
        feeds[value.name] = rng.normal(size=shape).astype(np.float32) * np.float32(1 if value.name == "x" else 0.5)
    onnx.checker.check_model(model, full_check=True)
    expected = list(Float64(model).run(feeds).values())
    bound = 8 * recurrent_bound(expected, "float32")  # norms amplify what the steps before them round
    return Form("export", frozenset([" ".join(key), way]), model, feeds, expected, bound)
