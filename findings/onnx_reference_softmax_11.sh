#!/usr/bin/env bash
# onnx's reference evaluator computes Softmax of opset 11 over one axis (opset 13's meaning), not over the flattened rest.
# Expected: the opset of the file selects the operator's version.
# Output seen on 28 November 2026 with onnx 1.23.2, onnxruntime 1.32.0:
#   sums over axis 1 (1 by opset 13): [1. 1. 1.]
#   sums over axes 1 and 2 (1 by opset 11): [4. 4.]
#   onnxruntime: [1. 1.]
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
model, x = file(H.make_node("Softmax", ["X"], ["Y"], axis=1), r.normal(size=(2, 3, 4)).astype("f4"), {}, 11)
y = run(model, x)
print("sums over axis 1 (1 by opset 13):", np.round(y.sum(1).ravel()[:3], 4))
print("sums over axes 1 and 2 (1 by opset 11):", np.round(y.sum((1, 2)), 4))
print("onnxruntime:", np.round(ort(model, x).sum((1, 2)), 4))
sys.exit(not (np.allclose(y.sum(1), 1) and np.allclose(ort(model, x).sum((1, 2)), 1)))
PY
cd "$d"
"$d/v/bin/python" -P t.py
