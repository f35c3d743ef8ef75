#!/usr/bin/env bash
# IREE compiles LSTM with peepholes (P), with sequence_lens and with activations in lower case, and computes others.
# Expected: it computes them as the standard says or refuses them, as it does clip and input_forget.
# Output seen on 28 November 2026 with iree 3.13.0, onnx 1.23.2, onnxruntime 1.32.0:
#   LSTM with P | equal to the file without: True | off from onnxruntime by 0.21
#   LSTM with sequence_lens | equal to the file without: True | off from onnxruntime by 0.62
#   LSTM with activations in lower case | equal to the file without: False | off from onnxruntime by 1.4e+02
#   LSTM plain | equal to the file without: True | off from onnxruntime by 8.9e-08
set -euo pipefail
d=$(mktemp -d)
trap 'rm -rf "$d"' EXIT
python3 -m venv "$d/v"
"$d/v/bin/pip" install -q --disable-pip-version-check 'iree-base-compiler[onnx]==3.13.0' iree-base-runtime==3.13.0 onnx==1.23.2 numpy==2.4.6 onnxruntime==1.32.0
cat > "$d/t.py" <<'PY'
import sys

import iree.compiler
import iree.runtime
import numpy as np
import onnx
import onnxruntime
from iree.compiler.tools.import_onnx import __main__ as importer
from onnx import helper as H, numpy_helper as N


def file(given=(), **attributes):
    """One LSTM over X [6, 2, 3], weights fixed by a seed."""
    r = np.random.default_rng(5)
    shapes = {"W": (1, 16, 3), "R": (1, 16, 4), "B": (1, 32), "P": (1, 12)}
    w = {k: r.normal(size=s).astype("f4") for k, s in shapes.items()}
    w["sequence_lens"] = np.array([3, 6], "i4")
    names = [k if k in ("W", "R", "B", *given) else "" for k in ("W", "R", "B", "sequence_lens", "h", "c", "P")]
    node = H.make_node("LSTM", ["X", *names], ["Y"], hidden_size=4, **attributes)
    inputs, outputs = [H.make_tensor_value_info("X", 1, [6, 2, 3])], [H.make_tensor_value_info("Y", 1, [6, 1, 2, 4])]
    graph = H.make_graph([node], "g", inputs, outputs, [N.from_array(w[k], k) for k in names if k in w])
    model = H.make_model(graph, opset_imports=[H.make_opsetid("", 14)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


def iree_run(model, x):
    onnx.save(model, "m.onnx")
    importer.main(importer.parse_arguments(["m.onnx", "-o", "m.mlir"]))
    code = iree.compiler.compile_file("m.mlir", input_type="onnx", target_backends=["llvm-cpu"], extra_args=["--iree-llvmcpu-target-cpu=host"])
    context = iree.runtime.SystemContext(config=iree.runtime.Config("local-sync"))
    module = iree.runtime.VmModule.copy_buffer(context.instance, code)
    context.add_vm_module(module)
    entry = next(n for n in module.function_names if n != "__init" and not n.endswith("$async"))
    return context.modules[module.name][entry](x).to_host()


def ort(model, x):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"X": x})[0]


x = np.random.default_rng(6).normal(size=(6, 2, 3)).astype("f4")
plain, ok = iree_run(file(), x), True
for what, model, wanted in (
    ("with P", file(["P"]), lambda same, off: same and off > 0.1),
    ("with sequence_lens", file(["sequence_lens"]), lambda same, off: same and off > 0.1),
    ("with activations in lower case", file(activations=["sigmoid", "tanh", "tanh"]), lambda same, off: off > 0.1),
    ("plain", file(), lambda same, off: off < 1e-5),
):
    y = iree_run(model, x)
    same, off = np.array_equal(y, plain), np.abs(y - ort(model, x)).max()
    print(f"LSTM {what} | equal to the file without: {same} | off from onnxruntime by {off:.2g}")
    ok &= wanted(same, off)
sys.exit(not ok)
PY
cd "$d"
"$d/v/bin/python" -P t.py
