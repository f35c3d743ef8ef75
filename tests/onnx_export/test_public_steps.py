"""Steps of public models: cnorm's error against float64 beside onnxruntime's own, each step from float64's state."""

import os
from pathlib import Path

import numpy as np
import pytest

from onnx_export import model_io
from onnx_export.importer import _layers, _prepared
from onnx_export.importer.proof import standard
from onnx_export.parity import check_parity

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
def test_steps_are_as_near_to_float64_as_those_of_onnxruntime(name):
    """The largest error of all steps and elements of y."""
    if not (MODELS / name).exists():
        pytest.skip(f"SKIPPED LOUDLY: {name} is not in {MODELS}")
    given = {"inputs": {}, "states": {}, "dims": {}, "frames": ()} | FILES[name]
    file = _prepared(model_io.load(MODELS / name, external_data=True))[0]
    found, model = _layers(file, given)
    assert found.inputs.steps == 1
    x = np.random.default_rng(0).standard_normal((FRAMES, model.input_size)).astype(np.float32)
    report = check_parity(model, standard(model, file, found), inputs=[x])
    errors = {(row.engine, row.tensor): row.max_abs for row in report.rows if row.against == "float64"}
    ours = {tensor: error for (engine, tensor), error in errors.items() if engine == "cnorm"}
    theirs = {tensor: errors["onnxruntime all", tensor] for tensor in ours}
    print(f"{name}, {FRAMES} steps, largest error of each: {ours}; onnxruntime's: {theirs}")
    assert ours["y"] <= TIMES * theirs["y"]
