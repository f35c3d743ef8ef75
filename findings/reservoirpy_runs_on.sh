#!/usr/bin/env bash
# reservoirpy goes on where the run before stopped: the same sequence run twice gives two answers, and a fitted model starts from the
# state that the training left. Every sequence of a list starts from that state too. reset() makes it zero.
# Expected: each run starts at zero, as a call of a recurrent layer in Keras, PyTorch or Flax does.
# Output seen on 29 November 2026 with reservoirpy 0.4.2:
#   states up to 0.99; from the run after reset(): after fit 0.84, a second run 0.88, two in a list 0.89 and 0.89, after another reset() 0
set -euo pipefail
d=$(mktemp -d)
trap 'rm -rf "$d"' EXIT
python3 -m venv "$d/v"
"$d/v/bin/pip" install -q --disable-pip-version-check reservoirpy==0.4.2 numpy==2.4.6 scipy==1.17.1
cat > "$d/t.py" <<'PY'
import sys
import numpy as np
from reservoirpy.nodes import Reservoir, Ridge

r = np.random.default_rng(0)
x, y = r.normal(size=(500, 2)), r.normal(size=(500, 1))
reservoir = Reservoir(30, seed=1)
model = reservoir >> Ridge(ridge=1)
model.fit(x, y)


def off(a, b):
    return np.abs(a - b).max()


x = x[:20]
fitted = reservoir.run(x)
second = reservoir.run(x)
listed = reservoir.run([x, x])
reservoir.reset()
fresh = reservoir.run(x)
reservoir.reset()
again = off(reservoir.run(x), fresh)
print(f"states up to {np.abs(fresh).max():.2g}; from the run after reset(): after fit {off(fitted, fresh):.2g}, a second run {off(second, fresh):.2g},", end=" ")
print(f"two in a list {off(listed[0], fresh):.2g} and {off(listed[1], fresh):.2g}, after another reset() {again:.2g}")
sys.exit(not (min(off(z, fresh) for z in (fitted, second, *listed)) > 0.1 and again == 0))
PY
cd "$d"
"$d/v/bin/python" -P t.py
