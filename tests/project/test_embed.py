"""The examples of examples/embed and of the Rust crate, built outside the tree in each way: Python's scores and hash.

cnorm.c is compiled once, by tests/support/cc_once, and kept in build/embed. `make two-files` compiles it with each
compiler.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from models import frame_layers, streamed_layers
from recordings import recordings

import cnorm
from cnorm import capi

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "embed"
PYTHON = [sys.executable, "-S", "-P"]  # -S hides the editable installation, which is a .pth file
NEEDS = "Debian: apt install cmake pkg-config cargo; pip install numba"


def needs(tool):
    return pytest.mark.skipif(not shutil.which(tool), reason=f"NOT RUN: {tool} is not installed ({NEEDS})")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with recorded frames, the packed demo and models with each kind of layer."""
    folder = tmp_path_factory.mktemp("data")
    for name, model in models().items():
        model.save_packed(folder / f"{name}.cnorm")
    frames().tofile(folder / "frames.f32")
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The environment of the builds: CC compiles cnorm.c once, and Python finds an installed cnorm."""
    folder = tmp_path_factory.mktemp("two_files")
    run([sys.executable, "-P", ROOT / "src" / "amalgamate.py", folder])
    compiler = run(["cc", "--version"]).encode()
    content = b"".join((folder / name).read_bytes() for name in ("cnorm.c", "cnorm.h"))
    kept = ROOT / "build" / "embed"
    kept.mkdir(parents=True, exist_ok=True)
    here = Path(sys.executable).parent
    return os.environ | {
        "CC": str(ROOT / "tests" / "support" / "cc_once"),
        "CNORM_CC": shutil.which("cc"),
        "CNORM_OBJECT": str(kept / f"{hashlib.sha256(compiler + content).hexdigest()[:16]}.o"),
        "PATH": f"{here}{os.pathsep}{os.environ['PATH']}",
        "TWO_FILES": str(folder),
    }


@pytest.fixture(scope="module")
def prefix(tmp_path_factory, environment):
    """The C library, installed by CMake."""
    build, prefix = tmp_path_factory.mktemp("cmake"), tmp_path_factory.mktemp("prefix")
    run(
        ["cmake", "-S", ROOT, "-B", build, f"-DCMAKE_INSTALL_PREFIX={prefix}", "-DCMAKE_INSTALL_LIBDIR=lib"],
        env=environment,
    )
    run(["cmake", "--build", build, "--target", "install"], env=environment)
    moved = prefix.with_name("moved")
    prefix.rename(moved)  # neither package file may hold the prefix
    return moved


@pytest.fixture(scope="module")
def installed(tmp_path_factory, environment):
    """`environment` with the package as a wheel installs it, from the editable build."""
    folder = tmp_path_factory.mktemp("installed")
    build = ROOT / "build" / f"cp{sys.version_info.major}{sys.version_info.minor}"
    meson = [sys.executable, "-P", "-m", "mesonbuild.mesonmain", "install", "-C", build, "--no-rebuild", "--quiet"]
    run([*meson, "--destdir", folder], env=environment)
    [package] = folder.rglob("cnorm/__init__.py")
    others = [path for path in sys.path if "site-packages" in path]
    return environment | {"PYTHONPATH": os.pathsep.join([str(package.parents[1]), *others])}


def run(command, **keywords):
    done = subprocess.run(command, capture_output=True, text=True, **keywords)
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def frames():
    return np.concatenate(recordings()[0])[:175].astype("<f4")  # whole frames of 12, 5 and 21 numbers


def models():
    rng = np.random.default_rng(7)
    every_layer = cnorm.Model(streamed_layers(rng), ("scaled", "last"))
    of_positions = cnorm.Model(frame_layers(rng))
    return {
        "demo": cnorm.demo_model(),
        "layers": every_layer,
        "layers_int8": every_layer.with_weights("int8", smallest=1),
        "positions": of_positions,
        "positions_int8": of_positions.with_weights("int8", smallest=1),
    }


def expected(model):
    """What the examples print for the frames, cut into those of the model."""
    numbers, size = frames().ravel(), model.input_size
    scores = model.stream().process(numbers[: len(numbers) // size * size].reshape(-1, size))
    hash_ = 0xCBF29CE484222325  # FNV-1a
    for byte in scores.astype("<f4").tobytes():
        hash_ = (hash_ ^ byte) * 0x100000001B3 % 2**64
    return "\n".join(" ".join(f"{v:.4f}" for v in row) for row in scores) + f"\nhash {hash_:016x}\n"


def check_scores(command, data, **keywords):
    """The command streams the frames with Python's hash, and refuses what is not a model."""
    command = command if isinstance(command, list) else [command]
    for name, model in models().items():
        with open(data / "frames.f32", "rb") as file:
            assert run([*command, data / f"{name}.cnorm"], stdin=file, **keywords) == expected(model), name
    with open(data / "frames.f32", "rb") as file:
        refused = subprocess.run(
            [*command, data / "frames.f32"], stdin=file, capture_output=True, text=True, **keywords
        )
    assert refused.returncode != 0
    assert "not a packed model" in refused.stderr


