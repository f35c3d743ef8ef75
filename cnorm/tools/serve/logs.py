"""The log of `cnorm serve`: lines with a time on standard error, at most so many a second."""

from __future__ import annotations

import logging
import time

__all__ = ["log_to_stderr"]

LINES_A_SECOND = 100  # a client that is refused again and again must not fill the disk


class Limit(logging.Filter):
    """Drops what comes beyond `LINES_A_SECOND`, and says how much that was."""

    def __init__(self) -> None:
        super().__init__()
        self._second, self._count = 0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        second = int(time.monotonic())
        if second != self._second:
            dropped, self._second, self._count = max(self._count - LINES_A_SECOND, 0), second, 0
            if dropped:
                record.msg, record.args = f"{record.getMessage()} (and {dropped} lines dropped before)", ()
        self._count += 1
        return self._count <= LINES_A_SECOND


def log_to_stderr(process: str) -> None:
    """Write the program's log to standard error; `process` is in each line."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(asctime)s.%(msecs)03d {process} %(message)s", "%Y-%m-%dT%H:%M:%S"))
    handler.addFilter(Limit())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("cnorm.serve").setLevel(logging.INFO)
