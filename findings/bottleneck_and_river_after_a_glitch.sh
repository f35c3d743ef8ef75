#!/usr/bin/env bash
# bottleneck's move_std of float32: after one glitch (30,000 among values of deviation 1) has left the window, the deviation stays
# wrong to the end of the array; in float64 after one of 1e8, and there river's rolling Var too. pandas and polars come back.
# Expected: a window of 50 depends on the 50 values in it.
# Output seen on 29 November 2026 with bottleneck 1.6.0, pandas 3.1.1, polars 2.1.0, river 0.26.1:
#   float32, glitch of 3e+04 850 values before the last window: bottleneck off by 27 %, pandas off by 4.7e-07 %, polars off by 1.6e-06 %, river off by 4.7e-07 %
#   float64, glitch of 1e+08 850 values before the last window: bottleneck off by 5.3 %, pandas off by 8.9e-14 %, polars off by 0 %, river off by 3 %
set -euo pipefail
d=$(mktemp -d)
trap 'rm -rf "$d"' EXIT
python3 -m venv "$d/v"
"$d/v/bin/pip" install -q --disable-pip-version-check bottleneck==1.6.0 pandas==3.1.1 polars==2.1.0 river==0.26.1 numpy==2.4.6
cat > "$d/t.py" <<'PY'
import sys
import bottleneck
import numpy as np
import pandas
import polars
from river import stats, utils

N = 50
r = np.random.default_rng(0)


def last(y):
    """Deviation of the last window by each library."""
    out = {"bottleneck": bottleneck.move_std(y, N)[-1]}
    out["pandas"] = pandas.Series(y).rolling(N).std(ddof=0).iloc[-1]
    out["polars"] = polars.Series(y).rolling_std(N, ddof=0)[-1]
    rolling = utils.Rolling(stats.Var, window_size=N, ddof=0)
    for v in y:
        rolling.update(float(v))
    out["river"] = max(rolling.get(), 0) ** 0.5
    return {k: abs(v / y[-N:].astype("f8").std() - 1) for k, v in out.items()}


same = True
for kind, glitch, wrong in (("f4", 3e4, {"bottleneck"}), ("f8", 1e8, {"bottleneck", "river"})):
    y = r.normal(size=1000).astype(kind)
    y[100] = glitch
    off = last(y)
    said = ", ".join(f"{name} off by {100 * share:.2g} %" for name, share in off.items())
    print(f"{np.dtype(kind)}, glitch of {glitch:.0e} 850 values before the last window: {said}")
    same &= all((share > 0.002) == (name in wrong) and (share < 1e-5) == (name not in wrong) for name, share in off.items())
sys.exit(not same)
PY
cd "$d"
"$d/v/bin/python" -P t.py
