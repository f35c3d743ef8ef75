"""Allowed imports and includes between layers, and the object code in the editable install's build folder."""

import ast
import json
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import cnorm
from cnorm import _core

ROOT = Path(__file__).parents[2]
EXTRAS = {"click", "rich", "matplotlib", "onnx", "onnxruntime", "onnx_export", "torch", "numba", "ml_dtypes"}
EXTRAS |= {"websockets", "prometheus_client"}


def run(tool, *arguments):
    path = shutil.which(tool)
    assert path, f"{tool} is not installed, and this test proves nothing without it (Debian: apt install binutils)"
    return subprocess.run([path, *map(str, arguments)], check=True, capture_output=True, text=True).stdout


def build_folder():
    folder = ROOT / "build" / f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert folder.is_dir(), f"{folder} is missing: install the project with `pip install --no-build-isolation -e .`"
    return folder


def object_files():
    """Those of the extension and of the C library; the C tests have theirs in tests/."""
    found = sorted({*build_folder().rglob("*.o")} - {*(build_folder() / "tests").rglob("*.o")})
    assert found, f"{build_folder()} has no object files: build the project first"
    return found


def isa_objects():
    """Object files of one instruction set: its name is a word of their path."""
    names = "|".join(["baseline", "avx2", "avx512", "neon"])
    word = re.compile(rf"(?<![a-z0-9])({names})(?![a-z0-9])")
    return {path: match[1] for path in object_files() if (match := word.search(str(path.relative_to(build_folder()))))}


def c_sources():
    found = sorted(path for path in (ROOT / "src").rglob("*") if path.suffix in {".c", ".h", ".inc"})
    assert found
    return found


def python_sources(package):
    return sorted((ROOT / package).rglob("*.py"))


def test_c_library_does_not_include_python():
    for path in c_sources():
        assert not re.search(r"#\s*include\s*[<\"](Python\.h|numpy/)", path.read_text()), path


def test_the_c_library_includes_nothing_but_libc_and_itself():
    ours = {path.name for path in c_sources()}
    allowed = {
        "stddef.h",
        "stdint.h",
        "stdbool.h",
        "stdlib.h",
        "string.h",
        "math.h",
        "float.h",
        "limits.h",
        "assert.h",
    }
    allowed |= {
        "stdatomic.h",
        "stdio.h",
        "cpuid.h",
        "immintrin.h",
        "emmintrin.h",
        "xmmintrin.h",
        "arm_neon.h",
        "fenv.h",
        "sys/auxv.h",
    }
    for path in c_sources():
        if path.name == "cnorm_map.h":  # a header for callers, that the library does not include
            continue
        for name in re.findall(r"^\s*#\s*include\s*[<\"]([^>\"]+)", path.read_text(), re.MULTILINE):
            assert name in allowed or Path(name).name in ours, f"{path} includes {name}"


def flags_of_header(path):
    """Compiler flags for a header of one instruction set; other headers need none."""
    special = {"avx512": ["-march=x86-64-v4"], "avx2": ["-mavx2", "-mf16c", "-mfma"], "generic": ["-U__SSE2__"]}
    return special.get(path.stem, []) if platform.machine() == "x86_64" else []


