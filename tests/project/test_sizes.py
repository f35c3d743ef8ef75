"""Limits on the size of files, functions and parameter lists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE_LINES, KERNEL_FILE_LINES, FUNCTION_LINES, PARAMETERS, COLUMNS = 450, 250, 50, 7, 120
# Functions with more parameters than that
MORE_PARAMETERS = {
    ("cnorm/_batch_norm.pxi", "batch_norm"): "public: options by keyword, with defaults",
    ("cnorm/_layer_norm.pxi", "add_layer_norm"): "public: as above",
    ("cnorm/analysis.py", "fisher_glm"): "public: as above",
    ("cnorm/layers/conv.py", "__init__"): "public: the options of torch.nn.Conv1d by keyword",
    ("cnorm/layers/conv_transpose.py", "__init__"): "public: the options of torch.nn.ConvTranspose1d by keyword",
    ("cnorm/torch/norms.py", "__init__"): "public: the arguments of torch.nn in their order",
    ("cnorm/torch/recurrent.py", "__init__"): "as above",
    ("onnx_export/exporter.py", "export"): "public: options by keyword, with defaults",
    ("onnx_export/loader.py", "load"): "public: as above",
    ("onnx_export/validation/__init__.py", "validate"): "public: as above",
    ("onnx_export/validation/command.py", "validate"): "the options of `cnorm validate`",
}


def sources(*suffixes):
    found = [p for d in ("src", "cnorm", "onnx_export") for p in sorted((ROOT / d).rglob("*")) if p.suffix in suffixes]
    assert found
    return found


def c_functions(text):
    """(name, lines, parameters) of each definition: a brace at the start of a line or of a one-line body."""
    code = re.sub(r"/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.S)
    head = re.compile(r"^(?!typedef)[A-Za-z_](?:[\w \t*]|[A-Z]N\(\w+\))*?[ *]([A-Z]N\(\w+\)|\w+)\(", re.M)
    for match in head.finditer(code):
        at, depth = match.end(), 1
        while depth:
            depth += {"(": 1, ")": -1}.get(code[at], 0)
            at += 1
        parameters = code[match.end() : at - 1]
        body = re.match(r"\s*\{", code[at:])
        if not body:
            continue
        end, depth = at + body.end(), 1
        while depth:
            depth += {"{": 1, "}": -1}.get(code[end], 0)
            end += 1
        yield match[1], code.count("\n", match.start(), end) + 1, len(parameters_of(parameters))


def parameters_of(text):
    """The parameters of a list, without what stands in brackets."""
    while (bare := re.sub(r"[(\[{][^()\[\]{}]*[)\]}]", "", text)) != text:
        text = bare
    return [part for part in text.split(",") if part.strip() not in ("", "void")]


def python_functions(text):
    """(name, lines without the docstring, parameters without self) of each function."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = node.end_lineno - node.lineno + 1
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(getattr(first, "value", None), ast.Constant):
                lines -= first.end_lineno - first.lineno + 1
            inner = [n for n in node.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))]
            lines -= sum(n.end_lineno - n.lineno + 1 for n in inner)
            names = [a.arg for a in node.args.posonlyargs + node.args.args if a.arg not in ("self", "cls")]
            yield node.name, lines, len(names) + len(node.args.kwonlyargs)


def cython_functions(text):
    """Like `python_functions`, but by indentation."""
    lines = text.split("\n")
    head = re.compile(r"^(\s*)(?:def|cdef inline|cdef|cpdef)\s+(?:[\w.* ]+?\s+\**)?\**(\w+)\(")
    for i, line in enumerate(lines):
        match = head.match(line)
        if not match or match[2] == "extern":
            continue
        whole = "\n".join(lines[i:])
        at = whole.index(match[2] + "(") + len(match[2]) + 1
        start, depth = at, 1
        while depth:
            depth += {"(": 1, ")": -1}.get(whole[at], 0)
            at += 1
        if not re.match(r"[^\n]*:\s*(#[^\n]*)?\n", whole[at:] + "\n"):
            continue
        names = [p for p in parameters_of(whole[start : at - 1]) if p.strip() not in ("self", "cls", "*", "/")]
        body = whole[at:].split("\n")[1:]
        indented = []
        for b in body:
            if b.strip() and len(b) - len(b.lstrip()) <= len(match[1]):
                break
            indented.append(b)
        code = "\n".join(indented).rstrip()
        bare = re.sub(r'^\s*[rf]?""".*?"""', "", code, count=1, flags=re.S)
        yield match[2], whole[:at].count("\n") + 1 + bare.count("\n") + (1 if bare.strip() else 0), len(names)


def functions(path):
    text = path.read_text()
    if path.suffix in (".c", ".h", ".hpp", ".inc"):
        return c_functions(text)
    return python_functions(text) if path.suffix == ".py" else cython_functions(text)


def test_no_file_is_too_long():
    long = []
    for path in sources(".c", ".h", ".hpp", ".inc", ".py", ".pyi", ".pyx", ".pxi", ".pxd", ".html", ".js"):
        limit = KERNEL_FILE_LINES if "kernels" in path.parts else FILE_LINES
        lines = path.read_text().count("\n")
        if lines > limit:
            long.append(f"{path.relative_to(ROOT)}: {lines} lines, at most {limit}")
    assert not long, "\n".join(long)


def test_no_line_of_c_is_too_long():
    """clang-format keeps code within the limit, not comments; ruff and cython-lint see to the other languages."""
    long = []
    for path in sources(".c", ".h", ".hpp", ".inc"):
        lines = enumerate(path.read_text().split("\n"), 1)
        long += [f"{path.relative_to(ROOT)}:{i}: {len(line)} columns" for i, line in lines if len(line) > COLUMNS]
    assert not long, "\n".join(long)


def test_functions_meet_the_limits_on_length_and_parameters():
    found, excepted = [], set()
    for path in sources(".c", ".h", ".hpp", ".inc", ".py", ".pyx", ".pxi"):
        name = str(path.relative_to(ROOT))
        for function, lines, parameters in functions(path):
            many = parameters > PARAMETERS
            if many and (name, function) in MORE_PARAMETERS:
                excepted.add((name, function))
                many = False
            if many or lines > FUNCTION_LINES:
                found.append(f"{name}: {function} has {lines} lines and {parameters} parameters")
    assert not found, "\n".join(found)
    assert excepted == MORE_PARAMETERS.keys(), f"no exceptions: {MORE_PARAMETERS.keys() - excepted}"


@pytest.mark.parametrize(
    ("suffix", "text", "expected"),
    [
        (".c", "static int f(int a, const int *b)\n{\n    return a;\n}\n", [("f", 4, 2)]),
        (".h", "INLINE V FN(load)(const X *p) { return *p; }\n", [("FN(load)", 1, 1)]),
        (".c", "int g(void); /* { */\n", []),
        (".py", 'def f(a, *, b):\n    """Doc.\n\n    more\n    """\n    return a\n', [("f", 2, 2)]),
        (".pxi", 'cdef int g(A self, int b) except -1:\n    """Doc."""\n    return 1\n\nx = 1\n', [("g", 3, 2)]),
    ],
)
def test_counts_of_lines_and_parameters(suffix, text, expected, tmp_path):
    path = tmp_path / f"file{suffix}"
    path.write_text(text)
    assert list(functions(path)) == expected
