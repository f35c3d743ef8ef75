#!/usr/bin/env bash
# tract ignores input_forget and clip: such files compute the plain cell.
# Expected: an attribute that is not supported is refused, as tract does for unequal sequence_lens.
# Output seen on 28 November 2026 with onnx 1.23.2, onnxruntime 1.32.0, tract 0.23.9:
#   LSTM {'input_forget': 1} | equal to the file without it: True | onnxruntime: differs by 0.61
#   LSTM {'clip': 0.5} | equal to the file without it: True | onnxruntime: differs by 0.63
#   GRU {'clip': 0.5} | equal to the file without it: True | onnxruntime: differs by 0.72
set -euo pipefail
d=$(mktemp -d)
trap 'rm -rf "$d"' EXIT
python3 -m venv "$d/v"
"$d/v/bin/pip" install -q --disable-pip-version-check onnx==1.23.2 numpy==2.4.6 onnxruntime==1.32.0 tract==0.23.9
cat > "$d/t.py" <<'PY'
import sys
import numpy as np
import onnx
from onnx import helper as H, numpy_helper as N
import tract
import onnxruntime


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
    return tract.onnx().load("m.onnx").into_model().into_runnable().run([x])[0].to_numpy()

def ort(model, x):
    s = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return s.run(None, {"X": x})[0]

CASES = [("LSTM", {"input_forget": 1}), ("LSTM", {"clip": 0.5}), ("GRU", {"clip": 0.5})]

ok = True
for kind, kwargs in CASES:
    plain, with_it = recurrent(kind), recurrent(kind, **kwargs)
    same = np.array_equal(run(*with_it), run(*plain))
    distance = np.abs(ort(*with_it) - ort(*plain)).max()
    print(kind, kwargs, "| equal to the file without it:", same, "| onnxruntime: differs by", f"{distance:.2g}")
    ok &= same and (distance > 0.005)
sys.exit(not ok)
PY
cd "$d"
"$d/v/bin/python" -P t.py
