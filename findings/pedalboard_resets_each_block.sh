#!/usr/bin/env bash
# pedalboard's plugins forget their state at each call unless reset=False is given: audio in blocks of 10 ms through a filter
# is another signal than the whole, with a click at each block.
# Expected: an object that has a state and a reset() keeps the state between calls, as a recurrent model's stream does.
# Output seen on 28 November 2026 with pedalboard 0.9.26:
#   high-pass at 300 Hz in blocks of 480 samples: off by 0.03 of a signal of deviation 0.1; with reset=False by 0
set -euo pipefail
d=$(mktemp -d)
trap 'rm -rf "$d"' EXIT
python3 -m venv "$d/v"
"$d/v/bin/pip" install -q --disable-pip-version-check pedalboard==0.9.26 numpy==2.4.6
cat > "$d/t.py" <<'PY'
import sys
import numpy as np
from pedalboard import HighpassFilter, Pedalboard

rate, block = 48000, 480
x = np.random.default_rng(0).normal(size=(1, 10 * block)).astype("f4") / 10
whole = Pedalboard([HighpassFilter(300)])(x, rate)


def blocks(**options):
    board = Pedalboard([HighpassFilter(300)])
    return np.concatenate([board(x[:, i : i + block], rate, **options) for i in range(0, x.shape[1], block)], 1)


plain, kept = (float(np.abs(whole - y).max()) for y in (blocks(), blocks(reset=False)))
print(f"high-pass at 300 Hz in blocks of 480 samples: off by {plain:.1g} of a signal of deviation 0.1; with reset=False by {kept:.1g}")
sys.exit(not (plain > 0.01 and kept == 0))
PY
cd "$d"
"$d/v/bin/python" -P t.py
