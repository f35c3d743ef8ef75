"""Export the demo model to ONNX, check its parity, and write some recordings to the same folder for run.py.

python examples/onnx/export.py FOLDER
"""

import sys
from pathlib import Path

import numpy as np

import cnorm
import onnx_export

sys.path.append(str(Path(__file__).parents[1] / "demo"))
from recordings import recordings

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "demo_out")
folder.mkdir(parents=True, exist_ok=True)

model = cnorm.demo_model()
exported = onnx_export.export(model, folder / "demo.onnx")

utterances, speakers = (each[::11] for each in recordings())

report = onnx_export.check_parity(model, exported, inputs=utterances)
print(report.verdict)

inputs = {f"frames{i}": frames for i, frames in enumerate(utterances)}
answers = {f"answers{i}": model.stream().process(frames) for i, frames in enumerate(utterances)}
np.savez(folder / "recordings.npz", speakers=speakers, **inputs, **answers)
print(f"wrote {folder / 'demo.onnx'} and {folder / 'recordings.npz'}; now: python examples/onnx/run.py {folder}")
sys.exit(0 if report.ok else 1)
