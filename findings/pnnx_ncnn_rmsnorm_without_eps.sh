#!/usr/bin/env bash
# torch.nn.RMSNorm(n) without eps has that of its type, 1.2e-7; pnnx writes eps 0, and ncnn makes a row of zeros NaN.
# Expected: zeros, as PyTorch gives, so the eps of float32 in the converted file.
# Output seen on 28 November 2026 with torch 2.13.0, pnnx 20261020, ncnn 1.0.20261020:
#   RMSNorm(5): eps in the converted file 0.0 | row of zeros: PyTorch 0.0, ncnn nan
#   RMSNorm(5, eps=1e-6): eps in the converted file 1.000000e-6 | row of zeros: PyTorch 0.0, ncnn 0.0
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


x[0, 2] = 0
seen = []
for name, module in (("RMSNorm(5)", torch.nn.RMSNorm(5)), ("RMSNorm(5, eps=1e-6)", torch.nn.RMSNorm(5, eps=1e-6))):
    wanted, found = both(module)
    line = next(line for line in Path("m.ncnn.param").read_text().splitlines() if line.startswith("RMSNorm"))
    eps = next(word[2:] for word in line.split() if word.startswith("1="))
    print(f"{name}: eps in the converted file {eps} | row of zeros: PyTorch {wanted[2, 0]}, ncnn {found[2, 0]}")
    seen.append((float(eps), wanted[2, 0], found[2, 0]))
(eps, zero, lost), (given, *zeros) = seen
sys.exit(not (eps == 0 and zero == 0 and np.isnan(lost) and given == 1e-6 and zeros == [0, 0]))
PY
cd "$d"
"$d/v/bin/python" -P -W ignore t.py
