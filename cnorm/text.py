"""Make names from untrusted files safe for messages: printable and of bounded length."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

__all__ = ["clip", "listed", "message_of", "printable", "quoted"]


def printable(text: str) -> str:
    """`text` without control characters and without marks that change the direction of writing."""
    return "".join(
        c
        if c.isprintable() and unicodedata.category(c) not in ("Cf", "Co", "Cn", "Cs")
        else "\N{REPLACEMENT CHARACTER}"
        for c in text
    )


def clip(text: str, most: int = 500) -> str:
    """`text`, or its beginning and end where it is longer than `most` characters."""
    return text if len(text) <= most else f"{text[: most * 4 // 5]} ... {text[-(most // 5 - 5) :]}"


def quoted(name: str) -> str:
    """A name of an untrusted file for a message: printable, in quotes, at most 80 characters."""
    return repr(clip(printable(name[:1000]), 80))


def listed(names: Iterable[str], most: int = 12) -> str:
    """The first `most` of some names, and how many more there are; "none" if there are none."""
    names = [str(name) for name in names]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(clip(printable(name[:1000]), 80) for name in names[:most]) or "none") + more


def message_of(error: Exception) -> str:
    """The text of an error, which may quote an untrusted file, made printable and at most 2000 characters long."""
    return clip(printable(str(error)[:100_000]), 2000)
