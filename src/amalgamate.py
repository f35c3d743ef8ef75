"""Write the C library as two files, cnorm.c and cnorm.h, which GCC and clang compile without flags.

    python src/amalgamate.py FOLDER

The files to compile and their flags are read from src/meson.build. Each translation unit becomes a region of cnorm.c:
its flags become a target pragma (GCC) or attribute (clang), and its file-scope names get a suffix, by macros that are
undefined at the end of the region. The names are found in the preprocessed unit, which takes a preprocessor with the
options of GCC and clang: CC, which may be a compiler for another machine, with arguments, else cc, gcc or clang,
whatever the compiler of cnorm.c will be. A file whose text is the same is not written again. Python 3.8 is enough.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

SRC = Path(__file__).resolve().parent
PUBLIC = ("cnorm.h", "cnorm_norms.h", "cnorm_rnn.h", "cnorm_train.h", "cnorm_model.h")
ARCHITECTURES = {"x86_64": "__x86_64__", "aarch64": "__aarch64__"}
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^">]+)[">].*$', re.M)
# Macros that compilers define for flags. They are replaced by CNORM_HAS_*, because clang's target attribute does not
# define them, and a user's -march defines more than a file may use.
FEATURES = re.compile(r"\b__(AVX\w*|F16C|FMA)__\b")
GUARD = re.compile(r"^#ifndef CNORM_\w+_H$", re.M)
TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\w+|[^\w\s]')


@dataclass
class Unit:
    """A translation unit: a file of src/ and what meson.build says of it."""

    path: Path
    name: str
    architecture: str | None = None
    flags: list[str] = field(default_factory=list)


def units() -> list[Unit]:
    """The units that src/meson.build compiles."""
    text = re.sub(r"#.*", "", (SRC / "meson.build").read_text())
    found = []
    for table, folder in (("isas", "kernels/isa_{}.c"), ("int8_backends", "int8/{}.c")):
        for name, architecture, flags in _entries(text, table):
            found.append(Unit(SRC / folder.format(name), f"{table[:4]}_{name}", architecture, flags))
    for path in re.findall(r"'([\w/]+\.c)'", text):
        found.append(Unit(SRC / path, re.sub(r"\W", "_", path[:-2])))
    return found


def _entries(text: str, table: str):
    """(name, architecture, flags) of the entries of a dictionary of meson.build, additions by architecture included."""
    architecture, current = None, None
    for line in text.splitlines():
        if match := re.search(r"cpu_family\(\) == '(\w+)'", line):
            architecture = match[1]
        elif line.strip() == "endif":
            architecture = None
        if match := re.match(r"\s*(\w+) \+?= \{", line):
            current = match[1]
        if current == table:
            for name, flags in re.findall(r"'(\w+)': \[([^\]]*)\]", line):
                yield name, architecture, re.findall(r"'([^']+)'", flags)
        if line.rstrip().endswith("}"):
            current = None


def inlined(path: Path, shared: set[Path], seen: set[Path]) -> str:
    """The text of a file with its own headers inlined, but for shared ones, and without system headers.

    seen : headers that are in the text already, and are guarded; one under a condition may be needed again.
    """
    text = path.read_text()

    def replaced(match):
        header = _find(path, match[2]) if match[1] == '"' else None
        if header is None or header in shared or header in seen:
            return ""
        guarded = GUARD.search(header.read_text())
        inner = seen if guarded and not _conditional(text[: match.start()]) else set(seen)
        inner |= {header} if guarded else set()
        return inlined(header, shared, inner)

    return f"/* ---- {path.relative_to(SRC).as_posix()} */\n{INCLUDE.sub(replaced, text)}"


def _conditional(text: str) -> bool:
    """Whether the end of the text is under another #if than the guard of the file."""
    opened = len(re.findall(r"^\s*#\s*if", text, re.M)) - len(re.findall(r"^\s*#\s*endif", text, re.M))
    return opened > (1 if GUARD.search(text) else 0)


def _find(path: Path, name: str) -> Path:
    for folder in (path.parent, SRC / "include", SRC):
        if (folder / name).is_file():
            return (folder / name).resolve()
    raise FileNotFoundError(f"{path} includes {name}, which is in no folder of src")


def closure(paths) -> list[Path]:
    """Headers that the files include, directly or not, each after those that it includes."""
    ordered: list[Path] = []
    begun: set[Path] = set()

    def visit(path):
        for kind, name in INCLUDE.findall(path.read_text()):
            header = _find(path, name) if kind == '"' else path
            if header not in begun and header != path:
                begun.add(header)
                visit(header)
                ordered.append(header)

    for path in paths:
        visit(path)
    return ordered


def of_one_unit(header: Path) -> bool:
    """Whether a header's text depends on the unit: vectors, kernels, and lists that are included more than once."""
    names = [header, *closure([header])]
    return not GUARD.search(header.read_text()) or any(p.parent.name == "simd" or ".inl." in p.name for p in names)


