#!/usr/bin/env bash
# Causal attention of the newest 2 queries on a cache of 6 keys: MLX lets the last query see all keys, as a stream needs. PyTorch
# (is_causal=True), JAX (is_causal=True) and ONNX's Attention (is_causal=1, keys as one input) count both from the start: the newest
# queries see the oldest keys. onnxruntime's Attention with past_key and past_value is right.
# Expected: one word, one mask, and that of a stream; at equal lengths all agree.
# Output seen on 29 November 2026 with torch 2.13.0, jax 0.10.2, mlx 0.32.4, onnx 1.23.2, onnxruntime 1.32.0:
#   MLX: off by 4e-08 from the whole sequence, by 2 from new queries on the oldest keys
#   PyTorch: off by 2 from the whole sequence, by 8e-08 from new queries on the oldest keys
#   JAX: off by 2 from the whole sequence, by 5e-08 from new queries on the oldest keys
#   onnxruntime: off by 2 from the whole sequence, by 5e-08 from new queries on the oldest keys
#   onnxruntime with past: off by 4e-08 from the whole sequence, by 2 from new queries on the oldest keys
set -euo pipefail
d=$(mktemp -d)
trap 'rm -rf "$d"' EXIT
python3 -m venv "$d/v"
"$d/v/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.4.6 jax==0.10.2 mlx==0.32.4 mlx-cpu==0.32.4 onnx==1.23.2 onnxruntime==1.32.0
cat > "$d/t.py" <<'PY'
import sys
import jax
import mlx.core as mx
import numpy as np
import onnxruntime
import torch
from onnx import TensorProto, helper

KEYS, NEW, SIZE = 6, 2, 4
r = np.random.default_rng(0)
q, k, v = (r.normal(size=(1, 1, KEYS, SIZE)).astype("f4") for _ in range(3))


def attend(q, k, v, before):
    """Causal attention [1, 1, rows, SIZE] of rows that `before` keys precede."""
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(SIZE)
    rows, columns = np.indices(scores.shape[-2:])
    p = np.exp(np.where(columns <= rows + before, scores, -np.inf))
    return p / p.sum(-1, keepdims=True) @ v


def by_onnx(**inputs):
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, a.shape) for n, a in inputs.items()]
    names, outs = list(inputs), ["y"]
    if "past_k" in inputs:
        names, outs = [*names[:3], "", *names[3:]], ["y", "present_k", "present_v"]
    node = helper.make_node("Attention", names, outs, is_causal=1)
    out = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 1, NEW, SIZE])]
    model = helper.make_model(helper.make_graph([node], "g", info, out), opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    return onnxruntime.InferenceSession(model.SerializeToString()).run(None, inputs)[0]


new = q[:, :, -NEW:]
turned = (a.swapaxes(1, 2) for a in (new, k, v))  # JAX: [batch, time, heads, size]
results = {
    "MLX": np.array(mx.fast.scaled_dot_product_attention(*map(mx.array, (new, k, v)), scale=SIZE**-0.5, mask="causal")),
    "PyTorch": torch.nn.functional.scaled_dot_product_attention(*map(torch.tensor, (new, k, v)), is_causal=True).numpy(),
    "JAX": np.asarray(jax.nn.dot_product_attention(*turned, is_causal=True)).swapaxes(1, 2),
    "onnxruntime": by_onnx(q=new, k=k, v=v),
    "onnxruntime with past": by_onnx(q=new, k=k[:, :, -NEW:], v=v[:, :, -NEW:], past_k=k[:, :, :-NEW], past_v=v[:, :, :-NEW]),
}
whole = attend(q, k, v, 0)[:, :, -NEW:]
oldest = attend(new, k, v, 0)
same = True
for name, y in results.items():
    a, b = np.abs(y - whole).max(), np.abs(y - oldest).max()
    print(f"{name}: off by {a:.1g} from the whole sequence, by {b:.1g} from new queries on the oldest keys")
    same &= (a < 1e-5 and b > 0.1) if name in ("MLX", "onnxruntime with past") else (a > 0.1 and b < 1e-5)
sys.exit(not same)
PY
cd "$d"
"$d/v/bin/python" -P t.py
