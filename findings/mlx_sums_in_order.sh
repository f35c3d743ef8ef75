#!/usr/bin/env bash
# On a CPU, MLX adds a whole float32 array in one running sum: 2^25 ones give 2^24, and the mean of 10^7 values of 0.1
# is 0.109.
# Expected: a reduction is in lanes, blocks or pairs, as in NumPy and PyTorch, so that a mean has about seven digits.
set -euo pipefail
d=$(mktemp -d)
trap 'rm -rf "$d"' EXIT
python3 -m venv "$d/v"
"$d/v/bin/pip" install -q --disable-pip-version-check mlx==0.32.4 mlx-cpu==0.32.4 numpy==2.4.6
cat > "$d/t.py" <<'PY'
import sys
import numpy as np
import mlx.core as mx

mx.set_default_device(mx.cpu)
from importlib.metadata import version

print("mlx", version("mlx"), "numpy", np.__version__)
ones = float(mx.sum(mx.ones((2**25,))))
mean = float(mx.mean(mx.full((10**7,), 0.1)))
rows = float(mx.mean(mx.full((2, 10**7), 0.1), axis=-1)[0])
numpy = float(np.full(10**7, 0.1, "f4").mean())
print(f"sum of 2^25 ones: {ones:.0f}, 2^25 is {2**25}; mean of 10^7 values 0.1: {mean:.4f}, of a row of two {rows:.4f}; NumPy {numpy:.4f}")
sys.exit(not (ones == 2**24 and abs(mean - 0.1) > 5e-3 and abs(numpy - 0.1) < 1e-5))
PY
cd "$d"
"$d/v/bin/python" -P t.py
