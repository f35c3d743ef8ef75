"""Errors about an untrusted file, whose names they may quote."""

from __future__ import annotations

from cnorm.text import clip, printable


class _Unusable(ValueError):
    """Its message may quote names of an untrusted file: of any length, with control characters in them."""

    def __init__(self, message: str) -> None:
        super().__init__(clip(printable(message)))


class Refused(_Unusable):
    """The file asks for something that is not safe to do."""


class Unreadable(_Unusable):
    """The file is not an ONNX model that makes sense."""
