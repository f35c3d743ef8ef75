"""Clients of `cnorm serve`: sessions that survive the loss of a connection, of a worker, and of a host.

A client keeps the last checkpoint that the server sent and the frames after it. When the connection is lost it connects
again, to any worker that has the key, continues from the checkpoint and sends these frames again. Outputs that it
already has are dropped by their number, so the caller sees each output once, with the bits of an uninterrupted run.
docs/serving.md documents the protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import struct
import time
from collections import deque

import numpy as np

__all__ = ["AsyncSession", "ServerError", "Session"]

PROTOCOL = 1
NUMBER = struct.Struct("<Q")  # a binary message: the number of its first frame, then frames or outputs in float32
FIRST_DELAY, LONGEST_DELAY = 0.05, 2.0  # seconds between attempts to connect; doubled each time, with jitter
REFUSED = (1002, 1003, 1007, 1009)  # close codes of a message that the server's WebSocket library refuses
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


class _Conversation:
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
        self.input_size = self.output_size = self.credit = 0

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
        """Take a message of the server."""
        if isinstance(message, bytes):
            self._take_outputs(message)
            return
        message = json.loads(message)
        kind = message["type"]
        if kind == "welcome":
            if self.session is None:  # perhaps the checkpoint of an earlier session
                self.covered = self.total = self.delivered = message["frames"]
            self.session, self.credit = message["session"], message["credit"]
            self.input_size, self.output_size = message["input_size"], message["output_size"]
            self.sent = self.answered = message["frames"]
            self._keep(message)
        elif kind == "checkpoint":
            self._keep(message)
        elif kind == "reset":
            self.covered = self.total = self.delivered = self.sent = self.answered = 0
            self.tail.clear()
            self._keep(message)
            self.resetting = False
        elif kind == "error":
            if message["code"] in RETRIED:
                raise Lost(message["message"])
            raise ServerError(message["code"], message["message"])

    def _take_outputs(self, message: bytes) -> None:
        first = NUMBER.unpack_from(message)[0]
        y = np.frombuffer(message, "<f4", offset=NUMBER.size).reshape(-1, self.output_size)
        self.answered = first + len(y)
        new = y[max(self.delivered - first, 0) :]
        if len(new):
            self.outputs.append(new.astype(np.float32))
            self.delivered += len(new)

    def _keep(self, message: dict) -> None:
        """Keep a checkpoint, and forget the frames that it covers: their outputs came before it."""
        self.checkpoint = message["checkpoint"]
        while self.tail and self.covered + len(self.tail[0]) <= message["frames"]:
            self.covered += len(self.tail.popleft())
        if self.covered < message["frames"]:
            self.tail[0] = self.tail[0][message["frames"] - self.covered :]
            self.covered = message["frames"]

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


class _Session:
    """The options and the retry policy that `Session` and `AsyncSession` share."""

    def __init__(
        self, url: str, *, token: str = "", patience: float = 30.0, timeout: float = 10.0, ssl=None, checkpoint=""
    ) -> None:
        try:
            import websockets.exceptions
        except ImportError:
            raise ImportError(
                "cnorm.client needs websockets: the extra serve, pip install '.[serve]' in cnorm's source folder"
            ) from None
        self.url, self.patience, self.timeout = url, patience, timeout
        self._errors = websockets.exceptions
        self._options = {"compression": None, "max_queue": None, "open_timeout": timeout, "close_timeout": 1.0}
        if token:
            self._options["additional_headers"] = {"Authorization": f"Bearer {token}"}
        if ssl is not None:
            self._options["ssl"] = ssl
        self._conversation = _Conversation()
        self._conversation.checkpoint = checkpoint or None
        self._socket = None
        self._restart_retries()

    @property
    def checkpoint(self) -> str:
        """The last checkpoint, in Base64: `checkpoint=` of another session continues from there."""
        return self._conversation.checkpoint or ""

    @property
    def frames(self) -> int:
        """Frames since the beginning or the last reset whose outputs have arrived."""
        return self._conversation.delivered

    @property
    def input_size(self) -> int:
        return self._conversation.input_size

    @property
    def output_size(self) -> int:
        return self._conversation.output_size

    def _restart_retries(self) -> None:
        """Count attempts and measure `patience` from now on."""
        self._attempts, self._delivered, self._progress = 0, self._conversation.delivered, time.monotonic()

    def _delay(self, error: Exception) -> float:
        """Seconds until the next attempt after a loss; raises if there is to be none."""
        if isinstance(error, self._errors.InvalidStatus):
            status = error.response.status_code
            if status in (401, 403):
                raise PermissionError(f"{self.url} refused the connection with status {status}") from error
            if status != 503:
                raise ServerError("http", f"{self.url} answered with status {status}") from error
        if isinstance(error, self._errors.ConnectionClosed) and error.rcvd and error.rcvd.code in REFUSED:
            raise ServerError("closed", f"{error.rcvd.code} {error.rcvd.reason}") from error
        if self._conversation.delivered != self._delivered:
            self._restart_retries()
        if time.monotonic() - self._progress > self.patience:
            raise ConnectionError(
                f"{self.url} has answered no frame for {self.patience:g} seconds and {self._attempts} attempts: {error}"
            ) from error
        self._conversation.forget()
        self._attempts += 1
        return min(FIRST_DELAY * 2 ** min(self._attempts, 10), LONGEST_DELAY) * random.uniform(0.5, 1.0)

    def _lost(self) -> tuple[type[Exception], ...]:
        """Errors after which a new connection is made."""
        return (OSError, TimeoutError, Lost, self._errors.ConnectionClosed, self._errors.InvalidHandshake)

    def _joined(self) -> np.ndarray:
        outputs = self._conversation.outputs
        y = np.concatenate(outputs) if outputs else np.empty((0, self.output_size), np.float32)
        outputs.clear()
        return y


class Session(_Session):
    """A session of `cnorm serve`, which reconnects by itself; used by one thread at a time.

    Parameters
    ----------
    url : str
        As in ``ws://127.0.0.1:8765/stream``, or ``wss:`` for TLS.
    token : str
        The server's secret, if it was started with one.
    patience : float
        Seconds without an output while one is awaited, after which the attempts to reconnect end.
    timeout : float
        Seconds without any message of the server while one is awaited, after which the connection counts as lost.
    ssl : ssl.SSLContext, optional
    checkpoint : str
        Of an earlier session, which is continued.

    Raises
    ------
    ImportError
        If websockets is not installed.
    ConnectionError
        If the server can't be reached, or answers no frame, for `patience` seconds.
    PermissionError
        If the server wants a token or does not accept the origin.
    ServerError
        If the server refuses a message, such as a checkpoint of another model.

    Examples
    --------
    >>> with Session("ws://127.0.0.1:8765/stream") as session:  # doctest: +SKIP
    ...     y = session.process(np.zeros((5, 12), np.float32))
    """

    def __enter__(self) -> Session:
        self._run(lambda: self._socket is not None)
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def process(self, x: np.ndarray) -> np.ndarray:
        """Send frames and wait for their outputs.

        Parameters
        ----------
        x : ndarray, shape (steps, input_size), float32, finite

        Returns
        -------
        y : ndarray, shape (steps, output_size), float32
            With outputs before them that were not received yet.
        """
        self.send(x)
        self._run(lambda: self._conversation.delivered == self._conversation.total)
        return self._joined()

    def send(self, x: np.ndarray) -> None:
        """Send frames [steps, input_size] without waiting for outputs, but where the server's credit is used up."""
        if self._socket is None:
            self.__enter__()
        self._conversation.add(x)
        self._run(lambda: self._conversation.sent == self._conversation.total)

    def receive(self) -> np.ndarray:
        """Wait for the next outputs [steps, output_size] of frames that were sent."""
        self._conversation.check_pending()
        self._run(lambda: self._conversation.outputs)
        return self._conversation.outputs.popleft()

    def reset(self) -> None:
        """Set the initial state, as at the beginning of the session."""
        text = self._conversation.reset()
        if self._socket is not None:
            self._run(lambda: not self._conversation.resetting, text)
        self._conversation.forget()

    def close(self) -> None:
        """End the session; the server forgets it."""
        if self._socket is not None:
            with contextlib.suppress(OSError, self._errors.ConnectionClosed):
                self._socket.send('{"type": "end"}')
                self._socket.close()
            self._socket = None

    def _run(self, done, text: str = "") -> None:
        """Send the frames that the credit allows, and receive, until `done()`; reconnect after a loss."""
        conversation = self._conversation
        self._restart_retries()
        while True:
            try:
                if self._socket is None:
                    self._connect()
                elif text:
                    self._socket.send(text)
                text = ""
                while message := conversation.next_message():
                    self._socket.send(message)
                if done():
                    return
                conversation.receive(self._socket.recv(timeout=self.timeout))
            except self._lost() as error:
                self._drop()
                time.sleep(self._delay(error))

    def _connect(self) -> None:
        from websockets.sync.client import connect

        self._socket = connect(self.url, **self._options).__enter__()  # `_drop` and `close` close it
        self._socket.send(self._conversation.hello())
        self._conversation.receive(self._socket.recv(timeout=self.timeout))

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close_timeout = 0.1
            self._socket.close()
            self._socket = None


