#!/usr/bin/env bash
# minGRU-pytorch trains by a parallel form in logarithms, whose running sum of log(1 - z) grows with the length: in float32 its states
# are off by 8e-5 after 1,000 steps and 2e-3 after 30,000 (2 minutes of frames at 250 Hz), those of its own steps by 2e-7 at any time.
# Expected: a parallel scan has rounding errors of about 1e-6 at any length: the gate forgets them.
# Output seen on 29 November 2026 with minGRU-pytorch 0.2.1, torch 2.13.0:
#   last 100 of 100 states (up to 2): parallel off by 1e-05, by steps 2e-07
#   last 100 of 1000 states (up to 2): parallel off by 8e-05, by steps 2e-07
#   last 100 of 10000 states (up to 2): parallel off by 0.0006, by steps 1e-07
#   last 100 of 30000 states (up to 2): parallel off by 0.002, by steps 1e-07
set -euo pipefail
d=$(mktemp -d)
trap 'rm -rf "$d"' EXIT
python3 -m venv "$d/v"
"$d/v/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$d/v/bin/pip" install -q --disable-pip-version-check --no-deps minGRU-pytorch==0.2.1
cat > "$d/t.py" <<'PY'
import sys
import torch
from minGRU_pytorch import minGRU

torch.manual_seed(0)
torch.set_grad_enabled(False)
torch.set_num_threads(1)
single = minGRU(16)
double = minGRU(16).double()
double.load_state_dict(single.state_dict())


def by_steps(model, x):
    h, out = None, []
    for frame in x.split(1, dim=1):
        y, h = model(frame, prev_hidden=h, return_next_prev_hidden=True)
        out.append(y)
    return torch.cat(out, 1)


x = torch.randn(1, 30_000, 16)
exact = by_steps(double, x.double())
same = True
for t in (100, 1_000, 10_000, 30_000):
    end = exact[:, t - 100 : t]
    parallel = (single(x[:, :t])[:, -100:] - end).abs().max().item()
    steps = (by_steps(single, x[:, max(t - 1000, 0) : t])[:, -100:] - end).abs().max().item()
    print(f"last 100 of {t} states (up to {end.abs().max():.1g}): parallel off by {parallel:.1g}, by steps {steps:.1g}")
    same &= steps < 1e-5 and (t < 10_000 or parallel > 3e-4)
sys.exit(not same)
PY
cd "$d"
"$d/v/bin/python" -P t.py