# ---- from source -----------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_two_files(environment, data, tmp_path):
    for source in (EXAMPLES / "scores.c", *Path(environment["TWO_FILES"]).glob("cnorm.[ch]")):
        shutil.copy(source, tmp_path)
    command = [environment["CC"], "-O2", "-Wall", "-Wextra", "-Werror", "scores.c", "cnorm.c", "-lm", "-o", "scores"]
    run(command, cwd=tmp_path, env=environment)
    check_scores(tmp_path / "scores", data)


CONSUMER = """\
cmake_minimum_required(VERSION 3.16)
project(consumer LANGUAGES {language})
{find}
add_executable(scores {source})
target_link_libraries(scores PRIVATE cnorm::cnorm)
"""


def build_by_cmake(tmp_path, environment, find, source, *options):
    """The program that a CMake project outside the tree builds, which finds cnorm by the lines `find`."""
    shutil.copy(EXAMPLES / source, tmp_path)
    language = "CXX" if source.endswith("cpp") else "C"
    (tmp_path / "CMakeLists.txt").write_text(CONSUMER.format(find=find, source=source, language=language))
    run(["cmake", "-S", tmp_path, "-B", tmp_path / "build", *options], env=environment)
    run(["cmake", "--build", tmp_path / "build"], env=environment)
    return tmp_path / "build" / "scores"


@pytest.mark.exhaustive
@needs("cmake")
@pytest.mark.parametrize("source", ["scores.c", "scores.cpp"])
def test_find_package(environment, prefix, data, tmp_path, source):
    find = "find_package(cnorm 0.1 REQUIRED)"
    check_scores(build_by_cmake(tmp_path, environment, find, source, f"-DCMAKE_PREFIX_PATH={prefix}"), data)


@pytest.mark.exhaustive
@needs("cmake")
def test_fetch_content(environment, data, tmp_path):
    """The lines of the manual, with this folder in place of the repository."""
    text = (ROOT / "docs" / "embedding.md").read_text()
    find = re.search(r"include\(FetchContent\)\n.*?FetchContent_MakeAvailable\(cnorm\)\n", text, re.S)[0]
    check_scores(
        build_by_cmake(tmp_path, environment, find, "scores.c", f"-DFETCHCONTENT_SOURCE_DIR_CNORM={ROOT}"), data
    )


@pytest.mark.exhaustive
@needs("cmake")
@needs("pkg-config")
def test_pkg_config(environment, prefix, data, tmp_path):
    environment = environment | {"PKG_CONFIG_PATH": str(prefix / "lib" / "pkgconfig")}
    flags = run(["pkg-config", "--cflags", "--libs", "cnorm"], env=environment).split()
    run(["cc", "-O2", EXAMPLES / "scores.c", *flags, "-o", tmp_path / "scores"], env=environment)
    check_scores(tmp_path / "scores", data)


