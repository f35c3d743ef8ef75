#!/usr/bin/env bash
# onnx's reference evaluator gives other numbers than the formula of LRN and than onnxruntime.
# Expected: the reference evaluator follows the operator's formula.
# Output seen on 28 November 2026 with onnx 1.23.2, onnxruntime 1.32.0:
#   reference evaluator off by 1.1, onnxruntime by 1.9e-07
set -euo pipefail
d=$(mktemp -d)
trap 'rm -rf "$d"' EXIT
python3 -m venv "$d/v"
"$d/v/bin/pip" install -q --disable-pip-version-check onnx==1.23.2 numpy==2.4.6 onnxruntime==1.32.0
cat > "$d/t.py" <<'PY'
import sys
import numpy as np
import onnx
from onnx import helper as H, numpy_helper as N
from onnx.reference import ReferenceEvaluator
import onnxruntime


def file(node, x, w, opset):
    inputs = [H.make_tensor_value_info("X", 1, x.shape)]
    outputs = [H.make_tensor_value_info("Y", 1, None)]
    graph = H.make_graph([node], "g", inputs, outputs, [N.from_array(v, k) for k, v in w.items()])
    model = H.make_model(graph, opset_imports=[H.make_opsetid("", opset)], ir_version=8)
    model = onnx.shape_inference.infer_shapes(model)
    onnx.checker.check_model(model, full_check=True)
    return model, x

def run(model, x):
    return ReferenceEvaluator(model).run(None, {"X": x})[0]

def ort(model, x):
    s = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return s.run(None, {"X": x})[0]

r = np.random.default_rng(2)
x = r.normal(size=(2, 5, 4, 4)).astype("f4")
model, x = file(H.make_node("LRN", ["X"], ["Y"], size=3, alpha=0.5), x, {}, 13)
q = np.pad(x.astype("f8") ** 2, ((0, 0), (1, 1), (0, 0), (0, 0)))
formula = x / (1 + 0.5 / 3 * (q[:, :-2] + q[:, 1:-1] + q[:, 2:])) ** 0.75
a, b = np.abs(run(model, x) - formula).max(), np.abs(ort(model, x) - formula).max()
print(f"reference evaluator off by {a:.2g}, onnxruntime by {b:.2g}")
sys.exit(not (a > 0.1 and b < 1e-6))
PY
cd "$d"
"$d/v/bin/python" -P t.py
