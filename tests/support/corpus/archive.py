"""Archives of exported files: written by the make_ scripts, read by tests/validator/test_corpus.py."""

import io
import lzma
import tarfile
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent


def write(exporter, files):
    """Write EXPORTER.tar.xz from pairs of name and bytes; the same files give the same bytes."""
    target, plain = FOLDER / f"{exporter}.tar.xz", io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in files:
            entry = tarfile.TarInfo(name)  # of 1970, owned by nobody
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    target.write_bytes(lzma.compress(plain.getvalue(), preset=9 | lzma.PRESET_EXTREME))
    read.cache_clear()
    print(f"{target.name}: {len(read(exporter))} files, {target.stat().st_size} bytes")


@cache
def read(exporter):
    """The files of an archive: bytes by name."""
    with tarfile.open(FOLDER / f"{exporter}.tar.xz") as archive:
        return {entry.name: archive.extractfile(entry).read() for entry in archive}