def test_every_header_compiles_alone():
    """Included first, with nothing before it. An .inl.h is no header: isa.inl.h, or a backend of int8, defines or
    includes what it uses and then includes it, perhaps several times."""
    x86_only = {"avx512.h", "avx2.h", "sse2.h"} if platform.machine() != "x86_64" else set()
    headers = [path for path in c_sources() if path.suffix == ".h" and not path.name.endswith(".inl.h")]
    headers += sorted((ROOT / "cnorm" / "include").glob("*.h"))
    assert len(headers) > 30
    for path in headers:
        if path.name not in x86_only:
            include = ["-I", ROOT / "src" / "include", "-I", ROOT / "src", "-I", sysconfig.get_path("include")]
            include += ["-I", build_folder() / "cnorm" / "include"]  # cnorm_names.h, which the build writes
            options = ["-std=c11", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", *flags_of_header(path)]
            run("cc", *options, *include, "-include", path, "-x", "c", "/dev/null")


def imports_of(path):
    """(module, whether inside a function) for every import of a Python file."""
    found = []

    def visit(node, inside):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.extend((alias.name.split(".")[0], inside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.level == 0:
                found.append((child.module.split(".")[0], inside))
            visit(child, inside or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))

    visit(ast.parse(path.read_text()), False)
    return found


def test_nothing_in_cnorm_imports_the_exporter_but_the_commands_and_load():
    for path in python_sources("cnorm"):
        for module, inside in imports_of(path):
            if module == "onnx_export":
                assert inside, f"{path} imports onnx_export at the top"
                assert "tools" in path.parts or path.name == "loading.py", f"{path} imports onnx_export"
    cython = [path for path in (ROOT / "cnorm").iterdir() if path.suffix in {".pyx", ".pxi", ".pxd"}]
    assert len(cython) > 2
    for path in cython:
        assert "onnx_export" not in path.read_text(), path


def test_nothing_in_the_library_imports_the_tools():
    for path in python_sources("cnorm"):
        if "tools" not in path.parts and path.name != "__main__.py":
            assert "cnorm.tools" not in path.read_text(), path


def test_the_exporter_does_not_import_the_validator():
    front = ROOT / "onnx_export" / "__init__.py"  # which names both, and imports each on first use
    for path in python_sources("onnx_export"):
        if "validation" not in path.parts and path != front:
            assert "onnx_export.validation" not in path.read_text(), path


def test_extras_are_imported_inside_functions_only():
    for path in python_sources("cnorm"):
        for module, inside in imports_of(path):
            # cnorm.torch, which nothing imports, and the subcommands and the server, which the command imports when it
            # runs
            own = (module, path.parent.name) in {("torch", "torch"), ("websockets", "serve")}
            own |= (module, path.name) == ("click", "commands.py")
            assert inside or own or module not in EXTRAS, f"{path} imports {module} at the top"


def test_importing_cnorm_loads_no_extra():
    code = f"import sys, cnorm; print(sorted(set(sys.modules) & {EXTRAS!r}))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_every_isa_has_objects():
    assert set(isa_objects().values()) >= set(cnorm.available_isas())


def test_one_exported_symbol_per_isa_object():
    for path in isa_objects():
        symbols = run("nm", "--defined-only", "--extern-only", path).split("\n")
        symbols = [line.split()[-1] for line in symbols if line]
        assert len(symbols) == 1, f"{path.name} exports {symbols}"


def test_the_extension_exports_only_its_initialiser_and_the_c_library():
    symbols = run("nm", "--dynamic", "--defined-only", "--extern-only", _core.__file__).split("\n")
    names = [line.split()[-1] for line in symbols if line]
    assert "PyInit__core" in names
    assert [name for name in names if not name.startswith(("PyInit__core", "cnorm_"))] == []


# A fused multiply-add gives other bits than a product and a sum; reciprocal estimates differ between vendors.
FORBIDDEN = (
    r"v?fn?m(add|sub|addsub|subadd)\w*|v4fn?madd\w*|v?(rcp|rsqrt)(14|28)?[ps][sdh]|vp?dpbf16ps|vexp2p[sd]"
    if platform.machine() == "x86_64"
    else r"fmla|fmls|fn?madd|fn?msub|frecp[esx]|frsqrt[es]|bfdot|bfmla\w*|bfmmla"
)


# What fma_f32 is compiled to: of float32, never of float64.
FMA_F32 = (
    r"v?fn?m(add|sub)(132|213|231)[ps]s\b"
    if platform.machine() == "x86_64"
    else r"fml[as]\s+v\d+\.[24]s,|fn?m(add|sub)\s+s\d+,"
)


@pytest.mark.parametrize("what", ["objects", "extension"])
def test_no_fused_or_approximate_instruction(what):
    """But for those of fma_f32, in the objects of instruction sets that have them."""
    paths = object_files() if what == "objects" else [Path(_core.__file__)]
    for path in paths:
        fused = what == "extension" or isa_objects().get(path, "baseline") != "baseline"
        allowed = rf"(?!{FMA_F32})" if fused or platform.machine() != "x86_64" else ""
        mnemonic = re.compile(rf"^\s*[0-9a-f]+:\s+{allowed}({FORBIDDEN})\b", re.MULTILINE)
        listing = run("objdump", "--disassemble", "--no-show-raw-insn", path)
        assert mnemonic.search(listing) is None, f"{path.name}: {mnemonic.search(listing)[1]}"


def test_fma_stands_where_the_contract_names_it():
    """The functions outside src/simd/ that call fma_f32 are those that docs/numerics.md lists."""
    section = (ROOT / "docs" / "numerics.md").read_text().split("\n## Where fma stands\n")[1].split("\n## ")[0]
    listed = set(re.findall(r"^\| `(\w+)` \| `([\w.]+)` \|", section, re.MULTILINE))
    calling = set()
    for path in c_sources():
        if path.parent.name != "simd":
            text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
            defined = r"^(?:INLINE|EDGE|RARE|static)\b[^;{=()]*?(?:\b[FT]N\((\w+)\)|(\w+))\("
            for found in re.finditer(r"\bfma_f32\(", text):
                name = [a or b for a, b in re.findall(defined, text[: found.start()], re.MULTILINE)][-1]
                calling.add((name, path.name))
    assert calling == listed


def without_fma(folder):
    """A header that makes fma_f32 outside src/simd/ a product and a sum: what is still fused is contracted."""
    header = folder / "without_fma.h"
    header.write_text('#include "simd/storage.h"\n#define fma_f32(a, b, c) ((a) * (b) + (c))\n')
    return header


def test_fused_instruction_search_detects_a_fused_instruction(tmp_path):
    """Control for the search above, which would also pass if its pattern or objdump's format were wrong."""
    source = tmp_path / "fused.c"
    source.write_text("float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }\n")
    flags = ["-mfma"] if platform.machine() == "x86_64" else []
    run("cc", "-O2", *flags, "-c", source, "-o", tmp_path / "fused.o")
    listing = run("objdump", "--disassemble", "--no-show-raw-insn", tmp_path / "fused.o")
    assert re.search(rf"^\s*[0-9a-f]+:\s+({FORBIDDEN})\b", listing, re.MULTILINE)


@pytest.mark.exhaustive
@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64-v4 is a level of x86-64")
@pytest.mark.parametrize("compiler", ["cc", *(["clang"] if shutil.which("clang") else [])])
def test_no_fused_instruction_with_an_embedders_flags(tmp_path, compiler):
    """GNU dialects of C contract a * b + c by default; none of our own flags is given here. Without calls of fma."""
    flags = ["-std=gnu17", "-O2", "-march=x86-64-v4", "-w", "-I", ROOT / "src" / "include", "-I", ROOT / "src"]
    trial = ["-include", without_fma(tmp_path)]
    mnemonic = re.compile(rf"^\s+({FORBIDDEN})\b", re.MULTILINE)
    sources = [path for path in c_sources() if path.suffix == ".c" and not path.stem.startswith("isa_")]
    sources = [path for path in sources if path.parent.name != "int8"]  # integers, each file with flags of its own
    for path in [*sources, ROOT / "src" / "kernels" / "isa_avx512.c"]:
        listing = run(compiler, *flags, *(trial if path.stem.startswith("isa_") else []), "-S", path, "-o", "-")
        found = mnemonic.search(listing)
        assert found is None, f"{path.name} as compiled by {compiler}: {found[1]}"
    contracted = tmp_path / "contracted.c"
    contracted.write_text("float contracted(float a, float b, float c) { return a * b + c; }\n")
    assert mnemonic.search(run(compiler, *flags, "-S", contracted, "-o", "-")), f"{compiler} does not contract"


@pytest.mark.exhaustive
@pytest.mark.skipif(platform.machine() != "x86_64", reason="AVX2 and FMA are features of x86-64")
@pytest.mark.skipif(not shutil.which("clang"), reason="NOT RUN: clang is not installed")
@pytest.mark.parametrize(
    ("flag", "exact"), [("-std=c11", 1), ("-ffp-contract=fast", 0), ("-funsafe-math-optimizations", 0)]
)
def test_code_that_clang_fused_or_reordered_is_not_used(tmp_path, flag, exact):
    """clang lets these flags override the pragmas: the check that dispatch.c makes must see it."""
    program = tmp_path / "exact.c"
    program.write_text('#include "kernels/kernels.h"\nint main(void) { return cnorm_kernels_avx2.exact(); }\n')
    includes = ["-I", ROOT / "src" / "include", "-I", ROOT / "src"]
    stub = tmp_path / "stub.c"
    called = "cnorm_int8_backend_of", "cnorm_cpu_is_amd", "cnorm_cpu_broadcasts_in_fma"  # by other kernels
    stub.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in called))
    sources, made = [ROOT / "src" / "kernels" / "isa_avx2.c", program, stub], tmp_path / "exact"
    run("clang", "-O1", "-w", flag, "-mavx2", "-mf16c", "-mfma", *includes, *sources, "-lm", "-o", made)
    assert subprocess.run([made]).returncode == exact


