#!/usr/bin/env bash
# torch.onnx.export(dynamo=True) of an LSTM or GRU with a Linear behind it, with an open number of frames by dynamic_shapes, gives no
# warning and a file whose input is open, whose nodes take any number, and whose recorded shapes say the example's number behind the
# cell. onnxruntime without optimisations runs it for any; by default it fuses MatMul and Add by the recorded shape and fails in a
# Reshape for other numbers. Of an RNN the input itself gets the example's number. The Linear alone takes any.
# Expected: no shape is recorded that holds for the example only, or the export raises, as torch.export does where a size was fixed.
# Output seen on 30 November 2026 with torch 2.13.0, onnx 1.23.2, onnxscript 0.7.2, onnxruntime 1.32.0, the example of 5 frames:
#   LSTM: input [1, 'T', 6], 0 warnings; of 2, 5, 7 and 100 frames it takes [5], not optimised [2, 5, 7, 100]
#   GRU: input [1, 'T', 6], 0 warnings; of 2, 5, 7 and 100 frames it takes [5], not optimised [2, 5, 7, 100]
#   RNN: input [1, 5, 6], 0 warnings; of 2, 5, 7 and 100 frames it takes [5], not optimised [5]
#   alone: input [1, 'T', 6], 0 warnings; of 2, 5, 7 and 100 frames it takes [2, 5, 7, 100], not optimised [2, 5, 7, 100]
set -euo pipefail
d=$(mktemp -d)
trap 'rm -rf "$d"' EXIT
python3 -m venv "$d/v"
"$d/v/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.4.6 onnx==1.23.2 onnxscript==0.7.2 onnxruntime==1.32.0
cat > "$d/t.py" <<'PY'
import logging
import sys
import warnings

import numpy as np
import onnxruntime
import torch


class Network(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.recurrent = kind(6, 8, batch_first=True) if kind else None
        self.linear = torch.nn.Linear(8 if kind else 6, 3)

    def forward(self, x):
        return self.linear(self.recurrent(x)[0] if self.recurrent else x)


kind = getattr(torch.nn, sys.argv[1], None)
onnxruntime.set_default_logger_severity(4)
logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # torchvision is not installed
shapes = ({1: torch.export.Dim("T", min=2, max=512)},)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    torch.onnx.export(Network(kind).eval(), (torch.zeros(1, 5, 6),), "m.onnx", dynamo=True, verbose=False, dynamic_shapes=shapes)
warned = sum("dynamic" in str(one.message).lower() or "speciali" in str(one.message).lower() for one in said)
taken = []
for level in ("ORT_ENABLE_ALL", "ORT_DISABLE_ALL"):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    session = onnxruntime.InferenceSession("m.onnx", options)
    source = session.get_inputs()[0]
    taken.append([])
    for frames in (2, 5, 7, 100):
        try:
            taken[-1].append(session.run(None, {source.name: np.zeros((1, frames, 6), "f4")})[0].shape[1])
        except Exception as error:
            assert type(error).__name__ in ("Fail", "InvalidArgument"), error
print(f"{sys.argv[1]}: input {source.shape}, {warned} warnings; of 2, 5, 7 and 100 frames it takes {taken[0]}, not optimised {taken[1]}")
every, one = [2, 5, 7, 100], [5]
seen = {"LSTM": [one, every], "GRU": [one, every], "RNN": [one, one], "alone": [every, every]}[sys.argv[1]]
sys.exit(warned > 0 or taken != seen or (source.shape[1] == 5) != (kind is torch.nn.RNN))
PY
cd "$d"
for kind in LSTM GRU RNN alone; do "$d/v/bin/python" -P t.py "$kind"; done
