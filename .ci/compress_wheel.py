"""Compress the members of wheels again, by zopfli: the same contents, 3 % fewer bytes to download.

    python -P .ci/compress_wheel.py WHEEL...

It takes 12 seconds a wheel; `zopflipy` on PyPI has the compressor.
"""

import sys
import zipfile
from pathlib import Path

import zopfli


def compress(wheel: Path) -> None:
    """Write a wheel again in its place; it is complete at every moment."""
    made = wheel.with_suffix(".zopfli")
    with zipfile.ZipFile(wheel) as old, zopfli.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as new:
        for member in old.infolist():
            new.writestr(member, old.read(member))
    made.replace(wheel)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        compress(Path(name))