@pytest.mark.exhaustive(one_in=2)
@needs("cmake")
@pytest.mark.parametrize("libdir", ["lib/x86_64-linux-gnu", "/elsewhere/lib"])
def test_pkg_config_finds_other_library_folders(environment, tmp_path, libdir):
    """Debian's, and an absolute one: the flags of cnorm.pc where it would be installed."""
    prefix = ["-DCMAKE_INSTALL_PREFIX=/opt/cnorm", f"-DCMAKE_INSTALL_LIBDIR={libdir}"]
    run(["cmake", "-S", ROOT, "-B", tmp_path, *prefix], env=environment)
    installed = Path("/opt/cnorm", libdir, "pkgconfig")
    text = (tmp_path / "cnorm.pc").read_text().replace("${pcfiledir}", str(installed))
    folders = {option: os.path.normpath(path) for option, path in re.findall(r"(-[IL]|prefix=)(\S+)", text)}
    assert folders == {"prefix=": "/opt/cnorm", "-I": "/opt/cnorm/include", "-L": str(installed.parent)}


@pytest.mark.exhaustive
@needs("cargo")
def test_cargo(environment, data, tmp_path):
    """The crate alone, which compiles cnorm.c of CNORM_SOURCE: its example, and the program of the manual."""
    shutil.copytree(ROOT / "rust" / "cnorm", tmp_path / "crate", ignore=shutil.ignore_patterns("target", "Cargo.lock"))
    environment = environment | {"CARGO_TARGET_DIR": str(tmp_path / "target"), "CNORM_SOURCE": environment["TWO_FILES"]}
    [manual] = re.findall(r"```rust\n(.*?)```", (ROOT / "docs" / "embedding.md").read_text(), re.S)
    main = f"fn main() -> Result<(), Box<dyn std::error::Error>> {{\n{manual}Ok(())\n}}\n"
    (tmp_path / "crate" / "examples" / "manual.rs").write_text(main)
    run(["cargo", "build", "--offline", "--quiet", "--examples"], cwd=tmp_path / "crate", env=environment)
    examples = tmp_path / "target" / "debug" / "examples"
    check_scores(examples / "scores", data)
    shutil.copy(data / "demo.cnorm", tmp_path / "speaker.cnorm")
    run([examples / "manual"], cwd=tmp_path)


def abi_version():
    [version] = re.findall(r"#define CNORM_ABI_VERSION (\d+)", (ROOT / "src" / "include" / "cnorm.h").read_text())
    return version


def test_the_crate_has_the_numbers_of_the_header():
    header = (ROOT / "src" / "include" / "cnorm.h").read_text()
    crate = "".join(path.read_text() for path in (ROOT / "rust" / "cnorm" / "src").iterdir())
    abi = abi_version()
    assert f"const CNORM_ABI_VERSION: c_int = {abi};" in crate
    assert f"soversion: '{abi}'" in (ROOT / "src" / "meson.build").read_text()
    assert f"SOVERSION {abi})" in (ROOT / "CMakeLists.txt").read_text()
    statuses = re.findall(r"^    CNORM_(?:ERROR_)?([A-Z]+)\b", header[header.index("CNORM_OK = 0") - 4 :], re.M)
    found = re.findall(r"pub const ([A-Z]+): i32 = (\d+);", crate)
    assert len(found) == 7
    assert all(statuses[int(number)] == name for name, number in found)


# ---- with the functions of the loaded package ------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_cimport(installed, data, tmp_path):
    shutil.copy(EXAMPLES / "scores_cython.pyx", tmp_path)
    include = run([*PYTHON, "-c", "import cnorm; print(cnorm.get_include())"], env=installed, cwd=tmp_path).strip()
    cythonize = [*PYTHON, "-m", "Cython.Build.Cythonize", "-i", "scores_cython.pyx"]
    run(cythonize, env=installed | {"CFLAGS": f"-O1 -I{include}", "CC": "cc"}, cwd=tmp_path)
    check_scores(
        [*PYTHON, "-c", "import sys; sys.path.insert(0, ''); import scores_cython"], data, env=installed, cwd=tmp_path
    )


