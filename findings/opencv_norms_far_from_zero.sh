#!/usr/bin/env bash
# OpenCV 5's LayerNormalization and InstanceNormalization cancel at mean 1e4, deviation 1: off by a thousand and more.
# Expected: a norm's error at mean 1e4 is about 1e-2 in float32.
# Output seen on 28 November 2026 with onnx 1.23.2, onnxruntime 1.32.0, opencv-python-headless 5.0.0.93:
#   LayerNormalization: OpenCV off by 904, onnxruntime by 0.00031
#   InstanceNormalization: OpenCV off by 942, onnxruntime by 0.0017
set -euo pipefail
d=$(mktemp -d)
trap 'rm -rf "$d"' EXIT
python3 -m venv "$d/v"
"$d/v/bin/pip" install -q --disable-pip-version-check onnx==1.23.2 numpy==2.4.6 onnxruntime==1.32.0 opencv-python-headless==5.0.0.93
cat > "$d/t.py" <<'PY'
import sys
import numpy as np
import onnx
from onnx import helper as H, numpy_helper as N
import cv2
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
    net = cv2.dnn.readNetFromONNX(np.frombuffer(model.SerializeToString(), np.uint8))
    net.setInput(x, "X")
    return np.array(net.forward("Y"))

def ort(model, x):
    s = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return s.run(None, {"X": x})[0]

r = np.random.default_rng(2)
ok = True
for op, shape in (("LayerNormalization", (3, 256)), ("InstanceNormalization", (2, 3, 50))):
    n = shape[1] if op[0] == "I" else shape[-1]
    w = {"S": np.ones(n, "f4"), "C": np.zeros(n, "f4")}
    m, x = file(H.make_node(op, ["X", "S", "C"], ["Y"]), (r.normal(size=shape) + 1e4).astype("f4"), w, 17)
    wide = x.astype("f8")
    y = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    a, b = np.abs(run(m, x) - y).max(), np.abs(ort(m, x) - y).max()
    print(f"{op}: OpenCV off by {a:.3g}, onnxruntime by {b:.2g}")
    ok &= a > 100 and b < 0.05
sys.exit(not ok)
PY
cd "$d"
"$d/v/bin/python" -P t.py
