#!/usr/bin/env bash
# samplerate's Resampler, fed in blocks with end_of_input=True on the last, leaves out the end: what its filter still holds has no
# room in a result of as many samples as the last block has, and no further call gives it. soxr's stream gives all of it.
# Expected: the blocks of a finished stream are as long as resample() of the whole; up to there they are equal to the bit.
# Output seen on 29 November 2026 with samplerate 0.2.4, soxr 1.1.0:
#   samplerate sinc_best, 48 to 16 kHz: whole 16000, blocks 15857 and 0 by an empty one, equal to there: True
#   samplerate sinc_fastest, 48 to 16 kHz: whole 16000, blocks 15981 and 0 by an empty one, equal to there: True
#   soxr: whole 16000, blocks 16000, equal: True
set -euo pipefail
d=$(mktemp -d)
trap 'rm -rf "$d"' EXIT
python3 -m venv "$d/v"
"$d/v/bin/pip" install -q --disable-pip-version-check samplerate==0.2.4 soxr==1.1.0 numpy==2.4.6
cat > "$d/t.py" <<'PY'
import sys
import numpy as np
import samplerate
import soxr

N = 480
x = np.random.default_rng(0).normal(size=48000).astype("f4") / 10
blocks = [(x[i : i + N], i + N >= len(x)) for i in range(0, len(x), N)]
same = True
for kind in ("sinc_best", "sinc_fastest"):
    whole = samplerate.resample(x, 1 / 3, kind)
    stream = samplerate.Resampler(kind)
    y = np.concatenate([stream.process(b, 1 / 3, end_of_input=end) for b, end in blocks])
    more = len(stream.process(x[:0], 1 / 3, end_of_input=True))
    equal = np.array_equal(y, whole[: len(y)])
    print(f"samplerate {kind}, 48 to 16 kHz: whole {len(whole)}, blocks {len(y)} and {more} by an empty one, equal to there: {equal}")
    same &= len(y) + more < len(whole) and equal
stream = soxr.ResampleStream(48000, 16000, 1, dtype="float32")
y = np.concatenate([stream.resample_chunk(b, last=end) for b, end in blocks])
whole = soxr.resample(x, 48000, 16000)
print(f"soxr: whole {len(whole)}, blocks {len(y)}, equal: {np.array_equal(y, whole)}")
sys.exit(not (same and np.array_equal(y, whole)))
PY
cd "$d"
"$d/v/bin/python" -P t.py
