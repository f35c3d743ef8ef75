#!/usr/bin/env bash
# IREE runs one step of a Scan whose number of steps is open, and every Scan forwards, whatever scan_input_directions says.
# Expected: as many steps as the sequence has, in the direction asked for, or a refusal when it is compiled.
# Output seen on 28 November 2026 with iree 3.13.0, onnx 1.23.2, onnxruntime 1.32.0:
#   T fixed, forward: IREE (5, 2), onnxruntime (5, 2) | equal: True
#   T open, forward: IREE (1, 2), onnxruntime (5, 2) | equal: False
#   T fixed, backward: IREE (5, 2), onnxruntime (5, 2) | equal: False, IREE's is the forward one: True
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


def file(steps, **attributes):
    """A leaky sum s = 0.5 s + x from zero, by a Scan over X [steps, 2]."""
    info = H.make_tensor_value_info
    nodes = [H.make_node("Mul", ["s", "half"], ["p"]), H.make_node("Add", ["p", "x"], ["t"]), H.make_node("Identity", ["t"], ["y"])]
    half = N.from_array(np.float32(0.5), "half")
    body = H.make_graph(nodes, "body", [info("s", 1, [2]), info("x", 1, [2])], [info("t", 1, [2]), info("y", 1, [2])], [half])
    scan = H.make_node("Scan", ["zero", "X"], ["last", "Y"], body=body, num_scan_inputs=1, **attributes)
    zero = N.from_array(np.zeros(2, "f4"), "zero")
    graph = H.make_graph([scan], "g", [info("X", 1, [steps, 2])], [info("Y", 1, [steps, 2])], [zero])
    model = H.make_model(graph, opset_imports=[H.make_opsetid("", 17)], ir_version=8)
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


x = np.arange(1, 11, dtype="f4").reshape(5, 2)
found = {}
for name, model in (("T fixed, forward", file(5)), ("T open, forward", file("T")), ("T fixed, backward", file(5, scan_input_directions=[1]))):
    y, wanted = iree_run(model, x), ort(model, x)
    found[name] = y, wanted
    print(f"{name}: IREE {y.shape}, onnxruntime {wanted.shape} | equal: {np.array_equal(y, wanted)}", end="")
    print(f", IREE's is the forward one: {np.array_equal(y, found['T fixed, forward'][0])}" * name.endswith("backward"))
forward, opened, backward = found.values()
sys.exit(not (np.array_equal(*forward) and opened[0].shape == (1, 2) and np.array_equal(backward[0], forward[0]) and not np.array_equal(*backward)))
PY
cd "$d"
"$d/v/bin/python" -P t.py
