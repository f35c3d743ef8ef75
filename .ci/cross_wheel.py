"""Make the wheel of another platform from one built here: its extension module is compiled again, by zig.

    python -P .ci/cross_wheel.py WHEEL TARGET FOLDER

TARGET is one of zig: aarch64-linux-gnu.2.17, aarch64-linux-musl, x86_64-linux-musl, x86_64-linux-gnu.2.17. zig
(`ziglang` on PyPI) compiles the two files of `make amalgamation` and the Cython module, with the C library of TARGET
and the headers of the running CPython: what extension modules use of them is the same on 64-bit little-endian Linux.
If WHEEL is an abi3 one, so is the new wheel: compiled for CPython's limited API of 3.11, it serves every later version.
"""

import argparse
import base64
import hashlib
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

import numpy

ROOT = Path(__file__).parents[1]
LIMITED = "0x030B0000"


def tag_of_platform(target):
    """The platform tag of a zig target: glibc's version is in it, zig's musl is 1.2."""
    machine, _, libc = target.split("-")
    if libc == "musl":
        return f"musllinux_1_2_{machine}"
    return f"manylinux_{libc.removeprefix('gnu.').replace('.', '_')}_{machine}"


def suffix_of_module(target, abi3):
    """What follows the name of an extension module."""
    triple = re.sub(r"\.[\d.]+$", "", target)
    return ".abi3.so" if abi3 else f".cpython-{sys.version_info[0]}{sys.version_info[1]}-{triple}.so"


def compile_module(target, abi3, folder):
    """The extension module `_core` for `target`, from the two files and _core.pyx."""
    python = [sys.executable, "-P"]
    subprocess.run([*python, ROOT / "src" / "amalgamate.py", folder], check=True)
    module = folder / "_core.c"
    options = ["--fast-fail", "-3", ROOT / "cnorm" / "_core.pyx", "-o", module]
    subprocess.run([*python, "-m", "cython", *options], check=True)
    places = (
        ROOT / "src" / "include",
        ROOT / "src",
        ROOT / "cnorm" / "include",
        numpy.get_include(),
        sysconfig.get_path("include"),
    )
    made = folder / f"_core{suffix_of_module(target, abi3)}"
    zig = [*python, "-m", "ziglang", "cc", "-target", target, "-O2", "-fPIC", "-fvisibility=hidden", "-DNDEBUG", "-w"]
    defines = ["-DCNORM_CORE", "-DNPY_NO_DEPRECATED_API=NPY_2_0_API_VERSION", *([f"-DPy_LIMITED_API={LIMITED}"] * abi3)]
    includes = [f"-I{place}" for place in places]
    subprocess.run(
        [*zig, *defines, *includes, "-shared", "-s", module, folder / "cnorm.c", "-lm", "-o", made], check=True
    )
    if target.endswith("musl"):  # the name that Alpine's linker writes, and auditwheel expects
        needed = f"libc.musl-{target.partition('-')[0]}.so.1"
        subprocess.run(["patchelf", "--replace-needed", "libc.so", needed, made], check=True)
    return made


def write_wheel(source, module, tag, folder):
    """`source` with `module` in the place of its extension module, and its tag and record rewritten."""
    with zipfile.ZipFile(source) as wheel:
        contents = {name: wheel.read(name) for name in wheel.namelist() if not name.endswith("/")}
    [old] = [name for name in contents if re.fullmatch(r"cnorm/_core\..*\.so", name)]
    [info] = [name for name in contents if name.endswith(".dist-info/WHEEL")]
    record = info.replace("WHEEL", "RECORD")
    del contents[old], contents[record]
    contents[f"cnorm/{module.name}"] = module.read_bytes()
    text = re.sub(r"^Tag: .*\n", "", contents[info].decode(), flags=re.M)
    contents[info] = f"{text.rstrip()}\nTag: {tag}\n".encode()
    lines = [f"{name},sha256={digest(data)},{len(data)}" for name, data in contents.items()]
    contents[record] = "\n".join([*lines, f"{record},,", ""]).encode()
    name = "-".join(source.name.split("-")[:2])
    made = folder / f"{name}-{tag}.whl"
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in contents.items():
            wheel.writestr(name, data)
    return made


def digest(data):
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("target")
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    python, abi = given.wheel.name.split("-")[2:4]
    tag = f"{python}-{abi}-{tag_of_platform(given.target)}"
    with tempfile.TemporaryDirectory() as folder:
        module = compile_module(given.target, abi == "abi3", Path(folder))
        made = write_wheel(given.wheel, module, tag, given.folder)
    print(f"{made.name}: {made.stat().st_size} bytes")


if __name__ == "__main__":
    main()
