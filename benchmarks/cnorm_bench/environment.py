"""The environment variables of the measuring process, and a description of the machine that goes with the figures."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import cnorm
from cnorm.tools.info import processor, versions

__all__ = ["MEMORY", "caches", "child", "settle", "settled_environment", "surroundings"]

# glibc returns large blocks to the system when they are freed, so a contender that returns new arrays would have page
# faults in every call. With these thresholds it keeps them. `fresh_memory` reports the time without this setting.
# Every contender runs on one thread.
MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(4 << 30), "MALLOC_TRIM_THRESHOLD_": str(16 << 30)}
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def settled_environment():
    """That of a measuring process: one thread, an allocator that keeps freed memory, this package's folder."""
    here = str(Path(__file__).parents[1])
    path = [here, *(p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p not in ("", here))]
    return {**os.environ, **THREADS, **MEMORY, "PYTHONPATH": os.pathsep.join(path)}


def settle():
    """Run this script again in `settled_environment` and exit with its code, unless it already runs there."""
    environment = settled_environment()
    if environment != os.environ:
        sys.exit(subprocess.call([sys.executable, *sys.orig_argv[1:]], env=environment))


def child(job, environment, **options):
    # -P: do not import cnorm from the working directory, which may be a source folder without the extension module
    command = [sys.executable, "-P", "-m", "cnorm_bench", json.dumps(job)]
    return subprocess.run(command, env=environment, check=False, **options)


def surroundings():
    """Conditions of a measurement: processor, caches, instruction set, versions, and whether freed memory is kept."""
    return {
        "processor": processor(),
        "caches": caches(),
        "isa": cnorm.active_isa(),
        "versions": {"cnorm": cnorm.__version__, "python": sys.version.split()[0]}
        | versions("numpy", "onnxruntime", "torch", "numba", "ncnn"),
        "memory_kept": platform.libc_ver()[0] == "glibc"
        and all(os.environ.get(name) == value for name, value in MEMORY.items()),
    }


def caches():
    """Sizes of the first processor's data caches in bytes, {"L1": 32768, ...}; empty where the system doesn't tell."""
    sizes = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        except OSError:
            continue
        if kind != "Instruction" and size.endswith("K"):
            sizes[f"L{level}"] = int(size[:-1]) * 1024
    return sizes
