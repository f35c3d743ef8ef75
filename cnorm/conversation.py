"""The client's side of the protocol of `cnorm serve`, without input or output; `cnorm.client` moves its messages.

What a server sends is checked: it can make a client fail with a `ServerError`, not with wrong outputs.
"""

from __future__ import annotations

import json
import struct
from collections import deque

import numpy as np

__all__ = ["NUMBER", "PROTOCOL", "Conversation", "Lost", "ServerError"]

PROTOCOL = 1
NUMBER = struct.Struct("<Q")  # a binary message: the number of its first frame, then frames or outputs in float32
# errors after which a new connection can continue
RETRIED = ("idle", "limit", "overload", "restart", "unknown", "replaced")


class ServerError(RuntimeError):
    """The server refused a message of the client, and would refuse it again.

    Attributes
    ----------
    code : str
        As in docs/serving.md, such as "checkpoint" or "frames".
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class Lost(Exception):
    """The connection can't be used any more, and a new one can continue the session."""


class Conversation:
    """The protocol state of a session, without input or output: `Session` and `AsyncSession` move its messages.

    Frames are numbered from 0 since the last reset. The checkpoint is of the state after `covered` frames; the frames
    from `covered` on are in `tail`, to be sent again.
    """

    def __init__(self) -> None:
        self.session = self.checkpoint = None
        self.covered = 0  # frames that the checkpoint covers
        self.tail: deque[np.ndarray] = deque()  # the frames from `covered` on, in arrays [count, input_size]
        self.total = 0  # frames that the caller has sent
        self.delivered = 0  # outputs that the caller was given
        self.sent = self.answered = 0  # frames sent and answered on this connection
        self.outputs: deque[np.ndarray] = deque()
        self.resetting = False
        self.input_size = self.output_size = self.credit = self.arithmetic = 0

    def hello(self) -> str:
        message = {"type": "hello", "protocol": PROTOCOL}
        if self.checkpoint is not None:
            message["checkpoint"] = self.checkpoint
        return json.dumps(message)

    def add(self, x: np.ndarray) -> None:
        """Queue frames of the caller."""
        x = np.asarray(x)
        if x.dtype != np.float32:
            raise TypeError(f"x must have dtype float32, got {x.dtype}")
        if x.ndim != 2 or x.shape[1] != self.input_size:
            raise ValueError(f"x must have shape (steps, {self.input_size}), got {x.shape}")
        if not np.isfinite(x).all():
            raise ValueError("x must be finite: a NaN or infinity would stay in the session's state")
        if len(x):
            self.tail.append(np.array(x, "<f4"))
            self.total += len(x)

    def next_message(self) -> bytes | None:
        """The next frames to send that the credit allows; None if there are none."""
        count = min(self.total - self.sent, self.credit - (self.sent - self.answered))
        if count <= 0:
            return None
        first, parts, start = self.sent, [], self.covered
        for x in self.tail:
            if start + len(x) > first and start < first + count:
                parts.append(x[max(first - start, 0) : first + count - start])
            start += len(x)
        self.sent += count
        return NUMBER.pack(first) + b"".join(part.tobytes() for part in parts)

    def receive(self, message: str | bytes) -> None:
        """Take a message of the server, which is believed nothing that does not fit what was sent."""
        try:
            if isinstance(message, bytes):
                self._take_outputs(message)
            else:
                self._take_text(json.loads(message))
        except (AttributeError, KeyError, IndexError, TypeError, ValueError, RecursionError, struct.error) as error:
            text = f"a message that the protocol does not have: {type(error).__name__}: {str(error)[:200]}"
            raise ServerError("malformed", text) from error

    def _take_text(self, message: dict) -> None:
        kind = message["type"]
        if kind == "welcome":
            self._take_welcome(message)
        elif kind == "checkpoint":
            self._keep(message)
        elif kind == "reset":
            check(self.resetting and number(message, "frames") == 0, "no reset was asked for")
            self.covered = self.total = self.delivered = self.sent = self.answered = 0
            self.tail.clear()
            self._keep(message)
            self.resetting = False
        elif kind == "error":
            code, text = str(message["code"]), str(message["message"])
            if code in RETRIED:
                raise Lost(text)
            raise ServerError(code, text)
        else:
            check(kind == "end", f"no message has the type {kind!r}")

    def _take_welcome(self, message: dict) -> None:
        frames, sizes = (
            number(message, "frames"),
            tuple(number(message, f"{side}_size", 1) for side in ("input", "output")),
        )
        arithmetic = number({"arithmetic": 1} | message, "arithmetic", 1)
        if self.session is not None and arithmetic != self.arithmetic:
            text = f"generation {arithmetic} of the arithmetic, the session began with {self.arithmetic}: other bits"
            raise ServerError("arithmetic", f"this server computes {text}")
        self.arithmetic = arithmetic
        if self.session is None:
            check(frames == 0 or self.checkpoint is not None, f"a new session begins at frame {frames}")
            self.covered = self.total = self.delivered = frames  # perhaps that of the checkpoint of an earlier session
        else:
            check(
                frames == self.covered, f"the session continues at frame {frames}, its checkpoint is of {self.covered}"
            )
            check(sizes == (self.input_size, self.output_size), "the model has other sizes than before")
        self.session, self.credit = str(message["session"]), number(message, "credit", 1)
        self.input_size, self.output_size = sizes
        self.sent = self.answered = frames
        self._keep(message)

    def _take_outputs(self, message: bytes) -> None:
        first = NUMBER.unpack_from(message)[0]
        y = np.frombuffer(message, "<f4", offset=NUMBER.size).reshape(-1, self.output_size)
        check(first == self.answered and 0 < len(y) <= self.sent - first, f"outputs of {len(y)} frames from {first} on")
        self.answered = first + len(y)
        new = y[max(self.delivered - first, 0) :]
        if len(new):
            self.outputs.append(new.astype(np.float32))
            self.delivered += len(new)

    def _keep(self, message: dict) -> None:
        """Keep a checkpoint, and forget the frames that it covers: their outputs came before it."""
        frames, checkpoint = number(message, "frames"), message["checkpoint"]
        check(isinstance(checkpoint, str), "a checkpoint is no string")
        check(self.covered <= frames <= self.delivered, f"a checkpoint of frame {frames}")
        self.checkpoint = checkpoint
        while self.tail and self.covered + len(self.tail[0]) <= frames:
            self.covered += len(self.tail.popleft())
        if self.covered < frames:
            self.tail[0] = self.tail[0][frames - self.covered :]
            self.covered = frames

    def check_pending(self) -> None:
        if not self.outputs and self.delivered == self.total:
            raise RuntimeError("no frame is without output: send some first")

    def reset(self) -> str:
        if self.delivered != self.total:
            raise RuntimeError("receive the outputs of all frames before a reset")
        self.resetting = True
        return json.dumps({"type": "reset"})

    def forget(self) -> None:
        """Drop checkpoint and frames if a reset was not answered: the next connection opens a new session."""
        if self.resetting:
            self.checkpoint, self.resetting = None, False
            self.covered = self.total = self.delivered = 0
            self.tail.clear()


def check(holds: bool, text: str) -> None:
    if not holds:
        raise ValueError(text)


def number(message: dict, name: str, least: int = 0) -> int:
    value = message[name]
    check(type(value) is int and least <= value < 1 << 64, f"{name} is {str(value)[:40]!r}")
    return value
