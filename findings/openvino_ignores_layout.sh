#!/usr/bin/env bash
# OpenVINO reads layout=1 (batch first) of LSTM, GRU and RNN, and returns Y in the axes of layout 0.
# Expected: a reader honours layout or refuses, as onnxruntime does.
# Output seen on 28 November 2026 with onnx 1.23.2, openvino 2026.4.1:
#   LSTM layout 1: Y by the standard [2, 6, 1, 4] | returned [2, 1, 6, 4]
#   GRU layout 1: Y by the standard [2, 6, 1, 4] | returned [2, 1, 6, 4]
#   RNN layout 1: Y by the standard [2, 6, 1, 4] | returned [2, 1, 6, 4]
set -euo pipefail
d=$(mktemp -d)
trap 'rm -rf "$d"' EXIT
python3 -m venv "$d/v"
"$d/v/bin/pip" install -q --disable-pip-version-check onnx==1.23.2 numpy==2.4.6 openvino==2026.4.1
cat > "$d/t.py" <<'PY'
import sys
import numpy as np
import onnx
from onnx import helper as H, numpy_helper as N
import openvino


def file(node, x, w, opset):
    inputs = [H.make_tensor_value_info("X", 1, x.shape)]
    outputs = [H.make_tensor_value_info("Y", 1, None)]
    graph = H.make_graph([node], "g", inputs, outputs, [N.from_array(v, k) for k, v in w.items()])
    model = H.make_model(graph, opset_imports=[H.make_opsetid("", opset)], ir_version=8)
    model = onnx.shape_inference.infer_shapes(model)
    onnx.checker.check_model(model, full_check=True)
    return model, x

def recurrent(kind, lens=None, layout=0, **attributes):
    """One node over X [6, 2, 3], weights fixed by a seed."""
    r = np.random.default_rng(5)
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    shapes = {"W": (1, gates * 4, 3), "R": (1, gates * 4, 4), "B": (1, gates * 8)}
    w = {k: r.normal(size=s).astype("f4") for k, s in shapes.items()}
    x = r.normal(size=(6, 2, 3)).astype("f4")
    if layout:
        x, attributes["layout"] = x.swapaxes(0, 1).copy(), 1
    if lens:
        w["L"] = np.array(lens, "i4")
    node = H.make_node(kind, ["X", *w], ["Y"], hidden_size=4, **attributes)
    return file(node, x, w, 14)

def run(model, x):
    onnx.save(model, "m.onnx")
    return openvino.Core().compile_model("m.onnx", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(x)[0]

ok = True
for kind in ("LSTM", "GRU", "RNN"):
    y0, y1 = run(*recurrent(kind)), run(*recurrent(kind, layout=1))
    declared = [d.dim_value for d in recurrent(kind, layout=1)[0].graph.output[0].type.tensor_type.shape.dim]
    print(kind, "layout 1: Y by the standard", declared, "| returned", list(y1.shape))
    ok &= declared == [2, 6, 1, 4] and list(y1.shape) == [2, 1, 6, 4]
sys.exit(not ok)
PY
cd "$d"
"$d/v/bin/python" -P t.py