@cache
def preprocessor() -> tuple[str, ...]:
    """The first of CC, cc, gcc and clang that preprocesses, with its arguments; clang-cl does as clang."""
    tried = []
    for name in [os.environ.get("CC", ""), "cc", "gcc", "clang"]:
        for mode in ([], ["--driver-mode=gcc"]) if name else ():
            command = [*shlex.split(name), *mode, *OPTIONS]
            try:
                done = subprocess.run(command, input="int ok;", capture_output=True, text=True, check=False)
            except OSError as error:
                tried.append(f"{name}: {error.strerror}")
                break
            if done.returncode == 0 and done.stdout.strip() == "int ok;":
                return tuple(command[: -len(OPTIONS)])
            tried.append(f"{name}: {(done.stderr.strip() or 'no output').splitlines()[-1]}")
    said = "".join(f"\n    {line}" for line in dict.fromkeys(tried))
    sys.exit(f"amalgamate.py needs GCC or clang to preprocess; set CC to one. Tried:{said}")


OPTIONS = ("-E", "-P", "-undef", "-nostdinc", "-x", "c", "-")


def preprocessed(text: str, unit: Unit) -> str:
    """`text` without macros, for the machine of the unit, whatever the compiler's own is."""
    defines = ["-D__SSE2__"] if unit.architecture == "x86_64" else []
    if unit.architecture:
        defines.append(f"-D{ARCHITECTURES[unit.architecture]}=1")
    command = [*preprocessor(), *defines, *features(unit), *OPTIONS]
    return subprocess.run(
        command, input=FEATURES.sub(r"CNORM_HAS_\1", text), capture_output=True, text=True, check=True
    ).stdout


def features(unit: Unit) -> list[str]:
    """The macros that stand for the unit's flags, as options of a preprocessor."""
    names = [flag[2:].upper() for flag in unit.flags if re.fullmatch(r"-m(avx\w*|f16c|fma)", flag)]
    names += ["AVX2"] if any(name.startswith("AVX512") for name in names) else []  # as the compilers imply
    return [f"-DCNORM_HAS_{name}=1" for name in names]


def names_of(code: str) -> set[str]:
    """Names that preprocessed C code declares at file scope: functions, variables, types, tags and enumerators.

    Such a name is the word before a bracket, a comma, `=` or `;`, outside of brackets or in those of an enumeration,
    but not in a value; or that of a pointer to functions, `(*name)`.
    """
    names, scope, value = set(), [], False
    tokens = ["", "", *TOKEN.findall(re.sub(r"^\s*#.*$", "", code, flags=re.M)), ""]
    for i, token in enumerate(tokens[2:-1], 2):
        word, declaring = tokens[i - 1], scope in ([], ["enum"])
        ends = token in ("[", ";", ",", "=", "{", "}", "__attribute__") or (token == "(" and tokens[i + 1] != "*")
        if (declaring and not value and ends) or (scope == ["("] and tokens[i - 3 : i - 1] == ["(", "*"]):
            names.add(word)
        if declaring and token in ("=", ",", ";", "}"):
            value = token == "="
        if token in ("(", "[", "{"):
            scope.append("enum" if token == "{" and "enum" in tokens[i - 2 : i] else token)
        elif token in (")", "]", "}"):
            scope.pop()
    words = {name for name in names if re.fullmatch(r"[A-Za-z]\w*", name) and not name.lower().startswith("cnorm_")}
    return words - {"struct", "union", "enum", "static", "inline"}