def test_numba(installed, data, tmp_path):
    pytest.importorskip("numba", reason=f"NOT RUN: numba is not installed ({NEEDS})")
    shutil.copy(EXAMPLES / "scores_numba.py", tmp_path)
    check_scores([*PYTHON, "scores_numba.py"], data, env=installed, cwd=tmp_path)


EXTENSION = """\
#define PY_SSIZE_T_CLEAN
#include "cnorm_python.h"

static PyObject *scores(PyObject *module, PyObject *args)
{
    static cnorm_norm call; /* every member 0 */
    float x[4] = {1, 2, 3, 6}, y[4];
    (void)module, (void)args;
    call.rows = 1, call.n = 4, call.x = x, call.y = y, call.eps = 1e-5;
    if (cnorm_layer_norm(CNORM_F32, &call)) return NULL;
    return Py_BuildValue("y#si", (char *)y, (Py_ssize_t)sizeof y, cnorm_isa_active(), cnorm_abi_version());
}
static PyMethodDef methods[] = {{"scores", scores, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "extension", "", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_extension(void)
{
    if (cnorm_import() < 0) return NULL;
    return PyModule_Create(&definition);
}
"""


@pytest.fixture(scope="module", params=["c", "c++"])
def extension(request, tmp_path_factory, installed):
    """The folder of a module `extension` in C and C++, which is not linked with cnorm."""
    folder = tmp_path_factory.mktemp("extension")
    include = run([*PYTHON, "-c", "import cnorm; print(cnorm.get_include())"], env=installed, cwd=folder).strip()
    flags = [
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-shared",
        "-fPIC",
        f"-I{include}",
        f"-I{sysconfig.get_path('include')}",
    ]
    output = folder / f"extension{sysconfig.get_config_var('EXT_SUFFIX')}"
    run(["cc", "-x", request.param, *flags, "-", "-o", output], input=EXTENSION)
    return folder


def test_extension_calls_the_loaded_functions(extension, installed):
    """One active instruction set for both."""
    code = """
import sys; sys.path.insert(0, "")
import cnorm, extension, numpy as np
cnorm.use_isa("baseline")
bits, isa, abi = extension.scores()
assert bits == cnorm.layer_norm(np.float32([1, 2, 3, 6])).tobytes()
print(isa, abi)
"""
    assert run([*PYTHON, "-c", code], env=installed, cwd=extension) == f"baseline {abi_version()}\n"


