#!/usr/bin/env bash
# Of [1, 6, 5], pnnx passes [6, 5] to ncnn, whose norms then normalise other axes: InstanceNorm1d, and LayerNorm and
# RMSNorm over the last two axes, are off by the size of their results.
# Expected: the axes that the module normalises, or a failing conversion. Norms of the last axis and GroupNorm are right.
# Output seen on 28 November 2026 with torch 2.13.0, pnnx 20261020, ncnn 1.0.20261020:
#   LayerNorm(5) | ncnn is off from PyTorch by 2e-07
#   GroupNorm(3, 6) | ncnn is off from PyTorch by 5e-07
#   InstanceNorm1d(6) | ncnn is off from PyTorch by 1
#   LayerNorm([6, 5]) | ncnn is off from PyTorch by 1
#   RMSNorm([6, 5]) | ncnn is off from PyTorch by 1
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


n = torch.nn
right = {"LayerNorm(5)": n.LayerNorm(5), "GroupNorm(3, 6)": n.GroupNorm(3, 6)}
wrong = {"InstanceNorm1d(6)": n.InstanceNorm1d(6), "LayerNorm([6, 5])": n.LayerNorm([6, 5]), "RMSNorm([6, 5])": n.RMSNorm([6, 5], eps=1e-5)}
ok = True
for name, module in (right | wrong).items():
    wanted, found = both(module)
    off = float(np.abs(wanted - found).max())
    print(f"{name} | ncnn is off from PyTorch by {off:.1g}")
    ok &= off < 1e-5 if name in right else off > 0.1
sys.exit(not ok)
PY
cd "$d"
"$d/v/bin/python" -P -W ignore t.py
