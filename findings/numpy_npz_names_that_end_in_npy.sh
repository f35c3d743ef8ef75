#!/usr/bin/env bash
# A NumPy archive with arrays "a" and "a.npy" lists both, and gives the first one's values for both names.
# Expected: each name gives the array that was saved under it, or savez refuses the pair.
# Output seen on 28 November 2026 with numpy 2.4.6:
#   names: ['a', 'a.npy'] | saved 1.0 and 2.0 | read 1.0 and 1.0
set -euo pipefail
d=$(mktemp -d)
trap 'rm -rf "$d"' EXIT
python3 -m venv "$d/v"
"$d/v/bin/pip" install -q --disable-pip-version-check numpy==2.4.6
cat > "$d/t.py" <<'PY'
import sys

import numpy as np

np.savez("m.npz", **{"a": np.array([1.0]), "a.npy": np.array([2.0])})
with np.load("m.npz") as found:
    a, b = float(found["a"][0]), float(found["a.npy"][0])
    print(f"names: {found.files} | saved 1.0 and 2.0 | read {a} and {b}")
    sys.exit(not (found.files == ["a", "a.npy"] and (a, b) == (1.0, 1.0)))
PY
cd "$d"
"$d/v/bin/python" -P t.py
