#!/usr/bin/env bash
# The running variance that BatchNorm keeps in training: Paddle's divides by n, MLX's (as PyTorch's) by n - 1. And
# Paddle's momentum is the share that stays (0.9), MLX's (as PyTorch's) the share that comes in (0.1).
# Expected: same names, same statistics; a network trained further in the other library keeps its variances.
set -euo pipefail
d=$(mktemp -d)
trap 'rm -rf "$d"' EXIT
python3 -m venv "$d/v"
"$d/v/bin/pip" install -q --disable-pip-version-check paddlepaddle==3.3.1 mlx==0.32.4 mlx-cpu==0.32.4 numpy==2.4.6
cat > "$d/t.py" <<'PY'
import sys
import numpy as np
import mlx.core as mx
import mlx.nn as nn
import paddle
from importlib.metadata import version

print("paddle", paddle.__version__, "mlx", version("mlx"))
mx.set_default_device(mx.cpu)
paddle.set_device("cpu")
x = np.random.default_rng(0).normal(size=(4, 8)).astype("f4")
ours, theirs = paddle.nn.BatchNorm1D(8, momentum=0.0), nn.BatchNorm(8, momentum=1.0)
ours.train(), ours(paddle.to_tensor(x))
theirs.train(), mx.eval(theirs(mx.array(x)))
kept = {"paddle": ours._variance.numpy(), "mlx": np.array(theirs.running_var)}
by_n = {name: float(np.abs(v - x.var(0)).max()) for name, v in kept.items()}
by_less = {name: float(np.abs(v - x.var(0, ddof=1)).max()) for name, v in kept.items()}
for name in kept:
    print(f"{name}: off by {by_n[name]:.1g} from the variance over n, by {by_less[name]:.1g} from that over n - 1")
print("momentum:", paddle.nn.BatchNorm1D(8)._momentum, "and", nn.BatchNorm(8).momentum)
sys.exit(not (by_n["paddle"] < 1e-6 < 1e-3 < by_less["paddle"] and by_less["mlx"] < 1e-6 < 1e-3 < by_n["mlx"]))
PY
cd "$d"
"$d/v/bin/python" -P t.py
