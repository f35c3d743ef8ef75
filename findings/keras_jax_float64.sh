#!/usr/bin/env bash
# On JAX with 64 bits enabled, keras.ops.tanh, sin, cosh, arctan and var of a float64 array are float32; exp, sigmoid and
# sqrt are float64. So a float64 SimpleRNN on JAX returns float32.
# Expected: with set_floatx("float64") every function of float64 gives float64.
set -euo pipefail
d=$(mktemp -d)
trap 'rm -rf "$d"' EXIT
python3 -m venv "$d/v"
"$d/v/bin/pip" install -q --disable-pip-version-check keras==3.15.1 jax==0.10.2 numpy==2.4.6
cat > "$d/t.py" <<'PY'
import sys
import numpy as np
import jax
import keras

print("keras", keras.__version__, "jax", jax.__version__)
keras.config.set_floatx("float64")
x = jax.numpy.asarray(np.random.default_rng(0).normal(size=5) ** 2)
assert x.dtype == "float64"
narrow = [name for name in ("tanh", "sin", "cosh", "arctan", "var") if getattr(keras.ops, name)(x).dtype == "float32"]
wide = [name for name in ("exp", "sqrt", "sigmoid", "mean", "softmax") if getattr(keras.ops, name)(x).dtype == "float64"]
error = float(np.abs(np.asarray(keras.ops.tanh(x), "f8") - np.tanh(np.asarray(x))).max())
cell = keras.layers.SimpleRNNCell(3)
cell.build((1, 2))
kind = cell(np.ones((1, 2)), [np.zeros((1, 3))])[0].dtype
print(f"float32: {', '.join(narrow)}; float64: {', '.join(wide)}; tanh is off by {error:.1g}; SimpleRNNCell gives {kind}")
sys.exit(not (len(narrow) == len(wide) == 5 and error > 1e-10 and kind == "float32"))
PY
cd "$d"
KERAS_BACKEND=jax JAX_ENABLE_X64=1 JAX_PLATFORMS=cpu "$d/v/bin/python" -P t.py
