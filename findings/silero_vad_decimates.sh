#!/usr/bin/env bash
# Silero VAD takes audio of 48 kHz, but keeps every third sample of it without a low-pass filter: what lies above 8 kHz is
# folded into the voice's band. A sound without anything below 9 kHz is a voice for it.
# Expected: a package that accepts multiples of 16 kHz resamples them, so that sound beyond the band stays out.
# Output seen on 28 November 2026 with silero-vad 6.2.3, torch 2.13.0, onnxruntime 1.32.0:
#   48 kHz, nothing below 9 kHz: 24.0 % of the chunks above 0.5
#   the same, resampled: 0.0 %
set -euo pipefail
d=$(mktemp -d)
trap 'rm -rf "$d"' EXIT
python3 -m venv "$d/v"
pip=("$d/v/bin/pip" install -q --disable-pip-version-check)
"${pip[@]}" torch==2.13.0 numpy==2.4.6 onnxruntime==1.32.0 packaging==26.2
"${pip[@]}" --no-deps silero-vad==6.2.3
cat > "$d/t.py" <<'PY'
import sys
from importlib.metadata import distribution
import numpy as np
import torch
from silero_vad.utils_vad import OnnxWrapper

RATE = 16000


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


# The voice at 48 kHz with zeros between its samples holds its spectrum three times; the lowest copy is taken away.
x = voice()
high = np.zeros(3 * len(x))
high[::3] = 1.5 * x
spectrum = np.fft.rfft(high)
frequencies = np.fft.rfftfreq(len(high), 1 / (3 * RATE))
spectrum[frequencies < 9000] = 0
high = np.fft.irfft(spectrum, len(high)).astype("f4")
low = np.fft.irfft(spectrum[: len(x) // 2 + 1], len(x)).astype("f4") / 3  # resampled to 16 kHz without folding

path = str(distribution("silero-vad").locate_file("silero_vad/data/silero_vad.onnx"))
wrapper = OnnxWrapper(path, force_onnx_cpu=True)


def share(audio, rate):
    wrapper.reset_states()
    n = 512 * rate // RATE
    said = [wrapper(torch.from_numpy(audio[i : i + n]), rate).item() for i in range(0, len(audio) - n + 1, n)]
    return 100 * np.mean(np.array(said) > 0.5)


folded, resampled = share(high, 3 * RATE), share(low, RATE)
print(f"48 kHz, nothing below 9 kHz: {folded:.1f} % of the chunks above 0.5")
print(f"the same, resampled: {resampled:.1f} %")
sys.exit(not (folded > 5 and resampled == 0))
PY
cd "$d"
"$d/v/bin/python" -P t.py
