"""The C library as two files: complete, and without a warning. `make two-files` compiles them and runs the C tests."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("amalgamation")
    subprocess.run([sys.executable, "-P", ROOT / "src" / "amalgamate.py", folder], check=True)
    return folder


@pytest.mark.parametrize("arguments", [[], ["--help"], ["a", "b"]], ids=str)
def test_other_arguments_than_a_folder_print_what_it_takes(arguments, tmp_path):
    command = [sys.executable, "-P", ROOT / "src" / "amalgamate.py", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "python src/amalgamate.py FOLDER" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.exhaustive(one_in=8)
@pytest.mark.parametrize("compiler", ["gcc", *(["clang"] if shutil.which("clang") else [])])
@pytest.mark.parametrize("flags", [[], ["-march=x86-64-v4"], ["-Wall", "-Wextra", "-Wno-unused-function", "-std=c11"]])
def test_compiles_without_a_warning(compiler, flags, folder):
    done = subprocess.run(
        [compiler, "-O2", *flags, "-fsyntax-only", "cnorm.c"], cwd=folder, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_cpp_compiler_is_told_that_the_file_is_c(folder):
    done = subprocess.run(["g++", "-fsyntax-only", "-x", "c++", "cnorm.c"], cwd=folder, capture_output=True, text=True)
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    assert done.returncode != 0
    assert "compile it with a C compiler" in errors[0]
    assert len([line for line in errors if "error:" in line]) == 1


@pytest.mark.parametrize("language", ["c", "c++"])
def test_the_header_compiles_alone_and_declares_everything(language, folder):
    declared = set()
    for header in (ROOT / "src" / "include").glob("*.h"):
        declared |= set(re.findall(r"\b(cnorm_\w+)\(", header.read_text()))
    assert len(declared) > 60
    text = (folder / "cnorm.h").read_text()
    assert {name for name in declared if f"{name}(" not in text} == set()
    subprocess.run(
        ["gcc", "-x", language, "-DCNORM_MAP", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "cnorm.h"],
        cwd=folder, check=True,
    )  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "compiler",
    [
        "no-such-compiler",
        "false",
        *(["clang --driver-mode=cl"] if shutil.which("clang") else []),
    ],
)
def test_preprocesses_by_a_compiler_of_its_own_choice(compiler, folder, tmp_path):
    """The target's compiler, CC, may be clang-cl, or one without GCC's options."""
    command = [sys.executable, "-P", ROOT / "src" / "amalgamate.py", tmp_path]
    subprocess.run(command, check=True, env=os.environ | {"CC": compiler})
    assert (tmp_path / "cnorm.c").read_bytes() == (folder / "cnorm.c").read_bytes()


def test_says_what_it_needs_to_preprocess(tmp_path):
    command = [sys.executable, "-P", ROOT / "src" / "amalgamate.py", tmp_path]
    done = subprocess.run(command, env={"CC": "false", "PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("amalgamate.py needs GCC or clang to preprocess; set CC to one. Tried:\n")
    assert "Traceback" not in done.stderr


def commands_of(folder, *options):
    """How CMake compiles cnorm.c, without compiling it."""
    options = ["-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", *options]
    subprocess.run(["cmake", "-S", ROOT, "-B", folder, *options], check=True, stdout=subprocess.DEVNULL)
    [entry] = json.loads((folder / "compile_commands.json").read_text())
    return entry["command"].split()


@pytest.mark.exhaustive
@pytest.mark.skipif(not shutil.which("cmake"), reason="NOT RUN: cmake is not installed (Debian: cmake)")
def test_cmake_optimises_in_every_configuration_and_keeps_flags_out(tmp_path):
    flags = "-DCMAKE_C_FLAGS=-ffast-math -fsanitize=address"
    command = commands_of(tmp_path / "debug", "-DCMAKE_BUILD_TYPE=Debug", flags)
    assert [flag for flag in command if flag.startswith("-O")][-1] == "-O2"
    assert command.index("-fno-fast-math") > command.index("-ffast-math")
    assert command.index("-fno-sanitize=all") > command.index("-fsanitize=address")
    assert "-fno-sanitize=all" not in commands_of(tmp_path / "sanitized", "-DCNORM_SANITIZE=ON", flags)


def test_every_unit_of_the_build_is_a_region(folder):
    text = (folder / "cnorm.c").read_text()
    units = re.findall(r"^/\* ==== (\S+) =", text, re.M)
    compiled = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.c")}
    assert set(units) == compiled
    assert len(units) == len(compiled)


def test_names_of_a_unit_end_with_it(folder):
    """No macro of a unit reaches the next one."""
    text = (folder / "cnorm.c").read_text()
    for region in re.split(r"^/\* ==== ", text, flags=re.M)[1:]:
        defined = set(re.findall(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", region, re.M))
        undefined = set(re.findall(r"^#undef (\w+)", region, re.M))
        assert defined <= undefined


@pytest.mark.exhaustive
def test_written_again_only_if_the_text_differs(tmp_path):
    """Else each configuration of CMake would compile for minutes. CC may have arguments, such as "ccache cc"."""
    command = [sys.executable, ROOT / "src" / "amalgamate.py", tmp_path]
    subprocess.run(command, check=True)
    text = (tmp_path / "cnorm.c").read_text()
    for path in tmp_path.iterdir():
        os.utime(path, (1, 1))
    (tmp_path / "cnorm.h").write_text("")
    subprocess.run(command, check=True, env=os.environ | {"CC": "env cc"})
    assert (tmp_path / "cnorm.c").stat().st_mtime == 1
    assert (tmp_path / "cnorm.c").read_text() == text
    assert (tmp_path / "cnorm.h").stat().st_mtime > 1