OTHER_ABI = """
import ctypes
version = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0)
new = ctypes.pythonapi.PyCapsule_New
new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
name = b"cnorm"
capi.__pyx_capi__["cnorm_abi_version"] = new(ctypes.cast(version, ctypes.c_void_p), name, None)
"""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("del capi.__pyx_capi__['cnorm_tape_drop']", "no function cnorm_tape_drop"),
        (OTHER_ABI, "has ABI version 0"),
        ("del capi.__pyx_capi__", "__pyx_capi__"),
    ],
)
def test_extension_refuses_another_version(extension, installed, change, message):
    code = f"import sys; sys.path.insert(0, '')\nfrom cnorm import capi\n{change}\nimport extension"
    done = subprocess.run([*PYTHON, "-c", code], env=installed, cwd=extension, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.search(f"(ImportError|AttributeError): .*{message}", done.stderr)


def declared(text):
    return re.findall(r"^[ \t]*[\w ]+?[ *]+(cnorm_\w+)\(", text, re.M)


def test_capi_has_every_function_of_the_headers():
    headers = [path.read_text() for path in (ROOT / "src" / "include").glob("*.h") if path.name != "cnorm_map.h"]
    code = "".join(re.sub(r"/\*.*?\*/", "", text, flags=re.S) for text in headers)
    functions = set(re.findall(r"^[\w ]+?[ *]+(cnorm_\w+)\([^;]*\);", code, re.M))
    assert len(functions) > 60
    assert functions == set(capi.__pyx_capi__)
    assert functions | {"cnorm_import"} == set(declared(Path(capi.__file__).with_suffix(".pxd").read_text()))


@pytest.mark.parametrize(
    ("declaration", "reason"),
    [
        ("typedef int (*cnorm_call)(int);", "of no known form"),
        ("typedef struct cnorm_a { long n; } cnorm_a;", "the type 'long'"),
        ("typedef struct cnorm_a { int n; } cnorm_b;", "the name of struct 'cnorm_a'"),
        ("int cnorm_a(int (*f)(int));", "'int (*f)(int)'"),
        ("#if INT_MAX > 3", "the directive #if INT_MAX > 3"),
    ],
)
def test_declarations_that_can_not_be_repeated_are_shown(declaration, reason, tmp_path):
    (tmp_path / "a.h").write_text(f"int cnorm_first(void);\n{declaration}\n")
    command = [*PYTHON, ROOT / "cnorm/include/declarations.py", "capi.pxd", tmp_path / "a.h"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert reason in done.stderr
    assert declaration.strip(";") in done.stderr


def test_lists_and_nested_structs_are_repeated(tmp_path):
    header = r"""
#define CNORM_ONE 1 /* a constant */
#define LIST(EACH) EACH(A, a) \
    EACH(B, b)
#define NUMBER(name, member) CNORM_##name,
typedef enum cnorm_kind { LIST(NUMBER) CNORM_LAST = 1 << 4 } cnorm_kind;
#define MEMBER(name, member) const int *member;
typedef struct cnorm_a { cnorm_kind kind; union { LIST(MEMBER) } as; } cnorm_a;
void cnorm_f(const cnorm_a *const *all);
"""
    (tmp_path / "a.h").write_text(header)
    done = run([*PYTHON, ROOT / "cnorm/include/declarations.py", "capi.pxd", tmp_path / "a.h"])
    expected = """
    # a.h
    ptrdiff_t CNORM_ONE
    ctypedef enum cnorm_kind:
        CNORM_A
        CNORM_B
        CNORM_LAST
    ctypedef union cnorm_a_as:
        const int *a
        const int *b
    ctypedef struct cnorm_a:
        cnorm_kind kind
        cnorm_a_as as_ "as"
    void cnorm_f(const cnorm_a *const *all)
"""
    assert done.endswith(expected)


STRUCTS = {f"cnorm_{name.lower()}": getattr(capi, name) for name in capi.__all__ if name.isupper()}


def test_capi_arrays_have_the_members_of_the_structs():
    text = "".join(path.read_text() for path in (ROOT / "src" / "include").glob("cnorm*.h"))
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    assert set(re.findall(r"\((?:cnorm_dtype dtype, )?const (\w+) \*call\b", text)) < STRUCTS.keys()
    for name, dtype in STRUCTS.items():
        body = re.search(rf"typedef struct {name} {{(.*?)}} {name};", text, re.S)[1]
        members = [part for line in body.split(";") for part in re.findall(r"(\w+)\s*(?=,|$)", line.strip())]
        assert list(dtype.names) == members, name


def test_capi_arrays_have_the_layout_of_the_structs(tmp_path):
    """The compiler says the size of each struct, and the offset and size of each member."""
    lines = "".join(
        f"_Static_assert(sizeof({name}) == {dtype.itemsize}, {quoted(name)});\n"
        + "".join(
            f"_Static_assert(offsetof({name}, {member}) == {at} && sizeof((({name} *)0)->{member}) == {kind.itemsize}, "
            f"{quoted(name, member)});\n"
            for member, (kind, at) in dtype.fields.items()
        )
        for name, dtype in STRUCTS.items()
    )
    includes = "".join(f'#include "cnorm_{name}.h"\n' for name in ("model", "norms", "train"))
    (tmp_path / "layout.c").write_text(includes + lines)
    run(["cc", "-std=c11", "-fsyntax-only", f"-I{ROOT / 'src' / 'include'}", "layout.c"], cwd=tmp_path)


def quoted(*names):
    return '"' + ".".join(names) + '"'
