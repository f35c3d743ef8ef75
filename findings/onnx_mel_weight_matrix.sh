#!/usr/bin/env bash
# ONNX's MelWeightMatrix rounds each filter's edges down to whole bins: with 80 bands of an FFT of 512 at 16 kHz, 18 are one bin
# each, some of them the same one, and log-mel features are off by 2 dB from librosa's, which keeps the edges between the bins.
# And HammingWindow is 25/46 - 21/46 cos, not SciPy's 0.54 - 0.46 cos. Both evaluators follow the standard.
# Expected: a front end moved into the ONNX file gives the log-mel features that the model was trained on.
# Output seen on 29 November 2026 with onnx 1.23.2, onnxruntime 1.32.0, librosa 0.11.0, scipy 1.17.1:
#   onnxruntime: 18 bands of one bin, 2 that repeat another (librosa 0); log-mel of white noise off by 2.4 dB on average, 1.8 in the lowest 10 bands
#   reference: 18 bands of one bin, 2 that repeat another (librosa 0); log-mel of white noise off by 2.4 dB on average, 1.8 in the lowest 10 bands
#   onnxruntime: HammingWindow off by 0.007 from SciPy's; at its ends 0.0870, SciPy 0.0800
#   reference: HammingWindow off by 0.007 from SciPy's; at its ends 0.0870, SciPy 0.0800
set -euo pipefail
d=$(mktemp -d)
trap 'rm -rf "$d"' EXIT
python3 -m venv "$d/v"
"$d/v/bin/pip" install -q --disable-pip-version-check librosa==0.11.0 scipy==1.17.1 numpy==2.4.6 onnx==1.23.2 onnxruntime==1.32.0
cat > "$d/t.py" <<'PY'
import sys
import librosa
import numpy as np
import onnxruntime
import scipy.signal
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

RATE, FFT, BANDS = 16000, 512, 80


def constant(name, value):
    kind = TensorProto.FLOAT if isinstance(value, float) else TensorProto.INT64
    return helper.make_node("Constant", [], [name], value=helper.make_tensor(name, kind, [], [value]))


def run(op, shape, *values):
    """What onnxruntime and the reference evaluator give for an operator of scalars."""
    names = [f"c{i}" for i in range(len(values))]
    nodes = [*map(constant, names, values), helper.make_node(op, names, ["y"])]
    graph = helper.make_graph(nodes, "g", [], [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return onnxruntime.InferenceSession(model.SerializeToString()).run(None, {})[0], ReferenceEvaluator(model).run(None, {})[0]


def decibels(mel):
    return 10 * np.log10(np.maximum(mel @ power, 1e-10))


ours = librosa.filters.mel(sr=RATE, n_fft=FFT, n_mels=BANDS, fmin=20, fmax=8000, htk=True, norm=None)
noise = np.random.default_rng(0).normal(size=RATE)
power = np.abs(librosa.stft(noise, n_fft=FFT)) ** 2
same = True
for name, theirs in zip(("onnxruntime", "reference"), run("MelWeightMatrix", [FFT // 2 + 1, BANDS], BANDS, FFT, RATE, 20.0, 8000.0)):
    theirs = theirs.T
    off = np.abs(decibels(theirs) - decibels(ours))
    single = ((theirs > 0).sum(1) == 1).sum()
    twice = BANDS - len(np.unique(theirs, axis=0))
    print(f"{name}: {single} bands of one bin, {twice} that repeat another (librosa {BANDS - len(np.unique(ours, axis=0))});", end=" ")
    print(f"log-mel of white noise off by {off.mean():.1f} dB on average, {np.median(off[:10]):.1f} in the lowest 10 bands")
    same &= off.mean() > 0.5
for name, window in zip(("onnxruntime", "reference"), run("HammingWindow", [400], 400)):
    off = np.abs(window - scipy.signal.get_window("hamming", 400)).max()
    print(f"{name}: HammingWindow off by {off:.1g} from SciPy's; at its ends {window[0]:.4f}, SciPy {scipy.signal.get_window('hamming', 400)[0]:.4f}")
    same &= 0.005 < off < 0.01
sys.exit(not same)
PY
cd "$d"
"$d/v/bin/python" -P t.py
