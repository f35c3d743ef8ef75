#!/usr/bin/env bash
# pnnx converts torch.nn.RNN(nonlinearity="relu") to ncnn's RNN, which is tanh.
# Expected: relu is kept, or the conversion fails.
# Output seen on 28 November 2026 with torch 2.13.0, pnnx 20261020, ncnn 1.0.20261020:
#   tanh | ncnn is off from PyTorch by 6e-08
#   relu | ncnn is off from PyTorch by 1; from the tanh RNN of these weights by 6e-08
set -euo pipefail
d=$(mktemp -d)
trap 'rm -rf "$d"' EXIT
python3 -m venv "$d/v"
"$d/v/bin/pip" install -q --disable-pip-version-check torch==2.13.0 pnnx==20261020 ncnn==1.0.20261020 numpy==2.4.6
cat > "$d/t.py" <<'PY'
import subprocess
import sys
from pathlib import Path

import ncnn
import numpy as np
import torch

pnnx = Path(ncnn.__file__).parents[1] / "pnnx" / "pnnx"
torch.manual_seed(0)
x = torch.randn(1, 6, 5)


def both(module, x=x):
    """The module's result in PyTorch and in ncnn, for x [1, 6, 5] as pnnx passes it: without the batch."""
    module = module.eval()
    torch.jit.trace(module, x, check_trace=False).save("m.pt")
    subprocess.run([pnnx, "m.pt", "inputshape=[1,6,5]f32", "fp16=0"], check=True, capture_output=True)
    with ncnn.Net() as net, torch.no_grad():
        net.load_param("m.ncnn.param")
        net.load_model("m.ncnn.bin")
        with net.create_extractor() as extractor:
            extractor.input("in0", ncnn.Mat(x[0].numpy()).clone())
            code, result = extractor.extract("out0")
            assert code == 0
            return module(x)[0].numpy(), np.array(result)


class Outputs(torch.nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        return self.cell(x)[0]


cells = {f: torch.nn.RNN(5, 4, nonlinearity=f, batch_first=True) for f in ("tanh", "relu")}
cells["relu"].load_state_dict(cells["tanh"].state_dict())
(tanh, seen), (relu, found) = both(Outputs(cells["tanh"])), both(Outputs(cells["relu"]))
off = [float(np.abs(a - b).max()) for a, b in ((seen, tanh), (found, relu), (found, tanh))]
print(f"tanh | ncnn is off from PyTorch by {off[0]:.1g}")
print(f"relu | ncnn is off from PyTorch by {off[1]:.1g}; from the tanh RNN of these weights by {off[2]:.1g}")
sys.exit(not (off[0] < 1e-5 and off[1] > 0.1 and off[2] < 1e-5))
PY
cd "$d"
"$d/v/bin/python" -P -W ignore t.py
