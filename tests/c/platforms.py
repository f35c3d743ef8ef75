"""Compile the two files with zig for each platform, look at the instructions, and run the C tests there.

    python -P tests/c/platforms.py FOLDER [--quick] [PLATFORM ...]

FOLDER has cnorm.c and cnorm.h (`make amalgamation`). --quick is the selection of .ci/run: no platform whose C library
zig would have to compile from source (40 to 90 s of CPU time each), eight golden files and one C test.
A warning is an error. A platform whose runner is not installed is compiled only, and named at the end.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
TESTS = [f"test_{name}" for name in ("model", "network", "train", "capi", "fma", "int8", "cells", "kernels", "threads")]
SLOW = {"test_cells", "test_kernels", "test_threads"}  # minutes on an emulated processor
QUICK_HASHES = ["layer_norm", "lstm", "lstm_int8_weights", "to_float"]  # eight golden files
QUICK_TESTS = ["test_model"]
# Fused instructions of float64 and approximate ones. Contraction in float32, where fma is used, shows in the hashes.
X86 = r"v?fn?m(add|sub|addsub|subadd)\d*[ps]d|v?(rcp|rsqrt)(14|28)?[ps][sdh]"
ARM = r"fn?m(add|sub)\s+[dh]|fml[as]\S*\s+v\d+\.[248][dh]|fml[as]l2?|frecp[esx]|frsqrt[es]"
RISCV = r"fn?m(add|sub)\.[hd]|vfn?m(acc|sac|add|sub)\.v[fv]|vf(rec7|rsqrt7)\.v"
POWER = r"x[sv]n?m(add|sub)[am]dp|fn?m(add|sub)|x[sv]r(e|sqrte)[sd]p|fres?|frsqrtes?|vr(e|sqrte)fp"
S390 = r"m[as]dbr?|[vw]fn?m[as]db"
ALTIVEC = "-Wno-deprecated-altivec-src-compat"  # comparisons of vectors, which cnorm uses as GCC defines them
WINE = shutil.which("wine64") or "/usr/lib/wine/wine64"
WASI = ("-msimd128", "-D_WASI_EMULATED_MMAN", "-lwasi-emulated-mman")
WASM = r"\S*relaxed\S*"
AVXVNNI = ("test_int8",)  # needs a backend of meson.build, where AVX-512 stands in for AVX-VNNI
COMPILED = "compiled only, no fused float64 instruction"


class Platform(NamedTuple):
    target: str  # of zig
    runner: list[str] | None  # the command before a program; None: nothing here runs it
    forbidden: str  # instructions, as llvm-objdump prints them
    flags: tuple[str, ...] = ()
    without: tuple[str, ...] = ()  # tests that need what the platform lacks
    emulated: bool = False
    quick: str = "no"  # --quick: "no", "compile" or "run"


def qemu(name):
    """The command before a program of Debian's glibc for `name`."""
    return [f"qemu-{name.replace('powerpc', 'ppc')}", "-L", f"/usr/{name}-linux-gnu"]


PLATFORMS = [
    Platform("x86_64-linux-musl", [], X86, ("-static",), AVXVNNI),
    Platform("aarch64-linux-musl", ["qemu-aarch64"], ARM, ("-static",), emulated=True),
    Platform("aarch64-linux-gnu", qemu("aarch64"), ARM, emulated=True, quick="run"),
    Platform("riscv64-linux-gnu", qemu("riscv64"), RISCV, emulated=True, quick="run"),
    Platform("powerpc64le-linux-gnu", qemu("powerpc64le"), POWER, (ALTIVEC,), emulated=True, quick="run"),
    Platform("s390x-linux-gnu", qemu("s390x"), S390, emulated=True, quick="run"),
    Platform(
        "wasm32-wasi", ["node", "--no-warnings", f"{FOLDER}/wasi.mjs"], WASM, WASI, ("test_threads",), quick="run"
    ),
    Platform("x86_64-windows-gnu", [WINE], X86, (), ("test_threads", *AVXVNNI), quick="compile"),
    Platform("x86_64-macos", None, X86),
    Platform("aarch64-macos", None, ARM, quick="compile"),
    Platform("aarch64-windows-gnu", None, ARM, quick="compile"),
]


