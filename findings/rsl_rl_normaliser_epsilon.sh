#!/usr/bin/env bash
# rsl_rl's EmpiricalNormalization divides by deviation + 0.01, not by sqrt(variance + 1e-8) as Stable-Baselines3's VecNormalize
# and Gymnasium's NormalizeObservation do: an observation of deviation 0.001 (radians, metres, seconds) comes out with deviation 0.09, not 1.
# Expected: what is called normalisation gives deviation 1 to whatever unit an observation is in.
# Output seen on 28 November 2026 with rsl-rl-lib 5.5.1, torch 2.13.0:
#   deviation 1 in, 0.99 out
#   deviation 0.01 in, 0.5 out
#   deviation 0.001 in, 0.091 out
set -euo pipefail
d=$(mktemp -d)
trap 'rm -rf "$d"' EXIT
python3 -m venv "$d/v"
pip=("$d/v/bin/pip" install -q --disable-pip-version-check)
"${pip[@]}" torch==2.13.0 numpy==2.4.6 tensordict==0.15.3 tensorboard==2.21.0
"${pip[@]}" --no-deps rsl-rl-lib==5.5.1
cat > "$d/t.py" <<'PY'
import sys
import torch
from rsl_rl.modules import EmpiricalNormalization

torch.manual_seed(0)
deviations = torch.tensor([1.0, 0.01, 0.001])
x = torch.randn(100_000, 3) * deviations
norm = EmpiricalNormalization(3)
norm.update(x)
out = norm.eval()(x).std(0)
for a, b in zip(deviations, out):
    print(f"deviation {a:.1g} in, {b:.2g} out")
sys.exit(not torch.allclose(out, deviations / (deviations + 0.01), rtol=0.01))
PY
cd "$d"
"$d/v/bin/python" -P t.py