class AsyncSession(_Session):
    """`Session` for asyncio, with coroutines `process`, `send`, `receive`, `reset` and `close`.

    It is used by one task at a time. Parameters and errors are those of `Session`.

    Examples
    --------
    >>> async def main():
    ...     async with AsyncSession("ws://127.0.0.1:8765/stream") as session:
    ...         return await session.process(np.zeros((5, 12), np.float32))
    """

    async def __aenter__(self) -> AsyncSession:
        await self._run(lambda: self._socket is not None)
        return self

    async def __aexit__(self, *error) -> None:
        await self.close()

    async def process(self, x: np.ndarray) -> np.ndarray:
        """See `Session.process`."""
        await self.send(x)
        await self._run(lambda: self._conversation.delivered == self._conversation.total)
        return self._joined()

    async def send(self, x: np.ndarray) -> None:
        """See `Session.send`."""
        if self._socket is None:
            await self.__aenter__()
        self._conversation.add(x)
        await self._run(lambda: self._conversation.sent == self._conversation.total)

    async def receive(self) -> np.ndarray:
        """See `Session.receive`."""
        self._conversation.check_pending()
        await self._run(lambda: self._conversation.outputs)
        return self._conversation.outputs.popleft()

    async def reset(self) -> None:
        """See `Session.reset`."""
        text = self._conversation.reset()
        if self._socket is not None:
            await self._run(lambda: not self._conversation.resetting, text)
        self._conversation.forget()

    async def close(self) -> None:
        """See `Session.close`."""
        if self._socket is not None:
            with contextlib.suppress(OSError, self._errors.ConnectionClosed):
                await self._socket.send('{"type": "end"}')
                await self._socket.close()
            self._socket = None

    async def _run(self, done, text: str = "") -> None:
        """As `Session._run`."""
        conversation = self._conversation
        self._restart_retries()
        while True:
            try:
                if self._socket is None:
                    await self._connect()
                elif text:
                    await self._socket.send(text)
                text = ""
                while message := conversation.next_message():
                    await self._socket.send(message)
                if done():
                    return
                conversation.receive(await asyncio.wait_for(self._socket.recv(), self.timeout))
            except self._lost() as error:
                await self._drop()
                await asyncio.sleep(self._delay(error))

    async def _connect(self) -> None:
        from websockets.asyncio.client import connect

        self._socket = await connect(self.url, **self._options)
        await self._socket.send(self._conversation.hello())
        self._conversation.receive(await asyncio.wait_for(self._socket.recv(), self.timeout))

    async def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close_timeout = 0.1
            await self._socket.close()
            self._socket = None
