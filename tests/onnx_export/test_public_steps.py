"""Steps of public models: cnorm's error against float64 beside onnxruntime's own, each step from float64's state."""

import os
from pathlib import Path

import numpy as np
import pytest

from onnx_export import model_io
from onnx_export.description import state_table
from onnx_export.importer import _layers, _prepared
from onnx_export.importer.proof import standard
from onnx_export.parity_engines import CnormEngine, Float64Engine, OrtEngine, interface

MODELS = Path(__file__).parents[3] / "shared" / "data" / "models"
FRAMES = int(os.environ.get("CNORM_PUBLIC_FRAMES", "60"))  # 2000: minutes, of float64
TIMES = 1.5  # onnxruntime's error
SILERO = {"inputs": {"sr": 16000}}
FILES = {
    "aircraft_lstm.onnx": {},
    "b2w.onnx": {},
    "dtln_1.onnx": {},
    "dtln_2.onnx": {},
    "fairtalk_app.onnx": {},
    "firered.onnx": {},
    "gtcrn_simple.onnx": {},
    "silero_16k_op15.onnx": SILERO | {"dims": {"sequence": 576}},
    "silero_vad.onnx": SILERO | {"dims": {"input:0": 1, "state:1": 1, "input:1": 576}},
    "stethoscope_rnn.onnx": {},
}


@pytest.mark.skipif(not MODELS.exists(), reason=f"SKIPPED: {MODELS} with public weight files is not here")
def test_every_public_file_is_here():
    """But one, whose steps are in a Loop over 60 frames, which has no single step: `test_import_loops.py`."""
    assert {path.name for path in MODELS.glob("*.onnx")} == FILES.keys() | {"quant_lstm.onnx"}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.exhaustive(one_in=4)
def test_steps_are_as_near_to_float64_as_those_of_onnxruntime(name):
    """The root mean square of the largest error of y in each step."""
    path = MODELS / name
    if not path.exists():
        pytest.skip(f"SKIPPED LOUDLY: {name} is not in {MODELS}")
    given = {"inputs": {}, "states": {}, "dims": {}, "frames": ()} | FILES[name]
    file = _prepared(model_io.load(path, external_data=True))[0]
    found, model = _layers(file, given)
    assert found.inputs.steps == 1
    file = standard(model, file, found)
    units = {row["name"]: row["units"] for row in state_table(model)}
    face = interface(file, model.input_size, units, model.outputs)
    engines = {"cnorm": CnormEngine(model), "onnxruntime": OrtEngine(file, face, "all")}
    exact, errors = Float64Engine(file, face), {which: [] for which in engines}
    start = {state: array.astype(np.float64) for state, array in engines["cnorm"].initial().items()}
    for x in np.random.default_rng(0).standard_normal((FRAMES, 1, 1, model.input_size)).astype(np.float32):
        rounded = {state: array.astype(np.float32) for state, array in start.items()}
        found = exact.call(x, rounded)
        for which, engine in engines.items():
            errors[which].append(np.abs(engine.call(x, rounded)["y"] - found["y"]).max())
        start = {state: found[f"{state}_out"] for state in units}
    ours, theirs = np.array(errors["cnorm"]), np.array(errors["onnxruntime"])
    mean, of_theirs = (np.sqrt(np.mean(one**2)) for one in (ours, theirs))
    print(f"{name}, {FRAMES} steps: {mean:.2e} of {of_theirs:.2e}, the largest {ours.max():.2e} of {theirs.max():.2e}")
    assert mean <= TIMES * of_theirs
