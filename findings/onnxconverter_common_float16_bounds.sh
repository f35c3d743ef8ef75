#!/usr/bin/env bash
# onnxconverter-common's conversion to float16 moves every stored number beyond 1e4 to 1e4, though float16 reaches 65504, and
# every one below 1e-7 to 1e-7. The scale of 16-bit audio, 32768, becomes 10000: a speech model that begins with it gets
# features that are 0.3 of the right ones. (It warns once per number; onnxruntime's copy of the converter keeps both.)
# Expected: what float16 can hold is rounded to float16.
# Output seen on 28 November 2026 with onnxconverter-common 1.16.0, onnx 1.23.2, onnxruntime 1.32.0:
#   stored 32768: 10000 by onnxconverter-common, 32768 by onnxruntime
#   stored 5.9605e-08: 1.1921e-07 by onnxconverter-common, 5.9605e-08 by onnxruntime
set -euo pipefail
d=$(mktemp -d)
trap 'rm -rf "$d"' EXIT
python3 -m venv "$d/v"
pip=("$d/v/bin/pip" install -q --disable-pip-version-check)
"${pip[@]}" onnx==1.23.2 numpy==2.4.6 onnxruntime==1.32.0
"${pip[@]}" --no-deps onnxconverter-common==1.16.0 packaging==26.2
cat > "$d/t.py" <<'PY'
import sys
import warnings
import numpy as np
from onnx import checker, helper as H, numpy_helper as N
from onnxconverter_common import float16 as common
from onnxruntime.transformers import float16 as theirs

stored = np.array([32768, 2.0**-24], "f4")  # both are float16 numbers
graph = H.make_graph(
    [H.make_node("Mul", ["samples", "scale"], ["scaled"])],
    "g",
    [H.make_tensor_value_info("samples", 1, ["n", 2])],
    [H.make_tensor_value_info("scaled", 1, ["n", 2])],
    [N.from_array(stored, "scale")],
)
model = H.make_model(graph, opset_imports=[H.make_opsetid("", 17)], ir_version=8)
checker.check_model(model, full_check=True)
warnings.simplefilter("ignore")
kept = [N.to_array(c.convert_float_to_float16(model).graph.initializer[0]) for c in (common, theirs)]
for x, a, b in zip(stored, *kept):
    print(f"stored {x:.5g}: {a:.5g} by onnxconverter-common, {b:.5g} by onnxruntime")
sys.exit(not (kept[0][0] == 10000 and float(kept[0][1]) > 1.1e-7 and np.array_equal(kept[1], stored)))
PY
cd "$d"
"$d/v/bin/python" -P t.py
