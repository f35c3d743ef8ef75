"""Export the demo model to ONNX, check its parity, and write some recordings to the same folder for run.py.

python examples/onnx/export.py FOLDER
"""

import sys
from importlib import resources
from pathlib import Path

import numpy as np

import cnorm
import onnx_export

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "demo_out")
folder.mkdir(parents=True, exist_ok=True)

model = cnorm.demo_model()
exported = onnx_export.export(model, folder / "demo.onnx")

with resources.as_file(resources.files("cnorm") / "data" / "japanese_vowels_test.npz") as path:
    data = np.load(path)
    utterances = np.split(data["frames"], np.cumsum(data["lengths"])[:-1])[::37]
    speakers = data["labels"][::37]

report = onnx_export.check_parity(model, exported, inputs=utterances)
print(report.verdict)

recordings = {f"frames{i}": frames for i, frames in enumerate(utterances)}
answers = {f"answers{i}": model.stream().process(frames) for i, frames in enumerate(utterances)}
np.savez(folder / "recordings.npz", speakers=speakers, **recordings, **answers)
print(f"wrote {folder / 'demo.onnx'} and {folder / 'recordings.npz'}; now: python examples/onnx/run.py {folder}")
sys.exit(0 if report.ok else 1)
