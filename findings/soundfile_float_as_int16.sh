#!/usr/bin/env bash
# soundfile reads a WAV file of floats with dtype="int16" without scaling: a full-scale recording is zeros, without a word. A file of
# 16 or 24 bits, FLAC or Vorbis is scaled. (Its documents say so of files of floats; a front end for Kaldi's features asks for int16.)
# Expected: one call gives the same 16-bit audio whatever the file stores.
# Output seen on 29 November 2026 with soundfile 0.14.0 (libsndfile 1.2.2):
#   a.wav PCM_16, amplitude 0.5: largest int16 16384
#   a.wav PCM_24, amplitude 0.5: largest int16 16384
#   a.flac PCM_16, amplitude 0.5: largest int16 16384
#   a.ogg VORBIS, amplitude 0.5: largest int16 16581
#   a.wav FLOAT, amplitude 0.5: largest int16 0
#   a.wav DOUBLE, amplitude 0.5: largest int16 0
set -euo pipefail
d=$(mktemp -d)
trap 'rm -rf "$d"' EXIT
python3 -m venv "$d/v"
"$d/v/bin/pip" install -q --disable-pip-version-check soundfile==0.14.0 numpy==2.4.6
cat > "$d/t.py" <<'PY'
import sys
import numpy as np
import soundfile

x = np.sin(np.arange(1600) / 5) / 2
largest = {}
for name, kind in (("a.wav", "PCM_16"), ("a.wav", "PCM_24"), ("a.flac", "PCM_16"), ("a.ogg", "VORBIS"), ("a.wav", "FLOAT"), ("a.wav", "DOUBLE")):
    soundfile.write(name, x, 16000, subtype=kind)
    y, rate = soundfile.read(name, dtype="int16")
    largest[name, kind] = int(np.abs(y.astype(int)).max())
    print(f"{name} {kind}, amplitude 0.5: largest int16 {largest[name, kind]}")
floats = [n for (name, kind), n in largest.items() if kind in ("FLOAT", "DOUBLE")]
others = [n for (name, kind), n in largest.items() if kind not in ("FLOAT", "DOUBLE")]
sys.exit(not (floats == [0, 0] and min(others) > 16000))
PY
cd "$d"
"$d/v/bin/python" -P t.py
