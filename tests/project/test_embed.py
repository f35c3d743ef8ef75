"""The examples of examples/embed and of the Rust crate, built outside the tree: the demo's scores, and Python's hash.

They are linked with the objects of the editable build. `make two-files` and CMakeLists.txt compile cnorm.c.
"""

import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

import cnorm

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with cnorm.h, cnorm.hpp, libcnorm.a, the packed demo and recorded frames."""
    folder = tmp_path_factory.mktemp("embed")
    subprocess.run([sys.executable, "-P", ROOT / "src" / "amalgamate.py", folder], check=True)
    shutil.copy(ROOT / "src" / "include" / "cnorm.hpp", folder)
    build = ROOT / "build" / f"cp{sys.version_info.major}{sys.version_info.minor}" / "src"
    objects = sorted(build.rglob("*.o"))
    assert objects, f"{build} has no objects: build the project first"
    subprocess.run(["ar", "rcs", folder / "libcnorm.a", *objects], check=True)
    cnorm.demo_model().save_packed(folder / "demo.cnorm")
    frames().tofile(folder / "frames.f32")
    return folder


def frames():
    with resources.as_file(resources.files("cnorm") / "data" / "japanese_vowels_test.npz") as path:
        return np.load(path)["frames"][:200].astype("<f4")


def expected():
    """What the examples print."""
    scores = cnorm.demo_model().stream().process(frames())
    hash_ = 0xCBF29CE484222325  # FNV-1a
    for byte in scores.astype("<f4").tobytes():
        hash_ = (hash_ ^ byte) * 0x100000001B3 % 2**64
    return "\n".join(" ".join(f"{v:.4f}" for v in row) for row in scores) + f"\nhash {hash_:016x}\n"


def check_scores(program, folder):
    with open(folder / "frames.f32", "rb") as file:
        done = subprocess.run([program, folder / "demo.cnorm"], stdin=file, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == expected()
    with open(folder / "frames.f32", "rb") as file:
        refused = subprocess.run([program, folder / "frames.f32"], stdin=file, capture_output=True, text=True)
    assert refused.returncode != 0
    assert "not a packed model" in refused.stderr


@pytest.mark.parametrize("command", [["cc", "scores.c"], ["c++", "-std=c++17", "scores.cpp"]], ids=["C", "C++"])
def test_example_has_the_bits_of_python(command, folder):
    shutil.copy(ROOT / "examples" / "embed" / command[-1], folder)
    program = folder / f"program_{command[0]}"
    strict = ["-O2", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([*command, *strict, "libcnorm.a", "-lm", "-o", program], cwd=folder, check=True)
    check_scores(program, folder)


@pytest.mark.skipif(not shutil.which("cargo"), reason="needs cargo")
def test_rust_example_has_the_bits_of_python(folder, monkeypatch):
    shutil.copytree(ROOT / "rust" / "cnorm", folder / "crate")
    monkeypatch.setenv("CNORM_LIB_DIR", str(folder))
    monkeypatch.setenv("CARGO_TARGET_DIR", str(folder / "target"))
    subprocess.run(["cargo", "build", "--offline", "--quiet", "--example", "scores"], cwd=folder / "crate", check=True)
    check_scores(folder / "target" / "debug" / "examples" / "scores", folder)
