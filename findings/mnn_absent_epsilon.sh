#!/usr/bin/env bash
# MNN takes an absent epsilon of InstanceNormalization (1e-5 by the standard) for 0.
# Expected: a converter gives an absent attribute its default.
# Output seen on 28 November 2026 with onnx 1.23.2, MNN 3.6.1:
#   absent: off by 1.9 from eps = 1e-5, by 0.00021 from eps = 0; epsilon=1e-5 given: off by 3.7e-08
set -euo pipefail
d=$(mktemp -d)
trap 'rm -rf "$d"' EXIT
python3 -m venv "$d/v"
"$d/v/bin/pip" install -q --disable-pip-version-check onnx==1.23.2 numpy==2.4.6 mnn==3.6.1
cat > "$d/t.py" <<'PY'
import sys
import numpy as np
import onnx
from onnx import helper as H, numpy_helper as N
import MNN
import _tools  # the converter without the command around it, which installs a package that reports its use


def run(x, **attributes):
    node = H.make_node("InstanceNormalization", ["X", "S", "C"], ["Y"], **attributes)
    stored = [N.from_array(np.ones(3, "f4"), "S"), N.from_array(np.zeros(3, "f4"), "C")]
    info = [H.make_tensor_value_info(name, 1, x.shape) for name in "XY"]
    graph = H.make_graph([node], "g", info[:1], info[1:], stored)
    model = H.make_model(graph, opset_imports=[H.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, "m.onnx")
    _tools.mnnconvert(["", "-f", "ONNX", "--modelFile", "m.onnx", "--MNNModel", "m.mnn", "--bizCode", "m"])
    net = MNN.nn.load_module_from_file("m.mnn", ["X"], ["Y"])
    given = MNN.expr.placeholder(list(x.shape), MNN.expr.NCHW, MNN.expr.float)
    given.write(x.ravel().tolist())
    return np.array(MNN.expr.convert(net.forward([given])[0], MNN.expr.NCHW).read())


x = (1e-3 * np.random.default_rng(0).normal(size=(1, 3, 5, 4))).astype("f4")
wide = x.astype("f8")
d = wide - wide.mean((2, 3), keepdims=True)
y = d / np.sqrt(wide.var((2, 3), keepdims=True) + 1e-5)
without = d / np.sqrt(wide.var((2, 3), keepdims=True))
absent, given = run(x), run(x, epsilon=1e-5)
a, b, c = (float(np.abs(value).max()) for value in (absent - y, given - y, absent - without))
print(f"absent: off by {a:.2g} from eps = 1e-5, by {c:.2g} from eps = 0; epsilon=1e-5 given: off by {b:.2g}")
sys.exit(not (a > 1 and b < 1e-5 and c < 1e-3))
PY
cd "$d"
"$d/v/bin/python" -P t.py | tail -1