def zig(platform, *arguments):
    """Compile or link; a warning is an error."""
    command = [sys.executable, "-m", "ziglang", "cc", "-target", platform.target, *platform.flags, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or done.stderr:
        raise RuntimeError(done.stderr[:2000] or f"zig cc: exit code {done.returncode}")


def compile_library(platform, folder):
    """The object of the two files; no warning, no forbidden instruction."""
    made = folder / platform.target / "cnorm.o"
    made.parent.mkdir(exist_ok=True)
    quiet = [flag for flag in platform.flags if flag != "-static" and not flag.startswith("-l")]  # for the linker
    zig(platform._replace(flags=tuple(quiet)), "-O2", "-c", folder / "cnorm.c", "-o", made)
    command = ["llvm-objdump", "-d", "--no-show-raw-insn", made]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(rf"^.*:\s+({platform.forbidden})(\s.*)?$", listing, re.MULTILINE)
    if found:
        raise RuntimeError(f"a forbidden instruction: {found[0].strip()}")
    if listing.count("\n") < 10000:
        raise RuntimeError("llvm-objdump shows no code")
    return made


def run(platform, test, library, *arguments):
    """Link and run a test; its output."""
    program = library.with_name(f"{test}.exe")
    source = ROOT / "tests" / "c" / f"{test}.c"
    includes = [f"-I{ROOT / 'src' / 'include'}", f"-I{ROOT / 'src'}"]
    zig(platform, "-O2", "-w", "-D_GNU_SOURCE", *includes, source, library, "-lm", "-o", program)
    done = subprocess.run([*platform.runner, program, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{test}: exit code {done.returncode}\n{(done.stdout + done.stderr)[:1500]}")
    return done.stdout


def missing(platform):
    """What of the platform's runner is not installed, if anything."""
    program, *arguments = platform.runner or ["true"]
    absent = [path for path in arguments if path.startswith("/") and not Path(path).exists()]
    return absent[0] if absent else None if shutil.which(program) else program


def examine(platform, folder, quick):
    """What was found, as a row of the table."""
    library = compile_library(platform, folder)
    if platform.runner is None or missing(platform) or (quick and platform.quick != "run"):
        return COMPILED
    output = run(platform, "golden", library, str(ROOT / "tests" / "golden"), *(QUICK_HASHES if quick else []))
    tests = QUICK_TESTS if quick else [test for test in TESTS if test not in platform.without]
    tests = [test for test in tests if not (platform.emulated and test in SLOW)]
    for test in tests:
        run(platform, test, library)
    return f"{output.strip()}, C tests: {', '.join(test.removeprefix('test_') for test in tests)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("platforms", nargs="*")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    unknown = set(given.platforms) - {platform.target for platform in PLATFORMS}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if not shutil.which("llvm-objdump"):
        parser.error("llvm-objdump is not installed (Debian: llvm)")
    wanted = [platform for platform in PLATFORMS if not given.platforms or platform.target in given.platforms]
    if given.quick:
        wanted = [platform for platform in wanted if platform.quick != "no"]

    def row(platform):
        begin = time.monotonic()
        try:
            result = examine(platform, given.folder.resolve(), given.quick)
        except RuntimeError as error:
            result = f"FAILED: {error}"
        print(f"{platform.target}: {result} ({time.monotonic() - begin:.0f} s)", flush=True)
        return result

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(row, wanted))
    for platform in wanted:
        if missing(platform) and not (given.quick and platform.quick != "run"):
            print(f"!!! NOT RUN: {platform.target}, because {missing(platform)} is not installed", file=sys.stderr)
    sys.exit(any(result.startswith("FAILED") for result in results))


if __name__ == "__main__":
    main()
