#!/usr/bin/env bash
# onnx's reference evaluator takes the pads of MaxPool (stride 1) in another order than the standard, begin and end of
# each axis in turn, and pads at the end where auto_pad=SAME_LOWER with strides asks for the beginning.
# Expected: the reference evaluator reads pads as [begins, ends], like the other operators.
# Output seen on 28 November 2026 with onnx 1.23.2, onnxruntime 1.32.0:
#   MaxPool, one element of padding at both ends: shape (1, 1, 3, 5) by the reference evaluator, (1, 1, 4, 4) by onnxruntime
#   MaxPool, SAME_LOWER with strides: off by 0.82, onnxruntime by 0
set -euo pipefail
d=$(mktemp -d)
trap 'rm -rf "$d"' EXIT
python3 -m venv "$d/v"
"$d/v/bin/pip" install -q --disable-pip-version-check onnx==1.23.2 numpy==2.4.6 onnxruntime==1.32.0
cat > "$d/t.py" <<'PY'
import sys
import numpy as np
import onnx
import onnxruntime
from onnx import helper as H
from onnx.reference import ReferenceEvaluator

x = np.random.default_rng(2).normal(size=(1, 1, 4, 4)).astype("f4")


def both(op, **attributes):
    graph = H.make_graph([H.make_node(op, ["X"], ["Y"], **attributes)], "g",
                         [H.make_tensor_value_info("X", 1, x.shape)], [H.make_tensor_value_info("Y", 1, None)])
    model = H.make_model(graph, opset_imports=[H.make_opsetid("", 19)], ir_version=8)
    onnx.checker.check_model(onnx.shape_inference.infer_shapes(model), full_check=True)
    s = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return ReferenceEvaluator(model).run(None, {"X": x})[0], s.run(None, {"X": x})[0]


a, b = both("MaxPool", kernel_shape=[2, 2], pads=[0, 0, 1, 1])
print(f"MaxPool, one element of padding at both ends: shape {a.shape} by the reference evaluator, {b.shape} by onnxruntime")
c, d = both("MaxPool", kernel_shape=[3, 3], strides=[2, 2], auto_pad="SAME_LOWER")
lower = np.pad(x, ((0, 0), (0, 0), (1, 0), (1, 0)), constant_values=-np.inf)
formula = np.lib.stride_tricks.sliding_window_view(lower, (3, 3), (2, 3))[:, :, ::2, ::2].max((-2, -1))
off = [float(np.abs(each - formula).max()) for each in (c, d)]
print(f"MaxPool, SAME_LOWER with strides: off by {off[0]:.2g}, onnxruntime by {off[1]:.2g}")
sys.exit(not (a.shape != b.shape == (1, 1, 4, 4) and off[0] > 0.1 and off[1] == 0))
PY
cd "$d"
"$d/v/bin/python" -P t.py
