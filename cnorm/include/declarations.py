"""Prints a file that repeats the declarations of the C headers: meson writes these when it configures.

    python declarations.py capi.pxd|capi.py|cnorm_functions.inc|cnorm_names.h HEADER...

A header has enumerations, structs and functions of simple arguments, constants and lists (`#define LIST(EACH) EACH(...)
...`), and other declarations than these end with an error that shows them.
"""

import re
import sys
from dataclasses import dataclass, field
from keyword import iskeyword
from pathlib import Path

KINDS = {"int": "intc", "float": "float32", "double": "float64", "ptrdiff_t": "intp", "uint64_t": "uint64"}
DECLARATOR = re.compile(r"((?:\* ?(?:const )?)*)(\w+)((?:\[\w+\])*)")
ARGUMENT = re.compile(r"((?:const )?(?:unsigned )?\w+) ?((?:\* ?(?:const )?)*\w+)")


@dataclass
class Declared:
    """What the headers declare; `lines` are those of the block of capi.pxd."""

    known: dict = field(default_factory=lambda: KINDS | {"void": None, "char": None, "unsigned char": None})
    structs: dict = field(default_factory=dict)  # name -> [(NumPy's kind or None, member)]
    functions: dict = field(default_factory=dict)  # name -> types of the arguments
    lines: list = field(default_factory=list)

    def header(self, path):
        self.lines += ["", f"    # {path.name}"]
        constants, code = preprocessed(path)
        self.lines += [f"    ptrdiff_t {name}" for name in constants]
        for text in parts(code, ";"):
            try:
                self.declaration(text)
            except ValueError as error:
                sys.exit(f"{path}: {Path(__file__).name} can't read a declaration, {error}:\n    {text};")

    def declaration(self, text):
        if found := re.fullmatch(r"(?:typedef )?enum (\w* ?)\{(.*)\} ?(\w*)", text):
            tag, body, name = found[1].strip(), found[2], found[3]
            if tag != name:
                raise ValueError(f"the name of enum {tag!r}")
            self.known[name] = "intc"
            names = [matched(r"(\w+)(?: ?= ?.+)?", each)[1] for each in parts(body, ",")]
            self.lines += [
                f"    ctypedef enum {name}:" if name else "    enum:",
                *(f"        {each}" for each in names),
            ]
        elif found := re.fullmatch(r"typedef struct (\w+) \{(.*)\} (\w+)", text):
            if found[1] != found[3]:
                raise ValueError(f"the name of struct {found[1]!r}")
            self.struct("ctypedef struct", found[1], found[2])
        elif found := re.fullmatch(r"((?:const )?\w+ ?\*?) ?(\w+)\((.*)\)", text):
            arguments = [] if found[3] == "void" else [matched(ARGUMENT, each) for each in parts(found[3], ",")]
            self.functions[found[2]] = [self.of_type(each[1]) for each in arguments]
            self.of_type(found[1].rstrip("* "))
            self.lines.append(f"    {found[1].strip()} {found[2]}({'' if found[3] == 'void' else found[3]})")
        else:
            raise ValueError("of no known form")

    def struct(self, keyword, name, body):
        """Declare a struct or union, those inside it first."""
        members, lines = [], []
        for text in parts(body, ";"):
            if found := re.fullmatch(r"(struct|union) (\w* ?)\{(.*)\} ?(.+)", text):
                base = found[2].strip() or f"{name}_{found[4]}"
                self.struct(f"cdef {found[1]}" if found[2] else f"ctypedef {found[1]}", base, found[3])
                declarators = found[4]
            else:
                base, declarators = matched(r"((?:const )?(?:unsigned )?\w+) ?(.+)", text).groups()
            for each in parts(declarators, ","):
                pointer, member, size = matched(DECLARATOR, each).groups()
                members.append(("uintp" if pointer else None if size else self.of_type(base), member))
                alias = f'{member}_ "{member}"' if iskeyword(member) else member
                lines.append(f"        {base} {pointer}{alias}{size}")
        self.known[name], self.structs[name] = None, members
        self.lines += [f"    {keyword} {name}:", *lines]

    def of_type(self, name):
        name = name.removeprefix("const ")
        if name not in self.known:
            raise ValueError(f"the type {name!r}")
        return self.known[name] if self.known[name] else name

    def arrays(self):
        """Name -> members of the structs that NumPy can allocate: scalars and pointers, which a function takes."""
        taken = {kind for kinds in self.functions.values() for kind in kinds}
        flat = {name for name, members in self.structs.items() if all(kind in ARRAY for kind, _ in members)}
        return {name: members for name, members in self.structs.items() if name in taken & flat}


ARRAY = {*KINDS.values(), "uintp"}


