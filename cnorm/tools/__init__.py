"""The command line and the server. They import the library; the library does not import them."""

import sys
from typing import NoReturn

from cnorm.text import printable


def fail(text: str) -> NoReturn:
    """Print why the command could not do its work, which may quote a strange file, and exit with code 2."""
    print("\n".join(map(printable, text.split("\n"))), file=sys.stderr)
    sys.exit(2)


def needs(extra: str, missing: list[str]) -> str:
    """Which packages are missing, and how to install them: from the source folder, as cnorm is not on PyPI."""
    return f"Needs {' and '.join(missing)}: the extra {extra}, pip install '.[{extra}]' in cnorm's source folder."
