#!/usr/bin/env bash
# jax.nn.standardize and the LayerNorm of Flax (linen and nnx, by default) take E[x^2] - E[x]^2: at mean 1e4 and
# deviation 1 they are off by hundreds and thousands. Haiku and Equinox on the same JAX are right.
# Expected: a function of the core library for this very purpose subtracts the mean first.
set -euo pipefail
d=$(mktemp -d)
trap 'rm -rf "$d"' EXIT
python3 -m venv "$d/v"
"$d/v/bin/pip" install -q --disable-pip-version-check jax==0.10.2 flax==0.12.8 dm-haiku==0.0.17 equinox==0.13.8 numpy==2.4.6
cat > "$d/t.py" <<'PY'
import sys
import numpy as np
import equinox
import flax
import haiku
import jax
from flax import linen, nnx

print("jax", jax.__version__, "flax", flax.__version__, "haiku", haiku.__version__, "equinox", equinox.__version__)
x = (1e4 + np.random.default_rng(0).normal(size=(4, 64))).astype("f4")
wide = x.astype("f8")
exact = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
norm = linen.LayerNorm(epsilon=1e-5)
in_haiku = haiku.transform(lambda x: haiku.LayerNorm(-1, True, True)(x))
found = {
    "jax.nn.standardize": jax.nn.standardize(x, epsilon=1e-5),
    "linen.LayerNorm": norm.apply(norm.init(jax.random.key(0), x), x),
    "nnx.LayerNorm": nnx.LayerNorm(64, epsilon=1e-5, rngs=nnx.Rngs(0))(x),
    "haiku.LayerNorm": in_haiku.apply(in_haiku.init(jax.random.key(0), x), None, x),
    "equinox.nn.LayerNorm": jax.vmap(equinox.nn.LayerNorm(64))(x),
}
off = {name: float(np.abs(np.asarray(y, "f8") - exact).max()) for name, y in found.items()}
print("; ".join(f"{name}: off by {error:.2g}" for name, error in off.items()))
sys.exit(not ([error > 100 for error in off.values()] == [True] * 3 + [False] * 2))
PY
cd "$d"
JAX_PLATFORMS=cpu "$d/v/bin/python" -P t.py
