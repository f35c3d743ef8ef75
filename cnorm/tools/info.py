"""``cnorm info``: versions, processor and instruction sets; the benchmarks, where there are any."""

import platform
import sys
from importlib import import_module, metadata, util
from pathlib import Path
from types import ModuleType

import cnorm


def processor() -> str:
    """The processor's model name from /proc/cpuinfo; elsewhere as `platform` has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model name"))]
    return names[0] if names else platform.processor() or platform.machine()


def versions(*packages: str) -> dict[str, str]:
    """Installed versions; a package that is absent is left out."""
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def of_checkout(name: str) -> ModuleType | None:
    """A module of the package `cnorm_bench`, which a checkout has and a wheel has not."""
    folder = str(Path(cnorm.__file__).parents[1] / "benchmarks")
    if folder not in sys.path:
        sys.path.append(folder)
    return import_module(f"cnorm_bench.{name}") if util.find_spec("cnorm_bench") else None


def show() -> None:
    """Print versions, processor and instruction sets."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None)
    table.add_row("cnorm", cnorm.__version__)
    table.add_row("processor", processor())
    table.add_row("instruction sets", ", ".join(cnorm.available_isas()))
    table.add_row("active", f"{cnorm.active_isa()}  (CNORM_ISA or cnorm.use_isa chooses)")
    table.add_row("Python", platform.python_version())
    for package, version in versions("numpy", "safetensors", "onnx", "onnxruntime", "torch", "ml_dtypes").items():
        table.add_row(package, version)
    Console().print(table)
