"""Run the exported model frame by frame with onnxruntime and NumPy only; cnorm need not be installed.

    python examples/onnx/run.py FOLDER

The file's metadata has all that the caller needs: its state table says which output of a step is which input of the
next step, and the initial states.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "demo_out")
session = onnxruntime.InferenceSession(folder / "demo.onnx", providers=["CPUExecutionProvider"])
names = [output.name for output in session.get_outputs()]
table = json.loads(session.get_modelmeta().custom_metadata_map["cnorm.model"])["states"]


def beginning():
    """The states before the first frame, each [1, units]."""
    return {row["input"]: np.full(row["shape"], row["initial"], np.float32) for row in table}


recordings = np.load(folder / "recordings.npz")
right = 0
largest = 0.0
for i, speaker in enumerate(recordings["speakers"]):
    states = beginning()
    for frame, answer in zip(recordings[f"frames{i}"], recordings[f"answers{i}"], strict=True):
        result = dict(zip(names, session.run(names, {"x": frame[None]} | states), strict=True))
        states = {row["input"]: result[row["output"]] for row in table}
        largest = max(largest, float(np.abs(result["y"][0] - answer).max()))
    named = int(result["y"][0].argmax())
    right += named == speaker
    print(f"recording {i}: {len(recordings[f'frames{i}'])} frames, speaker {speaker}, named {named}")

print(f"{right} of {len(recordings['speakers'])} named; at most {largest:.1e} from what cnorm said")