def preprocessed(path):
    """The constants that a header defines, and its code with lists unfolded, without comments and directives."""
    text = re.sub(r"/\*.*?\*/", " ", path.read_text(encoding="utf-8"), flags=re.S).replace("\\\n", " ")
    text = re.sub(r"^#ifdef __cplusplus$.*?^#endif$", "", text, flags=re.S | re.M)
    constants, macros = [], {}
    for directive in re.findall(r"^#.*$", text, re.M):
        if found := re.fullmatch(r"#define (\w+)\(([\w, ]*)\) *(.*)", directive):
            macros[found[1]] = parts(found[2], ","), found[3]
        elif found := re.fullmatch(r"#define (\w+) +\S.*", directive):
            constants.append(found[1])
        elif not re.match(r"#(ifndef|define|include|undef|endif)\b", directive):
            sys.exit(f"{path}: {Path(__file__).name} can't read the directive {directive}")
    code = re.sub(r"^#.*$", "", text, flags=re.M)

    def unfolded(call):
        names, body = macros[call[1]]
        values = dict(zip(names, parts(call[2], ","), strict=True))
        return re.sub(r" *## *", "", re.sub(r"\w+", lambda word: values.get(word[0], word[0]), body))

    calls = re.compile(rf"\b({'|'.join(macros) or '(?!)'})\(([^()]*)\)")
    while calls.search(code):
        code = calls.sub(unfolded, code)
    return constants, re.sub(r"\s+", " ", code)


def parts(text, separator):
    """The parts of a text between separators that are in no brackets; the last one may be empty."""
    found, depth = [""], 0
    for character in text:
        depth += (character in "{([") - (character in "})]")
        if character == separator and depth == 0:
            found.append("")
        else:
            found[-1] += character
    return [part.strip() for part in found if part.strip()]


def matched(pattern, text):
    return re.fullmatch(pattern, text) or fail(text)


def fail(text):
    raise ValueError(repr(text))


PXD = """\
# The C library for Cython modules: they call the functions of the loaded package, see include/cnorm_python.h. Only
# declarations; the headers in the folder cnorm.get_include() are the manual, and this file is written from them.
#
#     from cnorm.capi cimport *
#     cnorm_import()            once in each module, before any other function
#
# Pointers to arrays of any cnorm_dtype are void *.
from libc.stdint cimport uint64_t

cdef extern from "cnorm_python.h":
    int cnorm_import() except -1


cdef extern from "cnorm_python.h" nogil:"""

PY = '''\
"""The C library for extension modules, Numba and ctypes: capsules of its functions and the layout of its structs.

C and C++ include ``cnorm_python.h`` from the folder `cnorm.get_include`, Cython says ``from cnorm.capi cimport *``, and
Numba takes ``numba.extending.get_cython_function_address("cnorm.capi", name)``. All of them call the functions that are
loaded with this package, so that there is one active instruction set. docs/embedding.md has examples.

Attributes
----------
__pyx_capi__ : dict of str to PyCapsule
    The address of each function of the headers, by its name.
{names} : dtype
    The structs ``cnorm_norm``, ..., ``cnorm_stream``, for memory that NumPy allocates: ``np.zeros((), capi.NORM)``.
"""

import numpy as np

from cnorm._core import capsules as __pyx_capi__

__all__ = [{all}, "__pyx_capi__"]


def _struct(*members):
    """The dtype of a struct: texts, each a type and the names of the members that follow one another."""
    return np.dtype([(name, kind) for kind, *names in map(str.split, members) for name in names], align=True)

'''


def pxd(declared):
    return "\n".join([PXD, *declared.lines, ""])


def py(declared):
    arrays = {name.removeprefix("cnorm_").upper(): members for name, members in declared.arrays().items()}
    lines = [PY.format(names=", ".join(arrays), all=", ".join(f'"{name}"' for name in sorted(arrays)))]
    for name, members in arrays.items():
        groups = []
        for kind, member in members:
            if not groups or groups[-1][0] != kind:
                groups.append([kind])
            groups[-1].append(member)
        lines.append(f"{name} = _struct({', '.join(repr(' '.join(group)) for group in groups)})\n")
    return "".join(lines)


def entries(declared):
    lines = "".join(f"ENTRY({name})\n" for name in declared.functions)
    return f"/* the C library's functions, for cnorm_python.h and _capsules.pxi */\n{lines}#undef ENTRY\n"


def names(declared):
    """Macros: the C preprocessor makes none of a list."""
    return "".join(f"#define {name} (*cnorm_loaded.{name})\n" for name in declared.functions)


if __name__ == "__main__":
    kinds = {"capi.pxd": pxd, "capi.py": py, "cnorm_functions.inc": entries, "cnorm_names.h": names}
    everything = Declared()
    for header in sys.argv[2:]:
        everything.header(Path(header))
    sys.stdout.write(kinds[sys.argv[1]](everything))
