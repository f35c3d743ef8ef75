#!/usr/bin/env bash
# Silero VAD's ONNX file takes a chunk of 512 samples (the size that its documents name for 16 kHz) and answers, but hears
# no voice: it wants 576, the chunk behind the last 64 samples of the chunk before. The package's wrapper keeps those 64.
# Expected: a file with a state input keeps in it all that it needs of the past, or refuses another length.
# Output seen on 28 November 2026 with silero-vad 6.2.3, onnxruntime 1.32.0:
#   chunks of 512: 0.0 % above 0.5, most 0.002
#   64 samples before each: 24.8 % above 0.5, most 0.959
set -euo pipefail
d=$(mktemp -d)
trap 'rm -rf "$d"' EXIT
python3 -m venv "$d/v"
pip=("$d/v/bin/pip" install -q --disable-pip-version-check)
"${pip[@]}" numpy==2.4.6 onnxruntime==1.32.0
"${pip[@]}" --no-deps silero-vad==6.2.3  # for its file
cat > "$d/t.py" <<'PY'
import sys
from importlib.metadata import distribution
import numpy as np
import onnxruntime

CHUNK, RATE = 512, 16000


def voice(seconds=4):
    """Vowels of 0.2 s: pulses of 120 Hz through three resonances each."""
    t = np.arange(seconds * RATE) / RATE
    pitch = 120 + 15 * np.sin(2 * np.pi * 2.5 * t) + 10 * np.sin(2 * np.pi * 0.7 * t)
    pulses = np.diff(np.floor(np.cumsum(pitch) / RATE), prepend=0)
    vowels = [(730, 1090, 2440), (270, 2290, 3010), (300, 870, 2240), (530, 1840, 2480), (570, 840, 2410)]
    n, out = RATE // 5, np.zeros(len(t))
    for k in range(len(t) // n):
        x = pulses[k * n : (k + 1) * n]
        for f, width in zip(vowels[k % 5], (80, 90, 120)):
            r = np.exp(-np.pi * width / RATE)
            y, a, b = np.zeros(n), 0.0, 0.0
            for i in range(n):
                y[i] = (1 - r) * x[i] + 2 * r * np.cos(2 * np.pi * f / RATE) * a - r * r * b
                a, b = y[i], a
            x = y
        out[k * n : (k + 1) * n] = x * np.sqrt(np.hanning(n))
    noise = np.random.default_rng(0).normal(0, 1e-3, len(t))
    return (out / np.abs(out).max() / 2 + noise).astype("f4")


x = voice()
path = str(distribution("silero-vad").locate_file("silero_vad/data/silero_vad.onnx"))
session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
chunks = [x[i : i + CHUNK] for i in range(0, len(x) - CHUNK + 1, CHUNK)]


def file(context):
    state, before, said = np.zeros((2, 1, 128), "f4"), np.zeros(context, "f4"), []
    for c in chunks:
        feeds = {"input": np.concatenate([before, c])[None], "state": state, "sr": np.array(RATE, "i8")}
        p, state = session.run(None, feeds)
        said.append(p.item())
        before = c[CHUNK - context :]
    return np.array(said)


alone, behind = file(0), file(64)
for name, p in {"chunks of 512": alone, "64 samples before each": behind}.items():
    print(f"{name}: {100 * (p > 0.5).mean():.1f} % above 0.5, most {p.max():.3f}")
sys.exit(not (alone.max() < 0.1 and behind.max() > 0.9))
PY
cd "$d"
"$d/v/bin/python" -P t.py
