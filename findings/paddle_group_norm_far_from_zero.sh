#!/usr/bin/env bash
# Paddle's GroupNorm on a CPU cancels at mean 1e4, deviation 1: results of about 1 are off by hundreds. Its LayerNorm
# and InstanceNorm2D of the same array are right.
# Expected: the norms of one library share their care.
set -euo pipefail
d=$(mktemp -d)
trap 'rm -rf "$d"' EXIT
python3 -m venv "$d/v"
"$d/v/bin/pip" install -q --disable-pip-version-check paddlepaddle==3.3.1 numpy==2.4.6
cat > "$d/t.py" <<'PY'
import sys
import numpy as np
import paddle

print("paddle", paddle.__version__)
paddle.set_device("cpu")
x = (1e4 + np.random.default_rng(0).normal(size=(2, 8, 5, 4))).astype("f4")


def exact(groups):
    wide = x.astype("f8").reshape(2, groups, -1)
    return ((wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)).reshape(x.shape)


given = paddle.to_tensor(x)
found = {
    "GroupNorm": (paddle.nn.GroupNorm(2, 8)(given), 2),
    "InstanceNorm2D": (paddle.nn.InstanceNorm2D(8)(given), 8),
    "LayerNorm": (paddle.nn.LayerNorm([8, 5, 4])(given), 1),
}
off = {name: float(np.abs(y.numpy() - exact(groups)).max()) for name, (y, groups) in found.items()}
print("; ".join(f"{name}: off by {error:.2g}" for name, error in off.items()))
sys.exit(not (off["GroupNorm"] > 100 and off["InstanceNorm2D"] < 0.1 and off["LayerNorm"] < 0.1))
PY
cd "$d"
"$d/v/bin/python" -P t.py
