#!/usr/bin/env bash
# ncps' CfC and LTC take the spans between samples as timespans [batch, time]. A batch works only if it is as large as the number of
# units, and then unit j of every stream gets the span of stream j: 32 streams through 32 units are wrong in silence, 16 raise.
# Expected: each stream gets its own spans, as it does alone.
# Output seen on 29 November 2026 with ncps 1.0.1, torch 2.13.0:
#   CfC(32 units), 1 streams: off by 0 from each alone (up to 0.72)
#   CfC(32 units), 16 streams: raises
#   CfC(32 units), 32 streams: off by 0.26 from each alone (up to 0.86)
#   CfC without timespans, 32 streams: off by 3e-07
#   LTC(32 units), 1 streams: off by 0 from each alone (up to 0.83)
#   LTC(32 units), 16 streams: raises
#   LTC(32 units), 32 streams: off by 0.43 from each alone (up to 0.85)
#   LTC without timespans, 32 streams: off by 0
set -euo pipefail
d=$(mktemp -d)
trap 'rm -rf "$d"' EXIT
python3 -m venv "$d/v"
"$d/v/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$d/v/bin/pip" install -q --disable-pip-version-check ncps==1.0.1
cat > "$d/t.py" <<'PY'
import sys
import torch
from ncps.torch import LTC, CfC

torch.manual_seed(0)
torch.set_grad_enabled(False)
UNITS = 32
same = True
for kind in (CfC, LTC):
    model = kind(4, UNITS)
    for batch in (1, 16, UNITS):
        x, spans = torch.randn(batch, 5, 4), 0.1 + torch.rand(batch, 5)
        alone = torch.cat([model(x[i : i + 1], timespans=spans[i : i + 1])[0] for i in range(batch)])
        try:
            off = (model(x, timespans=spans)[0] - alone).abs().max().item()
            print(f"{kind.__name__}({UNITS} units), {batch} streams: off by {off:.2g} from each alone (up to {alone.abs().max():.2g})")
        except RuntimeError:
            off = None
            print(f"{kind.__name__}({UNITS} units), {batch} streams: raises")
        same &= off == 0 if batch == 1 else off is None if batch == 16 else off > 0.1
    off = (model(x)[0] - torch.cat([model(row[None])[0] for row in x])).abs().max().item()
    print(f"{kind.__name__} without timespans, {batch} streams: off by {off:.1g}")
    same &= off < 1e-5
sys.exit(not same)
PY
cd "$d"
"$d/v/bin/python" -P t.py