@pytest.mark.parametrize("flag", ["-ffast-math", "-funsafe-math-optimizations", "-ffinite-math-only"])
def test_gcc_refuses_flags_that_change_results(flag, tmp_path):
    includes = ["-I", ROOT / "src" / "include", "-I", ROOT / "src"]
    command = ["gcc", flag, *includes, "-E", ROOT / "src" / "kernels" / "isa_baseline.c", "-o", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert "cnorm's results are a contract" in done.stderr


def test_no_fast_math_no_lto_anywhere_in_the_build():
    commands = (build_folder() / "build.ninja").read_text()
    for flag in (
        "-ffast-math",
        "-Ofast",
        "-funsafe-math-optimizations",
        "-fassociative-math",
        "-flto",
        "-march=native",
    ):
        assert flag not in commands, flag


def test_floating_point_contraction_is_off_in_every_c_file():
    compiled = json.loads((build_folder() / "compile_commands.json").read_text())
    ours = [entry for entry in compiled if "src/" in entry["file"]]
    assert ours
    for entry in ours:
        assert "-ffp-contract=off" in entry["command"], entry["file"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("python", ["true", "false"])
def test_the_c_library_is_installed_for_c_alone(tmp_path, python):
    """A wheel has it inside the extension. Nothing is compiled here."""
    meson = [sys.executable, "-m", "mesonbuild.mesonmain"]
    setup = [*meson, "setup", f"-Dpython={python}", f"--prefix={tmp_path}", "-Dlibdir=lib", tmp_path / "build", ROOT]
    subprocess.run(setup, check=True, capture_output=True)
    asked = subprocess.run([*meson, "introspect", "--installed", tmp_path / "build"], check=True, capture_output=True)
    installed = {Path(place).relative_to(tmp_path).as_posix() for place in json.loads(asked.stdout).values()}
    for_c = {
        "lib/libcnorm.a",
        "lib/pkgconfig/cnorm.pc",
        *(f"include/{path.name}" for path in ROOT.glob("src/include/*")),
    }
    if python == "true":
        assert not installed & for_c
        return
    assert installed == for_c
    description = (tmp_path / "build" / "meson-private" / "cnorm.pc").read_text()
    # a static library needs libm at once
    assert "Libs: -L${libdir} -lcnorm -lm\nCflags: -I${includedir}\n" in description


# libc and libm functions that neither allocate nor lock nor call the system
HARMLESS = {
    "memcpy",
    "memset",
    "memmove",
    "memcmp",
    "strcmp",
    "fabs",
    "fabsf",
    "sqrt",
    "ilogb",
    "ldexp",
    "frexp",
    "scalbn",
    "floor",
}
AT_FIRST_USE = {"getenv"}  # CNORM_ISA


def test_library_calls_no_allocating_or_locking_function():
    """No function of the C library can allocate, because none calls anything that could."""
    objects = sorted((build_folder() / "src").rglob("*.o"))
    assert objects
    listing = subprocess.run(["nm", "--undefined-only", *objects], check=True, capture_output=True, text=True).stdout
    called = {line.split()[-1] for line in listing.splitlines() if line.strip().startswith("U ")}
    outside = {name for name in called if not name.startswith(("cnorm_", "_GLOBAL_OFFSET_TABLE_", "__stack_chk"))}
    assert outside <= HARMLESS | AT_FIRST_USE
    assert "memcpy" in outside


def siblings_of(path, modules):
    """The modules of `modules` that a file imports, also inside functions and for types only."""

    def visit(node):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (name.name for name in child.names)
            elif isinstance(child, ast.ImportFrom):
                for name in child.names:
                    whole = f"{child.module}.{name.name}"
                    yield whole if whole in modules else child.module
            else:
                yield from visit(child)

    return {name for name in visit(ast.parse(path.read_text())) if name in modules}


@pytest.mark.parametrize("package", ["cnorm", "onnx_export"])
def test_no_circle_of_imports(package):
    """Modules without imports among those that are left go, until none is left; in a circle none ever goes."""
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in python_sources(package)
    }
    modules[f"{package}._core"] = None
    left = {name: siblings_of(path, modules) - {name} if path else set() for name, path in modules.items()}
    while gone := [name for name, needed in left.items() if not needed & left.keys()]:
        for name in gone:
            del left[name]
    assert not left