def region(unit: Unit, shared: list[Path], shared_text: str) -> str:
    """The unit as a part of cnorm.c."""
    text = FEATURES.sub(r"CNORM_HAS_\1", inlined(unit.path, set(shared), set()))
    text = re.sub(r"\n\s*\n+", "\n", re.sub(r"/\*.*?\*/", "", text, flags=re.S))  # comments are in the sources
    names = names_of(preprocessed(shared_text + "\nint cnorm_boundary;\n" + text, unit).split("int cnorm_boundary;")[1])
    macros = set(re.findall(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", text, re.M))
    has = [option[2:].split("=")[0] for option in features(unit)]
    begin, end = target(unit)
    lines = [
        f"/* ==== {unit.path.relative_to(SRC).as_posix()} " + "=" * 60 + " */",
        *([f"#if defined({ARCHITECTURES[unit.architecture]})"] if unit.architecture else []),
        *begin,
        *(f"#define {name} 1" for name in has),
        *renamings(names - macros, unit, text),
        text,
        *(f"#undef {name}" for name in sorted(names | macros | set(has))),
        *end,
        *(["#endif"] if unit.architecture else []),
    ]
    return "\n".join(lines)


def renamings(names: set[str], unit: Unit, text: str) -> list[str]:
    """The macros that give names a suffix.

    A function's, if a member or a kernel of the list has its name too, renames it only where it is called.
    """
    called = set(re.findall(r"\b(\w+)\(", text))
    members = set(re.findall(r"(?:\.|->)\s*(\w+)", text)) | set(re.findall(r"\bKERNEL\((\w+)", text))
    calls = {name: "(...)" if name in called & members else "" for name in sorted(names)}
    return [f"#define {name}{call} {name}__{unit.name}{call and '(__VA_ARGS__)'}" for name, call in calls.items()]


def target(unit: Unit) -> tuple[list[str], list[str]]:
    """The lines that begin and end a region of the unit's instruction set."""
    if not unit.flags:
        return [], []
    gcc = ",".join(re.sub("^-m(?=arch=)|^-m|^-(?=march)", "", flag).replace("march=", "arch=") for flag in unit.flags)
    clang = ",".join(part for part in gcc.split(",") if not part.startswith("prefer"))
    clang = re.sub(r"arch=[^+,]*\+", "", clang)
    begin = [
        "#if defined(__clang__)",
        f'#pragma clang attribute push(__attribute__((target("{clang}"))), apply_to = function)',
        "#else",
        "#pragma GCC push_options",
        f'#pragma GCC target("{gcc}")',
        "#endif",
    ]
    return begin, [
        "#if defined(__clang__)",
        "#pragma clang attribute pop",
        "#else",
        "#pragma GCC pop_options",
        "#endif",
    ]


TOP = """\
/* cnorm, the whole C library in one file. Written by src/amalgamate.py: change the sources instead.
 *
 *     cc -O2 -c cnorm.c
 *
 * No flags are needed for instruction sets. One whose code was contracted or reordered nevertheless, as by clang's
 * -ffp-contract=fast, is not used. */
#ifdef __cplusplus
#error "cnorm.c is C: compile it with a C compiler (cc -O2 -c cnorm.c); C++ programs link cnorm.o and include cnorm.h"
#else
#if defined(__linux__) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed"
#elif defined(__GNUC__)
#pragma GCC push_options
#pragma GCC optimize("fp-contract=off", "no-math-errno", "no-trapping-math")
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"
#endif
"""
BOTTOM = """
#if defined(__clang__)
#pragma clang diagnostic pop
#elif defined(__GNUC__)
#pragma GCC diagnostic pop
#pragma GCC pop_options
#endif
#endif /* __cplusplus */
"""


def system_headers(paths) -> str:
    """All system headers, once; those of one machine under the condition of their place."""
    conditions = {
        "immintrin.h": "defined(__SSE2__)", "xmmintrin.h": "defined(__SSE2__)", "emmintrin.h": "defined(__SSE2__)",
        "cpuid.h": "defined(__x86_64__)", "arm_neon.h": "defined(__aarch64__)",
        "sys/auxv.h": "defined(__aarch64__) && defined(__linux__)",
        "fenv.h": "!defined(__SSE2__) && !defined(__aarch64__)",
    }  # fmt: skip
    found = sorted({name for path in paths for kind, name in INCLUDE.findall(path.read_text()) if kind == "<"})
    lines = []
    for name in found:
        include = f"#include <{name}>"
        lines += [f"#if {conditions[name]}", include, "#endif"] if name in conditions else [include]
    return "\n".join(lines)


def public_header() -> str:
    """The public headers as one; cnorm_map.h is the part that a program asks for."""
    own = re.compile(r'^#include "cnorm\w*\.h"\n', re.M)
    texts = [own.sub("", (SRC / "include" / name).read_text()) for name in PUBLIC]
    mapping = (SRC / "include" / "cnorm_map.h").read_text()
    asked = "/* define CNORM_MAP before including this file to map models into memory */\n#ifdef CNORM_MAP"
    return "\n".join([*texts, asked, mapping + "#endif\n"])


def amalgamation() -> tuple[str, str]:
    """cnorm.c and cnorm.h."""
    found = units()
    headers = closure(unit.path for unit in found)
    public = [path for path in headers if path.parent.name == "include"]
    shared = [path for path in headers if not of_one_unit(path)]
    private = [path for path in shared if path not in public]
    kept = "\n".join(inlined(path, set(shared), set()) for path in private)
    known = "\n".join(inlined(path, set(shared), set()) for path in shared)
    parts = [TOP, '#include "cnorm.h"\n', system_headers([*headers, *(unit.path for unit in found)]), kept]
    parts += [region(unit, shared, known) for unit in found]
    return "\n".join(parts) + BOTTOM, public_header()


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    source, header = amalgamation()
    for path, text in {folder / "cnorm.c": source, folder / "cnorm.h": header}.items():
        if not path.exists() or path.read_text() != text:  # else build systems would compile it again
            path.write_text(text)


if __name__ == "__main__":
    main()
