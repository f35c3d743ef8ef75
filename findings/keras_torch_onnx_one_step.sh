#!/usr/bin/env bash
# Keras on PyTorch exports an LSTM or GRU with Input((None, 4)) to an ONNX file that declares an open number of steps, takes any
# number, and runs the first step only: the loop over time was traced with one step. Without return_sequences even the shape is right.
# Expected: the file runs as many steps as it is given, or the export refuses an open axis. Input((7, 4)) is right.
# Output seen on 29 November 2026 with keras 3.15.1, torch 2.13.0, onnx 1.23.2, onnxscript 0.7.2, onnxruntime 1.32.0:
#   LSTM, Input((None, 4)), file's steps open: 7 steps given, off by 0.2 from Keras, by 7e-09 from its first step
#   GRU, Input((None, 4)), file's steps open: 7 steps given, off by 0.3 from Keras, by 7e-09 from its first step
#   LSTM, Input((7, 4)), file's steps 7: 7 steps given, off by 3e-08 from Keras, by 0.2 from its first step
#   GRU, Input((7, 4)), file's steps 7: 7 steps given, off by 3e-08 from Keras, by 0.6 from its first step
set -euo pipefail
d=$(mktemp -d)
trap 'rm -rf "$d"' EXIT
python3 -m venv "$d/v"
"$d/v/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.4.6 keras==3.15.1 onnx==1.23.2 onnxscript==0.7.2 onnxruntime==1.32.0
cat > "$d/t.py" <<'PY'
import os
import sys
import warnings

os.environ["KERAS_BACKEND"] = "torch"
warnings.simplefilter("ignore")
import keras
import numpy as np
import onnxruntime

keras.utils.set_random_seed(0)
x = np.random.default_rng(0).normal(size=(1, 7, 4)).astype("f4")
same = True
for steps in (None, 7):
    for layer in (keras.layers.LSTM, keras.layers.GRU):
        model = keras.Sequential([keras.Input((steps, 4)), layer(5)])
        model(x)
        model.export("m.onnx", format="onnx", verbose=False)
        session = onnxruntime.InferenceSession("m.onnx")
        source = session.get_inputs()[0]
        y = session.run(None, {source.name: x})[0]
        off, first = (np.abs(y - keras.ops.convert_to_numpy(model(z))).max() for z in (x, x[:, :1]))
        opened = not isinstance(source.shape[1], int)
        print(f"{layer.__name__}, Input({(steps, 4)}), file's steps {'open' if opened else source.shape[1]}: 7 steps given,", end=" ")
        print(f"off by {off:.1g} from Keras, by {first:.1g} from its first step")
        same &= (off > 1e-2 and first < 1e-6 and opened) if steps is None else off < 1e-6
sys.exit(not same)
PY
cd "$d"
"$d/v/bin/python" -P t.py
