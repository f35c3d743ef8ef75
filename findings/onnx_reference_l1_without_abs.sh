#!/usr/bin/env bash
# LpNormalization with p=1 in onnx's reference evaluator divides by the sum, not by the sum of magnitudes.
# Expected: p=1 divides by the sum of |x|.
# Output seen on 28 November 2026 with onnx 1.23.2, onnxruntime 1.32.0:
#   reference: 1e-07 from x / sum(x), 2 from x / sum(|x|); onnxruntime: 4.2e-08
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
model, x = file(H.make_node("LpNormalization", ["X"], ["Y"], p=1), r.normal(size=(3, 4)).astype("f4"), {}, 14)
y, wide = run(model, x), x.astype("f8")
to_sum = np.abs(y - wide / wide.sum(-1, keepdims=True)).max()
to_l1 = np.abs(y - wide / np.abs(wide).sum(-1, keepdims=True)).max()
ort_l1 = np.abs(ort(model, x) - wide / np.abs(wide).sum(-1, keepdims=True)).max()
print(f"reference: {to_sum:.2g} from x / sum(x), {to_l1:.2g} from x / sum(|x|); onnxruntime: {ort_l1:.2g}")
sys.exit(not (to_sum < 1e-5 < 0.01 < to_l1 and ort_l1 < 1e-6))
PY
cd "$d"
"$d/v/bin/python" -P t.py
