"""Errors about a file that is untrusted input; their messages may quote names from it."""

from __future__ import annotations

from collections.abc import Iterable

from cnorm.text import clip, printable

_SHOWN = 4  # names of nodes with the same fault


class _Unusable(ValueError):
    """Base of these errors. Names from an untrusted file may have any length and hold control characters."""

    def __init__(self, message: str) -> None:
        super().__init__(clip(printable(message)))


class Refused(_Unusable):
    """The file requires something unsafe."""


class Unreadable(_Unusable):
    """The file is not a valid ONNX model."""


class NotExported(Unreadable):
    """The file lacks the metadata that every file of `export` has."""


class NotImported(ValueError):
    """The file is valid, but no `cnorm.Model` computes it; the message has a line for each reason.

    `followed` says that the file fits one element of each open dimension: no other size of these is what it lacks.
    """

    def __init__(self, summary: str, reasons: Iterable[str] = (), followed: bool = False) -> None:
        self.summary, self.reasons, self.followed = summary, tuple(reasons), followed
        super().__init__("\n  ".join(clip(printable(line), 400) for line in (summary, *self.reasons)))


def together(faults: list[str]) -> list[str]:
    """The faults, each once, with the names of an operator's nodes that have the same reason in one line."""
    groups: dict[tuple[str, str], list[str]] = {}
    for fault in dict.fromkeys(faults):
        head, _, reason = fault.partition("': ")
        operator, quote, name = head.partition(" '")
        groups.setdefault((operator, reason) if quote and reason else (fault, ""), []).append(name)
    lines = []
    for (operator, reason), names in groups.items():
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        shown = ", ".join(f"'{name}'" for name in names[:_SHOWN])
        lines.append(f"{operator} {shown}{more}: {reason}" if reason else operator)
    return lines
