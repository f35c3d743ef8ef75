#!/usr/bin/env bash
# onnx's inliner drops the defaults that a local function gives its attributes: the inlined file computes something else.
# Expected: a call that leaves an attribute out gets the function's default (FunctionProto.attribute_proto), as in onnxruntime.
# Output seen on 29 November 2026 with onnx 1.23.2, onnxruntime 1.32.0:
#   slope 0.3 by default, the call leaves it out: onnxruntime -0.3, after inline_local_functions -0.01
#   the call gives slope 0.3: onnxruntime -0.3, after inline_local_functions -0.3
#   the reference evaluator raises TypeError for the first
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
from onnx import helper as H, inliner
from onnx.reference import ReferenceEvaluator

OPSETS = [H.make_opsetid("", 17), H.make_opsetid("my", 1)]
X = {"x": np.float32([-1])}


def file(**given):
    """y = my.Leaky(x), whose slope is the function's attribute `slope`, 0.3 by default."""
    leaky = H.make_node("LeakyRelu", ["a"], ["b"])
    leaky.attribute.add(name="alpha", type=onnx.AttributeProto.FLOAT, ref_attr_name="slope")
    function = H.make_function("my", "Leaky", ["a"], ["b"], [leaky], OPSETS,
                               attribute_protos=[H.make_attribute("slope", 0.3)])
    x, y = (H.make_tensor_value_info(name, 1, [1]) for name in "xy")
    graph = H.make_graph([H.make_node("Leaky", ["x"], ["y"], domain="my", **given)], "g", [x], [y])
    model = H.make_model(graph, functions=[function], opset_imports=OPSETS, ir_version=9)
    onnx.checker.check_model(model, full_check=True)
    return model


def run(model):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return float(session.run(None, X)[0][0])


seen = [(run(model), run(inliner.inline_local_functions(model))) for model in (file(), file(slope=0.3))]
print("slope 0.3 by default, the call leaves it out: onnxruntime %.2g, after inline_local_functions %.2g" % seen[0])
print("the call gives slope 0.3: onnxruntime %.2g, after inline_local_functions %.2g" % seen[1])
try:
    ReferenceEvaluator(file()).run(None, X)
    raised = ""
except Exception as error:
    raised = type(error).__name__
print("the reference evaluator raises", raised or "nothing", "for the first")
sys.exit(not (np.allclose(seen, [(-0.3, -0.01), (-0.3, -0.3)]) and raised == "TypeError"))
PY
cd "$d"
"$d/v/bin/python" -P t.py
